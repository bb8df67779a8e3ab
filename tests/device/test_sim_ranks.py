"""The simulated device as a rank: launches that nobody reads, siblings, skew."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron.device.sim import Fault, SimDevice
from aneuron.errors import ConfigError, DeviceError, DeviceLost, OutOfMemory
from tests.device.steps import (
    ENQUEUE_S,
    GAP_S,
    PROGRAM_S,
    exactly,
    fault_of,
    gone,
    launch,
    started,
    threads_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.device.steps import Clock

# ── unread launches ─────────────────────────────────────────────────────────────────────

both_ways_to_read = pytest.mark.parametrize("gap_s", [0.0, GAP_S])


@both_ways_to_read
async def test_a_discarded_value_is_never_copied(gap_s: float) -> None:
    async with started(gap_s=gap_s) as device:
        first = launch(device, read=False)
        fed = launch(device, first, read=False)
        last = launch(device, device.gather(fed, np.array([1, 0], np.int32)), read=False)
        for future in (last, first, fed):
            await future.discard()
        assert device.num_reads == 0
        assert device.num_steps == 3
        assert (await launch(device, last)).tolist() == [6, 5]
        assert device.num_reads == 1


@both_ways_to_read
@pytest.mark.parametrize("ended_first", [True, False])
async def test_an_unread_value_is_copied_once_when_asked_for(
    gap_s: float, ended_first: bool
) -> None:
    async with started(gap_s=gap_s, latency=0.001) as device:
        future = launch(device, read=False)
        if ended_first:
            await future.discard()

        async def get() -> Any:
            return (await future).tolist()

        assert list(await asyncio.gather(get(), get(), get())) == [[2, 3]] * 3
        assert await get() == [2, 3]
        assert device.num_reads == 1
        assert future.read_s >= future.device_end_s + gap_s - min(gap_s, ENQUEUE_S)


async def test_the_read_back_of_a_late_question_starts_when_it_is_asked(clock: Clock) -> None:
    async with started(latency=PROGRAM_S, gap_s=GAP_S) as device:
        future = launch(device, read=False)
        await future.discard()
        clock.now_s = asked_s = clock.now_s + 1.0
        await future
        assert clock.now_s == pytest.approx(asked_s + GAP_S - ENQUEUE_S, rel=0, abs=1e-9)


async def test_word_of_an_end_does_not_wait_behind_read_backs() -> None:
    async with started(gap_s=1.0) as device:
        read = launch(device)
        async with asyncio.timeout(0.5):
            await launch(device, read=False).discard()
        assert not read.done()


@both_ways_to_read
async def test_a_fault_of_an_unread_launch(gap_s: float) -> None:
    async with started(gap_s=gap_s, faults=[Fault(1, 4)]) as device:
        failed = launch(device, read=False)
        fed = launch(device, failed, read=False)
        with pytest.raises(OutOfMemory):
            await fed.discard()
        for future in (failed, fed):
            assert type(await fault_of(future)) is OutOfMemory
        assert (await launch(device)).tolist() == [2, 3]
        assert device.num_reads == 1


@both_ways_to_read
async def test_a_fault_of_an_unread_launch_that_was_asked_for(gap_s: float) -> None:
    """The question reaches the device behind the fault, and is no fault of its own."""
    async with started(gap_s=gap_s, latency=0.01, faults=[Fault(1, 1003)]) as device:
        failed = launch(device, read=False)
        assert type(await fault_of(failed)) is DeviceError
        assert (await launch(device)).tolist() == [2, 3]


async def test_asking_a_device_that_is_lost_or_closed() -> None:
    async with started(faults=[Fault(3, 101)]) as device:
        kept, other = launch(device, read=False), launch(device, read=False)
        await other.discard()
        assert type(await fault_of(launch(device))) is DeviceLost
        assert type(await fault_of(kept)) is DeviceLost
        await other.discard()
    fault = await fault_of(other)
    assert type(fault) is DeviceLost
    assert "closed" in str(fault)


async def test_a_full_queue_is_tried_again() -> None:
    async with started(faults=[Fault(2, 7)]) as device:
        futures = [launch(device, read=n != 1) for n in range(3)]
        for future in futures:
            assert (await future).tolist() == [2, 3]
        assert (device.num_queue_full, device.num_steps, device.num_reads) == (1, 3, 3)


# ── ranks ───────────────────────────────────────────────────────────────────────────────


def ranks(num_ranks: int, **options: Any) -> list[SimDevice]:
    device = SimDevice(**options)
    return [device.for_rank(rank, num_ranks) for rank in range(num_ranks)]


async def test_siblings_are_made_once_and_run_apart() -> None:
    await gone()
    devices = ranks(3, latency=0.001, gap_s=GAP_S)
    assert devices[0].ranks == devices
    assert [device.for_rank(r, 3) for r, device in enumerate([devices[0]] * 3)] == devices
    assert len(set(map(id, devices))) == 3
    assert [device.rank for device in devices] == [0, 1, 2]
    assert {device.gap_s for device in devices} == {GAP_S}
    async with started(*devices):
        names = ["sim", "sim-rank1", "sim-rank1-reader", "sim-rank2", "sim-rank2-reader"]
        assert threads_of() == [*names, "sim-reader"]
        futures = [launch(device, read=device.rank == 0) for device in devices]
        assert (await futures[0]).tolist() == [2, 3]
        for future in futures[1:]:
            await future.discard()
            assert future.device_end_s - future.device_start_s == pytest.approx(0.001)
        assert [device.num_reads for device in devices] == [1, 0, 0]
        assert [device.num_steps for device in devices] == [1, 1, 1]
        with pytest.raises(ConfigError, match="sim-rank2"):
            devices[2].start(asyncio.get_running_loop())
    await gone()


async def test_one_rank_is_no_other_device() -> None:
    device = SimDevice()
    assert device.for_rank(0, 1) is device
    assert device.ranks == [device]


async def test_faults_are_of_one_rank() -> None:
    devices = ranks(3, faults=[Fault(1, 4), Fault(2, 101, rank=2)])
    async with started(*devices):
        first = [launch(device, read=False) for device in devices]
        second = [launch(device, read=False) for device in devices]
        for future in (first[1], first[2], second[0], second[1]):
            await future.discard()
        assert type(await fault_of(first[0])) is OutOfMemory
        fault = await fault_of(second[2])
        assert type(fault) is DeviceLost
        assert fault.device == "sim-rank2"
        assert type(await fault_of(launch(devices[2]))) is DeviceLost
        assert (await launch(devices[1])).tolist() == [2, 3]


async def test_skew_delays_the_ends_of_later_ranks_and_does_not_add_up(clock: Clock) -> None:
    skew_s = 0.00008
    devices = ranks(5, latency=PROGRAM_S, skew_s=skew_s)
    async with started(*devices):
        first_s = clock.now_s
        futures = [[launch(device) for device in devices] for _ in range(6)]
        for step, of_ranks in enumerate(futures):
            for future in of_ranks:
                await future
            ends = [future.device_end_s for future in of_ranks]
            base_s = first_s + (step + 1) * PROGRAM_S
            assert ends == exactly(*(base_s + skew_s * rank / 4 for rank in range(5)))
        assert all(device.idle_s == 0.0 for device in devices)


async def test_random_skew_is_drawn_at_each_program(clock: Clock) -> None:
    drawn: list[tuple[int, float]] = []
    sizes = iter([0.001, 0.006, 0.0, 0.002])

    def skew_s(rank: int) -> float:
        drawn.append((rank, next(sizes)))
        return drawn[-1][1]

    device = SimDevice(latency=PROGRAM_S, skew_s=skew_s).for_rank(1, 2)
    async with started(device):
        first_s = clock.now_s
        futures = [launch(device) for _ in range(4)]
        for future in futures:
            await future
        assert [rank for rank, _ in drawn] == [1, 1, 1, 1]
        # The third would have ended before the second did: it ends at once.
        ends = [first_s + at for at in (0.005, 0.014, 0.014, 0.018)]
        assert [future.device_end_s for future in futures] == exactly(*ends)
        for one, following in pairwise(futures):
            assert following.device_start_s == one.device_end_s
        assert device.idle_s == 0.0


@pytest.mark.parametrize("make", [lambda: 0.001, lambda: lambda _: 0.001])
async def test_a_sibling_takes_as_long(clock: Clock, make: Callable[[], Any]) -> None:
    device = SimDevice(latency=make()).for_rank(1, 2)
    async with started(device):
        future = launch(device)
        await future
        assert future.device_end_s - future.device_start_s == pytest.approx(0.001)
