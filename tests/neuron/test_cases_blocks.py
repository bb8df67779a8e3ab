"""Cases 17 to 24 through both played runtimes: blocks that are short, shared and used again."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from aneuron.testing import no_leaks
from tests.neuron.flows import WIDE, every_way_with_blocks, fake_engine, fast
from tests.support import after, sum_reference
from tests.watch import watched

if TYPE_CHECKING:
    from aneuron import Completion, Engine


async def together(engine: Engine, prompts: list[list[int]], count: int) -> list[Completion]:
    streams = [engine.generate(prompt_token_ids=one, max_tokens=count) for one in prompts]
    return await asyncio.gather(*streams)


def alone(prompt: list[int], count: int) -> list[int]:
    return sum_reference(prompt, count, WIDE)


@every_way_with_blocks
async def test_case_17_every_token_once_through_preemptions(backend: str, carry: str) -> None:
    options: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 12}
    async with fake_engine(backend, carry, **options) as (engine, _), no_leaks(engine):
        prompts = [[1000 * n, 1, 2, 5000 * n] for n in range(1, 5)]
        found = await together(engine, prompts, 36)
        assert [one.token_ids for one in found] == [after(5000 * n, 36) for n in range(1, 5)]
        assert engine.stats().preemptions >= 1


@every_way_with_blocks
async def test_case_18_some_request_goes_on(backend: str, carry: str) -> None:
    options: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 11, "max_num_seqs": 6}
    async with fake_engine(backend, carry, "sum", **options) as (engine, _), no_leaks(engine):
        watch = watched(engine)
        prompts = [[n] * n for n in range(1, 7)]
        found = await together(engine, prompts, 16)
        assert [one.token_ids for one in found] == [alone(one, 16) for one in prompts]
        assert watch.preempted
        assert set(watch.preempted) == {1}  # in each pass: one more block is all that it lacks
        for at in range(len(watch.steps) - 2):
            assert any(watch.steps[at : at + 3]), f"no token in steps {at} to {at + 2}"


@every_way_with_blocks
async def test_case_19_two_prompts_that_do_not_fit_together(backend: str, carry: str) -> None:
    options: dict[str, Any] = {
        "block_size": 16,
        "num_kv_blocks": 32,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
    }
    prompts = [[3 * n + at for at in range(400)] for n in (1, 2)]
    async with fake_engine(backend, carry, "sum", **options) as (engine, fake), no_leaks(engine):
        before = fake.core.num_launches
        found = await together(engine, prompts, 8)
        assert [one.token_ids for one in found] == [alone(one, 8) for one in prompts]
        await engine.wait_idle()
        assert fake.core.num_launches - before < 60


@every_way_with_blocks
async def test_case_20_blocks_are_reused_only_after_the_surplus_step(
    backend: str, carry: str
) -> None:
    prompt_a, prompt_b = [11, 12, 13, 14], [91, 92, 93]
    expected_a, expected_b = alone(prompt_a, 5), alone(prompt_b, 6)
    rng = random.Random(20)
    options: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 3}
    times = fast(decode_s=rng.choice((0.0, 0.0005)))
    async with fake_engine(backend, carry, "sum", times=times, **options) as (engine, _):
        for _ in range(40):
            first = engine.generate(
                prompt_token_ids=prompt_a, stop_token_ids=[expected_a[-1]], max_tokens=8
            )
            second = engine.generate(prompt_token_ids=prompt_b, max_tokens=6)
            assert (await first).token_ids == expected_a
            assert (await second).token_ids == expected_b


@every_way_with_blocks
async def test_case_21_the_same_ids_after_other_ones_are_not_shared(
    backend: str, carry: str
) -> None:
    options: dict[str, Any] = {"block_size": 16, "max_model_len": 128}
    async with fake_engine(backend, carry, "sum", **options) as (engine, _), no_leaks(engine):
        same = [3] * 16
        for first in ([1] * 16, [2] * 16):
            answer = await engine.generate(prompt_token_ids=first + same, max_tokens=5)
            assert answer.token_ids == alone(first + same, 5)
            assert answer.usage.cached_tokens == 0


@every_way_with_blocks
async def test_case_22_a_prompt_that_comes_again_and_one_that_goes_on(
    backend: str, carry: str
) -> None:
    options: dict[str, Any] = {"block_size": 16, "max_model_len": 128}
    async with fake_engine(backend, carry, "sum", **options) as (engine, _), no_leaks(engine):
        prompt = list(range(32))
        cached = []
        for one in (prompt, prompt, [*prompt, *range(50, 66)]):
            answer = await engine.generate(prompt_token_ids=one, max_tokens=5)
            assert answer.token_ids == alone(one, 5)
            cached.append(answer.usage.cached_tokens)
        assert cached == [0, 16, 32]


@every_way_with_blocks
async def test_case_23_a_reset_while_another_request_runs(backend: str, carry: str) -> None:
    options: dict[str, Any] = {"block_size": 4, "max_model_len": 128}
    async with fake_engine(backend, carry, "sum", **options) as (engine, _), no_leaks(engine):
        prompt = list(range(20))
        for _ in range(2):
            answer = await engine.generate(prompt_token_ids=prompt, max_tokens=5)
        assert answer.usage.cached_tokens == 16
        other = engine.generate(prompt_token_ids=[5, 6, 7], max_tokens=60)
        await anext(other)
        engine.reset_prefix_cache()
        answer = await engine.generate(prompt_token_ids=prompt, max_tokens=5)
        assert answer.usage.cached_tokens == 0
        assert answer.token_ids == alone(prompt, 5)
        assert (await other).token_ids == alone([5, 6, 7], 60)


@every_way_with_blocks
async def test_case_24_every_length_and_a_recycled_pool(backend: str, carry: str) -> None:
    options: dict[str, Any] = {"block_size": 16, "num_kv_blocks": 16, "max_model_len": 64}
    async with fake_engine(backend, carry, "sum", **options) as (engine, _), no_leaks(engine):
        prompts = [[7 * n + at for at in range(n)] for n in range(1, 49)]
        found = await together(engine, prompts, 3)
        assert [one.token_ids for one in found] == [alone(one, 3) for one in prompts]
        first = await engine.generate(prompt_token_ids=[9] * 40, max_tokens=3)
        await together(engine, [[100 + n] * 40 for n in range(12)], 3)
        again = await engine.generate(prompt_token_ids=[9] * 40, max_tokens=3)
        assert again.usage.cached_tokens == 0
        assert first.token_ids == again.token_ids == alone([9] * 40, 3)
