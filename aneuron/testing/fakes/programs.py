"""Decoders for the fake runtimes, in which every lost, doubled or swapped token shows.

Comes in: what `aneuron.models.decoder.Decoder` takes. Goes out: logits that are high at one id and
0 elsewhere; which id, COUNT, SUM and SCRIPT say (`aneuron.models.simulated`). Like a real model
they know of their context only what the KV cache holds: ids, written through the slot mapping and
read back through the block table. Shapes are static, and integers stay below 2^31.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from aneuron.models.architecture import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["UNWRITTEN", "CountDecoder", "IdDecoder", "ScriptDecoder", "SumDecoder"]

UNWRITTEN = 7_777_777  # the id that a cell holds which nobody has written
_END = 257  # end id of the byte tokenizer
_BYTE_VOCAB = 258
_VOCAB = 4096
_MOST_IDS = 1 << 15  # squared it fits into int32
_MODEL_LEN = 1024
_NUM_KV_HEADS = 4  # they divide over the usual numbers of ranks
_SURE = 1000.0  # the logit of the id; drawn at any usual temperature it is that one
_DIGITS, _BITS = 4, 7  # of an id in a cell: a digit + 1 is exact even in bfloat16


class Step(NamedTuple):
    """What a next id may be computed from: S samples over L cells each.

    Attributes:
        last_ids: int32 [S], the newest id of each sample's context.
        positions: int32 [S], its position.
        block_table: int32 [S, B].
        k_cache: the cache, [num_blocks + 1, block_size, heads, 4].
        v_cache: as `k_cache`.
    """

    last_ids: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def context(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of each sample's cells, int32 [S, L], and which of them count."""
        ids = _from_cells(self.k_cache, self.block_table)
        same = ids == _from_cells(self.v_cache, self.block_table)
        places = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
        return torch.where(same, ids, UNWRITTEN), places <= self.positions.unsqueeze(-1)


class IdDecoder(nn.Module):
    """Base: the interface of `Decoder` over a cache of ids; a subclass gives the next ids.

    It has one layer and no weights. A cell is its id in four digits, the same in each head and in
    both caches, so any dtype of a cache holds it exactly that is exact up to 128. A cell of zeros
    is unwritten and reads as 7_777_777. As in `Decoder`, slot -1 writes into the null block.

    Args:
        vocab_size: ids are below this; at most 2^15.
        max_model_len: longest context in tokens.
        num_kv_heads: heads of the cache; with several ranks each may have a share of them.

    Attributes:
        config: dimensions, as those of a real decoder.
    """

    def __init__(
        self,
        vocab_size: int = _VOCAB,
        *,
        max_model_len: int = _MODEL_LEN,
        num_kv_heads: int = _NUM_KV_HEADS,
    ) -> None:
        """Describe the decoder."""
        super().__init__()
        if not 0 < vocab_size <= _MOST_IDS:
            raise ValueError(f"vocab_size must be in 1..{_MOST_IDS}, not {vocab_size}")
        self.config = ModelConfig(
            model_type="llama",
            vocab_size=vocab_size,
            hidden_size=num_kv_heads * _DIGITS,
            intermediate_size=num_kv_heads * _DIGITS,
            num_layers=1,
            num_heads=num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_DIGITS,
            max_model_len=max_model_len,
            norm_eps=1e-6,
            rope=RopeConfig(),
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            qk_norm=False,
            tied=True,
            windows=(None,),
            rope_layers=(False,),
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_start: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        logits_indices: torch.Tensor,
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        *,
        max_query_len: int,
    ) -> torch.Tensor:
        """Write the step's ids and return the logits of the next; see `Decoder.forward`.

        Returns:
            float32 [S, vocab_size].
        """
        (k_cache,), (v_cache,) = k_caches, v_caches
        input_ids = input_ids.to(torch.int32)
        _write(input_ids, slot_mapping, k_cache, v_cache)
        step = Step(input_ids, positions, block_table, k_cache, v_cache)
        if not (max_query_len == 1 and len(input_ids) == len(context_lens)):
            rows = (logits_indices.unsqueeze(-1) >= query_start[1:]).sum(dim=-1)
            step = step._replace(
                last_ids=input_ids.index_select(0, logits_indices),
                positions=positions.index_select(0, logits_indices),
                block_table=block_table.index_select(0, rows.clamp(max=len(block_table) - 1)),
            )
        chosen = self.next_ids(step).unsqueeze(-1)
        every = torch.arange(self.config.vocab_size, dtype=torch.int32, device=chosen.device)
        return (every == chosen).to(torch.float32) * _SURE

    def next_ids(self, step: Step) -> torch.Tensor:
        """Return the id that follows each sample's context, int32 [S]."""
        raise NotImplementedError


