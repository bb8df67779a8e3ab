"""The simulated device in virtual time: the timeline of real time, and no thread."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from aneuron.device.cpu import CpuDevice
from aneuron.device.sim import Fault, Latency, SimDevice
from aneuron.engine import Engine
from aneuron.errors import ConfigError, DeviceError, DeviceLost, LaunchFailed, OutOfMemory
from aneuron.testing import Count, Deadlock, Sum, no_leaks, run_virtual, sim_engine
from tests.device.steps import (
    ENQUEUE_S,
    GAP_S,
    PROGRAM_S,
    Inputs,
    Part,
    Program,
    exactly,
    fault_of,
    launch,
    started,
    threads_of,
    times,
)
from tests.support import after, device_of, every_carry, start, sum_reference


def now() -> float:
    return asyncio.get_running_loop().time()


# ── the timeline ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("gap_s", [0.0, 0.00005, GAP_S])
def test_queued_ahead_no_gap_shows(gap_s: float) -> None:
    async def main() -> None:
        async with started(latency=PROGRAM_S, gap_s=gap_s) as device:
            await asyncio.sleep(1)
            first_s = 1 + min(gap_s, ENQUEUE_S)
            futures = [launch(device) for _ in range(4)]
            for future in futures:
                assert (await future).tolist() == [2, 3]
                assert future.read_s == now()
            edges = [first_s + n * PROGRAM_S for n in (0, 1, 1, 2, 2, 3, 3, 4)]
            assert times(futures) == exactly(*edges)
            reads = [future.read_s - future.device_end_s for future in futures]
            assert reads == exactly(*[max(0.0, gap_s - ENQUEUE_S)] * 4)
            assert device.idle_s == 0.0
            assert device.busy_s == pytest.approx(4 * PROGRAM_S)
            assert device.end_s == futures[-1].device_end_s
            assert (device.num_steps, device.num_rows, device.num_reads) == (4, 8, 4)

    run_virtual(main())


@pytest.mark.parametrize("gap_s", [0.0, 0.00005, GAP_S])
def test_awaited_one_by_one_the_whole_gap_shows(gap_s: float) -> None:
    async def main() -> None:
        async with started(latency=PROGRAM_S, gap_s=gap_s) as device:
            futures = []
            for _ in range(4):
                futures.append(launch(device))
                await futures[-1]
            starts = [min(gap_s, ENQUEUE_S) + n * (PROGRAM_S + gap_s) for n in range(4)]
            assert times(futures) == exactly(*(at for s in starts for at in (s, s + PROGRAM_S)))
            assert device.idle_s == pytest.approx(3 * gap_s, abs=1e-9)

    run_virtual(main())


def test_a_program_reads_its_inputs_when_it_starts() -> None:
    async def main() -> None:
        async with started(latency=PROGRAM_S) as device:
            first, inputs = launch(device), Inputs()
            second = device.launch(Program(), inputs, read=True)  # type: ignore[arg-type]
            inputs.input_ids += 10
            assert device.num_steps == 0, "a launch runs nothing, like one that a thread takes"
            assert (await first).tolist() == [2, 3]
            assert (await second).tolist() == [12, 13]

    run_virtual(main())


@pytest.mark.parametrize("where", ["input_ids", "writes.slots"])
@pytest.mark.parametrize("read", [True, False])
def test_inputs_written_while_the_program_runs(where: str, read: bool) -> None:
    async def main() -> None:
        async with started(latency=PROGRAM_S) as device:
            inputs: Any = Inputs(writes=Part())
            future = device.launch(Program(), inputs, read=read)
            await asyncio.sleep(PROGRAM_S / 2)
            array = inputs.input_ids if where == "input_ids" else inputs.writes.slots
            array += 1
            with pytest.raises(LaunchFailed, match="1002"):
                await (future if read else future.discard())
            assert now() == PROGRAM_S
            assert (await launch(device, writes=Part())).tolist() == [2, 3]

    run_virtual(main())


def test_the_pause_between_two_lives_is_not_idle_time_and_a_new_loop_begins_at_zero() -> None:
    device = SimDevice(latency=PROGRAM_S)

    async def life(number: int) -> None:
        async with started(device):
            assert (await launch(device)).tolist() == [2, 3]
            await asyncio.sleep(1.0)
            future = launch(device)
            await future
            assert device.idle_s == pytest.approx(1.0 * number)
            assert future.device_end_s == device.end_s

    async def two_lives() -> None:
        await life(1)
        await asyncio.sleep(5)
        await life(2)
        assert device.end_s == pytest.approx(7 + 4 * PROGRAM_S)

    async def real_life() -> None:
        begun_s = time.monotonic()
        async with started(device):
            await launch(device)
            assert begun_s <= device.end_s - PROGRAM_S <= time.monotonic()

    run_virtual(two_lives())
    run_virtual(life(3))
    assert device.end_s == pytest.approx(1 + 2 * PROGRAM_S)
    asyncio.run(real_life())
    assert device.idle_s == pytest.approx(3.0)


# ── values that are asked for later ─────────────────────────────────────────────────────

both_ways_to_read = pytest.mark.parametrize("gap_s", [0.0, GAP_S])


@both_ways_to_read
def test_a_discarded_value_is_never_copied(gap_s: float) -> None:
    async def main() -> None:
        async with started(gap_s=gap_s, latency=PROGRAM_S) as device:
            first = launch(device, read=False)
            fed = launch(device, first, read=False)
            gathered = device.gather(fed, np.array([1, 0], np.int32))
            last = launch(device, gathered, read=False)
            for future in (first, fed, last):
                await future.discard()
                assert now() == future.device_end_s
            assert gathered.device_start_s == gathered.device_end_s == fed.device_end_s
            assert (device.num_reads, device.num_steps) == (0, 3)
            assert (await launch(device, last)).tolist() == [6, 5]
            assert device.num_reads == 1

    run_virtual(main())


@both_ways_to_read
@pytest.mark.parametrize("asked_s", [0.0, PROGRAM_S / 2, 1.0])
def test_an_unread_value_is_copied_once_when_asked_for(gap_s: float, asked_s: float) -> None:
    async def main() -> None:
        async with started(gap_s=gap_s, latency=PROGRAM_S) as device:
            future = launch(device, read=False)

            async def get() -> Any:
                return (await future).tolist()

            await asyncio.sleep(asked_s)
            assert list(await asyncio.gather(get(), get(), get())) == [[2, 3]] * 3
            readback_s = gap_s - min(gap_s, ENQUEUE_S)
            assert now() == pytest.approx(max(future.device_end_s, asked_s) + readback_s)
            assert future.read_s == now()
            assert device.num_reads == 1

    run_virtual(main())


def test_the_reader_is_serial_and_read_backs_overlap() -> None:
    async def main() -> None:
        async with started(latency=0.002, gap_s=0.02) as device:
            unread, read = launch(device, read=False), launch(device)
            await asyncio.sleep(0.001)
            # The question waits behind `read` on the device, and its copy behind that one.
            await asyncio.gather(unread, read)
            assert read.read_s == pytest.approx(read.device_end_s + 0.02 - ENQUEUE_S)
            assert unread.read_s == read.read_s
            assert read.device_start_s == unread.device_end_s

    run_virtual(main())


def test_word_of_an_end_does_not_wait_behind_read_backs() -> None:
    async def main() -> None:
        async with started(gap_s=1.0) as device:
            read = launch(device)
            await launch(device, read=False).discard()
            assert now() == ENQUEUE_S
            assert not read.done()
        assert read.done(), "close lets what is queued end first"
        assert now() == pytest.approx(1.0)

    run_virtual(main())


# ── faults ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (2, LaunchFailed),
        (4, OutOfMemory),
        (5, DeviceLost),
        (101, DeviceLost),
        (1003, DeviceError),
        (1006, DeviceError),
    ],
)
@both_ways_to_read
def test_faults_by_kind(gap_s: float, status: int, kind: type[DeviceError]) -> None:
    async def main() -> None:
        async with started(gap_s=gap_s, latency=PROGRAM_S, faults=[Fault(2, status)]) as device:
            first, failed, fed = launch(device), launch(device), launch(device, read=False)
            assert (await first).tolist() == [2, 3]
            assert type(await fault_of(failed)) is kind
            if kind is DeviceLost:
                assert type(await fault_of(fed)) is DeviceLost
                assert type(await fault_of(launch(device))) is DeviceLost, "it stays lost"
                assert device.num_steps == 2
            else:
                await fed.discard()
                edges = [min(gap_s, ENQUEUE_S) + n * PROGRAM_S for n in (0, 1, 1, 2, 2, 3)]
                assert times([first, failed, fed]) == exactly(*edges)
        async with started(device):
            assert (await launch(device)).tolist() == [2, 3], "not in its next life"

    run_virtual(main())


@both_ways_to_read
def test_a_fault_is_inherited_and_the_rest_runs(gap_s: float) -> None:
    async def main() -> None:
        async with started(gap_s=gap_s, faults=[Fault(1, 4)]) as device:
            failed = launch(device, read=False)
            fed = launch(device, failed, read=False)
            with pytest.raises(OutOfMemory):
                await fed.discard()
            for future in (failed, fed, device.gather(fed, np.array([0], np.int32))):
                assert type(await fault_of(future)) is OutOfMemory
            assert (await launch(device)).tolist() == [2, 3]
            assert device.num_reads == 1

    run_virtual(main())


def test_a_full_queue_is_tried_again() -> None:
    async def main() -> None:
        async with started(latency=PROGRAM_S, faults=[Fault(2, 7)]) as device:
            futures = [launch(device, read=n != 1) for n in range(3)]
            for future in futures:
                assert (await future).tolist() == [2, 3]
            assert (device.num_queue_full, device.num_steps, device.num_reads) == (1, 3, 3)
            assert device.end_s == pytest.approx(3 * PROGRAM_S)

    run_virtual(main())


def test_a_device_that_hangs() -> None:
    device = SimDevice(faults=[Fault(2, "hang")])

    async def main() -> None:
        device.start(asyncio.get_running_loop())
        assert (await launch(device)).tolist() == [2, 3]
        hanging = launch(device)
        closed = device.close()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await closed
        async with started(device):
            assert (await launch(device)).tolist() == [2, 3]
        assert not hanging.done()
        await hanging

    with pytest.raises(Deadlock, match=r"at 1000 s"):
        run_virtual(main())


def test_asking_a_device_that_is_closed() -> None:
    async def main() -> None:
        async with started() as device:
            unread = launch(device, read=False)
            await unread.discard()
            with pytest.raises(ConfigError, match="another engine"):
                device.start(asyncio.get_running_loop())
        assert "closed" in str(await fault_of(unread))

    run_virtual(main())


def test_a_device_that_runs_in_real_time_says_so() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="real time"):
            CpuDevice().start(asyncio.get_running_loop())

    run_virtual(main())


# ── ranks ───────────────────────────────────────────────────────────────────────────────


def test_skew_delays_the_ends_of_later_ranks_and_does_not_add_up() -> None:
    skew_s = 0.00008

    async def main() -> None:
        device = SimDevice(latency=PROGRAM_S, skew_s=skew_s)
        devices = [device.for_rank(rank, 5) for rank in range(5)]
        async with started(*devices):
            futures = [[launch(device) for device in devices] for _ in range(6)]
            for step, of_ranks in enumerate(futures):
                for future in of_ranks:
                    await future
                ends = [future.device_end_s for future in of_ranks]
                base_s = (step + 1) * PROGRAM_S
                assert ends == exactly(*(base_s + skew_s * rank / 4 for rank in range(5)))
            assert all(device.idle_s == 0.0 for device in devices)

    run_virtual(main())


@every_carry
def test_an_engine_of_ranks_with_skew(carry: dict[str, Any]) -> None:
    async def main() -> None:
        device = SimDevice(latency=PROGRAM_S, gap_s=GAP_S, skew_s=0.001)
        engine = Engine(Sum(), device=device, num_ranks=3, **carry)
        async with engine, no_leaks(engine):
            answer = await engine.generate(prompt_token_ids=[7, 1], max_tokens=4)
            assert answer.token_ids == sum_reference([7, 1], 4)
        assert [one.num_steps for one in device.ranks] == [4, 4, 4]
        ends = [one.end_s - device.end_s for one in device.ranks]
        assert ends == exactly(0.0, 0.0005, 0.001)

    run_virtual(main())


# ── engines ─────────────────────────────────────────────────────────────────────────────

MODEL_S = Latency(decode_s=0.02, prefill_s=0.05)
ENGINE_GAP_S = 0.005
ENGINE_READ_S = ENGINE_GAP_S - ENQUEUE_S


async def one_request(carry: dict[str, Any]) -> list[float]:
    """Start and end of each program of one request, from the first one's start."""
    device = SimDevice(latency=MODEL_S, gap_s=ENGINE_GAP_S)
    engine = Engine(Count(), device=device, timeline=True, **carry)
    async with engine, no_leaks(engine):
        assert (await start(engine, 10, max_tokens=6)).token_ids == after(10, 6)
        steps = engine.timeline.steps
        for step in steps:
            assert step.read_s >= step.device_end_s + ENGINE_READ_S - 1e-9
        edges = [at for step in steps for at in (step.device_start_s, step.device_end_s)]
        assert device.idle_s == pytest.approx(sum(gaps(edges)), abs=1e-9)
        return [at - edges[0] for at in edges]


