"""Random scenarios: requests that come, are read and given up in any order, and what they get.

On COUNT and SUM one stale, doubled, lost or swapped token shows; SUM also reads the whole
context back through the block tables. The reference is arithmetic, not an engine.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from aneuron import FinishReason
from aneuron.testing import assert_idle, wait_all_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from aneuron import Engine, TokenStream

VOCAB = 4_096
MAX_LEN = 64


def reference(kind: str, prompt: list[int], count: int) -> list[int]:
    """What the model says after a prompt, alone."""
    ids = list(prompt)
    for _ in range(count):
        if kind == "count":
            ids.append((ids[-1] + 1) % VOCAB)
        else:
            ids.append(sum((at + 1) * token for at, token in enumerate(ids)) % VOCAB)
    return ids[len(prompt) :]


@dataclass(frozen=True)
class Job:
    """One request of a scenario."""

    gap: int  # loop turns before it is submitted
    prompt: list[int]
    max_tokens: int
    stops_at: int | None  # the id that its n-th token will be is a stop id
    leaves_at: int | None  # it is given up after n tokens …
    how: str  # … like this

    def expected(self, kind: str) -> list[int]:
        ids = reference(kind, self.prompt, min(self.max_tokens, MAX_LEN - len(self.prompt)))
        stop_ids = self.stop_ids(kind)
        for at, token in enumerate(ids):
            if token in stop_ids:
                return ids[: at + 1]
        return ids

    def stop_ids(self, kind: str) -> list[int]:
        if self.stops_at is None:
            return []
        return [reference(kind, self.prompt, self.stops_at)[-1]]


jobs = st.builds(
    Job,
    gap=st.integers(0, 6),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    max_tokens=st.integers(1, 24),
    stops_at=st.none() | st.integers(1, 12),
    leaves_at=st.none() | st.integers(0, 10),
    how=st.sampled_from(["cancel", "drop", "abort", "stop", "task"]),
)


async def hog(seed: int) -> None:
    """The caller's own code, which blocks the loop now and then."""
    rng = random.Random(seed)
    while True:
        await asyncio.sleep(rng.choice((0.0, 0.0005, 0.002)))
        time.sleep(rng.choice((0.0, 0.0002, 0.001)))


@asynccontextmanager
async def beside(one: Coroutine[Any, Any, None] | None) -> AsyncIterator[None]:
    """Run a coroutine in the background, if there is one."""
    task = None if one is None else asyncio.create_task(one)
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def consume(engine: Engine, job: Job, kind: str, name: str) -> None:
    for _ in range(job.gap):
        await asyncio.sleep(0)
    stream = engine.generate(
        prompt_token_ids=job.prompt,
        max_tokens=job.max_tokens,
        stop_token_ids=job.stop_ids(kind),
        request_id=name,
    )
    expected = job.expected(kind)
    got: list[int] = []
    if job.leaves_at == 0 and job.how == "drop":
        return
    async for token in stream:
        if token.token_id is None:
            break
        got.append(token.token_id)
        assert got == expected[: len(got)]
        if len(got) == job.leaves_at:
            if job.how == "drop":
                return
            leave(engine, stream, job.how, name)
    if job.leaves_at is None or len(got) < job.leaves_at:
        assert got == expected
    completion = await stream
    assert completion.token_ids[: len(got)] == got
    if completion.finish_reason is not FinishReason.ABORT and job.leaves_at is None:
        assert completion.token_ids == expected


def leave(engine: Engine, stream: TokenStream, how: str, name: str) -> None:
    if how == "cancel":
        stream.cancel()
    elif how == "stop":
        stream.stop()
    elif how == "abort":
        engine.abort(name)
    else:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()


async def play(engine: Engine, scenario: list[Job], kind: str, carry: str) -> None:
    """Run a scenario: every output is as alone, and nothing is left."""
    tasks = [
        asyncio.create_task(consume(engine, job, kind, f"job-{number}"))
        for number, job in enumerate(scenario)
    ]
    async with asyncio.timeout(15):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if result is not None and not isinstance(result, asyncio.CancelledError):
            raise result
    await wait_all_idle(engine)
    assert_idle(engine)
    check_counts(engine, carry)


def check_counts(engine: Engine, carry: str) -> None:
    """Each step is counted once; with slots on the device every decode is fed."""
    stats = engine.stats()
    if carry == "host":
        assert (stats.async_steps, stats.sync_fallback_steps) == (0, 0)
        return
    assert stats.async_steps + stats.sync_fallback_steps == stats.steps
    if carry == "resident":
        assert stats.async_steps == stats.decode_steps
        assert stats.breaks.keys() <= {"drain"}