class CountDecoder(IdDecoder):
    """The next id is the last id + 1, modulo the vocabulary."""

    def next_ids(self, step: Step) -> torch.Tensor:
        """Return last + 1."""
        return (step.last_ids + 1) % self.config.vocab_size


class SumDecoder(IdDecoder):
    """The next id is the sum of (position + 1) * id over the context, modulo the vocabulary."""

    def next_ids(self, step: Step) -> torch.Tensor:
        """Return the sum, read from the cache."""
        ids, counts = step.context()
        size = self.config.vocab_size
        weights = torch.arange(1, ids.shape[1] + 1, dtype=torch.int32, device=ids.device) % size
        terms = ids % size * weights % size  # each factor is below 2^15
        return torch.where(counts, terms, 0).sum(dim=-1, dtype=torch.int32) % size


class ScriptDecoder(IdDecoder):
    """The listed ids in order behind the first start id of the context, then the end id.

    A decoder does not know where a prompt ends, so the prompt tells: its last id is `start`, and
    no other is. That works for prompts of any length, and in any number of chunks or behind cached
    blocks, as the start is looked for in the KV cache. A context without it gets the end id.

    Args:
        script: ids, or bytes of the byte tokenizer.
        start: the id, by default that of a NUL byte, `chr(0)`, in a text.
        end: what follows the script, by default the end id of the byte tokenizer.
        vocab_size: ids are below this.
        max_model_len: longest context in tokens.
    """

    script: torch.Tensor

    def __init__(
        self,
        script: Sequence[int] | bytes,
        *,
        start: int = 0,
        end: int = _END,
        vocab_size: int = _BYTE_VOCAB,
        max_model_len: int = _MODEL_LEN,
    ) -> None:
        """Fix the script."""
        super().__init__(vocab_size, max_model_len=max_model_len)
        self.start = start
        entries = torch.tensor([*script, end], dtype=torch.int32)
        self.register_buffer("script", entries, persistent=False)

    def next_ids(self, step: Step) -> torch.Tensor:
        """Return the entry at the number of ids behind the start."""
        ids, counts = step.context()
        places = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
        nowhere = ids.shape[1]
        first = torch.where(counts & (ids == self.start), places, nowhere).amin(dim=-1)
        end = len(self.script) - 1
        told = torch.where(first == nowhere, end, step.positions - first).clamp(0, end)
        return self.script.index_select(0, told.to(torch.int32))


def _write(
    ids: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    digits = torch.stack([ids >> (_BITS * place) for place in range(_DIGITS)], dim=-1)
    cells = ((digits & ((1 << _BITS) - 1)) + 1).unsqueeze(1)
    slots, block_size = slot_mapping.to(torch.int64).clamp(min=0), k_cache.shape[1]
    index = (slots // block_size, slots % block_size)
    for cache in (k_cache, v_cache):
        cache.index_put_(index, cells.to(cache.dtype).expand(-1, cache.shape[2], -1))


def _from_cells(cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """Return the ids of the blocks of each row, int32 [R, B] → int32 [R, B * block_size]."""
    num_rows = len(block_table)
    blocks = cache.index_select(0, block_table.flatten())[:, :, -1]
    digits = blocks.to(torch.int32).reshape(num_rows, -1, _DIGITS) - 1
    shifts = torch.arange(0, _BITS * _DIGITS, _BITS, dtype=torch.int32, device=digits.device)
    ids = (digits.clamp(min=0) << shifts).sum(dim=-1, dtype=torch.int32)
    return torch.where(digits.amin(dim=-1) < 0, UNWRITTEN, ids)
