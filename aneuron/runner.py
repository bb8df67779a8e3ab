"""`ModelRunner`: the step coroutine, from a plan to a launch and a step in flight.

Comes in: `SchedulerOutput`. Goes out: `InFlightStep`, whose `get_output()` gives the tokens.
Run by the step loop. Wherever a launch must stop and wait for the device on the critical path,
there is an `await` in `execute_model`: a break of the flow, with its reason. What waits for
masks and hooks before it samples is in guidance.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, cast

import numpy as np

from aneuron.carry import Feed, FromSlots, Mismatch, Remap
from aneuron.clock import clock_of
from aneuron.inflight import InFlightStep
from aneuron.outputs import BreakStats
from aneuron.plans import Break, BreakReason, LogitEdits

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aneuron.batch import InputBatch, Launch
    from aneuron.carry import Carry
    from aneuron.device import Device, Model, SplitExecutable, SplitModel
    from aneuron.futures import DeviceFuture
    from aneuron.plans import GrammarOutput, ModelInput, SchedulerOutput, StepRecord

__all__ = ["AsyncExecutionBuffer", "FlowStats", "ModelRunner"]

_logger = logging.getLogger("aneuron.flow")


@dataclass(slots=True)
class FlowStats:
    """What became of each step launched; breaks with how often and how long."""

    carry: str  # how tokens travel from step to step
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
        self.stats = FlowStats(carry.name)
        self.async_execution_buffer = AsyncExecutionBuffer()
        # The future is the forward part's, or None, of a launch whose sampling waits.
        self._executed: tuple[SchedulerOutput, Launch, DeviceFuture | None] | None = None

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
            case _:
                pass  # HostIds, FromSlots: as prepared
        self._launch_forward(plan, launch, is_async=isinstance(decision, Feed | FromSlots))

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> InFlightStep:
        """Return the step in flight; what of it waits for the host is launched now.

        Args:
            grammar_output: what the host says of the launch's `guided` samples, if it has some.
        """
        assert self._executed is not None, "execute_model() comes first"
        plan, launch, future = self._executed
        self._executed = None
        forward = None
        if launch.guided is not None:
            forward, future = future, self._launch_guided(launch, future, grammar_output)
            if forward is None:
                plan.record.launched_s = self._clock()
        assert future is not None, "only a guided launch waits"
        previous = self.async_execution_buffer.pending
        step = InFlightStep(
            plan, launch, future, self.batch, previous, forward=forward, is_read=self._is_read
        )
        self.async_execution_buffer.pending = step
        return step

    @property
    def guided(self) -> Launch | None:
        """The launch whose sampling waits for `sample_tokens`, if it does."""
        launch = None if self._executed is None else self._executed[1]
        return None if launch is None or launch.guided is None else launch

    def read_logits(self, samples: np.ndarray) -> DeviceFuture:
        """Have logits copied to the host, of samples of the launch that waits, int64 [H].

        Returns:
            Of float32 [H, V].
        """
        assert self._executed is not None, "execute_model() comes first"
        _, launch, forward = self._executed
        none = np.zeros(0, np.int64)
        edits = LogitEdits(none, np.zeros((0, 0), np.int32), samples, np.zeros((0, 0), np.float32))
        inputs = replace(launch.inputs, edits=edits)
        return self.device.launch(self._split(inputs).hooked, inputs, feed=forward)

    def note_break(self, plan: SchedulerOutput, one: Break) -> None:
        """Count a break before sampling: a step that was asynchronous until then is not."""
        self._note_break(plan, one)
        if plan.record.is_async:
            plan.record.is_async = False
            self.stats.async_steps -= 1
            self.stats.sync_fallback_steps += 1

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the device; see `Device.start`."""
        self._clock = clock_of(loop)
        self.device.start(loop)

    def close(self) -> list[DeviceFuture]:
        """Close the device, and let go of the model, whose memory may be the device's.

        The future resolves when the device's threads have ended.
        """
        self.__dict__.pop("model", None)  # a rank that did not start is closed twice
        self.async_execution_buffer.pending = None
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
        record, inputs, future = plan.record, launch.inputs, None
        record.prepared_s = self._clock()
        if launch.guided is None:
            executable = self.model.executable(inputs)
            future = self.device.launch(executable, inputs, read=self._is_read)
        elif self.model.spec.is_split:
            # The host has its say later: the device computes meanwhile.
            future = self.device.launch(self._split(inputs).forward, inputs, read=False)
        else:
            is_async = False
        self.batch.advance(plan)
        self._executed = (plan, launch, future)
        # Fed with the device's own tokens, but only once the host had seen them: not ahead.
        waited = any(one.reason is BreakReason.SPECULATION for one in record.breaks)
        record.is_async = is_async and not waited if self.carry.counts_steps else None
        self.stats.note_step(is_decode=not plan.is_prefill, is_async=record.is_async)
        if future is not None:
            record.launched_s = self._clock()

    def _launch_guided(
        self, launch: Launch, forward: DeviceFuture | None, told: GrammarOutput | None
    ) -> DeviceFuture:
        """Launch what waited for the host: the sampling part, or all of a fused program."""
        assert told is not None, "the host has not spoken yet"
        # Its own object: the device may look at the other one now.
        inputs = replace(launch.inputs, edits=_edits(launch, told))
        if forward is None:
            executable = self.model.executable(inputs)
            return self.device.launch(executable, inputs, read=self._is_read)
        executable = self._split(inputs).sampling
        return self.device.launch(executable, inputs, read=self._is_read, feed=forward)

    def _split(self, inputs: ModelInput) -> SplitExecutable:
        return cast("SplitModel", self.model).split(inputs)


def _edits(launch: Launch, told: GrammarOutput) -> LogitEdits:
    """Return what the host said, with samples of the launch in place of slots."""
    assert launch.guided is not None
    sample_of = dict(zip(launch.slots[launch.guided].tolist(), launch.guided.tolist(), strict=True))

    def samples(slots: np.ndarray) -> np.ndarray:
        return np.array([sample_of[slot] for slot in slots.tolist()], np.int64)

    return LogitEdits(samples(told.slots), told.bitmask, samples(told.hooked_slots), told.logits)
