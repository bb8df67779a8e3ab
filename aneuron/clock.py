"""Time: the clock that goes with an event loop, and a loop whose time is virtual.

On `VirtualClockLoop` an hour passes as fast as the processor can run what happens in it, and
passes alike at each run. The simulated device runs on it without threads; fleets are
simulated and tests are run on it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from heapq import heappush
from math import inf, ulp
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, TypeVarTuple, Unpack

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor
    from contextvars import Context

__all__ = ["Deadlock", "VirtualClockLoop", "clock_of", "run_virtual"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_NUM_NAMED = 8  # tasks that a deadlock's message names
_REFUSED = (
    "add_reader", "add_signal_handler", "add_writer", "connect_accepted_socket",
    "connect_read_pipe", "connect_write_pipe", "create_connection", "create_datagram_endpoint",
    "create_server", "create_unix_connection", "create_unix_server", "sendfile", "sock_accept",
    "sock_connect", "sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into",
    "sock_sendall", "sock_sendfile", "sock_sendto", "start_tls", "subprocess_exec",
    "subprocess_shell",
)  # fmt: skip


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return what tells the time on this loop, in seconds from some start.

    `loop.time` if it is virtual. Else `time.monotonic`, since `loop.time` of uvloop stands
    still for a turn and counts in milliseconds.
    """
    return loop.time if isinstance(loop, VirtualClockLoop) else monotonic


