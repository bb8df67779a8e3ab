"""The buffers of launches, and what stays the same in them from decode to decode.

Used by `InputBatch` alone, on the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aneuron.params import STATE_COLUMNS
from aneuron.plans import ModelInput

if TYPE_CHECKING:
    from aneuron.config import BatchShape

__all__ = ["Layout", "Staging"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rows a plan's slots are; the same for as long as the same requests run."""

    planned: np.ndarray  # the plan's own column, kept so that it can be recognised
    rows: np.ndarray  # int64 [n], ascending
    where: slice | np.ndarray  # the same rows, as a slice if they have no gap
    order: np.ndarray | None  # launch order of the plan's entries; None: as planned
    token_starts: np.ndarray  # int64 [n], where the rows' tokens begin
    request_ids: np.ndarray
    slots: np.ndarray
    all_greedy: bool
    rule_samples: np.ndarray | None  # int64
    logprob_samples: np.ndarray | None  # int64
    num_logprobs: int
    guided: np.ndarray | None  # int64, rows that have a grammar or hooks


class Staging:
    """One entry of the ring: buffers at their largest, handed out as views."""

    def __init__(self, shape: BatchShape, max_blocks: int) -> None:
        """Make the buffers for launches of this shape; `max_blocks` is the widest table."""
        rows = max(shape.max_num_seqs, shape.rows.largest)
        samples = rows * (shape.num_draft_tokens + 1)
        tokens = max(shape.max_num_batched_tokens, shape.tokens.largest, samples)
        width = max(max_blocks, shape.blocks.largest)
        self.layout: Layout | None = None  # of the decode whose columns the buffers hold
        self.table_version = -1  # of the tables that they hold
        self.decode_columns = np.zeros((3, rows), np.int32)  # positions, cells, context lengths
        self._size: tuple[int, int, int, int, bool] | None = None  # of the views made last
        self.inputs: ModelInput | None = None
        self._iota = np.arange(rows + 1, dtype=np.int32)
        self._token_columns = {
            name: np.zeros(tokens, np.int32) for name in ("input_ids", "positions", "slot_mapping")
        }
        self._context_lens = np.zeros(rows, np.int32)
        self._sample_columns = {
            name: np.zeros(samples, dtype)
            for name, dtype in (
                ("logits_indices", "int32"), ("slots", "int32"), *STATE_COLUMNS.items(),
            )
        }  # fmt: skip
        self._sample_columns["top_p"][:] = 1.0
        self._query_start = np.zeros(rows + 1, np.int32)
        # Flat, so that a narrower table is contiguous too.
        self._block_table = np.zeros(rows * width, np.int32)

    def views(
        self, rows: int, samples: int, tokens: int, width: int, *, is_decode: bool
    ) -> ModelInput:
        """Return a `ModelInput` of this size over the buffers; scalars are to be set.

        One of the same size as before is the same object: its last launch has resolved.
        """
        size = (rows, samples, tokens, width, is_decode)
        inputs = self.inputs
        if inputs is None or size != self._size:
            self._size, self.layout = size, None
            inputs = self.inputs = self._make_views(*size)
        inputs.input_ids = self._token_columns["input_ids"][:tokens]
        inputs.writes = inputs.copies = inputs.prompt_targets = None
        inputs.spec_decode_metadata = None
        return inputs

    def _make_views(
        self,
        rows: int,
        samples: int,
        tokens: int,
        width: int,
        is_decode: bool,  # noqa: FBT001
    ) -> ModelInput:
        inputs = ModelInput(
            is_decode=is_decode,
            num_reqs=0,
            num_samples=0,
            num_tokens=0,
            max_query_len=0,
            all_greedy=False,
            writes=None,
            copies=None,
            num_logprobs=0,
            prompt_targets=None,
            edits=None,
            spec_decode_metadata=None,
            query_start=self._query_start[: rows + 1],
            block_table=self._block_table[: rows * width].reshape(rows, width),
            context_lens=self._context_lens[:rows],
            **{name: column[:tokens] for name, column in self._token_columns.items()},
            **{name: column[:samples] for name, column in self._sample_columns.items()},
        )
        if is_decode:  # a row's one token is its own: never written, so shared
            inputs.query_start = self._iota[: rows + 1]
            inputs.logits_indices = self._iota[:rows]
            columns = self.decode_columns[:, :rows]
            inputs.positions, inputs.slot_mapping, inputs.context_lens = columns
        return inputs
