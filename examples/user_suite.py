"""A test suite of your own on `aneuron.testing`: `pytest examples/user_suite.py`."""

import pytest

import aneuron
from aneuron.testing import count_engine, no_leaks

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def my_app(engine: aneuron.Engine, start: int) -> list[int | None]:
    """Stands for your code: the simulated model COUNT says start + 1, start + 2, …"""
    return [
        token.token_id async for token in engine.generate(prompt_token_ids=[start], max_tokens=3)
    ]


async def test_my_app_passes_every_token_on() -> None:
    async with count_engine() as engine, no_leaks(engine):
        assert await my_app(engine, 41) == [42, 43, 44]


async def test_my_app_survives_a_slow_device() -> None:
    async with count_engine(latency=0.01) as engine, no_leaks(engine):
        assert await my_app(engine, 7) == [8, 9, 10]
