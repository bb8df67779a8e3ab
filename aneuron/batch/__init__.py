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

from aneuron.batch.packing import (
    pack,
    pad,
    prompt_targets,
    rule_writes,
    stage_forks,
    stage_verification,
    store_drafts,
)
from aneuron.batch.staging import Layout, Staging
from aneuron.params import STATE_COLUMNS
from aneuron.plans import SlotWrites

if TYPE_CHECKING:
    from aneuron.config import BatchShape
    from aneuron.plans import Fork, ModelInput, NewRequest, SchedulerOutput

__all__ = ["InputBatch", "Launch"]

_FLOW_COLUMNS = ("slot_of", "request_ids", "prefill_end", "num_computed", "next_cell", "next_len")
_ROW_COLUMNS = (
    *_FLOW_COLUMNS, *STATE_COLUMNS, "has_rules", "is_guided",
    "num_logprobs", "prompt_logprobs",
)  # fmt: skip


@dataclass(slots=True)  # not frozen: made each step, and that costs four times as much
class Launch:
    """One prepared step: its inputs, and who its rows are, copied for later matching."""

    inputs: ModelInput
    request_ids: np.ndarray  # int64 [num_reqs], launch order
    slots: np.ndarray  # int64 [num_reqs], launch order
    ends: np.ndarray  # int [num_reqs], position of the token that the row gives
    emits: np.ndarray | None  # bool [num_reqs]: the row's token counts; None: all do
    guided: np.ndarray | None = None  # int64, those whose token waits for the host; None: none


