"""How tests of deliberate faults run the test that must notice."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def load_test(module: str, name: str) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return an async test of a file beside this one."""
    spec = importlib.util.spec_from_file_location(module, Path(__file__).with_name(f"{module}.py"))
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    function: Callable[..., Coroutine[Any, Any, None]] = getattr(loaded, name)
    return function


def assert_fails(
    function: Callable[..., Coroutine[Any, Any, None]], arguments: dict[str, Any]
) -> None:
    """Run a test that a fault must make fail."""

    async def run() -> None:
        async with asyncio.timeout(8):
            await function(**arguments)

    with pytest.raises(BaseException) as caught:  # noqa: PT011  any failure counts …
        asyncio.run(run())
    # … but one of the mutation's own, or of a test that has another signature by now.
    error: BaseException | None = caught.value
    while error is not None:
        assert not isinstance(error, KeyboardInterrupt | TypeError | AttributeError | NameError)
        error = error.__cause__
