"""Steps of a native model by hand: the columns that the engine would write."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.config import BatchShape, EngineConfig
from aneuron.device.neuron import NeuronDevice
from aneuron.models.neuron.native import NativeModel, adapt, native_spec
from aneuron.plans import ModelInput, SlotWrites
from aneuron.testing.fakes import CountDecoder, FakeNative

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

__all__ = ["BLOCK_SIZE", "SHAPE", "SPARE", "Row", "Steps", "Watched", "Weakly", "shape_of", "steps"]

BLOCK_SIZE, NUM_BLOCKS, SPARE = 4, 64, 8
_STATE = {
    "prompt_lens": np.int32, "temperature": np.float32, "top_k": np.int32, "top_p": np.float32,
    "min_p": np.float32, "seed": np.int64,
}  # fmt: skip


def shape_of(**options: Any) -> BatchShape:
    """Small buckets; 8 slots."""
    given: dict[str, Any] = {
        "max_num_seqs": 4, "max_model_len": 32, "max_num_batched_tokens": 8,
        "block_size": BLOCK_SIZE, "num_blocks_buckets": [4], "num_seqs_buckets": [1, 4],
        "num_tokens_buckets": [8], **options,
    }  # fmt: skip
    return BatchShape.of(adapt(EngineConfig(**given)), given["max_model_len"])


SHAPE = shape_of()


@dataclass
class Row:
    """A request: where its tokens are, and how many have been computed."""

    slot: int
    count: int = 0

    @property
    def blocks(self) -> list[int]:
        """Eight blocks, out of order."""
        return [1 + self.slot + 8 * (7 - index) for index in range(8)]

    def cells(self, positions: np.ndarray) -> np.ndarray:
        """Where the cache takes those tokens."""
        cells: np.ndarray = np.array(self.blocks)[positions // BLOCK_SIZE] * BLOCK_SIZE
        cells += positions % BLOCK_SIZE
        return cells


class Watched(FakeNative):
    """Writes down what is sent to the core."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sent: list[torch.Tensor] = []

    def to_device(self, tensor: torch.Tensor, *, non_blocking: bool = True) -> torch.Tensor:
        self.sent.append(tensor)
        return super().to_device(tensor, non_blocking=non_blocking)


class Weakly(FakeNative):
    """Knows what was sent to the core, and does not keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[weakref.ref[torch.Tensor]] = []

    def to_device(self, tensor: torch.Tensor, *, non_blocking: bool = True) -> torch.Tensor:
        self.sent.append(weakref.ref(tensor))
        return super().to_device(tensor, non_blocking=non_blocking)


@dataclass
class Steps:
    """A model on a played core."""

    model: NativeModel
    fake: Any
    device: NeuronDevice

    def run(self, inputs: ModelInput, fed: Any = None) -> Any:
        """Launch."""
        return self.model.executable(inputs)(inputs, fed)

    def begin(self, slot: int, ids: Sequence[int], **columns: Any) -> tuple[Row, int]:
        """Compute a prompt; return the request and its first token."""
        row = Row(slot)
        return row, int(self.run(self.prefill(row, ids, **columns)).read()[0])

    def prefill(self, row: Row, ids: Sequence[int], **columns: Any) -> ModelInput:
        """The columns of a prompt's next tokens, padded to 8."""
        num, positions = len(ids), np.arange(row.count, row.count + len(ids))
        inputs = _inputs(8, 1, [row], is_decode=False, **columns)
        inputs.input_ids[:num] = ids
        inputs.positions[:num] = positions
        inputs.slot_mapping[:num] = row.cells(positions)
        inputs.query_start[1:] = num
        inputs.logits_indices[0] = num - 1
        row.count += num
        inputs.context_lens[0] = row.count
        inputs.num_tokens, inputs.max_query_len = num, 8
        return inputs

    def decode(
        self, rows: Sequence[Row], ids: Sequence[int] | None, *, padded: int = 4, **columns: Any
    ) -> ModelInput:
        """The columns of a decode; without ids they are on the device."""
        inputs = _inputs(padded, padded, rows, is_decode=True, **columns)
        inputs.query_start[:] = np.arange(padded + 1)
        inputs.logits_indices[:] = np.arange(padded)
        for at, row in enumerate(rows):
            inputs.positions[at] = row.count
            inputs.slot_mapping[at] = row.cells(np.array([row.count]))[0]
            row.count += 1
            inputs.context_lens[at] = row.count
        inputs.num_tokens = len(rows)
        if ids is None:
            inputs.input_ids = None
        else:
            inputs.input_ids[: len(rows)] = ids
        return inputs


def _inputs(
    tokens: int,
    num_rows: int,
    rows: Sequence[Row],
    *,
    is_decode: bool,
    has_slots: bool = True,
    **state: Any,
) -> ModelInput:
    num = len(rows)
    table = np.zeros((num_rows, 8), np.int32)
    table[:num] = [row.blocks for row in rows]
    slots = np.full(num_rows, SPARE, np.int32)
    slots[:num] = [row.slot for row in rows]
    columns: dict[str, Any] = {name: np.zeros(num_rows, dtype) for name, dtype in _STATE.items()}
    columns["top_p"][:] = 1.0
    for name, value in state.items():
        columns[name][:num] = value
    writes = None
    if has_slots and not is_decode:  # the request's own, as the engine sends them once
        writes = SlotWrites(slots[:num].astype(np.int64), **columns)
    hidden: dict[str, Any] = {name: np.zeros_like(column) for name, column in columns.items()}
    return ModelInput(
        is_decode=is_decode,
        num_reqs=num,
        num_samples=num,
        num_tokens=0,
        max_query_len=1,
        all_greedy=not columns["temperature"].any(),
        input_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        slot_mapping=np.full(tokens, -1, np.int32),
        query_start=np.zeros(num_rows + 1, np.int32),
        block_table=table,
        context_lens=np.ones(num_rows, np.int32),
        logits_indices=np.zeros(num_rows, np.int32),
        slots=slots if has_slots else None,
        writes=writes,
        **(hidden if has_slots else columns),
    )


@contextmanager
def steps(fake: Any = None, decoder: Any = None) -> Iterator[Steps]:
    """A model on a core; at the end nobody may have broken a rule, or left a launch unread."""
    fake = fake or FakeNative()
    decoder = decoder or CountDecoder(300)
    device = NeuronDevice(lambda: fake, kind="native")
    model = NativeModel(native_spec(decoder.config, name="played"), decoder)
    try:
        yield Steps(model.on(device).with_kv(NUM_BLOCKS, BLOCK_SIZE, SPARE), fake, device)
    finally:
        device.disconnect()
    assert fake.violations == []
