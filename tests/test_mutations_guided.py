"""Deliberate faults in drafts, grammars and hooks, each of which a property test must notice.

See test_mutations.py; here the properties themselves run, on examples that are always the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

from aneuron.batch import InputBatch
from aneuron.guidance import Guidance
from aneuron.kv_cache import KVCacheManager
from aneuron.models.sampling import slots as slots_module
from aneuron.runner import ModelRunner, _edits
from aneuron.scheduler import speculation
from aneuron.scheduler.decodes import Decodes
from aneuron.scheduler.outcomes import Outcomes
from aneuron.scheduler.prompts import Prompts
from aneuron.scheduler.speculation import Speculation
from tests.test_properties_guided import Scenario, all_alone, check, jobs_of, scenarios
from tests.test_scheduler_drafts import DraftMachine

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.request import Request

    Patch = Callable[[pytest.MonkeyPatch], None]

TRIES = settings(
    max_examples=1000, derandomize=True, database=None, phases=[Phase.generate],
    report_multiple_bugs=False, stateful_step_count=40,
)  # fmt: skip


def keep_rejected_tokens(patch: pytest.MonkeyPatch) -> None:
    """Do not tell the batch what was rejected."""
    patch.setattr(Speculation, "take_rejected", lambda self: self._rejected.clear())


def mask_too_early(patch: pytest.MonkeyPatch) -> None:
    """Ask a grammar before it has seen the token before."""
    patch.setattr("aneuron.guidance._lags", lambda *_: False)


def mask_the_sample_beside(patch: pytest.MonkeyPatch) -> None:
    """Give masks, and the logits of hooks, to other samples."""

    def broken(launch: Any, told: Any) -> Any:
        edits = _edits(launch, told)
        count = len(launch.slots)
        return edits._replace(
            samples=(edits.samples + 1) % count, hooked=(edits.hooked + 1) % count
        )

    patch.setattr("aneuron.runner._edits", broken)


def count_what_was_rejected(patch: pytest.MonkeyPatch) -> None:
    """Take every sample of a verification for accepted."""
    accept = slots_module._accept

    def broken(tokens: Any, metadata: Any) -> Any:
        kept = tokens.copy()
        last = accept(tokens, metadata)
        tokens[:] = kept
        return last

    patch.setattr(slots_module, "_accept", broken)


def keep_the_aim(patch: pytest.MonkeyPatch) -> None:
    """Expect a block to come when the one before is full, though it has come already."""
    advance = InputBatch.advance

    def broken(self: InputBatch, plan: Any) -> None:
        shape, self.shape = self.shape, replace(self.shape, num_draft_tokens=0)
        advance(self, plan)
        self.shape = shape

    patch.setattr(InputBatch, "advance", broken)


def sample_old_logits(patch: pytest.MonkeyPatch) -> None:
    """Sample from the logits of the step before."""
    launch_guided = ModelRunner._launch_guided
    before: dict[ModelRunner, Any] = {}

    def broken(self: ModelRunner, launch: Any, forward: Any, told: Any) -> Any:
        if forward is not None:
            old = before.get(self, forward)
            before[self], forward = forward, old if old.shape == forward.shape else forward
        return launch_guided(self, launch, forward, told)

    patch.setattr(ModelRunner, "_launch_guided", broken)


def go_on_from_the_first_sample(patch: pytest.MonkeyPatch) -> None:
    """Decode behind a verification with its first sample, not the last that counts."""
    accept = slots_module._accept

    def broken(tokens: Any, metadata: Any) -> Any:
        accept(tokens, metadata)
        return metadata.starts

    patch.setattr(slots_module, "_accept", broken)


def overlook_a_stop_id(patch: pytest.MonkeyPatch) -> None:
    """Do not look at tokens that others of the same step come behind."""
    take, stop = Outcomes.take, Outcomes._stop
    deaf: list[bool] = [False]

    def broken(self: Outcomes, plan: Any, output: Any) -> Any:
        deaf[0] = bool(output.more)
        return take(self, plan, output)

    def listen(self: Outcomes, request: Request, token: int) -> None:
        if not deaf[0]:
            stop(self, request, token)

    patch.setattr(Outcomes, "take", broken)
    patch.setattr(Outcomes, "_stop", listen)


def draft_for_everybody(patch: pytest.MonkeyPatch) -> None:
    """Draft for grammars and rules, which every token changes."""
    patch.setattr(speculation, "_can_draft", lambda _: True)


def rules_of_rows(patch: pytest.MonkeyPatch) -> None:
    """Take the rows that have rules for the samples that have them."""
    stage = InputBatch._prepare_verification

    def broken(self: InputBatch, staging: Any, layout: Any, plan: Any) -> Any:
        launch = stage(self, staging, layout, plan)
        launch.inputs.rule_samples = layout.rule_samples
        return launch

    patch.setattr(InputBatch, "_prepare_verification", broken)


def share_a_matcher(patch: pytest.MonkeyPatch) -> None:
    """Let all choices of a request have one place in the grammar."""
    patch.setattr("aneuron.grammar.GrammarMatcher.copy", lambda self: self)


def forget_the_hooks(patch: pytest.MonkeyPatch) -> None:
    """Leave logits as they are where a hook changes them in place."""
    hooked = Guidance._hooked

    async def broken(self: Guidance, launch: Any, requests: Any) -> Any:
        slots, logits = await hooked(self, launch, requests)
        return slots[:0], logits[:0]

    patch.setattr(Guidance, "_hooked", broken)


# ── in the scheduler ────────────────────────────────────────────────────────────────────


def give_nothing_back(patch: pytest.MonkeyPatch) -> None:
    """Let rejected tokens count for the length."""
    patch.setattr(Decodes, "give_back", lambda *_: None)


def give_to_who_left(patch: pytest.MonkeyPatch) -> None:
    """Give tokens back to slots that decode no more."""
    settle = Speculation.settle

    def broken(self: Speculation, plan: Any, output: Any) -> None:
        active, self._decodes.active = self._decodes.active, self._decodes.active | 1
        settle(self, plan, output)
        self._decodes.active = active

    patch.setattr(Speculation, "settle", broken)


def take_no_block(patch: pytest.MonkeyPatch) -> None:
    """Draft beyond the blocks that there are."""

    def broken(self: KVCacheManager, slots: Any) -> Any:
        columns, blocks = self.num_held[slots], self.num_held[slots]
        return columns[:0], blocks[:0]

    def propose(self: Speculation) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KVCacheManager, "extend", broken)
            one = draft(self)
        return one and one._replace(updates=(one.updates[0][:0], *one.updates[1:]))

    draft = Speculation.propose
    patch.setattr(Speculation, "propose", propose)


def draft_beyond_the_length(patch: pytest.MonkeyPatch) -> None:
    """Draft more than what is left of a request's length."""
    draft = Speculation._draft

    def broken(self: Speculation, slot: int) -> Any:
        left = int(self._decodes.left[slot])
        self._decodes.left[slot] += 3
        try:
            return draft(self, slot)
        finally:
            self._decodes.left[slot] = left

    patch.setattr(Speculation, "_draft", broken)


