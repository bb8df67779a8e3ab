"""The decoder: packed tokens in, logits out, with keys and values in a paged cache.

Comes in: the columns of one launch as tensors, and each layer's K and V cache. Goes out:
float32 logits. Shapes are static and no Python branches on values, so one call can be
exported, compiled or traced. Runs on the device's launch thread, inside an executable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import nn

from aneuron.models.rope import cos_sin, inverse_frequencies, rotate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.models.architecture import ModelConfig

__all__ = ["SCALE_BYTES", "Decoder"]

SCALE_BYTES = 4  # of a float32, behind the 8-bit values of a key or value


class _Step(NamedTuple):
    """What all layers of a step share, computed once.

    T tokens, R rows, S query positions a row, L key positions a row.
    """

    cos: torch.Tensor  # [T, 1, D]
    sin: torch.Tensor  # [T, 1, D]
    write_index: tuple[torch.Tensor, torch.Tensor]  # int64 [T] each: block, offset
    key_slots: torch.Tensor  # int64 [R * L]
    masks: dict[int | None, torch.Tensor]  # by window: [R, 1, S, L], added to the scores
    query_index: torch.Tensor | None  # int64 [R * S], token of a query; None = identity
    token_index: torch.Tensor | None  # int64 [T], query of a token; None = identity


class Decoder(nn.Module):
    """A dense Llama-family decoder over a paged KV cache.

    The cache of a layer is two tensors of its own, [num_blocks + 1, block_size,
    num_kv_heads, width] each, where the width is head_dim, or with 8 bits (uint8) that and the
    bytes of a float32 scale: keys are scale * (byte - 128), values scale * signed byte. Block 0
    is the null block, into which padding writes and which no request owns.

    No garbage reaches a row, not even NaN: a key position past a row's context is read
    from the row's own first token instead of from the cache slot there, so all that is
    gathered for a row has been written for its tokens, and masked scores multiply finite
    values by zero. (A mask alone would not do: 0 * NaN is NaN.)
    """

    inv_freq: torch.Tensor

    def __init__(
        self, config: ModelConfig, *, reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """Make a decoder with weights that are not set yet.

        Args:
            config: of the model, or of one rank's part of it.
            reduce: adds up what the ranks' attention and MLP give, [T, hidden_size]; None if
                there is one rank.
        """
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            _Layer(config, index, reduce) for index in range(config.num_layers)
        )
        self.norm = _RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tied else _linear(config.hidden_size, config.vocab_size)
        inv_freq = inverse_frequencies(config.rope, config.head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

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
        """Run one step: write the tokens' keys and values, return the logits asked for.

        Args:
            input_ids: int [T].
            positions: int [T].
            slot_mapping: int [T], block * block_size + offset; -1 writes to the null block.
            query_start: int [R + 1], first token of each row.
            block_table: int [R, B].
            context_lens: int [R], tokens in the cache after this step, at least 1.
            logits_indices: int [S], tokens whose logits are wanted; with T == R and one token a
                row they are all, in order.
            k_caches: per layer [num_blocks + 1, block_size, num_kv_heads, width].
            v_caches: like k_caches.
            max_query_len: most tokens of one row. With 1 and T == R, token r is row r's.

        Returns:
            float32 [S, vocab_size].
        """
        hidden = self.hidden(
            input_ids, positions, slot_mapping, query_start, block_table, context_lens, k_caches,
            v_caches, max_query_len=max_query_len,
        )  # fmt: skip
        if not (max_query_len == 1 and len(input_ids) == len(context_lens)):
            hidden = hidden.index_select(0, logits_indices)
        return self.logits(hidden)

    def hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_start: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        *,
        max_query_len: int,
    ) -> torch.Tensor:
        """Run one step but for the logits; arguments are those of `forward`.

        Returns:
            The hidden state of each token, [T, hidden_size], for `logits`.
        """
        direct = max_query_len == 1 and len(input_ids) == len(context_lens)
        block_size = k_caches[0].shape[1]
        index = None if direct else _query_index(query_start, len(positions), max_query_len)
        query_positions = positions if index is None else positions.index_select(0, index)
        cos, sin = cos_sin(
            positions, self.inv_freq, self.config.rope.attention_factor, self.embed.weight.dtype
        )
        step = _Step(
            cos=cos,
            sin=sin,
            write_index=_write_index(slot_mapping, block_size),
            key_slots=_key_slots(block_table, context_lens, block_size),
            masks=self._masks(query_positions, context_lens, block_table.shape[1] * block_size),
            query_index=index,
            token_index=None
            if direct
            else _token_index(query_start, len(positions), max_query_len),
        )
        hidden: torch.Tensor = self.embed(input_ids)
        for layer, k_cache, v_cache in zip(self.layers, k_caches, v_caches, strict=True):
            hidden = layer(hidden, step, k_cache, v_cache)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states, [n, hidden_size] → float32 [n, vocab_size]."""
        head = self.embed if self.lm_head is None else self.lm_head
        return F.linear(self.norm(hidden), head.weight).float()

    def _masks(
        self, query_positions: torch.Tensor, context_lens: torch.Tensor, num_keys: int
    ) -> dict[int | None, torch.Tensor]:
        """Return the additive mask of each sliding window that some layer has."""
        num_rows = len(context_lens)
        # Queries that only pad a row stay within its context, so each sees some key.
        last = torch.minimum(query_positions.view(num_rows, -1), (context_lens - 1).unsqueeze(1))
        last = last.unsqueeze(-1)
        keys = torch.arange(num_keys, device=last.device)
        masks = {}
        for window in dict.fromkeys(self.config.windows):
            hidden = keys > last
            if window is not None:
                hidden = hidden | (keys <= last - window)
            zeros = torch.zeros(hidden.shape, dtype=self.embed.weight.dtype, device=last.device)
            masks[window] = zeros.masked_fill(hidden, float("-inf")).unsqueeze(1)
        return masks


