"""The played native runtime fails on demand, as the hardware does, and closes in order."""

from __future__ import annotations

import logging
import os
import threading
from time import perf_counter
from typing import Any

import pytest
import torch

from aneuron.device.neuron.status import status_of
from aneuron.testing.fakes import FakeNative, Fault, Times, Violation
from tests.neuron.native_rig import counter, fake, ids_of, increment, make

__all__ = ["fake"]

# ── rule 14: launches that block ────────────────────────────────────────────────────────


@pytest.mark.parametrize("true_async", [True, False])
def test_rule_14_a_launch_that_blocks_returns_when_its_graph_has_ended(
    request: pytest.FixtureRequest, *, true_async: bool
) -> None:
    fake = make(request, true_async=true_async)
    graph, host = fake.compile(increment), ids_of(1)
    sent = fake.to_device(host)
    fake.core.hold()
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.append(fake.call(graph, sent)))
    thread.start()
    if true_async:
        thread.join()  # for ever, if the call waited
        assert fake.core.end_s == 0
    else:
        assert not outputs
    fake.core.go_on()
    thread.join()
    assert true_async or outputs[0].cell.launch.entry.has_ended
    assert fake.to_host(outputs[0]).tolist() == [2]


# ── rule 15: faults ─────────────────────────────────────────────────────────────────────


def run(fake: FakeNative, host: torch.Tensor | None = None) -> list[int]:
    """Send, launch and read; what is sent stays until then."""
    host = ids_of(1) if host is None else host
    sent = fake.to_device(host)
    ids: list[int] = fake.to_host(fake.call(fake.compile(increment), sent)).tolist()
    assert len(sent) == len(host)
    return ids


@pytest.mark.parametrize("status", [4, 5, 1003, 1006])
def test_rule_15_one_step_fails(request: pytest.FixtureRequest, status: int) -> None:
    fake = make(request, faults=[Fault(status, step=2)])
    assert run(fake) == [2]
    with pytest.raises(RuntimeError) as caught:
        run(fake)
    assert status_of(caught.value) == status
    assert run(fake) == [2]
    assert not fake.violations


def test_rule_15_out_of_memory_at_load(request: pytest.FixtureRequest) -> None:
    fake = make(request, faults=[Fault(4, step=0)])
    with pytest.raises(RuntimeError) as caught:
        fake.to_device(ids_of(1))
    assert status_of(caught.value) == 4
    assert run(fake) == [2]


def test_rule_15_out_of_memory_when_it_is_full(request: pytest.FixtureRequest) -> None:
    fake = make(request, memory_bytes=1 << 20)
    host = torch.zeros(3 << 16)  # three quarters
    sent = fake.to_device(host)
    stats = {"allocated_bytes.all.current": host.nbytes, "total_bytes": 1 << 20}
    assert fake.memory_stats() == stats
    with pytest.raises(RuntimeError) as caught:
        fake.to_device(host)
    assert status_of(caught.value) == 4
    del sent
    assert fake.to_device(host).shape == host.shape


