"""`DeviceFuture`: one crossing, waiters of their own, silence when nobody waits."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import DeviceFuture
from aneuron.errors import DeviceError, OutOfMemory
from aneuron.futures import Signal

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def complaints() -> Iterator[list[dict[str, Any]]]:
    """What the loop's exception handler was told."""
    told: list[dict[str, Any]] = []
    yield told
    assert told == []


def future_of_loop() -> DeviceFuture:
    return DeviceFuture(asyncio.get_running_loop(), shape=(2,), dtype="int32")


def listen(complaints: list[dict[str, Any]]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, facts: complaints.append(facts))


async def test_a_thread_resolves_it(complaints: list[dict[str, Any]]) -> None:
    listen(complaints)
    future = future_of_loop()
    assert "pending" in repr(future)
    threading.Thread(target=future.post, args=([1, 2],)).start()
    assert await future == [1, 2]
    assert future.done()
    assert future.result() == [1, 2]
    assert await future == [1, 2], "it may be awaited again"
    assert "done" in repr(future)


async def test_result_before_it_is_done() -> None:
    with pytest.raises(asyncio.InvalidStateError):
        future_of_loop().result()


async def test_cancelling_one_waiter_leaves_the_others(complaints: list[dict[str, Any]]) -> None:
    listen(complaints)
    future = future_of_loop()

    async def wait() -> Any:
        return await future

    tasks = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    future.resolve(7)
    assert [await tasks[0], await tasks[2]] == [7, 7]
    assert tasks[1].cancelled()


async def test_case_91_a_timeout_round_a_users_await(complaints: list[dict[str, Any]]) -> None:
    listen(complaints)
    future = future_of_loop()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await future
    other = asyncio.ensure_future(asyncio.wait_for(future, 5))
    await asyncio.sleep(0)
    future.resolve("late")
    assert await other == "late"


async def test_resolving_after_all_waiters_left_is_silent(
    complaints: list[dict[str, Any]],
) -> None:
    listen(complaints)
    future = future_of_loop()

    async def wait() -> None:
        await future

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    future.resolve(None, DeviceError("nobody asks"))
    await asyncio.sleep(0)


async def test_cancelled_and_resolved_in_the_same_turn(complaints: list[dict[str, Any]]) -> None:
    listen(complaints)
    for cancel_first in (True, False):
        future = future_of_loop()

        async def wait(future: DeviceFuture = future) -> Any:
            return await future

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        if cancel_first:
            task.cancel()
        future.resolve(1)
        if not cancel_first:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await future == 1


async def test_the_first_result_stands() -> None:
    future = future_of_loop()
    future.resolve(1)
    future.resolve(None, DeviceError("too late"))
    assert await future == 1


async def test_each_awaiter_gets_an_error_of_its_own() -> None:
    future = future_of_loop()
    cause = RuntimeError("status 4")
    error = OutOfMemory("full", device="sim")
    error.__cause__ = cause
    future.resolve(None, error)
    assert "failed" in repr(future)
    caught = []
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="full") as info:
            await future
        caught.append(info.value)
    assert caught[0] is not caught[1]
    assert all(one.__cause__ is cause and one.device == "sim" for one in caught)


def test_posting_to_a_closed_loop_is_silent() -> None:
    loop = asyncio.new_event_loop()
    future = DeviceFuture(loop, shape=(), dtype="int32")
    loop.close()
    future.post(1)
    assert not future.done()


def test_awaiting_on_another_loop_is_refused() -> None:
    loop = asyncio.new_event_loop()
    future = DeviceFuture(loop, shape=(), dtype="int32")

    async def wait() -> None:
        await future

    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(wait())
    loop.close()


async def test_the_time_of_arrival_is_the_loop_s() -> None:
    future = future_of_loop()
    assert all(map(math.isnan, (future.device_start_s, future.device_end_s, future.read_s)))
    before_s = time.monotonic()
    future.resolve(1)
    first_s = future.read_s
    assert before_s <= first_s <= time.monotonic()
    future.resolve(2)
    assert future.read_s == first_s


# ── unread: the value stays on the device until somebody awaits it ──────────────────────


class Reader:
    """Counts who asks; the test answers."""

    def __init__(self) -> None:
        self.asked: list[DeviceFuture] = []
        self.future = DeviceFuture(
            asyncio.get_running_loop(), shape=(2,), dtype="int32", reader=self.asked.append
        )


