"""Threads of ours for work that is not the device's, and what else ties an engine to a place.

The threads are daemons, so that none keeps a process. Comes in: calls. Goes out: futures of
`concurrent.futures`, which `run_in_executor` makes awaitable. The loop's own executor would do
but for two things: an application may fill it with work that takes for ever, and its threads
are joined when the interpreter ends. An engine also belongs to one event loop, and to the process
that opened it: a forked child has none of its threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Executor, Future
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DaemonExecutor",
    "Leavable",
    "call_within",
    "check_loop",
    "leave_at_fork",
    "run_apart",
    "use_compute_threads",
]

T = TypeVar("T")
_Call = tuple["Future[Any]", "Callable[..., Any]", tuple[Any, ...]]


async def run_apart(
    work: Callable[[], T], *, name: str, discard: Callable[[T], None] | None = None
) -> T:
    """Run work that blocks on a daemon thread of its own, and return its result.

    Cancelled, the caller goes on at once; the thread cannot be stopped, but keeps no process.

    Args:
        work: to run; it sees the caller's context variables.
        name: of the thread.
        discard: given the result, on a thread, if nobody waits for it any more.

    Raises what the work raises.
    """
    executor, context = DaemonExecutor(name), copy_context()
    changing, made, is_left = threading.Lock(), list[T](), False

    def body() -> T:
        value = context.run(work)
        with changing:
            made.append(value)
            is_unwanted = is_left
        if is_unwanted and discard is not None:
            discard(value)
        return value

    try:
        return await asyncio.get_running_loop().run_in_executor(executor, body)
    except asyncio.CancelledError:
        with changing:
            is_left, is_made = True, bool(made)  # else `body` sees that it is left
        if is_made and discard is not None:
            executor.submit(discard, made[0])
        raise
    finally:
        executor.shutdown()


def call_within(work: Callable[[], T], seconds: float, *, name: str) -> T:
    """Run work that may hang, on a daemon thread, and wait for it; for worker threads.

    Raises what the work raises, and:
        TimeoutError: it took longer; its thread is left behind.
    """
    told: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def body() -> None:
        try:
            told.put((work(), None))
        except BaseException as fault:  # noqa: BLE001  it is the caller's
            told.put((None, fault))

    threading.Thread(target=body, name=name, daemon=True).start()
    try:
        value, error = told.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"not done within {seconds:g} s") from None
    if error is not None:
        raise error
    result: T = value
    return result


def check_loop(loop: asyncio.AbstractEventLoop, *, what: str) -> None:
    """Check that the caller runs on an event loop.

    Args:
        loop: that it should be.
        what: belongs to it, for the error.

    Raises:
        RuntimeError: it runs on another, or on none; the message names both.
    """
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        here = "no event loop runs in this thread"
    else:
        if running is loop:
            return
        here = f"this is {_name(running)}"
    raise RuntimeError(f"{what} belongs to the event loop {_name(loop)}: call it there; {here}")


def _name(loop: asyncio.AbstractEventLoop) -> str:
    return f"{loop!r} at {id(loop):#x}"  # two loops of a kind look alike otherwise


class Leavable(Protocol):
    """What a forked child has of its parent, and must not use."""

    def leave_to_parent(self) -> None:
        """Be of no use from now on; called in the child, before anything else runs there."""


_LEFT_AT_FORK: WeakSet[Leavable] = WeakSet()


def leave_at_fork(owner: Leavable) -> None:
    """Have `owner.leave_to_parent()` called in each child that is forked from now on."""
    _LEFT_AT_FORK.add(owner)


def _leave_to_parent() -> None:
    for owner in list(_LEFT_AT_FORK):
        owner.leave_to_parent()


class _ComputeThreads:
    """Whether threads of libraries, such as OpenMP's, have computed in this process."""

    are_started = are_lost = False

    def leave_to_parent(self) -> None:
        self.are_lost = self.are_lost or self.are_started  # a child of a child, too


_COMPUTE_THREADS = _ComputeThreads()
leave_at_fork(_COMPUTE_THREADS)


def use_compute_threads() -> None:
    """Take note that libraries compute here from now on, with threads of their own.

    Raises:
        ConfigError: they did so in the process that this one was forked from. A child has no
            threads but knows of them, and its first step would wait for them for ever.
    """
    if _COMPUTE_THREADS.are_lost:
        raise ConfigError(
            "this process was forked from one that has run a model on the processor, whose threads "
            "are not here: start processes with the method 'spawn', or fork before opening",
            param="device",
        )
    _COMPUTE_THREADS.are_started = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class DaemonExecutor(Executor):
    """Runs calls one after the other on a thread that starts with the first one.

    Args:
        name: of the thread.
        stack_bytes: of its stack; 0 is the platform's usual one.
    """

    def __init__(self, name: str, *, stack_bytes: int = 0) -> None:
        """Make one without a thread."""
        self._name = name
        self._stack_bytes = stack_bytes
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._is_started = self._is_closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a call; from one thread at a time.

        Raises:
            RuntimeError: it was shut down.
        """
        if self._is_closed:
            raise RuntimeError(f"{self._name} was shut down")
        if not self._is_started:
            self._start()  # it raises where no thread is to be had
            self._is_started = True
        future: Future[T] = Future()
        self._calls.put((future, fn, args))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002
        """Let the thread end behind what is queued; a call that hangs is left behind."""
        self._is_closed = True
        self._calls.put(None)

    def _start(self) -> None:
        usual = threading.stack_size(self._stack_bytes) if self._stack_bytes else 0
        try:
            threading.Thread(
                target=_serve, args=(self._calls,), name=self._name, daemon=True
            ).start()
        finally:
            if self._stack_bytes:
                threading.stack_size(usual)


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        future, fn, args = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(fn(*args))
            except BaseException as error:  # noqa: BLE001  it is whoever waits that it concerns
                future.set_exception(error)
        del call, future, fn, args  # idle, nothing of it is kept
