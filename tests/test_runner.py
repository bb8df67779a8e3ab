"""The step coroutine and its steps in flight: in order, once, and a break does no more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aneuron import DeviceError, DeviceFuture, SamplingParams
from aneuron.batch import BatchShape, InputBatch, Launch
from aneuron.carry import BreakReason, make_carry
from aneuron.config import EngineConfig
from aneuron.errors import OutOfMemory
from aneuron.kv_cache import KVCacheManager
from aneuron.request import Request
from aneuron.runner import InFlightStep, ModelRunner
from aneuron.scheduler import Scheduler


def pending_future(rows: int = 1) -> DeviceFuture:
    return DeviceFuture(asyncio.get_running_loop(), shape=(rows,), dtype="int32")


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# ── steps in flight ─────────────────────────────────────────────────────────────────────


class RecordingBatch:
    """Keeps what was written to it, in order."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []

    def apply(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        self.written.append(tokens.tolist())


def step_of(batch: Any, previous: InFlightStep | None = None) -> InFlightStep:
    plan: Any = None
    inputs: Any = None
    launch = Launch(inputs, np.array([1]), np.array([0], np.int32), np.array([True]))
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


class HandDevice:
    """Launches nothing; the test resolves each future."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, DeviceFuture]] = []

    def launch(self, executable: Any, inputs: Any) -> DeviceFuture:
        self.launched.append((inputs.input_ids, pending_future(inputs.num_sampled)))
        return self.launched[-1][1]


class Flow:
    """A scheduler and a runner over a device that is played by hand."""

    def __init__(self) -> None:
        config = EngineConfig(max_num_seqs=4, block_size=4, max_in_flight_steps=3)
        shape = BatchShape.of(config, 64)
        self.scheduler = Scheduler(
            KVCacheManager(64, 4, shape.num_slots),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            length_limit=64,
            eos_token_ids=(),
            num_slots=shape.num_slots,
            clock=lambda: 1.0,
        )
        self.device = HandDevice()
        self.batch = InputBatch(shape)
        model: Any = SimpleNamespace(executable=lambda _: None)
        device: Any = self.device
        self.runner = ModelRunner(device, model, self.batch, make_carry("auto"))

    def add(self, number: int, *prompt: int) -> Request:
        request = Request(number, f"r{number}", SamplingParams(), arrival_s=0.0)
        request.prompt_ids = np.array(prompt, np.int32)
        self.scheduler.add(request)
        return request

    async def step(self) -> InFlightStep:
        plan = self.scheduler.schedule()
        assert plan is not None
        await self.runner.execute_model(plan)
        return self.runner.sample_tokens()


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
    assert flow.batch.num_tokens[row] == 3
    # The scheduler and the consumer have not seen it.
    assert one.output_ids.tolist() == []
    assert flow.scheduler._known[one.slot] == 2
    assert flow.scheduler._pending[one.slot] == 1
    assert one.first_token_s is None
    updated = flow.scheduler.update_from_output(first.plan, await first.get_output())
    assert updated == [one]
    assert one.output_ids.tolist() == [60]
    assert flow.batch.num_tokens[row] == 3, "written once"
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
