"""What the device keeps of every slot: last token, sampling parameters, rules.

Comes in: the writes that travel with launches, and sampled tokens. Goes out: the columns of
a launch's rows. Used by executables, so on the device's thread alone, in queue order. The
columns are numpy arrays; torch executables on the processor work on the same memory.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from aneuron.models.sampling.rules import SlotRules
from aneuron.params import STATE_COLUMNS

if TYPE_CHECKING:
    from aneuron.plans import ModelInput, SlotWrites, SpecDecodeMetadata

__all__ = ["SlotState"]


class SlotState:
    """Columns over S slots and a spare one, which padding reads and writes.

    Attributes:
        last_tokens: int32 [S + 1], the id that each slot's request was given last.
    """

    def __init__(self, num_slots: int, *, unset: int = 0) -> None:
        """Make the slots; `unset` is the last token of one whose owner has none yet."""
        size = num_slots + 1
        self.last_tokens = np.full(size, unset, np.int32)
        self._unset = unset
        self._columns = {name: np.zeros(size, dtype) for name, dtype in STATE_COLUMNS.items()}
        self._columns["top_p"][:] = 1.0
        self._rules: dict[int, SlotRules] = {}

    def write(self, writes: SlotWrites) -> None:
        """Give slots to new owners: nothing of the old ones stays."""
        slots = writes.slots
        self.last_tokens[slots] = self._unset
        for name, column in self._columns.items():
            column[slots] = getattr(writes, name)
        for slot in slots.tolist() if self._rules else ():
            self._rules.pop(slot, None)
        for rule in writes.rules:
            self._rules[rule.slot] = SlotRules(rule)

    def filled(self, inputs: ModelInput) -> ModelInput:
        """Return the launch's inputs with its rows' columns, as they are now."""
        inputs = copy(inputs)
        for name, column in self._columns.items():
            setattr(inputs, name, column[inputs.slots])
        return inputs

    def apply_rules(self, logits: np.ndarray, inputs: ModelInput) -> None:
        """Change the logits of samples that have rules, float32 [S, V], in place."""
        for sample, rules in self._ruled(inputs):
            rules.apply(logits[sample])

    def take(self, tokens: np.ndarray, inputs: ModelInput) -> None:
        """Note what samples gave, int32 [samples]; drafts that fail give -1, in place."""
        if inputs.slots is None:
            return
        slots, last = inputs.slots[: len(tokens)], tokens
        if inputs.spec_decode_metadata is not None:
            accepted = _accept(tokens, inputs.spec_decode_metadata)
            slots, last = slots[accepted], tokens[accepted]
        self.last_tokens[slots] = last
        self.note_tokens(tokens, inputs)

    def note_tokens(self, tokens: np.ndarray, inputs: ModelInput) -> None:
        """Let rules know what their requests were given; int32 [samples]."""
        for sample, rules in self._ruled(inputs):
            rules.note(int(tokens[sample]))

    def _ruled(self, inputs: ModelInput) -> list[tuple[int, SlotRules]]:
        """Return the samples that have rules; one that does not count has the spare slot."""
        if inputs.rule_samples is None or inputs.slots is None:
            return []
        samples = inputs.rule_samples
        found = zip(samples.tolist(), inputs.slots[samples].tolist(), strict=True)
        return [(sample, self._rules[slot]) for sample, slot in found if slot in self._rules]


def _accept(tokens: np.ndarray, metadata: SpecDecodeMetadata) -> np.ndarray:
    """Put -1 in place of samples behind one that is not as drafted.

    A sample is drawn from what the model says behind the draft, with the noise of its position:
    until the first difference they are what they would have been one by one.

    Returns:
        int64 [n], the last sample of each request that counts.
    """
    starts = metadata.starts
    ends = np.append(starts[1:], len(tokens))
    differs = (tokens != metadata.draft_ids[: len(tokens)]).astype(np.int64)
    before = np.cumsum(differs) - differs  # differences behind which a sample stands
    counts = before == np.repeat(before[starts], ends - starts)
    tokens[~counts] = -1
    last: np.ndarray = starts + np.add.reduceat(counts.astype(np.int64), starts) - 1
    return last
