"""The scheduler when blocks are short: who waits, who is preempted, who is let in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aneuron import SamplingParams
from aneuron.kv_cache import KVCacheManager
from aneuron.outputs import FinishReason
from aneuron.plans import ModelRunnerOutput, SchedulerOutput
from aneuron.request import Request, RequestState
from aneuron.scheduler import Scheduler


def scheduler_of(
    *, num_blocks: int, block_size: int = 4, max_num_seqs: int = 4, budget: int = 64,
    eos: tuple[int, ...] = (), interleaved: int | None = None, limit: int | None = None,
) -> Scheduler:  # fmt: skip
    slots = max_num_seqs * 2
    kv = KVCacheManager(num_blocks, block_size, slots)
    return Scheduler(
        kv,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        interleaved_prefill_tokens=interleaved,
        length_limit=limit or kv.capacity,
        eos_token_ids=eos,
        num_slots=slots,
        clock=lambda: 1.0,
    )


def added(scheduler: Scheduler, number: int, length: int, **params: Any) -> Request:
    request = Request(number, f"r{number}", SamplingParams(**params), arrival_s=0.0)
    request.prompt_ids = np.full(length, number, np.int32)
    scheduler.add(request)
    return request


def scheduled(scheduler: Scheduler) -> SchedulerOutput:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def answer(scheduler: Scheduler, plan: SchedulerOutput, token: int = 9) -> list[Request]:
    """Give every row of a plan whose chunk is its last the same token."""
    planned = scheduler._prompts.planned[plan.slots] >= scheduler._prompts.end[plan.slots]
    slots = plan.slots[planned]
    tokens = np.full(len(slots), token, np.int32)
    return scheduler.update_from_output(plan, ModelRunnerOutput(slots, tokens))


def test_a_preempted_request_waits_though_other_blocks_are_free() -> None:
    """Its token in flight has not arrived: it must not be admitted a second time."""
    scheduler = scheduler_of(num_blocks=4, block_size=2, max_num_seqs=3)
    old, young = added(scheduler, 1, 2), added(scheduler, 2, 2)
    answer(scheduler, scheduled(scheduler), token=20)
    first, second = scheduled(scheduler), scheduled(scheduler)
    assert [plan.request_ids.tolist() for plan in (first, second)] == [[1, 2], [1, 2]]
    assert scheduler.schedule() is None, "no block is free: the young one is preempted"
    assert young.state is RequestState.PREEMPTED
    scheduler.kv._free += [5, 6, 7, 8]
    answer(scheduler, first, token=21)
    assert young.slot >= 0
    plan = scheduled(scheduler)
    assert (plan.request_ids.tolist(), plan.new_requests) == ([1], ())
    assert not old.is_finished
    answer(scheduler, second, token=22)
    assert young.output_ids.tolist() == [20, 21, 22]
    (entry,) = scheduled(scheduler).new_requests or scheduled(scheduler).new_requests
    assert entry.request_id == 2


def test_blocks_of_a_request_whose_last_token_is_in_flight_are_waited_for() -> None:
    """They come with that step: nobody is preempted for them."""
    scheduler = scheduler_of(num_blocks=8, block_size=2, max_num_seqs=3)
    old, ends = added(scheduler, 1, 2), added(scheduler, 2, 7, max_tokens=2)
    young = added(scheduler, 3, 2)
    answer(scheduler, scheduled(scheduler), token=20)
    first, second = scheduled(scheduler), scheduled(scheduler)
    assert [plan.request_ids.tolist() for plan in (first, second)] == [[1, 2, 3], [1, 3]]
    assert scheduler.schedule() is None, "no block is free"
    answer(scheduler, first, token=21)
    assert ends.is_released
    assert scheduled(scheduler).request_ids.tolist() == [1, 3]
    assert scheduler.num_preemptions == 0
    assert not (old.is_finished)
    assert not (young.is_finished)


def test_a_request_whose_last_token_is_in_flight_gives_up_its_seat() -> None:
    """The next in line is admitted at once; the slot comes free with the step in flight."""
    scheduler = scheduler_of(num_blocks=8, max_num_seqs=1)
    ends, waits = added(scheduler, 1, 3, max_tokens=2), added(scheduler, 2, 3, max_tokens=2)
    answer(scheduler, scheduled(scheduler))
    last = scheduled(scheduler)
    assert last.ending_slots == (ends.slot,)
    plan = scheduled(scheduler)
    assert plan.request_ids.tolist() == [2]
    assert plan.removed_slots == last.ending_slots
    assert waits.slot != ends.slot, "the device may still write there"
    assert not ends.is_finished
    answer(scheduler, last)
    assert ends.finish_reason is FinishReason.LENGTH
    assert ends.is_released


def one_ahead_until_preempted(scheduler: Scheduler, first: SchedulerOutput) -> SchedulerOutput:
    """Run with one step ahead; return the step in flight at the first preemption."""
    flying = first
    for _ in range(50):
        plan = scheduler.schedule()
        if scheduler.num_preemptions:
            return flying
        answer(scheduler, flying)
        flying = scheduled(scheduler) if plan is None else plan
    raise AssertionError("nothing was preempted")


def test_blocks_of_a_victim_in_flight_count_as_coming() -> None:
    """One block is short: one victim, and the wait for its blocks, not a second victim."""
    scheduler = scheduler_of(num_blocks=7, block_size=4, max_num_seqs=3)
    requests = [added(scheduler, number, number) for number in (1, 2, 3)]
    flying = one_ahead_until_preempted(scheduler, scheduled(scheduler))
    states = [RequestState.RUNNING, RequestState.RUNNING, RequestState.PREEMPTED]
    for _ in range(3):  # asked again before the step has come back: still the one
        assert scheduler.num_preemptions == 1
        assert [request.state for request in requests] == states
        assert requests[2].slot >= 0
        scheduler.schedule()
    answer(scheduler, flying)
    assert requests[2].slot < 0


def test_blocks_of_a_finished_request_in_flight_count_as_coming() -> None:
    """A request has stopped and a surplus step holds its blocks: nobody is preempted."""
    scheduler = scheduler_of(num_blocks=6, block_size=2, max_num_seqs=3, eos=(5,))
    added(scheduler, 1, 2)
    added(scheduler, 2, 1)
    stops = added(scheduler, 3, 1)
    prefill = scheduled(scheduler)
    first = scheduled(scheduler)
    scheduler.update_from_output(
        prefill, ModelRunnerOutput(prefill.slots, np.array([9, 9, 5], np.int32))
    )
    assert stops.is_finished
    assert not stops.is_released
    second = scheduled(scheduler)
    assert second.request_ids.tolist() == [1, 2]
    free = scheduler.kv.num_free
    taken = scheduler.kv.allocate(len(scheduler.kv.num_held) - 1, free)  # someone else's
    assert taken is not None
    assert scheduled(scheduler).request_ids.tolist() == [2], "the other sits one step out"
    assert scheduler.num_preemptions == 0, "the blocks of the one that stopped are coming"
    assert scheduler.num_running == 2
    answer(scheduler, first)
    assert scheduler.kv.num_free == 1


@pytest.mark.parametrize(("length", "fits"), [(2, True), (3, False)])
def test_a_prompt_leaves_a_block_for_each_that_runs(length: int, fits: bool) -> None:
    """docs/decisions/0002: or the newcomer would be preempted in its first steps."""
    scheduler = scheduler_of(num_blocks=3, block_size=2)
    added(scheduler, 1, 2)
    scheduled(scheduler)
    added(scheduler, 2, length)
    scheduler._prefilled_last = False
    plan = scheduled(scheduler)
    assert plan.is_decode is not fits
    assert plan.request_ids.tolist() == ([2] if fits else [1])


def test_one_long_prompt_and_many_short_ones_are_not_packed_together() -> None:
    """Attention pads each row of a prefill to the longest: rows x longest stays bounded."""
    budget = 64
    scheduler = scheduler_of(num_blocks=400, max_num_seqs=40, budget=budget)
    lengths = [1, 60, *[1] * 20, 200, *[2] * 10, 33, *[3] * 3]
    for number, length in enumerate(lengths, 1):
        added(scheduler, number, length, max_tokens=1)
    computed = dict.fromkeys(range(1, len(lengths) + 1), 0)
    sizes = []
    while not scheduler.is_empty:
        plan = scheduled(scheduler)
        counts = plan.num_scheduled.tolist()
        assert sum(counts) <= budget
        assert len(counts) * max(counts) <= 2 * budget
        sizes.append(len(counts))
        for request_id, count in zip(plan.request_ids.tolist(), counts, strict=True):
            computed[request_id] += count
        answer(scheduler, plan)
    assert list(computed.values()) == lengths
    assert max(sizes) > 10, "short ones alone are packed"


def test_nobody_makes_way_for_what_they_hold_themselves() -> None:
    """Blocks that a newcomer shares with a victim are needed still when the victim has gone."""
    scheduler = scheduler_of(num_blocks=30, budget=256, eos=())
    shared = list(range(100, 140))  # 10 blocks

    def add(number: int, prompt: list[int], max_tokens: int, priority: int) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(number, f"r{number}", params, arrival_s=0.0, priority=priority)
        request.prompt_ids = np.array(prompt, np.int32)
        scheduler.add(request)
        return request

    def run(steps: int) -> None:
        for _ in range(steps):
            if (plan := scheduler.schedule()) is not None:
                answer(scheduler, plan)

    add(1, [*shared, 1], 1, 2)
    run(2)
    hog = add(2, [3] * 38, 60, 0)
    low = add(3, [*shared, *[5] * 14], 40, 2)
    run(4)
    assert low.cached_tokens == 40
    newcomer = add(4, [*shared, *[7] * 66], 4, 1)  # 17 blocks beside those 10
    run(2)
    assert newcomer.state is RequestState.WAITING
    assert low.state is RequestState.RUNNING, "its 4 own blocks would not do"
    assert hog.state is RequestState.RUNNING
    run(200)
    assert {one.finish_reason for one in (hog, low, newcomer)} == {FinishReason.LENGTH}


def test_a_prefill_between_decodes_is_short() -> None:
    """All of the budget alone, a share beside few that decode, and never below the setting."""
    scheduler = scheduler_of(num_blocks=400, max_num_seqs=12, budget=64, interleaved=10)
    seen = []
    for number in range(1, 10):
        added(scheduler, number, 64, max_tokens=500)
        counts = []
        while scheduler._prompts.unfinished or scheduler.num_waiting:
            plan = scheduled(scheduler)
            if plan.is_prefill:
                counts.append(int(plan.num_scheduled.sum()))
            answer(scheduler, plan)
        seen.append(counts)
    assert seen[:3] == [[64], [64], [32, 32]]
    assert seen[-1] == [10] * 6 + [4]


def test_a_prefill_between_decodes_grows_with_what_waits() -> None:
    """What waits now is let in within some 96 such steps, however many decode."""
    scheduler = scheduler_of(num_blocks=9000, max_num_seqs=80, budget=256, interleaved=4)
    for number in range(64):
        added(scheduler, number, 2, max_tokens=500)
    while scheduler._decodes.num_active < 64:
        answer(scheduler, scheduled(scheduler))
    late = [added(scheduler, number, 128, max_tokens=500) for number in range(64, 79)]
    assert scheduler._queue.num_tokens == 1920
    for one in late[12:]:
        scheduler.finish(one, FinishReason.ABORT)
    assert scheduler._queue.num_tokens == 1536
    counts = []
    while scheduler._prompts.unfinished or scheduler.num_waiting:
        plan = scheduled(scheduler)
        if plan.is_prefill:
            counts.append(int(plan.num_scheduled.sum()))
        answer(scheduler, plan)
    assert counts[0] == 16
    left, grown = 1536, []
    for count in counts:
        grown.append(count <= max(4, left // 96))
        left -= count
    assert all(grown), "a 96th of those that are left, also of a prompt's rest"
    assert len(counts) < 250, "with 4 a step it would be 384"
    assert scheduler._queue.num_tokens == 0


def test_where_a_block_holds_a_request_no_block_is_kept_for_growth() -> None:
    scheduler = scheduler_of(num_blocks=3, block_size=8, limit=8)
    for number in (1, 2, 3, 4):
        added(scheduler, number, 3)
    plan = scheduled(scheduler)
    answer(scheduler, plan)
    assert plan.request_ids.tolist() == [1, 2, 3]
    assert scheduled(scheduler).request_ids.tolist() == [1, 2, 3]
