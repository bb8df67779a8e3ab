"""Cancel, abort, stop, drop: whoever ends a request, and whenever, nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.testing import ByteTokenizer, assert_idle, count_engine, no_leaks
from tests.support import (
    STEP_S,
    assert_exact,
    assert_idle_soon,
    await_it,
    device_of,
    every_carry,
    nothing_logged,
    read,
    until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aneuron import Engine, TokenStream


def start(engine: Engine, last: int = 10, max_tokens: int = 1000, **options: Any) -> TokenStream:
    return engine.generate(prompt_token_ids=[last], max_tokens=max_tokens, **options)


# ── the consumer goes ───────────────────────────────────────────────────────────────────


async def sleep_in_body(stream: TokenStream, ready: asyncio.Event) -> None:
    async for token in stream:
        if token.index == 2:
            ready.set()
            await asyncio.sleep(60)


async def consume_temporary(engine: Engine, ready: asyncio.Event) -> None:
    await sleep_in_body(start(engine), ready)


async def consume_local(engine: Engine, ready: asyncio.Event) -> None:
    stream = start(engine)  # stays in this frame, which the task's traceback keeps
    await sleep_in_body(stream, ready)


@every_carry
@pytest.mark.parametrize("consume", [consume_temporary, consume_local])
async def test_case_01_consumer_cancelled_in_the_loop_body(
    consume: Any, carry: dict[str, Any]
) -> None:
    """A consumer cancelled inside its loop body leaves an idle engine within 3 steps."""
    async with count_engine(latency=STEP_S, **carry) as engine:
        ready = asyncio.Event()
        task = asyncio.create_task(consume(engine, ready))
        await ready.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        await assert_idle_soon(engine)
        await assert_exact(engine)
        assert caught.traceback  # alive until here, as is the task
        assert task.cancelled()


@every_carry
async def test_case_01_break_out_of_aclosing(carry: dict[str, Any]) -> None:
    """`break` out of a loop in `contextlib.aclosing` leaves an idle engine within 3 steps."""
    async with count_engine(latency=STEP_S, **carry) as engine:
        before = 0
        async with aclosing(start(engine)) as stream:
            async for token in stream:
                if token.index == 2:
                    before = device_of(engine).num_steps
                    break
        assert_idle(engine)  # aclose() waited for the blocks
        assert device_of(engine).num_steps - before <= 3
        await assert_exact(engine)


async def test_break_out_of_a_temporary() -> None:
    """`break` out of `async for` over a temporary ends the request, without gc."""
    async with count_engine(latency=STEP_S) as engine:
        async for token in start(engine):
            if token.index == 2:
                break
        await assert_idle_soon(engine)


async def test_generator_exit_in_a_wrapper() -> None:
    """A user's async generator round a stream, closed early, ends the request."""

    async def texts(engine: Engine) -> AsyncIterator[str]:
        async for token in start(engine):
            yield token.text

    async with count_engine(latency=STEP_S) as engine:
        wrapper = texts(engine)
        await anext(wrapper)
        await wrapper.aclose()  # type: ignore[attr-defined]
        await assert_idle_soon(engine)


async def test_consumer_that_fails_ends_its_request_without_gc() -> None:
    """A consumer that raises frees its request as soon as the error is let go of."""

    async def consume(engine: Engine) -> None:
        stream = start(engine)
        async for _ in stream:
            raise ZeroDivisionError

    async with count_engine(latency=STEP_S) as engine:
        gc.disable()
        try:
            task = asyncio.create_task(consume(engine))
            await asyncio.wait([task])
            assert isinstance(task.exception(), ZeroDivisionError)
            del task
            await assert_idle_soon(engine)
        finally:
            gc.enable()


async def test_consumer_cancelled_before_it_ever_waited() -> None:
    """Many tokens are ready; the consumer is cancelled in its body; the request ends."""
    async with count_engine(latency=0.001) as engine:
        stream = start(engine)
        await until(lambda: len(stream._request.output_ids) > 5)
        ready = asyncio.Event()
        task = asyncio.create_task(sleep_in_body(stream, ready))
        await ready.wait()
        task.cancel()
        await asyncio.wait([task])
        await assert_idle_soon(engine, steps=4)


