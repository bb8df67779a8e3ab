"""The scheduler alone: no device, no loop, only plans and outputs."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aneuron import FinishReason, InvalidRequest, SamplingParams
from aneuron.errors import OutOfMemory
from aneuron.kv_cache import KVCacheManager
from aneuron.plans import ModelRunnerOutput, SchedulerOutput
from aneuron.request import Request, RequestState
from aneuron.scheduler import Scheduler
from aneuron.scheduler.waiting import WaitingQueue


def scheduler_of(
    *, num_blocks: int = 100, block_size: int = 4, max_num_seqs: int = 4, depth: int = 2,
    budget: int = 64, limit: int | None = None, eos: tuple[int, ...] = (),
) -> Scheduler:  # fmt: skip
    slots = max_num_seqs * depth
    kv = KVCacheManager(num_blocks, block_size, slots)
    return Scheduler(
        kv,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        length_limit=kv.capacity if limit is None else min(limit, kv.capacity),
        eos_token_ids=eos,
        num_slots=slots,
        clock=lambda: 1.0,
    )


def request_of(number: int, prompt: list[int], **params: Any) -> Request:
    request = Request(number, f"r{number}", SamplingParams(**params), arrival_s=0.0)
    request.prompt_ids = np.array(prompt, np.int32)
    return request


def added(scheduler: Scheduler, number: int, length: int = 3, **params: Any) -> Request:
    request = request_of(number, [1] * length, **params)
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
    return scheduler.update_from_output(
        plan, ModelRunnerOutput(slots, np.full(len(slots), token, np.int32))
    )


def test_prefill_then_decode_then_length() -> None:
    scheduler = scheduler_of()
    request = added(scheduler, 1, max_tokens=2)
    assert scheduler.num_waiting == 1
    prefill = scheduled(scheduler)
    assert not prefill.is_decode
    assert prefill.num_scheduled.tolist() == [3]
    assert request.slot >= 0
    decode = scheduled(scheduler)  # one step ahead: the first token is in flight
    assert decode.is_decode
    assert decode.num_scheduled.tolist() == [1]
    assert scheduler.schedule() is None, "its second and last token is in flight"
    assert [answer(scheduler, plan) for plan in (prefill, decode)] == [[request], [request]]
    assert request.finish_reason == "length"
    assert request.output_ids.tolist() == [9, 9]
    assert request.is_released
    assert scheduler.is_empty
    assert scheduler.kv.num_free == 100


def test_a_stop_frees_only_with_the_last_step_in_flight() -> None:
    scheduler = scheduler_of(eos=(5,))
    request = added(scheduler, 1)
    prefill, decode = scheduled(scheduler), scheduled(scheduler)
    answer(scheduler, prefill, token=5)
    assert request.finish_reason is FinishReason.STOP
    assert scheduler.num_held == 1
    assert scheduler.kv.num_free == 99
    assert answer(scheduler, decode, token=6) == [], "a surplus token goes nowhere"
    assert request.is_released
    assert request.output_ids.tolist() == [5]
    assert scheduler.kv.num_free == 100


def test_a_slot_is_not_given_away_while_a_step_holds_it() -> None:
    scheduler = scheduler_of(max_num_seqs=1, eos=(5,))
    first = added(scheduler, 1)
    added(scheduler, 2)
    prefill, decode = scheduled(scheduler), scheduled(scheduler)
    answer(scheduler, prefill, token=5)
    successor = scheduled(scheduler)
    assert successor.new_requests[0].request_id == 2
    assert successor.slots[0] != decode.slots[0]
    assert successor.removed_slots == (int(decode.slots[0]),)
    answer(scheduler, decode)
    assert first.is_released


def test_min_tokens_holds_back_end_ids() -> None:
    scheduler = scheduler_of(eos=(5,))
    request = added(scheduler, 1, min_tokens=2)
    answer(scheduler, scheduled(scheduler), token=5)
    assert not request.is_finished
    answer(scheduler, scheduled(scheduler), token=5)
    assert request.finish_reason is FinishReason.STOP


def test_stop_ids_name_themselves_and_end_ids_do_not() -> None:
    scheduler = scheduler_of(eos=(5, 6))
    named = added(scheduler, 1, stop_token_ids=[70, 71, 72])
    plain = added(scheduler, 2)
    free = added(scheduler, 3, ignore_eos=True, max_tokens=1)
    plan = scheduled(scheduler)
    scheduler.update_from_output(
        plan, ModelRunnerOutput(plan.slots, np.array([72, 6, 6], np.int32))
    )
    assert (named.finish_reason, named.stop_reason) == (FinishReason.STOP, 72)
    assert (plain.finish_reason, plain.stop_reason) == (FinishReason.STOP, None)
    assert free.finish_reason is FinishReason.LENGTH


def test_prompts_over_the_budget_are_cut() -> None:
    scheduler = scheduler_of(budget=8)
    added(scheduler, 1, 20)
    added(scheduler, 2, 5)
    assert scheduled(scheduler).num_scheduled.tolist() == [8]
    assert scheduled(scheduler).num_scheduled.tolist() == [8]
    last = scheduled(scheduler)
    assert last.num_scheduled.tolist() == [4, 4]
    assert [new.request_id for new in last.new_requests] == [2]


def test_prefill_and_decode_take_turns() -> None:
    scheduler = scheduler_of(budget=8, max_num_seqs=8)
    added(scheduler, 1)
    answer(scheduler, scheduled(scheduler))
    for number in range(2, 6):
        added(scheduler, number, 8)
    kinds = [scheduled(scheduler).is_decode for _ in range(6)]
    assert kinds == [True, False, True, False, True, False]


def test_case_02b_a_waiting_request_that_ends_is_never_planned() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    added(scheduler, 1)
    waiting = added(scheduler, 2)
    answer(scheduler, scheduled(scheduler))
    scheduler.finish(waiting, FinishReason.ABORT)
    assert waiting.is_released
    scheduler.finish(waiting, FinishReason.ERROR)
    assert waiting.finish_reason is FinishReason.ABORT, "ending twice changes nothing"
    for _ in range(3):
        plan = scheduled(scheduler)
        assert plan.request_ids.tolist() == [1]
        answer(scheduler, plan)


def test_case_18_as_few_victims_as_needed_latest_first() -> None:
    # Each row needs its second block at another step; the pool lacks the last of them.
    scheduler = scheduler_of(num_blocks=11, max_num_seqs=6, block_size=6)
    requests = [added(scheduler, number, number) for number in range(1, 7)]
    plan = scheduled(scheduler)
    assert plan.request_ids.tolist() == [1, 2, 3, 4, 5, 6]
    answer(scheduler, plan)
    while not scheduler.num_preemptions:
        plan = scheduled(scheduler)
        answer(scheduler, plan)
    assert scheduler.num_preemptions == 1
    assert plan.request_ids.tolist() == [1, 2, 3, 4, 5], "nobody else sits it out"
    assert [request.state for request in requests] == [RequestState.RUNNING] * 5 + [
        RequestState.PREEMPTED
    ]


def test_a_preempted_request_waits_for_its_tokens_and_keeps_them() -> None:
    scheduler = scheduler_of(num_blocks=4, block_size=2, max_num_seqs=2)
    old, young = added(scheduler, 1, 2), added(scheduler, 2, 1)
    answer(scheduler, scheduled(scheduler), token=20)
    first, second = scheduled(scheduler), scheduled(scheduler)
    answer(scheduler, first, token=21)
    assert scheduler.schedule() is None, "blocks of the victim come free with the step in flight"
    assert scheduler.num_preemptions == 1
    assert young.state is RequestState.PREEMPTED
    assert young.slot >= 0
    answer(scheduler, second, token=22)
    assert young.slot < 0
    assert young.output_ids.tolist() == [20, 21, 22], "its token in flight has arrived"
    scheduler.finish(old, FinishReason.ABORT)
    (entry,) = scheduled(scheduler).new_requests
    assert entry.request_id == 2
    assert entry.token_ids.tolist() == [1, 20, 21, 22]
    assert entry.prompt_len == 1


def test_a_lone_request_uses_the_whole_pool_and_is_never_preempted() -> None:
    scheduler = scheduler_of(num_blocks=3, block_size=2)
    request = added(scheduler, 1, 2)
    while not request.is_finished:
        answer(scheduler, scheduled(scheduler))
    assert scheduler.num_preemptions == 0
    assert len(request.output_ids) == 4
    assert request.finish_reason is FinishReason.LENGTH


def test_a_failed_step_ends_its_requests_and_no_other() -> None:
    scheduler = scheduler_of(max_num_seqs=2)
    victims = [added(scheduler, 1), added(scheduler, 2)]
    plan = scheduled(scheduler)
    other = added(scheduler, 3)
    error = OutOfMemory("full")
    scheduler.fail(plan, error)
    assert [victim.finish_reason for victim in victims] == [FinishReason.ERROR] * 2
    assert all(victim.error is not error for victim in victims)
    assert all(victim.is_released for victim in victims)
    assert scheduled(scheduler).request_ids.tolist() == [3]
    assert not other.is_finished


def test_abandon_ends_and_releases_everyone() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    running, waiting = added(scheduler, 1), added(scheduler, 2)
    scheduled(scheduler)
    scheduler.abandon(OutOfMemory("gone"))
    for request in (running, waiting):
        assert request.finish_reason is FinishReason.ERROR
        assert request.is_released


@pytest.mark.timeout(120)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=10),
    num_blocks=st.integers(12, 40),
    block_size=st.integers(2, 4),
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(1, 16),
    depth=st.integers(1, 3),
    choices=st.randoms(use_true_random=False),
)
def test_any_order_of_events_ends_with_a_full_pool(
    lengths: list[tuple[int, int]],
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    depth: int,
    choices: Any,
) -> None:
    scheduler = scheduler_of(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, budget=budget,
        depth=depth, eos=(0,),
    )  # fmt: skip
    requests = [
        added(scheduler, number, prompt, max_tokens=count)
        for number, (prompt, count) in enumerate(lengths, 1)
    ]
    in_flight: list[SchedulerOutput] = []
    ends: dict[int, np.ndarray] = {}
    for _ in range(2000):
        plan = scheduler.schedule() if len(in_flight) < depth and choices.random() < 0.7 else None
        if plan is not None:
            in_flight.append(plan)
            ends[plan.step_id] = (
                scheduler._prompts.planned[plan.slots] >= scheduler._prompts.end[plan.slots]
            )
        elif in_flight:
            done = in_flight.pop(0)
            slots = done.slots[ends[done.step_id]]
            tokens = np.array([choices.choice((0, 1, 1, 1)) for _ in slots], np.int32)
            scheduler.update_from_output(done, ModelRunnerOutput(slots, tokens))
        elif scheduler.is_empty:
            break
        if choices.random() < 0.02:
            scheduler.finish(choices.choice(requests), FinishReason.ABORT)
        held = {block for blocks in scheduler.kv._held for block in blocks}
        assert len(held) + scheduler.kv.num_free == num_blocks
    assert scheduler.is_empty
    assert scheduler.kv.num_free == num_blocks
    assert scheduler._slots.num_free == max_num_seqs * depth
    for request in requests:
        assert request.is_released
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.output_ids) == request.params.max_tokens


@pytest.mark.parametrize("count", [0, 3])
def test_the_pool_gives_all_or_nothing(count: int) -> None:
    kv = KVCacheManager(3, 4, 2)
    assert kv.allocate(0, 4) is None
    assert kv.num_free == 3
    blocks = kv.allocate(0, count)
    assert blocks is not None
    assert 0 not in blocks, "block 0 is the null block"
    assert kv.blocks_for(4) == 1
    assert kv.blocks_for(5) == 2
    kv.free(0)
    assert kv.num_free == 3


def test_the_waiting_queue_forgets_who_left() -> None:
    """Of a thousand that came and went, its heap keeps no more than those that wait need."""
    queue = WaitingQueue()
    requests = [request_of(number, [1]) for number in range(1000)]
    for request in requests:
        queue.add(request)
    for request in (*requests[:500], *requests[503:]):
        queue.discard(request)
        assert len(queue._heap) <= 2 * queue.num_requests + 16
    assert queue.head() is requests[500]
    assert (queue.num_requests, queue.num_tokens) == (3, 3)


@pytest.mark.parametrize("hooks", [[], [lambda ids, logits: logits]])
def test_a_grammar_that_fails_ends_its_request_by_name(hooks: list[Any]) -> None:
    scheduler = scheduler_of()
    failing = added(scheduler, 1, logits_processors=hooks)
    failing.matcher = Mock(error="no such state")
    beside = added(scheduler, 2)
    assert failing in answer(scheduler, scheduled(scheduler))
    assert failing.finish_reason == FinishReason.ERROR
    assert isinstance(failing.error, InvalidRequest)
    assert failing.error.param == "grammar"
    assert "no such state" in str(failing.error)
    assert ("hooks" in str(failing.error)) is bool(hooks)
    assert list(beside.output_ids) == [9]
