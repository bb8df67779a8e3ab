"""The simulated device: a modelled timeline in real time, on a thread like any device's.

A program starts at max(end of the program before, arrival of its launch) and ends its
latency later; oversleeping delays only the read-back, never the timeline. Inputs are read
when a program *starts*, and must still be the same when it ends, so a buffer that is
written again too early shows. Faults come on demand. It counts steps and rows.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.device.thread import Job, QueueFull, ThreadDevice
from aneuron.errors import DeviceError, DeviceLost, LaunchFailed, OutOfMemory

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from aneuron.outputs import ModelInput

__all__ = ["Fault", "Latency", "SimDevice", "SimValue"]

_KV_BYTES = 64 * 2**20
_WRITTEN = 1002  # bad input: somebody wrote it while the program ran


@dataclass(frozen=True, slots=True)
class Latency:
    """How long programs take, in seconds: a base and what each row or prompt token adds."""

    decode_s: float = 0.0
    decode_row_s: float = 0.0
    prefill_s: float | None = None  # None: like decode
    prefill_token_s: float = 0.0

    def __call__(self, inputs: ModelInput) -> float:
        """Return the latency of one program."""
        if inputs.is_decode:
            return self.decode_s + self.decode_row_s * inputs.num_rows
        base = self.decode_s if self.prefill_s is None else self.prefill_s
        return base + self.prefill_token_s * len(inputs.positions)


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong at one step (from 1, in launch order).

    `status` is a Neuron runtime status code (nrt_status: 2 invalid, 4 out of memory,
    5 time-out, 7 queue full, 101 unrecoverable, 1003 NaN, 1006 out of bounds), or "hang".
    """

    step: int
    status: int | str


class _StatusError(RuntimeError):
    """What a driver raises: a runtime error whose text has the status code."""

    def __init__(self, status: int) -> None:
        super().__init__(f"simulated nrt status {status}")
        self.status = status


class SimValue:
    """A value in the simulated device's memory; the loop's thread must not look at it."""

    __slots__ = ("_array", "_loop_thread")

    def __init__(self, array: np.ndarray, loop_thread: int) -> None:
        self._array = array
        self._loop_thread = loop_thread

    def read(self) -> np.ndarray:
        """Return the array.

        Raises:
            RuntimeError: called on the event loop's thread.
        """
        if threading.get_ident() == self._loop_thread:
            raise RuntimeError("a device value was read on the event loop's thread")
        return self._array


class SimDevice(ThreadDevice):
    """A device that takes as long, and fails, as told.

    Args:
        latency: seconds per program: a number, a `Latency`, or any function of the inputs.
        faults: what goes wrong, by step.
    """

    name = "sim"

    def __init__(
        self,
        *,
        latency: float | Callable[[ModelInput], float] = 0.0,
        faults: Sequence[Fault] = (),
    ) -> None:
        """Make the device; nothing runs before `start`."""
        super().__init__()
        self._latency = latency if callable(latency) else Latency(decode_s=latency)
        self._faults = {fault.step: fault.status for fault in faults}
        self._end_s = 0.0  # of the program before, on the modelled timeline
        self._loop_thread = 0
        self._never = threading.Event()
        self.num_steps = 0
        self.num_rows = 0  # rows that count, over all steps
        self.num_prefill_tokens = 0
        self.num_queue_full = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start; the calling thread is the one that must not read values."""
        self._loop_thread = threading.get_ident()
        super().start(loop)

    def memory_budget(self) -> int:
        """Return 64 MiB."""
        return _KV_BYTES

    # ── on the launch thread ────────────────────────────────────────────────────────────

    def _execute(self, job: Job) -> Any:
        if job.inputs is None:
            return self._gather(job)
        status = self._faults.pop(self.num_steps + 1, None)
        if status == 7:
            self.num_queue_full += 1
            raise QueueFull
        start_s = max(self._end_s, job.arrival_s)
        _sleep_until(start_s)
        self._count(job.inputs)
        # The timeline moves on also when the program fails or its input was poisoned.
        self._end_s = start_s + self._latency(job.inputs)
        if status is not None:
            self._fail(status)
        value = self._compute(job)
        if self._end_s > time.monotonic():
            before = _fingerprint(job.inputs)
            _sleep_until(self._end_s)
            if _fingerprint(job.inputs) != before:
                raise _StatusError(_WRITTEN)
        return value

    def _compute(self, job: Job) -> np.ndarray:
        assert job.executable is not None
        fed = job.fed_value()
        assert job.inputs is not None
        array: np.ndarray = job.executable(job.inputs, None if fed is None else fed.read())
        job.future.device_value = SimValue(array, self._loop_thread)
        return array

    def _gather(self, job: Job) -> np.ndarray:
        array: np.ndarray = job.fed_value().read()[job.order]
        job.future.device_value = SimValue(array, self._loop_thread)
        return array

    def _count(self, inputs: ModelInput) -> None:
        self.num_steps += 1
        self.num_rows += inputs.num_reqs
        if not inputs.is_decode:
            self.num_prefill_tokens += inputs.num_tokens

    def _fail(self, status: int | str) -> None:
        if status == "hang":
            self._never.wait()
        raise _StatusError(int(status))

    def _classify(self, error: Exception) -> DeviceError:
        status = error.status if isinstance(error, _StatusError) else None
        text = f"device sim: {error}"
        match status:
            case 2 | 3 | 1002:
                return LaunchFailed(text, device=self.name)
            case 4:
                return OutOfMemory(text, device=self.name)
            case 1003 | 1006:
                return DeviceError(text, device=self.name)
        return DeviceLost(text, device=self.name)


def _fingerprint(inputs: ModelInput) -> int:
    columns = (getattr(inputs, field.name) for field in fields(inputs))
    return hash(tuple(one.tobytes() for one in columns if isinstance(one, np.ndarray)))


def _sleep_until(when_s: float) -> None:
    if (left_s := when_s - time.monotonic()) > 0:
        time.sleep(left_s)
