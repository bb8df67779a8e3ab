"""Drafts by prompt lookup: the same ids as one token a step, in fewer steps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import ConfigError, Engine
from aneuron.models.simulated import LogitsModel
from aneuron.scheduler.speculation import look_up
from aneuron.testing import Count, Script, SimModel, no_leaks, sim_engine
from tests.support import every_carry

if TYPE_CHECKING:
    from aneuron.plans import ModelInput

NGRAM: dict[str, Any] = {"method": "ngram", "num_tokens": 4}
VOCAB = 258


class Loops(LogitsModel):
    """Says what depends on its last two ids, over few ids, so that it repeats itself; noisy."""

    name = "loops"

    def __init__(self, *, peak: float = 4.0) -> None:
        super().__init__(vocab_size=VOCAB)
        self.peak = peak

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        context, counts = self._context(inputs)
        length = counts.sum(axis=1)
        at = np.arange(len(context))
        last, before = context[at, length - 1], context[at, np.maximum(length - 2, 0)]
        rows = np.full((len(context), VOCAB), -9.0, np.float32)
        for place in range(5):
            liked = (last * 7 + before * 3 + place) % 6
            rows[at, liked] = self.peak - place
        return rows


class Repeat(SimModel):
    """Says again what stands `period` tokens before: read back through the block table."""

    name = "repeat"

    def __init__(self, period: int = 7) -> None:
        super().__init__()
        self.period = period

    def next_ids(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        context, counts = self._context(inputs)
        length = counts.sum(axis=1)
        found: np.ndarray = context[np.arange(len(context)), np.maximum(length - self.period, 0)]
        return found


async def answers(engine: Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    streams = [engine.generate(prompt_token_ids=one, seed=9, **params) for one in prompts]
    return [list((await stream).token_ids) for stream in streams]


@every_carry
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
async def test_the_ids_are_those_of_one_token_a_step(carry: Any, temperature: float) -> None:
    prompts = [[1 + at, 2, 3 + at, 4] * (1 + at % 3) for at in range(9)]
    params = {"max_tokens": 60, "temperature": temperature}
    async with sim_engine(Loops(), **carry) as engine:
        alone = await answers(engine, prompts, **params)
        plain = engine.stats().steps
    options = {**carry, "speculative": NGRAM, "max_num_seqs": 4, "block_size": 4}
    async with sim_engine(Loops(), **options) as engine, no_leaks(engine):
        assert await answers(engine, prompts, **params) == alone
        stats = engine.stats()
        assert 0 < stats.accepted_draft_tokens <= stats.draft_tokens
        if carry.get("async_scheduling", True):
            assert stats.breaks["speculation"].count > 0
        assert plain > 0


@every_carry
async def test_a_copy_takes_a_step_for_five_tokens(carry: Any) -> None:
    prompt = [11, 12, 13, 14, 15, 16, 17] * 2
    async with sim_engine(Repeat(), **carry, speculative=NGRAM) as engine, no_leaks(engine):
        told = (await answers(engine, [prompt], max_tokens=70))[0]
        assert told == (prompt * 5)[:70]
        stats = engine.stats()
        assert stats.accepted_draft_tokens == stats.draft_tokens
        assert stats.steps <= 2 + 70 // 5 + 5


@every_carry
async def test_stops_limits_and_companions(carry: Any) -> None:
    """A stop id in the middle of a draft ends it there; lengths are exact; others are as alone."""
    prompt = [11, 12, 13, 14, 15, 16, 17] * 2
    options = {**carry, "speculative": NGRAM, "block_size": 4}
    async with sim_engine(Repeat(), **options) as engine, no_leaks(engine):
        generate = engine.generate
        stopped = generate(prompt_token_ids=prompt, stop_token_ids=[13], min_tokens=4)
        limited = [generate(prompt_token_ids=prompt, max_tokens=count) for count in range(1, 14)]
        done = await stopped
        assert (done.finish_reason, done.stop_reason) == ("stop", 13)
        assert list(done.token_ids) == [*prompt[:7], 11, 12, 13]
        for count, stream in enumerate(limited, 1):
            one = await stream
            assert list(one.token_ids) == (prompt * 2)[:count]
            assert one.finish_reason == "length"


async def test_a_stop_string_in_the_middle_of_a_draft() -> None:
    script = b"abcdefg." * 6 + b"abcSTOPabcdefg."
    async with sim_engine(Script(script), speculative=NGRAM) as engine, no_leaks(engine):
        told = await engine.generate("abcdefg.abcdefg.", max_tokens=99, stop=["cST"])
        assert told.text == (b"abcdefg." * 6 + b"ab").decode()
        assert told.stop_reason == "cST"


@every_carry
async def test_rules_logprobs_and_grammars_draft_nothing(carry: Any) -> None:
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3}, {"logprobs": 2}, {"grammar": {"regex": "[ab]{30}"}},
        {"logits_processors": [lambda _, row: row]}, {"bad_words": ["a"]}, {},
    ]  # fmt: skip

    async def all_of(engine: Engine) -> list[Any]:
        streams = [
            engine.generate(prompt_token_ids=[1, 2, 3], max_tokens=30, temperature=0, **kind)
            for kind in kinds
        ]
        return [await stream for stream in streams]

    async with sim_engine(Loops(), **carry) as engine:
        alone = await all_of(engine)
    async with sim_engine(Loops(), **carry, speculative=NGRAM) as engine, no_leaks(engine):
        told = await all_of(engine)
        assert [one.token_ids for one in told] == [one.token_ids for one in alone]
        assert told[1].choices[0].logprobs == alone[1].choices[0].logprobs
        assert engine.stats().accepted_draft_tokens > 0
    async with sim_engine(Loops(), **carry, speculative=NGRAM) as engine, no_leaks(engine):
        await asyncio.gather(*(
            engine.generate(prompt_token_ids=[1, 2, 3], max_tokens=9, temperature=0, **kind)
            for kind in kinds[:5]
        ))  # fmt: skip
        assert engine.stats().draft_tokens == 0
        assert "speculation" not in engine.stats().breaks


@every_carry
async def test_rejected_tokens_are_in_no_cached_block(carry: Any) -> None:
    """What a later prompt finds is what was said, not what was drafted."""
    options = {**carry, "block_size": 4, "num_kv_blocks": 64}
    prompt = [5, 6, 7, 8] * 3
    async with sim_engine(Loops(), **options) as engine:
        alone = (await answers(engine, [prompt], max_tokens=40, temperature=1.2))[0]
        longer = (await answers(engine, [prompt + alone], max_tokens=9, temperature=0))[0]
    async with sim_engine(Loops(), speculative=NGRAM, **options) as engine, no_leaks(engine):
        assert (await answers(engine, [prompt], max_tokens=40, temperature=1.2))[0] == alone
        stats = engine.stats()
        assert stats.draft_tokens > stats.accepted_draft_tokens
        again = await engine.generate(
            prompt_token_ids=prompt + alone, max_tokens=9, temperature=0, seed=9
        )
        assert again.usage.cached_tokens > len(prompt)
        assert list(again.token_ids) == longer


@every_carry
async def test_a_tight_pool_preempts_and_all_is_exact(carry: Any) -> None:
    prompts = [[at + 1, at + 2, at + 3, at + 1] for at in range(4)]
    params = {"max_tokens": 36, "temperature": 0.9}
    async with sim_engine(Loops(), **carry) as engine:
        alone = await answers(engine, prompts, **params)
    options = {**carry, "block_size": 4, "num_kv_blocks": 12}
    async with sim_engine(Loops(), speculative=NGRAM, **options) as engine, no_leaks(engine):
        assert await answers(engine, prompts, **params) == alone
        assert engine.stats().preemptions > 0


def test_look_up_finds_the_latest_place_with_enough_behind_it() -> None:
    def find(ids: list[int], most: int = 3) -> list[int]:
        return [int(one) for one in look_up(np.array(ids, np.int32), most)]

    assert find([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1]
    assert find([1, 2, 3, 9, 9, 9, 1, 2, 3, 7, 7, 7, 1, 2, 3]) == [7, 7, 7]
    assert find([9, 2, 3, 4, 5, 6, 8, 2, 3]) == [4, 5, 6]  # two are enough
    assert find([1, 2, 3]) == find([1, 1]) == find([1]) == find([]) == []
    assert find([5, 5, 5, 5, 5, 5]) == [5, 5, 5]
    assert find([1, 2, 1, 2, 1, 2, 1], most=4) == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"method": "eagle"}, "method"), ({}, "method"), ("ngram", "mapping"),
        ({"method": "ngram", "num_tokens": 0}, "num_tokens"),
        ({"method": "ngram", "num_tokens": 99}, "num_tokens"),
        ({"method": "ngram", "model": "x"}, "model"),
    ],
)  # fmt: skip
def test_bad_settings(given: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        Engine(Count(), speculative=given)
    assert caught.value.param == "speculative"


async def test_who_cannot_verify_refuses() -> None:
    with pytest.raises(ConfigError, match="verify") as caught:
        await Engine(Count(sampled_dtype="int64"), speculative=NGRAM).open()
    assert caught.value.param == "speculative"


async def test_prompts_and_decodes_take_turns() -> None:
    """A long prompt in many chunks does not starve a stream whose tokens must be known first."""
    options: dict[str, Any] = {"speculative": NGRAM, "max_num_batched_tokens": 32}
    async with sim_engine(Loops(), timeline=True, **options) as engine, no_leaks(engine):
        stream = engine.generate(prompt_token_ids=[1, 2, 3], max_tokens=60, temperature=0)
        await anext(stream)
        long = engine.generate(prompt_token_ids=[7] * 900, max_tokens=2)
        await stream
        await long
        await engine.wait_idle()
        kinds = [record.is_decode for record in engine.timeline.steps]
    first = kinds.index(False, 1)
    assert kinds[first : first + 20] == [False, True] * 10


async def test_the_statistics_call_such_steps_decodes_that_waited() -> None:
    async with sim_engine(Loops(), speculative=NGRAM) as engine, no_leaks(engine):
        await engine.generate(prompt_token_ids=[1, 2, 3], max_tokens=40, temperature=0)
        await engine.wait_idle()
        stats = engine.stats()
        assert stats.decode_steps == stats.steps - 1
        assert stats.async_steps == 0
        assert stats.sync_fallback_steps == stats.steps
