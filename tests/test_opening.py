"""Opening: what cannot be opened, models and devices that another engine has, waiting."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, Self

import pytest

from aneuron import ConfigError, DeviceLost, Engine, EngineClosed, InternalError
from aneuron.testing import Count, SimDevice, Sum, assert_idle, count_engine, no_leaks
from tests.support import after, both_schedulings, start, sum_reference

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

    def __init__(self) -> None:
        super().__init__()
        self.loads = [0]

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        self.loads[0] += 1
        if self.loads[0] == 2:
            raise ConfigError("the file is gone", param="model")
        return super().with_kv(num_blocks, block_size, num_slots)


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
async def test_a_device_that_another_engine_has(async_scheduling: bool) -> None:
    """The second cannot open and harms nobody; once the first is closed, it can."""
    device = SimDevice(latency=0.002)
    first = Engine(Count(), device=device, async_scheduling=async_scheduling)
    second = Engine(Count(), device=device)
    async with first, no_leaks(first):
        stream = start(first, 10, 60)
        await anext(stream)
        for _ in range(2):
            async with asyncio.timeout(5):
                with pytest.raises(ConfigError, match="another engine") as caught:
                    await second.open()
            assert caught.value.param == "device"
        await second.aclose()  # closes nothing of the first
        assert (await stream).token_ids == after(10, 60)
        assert (await start(first, 500, 5)).token_ids == after(500, 5)
    for engine in (second, first, second):
        async with engine:
            assert (await start(engine, 10, 5)).token_ids == after(10, 5)


@both_schedulings
async def test_engines_that_share_a_model_object_have_caches_of_their_own(
    async_scheduling: bool,
) -> None:
    """SUM reads its whole context back: neither sees a token of the other."""
    model = Sum()
    engines = [Engine(model, async_scheduling=async_scheduling) for _ in range(2)]
    await asyncio.gather(*(engine.open() for engine in engines))
    prompts = [[n, n + 7, 3 * n] for n in range(1, 9)]
    answers = await asyncio.gather(
        *(
            engines[n % 2].generate(prompt_token_ids=prompt, max_tokens=30)
            for n, prompt in enumerate(prompts)
        )
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == sum_reference(prompt, 30)
    for engine in engines:
        await engine.aclose()


async def test_a_late_thread_of_a_lost_device_touches_nothing_of_the_next_engine() -> None:
    """A program sleeps through its time-out; its model is opened again while it sleeps."""
    model = Sum()
    lengths = iter([0.0, 0.0, 0.6])
    slow = SimDevice(latency=lambda _: next(lengths, 0.0))
    async with Engine(model, device=slow, step_timeout_s=0.1, shutdown_s=0.1) as engine:
        with pytest.raises(DeviceLost):
            await engine.generate(prompt_token_ids=[1, 2, 3], max_tokens=20)
    async with Engine(model, device=SimDevice(latency=0.02)) as engine:
        answer = await engine.generate(prompt_token_ids=[4, 5, 6], max_tokens=50)
        assert answer.token_ids == sum_reference([4, 5, 6], 50)


def test_an_engine_whose_loop_went_closes_no_device_of_another() -> None:
    """Reopening it lets go of its own device only, and only once."""
    device = SimDevice()
    first, second = Engine(Count(), device=device), Engine(Count(), device=device)

    async def only_open() -> None:
        await first.open()

    async def use_second() -> list[int]:
        async with second:
            with pytest.raises(ConfigError, match="another engine"):
                await first.open()
            return (await start(second, 10, 3)).token_ids

    asyncio.run(only_open())
    assert asyncio.run(use_second()) == [11, 12, 13]


def test_an_engine_that_was_refused_never_closes_the_device_of_the_other() -> None:
    """Refused on one loop, tried again on the next: the owner goes on serving."""
    device = SimDevice()
    owner, other = Engine(Count(), device=device), Engine(Count(), device=device)

    async def try_both() -> list[int]:
        await owner.open()
        with pytest.raises(ConfigError, match="another engine"):
            await other.open()
        async with asyncio.timeout(5):
            return (await start(owner, 10, 3)).token_ids

    for _ in range(2):  # the loop goes without aclose()
        assert asyncio.run(try_both()) == [11, 12, 13]


async def test_closed_and_opened_again_while_the_first_opening_loads() -> None:
    """The first opening gives up; the second wins; one core lives."""
    engine = Engine("sim:count")
    first = asyncio.create_task(engine.open())
    await asyncio.sleep(0)
    await engine.aclose()
    await engine.open()
    with pytest.raises(EngineClosed):
        await first
    assert (await start(engine, 10, 3)).token_ids == [11, 12, 13]
    await engine.aclose()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("aneuron")]


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
        assert len(engine._core._idle._waiters) == 1
        stream.cancel()
        await patient
        assert not engine._core._idle._waiters
        assert_idle(engine)


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