def offer_drafts(patch: pytest.MonkeyPatch) -> None:
    """Offer what a request's blocks have cells for, rejected or not."""

    def broken(self: Prompts, slot: int, request: Request) -> None:
        if self.written[slot] >= self.end[slot]:
            self._kv.offer(slot, request, len(request.token_ids()))
        self._kv.free(slot)

    patch.setattr(Prompts, "give_back", broken)


def draft_behind_unknown_tokens(patch: pytest.MonkeyPatch) -> None:
    """Draft while tokens are in flight."""
    patch.setattr("aneuron.scheduler.slots.SlotTable.applied_step", property(lambda _: 2**40))


DRAFTS: dict[str, Any] = {"draft_tokens": 4, "num_ranks": 1, "latency_s": 0.0}
# With a few parts of the scenarios given, so that few of them are enough.
IN_ENGINE: list[tuple[Patch, dict[str, Any]]] = [
    (keep_rejected_tokens, DRAFTS),
    (mask_too_early, {"carry": "resident"}),
    (mask_too_early, {"carry": "handoff"}),
    (mask_the_sample_beside, {"is_split": True}),
    (mask_the_sample_beside, {"is_split": False}),
    (count_what_was_rejected, DRAFTS),
    (keep_the_aim, {**DRAFTS, "jobs": jobs_of(["wild", "few"])}),
    (sample_old_logits, {"is_split": True}),
    (go_on_from_the_first_sample, {**DRAFTS, "carry": "resident"}),
    (overlook_a_stop_id, {**DRAFTS, "jobs": jobs_of(["hot"])}),
    (draft_for_everybody, DRAFTS),
    (rules_of_rows, {**DRAFTS, "jobs": jobs_of(["on and on", "few"])}),
    (share_a_matcher, {}),
    (forget_the_hooks, {"is_split": True}),
    (give_nothing_back, DRAFTS),
]
IN_SCHEDULER: list[Patch] = [
    keep_rejected_tokens, overlook_a_stop_id, give_nothing_back, give_to_who_left, take_no_block,
    draft_beyond_the_length, offer_drafts, draft_behind_unknown_tokens,
]  # fmt: skip


def name_of(case: Any) -> str:
    return getattr(case, "__name__", "") or "-".join(
        str(case[name]) for name in ("carry", "is_split") if name in case
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("mutate", "fixed"), IN_ENGINE, ids=name_of)
def test_the_engines_property_sees_it(
    mutate: Patch,
    fixed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone = all_alone()  # before anything is broken

    @TRIES
    @given(scenario=scenarios(**fixed))
    def run(scenario: Scenario) -> None:
        asyncio.run(check(scenario, alone))

    mutate(monkeypatch)
    assert_sees(run)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mutate", IN_SCHEDULER, ids=name_of)
def test_the_schedulers_property_sees_it(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert_sees(lambda: run_state_machine_as_test(DraftMachine, settings=TRIES))


def assert_sees(run: Callable[[], None]) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  any failure counts …
        run()
    # … but one of the mutation's own.
    error: BaseException | None = caught.value
    while error is not None:
        assert not isinstance(error, KeyboardInterrupt | TypeError | AttributeError | NameError)
        error = error.__cause__
