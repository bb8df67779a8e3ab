"""The step coroutine and its steps in flight: in order, once, and a break does no more."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import DeviceError, DeviceFuture, DeviceLost
from aneuron.batch import Launch
from aneuron.errors import OutOfMemory
from aneuron.futures import Watchdog
from aneuron.inflight import InFlightStep
from aneuron.plans import BreakReason
from aneuron.testing import count_engine
from tests.support import Flow, some_turns

if TYPE_CHECKING:
    from aneuron.runner import ModelRunner


def pending_future(rows: int = 1) -> DeviceFuture:
    return DeviceFuture(asyncio.get_running_loop(), shape=(rows,), dtype="int32")


# ── steps in flight ─────────────────────────────────────────────────────────────────────


class RecordingBatch:
    """Keeps what was written to it, in order."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []

    def apply(self, slots: np.ndarray, ends: np.ndarray, tokens: np.ndarray) -> None:
        self.written.append(tokens.tolist())


def step_of(batch: Any, previous: InFlightStep | None = None) -> InFlightStep:
    plan: Any = SimpleNamespace(record=SimpleNamespace(read_s=math.nan))
    inputs: Any = SimpleNamespace(spec_decode_metadata=None)
    launch = Launch(inputs, np.array([1]), np.array([0]), np.array([1]), np.array([True]))
    return InFlightStep(plan, launch, pending_future(), batch, previous)


async def test_steps_are_materialized_in_order_whoever_is_awaited_first() -> None:
    batch = RecordingBatch()
    first = step_of(batch)
    second = step_of(batch, first)
    third = step_of(batch, second)
    task = asyncio.create_task(third.get_output())
    for step, token in ((third, 30), (second, 20)):
        step.sampled_token_ids.resolve(np.array([token]))
        await some_turns()
        assert batch.written == [], "the step before has not been written"
    first.sampled_token_ids.resolve(np.array([10]))
    assert (await task).token_ids.tolist() == [30]
    assert batch.written == [[10], [20], [30]]
    for step, token in ((first, 10), (second, 20), (third, 30)):
        assert (await step.get_output()).token_ids.tolist() == [token]
    assert len(batch.written) == 3


@pytest.mark.parametrize("resolve_first", [True, False])
async def test_two_awaiters_write_the_batch_once(resolve_first: bool) -> None:
    batch = RecordingBatch()
    first = step_of(batch)
    second = step_of(batch, first)
    if resolve_first:
        first.sampled_token_ids.resolve(np.array([10]))
        second.sampled_token_ids.resolve(np.array([20]))
    awaiters = [second.get_output(), second.get_output(), second.settle(), first.get_output()]
    tasks = [asyncio.create_task(one) for one in awaiters]
    await some_turns()
    if not resolve_first:
        first.sampled_token_ids.resolve(np.array([10]))
        second.sampled_token_ids.resolve(np.array([20]))
    outputs = await asyncio.gather(*tasks)
    assert outputs[0] is outputs[1]
    assert batch.written == [[10], [20]]


async def test_cancelled_it_has_written_nothing_and_the_next_does() -> None:
    batch = RecordingBatch()
    step = step_of(batch, step_of(batch))
    previous = step._previous
    assert previous is not None
    for resolved, written in ((previous, []), (step, [[7]])):
        task = asyncio.create_task(step.get_output())
        await some_turns()
        resolved.sampled_token_ids.resolve(np.array([7 + len(written)]))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert batch.written == written
    assert (await step.get_output()).token_ids.tolist() == [8]
    assert batch.written == [[7], [8]]


async def test_a_failed_step_does_not_fail_the_one_behind_it() -> None:
    batch = RecordingBatch()
    first = step_of(batch)
    second = step_of(batch, first)
    first.sampled_token_ids.resolve(None, OutOfMemory("full"))
    second.sampled_token_ids.resolve(np.array([20]))
    await first.settle()
    assert (await second.get_output()).token_ids.tolist() == [20]
    with pytest.raises(OutOfMemory):
        await first.get_output()
    assert batch.written == [[20]]


# ── breaks ──────────────────────────────────────────────────────────────────────────────


def counted(runner: ModelRunner) -> dict[BreakReason, int]:
    return runner.stats.break_counts


