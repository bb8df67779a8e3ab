"""The simulated device: its modelled timeline, the gap, its threads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.device.sim import Fault, SimDevice
from aneuron.errors import DeviceError, DeviceLost, LaunchFailed
from tests.device.steps import (
    ENQUEUE_S,
    GAP_S,
    PROGRAM_S,
    Inputs,
    Part,
    Program,
    exactly,
    fault_of,
    gone,
    launch,
    started,
    threads_of,
    times,
)

if TYPE_CHECKING:
    from tests.device.steps import Clock

# ── the timeline ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("gap_s", [0.0, 0.00005, GAP_S])
async def test_queued_ahead_no_gap_shows(clock: Clock, gap_s: float) -> None:
    async with started(latency=PROGRAM_S, gap_s=gap_s) as device:
        first_s = clock.now_s + min(gap_s, ENQUEUE_S)
        futures = [launch(device) for _ in range(4)]
        for future in futures:
            assert (await future).tolist() == [2, 3]
        edges = [first_s + n * PROGRAM_S for n in (0, 1, 1, 2, 2, 3, 3, 4)]
        assert times(futures) == exactly(*edges)
        assert device.idle_s == 0.0
        assert device.busy_s == pytest.approx(4 * PROGRAM_S)
        assert device.end_s == futures[-1].device_end_s


@pytest.mark.parametrize("gap_s", [0.0, 0.00005, GAP_S])
async def test_awaited_one_by_one_the_whole_gap_shows(clock: Clock, gap_s: float) -> None:
    async with started(latency=PROGRAM_S, gap_s=gap_s) as device:
        first_s = clock.now_s + min(gap_s, ENQUEUE_S)
        futures = []
        for _ in range(4):
            futures.append(launch(device))
            await futures[-1]
        step_s = PROGRAM_S + gap_s
        starts = [first_s + n * step_s for n in range(4)]
        assert times(futures) == exactly(*(at for s in starts for at in (s, s + PROGRAM_S)))
        assert device.idle_s == pytest.approx(3 * gap_s, abs=1e-9)


async def test_oversleeping_does_not_move_the_timeline(clock: Clock) -> None:
    clock.late_s = PROGRAM_S / 2
    async with started(latency=PROGRAM_S, gap_s=GAP_S) as device:
        first_s = clock.now_s + ENQUEUE_S
        futures = [launch(device) for _ in range(5)]
        await futures[-1]
        assert clock.now_s > futures[-1].device_end_s + GAP_S, "it did oversleep"
        edges = [first_s + n * PROGRAM_S for n in (0, 1, 1, 2, 2, 3, 3, 4, 4, 5)]
        assert times(futures) == exactly(*edges)
        assert device.idle_s == 0.0


async def test_a_value_arrives_after_its_read_back_and_holds_nothing_up() -> None:
    """In real time: the next program starts at the end of the first, not after its read-back."""
    async with started(latency=0.002, gap_s=0.02) as device:
        first, second = launch(device), launch(device)
        await second
        assert first.read_s - first.device_end_s >= 0.02 - ENQUEUE_S
        assert second.device_start_s == first.device_end_s
        assert second.read_s - first.read_s < 0.02, "read-backs overlap"


async def test_failed_programs_take_their_time_too(clock: Clock) -> None:
    async with started(latency=PROGRAM_S, faults=[Fault(2, 1003)]) as device:
        first_s = clock.now_s
        futures = [launch(device) for _ in range(3)]
        await futures[2]
        assert type(await fault_of(futures[1])) is DeviceError
        edges = [first_s + n * PROGRAM_S for n in (0, 1, 1, 2, 2, 3)]
        assert times(futures) == exactly(*edges)


async def test_the_pause_between_two_lives_is_not_idle_time(clock: Clock) -> None:
    device = SimDevice(latency=PROGRAM_S)
    for life in (1, 2):
        async with started(device):
            await launch(device)
            clock.sleep(1.0)
            await launch(device)
            assert device.idle_s == pytest.approx(1.0 * life)
        clock.sleep(5.0)


@pytest.mark.parametrize("where", ["input_ids", "writes.slots"])
@pytest.mark.parametrize("read", [True, False])
async def test_inputs_written_while_the_program_runs(where: str, read: bool) -> None:
    async with started(latency=0.05) as device:
        inputs: Any = Inputs(writes=Part())
        future = device.launch(Program(), inputs, read=read)
        while device.num_steps == 0:  # it starts
            await asyncio.sleep(0.005)
        array = inputs.input_ids if where == "input_ids" else inputs.writes.slots
        array += 1
        with pytest.raises(LaunchFailed, match="1002"):
            await (future if read else future.discard())
        assert (await launch(device, writes=Part())).tolist() == [2, 3]


# ── threads ─────────────────────────────────────────────────────────────────────────────


async def test_the_reader_thread_lives_as_long_as_the_launch_thread() -> None:
    await gone()
    device = SimDevice(gap_s=GAP_S)
    for _ in range(2):
        async with started(device):
            assert threads_of() == ["sim", "sim-reader"]
            unread, read = launch(device, read=False), launch(device)
        assert read.done(), "close lets what is queued end first"
        await unread.discard()
        await gone()


async def test_without_a_read_back_there_is_no_reader_thread() -> None:
    await gone()
    async with started(gap_s=ENQUEUE_S) as device:
        assert threads_of() == ["sim"]
        await launch(device)
    await gone()


@pytest.mark.parametrize("gap_s", [0.0, GAP_S])
async def test_a_device_that_hangs_leaves_its_threads_behind_and_starts_anew(
    gap_s: float,
) -> None:
    await gone()
    device = SimDevice(gap_s=gap_s, faults=[Fault(2, "hang")])
    device.start(asyncio.get_running_loop())
    assert (await launch(device)).tolist() == [2, 3]
    hanging = launch(device)
    closed = device.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await closed
    async with started(device):
        assert len(threads_of()) == (4 if gap_s else 2)
        assert (await launch(device)).tolist() == [2, 3]
        device._never.set()  # the old threads end their own life, not the new one's
        assert type(await fault_of(hanging)) is DeviceLost
        await closed
        assert (await launch(device)).tolist() == [2, 3]
    await gone()


async def test_a_value_is_not_read_on_the_loop_s_thread() -> None:
    async with started() as device:
        future = launch(device)
        await future
        with pytest.raises(RuntimeError, match="event loop's thread"):
            future.device_value.read()
