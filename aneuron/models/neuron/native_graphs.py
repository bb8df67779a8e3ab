"""Graphs of native PyTorch on one NeuronCore, and the device state that they change.

Comes in: the columns of a launch. Goes out: `NativeLaunch`, unread. There are three graphs: a
prefill, a decode, and a gather, each compiled once for every bucket. Weights, KV caches and last
tokens are captured and change in place, so the order of launches is all that protects them.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from aneuron.device.neuron.status import QUEUE_FULL, status_of
from aneuron.models.neuron.sampler import sample, sampling_rows
from aneuron.models.sampling.edits import allowed_ids
from aneuron.models.sampling.slots import SlotState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aneuron.device.neuron.raw import NativeRaw
    from aneuron.plans import ModelInput

__all__ = ["Graphs", "NativeLaunch", "Pool"]

_FROM_SLOT = -1  # in the place of an id: the last one of the row's slot


class Pool(NamedTuple):
    """Sizes of the state on a device.

    Attributes:
        num_blocks: of the KV cache, without the null block.
        block_size: tokens in a block.
        num_slots: without the spare one.
        dtype: of keys and values.
    """

    num_blocks: int
    block_size: int
    num_slots: int
    dtype: torch.dtype


class _Copy(NamedTuple):
    """A copy of ids to the host that was queued behind their launch, or was refused.

    Attributes:
        host: its target, which has to stay until the launch was waited for; None if there is none.
        event: behind it; None if a read has to copy the ids.
    """

    host: torch.Tensor | None
    event: Any


class _Fate:
    """What launches share of which one has failed, nobody can say which: that error."""

    error: Exception | None = None


class NativeLaunch:
    """A launch whose sampled ids are on their way; see `Launched`.

    Where the runtime has events, work is done in order, so a read behind a later launch would
    wait for that as well: the copy to the host is queued right behind the launch, and an event
    behind the copy.

    Attributes:
        ids: int32 [S], on the device.
    """

    def __init__(
        self, graphs: Graphs, ids: torch.Tensor, keep: tuple[Any, ...], sizes: tuple[int, int]
    ) -> None:
        """Note a launch.

        Args:
            graphs: that it is of.
            ids: int32 [S], unread.
            keep: what must stay until it was waited for.
            sizes: how many of the ids to return, and how many of them count.
        """
        self.ids = ids
        self._graphs = graphs
        self._keep = keep
        self._num_sampled, self._num_counted = sizes
        self._fate = graphs.fate
        self._copy = graphs.copied_early(ids)
        self._host: np.ndarray | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def read(self) -> np.ndarray:
        """Wait for the ids and return them; see `Launched.read`."""
        host = self._read()
        if (host[: self._num_counted] < 0).any():
            raise FloatingPointError("the logits hold NaN")
        return host[: self._num_sampled]

    def wait(self) -> None:
        """Wait until the program has ended; see `Launched.wait`."""
        self._read()  # ids that nobody reads would keep their place in the queue

    def gather(self, order: np.ndarray) -> NativeLaunch:
        """Return the ids in another order, launched by a graph of its own."""
        graphs, keep = self._graphs, [self]
        order = np.ascontiguousarray(order, np.int32)
        with graphs.kept_if_refused(keep):
            ids = graphs.call("gather", self.ids, graphs.send(order, keep))
        return NativeLaunch(graphs, ids, tuple(keep), (len(order), 0))

    def _read(self) -> np.ndarray:
        with self._lock:
            if self._error is not None:
                raise self._error  # a runtime may tell it once
            if self._host is None:
                try:
                    host = self._arrived().numpy()
                    if self._fate.error is not None:
                        raise self._fate.error
                    self._host = host
                except Exception as error:
                    self._error = error
                    raise
                finally:
                    self._keep, self._copy = (), None  # it has ended, well or not
            return self._host

    def _arrived(self) -> torch.Tensor:
        """Wait for the ids and return them, on the host."""
        raw, copy = self._graphs.raw, self._copy
        if copy is None or copy.host is None or copy.event is None:
            return raw.to_host(self.ids)
        raw.synchronize(copy.event)
        return copy.host


class Graphs:
    """The graphs of one model on one core.

    Args:
        raw: the core's runtime.
        decoder: a module with the interface of `Decoder`, its tensors on the core.
        pool: sizes of the state.

    Attributes:
        slots: what the host knows of every slot; last tokens are on the device.
        copies_early: whether each launch has its copy to the host queued behind it; warm-up turns
            it on.
        fate: of the launches that are made now.
    """

    def __init__(self, raw: NativeRaw, decoder: torch.nn.Module, pool: Pool) -> None:
        """Allocate the KV caches and the last tokens, zeroed."""
        self.raw = raw
        self.decoder = decoder
        self.slots = SlotState(pool.num_slots)
        self.copies_early = False
        self.fate = _Fate()
        config: Any = decoder.config
        shape = (pool.num_blocks + 1, pool.block_size, config.num_kv_heads, config.head_dim)
        zeros = torch.zeros(shape, dtype=pool.dtype)  # of one layer: they all are copies of it
        self._k_caches = [raw.to_device(zeros) for _ in range(config.num_layers)]
        self._v_caches = [raw.to_device(zeros) for _ in range(config.num_layers)]
        last_tokens = torch.zeros(pool.num_slots + 1, dtype=torch.int32)
        self._last_tokens = raw.to_device(last_tokens)
        self._spare = pool.num_slots
        self._vocab_size: int = config.vocab_size
        self._unsettled: tuple[Any, ...] = (zeros, last_tokens)  # sent; nothing behind it was read
        self._constants: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        functions: dict[str, Callable[..., Any]] = {
            "prefill": self._prefill, "decode": self._decode, "gather": _gather,
        }  # fmt: skip
        self._graphs = {name: raw.compile(fn) for name, fn in functions.items()}

    # ── launches ────────────────────────────────────────────────────────────────────────

    def launch(self, inputs: ModelInput, fed: NativeLaunch | None) -> NativeLaunch:
        """Launch a step.

        Args:
            inputs: its columns, which are copied.
            fed: whose ids take the place of `inputs.input_ids`.

        Raises:
            ValueError: the fed ids are not one for each token.
            RuntimeError: the runtime refuses; the text has the status code.
        """
        if fed is not None and len(fed.ids) != len(inputs.positions):
            raise ValueError(f"fed {len(fed.ids)} ids to a step of {len(inputs.positions)} tokens")
        if inputs.writes is not None:
            self.slots.write(inputs.writes)
        keep: list[Any] = []
        with self.kept_if_refused(keep):
            ids = self._launched(inputs, fed, keep)
        keep += [self, fed, self._unsettled]
        self._unsettled = ()
        return NativeLaunch(self, ids, tuple(keep), (inputs.num_sampled, inputs.num_samples))

    @contextmanager
    def kept_if_refused(self, keep: list[Any]) -> Iterator[None]:
        """Keep what a launch that is refused has sent until the next one was read.

        Nothing else tells when its copies are done.
        """
        try:
            yield
        except BaseException:
            self._unsettled = (*self._unsettled, *keep)
            raise

    def _launched(
        self, inputs: ModelInput, fed: NativeLaunch | None, keep: list[Any]
    ) -> torch.Tensor:
        slots = inputs.slots
        if slots is None:
            slots = np.full(len(inputs.logits_indices), self._spare, np.int32)
        elif not inputs.all_greedy:
            inputs = self.slots.filled(inputs)
        args = [self._input_ids(inputs, fed, keep)]
        if inputs.is_decode:
            columns = inputs.positions, inputs.slot_mapping, inputs.context_lens, slots
            args.append(self.send(np.stack(columns), keep))
        else:
            args.append(self.send(np.stack((inputs.positions, inputs.slot_mapping)), keep))
            ends = inputs.query_start[1:]
            rows = inputs.context_lens, ends, inputs.logits_indices, slots
            args.append(self.send(np.stack(rows), keep))
        args.append(self.send(inputs.block_table.copy(), keep))
        args.append(self.send(sampling_rows(inputs), keep))
        args.append(self._mask(inputs, keep))
        ids: torch.Tensor = self.call("decode" if inputs.is_decode else "prefill", *args)
        return ids

    def call(self, name: str, *tensors: torch.Tensor) -> Any:
        """Launch a graph by its name."""
        return self.raw.call(self._graphs[name], *tensors)

    def copied_early(self, ids: torch.Tensor) -> _Copy | None:
        """Queue the copy of ids to the host; None if `copies_early` is off.

        A queue without room is no fault of the launch: its read copies them. Any other error is
        one that came late, of this launch or one before; the runtime may not tell it again.
        """
        if not self.copies_early:
            return None
        host = event = None
        try:
            host = self.raw.to_host(ids, non_blocking=True)
            event = self.raw.record_event()
        except RuntimeError as error:
            if status_of(error) != QUEUE_FULL:
                self.fate.error, self.fate = error, _Fate()
        return _Copy(host, event)

    def send(self, column: np.ndarray, keep: list[Any]) -> torch.Tensor:
        """Queue the copy of a column that nobody changes; what must stay goes to `keep`."""
        host = torch.from_numpy(column)
        sent = self.raw.to_device(host)
        keep += [host, sent]
        return sent

    def _input_ids(
        self, inputs: ModelInput, fed: NativeLaunch | None, keep: list[Any]
    ) -> torch.Tensor:
        if fed is not None:
            return fed.ids
        if inputs.input_ids is None:
            return self._constant((len(inputs.positions),), _FROM_SLOT, torch.int32)
        return self.send(inputs.input_ids.copy(), keep)

    def _mask(self, inputs: ModelInput, keep: list[Any]) -> torch.Tensor:
        """Return which ids may be drawn, bool [S, V]: rows without a grammar may draw all."""
        shape = len(inputs.logits_indices), self._vocab_size
        if inputs.edits is None:
            return self._constant(shape, True, torch.bool)  # noqa: FBT003  it is the value
        mask = np.ones(shape, np.bool_)
        mask[inputs.edits.samples] = allowed_ids(inputs.edits.bitmask, self._vocab_size)
        return self.send(mask, keep)

    def _constant(self, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that is sent once, and then is there."""
        key = (shape, dtype)
        if key not in self._constants:
            host = torch.full(shape, value, dtype=dtype)
            self._constants[key] = host, self.raw.to_device(host)
        return self._constants[key][1]

    # ── inside graphs ───────────────────────────────────────────────────────────────────

    def _prefill(
        self,
        ids: torch.Tensor,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        block_table: torch.Tensor,
        params: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Compute prompts: ids [T], tokens [2, T], rows [4, R], all int32."""
        positions, slot_mapping = tokens.unbind(0)
        context_lens, ends, indices, slots = rows.unbind(0)
        query_start = torch.cat((torch.zeros_like(ends[:1]), ends))
        logits = self.decoder(
            ids, positions, slot_mapping, query_start, block_table, context_lens, indices,
            self._k_caches, self._v_caches, max_query_len=len(ids),
        )  # fmt: skip
        return self._sampled(logits, params, positions.index_select(0, indices), slots, mask)

    def _decode(
        self,
        ids: torch.Tensor,
        columns: torch.Tensor,
        block_table: torch.Tensor,
        params: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one token of each row: ids [R], columns [4, R], all int32."""
        positions, slot_mapping, context_lens, slots = columns.unbind(0)
        kept = self._last_tokens.index_select(0, slots)
        # A row of NaN gave -1, and padding may read it: no index for an embedding.
        ids = torch.where(ids < 0, kept, ids).clamp(min=0)
        starts = torch.arange(len(ids) + 1, dtype=torch.int32, device=ids.device)
        logits = self.decoder(
            ids, positions, slot_mapping, starts, block_table, context_lens, starts[:-1],
            self._k_caches, self._v_caches, max_query_len=1,
        )  # fmt: skip
        return self._sampled(logits, params, positions, slots, mask)

    def _sampled(
        self,
        logits: torch.Tensor,
        params: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Return the sampled ids, int32 [S], which become their slots' last tokens."""
        sampled = sample(logits, params, positions, mask)
        self._last_tokens.index_put_((slots.to(torch.int64),), sampled)
        return sampled


def _gather(ids: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return ids in another order, both int32 [R]."""
    return ids.index_select(0, order)
