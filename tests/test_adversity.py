"""What the device, a tokenizer or a bug does wrong: who fails, how, and what goes on."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

import aneuron
from aneuron import DeviceError, DeviceLost, EngineClosed, LaunchFailed, OutOfMemory
from aneuron.testing import Count, Fault, SimDevice, assert_idle, count_engine, no_leaks
from tests.support import assert_serves, every_carry, exact, outcome, outcomes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from aneuron import Engine, TokenStream


@pytest.fixture(autouse=True)
def nothing_unretrieved(caplog: pytest.LogCaptureFixture) -> Iterable[None]:
    """asyncio logs no lost exception, whatever happens."""
    yield
    lost = [r for r in caplog.records if r.name == "asyncio" and r.levelno >= logging.ERROR]
    assert not lost


def start(engine: Engine, last: int, max_tokens: int = 40, **options: Any) -> TokenStream:
    return engine.generate(prompt_token_ids=[last], max_tokens=max_tokens, **options)


# ── the fault table ─────────────────────────────────────────────────────────────────────


@every_carry
@pytest.mark.parametrize("step", [1, 2, 3, 7])
async def test_fault_queue_full(carry: dict[str, Any], step: int) -> None:
    """Status 7: nobody fails; the launch is repeated and the event counted."""
    faults = [Fault(step=step, status=7)]
    async with (
        count_engine(latency=0.001, faults=faults, **carry) as engine,
        no_leaks(engine),
    ):
        answers = await outcomes([start(engine, 100), start(engine, 200)])
        assert exact(answers[0], 100)
        assert exact(answers[1], 200)
        device = engine.device
        assert isinstance(device, SimDevice)
        assert device.num_queue_full == 1


ROW_FAULTS: list[tuple[int, type[DeviceError]]] = [
    (2, LaunchFailed),
    (1002, LaunchFailed),
    (4, OutOfMemory),
    (1003, DeviceError),
    (1006, DeviceError),
]


@every_carry
@pytest.mark.parametrize(("status", "kind"), ROW_FAULTS)
async def test_fault_of_some_rows(
    status: int, kind: type[DeviceError], carry: dict[str, Any]
) -> None:
    """Refused, out of memory, NaN, bad index: that step's rows fail; who waits is served."""
    async with count_engine(
        faults=[Fault(step=6, status=status)],
        max_num_seqs=3,
        **carry,
    ) as engine:
        streams = [start(engine, 100 * n) for n in range(1, 6)]
        answers = await outcomes(streams)
        for error in answers[:3]:
            assert type(error) is kind
            assert str(status) in str(error)
            assert error.__cause__ is not None
        assert len(set(map(id, answers))) == 5  # each its own instance
        assert exact(answers[3], 400)
        assert exact(answers[4], 500)
        await assert_serves(engine)


@every_carry
@pytest.mark.parametrize(("status", "kind"), ROW_FAULTS)
async def test_fault_spares_rows_of_other_steps(
    status: int, kind: type[DeviceError], carry: dict[str, Any]
) -> None:
    """B's prefill fails while A decodes: B alone fails, also with steps ahead of it."""
    async with count_engine(
        faults=[Fault(step=3, status=status)],
        max_num_batched_tokens=16,
        **carry,
    ) as engine:
        # Steps: 1 prefill A, 2 decode A, 3 prefill B, 4 decode both.
        streams = [
            engine.generate(prompt_token_ids=[last] * 16, max_tokens=40) for last in (100, 200)
        ]
        first, second = await outcomes(streams)
        assert exact(first, 100)
        assert type(second) is kind
        await assert_serves(engine)


@every_carry
async def test_fault_gives_the_tokens_before_it(carry: dict[str, Any]) -> None:
    """Iterating gives every token from before the fault, then raises; then it has ended."""
    async with count_engine(faults=[Fault(step=6, status=1003)], **carry) as engine:
        stream = start(engine, 10)
        ids = []
        with pytest.raises(DeviceError):
            async for token in stream:
                ids.append(token.token_id)  # noqa: PERF401  what came before the error
        assert ids == [11, 12, 13, 14, 15]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(DeviceError):
            await stream
        await assert_serves(engine)


