"""What several test files share: short ways to say a request, and what COUNT and SUM answer."""

from __future__ import annotations

import asyncio
import gc
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import Completion
from aneuron.testing import SimDevice, assert_idle, wait_all_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from aneuron import Engine, Token, TokenStream

STEP_S = 0.005
both_schedulings = pytest.mark.parametrize("async_scheduling", [True, False])


def after(last: int, count: int) -> list[int]:
    """What COUNT says after a prompt that ends in `last`."""
    return list(range(last + 1, last + 1 + count))


def sum_reference(prompt: list[int], count: int, vocab_size: int = 1 << 20) -> list[int]:
    """What SUM says, computed without an engine."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(sum((at + 1) * token for at, token in enumerate(ids)) % vocab_size)
    return ids[len(prompt) :]


def start(engine: Engine, last: int = 10, max_tokens: int = 50, **options: Any) -> TokenStream:
    return engine.generate(prompt_token_ids=[last], max_tokens=max_tokens, **options)


def device_of(engine: Engine) -> SimDevice:
    assert isinstance(engine.device, SimDevice)
    return engine.device


async def await_it(stream: TokenStream) -> Any:
    return await stream


async def read(stream: TokenStream, count: int) -> list[int | None]:
    return [(await anext(stream)).token_id for _ in range(count)]


async def items_of(stream: TokenStream) -> list[Token]:
    return [token async for token in stream]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def outcome(stream: TokenStream) -> Completion | BaseException:
    try:
        async with asyncio.timeout(5):
            return await stream
    except BaseException as error:
        return error


async def outcomes(streams: Iterable[TokenStream]) -> list[Any]:
    return await asyncio.gather(*map(outcome, streams))


def exact(answer: Any, last: int, count: int = 40) -> bool:
    return isinstance(answer, Completion) and answer.token_ids == after(last, count)


async def assert_exact(engine: Engine, last: int = 500, count: int = 5) -> None:
    assert exact(await start(engine, last, count), last, count)


async def assert_serves(engine: Engine) -> None:
    """Later requests are served exact, and the pool is full behind them."""
    streams = [start(engine, 1000 * n, 20) for n in range(1, 6)]
    for n, answer in enumerate(await outcomes(streams), 1):
        assert exact(answer, 1000 * n, 20), answer
    await wait_all_idle(engine)
    assert_idle(engine)


async def assert_idle_soon(engine: Engine, steps: int = 3) -> None:
    """The engine is idle no later than `steps` engine steps on."""
    before = device_of(engine).num_steps
    await engine.wait_idle()
    assert device_of(engine).num_steps - before <= steps
    assert_idle(engine)


@asynccontextmanager
async def nothing_logged(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """No InvalidStateError, no "exception was never retrieved", no destroyed task."""
    loop = asyncio.get_running_loop()
    seen: list[dict[str, Any]] = []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: seen.append(context))
    try:
        yield
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(before)
    assert not seen
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
