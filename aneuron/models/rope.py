"""Rotary positions: the inverse frequencies of each scaling, and cos and sin of a step.

Comes in: a `RopeConfig`, and the positions of a launch. Goes out: what the decoder rotates
queries and keys with. The frequencies are computed once, at loading; cos and sin once per
step, for all layers, from the positions (no table that would bound the context).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from aneuron.models.architecture import RopeConfig

__all__ = ["cos_sin", "inverse_frequencies", "rotate"]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the inverse frequencies of a rope, scaled.

    Follows `transformers.modeling_rope_utils` operation by operation, so that fp32 results
    are the same bits.

    Args:
        rope: kind and parameters.
        head_dim: elements of one head, even.

    Returns:
        float32 [head_dim / 2] on the processor, radians per position.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    if rope.kind == "yarn":
        return _yarn(exponents, rope, head_dim)
    return inv_freq


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Blend by wavelength, as Llama 3.1 does."""
    low_wavelen = rope.original_max_position / rope.low_freq_factor
    high_wavelen = rope.original_max_position / rope.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_wavelen, inv_freq / rope.factor, inv_freq)
    share = rope.original_max_position / wavelen - rope.low_freq_factor
    smooth = share / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelen >= high_wavelen) & (wavelen <= low_wavelen)
    return torch.where(between, blended, scaled)


def _yarn(exponents: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Blend by number of rotations over the original context (YaRN, arXiv:2309.00071)."""
    pos_freqs = rope.theta**exponents
    low, high = _yarn_range(rope, head_dim)
    steps = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - torch.clamp((steps - low) / (high - low), 0, 1)
    return 1.0 / (rope.factor * pos_freqs) * (1 - keep) + 1.0 / pos_freqs * keep


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Return the first and last dimension of the ramp."""
    low = _yarn_dim(rope.beta_fast, rope, head_dim)
    high = _yarn_dim(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # The ramp's width is a divisor.
    return low, high + 0.001 if low == high else high


def _yarn_dim(rotations: float, rope: RopeConfig, head_dim: int) -> float:
    """Return the dimension that turns `rotations` times over the original context."""
    turns = rope.original_max_position / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(rope.theta))


def cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `rotate` multiplies with, for one token each.

    Args:
        positions: int [T].
        inv_freq: float32 [head_dim / 2].
        scale: the rope's attention factor.
        dtype: of the result; computed in float32.

    Returns:
        cos and sin, [T, 1, head_dim] each; the first half of sin is negated, which saves
        negating half of every query and key.
    """
    freqs = positions.unsqueeze(-1).float() * inv_freq
    cos, sin = freqs.cos() * scale, freqs.sin() * scale
    cos = torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1)
    return cos, torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `heads` [T, H, head_dim] rotated by the tables of `cos_sin`."""
    swapped = torch.roll(heads, heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, swapped, sin)
