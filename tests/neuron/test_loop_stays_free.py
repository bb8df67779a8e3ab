"""Rule 14: where launches block until their program has ended, the event loop does not."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from tests.neuron.flows import fake_engine, fast
from tests.neuron.overlap import beat
from tests.support import after, start

PROGRAM_S, BEAT_S, MOST_S = 0.2, 0.005, 0.1
WAYS = [("native", "resident"), ("native", "handoff"), ("blocks", "resident"), ("rows", "handoff")]


@pytest.mark.alone
@pytest.mark.parametrize(("backend", "carry"), WAYS, ids=[" ".join(way) for way in WAYS])
async def test_rule_14_launches_that_block_leave_the_loop_free(backend: str, carry: str) -> None:
    options: dict[str, Any] = {"max_num_seqs": 2}
    if backend == "native":
        options["num_seqs_buckets"] = [2]
    times = fast(decode_s=PROGRAM_S)
    async with fake_engine(backend, carry, times=times, true_async=False, **options) as (engine, _):
        gaps: list[float] = []
        heart = asyncio.create_task(beat(gaps, BEAT_S))
        answers = await asyncio.gather(start(engine, 100, 5), start(engine, 500, 5))
        heart.cancel()
        with suppress(asyncio.CancelledError):
            await heart
        assert [one.token_ids for one in answers] == [after(100, 5), after(500, 5)]
        assert len(gaps) > PROGRAM_S / BEAT_S
        assert max(gaps) < MOST_S
