"""`InputBatch` where rows begin in the middle: found prefixes, and choices that fork."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aneuron import SamplingParams
from aneuron.batch import InputBatch
from aneuron.config import BatchShape, EngineConfig
from aneuron.plans import Fork, NewRequest, SchedulerOutput


def batch_of(*, tokens_on_device: bool = False) -> InputBatch:
    config = EngineConfig(
        max_num_seqs=8,
        block_size=4,
        max_num_batched_tokens=64,
        num_seqs_buckets=[1, 2, 4, 8],
        num_tokens_buckets=[1, 2, 4, 16, 64],
    )
    return InputBatch(BatchShape.of(config, 64), tokens_on_device=tokens_on_device)


def new(
    slot: int, tokens: list[int], blocks: list[int], num_computed: int = 0, **params: Any
) -> NewRequest:
    return NewRequest(
        100 + slot, slot, np.array(tokens, np.int32), len(tokens), np.array(blocks, np.int32),
        SamplingParams(**params), 5 + slot, num_computed,
    )  # fmt: skip


def plan(
    slots: list[int],
    counts: list[int],
    *,
    added: tuple[NewRequest, ...] = (),
    forks: tuple[Fork, ...] = (),
    is_decode: bool = False,
) -> SchedulerOutput:
    none = np.zeros(0, np.int32)
    return SchedulerOutput(
        1, is_decode, np.array(slots, np.int64) + 100, np.array(slots, np.int64),
        np.array(counts, np.int32), added, (), (), forks, none, none, none,
    )  # fmt: skip


def fork_of(slot: int, slots: list[int], copied: list[int]) -> Fork:
    return Fork(slot, np.array(slots, np.int64), np.array(copied, np.int32))


def test_a_found_prefix_is_not_computed_again() -> None:
    batch = batch_of()
    step = plan([1], [2], added=(new(1, [1, 2, 3, 4, 5, 6], [10, 11], num_computed=4),))
    batch.update(step)
    launch = batch.prepare(step)
    assert launch.inputs.input_ids.tolist() == [5, 6]
    assert launch.inputs.positions.tolist() == [4, 5]
    assert launch.inputs.slot_mapping.tolist() == [44, 45]
    assert launch.inputs.context_lens.tolist() == [6]
    assert launch.inputs.block_table[0, :2].tolist() == [10, 11]
    assert launch.ends.tolist() == [6]
    batch.advance(step)
    decode = plan([1], [1], is_decode=True)
    batch.update(decode)
    assert batch.prepare(decode).inputs.slot_mapping.tolist() == [46]


@pytest.mark.parametrize("tokens_on_device", [False, True])
def test_choices_sample_from_the_row_that_computes_their_prompt(tokens_on_device: bool) -> None:
    """Two prompts, the second with three choices, of which row and slot order differ."""
    batch = batch_of(tokens_on_device=tokens_on_device)
    first = plan([5], [2], added=(new(5, [1, 2], [30]),))  # row 0: it is there already
    batch.update(first)
    batch.prepare(first)
    batch.advance(first)
    leader = new(1, [7, 8, 9, 6, 5], [10, 11], temperature=0.0)
    sleepers = (
        new(3, [7, 8, 9, 6, 5], [10, 12], num_computed=5, temperature=0.5),
        new(2, [7, 8, 9, 6, 5], [10, 13], num_computed=5, temperature=0.7),
    )
    other = new(4, [9, 9], [20])
    step = plan(
        [1, 4, 3, 2], [5, 2, 0, 0], added=(leader, other, *sleepers),
        forks=(fork_of(1, [3, 2], [12, 13]),),
    )  # fmt: skip
    batch.update(step)
    launch = batch.prepare(step)
    inputs = launch.inputs
    assert (inputs.num_reqs, inputs.num_samples, inputs.num_sampled) == (2, 4, 4)
    assert inputs.num_tokens == 7
    assert inputs.query_start.tolist() == [0, 5, 7]
    assert inputs.context_lens.tolist() == [5, 2]
    assert launch.slots.tolist() == [1, 4, 3, 2]
    assert inputs.logits_indices.tolist() == [4, 6, 4, 4]
    assert inputs.sampled_rows.tolist() == [0, 1, 0, 0]
    assert launch.emits is not None
    assert launch.emits.all()
    assert launch.ends.tolist() == [5, 2, 5, 5]
    assert inputs.copies is not None
    assert inputs.copies.sources.tolist() == [11, 11]
    assert inputs.copies.targets.tolist() == [12, 13]
    if tokens_on_device:
        assert inputs.slots is not None
        assert inputs.slots.tolist() == [1, 4, 3, 2]
        assert inputs.writes is not None
        assert inputs.writes.slots.tolist() == [1, 4, 3, 2]
    else:
        assert inputs.temperature.tolist() == pytest.approx([0.0, 1.0, 0.5, 0.7])
    batch.advance(step)
    decode = plan([1, 3, 2], [1, 1, 1], is_decode=True)
    batch.update(decode)
    inputs = batch.prepare(decode).inputs
    assert inputs.slot_mapping[:3].tolist() == [45, 49, 53]
    assert inputs.copies is None


def test_choices_of_a_prompt_that_fills_its_blocks_copy_nothing() -> None:
    batch = batch_of()
    leader, fork = new(1, [1, 2, 3, 4], [10]), new(2, [1, 2, 3, 4], [10], num_computed=4)
    step = plan([1, 2], [4, 0], added=(leader, fork), forks=(fork_of(1, [2], []),))
    batch.update(step)
    assert batch.prepare(step).inputs.copies is None


def test_a_step_with_forks_never_looks_like_a_decode() -> None:
    """One token a row, and as many tokens as rows: executables take that for a decode."""
    batch = batch_of()
    leader = new(1, [1, 2, 3, 4, 5], [10, 11], num_computed=4)
    fork = new(2, [1, 2, 3, 4, 5], [10, 12], num_computed=5)
    step = plan([1, 2], [1, 0], added=(leader, fork), forks=(fork_of(1, [2], [12]),))
    batch.update(step)
    inputs = batch.prepare(step).inputs
    assert len(inputs.positions) == inputs.num_rows == 1
    assert inputs.max_query_len > 1
    assert inputs.logits_indices.tolist() == [0, 0]
