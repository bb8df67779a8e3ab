"""Choices whose answers differ: each writes, reads and gives back blocks of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.models.simulated import Sum
from aneuron.testing import no_leaks, sim_engine
from tests.support import every_carry

if TYPE_CHECKING:
    import numpy as np

    from aneuron.plans import ModelInput

VOCAB = 5003
SEED = 11


class SeededSum(Sum):
    """SUM, and each request's seed on top: choices have others, so their answers differ."""

    def next_ids(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return (sum + seed) modulo the vocabulary."""
        following: np.ndarray = (super().next_ids(ids, inputs) + inputs.seed) % VOCAB
        return following


def reference(prompt: list[int], count: int, seed: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append((sum((i + 1) * one for i, one in enumerate(ids)) % VOCAB + seed) % VOCAB)
    return ids[len(prompt) :]


async def assert_choices(engine: Any, prompt: list[int], n: int, count: int) -> Any:
    stream = engine.generate(prompt_token_ids=prompt, n=n, max_tokens=count, seed=SEED)
    answer = await stream
    told = [choice.token_ids for choice in answer.choices]
    assert told == [reference(prompt, count, SEED + choice) for choice in range(n)]
    return answer


@every_carry
@pytest.mark.parametrize("length", [1, 4, 7, 8, 13])
@pytest.mark.parametrize("budget", [3, 64])
async def test_choices_that_differ_write_blocks_of_their_own(
    carry: dict[str, Any], length: int, budget: int
) -> None:
    model = SeededSum(vocab_size=VOCAB)
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": budget, **carry}
    async with sim_engine(model, **options) as engine, no_leaks(engine):
        await assert_choices(engine, list(range(20, 20 + length)), 3, 12)


@every_carry
async def test_choices_that_differ_are_preempted_one_by_one(carry: dict[str, Any]) -> None:
    """Five choices of 8 blocks in the end, in a pool of 14: each is exact all the same."""
    options: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 14, **carry}
    async with sim_engine(SeededSum(vocab_size=VOCAB), **options) as engine, no_leaks(engine):
        await assert_choices(engine, list(range(30, 39)), 5, 23)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.used_blocks == 0


@every_carry
async def test_the_prompt_of_choices_is_found_by_later_ones(carry: dict[str, Any]) -> None:
    options: dict[str, Any] = {"block_size": 4, **carry}
    prompt = list(range(50, 63))
    async with sim_engine(SeededSum(vocab_size=VOCAB), **options) as engine, no_leaks(engine):
        assert (await assert_choices(engine, prompt, 2, 9)).usage.cached_tokens == 0
        assert (await assert_choices(engine, prompt, 4, 9)).usage.cached_tokens == 12
        # The second choice's own answer, as the next turn of a conversation.
        turn = [*prompt, *reference(prompt, 9, SEED + 1), 7, 7, 7]
        assert (await assert_choices(engine, turn, 1, 5)).usage.cached_tokens == 20


@every_carry
@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_every_rank_copies_blocks(carry: dict[str, Any], num_ranks: int) -> None:
    options: dict[str, Any] = {"block_size": 4, "num_ranks": num_ranks, **carry}
    async with sim_engine(SeededSum(vocab_size=VOCAB), **options) as engine, no_leaks(engine):
        prompts = [list(range(60 + n, 66 + n)) for n in range(4)]
        await asyncio.gather(*(assert_choices(engine, one, 2, 10) for one in prompts))
