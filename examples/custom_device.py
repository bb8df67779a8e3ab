"""A device of your own, which computes with numpy: `python examples/custom_device.py`."""

import asyncio
import time

import aneuron
from aneuron.device.thread import Job, ThreadDevice


class NumpyDevice(ThreadDevice):
    """Runs programs on a thread; `aneuron.device.Device` is the protocol that it follows."""

    name = "numpy"
    num_programs = 0

    def memory_budget(self) -> int:
        return 64 * 2**20  # bytes for the KV pool

    def _execute(self, job: Job) -> None:  # on the device's thread
        future, fed = job.future, job.fed_value()  # what the step before gave, unread
        future.device_start_s = time.monotonic()
        if job.executable is not None and job.inputs is not None:
            self.num_programs += 1
            future.device_value = self._keep(future, job.executable(job.inputs, fed))
        else:
            future.device_value = fed[job.order]  # a gather: rows in another order
        future.device_end_s = time.monotonic()

    def _to_host(self, job: Job) -> object:
        return self._with_extras(job.future, job.future.device_value)


async def main() -> None:
    device = NumpyDevice()
    async with aneuron.Engine("sim:count", device=device) as engine:
        answer = await engine.generate("abc", max_tokens=5)
    print(f"{answer.text} in {device.num_programs} programs")


asyncio.run(main())