def gaps(edges: list[float]) -> list[float]:
    return [begun - ended for ended, begun in zip(edges[1::2], edges[2::2], strict=False)]


@every_carry
def test_the_timeline_of_one_request(carry: dict[str, Any]) -> None:
    """By hand: waiting for each token costs the gap each step; carried on, it costs nothing."""
    waited_s = ENGINE_GAP_S if "async_scheduling" in carry else 0.0
    starts = [0.0, *(0.05 + waited_s + n * (0.02 + waited_s) for n in range(5))]
    ends = [0.05, *(at + 0.02 for at in starts[1:])]
    edges = [at for pair in zip(starts, ends, strict=True) for at in pair]
    virtual = run_virtual(one_request(carry))
    assert virtual == exactly(*edges)
    real = asyncio.run(one_request(carry))
    longer_s = [ours - theirs for ours, theirs in zip(gaps(real), gaps(virtual), strict=True)]
    assert min(longer_s) >= -1e-6
    assert statistics.median(longer_s) < 0.002, "what this processor takes for a step"


def test_an_hour_of_device_time_is_the_same_each_time_and_short() -> None:
    async def client(engine: Engine, number: int, told: list[Any]) -> None:
        await asyncio.sleep(91.3 * number)
        stream = start(engine, 1000 * number, max_tokens=100 + 7 * number)
        told.extend([(number, token.token_id, now()) async for token in stream])

    async def main() -> tuple[list[Any], list[Any]]:
        device, told = SimDevice(latency=Latency(1.0, 0.01, 2.0), gap_s=0.1), list[Any]()
        engine = Engine(Count(), device=device, max_num_seqs=8)
        async with engine, no_leaks(engine), asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(client(engine, number, told))
        assert now() > 3600
        for number in range(40):
            tokens = [token for who, token, _ in told if who == number]
            assert tokens == after(1000 * number, 100 + 7 * number)
        return told, [device.num_steps, device.busy_s, device.idle_s, device.end_s, now()]

    begun_s = time.monotonic()
    first = run_virtual(main())
    took_s = time.monotonic() - begun_s
    assert run_virtual(main()) == first
    assert took_s < first[1][-1] / 300


