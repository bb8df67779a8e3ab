"""Alive and ready: what each state of the engine and the server says."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field

from aneuron import DeviceLost, Engine
from aneuron.server.watch.health import body, health, ready
from aneuron.testing import Fault, count_engine
from tests.support import outcomes, start, until


@dataclass
class Settings:
    stall_s: float = 90.0


@dataclass
class State:
    engine: Engine
    config: Settings = field(default_factory=Settings)
    is_draining: bool = False


async def test_from_new_to_closed() -> None:
    engine = Engine("sim:count")
    state = State(engine)
    assert health(state) == ready(state) == (False, "the engine is not open")
    async with engine:
        assert health(state) == ready(state) == (True, "ok")
        await engine.generate("a", max_tokens=5)
        assert health(state) == (True, "ok")
    assert health(state) == ready(state) == (False, "the engine is not open")
    async with engine:
        assert health(state) == ready(state) == (True, "ok")


async def test_draining_is_alive_and_not_ready() -> None:
    async with count_engine() as engine:
        state = State(engine, is_draining=True)
        assert health(state) == (True, "ok")
        assert ready(state) == (False, "the server is draining")


async def test_case_63_device_lost() -> None:
    async with count_engine(faults=[Fault(10, 101)], max_num_seqs=5) as engine:
        state = State(engine)
        answers = await outcomes([start(engine, 10 * at) for at in range(1, 9)])
        assert all(isinstance(answer, DeviceLost) for answer in answers)
        await until(lambda: not health(state)[0])
        assert health(state) == (False, "the engine has failed: device_lost")
        assert ready(state) == (False, "the engine is not open")
    assert health(state) == (False, "the engine has failed: device_lost")  # closed, and why


async def test_no_step_while_work_waits() -> None:
    resume = threading.Event()

    def stuck(_: object) -> float:
        resume.wait()
        return 0.0

    async with count_engine(latency=stuck) as engine:
        state = State(engine, Settings(stall_s=0.05))
        assert health(state)[0]  # idle is no stall
        stream = start(engine, 10, 3)
        patient = State(engine)
        try:
            await until(lambda: not health(state)[0])
            assert "while work waits" in health(state)[1]
            assert health(patient) == (True, "ok")
            assert ready(state) == (True, "ok")  # it takes requests; they wait
        finally:
            resume.set()
        await stream
        await engine.wait_idle()
        assert health(state) == (True, "ok")


async def test_a_probe_costs_nothing() -> None:
    async with count_engine() as engine:
        state = State(engine)
        streams = [start(engine, 10 * at, 1000) for at in range(1, 5)]
        await anext(streams[0])
        best_s = min(timed(state) for _ in range(20))
        assert best_s < 100e-6
        await asyncio.gather(*(stream.aclose() for stream in streams))


def timed(state: State) -> float:
    began_s = time.perf_counter()
    body(health(state))
    body(ready(state))
    return time.perf_counter() - began_s


def test_bodies() -> None:
    assert json.loads(body((True, "ok"))) == {"status": "ok", "reason": "ok"}
    said = json.loads(body((False, 'it "failed"')))
    assert said == {"status": "unavailable", "reason": 'it "failed"'}
