"""The processor as a device: torch executables on the launch thread.

A program's run is the device's work here: torch lets go of the GIL inside its kernels, so
the loop schedules the next step meanwhile, and on more cores than one nothing waits.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from aneuron.device import limits
from aneuron.device.thread import Job, ThreadDevice
from aneuron.errors import DeviceError, DeviceLost, LaunchFailed, OutOfMemory

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CpuDevice"]

_KV_SHARE = 4  # the KV pool may take this part of the memory
_FALLBACK_BYTES = 4 * 2**30


class CpuDevice(ThreadDevice):
    """Runs torch executables on the processor."""

    name = "cpu"

    def memory_budget(self) -> int:
        """Return a quarter of the memory that this process may use.

        The pool's pages are committed as they are first written, not when it is made.
        """
        memory = limits.memory()
        return (memory.limit or memory.total or _FALLBACK_BYTES) // _KV_SHARE

    def _sibling(self, rank: int, num_ranks: int) -> Self:
        return type(self)(rank=rank)

    # ── on the launch thread ────────────────────────────────────────────────────────────

    def _execute(self, job: Job) -> None:
        future = job.future
        future.device_start_s = monotonic()
        try:
            future.device_value = self._keep(future, self._compute(job))
        finally:
            future.device_end_s = monotonic()

    def _compute(self, job: Job) -> Any:
        fed = job.fed_value()
        if job.inputs is None:
            import torch

            assert job.order is not None
            return fed[torch.from_numpy(job.order)]
        assert job.executable is not None
        return job.executable(job.inputs, fed)

    def _to_host(self, job: Job) -> Any:
        host: np.ndarray = job.future.device_value.numpy()
        return self._with_extras(job.future, host)  # the same memory; nothing writes it again

    def _classify(self, error: Exception) -> DeviceError:
        text = f"device {self.label}: {type(error).__name__}: {error}"
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return OutOfMemory(text, device=self.label)
        if isinstance(error, IndexError | FloatingPointError):  # bad index, NaN
            return DeviceError(text, device=self.label)
        if isinstance(error, ValueError | TypeError):
            return LaunchFailed(text, device=self.label)
        return DeviceLost(text, device=self.label)
