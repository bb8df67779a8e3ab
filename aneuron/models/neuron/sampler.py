"""From logits to ids inside a compiled graph: fixed shapes, int32 and float32 alone.

Comes in: logits, a row of parameters for each sample and the positions. Goes out: one id a row,
the same in any company. Sampling looks at the 256 likeliest ids of a row and at no others, which
is what traced programs do. Integers stay within what float32 holds exactly, since some engines
of a NeuronCore compute integers in float32: the noise is made from 16-bit words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name

from aneuron.models.sampling.host import noise_of

if TYPE_CHECKING:
    from aneuron.plans import ModelInput

__all__ = ["CANDIDATES", "SAMPLING_COLUMNS", "sample", "sampling_rows"]

SAMPLING_COLUMNS = ("top_k", "top_p", "temperature", "min_p", "seed_low", "seed_high")
CANDIDATES = 256
_GREEDY = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
_MIN_TEMPERATURE = 1e-10
_SEED_BITS = 22  # of each half: exact in float32
_ROUNDS = 22
_WORD = 0xFFFF


def sampling_rows(inputs: ModelInput, columns: int = len(SAMPLING_COLUMNS)) -> np.ndarray:
    """Return the parameters of a launch's samples, as graphs take them.

    Args:
        inputs: the launch, with its samples' columns.
        columns: how many of `SAMPLING_COLUMNS` the graph takes.

    Returns:
        float32 [S, columns]. Greedy samples have top_k 1, and -1 keeps all. The seed is folded
        to two numbers of 22 bits.
    """
    rows = np.tile(np.array(_GREEDY, np.float32), (len(inputs.logits_indices), 1))
    if not inputs.all_greedy:
        drawn = inputs.temperature > 0
        top_k = inputs.top_k[drawn]
        rows[drawn, 0] = np.where(top_k <= 0, -1, top_k)
        rows[drawn, 1] = inputs.top_p[drawn]
        rows[drawn, 2] = inputs.temperature[drawn]
        rows[drawn, 3] = inputs.min_p[drawn]
        seed = inputs.seed[drawn]
        folded = noise_of(seed, np.zeros(len(seed), np.int64)) * 2.0 ** (2 * _SEED_BITS)
        high, low = np.divmod(folded.astype(np.int64), 1 << _SEED_BITS)
        rows[drawn, 4], rows[drawn, 5] = low, high
    return np.ascontiguousarray(rows[:, :columns])


def sample(
    logits: torch.Tensor,
    params: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one id for each row of logits: temperature, then top-k, top-p, min-p, inverse CDF.

    The order is that of a stable descending sort: ties go to the lowest id. Filters and
    shares are of the 256 likeliest ids; the others are never drawn.

    Args:
        logits: float32 [S, V]; -inf forbids an id.
        params: float32 [S, 6], from `sampling_rows`.
        positions: int32 [S], of the last token of each row.
        mask: bool [S, V], which ids may be drawn; None: all.

    Returns:
        int32 [S]: the likeliest id of rows with top_k 1; -1 of rows whose logits hold NaN.
    """
    is_nan = torch.isnan(logits).any(dim=-1)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    values, ids = _candidates(logits)
    weights, kept = _kept(values, params)
    running = _running_sum(weights)
    threshold = _noise(params[:, 4], params[:, 5], positions) * running[:, -1]
    # Rounding may put the threshold on the sum itself, so the last one kept is the limit.
    place = (running <= threshold.unsqueeze(-1)).sum(dim=-1, dtype=torch.int32)
    place = torch.minimum(place, kept - 1).to(torch.int64).unsqueeze(-1)
    return torch.where(is_nan, -1, ids.gather(1, place).squeeze(-1))


