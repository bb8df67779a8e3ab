"""Drawing tokens from given logits, on every carry: cases 40, 45, 48 and 95."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aneuron import SamplingParams
from aneuron.models.simulated import LogitsModel
from aneuron.testing import Const, no_leaks, sim_engine
from tests.support import CARRIES, every_carry

if TYPE_CHECKING:
    from aneuron import Completion, Token, TokenStream
    from aneuron.plans import ModelInput

Carry = dict[str, Any]
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}


async def whole(stream: TokenStream) -> Completion:
    return await stream


async def all_of(*streams: TokenStream) -> list[Completion]:
    return await asyncio.gather(*map(whole, streams))


def ids_of(items: list[Token]) -> list[int | None]:
    return [item.token_id for item in items]


# ── greedy, and what comes close to it ──────────────────────────────────────────────────


@every_carry
async def test_case_40_greedy_is_argmax(carry: Carry) -> None:
    """Of equal logits the lowest id, in any company; the smallest temperature takes either."""
    async with sim_engine(Const([1.0, 1.0, 0.0]), **SMALL, **carry) as engine, no_leaks(engine):
        options: dict[str, Any] = {"prompt_token_ids": [5], "max_tokens": 3}
        assert (await engine.generate(**options, temperature=0)).token_ids == [0, 0, 0]
        either: set[int] = set()
        for seed in range(100):
            greedy, drawn = await all_of(
                engine.generate(**options, temperature=0, seed=seed),
                engine.generate(**options, temperature=1e-4, seed=seed),
            )
            assert greedy.token_ids == [0, 0, 0]
            either |= set(drawn.token_ids)
        assert either == {0, 1}


@every_carry
@pytest.mark.parametrize("seed", [2**63 - 2, 2**63 - 1, -(2**63), -2, 2**64 - 1])
async def test_seeds_of_choices_wrap_around(seed: int, carry: Carry) -> None:
    """Of choice i it is seed + i, modulo 2**64."""
    asked: dict[str, Any] = {"prompt_token_ids": [1], "max_tokens": 20, "temperature": 1.0}
    async with sim_engine(Const([1.0] * 9), **SMALL, **carry) as engine, no_leaks(engine):
        answer = await engine.generate(**asked, n=3, seed=seed)
        ids = [choice.token_ids for choice in answer.choices]
        assert len({tuple(one) for one in ids}) == 3
        for n, one in enumerate(ids):
            wrapped = (seed + n + 2**63) % 2**64 - 2**63
            assert (await engine.generate(**asked, seed=wrapped)).token_ids == one
            assert (await engine.generate(**asked, seed=wrapped % 2**64)).token_ids == one


@every_carry
async def test_case_45_what_the_caller_changes_later_is_not_heard(carry: Carry) -> None:
    """Lists, sets and dicts of a call are read at the call, and are not changed either."""
    given: dict[str, Any] = {
        "stop": ["zz"], "stop_token_ids": [7], "logit_bias": {3: 50.0}, "bad_words": ["a"],
        "allowed_token_ids": [3, 4],
    }  # fmt: skip
    params = SamplingParams(max_tokens=5, temperature=0, **given)
    copy = SamplingParams(max_tokens=5, temperature=0, **given)
    async with sim_engine(Const([1.0] * 9), **SMALL, **carry) as engine, no_leaks(engine):
        streams = [engine.generate(prompt_token_ids=[n], params=params) for n in range(10)]
        streams += [
            engine.generate(prompt_token_ids=[n], max_tokens=5, temperature=0, **given)
            for n in range(10)
        ]
        given["stop"][0] = "\x03"
        given["stop_token_ids"].append(3)
        given["logit_bias"][4] = 90.0
        given["bad_words"].append("\x03")
        given["allowed_token_ids"].remove(3)
        assert [answer.token_ids for answer in await all_of(*streams)] == [[3] * 5] * 20
    assert params == copy


# ── what happened before ────────────────────────────────────────────────────────────────


@every_carry
async def test_case_48_padding_with_the_id_of_a(carry: Carry) -> None:
    """Padding has id 0, and "a" is id 0: nobody pays for tokens that fill up the batch."""
    model = Const([1.0, 0.9, 0.8])
    buckets: dict[str, Any] = {"num_tokens_buckets": [64], "num_seqs_buckets": [8]}
    async with sim_engine(model, **SMALL, **buckets, **carry) as engine, no_leaks(engine):
        options: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.2}
        long, short, other = await all_of(
            engine.generate(prompt_token_ids=[0] * 30, max_tokens=4, **options),
            engine.generate(prompt_token_ids=[5, 6], max_tokens=4, **options),
            engine.generate(prompt_token_ids=[0, 6], max_tokens=1, temperature=0),
        )
        assert long.token_ids == [1, 0, 0, 0]
        assert short.token_ids == [0, 1, 0, 0]
        assert other.token_ids == [0]


@every_carry
async def test_a_cached_prompt_counts_for_repetition(carry: Carry) -> None:
    """What of it is not computed again was said all the same, to each choice."""
    prompt = [0] * 33
    for caching in (True, False):
        async with (
            sim_engine(
                Const([1.0, 0.9, 0.8]), enable_prefix_caching=caching, **SMALL, **carry
            ) as engine,
            no_leaks(engine),
        ):
            for run in range(3):
                answer = await engine.generate(
                    prompt_token_ids=[*prompt, 5 + run], max_tokens=3, temperature=0, n=1 + run,
                    repetition_penalty=1.2,
                )  # fmt: skip
                assert answer.usage.cached_tokens == (32 if caching and run else 0)
                told = [choice.token_ids for choice in answer.choices]
                assert told == [[1, 0, 0]] * (1 + run)


class Hashed(LogitsModel):
    """Logits that depend on the last id alone, and differ everywhere."""

    name = "hashed"

    def __init__(self, vocab_size: int = 24) -> None:
        super().__init__(vocab_size=vocab_size, eos_token_ids=(0,))
        chance = np.random.default_rng(5)
        self.table = chance.normal(size=(vocab_size, vocab_size)).astype(np.float32)

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        # Padding reads the spare slot, which may hold no id at all.
        rows: np.ndarray = self.table[ids[inputs.logits_indices] % len(self.table)]
        return rows


def one_or(value: Any, other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Half of the time the neutral value, so that rows with and without stand side by side."""
    return st.just(value) | other


