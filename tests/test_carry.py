"""The carries' decisions, and what an engine counts: what is fed, what breaks, and why."""

from __future__ import annotations

import asyncio
import itertools
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import ConfigError, Engine
from aneuron.batch import InputBatch
from aneuron.carry import (
    Feed,
    FromSlots,
    HandoffCarry,
    HostCarry,
    HostIds,
    Mismatch,
    Remap,
    ResidentCarry,
    make_carry,
)
from aneuron.plans import BreakReason
from aneuron.testing import Count, no_leaks, sim_engine
from tests.support import (
    CARRIES,
    after,
    both_async_carries,
    break_counts,
    device_of,
    patient,
    swap_rows,
)

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

BUCKETS: dict[str, Any] = {"num_seqs_buckets": [1, 2, 4, 8], "max_num_seqs": 8}


def launch(ids: list[int], *, rows: int, is_decode: bool = True) -> Any:
    inputs = SimpleNamespace(is_decode=is_decode, num_rows=rows, input_ids=np.zeros(rows, np.int32))
    return SimpleNamespace(request_ids=np.array(ids), inputs=inputs)


def pending(ids: list[int], *, rows: int, dtype: str = "int32") -> Any:
    future = SimpleNamespace(shape=(rows,), dtype=dtype)
    return SimpleNamespace(
        request_ids=np.array(ids), sampled_token_ids=future, verifies_drafts=False
    )


def plan(ids: list[int]) -> Any:
    return SimpleNamespace(request_ids=np.array(ids))


class TestDecisions:
    """`HandoffCarry` as a pure function."""

    def test_the_first_step_takes_host_ids(self) -> None:
        assert HandoffCarry().decide(launch([1], rows=1), None) == HostIds()
        assert not HandoffCarry().composition_changed(plan([1]), None)

    def test_a_prefill_takes_host_ids(self) -> None:
        step = launch([1], rows=1, is_decode=False)
        assert HandoffCarry().decide(step, pending([1], rows=1)) == HostIds()

    def test_the_same_rows_are_fed(self) -> None:
        step = pending([3, 1], rows=2)
        decision = HandoffCarry().decide(launch([3, 1], rows=2), step)
        assert decision == Feed(step.sampled_token_ids)

    @pytest.mark.parametrize("ids", [[1, 2], [1, 2, 3, 4], [1, 2, 9], []])
    def test_another_set_is_a_changed_composition(self, ids: list[int]) -> None:
        assert HandoffCarry().composition_changed(plan(ids), pending([1, 2, 3], rows=4))

    def test_another_order_of_the_same_set_is_not(self) -> None:
        assert not HandoffCarry().composition_changed(plan([3, 1, 2]), pending([1, 2, 3], rows=4))

    def test_another_order_is_remapped_and_padding_stays(self) -> None:
        decision = HandoffCarry().decide(launch([7, 5, 6], rows=4), pending([5, 6, 7], rows=4))
        assert isinstance(decision, Remap)
        assert decision.order.tolist() == [2, 0, 1, 3]

    def test_shape_and_dtype_are_compared(self) -> None:
        carry = HandoffCarry()
        assert carry.decide(launch([1, 2, 3], rows=4), pending([1, 2, 3], rows=3)) == Mismatch(
            BreakReason.SHAPE_MISMATCH
        )
        assert carry.decide(launch([1], rows=1), pending([1], rows=1, dtype="int64")) == Mismatch(
            BreakReason.DTYPE_MISMATCH
        )

    def test_the_host_carry_never_breaks(self) -> None:
        carry = make_carry("host")
        assert isinstance(carry, HostCarry)
        assert not carry.composition_changed(plan([1]), pending([2], rows=1))
        assert carry.decide(launch([1], rows=1), pending([1], rows=1)) == HostIds()

    @pytest.mark.parametrize("name", ["auto", "resident"])
    def test_the_resident_carry_reads_slots_whoever_ran_before(self, name: str) -> None:
        carry = make_carry(name, has_slots=True)
        assert isinstance(carry, ResidentCarry)
        assert not carry.composition_changed(plan([1]), pending([2, 3], rows=2))
        step = pending([2, 3], rows=2, dtype="int64")
        assert carry.decide(launch([1], rows=1), step) == FromSlots()
        assert carry.decide(launch([1], rows=1), None) == FromSlots()
        assert carry.decide(launch([1], rows=1, is_decode=False), step) == HostIds()

    def test_auto_is_handoff_without_slots(self) -> None:
        assert isinstance(make_carry("auto"), HandoffCarry)
        assert isinstance(make_carry("handoff", has_slots=True), HandoffCarry)


