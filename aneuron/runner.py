"""`ModelRunner`: the step coroutine, from a plan to a launch and a step in flight.

Comes in: `SchedulerOutput`. Goes out: `InFlightStep`, whose `get_output()` gives the tokens.
Run by the step loop. Wherever the engine must stop and wait for the device on the critical
path, there is an `await` in `execute_model`: a break of the flow, with its reason.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.carry import Feed, FromSlots, HostIds, Mismatch, Remap
from aneuron.clock import clock_of
from aneuron.errors import DeviceError
from aneuron.outputs import BreakStats
from aneuron.plans import (
    Break,
    BreakReason,
    ModelRunnerOutput,
    PromptLogprobs,
    Sampled,
    SampledLogprobs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aneuron.batch import InputBatch, Launch
    from aneuron.carry import Carry
    from aneuron.device import Device, Model
    from aneuron.futures import DeviceFuture
    from aneuron.plans import ModelInput, SchedulerOutput, StepRecord

__all__ = ["AsyncExecutionBuffer", "FlowStats", "InFlightStep", "ModelRunner"]

_logger = logging.getLogger("aneuron.flow")


@dataclass(slots=True)
class FlowStats:
    """What became of each step launched; breaks with how often and how long."""

    steps: int = 0
    decode_steps: int = 0
    async_steps: int = 0
    sync_fallback_steps: int = 0
    break_counts: dict[BreakReason, int] = field(default_factory=dict)
    break_seconds: dict[BreakReason, float] = field(default_factory=dict)

    def note_step(self, *, is_decode: bool, is_async: bool | None) -> None:
        """Count a step once; `is_async` is None where the carry makes no difference."""
        self.steps += 1
        self.decode_steps += is_decode
        if is_async is not None:
            self.async_steps += is_async
            self.sync_fallback_steps += not is_async

    def note_break(self, record: StepRecord, one: Break) -> None:
        """Count a break, and keep it with the step that it held up."""
        record.breaks = (*record.breaks, one)
        reason, seconds = one.reason, one.end_s - one.start_s
        self.break_counts[reason] = self.break_counts.get(reason, 0) + 1
        self.break_seconds[reason] = self.break_seconds.get(reason, 0.0) + seconds
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug(
                "step %d: %s cost %.3f ms; requests %s",
                record.step_id, reason, 1e3 * seconds, record.request_ids.tolist(),
            )  # fmt: skip

    def prolong_break(self, record: StepRecord, end_s: float) -> None:
        """Let the step's break end later: another rank had to wait longer."""
        *before, last = record.breaks
        record.breaks = (*before, last._replace(end_s=end_s))
        self.break_seconds[last.reason] += end_s - last.end_s

    def breaks(self) -> dict[str, BreakStats]:
        """Return counts and times by the reasons' names."""
        return {
            reason.value: BreakStats(number, self.break_seconds[reason])
            for reason, number in self.break_counts.items()
        }


