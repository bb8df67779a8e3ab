"""What is compiled for NxD: a decoder, its KV cache and sampling behind NxDI's positional inputs.

Comes in: the tensors of one launch, padded to a bucket. Goes out: sampled ids, and the state that
the launch changed, which aliases keep on the device. One module is the prefill ("context
encoding", a prompt) and the decode ("token generation", a token a row): shapes tell which.
Runs on the compiler's host, never in a process that serves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from aneuron.models.neuron.sampler import SAMPLING_COLUMNS, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CONTEXT",
    "DTYPES",
    "TOKEN",
    "Bucket",
    "NxdProgram",
    "Program",
    "ProgramShape",
    "padding_inputs",
    "traced_programs",
]

CONTEXT, TOKEN = "context_encoding_model", "token_generation_model"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUM_COLUMNS = len(SAMPLING_COLUMNS)


class Bucket(NamedTuple):
    """One compiled shape.

    Attributes:
        is_decode: a token a row, else a prompt.
        size: of a decode, tokens of context; of a prefill, tokens that it computes.
        prefix: of a prefill, tokens before them that are in the cache already.
    """

    is_decode: bool
    size: int
    prefix: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramShape:
    """All sizes that a set of programs is compiled for.

    Attributes:
        batch_size: rows of a decode; a prefill has one.
        max_model_len: tokens of the longest context.
        context_buckets: tokens of a prefill, ascending.
        prefix_buckets: tokens before them that are cached, ascending; (0,) is none.
        token_buckets: tokens of a decode's context, ascending.
        is_block_kv: the cache is in blocks; else a sequence id has a row of its own.
        block_size: tokens of a block; of a row, `max_model_len`.
        num_blocks: blocks, or rows, that requests may own; block 0 comes on top.
        num_slots: whose last tokens stay on the device; 0: none do.
        sampling_columns: parameters of each sample.
        sampling: "drawn" by those; "greedy"; "none": programs give logits.
        dtype: of weights and cache.
        is_ours: inputs have all of NxDI's positions, and rows too have a slot mapping.
        block_padding: what a decode's block table has where a row has no block.
    """

    batch_size: int
    max_model_len: int
    context_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    prefix_buckets: tuple[int, ...] = (0,)
    is_block_kv: bool
    block_size: int
    num_blocks: int
    num_slots: int = 0
    sampling_columns: int = _NUM_COLUMNS
    sampling: Literal["drawn", "greedy", "none"] = "drawn"
    dtype: str = "float32"
    is_ours: bool = True
    block_padding: int = 0

    @property
    def page_size(self) -> int:
        """Tokens that are addressed as one; of a row a part that divides all its buckets."""
        if self.is_block_kv:
            return self.block_size
        return math.gcd(self.max_model_len, *self.context_buckets, *self.token_buckets)

    @property
    def spare_slot(self) -> int:
        """The slot that padding writes its tokens to."""
        return self.num_slots if self.is_block_kv else self.num_blocks

    @property
    def decodes(self) -> tuple[Bucket, ...]:
        """Buckets of the decode, smallest first."""
        return tuple(Bucket(is_decode=True, size=size) for size in self.token_buckets)

    @property
    def prefills(self) -> tuple[Bucket, ...]:
        """Buckets of the prefill that some prompt can need, smallest first."""
        least, found = 1, []
        for size in self.context_buckets:
            least_prefix = 0
            for prefix in self.prefix_buckets:
                if least + least_prefix <= self.max_model_len:
                    found.append(Bucket(is_decode=False, size=size, prefix=prefix))
                least_prefix = prefix + 1
            least = size + 1
        return tuple(found)


def padding_inputs(shape: ProgramShape, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """Return a bucket's inputs with nothing but padding, in NxDI's order.

    Ids are 0, attention masks 0, slots and slot mappings say "nowhere". Decodes of rows have the
    sequence ids 0, 1, … and the last position, which their owners write before they read it.
    """
    rows = shape.batch_size if bucket.is_decode else 1
    tokens = 1 if bucket.is_decode else bucket.size
    width = bucket.size if bucket.is_decode or not shape.is_block_kv else bucket.prefix
    fill = shape.max_model_len - 1 if bucket.is_decode and not shape.is_block_kv else 0
    params = torch.zeros((rows, shape.sampling_columns))
    params[:, :3] = 1.0
    inputs = [
        _ints((rows, tokens)),
        _ints((rows, width) if width else (1,)),
        _ints((rows, tokens), fill if bucket.is_decode else 1),
        _ints((rows,), shape.num_slots)
        if shape.num_slots and shape.is_block_kv
        else torch.arange(rows, dtype=torch.int32),
        params,
    ]
    if not shape.is_block_kv and not shape.is_ours:
        return (*inputs, _ints((rows,)), _ints((rows,)))
    inputs += [torch.empty(0) for _ in range(6)] + [_ints((rows, tokens), -1)]
    if shape.is_block_kv:
        num_blocks = width // shape.block_size
        padding = shape.block_padding if bucket.is_decode else 0
        inputs += [
            _ints((rows, num_blocks) if num_blocks else (1,), padding),
            _ints((rows, 1), 1),
            _ints((rows, 1)),
        ]
    else:
        inputs += [torch.empty(0) for _ in range(3)]
    return tuple(inputs)


@dataclass(slots=True)  # the protocol's attributes may be set
class Program:
    """One program to compile; see `aneuron.device.neuron.raw.TracedProgram`."""

    tag: str
    module: Callable[[int], nn.Module]
    inputs: Sequence[tuple[torch.Tensor, ...]]
    aliases: Sequence[str]


def traced_programs(
    shape: ProgramShape, decoder: Callable[[int], nn.Module], *, num_layers: int
) -> list[Program]:
    """Return the programs of an artifact: the prefill's, then the decode's.

    Args:
        shape: of the programs.
        decoder: makes the decoder of a rank, on the host.
        num_layers: of it.
    """

    def module(rank: int) -> nn.Module:
        return NxdProgram(decoder(rank), shape)

    names = state_names(shape, num_layers)
    return [
        Program(tag, module, [padding_inputs(shape, one) for one in buckets], names)
        for tag, buckets in ((CONTEXT, shape.prefills), (TOKEN, shape.decodes))
    ]


def state_names(shape: ProgramShape, num_layers: int) -> tuple[str, ...]:
    """Return the names of an `NxdProgram`'s state, in the order of its outputs."""
    caches = [f"{kind}_cache_{layer}" for layer in range(num_layers) for kind in "kv"]
    return (*caches, "last_tokens") if shape.num_slots else tuple(caches)


