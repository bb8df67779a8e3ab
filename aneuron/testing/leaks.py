"""Checks that nothing is left: no request, no block, no step, no task.

For the end of a test; `no_leaks` wraps a whole one.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aneuron.engine import Engine

__all__ = ["assert_idle", "no_leaks", "wait_all_idle"]


async def wait_all_idle(*engines: Engine, timeout_s: float = 10.0) -> None:
    """Wait until every engine is idle.

    Raises:
        TimeoutError: one was still busy after `timeout_s` seconds.
    """
    async with asyncio.timeout(timeout_s):
        for engine in engines:
            await engine.wait_idle()


def assert_idle(engine: Engine) -> None:
    """Check that an engine holds nothing: the pool is full, every table empty.

    Raises:
        AssertionError: it names what is left.
    """
    stats = engine.stats()
    left = {
        "running": stats.running,
        "waiting": stats.waiting,
        "steps in flight": stats.in_flight_steps,
        "blocks held": stats.num_blocks - stats.free_blocks,
        **engine._core.records(),  # noqa: SLF001  tables that nobody else needs
    }
    held = {name: number for name, number in left.items() if number}
    assert not held, f"{engine!r} is not idle: {held}"


@asynccontextmanager
async def no_leaks(engine: Engine, *, timeout_s: float = 10.0) -> AsyncIterator[None]:
    """Check at the end of the block that the engine comes to rest and holds nothing.

    Raises:
        TimeoutError, AssertionError: it does not.
    """
    yield
    await wait_all_idle(engine, timeout_s=timeout_s)
    assert_idle(engine)
