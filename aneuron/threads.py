"""Threads of ours for work that is not the device's: daemons, so that none keeps a process.

Comes in: calls. Goes out: futures of `concurrent.futures`, which `run_in_executor` makes awaitable.
The loop's own executor would do but for two things: an application may fill it with work that
takes for ever, and its threads are joined when the interpreter ends.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DaemonExecutor"]

T = TypeVar("T")
_Call = tuple["Future[Any]", "Callable[..., Any]", tuple[Any, ...]]


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
            self._is_started = True
            self._start()
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