def test_no_thread_is_left_of_the_one_that_loads() -> None:
    async def main() -> None:
        before = set(threading.enumerate())
        async with sim_engine(Count(), latency=PROGRAM_S, num_ranks=2) as engine:
            await start(engine, 10)
            assert threads_of() == []
            new = {thread.name for thread in set(threading.enumerate()) - before}
            assert new == set()

    before = set(threading.enumerate())
    run_virtual(main())
    assert set(threading.enumerate()) <= before


def test_a_timeout_round_opening_does_not_count_real_time() -> None:
    class Slow(Count):
        def with_kv(self, *sizes: int) -> Slow:
            time.sleep(0.05)
            return super().with_kv(*sizes)

    async def main() -> None:
        async with asyncio.timeout(0.01):
            engine = await Engine(Slow(), device=SimDevice()).open()
        assert now() == 0.0
        await engine.aclose()

    run_virtual(main())


@pytest.mark.parametrize("debug", [False, True])
def test_a_hang_is_found_by_its_time_out_at_once(debug: bool) -> None:
    async def main() -> tuple[float, float]:
        device = SimDevice(latency=1.0, faults=[Fault(4, "hang")])
        engine = Engine(Count(), device=device, step_timeout_s=3600, shutdown_s=100)
        async with engine:
            with pytest.raises(DeviceLost):
                await start(engine, 10)
            failed_s = now()
        return failed_s, now()

    begun_s = time.monotonic()
    # Three steps of a second; then an hour, and `shutdown_s` for the thread that never ends.
    assert run_virtual(main(), debug=debug) == (3603.0, 3703.0)
    assert time.monotonic() - begun_s < 5


