"""`scheduling_policy="priority"`: who comes first, and who makes way for whom."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import InvalidRequest
from aneuron.request import RequestState
from aneuron.testing import Sum, count_engine, no_leaks, run_virtual, sim_engine
from tests.support import (
    after,
    assert_serves,
    device_of,
    every_carry,
    patient,
    start,
    sum_reference,
    until,
)
from tests.watch import watched

if TYPE_CHECKING:
    from aneuron import TokenStream

Carry = dict[str, Any]  # engine options


@pytest.mark.parametrize("priority", [1, -1])
async def test_first_come_first_served_refuses_a_priority(priority: int) -> None:
    """It would take no notice of it."""
    async with count_engine() as engine, no_leaks(engine):
        with pytest.raises(InvalidRequest, match="scheduling_policy='priority'") as caught:
            _ = start(engine, priority=priority)
        assert caught.value.param == "priority"
        assert (await start(engine, 10, 2, priority=0)).token_ids == after(10, 2)


@pytest.mark.parametrize("priority", [1.0, "1", True, None, 2**31, -(2**31) - 1])
async def test_bad_priorities_are_refused(priority: Any) -> None:
    async with count_engine(scheduling_policy="priority") as engine, no_leaks(engine):
        with pytest.raises(InvalidRequest) as caught:
            _ = start(engine, priority=priority)
        assert caught.value.param == "priority"
        await assert_serves(engine)


@every_carry
@pytest.mark.parametrize("num_blocks", [12, 14, 16, 17, 20])
async def test_case_73_high_priority_comes_first(carry: Carry, num_blocks: int) -> None:
    """Each wants 8 blocks in the end: room for one to two of the high ones, and a bit.

    A low one resumes by a step behind the one that gives a high one its last token.
    """
    async with (
        count_engine(
            **carry, block_size=4, num_kv_blocks=num_blocks, scheduling_policy="priority",
            latency=patient(),
        ) as engine,
        no_leaks(engine),
    ):  # fmt: skip
        watch = watched(engine)

        def submit(n: int, priority: int) -> TokenStream:
            prompt = [1000 * n, 1, 2, 3, 4, 5, 6, 5000 * n]
            return engine.generate(prompt_token_ids=prompt, max_tokens=24, priority=priority)

        low = [submit(n, 1) for n in range(1, 5)]  # internal ids 1 to 4
        await asyncio.gather(*map(anext, low))
        high = [submit(n, 0) for n in (5, 6)]
        arrived = watch.num_planned
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*high, *low)
        for n, answer in zip((5, 6, 1, 2, 3, 4), answers, strict=True):
            assert answer.token_ids == after(5000 * n, 24)
        assert engine.stats().preemptions >= 2
        resumed = [at for request_id, at in watch.admitted if request_id <= 4 and at > arrived]
        assert resumed
        assert min(resumed) > max(watch.ended[5], watch.ended[6])


@every_carry
async def test_the_only_one_that_runs_makes_way_and_the_next_step_is_planned(
    carry: Carry,
) -> None:
    """Also where no step is in flight then, which would wake the step loop."""
    async with (
        count_engine(
            **carry, max_num_seqs=1, scheduling_policy="priority", latency=patient()
        ) as engine,
        no_leaks(engine),
    ):
        low = engine.generate(prompt_token_ids=[1000], max_tokens=30, priority=1)
        await anext(low)
        async with asyncio.timeout(5):
            for n in (5, 6):
                high = engine.generate(prompt_token_ids=[1000 * n], max_tokens=3)
                assert (await high).token_ids == after(1000 * n, 3)
            assert (await low).token_ids == after(1000, 30)
        assert engine.stats().preemptions >= 1


@every_carry
async def test_sleeping_choices_make_way_together(carry: Carry) -> None:
    """Three choices wait for a long prompt; they are one victim, not three."""
    prompt, other = list(range(60)), list(range(200, 212))
    async with (
        sim_engine(
            Sum(), **carry, block_size=4, max_num_seqs=3, max_num_batched_tokens=8,
            scheduling_policy="priority", latency=patient(),
        ) as engine,
        no_leaks(engine),
    ):  # fmt: skip
        low = engine.generate(prompt_token_ids=prompt, max_tokens=6, n=3, priority=1)
        await until(lambda: device_of(engine).num_steps >= 2)
        high = engine.generate(prompt_token_ids=other, max_tokens=6, n=3)
        async with asyncio.timeout(10):
            for stream, ids in ((high, other), (low, prompt)):
                expected = sum_reference(ids, 6)
                assert [one.token_ids for one in (await stream).choices] == [expected] * 3


@every_carry
@pytest.mark.parametrize(("priority", "preemptions"), [(0, 1), (1, 0), (2, 0)])
async def test_seats_go_to_strictly_higher_priorities(
    carry: Carry, priority: int, preemptions: int
) -> None:
    async with (
        count_engine(
            **carry, max_num_seqs=2, scheduling_policy="priority", latency=patient()
        ) as engine,
        no_leaks(engine),
    ):
        watch = watched(engine)
        running = [
            engine.generate(prompt_token_ids=[1000 * n], max_tokens=30, priority=1) for n in (1, 2)
        ]
        await asyncio.gather(*map(anext, running))
        comes = engine.generate(prompt_token_ids=[9000], max_tokens=5, priority=priority)
        async with asyncio.timeout(10):
            assert (await comes).token_ids == after(9000, 5)
            for n, stream in enumerate(running, 1):
                assert (await stream).token_ids == after(1000 * n, 30)
        assert engine.stats().preemptions == preemptions
        assert (watch.ended[3] < watch.ended[1]) is (preemptions > 0)
        if preemptions:
            assert watch.ended[1] < watch.ended[2], "the latest makes way"


@every_carry
@pytest.mark.parametrize(("priority", "preemptions"), [(0, 1), (1, 0)])
async def test_blocks_go_to_strictly_higher_priorities(
    carry: Carry, priority: int, preemptions: int
) -> None:
    async with (
        sim_engine(
            Sum(), **carry, block_size=4, num_kv_blocks=15, scheduling_policy="priority",
            latency=patient(),
        ) as engine,
        no_leaks(engine),
    ):  # fmt: skip
        prompts = [[100 * n + at for at in range(18)] for n in (1, 2)]
        running = [
            engine.generate(prompt_token_ids=prompt, max_tokens=7, priority=1) for prompt in prompts
        ]
        await asyncio.gather(*map(anext, running))
        prompt = list(range(20))
        comes = engine.generate(prompt_token_ids=prompt, max_tokens=4, priority=priority)
        async with asyncio.timeout(10):
            assert (await comes).token_ids == sum_reference(prompt, 4)
            for prompt, stream in zip(prompts, running, strict=True):
                assert (await stream).token_ids == sum_reference(prompt, 7)
        assert engine.stats().preemptions == preemptions


@every_carry
async def test_a_half_computed_prompt_makes_way(carry: Carry) -> None:
    """It is in the middle of its chunks when a request of a higher priority takes its seat."""
    low, high = list(range(60)), list(range(200, 212))
    async with (
        sim_engine(
            Sum(), **carry, block_size=4, max_num_seqs=1, max_num_batched_tokens=8,
            scheduling_policy="priority", latency=patient(),
        ) as engine,
        no_leaks(engine),
    ):  # fmt: skip
        first = engine.generate(prompt_token_ids=low, max_tokens=6, priority=1)
        await until(lambda: device_of(engine).num_steps >= 2)
        assert engine._core.intake.requests[first.request_id].state is RequestState.RUNNING
        second = engine.generate(prompt_token_ids=high, max_tokens=6)
        async with asyncio.timeout(10):
            assert (await second).token_ids == sum_reference(high, 6)
            assert (await first).token_ids == sum_reference(low, 6)
        assert engine.stats().preemptions == 1


@every_carry
def test_later_urgent_ones_do_not_lock_the_preempted_out(carry: Carry) -> None:
    """One or two short urgent requests at a time, in a pool that has room beside them."""

    async def main() -> tuple[list[float], float]:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 24, "max_num_seqs": 8}
        async with count_engine(
            **carry, **options, scheduling_policy="priority", latency=0.01
        ) as engine:

            async def low(n: int) -> float:
                assert (await start(engine, n, 28, priority=1)).token_ids == after(n, 28)
                return loop.time()

            async def urgent(n: int) -> None:
                await asyncio.sleep(0.05 + n * 0.18)
                prompt = [7] * 7 + [100 * n]
                answer = await engine.generate(prompt_token_ids=prompt, max_tokens=20)
                assert answer.token_ids == after(100 * n, 20)

            async with asyncio.TaskGroup() as group:
                lows = [group.create_task(low(n)) for n in (1000, 2000, 3000)]
                for n in range(60):
                    group.create_task(urgent(n))
                await asyncio.sleep(5)
                late = engine.generate(prompt_token_ids=[1], max_tokens=2, priority=1)
                began_s = loop.time()
                await late
                waited_s = loop.time() - began_s
            assert engine.stats().preemptions >= 1
            return [one.result() for one in lows], waited_s

    ended_s, waited_s = run_virtual(main())
    assert max(ended_s) < 2
    assert waited_s < 0.1
