"""`DeviceFuture`: a value on its way on the device, awaitable on the loop.

This is the one place where device threads touch the event loop. A launch returns the
future at once; the device's thread resolves it through `call_soon_threadsafe`. Unread, it
can be fed to the next launch: then the value never leaves the device on its way. Beside
it, how the engine's coroutines wait: `Signal`, `Mailbox`, and the `Watchdog` over a silent
device; and `end_with_owner`, for the task that an engine is.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from asyncio import get_running_loop
from collections import deque
from math import nan
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import finalize

from aneuron.errors import DeviceLost

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from aneuron.errors import DeviceError

__all__ = ["DeviceFuture", "Mailbox", "Signal", "Watchdog", "end_with_owner"]

T = TypeVar("T")
_TURNS = 3  # of the loop, from a posted result to the next step being waited for


class DeviceFuture:
    """An awaitable handle on a device value; `await` gives the host value.

    Each awaiter has a waiter of its own: cancelling one (a task, an `asyncio.timeout`)
    changes nothing for the others, or for the device. A result that arrives after all
    waiters left, or after the loop closed, is kept or dropped in silence.

    With a `reader`, the value stays on the device until somebody awaits it: the first
    `await` asks for it, once. `discard` waits for the end of the program and asks nothing.

    Attributes:
        shape: of the value, known at launch.
        dtype: name of the value's dtype, known at launch.
        device_value: what a following launch is fed with; written and read by the
            device's threads only.
        device_extras: what else goes to the host beside the value, or None; likewise.
        device_error: the fault that a following launch inherits; likewise.
        device_start_s, device_end_s: when its program ran, in seconds of
            its clock; NaN before it has. Written by the device's thread.
        read_s: when the value or the fault was on the loop; NaN before.
    """

    # On the class until they are set: a future is made each step.
    device_value: Any = None
    device_extras: Any = None
    device_error: DeviceError | None = None
    device_start_s = device_end_s = read_s = nan
    _ended = False  # the program; its value may still be on the device
    _done = False
    _value: Any = None
    _error: DeviceError | None = None

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        shape: tuple[int, ...],
        dtype: str,
        reader: Callable[[DeviceFuture], None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Make a pending future that belongs to `loop`.

        Args:
            loop: where it resolves.
            shape: of the value.
            dtype: of the value.
            reader: asks the device for the host value; None: it comes by itself.
            clock: for `read_s`, in seconds.
        """
        self.shape = shape
        self.dtype = dtype
        self._loop = loop
        self._clock = clock
        self._reader = reader
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        if self._done:
            state = "failed" if self._error else "done"
        else:
            state = "unread" if self._ended else "pending"
        return f"<DeviceFuture {state} {self.dtype}{list(self.shape)}>"

    def done(self) -> bool:
        """Whether the host value, or the fault, has arrived."""
        return self._done

    def result(self) -> Any:
        """Return the host value of a future that is done.

        Raises:
            DeviceError: what the device reported; a fresh instance each time.
            asyncio.InvalidStateError: it is not done.
        """
        if not self._done:
            raise asyncio.InvalidStateError("the device value has not arrived; await it")
        if self._error is not None:
            raise self._error.copy()
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        while not self._done:
            waiter = self._add_waiter()
            if self._reader is not None:
                reader, self._reader = self._reader, None
                reader(self)
            try:
                yield from waiter
            except BaseException:
                self._drop_waiter(waiter)
                raise
        return self.result()

    async def discard(self) -> None:
        """Wait until the program has ended; an unread value is not copied to the host.

        Raises:
            DeviceError: it failed; a fresh instance each time.
        """
        while not (self._ended or self._done):
            waiter = self._add_waiter()
            try:
                await waiter
            except BaseException:
                self._drop_waiter(waiter)
                raise
        if self._error is not None:
            raise self._error.copy()

    def _add_waiter(self) -> asyncio.Future[None]:
        """Return a waiter of one's own, for the next change."""
        if get_running_loop() is not self._loop:
            raise RuntimeError("this DeviceFuture belongs to another event loop")
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        return waiter

    def _drop_waiter(self, waiter: asyncio.Future[None]) -> None:
        # Woken in the same turn as it was cancelled: the list is empty already.
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    # ── from a device thread: the crossing to the loop ──────────────────────────────────

    def post(self, value: Any, error: DeviceError | None = None) -> None:
        """Resolve it."""
        try:
            self._loop.call_soon_threadsafe(self.resolve, value, error)
        except RuntimeError:
            # The loop has closed: nobody can be waiting.
            return

    def post_complete(self) -> None:
        """Say that the program has ended, and no more."""
        try:
            self._loop.call_soon_threadsafe(self.complete)
        except RuntimeError:  # likewise
            return

    # ── on the loop ─────────────────────────────────────────────────────────────────────

    def resolve(self, value: Any, error: DeviceError | None = None) -> None:
        """Take the host value, or the fault; the first stands, later ones are dropped."""
        if self._done:
            return
        self._done = True
        self._value = value
        self._error = error
        self.read_s = self._clock()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def complete(self) -> None:
        """Note that the program has ended and its value stays on the device for now."""
        self._ended = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


