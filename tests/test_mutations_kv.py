"""Deliberate faults in the KV cache, the queue and the limits; see test_mutations.py."""

from __future__ import annotations

from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron.intake import Intake
from aneuron.kv_cache import KVCacheManager
from aneuron.scheduler import Scheduler
from aneuron.scheduler.admission import Admission
from aneuron.scheduler.prompts import Prompts
from aneuron.scheduler.waiting import rank
from tests.mutating import assert_fails, load_test
from tests.support import CARRIES

if TYPE_CHECKING:
    from collections.abc import Callable

    Patch = Callable[[pytest.MonkeyPatch], None]


def forget_the_parent(patch: pytest.MonkeyPatch) -> None:
    """Name a block by its own ids alone."""

    def broken(self: KVCacheManager, request: Any, ids: memoryview, index: int) -> bytes:
        size = self.block_size * 4
        return blake2b(ids[index * size : (index + 1) * size]).digest()

    patch.setattr(KVCacheManager, "_digest", broken)


def find_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    """Leave nothing to compute."""
    find = KVCacheManager.find

    def broken(self: KVCacheManager, request: Any, token_ids: np.ndarray) -> Any:
        return find(self, request, np.append(token_ids, np.int32(0)))

    patch.setattr(KVCacheManager, "find", broken)


def offer_over_a_reset(patch: pytest.MonkeyPatch) -> None:
    """Offer what was written before a reset."""
    offer = KVCacheManager.offer

    def broken(self: KVCacheManager, slot: int, request: Any, num_tokens: int) -> None:
        self._epoch_of[slot] = self._epoch
        offer(self, slot, request, num_tokens)

    patch.setattr(KVCacheManager, "offer", broken)


def keep_content_over_a_reset(patch: pytest.MonkeyPatch) -> None:
    """Reset nothing."""
    patch.setattr(KVCacheManager, "reset", lambda _: None)


def forget_beginnings_first(patch: pytest.MonkeyPatch) -> None:
    """Hand the beginning of a content on before its end."""
    free = KVCacheManager.free

    def broken(self: KVCacheManager, slot: int) -> None:
        self._held[slot].reverse()
        free(self, slot)

    patch.setattr(KVCacheManager, "free", broken)


def keep_names_of_evicted_blocks(patch: pytest.MonkeyPatch) -> None:
    """Let a block be found that others write."""

    def broken(self: KVCacheManager, number: int) -> list[int]:
        while len(self._free) < number:
            block = next(iter(self._idle))
            del self._idle[block]
            self._free.append(block)
        return [self._free.pop() for _ in range(number)]

    patch.setattr(KVCacheManager, "_take", broken)


def offer_when_planned(patch: pytest.MonkeyPatch) -> None:
    """Offer blocks before the step that fills them has resolved."""
    plan = Prompts.plan

    def broken(self: Prompts, chunks: Any) -> list[int]:
        ended = plan(self, chunks)
        for slot in chunks.slots:
            self._kv.offer(slot, self._slots[slot], int(self.planned[slot]))
        return ended

    patch.setattr(Prompts, "plan", broken)


def forget_that_it_failed(patch: pytest.MonkeyPatch) -> None:
    """Offer what a step that failed should have written."""
    patch.setattr(Prompts, "failed", lambda _, plan: plan.slots.tolist())


def offer_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    """Offer the block with the last token, which no step has computed."""

    def broken(self: Prompts, slot: int, request: Any) -> None:
        self._kv.offer(slot, request, len(request.token_ids()))
        self._kv.free(slot)

    patch.setattr(Prompts, "give_back", broken)


def share_the_last_block(patch: pytest.MonkeyPatch) -> None:
    """Let all choices write the block that their prompt fills in part."""

    def broken(self: KVCacheManager, slots: list[int], owner: int, num_tokens: int) -> None:
        for slot in slots:
            self.allocate(slot, 0, self._held[owner][: self.blocks_for(num_tokens)])

    patch.setattr(KVCacheManager, "share", broken)


def preempt_equals(patch: pytest.MonkeyPatch) -> None:
    """Let a newcomer preempt its equals."""
    victims = Admission.victims

    def broken(self: Admission, one: Any, running: Any) -> Any:
        one.request.priority -= 1
        try:
            return victims(self, one, running)
        finally:
            one.request.priority += 1

    patch.setattr(Admission, "victims", broken)


def preempt_the_first(patch: pytest.MonkeyPatch) -> None:
    """Preempt the first in line."""
    patch.setattr(
        "aneuron.scheduler.admission.rank", lambda request: tuple(-one for one in rank(request))
    )


