"""One launch of a traced program: its padded inputs, and its result until that has been read.

Comes in: `ModelInput`; device tensors of all ranks. Goes out: host tensors of a bucket's shapes, in
NxDI's order, new ones for each launch; host arrays, read once, on whichever thread asks first, or
the device tensors themselves as inputs of the next launch. Sizes are chosen on the loop, the rest
runs on the device's threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aneuron.models.neuron.program import Bucket, padding_inputs
from aneuron.models.neuron.sampler import sampling_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aneuron.device.neuron.raw import NxdRaw
    from aneuron.models.neuron.program import ProgramShape
    from aneuron.plans import ModelInput

__all__ = [
    "LAST_TOKEN",
    "LaunchInputs",
    "LaunchWriter",
    "NxdGathered",
    "NxdLaunched",
    "bucket_name",
    "bucket_of",
]

_IDS, _MASK, _POSITIONS, _SEQ_IDS, _PARAMS = range(5)
_SLOTS, _TABLE, _QUERIES, _COMPUTED = range(11, 15)
_AHEAD = 2  # tokens that may be launched before the host knows them
LAST_TOKEN = -1  # in place of an id: the last token of the row's slot


@dataclass(frozen=True, slots=True)
class LaunchInputs:
    """The inputs of one launch.

    Attributes:
        args: in NxDI's order, padded.
        owners: int32 [rows that are no padding], the sequence id of each, in the order of args.
        places: int64 [B], where the rows of the launch stand, padding behind them; None: in order.
    """

    args: list[torch.Tensor]
    owners: np.ndarray
    places: np.ndarray | None


def bucket_of(shape: ProgramShape, inputs: ModelInput) -> Bucket:
    """Return the bucket that a launch runs in.

    A decode takes the first one above its longest context, or the one behind that where the end
    is at most two tokens away. A prefill takes the first that holds its tokens and those before
    them; of rows of the cache, as NxDI does, one above its tokens.

    Raises:
        ValueError: no bucket is that long.
    """
    longest = int(inputs.context_lens[: inputs.num_reqs].max())
    if inputs.is_decode:
        sizes = shape.token_buckets
        at = bisect_right(sizes, longest)
        if at < len(sizes) and sizes[at] <= longest + _AHEAD:
            at += 1
        at = min(at, len(sizes) - 1)
        _check(sizes[at] >= longest, "contexts", longest)
        return Bucket(is_decode=True, size=sizes[at])
    _check(inputs.num_reqs == 1, "prompts in a step", inputs.num_reqs)
    count = inputs.num_tokens
    find = bisect_left if shape.is_block_kv else bisect_right
    at = min(find(shape.context_buckets, count), len(shape.context_buckets) - 1)
    size, before = shape.context_buckets[at], longest - count
    _check(size >= count, "prompts", count)
    at = min(bisect_left(shape.prefix_buckets, before), len(shape.prefix_buckets) - 1)
    prefix = shape.prefix_buckets[at]
    _check(prefix >= before, "cached prefixes", before)
    return Bucket(is_decode=False, size=size, prefix=prefix)


def bucket_name(shape: ProgramShape, bucket: Bucket) -> str:
    """Return what people call a bucket, such as `decode[r4,c128]`."""
    if bucket.is_decode:
        return f"decode[r{shape.batch_size},c{bucket.size}]"
    return f"prefill[t{bucket.size},p{bucket.prefix}]"


class LaunchWriter:
    """Writes launches for programs of one shape."""

    def __init__(self, shape: ProgramShape) -> None:
        """Keep what padding looks like in each bucket."""
        self._shape = shape
        self._padding = {
            bucket: padding_inputs(shape, bucket) for bucket in (*shape.prefills, *shape.decodes)
        }

    def padding(self, bucket: Bucket) -> LaunchInputs:
        """Return a launch of padding alone."""
        args = [arg.clone() for arg in self._padding[bucket]]
        return LaunchInputs(args, args[_SEQ_IDS].numpy()[:0], None)

    def write(self, bucket: Bucket, inputs: ModelInput) -> LaunchInputs:
        """Return a launch's inputs.

        Args:
            bucket: that it runs in.
            inputs: with their sampling columns. Without `input_ids`, or with those of a launch
                unread, ids are the last tokens of the slots.

        Raises:
            ValueError: its rows are more than those of the programs.
        """
        launch = self.padding(bucket)
        args = [arg.numpy() for arg in launch.args]
        if not inputs.all_greedy and self._shape.sampling == "drawn":
            num = inputs.num_reqs
            args[_PARAMS][:num] = sampling_rows(inputs, self._shape.sampling_columns)[:num]
        if bucket.is_decode:
            _check(inputs.num_reqs <= self._shape.batch_size, "rows", inputs.num_reqs)
            self._write_decode(inputs, args)
            if not self._shape.is_block_kv:
                return self._by_seq_id(launch, inputs)
        else:
            self._write_prefill(bucket, inputs, args)
        return LaunchInputs(launch.args, args[_SEQ_IDS][: inputs.num_reqs], None)

    def _write_decode(self, inputs: ModelInput, args: list[np.ndarray]) -> None:
        """Write rows in the launch's order, padding behind them."""
        shape, num = self._shape, inputs.num_reqs
        positions = inputs.positions[:num]
        ids = inputs.input_ids
        args[_IDS][:num, 0] = ids[:num] if isinstance(ids, np.ndarray) else LAST_TOKEN
        args[_POSITIONS][:num, 0] = positions
        if not shape.is_ours:  # ours know what is in the cache from the positions
            args[_MASK][:num] = np.arange(args[_MASK].shape[1]) < positions[:, None]
        if shape.is_ours:
            args[_SLOTS][:num, 0] = inputs.slot_mapping[:num]
        if not shape.is_block_kv:
            return
        if inputs.slots is not None and shape.num_slots:
            args[_SEQ_IDS][:num] = inputs.slots[:num]
        args[_SLOTS][:num, 0] = inputs.slot_mapping[:num]
        args[_COMPUTED][:num, 0] = positions
        width = min(args[_TABLE].shape[1], inputs.block_table.shape[1])
        table = inputs.block_table[:num, :width]
        if shape.block_padding:
            table = np.where(table, table, shape.block_padding)
        args[_TABLE][:num, :width] = table

    def _by_seq_id(self, launch: LaunchInputs, inputs: ModelInput) -> LaunchInputs:
        """Return a launch with its rows sorted by sequence id, padding with ids of nobody."""
        num, rows = inputs.num_reqs, self._shape.batch_size
        own = inputs.block_table[:num, 0] - 1
        unused = np.ones(self._shape.num_blocks, np.bool_)
        unused[own] = False
        seq_ids = np.concatenate((own, unused.nonzero()[0][: rows - num])).astype(np.int32)
        order = np.argsort(seq_ids)
        places = np.empty_like(order)
        places[order] = np.arange(rows)
        by_id = torch.from_numpy(order)
        args = [arg.index_select(0, by_id) if arg.numel() else arg for arg in launch.args]
        args[_SEQ_IDS] = torch.from_numpy(seq_ids[order])
        return LaunchInputs(args, np.sort(own), places)

    def _write_prefill(self, bucket: Bucket, inputs: ModelInput, args: list[np.ndarray]) -> None:
        shape, count, longest = self._shape, inputs.num_tokens, int(inputs.context_lens[0])
        before = longest - count
        args[_IDS][0, :count] = inputs.input_ids[:count]
        args[_POSITIONS][0, :count] = inputs.positions[:count]
        if longest == 1:  # NxDI takes the highest position for the last token
            args[_POSITIONS][0, 1:] = 0
        if not shape.is_block_kv:
            args[_MASK][0, :count] = 1
            args[_SEQ_IDS][0] = inputs.block_table[0, 0] - 1
            if shape.is_ours:
                args[_SLOTS][0, :count] = inputs.slot_mapping[:count]
            return
        if inputs.slots is not None and shape.num_slots:
            args[_SEQ_IDS][0] = inputs.slots[0]
        args[_SLOTS][0, :count] = inputs.slot_mapping[:count]
        args[_QUERIES][0, 0], args[_COMPUTED][0, 0] = count, before
        if bucket.prefix:
            args[_MASK][0, :before] = 1
            num_blocks = -(-before // shape.block_size)
            args[_TABLE][0, :num_blocks] = inputs.block_table[0, :num_blocks]


class NxdLaunched:
    """A launch of a traced program; see `aneuron.device.neuron.raw.Launched`."""

    def __init__(
        self,
        raw: NxdRaw,
        launch: LaunchInputs,
        outputs: list[Any],
        *,
        num_rows: int,
        num_counts: int,
        keep: tuple[Any, ...] = (),
    ) -> None:
        """Wrap a launch that has been made.

        Args:
            raw: that made it.
            launch: its inputs.
            outputs: the first one of each rank: ids, or logits.
            num_rows: of the result.
            num_counts: rows of it that are no padding.
            keep: what must not go before the program has ended.
        """
        self._raw = raw
        self._owners, self._places = launch.owners, launch.places
        self._batch_size = len(launch.args[_SEQ_IDS])
        self._num_rows, self._num_counts = num_rows, num_counts
        self._reading = threading.Lock()  # held while somebody waits for the device
        self._changing = threading.Lock()  # never held for long: a launch must not wait for a read
        self._outputs: list[Any] | None = outputs
        self._keep = keep
        self._values: np.ndarray | None = None  # of all rows, as the program has them
        self._error: Exception | None = None

    @property
    def is_sorted(self) -> bool:
        """Whether its rows stand by sequence id, whatever the launch's order."""
        return self._places is not None

    def read(self) -> np.ndarray:
        """Wait for the result: int32 [rows], or logits float32 [rows, V]; see `Launched.read`."""
        values = self.values()[: self._num_rows]
        if values.ndim == 1 and (values[: self._num_counts] < 0).any():
            raise FloatingPointError("the logits hold NaN")
        return values

    def wait(self) -> None:
        """Wait for its end; see `Launched.wait`. A read is the only wait there is."""
        self.read()

    def gather(self, order: np.ndarray) -> NxdGathered:
        """Return its ids in another order; see `Launched.gather`."""
        return NxdGathered(self, order)

    def tokens_for(self, launch: LaunchInputs, ranks: int) -> Sequence[Any]:
        """Return the ids for each rank, as inputs of a launch of the same rows in this order.

        The device's own; the host's, if they have been read.

        Raises:
            ValueError: it has other rows.
        """
        tokens = self.device_tokens(launch)
        return as_ids(self.values(), launch, ranks) if tokens is None else tokens

    def device_tokens(self, launch: LaunchInputs) -> list[Any] | None:
        """Return the ids on the device, [B, 1] for each rank; None if they have been read.

        Raises:
            ValueError: the launch that they are for has other rows.
        """
        with self._changing:
            if self._outputs is None:
                return None
            if not np.array_equal(self._owners, launch.owners):
                raise ValueError("fed with the tokens of other rows, or in another order")
            return [one.reshape(self._batch_size, 1) for one in self._outputs]

    def values(self) -> np.ndarray:
        """Wait for all rows, padding included, and return them in the launch's order."""
        with self._reading:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._values is None:
                self._values = self._copied()
        return self._values if self._places is None else self._values[self._places]

    def _copied(self) -> np.ndarray:
        assert self._outputs is not None
        try:
            copied: torch.Tensor = self._raw.to_cpu(self._outputs[0])
        except Exception as error:
            self._error = error
            raise
        finally:
            with self._changing:
                self._outputs, self._keep = None, ()
        flat = copied.reshape(self._batch_size, -1)
        found: np.ndarray = flat[:, 0].numpy() if flat.shape[1] == 1 else flat.float().numpy()
        return found


class NxdGathered:
    """Ids of a launch in another order; see `aneuron.device.neuron.raw.Launched`."""

    def __init__(self, source: NxdLaunched, order: np.ndarray) -> None:
        """Take a launch and which of its rows come, int32 [rows]."""
        self._source = source
        self._order = order

    def read(self) -> np.ndarray:
        """Wait for the launch and return the ids, int32 [rows]."""
        gathered: np.ndarray = self._source.values()[self._order]
        return gathered

    def wait(self) -> None:
        """Wait for the launch."""
        self._source.wait()

    def gather(self, order: np.ndarray) -> NxdGathered:
        """Return these in another order."""
        return NxdGathered(self._source, self._order[order])

    def tokens_for(self, launch: LaunchInputs, ranks: int) -> Sequence[Any]:
        """Return the ids for each rank, as inputs of a launch; see `NxdLaunched.tokens_for`.

        Rows that stand by sequence id stand there still; others are moved on the host.
        """
        tokens = self._source.device_tokens(launch) if self._source.is_sorted else None
        return as_ids(self.read(), launch, ranks) if tokens is None else tokens


def as_ids(tokens: np.ndarray, launch: LaunchInputs, ranks: int) -> list[torch.Tensor]:
    """Return host ids, int32 [rows] in a launch's order, as its first input for each rank."""
    ids = launch.args[0].clone()
    places: Any = slice(len(tokens)) if launch.places is None else launch.places[: len(tokens)]
    # A row without an id (-1) must not take the one that its slot has.
    ids.numpy()[places, 0] = np.maximum(tokens, 0)
    return [ids] * ranks


def _check(holds: bool, what: str, number: int) -> None:  # noqa: FBT001  it is what is checked
    if not holds:
        raise ValueError(f"no program is compiled for {number} {what}")
