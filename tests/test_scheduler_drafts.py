"""The scheduler in any order of events, with drafts of which any number comes true."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from aneuron import FinishReason
from aneuron.inflight import _in_rounds
from aneuron.plans import ModelRunnerOutput
from aneuron.request import RequestState
from aneuron.scheduler import Scheduler
from aneuron.scheduler.waiting import rank
from tests.cells import GARBAGE, VOCAB, Device, Work, names_of, sampled
from tests.test_scheduler_machine import PREFIXES, SchedulerMachine

if TYPE_CHECKING:
    from aneuron.plans import SchedulerOutput
    from aneuron.request import Request


@dataclass
class Verify(Work):
    """What a launch that verifies drafts does for a row."""

    drafts: list[int]


@dataclass
class DraftDevice(Device):
    """A device that verifies drafts as well."""

    def launch(self, plan: SchedulerOutput, requests: dict[int, Request]) -> list[Work]:
        rejected = () if plan.rejected is None else zip(*map(np.ndarray.tolist, plan.rejected))  # noqa: B905
        for slot, number in rejected:
            row = self.rows[slot]
            assert number > 0
            row.computed -= number
            assert row.is_spoilt or row.computed == len(row.ids) - 1
        return super().launch(plan, requests)

    def work(self, plan: SchedulerOutput, slot: int, count: int) -> Work:
        if plan.draft_ids is None:
            return super().work(plan, slot, count)
        row, at = self.rows[slot], plan.slots.tolist().index(slot)
        begin = int(plan.num_scheduled[:at].sum())
        last, *drafts = plan.draft_ids[begin : begin + count].tolist()
        start, row.computed = row.computed, row.computed + count
        assert start >= row.end, "its prompt is not computed"
        assert row.is_spoilt or row.ids[start:] == [last], "tokens are in flight"
        return Verify(slot, row, start, count, [], [], set(), drafts)

    def run(self, work: list[Work], *, fails: bool) -> Any:
        if not work or not isinstance(work[0], Verify):
            return super().run(work, fails=fails)
        return {one.slot: self.verify(one, fails=fails) for one in work if isinstance(one, Verify)}

    def verify(self, one: Verify, *, fails: bool) -> list[int]:
        """Write a row's tokens; return those that count, one to `count`."""
        row, said = one.row, []
        row.is_spoilt |= fails
        if not row.is_spoilt:
            self.check_context(row, one.start)
        names = names_of(row.ids[: one.start + 1] + one.drafts)
        for at in one.positions:
            self.cells[row.table[at // self.size], at % self.size] = (
                GARBAGE if row.is_spoilt else names[at]
            )
        for at, draft in zip(one.positions, [*one.drafts, None], strict=True):
            said.append(1 if row.is_spoilt else sampled(names[at], row.request.choice))
            if said[-1] != draft:
                break
        row.ids += said
        return said


class DraftMachine(SchedulerMachine):
    """Drafts begin with what the first choice will say; how much of it, and what then, is drawn."""

    has_priorities = True

    @initialize(
        num_blocks=st.integers(6, 24), block_size=st.integers(1, 4), max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12), depth=st.integers(1, 3), limit=st.integers(12, 40),
        caching=st.sampled_from([True, True, False]),
        num_draft_tokens=st.sampled_from([1, 2, 4, 9]),
        luck=st.lists(
            st.tuples(st.sampled_from([9, 9, 2, 1, 0]), st.sampled_from([0, 1, 2, 9])),
            min_size=2, max_size=6,
        ),
    )  # fmt: skip
    def open(
        self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, depth: int,
        limit: int, caching: bool, num_draft_tokens: int = 4,
        luck: list[tuple[int, int]] = [(9, 9)],  # noqa: B006  not written to
    ) -> None:  # fmt: skip
        super().open(num_blocks, block_size, max_num_seqs, budget, depth, limit, caching)
        old = self.scheduler
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
            length_limit=old.length_limit, eos_token_ids=old.eos_token_ids,
            num_slots=self.num_slots, clock=lambda: 1.0, num_draft_tokens=num_draft_tokens,
        )  # fmt: skip
        self.device = DraftDevice(block_size, self.device.cells)
        self.luck, self.numbers = luck, count()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("aneuron.scheduler.speculation.look_up", self.look_up)
        self.offer = self.kv.offer
        self.patch.setattr(self.kv, "offer", self.check_offer)

    def look_up(self, ids: np.ndarray, most: int) -> np.ndarray:
        """Draft at most `most` tokens, the first few of them right."""
        length, right = self.luck[next(self.numbers) % len(self.luck)]
        drafts: list[int] = []
        for at in range(min(length, most)):
            token = sampled(names_of([*ids.tolist(), *drafts])[-1], 0)
            drafts.append(token if at < right else (token + 1) % VOCAB)
        return np.array(drafts, np.int32)

    def check_offer(self, slot: int, request: Request, num_tokens: int) -> None:
        """What is offered was written, and is what the request says."""
        before = self.kv._num_offered[slot]
        self.offer(slot, request, num_tokens)
        names = names_of(request.token_ids().tolist())
        size = self.kv.block_size
        for index in range(before, self.kv._num_offered[slot]):
            cells = self.device.cells[self.kv._held[slot][index]].tolist()
            assert cells == names[index * size : (index + 1) * size], "rejected, or not written"

    # ── rules ───────────────────────────────────────────────────────────────────────────

    def launch(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        if plan.is_prefill:
            assert plan.num_scheduled.sum() <= self.budget
        if plan.draft_ids is not None:
            assert not self.in_flight, "tokens are in flight"
            assert plan.num_scheduled.sum() == len(plan.draft_ids) > len(plan.slots)
        self.in_flight.append((plan, self.device.launch(plan, self.requests)))
        for slot, row in self.device.rows.items():
            held = self.kv.num_held[slot]
            assert row.computed <= held * self.kv.block_size, "no cell for a token"
        return True

    @precondition(lambda self: self.in_flight)
    @rule()
    def resolve(self) -> None:
        """Run the oldest step and take its tokens in, as the core does."""
        plan, work = self.in_flight.pop(0)
        given: dict[int, Any] = self.device.run(work, fails=False)
        pairs = [(slot, token) for slot, told in given.items() for token in np.atleast_1d(told)]
        slots, tokens = np.array(pairs, np.int64).reshape(-1, 2).T
        output = ModelRunnerOutput(slots.copy(), tokens.astype(np.int32))
        if plan.draft_ids is not None:
            output = _in_rounds(output)
            self.scheduler.speculation.settle(plan, output)
        updated: list[Request] = []
        for one in (output, *output.more):
            updated += self.scheduler.update_from_output(plan, one)
        self.note_progress(updated)

    @rule()
    def preempt(self) -> None:
        """Take slot and blocks from the last in line, as one of a better priority does."""
        running = sorted(self.scheduler.running(), key=rank)
        asleep = self.scheduler._admission.leader_of
        if running and asleep.get(running[-1].slot, running[-1]) is not running[0]:
            self.scheduler._preempt(running[-1])

    @precondition(lambda self: self.in_flight)
    @rule(which=st.integers(0, 100))
    def stop_one_in_flight(self, which: int) -> None:
        """End a request whose tokens are on their way."""
        slots = self.in_flight[-1][0].slots.tolist()
        one = self.scheduler.holder(slots[which % len(slots)])
        if one.output_ids and not one.is_finished:
            self.scheduler.finish(one, FinishReason.STOP, stop_reason="x")
            self.ended_by[one.request_id] = FinishReason.STOP

    def turn(self) -> bool:
        """As the engine does; what always holds is looked at in between, too."""
        is_busy = super().turn()
        self.columns_are_those_of_the_requests()
        return is_busy

    # ── always ──────────────────────────────────────────────────────────────────────────

    @invariant()
    def columns_are_those_of_the_requests(self) -> None:
        """Nothing is negative; with no step in flight, what is left is what the limit leaves."""
        if not hasattr(self, "patch"):
            return
        decodes = self.scheduler._decodes
        assert (decodes.left >= 0).all()
        assert (decodes.room >= 0).all()
        idle = decodes.active == 0
        assert not decodes.left[idle].any()
        assert (decodes.room[idle] == 1).all()
        for one in self.requests.values():
            limit = one.limit(self.scheduler.length_limit)
            num_tokens = one.prompt_len + len(one.output_ids)
            assert num_tokens <= limit
            is_decoding = one.state is RequestState.RUNNING and decodes.active[one.slot]
            if is_decoding and not self.in_flight:
                assert decodes.left[one.slot] == limit - num_tokens
                held = int(self.kv.num_held[one.slot]) * self.kv.block_size
                assert decodes.room[one.slot] == held - num_tokens + 1

    def teardown(self) -> None:
        """As without drafts."""
        try:
            super().teardown()
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()


TestDraftMachine = DraftMachine.TestCase
TestDraftMachine.settings = settings(stateful_step_count=40)
TestDraftMachine = pytest.mark.timeout(max(300, settings().max_examples))(TestDraftMachine)


def test_everything_comes_true() -> None:
    """One, three times five, three, and one: the last one is never a draft."""
    machine = DraftMachine()
    machine.open(12, 8, 3, 12, 2, 40, caching=True)
    machine.add(
        prefix=PREFIXES[0], length=5, tail=[], n=1, max_tokens=20, min_tokens=0, stop=(),
        ignore_eos=True, priority=0,
    )  # fmt: skip
    steps = 0
    while machine.launch():
        machine.resolve()
        steps += 1
    assert steps == 1 + 3 + 1 + 1
    speculation = machine.scheduler.speculation
    assert speculation.num_accepted == speculation.num_drafted == 3 * 4 + 2
    machine.teardown()
