"""`NeuronDevice`: launches on one thread, reads on another, over either Neuron runtime.

Comes in: jobs of the loop. Goes out: resolved futures. A launch returns while its program runs
(or, where the runtime is synchronous, when it has ended: then that thread waits, not the loop).
Its result is waited for by the reader thread, in launch order, since nothing else tells its end.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from math import nan
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from aneuron.device.neuron.status import QUEUE_FULL, classify, status_of
from aneuron.device.thread import Job, ThreadDevice
from aneuron.errors import AneuronError, ConfigError, DeviceError, DeviceLost
from aneuron.threads import call_within

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from aneuron.device.neuron.raw import Launched, NativeRaw, NxdCompiler, NxdRaw
    from aneuron.device.thread import JobQueue
    from aneuron.futures import DeviceFuture

__all__ = ["CLOSE_S", "WARM_UP_S", "NeuronDevice", "warm_up_limit_s"]

T = TypeVar("T")

_logger = logging.getLogger("aneuron.device")
WARM_UP_S = 600.0  # of one bucket, its compile included: as long as the lite runtime lets it take
CLOSE_S = 10.0  # of a runtime that was never started; one whose program hangs never drains
_COMPILE_LIMIT = "NEURON_LIBTORCH_COMPILATION_TIMEOUT"
_RING = 2  # outputs of a traced program: a third launch may overwrite the first one's
# Between launches that are refused though nothing is unread here; then the launch has failed.
_FULL_WAITS_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)
_UNKNOWN_BUDGET = 4 * 2**30  # of a runtime that does not tell its memory


def warm_up_limit_s() -> float:
    """Return how long one bucket may take to warm up: as long as its compile may, or 600 s."""
    asked = os.environ.get(_COMPILE_LIMIT, "").strip()
    return max(WARM_UP_S, min(float(asked), threading.TIMEOUT_MAX) if asked.isdecimal() else 0.0)


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

    def wait_for_change(self, seconds: float) -> None:
        """Wait until the number changes, at most so long."""
        with self._changed:
            self._changed.wait(seconds)

    def wait_for_one(self) -> bool:
        """Wait until there is one fewer; False if there is none."""
        with self._changed:
            before = self._count
            self._changed.wait_for(lambda: self._count < before or not self._count)
            return before > 0


class _Life:
    """What belongs to one opening: threads that hang in an earlier one keep theirs."""

    def __init__(self, raw: NxdRaw | NativeRaw | None, depth: int) -> None:
        self.raw = raw
        self.unread = _Unread()
        self.depth = depth
        self.last_end_s = nan  # on the reader thread


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
        self._true_async: bool | None = None
        self._connect = connect
        self._raw: NxdRaw | NativeRaw | None = None
        self._reserving = threading.Lock()
        self._is_reserved = False
        self._life = _Life(None, _RING)  # of the next threads
        self._here = threading.local()  # .life: of the thread that asks

    # ── before it is started ────────────────────────────────────────────────────────────

    @property
    def raw(self) -> NxdRaw | NativeRaw:
        """The runtime; a model that is loaded calls it, before the device is started.

        Raises:
            ConfigError: another engine has the device open, or no such runtime is here.
            DeviceError: the cores cannot be had.
        """
        self._check_free()
        if self._raw is None:
            with self._typed():
                self._raw = self._connect()
        return self._raw

    @property
    def true_async(self) -> bool | None:
        """Whether a launch returns before its program ends, as warm-up measured it, or None."""
        return self._true_async

    @true_async.setter
    def true_async(self, measured: bool) -> None:
        self._true_async = measured
        if not measured:
            _logger.warning(
                "launches on device %s return only when their program has ended: nothing of the "
                "host's work is hidden; see docs/neuron.md",
                self.label,
            )

    def reserve(self) -> None:
        """Take the device for a model that is about to be loaded; see `OwnsCores.reserve`."""
        with self._reserving:
            self._check_free()
            if self._is_reserved:
                raise ConfigError(
                    f"a model is being loaded onto device {self.label} already", param="device"
                )
            self._is_reserved = True

    def disconnect(self) -> None:
        """Give all ranks' cores back of a device that was never started; may block.

        At most `CLOSE_S` for each: a runtime that hangs is left behind.
        """
        self._close_all(self._taken())

    def run_bucket(self, run: Callable[[], T]) -> T:
        """Run one bucket for warm-up; for worker threads.

        Raises what it raises, and:
            DeviceLost: it took longer than `warm_up_limit_s`.
        """
        try:
            return call_within(run, warm_up_limit_s(), name=f"aneuron-{self.label}-warm-up")
        except TimeoutError as error:
            message = f"device {self.label}: a program that was warmed up hangs: {error}"
            raise DeviceLost(message, device=self.label) from None

    def memory_budget(self) -> int:
        """Return most of the memory that is free, or 4 GiB if the runtime does not tell."""
        raw = self.raw
        with self._typed():
            stats = raw.memory_stats()
        if isinstance(stats, tuple):
            free = stats[1]
        else:
            free = stats.get("total_bytes", -1) - stats.get("allocated_bytes.all.current", 0)
        return free * 4 // 5 if free > 0 else _UNKNOWN_BUDGET

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the threads; see `ThreadDevice.start`."""
        try:
            super().start(loop)
        except BaseException:
            if not self._in_use:  # else another engine's
                self._disconnect_apart()
            raise

    def close(self) -> DeviceFuture:
        """Let queued work end, then give the cores back; see `Device.close`."""
        if not self._in_use:  # it never started, as a rank before it did not
            if self._raw is not None:
                self._disconnect_apart()
            return super().close()
        self._raw = None
        closed = super().close()
        self._is_reserved = False
        return closed

    def _check_free(self) -> None:
        if self._in_use:
            raise ConfigError(f"another engine has device {self.label} open", param="device")

    def _disconnect_apart(self) -> None:
        """Give the cores back as `disconnect` does, and never block."""
        taken = self._taken()
        try:
            threading.Thread(
                target=self._close_all, args=(taken,), name="aneuron-close", daemon=True
            ).start()
        except RuntimeError:  # no thread is to be had: the next engine over it takes them as is
            for one, raw in taken:
                one._raw = raw  # noqa: SLF001  a sibling
            self._is_reserved = False
            _logger.warning("device %s keeps its cores: no thread starts to close it", self.label)

    def _taken(self) -> list[tuple[Self, NxdRaw | NativeRaw]]:
        """Take the runtimes of all ranks that are not started, for one thread to close."""
        taken = []
        with self._reserving:
            for one in self.ranks:
                raw = None if one._in_use else one._raw  # noqa: SLF001  a sibling
                if raw is not None:
                    one._raw = None  # noqa: SLF001
                    taken.append((one, raw))
        return taken

    def _close_all(self, taken: list[tuple[Self, NxdRaw | NativeRaw]]) -> None:
        for one, raw in reversed(taken):
            one._close_raw(raw)  # noqa: SLF001  a sibling
        self._is_reserved = False

    def _close_raw(self, raw: NxdRaw | NativeRaw) -> None:
        try:
            call_within(raw.close, CLOSE_S, name=f"aneuron-{self.label}-close")
        except TimeoutError:
            _logger.warning("device %s hangs: not closed within %g s", self.label, CLOSE_S)
        except Exception:
            _logger.exception("device %s did not close", self.label)

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Raise what a runtime raises as a typed error."""
        try:
            yield
        except AneuronError:
            raise
        except Exception as error:
            raise classify(error, self.label) from error

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
        depth = _RING
        if self.kind == "native":
            depth = max(1, cast("NativeRaw", self.raw).queue_depth - 1)
        self._life = _Life(self._raw, depth)
        return super()._open_queue(loop)

    def _start_thread(self, body: Callable[..., None], name: str, *args: Any) -> None:
        super()._start_thread(self._live, name, self._life, body, *args)

    def _live(self, life: _Life, body: Callable[..., None], *args: Any) -> None:
        self._here.life = life
        body(*args)

    # ── on the launch thread ────────────────────────────────────────────────────────────

    def _execute_until_accepted(self, job: Job) -> None:
        life: _Life = self._here.life
        life.unread.wait_below(life.depth)
        waits_s = iter(_FULL_WAITS_S)
        while True:
            try:
                job.future.device_value = _Flight(self._launched(job), life.unread)
            except RuntimeError as error:
                if status_of(error) != QUEUE_FULL:
                    raise
                # Of others' launches, or of what was read already: nothing tells when it drains.
                if not life.unread.wait_for_one():
                    if (wait_s := next(waits_s, None)) is None:
                        raise
                    life.unread.wait_for_change(wait_s)
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
            future, life = job.future, self._here.life
            future.device_end_s = self._clock()
            # In order: behind the end of the program before.
            future.device_start_s = max(future.device_start_s, life.last_end_s)
            life.last_end_s = future.device_end_s

    def _shut_down(self) -> None:
        raw = self._here.life.raw
        try:
            if raw is not None:
                raw.close()
        except Exception:
            _logger.exception("device %s did not close", self.label)

    # ── on both ─────────────────────────────────────────────────────────────────────────

    def _classify(self, error: Exception) -> DeviceError:
        return classify(error, self.label)