async def test_a_break_copies_and_writes_and_does_no_more() -> None:
    """(a) and (b) of the four things; (c) and (d) stay with the materializer."""
    flow = Flow()
    one = flow.add(1, 5, 6)
    first = await flow.step()
    two = flow.add(2, 7)
    flow.scheduler._prefilled_last = False  # its prefill comes next: another set of requests
    breaking = asyncio.create_task(flow.step())
    await some_turns()
    assert not breaking.done()
    assert len(flow.device.launched) == 1, "the break comes before the launch"
    assert flow.batch.num_reqs == 1, "… and before any state changes"
    first.sampled_token_ids.resolve(np.array([60]))
    second = await breaking
    assert counted(flow.runner) == {BreakReason.COMPOSITION_CHANGED: 1}
    row = flow.batch.row_of[one.slot]
    assert flow.batch.token_ids[row, :3].tolist() == [5, 6, 60]
    # The scheduler and the consumer have not seen it.
    assert one.output_ids.tolist() == []
    assert one.first_token_s is None
    updated = flow.scheduler.update_from_output(first.plan, await first.get_output())
    assert updated == [one]
    assert one.output_ids.tolist() == [60]
    assert flow.batch.token_ids[row, :3].tolist() == [5, 6, 60]
    second.sampled_token_ids.resolve(np.array([8]))
    flow.scheduler.update_from_output(second.plan, await second.get_output())
    assert two.output_ids.tolist() == [8]


async def test_a_break_on_a_failed_step_does_not_raise() -> None:
    """The failure is the materializer's to tell; the next plan is launched all the same."""
    flow = Flow()
    one = flow.add(1, 5, 6)
    first = await flow.step()
    two = flow.add(2, 7)
    flow.scheduler._prefilled_last = False
    breaking = asyncio.create_task(flow.step())
    await some_turns()
    first.sampled_token_ids.resolve(None, DeviceError("NaN"))
    second = await breaking
    assert len(flow.device.launched) == 2
    assert counted(flow.runner) == {BreakReason.COMPOSITION_CHANGED: 1}
    assert not one.is_finished
    with pytest.raises(DeviceError) as caught:
        await first.get_output()
    flow.scheduler.fail(first.plan, caught.value)
    second.sampled_token_ids.resolve(np.array([8]))
    flow.scheduler.update_from_output(second.plan, await second.get_output())
    assert two.output_ids.tolist() == [8]
    assert isinstance(one.error, DeviceError)


async def test_a_decode_of_the_same_rows_is_fed_unread() -> None:
    """No break: the launch takes the future itself while it is pending."""
    flow = Flow()
    flow.add(1, 5, 6)
    first = await flow.step()
    second = await flow.step()
    assert flow.device.launched[1][0] is first.sampled_token_ids
    assert counted(flow.runner) == {}
    assert second.plan.is_decode


# ── steps that nobody reads ─────────────────────────────────────────────────────────────


async def test_a_discarded_step_is_waited_for_and_not_written() -> None:
    batch = RecordingBatch()
    step = step_of(batch, step_of(batch))
    task = asyncio.create_task(step.discard())
    await some_turns()
    assert not task.done()
    step.sampled_token_ids.complete()
    await task
    assert batch.written == []


async def test_discarding_a_failed_step_tells_its_fault() -> None:
    step = step_of(RecordingBatch())
    task = asyncio.create_task(step.discard())
    await some_turns()
    step.sampled_token_ids.resolve(None, DeviceError("NaN"))
    with pytest.raises(DeviceError, match="NaN"):
        await task


# ── a device that stays silent ──────────────────────────────────────────────────────────


class Silent:
    """A step in flight that nothing but the watchdog ends."""

    def __init__(self) -> None:
        self.error: DeviceError | None = None
        self.failed_s = math.nan
        self.failed = asyncio.Event()

    def fail(self, error: DeviceError) -> None:
        self.error, self.failed_s = error, time.monotonic()
        self.failed.set()


async def test_the_watchdog_fails_a_step_after_its_own_time_not_an_earlier_ones() -> None:
    dog = Watchdog(0.2)
    first, second = Silent(), Silent()
    dog.watch(first)
    await asyncio.sleep(0.1)
    started_s = time.monotonic()
    dog.watch(second)  # the timer of the first is still on its way
    async with asyncio.timeout(5):
        await second.failed.wait()
    assert first.error is None
    assert isinstance(second.error, DeviceLost)
    assert "step_timeout_s" in str(second.error)
    assert 0.19 < second.failed_s - started_s < 1


async def test_a_watchdog_at_rest_has_no_timer_and_no_step() -> None:
    dog = Watchdog(0.02)
    step = Silent()
    dog.watch(step)
    dog.rest()
    assert dog._timer is None
    assert dog._watched is None
    await asyncio.sleep(0.06)
    assert step.error is None
    dog.watch(step)
    async with asyncio.timeout(5):
        await step.failed.wait()


async def test_an_idle_engine_has_no_timer() -> None:
    async with count_engine() as engine:
        await engine.generate(prompt_token_ids=[1], max_tokens=5)
        await engine.wait_idle()
        assert engine._core._watchdog._timer is None
