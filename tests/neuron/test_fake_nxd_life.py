"""The played NxD runtime: how launches run, how they fail, and how a runtime begins and ends."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aneuron.device.neuron.status import status_of
from aneuron.testing.fakes import FakeNxd, Fault, Times, Violation
from aneuron.testing.fakes.faults import _claimed
from tests.neuron.nxd_rig import IDS, VOCAB, Rig, Row, make_decoder, rig, write_artifact

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron.device.neuron.raw import NxdRaw

PROGRAM_S = 0.002


def violation(text: str) -> Any:
    return pytest.raises(Violation, match=text)


def status(one: Rig, outputs: Any) -> int | None:
    with pytest.raises(RuntimeError) as caught:
        one.read(outputs)
    return status_of(caught.value)


def test_it_is_what_the_seam_says() -> None:
    raw: NxdRaw = FakeNxd()
    raw.close()


# ── rules 1 to 4 ────────────────────────────────────────────────────────────────────────


def test_rule_01_a_fed_launch_waits_for_its_feed(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        newest = one.begin(row)
        one.fake.core.hold()
        flying = one.launch(one.decode([row], newest))
        row.position += 1
        ahead = one.launch(one.decode([row], one.tokens(flying)))
        assert one.fake.core.in_flight == 2
        one.fake.core.go_on()
        assert one.read(ahead)[0] == newest[0] + 2
        assert one.read(flying)[0] == newest[0] + 1


def test_rule_01_the_cache_changes_in_order_of_launches(tmp_path: Path) -> None:
    with rig(tmp_path, decoder=sum_decoder) as one:
        row = Row(0, 3)
        newest = one.begin(row)
        one.fake.core.hold()
        flying = one.launch(one.decode([row], newest))
        row.position += 1
        ahead = one.launch(one.decode([row], one.tokens(flying)))
        one.fake.core.go_on()
        first, other = one.read(flying)[0], one.read(ahead)[0]
        one.read(one.launch(one.prefill(Row(1, 4), [10, 11, 12, newest[0]])))
        whole = one.read(one.launch(one.prefill(Row(2, 5), [10, 11, 12, newest[0], first])))
        assert whole == [other]  # what was in the cache is what a prompt of it all puts there


def sum_decoder(_: Any = None) -> Any:
    from aneuron.testing.fakes import SumDecoder

    return SumDecoder(VOCAB, max_model_len=64)


async def test_rule_02_nothing_is_called_on_the_loop(tmp_path: Path) -> None:
    shape = await asyncio.to_thread(write_artifact, tmp_path)
    fake = FakeNxd(decoder=make_decoder)
    one = Rig(fake, shape)
    await asyncio.to_thread(fake.load, tmp_path)
    await asyncio.to_thread(fake.initialize, [{}, {}], 0)
    row = Row(0, 3)
    newest = await asyncio.to_thread(one.begin, row)
    args = one.decode([row], newest)
    outputs = await asyncio.to_thread(one.launch, args)
    calls = [
        lambda: one.read(outputs),
        lambda: one.launch(args),
        lambda: fake.forward(args),
        lambda: fake.load(tmp_path),
        lambda: fake.initialize([{}, {}], 0),
        fake.memory_stats,
        fake.close,
    ]
    for call in calls:
        with violation("on the event loop's thread"):
            call()
    assert len(fake.violations) == len(calls)
    await asyncio.to_thread(one.read, outputs)
    await asyncio.to_thread(fake.close)
    assert len(fake.violations) == len(calls)


@pytest.mark.parametrize("code", [4, 5, 1003, 1006])
def test_rule_03_an_error_is_that_of_the_read_and_of_what_is_fed(tmp_path: Path, code: int) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        newest = one.begin(row)
        one.fake.inject(Fault(code))
        one.fake.core.hold()
        flying = one.launch(one.decode([row], newest))
        row.position += 1
        ahead = one.launch(one.decode([row], one.tokens(flying)))
        one.fake.core.go_on()
        assert [status(one, flying), status(one, ahead)] == [code] * 2
        row.position -= 1
        assert one.read(one.launch(one.decode([row], newest)))[0] == newest[0] + 1


def test_rule_03_a_failed_program_changes_no_cache(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.fake.inject(Fault(1003))
        failed = one.launch(one.prefill(Row(0, 3), [1, 2, 3]))
        assert status(one, failed) == 1003
        assert one.fake._group is not None
        assert not one.fake._group._modules[0].get_buffer("k_cache_0").any()


def test_rule_04_two_launches_at_a_time(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        newest = one.begin(row)
        one.fake.core.hold()
        first = one.launch(one.decode([row], newest))
        row.position += 1
        second = one.launch(one.decode([row], one.tokens(first)))
        row.position += 1
        third = one.decode([row], one.tokens(second))
        with pytest.raises(RuntimeError, match="nrt status 7"):
            one.launch(third)
        one.fake.core.go_on()
        assert one.read(first)[0] == newest[0] + 1
        second[0][0].output.flight.entry.wait()
        assert one.read(one.launch(third))[0] == newest[0] + 3  # the one refused left no trace


# ── rule 6 ──────────────────────────────────────────────────────────────────────────────


def test_rule_06_an_argument_that_is_dropped_in_flight_fails_the_launch(tmp_path: Path) -> None:
    with rig(tmp_path, expect="an input of launch") as one:
        row = Row(0, 3)
        args = one.decode([row], one.begin(row))
        one.fake.core.hold()
        flying = one.launch(args)
        one.kept.clear()
        del args
        one.fake.core.go_on()
        with violation("was dropped before it was ended"):
            one.read(flying)


def test_rule_06_so_does_what_fed_it_and_has_been_read(tmp_path: Path) -> None:
    with rig(tmp_path, expect="an input of launch") as one:
        row = Row(0, 3)
        flying = one.launch(one.decode([row], one.begin(row)))
        one.read(flying)
        row.position += 1
        one.fake.core.hold()
        ahead = one.launch(one.decode([row], one.tokens(flying)))
        for args in one.kept[-1]:
            del args[IDS]
        del flying
        one.fake.core.go_on()
        with violation("was dropped before it was ended"):
            one.read(ahead)


# ── rule 14 ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("true_async", [True, False])
def test_rule_14_a_launch_that_blocks(tmp_path: Path, *, true_async: bool) -> None:
    times = Times(decode_s=PROGRAM_S, prefill_s=PROGRAM_S)
    with rig(tmp_path, times=times, true_async=true_async) as one:
        row = Row(0, 3)
        newest = one.begin(row)
        flying = one.launch(one.decode([row], newest))
        entry = flying[0][0].output.flight.entry
        if not true_async:
            assert entry.has_ended
        assert one.read(flying)[0] == newest[0] + 1
        assert entry.end_s - entry.start_s >= PROGRAM_S * 0.999


# ── rule 15 ─────────────────────────────────────────────────────────────────────────────


def test_rule_15_a_lost_device_fails_everything_from_then_on(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        newest = one.begin(row)
        one.fake.inject(Fault(101))
        assert status(one, one.launch(one.decode([row], newest))) == 101
        assert status(one, one.launch(one.decode([row], newest))) == 101
        assert one.fake.memory_stats() == (-1, -1)


def test_rule_15_a_hang_ends_when_it_is_let_go(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        newest = one.begin(row)
        one.fake.inject(Fault("hang"))
        flying = one.launch(one.decode([row], newest))
        one.fake.core.let_go()
        assert status(one, flying) == 5


def test_rule_15_a_bad_slot_is_out_of_bounds(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3, blocks=[900])
        assert status(one, one.launch(one.prefill(row, [1, 2, 3]))) == 1006


@pytest.mark.parametrize(("fault", "code"), [(Fault(4, step=0), 4), (Fault("cores busy", 0), 1005)])
def test_rule_15_loading_fails(tmp_path: Path, fault: Fault, code: int) -> None:
    write_artifact(tmp_path)
    fake = FakeNxd(faults=[fault], decoder=make_decoder)
    fake.load(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        fake.initialize([{}, {}], 0)
    assert status_of(caught.value) == code
    fake.close()
    assert fake.violations == []
    assert _claimed == {}


def test_rule_15_what_does_not_fit_is_out_of_memory(tmp_path: Path) -> None:
    write_artifact(tmp_path)
    fake = FakeNxd(decoder=make_decoder, memory_bytes=1000)
    fake.load(tmp_path)
    with pytest.raises(RuntimeError, match="Allocation Failure") as caught:
        fake.initialize([{}, {}], 0)
    assert status_of(caught.value) == 4
    fake.close()
    assert _claimed == {}


# ── rules 16 to 18 ──────────────────────────────────────────────────────────────────────


def test_rule_16_close_drains_and_tells_what_nobody_waited_for(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(Violation, match="closed before anybody waited for launches"):  # noqa: SIM117
        with rig(tmp_path) as one:
            row = Row(0, 3)
            flying = one.launch(one.decode([row], one.begin(row)))
    assert flying[0][0].output.flight.entry.has_ended
    assert _claimed == {}
    assert threading.active_count() == before
    with violation("a read of a device value after close"):
        one.read(flying)


@pytest.mark.parametrize("layout", ["rank_out", "out_rank"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rule_17_the_other_nesting_is_caught(tmp_path: Path, layout: Any, ranks: int) -> None:
    with rig(tmp_path, layout=layout, ranks=ranks, expect="nested otherwise than as") as one:
        args = one.decode([], [])
        nested = [args] * ranks if layout == "out_rank" else [[arg] * ranks for arg in args]
        with violation("nested otherwise than as"):
            one.fake.forward_async(nested)


def test_rule_17_a_ranks_tensor_feeds_that_rank(tmp_path: Path) -> None:
    with rig(tmp_path, expect="of rank 1 is output 0 of rank 0") as one:
        row = Row(0, 3)
        flying = one.launch(one.decode([row], one.begin(row)))
        row.position += 1
        first = one.tokens(flying)[0]
        with violation("argument 0 of rank 1 is output 0 of rank 0"):
            one.launch(one.decode([row], (first, first)))
        one.read(flying)


def test_rule_17_another_runtimes_tensors_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with rig(tmp_path / "a", ranks=1) as other:
        row = Row(0, 3)
        flying = other.launch(other.decode([row], other.begin(row)))
        fake = FakeNxd()
        with violation("another runtime's tensor"):
            fake.to_cpu(flying[0][0])
        fake.close()
        other.read(flying)


def test_rule_18_only_rank_0_is_read(tmp_path: Path) -> None:
    with rig(tmp_path, expect="a read of rank 1") as one:
        row = Row(0, 3)
        flying = one.launch(one.decode([row], one.begin(row)))
        with violation("only rank 0 is read"):
            one.fake.to_cpu(flying[1][0])
        one.read(flying)


@pytest.mark.parametrize("dropped", [0, 1])
def test_rule_18_all_ranks_outputs_are_kept_until_a_launch_was_waited_for(
    tmp_path: Path, dropped: int
) -> None:
    text = f"output 0 of rank {dropped} was dropped"
    with rig(tmp_path, expect=text) as one:
        row = Row(0, 3)
        flying = one.launch(one.decode([row], one.begin(row)))
        kept = flying[1 - dropped]
        entry = kept[0].output.flight.entry
        del flying
        assert len(one.fake.violations) == 1
        with violation("was dropped before its launch was waited for"):
            entry.read()


def test_rule_18_once_read_nothing_needs_to_be_kept(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        flying = one.launch(one.decode([row], one.begin(row)))
        one.read(flying)
        del flying[1]
        assert one.read(flying)[0] == 14


def test_an_argument_is_not_written_to_in_flight(tmp_path: Path) -> None:
    with rig(tmp_path, expect="an argument was written to") as one:
        row = Row(0, 3)
        args = one.decode([row], one.begin(row))
        one.fake.core.hold()
        flying = one.launch(args)
        args[IDS][0, 0] += 1
        one.fake.core.go_on()
        with violation("an argument was written to while its launch was in flight"):
            one.read(flying)


# ── rules 19 and 20 ─────────────────────────────────────────────────────────────────────


def test_rule_19_the_first_launch_of_each_bucket_loads_it(tmp_path: Path) -> None:
    with rig(tmp_path, times=Times(load_s=PROGRAM_S)) as one:
        row = Row(0, 3)
        newest = one.begin(row)
        modelled = []
        for size in (16, 16, 32, 32):
            flying = one.launch(one.decode([row], newest, size=size))
            one.read(flying)
            modelled.append(flying[0][0].output.flight.entry._latency_s)
        assert modelled == [PROGRAM_S, 0.0, PROGRAM_S, 0.0]
        assert one.fake.num_cold == 3  # one of them the prefill's


def test_rule_20_cores_have_one_runtime_until_it_is_closed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with rig(tmp_path / "a"):
        fake = FakeNxd(decoder=make_decoder)
        fake.load(tmp_path / "a")
        with pytest.raises(RuntimeError, match=r"NeuronCore\(s\) not available: 1") as caught:
            fake.initialize([{}, {}], 1)
        assert status_of(caught.value) == 1005
        fake.initialize([{}, {}], 2)
        fake.close()
    again = FakeNxd(decoder=make_decoder)
    again.load(tmp_path / "a")
    again.initialize([{}, {}], 1)
    again.close()
    assert _claimed == {}


def test_nothing_runs_before_it_is_loaded_and_initialised(tmp_path: Path) -> None:
    fake = FakeNxd(decoder=make_decoder)
    with pytest.raises(ValueError, match="does not exist"):
        fake.load(tmp_path)
    shape = write_artifact(tmp_path)
    with violation("2 weights for 0 ranks"):
        fake.initialize([{}, {}], 0)
    fake.load(tmp_path)
    with violation("1 weights for 2 ranks"):
        fake.initialize([{}], 0)
    one = Rig(fake, shape)
    with violation("a launch before weights were loaded"):
        one.launch(one.decode([], []))
    with pytest.raises(ValueError, match=r"weights of rank 1: .*unexpected \['decoder.no'\]"):
        fake.initialize([{}, {"decoder.no": torch.zeros(1)}], 0)
    fake.close()
