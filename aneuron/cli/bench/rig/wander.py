"""A simulated model that says anything: for grammars, which leave it only what they allow.

Comes in: launches. Goes out: ids of a real vocabulary, from logits that were drawn before, a row
of them for each last token; so a step costs the host little beside the grammar's own work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aneuron.models.simulated import LogitsModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aneuron.plans import ModelInput

__all__ = ["Wander"]

_NUM_ROWS = 61
_SEED = 0


class Wander(LogitsModel):
    """Logits at random, a function of the last token and its position."""

    name = "wander"

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Draw the logits."""
        super().__init__(vocab_size=vocab_size, eos_token_ids=eos_token_ids, max_model_len=4096)
        draw = np.random.default_rng(_SEED).standard_normal
        self._rows = draw((_NUM_ROWS, vocab_size), np.float32)

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return one of the rows for each sample; see `LogitsModel.logits`."""
        last = ids[inputs.logits_indices].astype(np.int64)
        rows: np.ndarray = self._rows[
            (last * 31 + inputs.positions[inputs.logits_indices]) % _NUM_ROWS
        ]
        return rows
