"""Opening: what cannot be opened, models and devices that another engine has, waiting."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aneuron import ConfigError, Engine, EngineClosed, InternalError
from aneuron.testing import Count, SimDevice, assert_idle, count_engine, no_leaks
from tests.support import after, both_schedulings, start

# ── what cannot be opened ───────────────────────────────────────────────────────────────


class StubbornDevice(SimDevice):
    """Starts at the second try."""

    tries = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.tries += 1
        if self.tries == 1:
            raise OSError("no such device file")
        super().start(loop)


@both_schedulings
async def test_a_device_whose_start_raises(async_scheduling: bool) -> None:
    """open() raises InternalError with the driver's error as cause; then it can be opened."""
    engine = Engine(Count(), device=StubbornDevice(), async_scheduling=async_scheduling)
    async with asyncio.timeout(5):
        with pytest.raises(InternalError, match="no such device file") as caught:
            await engine.open()
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(EngineClosed):
            _ = start(engine)
        async with engine:
            assert (await start(engine, 10, 3)).token_ids == [11, 12, 13]


class Fickle(Count):
    """Cannot be loaded the second time."""

    loads = 0

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self.loads += 1
        if self.loads == 2:
            raise ConfigError("the file is gone", param="model")
        super().allocate_kv(num_blocks, block_size)


ORPHANS: list[Any] = []


@pytest.mark.parametrize("by_hand", [True, False])
def test_reopened_after_its_loop_went_with_a_load_that_fails(by_hand: bool) -> None:
    """The load's error comes out, not one of the old loop; then it can be opened."""
    engine = Engine(Fickle(), device=SimDevice())

    async def reopen() -> list[int]:
        with pytest.raises(ConfigError, match="the file is gone"):
            await engine.open()
        with pytest.raises(EngineClosed):
            _ = start(engine)
        async with asyncio.timeout(5), engine:
            return (await start(engine, 10, 3)).token_ids

    async def only_open() -> None:
        await engine.open()

    if by_hand:  # as a notebook's kernel does: nothing is cancelled
        loop = asyncio.new_event_loop()
        loop.run_until_complete(only_open())
        ORPHANS.append(asyncio.all_tasks(loop))  # or gc would throw GeneratorExit into them
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    else:
        asyncio.run(only_open())
    assert asyncio.run(reopen()) == [11, 12, 13]
    gc.collect()


# ── one engine at a time ────────────────────────────────────────────────────────────────


@both_schedulings
@pytest.mark.parametrize("shared", ["model", "device"])
async def test_a_model_or_device_that_another_engine_has(
    shared: str, async_scheduling: bool
) -> None:
    """The second cannot open and harms nobody; once the first is closed, it can."""
    model, device = Count(), SimDevice(latency=0.002)
    first = Engine(model, device=device, async_scheduling=async_scheduling)
    second = Engine(
        model if shared == "model" else Count(), device=device if shared == "device" else "sim"
    )
    async with first, no_leaks(first):
        stream = start(first, 10, 60)
        await anext(stream)
        for _ in range(2):
            async with asyncio.timeout(5):
                with pytest.raises(ConfigError, match="another engine") as caught:
                    await second.open()
            assert caught.value.param == shared
        await second.aclose()  # closes nothing of the first
        assert (await stream).token_ids == after(10, 60)
        assert (await start(first, 500, 5)).token_ids == after(500, 5)
    for engine in (second, first, second):
        async with engine:
            assert (await start(engine, 10, 5)).token_ids == after(10, 5)


# ── waiting ─────────────────────────────────────────────────────────────────────────────


async def test_wait_idle_that_times_out_leaves_no_waiter() -> None:
    """Many impatient calls of wait_idle() while a long request runs: nothing piles up."""
    async with count_engine(latency=0.002) as engine:
        stream = start(engine, 10, 10_000)
        await anext(stream)
        for _ in range(50):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await engine.wait_idle()
        patient = asyncio.create_task(engine.wait_idle())
        await asyncio.sleep(0)
        assert len(engine._core._idle_waiters) == 1
        stream.cancel()
        await patient
        assert engine._core._idle_waiters == []
        assert_idle(engine)


async def test_two_engines_cannot_open_one_model_object_at_the_same_time() -> None:
    """One of two simultaneous openings is refused; the other runs exact."""
    model = Count()
    engines = [Engine(model), Engine(model)]
    opened = await asyncio.gather(*(engine.open() for engine in engines), return_exceptions=True)
    refused = [one for one in opened if isinstance(one, ConfigError)]
    assert [one.param for one in refused] == ["model"]
    for engine in engines:
        if engine in opened:
            assert (await start(engine, 10, 3)).token_ids == [11, 12, 13]
        await engine.aclose()
    async with engines[0] as engine:
        assert (await start(engine, 20, 3)).token_ids == [21, 22, 23]


class HalfStarted(SimDevice):
    """Its thread is running when its first start fails."""

    fails = True

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        super().start(loop)
        if self.fails:
            self.fails = False
            raise OSError("half way")


async def test_a_device_that_fails_half_way_can_be_opened_again() -> None:
    device = HalfStarted()
    with pytest.raises(InternalError, match="half way"):
        await Engine(Count(), device=device).open()
    async with Engine(Count(), device=device) as engine:
        assert (await start(engine, 10, 3)).token_ids == [11, 12, 13]
