"""How the tokens of several rows, and what they bring, are packed into one launch.

Used by `InputBatch` alone, on the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aneuron.plans import BlockCopies, PromptTargets, RuleWrite, SpecDecodeMetadata

if TYPE_CHECKING:
    from aneuron.batch import InputBatch
    from aneuron.batch.staging import Layout
    from aneuron.plans import Fork, ModelInput, NewRequest

__all__ = [
    "pack",
    "pad",
    "prompt_targets",
    "rule_writes",
    "stage_forks",
    "stage_verification",
    "store_drafts",
]


def pack(batch: InputBatch, inputs: ModelInput, rows: np.ndarray, counts: np.ndarray) -> None:
    """Write the next `counts` tokens of each row, one row after the other."""
    num, total = len(rows), int(counts.sum())
    pad(inputs, num, total)
    inputs.input_ids[total:] = 0
    inputs.block_table[:num] = batch.block_table[rows, : inputs.block_table.shape[1]]
    inputs.query_start[0] = 0
    np.cumsum(counts, out=inputs.query_start[1 : num + 1])
    inputs.query_start[num + 1 :] = total
    start = batch.num_computed[rows]
    _stage_tokens(batch, inputs, rows, start, counts)
    inputs.context_lens[:num] = start + counts


def pad(inputs: ModelInput, num_reqs: int, num_tokens: int) -> None:
    """Write what stands behind so many rows and tokens: it reads the null block alone."""
    inputs.num_reqs, inputs.num_tokens = num_reqs, num_tokens
    inputs.positions[num_tokens:] = 0
    inputs.slot_mapping[num_tokens:] = -1
    inputs.context_lens[num_reqs:] = 1
    inputs.block_table[num_reqs:] = 0


def _stage_tokens(
    batch: InputBatch,
    inputs: ModelInput,
    rows: np.ndarray,
    start: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Write ids, positions and cells of the tokens start..start+counts of each row."""
    num, total = len(rows), inputs.num_tokens
    row_of_token = np.repeat(rows, counts)
    positions = np.arange(total) + np.repeat(start - inputs.query_start[:num], counts)
    blocks, offsets = np.divmod(positions, batch.shape.block_size)
    cells = batch.block_table[row_of_token, blocks] * batch.shape.block_size + offsets
    inputs.input_ids[:total] = batch.token_ids[row_of_token, positions]
    inputs.positions[:total] = positions
    inputs.slot_mapping[:total] = cells


def prompt_targets(
    batch: InputBatch, inputs: ModelInput, rows: np.ndarray, counts: np.ndarray
) -> PromptTargets | None:
    """Return which tokens of prompts are wanted, of the rows that want some."""
    indices: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    parts: list[tuple[int, int, int]] = []
    wanted = batch.prompt_logprobs[rows]
    for position in (wanted >= 0).nonzero()[0].tolist():
        row, start = rows[position], int(batch.num_computed[rows[position]])
        # Each token tells of the next one; the last one of the prompt, of the answer.
        end = min(start + int(counts[position]), int(batch.prompt_lens[row]) - 1)
        if end > start:
            first = int(inputs.query_start[position])
            indices.append(np.arange(first, first + end - start))
            targets.append(batch.token_ids[row, start + 1 : end + 1].copy())
            parts.append((int(batch.slot_of[row]), start + 1, end - start))
    if not parts:
        return None
    most = int(wanted.max())
    return PromptTargets(np.concatenate(indices), np.concatenate(targets), most, tuple(parts))


def stage_forks(
    batch: InputBatch,
    inputs: ModelInput,
    samples: np.ndarray,
    rows: np.ndarray,
    forks: tuple[Fork, ...],
) -> None:
    """Let choices sample from the row that computes their prompt, and copy its last block."""
    computed_by = samples.copy()
    sources: list[int] = []
    for fork in forks:
        row = batch.row_of[fork.slot]
        computed_by[np.isin(samples, batch.row_of[fork.slots])] = row
        block = batch.block_table[row, (batch.prefill_end[row] - 1) // batch.shape.block_size]
        sources += [int(block)] * len(fork.copied_blocks)
    ends = inputs.query_start[1 : len(rows) + 1] - 1
    inputs.logits_indices[: len(samples)] = ends[np.searchsorted(rows, computed_by)]
    # One token a row is what decodes look like, and those have a sample for each row.
    inputs.max_query_len = max(2, inputs.max_query_len)
    if sources:
        targets = np.concatenate([fork.copied_blocks for fork in forks])
        inputs.copies = BlockCopies(np.array(sources, np.int64), targets.astype(np.int64))


def store_drafts(
    batch: InputBatch, slots: np.ndarray, counts: np.ndarray, draft_ids: np.ndarray
) -> None:
    """Write last tokens and drafts to the rows of slots, as if they were given already."""
    rows = batch.row_of[slots]
    starts = np.cumsum(counts) - counts
    places = np.arange(len(draft_ids)) + np.repeat(batch.num_computed[rows] - starts, counts)
    batch.token_ids[np.repeat(rows, counts), places] = draft_ids


def stage_verification(
    inputs: ModelInput, layout: Layout, counts: np.ndarray, *, spare: int
) -> np.ndarray:
    """Write the sample columns of packed drafts, one sample for each token.

    Requests with rules, logprobs, a grammar or hooks have no drafts, and one sample.

    Returns:
        int64 [samples], the slot of each.
    """
    assert inputs.slots is not None, "drafts are verified where slots are on the device"
    total = inputs.num_samples = inputs.num_tokens
    starts = inputs.query_start[: len(counts)].astype(np.int64)
    slots = np.repeat(layout.slots, counts)
    inputs.slots[:total], inputs.slots[total:] = slots, spare
    inputs.logits_indices[:total], inputs.logits_indices[total:] = np.arange(total), 0
    wanted = (layout.rule_samples, layout.logprob_samples)
    inputs.rule_samples, inputs.logprob_samples = (
        None if samples is None else starts[samples] for samples in wanted
    )
    inputs.num_logprobs = layout.num_logprobs
    follows = np.full(len(inputs.positions), -1, np.int32)
    follows[: total - 1] = inputs.input_ids[1:total]
    follows[starts[1:] - 1] = -1  # the last sample of each request has nothing to verify
    inputs.spec_decode_metadata = SpecDecodeMetadata(follows, starts)
    return slots


def rule_writes(new_requests: tuple[NewRequest, ...]) -> tuple[RuleWrite, ...]:
    """Return the rules of requests that enter the batch, of those that have some."""
    return tuple(
        RuleWrite(
            new.slot, new.params, new.token_ids, new.prompt_len, new.end_ids, new.bad_word_ids
        )
        for new in new_requests
        if new.params.has_rules
    )
