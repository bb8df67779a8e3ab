"""Launches by hand: the columns that the engine would write, and a loaded model to run them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.models.neuron.nxd import NxdModel
from aneuron.params import STATE_COLUMNS as STATE
from aneuron.plans import ModelInput, SlotWrites
from aneuron.testing.fakes import FakeNxd
from tests.neuron.artifacts import artifact_of, count_decoder, fake_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


@dataclass
class Placed:
    """A request: where its tokens are, and how many have been computed."""

    slot: int
    blocks: list[int]
    count: int = 0


class Spy(FakeNxd):
    """A played runtime that keeps what rank 0 was launched with."""

    def __init__(self, **options: Any) -> None:
        options = {"decoder": count_decoder, **options}
        super().__init__(**options)
        self.launches: list[list[Any]] = []

    def forward_async(self, ranked: Any) -> Any:
        is_by_rank = self.layout == "rank_out"
        self.launches.append(list(ranked[0]) if is_by_rank else [one[0] for one in ranked])
        return super().forward_async(ranked)

    def last(self, index: int) -> Any:
        return self.launches[-1][index]


@dataclass
class Launcher:
    """A model on a played runtime, and requests on it."""

    model: NxdModel
    fake: FakeNxd

    def place(self, slot: int, length: int = 24) -> Placed:
        """A request with blocks for some tokens; on rows, with the row of its slot."""
        shape = self.model.artifact.shape
        if not shape.is_block_kv:
            return Placed(slot, [slot + 1])
        per = shape.num_blocks // shape.batch_size
        first = 1 + slot * per
        return Placed(slot, list(range(first, first + -(-length // shape.block_size))))

    def prefill(self, one: Placed, ids: Sequence[int], **sampling: Any) -> ModelInput:
        """The columns of a prompt's next tokens."""
        num, start = len(ids), one.count
        padded = num + 3
        inputs = self._inputs(padded, 1, [one], is_decode=False, **sampling)
        positions = np.arange(start, start + num)
        inputs.input_ids[:num] = ids
        inputs.positions[:num] = positions
        inputs.slot_mapping[:num] = self._cells(one, positions)
        inputs.query_start[1:] = num
        inputs.num_tokens, inputs.max_query_len = num, padded
        inputs.logits_indices[0] = num - 1
        one.count += num
        inputs.context_lens[0] = one.count
        return inputs

    def decode(
        self, rows: Sequence[Placed], ids: Sequence[int] | None, *, padded: int = 4, **sampling: Any
    ) -> ModelInput:
        """The columns of a decode; without ids they are on the device."""
        inputs = self._inputs(padded, padded, rows, is_decode=True, **sampling)
        inputs.query_start[:] = np.arange(padded + 1)
        inputs.logits_indices[:] = np.arange(padded)
        for row, one in enumerate(rows):
            inputs.positions[row] = one.count
            inputs.slot_mapping[row] = self._cells(one, np.array([one.count]))[0]
            one.count += 1
            inputs.context_lens[row] = one.count
        if ids is None:
            inputs.input_ids = None
        else:
            inputs.input_ids[: len(rows)] = ids
        inputs.num_tokens = len(rows)
        return inputs

    def run(self, inputs: ModelInput, fed: Any = None) -> Any:
        """Launch."""
        return self.model.executable(inputs)(inputs, fed)

    def begin(self, slot: int, ids: Sequence[int], **sampling: Any) -> tuple[Placed, int]:
        """Compute a prompt; return the request and its first token."""
        one = self.place(slot, max(24, len(ids) + 12))
        told = self.run(self.prefill(one, ids, **sampling)).read()[0]
        return one, int(told.argmax() if told.ndim else told)

    def _cells(self, one: Placed, positions: np.ndarray) -> np.ndarray:
        size = self.model.artifact.shape.block_size
        blocks = np.array(one.blocks)[np.minimum(positions // size, len(one.blocks) - 1)]
        cells: np.ndarray = blocks * size + positions % size
        return cells

    def _inputs(
        self,
        tokens: int,
        rows: int,
        placed: Sequence[Placed],
        *,
        is_decode: bool,
        writes: bool = False,
        **sampling: Any,
    ) -> ModelInput:
        shape = self.model.artifact.shape
        table = np.zeros((rows, max(len(one.blocks) for one in placed)), np.int32)
        for row, one in enumerate(placed):
            table[row, : len(one.blocks)] = one.blocks
        columns: dict[str, Any] = {name: np.zeros(rows, kind) for name, kind in STATE.items()}
        columns["top_p"][:] = 1.0
        for name, value in sampling.items():
            columns[name][: len(placed)] = value
        slots = None
        if shape.num_slots:
            slots = np.full(rows, shape.num_slots, np.int32)
            slots[: len(placed)] = [one.slot for one in placed]
        told: dict[str, Any] = {name: column[: len(placed)] for name, column in columns.items()}
        return ModelInput(
            is_decode=is_decode,
            num_reqs=len(placed),
            num_samples=len(placed),
            num_tokens=0,
            max_query_len=1,
            all_greedy=not columns["temperature"].any(),
            input_ids=np.zeros(tokens, np.int32),
            positions=np.zeros(tokens, np.int32),
            slot_mapping=np.full(tokens, -1, np.int32),
            query_start=np.zeros(rows + 1, np.int32),
            block_table=table,
            context_lens=np.ones(rows, np.int32),
            logits_indices=np.zeros(rows, np.int32),
            slots=slots,
            writes=SlotWrites(np.array([one.slot for one in placed]), **told) if writes else None,
            **columns,
        )


@contextmanager
def launcher(
    folder: Path, fake: FakeNxd | None = None, *, expect: str | None = None
) -> Iterator[Launcher]:
    """A loaded artifact; at the end the runtime must have nothing else to say than expected."""
    fake = fake or FakeNxd(decoder=count_decoder)
    artifact = artifact_of(folder)
    device = fake_device(fake)
    model = NxdModel.load(artifact, device).on(device)
    shape = artifact.shape
    model = model.with_kv(shape.num_blocks, shape.block_size, shape.num_slots)
    try:
        yield Launcher(model, fake)
    finally:
        device.disconnect()
    if expect is None:
        assert fake.violations == []
    else:
        assert any(expect in one for one in fake.violations)
