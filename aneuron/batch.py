"""`InputBatch`: what the runner knows of the requests in the batch, and the launch buffers.

Comes in: plans, and the tokens of resolved steps. Goes out: `ModelInput`. State is numpy
columns over dense rows; `condense` closes the gaps that leaving requests make. Buffers of
launches come from a ring of `depth + 1` entries: an entry is not written again until the
step that owns it has resolved. Runs on the loop, without an await.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aneuron.config import Buckets
from aneuron.outputs import ModelInput

if TYPE_CHECKING:
    from aneuron.config import EngineConfig
    from aneuron.outputs import NewRequest, SchedulerOutput

__all__ = ["BatchShape", "InputBatch", "Launch"]

_ROW_COLUMNS = (
    "slot_of",
    "request_ids",
    "num_tokens",
    "num_computed",
    "prompt_lens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sizes of the batch and the buckets that launches are padded to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_slots: int
    depth: int  # steps in flight
    rows: Buckets
    tokens: Buckets
    blocks: Buckets

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> BatchShape:
        """Return the shape for these settings."""
        max_blocks = -(-max_model_len // config.block_size)
        num_tokens = config.max_num_batched_tokens
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=num_tokens,
            max_model_len=max_model_len,
            block_size=config.block_size,
            num_slots=config.max_num_seqs * config.depth,
            depth=config.depth,
            rows=Buckets.up_to(config.max_num_seqs, config.num_seqs_buckets),
            tokens=Buckets.up_to(num_tokens, config.num_tokens_buckets, smallest=16),
            blocks=Buckets.up_to(max_blocks, config.num_blocks_buckets),
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """One prepared step: its inputs, and who its rows are, copied for later matching."""

    inputs: ModelInput
    request_ids: np.ndarray  # int64 [num_reqs], launch order
    slots: np.ndarray  # int32 [num_reqs], launch order
    emits: np.ndarray  # bool [num_reqs]: the row's token counts (its chunk is the last)


class InputBatch:
    """Columns over rows 0..num_reqs-1; launches take their rows in this order."""

    def __init__(self, shape: BatchShape) -> None:
        """Make an empty batch with all its memory."""
        self.shape = shape
        rows = shape.max_num_seqs
        max_blocks = -(-shape.max_model_len // shape.block_size)
        self.num_reqs = 0
        self.row_of = np.full(shape.num_slots, -1, np.int32)  # slot → row, -1 = not here
        self.slot_of = np.zeros(rows, np.int32)
        self.request_ids = np.zeros(rows, np.int64)
        self.token_ids = np.zeros((rows, shape.max_model_len), np.int32)
        self.block_table = np.zeros((rows, max_blocks), np.int32)
        self.num_tokens = np.zeros(rows, np.int32)  # tokens the host knows
        self.num_computed = np.zeros(rows, np.int32)  # tokens launched
        self.prompt_lens = np.zeros(rows, np.int32)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seed = np.zeros(rows, np.int64)
        self._ring = [_Staging(shape, max_blocks) for _ in range(shape.depth + 1)]
        self._num_launches = 0

    # ── membership ──────────────────────────────────────────────────────────────────────

    def update(self, plan: SchedulerOutput) -> None:
        """Bring rows and blocks up to date with a plan."""
        self.remove(plan.removed_slots)
        for new in plan.new_requests:
            self._add(new)
        if plan.block_slots.size:
            self.block_table[self.row_of[plan.block_slots], plan.block_columns] = plan.block_ids

    def remove(self, slots: tuple[int, ...]) -> None:
        """Take requests out and close the gaps."""
        gone = [row for row in self.row_of[list(slots)].tolist() if row >= 0] if slots else []
        self.row_of[list(slots)] = -1
        self._condense(gone)

    def _condense(self, gone: list[int]) -> None:
        """Move the last rows into the gaps, so that rows stay 0..num_reqs-1."""
        holes = set(gone)
        for hole in sorted(gone):
            while self.num_reqs and self.num_reqs - 1 in holes:
                self.num_reqs -= 1
            if hole >= self.num_reqs:
                break
            self._move(self.num_reqs - 1, hole)
            holes.discard(hole)
            self.num_reqs -= 1

    def _move(self, source: int, target: int) -> None:
        for name in _ROW_COLUMNS:
            column = getattr(self, name)
            column[target] = column[source]
        used = int(self.num_tokens[source]) + 1
        self.token_ids[target, :used] = self.token_ids[source, :used]
        self.block_table[target] = self.block_table[source]
        self.row_of[self.slot_of[target]] = target

    def _add(self, new: NewRequest) -> None:
        row = self.num_reqs
        self.num_reqs += 1
        params, count = new.params, len(new.token_ids)
        self.row_of[new.slot] = row
        self.slot_of[row] = new.slot
        self.request_ids[row] = new.request_id
        self.token_ids[row, :count] = new.token_ids
        self.block_table[row] = 0
        self.block_table[row, : len(new.block_ids)] = new.block_ids
        self.num_tokens[row] = count
        self.num_computed[row] = 0
        self.prompt_lens[row] = new.prompt_len
        self.temperature[row] = params.temperature
        self.top_k[row] = max(0, min(params.top_k, 2**31 - 1))
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = new.seed

    # ── launches ────────────────────────────────────────────────────────────────────────

    def prepare(self, plan: SchedulerOutput) -> Launch:
        """Write a plan's inputs into the next entry of the ring; may be called again."""
        staging = self._ring[self._num_launches % len(self._ring)]
        rows = self.row_of[plan.slots]
        order = np.argsort(rows)
        rows, counts = rows[order], plan.num_scheduled[order]
        if plan.is_decode:
            inputs = self._prepare_decode(staging, rows)
            emits = np.ones(len(rows), np.bool_)
        else:
            inputs = self._prepare_prefill(staging, rows, counts)
            emits = self.num_computed[rows] + counts >= self.num_tokens[rows]
        self._stage_rows(staging, inputs, rows)
        return Launch(inputs, self.request_ids[rows], plan.slots[order], emits)

    def advance(self, plan: SchedulerOutput) -> None:
        """Record that a prepared plan is launched: its buffers now belong to the launch."""
        self.num_computed[self.row_of[plan.slots]] += plan.num_scheduled
        self._num_launches += 1

    def _prepare_decode(self, staging: _Staging, rows: np.ndarray) -> ModelInput:
        num, size = len(rows), self.shape.block_size
        padded = self.shape.rows.fit(num)
        at = self.num_computed[rows]
        inputs = staging.views(padded, padded, self._width(at, 1))
        inputs.is_decode, inputs.num_reqs, inputs.num_tokens = True, num, num
        inputs.max_query_len = 1
        inputs.input_ids[:num] = self.token_ids[rows, at]
        inputs.positions[:num] = at
        inputs.slot_mapping[:num] = self.block_table[rows, at // size] * size + at % size
        inputs.query_start[:] = staging.iota[: padded + 1]
        inputs.logits_indices[:] = staging.iota[:padded]
        inputs.context_lens[:num] = at + 1
        self._pad(inputs)
        return inputs

    def _prepare_prefill(
        self, staging: _Staging, rows: np.ndarray, counts: np.ndarray
    ) -> ModelInput:
        num, total = len(rows), int(counts.sum())
        start = self.num_computed[rows]
        padded_rows, padded_tokens = self.shape.rows.fit(num), self.shape.tokens.fit(total)
        inputs = staging.views(padded_rows, padded_tokens, self._width(start, counts))
        inputs.is_decode, inputs.num_reqs, inputs.num_tokens = False, num, total
        inputs.max_query_len = self.shape.tokens.fit(int(counts.max()))
        first = 0
        for row, at, count in zip(rows.tolist(), start.tolist(), counts.tolist(), strict=True):
            self._stage_prompt(inputs, row, at, first, count)
            first += count
        inputs.query_start[0] = 0
        np.cumsum(counts, out=inputs.query_start[1 : num + 1])
        inputs.query_start[num + 1 :] = total
        inputs.logits_indices[:num] = inputs.query_start[1 : num + 1] - 1
        inputs.logits_indices[num:] = 0
        inputs.context_lens[:num] = start + counts
        self._pad(inputs)
        return inputs

    def _stage_prompt(self, inputs: ModelInput, row: int, at: int, first: int, count: int) -> None:
        size = self.shape.block_size
        positions = np.arange(at, at + count, dtype=np.int32)
        inputs.input_ids[first : first + count] = self.token_ids[row, at : at + count]
        inputs.positions[first : first + count] = positions
        blocks = self.block_table[row, positions // size]
        inputs.slot_mapping[first : first + count] = blocks * size + positions % size

    def _width(self, computed: np.ndarray, counts: np.ndarray | int) -> int:
        """Return the blocks per row that the longest context needs, as a bucket."""
        longest = int((computed + counts).max())
        return self.shape.blocks.fit(-(-longest // self.shape.block_size))

    @staticmethod
    def _pad(inputs: ModelInput) -> None:
        tokens, rows = inputs.num_tokens, inputs.num_reqs
        inputs.input_ids[tokens:] = 0
        inputs.positions[tokens:] = 0
        inputs.slot_mapping[tokens:] = -1
        inputs.context_lens[rows:] = 1
        inputs.block_table[rows:] = 0

    def _stage_rows(self, staging: _Staging, inputs: ModelInput, rows: np.ndarray) -> None:
        num = len(rows)
        inputs.block_table[:num] = self.block_table[rows, : inputs.block_table.shape[1]]
        for name in ("prompt_lens", "temperature", "top_k", "top_p", "min_p", "seed"):
            getattr(inputs, name)[:num] = getattr(self, name)[rows]
        inputs.temperature[num:] = 0.0
        inputs.all_greedy = not inputs.temperature[:num].any()

    # ── results ─────────────────────────────────────────────────────────────────────────

    def apply(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Append a resolved step's tokens to the rows that are still here."""
        rows = self.row_of[slots]
        if rows.size and rows.min() < 0:
            tokens, rows = tokens[rows >= 0], rows[rows >= 0]
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1


class _Staging:
    """One entry of the ring: buffers at their largest, handed out as views."""

    def __init__(self, shape: BatchShape, max_blocks: int) -> None:
        rows = max(shape.max_num_seqs, shape.rows.largest)
        tokens = max(shape.max_num_batched_tokens, shape.tokens.largest, rows)
        width = max(max_blocks, shape.blocks.largest)
        self.iota = np.arange(rows + 1, dtype=np.int32)
        self.token_columns = {
            name: np.zeros(tokens, np.int32) for name in ("input_ids", "positions", "slot_mapping")
        }
        self.row_columns = {
            name: np.zeros(rows, dtype)
            for name, dtype in (
                ("context_lens", np.int32),
                ("logits_indices", np.int32),
                ("prompt_lens", np.int32),
                ("temperature", np.float32),
                ("top_k", np.int32),
                ("top_p", np.float32),
                ("min_p", np.float32),
                ("seed", np.int64),
            )
        }
        self.row_columns["top_p"][:] = 1.0
        self.query_start = np.zeros(rows + 1, np.int32)
        # Flat, so that a narrower table is contiguous too.
        self.block_table = np.zeros(rows * width, np.int32)

    def views(self, rows: int, tokens: int, width: int) -> ModelInput:
        """Return a `ModelInput` of this size over the buffers; scalars are to be set."""
        return ModelInput(
            is_decode=False,
            num_reqs=0,
            num_tokens=0,
            max_query_len=0,
            all_greedy=False,
            query_start=self.query_start[: rows + 1],
            block_table=self.block_table[: rows * width].reshape(rows, width),
            **{name: column[:tokens] for name, column in self.token_columns.items()},
            **{name: column[:rows] for name, column in self.row_columns.items()},
        )
