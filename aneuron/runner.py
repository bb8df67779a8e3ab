"""`ModelRunner`: the step coroutine, from a plan to a launch and a step in flight.

Comes in: `SchedulerOutput`. Goes out: `InFlightStep`, whose `get_output()` gives the tokens.
Run by the step loop. Wherever the engine must stop and wait for the device on the critical
path, there is an `await` in `execute_model`: a break of the flow, with its reason.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.carry import BreakReason, Feed, HostIds, Mismatch, Remap
from aneuron.errors import DeviceError
from aneuron.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from aneuron.batch import InputBatch, Launch
    from aneuron.carry import Carry
    from aneuron.device import Device, Model
    from aneuron.futures import DeviceFuture
    from aneuron.outputs import ModelInput, SchedulerOutput

__all__ = ["AsyncExecutionBuffer", "FlowStats", "InFlightStep", "ModelRunner"]


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

    def note_break(self, reason: BreakReason, seconds: float = 0.0) -> None:
        """Count a break and the time it cost."""
        self.break_counts[reason] = self.break_counts.get(reason, 0) + 1
        self.break_seconds[reason] = self.break_seconds.get(reason, 0.0) + seconds


class InFlightStep:
    """A launched step: its plan, its future, and who its rows are.

    Materialized exactly once, by whoever awaits first: the materializer, or a break.
    """

    __slots__ = ("_batch", "_launch", "_output", "_previous", "plan", "sampled_token_ids")

    def __init__(
        self,
        plan: SchedulerOutput,
        launch: Launch,
        future: DeviceFuture,
        batch: InputBatch,
        previous: InFlightStep | None,
    ) -> None:
        """Make the handle; `previous` is the step launched before, if not yet settled."""
        self.plan = plan
        self.sampled_token_ids = future
        self._launch = launch
        self._batch = batch
        self._previous = previous
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
        if self._previous is not None:
            await self._previous.settle()
            self._previous = None
        values = await self.sampled_token_ids
        if values.ndim == 2:
            values = await asyncio.to_thread(_sample_on_host, values, self._launch.inputs)
        # From here on nothing waits: the check and the write are one.
        if self._output is None:
            self._output = self._materialize(values)
        return self._output

    async def settle(self) -> None:
        """Wait as `get_output` does, and leave a failure to the materializer."""
        try:
            await self.get_output()
        except DeviceError:
            return

    def _materialize(self, values: Any) -> ModelRunnerOutput:
        launch = self._launch
        tokens = np.asarray(values)[: len(launch.slots)].astype(np.int32, copy=False)
        output = ModelRunnerOutput(launch.slots[launch.emits], tokens[launch.emits])
        self._batch.apply(output.slots, output.token_ids)
        return output


@dataclass(slots=True)
class AsyncExecutionBuffer:
    """The step whose future the next launch may be fed with."""

    pending: InFlightStep | None = None


class ModelRunner:
    """One rank: a device, the model on it, and its view of the batch."""

    def __init__(self, device: Device, model: Model, batch: InputBatch, carry: Carry) -> None:
        """Make a runner over a started device."""
        self.device = device
        self.model = model
        self.batch = batch
        self.carry = carry
        self.stats = FlowStats()
        self.async_execution_buffer = AsyncExecutionBuffer()
        self._executed: tuple[SchedulerOutput, Launch, DeviceFuture] | None = None

    async def execute_model(self, plan: SchedulerOutput) -> None:
        """Launch a plan; the awaits below are the breaks of the flow."""
        pending = self.async_execution_buffer.pending
        if self.carry.composition_changed(plan, pending):
            # Before any state changes: afterwards the batch holds every token.
            await self._break(pending, BreakReason.COMPOSITION_CHANGED)
            pending = None
        self.batch.update(plan)
        launch = self.batch.prepare(plan)
        decision = self.carry.decide(launch, pending)
        match decision:
            case Feed(tokens):
                launch.inputs.input_ids = tokens
            case Remap(tokens, order):
                launch.inputs.input_ids = self._remap(tokens, order)
            case Mismatch(reason):
                await self._break(pending, reason)
                launch = self.batch.prepare(plan)
            case HostIds():
                pass
        self._launch_forward(plan, launch, is_async=isinstance(decision, Feed))

    def sample_tokens(self) -> InFlightStep:
        """Return the step in flight; its executable samples, so there is no more to launch."""
        assert self._executed is not None, "execute_model() comes first"
        plan, launch, future = self._executed
        self._executed = None
        previous = self.async_execution_buffer.pending
        step = InFlightStep(plan, launch, future, self.batch, previous)
        self.async_execution_buffer.pending = step
        return step

    def drain(self, removed_slots: tuple[int, ...]) -> None:
        """Let go of everything; called when nothing is in flight and nothing waits."""
        self.async_execution_buffer.pending = None
        self.batch.remove(removed_slots)

    async def _break(self, pending: InFlightStep | None, reason: BreakReason) -> None:
        """Force a pending future, so that the batch holds its tokens.

        Cancelled, the engine is closing: the step stays with the materializer.
        """
        assert pending is not None
        started_s = monotonic()
        await pending.settle()
        self.stats.note_break(reason, monotonic() - started_s)

    def _remap(self, tokens: DeviceFuture, order: np.ndarray) -> DeviceFuture:
        self.stats.note_break(BreakReason.REORDERED)
        return self.device.gather(tokens, order)

    def _launch_forward(self, plan: SchedulerOutput, launch: Launch, *, is_async: bool) -> None:
        future = self.device.launch(self.model.executable(launch.inputs), launch.inputs)
        self.batch.advance(plan)
        self._executed = (plan, launch, future)
        self.stats.note_step(
            is_decode=plan.is_decode, is_async=is_async if self.carry.counts_steps else None
        )


def _sample_on_host(logits: np.ndarray, inputs: ModelInput) -> np.ndarray:
    from aneuron.models.sampler import sample_on_host  # torch, only where needed

    return sample_on_host(logits, inputs)
