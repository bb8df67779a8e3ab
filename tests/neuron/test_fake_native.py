"""The played native runtime catches what a caller may not do: order, reads, errors, the queue."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from aneuron.device.neuron.status import status_of
from aneuron.testing.fakes import Fault, Violation
from tests.neuron.native_rig import counter, fake, held, ids_of, increment, make

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.testing.fakes import FakeNative

__all__ = ["fake", "held"]


# ── rule 1: launches return early, and run in order ─────────────────────────────────────


def test_rule_01_a_call_returns_before_its_graph_has_started(held: FakeNative) -> None:
    graph, host = held.compile(increment), ids_of(1)
    first = held.call(graph, sent := held.to_device(host))
    second = held.call(graph, first)  # fed by what is not there yet
    assert held.core.in_flight == 2
    held.core.go_on()
    assert held.to_host(second).tolist() == [3]
    assert held.to_host(first).tolist() == [2]
    assert sent is not None
    assert not held.violations


def test_rule_01_state_changes_in_the_order_of_execution(held: FakeNative) -> None:
    graph, kept = counter(held)
    step = held.to_device(host := ids_of(1))
    outputs = [held.call(graph, step) for _ in range(3)]
    held.core.go_on()
    # Each is what the state was then, although the graph returned the state itself.
    assert [held.to_host(out).item() for out in reversed(outputs)] == [3, 2, 1]
    assert held.to_host(kept[1]).tolist() == [3]
    assert host.tolist() == [1]
    assert not held.violations


# ── rule 2: nothing is readable but by to_host, and never on the loop's thread ──────────

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu"),
    "item": lambda tensor: tensor.item(),
    "bool": bool,
    "int": int,
    "numpy": lambda tensor: tensor.numpy(),
    "array": np.asarray,
    "tolist": lambda tensor: tensor.tolist(),
    "operator": lambda tensor: tensor + 1,
    "index": lambda tensor: tensor[0],
    "copy": lambda tensor: torch.zeros(1, dtype=torch.int32).copy_(tensor),
    "print": lambda tensor: f"{tensor:d}",
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_rule_02_a_read_outside_of_a_graph_is_caught(
    fake: FakeNative, read: Callable[[torch.Tensor], Any]
) -> None:
    output = fake.call(fake.compile(increment), sent := fake.to_device(host := ids_of(1)))
    with pytest.raises((Violation, TypeError)) as caught:
        read(output)
    assert fake.violations or caught.type is TypeError
    assert repr(output) == str(output) == "DeviceTensor((1,), torch.int32, neuron:0)"
    assert fake.to_host(output).tolist() == [2]
    assert (host.device.type, sent.device.type) == ("cpu", "neuron")


def test_rule_02_a_read_waits(held: FakeNative) -> None:
    output = held.call(held.compile(increment), sent := held.to_device(host := ids_of(1)))
    read: list[int] = []
    reader = threading.Thread(target=lambda: read.extend(held.to_host(output).tolist()))
    reader.start()
    assert not read
    held.core.go_on()
    reader.join()
    assert read == [2]
    assert len(sent) == len(host)


async def test_rule_02_no_call_on_the_event_loops_thread(fake: FakeNative) -> None:
    graph = fake.compile(increment)
    with pytest.raises(Violation, match="event loop"):
        fake.to_device(ids_of(1))
    with pytest.raises(Violation, match="event loop"):
        fake.call(graph)
    with pytest.raises(Violation, match="event loop"):
        fake.to_host(ids_of(1))
    assert len(fake.violations) == 3


def test_rule_02_a_graph_does_not_branch_on_values(fake: FakeNative) -> None:
    def branching(ids: torch.Tensor) -> torch.Tensor:
        return ids + 1 if ids.sum() > 0 else ids

    with pytest.raises(Violation, match="cannot be compiled"):
        fake.call(fake.compile(branching), fake.to_device(ids_of(1)))


# ── rule 3: errors come late ────────────────────────────────────────────────────────────


def test_rule_03_an_error_appears_at_the_read_of_the_step_and_of_what_it_fed(
    request: pytest.FixtureRequest,
) -> None:
    fake = make(request, faults=[Fault(1003, step=2)])
    graph, host = fake.compile(increment), ids_of(1)
    sent = fake.to_device(host)
    first = fake.call(graph, sent)
    failed = fake.call(graph, first)
    fed = fake.call(graph, failed)
    other = fake.call(graph, first)
    assert fake.to_host(other).tolist() == [3]
    for output in (failed, fed, failed):  # a second read fails again
        with pytest.raises(RuntimeError) as caught:
            fake.to_host(output)
        assert status_of(caught.value) == 1003
    assert fake.to_host(first).tolist() == [2]
    assert not fake.violations


def test_rule_03_an_event_tells_the_error_too(request: pytest.FixtureRequest) -> None:
    fake = make(request, faults=[Fault(1003)], has_events=True)
    graph, host = fake.compile(increment), ids_of(1)
    output = fake.call(graph, sent := fake.to_device(host))
    event = fake.record_event()
    behind = fake.call(graph, sent)
    with pytest.raises(RuntimeError, match="status 1003"):
        fake.synchronize(event)
    assert fake.to_host(behind).tolist() == [2]
    assert output.shape == (1,)


def test_events_only_where_they_exist(fake: FakeNative) -> None:
    with pytest.raises(Violation, match="has none"):
        fake.record_event()
    output = fake.call(fake.compile(increment), sent := fake.to_device(host := ids_of(1)))
    with pytest.raises(Violation, match="whose end nothing tells"):
        fake.to_host(output, non_blocking=True)
    assert fake.to_host(output).tolist() == [2]
    assert len(sent) == len(host)


# ── with events, work is done in order ──────────────────────────────────────────────────


def test_with_events_a_read_waits_for_all_that_was_launched_before_it(
    request: pytest.FixtureRequest,
) -> None:
    for has_events in (True, False):
        fake = make(
            request, faults=[Fault("hang", step=2)], has_events=has_events, index=int(has_events)
        )
        graph, host = fake.compile(increment), ids_of(1)
        sent = fake.to_device(host)
        outputs = fake.call(graph, sent), fake.call(graph, sent)
        reader = threading.Thread(target=fake.to_host, args=outputs[:1])
        reader.start()
        reader.join(None if not has_events else 0.05)
        assert reader.is_alive() == has_events
        fake.core.let_go()
        reader.join()


def test_a_queued_copy_arrives_when_an_event_behind_it_was_waited_for(
    request: pytest.FixtureRequest,
) -> None:
    fake = make(request, has_events=True, queue_depth=1)
    graph, host = fake.compile(increment), ids_of(1)
    output = fake.call(graph, sent := fake.to_device(host))
    before = fake.record_event()
    copy = fake.to_host(output, non_blocking=True)
    fake.synchronize(before)
    assert copy.item() < 0  # garbage
    with pytest.raises(RuntimeError, match="status 7"):
        fake.call(graph, sent)  # nor is the output read
    behind = fake.record_event()
    fake.synchronize(behind)
    assert copy.item() == 2
    fake.to_host(fake.call(graph, sent))
    fake.synchronize(behind)
    assert not fake.violations


def test_the_target_of_a_queued_copy_has_to_stay(request: pytest.FixtureRequest) -> None:
    fake = make(request, has_events=True)
    output = fake.call(fake.compile(increment), sent := fake.to_device(host := ids_of(1)))
    fake.to_host(output, non_blocking=True)
    with pytest.raises(Violation, match="target of a copy"):
        fake.synchronize(fake.record_event())
    assert len(sent) == len(host)


def test_a_runtime_may_make_a_queued_copy_wait(request: pytest.FixtureRequest) -> None:
    fake = make(request, has_events=True, queues_copies=False)
    output = fake.call(fake.compile(increment), sent := fake.to_device(host := ids_of(1)))
    assert fake.to_host(output, non_blocking=True).tolist() == [2]
    assert len(sent) == len(host)


# ── rule 4: the queue is bounded, and unread outputs count ──────────────────────────────


def test_rule_04_an_unread_output_holds_its_place_in_the_queue(
    request: pytest.FixtureRequest,
) -> None:
    fake = make(request, queue_depth=2)
    graph, host = fake.compile(increment), ids_of(1)
    sent = fake.to_device(host)
    first, second = fake.call(graph, sent), fake.call(graph, sent)
    fake.to_host(second)  # so both have ended, and the first is unread
    third = fake.call(graph, sent)
    with pytest.raises(RuntimeError) as caught:
        fake.call(graph, sent)
    assert status_of(caught.value) == 7
    assert fake.core.num_queue_full == 1
    fake.to_host(first)
    fake.to_host(fourth := fake.call(graph, sent))
    assert (third.shape, fourth.shape) == ((1,), (1,))


def test_rule_04_an_output_that_nobody_has_counts_no_more(request: pytest.FixtureRequest) -> None:
    fake = make(request, queue_depth=2)
    graph, host = fake.compile(increment), ids_of(1)
    sent = fake.to_device(host)
    for _ in range(3):
        gathered = fake.call(graph, sent)  # only the next launch reads it
        output = fake.call(graph, gathered)
        assert fake.to_host(output).tolist() == [3]
        del gathered
    assert not fake.violations


def test_rule_04_each_output_of_a_launch_counts(request: pytest.FixtureRequest) -> None:
    fake = make(request, queue_depth=1)

    def two(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ids + 1, ids + 2

    sent = fake.to_device(host := ids_of(1))
    graph = fake.compile(two)
    one, other = fake.call(graph, sent)
    assert fake.to_host(one).tolist() == [2]
    with pytest.raises(RuntimeError, match="status 7"):
        fake.call(graph, sent)
    assert fake.to_host(other).tolist() == [3]
    assert [fake.to_host(out).tolist() for out in fake.call(graph, sent)] == [[2], [3]]
    assert host.shape == (1,)


def test_rule_04_the_depth_is_at_most_that_of_the_runtime(request: pytest.FixtureRequest) -> None:
    assert make(request, queue_depth=100).queue_depth == 63


# ── rule 9: what may feed a launch ──────────────────────────────────────────────────────


def test_rule_09_ids_are_gathered_on_the_device(fake: FakeNative) -> None:
    def gather(ids: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return ids.index_select(0, order)

    host, order = ids_of(1, 2), ids_of(1, 0)
    sent = fake.to_device(host), fake.to_device(order)
    ids = fake.call(fake.compile(increment), sent[0])
    gathered = fake.call(fake.compile(gather), ids, sent[1])
    assert fake.to_host(gathered).tolist() == [3, 2]
    assert not fake.violations


def test_rule_09_another_cores_tensor_feeds_nothing(
    fake: FakeNative, request: pytest.FixtureRequest
) -> None:
    other = fake.at(1)
    request.addfinalizer(other.close)
    foreign = other.to_device(host := ids_of(1))
    assert str(foreign.device) == "neuron:1"
    with pytest.raises(Violation, match="neuron:0"):
        fake.call(fake.compile(increment), foreign)
    with pytest.raises(Violation, match="another core"):
        fake.call(fake.compile(lambda ids: ids + foreign), fake.to_device(host))
    assert other.violations is fake.violations
