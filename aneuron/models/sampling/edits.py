"""What the host decides of a launch's samples: logits that hooks changed, and grammars' masks.

Used by executables, so on the device's thread alone. Logits are numpy arrays here; torch
executables on the processor work on the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aneuron.models.sampling.slots import SlotState
    from aneuron.plans import ModelInput

__all__ = ["allowed_ids", "edit_logits"]


def edit_logits(logits: np.ndarray, inputs: ModelInput, slots: SlotState) -> None:
    """Change the logits of samples in place: hooks first, then rules, then grammars.

    What hooks leave and a grammar allows wins over bans: where rules leave none of it, they do
    not count.

    Args:
        logits: float32 [S, V], as the model gave them.
        inputs: the launch.
        slots: with the rules of its samples.
    """
    edits = inputs.edits
    if edits is None:
        slots.apply_rules(logits, inputs)
        return
    logits[edits.hooked] = edits.logits
    forbidden = ~allowed_ids(edits.bitmask, logits.shape[1])
    banned = dict(zip(edits.samples.tolist(), forbidden, strict=True))
    before = {sample: logits[sample].copy() for sample in {*banned, *edits.hooked.tolist()}}
    slots.apply_rules(logits, inputs)
    for sample, kept in before.items():
        row, mask = logits[sample], banned.get(sample, False)
        np.copyto(row, -np.inf, where=mask)
        if row.max() == -np.inf:
            row[:] = kept
            np.copyto(row, -np.inf, where=mask)


def allowed_ids(bitmask: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return which ids may be drawn, bool [G, V], from int32 [G, ceil(V / 32)]."""
    octets = np.ascontiguousarray(bitmask, "<i4").view(np.uint8)
    allowed = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little")
    return allowed.view(np.bool_)
