"""The virtual-time loop by itself: its order, its jumps, threads, what it refuses."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aneuron.clock import clock_of
from aneuron.testing import Deadlock, VirtualClockLoop, run_virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

in_both_modes = pytest.mark.parametrize("debug", [False, True])


def now() -> float:
    return asyncio.get_running_loop().time()


# ── order and jumps ─────────────────────────────────────────────────────────────────────


@in_both_modes
def test_it_jumps_and_sleeps_never(debug: bool) -> None:
    async def main() -> list[float]:
        times = [now()]
        for seconds in (0, 0.25, 3600, 1e9, 1e-6):
            await asyncio.sleep(seconds)
            times.append(now())
        return times

    begun_s = time.monotonic()
    times = run_virtual(main(), debug=debug)
    assert times == [0.0, 0.0, 0.25, 3600.25, 1e9 + 3600.25, 1e9 + 3600.25 + 1e-6]
    assert time.monotonic() - begun_s < 5


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 0.2, 0.3, 1e6]) | st.floats(-1, 1e9), st.booleans()),
        max_size=60,
    )
)
def test_timers_fire_in_the_order_of_time_and_of_being_set(
    timers: list[tuple[float, bool]],
) -> None:
    fired: list[tuple[float, int, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        handles = [
            loop.call_at(when, lambda when=when, n=n: fired.append((when, n, now())))  # type: ignore[misc]
            for n, (when, _) in enumerate(timers)
        ]
        for handle, (_, is_cancelled) in zip(handles, timers, strict=True):
            if is_cancelled:
                handle.cancel()
        await asyncio.sleep(2e9)

    run_virtual(main())
    kept = [(when, n) for n, (when, is_cancelled) in enumerate(timers) if not is_cancelled]
    assert [(when, n) for when, n, _ in fired] == sorted(kept)
    assert all(at == max(0.0, when) for when, _, at in fired)


def test_cancelled_timers_are_purged_and_the_others_keep_their_order() -> None:
    fired: list[int] = []

    async def main() -> int:
        loop = asyncio.get_running_loop()
        handles = [loop.call_at(1.0, fired.append, n) for n in range(500)]
        for n, handle in enumerate(handles):
            if n % 10:
                handle.cancel()
        await asyncio.sleep(0)
        left = len(loop._scheduled)  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)
        return int(left)

    assert run_virtual(main()) == 50
    assert fired == list(range(0, 500, 10))


def test_a_timer_set_by_one_that_fires_comes_behind_those_due_with_it() -> None:
    told: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def first() -> None:
            told.append("first")
            loop.call_at(loop.time(), told.append, "third")

        loop.call_at(1.0, first)
        loop.call_at(1.0, told.append, "second")
        await asyncio.sleep(1.5)

    run_virtual(main())
    assert told == ["first", "second", "third"]


def test_what_is_ready_runs_before_time_goes_on() -> None:
    async def busy() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return now()

    async def main() -> list[float]:
        async with asyncio.TaskGroup() as group:
            other = group.create_task(asyncio.sleep(1e-9))
            tasks = [group.create_task(busy()) for _ in range(3)]
        assert other.done()
        return [task.result() for task in tasks]

    assert run_virtual(main()) == [0.0, 0.0, 0.0]


@in_both_modes
def test_timeouts_fire_at_their_time(debug: bool) -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.5):
                await asyncio.Event().wait()
        async with asyncio.timeout(1e6):
            await asyncio.sleep(2.5)
        return now()

    assert run_virtual(main(), debug=debug) == 10.0


def test_debug_mode_still_checks() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(TypeError, match="call_at"):
            loop.call_at(1.0, main)
        caught: list[BaseException] = []

        def from_a_thread() -> None:
            try:
                loop.call_later(1.0, print)
            except RuntimeError as error:
                caught.append(error)

        await asyncio.to_thread(from_a_thread)
        assert "non-thread-safe" in str(caught[0]).lower()

    run_virtual(main(), debug=True)


# ── deadlock ────────────────────────────────────────────────────────────────────────────


async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@in_both_modes
@pytest.mark.parametrize("wait", [wait_for_ever, lambda: asyncio.sleep(float("inf"))])
def test_waiting_for_nothing_is_a_deadlock(debug: bool, wait: Callable[[], Any]) -> None:
    cleaned: list[float] = []

    async def main() -> None:
        await asyncio.sleep(2)
        try:
            await wait()
        finally:
            await asyncio.sleep(1)  # the end of a program still runs
            cleaned.append(now())

    with pytest.raises(Deadlock, match=r"nothing will ever happen again at 2 s .*test_clock\.py:"):
        run_virtual(main(), debug=debug)
    assert cleaned == [3.0]


def test_a_deadlock_names_some_of_those_who_wait() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(20):
                group.create_task(wait_for_ever(), name=f"waiter-{n:02}")

    with pytest.raises(Deadlock, match=r"waiter-00 at test_clock\.py:\d+, .*, 13 more"):
        run_virtual(main())


def test_a_loop_without_tasks_is_a_deadlock_too() -> None:
    loop = VirtualClockLoop()
    with pytest.raises(Deadlock, match="waiting: no task"):
        loop.run_forever()
    loop.close()


# ── threads ─────────────────────────────────────────────────────────────────────────────


@in_both_modes
def test_time_stands_still_while_a_thread_works(debug: bool) -> None:
    def work() -> int:
        time.sleep(0.05)
        return 7

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.001, print)
        async with asyncio.timeout(0.01):
            assert await asyncio.to_thread(work) == 7
        assert now() == 0.0
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        await asyncio.sleep(1)
        assert now() == 1.0

    run_virtual(main(), debug=debug)


@in_both_modes
def test_a_thread_wakes_the_loop_and_works_on(debug: bool) -> None:
    go_on = threading.Event()

    async def main() -> list[float]:
        loop, posted = asyncio.get_running_loop(), asyncio.Event()

        def work() -> bool:
            loop.call_soon_threadsafe(posted.set)
            return go_on.wait(5)

        async with asyncio.TaskGroup() as group:
            working = group.create_task(asyncio.to_thread(work))
            await posted.wait()
            times = [now()]
            go_on.set()
        assert working.result()
        return [*times, now()]

    assert run_virtual(main(), debug=debug) == [0.0, 0.0]


def test_work_that_nobody_awaits_any_more_is_waited_for() -> None:
    gate, told = threading.Event(), list[str]()

    class Loop(VirtualClockLoop):
        def _listen(self) -> None:
            gate.set()  # it waits for the thread, which can end now
            super()._listen()

    async def main() -> None:
        loop, started = asyncio.get_running_loop(), threading.Event()

        def work() -> None:
            started.set()
            assert gate.wait(5)
            loop.call_soon_threadsafe(told.append, "thread")

        working = asyncio.create_task(asyncio.to_thread(work))
        while not started.is_set():
            await asyncio.sleep(0)
        working.cancel()
        loop.call_later(1, told.append, "timer")
        await asyncio.sleep(2)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
    assert told == ["thread", "timer"]


def test_an_executor_of_one_s_own_and_work_that_never_began() -> None:
    gate = threading.Event()

    async def main(pool: ThreadPoolExecutor) -> float:
        loop = asyncio.get_running_loop()
        first = loop.run_in_executor(pool, gate.wait, 5)
        second = loop.run_in_executor(pool, print)
        second.cancel()  # it never begins
        gate.set()
        assert await first
        await asyncio.sleep(1)
        return now()

    with ThreadPoolExecutor(1) as pool:
        assert run_virtual(main(pool)) == 1.0


def test_threads_at_work_are_no_deadlock_and_the_executor_can_be_shut_down() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        await loop.shutdown_default_executor()
        with pytest.raises(RuntimeError, match="shutdown"):
            await asyncio.to_thread(print)

    run_virtual(main())
    before = set(threading.enumerate())
    run_virtual(asyncio.to_thread(time.sleep, 0.01))
    assert set(threading.enumerate()) <= before


def test_many_threads() -> None:
    async def main() -> float:
        loop, posted = asyncio.get_running_loop(), list[int]()

        def work(n: int) -> int:
            loop.call_soon_threadsafe(posted.append, n)
            return n

        for _ in range(20):
            done = await asyncio.gather(*(asyncio.to_thread(work, n) for n in range(50)))
            assert done == list(range(50))
            assert sorted(posted) == done
            posted.clear()
            await asyncio.sleep(0.5)
        return now()

    assert run_virtual(main()) == 10.0


def test_ctrl_c_ends_it_while_it_waits_for_a_thread() -> None:
    ended, main_thread = threading.Event(), threading.main_thread().ident
    assert main_thread is not None

    def work() -> None:
        signal.pthread_kill(main_thread, signal.SIGINT)
        assert ended.wait(5)

    async def main() -> None:
        try:
            await asyncio.to_thread(work)
        finally:
            ended.set()

    # Started in the background by a shell, a process ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_virtual(main())
    finally:
        signal.signal(signal.SIGINT, before)


# ── the rest of a loop ──────────────────────────────────────────────────────────────────


def test_async_generators_are_closed_at_its_end() -> None:
    told: list[float] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(1)
            told.append(now())

    async def main() -> object:
        generator = numbers()
        async for _ in generator:
            break
        return generator  # kept: it is not the garbage collector that closes it

    kept = run_virtual(main())
    assert told == [1.0]
    del kept


@pytest.mark.parametrize(
    "use",
    [
        lambda: asyncio.open_connection("127.0.0.1", 1),
        lambda: asyncio.start_server(print, "127.0.0.1", 0),
        lambda: asyncio.create_subprocess_exec("true"),
        lambda: asyncio.get_running_loop().add_reader(0, print),
        lambda: asyncio.get_running_loop().add_signal_handler(2, print),
    ],
)
def test_it_says_what_it_has_not(use: Callable[[], Any]) -> None:
    async def main() -> None:
        with pytest.raises(NotImplementedError, match="VirtualClockLoop has no sockets"):
            await use()

    run_virtual(main())


def test_the_clock_that_goes_with_a_loop() -> None:
    async def main() -> bool:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3)
        return clock_of(loop)() == loop.time() == 3.0

    assert run_virtual(main())

    async def real() -> object:
        return clock_of(asyncio.get_running_loop())

    assert asyncio.run(real()) is time.monotonic


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)

    async def main() -> None:
        await asyncio.to_thread(print, end="")
        asyncio.get_running_loop().call_later(100, print)

    run_virtual(main())
    with pytest.raises(Deadlock):
        run_virtual(wait_for_ever())
    gc.collect()
    assert not seen


async def test_it_is_not_run_inside_another_loop() -> None:
    """And nothing of it is left for a later garbage collection to complain about."""

    async def main() -> None:
        """Do nothing."""

    with pytest.raises(RuntimeError, match=r"run_virtual\(\) makes an event loop of its own"):
        run_virtual(main())
    gc.collect()
