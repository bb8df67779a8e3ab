"""Sampling: exact at the edges, right in distribution, the same in any company."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aneuron.models.sampling.host import draw, noise_of, sample_on_host

pytestmark = pytest.mark.tiny

DTYPES = {
    "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32,
    "seed": np.int64, "position": np.int32,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0,
}  # fmt: skip


def inputs_of(num: int, *, num_samples: int | None = None, **params: Any) -> Any:
    """The launch's columns of plain values, or lists per row; position and seed 0 by default."""
    columns = {
        name: np.broadcast_to(np.asarray(params.get(name, DEFAULTS[name]), dtype), num).copy()
        for name, dtype in DTYPES.items()
    }
    return SimpleNamespace(
        **columns, positions=columns["position"], logits_indices=np.arange(num),
        num_samples=num if num_samples is None else num_samples,
        all_greedy=not columns["temperature"].any(),
    )  # fmt: skip


def sample(logits: np.ndarray, **params: Any) -> list[int]:
    """Sample each row once."""
    ids = sample_on_host(logits, inputs_of(len(logits), **params))
    assert ids.dtype == np.int32
    assert ids.shape == (len(logits),)
    listed: list[int] = ids.tolist()
    return listed


def random_logits(num: int, vocab: int = 1000, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    normal = np.random.default_rng(seed).normal(scale=scale, size=(num, vocab))
    return normal.astype(np.float32)


def coarse(logits: np.ndarray) -> np.ndarray:
    """Cut them to bfloat16, which makes ties."""
    return (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def many(row: np.ndarray, num: int = 20_000, **params: Any) -> np.ndarray:
    """Count the ids of `num` draws from one row with seed 0 at positions 0, 1, 2, …"""
    noise = noise_of(np.zeros(num, np.int64), np.arange(num))
    columns = {**DEFAULTS, **params}
    filters = columns["top_k"], columns["top_p"], columns["min_p"]
    ids = draw(row, columns["temperature"], *filters, noise)
    assert ids.dtype == np.int64
    some = np.arange(100)
    in_a_batch = sample(np.tile(row, (100, 1)), position=some, **params)
    assert in_a_batch == ids[some].tolist()
    return np.bincount(ids, minlength=len(row))


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    share: np.ndarray = weights / weights.sum()
    return share


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * counts.sum()
    kept = expected > 0
    assert not counts[~kept].any()
    return float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())


def reference_probs(
    row: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """The textbook way: stable sort, cut, renormalise."""
    probs = softmax(row.astype(np.float64) / temperature)
    order = np.argsort(-probs, stable=True)
    kept = order[: top_k or None]
    share = probs[kept] / probs[kept].sum()
    kept = kept[share.cumsum() - share < top_p]
    kept = kept[probs[kept] >= min_p * probs.max()]
    result = np.zeros_like(probs)
    result[kept] = probs[kept]
    result /= result.sum()
    return result


# ── edges ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mate", [0.0, 1.0], ids=["all greedy", "mixed"])
def test_greedy_takes_the_lowest_id_on_ties(mate: float) -> None:
    logits = np.zeros((4, 500), np.float32)
    logits[1, [77, 400]] = 5.0
    logits[2] = np.arange(500)
    ids = sample(logits, temperature=[0.0, 0.0, 0.0, mate], seed=[1, 2, 3, 4])
    assert ids[:3] == [0, 77, 499]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-30},
        {"temperature": 1e-40},
        {"temperature": 5.0, "top_p": 1e-9},
        {"temperature": 5.0, "top_k": 1},
        {"temperature": 5.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_the_narrowest_settings_are_greedy(params: dict[str, Any]) -> None:
    logits = random_logits(64, scale=30.0)
    assert sample(logits, seed=np.arange(64), **params) == sample(logits, temperature=0.0)
    assert sample(logits, temperature=0.0) == logits.argmax(axis=1).tolist()


def test_top_k_takes_the_lowest_of_ties() -> None:
    logits = np.zeros((200, 300), np.float32)
    logits[:, [5, 250]] = 3.0
    seeds = np.arange(200)
    assert sample(logits, top_k=1, seed=seeds) == [5] * 200
    assert set(sample(logits, top_k=2, seed=seeds)) == {5, 250}
    assert set(sample(logits, top_k=3, seed=seeds)) == {0, 5, 250}


@pytest.mark.parametrize("top_k", [0, -1, 1000, 5000])
def test_top_k_that_keeps_all(top_k: int) -> None:
    row = random_logits(1)[0]
    noise = noise_of(np.arange(50), np.zeros(50, np.int64))
    drawn = draw(row, 1.0, top_k, 1.0, 0.0, noise)
    all_of_it = softmax(row).cumsum()
    assert drawn.tolist() == np.searchsorted(all_of_it, noise, side="right").tolist()


def test_forbidden_ids_are_never_drawn() -> None:
    logits = np.full((200, 90), -np.inf, np.float32)
    logits[:, [3, 60]] = 1.0
    for filters in ({}, {"top_p": 0.99}, {"top_k": 50}, {"min_p": 0.1}):
        assert set(sample(logits, seed=np.arange(200), **filters)) == {3, 60}
    extremes = np.array([0.0, 1 - 2.0**-52])  # of noise
    assert draw(logits[0], 1.0, 0, 1.0, 0.0, extremes).tolist() == [3, 60]


def test_a_row_of_nothing_gives_an_id_in_range() -> None:
    row = np.full(90, -np.inf, np.float32)
    assert draw(row, 1.0, 0, 0.9, 0.0, 0.7) == 0
    assert draw(row, 1.0, 0, 0.9, 0.0, np.array([0.1, 0.7])).tolist() == [0, 0]


def test_long_tail_is_reached() -> None:
    """Weights too small to change a float32 sum of 1 keep their share together."""
    row = np.full(150_000, -17.0, np.float32)
    row[0] = 0.0
    head = float(softmax(row)[0])
    noise = noise_of(np.arange(20_000), np.zeros(20_000, np.int32))
    tail = noise[(noise > head + 0.0005) & (noise < head + 0.004)][:25]
    assert len(set(draw(row, 1.0, 0, 1.0, 0.0, tail).tolist()) - {0}) == 25


def test_nan_fails_rows_that_count() -> None:
    logits = np.zeros((3, 10), np.float32)
    logits[2, 4] = np.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError):
            sample_on_host(logits, inputs_of(3, temperature=temperature))
    padded = inputs_of(3, temperature=0.0, num_samples=2)
    assert sample_on_host(logits, padded)[:2].tolist() == [0, 0]


def test_nan_rows_stay_in_range_and_alone() -> None:
    logits = random_logits(3)
    expected = sample(logits, seed=[1, 2, 3], top_p=0.9)
    logits[2] = np.nan
    ids = sample_on_host(logits, inputs_of(3, num_samples=2, seed=[1, 2, 3], top_p=0.9)).tolist()
    assert ids[:2] == expected[:2]
    assert 0 <= ids[2] < 1000
    logits[0, 17] = np.nan
    assert 0 <= draw(logits[0], 1.0, 0, 0.9, 0.0, 0.5) < 1000


# ── distribution ────────────────────────────────────────────────────────────────────────


def test_frequencies_match_softmax() -> None:
    row = random_logits(1, vocab=40, scale=1.0)[0]
    # 99.99 % of chi-square with 39 degrees of freedom lies below 80.
    assert chi_square(many(row), softmax(row)) < 80
    assert chi_square(many(row, temperature=2.5), softmax(row / 2.5)) < 80


def test_frequencies_over_seeds_match_softmax() -> None:
    row = random_logits(1, vocab=40, scale=1.0, seed=3)[0]
    ids = sample(np.tile(row, (20_000, 1)), seed=np.arange(20_000), position=17)
    assert chi_square(np.bincount(ids, minlength=40), softmax(row)) < 80


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(7, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (12, 0.7, 0.0), (20, 0.9, 0.1)],
)
def test_filters_match_the_textbook(top_k: int, top_p: float, min_p: float) -> None:
    row = random_logits(1, vocab=40, scale=1.5, seed=1)[0]
    filters: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = reference_probs(row, temperature=0.8, **filters)
    counts = many(row, temperature=0.8, **filters)
    assert chi_square(counts, expected) < 80
    assert bool(counts[expected > 0.001].all())


