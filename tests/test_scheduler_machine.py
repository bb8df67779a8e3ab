"""The scheduler in any order of events, against a device that remembers what wrote each cell."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aneuron import FinishReason, SamplingParams
from aneuron.errors import InvalidRequest, OutOfMemory
from aneuron.kv_cache import KVCacheManager
from aneuron.outputs import AbortReason
from aneuron.plans import ModelRunnerOutput
from aneuron.prompt import check_choices
from aneuron.request import Request, RequestState, make_request
from aneuron.scheduler import Scheduler
from aneuron.scheduler.waiting import rank
from tests.cells import EOS, UNWRITTEN, Device, alone

if TYPE_CHECKING:
    from aneuron.plans import SchedulerOutput
    from tests.cells import Work

PREFIXES = ([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4, 2, 2, 2, 2, 2], [3])


class SchedulerMachine(RuleBasedStateMachine):
    """Add, schedule, resolve, fail, finish, abort and reset, in any order."""

    has_priorities = False

    def __init__(self) -> None:
        """Begin without a scheduler: its sizes are drawn."""
        super().__init__()
        self.in_flight: list[tuple[SchedulerOutput, list[Work]]] = []
        self.firsts: list[Request] = []  # choice 0 of each
        self.requests: dict[int, Request] = {}
        self.ended_by: dict[int, FinishReason] = {}  # what the test ended
        self.ids = itertools.count(1)
        self.first_in_line: tuple[Request | None, int, int] = None, 0, 0

    @initialize(
        num_blocks=st.integers(5, 16), block_size=st.integers(1, 4), max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12), depth=st.integers(1, 3), limit=st.integers(12, 40),
        caching=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def open(
        self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, depth: int,
        limit: int, caching: bool,
    ) -> None:  # fmt: skip
        self.depth, self.budget = depth, budget
        self.num_slots = max_num_seqs * depth
        self.kv = KVCacheManager(num_blocks, block_size, self.num_slots, prefix_caching=caching)
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
            length_limit=min(limit, self.kv.capacity), eos_token_ids=(EOS,),
            num_slots=self.num_slots, clock=lambda: 1.0,
        )  # fmt: skip
        cells = np.full((num_blocks + 1, block_size), UNWRITTEN, np.int64)
        self.device = Device(block_size, cells)

    # ── rules ───────────────────────────────────────────────────────────────────────────

    @rule(
        prefix=st.sampled_from(PREFIXES), length=st.integers(0, 11),
        tail=st.lists(st.integers(1, 2), max_size=4), n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.none() | st.integers(1, 16), min_tokens=st.integers(0, 3),
        stop=st.sampled_from([(), (), (2,)]), ignore_eos=st.booleans(), priority=st.integers(0, 2),
        turn=st.none() | st.integers(0, 100), times=st.sampled_from([1, 1, 3]),
    )  # fmt: skip
    def add(
        self, prefix: list[int], length: int, tail: list[int], n: int, max_tokens: int | None,
        min_tokens: int, stop: tuple[int, ...], ignore_eos: bool, priority: int,
        turn: int | None = None, times: int = 1,
    ) -> None:  # fmt: skip
        most = self.scheduler.length_limit - 1
        prompt = (prefix[:length] + tail or [4])[:most]
        earlier = [one for one in self.requests.values() if one.is_finished and one.output_ids]
        if turn is not None and earlier:  # the next turn of a conversation
            prompt = (earlier[turn % len(earlier)].token_ids().tolist() + tail)[:most]
        params = SamplingParams(
            max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens or 3), n=n,
            stop_token_ids=stop, ignore_eos=ignore_eos,
        )  # fmt: skip
        kv = self.kv
        try:
            check_choices(len(prompt), n, block_size=kv.block_size, num_blocks=kv.num_blocks)
        except InvalidRequest:
            return
        if n > self.scheduler.max_num_seqs:
            return
        priority *= self.has_priorities
        for _ in range(times):
            request = make_request(self.ids, None, params, arrival_s=0.0, priority=priority)
            for one in request.choices:
                one.prompt_ids = np.array(prompt, np.int32)
                self.requests[one.request_id] = one
            self.firsts.append(request)
            self.scheduler.add(request)

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def schedule(self) -> None:
        self.launch()

    def launch(self) -> bool:
        """Plan a step, if there is something to do, and launch it."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        if not plan.is_decode:
            assert plan.num_scheduled.sum() <= self.budget
        self.in_flight.append((plan, self.device.launch(plan, self.requests)))
        assert len(self.device.rows) <= self.scheduler.max_num_seqs
        return True

    @precondition(lambda self: self.in_flight)
    @rule()
    def resolve(self) -> None:
        """Run the oldest step and take its tokens in."""
        plan, work = self.in_flight.pop(0)
        tokens = self.device.run(work, fails=False)
        live = [slot for slot in tokens if not self.scheduler._slots[slot].is_finished]
        expected = [self.scheduler._slots[slot] for slot in live]
        before = [len(request.output_ids) for request in expected]
        output = ModelRunnerOutput(
            np.array(list(tokens), np.int64), np.array(list(tokens.values()), np.int32)
        )
        updated = self.scheduler.update_from_output(plan, output)
        assert updated == expected
        assert [len(request.output_ids) for request in updated] == [n + 1 for n in before]
        self.note_progress(updated)

    @rule(how=st.sampled_from(["fail", "abort", "stop", "reset"]), which=st.integers(0, 100))
    def disturb(self, how: str, which: int) -> None:
        if how == "fail" and self.in_flight:
            self.fail()
        elif how == "abort" and self.firsts:
            self.abort(which)
        elif how == "stop":
            self.stop(which)
        elif how == "reset":
            self.kv.reset()

    def fail(self) -> None:
        """The oldest step fails on the device: what it has written is garbage."""
        plan, work = self.in_flight.pop(0)
        self.device.run(work, fails=True)
        self.scheduler.fail(plan, OutOfMemory("full"))
        holders = [self.scheduler._slots._request_of[slot] for slot in plan.slots.tolist()]
        assert all(one is None or one.is_finished for one in holders)
        self.first_in_line = None, 0, 0

    def abort(self, which: int) -> None:
        """End a whole request from outside."""
        choices = self.firsts[which % len(self.firsts)].choices
        live = [one for one in choices if not one.is_finished]
        for one in choices:
            self.scheduler.finish(one, FinishReason.ABORT, abort_reason=AbortReason.CLIENT)
        for one in live:
            assert one.finish_reason is FinishReason.ABORT
            self.ended_by[one.request_id] = FinishReason.ABORT

    def stop(self, which: int) -> None:
        """End one choice that has text, as a stop string does."""
        some = [one for one in self.requests.values() if one.output_ids and not one.is_finished]
        if some:
            one = some[which % len(some)]
            self.scheduler.finish(one, FinishReason.STOP, stop_reason="x")
            self.ended_by[one.request_id] = FinishReason.STOP

    @rule(turns=st.integers(2, 12))
    def go_on(self, turns: int) -> None:
        """Let the engine do as it does, with the device slower than the host."""
        for _ in range(turns):
            self.turn()

    def turn(self) -> bool:
        if len(self.in_flight) < self.depth and self.launch():
            return True
        if self.in_flight:
            self.resolve()
            return True
        return False

    # ── always ──────────────────────────────────────────────────────────────────────────

    def note_progress(self, updated: list[Request]) -> None:
        """Count the steps in which the first in line got no token; only a few are allowed."""
        live = [one for one in self.requests.values() if not one.is_finished]
        if not live:
            return
        first, (before, steps, bound) = min(live, key=rank), self.first_in_line
        if first is not before or first in updated:
            # Ahead of it: steps in flight, twice its chunks, and room that comes with steps.
            chunks = -(-(first.prompt_len + len(first.output_ids)) // self.budget)
            self.first_in_line = first, 0, 2 * chunks + 3 * self.depth + 4
            return
        self.first_in_line = first, steps + 1, bound
        assert steps < bound, f"{first} starves"

    @invariant()
    def blocks_are_neither_lost_nor_doubled(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv, slots = self.kv, self.scheduler._slots
        held = {block for blocks in kv._held for block in blocks}
        assert sorted([*held, *kv._free, *kv._idle]) == list(range(1, kv.num_blocks + 1))
        assert all(len(set(blocks)) == len(blocks) for blocks in kv._held)
        holders = {request.slot: request for request in slots.holders}
        assert len(holders) + slots.num_free == self.num_slots
        for slot in range(self.num_slots):
            assert slot in holders or not kv._held[slot], "blocks of a slot that nobody has"

    @invariant()
    def a_step_in_flight_writes_its_own_blocks_only(self) -> None:
        """Held by its request until it has ended, and by nobody else but its own choices."""
        for _, work in self.in_flight:
            for one in work:
                self.check_writes(one)

    def check_writes(self, one: Work) -> None:
        slots, held = self.scheduler._slots, self.kv._held
        assert slots[one.slot] is one.row.request, "the slot was given to another"
        blocks = {one.row.table[at // self.kv.block_size] for at in one.positions}
        targets = [(one.slot, block) for block in blocks]
        targets += [
            (slot, block)
            for (slot, _), block in zip(one.samples[1:], one.copies, strict=bool(one.copies))
        ]
        for slot, block in targets:
            assert block in held[slot], "it was freed"
            holders = {
                request.request_id
                for request in slots.holders
                if block in held[request.slot] and request.slot != slot
            }
            assert holders <= (one.sharers if block in blocks else set()), "it is shared"
            assert block not in self.kv._idle
            assert block not in self.kv._digest_of, "it can be found while it is written"

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler, states = self.scheduler, [one.state for one in self.requests.values()]
        waiting = states.count(RequestState.WAITING) + states.count(RequestState.PREEMPTED)
        assert scheduler.num_waiting == waiting
        assert 0 <= scheduler.num_running <= scheduler.max_num_seqs
        assert scheduler.num_held <= self.num_slots
        for one in self.requests.values():
            assert one.is_released == (one.is_finished and one.slot < 0)

    def teardown(self) -> None:
        """Let all run to its end; every answer is as alone, and nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        left = sum(40 + one.prompt_len for one in self.requests.values() if not one.is_finished)
        bound = 2 * left * (1 + len(self.requests)) + 10
        while self.turn():
            self.blocks_are_neither_lost_nor_doubled()
            self.a_step_in_flight_writes_its_own_blocks_only()
            bound -= 1
            assert bound, "it does not come to rest"
        assert self.scheduler.is_empty
        assert self.scheduler._slots.num_free == self.num_slots
        assert self.kv.num_free == self.kv.num_blocks
        assert self.scheduler._queue.num_requests == self.scheduler.num_running == 0
        assert not (self.scheduler._admission.leader_of)
        assert not (self.scheduler._prompts.unfinished)
        for one in self.requests.values():
            self.check_answer(one)

    def check_answer(self, one: Request) -> None:
        expected, reason = alone(one, self.scheduler.length_limit)
        got = one.output_ids.tolist()
        if one.request_id in self.ended_by or one.finish_reason is FinishReason.ERROR:
            assert got == expected[: len(got)]
            assert one.finish_reason is self.ended_by.get(one.request_id, FinishReason.ERROR)
        else:
            assert (got, one.finish_reason) == (expected, reason)


class PriorityMachine(SchedulerMachine):
    """The same with requests of three priorities."""

    has_priorities = True


def case_of(machine: type[SchedulerMachine]) -> Any:
    case = machine.TestCase
    case.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=40)
    return pytest.mark.timeout(max(300, settings().max_examples))(case)


TestSchedulerMachine = case_of(SchedulerMachine)
TestPriorityMachine = case_of(PriorityMachine)


# ── orders of events that are easily got wrong ──────────────────────────────────────────


def machine_of(kind: type[SchedulerMachine] = SchedulerMachine, **options: Any) -> SchedulerMachine:
    machine = kind()
    sizes: dict[str, Any] = {
        "num_blocks": 24, "block_size": 2, "max_num_seqs": 3, "budget": 2, "depth": 2, "limit": 40,
        "caching": True,
    }  # fmt: skip
    machine.open(**{**sizes, **options})
    return machine


def added(machine: SchedulerMachine, length: int, **options: Any) -> Request:
    """Add a request that begins like every other one, and ends by its length alone."""
    asked: dict[str, Any] = {
        "n": 1, "max_tokens": 4, "min_tokens": 0, "stop": (), "ignore_eos": True, "priority": 0,
    }  # fmt: skip
    machine.add(prefix=PREFIXES[0], length=length, tail=[], **{**asked, **options})
    return machine.firsts[-1]


@pytest.mark.parametrize("length", [5, 8, 11])
def test_a_chunk_behind_one_that_failed_offers_no_blocks(length: int) -> None:
    """Its own are built on garbage, and by its count those of the failed one seem written."""
    machine = machine_of()
    failed = added(machine, length)
    machine.schedule()
    machine.schedule()
    machine.fail()
    machine.resolve()
    assert failed.finish_reason is FinishReason.ERROR
    assert machine.kv.num_cached == 0
    added(machine, length)
    machine.teardown()


@pytest.mark.parametrize("length", [3, 4])
def test_choices_that_wake_behind_a_chunk_that_failed_end_with_it(length: int) -> None:
    """They are in no row of the failed step, and have all of its blocks."""
    machine = machine_of()
    first = added(machine, length, n=3)
    machine.schedule()
    machine.schedule()
    machine.fail()
    assert [one.finish_reason for one in first.choices] == [FinishReason.ERROR] * 3
    assert len({id(one.error) for one in first.choices}) == 3, "each its own instance"
    machine.teardown()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_plan_follows_when_all_that_ran_made_way(depth: int) -> None:
    """No step is in flight: nothing else would make the engine ask again."""
    machine = machine_of(PriorityMachine, depth=depth, max_num_seqs=1)
    added(machine, 2, priority=1)
    machine.schedule()
    machine.resolve()
    machine.schedule()
    machine.resolve()
    urgent = added(machine, 2)
    assert machine.launch()
    assert urgent.slot >= 0
    machine.teardown()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("length", "budget"), [(3, 2), (7, 6), (10, 4)])
def test_a_prompt_that_makes_way_gets_no_chunk_in_the_same_plan(
    length: int, budget: int, depth: int
) -> None:
    """Its next chunk would be its last, and leaves room in the step for who comes."""
    machine = machine_of(PriorityMachine, depth=depth, max_num_seqs=1, budget=budget)
    low = added(machine, length, priority=1)
    for _ in range(length // budget - 1):
        machine.schedule()
        machine.resolve()
    machine.schedule()
    added(machine, 3)
    if len(machine.in_flight) == depth:
        machine.resolve()
    machine.launch()
    assert low.state is RequestState.PREEMPTED
    machine.teardown()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_choices_that_sleep_make_way_together(n: int) -> None:
    """They are one victim, and preempted once."""
    machine = machine_of(PriorityMachine)
    low = added(machine, 3, n=3, priority=1)
    machine.schedule()
    added(machine, 3, n=n)
    machine.schedule()
    assert {one.state for one in low.choices} == {RequestState.PREEMPTED}
    assert machine.scheduler.num_preemptions == 1
    machine.teardown()
