"""How late the loop is: a timer with no task, which leaves with what it is for."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import uvloop

from aneuron import Engine
from aneuron.server.watch.lag import LoopLag
from aneuron.server.watch.metrics import Metrics
from aneuron.testing import VirtualClockLoop, count_engine, run_virtual
from tests.support import until

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class StandIn:
    """An engine as far as its loop is concerned."""

    loop: asyncio.AbstractEventLoop
    is_open: bool = True


def test_ten_times_a_second_and_never_late_in_virtual_time() -> None:
    async def main() -> LoopLag:
        lag = LoopLag(StandIn(asyncio.get_running_loop()))
        lag.start()
        lag.start()  # one timer
        await asyncio.sleep(2.05)
        return lag

    lag = run_virtual(main())
    assert lag.lateness.num_values == 20
    assert lag.max_s == pytest.approx(0.0, abs=1e-9)


async def test_a_blocked_loop_is_late() -> None:
    lag = LoopLag(StandIn(asyncio.get_running_loop()))
    lag.start()
    time.sleep(0.3)
    await until(lambda: lag.lateness.num_values > 0)
    assert 0.15 < lag.last_s == lag.max_s < 5
    await until(lambda: lag.lateness.num_values > 1)
    assert lag.last_s < lag.max_s
    assert lag.lateness.total >= lag.max_s


def test_it_stops_with_the_engine_and_starts_again() -> None:
    async def main() -> None:
        engine = StandIn(asyncio.get_running_loop())
        lag = LoopLag(engine)
        lag.start()
        engine.is_open = False
        await asyncio.sleep(0.5)
        assert not lag.is_running
        assert lag.lateness.num_values == 1
        lag.start()  # a scrape of a closed engine
        assert not lag.is_running
        engine.is_open = True
        lag.start()
        await asyncio.sleep(0.25)
        assert lag.lateness.num_values == 3

    run_virtual(main())


def test_an_engine_on_another_loop() -> None:
    async def some_time(lag: LoopLag, engine: StandIn) -> None:
        engine.loop = asyncio.get_running_loop()
        lag.start()
        await asyncio.sleep(0.25)

    lag = LoopLag(engine := StandIn(asyncio.new_event_loop()))
    engine.loop.close()
    lag.start()  # outside any loop
    assert not lag.is_running
    for _ in range(2):  # the first loop closes with a timer on it
        run_virtual(some_time(lag, engine))
    assert lag.lateness.num_values == 4


def test_a_timer_of_a_loop_that_the_engine_has_left_is_not_counted() -> None:
    async def begin(lag: LoopLag, engine: StandIn) -> None:
        engine.loop = asyncio.get_running_loop()
        lag.start()

    one, other = VirtualClockLoop(), VirtualClockLoop()
    lag = LoopLag(engine := StandIn(one))
    for loop in (one, other):
        loop.run_until_complete(begin(lag, engine))
    one.run_until_complete(asyncio.sleep(1))
    assert lag.lateness.num_values == 0
    other.run_until_complete(asyncio.sleep(0.25))
    assert lag.lateness.num_values == 2
    one.close()
    other.close()


async def test_nothing_on_a_loop_that_is_not_the_engines() -> None:
    other = asyncio.new_event_loop()
    lag = LoopLag(StandIn(other))
    lag.start()
    assert not lag.is_running
    other.close()


def test_it_goes_with_its_app() -> None:
    async def main() -> int:
        lag = LoopLag(StandIn(asyncio.get_running_loop()))
        lag.start()
        await asyncio.sleep(0.25)
        gone = weakref.ref(lag)
        del lag
        gc.collect()
        assert gone() is None  # the timer does not hold it
        await asyncio.sleep(1)
        return len(getattr(asyncio.get_running_loop(), "_scheduled"))  # noqa: B009

    assert run_virtual(main()) == 0


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_closes_silently_with_a_timer_on_it(run: Callable[..., None]) -> None:
    kept: list[LoopLag] = []

    async def main() -> None:
        kept.append(LoopLag(StandIn(asyncio.get_running_loop())))
        kept[0].start()
        assert kept[0].is_running

    run(main())
    kept.clear()
    gc.collect()  # a warning here would be an error


def runs(metrics: Metrics) -> bool:
    return metrics.lag.is_running


async def test_requests_and_scrapes_start_it() -> None:
    async with count_engine() as engine:
        asked, scraped = Metrics(engine, "m"), Metrics(engine, "m")
        assert not runs(asked)
        asked.received("chat")
        await scraped.render(None)
        assert runs(asked)
        assert runs(scraped)
    await until(lambda: not runs(asked))
    closed = Metrics(Engine("sim:count"), "m")
    await closed.render(None)
    assert not runs(closed)