@every_carry
@pytest.mark.parametrize("gap_s", [0.0, GAP_S])
def test_every_token_is_exact_and_idle_time_is_the_sum_of_gaps(
    carry: dict[str, Any], gap_s: float
) -> None:
    async def client(engine: Engine, number: int) -> None:
        await asyncio.sleep(0.0173 * (number % 7) + (5.0 if number > 15 else 0.0))
        prompt = [number, 3, 5 * number]
        answer = await engine.generate(prompt_token_ids=prompt, max_tokens=1 + number % 9)
        assert answer.token_ids == sum_reference(prompt, 1 + number % 9)

    async def main() -> None:
        device = SimDevice(latency=Latency(PROGRAM_S, 0.0001), gap_s=gap_s)
        engine = Engine(Sum(), device=device, max_num_seqs=4, timeline=True, **carry)
        async with engine, no_leaks(engine), asyncio.TaskGroup() as group:
            for number in range(24):
                group.create_task(client(engine, number))
        steps = engine.timeline.steps
        assert len(steps) == device.num_steps
        edges = [at for step in steps for at in (step.device_start_s, step.device_end_s)]
        assert all(one <= following for one, following in pairwise(edges))
        assert device.idle_s == pytest.approx(sum(gaps(edges)))
        assert device.idle_s > 4.0, "the batch ran empty"
        spans = zip(edges[::2], edges[1::2], strict=True)
        assert device.busy_s == pytest.approx(sum(end - begun for begun, end in spans))

    run_virtual(main())


def test_a_value_may_be_read_where_there_is_one_thread_only() -> None:
    async def main() -> None:
        async with started() as device:
            future = launch(device)
            await future
            assert future.device_value.read().tolist() == [2, 3]

    run_virtual(main())


def test_the_engine_s_own_clock_is_the_loop_s() -> None:
    async def main() -> None:
        async with sim_engine(Count(), latency=1.0, timeline=True) as engine:
            await asyncio.sleep(100)
            await start(engine, 10, max_tokens=3)
            first, *_, last = engine.timeline.steps
            assert first.begun_s == first.prepared_s == first.launched_s == 100.0
            assert last.read_s == last.applied_s == last.delivered_s == now() == 103.0
            assert device_of(engine).end_s == 103.0

    run_virtual(main())
