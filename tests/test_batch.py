"""`InputBatch`: rows that come and go, launch inputs, padding, and the staging ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aneuron import SamplingParams
from aneuron.batch import InputBatch
from aneuron.config import BatchShape, EngineConfig
from aneuron.plans import NewRequest, SchedulerOutput

NONE = np.zeros(0, np.int32)


def batch_of(*, tokens_on_device: bool = False, **options: Any) -> InputBatch:
    config = EngineConfig(
        **{
            "max_num_seqs": 8,
            "block_size": 4,
            "max_num_batched_tokens": 64,
            "num_seqs_buckets": [1, 2, 4, 8],
            "num_tokens_buckets": [16, 64],
            **options,
        }
    )
    shape = BatchShape.of(config, max_model_len=64)
    return InputBatch(shape, tokens_on_device=tokens_on_device)


def new(number: int, tokens: list[int], **params: Any) -> NewRequest:
    blocks = np.arange(10 * number, 10 * number + -(-len(tokens) // 4), dtype=np.int32)
    return NewRequest(
        number, number, np.array(tokens, np.int32), len(tokens), blocks, SamplingParams(**params), 5
    )


def plan(
    slots: list[int],
    counts: list[int],
    *,
    added: tuple[NewRequest, ...] = (),
    removed: tuple[int, ...] = (),
    is_decode: bool = False,
    blocks: tuple[list[int], list[int], list[int]] = ([], [], []),
) -> SchedulerOutput:
    return SchedulerOutput(
        1, is_decode, np.array(slots, np.int64), np.array(slots, np.int32),
        np.array(counts, np.int32), added, removed, (), (),
        *(np.array(one, np.int32) for one in blocks),
    )  # fmt: skip


def test_a_prefill_packs_prompts_and_pads() -> None:
    batch = batch_of()
    step = plan([1, 2], [3, 5], added=(new(1, [7, 8, 9]), new(2, [1, 2, 3, 4, 5])))
    batch.update(step)
    launch = batch.prepare(step)
    inputs = launch.inputs
    assert inputs.input_ids.tolist() == [7, 8, 9, 1, 2, 3, 4, 5] + [0] * 8
    assert inputs.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4] + [0] * 8
    assert inputs.slot_mapping.tolist() == [40, 41, 42, 80, 81, 82, 83, 84] + [-1] * 8
    assert inputs.query_start.tolist() == [0, 3, 8]
    assert inputs.logits_indices.tolist() == [2, 7]
    assert inputs.context_lens.tolist() == [3, 5]
    assert inputs.block_table[:, :2].tolist() == [[10, 0], [20, 21]]
    assert inputs.max_query_len == 16
    assert inputs.num_sampled == 2
    assert launch.emits is not None
    assert launch.emits.tolist() == [True, True]


def test_a_chunk_that_is_not_the_last_gives_no_token() -> None:
    batch = batch_of()
    step = plan([1], [3], added=(new(1, [7, 8, 9, 10, 11]),))
    batch.update(step)
    emits = batch.prepare(step).emits
    assert emits is not None
    assert emits.tolist() == [False]
    batch.advance(step)
    rest = plan([1], [2])
    batch.update(rest)
    launch = batch.prepare(rest)
    assert launch.inputs.input_ids[:2].tolist() == [10, 11]
    assert launch.inputs.context_lens.tolist() == [5]
    assert launch.emits is not None
    assert launch.emits.tolist() == [True]


def test_a_decode_step_reads_the_last_token_and_pads_rows() -> None:
    batch = batch_of()
    first = plan(
        [1, 2, 3], [3, 4, 1],
        added=(new(1, [7, 8, 9]), new(2, [1, 2, 3, 4], temperature=0.0), new(3, [6])),
    )  # fmt: skip
    batch.update(first)
    batch.prepare(first)
    batch.advance(first)
    batch.apply(np.array([3, 1, 2]), np.array([1, 3, 4]), np.array([30, 10, 20]))
    step = plan([1, 2, 3], [1, 1, 1], is_decode=True, blocks=([2], [1], [99]))
    batch.update(step)
    inputs = batch.prepare(step).inputs
    assert inputs.input_ids.tolist() == [10, 20, 30, 0]
    assert inputs.positions.tolist() == [3, 4, 1, 0]
    assert inputs.slot_mapping.tolist() == [43, 396, 121, -1]
    assert inputs.context_lens.tolist() == [4, 5, 2, 1]
    assert inputs.block_table[3].tolist() == [0] * inputs.block_table.shape[1]
    assert inputs.temperature.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert not inputs.all_greedy
    assert inputs.num_sampled == 4


def test_late_tokens_of_removed_requests_are_dropped() -> None:
    batch = batch_of()
    step = plan([1, 2], [1, 1], added=(new(1, [7]), new(2, [8])))
    batch.update(step)
    batch.prepare(step)
    batch.advance(step)
    batch.update(plan([2], [1], removed=(1,), is_decode=True))
    batch.apply(np.array([1, 2]), np.array([1, 1]), np.array([70, 80]))
    assert batch.num_reqs == 1
    assert batch.token_ids[0, :2].tolist() == [8, 80]


def test_the_ring_gives_a_launch_in_flight_its_own_buffers() -> None:
    batch = batch_of(max_in_flight_steps=2)
    step = plan([1], [1], added=(new(1, [7]),))
    batch.update(step)
    launches = []
    for _ in range(3):
        launches.append(batch.prepare(plan([1], [1], is_decode=True)).inputs)
        batch.advance(plan([1], [1], is_decode=True))
    for one in range(3):
        for other in range(one):
            assert not np.shares_memory(launches[one].positions, launches[other].positions)
            assert not np.shares_memory(launches[one].block_table, launches[other].block_table)
    again = batch.prepare(plan([1], [1], is_decode=True)).inputs
    assert np.shares_memory(again.positions, launches[0].positions)


def test_a_token_goes_to_its_position_whatever_arrived_before_it() -> None:
    """A rank whose tokens are not read misses some: those of a break still stand right."""
    batch = batch_of()
    step = plan([1], [2], added=(new(1, [7, 8]),))
    batch.update(step)
    batch.prepare(step)
    batch.advance(step)
    batch.apply(np.array([1]), np.array([4]), np.array([50]))
    assert batch.token_ids[0, :5].tolist() == [7, 8, 0, 0, 50]


# ── with slots on the device ────────────────────────────────────────────────────────────


def test_slots_replace_host_ids_and_padding_has_the_spare_one() -> None:
    batch = batch_of(tokens_on_device=True)
    first = plan([4, 2, 9], [1, 1, 1], added=(new(4, [6]), new(2, [7]), new(9, [8])))
    batch.update(first)
    inputs = batch.prepare(first).inputs
    spare = batch.shape.num_slots
    assert spare == 16
    assert inputs.slots is not None
    assert inputs.slots.tolist() == [4, 2, 9, spare]
    assert inputs.input_ids[:3].tolist() == [6, 7, 8], "a prompt's ids come from the host"
    batch.advance(first)
    step = plan([4, 2, 9], [1, 1, 1], is_decode=True)
    batch.update(step)
    inputs = batch.prepare(step).inputs
    assert inputs.input_ids is None
    assert inputs.slots is not None
    assert inputs.slots.tolist() == [4, 2, 9, spare]


def test_the_admitting_launch_writes_a_slots_whole_state_and_no_other_does() -> None:
    batch = batch_of(tokens_on_device=True)
    hot = new(3, [1, 2], temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)
    first = plan([3, 5], [2, 1], added=(hot, new(5, [9], temperature=0.0)))
    batch.update(first)
    writes = batch.prepare(first).inputs.writes
    assert writes is not None
    assert writes.slots.tolist() == [3, 5]
    assert writes.prompt_lens.tolist() == [2, 1]
    assert writes.temperature.tolist() == [0.5, 0.0]
    assert writes.top_k.tolist() == [7, 0]
    assert writes.top_p.tolist() == [0.25, 1.0]
    assert writes.min_p.tolist() == [0.125, 0.0]
    assert writes.seed.tolist() == [5, 5]
    batch.advance(first)
    step = plan([3, 5], [1, 1], is_decode=True)
    batch.update(step)
    assert batch.prepare(step).inputs.writes is None
    batch.advance(step)
    batch.update(joined := plan([6], [1], added=(new(6, [4]),), removed=(3,)))
    again = batch.prepare(joined).inputs.writes
    assert again is not None
    assert again.slots.tolist() == [6]


def test_a_chunk_that_is_not_the_last_leaves_its_slots_token_alone() -> None:
    batch = batch_of(tokens_on_device=True)
    step = plan([1, 2], [3, 2], added=(new(1, [7, 8, 9, 10, 11]), new(2, [5, 6])))
    batch.update(step)
    launch = batch.prepare(step)
    assert launch.emits is not None
    assert launch.emits.tolist() == [False, True]
    assert launch.inputs.slots is not None
    assert launch.inputs.slots.tolist() == [batch.shape.num_slots, 2]


@pytest.mark.timeout(120)
@given(st.data())
def test_condense_keeps_every_remaining_row_whole(data: st.DataObject) -> None:
    batch = batch_of()
    here: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 6), label="rounds")):
        gone = tuple(data.draw(st.sets(st.sampled_from(sorted(here)))) if here else ())
        for slot in gone:
            del here[slot]
        free = [slot for slot in range(16) if slot not in here]
        room = 8 - len(here)
        joining = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=room))
        added = []
        for slot in joining:
            here[slot] = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
            added.append(new(slot, here[slot]))
        batch.update(plan([], [], added=tuple(added), removed=gone))
        assert batch.num_reqs == len(here)
        assert sorted(batch.slot_of[: len(here)].tolist()) == sorted(here)
        for slot, tokens in here.items():
            row = int(batch.row_of[slot])
            assert batch.slot_of[row] == slot
            assert batch.request_ids[row] == slot
            assert batch.token_ids[row, : batch.prefill_end[row]].tolist() == tokens
            assert batch.block_table[row, 0] == 10 * slot
        assert (np.delete(batch.row_of, list(here)) == -1).all()


@pytest.mark.parametrize("num", [1, 3, 8])
def test_rows_are_padded_to_the_bucket(num: int) -> None:
    batch = batch_of()
    step = plan(list(range(num)), [1] * num, added=tuple(new(n, [n]) for n in range(num)))
    batch.update(step)
    assert batch.prepare(step).inputs.num_rows == {1: 1, 3: 4, 8: 8}[num]