def handoff_engine(model: Any = None, **options: Any) -> AbstractAsyncContextManager[Engine]:
    return sim_engine(model or Count(), **CARRIES["handoff"], **options)


async def prefilled_together(engine: Engine, lasts: list[int], max_tokens: int) -> list[list[int]]:
    streams = [engine.generate(prompt_token_ids=[last], max_tokens=max_tokens) for last in lasts]
    answers = await asyncio.gather(*streams)
    await engine.wait_idle()
    return [answer.token_ids for answer in answers]


async def test_case_83_a_length_stop_breaks_when_its_request_leaves_the_plan() -> None:
    async with handoff_engine(latency=patient()) as engine, no_leaks(engine):
        first = engine.generate(prompt_token_ids=[100], max_tokens=5)
        second = engine.generate(prompt_token_ids=[200], max_tokens=9)
        assert (await first).token_ids == after(100, 5)
        assert (await second).token_ids == after(200, 9)
        await engine.wait_idle()
        stats = engine.stats()
        # A prefill of two and four decodes of two ([2] fits the bucket of 2 at once); then
        # A is left out one step before it is reported: a break; its removal moves B into
        # row 0 of a decode of one, which changes no order.
        assert stats.steps == 9
        assert break_counts(engine) == {"composition_changed": 1}
        assert stats.async_steps == 7
        assert stats.sync_fallback_steps == 2
        assert device_of(engine).num_rows == 5 + 9


async def test_case_84_the_middle_of_three_ends_then_condense_reorders() -> None:
    async with handoff_engine(latency=patient(), **BUCKETS) as engine, no_leaks(engine):
        streams = [
            engine.generate(prompt_token_ids=[1000 * n], max_tokens=length)
            for n, length in ((1, 10), (2, 5), (3, 10))
        ]
        for number, stream in enumerate(streams, 1):
            assert (await stream).token_ids == after(1000 * number, 5 if number == 2 else 10)
        await engine.wait_idle()
        # Prefill [3] against a decode bucket of 4: a shape mismatch. The middle one leaves
        # the plan: a composition break, and 4 → 2 rows. Nothing is out of order: rows 0, 2,
        # then `condense` puts row 2 into the gap between 0 and the end.
        assert break_counts(engine) == {"shape_mismatch": 1, "composition_changed": 1}


async def test_case_84_a_reorder_of_the_same_set_is_remapped_on_the_device() -> None:
    update, turns = InputBatch.update, itertools.count(1)

    def reordering(self: InputBatch, plan: Any) -> None:
        update(self, plan)
        if next(turns) == 6:
            swap_rows(self, 0, 1)
            swap_rows(self, 1, 2)

    async with handoff_engine(latency=patient(), **BUCKETS) as engine, no_leaks(engine):
        # Three rows in a bucket of four; in step 6 the batch has each in the next one's
        # place: the same set in another order, whose inverse is another one.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InputBatch, "update", reordering)
            lasts = [1000, 2000, 3000]
            expected = [after(last, 12) for last in lasts]
            assert await prefilled_together(engine, lasts, 12) == expected
        stats = engine.stats()
        assert break_counts(engine) == {"shape_mismatch": 1, "reordered": 1}
        assert stats.steps == 12
        assert stats.sync_fallback_steps == 3  # the prefill, the shape, the remap
        assert stats.async_steps == 9


@pytest.mark.parametrize(
    ("num", "expected"), [(1, {}), (2, {}), (3, {"shape_mismatch": 1}), (8, {})]
)
async def test_case_85_first_decode_after_a_prefill(num: int, expected: dict[str, int]) -> None:
    async with handoff_engine(latency=patient(), **BUCKETS) as engine, no_leaks(engine):
        lasts = [1000 * n for n in range(1, num + 1)]
        assert await prefilled_together(engine, lasts, 10) == [after(last, 10) for last in lasts]
        stats = engine.stats()
        assert stats.steps == 10
        assert break_counts(engine) == expected
        assert stats.async_steps == 9 - len(expected)
        assert stats.decode_async_share == pytest.approx((9 - len(expected)) / 9)


