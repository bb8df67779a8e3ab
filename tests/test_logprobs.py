"""Log probabilities: those of the plain logits, with each token, however they are read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import InvalidRequest
from aneuron.models.simulated import LogitsModel
from aneuron.testing import Count, no_leaks, sim_engine
from tests.support import every_carry

if TYPE_CHECKING:
    from aneuron import Token, TokenStream
    from aneuron.plans import ModelInput

Carry = dict[str, Any]
VOCAB = 258


class Hashed(LogitsModel):
    """Logits that depend on the last id alone, and differ everywhere."""

    name = "hashed"

    def __init__(self, **options: Any) -> None:
        super().__init__(vocab_size=VOCAB, **options)
        self.table = np.random.default_rng(5).normal(size=(VOCAB, VOCAB)).astype(np.float32)

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        # Padding reads the spare slot, which may hold no id at all.
        rows: np.ndarray = self.table[ids[inputs.logits_indices] % VOCAB]
        return rows


def reference(model: Hashed, last: int) -> np.ndarray:
    row = model.table[last].astype(np.float64)
    logprobs: np.ndarray = row - np.log(np.exp(row).sum())
    return logprobs


def assert_right(model: Hashed, prompt: list[int], tokens: list[Token], most: int) -> None:
    last = prompt[-1]
    for token in tokens:
        assert token.token_id is not None
        assert token.logprobs is not None
        expected = reference(model, last)
        assert token.logprobs.logprob == pytest.approx(expected[token.token_id], abs=1e-5)
        ids, values = zip(*token.logprobs.top, strict=True) if most else ((), ())
        likeliest = np.argsort(-expected, kind="stable")[:most]
        assert list(ids) == likeliest.tolist()
        assert list(values) == pytest.approx(expected[likeliest], abs=1e-5)
        last = token.token_id


async def read(stream: TokenStream) -> list[Token]:
    return [token async for token in stream]


@every_carry
@pytest.mark.parametrize("most", [0, 1, 3, 20])
async def test_logprobs_of_each_token(carry: Carry, most: int) -> None:
    model = Hashed()
    async with sim_engine(model, **carry) as engine, no_leaks(engine):
        plain = engine.generate(prompt_token_ids=[3, 4], max_tokens=12, temperature=0)
        stream = engine.generate(
            prompt_token_ids=[3, 4], max_tokens=12, temperature=0, logprobs=most
        )
        tokens = await read(stream)
        assert len(tokens) == 12
        assert_right(model, [3, 4], tokens, most)
        assert [token.token_id for token in tokens] == (await plain).token_ids
        answer = await stream
        assert answer.choices[0].logprobs == [token.logprobs for token in tokens]
        assert (await plain).choices[0].logprobs is None


@every_carry
async def test_case_51_a_slow_reader_gets_the_same(carry: Carry) -> None:
    async with sim_engine(Hashed(), **carry) as engine, no_leaks(engine):
        options: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "logprobs": 3}
        slow = engine.generate(prompt_token_ids=[9], **options)
        whole = await engine.generate(prompt_token_ids=[9], **options)
        await engine.wait_idle()  # all of the slow one's tokens are ready by now
        tokens = await read(slow)
        assert [token.logprobs for token in tokens] == whole.choices[0].logprobs
        assert [token.token_id for token in tokens] == whole.token_ids


@every_carry
async def test_each_row_of_a_batch_has_its_own(carry: Carry) -> None:
    """Rows that want none, few and many; cut prompts; sampled; rules; choices; a small pool."""
    model = Hashed()
    pool: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 10, "max_num_batched_tokens": 5}
    async with sim_engine(model, **pool, **carry) as engine, no_leaks(engine):

        async def one(n: int) -> None:
            prompt, most = [n] * (1 + n % 9), (None, 0, 2, 7)[n % 4]
            rules: dict[str, Any] = {"logit_bias": {n: 9.0}} if n % 3 == 0 else {}
            stream = engine.generate(
                prompt_token_ids=prompt, max_tokens=3 + n % 7, seed=n, logprobs=most,
                temperature=n % 2, n=1 + n % 2, **rules,
            )  # fmt: skip
            told: dict[int, list[Token]] = {}
            async for token in stream:
                told.setdefault(token.choice, []).append(token)
            assert len(told) == 1 + n % 2
            for tokens in told.values():
                assert len(tokens) == 3 + n % 7
                if most is None:
                    assert all(token.logprobs is None for token in tokens)
                else:
                    assert_right(model, prompt, tokens, most)

        await asyncio.gather(*map(one, range(24)))
        assert engine.stats().preemptions > 0


@every_carry
async def test_the_last_token_has_its_own_whatever_ends_it(carry: Carry) -> None:
    model = Hashed(eos_token_ids=())
    async with sim_engine(model, **carry) as engine, no_leaks(engine):
        free = await engine.generate(prompt_token_ids=[7], max_tokens=6, temperature=0)
        stop = free.token_ids[3]
        ended = await engine.generate(
            prompt_token_ids=[7], max_tokens=6, temperature=0, logprobs=1, stop_token_ids=[stop]
        )
        assert ended.choices[0].logprobs is not None
        assert len(ended.choices[0].logprobs) == len(ended.token_ids)


@pytest.mark.parametrize("value", [-1, 21, 1.5, "3", True])
async def test_bad_numbers_are_refused(value: Any) -> None:
    async with sim_engine(Hashed()) as engine:
        with pytest.raises(InvalidRequest) as caught:
            _ = engine.generate(prompt_token_ids=[1], logprobs=value)
        assert caught.value.param == "logprobs"


async def test_a_model_without_logits_refuses() -> None:
    async with sim_engine(Count()) as engine:
        with pytest.raises(InvalidRequest, match="shows no logits") as caught:
            _ = engine.generate(prompt_token_ids=[1], logprobs=1)
        assert caught.value.param == "logprobs"


@pytest.mark.parametrize("num_ranks", [2])
@every_carry
async def test_with_ranks(carry: Carry, num_ranks: int) -> None:
    model = Hashed()
    async with sim_engine(model, num_ranks=num_ranks, **carry) as engine, no_leaks(engine):
        stream = engine.generate(prompt_token_ids=[3], max_tokens=5, temperature=0, logprobs=2)
        assert_right(model, [3], await read(stream), 2)


# ── of prompts ──────────────────────────────────────────────────────────────────────────


def assert_right_of_prompt(model: Hashed, prompt: list[int], told: Any, most: int) -> None:
    assert len(told) == len(prompt)
    assert told[0] is None
    for before, token, one in zip(prompt, prompt[1:], told[1:], strict=False):
        expected = reference(model, before)
        assert one.logprob == pytest.approx(expected[token], abs=1e-5)
        likeliest = np.argsort(-expected, kind="stable")[:most]
        assert [token_id for token_id, _ in one.top] == likeliest.tolist()
        assert [value for _, value in one.top] == pytest.approx(expected[likeliest], abs=1e-5)


@every_carry
@pytest.mark.parametrize("budget", [3, 64])
async def test_logprobs_of_prompts(carry: Carry, budget: int) -> None:
    """Cut or whole, beside others, cached or not; the same again after a preemption."""
    model = Hashed()
    pool: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 12, "max_num_batched_tokens": budget}
    async with sim_engine(model, **pool, **carry) as engine, no_leaks(engine):

        async def one(n: int) -> None:
            prompt = [5, 6, 7, 8, *[n % 3] * (n % 6), 9][: 1 + n % 11]
            most = (0, 2, 5, None)[n % 4]
            answer = await engine.generate(
                prompt_token_ids=prompt, max_tokens=2 + n % 9, temperature=0, n=1 + n % 2,
                prompt_logprobs=most, logprobs=(None, 1)[n % 2],
            )  # fmt: skip
            if most is None:
                assert answer.prompt_logprobs is None
            else:
                assert answer.usage.cached_tokens == 0
                assert_right_of_prompt(model, prompt, answer.prompt_logprobs, most)

        await asyncio.gather(*map(one, range(24)))


async def test_many_prompt_tokens_are_worked_through_in_slices() -> None:
    model = Hashed()
    prompt = [(7 * n) % VOCAB for n in range(300)]
    async with sim_engine(model, max_num_batched_tokens=256) as engine, no_leaks(engine):
        answer = await engine.generate(prompt_token_ids=prompt, max_tokens=1, prompt_logprobs=1)
        assert_right_of_prompt(model, prompt, answer.prompt_logprobs, 1)
