"""Random interleavings through both played runtimes: every output is as alone, nothing is left.

The scenarios are those of tests/test_properties.py; traced programs come in few sizes, since each
is compiled.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.neuron.flows import WAYS, WITH_BLOCKS, fake_engine, fast
from tests.scenarios import Job, beside, hog, jobs, play

sizes = st.sampled_from(
    [
        {"max_num_seqs": 4, "block_size": 4, "num_kv_blocks": 24},
        {"max_num_seqs": 2, "block_size": 16, "num_kv_blocks": 12},
        {"max_num_seqs": 4, "block_size": 4, "num_kv_blocks": 80},
    ]
)
latencies = st.sampled_from([0.0, 0.0005, 0.002])


@settings(max_examples=max(2, settings().max_examples // 30))
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "carry"), WAYS, ids=[" ".join(way) for way in WAYS])
@pytest.mark.parametrize("kind", ["count", "sum"])
@given(
    scenario=st.lists(jobs, min_size=1, max_size=8),
    size=sizes,
    budget=st.sampled_from([16, 64]),
    decode_s=latencies,
    true_async=st.booleans(),
    hogs=st.none() | st.integers(0, 1000),
)
async def test_every_output_is_as_alone_and_nothing_is_left(
    backend: str,
    carry: str,
    kind: str,
    scenario: list[Job],
    size: dict[str, int],
    budget: int,
    decode_s: float,
    true_async: bool,
    hogs: int | None,
) -> None:
    options: dict[str, Any] = dict(size)
    if backend in WITH_BLOCKS:
        options["max_num_batched_tokens"] = budget
    else:
        del options["block_size"], options["num_kv_blocks"]
    times = fast(decode_s=decode_s, prefill_s=decode_s)
    played = fake_engine(
        backend, carry, f"random {kind}", times=times, true_async=true_async, **options
    )
    async with played as (engine, _), beside(None if hogs is None else hog(hogs)):
        await play(engine, scenario, kind, carry)
