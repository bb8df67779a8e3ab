"""The front door: opening and closing, loops, bad input, many prompts, counts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import FrozenInstanceError, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aneuron
from aneuron import (
    ConfigError,
    ContextTooLong,
    Engine,
    EngineClosed,
    InvalidRequest,
    OutOfMemory,
    SamplingParams,
)
from aneuron.testing import (
    ByteTokenizer,
    Count,
    Script,
    SimDevice,
    assert_idle,
    count_engine,
    no_leaks,
    sim_engine,
)
from tests.support import after, every_carry, start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron import TokenStream


# ── names and limits ────────────────────────────────────────────────────────────────────


async def test_case_14_name_in_use() -> None:
    """A second "x" while "x" runs: ValueError at once, the first exact, then the name is free."""
    async with count_engine(latency=0.001) as engine, no_leaks(engine):
        first = start(engine, 10, request_id="x")
        with pytest.raises(ValueError, match="'x' is in use") as caught:
            _ = start(engine, 500, request_id="x")
        assert isinstance(caught.value, InvalidRequest)
        assert caught.value.param == "request_id"
        assert caught.value.request_id == "x"
        answer = await first
        assert (answer.token_ids, answer.request_id) == (after(10, 50), "x")
        assert (await start(engine, 500, 2, request_id="x")).token_ids == [501, 502]


@every_carry
@pytest.mark.parametrize("text", [True, False])
async def test_case_25_prompt_over_the_pool(text: bool, carry: dict[str, Any]) -> None:
    """A prompt over the whole KV pool: an error that names the capacity; the next is served."""
    async with (
        count_engine(num_kv_blocks=8, max_model_len=4096, **carry) as engine,
        no_leaks(engine),
    ):
        with pytest.raises(ContextTooLong, match=r"200 tokens.*pool holds 128") as caught:
            async with asyncio.timeout(1):
                await engine.generate(
                    **({"prompt": "a" * 200} if text else {"prompt_token_ids": [1] * 200})
                )
        assert caught.value.param == ("prompt" if text else "prompt_token_ids")
        answer = await engine.generate(prompt_token_ids=[1] * 10, max_tokens=3)
        assert answer.token_ids == [2, 3, 4]


@every_carry
async def test_case_26_empty_prompt(carry: dict[str, Any]) -> None:
    """No ids, or a text that gives none: a clear error for that request alone."""
    async with (
        count_engine(latency=0.001, **carry) as engine,
        no_leaks(engine),
    ):
        running = [start(engine, 100), start(engine, 200)]
        with pytest.raises(InvalidRequest, match="empty") as caught:
            _ = engine.generate(prompt_token_ids=[])
        assert caught.value.param == "prompt_token_ids"
        empty = engine.generate("")  # needs the tokenizer: raised at the first await
        with pytest.raises(InvalidRequest, match="empty") as caught:
            await anext(empty)
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequest):
            await empty
        assert (await running[0]).token_ids == after(100, 50)
        assert (await running[1]).token_ids == after(200, 50)
        assert (await engine.generate("A", max_tokens=2)).token_ids == [66, 67]


@every_carry
@pytest.mark.parametrize("text", [True, False])
async def test_case_27_prompt_at_the_limit(text: bool, carry: dict[str, Any]) -> None:
    """Limit 64: 64 and 65 are refused; 63 gives one token, "length", both ways."""
    async with (
        count_engine(max_model_len=64, **carry) as engine,
        no_leaks(engine),
    ):

        def submit(count: int, **options: Any) -> TokenStream:
            if text:
                return engine.generate("A" * count, **options)
            return engine.generate(prompt_token_ids=[65] * count, **options)

        for count in (64, 65):
            with pytest.raises(ContextTooLong, match=f"{count} tokens.* 64 tokens"):
                await submit(count)
        for options in ({"max_tokens": 1}, {}, {"max_tokens": 10}):
            answer = await submit(63, **options)
            assert (answer.token_ids, answer.finish_reason) == ([66], "length")


@every_carry
async def test_case_89_alone_up_to_the_pool(carry: dict[str, Any]) -> None:
    """Pool 128, prompt 100, no max_tokens: 28 tokens, "length", no preemption."""
    async with (
        count_engine(num_kv_blocks=8, max_model_len=4096, **carry) as engine,
        no_leaks(engine),
    ):
        answer = await engine.generate(prompt_token_ids=[7] * 100)
        assert (answer.token_ids, answer.finish_reason) == (after(7, 28), "length")
        assert engine.stats().preemptions == 0


async def test_case_87_no_on_device_sampling() -> None:
    """Without it: async scheduling is refused by name; the baseline runs and counts 0 and 0."""
    model = Count(on_device_sampling=False, vocab_size=1000)
    with pytest.raises(ConfigError, match="async_scheduling=False") as caught:
        await aneuron.open(model)
    assert caught.value.param == "async_scheduling"
    async with sim_engine(model, async_scheduling=False) as engine, no_leaks(engine):
        answers = [await start(engine, 10, 5, temperature=0.0) for _ in range(2)]
        assert [answer.token_ids for answer in answers] == [after(10, 5)] * 2
        stats = engine.stats()
        assert (stats.async_steps, stats.sync_fallback_steps) == (0, 0)
        assert stats.steps == 10


# ── opening and closing ─────────────────────────────────────────────────────────────────


def calls(engine: Engine) -> Iterator[Any]:
    yield lambda: engine.generate("x")
    yield lambda: engine.chat([{"role": "user", "content": "x"}])
    yield lambda: engine.generate_many(["x"])
    yield lambda: engine.wait_idle().send(None)


async def test_not_open_closed_and_open_again() -> None:
    """Before open and after close: EngineClosed; open twice: RuntimeError; then open again."""
    engine = Engine("sim:count", device="sim")
    with pytest.raises(EngineClosed):
        engine.stats()
    await engine.aclose()  # never opened: no harm
    for _ in range(2):
        for call in calls(engine):
            with pytest.raises(EngineClosed, match="not open"):
                call()
        async with engine:
            with pytest.raises(RuntimeError, match="cannot be opened again"):
                await engine.open()
            stream = start(engine, 10, 3)
            assert (await stream).token_ids == [11, 12, 13]
            running = start(engine, 10, 10_000)
            await anext(running)
        assert (await running).abort_reason == "shutdown"
        assert engine.stats().running == 0
    assert isinstance(EngineClosed("x"), RuntimeError)


async def test_closed_while_it_opens() -> None:
    """aclose() while open() is loading: it returns, and the engine ends up closed."""
    engine = Engine("sim:count")
    opening = asyncio.create_task(engine.open())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await engine.aclose()
        await asyncio.wait([opening])
    if not opening.cancelled():
        opening.exception()
    with pytest.raises(EngineClosed):
        _ = engine.generate("x")
    await engine.aclose()


class BrokenDevice(SimDevice):
    """Cannot be started."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        super().start(loop)
        raise OutOfMemory("no room for a queue")


