"""`NeuronDevice`: launches on one thread, reads on another, over either Neuron runtime.

Comes in: jobs of the loop. Goes out: resolved futures. A launch returns while its program runs
(or, where the runtime is synchronous, when it has ended: then that thread waits, not the loop).
Its result is waited for by the reader thread, in launch order, since nothing else tells its end.
"""

from __future__ import annotations

import logging
import threading
from math import nan
from typing import TYPE_CHECKING, Any, Literal, Self

from aneuron.device.neuron.status import QUEUE_FULL, classify, status_of
from aneuron.device.thread import Job, ThreadDevice
from aneuron.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aneuron.device.neuron.raw import Launched, NativeRaw, NxdCompiler, NxdRaw
    from aneuron.device.thread import JobQueue

__all__ = ["NeuronDevice"]

_logger = logging.getLogger("aneuron.device")
_RING = 2  # outputs of a traced program: a third launch may overwrite the first one's
_UNKNOWN_BUDGET = 4 * 2**30  # of a runtime that does not tell its memory


class _Unread:
    """How many launches have not been read: more than the runtime bears must not be made."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def add(self) -> None:
        with self._changed:
            self._count += 1

    def remove(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_below(self, most: int) -> None:
        """Wait until there are fewer."""
        with self._changed:
            self._changed.wait_for(lambda: self._count < most)

    def wait_for_one(self) -> bool:
        """Wait until there is one fewer; False if there is none."""
        with self._changed:
            before = self._count
            self._changed.wait_for(lambda: self._count < before or not self._count)
            return before > 0


class _Flight:
    """A launch on the device: what reads it, and where it counts as unread."""

    def __init__(self, launched: Launched, unread: _Unread) -> None:
        self.launched = launched
        self._unread = unread
        self._counts = True
        unread.add()

    def settle(self) -> None:
        """It has been read, or has failed; called by the reader thread alone."""
        if self._counts:
            self._counts = False
            self._unread.remove()


class NeuronDevice(ThreadDevice):
    """One set of NeuronCores and the runtime that drives them.

    Args:
        connect: returns the runtime; called anew after each `close`.
        kind: whose seam that is: "nxd" (traced programs) or "native" (PyTorch).
        compiler: of traced programs.
        rank: which rank it is; 0 is the output rank.

    Attributes:
        true_async: whether a launch returns before its program ends, as warm-up measured it;
            None before.
    """

    name = "neuron"

    def __init__(
        self,
        connect: Callable[[], NxdRaw | NativeRaw],
        *,
        kind: Literal["nxd", "native"],
        compiler: NxdCompiler | None = None,
        rank: int = 0,
    ) -> None:
        """Connect to nothing yet; `raw` does."""
        super().__init__(rank=rank, has_reader=True)
        self.kind = kind
        self.compiler = compiler
        self.true_async: bool | None = None
        self._connect = connect
        self._raw: NxdRaw | NativeRaw | None = None
        self._closing: NxdRaw | NativeRaw | None = None
        self._unread = _Unread()
        self._depth = _RING
        self._last_end_s = nan  # on the reader thread

    @property
    def raw(self) -> NxdRaw | NativeRaw:
        """The runtime; a model that is loaded calls it, before the device is started.

        Raises:
            ConfigError: another engine has the device open.
            DeviceError: the cores cannot be had.
        """
        if self._in_use:
            raise ConfigError(f"another engine has device {self.label} open", param="device")
        if self._raw is None:
            try:
                self._raw = self._connect()
            except RuntimeError as error:
                raise classify(error, self.label) from error
        return self._raw

    def disconnect(self) -> None:
        """Give the cores back of a device that was never started; may block."""
        raw, self._raw = self._raw, None
        if raw is not None and not self._in_use:
            raw.close()

    def memory_budget(self) -> int:
        """Return most of the memory that is free, or 4 GiB if the runtime does not tell."""
        stats = self.raw.memory_stats()
        if isinstance(stats, tuple):
            free = stats[1]
        else:
            free = stats.get("total_bytes", -1) - stats.get("allocated_bytes.all.current", 0)
        return free * 4 // 5 if free > 0 else _UNKNOWN_BUDGET

    def close(self) -> Any:
        """Let queued work end, then give the cores back; see `Device.close`."""
        self._closing, self._raw = self._raw, None
        return super().close()

    def _sibling(self, rank: int, num_ranks: int) -> Self:
        if self.kind == "nxd":
            raise ConfigError(
                "a traced program spans its ranks itself: pass tensor_parallel_size, not num_ranks",
                param="num_ranks",
            )
        return type(self)(lambda: self._core(rank), kind=self.kind, rank=rank)

    def _core(self, rank: int) -> NativeRaw:
        first: Any = self.raw
        core: NativeRaw = first.at(first.index + rank)
        return core

    def _open_queue(self, loop: asyncio.AbstractEventLoop) -> JobQueue:
        # One that hung before still counts on what it had.
        self._unread, self._last_end_s = _Unread(), nan
        self._depth = _RING if self.kind == "nxd" else max(1, self._queue_depth() - 1)
        return super()._open_queue(loop)

    def _queue_depth(self) -> int:
        depth: int = getattr(self.raw, "queue_depth", _RING)
        return depth

    # ── on the launch thread ────────────────────────────────────────────────────────────

    def _execute_until_accepted(self, job: Job) -> None:
        unread = self._unread
        unread.wait_below(self._depth)
        has_drained = False
        while True:
            try:
                job.future.device_value = _Flight(self._launched(job), unread)
            except RuntimeError as error:
                # Once more when all has been read: the runtime may notice it a little later.
                if status_of(error) != QUEUE_FULL or has_drained:
                    raise
                has_drained = not unread.wait_for_one()
            else:
                return

    def _launched(self, job: Job) -> Launched:
        job.future.device_start_s = self._clock()
        fed: Any = None if job.feed is None else job.fed_value().launched
        if job.inputs is None or job.executable is None:
            gathered: Launched = fed.gather(job.order)
            return gathered
        launched: Launched = job.executable(job.inputs, fed)
        return launched

    def _hand_on(self, job: Job, copies: JobQueue | None) -> None:
        """Let the reader thread wait for the end of every program."""
        assert copies is not None
        copies.put(job)

    # ── on the reader thread ────────────────────────────────────────────────────────────

    def _copy(self, job: Job) -> None:
        future = job.future
        flight: _Flight = future.device_value
        host = None
        try:
            if job.read:
                host = flight.launched.read()
            else:
                flight.launched.wait()
        except Exception as error:  # noqa: BLE001  whatever the driver raises is classified
            flight.settle()
            self._note_times(job)
            self._fail(future, error)
            return
        flight.settle()
        self._note_times(job)
        if job.read:
            future.post(host)
        else:
            future.post_complete()

    def _note_times(self, job: Job) -> None:
        """Note when the program ran, as far as this side can tell."""
        if job.is_program:
            future = job.future
            future.device_end_s = self._clock()
            # In order: behind the end of the program before.
            future.device_start_s = max(future.device_start_s, self._last_end_s)
            self._last_end_s = future.device_end_s

    def _shut_down(self) -> None:
        raw, self._closing = self._closing, None
        try:
            if raw is not None:
                raw.close()
        except Exception:
            _logger.exception("device %s did not close", self.label)

    # ── on both ─────────────────────────────────────────────────────────────────────────

    def _classify(self, error: Exception) -> DeviceError:
        return classify(error, self.label)
