"""A device whose programs run on one daemon thread, first in, first out.

The loop puts a job on a `SimpleQueue` (one crossing in); the thread runs it and posts the
result to the job's `DeviceFuture` (one crossing out): the value, or of a launch that nobody
reads only the end of its program. Where a copy to the host takes time, a second thread
makes it while the next program runs. Devices differ in how a job runs, in how a value gets
to the host, and in what their faults mean.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, Self

from aneuron.clock import VirtualClockLoop
from aneuron.errors import ConfigError, DeviceError, DeviceLost
from aneuron.futures import DeviceFuture
from aneuron.plans import Sampled

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from aneuron.device import Executable
    from aneuron.plans import ModelInput

__all__ = ["Job", "JobQueue", "QueueFull", "ThreadDevice"]


class QueueFull(Exception):
    """The device's queue has no room: nobody's fault, launch again once it has drained."""


@dataclass(slots=True)
class Job:
    """One launch on its way; keeps its inputs, and what feeds it, alive until it ends.

    Without inputs and order it is a read: an earlier launch whose value is asked for.

    Attributes:
        future: that it resolves.
        executable: the program; None of a gather or a read.
        inputs: of the program.
        feed: the launch whose value feeds it, if one does.
        order: of a gather: which of the fed values, in which order.
        arrival_s: when the loop put it on the queue.
        read: whether its value goes to the host, or only word that it has ended.
        goes_on: it is a later part of a split executable: no step of its own.
    """

    future: DeviceFuture
    executable: Executable | None
    inputs: ModelInput | None
    feed: DeviceFuture | None
    order: np.ndarray | None
    arrival_s: float
    read: bool
    goes_on: bool = False

    @property
    def is_program(self) -> bool:
        """Whether it runs on the device; a read does not."""
        return self.inputs is not None or self.order is not None

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


class JobQueue(Protocol):
    """What a thread of a device takes its jobs from."""

    def put(self, item: Job | DeviceFuture, /) -> None:
        """Queue a job; a future ends the thread, which resolves it."""


_Queue = SimpleQueue[Job | DeviceFuture]


class ThreadDevice:
    """Base of the devices that have one launch thread; subclasses say how a job runs.

    Args:
        rank: which rank it is; 0 is the output rank.
        has_reader: whether copies to the host are made on a reader thread of its own, so
            that the next program starts meanwhile.
    """

    name = "thread"

    def __init__(self, *, rank: int = 0, has_reader: bool = False) -> None:
        """Make the queue; `start` makes the threads."""
        self.rank = rank
        self.has_reader = has_reader
        self._siblings: list[Self] = []
        self._jobs: JobQueue = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock: Callable[[], float] = monotonic
        self._in_use = False

    @property
    def label(self) -> str:
        """What errors and threads call it: its name, and its rank if it is not the first."""
        return f"{self.name}-rank{self.rank}" if self.rank else self.name

    @property
    def ranks(self) -> list[Self]:
        """This device and its siblings, by rank."""
        return [self, *self._siblings]

    def for_rank(self, rank: int, num_ranks: int) -> Self:
        """Return the device of a rank; siblings are made once. See `Device.for_rank`."""
        if len(self._siblings) != num_ranks - 1:
            self._siblings = [self._sibling(one, num_ranks) for one in range(1, num_ranks)]
        return self.ranks[rank]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the threads; daemons, so a hanging device never keeps a process.

        Raises:
            ConfigError: another engine has it open, or the loop's time is virtual and it runs
                in real time.
        """
        if self._in_use:
            raise ConfigError(f"another engine has device {self.label} open", param="device")
        self._jobs = self._open_queue(loop)
        self._in_use = True
        self._loop = loop

    def launch(
        self,
        executable: Executable,
        inputs: ModelInput,
        *,
        read: bool = True,
        feed: DeviceFuture | None = None,
    ) -> DeviceFuture:
        """Queue a program; see `Device.launch`."""
        goes_on = feed is not None
        if not goes_on and isinstance(inputs.input_ids, DeviceFuture):
            feed = inputs.input_ids
        future = DeviceFuture(
            self._loop or asyncio.get_running_loop(),
            shape=(inputs.num_sampled,),
            dtype=executable.sampled_dtype,
            reader=None if read else self._read_later,
            clock=self._clock,
        )
        now_s = self._clock()
        self._jobs.put(Job(future, executable, inputs, feed, None, now_s, read, goes_on))
        return future

    def gather(self, tokens: DeviceFuture, order: np.ndarray) -> DeviceFuture:
        """Queue a gather; see `Device.gather`."""
        loop = self._loop or asyncio.get_running_loop()
        future = DeviceFuture(
            loop,
            shape=order.shape,
            dtype=tokens.dtype,
            reader=self._read_later,
            clock=self._clock,
        )
        self._jobs.put(Job(future, None, None, tokens, order, self._clock(), read=False))
        return future

    def close(self) -> DeviceFuture:
        """End the threads once the queue is empty; see `Device.close`."""
        loop = self._loop or asyncio.get_running_loop()
        future = DeviceFuture(loop, shape=(), dtype="none", clock=self._clock)
        self._jobs.put(future)
        self._in_use = False
        return future

    def _sibling(self, rank: int, num_ranks: int) -> Self:
        """Return another device of this kind, for a rank from 1 on."""
        raise ConfigError(
            f"device {self.label} has no sibling for rank {rank} of {num_ranks}: it must have "
            "`_sibling()` for num_ranks over 1",
            param="num_ranks",
        )

    def _open_queue(self, loop: asyncio.AbstractEventLoop) -> JobQueue:
        """Start the threads, and return the queue that they take jobs from."""
        if isinstance(loop, VirtualClockLoop):
            raise ConfigError(
                f"device {self.label} runs in real time; on a VirtualClockLoop, take sim",
                param="device",
            )
        jobs: _Queue = SimpleQueue()  # one that hung before may still wait on the old one
        copies: _Queue | None = None
        if self.has_reader:
            copies = SimpleQueue()
        self._start_thread(self._run, f"aneuron-{self.label}", jobs, copies)
        if copies is not None:
            try:
                self._start_thread(self._run_copies, f"aneuron-{self.label}-reader", copies)
            except BaseException:  # the launch thread ends with this; it lets go of nothing
                jobs.put(DeviceFuture(loop, shape=(), dtype="none", clock=self._clock))
                raise
        return jobs

    def _start_thread(self, body: Callable[..., None], name: str, *args: Any) -> None:
        threading.Thread(target=body, args=args, name=name, daemon=True).start()

    def _read_later(self, future: DeviceFuture) -> None:
        """Queue the copy of a value to the host."""
        if self._in_use:
            self._jobs.put(Job(future, None, None, None, None, self._clock(), read=True))
        else:
            future.resolve(None, DeviceLost(f"device {self.label} is closed", device=self.label))

    # ── on the launch thread ────────────────────────────────────────────────────────────

    def _run(self, jobs: _Queue, copies: _Queue | None) -> None:
        self._enter_thread()
        lost: DeviceLost | None = None  # of this thread's life only
        while True:
            job = jobs.get()
            if isinstance(job, DeviceFuture):
                self._end(job, copies)
                return
            lost = self._run_job(job, lost, copies)
            # Idle, the thread must not keep the last step's tensors.
            del job

    def _run_job(
        self, job: Job, lost: DeviceLost | None, copies: JobQueue | None
    ) -> DeviceLost | None:
        """Run a job, or fail it if the device is lost; return whether it is lost now."""
        try:
            self._check(job, lost)
            if job.is_program:
                self._execute_until_accepted(job)
            self._hand_on(job, copies)
        except Exception as error:  # noqa: BLE001  whatever the driver raises is classified
            return self._fail_job(job, error, lost)
        return None

    def _end(self, closed: DeviceFuture, copies: JobQueue | None) -> None:
        if copies is None:
            self._shut_down()
            closed.post(None)
        else:
            copies.put(closed)  # the reader ends last

    def _check(self, job: Job, lost: DeviceLost | None) -> None:
        """Raise if the device is lost, or the value that is asked for was never made."""
        if lost is not None:
            raise lost
        if not job.is_program and job.future.device_error is not None:
            raise job.future.device_error

    def _hand_on(self, job: Job, copies: JobQueue | None) -> None:
        """Have the value of a program that has ended copied, or say only that it has."""
        if not job.read:
            job.future.post_complete()
        elif copies is None:
            job.future.post(self._to_host(job))
        else:
            copies.put(job)

    def _fail_job(self, job: Job, error: Exception, lost: DeviceLost | None) -> DeviceLost | None:
        fault = self._fail(job.future, error)
        return fault if isinstance(fault, DeviceLost) else lost

    def _execute_until_accepted(self, job: Job) -> None:
        while True:
            try:
                self._execute(job)
            except QueueFull:
                # All earlier jobs of this thread have ended by now, so there is room.
                continue
            return

    def _execute(self, job: Job) -> None:
        """Run one job; set its future's `device_value`, `device_start_s`, `device_end_s`."""
        raise NotImplementedError

    # ── on the reader thread, or on the launch thread of a device without one ───────────

    def _run_copies(self, copies: _Queue) -> None:
        self._enter_thread()
        while True:
            job = copies.get()
            if isinstance(job, DeviceFuture):
                self._shut_down()
                job.post(None)
                return
            self._copy(job)
            del job

    def _copy(self, job: Job) -> None:
        try:
            job.future.post(self._to_host(job))
        except Exception as error:  # noqa: BLE001  likewise
            self._fail(job.future, error)

    @staticmethod
    def _keep(future: DeviceFuture, result: Any) -> Any:
        """Keep what an executable gave beside its tokens; return the tokens."""
        if not isinstance(result, Sampled):
            return result
        future.device_extras = result[1:]
        return result.token_ids

    @staticmethod
    def _with_extras(future: DeviceFuture, host: Any) -> Any:
        """Return a host value with what was kept beside it."""
        return host if future.device_extras is None else Sampled(host, *future.device_extras)

    def _to_host(self, job: Job) -> Any:
        """Return the host value of a program that has ended."""
        raise NotImplementedError

    # ── on both ─────────────────────────────────────────────────────────────────────────

    def _enter_thread(self) -> None:
        """Prepare the calling thread, a new one of this device."""

    def _shut_down(self) -> None:
        """Let go of the device; called by the last thread to end, when all jobs have."""

    def _fail(self, future: DeviceFuture, error: Exception) -> DeviceError:
        """Resolve a future with the typed error for what was raised, and return that."""
        if isinstance(error, DeviceError):
            fault = error
        else:
            fault = self._classify(error)
            fault.__cause__ = error
        future.device_error = fault
        future.post(None, fault)
        return fault

    def _classify(self, error: Exception) -> DeviceError:
        """Return the typed error for what a job raised; unclassified means lost."""
        return DeviceLost(f"device {self.label} failed: {error}", device=self.label)