async def test_device_that_cannot_start() -> None:
    """open() raises what the device's start raised; it does not hang."""
    engine = Engine(Count(), device=BrokenDevice())
    async with asyncio.timeout(5):
        with pytest.raises(OutOfMemory, match="no room"):
            await engine.open()
        await engine.aclose()


@pytest.mark.parametrize("turns", range(6))
async def test_opening_cancelled(turns: int) -> None:
    """open() cancelled at any loop turn: nothing runs, and it can be opened afterwards."""
    engine = Engine("sim:count")
    opening = asyncio.create_task(engine.open())
    for _ in range(turns):
        await asyncio.sleep(0.0005)
    opening.cancel()
    await asyncio.wait([opening])
    if opening.cancelled():
        await engine.open()
    assert (await start(engine, 10, 3)).token_ids == [11, 12, 13]
    await engine.aclose()


async def test_two_engines_in_one_loop() -> None:
    """Two engines side by side: the same names, each exact, each closes alone."""
    async with count_engine(latency=0.001) as one, sim_engine(Script(b"hello")) as two:
        first = start(one, 10, request_id="x")
        second = two.generate("?", request_id="x")
        assert (await second).text == "hello"
        await two.aclose()
        assert (await first).token_ids == after(10, 50)


async def test_case_76_idle_costs_nothing() -> None:
    """2 s idle after a request: under 0.04 s of CPU; then the next one starts at once."""
    idle_s = 0.2 if asyncio.get_running_loop().get_debug() else 2.0
    async with count_engine() as engine:
        await start(engine)
        await engine.wait_idle()
        spent_s = 1.0
        for _ in range(3):  # a thread of an earlier test may still be freeing its memory
            before_s = time.process_time()
            await asyncio.sleep(idle_s)
            spent_s = min(spent_s, time.process_time() - before_s)
            if spent_s < 0.04:
                break
        assert spent_s < 0.04
        answer = await start(engine, 10, 2)
        assert answer.timing.queued_s is not None
        assert answer.timing.queued_s < 0.05


# ── parameters ──────────────────────────────────────────────────────────────────────────


