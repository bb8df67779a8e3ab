"""Launched ahead, the device hardly idles: what `tests.neuron.overlap` measures, asserted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.neuron.flows import fake_engine, fast
from tests.neuron.overlap import LENGTH, window

NUM_SEQS = 4
MOST = 0.01  # of the time
WINDOWS = 4  # at most: what else runs here may hold up one of them
TIMES = fast(enqueue_s=100e-6, decode_s=6.4e-3, read_s=300e-6)
WAYS = [("native", "resident"), ("native", "handoff"), ("blocks", "resident"), ("rows", "handoff")]


@pytest.mark.alone
@pytest.mark.parametrize(("backend", "carry"), WAYS, ids=[" ".join(way) for way in WAYS])
async def test_the_device_idles_less_than_a_hundredth_of_the_time(backend: str, carry: str) -> None:
    options: dict[str, Any] = {"max_num_seqs": NUM_SEQS, "max_model_len": LENGTH}
    if backend != "rows":
        options["block_size"] = 16
    if backend == "native":
        options |= {"num_kv_blocks": NUM_SEQS * LENGTH // 16, "num_seqs_buckets": [NUM_SEQS]}
    async with fake_engine(backend, carry, "random count", times=TIMES, **options) as opened:
        shares: list[float] = []
        while len(shares) < WINDOWS and not any(share < MOST for share in shares):
            shares.append((await window(*opened, NUM_SEQS)).idle_share)
    assert min(shares) < MOST
