"""Opening, cancelling, refusing and closing engines: none keeps cores that it has no use for."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import ConfigError, DeviceError, DeviceLost, Engine, InternalError
from aneuron.clock import VirtualClockLoop
from aneuron.device.neuron import NeuronDevice
from aneuron.device.neuron import device as device_module
from aneuron.models.neuron.native import NativeModel, native_spec
from aneuron.testing import Count
from aneuron.testing.fakes import CountDecoder, FakeNative, Fault, Times
from tests.neuron.flows import cores_free
from tests.support import after, start, until

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "max_num_seqs": 1,
    "num_tokens_buckets": [64],
    "num_blocks_buckets": [4],
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 8,
}


def model() -> NativeModel:
    decoder = CountDecoder(max_model_len=64)
    return NativeModel(native_spec(decoder.config, name="count"), decoder)


def device_of(*faults: Fault, made: list[FakeNative] | None = None) -> NeuronDevice:
    """A device that makes a runtime for each opening; the faults are the first one's."""
    left = list(faults)

    def connect() -> FakeNative:
        fake = FakeNative(faults=left)
        left.clear()
        if made is not None:
            made.append(fake)
        return fake

    return NeuronDevice(connect, kind="native")


async def assert_free() -> None:
    """Another engine gets the cores, once nobody closes any more."""
    await cores_free()
    async with Engine(model(), device=device_of(), num_ranks=2, **SIZES) as engine:
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)


async def test_a_refused_second_engine_leaves_the_first_its_runtime() -> None:
    device = device_of()
    engine = Engine(model(), device=device, **SIZES)
    async with engine:
        with pytest.raises(ConfigError, match="another engine"):
            await Engine(model(), device=device, **SIZES).open()
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)
    async with engine:
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)
    await assert_free()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("status", ["compile", 4, 1003])
async def test_a_rank_that_fails_at_opening_frees_the_cores_of_all(rank: int, status: Any) -> None:
    device = device_of(Fault(status=status, rank=rank, step=1))
    with pytest.raises((DeviceError, ConfigError)):
        await Engine(model(), device=device, num_ranks=2, **SIZES).open()
    await assert_free()


