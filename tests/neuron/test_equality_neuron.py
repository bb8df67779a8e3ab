"""Greedy answers of a real model through both played runtimes are those of the processor."""

from __future__ import annotations

from typing import Any

import pytest

from aneuron import Engine
from aneuron.device.neuron import NeuronDevice
from aneuron.testing.fakes import FakeCompiler, FakeNative, FakeNxd

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(300)]

PROMPTS = ["The capital of France is", "1, 2, 3, 4, 5,", "def add(a, b):\n    return"]
COUNT = 12
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 16,
}


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    """One loop is enough here: the engine's own tests run on all of them."""
    return "asyncio", {"use_uvloop": True}


async def answers(**options: Any) -> list[list[int]]:
    found: list[Any] = [None] * len(PROMPTS)
    async with Engine("smollm2-135m", **SIZES, **options) as engine:
        many = engine.generate_many(PROMPTS, max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        async for index, completion in many:
            found[index] = completion.token_ids
    return found


@pytest.fixture(scope="module")
async def expected(anyio_backend: Any) -> list[list[int]]:
    """What the processor answers."""
    return await answers(device="cpu", enforce_eager=True)


@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_smollm2_on_native_pytorch(num_ranks: int, expected: list[list[int]]) -> None:
    fake = FakeNative(memory_bytes=4 * 2**30)
    device = NeuronDevice(lambda: fake, kind="native")
    buckets = {"num_seqs_buckets": [4], "num_tokens_buckets": [64], "num_blocks_buckets": [4]}
    assert await answers(device=device, num_ranks=num_ranks, **buckets) == expected
    assert fake.violations == []


@pytest.mark.parametrize(("ranks", "layout"), [(1, "rank_out"), (3, "rank_out"), (3, "out_rank")])
async def test_smollm2_on_traced_programs(
    ranks: int, layout: Any, expected: list[list[int]]
) -> None:
    fake = FakeNxd(layout=layout)
    device = NeuronDevice(lambda: fake, kind="nxd", compiler=FakeCompiler())
    assert await answers(device=device, tensor_parallel_size=ranks) == expected
    assert fake.violations == []