class _Step(NamedTuple):
    """What the decoder needs beside its caches: T tokens, R rows."""

    ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    slots: torch.Tensor  # int [T], -1 = no write
    query_start: torch.Tensor  # int32 [R + 1]
    table: torch.Tensor  # int [R, pages]
    context_lens: torch.Tensor  # int32 [R]
    last: torch.Tensor  # int64 [R], last token of each row
    is_real: torch.Tensor | None  # bool [R]; None: all are


class NxdProgram(nn.Module):
    """A decoder with its state, as one module of NxDI's positional inputs.

    Args:
        decoder: `Decoder`, or a module with its `config` and its `forward`.
        shape: what it is compiled for.

    The state is buffers: `k_cache_0`, `v_cache_0`, … [num_blocks + 1, block_size, num_kv_heads,
    head_dim], and with slots `last_tokens`, int32.
    """

    last_tokens: torch.Tensor

    def __init__(self, decoder: nn.Module, shape: ProgramShape) -> None:
        super().__init__()
        self.decoder = decoder
        self.shape = shape
        config: Any = decoder.config
        cells = shape.num_blocks + 1, shape.block_size, config.num_kv_heads, config.head_dim
        self._names = state_names(shape, config.num_layers)
        for name in self._names:
            if name == "last_tokens":
                state = torch.zeros(shape.spare_slot + 1, dtype=torch.int32)
            else:
                state = torch.zeros(cells, dtype=DTYPES[shape.dtype])
            self.register_buffer(name, state, persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        sampling_params: torch.Tensor,
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run one launch.

        Args:
            input_ids: int32 [B, S]; negative: the last token of the row's slot.
            attention_mask: int32 [B, L], 1 where a token is: of a prefill into a row itself, else
                before it.
            position_ids: int32 [B, S].
            seq_ids: int32 [B]: the row of the cache, or with blocks the slot.
            sampling_params: float32 [B, K].
            others: prev_hidden, adapter_ids, and four of Medusa's, all unused; then slot_mapping
                int32 [B, S], block_table int32 [B, blocks], num_queries and
                computed_context_lens int32 [B, 1], as far as the cache needs them.

        Returns:
            Ids int32 [B, 1], or logits float32 [B, 1, V]; and the state.
        """
        ids = input_ids
        if self.shape.num_slots:
            kept = self.last_tokens.index_select(0, seq_ids.to(torch.int64)).unsqueeze(1)
            # A row of NaN has left no id: it fails by itself, and must not fail the others.
            ids = torch.where(ids < 0, kept, ids).clamp(min=0)
        paged = others[6:] if self.shape.is_ours or self.shape.is_block_kv else ()
        if input_ids.shape[1] == 1:
            step = self._decode(ids, attention_mask, position_ids, seq_ids, paged)
        elif self.shape.is_block_kv:
            step = self._prefill_blocks(ids, position_ids, paged)
        else:
            step = self._prefill_row(ids, attention_mask, position_ids, seq_ids)
        told = self._sample(self._logits(step), sampling_params, step)
        if self.shape.num_slots:
            at = seq_ids.to(torch.int64)
            if step.is_real is not None:
                at = torch.where(step.is_real, at, self.shape.spare_slot)
            self.last_tokens.index_put_((at,), told.squeeze(1))
        return (told, *(getattr(self, name) for name in self._names))

    def _logits(self, step: _Step) -> torch.Tensor:
        """Return the logits of each row's last token, float32 [B, V]."""
        caches: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index, name in enumerate(name for name in self._names if name != "last_tokens"):
            cache = getattr(self, name)
            if not self.shape.is_block_kv:
                cache = cache.view(-1, self.shape.page_size, *cache.shape[2:])
            caches[index % 2].append(cache)
        rows = len(step.context_lens)
        logits: torch.Tensor = self.decoder(
            step.ids, step.positions, step.slots, step.query_start, step.table, step.context_lens,
            step.last, *caches, max_query_len=len(step.ids) // rows,
        )  # fmt: skip
        return logits

    def _sample(self, logits: torch.Tensor, params: torch.Tensor, step: _Step) -> torch.Tensor:
        if self.shape.sampling == "none":
            return logits.unsqueeze(1)
        if self.shape.sampling == "greedy":
            return logits.argmax(dim=-1, keepdim=True).to(torch.int32)
        missing = _NUM_COLUMNS - params.shape[1]  # of NxDI's: no min_p, one noise for all
        params = nn.functional.pad(params, (0, missing))
        positions = step.positions.index_select(0, step.last)
        return sample(logits, params, positions).unsqueeze(1)

    def _decode(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        paged: tuple[torch.Tensor, ...],
    ) -> _Step:
        positions, rows, size = position_ids[:, 0], len(ids), self.shape.page_size
        is_real = paged[0][:, 0] >= 0 if paged else None
        if self.shape.is_block_kv:
            table = paged[1].clamp(min=0)
        else:
            table = self._row_table(seq_ids, attention_mask.shape[1])
        # Not of the host: with tokens launched ahead it may not know them.
        page = (positions // size).to(torch.int64).clamp(max=table.shape[1] - 1)
        slots = table.gather(1, page.unsqueeze(1)).squeeze(1) * size + positions % size
        if not self.shape.is_block_kv:
            slots = (seq_ids + 1) * self.shape.max_model_len + positions
        if is_real is not None:
            slots = torch.where(is_real, slots, -1)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=ids.device)
        last = starts[:-1].to(torch.int64)
        return _Step(ids[:, 0], positions, slots, starts, table, positions + 1, last, is_real)

    def _prefill_row(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
    ) -> _Step:
        count = attention_mask.sum(dim=1, dtype=torch.int32).clamp(min=1)
        cells = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
        slots = torch.where(
            attention_mask[0] > 0, (seq_ids + 1) * self.shape.max_model_len + cells, -1
        )
        table = self._row_table(seq_ids, ids.shape[1])
        return self._prefill(ids, position_ids, slots, table, count, count)

    def _prefill_blocks(
        self, ids: torch.Tensor, position_ids: torch.Tensor, paged: tuple[torch.Tensor, ...]
    ) -> _Step:
        slot_mapping, prefix_table, num_queries, computed = paged
        slots, size = slot_mapping[0], self.shape.block_size
        num_prefix = prefix_table.shape[1] if prefix_table.dim() == 2 else 0
        count = -(-ids.shape[1] // size) + num_prefix
        starts = torch.arange(count, dtype=torch.int32, device=ids.device) * size
        # Blocks of the prefix are in the table; of those behind, the mapping's cells tell.
        behind = starts - computed[0]
        at = behind.clamp(0, ids.shape[1] - 1).to(torch.int64)
        written = slots.index_select(0, at).clamp(min=0) // size
        table = torch.where(behind < num_queries[0], written, 0)
        if num_prefix:
            before = nn.functional.pad(prefix_table[0], (0, count - num_prefix))
            table = torch.where(behind < 0, before, table)
        queries = num_queries[0]
        return self._prefill(
            ids, position_ids, slots, table.unsqueeze(0), queries, queries + computed[0]
        )

    def _prefill(
        self,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        count: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> _Step:
        starts = nn.functional.pad(count, (1, 0))
        last = (count - 1).to(torch.int64)
        return _Step(ids[0], position_ids[0], slots, starts, table, context_lens, last, None)

    def _row_table(self, seq_ids: torch.Tensor, length: int) -> torch.Tensor:
        """Return the pages of the first `length` tokens of rows, int32 [B, pages]."""
        pages = torch.arange(
            length // self.shape.page_size, dtype=torch.int32, device=seq_ids.device
        )
        num_pages = self.shape.max_model_len // self.shape.page_size
        return (seq_ids + 1).unsqueeze(1) * num_pages + pages


def _ints(size: tuple[int, ...], value: int = 0) -> torch.Tensor:
    return torch.full(size, value, dtype=torch.int32)
