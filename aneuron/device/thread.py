"""A device whose programs run on one daemon thread, first in, first out.

The loop puts a job on a `SimpleQueue` (one crossing in); the thread runs it and posts the
result to the job's `DeviceFuture` (one crossing out). Devices differ in how a job runs and
in what their faults mean.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from aneuron.errors import ConfigError, DeviceError, DeviceLost
from aneuron.futures import DeviceFuture

if TYPE_CHECKING:
    import numpy as np

    from aneuron.device import Executable
    from aneuron.outputs import ModelInput

__all__ = ["Job", "QueueFull", "ThreadDevice"]


class QueueFull(Exception):
    """The device's queue has no room: nobody's fault, launch again once it has drained."""


@dataclass(slots=True)
class Job:
    """One launch on its way; keeps its inputs, and what feeds it, alive until it ends."""

    future: DeviceFuture
    executable: Executable | None
    inputs: ModelInput | None
    feed: DeviceFuture | None
    order: np.ndarray | None
    arrival_s: float

    def fed_value(self) -> Any:
        """Return the device value that feeds this job, or None.

        Raises:
            DeviceError: the launch that should have made it failed.
        """
        if self.feed is None:
            return None
        if self.feed.device_error is not None:
            raise self.feed.device_error
        return self.feed.device_value


class ThreadDevice:
    """Base of the devices that have one launch thread; subclasses say how a job runs."""

    name = "thread"

    def __init__(self) -> None:
        """Make the queue; `start` makes the thread."""
        self._jobs: SimpleQueue[Job | DeviceFuture] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_use = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the launch thread; a daemon, so a hanging device never keeps a process."""
        if self._in_use:
            raise ConfigError(f"another engine has device {self.name} open", param="device")
        self._in_use = True
        self._loop = loop
        self._jobs = SimpleQueue()  # one that hung before may still wait on the old one
        args = (self._jobs,)
        name = f"aneuron-{self.name}"
        threading.Thread(target=self._run, args=args, name=name, daemon=True).start()

    def launch(self, executable: Executable, inputs: ModelInput) -> DeviceFuture:
        """Queue a program; see `Device.launch`."""
        feed = inputs.input_ids if isinstance(inputs.input_ids, DeviceFuture) else None
        future = self._future((inputs.num_sampled,), executable.sampled_dtype)
        self._jobs.put(Job(future, executable, inputs, feed, None, monotonic()))
        return future

    def gather(self, tokens: DeviceFuture, order: np.ndarray) -> DeviceFuture:
        """Queue a gather; see `Device.gather`."""
        future = self._future(order.shape, tokens.dtype)
        self._jobs.put(Job(future, None, None, tokens, order, monotonic()))
        return future

    def close(self) -> DeviceFuture:
        """End the thread once the queue is empty; see `Device.close`."""
        future = self._future((), "none")
        self._jobs.put(future)
        self._in_use = False
        return future

    def _future(self, shape: tuple[int, ...], dtype: str) -> DeviceFuture:
        loop = self._loop or asyncio.get_running_loop()
        return DeviceFuture(loop, shape=shape, dtype=dtype)

    # ── on the launch thread ────────────────────────────────────────────────────────────

    def _run(self, jobs: SimpleQueue[Job | DeviceFuture]) -> None:
        lost: DeviceLost | None = None  # of this thread's life only
        while True:
            job = jobs.get()
            if isinstance(job, DeviceFuture):
                job.post(None)
                return
            lost = self._run_job(job, lost)
            # Idle, the thread must not keep the last step's tensors.
            del job

    def _run_job(self, job: Job, lost: DeviceLost | None) -> DeviceLost | None:
        """Run a job, or fail it if the device is lost; return whether it is lost now."""
        future = job.future
        try:
            if lost is not None:
                raise lost
            value = self._execute_until_accepted(job)
        except Exception as error:  # noqa: BLE001  whatever the driver raises is classified
            fault = self._fault(error)
            future.device_error = fault
            future.post(None, fault)
            return fault if isinstance(fault, DeviceLost) else lost
        future.post(value)
        return None

    def _execute_until_accepted(self, job: Job) -> Any:
        while True:
            try:
                return self._execute(job)
            except QueueFull:
                # All earlier jobs of this thread have ended by now, so there is room.
                continue

    def _fault(self, error: Exception) -> DeviceError:
        if isinstance(error, DeviceError):
            return error
        fault = self._classify(error)
        fault.__cause__ = error
        return fault

    def _execute(self, job: Job) -> Any:
        """Run one job, set `job.future.device_value`, return the host value."""
        raise NotImplementedError

    def _classify(self, error: Exception) -> DeviceError:
        """Return the typed error for what a job raised; unclassified means lost."""
        return DeviceLost(f"device {self.name} failed: {error}", device=self.name)