async def test_case_86_int64_ids_break_every_step_and_are_never_cast_silently() -> None:
    model = Count(sampled_dtype="int64")
    async with handoff_engine(model, latency=patient()) as engine, no_leaks(engine):
        assert await prefilled_together(engine, [1000, 2000], 8) == [after(1000, 8), after(2000, 8)]
        stats = engine.stats()
        assert stats.async_steps == 0
        assert stats.sync_fallback_steps == 8
        assert break_counts(engine) == {"dtype_mismatch": 7}


async def test_a_joining_request_breaks_and_the_flow_resumes() -> None:
    async with handoff_engine(latency=patient()) as engine, no_leaks(engine):
        first = engine.generate(prompt_token_ids=[100], max_tokens=30)
        for _ in range(5):
            await anext(first)
        second = engine.generate(prompt_token_ids=[900], max_tokens=10)
        assert (await second).token_ids == after(900, 10)
        assert (await first).token_ids == after(100, 30)
        await engine.wait_idle()
        stats = engine.stats()
        # Its prefill, the first decode of both, and its leaving; beside the first prefill.
        assert break_counts(engine) == {"composition_changed": 3}
        assert stats.breaks["composition_changed"].seconds > 0
        assert stats.async_steps + stats.sync_fallback_steps == stats.steps
        assert stats.async_steps == stats.steps - 4


async def test_an_idle_spell_is_no_break() -> None:
    async with handoff_engine(latency=patient()) as engine, no_leaks(engine):
        for start in (100, 200):
            await engine.generate(prompt_token_ids=[start], max_tokens=4)
            await engine.wait_idle()
        stats = engine.stats()
        assert break_counts(engine) == {}
        assert (stats.async_steps, stats.sync_fallback_steps) == (6, 2)


async def test_the_synchronous_baseline_counts_neither() -> None:
    async with sim_engine(Count(), async_scheduling=False) as engine, no_leaks(engine):
        await prefilled_together(engine, [1, 2, 3], 5)
        stats = engine.stats()
        assert stats.steps == 5
        assert (stats.async_steps, stats.sync_fallback_steps, stats.breaks) == (0, 0, {})


async def test_auto_is_resident_where_the_model_has_slots() -> None:
    async with sim_engine(Count(), latency=patient()) as engine, no_leaks(engine):
        assert await prefilled_together(engine, [1000, 2000, 3000], 5) == [
            after(last, 5) for last in (1000, 2000, 3000)
        ]
        stats = engine.stats()
        assert (stats.async_steps, stats.sync_fallback_steps, stats.breaks) == (4, 1, {})
        assert stats.decode_async_share == 1.0
    async with sim_engine(Count(sampled_dtype="int64"), latency=patient()) as engine:
        await prefilled_together(engine, [1000], 3)
        assert break_counts(engine) == {"dtype_mismatch": 2}, "no slots: handoff"


async def test_resident_needs_slots_and_says_so() -> None:
    with pytest.raises(ConfigError) as caught:
        await Engine(Count(sampled_dtype="int64"), token_carry="resident").open()
    assert caught.value.param == "token_carry"
    with pytest.raises(ConfigError, match="async_scheduling=True"):
        Engine("sim:count", token_carry="resident", async_scheduling=False)


@both_async_carries
async def test_breaks_are_told_with_their_time_and_requests(
    carry: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each one at DEBUG: the step held up, the reason, what it cost, whose step it was."""
    caplog.set_level(logging.DEBUG, logger="aneuron.flow")
    async with sim_engine(Count(), latency=0.01, timeline=True, **carry) as engine:
        first = engine.generate(prompt_token_ids=[100], max_tokens=3)
        second = engine.generate(prompt_token_ids=[200], max_tokens=6)
        await asyncio.gather(first, second)
        await engine.wait_idle()
        messages = [one.getMessage() for one in caplog.records if one.name == "aneuron.flow"]
        broken = [one for one in engine.timeline.steps if one.breaks]
        if carry is CARRIES["resident"]:
            assert (messages, broken) == ([], [])
            return
        (record,) = broken
        ((reason, start_s, end_s),) = record.breaks
        assert (record.step_id, reason) == (4, BreakReason.COMPOSITION_CHANGED)
        cost_ms = 1e3 * (end_s - start_s)
        assert 5 < cost_ms < 500, "most of the program before it"
        assert engine.stats().breaks[reason].seconds == pytest.approx(end_s - start_s)
        assert messages == [f"step 4: {reason} cost {cost_ms:.3f} ms; requests [2]"]