class InFlightStep:
    """A launched step: its plan, its future, and who its rows are.

    Materialized exactly once, by whoever awaits first: the materializer, or a break.
    """

    __slots__ = (
        "_batch",
        "_is_let_go",
        "_launch",
        "_output",
        "_previous",
        "is_read",
        "plan",
        "sampled_token_ids",
    )

    def __init__(
        self,
        plan: SchedulerOutput,
        launch: Launch,
        future: DeviceFuture,
        batch: InputBatch,
        previous: InFlightStep | None,
        *,
        is_read: bool = True,
    ) -> None:
        """Make the handle.

        Args:
            plan: of the step.
            launch: of the plan.
            future: of the launch.
            batch: where its tokens are written.
            previous: the step launched before, if not yet settled.
            is_read: whether its tokens are copied to the host also without a break.
        """
        self.is_read = is_read
        self.plan = plan
        self.sampled_token_ids = future
        self._launch = launch
        self._batch = batch
        # Where steps are not read, a break needs this one's tokens alone: rows that it lacks
        # were forced by the break that let them out.
        self._previous = previous if is_read else None
        self._is_let_go = False  # the materializer is done with it, and saw no failure
        self._output: ModelRunnerOutput | None = None

    @property
    def request_ids(self) -> np.ndarray:
        """Internal ids of the rows, int64 [num_reqs], in launch order."""
        return self._launch.request_ids

    async def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens and write them to the batch; may be called again.

        Cancelled: nothing has been written, and the next call does it.

        Raises:
            DeviceError: the step, or one that fed it, failed.
        """
        if (previous := self._previous) is not None:
            if previous._output is None:  # noqa: SLF001  its own kind
                await previous.settle()
            self._previous = None
        try:
            values = await self.sampled_token_ids
        finally:
            self._note_run()
        if getattr(values, "ndim", 1) == 2:
            values = await asyncio.to_thread(_sample_on_host, values, self._launch.inputs)
        # From here on nothing waits: the check and the write are one.
        if self._output is None:
            self._output = self._materialize(values)
        return self._output

    async def settle(self) -> None:
        """Wait as `get_output` does, and leave a failure to the materializer.

        Raises:
            DeviceError: it failed behind the materializer's back: tokens that it had left on
                the device could not be read.
        """
        if self._output is not None:
            return
        try:
            await self.get_output()
        except DeviceError:
            if self._is_let_go:
                raise

    async def discard(self) -> None:
        """Wait for the step's end and leave its tokens on the device.

        Raises:
            DeviceError: the step, or one that fed it, failed.
        """
        await self.sampled_token_ids.discard()
        self._is_let_go = True

    def fail(self, error: DeviceError) -> None:
        """Resolve it with an error if it has no result yet."""
        self.sampled_token_ids.resolve(None, error)

    def _note_run(self) -> None:
        """Record when the program ran: the output rank's, which is the first to be asked."""
        record, future = self.plan.record, self.sampled_token_ids
        if math.isnan(record.read_s) and future.done():
            record.device_start_s = future.device_start_s
            record.device_end_s = future.device_end_s
            record.read_s = future.read_s

    def _materialize(self, values: Any) -> ModelRunnerOutput:
        launch, logprobs, of_prompts = self._launch, None, None
        if isinstance(values, Sampled):
            values, logprobs, of_prompts = values
        tokens = np.asarray(values)[: len(launch.slots)].astype(np.int32, copy=False)
        slots, ends, emits = launch.slots, launch.ends, launch.emits
        if logprobs is not None:
            logprobs = _by_slot(logprobs, slots, emits)
        if emits is not None:
            slots, ends, tokens = slots[emits], ends[emits], tokens[emits]
        self._batch.apply(slots, ends, tokens)
        parts = () if of_prompts is None else tuple(_parts(of_prompts, launch.inputs))
        return ModelRunnerOutput(slots, tokens, logprobs, parts)


def _by_slot(
    logprobs: SampledLogprobs, slots: np.ndarray, emits: np.ndarray | None
) -> SampledLogprobs:
    """Return logprobs with slots in place of samples, of those whose tokens count."""
    samples, *columns = logprobs
    if emits is not None:
        counts = emits[samples]
        samples, columns = samples[counts], [column[counts] for column in columns]
    return SampledLogprobs(slots[samples], *columns)


def _parts(
    logprobs: PromptLogprobs, inputs: ModelInput
) -> Iterator[tuple[int, int, PromptLogprobs]]:
    """Yield the part of each prompt: slot, position of its first token, and its columns."""
    assert inputs.prompt_targets is not None
    begin = 0
    for slot, position, count in inputs.prompt_targets.parts:
        columns = (column[begin : begin + count] for column in logprobs)
        yield slot, position, PromptLogprobs(*columns)
        begin += count


@dataclass(slots=True)
class AsyncExecutionBuffer:
    """The step whose future the next launch may be fed with."""

    pending: InFlightStep | None = None


