"""From logits to token ids in one program of fixed shape, for devices that run such programs.

The processor draws row by row (`host.py`), which costs it less; both draw the same ids.
Comes in: float32 logits and one column per sampling parameter. Goes out: one id a row.
A row's noise is a function of its seed and position alone, and everything else is done
row by row, so a row's id does not depend on its neighbours or on padding.
"""

from __future__ import annotations

import torch

__all__ = ["greedy", "sample", "uniform"]

# SplitMix64's constants as signed numbers: torch's int64 multiplication wraps around.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_MIN_TEMPERATURE = 1e-10


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's most likely id, the lowest on ties: [R, V] → int32 [R]."""
    return logits.argmax(dim=-1).to(torch.int32)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    window: int | None = None,
) -> torch.Tensor:
    """Draw one id a row: temperature, then top-k, top-p and min-p, then inverse CDF.

    The kept set is that of a stable descending sort: ties go to the lowest id.

    Args:
        logits: float32 [R, V]; -inf forbids an id.
        temperature: float32 [R]; 0 takes the most likely id.
        top_k: int [R]; 0, -1 and V or more keep all.
        top_p: float32 [R] in (0, 1]; 1 keeps all.
        min_p: float32 [R] in [0, 1]; 0 keeps all.
        seed: int64 [R].
        position: int [R], of the token whose logits these are.
        window: how many of the likeliest tokens top-k and top-p look at. None: all, always
            right. 0: no row has a top-k or top-p, and nothing is sorted. Else every row
            with either has a top-k of at most `window`.

    Returns:
        int32 [R].
    """
    best = logits.amax(dim=-1, keepdim=True)
    # Minus the maximum first, so that the smallest temperature does not overflow.
    divisor = torch.where(temperature > 0, temperature.clamp(min=_MIN_TEMPERATURE), 1.0)
    scaled = (logits - best) / divisor.unsqueeze(-1)
    weights = scaled.exp()  # the likeliest weighs 1, so min-p compares with the weight
    keep = weights >= min_p.unsqueeze(-1)
    if window != 0:
        keep &= _nucleus(scaled, top_k, top_p, window)
    drawn = _draw(weights * keep, uniform(seed, position))
    return torch.where(temperature > 0, drawn, greedy(logits))


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return the noise of (seed, position): float64 [R] in [0, 1), multiples of 2^-52.

    Two rounds of SplitMix64's finaliser (Steele, Lea and Flood 2014), one that scatters
    the seed and one that scatters the position within the seed's stream.
    """
    stream = _mix(seed.to(torch.int64) + _GOLDEN)
    bits = _mix(stream + (position.to(torch.int64) + 1) * _GOLDEN)
    return _shift_right(bits, 12).double() * 2.0**-52


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift as unsigned numbers; torch's own shift repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _nucleus(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Return which tokens top-k, and top-p within them, keep: bool [R, V].

    Only values are sorted; a value's rank is settled by id afterwards. All sums run in
    sorted order, so the set is the same for every window.
    """
    size = scaled.shape[-1]
    width = size if window is None else min(window, size)
    limit = torch.where((top_k <= 0) | (top_k > size), size, top_k).unsqueeze(-1)
    every = (limit >= size) & (top_p >= 1).unsqueeze(-1)
    values = scaled.topk(width, dim=-1).values if width < size else _descending(scaled)
    count = _num_kept(values, limit, top_p.unsqueeze(-1))
    edge = values.gather(-1, count - 1)
    ties = scaled == edge
    room = count - (values > edge).sum(dim=-1, keepdim=True)
    within = ties & (ties.cumsum(dim=-1, dtype=torch.int32) <= room)
    return every | (scaled > edge) | within


def _descending(values: torch.Tensor) -> torch.Tensor:
    return values.sort(dim=-1, descending=True).values


def _num_kept(values: torch.Tensor, limit: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Count the sorted tokens before which less than top_p of the mass lies: int64 [R, 1]."""
    rank = torch.arange(values.shape[-1], device=values.device)
    weights = values.exp().double()
    mass = torch.where(rank < limit, weights, 0.0).cumsum(dim=-1)
    inside = (mass - weights < top_p * mass[:, -1:]) | (top_p >= 1)
    return (inside & (rank < limit)).sum(dim=-1, keepdim=True).clamp(min=1)


def _draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return the first id at which the running sum passes the noise's share of the whole.

    float64, because a long tail of tiny weights would vanish beside a sum of 1. The noise
    is at most 1 - 2^-52, so its share stays under the whole in float64 as well.
    """
    running = weights.double().cumsum(dim=-1)
    target = noise.unsqueeze(-1) * running[:, -1:]
    ids = torch.searchsorted(running, target, right=True).squeeze(-1)
    # Only a row of NaN gets past the end.
    return ids.clamp(max=weights.shape[-1] - 1).to(torch.int32)
