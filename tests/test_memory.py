"""What 2,000 requests leave behind: nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from typing import Any

import pytest

from aneuron.testing import assert_idle, count_engine, wait_all_idle
from tests.support import after, every_carry

Carry = dict[str, Any]  # engine options


@every_carry
@pytest.mark.timeout(120)
async def test_case_77_memory_does_not_grow(carry: Carry) -> None:
    """2,000 requests, half of them given up at a random point."""
    rng = random.Random(77)
    async with count_engine(
        **carry, num_kv_blocks=256, block_size=4, max_num_seqs=16, max_num_batched_tokens=128
    ) as engine:

        async def one(number: int) -> None:
            prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
            count = rng.randrange(1, 8)
            stream = engine.generate(prompt_token_ids=prompt, max_tokens=count, deadline_s=60)
            if number % 2:
                for _ in range(rng.randrange(count)):
                    await anext(stream)
                stream.cancel()
            else:
                assert (await stream).token_ids == after(prompt[-1], count)

        async def many(numbers: range) -> int:
            for begin in numbers[::40]:
                await asyncio.gather(*(one(begin + n) for n in range(40)))
            await wait_all_idle(engine)
            assert_idle(engine)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before = await many(range(200))
            growth = await many(range(2000)) - before
        finally:
            tracemalloc.stop()
        assert growth < 1_000_000
        core = engine._core
        assert not core.intake._deadlines
        assert not core.scheduler._admission.leader_of
        assert not core.scheduler._prompts.unfinished
        assert len(core.scheduler._queue._heap) < 20
        assert not core.scheduler._slots.holders
        assert core.intake._num_live == 0