def test_rule_15_a_hang_keeps_a_close_waiting(request: pytest.FixtureRequest) -> None:
    fake = make(request, faults=[Fault("hang")])
    graph, host = fake.compile(increment), ids_of(1)
    outputs = [fake.call(graph, sent := fake.to_device(host)) for _ in range(2)]
    errors: list[RuntimeError] = []

    def read() -> None:
        for output in outputs:
            with pytest.raises(RuntimeError) as caught:
                fake.to_host(output)
            errors.append(caught.value)

    reader = threading.Thread(target=read)
    reader.start()
    closing = threading.Thread(target=fake.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    assert not errors
    fake.core.let_go()
    closing.join()
    reader.join()
    assert [status_of(one) for one in errors] == [5, 101]  # what is behind it never runs
    assert len(sent) == len(host)


def test_rule_15_queue_full_is_told_at_the_call(request: pytest.FixtureRequest) -> None:
    fake = make(request, faults=[Fault(7)])
    with pytest.raises(RuntimeError) as caught:
        run(fake)
    assert status_of(caught.value) == 7
    assert fake.core.num_launches == 0
    assert run(fake) == [2]
    fake.core.inject(Fault(7))
    with pytest.raises(RuntimeError, match=r"^execution queue full$") as caught:
        run(fake)  # in words, every other time
    assert status_of(caught.value) == 7


def test_rule_15_after_an_unrecoverable_error_everything_fails(
    request: pytest.FixtureRequest,
) -> None:
    fake = make(request, faults=[Fault(101)])
    graph, host = fake.compile(increment), ids_of(1)
    sent = fake.to_device(host)
    with pytest.raises(RuntimeError) as caught:
        fake.to_host(fake.call(graph, sent))
    assert status_of(caught.value) == 101
    for call in (lambda: fake.to_device(host), lambda: fake.call(graph, sent)):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert status_of(caught.value) == 101


def test_rule_15_an_index_out_of_bounds(fake: FakeNative) -> None:
    host, index = ids_of(1, 2), ids_of(2)
    sent = fake.to_device(host), fake.to_device(index)
    output = fake.call(fake.compile(lambda ids, at: ids.index_select(0, at)), *sent)
    with pytest.raises(RuntimeError) as caught:
        fake.to_host(output)
    assert status_of(caught.value) == 1006


def test_rule_15_a_compilation_fails(request: pytest.FixtureRequest) -> None:
    fake = make(request, faults=[Fault("compile", step=2)])
    assert run(fake) == [2]
    stays = ids_of(1)  # until something behind its copy was read
    with pytest.raises(RuntimeError, match="NCC_"):
        run(fake, stays)  # a graph of its own
    assert run(fake) == [2]


def test_rule_15_another_process_has_the_core(request: pytest.FixtureRequest) -> None:
    with pytest.raises(RuntimeError, match="not available") as caught:
        make(request, faults=[Fault("cores busy")])
    assert status_of(caught.value) == 1005
    fake = make(request, faults=[Fault("cores busy", rank=1)])
    with pytest.raises(RuntimeError, match="not available: 1"):
        fake.at(1)


def test_rule_15_a_fault_is_of_the_core_of_its_rank(request: pytest.FixtureRequest) -> None:
    fake = make(request, faults=[Fault(1003, rank=1)])
    other = fake.at(1)
    request.addfinalizer(other.close)
    assert run(fake) == [2]
    with pytest.raises(RuntimeError, match="status 1003"):
        run(other)
    assert (fake.core.num_launches, other.core.num_launches) == (1, 1)
    other.close()
    assert fake.at(1).core is other.core  # with its counters


# ── rule 16: close runs what is queued ──────────────────────────────────────────────────


def test_rule_16_a_close_drains_and_tells_what_nobody_waited_for(fake: FakeNative) -> None:
    graph, _kept = counter(fake)
    sent = fake.to_device(host := ids_of(1))
    fake.core.hold()
    outputs = [fake.call(graph, sent) for _ in range(3)]
    with pytest.raises(Violation, match=r"launches \[1, 2, 3\]"):
        fake.close()
    assert all(output.cell.launch.entry.has_ended for output in outputs)
    assert len(sent) == len(host)


def test_rule_16_nothing_may_be_called_after_close(fake: FakeNative) -> None:
    graph, host = fake.compile(increment), ids_of(1)
    sent = fake.to_device(host)
    fake.to_host(fake.call(graph, sent))
    fake.close()
    fake.close()
    for call in (lambda: fake.to_device(host), lambda: fake.call(graph, sent)):
        with pytest.raises(Violation, match="after close"):
            call()


# ── rule 19: the first call of a shape compiles ─────────────────────────────────────────


def test_rule_19_the_first_call_costs_the_compilation_and_says_so(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    compile_s = 0.05
    fake = FakeNative(times=Times(compile_s=compile_s))
    request.addfinalizer(fake.close)
    graph, host = fake.compile(increment), ids_of(1)
    sent = fake.to_device(host)
    with caplog.at_level(logging.WARNING, "aneuron.testing"):
        before_s = perf_counter()
        warm_up = fake.call(graph, sent)
        assert perf_counter() - before_s >= compile_s
        fake.to_host(warm_up)
        assert "increment compiles" in caplog.text
        caplog.clear()
        fake.to_host(fake.call(graph, sent))
    assert not caplog.records
    assert len(fake.compiles) == 1


def test_latency_is_that_of_the_graphs_kind(request: pytest.FixtureRequest) -> None:
    times = Times(decode_s=0.01, decode_row_s=0.001, prefill_s=0.02, prefill_token_s=0.003)
    fake = FakeNative(times=times)
    request.addfinalizer(fake.close)

    def decode(ids: torch.Tensor) -> torch.Tensor:
        return ids + 1

    def prefill(ids: torch.Tensor) -> torch.Tensor:
        return ids + 1

    sent = fake.to_device(host := ids_of(1, 2))
    for fn, latency_s in ((decode, 0.012), (prefill, 0.026), (increment, 0.0)):
        output = fake.call(fake.compile(fn), sent)
        fake.to_host(output)
        entry = output.cell.launch.entry
        assert entry.end_s - entry.start_s > latency_s - 1e-6
    assert fake.core.busy_s > 0.038 - 1e-6
    assert len(sent) == len(host)


# ── rule 20: one process, one runtime to a core ─────────────────────────────────────────


def test_rule_20_a_second_runtime_on_a_core_fails(
    fake: FakeNative, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(RuntimeError) as caught:
        FakeNative()
    assert status_of(caught.value) == 1005
    make(request, index=1)
    fake.close()
    assert run(make(request)) == [2]


def test_rule_20_a_forked_process_has_no_runtime(
    fake: FakeNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(Violation, match="forked"):
            fake.to_device(ids_of(1))
    assert run(fake) == [2]