def plain_draw(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, noise: np.ndarray
) -> list[int]:
    """Sort all, cut, and look the noise up in the running sum of what is left, in id order."""
    scaled = (row - row.max()) / np.float32(max(temperature, 1e-10))
    weights = np.exp(scaled)
    order = np.argsort(-scaled, stable=True)
    kept = order[:top_k] if top_k > 0 else order
    if top_p < 1:
        mass = weights[kept].astype(np.float64)
        before = mass.cumsum() - mass
        kept = kept[(before < np.float32(top_p) * mass.sum()) | (np.arange(len(kept)) == 0)]
    kept = np.sort(kept[weights[kept] >= np.float32(min_p)])
    running = weights[kept].cumsum(dtype=np.float64)
    return [int(kept[np.searchsorted(running, one * running[-1], side="right")]) for one in noise]


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10_000), ties=st.booleans(),
    spread=st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    temperature=st.sampled_from([1e-30, 0.01, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 60, 200, 10_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.2, 1.0]), banned=st.integers(0, 199),
)  # fmt: skip
def test_draws_are_those_of_a_sort_of_all(
    seed: int, ties: bool, spread: float, top_k: int, banned: int, **params: float
) -> None:
    """Alone, as many draws of one row and as rows of a batch."""
    row = random_logits(1, vocab=200, scale=spread, seed=seed)[0]
    row = row.round() if ties else row
    row[:banned] = -np.inf
    noise = noise_of(np.arange(40), np.full(40, seed))
    temperature, top_p, min_p = params["temperature"], params["top_p"], params["min_p"]
    expected = plain_draw(row, temperature, top_k, top_p, min_p, noise)
    filters = temperature, top_k, top_p, min_p
    assert draw(row, *filters, noise).tolist() == expected
    alone = [draw(row, *filters, one) for one in noise.tolist()]
    assert alone == expected
    assert {type(one) for one in alone} == {int}
    batch = {"seed": np.arange(40), "position": seed, "top_k": top_k, **params}
    assert sample(np.tile(row, (40, 1)), **batch) == expected


