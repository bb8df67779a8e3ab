"""Devices that stay silent, and callers that block: who is lost, when, and what is left."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from aneuron import Completion, DeviceError, DeviceLost, Engine, EngineClosed
from aneuron.futures import DeviceFuture
from aneuron.testing import Count, Fault, SimDevice, count_engine
from tests.support import after, outcome, outcomes, recorded, start

TIMEOUT_S = 0.5


class BadReads(SimDevice):
    """Its rank 1 cannot copy one value to the host: the copy hangs, or fails."""

    def __init__(self, *, at: int, hangs: bool, **options: Any) -> None:
        super().__init__(**options)
        self.at, self.hangs = at, hangs

    def _sibling(self, rank: int, num_ranks: int) -> BadReads:
        sibling = BadReads(at=self.at, hangs=self.hangs, latency=self._latency, rank=rank)
        sibling._skew_s = sibling._skew = lambda _: 0.004
        return sibling

    def _to_host(self, job: Any) -> Any:
        if self.rank == 1:
            self.at -= 1
            if self.at == 0 and self.hangs:
                threading.Event().wait()
            if self.at == 0:
                raise DeviceError("the copy failed")
        return super()._to_host(job)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("at", [1, 3, 5])
async def test_a_break_whose_read_hangs_on_another_rank_loses_the_device(
    at: int, depth: int
) -> None:
    """Once, and in time: a break waits for no other read than its own."""
    device = BadReads(at=at, hangs=True, latency=0.002)
    engine = Engine(
        Count(), device=device, num_ranks=2, token_carry="handoff", max_num_seqs=4,
        max_in_flight_steps=depth, step_timeout_s=TIMEOUT_S, shutdown_s=0.2,
    )  # fmt: skip
    async with engine:
        begun_s = time.monotonic()
        ends = await outcomes(start(engine, 100 * n, 3 + 4 * n) for n in range(1, 6))
        assert any(isinstance(end, DeviceLost) for end in ends)
        assert time.monotonic() - begun_s < 1.7 * TIMEOUT_S + 0.3
        assert engine.stats().in_flight_steps == 0


@pytest.mark.parametrize("at", [1, 2, 3, 4])
async def test_a_break_whose_read_fails_on_another_rank_never_goes_unseen(at: int) -> None:
    """Without its tokens the rank would go on from wrong ids: the step fails, or the engine."""
    model, told = recorded(Count)
    device = BadReads(at=at, hangs=False, latency=0.002)
    async with Engine(
        model, device=device, num_ranks=2, token_carry="handoff", max_num_seqs=4
    ) as engine:
        ends = await outcomes(start(engine, 100 * n, 3 + 4 * n) for n in range(1, 6))
        assert any(isinstance(end, Exception) for end in ends)
    # A step that was launched before the failure was seen, and that fails with it.
    assert sum(ours != theirs for ours, theirs in zip(*told, strict=False)) <= 2


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_lost_rank_is_told_at_once(lost: int) -> None:
    """The other rank waits for it for ever, as in a collective; the time-out is the last resort."""
    faults = [Fault(5, 101, rank=lost), Fault(5, "hang", rank=1 - lost)]
    device = SimDevice(latency=0.002, faults=faults)
    async with Engine(
        Count(), device=device, num_ranks=2, step_timeout_s=1.5, shutdown_s=0.1
    ) as engine:
        begun_s = time.monotonic()
        assert isinstance(await outcome(start(engine)), DeviceLost)
        assert time.monotonic() - begun_s < 1.2, "not by the time-out"


async def test_a_caller_that_blocks_the_loop_does_not_lose_a_healthy_device() -> None:
    """On uvloop timers run before results that were posted meanwhile."""
    async with count_engine(latency=0.01, step_timeout_s=0.2) as engine:
        stream = start(engine, 100, 60)
        for _ in range(3):
            for _ in range(4):
                await anext(stream)
            time.sleep(0.35)
        assert (await stream).token_ids == after(100, 60)


async def test_a_lost_or_hanging_device_leaves_no_timer_on_the_loop() -> None:
    for status in (101, "hang"):
        faults = [Fault(5, status)]
        engine = Engine(Count(), device=SimDevice(latency=0.001, faults=faults), shutdown_s=0.1)
        await engine.open()
        stream = start(engine)
        for _ in range(3):
            await anext(stream)
        await asyncio.sleep(0.02)
        await engine.aclose()
        assert engine._core._watchdog._timer is None
        assert engine._core._watchdog._watched is None
        end = await outcome(stream)
        if status == "hang":
            assert isinstance(end, Completion)
            assert end.abort_reason == "shutdown"
        else:
            assert isinstance(end, DeviceLost)


@pytest.mark.parametrize("carry", ["handoff", "resident"])
async def test_an_idle_engine_keeps_no_device_value(carry: str) -> None:
    gc.collect()
    before = sum(type(one) is DeviceFuture for one in gc.get_objects())
    async with count_engine(token_carry=carry) as engine:
        await start(engine, 10, 20)
        await engine.wait_idle()
        gc.collect()
        left = sum(type(one) is DeviceFuture for one in gc.get_objects())
        assert left <= before
        assert (await start(engine, 10, 20)).token_ids == after(10, 20)


def test_an_engine_that_was_never_open_says_so() -> None:
    engine = Engine("sim:count")
    for name in ("device", "timeline"):
        with pytest.raises(EngineClosed, match="not open"):
            getattr(engine, name)
