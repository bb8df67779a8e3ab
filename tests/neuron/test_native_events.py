"""The native model where the runtime has events, and so does its work in order.

There a read that comes behind the next launch waits for that as well: ids are copied to the host
right behind their own launch, and an event tells that they are there.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import DeviceError
from aneuron.device.neuron.status import status_of
from aneuron.testing.fakes import FakeNative, Fault, SumDecoder, Times
from tests.neuron.flows import fake_engine, fast
from tests.neuron.native_steps import Row, Steps, shape_of, steps
from tests.support import after, sum_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from aneuron.testing.fakes.native.cores import Event

VOCAB = 300


class Refusing(FakeNative):
    """Refuses, once, a call that is told to it."""

    refused = ""
    status = 7

    def refuse(self, call: str) -> None:
        if self.refused == call:
            self.refused = ""
            raise RuntimeError(f"nrt status {self.status}")

    def to_host(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            self.refuse("to_host")
        return super().to_host(tensor, non_blocking=non_blocking)

    def record_event(self) -> Event:
        self.refuse("record_event")
        return super().record_event()


class Late(FakeNative):
    """Tells a late error once, at the first wait behind it."""

    told = False

    def synchronize(self, event: Event) -> None:
        try:
            super().synchronize(event)
        except RuntimeError:
            if not self.told:
                self.told = True
                raise


@contextmanager
def early(fake: FakeNative, decoder: Any = None) -> Iterator[Steps]:
    """A model whose copies are early, as a warm-up would find out."""
    with steps(fake, decoder) as on:
        graphs: Any = on.model._graphs
        graphs.copies_early = True
        yield on


def test_ids_are_read_while_the_next_launch_runs() -> None:
    fake = FakeNative(has_events=True, faults=[Fault("hang", step=4)])
    with early(fake) as on:
        row, _ = on.begin(0, [5])
        first = on.run(on.decode([row], None))
        gathered = first.gather(np.array([0, 1, 2, 3]))
        hanging = on.run(on.decode([row], None))
        assert first.read()[0] == 7
        assert gathered.read()[0] == 7
        fake.core.let_go()
        with pytest.raises(RuntimeError, match="status 5"):
            hanging.read()


def test_a_chain_is_right() -> None:
    prompt = [5, 9, 2]
    with early(FakeNative(has_events=True), SumDecoder(VOCAB)) as on:
        row, first = on.begin(0, prompt)
        launched = [on.run(on.decode([row], None))]
        for _ in range(3):
            launched.append(on.run(on.decode([row], [0]), launched[-1]))
        ids = [first, *(int(one.read()[0]) for one in launched)]
    assert ids == sum_reference(prompt, 5, VOCAB)


def test_rule_06_a_launch_keeps_what_its_copy_is_written_to() -> None:
    fake = FakeNative(has_events=True)
    with early(fake) as on:
        fake.core.hold()
        row = Row(0)
        launched = on.run(on.prefill(row, [5]))
        gc.collect()
        fake.core.go_on()
        assert launched.read()[0] == 6
        assert launched.read()[0] == 6


@pytest.mark.parametrize("kind", [FakeNative, Late])
def test_rule_03_a_late_error_comes_with_each_read(kind: type[FakeNative]) -> None:
    with early(kind(has_events=True, faults=[Fault(1003, step=2)])) as on:
        row, _ = on.begin(0, [5])
        failed = on.run(on.decode([row], None))
        for read in (failed.read, failed.wait, failed.read):
            with pytest.raises(RuntimeError) as caught:
                read()
            assert status_of(caught.value) == 1003


@pytest.mark.parametrize("refused", ["to_host", "record_event"])
def test_a_copy_that_is_refused_is_made_by_the_read(refused: str) -> None:
    fake = Refusing(has_events=True)
    with early(fake) as on:
        row, _ = on.begin(0, [5])
        fake.refused = refused
        launched = on.run(on.decode([row], None))
        behind = on.run(on.decode([row], None))
        assert launched.read()[0] == 7
        assert behind.read()[0] == 8


@pytest.mark.parametrize("refused", ["to_host", "record_event"])
def test_rule_03_an_error_of_nobody_knows_which_launch_fails_all_that_are_unread(
    refused: str,
) -> None:
    """It came late, with a call for another launch, and is not told again."""
    fake = Refusing(has_events=True)
    with early(fake) as on:
        row, _ = on.begin(0, [5])
        read, unread = (on.run(on.decode([row], None)) for _ in range(2))
        assert read.read()[0] == 7
        fake.refused, fake.status = refused, 1003
        newest = on.run(on.decode([row], None))
        later = on.run(on.decode([row], None))
        for one in (unread, newest, unread):
            with pytest.raises(RuntimeError) as caught:
                one.read()
            assert status_of(caught.value) == 1003
        assert later.read()[0] == 10
        assert read.read()[0] == 7


@pytest.mark.parametrize("has_events", [False, True])
@pytest.mark.parametrize("true_async", [False, True])
@pytest.mark.parametrize("queues_copies", [False, True])
def test_copies_are_early_where_none_makes_a_launch_wait(
    has_events: bool, true_async: bool, queues_copies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is measured, and not assumed; wherever that leads, the ids are right."""
    fake = FakeNative(
        times=Times(decode_s=0.05),
        has_events=has_events,
        true_async=true_async,
        queues_copies=queues_copies,
    )
    with steps(fake) as on:
        on.model.warm_up(shape_of(num_seqs_buckets=[4]))
        assert on.device.true_async is true_async
        graphs: Any = on.model._graphs
        assert graphs.copies_early == (has_events and true_async and queues_copies)
        row, first = on.begin(0, [5])
        launched = on.run(on.decode([row], None))
        behind = on.run(on.decode([row], [0]), launched)
        assert [first, launched.read()[0], behind.read()[0]] == [6, 7, 8]
    told = any("copies to the host" in one.message for one in caplog.records)
    assert told == (has_events and true_async and not queues_copies)