async def test_stream_handed_on_outlives_its_first_consumer() -> None:
    """Task A reads a token and hands the stream to B; A's cancellation is not B's."""
    async with count_engine(latency=0.001) as engine:
        stream = start(engine, max_tokens=50)

        async def first() -> None:
            await read(stream, 1)
            handed_on.set()
            await asyncio.sleep(60)

        handed_on = asyncio.Event()
        task = asyncio.create_task(first())
        await handed_on.wait()
        rest = asyncio.create_task(read(stream, 49))
        await asyncio.sleep(0.005)
        task.cancel()
        assert await rest == list(range(12, 61))


async def test_case_02b_cancelled_while_it_waits() -> None:
    """A request cancelled in the queue: the device runs no prompt token of it."""
    async with count_engine(latency=STEP_S, max_num_seqs=1) as engine:
        long = start(engine)
        await read(long, 1)
        waiting = asyncio.create_task(await_it(engine.generate(prompt_token_ids=[1] * 100)))
        await asyncio.sleep(0)
        assert engine.stats().waiting == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert engine.stats().waiting == 0
        await read(long, 5)
        assert device_of(engine).num_prefill_tokens == 1  # the long one's
        await long.aclose()
        assert_idle(engine)


async def test_case_03_awaiting_task_cancelled() -> None:
    """A task that awaits a whole answer is cancelled: the request stops with it."""
    async with count_engine(latency=0.002) as engine:
        task = asyncio.create_task(await_it(start(engine, max_tokens=5000)))
        await until(lambda: engine.stats().generation_tokens >= 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_idle_soon(engine)
        assert engine.stats().generation_tokens < 300


@every_carry
async def test_case_04_500_dropped_streams(carry: dict[str, Any]) -> None:
    """500 streams dropped after 0..5 tokens: 8 more are right, and no record is left."""
    async with count_engine(max_num_seqs=8, **carry) as engine:
        rng = random.Random(4)
        task: Any = asyncio.current_task()
        callbacks = len(task._callbacks or ())
        for _ in range(100 if asyncio.get_running_loop().get_debug() else 500):
            await read(start(engine), rng.randrange(6))
        streams = [start(engine, 1000 * n, 20) for n in range(1, 9)]
        for n, stream in enumerate(streams, 1):
            assert (await stream).token_ids == list(range(1000 * n + 1, 1000 * n + 21))
        await engine.wait_idle()
        assert_idle(engine)
        # Nor in the consumer, which may live as long as the process.
        assert len(task._callbacks or ()) - callbacks < 10


def test_case_04_at_5_ms_a_step() -> None:
    """The same on plain asyncio at 5 ms a step; eight consumers share the 500 rounds."""
    asyncio.run(drop_500_streams())


async def drop_500_streams() -> None:
    async with count_engine(latency=STEP_S, max_num_seqs=8) as engine:

        async def drop_some(number: int) -> None:
            rng = random.Random(number)
            for _ in range(63 if number < 4 else 62):
                count = rng.randrange(6)
                assert await read(start(engine), count) == list(range(11, 11 + count))

        await asyncio.gather(*map(drop_some, range(8)))
        streams = [start(engine, 1000 * n, 20) for n in range(1, 9)]
        for n, stream in enumerate(streams, 1):
            assert (await stream).token_ids == list(range(1000 * n + 1, 1000 * n + 21))
        await engine.wait_idle()
        assert_idle(engine)


# ── abort, cancel, stop ─────────────────────────────────────────────────────────────────


async def test_case_05_abort_of_what_is_over_or_unknown() -> None:
    """abort() twice of a finished id, and of an unknown one, changes nothing."""
    async with count_engine(latency=0.001) as engine, no_leaks(engine):
        others = [start(engine, 100 * n, 50) for n in range(1, 4)]
        await start(engine, max_tokens=3, request_id="done")
        for name in ("done", "done", "never seen"):
            engine.abort(name)
            stats = engine.stats()
            assert stats.running == 3
            assert stats.free_blocks <= stats.num_blocks
        for n, stream in enumerate(others, 1):
            assert (await stream).token_ids == list(range(100 * n + 1, 100 * n + 51))


@every_carry
async def test_case_06_abort_one_of_eight(carry: dict[str, Any]) -> None:
    """Request 3 of 8 is aborted with steps in flight: it gives nothing more, 7 are exact."""
    async with count_engine(latency=0.002, **carry) as engine:
        streams = [start(engine, 1000 * n, 60, request_id=f"r{n}") for n in range(1, 9)]
        await read(streams[2], 5)
        await until(lambda: len(streams[2]._request.output_ids) >= 20)  # 15 are unread
        engine.abort("r3")
        items = [token async for token in streams[2]]
        assert [item.token_id for item in items] == [None]
        assert items[0].finish_reason == "abort"
        for n, stream in enumerate(streams, 1):
            answer = await stream
            if n == 3:
                assert answer.finish_reason == "abort"
                assert answer.abort_reason == "client"
            else:
                assert answer.token_ids == list(range(1000 * n + 1, 1000 * n + 61))
        await engine.wait_idle()
        assert_idle(engine)


@pytest.mark.parametrize("by", ["name", "handle"])
async def test_case_07_ended_from_another_task(by: str, caplog: pytest.LogCaptureFixture) -> None:
    """Task B ends the request that A iterates: A's loop ends by itself with "abort"."""
    async with nothing_logged(caplog), count_engine(latency=STEP_S) as engine:
        stream = start(engine, request_id="x")

        async def consume() -> list[Any]:
            return [token async for token in stream]

        task = asyncio.create_task(consume())
        await until(lambda: stream._request.first_token_s is not None)
        before = device_of(engine).num_steps
        if by == "name":
            engine.abort("x")
        else:
            stream.cancel()
            stream.cancel()
        items = await task
        assert device_of(engine).num_steps - before <= 3
        assert items[-1].finish_reason == "abort"
        assert [item.token_id for item in items[:-1]] == list(range(11, 10 + len(items)))
        await assert_idle_soon(engine)


@every_carry
@pytest.mark.parametrize("count", [1, 4])
async def test_case_11_and_88_same_name_in_the_same_turn(carry: dict[str, Any], count: int) -> None:
    """ "x" cancelled with a step in flight and submitted again: only the new one's ids."""
    async with count_engine(latency=0.002, **carry) as engine:
        for tokens_read in (0, 1, 3):
            old = engine.generate(prompt_token_ids=[7] * (count - 1) + [10], request_id="x")
            await read(old, tokens_read)
            if not tokens_read:
                await until(lambda: engine.stats().in_flight_steps > 0)
            old.cancel()
            new = engine.generate(
                prompt_token_ids=[7] * (count - 1) + [500], request_id="x", max_tokens=20
            )
            assert (await new).token_ids == list(range(501, 521))
            assert (await old).finish_reason == "abort"
        await engine.wait_idle()
        assert_idle(engine)


async def test_async_with_left_early_waits_for_the_blocks() -> None:
    """`async with stream` left early, or by an error: its blocks are free behind it."""
    async with count_engine(latency=STEP_S) as engine:
        async with start(engine) as stream:
            await read(stream, 2)
            assert engine.stats().free_blocks < engine.stats().num_blocks
        assert_idle(engine)
        with pytest.raises(ZeroDivisionError):
            async with start(engine) as stream:
                await read(stream, 2)
                raise ZeroDivisionError
        assert_idle(engine)
        await stream.aclose()  # again: no harm


async def test_stop_keeps_what_there_is() -> None:
    """stop(): finish "stop", every token so far with its text, read or not."""
    async with count_engine(latency=0.002) as engine:
        stream = start(engine)
        first = [await anext(stream) for _ in range(2)]
        await until(lambda: len(stream._request.output_ids) >= 6)
        stream.stop()
        count = len(stream._request.output_ids)
        items = first + [token async for token in stream]
        ids = [item.token_id for item in items if item.token_id is not None]
        assert ids == list(range(11, 11 + count))
        assert items[-1].finish_reason == "stop"
        answer = await stream
        assert answer.token_ids == ids
        assert answer.text == "".join(map(str, items)) == ByteTokenizer().decode(ids)
        assert answer.abort_reason is None
        await assert_idle_soon(engine)
