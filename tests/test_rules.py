"""What requests do to logits: penalties, bias, bans; exact, in any company, on every carry."""

from __future__ import annotations

import asyncio
import pickle
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import InvalidRequest, SamplingParams
from aneuron.models.simulated import LogitsModel
from aneuron.testing import Const, Count, no_leaks, sim_engine
from tests.support import every_carry

if TYPE_CHECKING:
    from aneuron import Engine
    from aneuron.plans import ModelInput

Carry = dict[str, Any]
A, B, C = 97, 98, 99  # of the byte tokenizer
VOCAB = 258


class Favourites(LogitsModel):
    """a 1.0, b 0.9, c 0.8, the others -10; with `after_a`, behind an a: b 1.0, c 0.9."""

    name = "favourites"

    def __init__(self, *, after_a: bool = False) -> None:
        super().__init__(vocab_size=VOCAB)
        self.after_a = after_a

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        rows = np.full((len(inputs.logits_indices), VOCAB), -10.0, np.float32)
        rows[:, A], rows[:, B], rows[:, C] = 1.0, 0.9, 0.8
        if self.after_a:
            behind_a = ids[inputs.logits_indices] == A
            rows[behind_a, A], rows[behind_a, B], rows[behind_a, C] = -10.0, 1.0, 0.9
        return rows


async def told(engine: Engine, prompt: list[int], count: int, **params: Any) -> str:
    stream = engine.generate(prompt_token_ids=prompt, max_tokens=count, temperature=0, **params)
    return bytes((await stream).token_ids).decode()


@every_carry
async def test_case_46_frequency(carry: Carry) -> None:
    async with sim_engine(Favourites(), **carry) as engine, no_leaks(engine):
        assert await told(engine, [1, 2], 8, frequency_penalty=0.15) == "abacbacb"


@every_carry
async def test_case_47_presence_and_repetition(carry: Carry) -> None:
    """The prompt counts for repetition alone."""
    prompt = [A, 1, A, 2, A]
    async with sim_engine(Favourites(), **carry) as engine, no_leaks(engine):
        assert await told(engine, prompt, 4, presence_penalty=0.15) == "abaa"
        assert await told(engine, prompt, 3, repetition_penalty=1.2) == "baa"


@every_carry
async def test_case_48_padding_is_nobodys_token(carry: Carry) -> None:
    """Padding has id 0 here; neither it nor a neighbour's prompt counts."""
    async with sim_engine(Favourites(), **carry) as engine, no_leaks(engine):
        long = told(engine, [A] * 30, 4, repetition_penalty=1.2)
        short = told(engine, [1, 2], 1, repetition_penalty=1.2)
        assert list(await asyncio.gather(long, short)) == ["baaa", "a"]


@pytest.mark.parametrize("words", [[""], ["x" * 300], [1], "ab", [None], ["x"] * 300])
async def test_case_49_bad_bad_words(words: Any) -> None:
    async with sim_engine(Favourites()) as engine:
        with pytest.raises(InvalidRequest) as caught:
            _ = engine.generate(prompt_token_ids=[1], bad_words=words)
        assert caught.value.param == "bad_words"


@every_carry
@pytest.mark.parametrize("word", [" ", "\t", "\u0001", "\n\n"])
async def test_case_49_harmless_bad_words(word: str, carry: Carry) -> None:
    async with sim_engine(Favourites(), **carry) as engine, no_leaks(engine):
        assert await told(engine, [1], 3, bad_words=[word]) == "aaa"


@every_carry
async def test_case_50_bad_words_of_several_tokens(carry: Carry) -> None:
    async with sim_engine(Favourites(after_a=True), **carry) as engine, no_leaks(engine):
        assert await told(engine, [1], 6, bad_words=["ab"]) == "acacac"
        assert await told(engine, [1], 6, bad_words=["ba"]) == "abbbbb"
        assert await told(engine, [A], 3, bad_words=["ab"]) == "bac"


