"""Sampling: exact at the edges, right in distribution, the same in any company."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aneuron.models.sampling.host import draw as draw_on_host
from aneuron.models.sampling.host import noise_of, sample_on_host
from aneuron.models.sampling.sampler import greedy, sample, uniform

pytestmark = pytest.mark.tiny


def column(value: Any, num: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.as_tensor(value, dtype=dtype)
    return tensor.expand(num) if tensor.dim() == 0 else tensor


def draw(logits: torch.Tensor, *, window: int | None = None, **params: Any) -> list[int]:
    """Sample with plain values or lists per row; position and seed 0 by default.

    What the processor draws row by row must be the same, of some hundred rows.
    """
    num = len(logits)
    columns = {
        "temperature": column(params.get("temperature", 1.0), num, torch.float32),
        "top_k": column(params.get("top_k", 0), num, torch.int32),
        "top_p": column(params.get("top_p", 1.0), num, torch.float32),
        "min_p": column(params.get("min_p", 0.0), num, torch.float32),
        "seed": column(params.get("seed", 0), num, torch.int64),
        "position": column(params.get("position", 0), num, torch.int32),
    }
    ids = sample(logits, **columns, window=window)
    assert ids.dtype == torch.int32
    some = slice(0, 300)
    if not logits.isnan().any():
        alike = on_host(logits[some], {name: one[some] for name, one in columns.items()})
        assert alike == ids[some].tolist()
    return ids.tolist()


def on_host(logits: torch.Tensor, columns: dict[str, torch.Tensor]) -> list[int]:
    """What `sample_on_host` draws."""
    arrays = {name: one.numpy() for name, one in columns.items()}
    inputs: Any = SimpleNamespace(
        **arrays, positions=arrays["position"], logits_indices=np.arange(len(logits)),
        num_samples=len(logits), all_greedy=not arrays["temperature"].any(),
    )  # fmt: skip
    return sample_on_host(logits.numpy(), inputs).tolist()


def random_logits(num: int, vocab: int = 1000, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def many(row: torch.Tensor, num: int = 20_000, **params: Any) -> torch.Tensor:
    """Count the ids of `num` draws from one row at positions 0, 1, 2, …"""
    ids = draw(row.expand(num, -1), position=torch.arange(num), **params)
    return torch.bincount(torch.tensor(ids), minlength=len(row))


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    kept = expected > 0
    assert not counts[~kept].any()
    return float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())


def reference_probs(
    row: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """The textbook way: stable sort, cut, renormalise."""
    probs = (row.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True, stable=True)
    kept = order[: top_k or None]
    share = probs[kept] / probs[kept].sum()
    kept = kept[share.cumsum(0) - share < top_p]
    kept = kept[probs[kept] >= min_p * probs.max()]
    result = torch.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(3, 500)
    logits[1, [77, 400]] = 5.0
    logits[2] = torch.arange(500)
    assert greedy(logits).tolist() == [0, 77, 499]
    assert draw(logits, temperature=0.0, seed=[1, 2, 3]) == [0, 77, 499]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-30},
        {"temperature": 5.0, "top_p": 1e-9},
        {"temperature": 5.0, "top_k": 1},
        {"temperature": 5.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_the_narrowest_settings_are_greedy(params: dict[str, Any]) -> None:
    logits = random_logits(64, scale=30.0)
    assert draw(logits, seed=torch.arange(64), **params) == greedy(logits).tolist()


def test_top_k_one_takes_the_lowest_of_ties() -> None:
    logits = torch.zeros(20, 300)
    logits[:, [5, 250]] = 3.0
    assert draw(logits, top_k=1, seed=torch.arange(20)) == [5] * 20
    assert draw(logits, top_k=1, window=64, seed=torch.arange(20)) == [5] * 20
    assert set(draw(logits, top_k=3, seed=torch.arange(20))) <= {0, 5, 250}


def test_frequencies_match_softmax() -> None:
    row = random_logits(1, vocab=40, scale=1.0)[0]
    # 99.99 % of chi-square with 39 degrees of freedom lies below 80.
    assert chi_square(many(row), row.softmax(-1)) < 80
    assert chi_square(many(row, temperature=2.5), (row / 2.5).softmax(-1)) < 80


def test_frequencies_over_seeds_match_softmax() -> None:
    row = random_logits(1, vocab=40, scale=1.0, seed=3)[0]
    ids = draw(row.expand(20_000, -1), seed=torch.arange(20_000), position=17)
    assert chi_square(torch.bincount(torch.tensor(ids), minlength=40), row.softmax(-1)) < 80


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(7, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (12, 0.7, 0.0), (20, 0.9, 0.1)],
)
@pytest.mark.parametrize("window", [None, 20])
def test_filters_match_the_textbook(
    top_k: int, top_p: float, min_p: float, window: int | None
) -> None:
    if window and not top_k and top_p < 1:
        window = None
    row = random_logits(1, vocab=40, scale=1.5, seed=1)[0]
    filters: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = reference_probs(row, temperature=0.8, **filters)
    counts = many(row, temperature=0.8, window=window, **filters)
    assert chi_square(counts, expected) < 80
    assert bool(counts[expected > 0.001].all())


@pytest.mark.parametrize("top_k", [0, -1, 1000, 5000])
def test_top_k_that_keeps_all(top_k: int) -> None:
    logits, seed = random_logits(50), torch.arange(50)
    assert draw(logits, top_k=top_k, seed=seed) == draw(logits, seed=seed, window=0)


def test_row_does_not_depend_on_company_or_window() -> None:
    logits = random_logits(40, scale=2.0).bfloat16().float()  # with ties
    params: dict[str, Any] = {
        "temperature": [0.0, 0.5, 1.0, 1.7] * 10,
        "top_k": [0, 50, 3, 60, 0, 10, 64, 7] * 5,
        "top_p": [1.0, 0.9, 0.3, 1.0, 1.0, 1.0, 0.99, 0.5] * 5,
        "min_p": [0.0, 0.0, 0.05, 0.0, 0.1] * 8,
        "seed": list(range(40)),
        "position": list(range(100, 140)),
    }
    together = draw(logits, **params)
    assert draw(logits, window=64, **params) == together
    for row in range(40):
        own: dict[str, Any] = {name: values[row : row + 1] for name, values in params.items()}
        assert draw(logits[row : row + 1], **own) == together[row : row + 1]


def test_seeds_and_positions_are_independent() -> None:
    seeds = torch.arange(-300, 300).repeat_interleave(600)
    positions = torch.arange(600).repeat(600)
    noise = uniform(seeds, positions).view(600, 600)
    assert noise.min() >= 0
    assert noise.max() < 1
    assert len(set(noise.flatten().tolist())) == 360_000
    for table in (noise, noise.T):
        correlation = torch.corrcoef(table) - torch.eye(600)
        assert correlation.abs().max() < 0.25  # 6 sigma of 1 / sqrt(600)
        shifted = torch.corrcoef(torch.stack((table[1:].flatten(), table[:-1].flatten())))
        assert shifted[0, 1].abs() < 0.01
    assert abs(noise.mean() - 0.5) < 0.003
    counts = torch.histc(noise.float(), bins=64, min=0, max=1)
    assert chi_square(counts, torch.full((64,), 1 / 64)) < 120


def test_noise_is_fixed_for_ever() -> None:
    """A seeded request repeats after an update of aneuron, too."""
    noise = uniform(torch.tensor([0, 1, -1, 2**63 - 1]), torch.tensor([0, 5, 7, 2**31 - 1]))
    assert noise.tolist() == NOISE
    seeds, positions = np.array([0, 1, -1, 2**63 - 1]), np.array([0, 5, 7, 2**31 - 1])
    assert noise_of(seeds, positions).tolist() == NOISE


def splitmix(z: int) -> int:
    mask = 2**64 - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def plain_uniform(seed: int, position: int) -> float:
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    stream = splitmix((seed + golden) & mask)
    return (splitmix((stream + (position + 1) * golden) & mask) >> 12) * 2.0**-52


NOISE = [plain_uniform(s, p) for s, p in ((0, 0), (1, 5), (-1, 7), (2**63 - 1, 2**31 - 1))]


def test_forbidden_ids_are_never_drawn() -> None:
    logits = torch.full((200, 90), float("-inf"))
    logits[:, [3, 60]] = 1.0
    ids = draw(logits, seed=torch.arange(200), top_p=0.99)
    assert set(ids) == {3, 60}


def test_long_tail_is_reached() -> None:
    """Weights too small to change a float32 sum of 1 keep their share together."""
    row = torch.full((150_000,), -17.0)
    row[0] = 0.0
    head = float(row.double().softmax(-1)[0])
    noise = uniform(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int32))
    seeds = ((noise > head + 0.0005) & (noise < head + 0.004)).nonzero().flatten()[:25]
    ids = draw(row.expand(len(seeds), -1), seed=seeds)
    assert len(set(ids) - {0}) == 25


def test_nan_rows_stay_in_range_and_alone() -> None:
    logits = random_logits(3)
    expected = draw(logits, seed=[1, 2, 3], top_p=0.9)
    logits[1] = float("nan")
    ids = draw(logits, seed=[1, 2, 3], top_p=0.9)
    assert (ids[0], ids[2]) == (expected[0], expected[2])
    assert 0 <= ids[1] < 1000


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10_000), coarse=st.booleans(),
    spread=st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    temperature=st.sampled_from([1e-30, 0.01, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 60, 200, 10_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.2, 1.0]), banned=st.integers(0, 199),
)  # fmt: skip
def test_the_processor_draws_what_the_program_draws(
    seed: int, coarse: bool, spread: float, top_k: int, banned: int, **params: float
) -> None:
    logits = random_logits(4, vocab=200, scale=spread, seed=seed)
    logits = logits.round() if coarse else logits  # many ties
    logits[:, :banned] = float("-inf")
    draw(logits, seed=torch.arange(4), position=seed, top_k=top_k, **params)


def test_hot_rows_of_the_processor_match_softmax() -> None:
    row = random_logits(1, vocab=40, scale=1.0, seed=5)[0]
    noise = noise_of(np.full(20_000, 9), np.arange(20_000)).tolist()
    ids = [draw_on_host(row.numpy(), 1.0, 0, 1.0, 0.0, one) for one in noise]
    counts = torch.bincount(torch.tensor(ids), minlength=40)
    assert chi_square(counts, row.softmax(-1)) < 80


def test_nan_fails_rows_that_count() -> None:
    logits = torch.zeros(3, 10)
    logits[2, 4] = float("nan")
    columns = {name: torch.zeros(3) for name in ("temperature", "position")}
    inputs: Any = SimpleNamespace(
        **{name: one.numpy() for name, one in columns.items()}, num_samples=3, all_greedy=True
    )
    with pytest.raises(FloatingPointError):
        sample_on_host(logits.numpy(), inputs)
    inputs.num_samples = 2  # the third one pads
    assert sample_on_host(logits.numpy(), inputs)[:2].tolist() == [0, 0]