def preempt_all(patch: pytest.MonkeyPatch) -> None:
    """Preempt everybody but one for a single block."""
    make_room = Scheduler._make_room

    def broken(self: Scheduler, short: np.ndarray) -> np.ndarray:
        while len(self._order) > 1:
            self._preempt(self._slots[max(self._order, key=self._slots.rank_of)])
        return make_room(self, short[self._decodes.active[short] > 0])

    patch.setattr(Scheduler, "_make_room", broken)


def resume_at_once(patch: pytest.MonkeyPatch) -> None:
    """Let a preempted request back in beside those that it made way for."""
    fits = Admission.fits

    def broken(self: Admission, one: Any, running: Any) -> bool:
        priority, one.request.priority = one.request.priority, -(2**31)
        try:
            return fits(self, one, running)
        finally:
            one.request.priority = priority

    patch.setattr(Admission, "fits", broken)


def queue_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """Let priorities and earlier calls count for nothing in the queue."""
    numbers = count()
    patch.setattr(
        "aneuron.scheduler.waiting.rank", lambda request: (next(numbers), request.request_id)
    )


def keep_the_timer(patch: pytest.MonkeyPatch) -> None:
    """Leave the timer of a deadline behind."""
    ended = Intake._ended

    def broken(self: Intake, request: Any, one: Any) -> None:
        kept, self._deadlines = self._deadlines, {}
        ended(self, request, one)
        self._deadlines = kept

    patch.setattr(Intake, "_ended", broken)


def no_place_is_free_again(patch: pytest.MonkeyPatch) -> None:
    """Count requests that have ended as if they had not."""
    ended = Intake._ended

    def broken(self: Intake, request: Any, one: Any) -> None:
        ended(self, request, one)
        self._num_live += 1

    patch.setattr(Intake, "_ended", broken)


def prefill_goes_on(patch: pytest.MonkeyPatch) -> None:
    """Decode only when no prompt is left."""

    def broken(self: Scheduler) -> Any:
        return self._schedule_prefill() or self._schedule_decode()

    patch.setattr(Scheduler, "schedule", broken)


RESIDENT: dict[str, Any] = {"carry": CARRIES["resident"]}
FAILED = "test_blocks_that_a_failed_step_should_have_written_are_not_found"
SEATS = "test_seats_go_to_strictly_higher_priorities"
RESET = "test_case_23_a_reset_while_another_request_runs"

CASES: list[tuple[Patch, str, str, dict[str, Any]]] = [
    (forget_the_parent, "test_pressure", "test_case_21_the_same_ids_after_other_ones_are_not_shared", RESIDENT),
    (find_the_whole_prompt, "test_pressure", "test_case_22_a_prompt_that_comes_again_and_one_that_goes_on", RESIDENT),
    (offer_over_a_reset, "test_pressure", RESET, RESIDENT),
    (keep_content_over_a_reset, "test_pressure", RESET, RESIDENT),
    (forget_beginnings_first, "test_pressure", "test_a_preempted_request_finds_its_blocks_again", {}),
    (keep_names_of_evicted_blocks, "test_pressure", "test_case_24b_a_prompt_whose_blocks_were_recycled", RESIDENT),
    (offer_when_planned, "test_pressure", FAILED, {"step": 1, **RESIDENT}),
    (forget_that_it_failed, "test_pressure", FAILED, {"step": 1, **RESIDENT}),
    (offer_a_token_too_many, "test_pressure", "test_the_next_turn_finds_the_answer_but_for_its_last_token", {"count": 5, **RESIDENT}),
    (share_the_last_block, "test_choices_blocks", "test_choices_that_differ_write_blocks_of_their_own", {"length": 7, "budget": 64, **RESIDENT}),
    (preempt_equals, "test_priority", SEATS, {"priority": 1, "preemptions": 0, **RESIDENT}),
    (preempt_the_first, "test_priority", SEATS, {"priority": 0, "preemptions": 1, **RESIDENT}),
    (preempt_all, "test_pressure", "test_case_18_as_few_victims_as_needed", RESIDENT),
    (resume_at_once, "test_priority", "test_case_73_high_priority_comes_first", {"num_blocks": 14, **RESIDENT}),
    (queue_by_arrival, "test_priority", "test_case_73_high_priority_comes_first", {"num_blocks": 14, **RESIDENT}),
    (keep_the_timer, "test_limits", "test_the_timer_goes_with_its_request", {"how": "length"}),
    (no_place_is_free_again, "test_limits", "test_case_75_three_of_fifteen_are_refused_at_once", RESIDENT),
    (prefill_goes_on, "test_pressure", "test_case_74_a_stream_goes_on_while_long_prompts_arrive", RESIDENT),
]  # fmt: skip
# ruff: noqa: E501  the table above is wide


@pytest.mark.parametrize(
    ("mutate", "module", "test", "arguments"), CASES, ids=[case[0].__name__ for case in CASES]
)
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
