"""How step N's tokens become step N+1's `input_ids`: one small object per carry.

Pure decisions; the step coroutine (runner.py) carries them out, so that every await they
cost stands there. See docs/async_scheduling.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aneuron.plans import BreakReason

if TYPE_CHECKING:
    from aneuron.batch import Launch
    from aneuron.futures import DeviceFuture
    from aneuron.plans import ModelInput, SchedulerOutput

__all__ = [
    "Carry",
    "Decision",
    "Feed",
    "FromSlots",
    "HandoffCarry",
    "HostCarry",
    "HostIds",
    "Mismatch",
    "PendingTokens",
    "Remap",
    "ResidentCarry",
    "make_carry",
]


_STEPS_AHEAD = 2  # the published protocol looks so far ahead for the end of a bucket


class PendingTokens(Protocol):
    """The part of a step in flight that a carry looks at."""

    sampled_token_ids: DeviceFuture

    @property
    def request_ids(self) -> np.ndarray:
        """Internal ids of its rows, int64 [n], in launch order."""

    @property
    def verifies_drafts(self) -> bool:
        """Whether its future holds any number of tokens of each."""


@dataclass(frozen=True, slots=True)
class HostIds:
    """Use the ids that the host wrote."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Feed the pending future itself."""

    tokens: DeviceFuture


@dataclass(frozen=True, slots=True)
class FromSlots:
    """Let the device read the last tokens of the slots, where sampling put them."""


@dataclass(frozen=True, slots=True)
class Remap:
    """Feed the pending future, gathered into the new order on the device."""

    tokens: DeviceFuture
    order: np.ndarray  # int32 [padded rows]: new row → pending row; padding stays in place


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Same requests, but the future does not fit: materialize it and prepare again."""

    reason: BreakReason


Decision = HostIds | Feed | FromSlots | Remap | Mismatch


class Carry(Protocol):
    """What the step coroutine asks a carry, in this order."""

    name: str  # as `token_carry` has it
    counts_steps: bool  # whether async and fallback steps are told apart
    tokens_on_device: bool  # whether decodes read last tokens from slots on the device
    reads_all_ranks: bool  # whether every rank needs every token on its host

    def composition_changed(self, plan: SchedulerOutput, pending: PendingTokens | None) -> bool:
        """Whether the pending future must be materialized before any state changes."""

    def decide(self, launch: Launch, pending: PendingTokens | None) -> Decision:
        """How to fill `input_ids` of a prepared launch."""


class HostCarry:
    """The synchronous baseline: at depth 1 every token is on the host already."""

    name = "host"
    counts_steps = False
    tokens_on_device = False
    reads_all_ranks = True

    def composition_changed(self, plan: SchedulerOutput, pending: PendingTokens | None) -> bool:
        """Never: nothing is in flight when the next step is planned."""
        return False

    def decide(self, launch: Launch, pending: PendingTokens | None) -> Decision:
        """Always the host's ids."""
        return HostIds()


class HandoffCarry:
    """The published protocol: feed the whole future, or break.

    Works with every executable that returns `sampled_token_ids` and takes `input_ids`.
    """

    name = "handoff"
    counts_steps = True
    tokens_on_device = False
    reads_all_ranks = False

    def __init__(self, bucket_edges: tuple[int, ...] = ()) -> None:
        """Feed no step whose context ends just below one of these lengths, in tokens."""
        self._edges = np.array(bucket_edges, np.int32)

    def composition_changed(self, plan: SchedulerOutput, pending: PendingTokens | None) -> bool:
        """Whether the set of requests differs from the one that made the future."""
        return pending is not None and not _same_set(plan.request_ids, pending.request_ids)

    def decide(self, launch: Launch, pending: PendingTokens | None) -> Decision:
        """Feed a decode step with the future of the same requests, if it fits."""
        inputs = launch.inputs
        if pending is None or not inputs.is_decode:
            return HostIds()
        future = pending.sampled_token_ids
        if (reason := self._misfit(inputs, pending)) is not None:
            return Mismatch(reason)
        if np.array_equal(launch.request_ids, pending.request_ids):
            return Feed(future)
        return Remap(future, _order(launch.request_ids, pending.request_ids, inputs.num_rows))

    def _misfit(self, inputs: ModelInput, pending: PendingTokens) -> BreakReason | None:
        future = pending.sampled_token_ids
        if pending.verifies_drafts:
            return BreakReason.SPECULATION
        if self._edges.size and self._is_at_edge(inputs.context_lens[: inputs.num_reqs]):
            return BreakReason.BUCKET_EDGE
        if future.dtype != inputs.input_ids.dtype.name:
            return BreakReason.DTYPE_MISMATCH
        if future.shape != inputs.input_ids.shape:
            return BreakReason.SHAPE_MISMATCH
        return None

    def _is_at_edge(self, context_lens: np.ndarray) -> bool:
        """Whether this step or the next comes to the end of the longest row's bucket."""
        longest = context_lens.max()
        return bool(((longest < self._edges) & (self._edges <= longest + _STEPS_AHEAD)).any())


class ResidentCarry:
    """Tokens stay where they are: the device keeps the last one of every slot.

    Decode reads its rows' slots and sampling writes them, in queue order, so it does not
    matter which rows ran in the step before: no change of the batch breaks the flow.
    """

    name = "resident"
    counts_steps = True
    tokens_on_device = True
    reads_all_ranks = False

    def composition_changed(self, plan: SchedulerOutput, pending: PendingTokens | None) -> bool:
        """Never mind: whoever joins or leaves, a slot has its own request's token."""
        return False

    def decide(self, launch: Launch, pending: PendingTokens | None) -> Decision:
        """A decode reads slots; a prompt's ids come from the host."""
        return FromSlots() if launch.inputs.is_decode else HostIds()


def make_carry(name: str, *, has_slots: bool = False, bucket_edges: tuple[int, ...] = ()) -> Carry:
    """Return the carry of this name; "auto" is `resident` for executables with slots."""
    match name:
        case "host":
            return HostCarry()
        case "resident":
            return ResidentCarry()
        case "auto" if has_slots:
            return ResidentCarry()
    return HandoffCarry(bucket_edges)


def _same_set(ids: np.ndarray, others: np.ndarray) -> bool:
    if len(ids) != len(others):
        return False
    return np.array_equal(ids, others) or np.array_equal(np.sort(ids), np.sort(others))


def _order(ids: np.ndarray, pending: np.ndarray, num_rows: int) -> np.ndarray:
    """Return where each row of `ids` stands in `pending`; padding rows map to themselves."""
    order = np.arange(num_rows, dtype=np.int32)
    by_id = np.argsort(pending)
    order[: len(ids)] = by_id[np.searchsorted(pending, ids, sorter=by_id)]
    return order