@every_carry
@pytest.mark.parametrize("step", range(1, 12))
async def test_fault_at_each_step_of_a_mixed_batch(carry: dict[str, Any], step: int) -> None:
    """Whichever step fails, every request is exact or has the error, and life goes on."""
    async with count_engine(
        faults=[Fault(step=step, status=1006)],
        max_num_seqs=3,
        max_num_batched_tokens=16,
        **carry,
    ) as engine:
        streams = [
            engine.generate(prompt_token_ids=[1] * 20 + [100 * n], max_tokens=n + 2)
            for n in range(1, 7)
        ]
        answers = await outcomes(streams)
        assert any(isinstance(answer, DeviceError) for answer in answers)
        for n, answer in enumerate(answers, 1):
            assert type(answer) is DeviceError or exact(answer, 100 * n, n + 2), answer
        await assert_serves(engine)


@every_carry
@pytest.mark.parametrize("status", [5, 101, 9999])
async def test_case_63_device_lost(status: int, carry: dict[str, Any]) -> None:
    """Lost at step 10 with 5 running, 3 waiting: all 8 raise, new ones are refused, it closes."""
    async with count_engine(
        latency=0.001,
        faults=[Fault(step=10, status=status)],
        max_num_seqs=5,
        **carry,
    ) as engine:
        idle = asyncio.create_task(engine.wait_idle())
        started_s = time.monotonic()
        answers = await outcomes([start(engine, 100 * n) for n in range(1, 9)])
        assert time.monotonic() - started_s < 1
        for error in answers:
            assert type(error) is DeviceLost
            assert str(status) in str(error.__cause__)
        assert len(set(map(id, answers))) == 8
        with pytest.raises(DeviceLost):
            await idle
        with pytest.raises(DeviceLost):
            _ = start(engine, 1)
        with pytest.raises(DeviceLost):
            _ = engine.generate("x")
        with pytest.raises(DeviceLost):
            await engine.wait_idle()
        async with asyncio.timeout(5):
            await engine.aclose()
        with pytest.raises(EngineClosed):
            _ = start(engine, 1)
        # A dead engine neither reports nor keeps what it ran.
        assert_idle(engine)


@pytest.mark.parametrize("text", [True, False])
async def test_requests_while_the_engine_fails(text: bool) -> None:
    """A request at each loop turn of a failure: always the typed error, there or when awaited."""
    async with count_engine(faults=[Fault(step=3, status=101)]) as engine:
        errors: list[BaseException] = []
        streams = [start(engine, 1)]
        after = 0
        while after < 10:
            after += isinstance(engine._core.failure, DeviceLost)
            try:
                streams.append(engine.generate("x") if text else start(engine, 7))
            except Exception as error:
                errors.append(error)
            await asyncio.sleep(0)
        errors += await outcomes(streams)
        assert {type(error) for error in errors} == {DeviceLost}


async def test_reopened_on_a_new_device() -> None:
    """A lost engine is closed and opened again: a device by name is a new one."""
    engine = await aneuron.open("sim:count")
    engine._core.runner.device._faults[3, False] = 101  # type: ignore[attr-defined]
    assert type(await outcome(start(engine, 1))) is DeviceLost
    await engine.aclose()
    async with engine:
        await assert_serves(engine)


async def test_reopened_on_the_same_device_after_a_hang() -> None:
    """A device object is started again: nothing of its former life is in the way."""
    async with count_engine(
        latency=0.001, faults=[Fault(step=3, status="hang")], step_timeout_s=0.1, shutdown_s=0.1
    ) as engine:
        assert type(await outcome(start(engine, 1))) is DeviceLost
        await engine.aclose()
        await engine.open()
        await assert_serves(engine)


# ── a device that hangs ─────────────────────────────────────────────────────────────────


