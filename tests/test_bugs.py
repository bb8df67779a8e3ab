"""Bugs, ours and others': an executable, a loop, a tokenizer that raises."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import AneuronError, DeviceLost, InternalError, InvalidRequest
from aneuron.testing import ByteTokenizer, Count, count_engine, no_leaks, sim_engine
from tests.support import assert_serves, every_carry, exact, outcome, outcomes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aneuron import Engine, TokenStream


@pytest.fixture(autouse=True)
def nothing_unretrieved(caplog: pytest.LogCaptureFixture) -> Iterable[None]:
    """asyncio logs no lost exception, whatever happens."""
    yield
    lost = [r for r in caplog.records if r.name == "asyncio" and r.levelno >= logging.ERROR]
    assert not lost


def start(engine: Engine, last: int, max_tokens: int = 40, **options: Any) -> TokenStream:
    return engine.generate(prompt_token_ids=[last], max_tokens=max_tokens, **options)


class Bug(Exception):
    pass


class Crashing(Count):
    """Raises what no driver would, at the 5th step."""

    steps = 0

    def next_ids(self, ids: Any, inputs: Any) -> Any:
        self.steps += 1
        if self.steps == 5:
            raise Bug("unexpected")
        return super().next_ids(ids, inputs)


@every_carry
async def test_executable_with_a_bug(carry: dict[str, Any]) -> None:
    """An unclassified exception of a program: DeviceLost, with it as the cause."""
    async with sim_engine(Crashing(), **carry) as engine:
        for error in await outcomes([start(engine, 1), start(engine, 2)]):
            assert type(error) is DeviceLost
            assert isinstance(error.__cause__, Bug)


@every_carry
@pytest.mark.parametrize(
    "where", ["schedule", "update_from_output", "execute_model", "sample_tokens"]
)
async def test_a_bug_in_the_loops(
    where: str, carry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop of the engine crashes: InternalError with the cause for all; it closes."""
    async with count_engine(**carry, max_num_seqs=2) as engine:
        await assert_serves(engine)
        core = engine._core
        part = core.scheduler if where in ("schedule", "update_from_output") else core.runner

        def crash(*_: object) -> None:
            raise Bug(where)

        streams = [start(engine, 1, 1000) for _ in range(3)]
        await anext(streams[0])
        monkeypatch.setattr(part, where, crash)
        for error in await outcomes(streams):
            assert type(error) is InternalError
            assert isinstance(error.__cause__, Bug)
        with pytest.raises(InternalError):
            _ = start(engine, 1)
        async with asyncio.timeout(5):
            await engine.aclose()
        monkeypatch.undo()
        async with engine:
            await assert_serves(engine)


class BadTokenizer(ByteTokenizer):
    """Raises when told to encode "bad", or to decode id 66."""

    async def encode(self, text: str, **options: Any) -> Any:
        if text == "bad":
            raise Bug("encode")
        return await super().encode(text, **options)

    def decode_stream(self, prompt_ids: Any, *, skip_special_tokens: bool = True) -> Any:
        if 65 in prompt_ids:
            raise Bug("decode_stream")
        return BadStream()


class BadStream:
    def step(self, token_id: int) -> str:
        if token_id == 67:
            raise Bug("step")
        return chr(token_id)

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("bad", {}),
        ("bad", {"stop": "x"}),
        ("A", {}),  # when the text's decoder is made
        ("A", {"stop": "x"}),
        ("B", {}),  # at its first token
        ("B", {"stop": "x"}),  # … inside the materializer
    ],
)
async def test_tokenizer_with_a_bug(prompt: str, options: dict[str, Any]) -> None:
    """A tokenizer that raises fails the one request; those beside it are exact."""
    async with count_engine(tokenizer=BadTokenizer(), latency=0.001) as engine, no_leaks(engine):
        beside = start(engine, 1000)
        error = await outcome(engine.generate(prompt, max_tokens=5, **options))
        assert isinstance(error, Bug) or type(error) is InternalError
        assert isinstance(error, Bug) or isinstance(error.__cause__, Bug)
        assert exact(await outcome(beside), 1000)


async def test_tokenizer_with_a_bug_leaves_no_name(caplog: pytest.LogCaptureFixture) -> None:
    """Its decoder cannot be made for ids with a stop string: that name is free again."""
    async with count_engine(tokenizer=BadTokenizer()) as engine, no_leaks(engine):
        for _ in range(2):
            with pytest.raises((Bug, InternalError)):
                await start(engine, 65, stop="x", request_id="a")
        assert issubclass(InternalError, AneuronError)


async def test_a_decoder_that_cannot_be_made_is_told_at_the_call() -> None:
    """Ids and a stop string: the typed error comes from generate(), with its cause."""
    async with count_engine(tokenizer=BadTokenizer()) as engine, no_leaks(engine):
        with pytest.raises(InternalError) as caught:
            _ = engine.generate(prompt_token_ids=[65], stop="x")
        assert isinstance(caught.value.__cause__, Bug)
        assert exact(await start(engine, 1000, 5), 1000, 5)


async def test_awaiting_an_aborted_answer_that_cannot_be_decoded() -> None:
    async with count_engine(tokenizer=BadTokenizer(), latency=0.002) as engine, no_leaks(engine):
        stream = engine.generate(prompt_token_ids=[66], max_tokens=50)
        while not engine.stats().generation_tokens:
            await asyncio.sleep(0.001)
        stream.cancel()
        with pytest.raises(InternalError) as caught:
            await stream
        assert isinstance(caught.value.__cause__, Bug)


class Wild(ByteTokenizer):
    """Gives whatever ids it was told to."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.ids = ids

    async def encode(self, text: str, **options: Any) -> Any:
        return np.array(self.ids, np.int32)


@pytest.mark.parametrize("ids", [[-1], [5, 2**20], []])
async def test_a_tokenizer_that_gives_impossible_ids(ids: list[int]) -> None:
    """InvalidRequest for that request alone, whatever runs beside it."""
    async with count_engine(tokenizer=Wild(ids), latency=0.001) as engine, no_leaks(engine):
        beside = start(engine, 1000, 20)
        error = await outcome(engine.generate("x"))
        assert isinstance(error, InvalidRequest)
        assert error.param == "prompt"
        assert exact(await beside, 1000, 20)
