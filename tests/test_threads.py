"""Threads of ours: results that nobody waits for any more are given back, once."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import threads
from tests.support import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from blockbuster import BlockBuster


class Slow:
    """A lock behind whose release by the event loop's thread another thread has its turn."""

    def __init__(self, turn: Callable[[], Any]) -> None:
        self._lock = threading.Lock()
        self._turn = turn

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread() is threading.main_thread():
            self._turn()


@pytest.fixture
def loop_may_wait(blocking_calls_raise: BlockBuster) -> Iterator[None]:
    blocking_calls_raise.deactivate()
    yield
    blocking_calls_raise.activate()


@pytest.mark.usefixtures("loop_may_wait")
@pytest.mark.parametrize("is_made_first", [True, False])
async def test_what_a_cancelled_caller_leaves_is_given_back_once(
    monkeypatch: pytest.MonkeyPatch, is_made_first: bool
) -> None:
    """Made before the caller is cancelled, or between two looks that it might have then."""
    started, may_end, is_discarded = threading.Event(), threading.Event(), threading.Event()
    discarded: list[str] = []

    def work() -> str:
        started.set()
        may_end.wait()
        return "loaded"

    def discard(value: str) -> None:
        discarded.append(value)
        is_discarded.set()

    def turn() -> None:
        if not is_made_first:
            may_end.set()
            is_discarded.wait(5)

    names = {**vars(threading), "Lock": lambda: Slow(turn)}
    monkeypatch.setattr(threads, "threading", SimpleNamespace(**names))
    task = asyncio.create_task(threads.run_apart(work, name="apart", discard=discard))
    await asyncio.to_thread(started.wait)
    if is_made_first:
        may_end.set()
        thread_of("apart").join(0.1)  # it has made it, and waits for its next call
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not [one for one in threading.enumerate() if one.name == "apart"])
    assert discarded == ["loaded"]


def thread_of(name: str) -> threading.Thread:
    (found,) = [one for one in threading.enumerate() if one.name == name]
    return found


def test_an_executor_whose_thread_did_not_start_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    executor = threads.DaemonExecutor("executor")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        executor.submit(int)
    monkeypatch.undo()
    assert executor.submit(int, "7").result(10) == 7
    executor.shutdown()