class Recorder(Count):
    """Keeps the seed and temperature of every prefill."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def next_ids(self, ids: Any, inputs: Any) -> Any:
        if not inputs.is_decode:
            rows = slice(inputs.num_reqs)
            self.seen += zip(
                inputs.seed[rows].tolist(), inputs.temperature[rows].tolist(), strict=True
            )
        return super().next_ids(ids, inputs)


async def test_case_45_values_at_submit() -> None:
    """One params object for 10 requests: it stays as it is, and later objects change nothing."""
    params = SamplingParams(max_tokens=20, temperature=0.0, stop=("#",), stop_token_ids=(9,))
    before = replace(params)
    async with count_engine(latency=0.001) as engine, no_leaks(engine):
        streams = [engine.generate(prompt_token_ids=[100 * n], params=params) for n in range(10)]
        with pytest.raises(FrozenInstanceError):
            params.max_tokens = 1  # type: ignore[misc]
        for n, stream in enumerate(streams):
            count = 9 if n == 0 else 20
            assert (await stream).token_ids == after(100 * n, count)
        over = await engine.generate(prompt_token_ids=[50], params=params, max_tokens=2)
        assert over.token_ids == [51, 52]
    assert params == before


async def test_prompt_is_taken_at_submit() -> None:
    """The caller's list of ids, or of messages, may change right after the call."""
    async with sim_engine(Count()) as engine, no_leaks(engine):
        ids, array = [1, 2, 3], np.array([1, 2, 3], np.int32)
        messages = [{"role": "user", "content": "abc"}]
        streams = [engine.generate(prompt_token_ids=given, max_tokens=1) for given in (ids, array)]
        chat = engine.chat(messages, max_tokens=1)
        ids[-1] = array[-1] = 500
        messages[0]["content"] = "a longer text"
        messages.clear()
        assert [(await stream).token_ids for stream in streams] == [[4], [4]]
        assert (await chat).usage.prompt_tokens == len("user: abc\nassistant: ")


async def test_seeds() -> None:
    """A seed reaches the device as it is (modulo 2**64); without one, each draws its own."""
    model = Recorder()
    async with sim_engine(model) as engine, no_leaks(engine):
        for seed in (42, 0, -1, 2**64 - 1, 2**63 - 1, -(2**63)):
            await start(engine, 1, 1, seed=seed, temperature=0.5)
        assert [seed for seed, _ in model.seen] == [42, 0, -1, -1, 2**63 - 1, -(2**63)]
        model.seen.clear()
        for _ in range(3):
            await start(engine, 1, 1)
        assert len({seed for seed, _ in model.seen}) == 3


# ── chat, many, counts ──────────────────────────────────────────────────────────────────


async def test_chat_on_the_byte_tokenizer() -> None:
    """chat(): the rendered messages are the prompt, the answer is a stream like any."""
    async with sim_engine(Script("Hé!".encode())) as engine, no_leaks(engine):
        stream = engine.chat([{"role": "user", "content": "Hi"}], temperature=0.0)
        pieces = [token.text async for token in stream]
        answer = await stream
        assert "".join(pieces) == answer.text == str(answer) == "Hé!"
        assert answer.finish_reason == "stop"
        assert answer.usage.prompt_tokens == len("user: Hi\nassistant: ")


async def test_stats() -> None:
    """Counts: before, during and after a few requests."""
    async with count_engine(latency=0.001, max_num_seqs=2, num_kv_blocks=50) as engine:
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.steps, stats.free_blocks) == (0, 0, 0, 50)
        assert stats.decode_async_share == 0.0
        streams = [start(engine, 10, 20) for _ in range(4)]
        assert engine.stats().waiting == 4
        await anext(streams[0])
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.num_blocks) == (2, 2, 50)
        assert stats.in_flight_steps <= 2
        assert stats.free_blocks < 50
        for stream in streams:
            await stream
        await engine.wait_idle()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.in_flight_steps) == (0, 0, 0)
        assert (stats.prompt_tokens, stats.generation_tokens) == (4, 80)
        assert stats.async_steps + stats.sync_fallback_steps == stats.steps
        assert 0.5 < stats.decode_async_share <= 1.0
        device = engine.device
        assert isinstance(device, SimDevice)
        assert device.num_steps == stats.steps
        assert device.num_rows == 80


async def test_wait_idle() -> None:
    """wait_idle(): at once when idle, else when the last step has come back; for many waiters."""
    async with count_engine(latency=0.002, tokenizer=ByteTokenizer()) as engine:
        await engine.wait_idle()
        stream = engine.generate("A", max_tokens=5)
        waiters = [asyncio.create_task(engine.wait_idle()) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        await asyncio.gather(*waiters[1:])
        assert_idle(engine)
        assert stream._request.is_finished