def _candidates(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest, float32 and int32 [S, K]; topk itself leaves open how ties go."""
    vocab_size = logits.shape[-1]
    count = min(CANDIDATES, vocab_size)
    values, found = torch.topk(logits, count, dim=-1)
    edge = values[:, -1:]
    # Ids at the edge, of which some may be left out: the lowest come first.
    names = torch.arange(vocab_size, dtype=torch.float32, device=logits.device)
    keys = torch.where(logits == edge, -names, float("-inf"))
    at_edge = torch.topk(keys, count, dim=-1).indices.to(torch.int32)
    places = torch.arange(count, dtype=torch.int32, device=logits.device)
    num_above = (values > edge).sum(dim=-1, keepdim=True, dtype=torch.int32)
    behind = (places - num_above).clamp(min=0).to(torch.int64)
    ids = torch.where(places < num_above, found.to(torch.int32), at_edge.gather(1, behind))
    return values, _by_id_within_ties(values, ids)


def _by_id_within_ties(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return ids of descending values in their order, those of equal values ascending."""
    count = ids.shape[-1]
    begins = F.pad((values[:, 1:] != values[:, :-1]).to(torch.float32), (1, 0))
    tie = _running_sum(begins)  # the number of the value, from 0
    by_id = torch.topk(-ids.to(torch.float32), count, dim=-1).indices
    places = torch.arange(count, dtype=torch.float32, device=ids.device)
    keys = tie.gather(1, by_id) * count + places  # all different, so topk leaves nothing open
    return ids.gather(1, by_id).gather(1, torch.topk(-keys, count, dim=-1).indices)


def _kept(values: torch.Tensor, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the candidates' weights, and of how many: float32 [S, K], int32 [S], at least 1.

    Weights descend, so what is kept is the first of them; the others weigh 0.
    """
    top_k, top_p, temperature, min_p = (params[:, index : index + 1] for index in range(4))
    best = values[:, :1]
    # Of a row with nothing to draw from, or with +inf, the first is taken, as on the host.
    has_choice = torch.isfinite(best)
    places = torch.arange(values.shape[-1], dtype=torch.float32, device=values.device)
    is_within = ((top_k <= 0) | (places < top_k)) & (has_choice | (places < 1))
    scaled = torch.where(has_choice, values - best, 0.0) / temperature.clamp(min=_MIN_TEMPERATURE)
    weights = torch.where(is_within, scaled.exp(), 0.0)
    running = _running_sum(weights)
    before = F.pad(running[:, :-1], (1, 0))
    is_kept = (weights > 0) & (weights >= min_p)
    is_kept = is_kept & ((top_p >= 1) | (before < top_p * running[:, -1:]))
    count = is_kept.sum(dim=-1, dtype=torch.int32).clamp(min=1)
    return torch.where(places < count.unsqueeze(-1), weights, 0.0), count


def _running_sum(weights: torch.Tensor) -> torch.Tensor:
    """Return running sums, float32 [S, K]: by doubling, since compilers make a cumsum K x K.

    Sums in one order whatever the batch, so that a row's bits do not depend on it.
    """
    shift, size = 1, weights.shape[-1]
    while shift < size:
        weights = weights + F.pad(weights[:, :-shift], (shift, 0))
        shift *= 2
    return weights


def _noise(low: torch.Tensor, high: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the noise of (seed, position), float32 [S]: multiples of 2^-24 in [0, 1)."""
    low, high = low.to(torch.int32), high.to(torch.int32)
    key = (low & _WORD, low >> 16, high & _WORD, high >> 16)
    left, right = _encipher((positions >> 16) & _WORD, positions & _WORD, key)
    return ((left << 8) | (right >> 8)).to(torch.float32) * 2.0**-24


def _encipher(
    left: torch.Tensor, right: torch.Tensor, key: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a block as Speck32/64 (Beaulieu et al. 2013) enciphers it, words as int32 [S].

    Shifts, xor and sums below 2^17: exact on every engine.

    Args:
        left: the block's first word.
        right: its second.
        key: four words, the last first.
    """
    word, *schedule = key
    for step in range(_ROUNDS):
        left = ((_turned(left, 9) + right) & _WORD) ^ word
        right = _turned(right, 2) ^ left
        schedule.append(((word + _turned(schedule.pop(0), 9)) & _WORD) ^ step)
        word = _turned(word, 2) ^ schedule[-1]
    return left, right


def _turned(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Return 16-bit words rotated to the left."""
    return ((word << bits) | (word >> (16 - bits))) & _WORD
