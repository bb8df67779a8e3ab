"""`InFlightStep`: a launched step until its tokens are on the host, and in the batch.

Comes in: a plan, its launch and the future of its tokens. Goes out: `ModelRunnerOutput`.
Awaited by the materializer, and by whoever breaks the flow. Runs on the loop.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.errors import DeviceError
from aneuron.plans import ModelRunnerOutput, PromptLogprobs, Sampled, SampledLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron.batch import InputBatch, Launch
    from aneuron.futures import DeviceFuture
    from aneuron.plans import ModelInput, SchedulerOutput

__all__ = ["InFlightStep"]


class InFlightStep:
    """A launched step: its plan, its future, and who its rows are.

    Materialized exactly once, by whoever awaits first: the materializer, or a break.
    """

    __slots__ = (
        "_batch",
        "_forward",
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
        forward: DeviceFuture | None = None,
        is_read: bool = True,
    ) -> None:
        """Make the handle.

        Args:
            plan: of the step.
            launch: of the plan.
            future: of the launch.
            batch: where its tokens are written.
            previous: the step launched before, if not yet settled.
            forward: of the part that came before, if the step is split.
            is_read: whether its tokens are copied to the host also without a break.
        """
        self.is_read = is_read
        self.plan = plan
        self.sampled_token_ids = future
        self._forward = forward
        self._launch = launch
        self._batch = batch
        # Where steps are not read, a break needs this one's tokens alone: rows that it lacks
        # were forced by the break that let them out.
        self._previous = previous if is_read else None
        self._is_let_go = False  # the materializer is done with it, and saw no failure
        self._output: ModelRunnerOutput | None = None

    @property
    def verifies_drafts(self) -> bool:
        """Whether it may give several tokens of a request, and its future is not one of each."""
        return self._launch.inputs.spec_decode_metadata is not None

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
            if (forward := self._forward) is not None:
                record.sampling_start_s = future.device_start_s
                record.device_start_s = forward.device_start_s
                record.forward_end_s = forward.device_end_s
            record.read_s = future.read_s

    def _materialize(self, values: Any) -> ModelRunnerOutput:
        launch, logprobs, of_prompts = self._launch, None, None
        if isinstance(values, Sampled):
            values, logprobs, of_prompts = values
        tokens = np.asarray(values)[: len(launch.slots)].astype(np.int32, copy=False)
        slots, ends, emits = launch.slots, launch.ends, launch.emits
        if logprobs is not None:
            logprobs = _by_slot(logprobs, slots, emits)
        if self.verifies_drafts:
            emits = tokens >= 0
        if emits is not None:
            slots, ends, tokens = slots[emits], ends[emits], tokens[emits]
        self._batch.apply(slots, ends, tokens)
        parts = () if of_prompts is None else tuple(_parts(of_prompts, launch.inputs))
        output = ModelRunnerOutput(slots, tokens, logprobs, parts)
        return _in_rounds(output) if self.verifies_drafts else output


def _in_rounds(output: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return the first token of each request, with the second ones and so on behind it."""
    slots, tokens = output.slots, output.token_ids
    starts = np.flatnonzero(np.append(True, slots[1:] != slots[:-1]))
    counts = np.diff(np.append(starts, len(slots)))
    rounds = [starts[counts > number] + number for number in range(int(counts.max()))]
    output.more = ()
    for one in reversed(rounds[1:]):
        behind = ModelRunnerOutput(slots[one], tokens[one], more=output.more)
        output.more = (behind, *output.more)
    output.slots, output.token_ids = slots[rounds[0]], tokens[rounds[0]]
    return output


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


def _sample_on_host(logits: np.ndarray, inputs: ModelInput) -> np.ndarray:
    from aneuron.models.sampling.host import sample_on_host

    return sample_on_host(logits, inputs)
