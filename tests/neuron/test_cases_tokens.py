"""Cases 8 to 16, 34, 88 and 89 through both played runtimes: every token, in every layout."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import FinishReason, InvalidRequest
from aneuron.testing import no_leaks
from tests.neuron.flows import WITH_BLOCKS, every_way, every_way_with_blocks, fake_engine, main_ways
from tests.support import after, items_of, start, until

if TYPE_CHECKING:
    from aneuron import Engine, TokenStream


async def answers(*streams: TokenStream) -> list[list[int]]:
    return [one.token_ids for one in await asyncio.gather(*streams)]


@main_ways
async def test_case_08_sixteen_at_once(backend: str, carry: str) -> None:
    options: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 256}
    async with fake_engine(backend, carry, **options) as (engine, _), no_leaks(engine):
        streams = [start(engine, 1000 * n, 200) for n in range(1, 17)]
        assert await answers(*streams) == [after(1000 * n, 200) for n in range(1, 17)]


@main_ways
async def test_case_09_short_requests_arrive_beside_long_ones(backend: str, carry: str) -> None:
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256}
    async with fake_engine(backend, carry, **options) as (engine, _), no_leaks(engine):
        long = [start(engine, 1000 * n, 250) for n in (1, 2)]
        short = []
        for number in range(60):
            await anext(long[0])
            short.append(start(engine, 100 + 200 * number, 1 + number % 7))
        found = await answers(*long, *short)
    assert found[:2] == [after(1000, 250), after(2000, 250)]
    assert found[2:] == [after(100 + 200 * n, 1 + n % 7) for n in range(60)]


@every_way
async def test_case_10_and_34_a_length_stop_samples_exactly_n_rows(
    backend: str, carry: str
) -> None:
    async with fake_engine(backend, carry) as (engine, fake), no_leaks(engine):
        for count in (1, 2, 3, 17):
            before = fake.core.num_launches
            answer = await start(engine, 10, count)
            assert answer.token_ids == after(10, count)
            assert answer.finish_reason is FinishReason.LENGTH
            await engine.wait_idle()
            assert fake.core.num_launches - before == count


@every_way
async def test_case_11_and_88_the_same_name_in_the_same_turn(backend: str, carry: str) -> None:
    async with fake_engine(backend, carry) as (engine, _), no_leaks(engine):
        for prompt in ([], [7, 8, 9, 10, 11, 12, 13, 14]):
            first = engine.generate(prompt_token_ids=[*prompt, 10], max_tokens=40, request_id="x")
            await anext(first)
            first.cancel()
            second = engine.generate(prompt_token_ids=[*prompt, 500], max_tokens=20, request_id="x")
            assert (await second).token_ids == after(500, 20)


@every_way
async def test_case_12_a_successor_takes_the_place_of_a_stopped_request(
    backend: str, carry: str
) -> None:
    async with fake_engine(backend, carry, max_num_seqs=1) as (engine, _), no_leaks(engine):
        for _ in range(25):
            first = start(engine, 10, 40, stop_token_ids=[15])
            second = start(engine, 500, 2)
            assert await answers(first, second) == [after(10, 5), [501, 502]]


@every_way_with_blocks
async def test_case_13_prompts_round_the_chunk_budget(backend: str, carry: str) -> None:
    options: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_model_len": 128,
        "max_num_batched_tokens": 32,
    }
    async with fake_engine(backend, carry, **options) as (engine, _), no_leaks(engine):
        decoding = [start(engine, 1000 * n, 60) for n in range(1, 5)]
        for stream in decoding:
            await anext(stream)
        sizes = (31, 32, 33, 64, 65, 100)
        prompts = [[n] * (size - 1) + [10_000 + 100 * n] for n, size in enumerate(sizes)]
        new = [engine.generate(prompt_token_ids=one, max_tokens=9) for one in prompts]
        found = await answers(*new, *decoding)
    assert found[:6] == [after(10_000 + 100 * n, 9) for n in range(6)]
    assert found[6:] == [after(1000 * n, 60) for n in range(1, 5)]


@every_way
async def test_case_14_a_name_in_use(backend: str, carry: str) -> None:
    async with fake_engine(backend, carry) as (engine, _), no_leaks(engine):
        first = start(engine, 10, 30, request_id="x")
        await anext(first)
        with pytest.raises(InvalidRequest):
            _ = start(engine, 500, 30, request_id="x")
        assert (await first).token_ids == after(10, 30)


@every_way
async def test_case_15_the_engine_comes_to_rest_and_starts_again(backend: str, carry: str) -> None:
    async with fake_engine(backend, carry) as (engine, fake), no_leaks(engine):
        for last in (10, 700):
            ended = await answers(start(engine, last, 9), start(engine, 90, stop_token_ids=[94]))
            assert ended == [after(last, 9), after(90, 4)]
            await engine.wait_idle()
            assert fake.core.in_flight == 0
            launches = fake.core.num_launches
            await asyncio.sleep(0.02)
            assert fake.core.num_launches == launches


@main_ways
async def test_case_16_twenty_loops(backend: str, carry: str) -> None:
    async def loop(engine: Engine, number: int, count: int) -> list[int | None]:
        items = await items_of(start(engine, 500 * number, count))
        assert items[-1].finish_reason is FinishReason.LENGTH
        return [one.token_id for one in items]

    counts = [1 + 10 * n for n in range(20)]
    async with fake_engine(backend, carry, max_model_len=256) as (engine, _), no_leaks(engine):
        found = await asyncio.gather(
            *(loop(engine, number, count) for number, count in enumerate(counts, 1))
        )
    assert found == [after(500 * number, count) for number, count in enumerate(counts, 1)]


@every_way
async def test_case_34_the_end_id_as_nth_token(backend: str, carry: str) -> None:
    async with fake_engine(backend, carry, "script") as (engine, _), no_leaks(engine):
        for count, reason in ((5, "stop"), (4, "length")):  # A, B, C, D and the end id
            answer = await engine.generate(
                prompt_token_ids=[70, 0], max_tokens=count, stop_token_ids=[257]
            )
            assert (answer.text, answer.finish_reason) == ("ABCD", reason)


@pytest.mark.parametrize("backend", WITH_BLOCKS)
async def test_case_89_alone_up_to_the_pool(backend: str) -> None:
    options: dict[str, Any] = {"block_size": 16, "num_kv_blocks": 8, "max_model_len": 1024}
    async with fake_engine(backend, "handoff", **options) as (engine, _), no_leaks(engine):
        answer = await engine.generate(prompt_token_ids=list(range(1000, 1100)))
        assert answer.token_ids == after(1099, 28)
        assert answer.finish_reason is FinishReason.LENGTH
        assert engine.stats().preemptions == 0


@every_way
async def test_a_choice_of_several_computes_its_prompt_itself(backend: str, carry: str) -> None:
    async with fake_engine(backend, carry) as (engine, _), no_leaks(engine):
        answer = await engine.generate(prompt_token_ids=[1, 2, 3, 4, 5, 90], n=4, max_tokens=12)
        assert [one.token_ids for one in answer.choices] == [after(90, 12)] * 4


@every_way
async def test_streams_that_are_dropped_leave_nothing(backend: str, carry: str) -> None:
    rng = random.Random(4)
    async with fake_engine(backend, carry) as (engine, fake), no_leaks(engine):
        for _ in range(30):
            stream = start(engine, 10, 50)
            for _ in range(rng.randrange(6)):
                await anext(stream)
            stream.cancel()
        assert (await start(engine, 500, 9)).token_ids == after(500, 9)
        await engine.wait_idle()
        await until(lambda: not fake.core.in_flight)
