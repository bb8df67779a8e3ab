"""`TokenStream`: each loop ends by itself, no token is lost, text comes when it is certain."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import aneuron
from aneuron import FinishReason
from aneuron.request import wake
from aneuron.testing import (
    ByteTokenizer,
    Const,
    Count,
    Script,
    SimDevice,
    assert_idle,
    count_engine,
    no_leaks,
    sim_engine,
)
from tests.support import after, every_carry, items_of, start, until

if TYPE_CHECKING:
    from aneuron import Token, TokenStream


def ids_of(items: list[Token]) -> list[int | None]:
    return [item.token_id for item in items]


# ── items ───────────────────────────────────────────────────────────────────────────────


@every_carry
async def test_case_16_twenty_loops(carry: dict[str, Any]) -> None:
    """20 loops of different lengths: each ends after its own finished item, with its own ids."""
    async with (
        count_engine(max_num_seqs=8, **carry) as engine,
        no_leaks(engine),
    ):
        lengths = [1, 2, 3, 5, 8, *range(10, 160, 10), 200][:20]
        tasks = [
            asyncio.create_task(items_of(start(engine, 1000 * n, count)))
            for n, count in enumerate(lengths)
        ]
        for n, (count, items) in enumerate(zip(lengths, await asyncio.gather(*tasks), strict=True)):
            assert ids_of(items) == after(1000 * n, count)
            assert [item.index for item in items] == list(range(count))
            assert [item.finish_reason for item in items] == [None] * (count - 1) + ["length"]
        assert engine.stats().generation_tokens == sum(lengths)


@every_carry
async def test_case_35_one_token(carry: dict[str, Any]) -> None:
    """max_tokens=1: one item, with the token and finish "length"."""
    async with sim_engine(Script(b"Hello"), **carry) as engine:
        (item,) = await items_of(engine.generate("?", max_tokens=1))
        assert (item.text, item.token_id, item.finish_reason) == ("H", ord("H"), "length")
        assert str(item) == "H"


async def test_case_35_slow_reader() -> None:
    """A reader who comes when all is over gets every token, and the finish."""
    async with count_engine() as engine:
        stream = start(engine, 10, 200)
        assert (await anext(stream)).token_id == 11
        await engine.wait_idle()
        items = await items_of(stream)
        assert ids_of(items) == after(11, 199)
        assert items[-1].finish_reason is FinishReason.LENGTH


@every_carry
@pytest.mark.parametrize(("max_tokens", "reason"), [(5, "stop"), (4, "length")])
async def test_case_34_eos_at_the_limit(
    max_tokens: int, reason: str, carry: dict[str, Any]
) -> None:
    """EOS as 5th id: max_tokens=5 gives "stop", 4 gives "length"; streamed or not."""
    async with (
        sim_engine(Script(b"abcd"), **carry) as engine,
        no_leaks(engine),
    ):
        for _ in range(3):
            items = await items_of(engine.generate("?", max_tokens=max_tokens))
            answer = await engine.generate("?", max_tokens=max_tokens)
            assert items[-1].finish_reason == answer.finish_reason == reason
            assert "".join(map(str, items)) == answer.text == "abcd"
            assert len(items) == len(answer.token_ids) == max_tokens


# ── text ────────────────────────────────────────────────────────────────────────────────


@every_carry
async def test_case_36_characters_of_several_bytes(carry: dict[str, Any]) -> None:
    """No U+FFFD in any delta; each character comes with its last byte."""
    text = "é🔥ç"
    model = Script(text.encode())
    async with sim_engine(model, **carry) as engine, no_leaks(engine):
        items = await items_of(engine.generate("?"))
        expected = ["", "é", "", "", "", "🔥", "", "ç", ""]
        assert [item.text for item in items] == expected
        cut = await items_of(engine.generate("?", max_tokens=4))
        assert "".join(map(str, cut)) == "é\ufffd"


@every_carry
async def test_case_37_prompt_ends_inside_a_character(carry: dict[str, Any]) -> None:
    """The answer completes the prompt's character; the prompt's text is not in it."""
    fire = "🔥".encode()
    async with sim_engine(Script(fire[2:] + b"!"), **carry) as engine:
        answer = await engine.generate(prompt_token_ids=[*b"Hi ", *fire[:2]])
        assert "Hi" not in answer.text
        assert answer.text.endswith("!")


STOPS: list[tuple[str, bytes, dict[str, Any], str, str]] = [
    ("30", b"ABCDEFGHIJK", {"stop": "DEFGHIJ"}, "ABC", "stop"),
    ("31a", b"plea", {"stop": "please"}, "plea", "stop"),
    ("31b", b"pleasant", {"stop": "please", "max_tokens": 4}, "plea", "length"),
    ("32", b"x\nyzw\nq", {"stop": "\n", "min_tokens": 4}, "x\nyzw", "stop"),
    ("last", b"abcdef", {"stop": "cd", "max_tokens": 4}, "ab", "stop"),
    ("kept", b"abcdef", {"stop": "cd", "include_stop": True}, "abcd", "stop"),
]


@every_carry
@pytest.mark.parametrize(
    ("script", "options", "text", "reason"),
    [pytest.param(*rest, id=name) for name, *rest in STOPS],
)
async def test_case_30_to_32_stop_strings(
    script: bytes, options: dict[str, Any], text: str, reason: str, carry: dict[str, Any]
) -> None:
    """Stop strings: nothing of the match is shown, also to a late reader, or one that awaits."""
    async with (
        sim_engine(Script(script), **carry) as engine,
        no_leaks(engine),
    ):
        prompt = engine.generate("?", **options)
        items = await items_of(prompt)
        late = engine.generate("?", **options)
        await engine.wait_idle()
        for answer in (await prompt, await late, await engine.generate("?", **options)):
            assert (answer.text, answer.finish_reason) == (text, reason)
        assert "".join(map(str, items)) == text
        assert items[-1].finish_reason == reason
        matched = {"stop": options["stop"]} if text != "plea" else {}
        assert items[-1].stop_reason == matched.get("stop")


async def test_stop_ids() -> None:
    """A stop id of the caller ends the answer, shows no text, and is named."""
    async with count_engine() as engine:
        stream = start(engine, 64, stop_token_ids=[68])
        items = await items_of(stream)
        assert ids_of(items) == [65, 66, 67, 68]
        assert "".join(map(str, items)) == "ABC"
        assert (items[-1].finish_reason, items[-1].stop_reason) == ("stop", 68)
        assert (await stream).stop_reason == 68


# ── iterating and awaiting ──────────────────────────────────────────────────────────────


async def test_await_after_iterating() -> None:
    """Awaiting after iterating, wholly or in part, or twice: the same whole answer."""
    async with sim_engine(Script(b"hello world")) as engine, no_leaks(engine):
        stream = engine.generate("?", request_id="mine")
        items = await items_of(stream)
        first, second = await stream, await stream
        assert first == second
        assert first.text == "hello world" == "".join(map(str, items))
        assert first.request_id == "mine" == stream.request_id
        part = engine.generate("?")
        await anext(part)
        assert (await part).text == "hello world"
        assert await items_of(part) == []


async def test_iterating_after_awaiting_ends_at_once() -> None:
    """What was awaited has been read."""
    async with count_engine() as engine:
        stream = start(engine)
        await stream
        assert await items_of(stream) == []
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.parametrize("how", ["anext", "await"])
async def test_second_consumer_raises(how: str) -> None:
    """A second task that consumes meanwhile: RuntimeError for it, the first gets all."""
    async with count_engine(latency=0.005) as engine, no_leaks(engine):
        for first in (items_of, None):
            stream = start(engine, 10, 10)

            async def whole(stream: TokenStream = stream) -> Any:
                return await stream

            task = asyncio.create_task(whole() if first is None else items_of(stream))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="one consumer"):
                await (anext(stream) if how == "anext" else whole())
            result = await task
            ids = result.token_ids if first is None else ids_of(result)
            assert ids == after(10, 10)


async def test_second_consumer_gets_no_token_that_is_ready() -> None:
    """A task awaits the whole answer; another that iterates takes none of its tokens."""
    async with count_engine(latency=0.002) as engine:
        stream = start(engine, 10, 30)

        async def whole() -> Any:
            return await stream

        task = asyncio.create_task(whole())
        await until(lambda: len(stream._request.output_ids) > 3)
        with pytest.raises(RuntimeError, match="one consumer"):
            await anext(stream)
        assert (await task).token_ids == after(10, 30)


async def test_a_kept_stream_lets_go_of_a_consumer_that_has_ended() -> None:
    """The task, with its result and its frames, is not kept by the stream that it read."""
    async with count_engine() as engine, no_leaks(engine):
        stream = start(engine, 10, 5)
        task = asyncio.create_task(items_of(stream))
        ended = weakref.ref(task)
        assert ids_of(await task) == after(10, 5)
        await asyncio.sleep(0)
        del task
        assert ended() is None
        assert (await stream).token_ids == after(10, 5)


async def test_waking_a_consumer_without_news_or_after_its_cancellation() -> None:
    """Woken without a token it waits on; cancelled and woken in one turn, it is cancelled."""
    async with count_engine(latency=0.005) as engine, no_leaks(engine):
        stream = start(engine, 10, 10)
        task = asyncio.create_task(items_of(stream))
        for _ in range(10):
            await asyncio.sleep(0)
            wake(stream._request)
        assert ids_of(await task) == after(10, 10)
        stream = start(engine, 10, 10)
        task = asyncio.create_task(items_of(stream))
        await asyncio.sleep(0)
        waiter = stream._request.waiter
        assert waiter is not None
        task.cancel()
        wake(stream._request)
        assert waiter.cancelled()
        await asyncio.wait([task])
        assert task.cancelled()
        assert stream._request.waiter is None
        assert (await stream).finish_reason is FinishReason.ABORT


async def test_usage_and_timing() -> None:
    """A completion says what it cost: tokens, time in the queue, to the first token, in all."""
    async with count_engine(latency=0.01, max_num_seqs=1) as engine:
        first = start(engine, 10, 5)
        answer = await engine.generate(prompt_token_ids=[1, 2, 3], max_tokens=4)
        assert (await first).token_ids == after(10, 5)
        usage, timing = answer.usage, answer.timing
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 4, 7)
        assert timing.queued_s is not None
        assert timing.ttft_s is not None
        # It waited for five steps of 10 ms; clocks of loops may be 1 ms coarse.
        assert 0.03 < timing.queued_s < timing.ttft_s < timing.total_s < 5
        unrun = start(engine)
        unrun.cancel()
        empty = await unrun
        assert (empty.token_ids, empty.text, empty.usage.completion_tokens) == ([], "", 0)
        assert empty.timing.ttft_s is None
        assert empty.finish_reason == "abort"


# ── readers and the loop ────────────────────────────────────────────────────────────────


async def test_slow_consumer_slows_nobody() -> None:
    """Nobody reads A: B runs on at full speed, in as many steps, and A is whole."""
    async with count_engine(latency=0.0005) as engine, no_leaks(engine):
        slow, fast = start(engine, 10, 200), start(engine, 1000, 200)
        assert (await anext(slow)).token_id == 11
        assert ids_of(await items_of(fast)) == after(1000, 200)
        device = engine.device
        assert isinstance(device, SimDevice)
        assert device.num_steps <= 200 + 3
        assert (await slow).token_ids == after(10, 200)


async def test_many_ready_tokens_yield_now_and_then() -> None:
    """1,000 unread tokens read in one go: others run at least every 100 tokens."""
    async with count_engine() as engine:
        stream = start(engine, 10, 1000)
        await engine.wait_idle()
        turns, reading = 0, True

        async def count_turns() -> None:
            nonlocal turns
            while reading:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count_turns())
        items = await items_of(stream)
        reading = False
        await counter
        assert ids_of(items) == after(10, 1000)
        assert turns >= 10


async def test_case_59_gc_on_every_turn() -> None:
    """50 requests while gc runs each turn; only the streams are kept: all exact."""
    caught: list[Any] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: caught.append(context))

    async def submit() -> list[TokenStream]:
        engine = await aneuron.open(Count(), device=SimDevice(), max_num_seqs=16)
        return [start(engine, 1000 * n, 10) for n in range(50)]

    async def collect_garbage() -> None:
        while True:
            gc.collect(0 if counter % 20 else 2)
            await asyncio.sleep(0)

    counter = 0
    streams = await submit()
    collector = asyncio.create_task(collect_garbage())
    try:
        for n, stream in enumerate(streams):
            counter += 1
            items = await items_of(stream)
            assert ids_of(items) == after(1000 * n, 10)
        gc.collect()
        await asyncio.sleep(0)
        await streams[0]._owner.aclose()  # type: ignore[attr-defined]
    finally:
        collector.cancel()
        loop.set_exception_handler(before)
    assert not caught


@pytest.mark.alone
async def test_case_61_heartbeat_beside_10_000_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """Latency 0, 10,000 tokens: a 10 ms heartbeat has no gap over 50 ms; all exact."""
    async with count_engine() as engine:
        gaps: list[float] = []

        async def heartbeat() -> None:
            last_s = time.monotonic()
            while True:
                await asyncio.sleep(0.01)
                now_s = time.monotonic()
                gaps.append(now_s - last_s)
                last_s = now_s

        beating = asyncio.create_task(heartbeat())
        count = 1000 if asyncio.get_running_loop().get_debug() else 10_000
        index = 0
        async for token in start(engine, 10, count):
            index += 1
            assert token.token_id == 10 + index
        beating.cancel()
        assert index == count
        # One gap may be the machine's, not ours.
        assert len(gaps) > 3
        assert sorted(gaps)[-2] < 0.05
        assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@every_carry
@pytest.mark.parametrize("pause_s", [0.0, 0.002])
async def test_case_61_cancel_at_token_500(carry: dict[str, Any], pause_s: float) -> None:
    """cancel() at token 500: the stream ends by token 510, for a slow reader too."""
    async with count_engine(**carry) as engine:
        stream = start(engine, 10, 10_000)
        items = []
        async for token in stream:
            items.append(token)
            if pause_s and token.index % 100 == 0:
                await asyncio.sleep(pause_s)
            if token.index == 500:
                stream.cancel()
        assert items[-1].finish_reason == "abort"
        assert ids_of(items) == [*after(10, 501), None]
        await engine.wait_idle()
        assert_idle(engine)


async def test_sampled_text_of_a_const_model() -> None:
    """Greedy on CONST: always the largest logit, alone or beside others."""
    model = Const([1.0, 3.0, 2.0])
    async with sim_engine(model, tokenizer=ByteTokenizer()) as engine, no_leaks(engine):
        streams = [engine.generate("?", temperature=0.0, max_tokens=4) for _ in range(3)]
        for stream in streams:
            assert (await stream).text == "\x01" * 4
