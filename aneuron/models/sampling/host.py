"""From logits to token ids on the processor, row by row: a row pays for what it asks alone.

Comes in: float32 logits in host memory and one column per sampling parameter. Goes out: one id a
row. A row's noise is a function of its seed and position alone, so its id does not depend on its
neighbours or on padding. Nothing as long as the vocabulary is sorted: top-k and top-p look at
the ids that can be in their sets. numpy, so that simulated models need no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from aneuron.plans import ModelInput

__all__ = ["check_finite", "draw", "noise_of", "sample_on_host"]

_MIN_TEMPERATURE = 1e-10
# SplitMix64's constants; see `noise_of`.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def sample_on_host(logits: np.ndarray, inputs: ModelInput) -> np.ndarray:
    """Return one id for each row of logits.

    Args:
        logits: float32 [n, V], n at most the samples of the launch; -inf forbids an id.
        inputs: the launch that gave them, with its samples' columns.

    Returns:
        int32 [n]: of rows with a temperature one that is drawn, of the others the likeliest, the
        lowest on ties.

    Raises:
        FloatingPointError: a row that counts holds NaN.
    """
    ids: np.ndarray = logits.argmax(axis=1).astype(np.int32)  # 11 to 23 times as fast as torch's
    check_finite(logits[np.arange(len(ids)), ids][: inputs.num_samples])  # it carries a NaN on
    if inputs.all_greedy:
        return ids
    # The last token's position: the same however its prompt was cut or resumed.
    positions = inputs.positions[inputs.logits_indices]
    noise = noise_of(inputs.seed, positions)
    columns = inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, noise
    for row in np.flatnonzero(inputs.temperature[: len(ids)] > 0).tolist():
        ids[row] = draw(logits[row], *(column[row].item() for column in columns))
    return ids


def check_finite(best: np.ndarray) -> None:
    """Check that the rows whose highest logits these are hold no NaN.

    Raises:
        FloatingPointError: one does.
    """
    if np.isnan(best).any():
        raise FloatingPointError("the logits hold NaN")


def noise_of(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the noise of (seed, position): multiples of 2^-52.

    Two rounds of SplitMix64's finaliser (Steele, Lea and Flood 2014), one that scatters the seed
    and one that scatters the position within the seed's stream.

    Args:
        seed: int64 [n].
        position: int [n], 0 or more.

    Returns:
        float64 [n] in [0, 1).
    """
    with np.errstate(over="ignore"):
        stream = _mix(seed.astype(np.int64).view(np.uint64) + _GOLDEN)
        bits = _mix(stream + (position.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    noise: np.ndarray = (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return noise


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


@overload
def draw(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, noise: float
) -> int: ...


@overload
def draw(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, noise: np.ndarray
) -> np.ndarray: ...


def draw(
    row: np.ndarray,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    noise: float | np.ndarray,
) -> int | np.ndarray:
    """Draw ids from one row: temperature, then top-k, top-p and min-p, then inverse CDF.

    The kept set is that of a stable descending sort: ties go to the lowest id.

    Args:
        row: float32 [V]; -inf forbids an id.
        temperature: over 0.
        top_k: 0, -1 and V or more keep all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: in [0, 1], of the weight of the likeliest; 0 keeps all.
        noise: in [0, 1); one, or float64 [n] for as many draws.

    Returns:
        An id, or int64 [n].
    """
    best = row.max()
    if not np.isfinite(best):  # nothing is left to draw from, or NaN
        first = int(row.argmax())
        return np.full(noise.shape, first) if isinstance(noise, np.ndarray) else first
    scaled = row - best
    scaled /= np.float32(max(temperature, _MIN_TEMPERATURE))
    ids = _kept(scaled, top_k, top_p)
    weights = np.exp(scaled if ids is None else scaled[ids])  # the likeliest weighs 1
    if min_p > 0:
        weights *= weights >= np.float32(min_p)
    running = weights.cumsum(dtype=np.float64)  # a long tail of tiny ones would vanish in float32
    found = running.searchsorted(noise * running[-1], side="right")
    if isinstance(noise, np.ndarray):
        places: np.ndarray = np.minimum(found, len(running) - 1)
        return places if ids is None else ids.take(places)
    at = min(int(found), len(running) - 1)
    return at if ids is None else int(ids[at])


def _kept(scaled: np.ndarray, top_k: int, top_p: float) -> np.ndarray | None:
    """Return which ids top-k, and top-p within them, keep, ascending; None: all."""
    size = len(scaled)
    limit = size if top_k <= 0 or top_k > size else top_k
    if limit < size:
        edge = np.partition(scaled, size - limit)[size - limit]
        ids = np.flatnonzero(scaled >= edge)
    elif top_p < 1:
        # The likeliest weighs 1, so all that lies under this bound weighs less than 1 - top_p of
        # the whole together: the set ends before. There is room for rounding by a factor of e.
        ids = np.flatnonzero(scaled >= -(math.log(size / (1 - top_p)) + 1))
    else:
        return None
    values = scaled[ids]
    ranked = np.sort(values)[::-1][:limit]
    count = len(ranked)
    if top_p < 1:
        weights = np.exp(ranked).astype(np.float64)
        mass = weights.cumsum()
        whole = mass[-1] if limit < size else np.exp(scaled).sum(dtype=np.float64)
        count = max(1, int(np.count_nonzero(mass - weights < np.float32(top_p) * whole)))
    edge = ranked[count - 1]
    keep = values > edge
    ties = np.flatnonzero(values == edge)
    keep[ties[: count - np.count_nonzero(keep)]] = True  # the lowest ids first
    kept: np.ndarray = ids[keep]
    return kept