# ── waiting, on the loop ────────────────────────────────────────────────────────────────


class Signal:
    """Wakes the one task that waits for it; a lighter `asyncio.Event` (docs/log.md)."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        """Make one that is not set."""
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiting task, or let the next wait return at once."""
        self._is_set = True
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def wait(self) -> None:
        """Wait until it is set, and reset it; for one task at a time."""
        while not self._is_set:
            self._waiter = get_running_loop().create_future()
            try:
                await self._waiter
            except BaseException:
                self._waiter = None
                raise
        self._is_set = False


class Mailbox(Generic[T]):
    """Items from one task to another, in order; a lighter `asyncio.Queue` without a limit."""

    __slots__ = ("_items", "_news")

    def __init__(self) -> None:
        """Make an empty one."""
        self._items: deque[T] = deque()
        self._news = Signal()

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        self._news.set()

    async def get(self) -> T:
        """Wait for an item and take it; for one task at a time."""
        while not self._items:
            await self._news.wait()
        return self._items.popleft()


class Failable(Protocol):
    """A step in flight, of one rank or of several."""

    def fail(self, error: DeviceError) -> None:
        """Resolve it with an error if it has no result yet."""


class Watchdog:
    """Fails a step that stays silent for too long, so that its device counts as lost.

    One timer, set once per time-out and not per step; none while nothing is in flight.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = monotonic) -> None:
        """Make one that allows a step `timeout_s` seconds after the step before."""
        self.timeout_s = timeout_s
        self._clock = clock
        self._late = DeviceLost(f"no step has finished for {timeout_s:g} s (step_timeout_s)")
        self._watched: Failable | None = None
        self._beside: Failable | None = None
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, step: Failable, *, beside: bool = False) -> None:
        """Note that this step is waited for from now on; or what is waited for beside one."""
        if beside:
            self._beside = step
        else:
            self._watched = step
        self._since_s = self._clock()
        if self._timer is None:
            self._set(self.timeout_s)

    def restart(self) -> None:
        """Note that something has ended: what is still waited for has its time from now on."""
        self._since_s = self._clock()

    def rest(self) -> None:
        """Stop the timer: nothing is in flight."""
        self._watched = self._beside = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        # Where the caller blocked the loop, results wait behind this timer: they come first.
        self._judge(turns=_TURNS)

    def _judge(self, turns: int) -> None:
        watched = [one for one in (self._watched, self._beside) if one is not None]
        if not watched or self._timer is not None:
            return
        left_s = self._since_s + self.timeout_s - self._clock()
        if left_s > 0:
            self._set(left_s)
        elif turns:
            asyncio.get_running_loop().call_soon(self._judge, turns - 1)
        else:
            for one in watched:
                one.fail(self._late)


_held: set[asyncio.Task[None]] = set()  # a loop alone would let them be collected


def end_with_owner(
    owner: object, task: asyncio.Task[None], stop: Callable[[], None], *, what: str
) -> None:
    """Hold a task until it is done; an owner that is dropped before warns, and has it stopped."""
    _held.add(task)
    finalizer = finalize(owner, _dropped, task, stop, what, os.getpid())
    finalizer.atexit = False

    def done(_: asyncio.Task[None]) -> None:
        _held.discard(task)
        finalizer.detach()

    task.add_done_callback(done)


def _dropped(task: asyncio.Task[None], stop: Callable[[], None], what: str, pid: int) -> None:
    loop = task.get_loop()
    is_over = task.done() or task.cancelling() or loop.is_closed()
    if is_over or pid != os.getpid():
        return
    message = f"{what} was dropped while it was open: await engine.aclose()"
    warnings.warn(message, ResourceWarning, stacklevel=2)
    loop.call_soon_threadsafe(stop)  # a collection may run in any thread