class Gate:
    """Holds the connecting thread until the test lets it go."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def connect(self) -> FakeNative:
        self.reached.set()
        self.open.wait()
        return FakeNative()


@pytest.mark.parametrize("how", ["cancel", "aclose"])
async def test_an_opening_that_nobody_waits_for_frees_the_cores(how: str) -> None:
    gate = Gate()
    device = NeuronDevice(gate.connect, kind="native")
    engine = Engine(model(), device=device, **SIZES)
    opening = asyncio.create_task(engine.open())
    await asyncio.to_thread(gate.reached.wait)
    if how == "cancel":
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        with pytest.raises(ConfigError, match="being loaded"):
            await engine.open()
        gate.open.set()
    else:
        await engine.aclose()
        gate.open.set()
        with pytest.raises(RuntimeError, match="closed while it was opening"):
            await opening
    await until(lambda: not device._is_reserved)
    await cores_free()
    async with engine:
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)
    await assert_free()


async def test_a_bucket_that_hangs_while_it_is_warmed_up_loses_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_module, "WARM_UP_S", 0.2)
    monkeypatch.setattr(device_module, "CLOSE_S", 0.2)
    made: list[FakeNative] = []
    device = device_of(Fault(status="hang", step=1), made=made)
    with pytest.raises(DeviceLost, match="hangs"):
        await Engine(model(), device=device, **SIZES).open()
    monkeypatch.undo()  # the next engine may take its time
    assert made[0].core.is_closed
    assert made[0].core.in_flight == 1  # its close waits for that, and has the core meanwhile
    with pytest.raises(DeviceLost, match="another process"):
        await Engine(model(), device=device, **SIZES).open()
    await asyncio.to_thread(made[0].core.let_go)
    await assert_free()


async def test_a_bucket_may_take_as_long_as_its_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "WARM_UP_S", 0.05)
    monkeypatch.setenv("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "3600")
    slow = FakeNative(times=Times(compile_s=0.2))
    device = NeuronDevice(lambda: slow, kind="native")
    async with Engine(model(), device=device, **SIZES) as engine:
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)


@pytest.mark.parametrize(("told", "limit_s"), [("", 600), ("60", 600), (" 900 ", 900), ("x", 600)])
def test_the_longer_of_two_limits_is_that_of_a_bucket(
    monkeypatch: pytest.MonkeyPatch, told: str, limit_s: float
) -> None:
    monkeypatch.setenv("NEURON_LIBTORCH_COMPILATION_TIMEOUT", told)
    assert device_module.warm_up_limit_s() == limit_s


@pytest.mark.parametrize(("step_timeout_s", "is_told"), [(60.0, True), (600.0, False)])
async def test_compiles_within_steps_are_told(
    caplog: pytest.LogCaptureFixture, step_timeout_s: float, is_told: bool
) -> None:
    options: dict[str, Any] = {**SIZES, "step_timeout_s": step_timeout_s}
    async with Engine(model(), device=device_of(), enforce_eager=True, **options) as engine:
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)
    told = [one.getMessage() for one in caplog.records if "enforce_eager" in one.getMessage()]
    assert len(told) == is_told
    assert all("60 s" in one and "step_timeout_s=600" in one for one in told)


class Scarce(NeuronDevice):
    """A device for which no thread of some name starts, as where a process has too many."""

    missing = ""

    def _start_thread(self, body: Any, name: str, *args: Any) -> None:
        if name == self.missing:
            raise RuntimeError("can't start new thread")
        super()._start_thread(body, name, *args)

    def _sibling(self, rank: int, num_ranks: int) -> Any:
        sibling = super()._sibling(rank, num_ranks)
        sibling.missing = self.missing
        return sibling


def scarce(missing: str, made: list[FakeNative]) -> Scarce:
    def connect() -> FakeNative:
        made.append(FakeNative())
        return made[-1]

    device = Scarce(connect, kind="native")
    device.missing = missing
    return device


@pytest.mark.parametrize("missing", ["", "-reader", "-rank1"])
async def test_threads_that_do_not_start_leave_nothing_behind(missing: str) -> None:
    made: list[FakeNative] = []
    there = {*threading.enumerate()}  # of other tests, whose device hangs for ever
    device = scarce(f"aneuron-neuron{missing}", made)
    engine = Engine(model(), device=device, num_ranks=3, **SIZES)
    with pytest.raises(InternalError):
        await engine.open()
    await cores_free()
    await until(lambda: not device._is_reserved)
    await until(lambda: not any("aneuron-" in one.name for one in {*threading.enumerate()} - there))
    assert [made[0].at(index).core.is_closed for index in range(3)] == [True] * 3
    assert made[0].violations == []
    device.missing = ""
    device.for_rank(0, 1)  # siblings are made anew
    async with engine:
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)


async def test_where_no_thread_starts_to_close_a_runtime_the_next_engine_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[FakeNative] = []
    device = scarce("aneuron-neuron", made)
    engine = Engine(model(), device=device, **SIZES)
    real = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == "aneuron-close":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    with pytest.raises(InternalError):
        await engine.open()
    monkeypatch.undo()
    device.missing = ""
    async with engine:
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)
    assert len(made) == 1
    await cores_free()


def test_a_process_that_gives_up_a_hanging_opening_exits(tmp_path: Path) -> None:
    code = """
        import asyncio
        from aneuron import Engine
        from aneuron.device.neuron import NeuronDevice
        from aneuron.models.neuron.native import NativeModel, native_spec
        from aneuron.testing.fakes import CountDecoder, FakeNative, Fault

        async def main():
            decoder = CountDecoder(max_model_len=64)
            model = NativeModel(native_spec(decoder.config, name="count"), decoder)
            fake = FakeNative(faults=[Fault(status="hang", step=1)])
            engine = Engine(model, device=NeuronDevice(lambda: fake, kind="native"))
            try:
                async with asyncio.timeout(0.5):
                    await engine.open()
            except TimeoutError:
                print("gave up")
            await engine.aclose()

        asyncio.run(main())
        """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (child.returncode, child.stdout) == (0, "gave up\n"), child.stderr


async def test_threads_that_hang_do_not_close_the_next_runtime() -> None:
    made: list[FakeNative] = []

    def connect() -> FakeNative:
        made.append(FakeNative(index=len(made)))  # the core of one that hangs is not free
        return made[-1]

    device = NeuronDevice(connect, kind="native")
    for _ in range(2):
        engine = Engine(model(), device=device, shutdown_s=0.1, **SIZES)
        await engine.open()
        made[-1].core.inject(Fault(status="hang", step=3))
        stream = start(engine, 10, 40)
        await anext(stream)
        await engine.aclose()
    first, second = made
    await asyncio.to_thread(first.core.let_go)
    await until(lambda: first.core.is_closed)
    assert not second.core.is_closed
    await asyncio.to_thread(second.core.let_go)
    await until(lambda: second.core.is_closed)
    await assert_free()


def test_a_loop_of_virtual_time_is_refused_and_frees_the_cores() -> None:
    made: list[FakeNative] = []
    loop = VirtualClockLoop()
    try:
        with pytest.raises(ConfigError, match="real time"):
            loop.run_until_complete(Engine(model(), device=device_of(made=made), **SIZES).open())
    finally:
        loop.close()
    asyncio.run(assert_free())


async def test_a_model_that_is_not_made_for_cores_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        await Engine(Count(), device=device_of()).open()
    assert raised.value.param in ("device", "model")
    await assert_free()


async def test_a_closed_engine_keeps_nothing_of_the_device() -> None:
    engine = Engine(model(), device=device_of(), **SIZES)
    await engine.open()
    graphs = weakref.ref(engine._core.runner.model._graphs)  # type: ignore[union-attr]
    assert graphs() is not None
    await engine.aclose()
    gc.collect()
    assert graphs() is None
    assert engine.stats().running == 0


async def test_what_cannot_be_connected_is_a_typed_error() -> None:
    def connect() -> Any:
        raise ImportError("libnrt.so.1: cannot open shared object file")

    with pytest.raises(DeviceLost, match="libnrt"):
        await Engine(model(), device=NeuronDevice(connect, kind="native")).open()


async def test_launches_that_block_are_told(caplog: pytest.LogCaptureFixture) -> None:
    device = device_of()
    device.true_async = True
    assert not caplog.records
    device.true_async = False
    (record,) = caplog.records
    assert "docs/neuron.md" in record.getMessage()
