"""A test suite of your own on `aneuron.testing`: copy it, then `pytest user_suite.py`."""

import os
from typing import Any

import pytest

import aneuron
from aneuron.testing import count_engine, no_leaks, run_virtual


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": os.environ.get("LOOP") == "uvloop"}


async def my_app(engine: aneuron.Engine, start: int) -> list[int | None]:
    """Stands for your code: the simulated model COUNT says start + 1, start + 2, …"""
    return [
        token.token_id async for token in engine.generate(prompt_token_ids=[start], max_tokens=3)
    ]


@pytest.mark.anyio
async def test_my_app_passes_every_token_on() -> None:
    async with count_engine() as engine, no_leaks(engine):
        assert await my_app(engine, 41) == [42, 43, 44]


def test_my_app_survives_a_slow_device() -> None:
    async def main() -> float:
        async with count_engine(latency=20.0) as engine, no_leaks(engine):
            assert await my_app(engine, 7) == [8, 9, 10]
            return engine.loop.time()

    assert run_virtual(main()) == 60.0  # three steps on virtual time: nothing slept
