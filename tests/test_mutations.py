"""Deliberate faults in the product, each of which a named test must notice.

A test that passes on broken code proves nothing. Each entry breaks one rule of the flow,
runs the test that guards it, and expects it to fail; unbroken, the suite runs it anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron.batch import InputBatch
from aneuron.carry import Feed, HandoffCarry, Remap
from aneuron.inflight import InFlightStep
from aneuron.models.sampling.logprobs import raw_logprobs
from aneuron.models.sampling.rules import SlotRules
from aneuron.models.sampling.slots import SlotState
from aneuron.models.simulated import SimModel
from aneuron.parallel.ranks import RankStep
from aneuron.plans import Break
from aneuron.runner import ModelRunner
from aneuron.scheduler import Scheduler
from aneuron.scheduler.slots import SlotTable
from tests.mutating import assert_fails, load_test
from tests.support import CARRIES

if TYPE_CHECKING:
    from collections.abc import Callable

    Patch = Callable[[pytest.MonkeyPatch], None]

pytestmark = pytest.mark.alone  # some faults show only if what races runs in time


def skip_the_guard(patch: pytest.MonkeyPatch) -> None:
    """Feed whatever future is there, whoever made it."""
    patch.setattr(HandoffCarry, "composition_changed", lambda *_: False)


def drop_the_remap(patch: pytest.MonkeyPatch) -> None:
    """Feed a future in the old order."""
    decide = HandoffCarry.decide

    def broken(self: HandoffCarry, launch: Any, pending: Any) -> Any:
        decision = decide(self, launch, pending)
        return Feed(decision.tokens) if isinstance(decision, Remap) else decision

    patch.setattr(HandoffCarry, "decide", broken)


def remap_the_wrong_way(patch: pytest.MonkeyPatch) -> None:
    """Gather with the inverse order."""
    remap = ModelRunner._remap

    def broken(self: ModelRunner, plan: Any, tokens: Any, order: np.ndarray) -> Any:
        return remap(self, plan, tokens, np.argsort(order).astype(np.int32))

    patch.setattr(ModelRunner, "_remap", broken)


def hand_slots_on_early(patch: pytest.MonkeyPatch) -> None:
    """Give slot and blocks away while a step in flight holds them."""
    release = SlotTable.release_unheld

    def broken(self: SlotTable) -> None:
        applied, self._applied_step = self._applied_step, 2**40
        release(self)
        self._applied_step = applied

    patch.setattr(SlotTable, "release_unheld", broken)


def reuse_a_staging_buffer(patch: pytest.MonkeyPatch) -> None:
    """Write the next step's inputs over those of a launch in flight."""
    prepare = InputBatch.prepare

    def broken(self: InputBatch, plan: Any) -> Any:
        self._num_launches = 0
        return prepare(self, plan)

    patch.setattr(InputBatch, "prepare", broken)


def apply_beside(patch: pytest.MonkeyPatch) -> None:
    """Write a step's tokens to the batch one position too early."""
    apply = InputBatch.apply

    def broken(self: InputBatch, slots: np.ndarray, ends: np.ndarray, tokens: np.ndarray) -> None:
        apply(self, slots, ends - 1, tokens)

    patch.setattr(InputBatch, "apply", broken)


def update_twice(patch: pytest.MonkeyPatch) -> None:
    """Let the scheduler see a step's tokens twice."""
    update = Scheduler.update_from_output

    def broken(self: Scheduler, plan: Any, output: Any) -> Any:
        update(self, plan, output)
        return update(self, plan, output)

    patch.setattr(Scheduler, "update_from_output", broken)


def break_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """Go on from a break before its tokens have arrived."""

    async def broken(self: ModelRunner, plan: Any, pending: Any, reason: Any) -> None:
        self._note_break(plan, Break(reason, 0.0, 0.0))

    patch.setattr(ModelRunner, "_break", broken)


def keep_surplus_tokens(patch: pytest.MonkeyPatch) -> None:
    """Give out tokens of requests that have finished."""

    def broken(self: SlotTable, slots: np.ndarray, tokens: np.ndarray) -> Any:
        updated = [self[slot] for slot in slots.tolist()]
        for request, token in zip(updated, tokens.tolist(), strict=True):
            request.output_ids.append(token)
        return updated

    patch.setattr(SlotTable, "append", broken)


