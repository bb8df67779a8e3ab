"""Text and ends of streams through the engine, read at once or late, with and without a lead."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models

from aneuron import InternalError, InvalidRequest
from aneuron.models.tokenizer import HFTokenizer
from aneuron.testing import Count, Script, count_engine, no_leaks, sim_engine
from tests.support import both_schedulings, items_of, until

if TYPE_CHECKING:
    from aneuron import Token, TokenStream

WORDS = ["<unk>", "▁Hi", "▁", "▁leading", "▁x", "▁I", "▁am", "▁here"]


def text_of(items: list[Token]) -> str:
    return "".join(map(str, items))


# ── whole text ──────────────────────────────────────────────────────────────────────────


@both_schedulings
@pytest.mark.parametrize("words", [["▁", "▁leading", "▁x"], ["▁I", "▁am", "▁here"]])
async def test_case_38_metaspace(words: list[str], async_scheduling: bool) -> None:
    """Joined deltas are decode(prompt + output) less decode(prompt); words keep their spaces."""
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<unk>"))
    inner.decoder = decoders.Metaspace()
    tokenizer = HFTokenizer(inner)
    prompt, output = [WORDS.index("▁Hi")], [WORDS.index(word) for word in words]
    both, before = tokenizer.decode(prompt + output), tokenizer.decode(prompt)
    assert both.startswith(before)
    async with (
        sim_engine(
            Script(output, eos_token_ids=()),
            tokenizer=tokenizer,
            async_scheduling=async_scheduling,
        ) as engine,
        no_leaks(engine),
    ):
        options: dict[str, Any] = {"prompt_token_ids": prompt, "max_tokens": len(output)}
        items = await items_of(engine.generate(**options))
        late = engine.generate(**options)
        await engine.wait_idle()
        assert text_of(items) == both[len(before) :]
        assert text_of(await items_of(late)) == text_of(items)
        assert (await engine.generate(**options)).text == text_of(items)


@both_schedulings
@pytest.mark.parametrize("latency", [0.0, 0.002])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("end", [b"Hi.\n", b"Hi.\nmore"])
async def test_a_stop_string_before_an_end_id_keeps_the_whole_text(
    end: bytes, late: bool, latency: float, async_scheduling: bool
) -> None:
    """The surplus row's end id is not the answer's: the last token shows its text."""
    async with (
        sim_engine(Script(end), latency=latency, async_scheduling=async_scheduling) as engine,
        no_leaks(engine),
    ):
        stream = engine.generate("?", stop="\n", include_stop=True)
        if late:
            await engine.wait_idle()
        items = await items_of(stream)
        await engine.wait_idle()
        answer = await stream
        assert text_of(items) == answer.text == "Hi.\n"
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "\n")
        assert bytes(answer.token_ids) == b"Hi.\n"
        awaited = engine.generate("?", stop="\n", include_stop=True)
        if late:
            await engine.wait_idle()
        assert (await awaited).text == "Hi.\n"


@both_schedulings
@pytest.mark.parametrize("late", [True, False])
async def test_stop_just_before_an_end_id_in_flight_keeps_the_whole_text(
    late: bool, async_scheduling: bool
) -> None:
    """stop() after the last visible token; the end id arrives behind it and is dropped."""
    for awaited in (True, False):
        ends = threading.Semaphore(2)  # of programs: the third gives the end id
        latency = lambda _, ends=ends: ends.acquire() and 0.0  # noqa: E731
        options: dict[str, Any] = {"latency": latency, "async_scheduling": async_scheduling}
        async with sim_engine(Script(b"Hi"), **options) as engine, no_leaks(engine):
            stream = engine.generate("?")
            await until(lambda stream=stream: len(stream._request.output_ids) == 2)  # type: ignore[misc]
            stream.stop()
            ends.release(100)
            if late:
                await engine.wait_idle()
            text = (await stream).text if awaited else text_of(await items_of(stream))
            await engine.wait_idle()
            answer = await stream
            assert text == answer.text == "Hi"
            assert (bytes(answer.token_ids), answer.finish_reason) == (b"Hi", "stop")


# ── the yield ───────────────────────────────────────────────────────────────────────────


@both_schedulings
async def test_cancelled_at_its_yield_a_finished_stream_loses_no_token(
    async_scheduling: bool,
) -> None:
    """Many tokens are ready; a short time-out that the caller handles hits just the yield."""
    count = 300
    async with count_engine(async_scheduling=async_scheduling) as engine, no_leaks(engine):
        stream = engine.generate(prompt_token_ids=[10], max_tokens=count)
        await engine.wait_idle()
        ids: list[int | None] = []
        hits = 0
        while len(ids) < 130:
            try:
                async with asyncio.timeout(0):  # fires as soon as anything waits
                    token = await anext(stream)
            except TimeoutError:
                hits += 1
            else:
                ids.append(token.token_id)
        assert hits == 2, "after 64 and after 128 ready tokens"
        ids += [item.token_id for item in await items_of(stream)]
        assert ids == list(range(11, 11 + count))
        assert (await stream).finish_reason == "length"


async def test_cancelled_at_its_yield_a_stream_ends_its_request() -> None:
    """As at any other wait; what there is stays in the completion."""
    async with count_engine(latency=0.0005) as engine, no_leaks(engine):
        stream = engine.generate(prompt_token_ids=[10], max_tokens=5000)
        await until(lambda: len(stream._request.output_ids) > 100)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                async for _ in stream:
                    pass
        answer = await stream
        assert answer.finish_reason == "abort"
        assert answer.token_ids == list(range(11, 11 + len(answer.token_ids)))
        assert len(answer.token_ids) > 100


async def test_a_second_consumer_at_the_yield_is_refused() -> None:
    async with count_engine() as engine, no_leaks(engine):
        stream = engine.generate(prompt_token_ids=[10], max_tokens=300)
        await engine.wait_idle()
        counts = await asyncio.gather(items_of(stream), items_of(stream), return_exceptions=True)
        assert sorted(type(one).__name__ for one in counts) == ["RuntimeError", "list"]


async def test_cancelled_while_it_waits_a_stream_ends_its_request() -> None:
    """The other wait: there the request goes with the waiting task."""
    async with count_engine(latency=0.05) as engine, no_leaks(engine):
        stream = engine.generate(prompt_token_ids=[10])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await anext(stream)
        assert (await stream).finish_reason == "abort"


# ── a decoder with a bug ────────────────────────────────────────────────────────────────


class Bug(Exception):
    pass


class BadDecoder:
    """Raises at one id."""

    def step(self, token_id: int) -> str:
        if token_id == 13:
            raise Bug("step")
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


class BadTokenizer(HFTokenizer):
    """Its decoders raise when they are made after id 500, else at id 13."""

    def decode_stream(self, prompt_ids: Any, *, skip_special_tokens: bool = True) -> Any:
        if 500 in prompt_ids:
            raise Bug("decode_stream")
        return BadDecoder()

    async def encode(self, text: str, **options: Any) -> Any:
        import numpy as np

        return np.array([int(text)], np.int32)


@both_schedulings
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("options", [{}, {"stop": "x"}], ids=repr)
@pytest.mark.parametrize("prompt", ["500", "10", "12"])
async def test_a_decoder_that_raises(
    prompt: str, options: dict[str, Any], late: bool, async_scheduling: bool
) -> None:
    """Iterating and awaiting both raise InternalError with the cause; others are exact."""
    tokenizer: Any = BadTokenizer(Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")))

    async def fails(how: Any) -> None:
        with pytest.raises(InternalError) as caught:
            await how
        assert isinstance(caught.value.__cause__, Bug)

    async def whole(stream: TokenStream) -> Any:
        return await stream

    async with (
        sim_engine(
            Count(), tokenizer=tokenizer, latency=0.001, async_scheduling=async_scheduling
        ) as engine,
        no_leaks(engine),
    ):
        beside = engine.generate(prompt_token_ids=[1000], max_tokens=60)
        for first, second in ((items_of, whole), (whole, items_of), (whole, whole)):
            stream = engine.generate(prompt, max_tokens=6, **options)
            while late and not stream._request.is_released:
                await asyncio.sleep(0.001)
            await fails(first(stream))
            if second is whole:
                await fails(whole(stream))
            else:
                assert await items_of(stream) == [], "it has raised, and is over"
        assert (await beside).token_ids == list(range(1001, 1061))


@pytest.mark.parametrize("n", [1, 2])
async def test_ids_alone_where_no_text_is_wanted(n: int) -> None:
    async with sim_engine(Script(b"hello")) as engine:
        stream = engine.generate(prompt_token_ids=[1], detokenize=False, n=n)
        tokens = [token async for token in stream]
        assert {token.text for token in tokens} == {""}
        ids = [token.token_id for token in tokens]
        assert sorted(ids, key=str) == sorted([*b"hello", 257] * n, key=str)
        answer = await stream
        assert (answer.text, answer.finish_reason) == ("", "stop")
        with pytest.raises(InvalidRequest) as caught:
            _ = engine.generate(prompt_token_ids=[1], detokenize=False, stop="l")
        assert caught.value.param == "stop"