def test_no_noise_and_much_noise_stay_within_the_kept_set() -> None:
    row = random_logits(1, vocab=200)[0]
    kept = np.flatnonzero(reference_probs(row, temperature=1.0, top_k=9, top_p=1.0, min_p=0.0))
    noise = np.array([0.0, 1 - 2.0**-52])
    assert draw(row, 1.0, 9, 1.0, 0.0, noise).tolist() == kept[[0, -1]].tolist()
    assert draw(row, 1.0, 9, 1.0, 0.0, np.empty(0)).tolist() == []


# ── company and noise ───────────────────────────────────────────────────────────────────


def test_row_does_not_depend_on_company() -> None:
    logits = coarse(random_logits(40, scale=2.0))
    params: dict[str, Any] = {
        "temperature": [0.0, 0.5, 1.0, 1.7] * 10,
        "top_k": [0, 50, 3, 60, 0, 10, 64, 7] * 5,
        "top_p": [1.0, 0.9, 0.3, 1.0, 1.0, 1.0, 0.99, 0.5] * 5,
        "min_p": [0.0, 0.0, 0.05, 0.0, 0.1] * 8,
        "seed": list(range(40)),
        "position": list(range(100, 140)),
    }
    together = sample(logits, **params)
    for row in range(40):
        own: dict[str, Any] = {name: values[row : row + 1] for name, values in params.items()}
        assert sample(logits[row : row + 1], **own) == together[row : row + 1]
    backwards: dict[str, Any] = {name: values[::-1] for name, values in params.items()}
    assert sample(logits[::-1].copy(), **backwards) == together[::-1]


def test_seeds_and_positions_are_independent() -> None:
    seeds = np.arange(-300, 300).repeat(600)
    positions = np.tile(np.arange(600), 600)
    noise = noise_of(seeds, positions).reshape(600, 600)
    assert noise.min() >= 0
    assert noise.max() < 1
    assert len(set(noise.flatten().tolist())) == 360_000
    for table in (noise, noise.T):
        correlation = np.corrcoef(table) - np.eye(600)
        assert np.abs(correlation).max() < 0.25  # 6 sigma of 1 / sqrt(600)
        shifted = np.corrcoef(table[1:].flatten(), table[:-1].flatten())
        assert abs(shifted[0, 1]) < 0.01
    assert abs(noise.mean() - 0.5) < 0.003
    counts, _ = np.histogram(noise, bins=64, range=(0, 1))
    assert chi_square(counts, np.full(64, 1 / 64)) < 120


def splitmix(z: int) -> int:
    mask = 2**64 - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def plain_noise(seed: int, position: int) -> float:
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    stream = splitmix((seed + golden) & mask)
    return (splitmix((stream + (position + 1) * golden) & mask) >> 12) * 2.0**-52


def test_noise_is_fixed_for_ever() -> None:
    """A seeded request repeats after an update of aneuron, too."""
    pairs = [(0, 0), (1, 5), (-1, 7), (2**63 - 1, 2**31 - 1), (-(2**63), 0)]
    seeds, positions = np.array(pairs).T
    expected = [plain_noise(seed, position) for seed, position in pairs]
    assert noise_of(seeds, positions).tolist() == expected
    assert noise_of(seeds, positions.astype(np.int32)).tolist() == expected