class _Layer(nn.Module):
    """Attention and gated MLP, each with its norm and residual."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.reduce = reduce
        self.input_norm = _RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = _Attention(config, index)
        self.post_norm = _RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = _MLP(config)

    def forward(
        self, hidden: torch.Tensor, step: _Step, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        mixed: torch.Tensor = self.attention(self.input_norm(hidden), step, k_cache, v_cache)
        hidden = hidden + (mixed if self.reduce is None else self.reduce(mixed))
        fed: torch.Tensor = self.mlp(self.post_norm(hidden))
        return hidden + (fed if self.reduce is None else self.reduce(fed))


class _Attention(nn.Module):
    """Grouped-query attention of packed queries over the rows' cached keys and values."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.window, self.use_rope = config.windows[index], config.rope_layers[index]
        num_rotated = config.num_heads + config.num_kv_heads
        num_fused = num_rotated + config.num_kv_heads
        self.qkv = _linear(config.hidden_size, num_fused * config.head_dim, bias=config.qkv_bias)
        self.out = _linear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.out_bias
        )
        norm_shape = (num_rotated, config.head_dim)
        self.qk_norm = _RMSNorm(norm_shape, config.norm_eps) if config.qk_norm else None

    def forward(
        self, hidden: torch.Tensor, step: _Step, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        heads = self.qkv(hidden).view(len(hidden), -1, self.head_dim)
        # Queries and keys are neighbours: norm and rotation take both at once.
        rotated = heads[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            rotated = self.qk_norm(rotated)
        if self.use_rope:
            rotated = rotate(rotated, step.cos, step.sin)
        k_cache.index_put_(step.write_index, _to_cells(rotated[:, self.num_heads :], k_cache, 128))
        v_cache.index_put_(step.write_index, _to_cells(heads[:, -self.num_kv_heads :], v_cache, 0))
        keys = _from_cells(k_cache.flatten(0, 1).index_select(0, step.key_slots), heads.dtype, 128)
        values = _from_cells(v_cache.flatten(0, 1).index_select(0, step.key_slots), heads.dtype, 0)
        mixed = self._attend(rotated[:, : self.num_heads], keys, values, step)
        return self.out(mixed)  # type: ignore[no-any-return]

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: _Step
    ) -> torch.Tensor:
        """Attend row by row: queries [T, H, D], keys and values [R * L, Hkv, D] → [T, H * D]."""
        mask = step.masks[self.window]
        num_rows = len(mask)
        keys = keys.view(num_rows, -1, self.num_kv_heads, self.head_dim).transpose(1, 2)
        values = values.view(num_rows, -1, self.num_kv_heads, self.head_dim).transpose(1, 2)
        if step.query_index is None or step.token_index is None:
            # One query a row: the heads of a group stand in for query positions, which is
            # twice as fast on the processor as enable_gqa.
            grouped = queries.reshape(num_rows, self.num_kv_heads, -1, self.head_dim)
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            return mixed.reshape(num_rows, -1)
        padded = queries.index_select(0, step.query_index)
        padded = padded.view(num_rows, -1, self.num_heads, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            padded, keys, values, attn_mask=mask, enable_gqa=True
        )
        mixed = mixed.transpose(1, 2).reshape(-1, self.num_heads * self.head_dim)
        return mixed.index_select(0, step.token_index)


class _MLP(nn.Module):
    """SwiGLU, gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden_size, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = _linear(hidden_size, 2 * size, bias=bias)
        self.down = _linear(size, hidden_size, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class _RMSNorm(nn.Module):
    """Normalise the last dimension in float32, then weigh in the model's dtype."""

    def __init__(self, shape: int | tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(hidden.float(), hidden.shape[-1:], None, self.eps)
        return self.weight * normed.to(hidden.dtype)


def _linear(in_features: int, out_features: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=bias)


def _to_cells(heads: torch.Tensor, cache: torch.Tensor, zero: int) -> torch.Tensor:
    """Return keys or values [T, Hkv, D] as the cache has them; in 8 bits where that is uint8."""
    if cache.dtype != torch.uint8:
        return heads
    heads = heads.float()
    scales = heads.abs().amax(-1, keepdim=True) / 127
    stored = (heads / scales.clamp(min=1e-32)).round().nan_to_num().to(torch.int16) + zero
    # The lowest byte of a negative number is what int8 has.
    return torch.cat(((stored & 0xFF).to(torch.uint8), scales.view(torch.uint8)), -1)


def _from_cells(cells: torch.Tensor, dtype: torch.dtype, zero: int) -> torch.Tensor:
    """Return keys or values [n, Hkv, D] of cells [n, Hkv, width]."""
    if cells.dtype != torch.uint8:
        return cells
    stored, scales = cells[..., :-SCALE_BYTES], cells[..., -SCALE_BYTES:]
    signed = stored.float() - zero if zero else stored.view(torch.int8).float()
    return (signed * scales.contiguous().view(torch.float32)).to(dtype)


def _write_index(slot_mapping: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slot_mapping.to(torch.int64).clamp(min=0)
    return slots // block_size, slots % block_size


def _key_slots(
    block_table: torch.Tensor, context_lens: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Return each key position's cache slot; past the context, that of the row's first key."""
    offsets = torch.arange(block_size, device=block_table.device)
    slots = block_table.to(torch.int64).unsqueeze(-1) * block_size + offsets
    slots = slots.flatten(1)
    keys = torch.arange(slots.shape[1], device=slots.device)
    written = keys < context_lens.unsqueeze(-1)
    return torch.where(written, slots, slots[:, :1]).flatten()


def _query_index(query_start: torch.Tensor, num_tokens: int, max_query_len: int) -> torch.Tensor:
    """Return the token of each padded query; one past its row is some other token."""
    steps = torch.arange(max_query_len, device=query_start.device)
    index = query_start[:-1].to(torch.int64).unsqueeze(-1) + steps
    return index.clamp(max=num_tokens - 1).flatten()


def _token_index(query_start: torch.Tensor, num_tokens: int, max_query_len: int) -> torch.Tensor:
    """Return the padded query of each token; of padding tokens, some query of the last row."""
    tokens = torch.arange(num_tokens, device=query_start.device)
    rows = (tokens.unsqueeze(-1) >= query_start[1:]).sum(dim=-1)
    rows = rows.clamp(max=len(query_start) - 2)
    steps = (tokens - query_start.index_select(0, rows)).clamp(0, max_query_len - 1)
    return rows * max_query_len + steps