class ModelRunner:
    """One rank: a device, the model on it, and its view of the batch.

    The tokens of the output rank are read back each step; other ranks run the same plans,
    and a break alone reads theirs.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        batch: InputBatch,
        carry: Carry,
        *,
        is_output_rank: bool = True,
    ) -> None:
        """Make a runner over a device; `device.start` comes before the first step."""
        self.device = device
        self.model = model
        self.batch = batch
        self.carry = carry
        self.is_output_rank = is_output_rank
        self._is_read = is_output_rank or carry.reads_all_ranks
        self.last_break: Break | None = None  # of the step launched last
        self._clock: Callable[[], float] = monotonic
        self.stats = FlowStats()
        self.async_execution_buffer = AsyncExecutionBuffer()
        self._executed: tuple[SchedulerOutput, Launch, DeviceFuture] | None = None

    async def execute_model(self, plan: SchedulerOutput) -> None:
        """Launch a plan; the awaits below are the breaks of the flow."""
        self.last_break = None
        pending = self.async_execution_buffer.pending
        if self.carry.composition_changed(plan, pending):
            # Before any state changes: afterwards the batch holds every token.
            await self._break(plan, pending, BreakReason.COMPOSITION_CHANGED)
            pending = None
        self.batch.update(plan)
        launch = self.batch.prepare(plan)
        decision = self.carry.decide(launch, pending)
        match decision:
            case Feed(tokens):
                launch.inputs.input_ids = tokens
            case Remap(tokens, order):
                launch.inputs.input_ids = self._remap(plan, tokens, order)
            case Mismatch(reason):
                await self._break(plan, pending, reason)
                launch = self.batch.prepare(plan)
            case HostIds() | FromSlots():
                pass  # as prepared
        self._launch_forward(plan, launch, is_async=isinstance(decision, Feed | FromSlots))

    def sample_tokens(self) -> InFlightStep:
        """Return the step in flight; its executable samples, so there is no more to launch."""
        assert self._executed is not None, "execute_model() comes first"
        plan, launch, future = self._executed
        self._executed = None
        previous = self.async_execution_buffer.pending
        step = InFlightStep(plan, launch, future, self.batch, previous, is_read=self._is_read)
        self.async_execution_buffer.pending = step
        return step

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the device; see `Device.start`."""
        self._clock = clock_of(loop)
        self.device.start(loop)

    def close(self) -> list[DeviceFuture]:
        """Close the device; the future resolves when its threads have ended."""
        return [self.device.close()]

    def records(self) -> dict[str, int]:
        """Return how much is kept of requests and steps; all 0 when idle."""
        pending = self.async_execution_buffer.pending
        return {"rows": self.batch.num_reqs, "pending step": int(pending is not None)}

    def drain(self, removed_slots: tuple[int, ...]) -> None:
        """Let go of everything; called when nothing is in flight and nothing waits."""
        self.async_execution_buffer.pending = None
        self.batch.remove(removed_slots)
        self.batch.forget_inputs()

    async def _break(
        self, plan: SchedulerOutput, pending: InFlightStep | None, reason: BreakReason
    ) -> None:
        """Force a pending future, so that the batch holds its tokens.

        Cancelled, the engine is closing: the step stays with the materializer.
        """
        assert pending is not None
        start_s = self._clock()
        await pending.settle()
        self._note_break(plan, Break(reason, start_s, self._clock()))

    def _remap(
        self, plan: SchedulerOutput, tokens: DeviceFuture, order: np.ndarray
    ) -> DeviceFuture:
        now_s = self._clock()
        self._note_break(plan, Break(BreakReason.REORDERED, now_s, now_s))
        return self.device.gather(tokens, order)

    def _note_break(self, plan: SchedulerOutput, one: Break) -> None:
        self.last_break = one
        if self.is_output_rank:  # all ranks break alike: it counts once
            self.stats.note_break(plan.record, one)

    def _launch_forward(self, plan: SchedulerOutput, launch: Launch, *, is_async: bool) -> None:
        record = plan.record
        record.prepared_s = self._clock()
        executable = self.model.executable(launch.inputs)
        future = self.device.launch(executable, launch.inputs, read=self._is_read)
        self.batch.advance(plan)
        self._executed = (plan, launch, future)
        record.is_async = is_async if self.carry.counts_steps else None
        self.stats.note_step(is_decode=plan.is_decode, is_async=record.is_async)
        record.launched_s = self._clock()


def _sample_on_host(logits: np.ndarray, inputs: ModelInput) -> np.ndarray:
    from aneuron.models.sampling.sampler import sample_on_host  # torch, only where needed

    return sample_on_host(logits, inputs)
