"""Tokens under one-step-ahead scheduling, on COUNT and SUM, where each wrong one shows."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import FinishReason
from aneuron.testing import (
    Count,
    Latency,
    Script,
    SimDevice,
    Sum,
    assert_idle,
    count_engine,
    no_leaks,
    sim_engine,
    wait_all_idle,
)
from tests.support import after, every_carry, sum_reference

if TYPE_CHECKING:
    from aneuron import TokenStream

Carry = dict[str, Any]  # engine options


@every_carry
async def test_case_08_sixteen_concurrent_requests_are_exact(carry: Carry) -> None:
    async with count_engine(**carry) as engine, no_leaks(engine):
        answers = await asyncio.gather(
            *(engine.generate(prompt_token_ids=[7, 1000 * n], max_tokens=200) for n in range(1, 17))
        )
        assert [answer.token_ids for answer in answers] == [
            after(1000 * n, 200) for n in range(1, 17)
        ]


@every_carry
async def test_case_09_short_requests_join_two_long_ones_each_step(carry: Carry) -> None:
    async with (
        count_engine(**carry, max_num_seqs=4) as engine,
        no_leaks(engine),
    ):
        long = [
            engine.generate(prompt_token_ids=[start], max_tokens=500) for start in (10_000, 20_000)
        ]
        short: list[TokenStream] = []
        async for token in long[0]:
            if len(short) < 60:
                number = len(short)
                short.append(
                    engine.generate(
                        prompt_token_ids=[1] * (number % 20) + [30_000 + 100 * number],
                        max_tokens=1 + number % 7,
                    )
                )
            assert token.token_id == 10_001 + token.index
        assert (await long[1]).token_ids == after(20_000, 500)
        for number, stream in enumerate(short):
            assert (await stream).token_ids == after(30_000 + 100 * number, 1 + number % 7)


@every_carry
@pytest.mark.parametrize("num", [1, 2, 3, 17])
async def test_case_10_length_stop_samples_exactly_n_rows(num: int, carry: Carry) -> None:
    async with (
        count_engine(**carry, latency=0.001) as engine,
        no_leaks(engine),
    ):
        answer = await engine.generate(prompt_token_ids=[4, 5], max_tokens=num)
        await engine.wait_idle()
        assert answer.token_ids == after(5, num)
        assert answer.finish_reason is FinishReason.LENGTH
        assert isinstance(engine.device, SimDevice)
        assert engine.device.num_rows == num


@every_carry
@pytest.mark.parametrize("latency", [0.0, 0.0005])
async def test_case_12_a_successor_takes_the_place_of_a_stopped_request(
    carry: Carry, latency: float
) -> None:
    model = Count(eos_token_ids=(257,))
    async with (
        sim_engine(model, latency=latency, **carry, max_num_seqs=1) as engine,
        no_leaks(engine),
    ):
        for _ in range(100):
            first = engine.generate(prompt_token_ids=[251])
            second = engine.generate(prompt_token_ids=[500], max_tokens=3)
            items = [token.token_id async for token in first]
            assert items == [252, 253, 254, 255, 256, 257]
            assert (await second).token_ids == after(500, 3)
            assert (await first).token_ids == after(251, 6), "its surplus row came meanwhile"


async def test_case_12_a_stop_costs_one_surplus_row_and_no_more() -> None:
    async with sim_engine(Count(eos_token_ids=(257,)), latency=0.001) as engine:
        answer = await engine.generate(prompt_token_ids=[251])
        await engine.wait_idle()
        assert answer.finish_reason is FinishReason.STOP
        assert isinstance(engine.device, SimDevice)
        assert engine.device.num_rows in (6, 7)  # 6 only if the host was late


@every_carry
async def test_case_13_prompts_around_the_chunk_budget(carry: Carry) -> None:
    async with (
        count_engine(**carry, max_num_batched_tokens=32) as engine,
        no_leaks(engine),
    ):
        decoding = [
            engine.generate(prompt_token_ids=[1000 * n], max_tokens=100) for n in range(1, 5)
        ]
        await anext(decoding[0])
        lengths = (31, 32, 33, 64, 65, 100)
        long = [
            engine.generate(prompt_token_ids=[3] * (n - 1) + [50_000 + 1000 * n], max_tokens=9)
            for n in lengths
        ]
        for length, stream in zip(lengths, long, strict=True):
            assert (await stream).token_ids == after(50_000 + 1000 * length, 9)
        for number, stream in enumerate(decoding[1:], 2):
            assert (await stream).token_ids == after(1000 * number, 100)


async def test_case_15_the_engine_comes_to_rest_and_starts_again() -> None:
    step_s = 0.02
    async with sim_engine(Count(eos_token_ids=(257,)), latency=step_s) as engine:
        loop = asyncio.get_running_loop()
        started = loop.time()
        fresh = engine.generate(prompt_token_ids=[50_000], max_tokens=4)
        await anext(fresh)
        first_s = loop.time() - started
        await asyncio.gather(engine.generate(prompt_token_ids=[254]), fresh)
        async with asyncio.timeout(0.1):
            await engine.wait_idle()
        assert_idle(engine)
        steps = engine.stats().steps
        await asyncio.sleep(5 * step_s)
        assert engine.stats().steps == steps, "an idle engine launches nothing"
        started = loop.time()
        again = engine.generate(prompt_token_ids=[70_000], max_tokens=4)
        assert (await anext(again)).token_id == 70_001
        assert loop.time() - started < first_s + 2 * step_s
        assert (await again).token_ids == after(70_000, 4)


@every_carry
async def test_case_20_blocks_of_a_stopped_request_are_reused_only_after_its_last_step(
    carry: Carry,
) -> None:
    rng = random.Random(20)
    prompt_a, prompt_b = [11, 12, 13, 14], [91, 92, 93]
    expected_a = sum_reference(prompt_a, 5)
    expected_b = sum_reference(prompt_b, 6)
    async with (
        sim_engine(
            Sum(),
            latency=lambda _: rng.choice((0.0, 0.0, 0.0005)),
            **carry,
            block_size=4,
            num_kv_blocks=3,
        ) as engine,
        no_leaks(engine),
    ):
        for _ in range(200):
            first = engine.generate(
                prompt_token_ids=prompt_a, stop_token_ids=[expected_a[-1]], max_tokens=8
            )
            second = engine.generate(prompt_token_ids=prompt_b, max_tokens=6)
            assert (await first).token_ids == expected_a
            assert (await second).token_ids == expected_b


@every_carry
async def test_case_24a_sum_at_every_prompt_length_round_the_block_borders(
    carry: Carry,
) -> None:
    async with (
        sim_engine(Sum(), **carry, block_size=16) as engine,
        no_leaks(engine),
    ):
        prompts = [[37 * n + at for at in range(n)] for n in range(1, 49)]
        answers = await asyncio.gather(
            *(engine.generate(prompt_token_ids=prompt, max_tokens=20) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == sum_reference(prompt, 20)


@every_carry
async def test_case_34_end_id_as_the_last_allowed_token(carry: Carry) -> None:
    async with sim_engine(Script([65, 66, 67, 68]), **carry) as engine:
        whole = await engine.generate("x", max_tokens=5)
        assert (whole.text, whole.finish_reason) == ("ABCD", FinishReason.STOP)
        cut = await engine.generate("x", max_tokens=4)
        assert (cut.text, cut.finish_reason) == ("ABCD", FinishReason.LENGTH)
        streamed = [token async for token in engine.generate("x", max_tokens=5)]
        assert streamed[-1].finish_reason is FinishReason.STOP


@every_carry
async def test_case_82_poisson_arrivals_with_idle_spells(carry: Carry) -> None:
    rng = random.Random(82)
    step_s = 0.0005
    async with (
        count_engine(**carry, latency=step_s, max_num_seqs=8) as engine,
        no_leaks(engine),
    ):
        streams = []
        for number in range(100):
            length = rng.randint(1, 12)
            streams.append(
                (engine.generate(prompt_token_ids=[1000 * number], max_tokens=length), length)
            )
            await asyncio.sleep(rng.expovariate(1 / (3 * step_s)))
            if number % 25 == 24:
                await wait_all_idle(engine)
                assert_idle(engine)
        for number, (stream, length) in enumerate(streams):
            assert (await stream).token_ids == after(1000 * number, length)


@every_carry
async def test_case_89_unset_max_tokens_ends_at_what_the_pool_holds(carry: Carry) -> None:
    async with (
        count_engine(**carry, num_kv_blocks=8, block_size=16, max_model_len=4096) as engine,
        no_leaks(engine),
    ):
        answer = await engine.generate(prompt_token_ids=list(range(1000, 1100)))
        assert answer.token_ids == after(1099, 28)
        assert answer.finish_reason is FinishReason.LENGTH
        assert engine.stats().preemptions == 0


@every_carry
async def test_case_17_requests_are_preempted_and_resume_exact(carry: Carry) -> None:
    async with (
        count_engine(**carry, block_size=4, num_kv_blocks=12) as engine,
        no_leaks(engine),
    ):
        prompts = [[1000 * n, 1, 2, 5000 * n] for n in range(1, 5)]
        answers = await asyncio.gather(
            *(engine.generate(prompt_token_ids=prompt, max_tokens=36) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == after(prompt[-1], 36)
        assert engine.stats().preemptions >= 1


@every_carry
async def test_preempted_sum_rebuilds_its_cache(carry: Carry) -> None:
    async with (
        sim_engine(
            Sum(),
            **carry,
            block_size=4,
            num_kv_blocks=14,
            latency=Latency(decode_s=0.0002),
        ) as engine,
        no_leaks(engine),
    ):
        prompts = [[17 * n + at for at in range(5 + n)] for n in range(6)]
        answers = await asyncio.gather(
            *(engine.generate(prompt_token_ids=prompt, max_tokens=30) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == sum_reference(prompt, 30)
        assert engine.stats().preemptions >= 1


async def test_decode_goes_on_between_prefills() -> None:
    async with count_engine(max_num_batched_tokens=64) as engine:
        stream = engine.generate(prompt_token_ids=[10], max_tokens=200)
        await anext(stream)
        before = engine.stats()
        others = [engine.generate(prompt_token_ids=[n] * 640, max_tokens=1) for n in range(5)]
        await asyncio.gather(*others)
        now = engine.stats()
        prefills = (now.steps - now.decode_steps) - (before.steps - before.decode_steps)
        assert prefills >= 50
        assert now.decode_steps - before.decode_steps >= prefills - 2


async def test_several_short_prompts_share_one_prefill() -> None:
    async with count_engine() as engine:
        streams = [engine.generate(prompt_token_ids=[n] * 20, max_tokens=1) for n in range(10)]
        await asyncio.gather(*streams)
        assert engine.stats().steps <= 2


@every_carry
async def test_case_93_buffers_are_not_written_while_a_launch_owns_them(
    carry: Carry,
) -> None:
    async with (
        sim_engine(Sum(), **carry, latency=0.001, block_size=4) as engine,
        no_leaks(engine),
    ):
        prompts = [[31 * n + at for at in range(3 * n)] for n in range(1, 6)]
        answers = await asyncio.gather(
            *(
                engine.generate(prompt_token_ids=prompt, max_tokens=8 * number)
                for number, prompt in enumerate(prompts, 1)
            )
        )
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
            assert answer.token_ids == sum_reference(prompt, 8 * number)
