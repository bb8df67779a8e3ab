"""The played core: its queue, its modelled timeline, its faults, and what it does not let pass."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron.device.neuron.status import status_of
from aneuron.testing.fakes import FakeCore, Fault, Times, Violation
from aneuron.testing.fakes.faults import FaultPlan, claim_cores, release_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron.testing.fakes.core import Entry

PROGRAM_S = 0.002


@contextmanager
def a_core(*faults: Fault, times: Times | None = None, **options: Any) -> Iterator[FakeCore]:
    """A core whose caller does nothing wrong, whose thread ends."""
    core = FakeCore(times, faults, **options)
    yield core
    core.close()
    assert core.violations == []
    assert not [one for one in threading.enumerate() if one is core._thread]


def status(entry: Entry) -> int | None:
    """How a launch failed, as who reads it sees it."""
    with pytest.raises(RuntimeError) as caught:
        entry.read()
    return status_of(caught.value)


# ── rule 1: a launch returns before its program ends; first in, first out ───────────────


def test_rule_01_a_launch_returns_before_its_program_has_run() -> None:
    ran: list[int] = []
    with a_core() as core:
        core.hold()
        entries = [core.submit(partial(ran.append, at)) for at in range(4)]
        assert ran == []
        assert not any(entry.has_ended for entry in entries)
        assert core.in_flight == 4
        core.go_on()
        for entry in reversed(entries):
            entry.read()
        assert ran == [0, 1, 2, 3]
        assert (core.num_launches, core.num_reads, core.in_flight) == (4, 4, 0)


def test_rule_01_a_launch_waits_for_what_feeds_it_on_another_core() -> None:
    with a_core() as first, a_core() as other:
        first.hold()
        source = first.submit(lambda: 41)
        fed = other.submit(lambda: source.value + 1, feeds=[source])
        assert not fed.has_ended
        first.go_on()
        assert fed.read() == 42
        assert source.read() == 41


def test_programs_queued_ahead_follow_each_other_without_a_gap() -> None:
    with a_core(times=Times(enqueue_s=0.0)) as core:
        core.hold()
        entries = [core.submit(int, latency_s=PROGRAM_S) for _ in range(3)]
        core.go_on()
        for entry in entries:
            entry.read()
        edges = [(entry.start_s, entry.end_s) for entry in entries]
        assert [start for start, _ in edges[1:]] == [end for _, end in edges[:-1]]
        assert all(end - start >= PROGRAM_S * 0.999 for start, end in edges)
        assert core.idle_s == 0.0
        assert core.busy_s == pytest.approx(edges[-1][1] - edges[0][0])
        assert core.end_s == edges[-1][1]


def test_a_core_that_waits_for_its_host_is_idle() -> None:
    with a_core(times=Times(enqueue_s=PROGRAM_S)) as core:
        for _ in range(3):
            core.submit(int).read()
        assert core.idle_s >= 2 * PROGRAM_S * 0.999


def test_a_program_never_ends_before_it_has_computed() -> None:
    may_end = threading.Event()
    with a_core() as core:
        entry = core.submit(may_end.wait, latency_s=0.0)
        assert not entry.has_ended
        may_end.set()
        assert entry.read() is True


# ── rule 2: unread until computed, and never on the loop ────────────────────────────────


def test_rule_02_a_value_that_is_not_there_yet_is_not_read() -> None:
    core = FakeCore()
    core.hold()
    entry = core.submit(int)
    with pytest.raises(Violation, match="before it has ended"):
        _ = entry.value
    core.go_on()
    entry.wait()
    assert entry.value == 0
    core.close()
    assert core.violations == ["the value of launch 1 before it has ended"]


async def test_rule_02_nothing_is_called_on_the_loop() -> None:
    core = FakeCore()
    entry = await asyncio.to_thread(core.submit, int)
    calls = (entry.wait, entry.read, lambda: core.submit(int), core.close)
    for call in calls:
        with pytest.raises(Violation, match="on the event loop's thread"):
            call()
    assert await asyncio.to_thread(entry.read) == 0
    await asyncio.to_thread(core.close)
    assert len(core.violations) == len(calls)


# ── rule 3: errors are the reader's ─────────────────────────────────────────────────────


def test_rule_03_an_error_shows_at_the_read_and_at_all_that_it_feeds() -> None:
    with a_core(Fault(1003, step=2)) as core:
        core.hold()
        good = core.submit(lambda: 1)
        bad = core.submit(lambda: 2)
        fed = core.submit(lambda: bad.value, feeds=[bad])
        fed_by_fed = core.submit(lambda: fed.value, feeds=[fed])
        apart = core.submit(lambda: 5)
        core.go_on()
        assert good.read() == 1
        assert [status(one) for one in (bad, fed, fed_by_fed)] == [1003] * 3
        assert status(bad) == 1003  # again
        assert apart.read() == 5


@pytest.mark.parametrize("code", [4, 5, 1002, 1003, 1006])
def test_rule_15_a_fault_has_its_status_and_spares_the_next_launch(code: int) -> None:
    with a_core(Fault(code, step=2)) as core:
        assert core.submit(lambda: 1).read() == 1
        assert status(core.submit(lambda: 2)) == code
        assert core.submit(lambda: 3).read() == 3


def test_rule_15_a_time_out_takes_its_time() -> None:
    with a_core(Fault(5), times=Times(timeout_s=PROGRAM_S)) as core:
        entry = core.submit(int)
        assert status(entry) == 5
        assert entry.end_s - entry.start_s >= PROGRAM_S * 0.999


def test_rule_15_behind_an_unrecoverable_error_everything_fails() -> None:
    with a_core(Fault(101, step=2)) as core:
        core.hold()
        entries = [core.submit(lambda: 1) for _ in range(4)]
        core.go_on()
        assert entries[0].read() == 1
        assert [status(one) for one in entries[1:]] == [101] * 3
        assert core.is_lost
        assert status(core.submit(lambda: 1)) == 101


def test_rule_15_a_program_that_hangs_ends_when_it_is_let_go() -> None:
    with a_core(Fault("hang")) as core:
        entry = core.submit(int)
        behind = core.submit(lambda: 7)
        assert not entry.has_ended
        core.let_go()
        assert status(entry) == 5
        assert behind.read() == 7


def test_faults_are_counted_from_where_they_were_planned() -> None:
    with a_core() as core:
        for _ in range(3):
            core.submit(int).read()
        core.inject(Fault(1006, step=2))
        assert core.submit(int).read() == 0
        assert status(core.submit(int)) == 1006
        assert core.submit(int).read() == 0


def test_a_plan_takes_the_faults_of_its_rank() -> None:
    faults = [Fault(4, step=0, rank=1), Fault(101, rank=0)]
    first, other = (FaultPlan(faults, rank=rank) for rank in (0, 1))
    assert first.at_load() is None
    assert other.at_load() == faults[0]
    assert other.at_load() is None
    assert first.next_launch() == faults[1]
    assert other.next_launch() is None


@pytest.mark.parametrize(
    ("error", "code"), [(IndexError("index 9 is out of bounds"), 1006), (TypeError("no"), 1004)]
)
def test_what_a_program_raises_is_a_status(error: Exception, code: int) -> None:
    def run() -> None:
        raise error

    with a_core() as core:
        assert status(core.submit(run)) == code


# ── rule 4: the queue ───────────────────────────────────────────────────────────────────


def test_rule_04_a_full_queue_refuses_until_one_is_read() -> None:
    with a_core(queue_depth=2) as core:
        first, second = core.submit(lambda: 1), core.submit(lambda: 2)
        second.wait()  # both have ended; unread, they hold their places
        with pytest.raises(RuntimeError, match="nrt status 7: NRT_QUEUE_FULL") as caught:
            core.submit(int)
        assert status_of(caught.value) == 7
        assert (core.num_launches, core.num_queue_full, core.in_flight) == (2, 1, 2)
        assert first.read() == 1
        assert core.submit(lambda: 3).read() == 3
        second.release()
        assert core.in_flight == 0


def test_rule_04_where_the_unread_do_not_count_those_that_run_do() -> None:
    with a_core(queue_depth=2, holds_unread=False) as core:
        core.hold()
        entries = [core.submit(int), core.submit(int)]
        with pytest.raises(RuntimeError, match="nrt status 7"):
            core.submit(int)
        core.go_on()
        for entry in entries:
            entry.wait()
        core.submit(int).read()


def test_rule_04_a_launch_that_a_fault_refuses_is_made_again() -> None:
    with a_core(Fault(7, step=2)) as core:
        assert core.submit(lambda: 1).read() == 1
        with pytest.raises(RuntimeError, match="nrt status 7"):
            core.submit(int)
        assert core.submit(lambda: 2).read() == 2
        assert (core.num_launches, core.num_queue_full) == (2, 1)


# ── rule 6: inputs are kept ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_held", [True, False])
def test_rule_06_an_input_that_was_dropped_poisons_its_launch(*, is_held: bool) -> None:
    core = FakeCore()
    if is_held:
        core.hold()
    inputs = np.zeros(3)
    entry = core.submit(int, keepalive=[weakref.ref(inputs)])
    if not is_held:
        entry.wait_ended()
    del inputs
    core.go_on()
    with pytest.raises(Violation, match=r"was dropped .*nrt status 1002") as caught:
        entry.read()
    assert status_of(caught.value) == 1002
    core.close()
    assert len(core.violations) == 1


def test_rule_06_what_a_poisoned_launch_feeds_is_poisoned() -> None:
    core = FakeCore()
    core.hold()
    inputs = np.zeros(3)
    entry = core.submit(int, keepalive=[weakref.ref(inputs)])
    fed = core.submit(int, feeds=[entry])
    del inputs
    core.go_on()
    assert [status(fed), status(entry)] == [1002, 1002]
    core.close()
    assert len(core.violations) == 1


def test_rule_06_once_read_a_launch_needs_its_inputs_no_more() -> None:
    with a_core() as core:
        inputs = np.zeros(3)
        entry = core.submit(int, keepalive=[weakref.ref(inputs)])
        assert entry.read() == 0
        del inputs
        assert entry.read() == 0


# ── rules 14, 16, 20 ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("true_async", [True, False])
def test_rule_14_without_true_async_a_launch_blocks_until_its_end(*, true_async: bool) -> None:
    returned = threading.Event()
    limit_s = 10.0 if true_async else 0.05  # that a program waits for its launch to return
    with a_core(Fault(1003, step=2), true_async=true_async) as core:
        entry = core.submit(partial(returned.wait, limit_s))
        returned.set()
        assert entry.read() is true_async
        assert status(core.submit(int)) == 1003  # an error is the reader's even so


def test_rule_16_close_with_a_launch_that_nobody_waited_for() -> None:
    core = FakeCore()
    core.hold()
    ran: list[int] = []
    core.submit(lambda: ran.append(1))
    with pytest.raises(Violation, match=r"closed before anybody waited for launches \[1\]"):
        core.close()
    assert ran == [1]  # it drained all the same
    assert core._thread is not None
    assert not core._thread.is_alive()


def test_rule_16_after_close_nothing_is_launched() -> None:
    core = FakeCore()
    core.submit(int).read()
    core.close()
    core.close()
    with pytest.raises(Violation, match="a launch after close"):
        core.submit(int)


def test_rule_20_a_forked_process_has_no_runtime() -> None:
    core = FakeCore()
    core.submit(int).read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: the point
        child = os.fork()
    if child == 0:
        try:
            core.submit(int)
        except Violation as error:
            os._exit(0 if "forked" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    core.close()


def test_rule_20_cores_have_one_owner() -> None:
    first, other = object(), object()
    claim_cores([0, 1], first)
    try:
        claim_cores([1], first)
        with pytest.raises(RuntimeError, match=r"NeuronCore\(s\) not available: 1") as caught:
            claim_cores([1, 2], other)
        assert status_of(caught.value) == 1005
        claim_cores([2], other)
        release_cores(first)
        claim_cores([0, 1], other)
    finally:
        release_cores(first)
        release_cores(other)


def test_two_threads_may_wait_for_one_launch() -> None:
    with a_core() as core:
        core.hold()
        entry = core.submit(lambda: 9)
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(entry.read())) for _ in range(2)]
        for thread in threads:
            thread.start()
        core.go_on()
        for thread in threads:
            thread.join()
        assert found == [9, 9]


def test_idle_a_core_keeps_nothing_of_a_launch() -> None:
    class Inputs:
        pass

    with a_core() as core:
        inputs = Inputs()
        gone = weakref.ref(inputs)
        entry = core.submit(partial(repr, inputs))
        del inputs
        entry.read()
        assert gone() is None
