"""Deliberate faults in the product, each of which a named test must notice.

A test that passes on broken code proves nothing. Each entry breaks one rule of the flow,
runs the test that guards it, and expects it to fail; unbroken, the suite runs it anyway.
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron.batch import InputBatch
from aneuron.carry import Feed, HandoffCarry, Remap
from aneuron.runner import ModelRunner
from aneuron.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    Patch = Callable[[pytest.MonkeyPatch], None]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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

    def broken(self: ModelRunner, tokens: Any, order: np.ndarray) -> Any:
        return remap(self, tokens, np.argsort(order).astype(np.int32))

    patch.setattr(ModelRunner, "_remap", broken)


def free_early(patch: pytest.MonkeyPatch) -> None:
    """Give slot and blocks away while a step in flight holds them."""
    release = Scheduler._release_if_unheld

    def broken(self: Scheduler, slot: int) -> None:
        held = int(self._held[slot])
        self._held[slot] = 0
        release(self, slot)
        self._held[slot] = held

    patch.setattr(Scheduler, "_release_if_unheld", broken)


def reuse_a_staging_buffer(patch: pytest.MonkeyPatch) -> None:
    """Write the next step's inputs over those of a launch in flight."""
    prepare = InputBatch.prepare

    def broken(self: InputBatch, plan: Any) -> Any:
        self._num_launches = 0
        return prepare(self, plan)

    patch.setattr(InputBatch, "prepare", broken)


def apply_twice(patch: pytest.MonkeyPatch) -> None:
    """Write a step's tokens to the batch twice."""
    apply = InputBatch.apply

    def broken(self: InputBatch, slots: np.ndarray, tokens: np.ndarray) -> None:
        apply(self, slots, tokens)
        apply(self, slots, tokens)

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

    async def broken(self: ModelRunner, pending: Any, reason: Any) -> None:
        self.stats.note_break(reason)

    patch.setattr(ModelRunner, "_break", broken)


def keep_surplus_tokens(patch: pytest.MonkeyPatch) -> None:
    """Give out tokens of requests that have finished."""

    def broken(self: Scheduler, slots: np.ndarray, tokens: np.ndarray) -> Any:
        updated = []
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            request = self._request_of[slot]
            assert request is not None
            request.output_ids.append(token)
            updated.append(request)
        return updated

    patch.setattr(Scheduler, "_append", broken)


def ignore_tokens_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Schedule a request beyond its length, since its last token is not known yet."""
    schedule = Scheduler._schedule_decode

    def broken(self: Scheduler) -> Any:
        limit = self._limit.copy()
        self._limit += self._pending
        plan = schedule(self)
        self._limit = limit
        return plan

    patch.setattr(Scheduler, "_schedule_decode", broken)


def count_every_chunk(patch: pytest.MonkeyPatch) -> None:
    """Take a token from a prompt chunk that is not the last."""
    prepare = InputBatch.prepare

    def broken(self: InputBatch, plan: Any) -> Any:
        launch = prepare(self, plan)
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


CASES: list[tuple[Patch, str, str, dict[str, Any]]] = [
    (skip_the_guard, "test_carry", "test_case_83_a_length_stop_breaks_when_its_request_leaves_the_plan", {}),
    (drop_the_remap, "test_carry", "test_case_84_a_reorder_of_the_same_set_is_remapped_on_the_device", {}),
    (remap_the_wrong_way, "test_carry", "test_case_84_a_reorder_of_the_same_set_is_remapped_on_the_device", {}),
    (free_early, "test_flow", "test_case_12_a_successor_takes_the_place_of_a_stopped_request", {}),
    (reuse_a_staging_buffer, "test_flow", "test_case_93_buffers_are_not_written_while_a_launch_owns_them", {}),
    (apply_twice, "test_flow", "test_case_09_short_requests_join_two_long_ones_each_step", {}),
    (update_twice, "test_flow", "test_case_08_sixteen_concurrent_requests_are_exact", {}),
    (break_without_waiting, "test_flow", "test_case_09_short_requests_join_two_long_ones_each_step", {}),
    (keep_surplus_tokens, "test_flow", "test_case_12_a_successor_takes_the_place_of_a_stopped_request", {}),
    (ignore_tokens_in_flight, "test_flow", "test_case_10_length_stop_samples_exactly_n_rows", {"num": 17}),
    (count_every_chunk, "test_flow", "test_case_13_prompts_around_the_chunk_budget", {}),
    (condense_wrongly, "test_flow", "test_case_93_buffers_are_not_written_while_a_launch_owns_them", {}),
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
    function = getattr(load(module), test)
    if module == "test_flow":
        arguments = {"async_scheduling": True, **arguments}

    async def run() -> None:
        async with asyncio.timeout(8):
            await function(**arguments)

    mutate(monkeypatch)
    with pytest.raises(BaseException) as caught:  # noqa: PT011  any failure counts
        asyncio.run(run())
    assert not isinstance(caught.value, KeyboardInterrupt)