@every_carry
async def test_case_90_hang(carry: dict[str, Any]) -> None:
    """A hang at step 10: DeviceLost within step_timeout_s and half as much (here 0.4 s)."""
    async with count_engine(
        faults=[Fault(step=10, status="hang")],
        step_timeout_s=0.4,
        shutdown_s=0.2,
        **carry,
    ) as engine:
        started_s = time.monotonic()
        answers = await outcomes([start(engine, 1), start(engine, 2)])
        assert {type(error) for error in answers} == {DeviceLost}
        assert "step_timeout_s" in str(answers[0])
        assert 0.3 < time.monotonic() - started_s < 0.6 + 0.5  # busy machine


@every_carry
async def test_case_90_aclose_while_it_hangs(carry: dict[str, Any]) -> None:
    """aclose() while the device hangs: within shutdown_s and half as much (here 0.6 s)."""
    async with count_engine(
        faults=[Fault(step=10, status="hang")],
        step_timeout_s=60,
        shutdown_s=0.6,
        **carry,
    ) as engine:
        stream = start(engine, 10)
        assert [(await anext(stream)).token_id for _ in range(9)] == list(range(11, 20))
        while engine.device.num_steps < 10:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(stream.aclose())
        started_s = time.monotonic()
        await engine.aclose()
        assert time.monotonic() - started_s < 0.9 + 0.2  # busy machine; twice 0.6 is too much
        answer = await stream
        assert answer.token_ids == list(range(11, 20))
        await closing


def test_case_90_a_process_whose_device_hangs_exits(tmp_path: Path) -> None:
    """A child process closes an engine whose device hangs, and exits."""
    code = """
        import asyncio
        from aneuron.testing import Fault, count_engine

        async def main():
            faults = [Fault(step=10, status="hang")]
            async with count_engine(faults=faults, shutdown_s=0.3) as engine:
                stream = engine.generate(prompt_token_ids=[10])
                for _ in range(9):
                    await anext(stream)

        asyncio.run(main())
        print("end of main")
        """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "end of main\n", "")


async def test_cancelling_the_others_while_it_hangs() -> None:
    """Consumers leave while the device hangs: each at once, and the engine closes."""
    async with count_engine(
        faults=[Fault(step=5, status="hang")], step_timeout_s=60, shutdown_s=0.2
    ) as engine:
        tasks = [asyncio.create_task(outcome(start(engine, n))) for n in range(3)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        for answer in await asyncio.gather(*tasks):
            assert isinstance(answer, asyncio.CancelledError)
        assert engine.stats().running == 0


# ── tasks of users ──────────────────────────────────────────────────────────────────────


async def test_case_92_opened_used_and_closed_by_three_tasks() -> None:
    """The device is lost in between: DeviceLost for streams and calls, no task is cancelled."""
    device = SimDevice(faults=[Fault(step=5, status=101)])

    async def use(engine: Engine) -> str:
        with pytest.raises(DeviceLost):
            await start(engine, 1)
        with pytest.raises(DeviceLost):
            _ = start(engine, 1)
        await asyncio.sleep(0.01)  # a stray cancellation would arrive here
        return "used"

    async def opening() -> Engine:
        return await aneuron.open(Count(), device=device)

    opener = asyncio.create_task(opening())
    engine = await opener
    user = asyncio.create_task(use(engine))
    bystander = asyncio.create_task(asyncio.sleep(0.02, "slept"))
    assert await user == "used"
    closer = asyncio.create_task(engine.aclose())
    await closer
    assert await bystander == "slept"
    assert not any(task.cancelling() for task in (opener, user, closer, bystander))


async def test_case_92_inside_async_with() -> None:
    """Lost inside `async with`: the user's own error comes out, alone; no ExceptionGroup."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(DeviceLost):
        async with count_engine(faults=[Fault(step=5, status=101)]) as engine:
            await start(engine, 1)
    async with count_engine(faults=[Fault(step=5, status=101)]) as engine:
        assert type(await outcome(start(engine, 1))) is DeviceLost
        await asyncio.sleep(0.01)
    assert not task.cancelling()
