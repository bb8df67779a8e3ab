"""Cancellation while the engine itself waits: in a break, in closing, in tokenising."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import EngineClosed
from aneuron.runner import ModelRunner
from aneuron.testing import ByteTokenizer, assert_idle, count_engine, no_leaks
from tests.support import await_it, device_of, nothing_logged, read

if TYPE_CHECKING:
    from aneuron import Engine, TokenStream


def start(engine: Engine, last: int = 10, max_tokens: int = 1000, **options: Any) -> TokenStream:
    return engine.generate(prompt_token_ids=[last], max_tokens=max_tokens, **options)


async def test_case_91_cancel_while_a_break_awaits(caplog: pytest.LogCaptureFixture) -> None:
    """Requests join and are cancelled at every loop turn of the break: the rest is exact."""
    handoff = count_engine(latency=0.001, token_carry="handoff")
    async with nothing_logged(caplog), handoff as engine, no_leaks(engine):
        stays = start(engine, 100_000, 5000)
        await read(stays, 2)
        for turns in range(25):
            for victims in ((0,), (1,), (0, 1)):
                pair = [start(engine, 10)]
                await read(pair[0], 2)
                pair.append(start(engine, 500))
                for _ in range(turns):
                    await asyncio.sleep(0)
                for victim in victims:
                    pair[victim].cancel()
                for index, stream in enumerate(pair):
                    if index not in victims:
                        first = 13 if index == 0 else 501
                        assert await read(stream, 2) == [first, first + 1]
                        stream.cancel()
        stays.stop()
        ids = (await stays).token_ids
        assert ids == list(range(100_001, 100_001 + len(ids)))
        assert engine.stats().breaks["composition_changed"].count > 50


def runner_of(engine: Engine) -> ModelRunner:
    runner = engine._core.runner
    assert isinstance(runner, ModelRunner)
    return runner


@pytest.mark.parametrize("carry", ["handoff", "resident"])
async def test_case_91_timeout_round_a_device_future(
    carry: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A user's await of a DeviceFuture times out: the materializer still gets its value."""
    async with nothing_logged(caplog), count_engine(latency=0.03, token_carry=carry) as engine:
        stream = start(engine, max_tokens=5)
        for _ in range(3):
            pending = None
            while pending is None:
                await asyncio.sleep(0.001)
                pending = runner_of(engine).async_execution_buffer.pending
            future = pending.sampled_token_ids
            if future.done():
                continue
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await future
            assert len(await future) >= 1
        assert (await stream).token_ids == [11, 12, 13, 14, 15]


# ── the engine's own waits ──────────────────────────────────────────────────────────────


async def test_cancelled_aclose_still_closes() -> None:
    """The task that awaits the engine's aclose() is cancelled: the engine closes all the same."""
    async with count_engine(latency=0.02) as engine:
        stream = start(engine)
        await read(stream, 1)
        task = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert engine._supervisor is not None
        async with asyncio.timeout(5):
            await asyncio.wait([engine._supervisor])
        assert_idle(engine)
        answer = await stream
        assert (answer.finish_reason, answer.abort_reason) == ("abort", "shutdown")
        with pytest.raises(EngineClosed):
            _ = start(engine)


class GatedTokenizer(ByteTokenizer):
    """Encodes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def encode(self, text: str, **options: Any) -> Any:
        await self.gate.wait()
        return await super().encode(text, **options)


async def test_cancel_during_tokenising() -> None:
    """Cancelled while its prompt is being encoded: it ends at once and never runs."""
    tokenizer = GatedTokenizer()
    async with count_engine(tokenizer=tokenizer) as engine, no_leaks(engine):
        stream = engine.generate("hello", request_id="x")
        awaiting = asyncio.create_task(await_it(engine.generate("hello")))
        await asyncio.sleep(0)
        awaiting.cancel()
        stream.cancel()
        assert (await stream).finish_reason == "abort"
        await stream.aclose()
        again = engine.generate("A", request_id="x", max_tokens=2)
        tokenizer.gate.set()
        assert (await again).token_ids == [66, 67]
        assert device_of(engine).num_prefill_tokens == 1


async def test_close_during_tokenising() -> None:
    """The engine closes while a prompt is being encoded: the stream ends with "abort"."""
    async with count_engine(tokenizer=GatedTokenizer(), shutdown_s=0.1) as engine:
        stream = engine.generate("hello")
        await asyncio.sleep(0)
        await engine.aclose()
        assert (await stream).abort_reason == "shutdown"
        assert_idle(engine)