class InputBatch:
    """Columns over rows 0..num_reqs-1; launches take their rows in this order.

    With `slots_on_device`, what changes only when a request joins is written once, to the
    request's slot, by the launch that admits it; with `tokens_on_device` (carry `resident`)
    decodes read their last tokens there, too.
    """

    def __init__(
        self, shape: BatchShape, *, slots_on_device: bool = False, tokens_on_device: bool = False
    ) -> None:
        """Make an empty batch with all its memory."""
        self.shape = shape
        rows = shape.max_num_seqs
        max_blocks = -(-shape.max_model_len // shape.block_size)
        self.num_reqs = 0
        self.row_of = np.full(shape.num_slots, -1, np.int64)  # slot → row, -1 = not here
        self.slot_of = np.zeros(rows, np.int64)
        self.request_ids = np.zeros(rows, np.int64)
        self.token_ids = np.zeros((rows, shape.max_model_len), np.int32)
        self.block_table = np.zeros((rows, max_blocks), np.int32)
        self._flat_tokens = self.token_ids.reshape(-1)  # the same memory
        self.prefill_end = np.zeros(rows, np.int32)  # tokens to compute before decoding
        # A decode's inputs, which all grow by one from step to step, in one array.
        self._next = np.zeros((3, rows), np.int32)
        self._ones = np.ones((3, rows), np.int32)
        self.num_computed = self._next[0]  # tokens launched: the next one's position
        # Where the cache takes the next token; past a block's end only for as long as the plan
        # that schedules it, and brings the next block, has not come.
        self.next_cell = self._next[1]
        self.next_len = self._next[2]  # tokens in the cache once that has run
        self.prompt_lens = np.zeros(rows, np.int32)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seed = np.zeros(rows, np.int64)
        self.has_rules = np.zeros(rows, np.bool_)
        self.is_guided = np.zeros(rows, np.bool_)  # has a grammar or hooks
        self.num_logprobs = np.full(rows, -1, np.int32)  # alternatives wanted; -1: no logprobs
        self.prompt_logprobs = np.full(rows, -1, np.int32)  # likewise, of the prompt
        self._slots_on_device = slots_on_device or tokens_on_device
        self._tokens_on_device = tokens_on_device
        self._layout: Layout | None = None
        self._longest = 0  # tokens launched of the layout's longest row
        self._table_version = 0  # counts blocks given to rows that are here
        self._ring = [Staging(shape, max_blocks) for _ in range(shape.depth + 1)]
        self._num_launches = 0

    # ── membership ──────────────────────────────────────────────────────────────────────

    def update(self, plan: SchedulerOutput) -> None:
        """Bring rows and blocks up to date with a plan."""
        if plan.removed_slots:
            self.remove(plan.removed_slots)
        if plan.rejected is not None:
            self._roll_back(*plan.rejected)
        for new in plan.new_requests:
            self._add(new)
        if plan.block_slots.size:
            rows = self.row_of[plan.block_slots]
            self.block_table[rows, plan.block_columns] = plan.block_ids
            self.next_cell[rows] = plan.block_ids * self.shape.block_size
            self._table_version += 1

    def _roll_back(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Forget tokens that were launched as drafts, and rejected."""
        rows = self.row_of[slots]
        self.num_computed[rows] -= counts
        self._aim(rows)
        self._layout = None

    def _aim(self, rows: np.ndarray) -> None:
        """Work out where the next token of each row goes, from how many there are."""
        size = self.shape.block_size
        self.next_len[rows] = self.num_computed[rows] + 1
        blocks, offsets = np.divmod(self.num_computed[rows], size)
        blocks = np.minimum(blocks, self.block_table.shape[1] - 1)  # of a row at its limit
        self.next_cell[rows] = self.block_table[rows, blocks] * size + offsets

    def remove(self, slots: tuple[int, ...]) -> None:
        """Take requests out and close the gaps."""
        self._layout = None
        rows = self.row_of[list(slots)].tolist()
        self.row_of[list(slots)] = -1
        self._condense([row for row in rows if row >= 0])

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
        used = max(int(self.prefill_end[source]), int(self.num_computed[source])) + 1
        self.token_ids[target, :used] = self.token_ids[source, :used]
        self.block_table[target] = self.block_table[source]
        self.row_of[self.slot_of[target]] = target

    def _add(self, new: NewRequest) -> None:
        row = self.num_reqs
        self.num_reqs += 1
        self._layout = None
        params, count = new.params, len(new.token_ids)
        self.row_of[new.slot] = row
        self.slot_of[row] = new.slot
        self.request_ids[row] = new.request_id
        self.token_ids[row, :count] = new.token_ids
        self.block_table[row] = 0
        self.block_table[row, : len(new.block_ids)] = new.block_ids
        self.prefill_end[row] = count
        self.num_computed[row], self.next_len[row] = new.num_computed, new.num_computed + 1
        self.prompt_lens[row] = new.prompt_len
        self.temperature[row] = params.temperature
        self.top_k[row] = max(0, min(params.top_k, 2**31 - 1))
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = new.seed
        self.has_rules[row] = params.has_rules
        self.is_guided[row] = params.is_guided
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        of_prompt = params.prompt_logprobs
        self.prompt_logprobs[row] = -1 if of_prompt is None else of_prompt

    # ── launches ────────────────────────────────────────────────────────────────────────

    def prepare(self, plan: SchedulerOutput) -> Launch:
        """Write a plan's inputs into the next entry of the ring; may be called again."""
        staging, layout = self._ring[self._num_launches % len(self._ring)], self._layout
        if layout is None or layout.planned is not plan.slots:
            layout = self._layout = self._lay_out(plan.slots)
        if plan.is_decode:
            launch = self._prepare_decode(staging, layout)
        elif plan.draft_ids is not None:
            launch = self._prepare_verification(staging, layout, plan)
        else:
            order = slice(None) if layout.order is None else layout.order
            counts = plan.num_scheduled[order]
            launch = self._prepare_prefill(staging, layout, counts, plan.forks)
        if self._slots_on_device and plan.new_requests:
            launch.inputs.writes = self._writes(plan)
        return launch

    def advance(self, plan: SchedulerOutput) -> None:
        """Record that a prepared plan is launched: its buffers now belong to the launch."""
        layout = self._layout
        assert layout is not None, "prepare() comes first"
        self._num_launches += 1
        if plan.is_decode:
            self._next[:, layout.where] += self._ones[:, : len(layout.rows)]
            self._longest += 1
            if self.shape.num_draft_tokens:  # blocks may have come before their time
                self._aim(layout.rows)
            return
        rows = self.row_of[plan.slots]
        self.num_computed[rows] += plan.num_scheduled
        self._aim(rows)
        self._layout = None  # its longest row has grown by more than one

    def _lay_out(self, slots: np.ndarray) -> Layout:
        rows, order = self.row_of[slots], None
        if (rows[1:] < rows[:-1]).any():
            order = np.argsort(rows)
            rows = rows[order]
        self._longest = int(self.num_computed[rows].max())
        num, first = len(rows), int(rows[0])
        dense = int(rows[-1]) - first == num - 1
        where = slice(first, first + num) if dense else rows
        is_greedy = not self.temperature[where].any()
        ruled = self.has_rules[where].nonzero()[0]
        guided = self.is_guided[where].nonzero()[0]
        wanted = self.num_logprobs[where]
        with_logprobs = (wanted >= 0).nonzero()[0]
        return Layout(
            slots, rows, where, order, rows * self.shape.max_model_len, self.request_ids[rows],
            self.slot_of[rows], is_greedy,
            ruled if ruled.size else None, with_logprobs if with_logprobs.size else None,
            max(0, int(wanted.max())), guided if guided.size else None,
        )  # fmt: skip

    def _prepare_decode(self, staging: Staging, layout: Layout) -> Launch:
        num = len(layout.rows)
        padded = self.shape.rows.fit(num)
        width = self.shape.blocks.fit(self._longest // self.shape.block_size + 1)
        inputs = staging.views(padded, padded, padded, width, is_decode=True)
        if staging.layout is not layout:
            self._stage_layout(staging, inputs, layout)
            pad(inputs, num, num)
            inputs.max_query_len = 1
        if staging.table_version != self._table_version:
            staging.table_version = self._table_version
            inputs.block_table[:num] = self.block_table[layout.where, :width]
        staging.decode_columns[:, :num] = self._next[:, layout.where]
        if self._tokens_on_device:
            inputs.input_ids = None
        else:
            at = layout.token_starts + inputs.positions[:num]
            inputs.input_ids[:num] = self._flat_tokens[at]
            inputs.input_ids[num:] = 0
        ends = inputs.context_lens[:num]
        return Launch(inputs, layout.request_ids, layout.slots, ends, None, layout.guided)

    def _prepare_prefill(
        self, staging: Staging, layout: Layout, counts: np.ndarray, forks: tuple[Fork, ...]
    ) -> Launch:
        samples = layout.rows
        ends = self.num_computed[samples] + counts
        emits = ends >= self.prefill_end[samples]
        rows, num_samples = samples, len(samples)
        if forks:  # choices that sample from another row have no tokens
            rows, counts = samples[counts > 0], counts[counts > 0]
        num, total, fit = len(rows), int(counts.sum()), self.shape.rows.fit
        width = self.shape.blocks.fit(-(-int(ends.max()) // self.shape.block_size))
        inputs = staging.views(
            fit(num), fit(num_samples), self.shape.tokens.fit(total), width, is_decode=False
        )
        self._stage_layout(staging, inputs, layout, emits=emits)
        pack(self, inputs, rows, counts)
        inputs.max_query_len = self.shape.tokens.fit(int(counts.max()))
        if (self.prompt_logprobs[rows] >= 0).any():
            inputs.prompt_targets = prompt_targets(self, inputs, rows, counts)
        inputs.logits_indices[num_samples:] = 0
        if forks:
            stage_forks(self, inputs, samples, rows, forks)
        else:
            inputs.logits_indices[:num] = inputs.query_start[1 : num + 1] - 1
        guided = layout.guided
        if guided is not None:
            guided = guided[emits[guided]]
            guided = guided if guided.size else None
        return Launch(inputs, layout.request_ids, layout.slots, ends, emits, guided)

    def _prepare_verification(
        self, staging: Staging, layout: Layout, plan: SchedulerOutput
    ) -> Launch:
        """Write each request's last token and its drafts; every one of them has a sample."""
        assert plan.draft_ids is not None, "not a step that verifies"
        store_drafts(self, plan.slots, plan.num_scheduled, plan.draft_ids)
        rows, counts = layout.rows, plan.num_scheduled
        if layout.order is not None:
            counts = counts[layout.order]
        most, padded = self.shape.num_draft_tokens + 1, self.shape.rows.fit(len(rows))
        longest = int((self.num_computed[rows] + counts).max())
        width = self.shape.blocks.fit(-(-longest // self.shape.block_size))
        inputs = staging.views(padded, padded * most, padded * most, width, is_decode=False)
        staging.layout = None
        pack(self, inputs, rows, counts)
        inputs.max_query_len = most
        inputs.all_greedy = layout.all_greedy
        slots = stage_verification(inputs, layout, counts, spare=self.shape.num_slots)
        ends = inputs.positions[: inputs.num_tokens] + 1
        guided = None if layout.guided is None else inputs.query_start[layout.guided]
        return Launch(inputs, layout.request_ids, slots, ends, None, guided)

    def _stage_layout(
        self,
        staging: Staging,
        inputs: ModelInput,
        layout: Layout,
        *,
        emits: np.ndarray | None = None,
    ) -> None:
        """Write what stays the same from decode to decode of the same rows."""
        staging.layout = layout if emits is None else None
        staging.table_version = -1  # the rows may be others
        num = inputs.num_samples = len(layout.rows)
        inputs.all_greedy = layout.all_greedy
        inputs.rule_samples = layout.rule_samples
        inputs.logprob_samples = layout.logprob_samples
        inputs.num_logprobs = layout.num_logprobs
        if self._slots_on_device:
            spare = self.shape.num_slots
            assert inputs.slots is not None
            inputs.slots[:num] = layout.slots
            if emits is not None:
                inputs.slots[:num][~emits] = spare
            inputs.slots[num:] = spare
            return
        inputs.slots = None
        for name in STATE_COLUMNS:
            getattr(inputs, name)[:num] = getattr(self, name)[layout.where]
        inputs.temperature[num:] = 0.0

    def _writes(self, plan: SchedulerOutput) -> SlotWrites:
        slots = np.array([new.slot for new in plan.new_requests], np.int64)
        rows = self.row_of[slots]
        columns = {name: getattr(self, name)[rows] for name in STATE_COLUMNS}
        return SlotWrites(slots, **columns, rules=rule_writes(plan.new_requests))

    def forget_inputs(self) -> None:
        """Let go of device values that launches were fed with; nothing is in flight."""
        for staging in self._ring:
            staging.inputs = None

    # ── results ─────────────────────────────────────────────────────────────────────────

    def apply(self, slots: np.ndarray, ends: np.ndarray, tokens: np.ndarray) -> None:
        """Write a resolved step's tokens, at their positions, to the rows still here.

        By position, because a rank whose tokens are not read misses some before a break.
        With tokens on the device no ids are ever built from them, and nothing is written.
        """
        if self._tokens_on_device:
            return
        if self._layout is not None and slots is self._layout.slots:
            starts = self._layout.token_starts
        else:
            rows = self.row_of[slots]
            here = rows >= 0
            if np.count_nonzero(here) < len(rows):
                ends, tokens, rows = ends[here], tokens[here], rows[here]
            starts = rows * self.shape.max_model_len
        self._flat_tokens[starts + ends] = tokens