async def discard(future: DeviceFuture) -> None:
    await future.discard()


async def get(future: DeviceFuture) -> Any:
    return await future


async def test_discard_waits_for_the_end_and_asks_nothing(
    complaints: list[dict[str, Any]],
) -> None:
    listen(complaints)
    reader = Reader()
    future = reader.future
    tasks = [asyncio.create_task(discard(future)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [False, True, False]
    threading.Thread(target=future.post_complete).start()
    await tasks[0]
    await tasks[2]
    assert tasks[1].cancelled()
    await future.discard()
    assert reader.asked == []
    assert not future.done(), "its value is not here"
    assert math.isnan(future.read_s)
    assert "unread" in repr(future)
    assert future._waiters == []


@pytest.mark.parametrize("end", ["complete", "resolve"])
async def test_an_end_passes_by_who_was_cancelled_in_the_same_turn(end: str) -> None:
    """The waiter is done and still in the list; the other one wakes all the same."""
    future = future_of_loop()
    gone, kept = (asyncio.create_task(discard(future)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    if end == "complete":
        future.complete()
    else:
        future.resolve(3)
    await kept
    assert gone.cancelled()
    assert future._waiters == []


async def test_a_timeout_round_discard_leaves_no_waiter() -> None:
    future = Reader().future
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await future.discard()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await future
    assert future._waiters == []


@pytest.mark.parametrize("ended_first", [True, False])
async def test_the_first_await_asks_once(ended_first: bool) -> None:
    reader = Reader()
    future = reader.future
    if ended_first:
        future.complete()
    tasks = [asyncio.create_task(get(future)) for _ in range(3)]
    await asyncio.sleep(0)
    assert reader.asked == [future]
    future.complete()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks), "the end of the program is not its value"
    tasks[0].cancel()
    future.resolve([1, 2])
    assert [await tasks[1], await tasks[2], await future] == [[1, 2]] * 3
    assert tasks[0].cancelled()
    assert reader.asked == [future]


async def test_discard_and_await_of_one_future() -> None:
    reader = Reader()
    future = reader.future
    dropping, getting = asyncio.create_task(discard(future)), asyncio.create_task(get(future))
    await asyncio.sleep(0)
    future.complete()
    await dropping
    assert not getting.done()
    future.resolve(3)
    assert await getting == 3
    await future.discard()


async def test_a_value_that_comes_by_itself_can_be_discarded() -> None:
    future = future_of_loop()
    task = asyncio.create_task(discard(future))
    await asyncio.sleep(0)
    future.resolve(3)
    await task
    assert await future == 3


@pytest.mark.parametrize("ended_first", [True, False])
async def test_a_fault_reaches_awaiters_and_discarders_alike(ended_first: bool) -> None:
    """As when a step takes too long: core.py resolves the future itself."""
    reader = Reader()
    future = reader.future
    getting = [asyncio.create_task(get(future)) for _ in range(2)]
    await asyncio.sleep(0)
    if ended_first:
        future.complete()
    else:
        getting += [asyncio.create_task(discard(future)) for _ in range(2)]
        await asyncio.sleep(0)
    future.resolve(None, OutOfMemory("full"))
    errors = await asyncio.gather(*getting, return_exceptions=True)
    with pytest.raises(OutOfMemory) as late:
        await future.discard()
    errors.append(late.value)
    assert {type(error) for error in errors} == {OutOfMemory}
    assert len({id(error) for error in errors}) == len(errors), "each has one of its own"


async def test_a_fault_asks_nothing() -> None:
    reader = Reader()
    reader.future.resolve(None, DeviceError("broke"))
    with pytest.raises(DeviceError, match="broke"):
        await reader.future
    assert reader.asked == []


def test_another_loop_does_not_ask() -> None:
    loop = asyncio.new_event_loop()
    asked: list[DeviceFuture] = []
    future = DeviceFuture(loop, shape=(), dtype="int32", reader=asked.append)
    for use in (get, discard):
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(use(future))
    assert asked == []
    loop.close()
    future.post_complete()


async def test_a_signal_outlives_a_waiter_that_was_cancelled() -> None:
    signal = Signal()
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    signal.set()  # before the task has noticed
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await signal.wait()
