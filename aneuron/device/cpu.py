"""The processor as a device: torch executables on the launch thread.

A program's run is the device's work here: torch lets go of the GIL inside its kernels, so
the loop schedules the next step meanwhile, and on more cores than one nothing waits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aneuron.device.thread import Job, ThreadDevice
from aneuron.errors import DeviceError, DeviceLost, LaunchFailed, OutOfMemory

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CpuDevice"]

_KV_SHARE = 4  # the KV pool may take this part of the memory
_FALLBACK_BYTES = 4 * 2**30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class CpuDevice(ThreadDevice):
    """Runs torch executables on the processor."""

    name = "cpu"

    def memory_budget(self) -> int:
        """Return a quarter of the memory that this process may use.

        The pool's pages are committed as they are first written, not when it is made.
        """
        return _total_memory() // _KV_SHARE

    # ── on the launch thread ────────────────────────────────────────────────────────────

    def _execute(self, job: Job) -> Any:
        fed = job.fed_value()
        if job.inputs is None:
            import torch

            assert job.order is not None
            tokens = fed[torch.from_numpy(job.order)]
        else:
            assert job.executable is not None
            tokens = job.executable(job.inputs, fed)
        job.future.device_value = tokens
        host: np.ndarray = tokens.numpy()  # the same memory; nothing writes it again
        return host

    def _classify(self, error: Exception) -> DeviceError:
        text = f"device cpu: {type(error).__name__}: {error}"
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return OutOfMemory(text, device=self.name)
        if isinstance(error, IndexError | FloatingPointError):  # bad index, NaN
            return DeviceError(text, device=self.name)
        if isinstance(error, ValueError | TypeError):
            return LaunchFailed(text, device=self.name)
        return DeviceLost(text, device=self.name)


def _total_memory() -> int:
    """Return bytes of memory: the machine's, or the container's limit if that is less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return _FALLBACK_BYTES
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total
