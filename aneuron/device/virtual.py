"""A device's threads on a virtual clock: none, but timers at which the same work is done.

Comes in: jobs, on what stands in for the queues. Goes out: resolved futures. A job says until
when it waits; a thread sleeps until then, and here a timer of the loop goes on with it. So
both have one timeline, and everything runs on the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aneuron.clock import VirtualClockLoop
from aneuron.device.thread import Job, QueueFull, ThreadDevice
from aneuron.futures import DeviceFuture

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aneuron.device.thread import JobQueue
    from aneuron.errors import DeviceLost

__all__ = ["ModelledDevice", "VirtualThread"]

_Items = deque[Job | DeviceFuture]
_Waits = Iterator[float | None]  # until when; None: until there is a job


class VirtualThread:
    """Does what a thread with a queue would do, at the times at which it would.

    Args:
        loop: whose timers wake it.
        body: what the thread runs, over its queue. It yields until when it waits, in seconds
            of the loop's time: infinity is for ever, None is until something is queued.
    """

    def __init__(self, loop: VirtualClockLoop, body: Callable[[_Items], _Waits]) -> None:
        """Make one that waits for its first job."""
        self._loop = loop
        self._items: _Items = deque()
        self._body = body(self._items)
        self._is_idle = True

    def put(self, item: Job | DeviceFuture) -> None:
        """Queue a job; like a thread, it is not looked at before the caller goes on."""
        self._items.append(item)
        if self._is_idle:
            self._is_idle = False
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        for until_s in self._body:
            if until_s is None:
                self._is_idle = True
                return
            if until_s > self._loop.time():
                self._loop.call_at(until_s, self._go_on)
                return


class ModelledDevice(ThreadDevice):
    """Base of a device whose time is modelled, so that it can be virtual.

    On a `VirtualClockLoop` it has no threads. Subclasses say how a job runs and until when
    it waits, and when a value is on the host.
    """

    def _open_queue(self, loop: asyncio.AbstractEventLoop) -> JobQueue:
        if not isinstance(loop, VirtualClockLoop):
            return super()._open_queue(loop)
        copies = VirtualThread(loop, self._copies) if self.has_reader else None
        return VirtualThread(loop, lambda jobs: self._launches(jobs, copies))

    def _program(self, job: Job) -> Iterator[float]:
        """Run a job as `_execute` does; yield until when it waits, infinity being for ever."""
        raise NotImplementedError

    def _host_time(self, job: Job) -> float:
        """Return when the value of a program that has ended is on the host."""
        raise NotImplementedError

    # ── what the launch thread and the reader thread do, on the loop ────────────────────

    def _launches(self, jobs: _Items, copies: VirtualThread | None) -> _Waits:
        lost: DeviceLost | None = None
        while True:
            while not jobs:
                yield None
            job = jobs.popleft()
            if isinstance(job, DeviceFuture):
                self._end(job, copies)
                return
            try:
                self._check(job, lost)
                if job.is_program:
                    yield from self._until_accepted(job)
                self._hand_on(job, copies)
            except Exception as error:  # noqa: BLE001  as on a thread
                lost = self._fail_job(job, error, lost)
            del job

    def _until_accepted(self, job: Job) -> Iterator[float]:
        while True:
            try:
                yield from self._program(job)
            except QueueFull:
                continue  # all earlier jobs have ended by now
            return

    def _copies(self, jobs: _Items) -> _Waits:
        while True:
            while not jobs:
                yield None
            job = jobs.popleft()
            if isinstance(job, DeviceFuture):
                job.post(None)
                return
            yield self._host_time(job)
            self._copy(job)
            del job
