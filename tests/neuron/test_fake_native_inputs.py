"""The played native runtime catches inputs that go, change, or have the wrong shape or dtype."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from aneuron.device.neuron.status import status_of
from aneuron.testing.fakes import Fault, Violation
from tests.neuron.native_rig import counter, fake, held, ids_of, increment

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.testing.fakes import FakeNative

__all__ = ["fake", "held"]

# ── rule 6: inputs stay, unchanged, until the launch was read ───────────────────────────


def test_rule_06_a_host_tensor_dropped_in_flight_poisons_the_step(held: FakeNative) -> None:
    host = ids_of(1)
    output = held.call(held.compile(increment), sent := held.to_device(host))
    del host
    held.core.go_on()
    with pytest.raises(Violation, match="dropped before") as caught:
        held.to_host(output)
    assert status_of(caught.value) == 1002
    assert len(held.violations) == len(sent)


def test_rule_06_a_numpy_array_does_not_keep_the_tensor_over_it(held: FakeNative) -> None:
    array = np.ones(1, np.int32)
    output = held.call(held.compile(increment), sent := held.to_device(torch.from_numpy(array)))
    held.core.go_on()
    with pytest.raises(Violation, match="dropped before"):
        held.to_host(output)
    assert len(sent) == len(array)


def test_rule_06_another_tensor_over_the_memory_keeps_it(held: FakeNative) -> None:
    kept = ids_of(1)
    output = held.call(held.compile(increment), sent := held.to_device(kept.detach()))
    held.core.go_on()
    assert held.to_host(output).tolist() == [2]
    assert len(sent) == len(kept)
    assert not held.violations


def test_rule_06_a_host_buffer_changed_before_its_copy_poisons_the_step(held: FakeNative) -> None:
    array = np.ones(4, np.int32)
    host = torch.from_numpy(array)
    output = held.call(held.compile(increment), sent := held.to_device(host))
    array[2] = 9
    held.core.go_on()
    with pytest.raises(Violation, match="changed before"):
        held.to_host(output)
    assert len(sent) == len(host)


@pytest.mark.parametrize("what", ["changed", "dropped"])
def test_rule_06_it_has_to_stay_until_the_read_though_the_graph_has_ended(
    fake: FakeNative, what: str
) -> None:
    graph, first = fake.compile(increment), ids_of(1)
    sent = [fake.to_device(first)]
    one = fake.call(graph, sent[0])
    fake.to_host(one)
    host = ids_of(5)
    sent.append(fake.to_device(host))
    two = fake.call(graph, sent[1])
    two.cell.launch.entry.wait_ended()
    if what == "changed":
        host[0] = 6
    else:
        del host
    with pytest.raises(Violation, match=f"{what} before .* read"):
        fake.to_host(two)


def test_rule_06_after_the_read_it_may_change_and_go(fake: FakeNative) -> None:
    graph, host = fake.compile(increment), ids_of(1)
    sent = fake.to_device(host)
    assert fake.to_host(fake.call(graph, sent)).tolist() == [2]
    host[0] = 9
    del host
    assert fake.to_host(fake.call(graph, sent)).tolist() == [2]  # the copy is the core's own
    assert not fake.violations


def test_rule_06_a_read_of_a_later_launch_settles_those_before(fake: FakeNative) -> None:
    graph, host = fake.compile(increment), ids_of(1)
    sent = fake.to_device(host)
    first, second = fake.call(graph, sent), fake.call(graph, sent)
    fake.to_host(second)
    host[0] = 9
    assert fake.to_host(first).tolist() == [2]
    assert not fake.violations


def test_rule_06_weights_stay_until_a_launch_behind_them_was_read(fake: FakeNative) -> None:
    captured = fake.to_device(ids_of(7))  # the host tensor is gone

    def add(ids: torch.Tensor) -> torch.Tensor:
        return ids + captured

    output = fake.call(fake.compile(add), sent := fake.to_device(host := ids_of(1)))
    with pytest.raises(Violation, match="dropped before"):
        fake.to_host(output)
    assert len(sent) == len(host)


def test_rule_06_a_read_of_a_copy_settles_it(fake: FakeNative) -> None:
    host = ids_of(7)
    sent = fake.to_device(host)
    assert fake.to_host(sent).tolist() == [7]
    del host
    assert fake.to_host(fake.call(fake.compile(increment), sent)).tolist() == [8]
    gone = fake.to_device(ids_of(8))
    with pytest.raises(Violation, match="dropped before"):
        fake.to_host(gone)


@pytest.mark.parametrize("keeps", [True, False])
def test_rule_06_inputs_of_a_launch_that_was_refused_stay_until_the_next_was_read(
    fake: FakeNative, *, keeps: bool
) -> None:
    graph, host, refused = fake.compile(increment), ids_of(1), [ids_of(5)]
    fake.core.inject(Fault(7))
    with pytest.raises(RuntimeError) as caught:
        fake.call(graph, fake.to_device(refused[0]))
    assert status_of(caught.value) == 7
    del caught
    if not keeps:
        refused.clear()
    output = fake.call(graph, sent := fake.to_device(host))
    if keeps:
        assert fake.to_host(output).tolist() == [2]
        refused.clear()
        assert fake.to_host(fake.call(graph, sent)).tolist() == [2]
        assert not fake.violations
    else:
        with pytest.raises(Violation, match="dropped before"):
            fake.to_host(output)
    assert len(sent) == len(host)


@pytest.mark.parametrize("drops_feed", [False, True])
def test_rule_06_a_device_tensor_dropped_in_flight_poisons_the_step(
    held: FakeNative, *, drops_feed: bool
) -> None:
    graph, host = held.compile(increment), ids_of(1)
    sent = held.to_device(host)
    feed = held.call(graph, sent)
    output = held.call(graph, feed)
    if drops_feed:
        del feed
    else:
        del sent
    held.core.go_on()
    with pytest.raises(Violation, match="dropped before"):
        held.to_host(output)
    assert held.violations


# ── rule 7: static shapes, and no 64 bits ───────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_rule_07_wide_inputs_and_results_are_refused(fake: FakeNative, dtype: torch.dtype) -> None:
    with pytest.raises(Violation, match="narrow"):
        fake.to_device(torch.zeros(1, dtype=dtype))
    graph = fake.compile(lambda ids: ids.to(dtype))
    with pytest.raises(Violation, match="narrows"):
        fake.call(graph, fake.to_device(ids_of(1)))


def test_rule_07_another_shape_or_dtype_is_another_program(
    fake: FakeNative, caplog: pytest.LogCaptureFixture
) -> None:
    graph = fake.compile(increment)
    hosts = [ids_of(1), ids_of(1, 2), ids_of(3), torch.ones(1)]
    with caplog.at_level(logging.WARNING, "aneuron.testing"):
        for host in hosts:
            fake.to_host(fake.call(graph, sent := fake.to_device(host)))
            assert sent.shape == host.shape
    assert fake.compiles == ["increment [(1,)]", "increment [(2,)]", "increment [(1,)]"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3


def test_rule_07_shapes_that_do_not_fit_fail_at_the_call(fake: FakeNative) -> None:
    left, right = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(Violation, match="cannot be compiled"):
        fake.call(fake.compile(torch.mm), fake.to_device(left), fake.to_device(right))
    assert fake.core.num_launches == 0


def test_rule_07_dynamic_shapes_are_refused(fake: FakeNative) -> None:
    with pytest.raises(Violation, match="dynamic shapes"):
        fake.compile(increment, dynamic=True)
    with pytest.raises(Violation, match="in parts"):
        fake.compile(increment, fullgraph=False)
    with pytest.raises(Violation, match="cannot be compiled"):
        fake.call(fake.compile(torch.nonzero), fake.to_device(ids_of(1)))


@pytest.mark.parametrize(
    "given", [ids_of(1), np.ones(1, np.int32), 1], ids=["host", "numpy", "int"]
)
def test_rule_07_a_call_takes_device_tensors_only(fake: FakeNative, given: Any) -> None:
    with pytest.raises(Violation, match="was given something of"):
        fake.call(fake.compile(increment), given)


def made_without_device(ids: torch.Tensor) -> torch.Tensor:
    return ids + torch.arange(1, dtype=torch.int32)


HOST = ids_of(1)


def captured_from_host(ids: torch.Tensor) -> torch.Tensor:
    return ids + HOST


@pytest.mark.parametrize("fn", [made_without_device, captured_from_host])
def test_rule_07_a_graph_uses_no_host_tensor(
    fake: FakeNative, fn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(Violation, match=r"host tensor .* inside a graph"):
        fake.call(fake.compile(fn), fake.to_device(ids_of(1)))


def test_a_graph_may_make_tensors_on_its_device(fake: FakeNative) -> None:
    weight = fake.to_device(weights := ids_of(10, 20))

    def ones(ids: torch.Tensor) -> torch.Tensor:
        made = torch.ones(2, dtype=torch.int32, device=weight.device)
        made = made + torch.arange(2, dtype=torch.int32, device=ids.device)
        return (made + torch.tensor(5) + torch.tensor([1, 2]).to(ids.device)).to(torch.int32)

    output = fake.call(fake.compile(ones), sent := fake.to_device(host := ids_of(1)))
    assert fake.to_host(output).tolist() == [7, 9]
    assert (len(weights), len(sent)) == (2, len(host))
    assert not fake.violations


def test_state_is_seen_by_every_graph(fake: FakeNative) -> None:
    count, kept = counter(fake)
    read = fake.compile(lambda ids: kept[1] + ids * 0)
    sent = fake.to_device(host := ids_of(4))
    fake.to_host(fake.call(count, sent))
    assert fake.to_host(fake.call(read, sent)).tolist() == [4]
    assert host.tolist() == [4]
