"""Cases 83 to 87 through both played runtimes: what is fed, and what breaks."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import ConfigError
from aneuron.batch import InputBatch
from aneuron.carry import HandoffCarry, ResidentCarry, make_carry
from aneuron.models.neuron.artifact import Artifact
from aneuron.models.neuron.launches import NxdLaunched
from aneuron.models.neuron.native import NativeExecutable
from aneuron.models.neuron.native_graphs import NativeLaunch
from aneuron.models.neuron.nxd import NxdExecutable
from aneuron.testing import no_leaks
from tests.neuron.artifacts import KINDS, MODEL, OURS, engine_over, finish, shape_of, write
from tests.neuron.flows import BACKENDS, every_way, fake_engine, handoff_everywhere
from tests.support import after, break_counts, start, swap_rows

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from aneuron import Engine
    from tests.neuron.artifacts import Kind

LONG: dict[str, Any] = {"max_model_len": 256}  # no bucket of contexts ends within a test
TRACED = [one for one in BACKENDS if one != "native"]


async def together(engine: Engine, lasts: list[int], count: int) -> list[list[int]]:
    found = await asyncio.gather(*(start(engine, last, count) for last in lasts))
    await engine.wait_idle()
    return [one.token_ids for one in found]


@handoff_everywhere
async def test_case_83_a_length_stop_breaks_when_its_request_leaves_the_plan(backend: str) -> None:
    options = {**LONG, "timeline": True}
    async with fake_engine(backend, "handoff", **options) as (engine, fake), no_leaks(engine):
        before = fake.core.num_launches
        first, second = start(engine, 100, 5), start(engine, 200, 9)
        assert (await first).token_ids == after(100, 5)
        assert (await second).token_ids == after(200, 9)
        await engine.wait_idle()
        steps = engine.timeline.steps
        rows = [one.request_ids.tolist() for one in steps]
        # Each has as many rows as tokens: none behind its last one.
        assert [sum(ids.count(one) for ids in rows) for one in (1, 2)] == [5, 9]
        last = max(at for at, ids in enumerate(rows) if 1 in ids)
        assert rows[last] == [1, 2]
        broken = [[reason.value for reason, *_ in one.breaks] for one in steps[last:]]
        assert broken == [[], ["composition_changed"], *[[]] * (len(steps) - last - 2)]
        fed = [one.is_async for one in steps[last:]]
        assert fed == [True, False, *[True] * (len(fed) - 2)]
        assert len(fed) > 3
        assert fake.core.num_launches - before == len(steps)


@handoff_everywhere
async def test_case_84_the_middle_of_three_ends(backend: str) -> None:
    async with fake_engine(backend, "handoff", **LONG) as (engine, _), no_leaks(engine):
        streams = [start(engine, 1000 * n, 6 if n == 2 else 30) for n in (1, 2, 3)]
        found = [(await one).token_ids for one in streams]
        assert found == [after(1000 * n, 6 if n == 2 else 30) for n in (1, 2, 3)]
        assert "composition_changed" in break_counts(engine)


@handoff_everywhere
async def test_case_84_a_reorder_of_the_same_set_is_remapped(backend: str) -> None:
    update, turns = InputBatch.update, itertools.count(1)

    def reordering(self: InputBatch, plan: Any) -> None:
        update(self, plan)
        if self.num_reqs == 3 and next(turns) == 8:
            swap_rows(self, 0, 1)
            swap_rows(self, 1, 2)

    gathered: list[tuple[Any, np.ndarray, Any]] = []

    def recording(gather: Any) -> Any:
        def call(source: Any, order: np.ndarray) -> Any:
            gathered.append((source, order.copy(), gather(source, order)))
            return gathered[-1][-1]

        return call

    async with fake_engine(backend, "handoff", **LONG) as (engine, _), no_leaks(engine):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InputBatch, "update", reordering)
            for kind in (NativeLaunch, NxdLaunched):
                patch.setattr(kind, "gather", recording(kind.gather))
            lasts = [1000, 2000, 3000]
            assert await together(engine, lasts, 30) == [after(last, 30) for last in lasts]
        assert break_counts(engine)["reordered"] == 1
    (source, order, fed) = gathered.pop()
    assert not gathered
    assert order.tolist() == [1, 2, 0, 3]  # padding, where it was
    before, told = await asyncio.to_thread(source.read), await asyncio.to_thread(fed.read)
    assert told.tolist() == before[order].tolist()
    assert len(set(told[:3].tolist())) == 3


@pytest.mark.parametrize(("num", "expected"), [(1, 0), (3, 1)])
async def test_case_85_native_first_decode_after_a_prefill(num: int, expected: int) -> None:
    async with fake_engine("native", "handoff", **LONG) as (engine, _), no_leaks(engine):
        lasts = [1000 * n for n in range(1, num + 1)]
        assert await together(engine, lasts, 10) == [after(last, 10) for last in lasts]
        if num == 1:  # [1] fits the bucket of one at once
            assert break_counts(engine) == {}
        else:  # prompts come one a step, so others join a decode
            assert break_counts(engine)["composition_changed"] >= expected


@pytest.mark.parametrize("backend", TRACED)
async def test_case_85_a_traced_decode_has_rows_that_no_prefill_has(backend: str) -> None:
    async with fake_engine(backend, "handoff", **LONG) as (engine, _), no_leaks(engine):
        assert await together(engine, [1000], 10) == [after(1000, 10)]
        assert break_counts(engine).pop("shape_mismatch") == 1
        stats = engine.stats()
        edges = stats.breaks.get("bucket_edge")
        assert stats.async_steps == stats.decode_steps - 1 - (0 if edges is None else edges.count)


@handoff_everywhere
async def test_case_86_ids_of_another_dtype_break_every_step(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the engine is told: what it fed would be cast silently."""
    wide = property(lambda _: "int64", lambda _, told: None)
    for kind in (NativeExecutable, NxdExecutable):
        monkeypatch.setattr(kind, "sampled_dtype", wide, raising=False)
    async with fake_engine(backend, "handoff", **LONG) as (engine, _), no_leaks(engine):
        assert await together(engine, [1000], 8) == [after(1000, 8)]
        stats = engine.stats()
        assert (stats.async_steps, stats.sync_fallback_steps) == (0, 8)
        assert break_counts(engine) == {"dtype_mismatch": 7}


