"""Cases 90 to 92 and the faults of rule 15 through both played runtimes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import (
    ConfigError,
    DeviceError,
    DeviceLost,
    Engine,
    EngineClosed,
    LaunchFailed,
    OutOfMemory,
)
from aneuron.device.neuron import NeuronDevice
from aneuron.device.neuron.native_runtime import NativeRuntime
from aneuron.device.neuron.nxd_runtime import ModelBuilderCompiler, NxdRuntime
from aneuron.device.neuron.raw import NativeRaw, NxdCompiler, NxdRaw
from aneuron.models.neuron.native import NativeModel, native_spec
from aneuron.testing import no_leaks
from aneuron.testing.fakes import CountDecoder, FakeCompiler, FakeNative, FakeNxd, Fault
from tests.neuron.flows import cores_free, fake_engine, fast, made_engine, main_ways
from tests.support import after, nothing_logged, outcome, outcomes, read, some_turns, start, until

if TYPE_CHECKING:
    from pathlib import Path

ENDS_S = 1.0  # a fault of a program is everybody's error, at most; the played ones take no time
# The engine goes on after these; the requests of the step have failed.
OF_A_STEP = [(1003, DeviceError), (1006, DeviceError), (4, OutOfMemory), (1002, LaunchFailed)]


def at(fake: Any, step: int, status: Any) -> None:
    """Plan a fault for a launch from now on; those before were the warm-up's."""
    fake.core.inject(Fault(status=status, step=step))


@main_ways
@pytest.mark.parametrize(("status", "kind"), OF_A_STEP)
async def test_rule_15_a_fault_of_a_step_fails_its_requests(
    backend: str, carry: str, status: int, kind: type[DeviceError]
) -> None:
    async with fake_engine(backend, carry) as (engine, fake), no_leaks(engine):
        at(fake, 5, status)
        began_s = time.monotonic()
        failed = await outcome(start(engine, 10, 40))
        assert time.monotonic() - began_s < ENDS_S
        assert type(failed) is kind
        assert str(status) in str(failed)
        assert (await start(engine, 500, 9)).token_ids == after(500, 9)


@main_ways
async def test_rule_15_a_full_queue_is_nobodys_fault(backend: str, carry: str) -> None:
    async with fake_engine(backend, carry) as (engine, fake), no_leaks(engine):
        for step in (3, 5, 6):
            at(fake, step, 7)
        assert (await start(engine, 10, 30)).token_ids == after(10, 30)
        assert fake.core.num_queue_full == 3


@main_ways
@pytest.mark.parametrize("status", [5, 101, 1004])
async def test_rule_15_and_case_63_a_lost_device_fails_everybody(
    backend: str, carry: str, status: int
) -> None:
    async with fake_engine(backend, carry) as (engine, fake):
        at(fake, 12, status)
        began_s = time.monotonic()
        streams = [start(engine, 100 * n, 40) for n in range(1, 9)]
        for failed in await outcomes(streams):
            assert type(failed) is DeviceLost
        assert time.monotonic() - began_s < ENDS_S
        with pytest.raises(DeviceLost):
            _ = start(engine, 1, 5)
        await engine.aclose()


@pytest.mark.parametrize("carry", ["resident", "handoff"])
@pytest.mark.parametrize(
    ("status", "kind"),
    [(7, None), (1003, DeviceError), (4, OutOfMemory), (5, DeviceLost), (101, DeviceLost)],
)
async def test_rule_15_a_fault_of_a_rank_that_nobody_reads(
    carry: str, status: int, kind: type[DeviceError] | None
) -> None:
    async with fake_engine("native", carry, num_ranks=2) as (engine, fake):
        fake.at(1).core.inject(Fault(status, step=5, rank=1))
        ended = await outcome(start(engine, 10, 20))
        if kind is None:
            assert ended.token_ids == after(10, 20)  # type: ignore[union-attr]
        else:
            assert type(ended) is kind
        if kind is not DeviceLost:
            assert (await start(engine, 500, 9)).token_ids == after(500, 9)


@main_ways
async def test_case_90_a_hang(backend: str, carry: str) -> None:
    options: dict[str, Any] = {"step_timeout_s": 1.0, "shutdown_s": 0.3}
    async with fake_engine(backend, carry, expects_violations=True, **options) as (engine, fake):
        at(fake, 10, "hang")
        stream = start(engine, 10, 40)
        got = await read(stream, 3)
        assert got == after(10, 3)
        began_s = time.monotonic()
        assert type(await outcome(stream)) is DeviceLost
        await engine.aclose()
        assert time.monotonic() - began_s < 10  # on a busy machine; the timeouts are 1.3 s
        await asyncio.to_thread(fake.core.let_go)


def test_case_90_a_process_whose_device_hangs_exits(tmp_path: Path) -> None:
    code = """
        import asyncio
        from aneuron import Engine
        from aneuron.device.neuron import NeuronDevice
        from aneuron.models.neuron.native import NativeModel, native_spec
        from aneuron.testing.fakes import CountDecoder, FakeNative, Fault

        async def main():
            decoder, fake = CountDecoder(max_model_len=64), FakeNative()
            model = NativeModel(native_spec(decoder.config, name="count"), decoder)
            device = NeuronDevice(lambda: fake, kind="native")
            sizes = {"max_num_seqs": 1, "num_tokens_buckets": [64], "num_blocks_buckets": [4],
                     "max_num_batched_tokens": 64, "num_kv_blocks": 8}
            async with Engine(model, device=device, shutdown_s=0.3, **sizes) as engine:
                fake.core.inject(Fault(status="hang", step=5))
                stream = engine.generate(prompt_token_ids=[10])
                for _ in range(3):
                    await anext(stream)

        asyncio.run(main())
        print("end of main")
        """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (child.returncode, child.stdout) == (0, "end of main\n"), child.stderr


