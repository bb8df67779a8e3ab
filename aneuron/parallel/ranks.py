"""Ranks: several runners, each with a device, that run every step alike.

Comes in: the plans of the step loop. Goes out: one step in flight for all ranks. Only the
first rank's tokens, the output rank's, are read back; the others' stay on their devices
unless a break, or the carry `host`, needs them on the host. Runs on the loop; a rank in a
process of its own would be another kind of runner here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aneuron.batch import InputBatch
from aneuron.carry import make_carry
from aneuron.errors import DeviceError, DeviceLost
from aneuron.runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from aneuron.batch import Launch
    from aneuron.config import BatchShape, EngineConfig
    from aneuron.device import Device
    from aneuron.futures import DeviceFuture
    from aneuron.inflight import InFlightStep
    from aneuron.models.loading import Loaded
    from aneuron.plans import Break, GrammarOutput, ModelRunnerOutput, SchedulerOutput
    from aneuron.runner import FlowStats

__all__ = ["RankGroup", "RankStep", "make_runner"]


class RankStep:
    """One step in flight on every rank."""

    __slots__ = ("_output", "_steps", "plan")

    def __init__(self, steps: Sequence[InFlightStep]) -> None:
        """Join the ranks' steps; the first is the output rank's."""
        self._steps = tuple(steps)
        self._output = steps[0]
        self.plan = self._output.plan

    async def get_output(self) -> ModelRunnerOutput:
        """Wait for every rank, failed or not; return the output rank's tokens.

        Raises:
            DeviceLost: a rank is lost: at once, since others may wait for it for ever.
            DeviceError: the step failed on any rank.
        """
        faults: list[DeviceError] = []
        try:
            async with asyncio.TaskGroup() as group:
                for step in self._steps:
                    group.create_task(_wait_for(step, faults), name="aneuron-rank")
        except ExceptionGroup as lost:
            fault = lost.exceptions[0]
            raise fault from fault.__cause__
        if faults:
            raise faults[0]
        return await self._output.get_output()

    def fail(self, error: DeviceError) -> None:
        """Resolve what has no result yet with an error."""
        for step in self._steps:
            step.fail(error)


async def _wait_for(step: InFlightStep, faults: list[DeviceError]) -> None:
    """Wait for one rank's step; a fault that leaves the device alive is noted."""
    try:
        await (step.get_output() if step.is_read else step.discard())
    except DeviceLost:
        raise
    except DeviceError as fault:
        faults.append(fault)


class RankGroup:
    """The runners of all ranks, to the core like one runner."""

    def __init__(self, runners: Sequence[ModelRunner]) -> None:
        """Join runners of the same batch shape, model and carry."""
        self.runners = tuple(runners)

    @property
    def stats(self) -> FlowStats:
        """What became of the steps; all ranks do alike, the first one counts."""
        return self.runners[0].stats

    @property
    def device(self) -> Device:
        """The output rank's device."""
        return self.runners[0].device

    async def execute_model(self, plan: SchedulerOutput) -> None:
        """Launch a plan on every rank; where the flow breaks, all ranks wait at once."""
        first, *others = [runner.execute_model(plan) for runner in self.runners]
        async with asyncio.TaskGroup() as group:
            for launching in others:
                group.create_task(launching, name="aneuron-rank")
            await first
        self._prolong_break(plan)

    def _prolong_break(self, plan: SchedulerOutput) -> None:
        """Let a break last until its last rank had its tokens."""
        ends_s = [one.last_break.end_s for one in self.runners if one.last_break is not None]
        if ends_s:
            self.stats.prolong_break(plan.record, max(ends_s))

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> RankStep:
        """Return the step in flight; all ranks sample with the same masks and logits."""
        return RankStep([runner.sample_tokens(grammar_output) for runner in self.runners])

    @property
    def guided(self) -> Launch | None:
        """The launch whose sampling waits, if it does; that of the output rank."""
        return self.runners[0].guided

    def read_logits(self, samples: np.ndarray) -> DeviceFuture:
        """Have logits copied to the host; the output rank's."""
        return self.runners[0].read_logits(samples)

    def note_break(self, plan: SchedulerOutput, one: Break) -> None:
        """Count a break of all ranks."""
        self.runners[0].note_break(plan, one)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start all devices, or none."""
        started: list[ModelRunner] = []
        try:
            for runner in self.runners:
                runner.start(loop)
                started.append(runner)
        except BaseException:
            for runner in started:
                runner.close()
            raise

    def close(self) -> list[DeviceFuture]:
        """Close all devices; see `ModelRunner.close`."""
        return [future for runner in self.runners for future in runner.close()]

    def drain(self, removed_slots: tuple[int, ...]) -> None:
        """Let go of everything on every rank."""
        for runner in self.runners:
            runner.drain(removed_slots)

    def records(self) -> dict[str, int]:
        """Return how much is kept, over all ranks; see `ModelRunner.records`."""
        total: dict[str, int] = {}
        for runner in self.runners:
            for name, number in runner.records().items():
                total[name] = total.get(name, 0) + number
        return total


def make_runner(config: EngineConfig, loaded: Loaded, shape: BatchShape) -> ModelRunner | RankGroup:
    """Return the runner of the one rank, or the group of several."""
    name = config.token_carry if config.async_scheduling else "host"
    spec = loaded.models[0].spec
    carry = make_carry(name, has_slots=spec.has_slots, bucket_edges=spec.bucket_edges)
    runners = [
        ModelRunner(
            device,
            model,
            InputBatch(
                shape,
                slots_on_device=model.spec.has_slots,
                tokens_on_device=carry.tokens_on_device,
            ),
            carry,
            is_output_rank=rank == 0,
        )
        for rank, (device, model) in enumerate(zip(loaded.devices, loaded.models, strict=True))
    ]
    return runners[0] if len(runners) == 1 else RankGroup(runners)
