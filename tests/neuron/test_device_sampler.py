"""Sampling inside a graph: exact at the edges, right in distribution, the same in any company."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from aneuron.models.neuron import sampler
from aneuron.models.neuron.sampler import CANDIDATES, SAMPLING_COLUMNS, sample, sampling_rows

pytestmark = pytest.mark.tiny

DTYPES = {
    "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32,
    "seed": np.int64,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


def rows_of(num: int, **params: Any) -> np.ndarray:
    """Parameters of plain values, or lists per row."""
    columns = {
        name: np.broadcast_to(np.asarray(params.get(name, DEFAULTS[name]), dtype), num).copy()
        for name, dtype in DTYPES.items()
    }
    inputs: Any = SimpleNamespace(
        **columns, logits_indices=np.arange(num), all_greedy=not columns["temperature"].any()
    )
    return sampling_rows(inputs, len(SAMPLING_COLUMNS))


def draw(
    logits: np.ndarray, *, position: Any = 0, mask: np.ndarray | None = None, **params: Any
) -> list[int]:
    """Sample each row once."""
    num = len(logits)
    positions = np.broadcast_to(np.asarray(position, np.int32), num).copy()
    ids = sample(
        torch.from_numpy(logits),
        torch.from_numpy(rows_of(num, **params)),
        torch.from_numpy(positions),
        None if mask is None else torch.from_numpy(mask),
    )
    assert ids.dtype == torch.int32
    listed: list[int] = ids.tolist()
    return listed


def random_logits(num: int, vocab: int = 1000, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    normal = np.random.default_rng(seed).normal(scale=scale, size=(num, vocab))
    return normal.astype(np.float32)


def coarse(logits: np.ndarray) -> np.ndarray:
    """Cut them to bfloat16, which makes ties."""
    return (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def kept_ids(
    row: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """The textbook way in float64: stable sort, 256 of it, cut; ids and their shares."""
    order = np.argsort(-row, kind="stable")[:CANDIDATES][: top_k if top_k > 0 else None]
    weights = np.exp((row[order].astype(np.float64) - row[order[0]]) / max(temperature, 1e-10))
    share = weights / weights.sum()
    kept = (share.cumsum() - share < np.float32(top_p)) & (weights >= np.float32(min_p))
    kept[0] = True
    return order[kept], weights[kept] / weights[kept].sum()


def chi_square(drawn: list[int], ids: np.ndarray, shares: np.ndarray) -> float:
    counts = np.bincount(drawn, minlength=int(ids.max()) + 1)
    expected = shares * len(drawn)
    assert set(drawn) <= set(ids.tolist())
    return float(((counts[ids] - expected) ** 2 / expected).sum())


# ── edges ───────────────────────────────────────────────────────────────────────────────


def test_greedy_is_argmax_with_the_lowest_id_on_ties() -> None:
    logits = coarse(random_logits(64))
    logits[:4] = 0.0
    logits[1, [77, 400]] = 5.0
    logits[2, 999] = 1.0
    logits[3] = -np.inf
    expected = logits.argmax(axis=1).tolist()
    assert draw(logits, temperature=0.0) == expected
    mixed = draw(logits, temperature=[0.0, 1.0] * 32, seed=np.arange(64))
    assert mixed[::2] == expected[::2]
    assert mixed[1::2] != expected[1::2]


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
    assert draw(logits, seed=np.arange(64), **params) == logits.argmax(axis=1).tolist()


def test_top_k_takes_the_lowest_of_ties() -> None:
    logits = np.zeros((200, 300), np.float32)
    logits[:, [5, 250]] = 3.0
    seeds = np.arange(200)
    assert draw(logits, top_k=1, seed=seeds) == [5] * 200
    assert set(draw(logits, top_k=2, seed=seeds)) == {5, 250}
    assert set(draw(logits, top_k=3, seed=seeds)) == {0, 5, 250}


def test_only_256_candidates_are_looked_at_the_lowest_of_ties() -> None:
    """The limit that traced programs have, too: 'all' is the 256 likeliest ids."""
    logits = np.zeros((3000, 600), np.float32)
    logits[:, 599] = 0.5
    drawn = draw(logits, seed=np.arange(3000), temperature=50.0)
    assert set(drawn) == {*range(CANDIDATES - 1), 599}
    assert set(draw(logits, seed=np.arange(3000), temperature=50.0, top_k=500)) == set(drawn)


def test_forbidden_ids_are_never_drawn() -> None:
    logits = np.full((200, 90), -np.inf, np.float32)
    logits[:, [3, 60]] = 1.0
    mask = np.zeros((200, 90), np.bool_)
    mask[:, [3, 60]] = True
    for filters in ({}, {"top_p": 0.99}, {"top_k": 50}, {"min_p": 0.1}):
        assert set(draw(logits, seed=np.arange(200), **filters)) == {3, 60}
        masked = draw(random_logits(200, 90, 0.1), mask=mask, seed=np.arange(200), **filters)
        assert set(masked) == {3, 60}
    assert set(draw(random_logits(200, 90), mask=mask, temperature=0.0)) == {3, 60}


def test_a_row_of_nothing_gives_its_first_id() -> None:
    logits = np.full((2, 90), -np.inf, np.float32)
    assert draw(logits, temperature=[0.0, 1.0]) == [0, 0]
    logits[:, 7] = np.inf
    assert draw(logits, temperature=[0.0, 1.0]) == [7, 7]


def test_nan_rows_give_minus_one_and_stay_alone() -> None:
    logits = random_logits(4)
    expected = draw(logits, seed=[1, 2, 3, 4], top_p=0.9, temperature=[0.0, 1.0, 0.0, 1.0])
    logits[2] = np.nan
    logits[3, 17] = np.nan
    ids = draw(logits, seed=[1, 2, 3, 4], top_p=0.9, temperature=[0.0, 1.0, 0.0, 1.0])
    assert ids == [*expected[:2], -1, -1]
    without = np.arange(1000) != 17
    assert draw(logits[3:], mask=without[None]) == [-1]  # a mask does not hide it


# ── distribution ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (12, 0.7, 0.0), (20, 0.9, 0.1)],
)
def test_frequencies_match_float64(top_k: int, top_p: float, min_p: float) -> None:
    """Over positions of one seed, and over seeds at one position, on a fixed set of each."""
    row = random_logits(1, vocab=40, scale=1.5, seed=1)[0]
    filters: dict[str, Any] = {
        "temperature": 0.8, "top_k": top_k, "top_p": top_p, "min_p": min_p,
    }  # fmt: skip
    ids, shares = kept_ids(row, **filters)
    rows, numbers = np.tile(row, (20_000, 1)), np.arange(20_000)
    # 99.99 % of chi-square with 39 degrees of freedom lies below 80.
    assert chi_square(draw(rows, position=numbers, **filters), ids, shares) < 80
    assert chi_square(draw(rows, position=17, seed=numbers, **filters), ids, shares) < 80


def test_frequencies_over_256_of_more_ids_match_float64() -> None:
    row = coarse(random_logits(1, vocab=600, scale=0.5, seed=2))[0]
    ids, shares = kept_ids(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    rows = np.tile(row, (1_000, 1))
    drawn = [
        one
        for start in range(0, 20_000, 1_000)
        for one in draw(rows, position=np.arange(start, start + 1_000), seed=9)
    ]
    # 99.99 % of chi-square with 255 degrees of freedom lies below 347.
    assert chi_square(drawn, ids, shares) < 347


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    ties=st.booleans(), banned=st.integers(0, 299),
    temperature=st.sampled_from([1e-30, 0.01, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 60, 200, 10_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.2, 1.0]),
)  # fmt: skip
def test_draws_are_of_the_kept_set_alone_or_not(
    seed: int, spread: float, ties: bool, banned: int, **filters: Any
) -> None:
    row = random_logits(1, vocab=300, scale=spread, seed=seed)[0]
    row = row.round() if ties else row
    row[:banned] = -np.inf
    # What float32 sums cut off differs by a hair of the mass.
    wider = {**filters, "top_p": min(1.0, filters["top_p"] + 1e-5)}
    ids, _ = kept_ids(row, **wider)
    rows, seeds = np.tile(row, (20, 1)), np.arange(seed, seed + 20)
    together = draw(rows, seed=seeds, position=seed, **filters)
    assert set(together) <= set(ids.tolist())
    assert not np.isinf(row[together]).any()
    alone = [
        draw(row[None].copy(), seed=[one], position=seed, **filters)[0] for one in seeds.tolist()
    ]
    assert alone == together


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
    together = draw(logits, **params)
    for row in range(40):
        own: dict[str, Any] = {name: values[row : row + 1] for name, values in params.items()}
        assert draw(logits[row : row + 1], **own) == together[row : row + 1]
    backwards: dict[str, Any] = {name: values[::-1] for name, values in params.items()}
    assert draw(logits[::-1].copy(), **backwards) == together[::-1]


def noise_of(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    rows = torch.from_numpy(rows_of(len(seeds), seed=seeds))
    noise = sampler._noise(rows[:, 4], rows[:, 5], torch.from_numpy(positions.astype(np.int32)))
    return noise.numpy().astype(np.float64)


def test_seeds_and_positions_are_independent() -> None:
    seeds, positions = np.arange(-300, 300).repeat(600), np.tile(np.arange(600), 600)
    noise = noise_of(seeds, positions).reshape(600, 600)
    assert noise.min() >= 0
    assert noise.max() < 1
    assert len(set(noise.flatten().tolist())) > 355_000  # 2^-24 apart: 356 155 are expected
    for table in (noise, noise.T):
        correlation = np.corrcoef(table) - np.eye(600)
        assert np.abs(correlation).max() < 0.25  # 6 sigma of 1 / sqrt(600)
        shifted = np.corrcoef(table[1:].flatten(), table[:-1].flatten())
        assert abs(shifted[0, 1]) < 0.01
    assert abs(noise.mean() - 0.5) < 0.003
    counts, _ = np.histogram(noise, bins=64, range=(0, 1))
    expected = 360_000 / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 120


def test_the_cipher_is_speck() -> None:
    """The test vector of its paper."""
    words = [torch.tensor([word], dtype=torch.int32) for word in (0x6574, 0x694C)]
    key = [torch.tensor([word], dtype=torch.int32) for word in (0x0100, 0x0908, 0x1110, 0x1918)]
    left, right = sampler._encipher(words[0], words[1], tuple(key))
    assert (left.item(), right.item()) == (0xA868, 0x42F2)


def test_integers_are_exact_in_float32() -> None:
    """Sums on engines that compute integers in float32 are the same."""
    largest = 0

    class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket in {torch.ops.aten.add, torch.ops.aten.mul}:
                assert result.dtype in {torch.int32, torch.float32}
                if result.dtype == torch.int32:
                    largest = max(largest, int(result.abs().max()))
            return result

    with Watched():  # type: ignore[no-untyped-call]
        noise_of(np.arange(5000) << 40, np.arange(2**31 - 5000, 2**31))
    assert 2**16 < largest < 2**24


def test_nothing_is_wider_than_32_bits_but_indices() -> None:
    class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            for one in args:
                if isinstance(one, torch.Tensor) and one.dtype == torch.int64:
                    named = str(func.overloadpacket)
                    assert named in {
                        "aten.gather", "aten._to_copy", "aten.unsqueeze",
                    }, named  # fmt: skip
                    assert int(one.abs().max()) < 2**31
            return func(*args, **(kwargs or {}))

    logits, rows = torch.from_numpy(random_logits(4)), torch.from_numpy(rows_of(4, seed=2**62))
    positions = torch.arange(4, dtype=torch.int32)
    with Watched():  # type: ignore[no-untyped-call]
        sample(logits, rows, positions, torch.ones(4, 1000, dtype=torch.bool))


def test_it_can_be_exported_with_fixed_shapes() -> None:
    class Sampler(torch.nn.Module):
        def forward(self, logits: Any, params: Any, positions: Any, mask: Any) -> torch.Tensor:
            return sample(logits, params, positions, mask)

    given_ = (
        torch.from_numpy(random_logits(4)),
        torch.from_numpy(rows_of(4, seed=[1, 2, 3, 4])),
        torch.arange(4, dtype=torch.int32),
        torch.ones(4, 1000, dtype=torch.bool),
    )
    program = torch.export.export(Sampler(), given_)
    assert program.module()(*given_).tolist() == sample(*given_).tolist()


# ── what the host sends ─────────────────────────────────────────────────────────────────


def test_rows_of_parameters() -> None:
    rows = rows_of(
        3, temperature=[0.0, 0.5, 2.0], top_k=[7, 0, 9], top_p=[0.5, 0.9, 1.0],
        min_p=[0.3, 0.1, 0.0], seed=[5, -1, 2**63 - 1],
    )  # fmt: skip
    assert rows.dtype == np.float32
    assert rows[0].tolist() == [1, 1, 1, 0, 0, 0]
    assert rows[1, :4].tolist() == [-1, np.float32(0.9), 0.5, np.float32(0.1)]
    assert rows[2, :4].tolist() == [9, 1, 2, 0]
    halves = rows[1:, 4:]
    assert (halves == halves.round()).all()
    assert ((halves >= 0) & (halves < 2**22)).all()
    assert rows_of(2, temperature=0.0, top_k=3).tolist() == [[1, 1, 1, 0, 0, 0]] * 2


def test_traced_programs_of_others_take_the_first_three_columns() -> None:
    inputs: Any = SimpleNamespace(
        temperature=np.array([0.5], np.float32), top_k=np.array([4]), top_p=np.array([0.25]),
        min_p=np.zeros(1), seed=np.ones(1, np.int64), logits_indices=np.arange(1),
        all_greedy=False,
    )  # fmt: skip
    assert sampling_rows(inputs, 3).tolist() == [[4, 0.25, 0.5]]
    assert sampling_rows(inputs, 3).flags.c_contiguous


def test_seeds_that_differ_keep_apart() -> None:
    seeds = np.concatenate([np.arange(-50_000, 50_000), np.arange(1 << 20) << 40])
    halves = rows_of(len(seeds), seed=seeds)[:, 4:].astype(np.int64)
    numbers = halves[:, 0] | halves[:, 1] << 22
    assert len(np.unique(numbers)) == len(np.unique(seeds))
