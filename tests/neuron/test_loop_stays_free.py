"""Rule 14: where launches block until their program has ended, the event loop does not."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from tests.neuron.flows import fake_engine, fast
from tests.neuron.overlap import beat
from tests.support import after, start

if TYPE_CHECKING:
    from aneuron import Engine

PROGRAM_S, BEAT_S = 0.1, 0.005
MOST_S = 0.020  # of a gap; a launch on the loop would make one of PROGRAM_S
WINDOWS = 5  # at most: what else runs here may hold up one of them
WAYS = [("native", "resident"), ("native", "handoff"), ("blocks", "resident"), ("rows", "handoff")]


@pytest.mark.alone
@pytest.mark.parametrize(("backend", "carry"), WAYS, ids=[" ".join(way) for way in WAYS])
async def test_rule_14_launches_that_block_leave_the_loop_free(backend: str, carry: str) -> None:
    options: dict[str, Any] = {"max_num_seqs": 2}
    if backend == "native":
        options["num_seqs_buckets"] = [2]
    times = fast(decode_s=PROGRAM_S)
    async with fake_engine(backend, carry, times=times, true_async=False, **options) as (engine, _):
        largest: list[float] = []
        while len(largest) < WINDOWS and not any(gap < MOST_S for gap in largest):
            largest.append(await largest_gap_s(engine))
    assert min(largest) < MOST_S


async def largest_gap_s(engine: Engine) -> float:
    """The largest gap of the loop while two requests are answered, which must be right."""
    gaps: list[float] = []
    heart = asyncio.create_task(beat(gaps, BEAT_S))
    answers = await asyncio.gather(start(engine, 100, 5), start(engine, 500, 5))
    heart.cancel()
    with suppress(asyncio.CancelledError):
        await heart
    assert [one.token_ids for one in answers] == [after(100, 5), after(500, 5)]
    assert len(gaps) > PROGRAM_S / BEAT_S
    return max(gaps)