class Early(FakeNative):
    """Has events that come before the copies that they are behind."""

    def synchronize(self, event: Event) -> None:
        super().synchronize(event._replace(copies=()))
        for copy in event.copies:
            copy.has_arrived = True  # and nothing comes


class Without(FakeNative):
    """Has no queued copies."""

    def to_host(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            raise NotImplementedError("non_blocking")
        return super().to_host(tensor)


@pytest.mark.parametrize("kind", [Early, Without])
def test_copies_that_do_not_work_are_made_by_reads(
    kind: type[FakeNative], caplog: pytest.LogCaptureFixture
) -> None:
    with steps(kind(has_events=True, times=Times(decode_s=0.05))) as on:
        on.model.warm_up(shape_of(num_seqs_buckets=[4]))
        graphs: Any = on.model._graphs
        assert not graphs.copies_early
        assert on.device.true_async
        assert any("copies to the host" in one.message for one in caplog.records)
        row, first = on.begin(0, [5])
        assert [first, on.run(on.decode([row], None)).read()[0]] == [6, 7]


async def test_tokens_are_delivered_while_the_next_step_runs() -> None:
    times = fast(decode_s=0.02)  # long enough to measure that copies are early
    async with fake_engine("native", "handoff", has_events=True, times=times) as (engine, fake):
        fake.core.inject(Fault("hang", step=6))  # a prefill, and five decodes
        stream = engine.generate(prompt_token_ids=[5], max_tokens=20)
        try:
            async with asyncio.timeout(30):
                ids = [(await anext(stream)).token_id for _ in range(5)]
        finally:
            fake.core.let_go()
        assert ids == after(5, 5)
        with pytest.raises(DeviceError, match="status 5"):
            async for _ in stream:
                pass