async def test_case_87_programs_that_do_not_sample(tmp_path: Path) -> None:
    folder = await asyncio.to_thread(write, tmp_path / "artifact", "nxdi logits")
    with pytest.raises(ConfigError, match="async_scheduling=False") as raised:
        async with engine_over(folder):
            pass
    assert raised.value.param == "async_scheduling"
    async with engine_over(folder, async_scheduling=False) as (engine, _):
        assert (await start(engine, 10, 9)).token_ids == after(10, 9)
        stats = engine.stats()
        assert (stats.async_steps, stats.sync_fallback_steps) == (0, 0)


@every_way
async def test_each_step_is_counted_once(backend: str, carry: str) -> None:
    async with fake_engine(backend, carry) as (engine, _), no_leaks(engine):
        await together(engine, [100, 200, 300, 400], 30)
        stats = engine.stats()
        if carry == "host":
            assert (stats.async_steps, stats.sync_fallback_steps) == (0, 0)
            return
        assert stats.async_steps + stats.sync_fallback_steps == stats.steps
        if carry == "resident":
            assert stats.async_steps == stats.decode_steps
            assert stats.breaks.keys() <= {"drain"}


@pytest.mark.parametrize("backend", KINDS)
def test_the_published_protocol_is_what_auto_takes_for_foreign_programs(
    tmp_path: Path, backend: Kind
) -> None:
    """`resident` is for programs of ours: what their artifacts say is that they keep tokens."""
    finish(tmp_path, shape_of(backend), [{}], MODEL)
    spec = Artifact.read(tmp_path).spec
    carry = make_carry("auto", has_slots=spec.has_slots, bucket_edges=spec.bucket_edges)
    assert type(carry) is (ResidentCarry if backend in OURS else HandoffCarry)