@main_ways
async def test_case_91_requests_join_and_leave_in_a_break(
    backend: str, carry: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"max_model_len": 1024}
    async with (
        nothing_logged(caplog),
        fake_engine(backend, carry, **options) as (engine, _),
        no_leaks(engine),
    ):
        stays = start(engine, 10_000, 900)
        await read(stays, 2)
        for turns in range(0, 20, 2):
            pair = [start(engine, 10)]
            await read(pair[0], 2)
            pair.append(start(engine, 500))
            for _ in range(turns):
                await asyncio.sleep(0)
            pair[turns % 4 // 2].cancel()
            left = pair[1 - turns % 4 // 2]
            first = 13 if left is pair[0] else 501
            assert await read(left, 2) == [first, first + 1]
            left.cancel()
        stays.stop()
        ids = (await stays).token_ids
        assert ids == after(10_000, len(ids))


@main_ways
async def test_case_92_opened_used_and_closed_by_three_tasks(backend: str, carry: str) -> None:
    engine, fake = await made_engine(backend, carry)

    async def use() -> str:
        at(fake, 5, 101)
        with pytest.raises(DeviceLost):
            await start(engine, 1)
        with pytest.raises(DeviceLost):
            _ = start(engine, 1)
        return "used"

    opener = asyncio.create_task(engine.open())
    assert await opener is engine
    user = asyncio.create_task(use())
    assert await user == "used"
    closer = asyncio.create_task(engine.aclose())
    await closer
    assert not any(task.cancelling() for task in (opener, user, closer))
    await cores_free()


@main_ways
async def test_case_92_a_device_lost_inside_the_users_own_block(backend: str, carry: str) -> None:
    """What gets out of it is the stream's error, as it is: no group, and no cancelled task."""
    with pytest.raises(DeviceLost) as raised:
        async with fake_engine(backend, carry) as (engine, fake):
            at(fake, 5, 101)
            await start(engine, 1)
    assert not isinstance(raised.value, BaseExceptionGroup)
    this = asyncio.current_task()
    assert this is not None
    assert not this.cancelling()
    await cores_free()


@pytest.mark.parametrize("fault", ["cores busy", 4, "compile"])
async def test_rule_15_what_fails_at_load_is_typed_and_can_be_tried_again(fault: Any) -> None:
    faults = [[Fault(status=fault, step=1 if fault == "compile" else 0)], []]
    decoder = CountDecoder(max_model_len=64)
    model = NativeModel(native_spec(decoder.config, name="count"), decoder)
    device = NeuronDevice(lambda: FakeNative(faults=faults.pop(0)), kind="native")
    sizes: dict[str, Any] = {
        "max_num_seqs": 1,
        "num_tokens_buckets": [64],
        "num_blocks_buckets": [4],
        "max_num_batched_tokens": 64,
        "num_kv_blocks": 8,
    }
    engine = Engine(model, device=device, **sizes)
    kinds: dict[Any, type[Exception]] = {
        "cores busy": DeviceLost,
        4: OutOfMemory,
        "compile": ConfigError,
    }
    with pytest.raises(kinds[fault]):
        await engine.open()
    async with engine:
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)


async def test_rule_20_cores_are_one_engines_alone() -> None:
    async with fake_engine("native", "resident") as (engine, _):
        decoder = CountDecoder(max_model_len=64)
        model = NativeModel(native_spec(decoder.config, name="count"), decoder)
        other = Engine(model, device=NeuronDevice(FakeNative, kind="native"))
        with pytest.raises(DeviceLost, match="another process has the NeuronCores"):
            await other.open()
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)
    async with fake_engine("native", "resident") as (engine, _):
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)


@main_ways
async def test_rule_16_closing_with_work_in_flight_drains_it(backend: str, carry: str) -> None:
    async with fake_engine(backend, carry, times=fast(decode_s=0.005)) as (engine, fake):
        stream = start(engine, 10, 40)
        await read(stream, 3)
        fake.core.hold()
        await until(lambda: fake.core.in_flight > 0)
        closing = asyncio.create_task(engine.aclose())
        await some_turns()
        assert not closing.done()
        fake.core.go_on()
        await closing
        assert not fake.core.in_flight
        assert fake.core.is_closed
        assert (await stream).finish_reason == "abort"
        with pytest.raises(EngineClosed):
            _ = start(engine, 10, 5)
        assert fake.violations == []


@pytest.mark.parametrize(
    ("seam", "over"),
    [
        (NxdRaw, (FakeNxd, NxdRuntime)),
        (NativeRaw, (FakeNative, NativeRuntime)),
        (NxdCompiler, (FakeCompiler, ModelBuilderCompiler)),
    ],
)
def test_runtimes_are_played_with_the_calls_of_the_seam(seam: Any, over: tuple[Any, ...]) -> None:
    """Names and arguments alike, of the played one and of the real one."""
    calls = {name: one for name, one in vars(seam).items() if callable(one) and name[0] != "_"}
    assert calls
    for name, call in calls.items():
        asked = signature(call).parameters
        for kind in over:
            taken = signature(getattr(kind, name)).parameters
            assert [(one.name, one.kind, one.default) for one in taken.values()] == [
                (one.name, one.kind, one.default) for one in asked.values()
            ], f"{kind.__name__}.{name}"


if TYPE_CHECKING:
    # A type checker compares types, too.
    PLAYED: tuple[NxdRaw, NativeRaw, NxdCompiler] = (FakeNxd(), FakeNative(), FakeCompiler())
    REAL: tuple[NxdRaw, NativeRaw, NxdCompiler] = (
        NxdRuntime(),
        NativeRuntime(),
        ModelBuilderCompiler(),
    )
