"""Event loops: the right one, a wrong one, none, one after another."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

import aneuron
from aneuron import Engine
from aneuron.testing import assert_idle, count_engine, no_leaks
from tests.support import after, start

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron import TokenStream


async def test_case_57_notebook_cell() -> None:
    """A running loop: `await aneuron.open(...)`, use in later calls, `await aclose()`."""
    engine = await aneuron.open("sim:count", max_num_seqs=4)
    ids = [token.token_id async for token in start(engine, 10, 3)]
    assert ids == [11, 12, 13]
    await engine.aclose()
    await engine.aclose()
    async with aneuron.open("sim:count") as engine:
        assert (await start(engine, 10, 3)).token_ids == [11, 12, 13]
    assert_idle(engine)


def test_case_58_run_twice() -> None:
    """`asyncio.run(use(engine))` twice: it works, or says at once what is wrong."""
    engine = Engine("sim:count")

    async def enter() -> list[int]:
        async with engine:
            return (await start(engine, 10, 3)).token_ids

    async def only_open() -> list[int]:
        await engine.open()
        return (await start(engine, 20, 3)).token_ids

    async def only_use() -> None:
        await start(engine, 20, 3)

    assert asyncio.run(enter()) == asyncio.run(enter()) == [11, 12, 13]
    # Never closed: the loop went, and the engine with it.
    assert asyncio.run(only_open()) == asyncio.run(only_open()) == [21, 22, 23]
    with pytest.raises(RuntimeError, match="belongs to the event loop"):
        asyncio.run(only_use())
    assert asyncio.run(enter()) == [11, 12, 13]


ORPHANS: list[Any] = []


def test_stream_of_a_loop_that_went_does_not_touch_the_next_engine() -> None:
    """The loop is closed in the middle of a request; its stream is dropped under a new loop."""
    engine = Engine("sim:count")
    kept: list[TokenStream] = []

    async def first() -> None:
        await engine.open()
        kept.append(start(engine, 10, 10_000))
        await anext(kept[0])

    async def second() -> list[int]:
        async with asyncio.timeout(5), engine:
            stream = start(engine, 500, 50)
            await anext(stream)
            kept.pop().cancel()
            await asyncio.sleep(0)
            return (await stream).token_ids

    loop = asyncio.new_event_loop()
    loop.run_until_complete(first())
    ORPHANS.append(asyncio.all_tasks(loop))  # or gc would throw GeneratorExit into them
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()  # as a notebook's kernel does: nothing is cancelled
    assert asyncio.run(second()) == after(500, 50)


def test_case_60_no_loop_yet(tmp_path: Path) -> None:
    """Import and use, plain and uvloop: no policy is set, no thread started by importing."""
    code = """
        import asyncio, threading, aneuron, aneuron.testing, aneuron.engine, uvloop

        assert threading.active_count() == 1
        assert asyncio.events._event_loop_policy is None
        engine = aneuron.Engine("sim:count")
        try:
            engine.generate("x")
        except aneuron.EngineClosed:
            pass

        async def main():
            async with engine:
                print((await engine.generate(prompt_token_ids=[1], max_tokens=3)).token_ids)

        asyncio.run(main())
        uvloop.run(main())
        try:
            engine.abort("x")
        except RuntimeError as error:
            print(error)
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if "aneuron" in name], names
        """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )
    assert (child.returncode, child.stderr) == (0, "")
    first, second, third = child.stdout.splitlines()
    assert first == second == "[2, 3, 4]"
    assert "call it there" in third


async def test_wrong_loop_and_no_loop() -> None:
    """Calls from another loop, or from a thread without one: RuntimeError that says so."""
    async with count_engine() as engine, no_leaks(engine):

        async def use() -> None:
            await start(engine)

        def run() -> None:
            asyncio.run(use())

        with pytest.raises(RuntimeError, match="belongs to the event loop"):
            await asyncio.to_thread(run)
        for call in (lambda: start(engine), lambda: engine.abort("x")):
            with pytest.raises(RuntimeError, match="call it there"):
                await asyncio.to_thread(call)
        assert engine.stats().steps == 0


async def test_an_engine_that_is_dropped_open_says_so_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As when a notebook's cell that opens one is run again."""
    engine = await aneuron.open("sim:count")
    core, [supervisor] = (
        engine._core,
        [one for one in asyncio.all_tasks() if one.get_name() == "aneuron-supervisor"],
    )
    with pytest.warns(ResourceWarning, match=r"sim:count.*was dropped.*aclose"):
        del engine
    await asyncio.wait({supervisor})
    assert core.failure is not None
    assert not caplog.records


async def test_an_open_engine_lives_while_its_stream_does() -> None:
    async def begin() -> TokenStream:
        engine = await aneuron.open("sim:count")
        return engine.generate(prompt_token_ids=[10], max_tokens=30)

    stream = await begin()
    gc.collect()
    assert (await stream).token_ids == list(range(11, 41))
    with pytest.warns(ResourceWarning, match="was dropped"):
        del stream
    while any(one.get_name() == "aneuron-supervisor" for one in asyncio.all_tasks()):
        await asyncio.sleep(0)