@every_carry
async def test_bias_and_allowed_ids(carry: Carry) -> None:
    async with sim_engine(Favourites(), **carry) as engine, no_leaks(engine):
        assert await told(engine, [1], 3, logit_bias={C: 0.3}) == "ccc"
        assert await told(engine, [1], 3, logit_bias={A: -100, B: -0.05}) == "bbb"
        assert await told(engine, [1], 3, allowed_token_ids=[B, C]) == "bbb"
        assert await told(engine, [1], 3, allowed_token_ids=[100]) == "ddd"
        both = await told(engine, [1], 4, allowed_token_ids=[B, C], frequency_penalty=0.15)
        assert both == "bcbc"
        # Bans that leave nothing of what is allowed are not heard.
        assert await told(engine, [1], 2, allowed_token_ids=[B], bad_words=["b"]) == "bb"


@every_carry
async def test_end_ids_are_held_back_until_min_tokens(carry: Carry) -> None:
    model = Const([0.0] * A + [0.9], eos_token_ids=(5,))
    model._fixed[5] = 1.0
    async with sim_engine(model, **carry) as engine, no_leaks(engine):
        ended = await engine.generate(prompt_token_ids=[1], temperature=0, min_tokens=4)
        assert ended.token_ids == [A, A, A, A, 5]
        also = await engine.generate(
            prompt_token_ids=[1], temperature=0, min_tokens=2, stop_token_ids=[A], max_tokens=9
        )
        assert also.token_ids == [0, 0, 5]


BAD_FIELDS: list[dict[str, Any]] = [
    {"logit_bias": {VOCAB: 5}}, {"logit_bias": {-1: 5}}, {"logit_bias": {1: 101}},
    {"logit_bias": [1]}, {"logit_bias": {"a": 1}}, {"logit_bias": {1: float("nan")}},
    {"allowed_token_ids": []}, {"allowed_token_ids": [VOCAB]}, {"allowed_token_ids": 3},
    {"presence_penalty": 2.1}, {"frequency_penalty": "1"}, {"repetition_penalty": 0},
    {"repetition_penalty": -1.0},
]  # fmt: skip


@pytest.mark.parametrize("field", BAD_FIELDS, ids=str)
async def test_case_42_bad_values_are_refused_and_others_go_on(field: dict[str, Any]) -> None:
    async with sim_engine(Favourites()) as engine, no_leaks(engine):
        others = [told(engine, [n], 20) for n in (1, 2)]
        with pytest.raises(InvalidRequest) as caught:
            _ = engine.generate(prompt_token_ids=[1], **field)
        assert caught.value.param == next(iter(field))
        last_id: dict[str, Any] = {"logit_bias": {VOCAB - 1: 50}}
        accepted = engine.generate(prompt_token_ids=[1], max_tokens=1, temperature=0, **last_id)
        assert (await accepted).token_ids == [VOCAB - 1]
        assert await asyncio.gather(*others) == ["a" * 20] * 2


EXTREMES: list[dict[str, Any]] = [
    {"min_tokens": 2, "stop_token_ids": [10**6]}, {"presence_penalty": Fraction(1, 2)},
    {"frequency_penalty": np.float64(1.1)}, {"repetition_penalty": 0.01},
    {"repetition_penalty": 100, "allowed_token_ids": [A]}, {"logit_bias": {A: -100, B: 100}},
    {"logit_bias": {}}, {"bad_words": ["\U0001f525", "\n", " ", "ab"]},
    {"bad_words": ["a"], "allowed_token_ids": [A], "repetition_penalty": 0.01},
    {"allowed_token_ids": range(VOCAB)}, {"allowed_token_ids": [np.int64(A)]},
    {"logit_bias": {np.int32(A): np.float16(1)}}, {"min_tokens": 9, "stop_token_ids": [A, B, C]},
]  # fmt: skip