ASKED: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "prompt_token_ids": st.lists(st.integers(1, 23), min_size=1, max_size=12),
        "seed": st.integers(0, 99),
        "max_tokens": st.integers(1, 12),
        "temperature": one_or(0, st.sampled_from([0.3, 1.0, 5.0])),
        "top_k": st.sampled_from([-1, 0, 1, 2, 5, 1000]),
        "top_p": one_or(1.0, st.floats(0.05, 1.0)),
        "min_p": one_or(0.0, st.floats(0.0, 0.9)),
        "presence_penalty": one_or(0.0, st.floats(-2, 2)),
        "frequency_penalty": one_or(0.0, st.floats(-2, 2)),
        "repetition_penalty": one_or(1.0, st.floats(0.5, 3.0)),
        "logit_bias": one_or(None, st.dictionaries(st.integers(0, 23), st.floats(-9, 9))),
        "allowed_token_ids": one_or(None, st.lists(st.integers(0, 23), min_size=1, max_size=6)),
        "bad_words": one_or([], st.lists(st.sampled_from(["\x01", "\x02\x03", "\x05\x04\x05"]))),
        "stop_token_ids": one_or([], st.lists(st.integers(0, 23), max_size=3)),
        "ignore_eos": st.booleans(),
        "min_tokens": one_or(0, st.integers(0, 12)),
        "logprobs": one_or(None, st.sampled_from([0, 2, 20])),
        "n": st.sampled_from([1, 1, 2, 3]),
    }
).map(lambda one: {**one, "min_tokens": min(one["min_tokens"], one["max_tokens"])})


def told_of(answer: Completion) -> Any:
    """All that must be as alone; values of log probabilities to within a rounding."""
    return [
        (
            choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason,
            [(round(one.logprob, 4), [at for at, _ in one.top]) for one in choice.logprobs or ()],
        )
        for choice in answer.choices
    ]  # fmt: skip


@settings(max_examples=settings().max_examples // 2)  # on each of two loops
@pytest.mark.timeout(max(120, settings().max_examples))
@pytest.mark.parametrize("carry", list(CARRIES))
@given(asked=st.lists(ASKED, min_size=2, max_size=8), max_num_seqs=st.sampled_from([3, 8]))
async def test_case_95_any_parameters_side_by_side_are_as_alone(
    carry: str, asked: list[dict[str, Any]], max_num_seqs: int
) -> None:
    """Few slots and a small pool: they are refilled all the time, and requests preempted."""
    options: dict[str, Any] = {**SMALL, "max_model_len": 64, "block_size": 4}
    async with sim_engine(
        Hashed(), **options, **CARRIES["host"], enable_prefix_caching=False
    ) as engine:
        alone = [told_of(await engine.generate(**one)) for one in asked]
    options |= {"max_num_seqs": max_num_seqs, "num_kv_blocks": 14, **CARRIES[carry]}
    async with sim_engine(Hashed(), **options) as engine, no_leaks(engine):
        together = await all_of(*(engine.generate(**one) for one in asked))
        assert [told_of(answer) for answer in together] == alone


@every_carry
async def test_case_95_preempted_with_penalties_and_a_seed(carry: Carry) -> None:
    """Counts, noise, and what may not come yet go on where they were."""
    asked: list[dict[str, Any]] = [
        {
            "prompt_token_ids": [1 + n, 2, 3], "max_tokens": 24, "seed": n, "temperature": n % 3,
            "frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.3,
            "ignore_eos": True, "min_tokens": 20, "stop_token_ids": [*range(n, 24, 2)],
        }
        for n in range(6)
    ]  # fmt: skip
    options: dict[str, Any] = {**SMALL, "block_size": 4}
    async with sim_engine(Hashed(), **options, **CARRIES["host"]) as engine:
        alone = [(await engine.generate(**one)).token_ids for one in asked]
    options |= {"num_kv_blocks": 14, "max_num_seqs": 4}
    async with sim_engine(Hashed(), **options, **carry) as engine, no_leaks(engine):
        together = await all_of(*(engine.generate(**one) for one in asked))
        assert [answer.token_ids for answer in together] == alone
        assert engine.stats().preemptions >= 1


@every_carry
async def test_one_allowed_id_at_any_temperature(carry: Carry) -> None:
    async with sim_engine(Hashed(), **SMALL, **carry) as engine, no_leaks(engine):
        kinds: list[dict[str, Any]] = [
            {}, {"top_p": 0.1}, {"top_k": 3}, {"min_p": 0.5}, {"repetition_penalty": 3.0},
            {"logit_bias": {9: -100}}, {"bad_words": ["\x09"]}, {"temperature": 1e-4},
            {"temperature": 100}, {"temperature": 0}, {"frequency_penalty": 2, "top_k": 1000},
        ]  # fmt: skip
        answers = await all_of(
            *(
                engine.generate(prompt_token_ids=[1], max_tokens=6, allowed_token_ids=[9], **kind)
                for kind in kinds
            )
        )
        assert [answer.token_ids for answer in answers] == [[9] * 6] * len(kinds)
