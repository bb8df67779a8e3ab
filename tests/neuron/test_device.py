"""`NeuronDevice` over a runtime that the test plays by hand: who launches, who reads, when."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import ConfigError, DeviceError, DeviceLost
from aneuron.device.neuron import NeuronDevice
from tests.support import some_turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Launch:
    """A launch that ends when the test says so."""

    def __init__(self, ids: Any, log: list[str], name: str) -> None:
        self.ids = np.asarray(ids, np.int32)
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.log, self.name = log, name
        self.asked: SimpleQueue[str] = SimpleQueue()  # of whoever waits

    def read(self) -> np.ndarray:
        self.wait()
        self.log.append(f"read {self.name}")
        return self.ids

    def wait(self) -> None:
        self.asked.put(threading.current_thread().name)
        self.ended.wait()
        if self.error is not None:
            raise self.error

    def gather(self, order: np.ndarray) -> Launch:
        return self.ended_one(self.ids[order])

    def ended_one(self, ids: Any) -> Launch:
        made = Launch(ids, self.log, f"gathered {self.name}")
        made.ended.set()
        return made


class Runtime:
    """Makes launches; the device asks nothing else of it."""

    queue_depth = 8
    index = 0

    def __init__(self) -> None:
        self.closed_by: list[str] = []  # threads
        self.cores: list[int] = []

    @property
    def is_closed(self) -> bool:
        return bool(self.closed_by)

    def at(self, index: int) -> Runtime:
        self.cores.append(index)
        return Runtime()

    def memory_stats(self) -> Any:
        return {"total_bytes": 1000, "allocated_bytes.all.current": 200}

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


class Program:
    """An executable whose launches the test ends."""

    name = "step"
    sampled_dtype = "int32"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.launches: list[Launch] = []
        self.made: SimpleQueue[Launch] = SimpleQueue()
        self.refusals: list[Exception] = []

    def __call__(self, inputs: Any, fed: Launch | None) -> Launch:
        if self.refusals:
            raise self.refusals.pop(0)
        ids = inputs.input_ids if fed is None else fed.ids
        one = Launch(ids + 1, self.log, str(len(self.launches)))
        self.log.append(f"launch {one.name}")
        self.launches.append(one)
        self.made.put(one)
        return one

    async def next(self) -> Launch:
        return await asyncio.to_thread(self.made.get, timeout=5)


class Inputs:
    num_sampled = 2

    def __init__(self, input_ids: Any) -> None:
        self.input_ids = input_ids


def inputs(first: int = 0) -> Any:
    return Inputs(np.array([first, first + 1], np.int32))


@asynccontextmanager
async def started(kind: Any = "nxd") -> AsyncIterator[tuple[NeuronDevice, Program, Runtime]]:
    runtime, program = Runtime(), Program()
    connect: Any = lambda: runtime  # noqa: E731
    device = NeuronDevice(connect, kind=kind)
    assert device.raw is connect()
    device.start(asyncio.get_running_loop())
    yield device, program, runtime
    for launch in program.launches:
        launch.ended.set()
    await device.close()


async def test_a_launch_is_made_on_one_thread_and_read_on_another() -> None:
    async with started() as (device, program, _):
        future = device.launch(program, inputs(4))
        one = await program.next()
        assert await asyncio.to_thread(one.asked.get, timeout=5) == "aneuron-neuron-reader"
        assert not future.done()
        one.ended.set()
        assert (await future).tolist() == [5, 6]
        assert future.device_start_s <= future.device_end_s <= future.read_s


async def test_the_next_launch_is_fed_before_the_first_has_ended() -> None:
    async with started() as (device, program, _):
        first = device.launch(program, inputs(4))
        second = device.launch(program, Inputs(first))  # type: ignore[arg-type]
        await program.next()
        two = await program.next()
        assert two.ids.tolist() == [6, 7]
        assert not first.done()
        for one in program.launches:
            one.ended.set()
        assert (await second).tolist() == [6, 7]
        assert first.device_end_s <= second.device_start_s


async def test_a_third_traced_launch_waits_until_the_first_is_read() -> None:
    async with started() as (device, program, _):
        futures = [device.launch(program, inputs(n)) for n in range(3)]
        one, two = await program.next(), await program.next()
        await asyncio.to_thread(one.asked.get, timeout=5)
        assert program.log == ["launch 0", "launch 1"]
        one.ended.set()
        await futures[0]
        three = await program.next()
        assert program.log == ["launch 0", "launch 1", "read 0", "launch 2"]
        two.ended.set()
        three.ended.set()
        await futures[2]


async def test_native_launches_stay_one_below_the_queue() -> None:
    async with started("native") as (device, program, _):
        futures = [device.launch(program, inputs(n)) for n in range(8)]
        seven = [await program.next() for _ in range(7)]
        await asyncio.to_thread(seven[0].asked.get, timeout=5)
        assert len(program.launches) == 7
        seven[0].ended.set()
        await program.next()
        for one in program.launches:
            one.ended.set()
        await futures[7]


@pytest.mark.parametrize("told", ["nrt status 7", "execution queue full"])
async def test_a_full_queue_is_nobodys_fault(told: str) -> None:
    async with started() as (device, program, _):
        first = device.launch(program, inputs(0))
        one = await program.next()
        program.refusals = [RuntimeError(told)]
        second = device.launch(program, inputs(9))
        await asyncio.to_thread(one.asked.get, timeout=5)
        assert len(program.launches) == 1
        one.ended.set()
        await first
        (await program.next()).ended.set()
        assert (await second).tolist() == [10, 11]


async def test_a_queue_that_is_full_of_nothing_is_a_refused_launch() -> None:
    async with started() as (device, program, _):
        program.refusals = [RuntimeError("nrt status 7")] * 9
        with pytest.raises(DeviceError, match="QUEUE_FULL"):
            await device.launch(program, inputs())
        assert not program.refusals


async def test_a_late_error_is_that_of_its_step() -> None:
    async with started() as (device, program, _):
        first = device.launch(program, inputs(0))
        one = await program.next()
        one.error = RuntimeError("nrt status 1003")
        one.ended.set()
        with pytest.raises(DeviceError, match="NaN") as raised:
            await first
        assert not isinstance(raised.value, DeviceLost)
        second = device.launch(program, inputs(5))
        (await program.next()).ended.set()
        assert (await second).tolist() == [6, 7]


@pytest.mark.parametrize("kind", ["native", "nxd"])
async def test_case_91_a_wait_for_a_future_that_times_out_costs_nobody_its_value(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(kind) as (device, program, _):
        future = device.launch(program, inputs(4))
        one = await program.next()
        other = asyncio.create_task(get(future))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await future
        one.ended.set()
        assert (await other).tolist() == [5, 6]
        assert (await future).tolist() == [5, 6]
        failing = device.launch(program, inputs(4))
        two = await program.next()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await failing
        two.error = RuntimeError("nrt status 1003")
        two.ended.set()
        await asyncio.wait([asyncio.create_task(get(failing))])
    gc.collect()
    assert not [one.message for one in caplog.records if one.name == "asyncio"]


async def get(future: Any) -> Any:
    try:
        return await future
    except DeviceError as error:
        return error


async def test_what_failed_feeds_nothing() -> None:
    async with started() as (device, program, _):
        first = device.launch(program, inputs(0))
        one = await program.next()
        one.error = RuntimeError("nrt status 1006")
        one.ended.set()
        with pytest.raises(DeviceError):
            await first
        with pytest.raises(DeviceError, match="1006"):
            await device.launch(program, Inputs(first))  # type: ignore[arg-type]
        assert len(program.launches) == 1


async def test_an_unread_launch_is_waited_for_and_read_when_somebody_asks() -> None:
    async with started() as (device, program, _):
        future = device.launch(program, inputs(2), read=False)
        one = await program.next()
        one.ended.set()
        await future.discard()
        assert not future.done()
        assert "read 0" not in program.log
        assert (await future).tolist() == [3, 4]


async def test_a_gather_brings_rows_into_another_order() -> None:
    async with started() as (device, program, _):
        first = device.launch(program, inputs(2))
        one = await program.next()
        gathered = device.gather(first, np.array([1, 0], np.int32))
        fed = device.launch(program, Inputs(gathered))  # type: ignore[arg-type]
        one.ended.set()
        (await program.next()).ended.set()
        assert (await fed).tolist() == [5, 4]


async def test_close_ends_queued_work_first_and_then_the_runtime() -> None:
    async with started() as (device, program, runtime):
        future = device.launch(program, inputs(2))
        closed = device.close()
        one = await program.next()
        await some_turns()
        assert not closed.done()
        assert not runtime.is_closed
        one.ended.set()
        await closed
        assert runtime.closed_by == ["aneuron-neuron-reader"]
        assert (await future).tolist() == [3, 4]
        device.start(asyncio.get_running_loop())  # for the end of the test


async def test_the_runtime_is_one_engines_alone() -> None:
    async with started() as (device, _, _):
        with pytest.raises(ConfigError, match="another engine"):
            _ = device.raw


async def test_each_native_rank_has_a_core_and_threads_of_its_own() -> None:
    async with started("native") as (device, _, runtime):
        pass
    sibling = device.for_rank(1, 2)
    assert sibling.label == "neuron-rank1"
    _ = sibling.raw
    assert runtime.cores == [1]


def test_traced_programs_span_their_ranks_themselves() -> None:
    device = NeuronDevice(Runtime, kind="nxd")  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as raised:
        device.for_rank(1, 2)
    assert raised.value.param == "num_ranks"


def test_a_device_that_never_started_gives_its_cores_back() -> None:
    runtime: Any = Runtime()
    device = NeuronDevice(lambda: runtime, kind="native")
    device.disconnect()  # nothing is connected yet
    assert device.memory_budget() == 640  # four fifths of what is free
    device.disconnect()
    assert runtime.is_closed


def test_cores_that_cannot_be_had_are_a_typed_error() -> None:
    def connect() -> Any:
        raise RuntimeError("NeuronCore(s) not available - Requested:1 Available:0")

    with pytest.raises(DeviceLost, match="another process has the NeuronCores"):
        _ = NeuronDevice(connect, kind="native").raw
