"""Memory is tight, prompts are long, and many begin alike: every answer is still as alone."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aneuron import AneuronError, Engine
from aneuron.testing import ByteTokenizer, Fault, Sum, count_engine, no_leaks, sim_engine
from tests.support import after, device_of, every_carry, outcomes, patient, sum_reference, until
from tests.watch import one_sum, together, watched

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron.plans import ModelRunnerOutput, SchedulerOutput
    from aneuron.request import Request

Carry = dict[str, Any]  # engine options


# ── preemption ──────────────────────────────────────────────────────────────────────────


@every_carry
async def test_case_17_every_token_is_delivered_once(carry: Carry) -> None:
    async with count_engine(**carry, block_size=4, num_kv_blocks=12) as engine, no_leaks(engine):
        prompts = [[1000 * n, 1, 2, 5000 * n] for n in range(1, 5)]

        async def read(prompt: list[int]) -> None:
            stream = engine.generate(prompt_token_ids=prompt, max_tokens=36)
            items = [(token.index, token.token_id) async for token in stream]
            assert items == list(enumerate(after(prompt[-1], 36)))

        await asyncio.gather(*map(read, prompts))
        assert engine.stats().preemptions >= 1


@every_carry
async def test_case_18_as_few_victims_as_needed(carry: Carry) -> None:
    """Each row needs its second block at another step, and the pool lacks the last of them."""
    async with (
        count_engine(**carry, block_size=6, num_kv_blocks=11, latency=patient()) as engine,
        no_leaks(engine),
    ):
        watch = watched(engine)
        prompts = [[n] * (n - 1) + [1000 * n] for n in range(1, 7)]
        answers = await together(engine, prompts, 12)
        assert [answer.token_ids for answer in answers] == [
            after(1000 * n, 12) for n in range(1, 7)
        ]
        assert watch.preempted
        assert set(watch.preempted) == {1}
        for at in range(len(watch.steps) - 2):
            assert any(watch.steps[at : at + 3]), f"no token in steps {at} to {at + 2}"


@every_carry
async def test_case_19_two_prompts_that_do_not_fit_together(carry: Carry) -> None:
    prompts = [[3 * n + at for at in range(400)] for n in (1, 2)]
    async with (
        sim_engine(
            Sum(), **carry, block_size=16, num_kv_blocks=32, max_num_batched_tokens=64
        ) as engine,
        no_leaks(engine),
    ):
        answers = await together(engine, prompts, 8)
        assert [one.token_ids for one in answers] == [sum_reference(one, 8) for one in prompts]
        await engine.wait_idle()
        assert device_of(engine).num_steps < 60


async def test_a_preempted_request_finds_its_blocks_again() -> None:
    """With the cache on, less is computed a second time; the answers are the same."""
    computed = {}
    prompts = [[100 * n + at for at in range(12)] for n in range(1, 5)]
    for caching in (True, False):
        async with (
            sim_engine(
                Sum(), block_size=4, num_kv_blocks=20, enable_prefix_caching=caching,
                latency=patient(),
            ) as engine,
            no_leaks(engine),
        ):  # fmt: skip
            answers = await together(engine, prompts, 20)
            assert [one.token_ids for one in answers] == [sum_reference(p, 20) for p in prompts]
            assert engine.stats().preemptions >= 1
            assert all(one.usage.cached_tokens == 0 for one in answers), "not of its own"
            await engine.wait_idle()
            computed[caching] = device_of(engine).num_prefill_tokens
    assert 48 <= computed[True] < computed[False]


# ── the prefix cache ────────────────────────────────────────────────────────────────────


@every_carry
async def test_case_21_the_same_ids_after_other_ones_are_not_shared(carry: Carry) -> None:
    async with sim_engine(Sum(), **carry, block_size=16) as engine, no_leaks(engine):
        shared = list(range(500, 516))
        assert await one_sum(engine, [7] * 16 + shared) == 0
        assert await one_sum(engine, [9] * 16 + shared) == 0
        assert await one_sum(engine, [5] * 16 + [6] * 16) == 0
        assert await one_sum(engine, [5] * 16 + shared + [1]) == 16, "where their first is known"


@every_carry
async def test_case_22_a_prompt_that_comes_again_and_one_that_goes_on(carry: Carry) -> None:
    async with sim_engine(Sum(), **carry, block_size=16) as engine, no_leaks(engine):
        prompt = list(range(40, 72))
        assert await one_sum(engine, prompt) == 0
        assert await one_sum(engine, prompt) in (16, 31)
        assert await one_sum(engine, prompt + list(range(900, 916))) >= 16
        stats = engine.stats()
        assert stats.prefix_cache_queries == 32 + 32 + 48
        assert stats.prefix_cache_hits in range(32, 64)


@every_carry
async def test_case_23_a_reset_while_another_request_runs(carry: Carry) -> None:
    async with sim_engine(Sum(), **carry, block_size=4) as engine, no_leaks(engine):
        prompt, other = list(range(60, 80)), list(range(5))
        await one_sum(engine, prompt)
        assert await one_sum(engine, prompt) == 16
        running = engine.generate(prompt_token_ids=other, max_tokens=60)
        before = [(await anext(running)).token_id for _ in range(5)]
        engine.reset_prefix_cache()
        assert engine.stats().cached_blocks == 0
        assert await one_sum(engine, prompt) == 0
        rest = [token.token_id async for token in running]
        assert before + rest == sum_reference(other, 60)
        await engine.wait_idle()
        assert await one_sum(engine, other) == 0
        later = other + sum_reference(other, 60)
        assert await one_sum(engine, later) == 12, "the rest was built on the old"
        assert await one_sum(engine, prompt) == 16, "what came after the reset is found"


@every_carry
async def test_case_24b_a_prompt_whose_blocks_were_recycled(carry: Carry) -> None:
    async with (
        sim_engine(Sum(), **carry, block_size=16, num_kv_blocks=8) as engine,
        no_leaks(engine),
    ):
        prompt = list(range(300, 340))
        await one_sum(engine, prompt)
        assert await one_sum(engine, prompt) == 32
        for n in range(1, 4):
            await one_sum(engine, [1000 * n + at for at in range(110)])
        assert await one_sum(engine, prompt) == 0
        assert engine.stats().num_blocks == 8


@every_carry
async def test_the_same_prompt_at_once_is_computed_twice_at_most(carry: Carry) -> None:
    async with (
        sim_engine(Sum(), **carry, block_size=16, max_num_batched_tokens=64) as engine,
        no_leaks(engine),
    ):
        prompt = list(range(200))
        answers = await together(engine, [prompt, prompt], 8)
        assert [one.token_ids for one in answers] == [sum_reference(prompt, 8)] * 2
        await engine.wait_idle()
        assert device_of(engine).num_prefill_tokens <= 400
        before = device_of(engine).num_prefill_tokens
        for _ in range(3):
            assert await one_sum(engine, prompt) == 192
        await engine.wait_idle()
        assert device_of(engine).num_prefill_tokens - before == 3 * 8


@every_carry
@pytest.mark.parametrize("count", range(1, 10))
async def test_the_next_turn_finds_the_answer_but_for_its_last_token(
    carry: Carry, count: int
) -> None:
    """That one was never computed, so a block that it fills cannot be found."""
    async with sim_engine(Sum(), **carry, block_size=4) as engine, no_leaks(engine):
        prompt = list(range(70, 77))
        for tail in ([], [1], [1, 2, 3, 4, 5]):
            await one_sum(engine, prompt, count)
            await engine.wait_idle()
            turn = prompt + sum_reference(prompt, count) + tail
            known = len(prompt) + count - 1
            assert await one_sum(engine, turn, 3) >= min(known, len(turn) - 1) // 4 * 4
            engine.reset_prefix_cache()


async def test_without_the_cache_nothing_is_found() -> None:
    async with sim_engine(Sum(), block_size=4, enable_prefix_caching=False) as engine:
        for _ in range(2):
            assert await one_sum(engine, list(range(20))) == 0
        assert engine.stats().cached_blocks == engine.stats().prefix_cache_hits == 0


@every_carry
@pytest.mark.parametrize("step", range(1, 7))
async def test_blocks_that_a_failed_step_should_have_written_are_not_found(
    carry: Carry, step: int
) -> None:
    """Nor those of the steps that were in flight behind it."""
    prompt = list(range(30, 74))
    async with (
        sim_engine(
            Sum(), **carry, block_size=4, max_num_batched_tokens=16, faults=[Fault(step, 2)],
            latency=0.0005,
        ) as engine,
        no_leaks(engine),
    ):  # fmt: skip
        (error,) = await outcomes([engine.generate(prompt_token_ids=prompt, max_tokens=20)])
        assert isinstance(error, AneuronError)
        await engine.wait_idle()
        for _ in range(2):
            assert await one_sum(engine, prompt) <= 40
        await one_sum(engine, prompt[:21])


@every_carry
@pytest.mark.parametrize("turns", [1, 3, 6, 10, 20])
async def test_aborted_in_the_middle_of_a_prompt_which_then_comes_again(
    carry: Carry, turns: int
) -> None:
    prompt = list(range(100, 180))
    async with (
        sim_engine(
            Sum(), **carry, block_size=4, max_num_batched_tokens=8, latency=patient()
        ) as engine,
        no_leaks(engine),
    ):
        stream = engine.generate(prompt_token_ids=prompt, max_tokens=9)
        await until(lambda: device_of(engine).num_steps >= turns // 3 + 1)
        for _ in range(turns):
            await asyncio.sleep(0)
        stream.cancel()
        await one_sum(engine, prompt)
        await one_sum(engine, prompt[:41] + [5] * 9)


@settings(max_examples=settings().max_examples // 2)  # on each of two loops
@pytest.mark.timeout(600)
@given(
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9), min_size=2, max_size=12),
    block_size=st.integers(1, 3),
    at_once=st.booleans(),
    num_blocks=st.integers(16, 40),
)
async def test_prompts_of_few_ids_never_get_each_others_blocks(
    prompts: list[list[int]], block_size: int, at_once: bool, num_blocks: int
) -> None:
    """SUM reads every cell back: a block of another content would change the answer."""
    async with (
        sim_engine(
            Sum(vocab_size=3), block_size=block_size, num_kv_blocks=num_blocks, max_num_seqs=3
        ) as engine,
        no_leaks(engine),
    ):
        streams = []
        for prompt in prompts:
            stream = engine.generate(prompt_token_ids=prompt, max_tokens=5)
            if not at_once:
                await stream
            streams.append(stream)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert (await stream).token_ids == sum_reference(prompt, 5, vocab_size=3)


@pytest.mark.tiny
@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_real_model_answers_alike_with_the_cache_on(family: str, tmp_path: Path) -> None:
    """One loop is enough: what is tested is the arithmetic over shared blocks."""
    asyncio.run(compare_with_the_cache_off(family, tmp_path))


async def compare_with_the_cache_off(family: str, path: Path) -> None:
    from tests.test_equality import VOCAB, run_one_by_one, run_together, tiny_model

    tiny_model(family, path)
    rng = random.Random(4)
    base = [rng.randrange(VOCAB) for _ in range(120)]
    prompts = [[*base[:cut], rng.randrange(VOCAB)] for cut in (15, 16, 17, 48, 100, 120)]
    outputs = {}
    for caching in (False, True):
        async with (
            Engine(
                str(path), dtype="float32", tokenizer=ByteTokenizer(),
                enable_prefix_caching=caching, max_num_batched_tokens=64,
            ) as engine,
            no_leaks(engine),
        ):  # fmt: skip
            outputs[caching] = await run_one_by_one(engine, prompts, 12)
            assert (engine.stats().prefix_cache_hits >= 160) is caching
            if caching:
                assert await run_together(engine, prompts, 12) == outputs[False]
    assert outputs[True] == outputs[False]


# ── long prompts ────────────────────────────────────────────────────────────────────────


@every_carry
async def test_case_13_a_first_token_comes_only_after_the_last_chunk(carry: Carry) -> None:
    async with (
        count_engine(**carry, max_num_batched_tokens=32, latency=patient()) as engine,
        no_leaks(engine),
    ):
        watch = watched(engine)
        decoding = [engine.generate(prompt_token_ids=[1000 * n], max_tokens=60) for n in (1, 2)]
        await anext(decoding[0])
        computed: dict[int, int] = {}
        apply = engine._core.scheduler.update_from_output

        def check(plan: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
            if not plan.is_decode:
                for request_id, count in zip(plan.request_ids, plan.num_scheduled, strict=True):
                    computed[request_id] = computed.get(request_id, 0) + int(count)
            updated = apply(plan, output)
            for request in updated:
                if request.prompt_len > 1 and len(request.output_ids) == 1:
                    assert computed[request.request_id] == request.prompt_len
            return updated

        engine._core.scheduler.update_from_output = check  # type: ignore[method-assign]
        lengths = (31, 32, 33, 64, 65, 100)
        prompts = [[n] * (n - 1) + [50_000 + 1000 * n] for n in lengths]
        answers = await together(engine, prompts, 9)
        assert [one.token_ids for one in answers] == [after(50_000 + 1000 * n, 9) for n in lengths]
        assert len([count for count in computed.values() if count > 1]) == len(lengths)
        for n, stream in enumerate(decoding, 1):
            assert (await stream).token_ids == after(1000 * n, 60)
        assert watch.preempted == []


@every_carry
async def test_case_74_a_stream_goes_on_while_long_prompts_arrive(carry: Carry) -> None:
    async with count_engine(**carry, max_num_batched_tokens=128) as engine, no_leaks(engine):
        watch = watched(engine)
        stream = engine.generate(prompt_token_ids=[10], max_tokens=400)
        await anext(stream)
        prompts = [[n] * 1999 + [1000 * n] for n in range(1, 11)]
        answers = await together(engine, prompts, 3)
        assert [answer.token_ids for answer in answers] == [
            after(1000 * n, 3) for n in range(1, 11)
        ]
        assert len(watch.steps) > 10 * 2000 // 128
        assert (await stream).token_ids == after(10, 400)
        assert watch.gap(1) <= 2
