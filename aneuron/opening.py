"""`aneuron.open()`: an engine to await, or to enter.

Comes in: the arguments of `Engine`. Goes out: what is not an open engine yet, and says so of
every use but these two. Runs in the caller's task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from aneuron.engine import Engine
from aneuron.stream import AsyncEntered

if TYPE_CHECKING:
    import os
    from collections.abc import Generator

    from aneuron.device import Model

__all__ = ["open_engine"]


class _Opening(AsyncEntered):
    """What `aneuron.open()` returns: await it for an open engine, or enter it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __await__(self) -> Generator[Any, None, Engine]:
        return self._engine.open().__await__()

    if not TYPE_CHECKING:  # a checker is to refuse it

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"no {name!r} yet: `engine = await aneuron.open(...)`, or `async with` it, comes "
                "first"
            )

    async def __aenter__(self) -> Engine:
        return await self._engine.open()

    async def __aexit__(self, *_: object) -> None:
        await self._engine.aclose()


def open_engine(model: str | os.PathLike[str] | Model, **options: Any) -> _Opening:
    """Return an `Engine` to await (close it with `aclose()`) or to enter; same arguments."""
    return _Opening(Engine(model, **options))