@pytest.mark.parametrize("rule", EXTREMES, ids=str)
@pytest.mark.parametrize("temperature", [0, 1])
async def test_no_accepted_value_harms_the_others(rule: dict[str, Any], temperature: int) -> None:
    async with sim_engine(Favourites()) as engine, no_leaks(engine):
        mate = told(engine, [1], 20)
        params = SamplingParams(max_tokens=9, temperature=temperature, **rule)
        assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
        answer = await engine.generate(prompt_token_ids=[1], params=params)
        assert 0 < len(answer.token_ids) <= 9
        assert await mate == "a" * 20
        assert await told(engine, [1], 3) == "aaa"


def test_a_bias_is_not_the_callers_any_more() -> None:
    bias = {A: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[10**7] = 1.0
    assert params.logit_bias == ((A, 1.0),)
    assert SamplingParams.build(params, {"n": 2}).logit_bias == ((A, 1.0),)


@pytest.mark.parametrize("words", [np.array(["a"]), ["\ud800"]])
async def test_bad_words_that_are_no_words(words: Any) -> None:
    async with sim_engine(Favourites()) as engine:
        with pytest.raises(InvalidRequest) as caught:
            _ = engine.generate(prompt_token_ids=[1], bad_words=words)
        assert caught.value.param == "bad_words"


async def test_a_newline_can_be_banned() -> None:
    async with sim_engine(Const([0.0] * 10 + [1.0])) as engine, no_leaks(engine):
        assert await told(engine, [1], 2) == "\n\n"
        assert await told(engine, [1], 2, bad_words=["\n"]) == "\0\0"


RULES: list[dict[str, Any]] = [
    {"logit_bias": {1: 5.0}}, {"presence_penalty": 0.1}, {"bad_words": ["x"]},
    {"allowed_token_ids": [3]}, {"repetition_penalty": 1.1}, {"frequency_penalty": -0.1},
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
async def test_a_model_without_logits_refuses_rules(rule: dict[str, Any]) -> None:
    """It never runs them unheard."""
    async with sim_engine(Count()) as engine, no_leaks(engine):
        with pytest.raises(InvalidRequest, match="shows no logits") as caught:
            _ = engine.generate(prompt_token_ids=[1], **rule)
        assert caught.value.param == next(iter(rule))


@every_carry
async def test_case_95_opposite_rules_follow_each_other_in_a_slot(carry: Carry) -> None:
    """Nothing of a rule stays behind, in a slot or beside it."""
    wanted: list[tuple[dict[str, Any], str]] = [
        ({"frequency_penalty": 0.15}, "abacbacb"),
        ({}, "aaaaaaaa"),
        ({"logit_bias": {C: 0.3}}, "cccccccc"),
        ({"bad_words": ["a"]}, "bbbbbbbb"),
        ({"allowed_token_ids": [C]}, "cccccccc"),
        ({"presence_penalty": 0.15}, "abaaaaaa"),
    ]
    async with sim_engine(Favourites(), max_num_seqs=3, **carry) as engine, no_leaks(engine):
        jobs = wanted * 8
        told_all = await asyncio.gather(*(told(engine, [1, 2], 8, **one) for one, _ in jobs))
        assert told_all == [text for _, text in jobs]


@every_carry
async def test_counts_are_rebuilt_when_a_request_resumes(carry: Carry) -> None:
    pool: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 9, "max_num_seqs": 4}
    async with sim_engine(Favourites(), **pool, **carry) as engine, no_leaks(engine):
        alone = await told(engine, [1, 2], 24, frequency_penalty=0.15)
        jobs = [told(engine, [1, 2], 24, frequency_penalty=0.15) for _ in range(4)]
        assert await asyncio.gather(*jobs) == [alone] * 4
        assert engine.stats().preemptions > 0


@every_carry
async def test_choices_have_counts_of_their_own(carry: Carry) -> None:
    async with sim_engine(Favourites(), **carry) as engine, no_leaks(engine):
        answer = await engine.generate(
            prompt_token_ids=[1, 2, 3], n=3, max_tokens=8, temperature=0, frequency_penalty=0.15
        )
        assert [choice.text for choice in answer.choices] == ["abacbacb"] * 3