def ignore_tokens_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Schedule a request beyond its length, since its last token is not known yet."""
    schedule = Scheduler._schedule_decode

    def broken(self: Scheduler) -> Any:
        plan = schedule(self)
        for slot in plan.ending_slots if plan is not None else ():
            self._decodes.begin(slot, left=1, room=int(self._decodes.room[slot]))
        return plan

    patch.setattr(Scheduler, "_schedule_decode", broken)


def count_every_chunk(patch: pytest.MonkeyPatch) -> None:
    """Take a token from a prompt chunk that is not the last."""
    prepare = InputBatch.prepare

    def broken(self: InputBatch, plan: Any) -> Any:
        launch = prepare(self, plan)
        if launch.emits is not None:
            launch.emits[:] = True
        return launch

    patch.setattr(InputBatch, "prepare", broken)


def condense_wrongly(patch: pytest.MonkeyPatch) -> None:
    """Move a row into a gap without its block table."""
    move = InputBatch._move

    def broken(self: InputBatch, source: int, target: int) -> None:
        table = self.block_table[target].copy()
        move(self, source, target)
        self.block_table[target] = table

    patch.setattr(InputBatch, "_move", broken)


# ── with slots on the device ────────────────────────────────────────────────────────────


def skip_a_staged_write(patch: pytest.MonkeyPatch) -> None:
    """Leave a slot as its old owner had it."""
    patch.setattr(SlotState, "write", lambda *_: None)


def skip_a_column(name: str) -> Patch:
    """Leave one parameter of a slot as its old owner had it."""

    def skip(patch: pytest.MonkeyPatch) -> None:
        write = SlotState.write

        def broken(self: SlotState, writes: Any) -> None:
            kept = self._columns[name].copy()
            write(self, writes)
            self._columns[name][:] = kept

        patch.setattr(SlotState, "write", broken)

    skip.__name__ = f"skip_the_write_of_{name}"
    return skip


def read_the_neighbours_slot(patch: pytest.MonkeyPatch) -> None:
    """Decode with the last tokens of other rows."""
    run = SimModel._run

    def broken(self: SimModel, inputs: Any, input_ids: Any) -> Any:
        if inputs.is_decode and inputs.slots is not None:
            input_ids = self._slots.last_tokens[np.roll(inputs.slots, 1)]
        return run(self, inputs, input_ids)

    patch.setattr(SimModel, "_run", broken)


def pad_with_a_requests_slot(patch: pytest.MonkeyPatch) -> None:
    """Let padding rows write to slot 0 in place of the spare one."""
    stage = InputBatch._stage_layout

    def broken(self: InputBatch, staging: Any, inputs: Any, layout: Any, **emits: Any) -> None:
        stage(self, staging, inputs, layout, **emits)
        inputs.slots[len(layout.rows) :] = 0

    patch.setattr(InputBatch, "_stage_layout", broken)


def write_one_slot_late(patch: pytest.MonkeyPatch) -> None:
    """Let a staged write travel with the launch behind its own."""
    staged: list[Any] = [None]
    writes = InputBatch._writes

    def broken(self: InputBatch, plan: Any) -> Any:
        staged.append(writes(self, plan))
        return staged.pop(0)

    patch.setattr(InputBatch, "_writes", broken)


def forget_to_count(patch: pytest.MonkeyPatch) -> None:
    """Let penalties know nothing of tokens that were given."""
    patch.setattr(SlotRules, "note", lambda *_: None)


def count_the_prompt(patch: pytest.MonkeyPatch) -> None:
    """Take the prompt for a part of the answer."""
    init = SlotRules.__init__

    def broken(self: SlotRules, write: Any) -> None:
        init(self, write)
        for token in write.token_ids[: write.prompt_len].tolist():
            self.note(token)

    patch.setattr(SlotRules, "__init__", broken)


def rules_of_the_row_beside(patch: pytest.MonkeyPatch) -> None:
    """Apply the rules of another row."""
    ruled = SlotState._ruled

    def broken(self: SlotState, inputs: Any) -> Any:
        found = ruled(self, inputs)
        rules = [one for _, one in found]
        return list(zip([sample for sample, _ in found], rules[1:] + rules[:1], strict=True))

    patch.setattr(SlotState, "_ruled", broken)


def logprobs_after_rules(patch: pytest.MonkeyPatch) -> None:
    """Give log probabilities of logits that rules have changed."""

    def broken(logits: Any, inputs: Any) -> Any:
        return raw_logprobs(logits * 1.001, inputs)

    patch.setattr("aneuron.models.sampling.logprobs.raw_logprobs", broken)


# ── with ranks ──────────────────────────────────────────────────────────────────────────


def leave_ranks_behind(patch: pytest.MonkeyPatch) -> None:
    """Take a step for ended when its output rank has."""

    async def broken(self: InFlightStep) -> None:
        """Wait for nothing."""

    patch.setattr(InFlightStep, "discard", broken)


def forgive_other_ranks(patch: pytest.MonkeyPatch) -> None:
    """Hear of faults of the output rank alone."""

    async def broken(self: RankStep) -> Any:
        for step in self._steps[1:]:
            await step.settle()
        return await self._output.get_output()

    patch.setattr(RankStep, "get_output", broken)


HANDOFF, RESIDENT = ({"carry": CARRIES[name]} for name in ("handoff", "resident"))
OPPOSITE: dict[str, Any] = {"max_num_seqs": 3, **RESIDENT}

CASES: list[tuple[Patch, str, str, dict[str, Any]]] = [
    (skip_the_guard, "test_carry", "test_case_83_a_length_stop_breaks_when_its_request_leaves_the_plan", {}),
    (drop_the_remap, "test_carry", "test_case_84_a_reorder_of_the_same_set_is_remapped_on_the_device", {}),
    (remap_the_wrong_way, "test_carry", "test_case_84_a_reorder_of_the_same_set_is_remapped_on_the_device", {}),
    (hand_slots_on_early, "test_flow", "test_case_12_a_successor_takes_the_place_of_a_stopped_request", {"latency": 0.001, **HANDOFF}),
    (hand_slots_on_early, "test_flow", "test_case_12_a_successor_takes_the_place_of_a_stopped_request", {"latency": 0.001, **RESIDENT}),
    (reuse_a_staging_buffer, "test_flow", "test_case_93_buffers_are_not_written_while_a_launch_owns_them", HANDOFF),
    (reuse_a_staging_buffer, "test_flow", "test_case_93_buffers_are_not_written_while_a_launch_owns_them", RESIDENT),
    (apply_beside, "test_flow", "test_case_09_short_requests_join_two_long_ones_each_step", HANDOFF),
    (update_twice, "test_flow", "test_case_08_sixteen_concurrent_requests_are_exact", HANDOFF),
    (break_without_waiting, "test_flow", "test_case_09_short_requests_join_two_long_ones_each_step", HANDOFF),
    (keep_surplus_tokens, "test_flow", "test_case_12_a_successor_takes_the_place_of_a_stopped_request", {"latency": 0.001, **HANDOFF}),
    (ignore_tokens_in_flight, "test_flow", "test_case_10_length_stop_samples_exactly_n_rows", {"num": 17, **RESIDENT}),
    (count_every_chunk, "test_flow", "test_case_13_prompts_around_the_chunk_budget", HANDOFF),
    (count_every_chunk, "test_flow", "test_case_13_prompts_around_the_chunk_budget", RESIDENT),
    (condense_wrongly, "test_flow", "test_case_93_buffers_are_not_written_while_a_launch_owns_them", HANDOFF),
    (condense_wrongly, "test_flow", "test_case_93_buffers_are_not_written_while_a_launch_owns_them", RESIDENT),
    (skip_a_staged_write, "test_resident", "test_case_95_a_slots_next_owner_has_opposite_parameters", OPPOSITE),
    *(
        (skip_a_column(name), "test_resident", "test_case_95_a_slots_next_owner_has_opposite_parameters", OPPOSITE)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed")
    ),
    (skip_a_column("prompt_lens"), "test_resident", "test_a_resumed_request_has_its_old_prompt_length", RESIDENT),
    (write_one_slot_late, "test_resident", "test_case_95_a_slots_next_owner_has_opposite_parameters", OPPOSITE),
    (read_the_neighbours_slot, "test_flow", "test_case_08_sixteen_concurrent_requests_are_exact", RESIDENT),
    (pad_with_a_requests_slot, "test_resident", "test_padding_rows_touch_no_slot", {"buckets": [8], **RESIDENT}),
    (forget_to_count, "test_rules", "test_case_46_frequency", RESIDENT),
    (forget_to_count, "test_rules", "test_case_50_bad_words_of_several_tokens", HANDOFF),
    (count_the_prompt, "test_rules", "test_case_47_presence_and_repetition", RESIDENT),
    (rules_of_the_row_beside, "test_rules", "test_case_95_opposite_rules_follow_each_other_in_a_slot", HANDOFF),
    (logprobs_after_rules, "test_logprobs", "test_logprobs_of_each_token", {"most": 3, **RESIDENT}),
    (leave_ranks_behind, "test_ranks", "test_a_step_has_ended_when_its_last_rank_has", RESIDENT),
    (forgive_other_ranks, "test_ranks", "test_a_fault_on_any_rank_at_any_step", {"step": 5, "rank": 1, **RESIDENT}),
]  # fmt: skip
# ruff: noqa: E501  the table above is wide


def name_of(case: tuple[Patch, str, str, dict[str, Any]]) -> str:
    carry = next((name for name, one in CARRIES.items() if one is case[3].get("carry")), "")
    return "-".join(filter(None, [case[0].__name__, carry]))


@pytest.mark.parametrize(("mutate", "module", "test", "arguments"), CASES, ids=map(name_of, CASES))
def test_a_mutation_makes_a_named_test_fail(
    mutate: Patch,
    module: str,
    test: str,
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    function = load_test(module, test)
    mutate(monkeypatch)
    assert_fails(function, arguments)
