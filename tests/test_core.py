"""The core where it ends in unusual ways: in a forked child, closed beside what still runs."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import EngineClosed
from aneuron.request import RequestState
from aneuron.testing import count_engine, no_leaks, sim_engine
from tests.support import after, assert_exact, start, until
from tests.test_logprobs import Hashed

if TYPE_CHECKING:
    from collections.abc import Iterator


async def test_what_a_forked_child_has_left() -> None:
    """As the child's hook does it, told here once more for a child of the child.

    Real children are in test_embedding.py, each a process of its own.
    """
    async with count_engine() as engine:
        core = engine._core
        await assert_exact(engine)
        core.leave_to_parent()
        told = core.failure
        core.leave_to_parent()
        assert core.failure is told, "a child's child hears of the process that opened it"
        assert core.is_orphan
        with pytest.raises(EngineClosed, match=f"belongs to process {os.getppid()}, .*forked"):
            core.check_caller()
        core.let_go()
        assert core._device_closed == [], "the device's threads are the parent's"
        # This process is the parent, too, and closes what it has.
        core.is_forked, core._has_device, core.failure = False, True, None
        await assert_exact(engine)


async def test_many_prompts_are_drawn_no_more_once_the_engine_is_closed() -> None:
    drawn: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for n in range(1000):
            drawn.append(n)
            yield [1000 * n]

    async with count_engine(max_num_seqs=2) as engine:
        many = engine.generate_many(prompts(), max_tokens=2)
        await anext(many)
        await engine.aclose()
        ends = 0
        while True:
            try:
                await anext(many)
            except EngineClosed:
                ends += 1
            except StopAsyncIteration:
                break
        assert ends >= 1
        assert len(drawn) < 50


async def test_a_prompts_log_probabilities_come_when_it_was_given_up() -> None:
    """They are dropped; whoever comes next has its own."""
    gate = threading.Event()
    model = Hashed()
    options: dict[str, Any] = {"max_tokens": 2, "prompt_logprobs": 1}
    async with (
        sim_engine(model, latency=lambda _: gate.wait() and 0.0) as engine,
        no_leaks(engine),
    ):
        given_up = engine.generate(prompt_token_ids=[5, 6, 7], **options)
        await until(lambda: engine._core._num_in_flight > 0)
        given_up.cancel()
        gate.set()
        answer = await given_up
        assert answer.finish_reason == "abort"
        await engine.wait_idle()
        assert given_up._request.prompt_logprobs is None
        told = (await engine.generate(prompt_token_ids=[5, 6, 7], **options)).prompt_logprobs
        assert told is not None
        assert len(told) == 3


def test_a_stream_dropped_after_its_loop_has_closed_is_silent() -> None:
    streams: list[Any] = []

    async def main() -> None:
        async with count_engine() as engine:
            streams.append(start(engine, 10, 3))
            assert "TokenStream" in repr(streams[0])
            await streams[0]
            await assert_exact(engine)

    asyncio.run(main())
    (stream,) = streams
    assert stream._owner.loop.is_closed()
    # One that was never told its end: as where the loop was stopped amid an answer.
    stream._request.state = RequestState.RUNNING
    stream.__del__()
    assert list(stream._request.output_ids) == after(10, 3)