def run_virtual(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a coroutine on a fresh `VirtualClockLoop`, as `asyncio.run` would, and close that.

    Args:
        main: what to run.
        debug: asyncio's debug mode; None leaves it to PYTHONASYNCIODEBUG.

    Returns:
        What `main` returns.

    Raises:
        Deadlock: `main` waits for what can never happen.
        RuntimeError: called where an event loop runs already.
    """
    if asyncio._get_running_loop() is not None:  # noqa: SLF001  what asyncio.run asks, too
        main.close()
        raise RuntimeError(
            "run_virtual() makes an event loop of its own, and one runs here already: call it from "
            "a plain function"
        )
    with asyncio.Runner(loop_factory=VirtualClockLoop, debug=debug) as runner:
        return runner.run(main)


class Deadlock(RuntimeError):
    """Nothing will ever happen on a virtual loop again, and its program waits for something."""


class _Timer(asyncio.TimerHandle):
    """A timer that comes behind those set before it for the same time.

    The heap of timers asks `<` alone, and no other kind is ever in it.
    """

    __slots__ = ("number",)
    number: int
    _when: float  # of the base class
    _scheduled: bool

    def __lt__(self, other: _Timer) -> bool:  # type: ignore[override]
        mine, others = self._when, other._when
        return mine < others or (mine == others and self.number < other.number)


class VirtualClockLoop(asyncio.BaseEventLoop):
    """An event loop whose `time()` is virtual: it starts at 0.0, and nothing sleeps.

    With nothing ready to run, it jumps to the next timer. Timers due at the same time run in
    the order in which they were set. So a program without threads runs alike each time.

    While a thread works (`run_in_executor`, `asyncio.to_thread`) time stands still, and the
    loop waits for it. It cannot see other threads, those of `anyio.to_thread` among them:
    what they post is taken in, but nothing waits for it.

    With nothing ready, no timer and no thread at work, an ordinary loop would wait for ever.
    This one raises `Deadlock` from where it is run.

    There are no sockets, pipes, subprocesses or signal handlers: their methods raise
    `NotImplementedError`. Ctrl-C ends it as usual. In debug mode no callback is ever slow,
    since none takes any time.
    """

    # Of the base class, for those that derive from it.
    _ready: deque[asyncio.Handle]
    _scheduled: list[_Timer]
    _default_executor: ThreadPoolExecutor | None
    _debug: bool
    _check_closed: Callable[[], None]
    _check_default_executor: Callable[[], None]
    _check_thread: Callable[[], None]
    _check_callback: Callable[[object, str], None]

    def __init__(self) -> None:
        """Make a loop at 0.0."""
        super().__init__()
        self._selector = SimpleNamespace(select=self._select)
        self._num_timers = 0
        self._at_work: set[object] = set()  # in threads
        # A queue that a signal handler may put on while this same thread gets from it: the
        # locks of an Event are no good for that.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._listens = False
        self._set_time(0.0)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Set a timer, behind those set for the same time before it."""
        self._check_closed()
        if self._debug:
            self._check_thread()
            self._check_callback(callback, "call_at")
        # As a float: the smallest step that one of numpy's takes is not that of the clock.
        timer = _Timer(float(when), callback, args, self, context)
        timer.number = self._num_timers
        self._num_timers += 1
        heappush(self._scheduled, timer)
        timer._scheduled = True  # noqa: SLF001  as the base class does
        return timer

    # ── when nothing is ready ───────────────────────────────────────────────────────────

    def _select(self, timeout: float | None) -> tuple[()]:
        """Stand in for a selector: the base class asks it once a turn, and waits in it."""
        if timeout == 0:  # something is ready, or due
            return ()
        if self._at_work:
            self._listen()
        elif self._scheduled and self._scheduled[0].when() < inf:
            self._set_time(self._scheduled[0].when())
        else:
            raise Deadlock(self._describe())
        return ()

    def _process_events(self, events: tuple[()]) -> None:
        """Take what `_select` returned: nothing."""

    def _set_time(self, now_s: float) -> None:
        self._now_s = now_s
        # The base class runs what is due before time() + this: exactly what is due by now.
        self._clock_resolution = ulp(now_s)

    def _describe(self) -> str:
        waiting = sorted(map(_whereabouts, asyncio.all_tasks(self))) or ["no task"]
        if len(waiting) > _NUM_NAMED:
            waiting[_NUM_NAMED:] = [f"{len(waiting) - _NUM_NAMED} more"]
        return (
            f"nothing will ever happen again at {self._now_s:g} s of virtual time: nothing is "
            f"ready, no timer is set and no thread is at work; waiting: {', '.join(waiting)}"
        )

    # ── threads ─────────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        """Wait until a thread has posted something, or has ended its work."""
        self._listens = True
        try:
            # Whoever came before did not ring.
            if self._at_work and not self._ready:
                self._bell.get()
        finally:
            self._listens = False

    def _write_to_self(self) -> None:
        """Wake the loop; the base class has it done behind `call_soon_threadsafe`."""
        if self._listens:
            self._bell.put(None)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a function in a thread; until it has ended, also unawaited, time stands still."""
        self._check_closed()
        if executor is None:
            self._check_default_executor()
            if self._default_executor is None:
                self.set_default_executor(ThreadPoolExecutor(thread_name_prefix="asyncio"))
            executor = self._default_executor
            assert executor is not None
        work = executor.submit(func, *args)
        self._at_work.add(work)
        future = asyncio.wrap_future(work, loop=self)
        # Behind wrap_future's own callback: the result is posted by then.
        work.add_done_callback(self._end_work)
        return future

    def _end_work(self, work: object) -> None:
        self._at_work.discard(work)
        self._write_to_self()

    async def shutdown_default_executor(self, *args: Any) -> None:
        """Wait for the threads of `asyncio.to_thread` to end: a thread of its own does."""
        shutdown = object()
        self._at_work.add(shutdown)
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._at_work.discard(shutdown)


def _whereabouts(task: asyncio.Task[Any]) -> str:
    places = [
        f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        for frame in task.get_stack(limit=1)
    ]
    return task.get_name() + "".join(places)


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name}: a VirtualClockLoop has no sockets, pipes, subprocesses or signal handlers"
        )

    return refuse


for _name in _REFUSED:
    setattr(VirtualClockLoop, _name, _refuse(_name))
