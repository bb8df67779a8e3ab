"""What the tests of AWS Neuron share: how often each of them runs, and what none leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

from aneuron.testing.fakes.faults import _claimed

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def no_hang_outlives_its_test() -> Iterator[None]:
    """Let go of what hangs behind a test that failed: else it keeps the cores from all others."""
    yield
    for owner in {*_claimed.values()}:
        core: Any = getattr(owner, "core", owner)
        core.let_go()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a test's ways over the runtimes on one event loop each, in turns: some on each loop.

    What differs between the loops is not in the adapters, and a step of a played runtime takes
    milliseconds.
    """
    items[:] = [item for item in items if item.path.parent != HERE or _is_its_turn(item)]


def _is_its_turn(item: pytest.Item) -> bool:
    params = getattr(item, "callspec", None)
    if params is None or not {"backend", "anyio_backend"} <= params.params.keys():
        return True
    on_uvloop = "[uvloop" in item.name
    name = item.name.replace("[uvloop", "[").replace("[asyncio", "[")
    return bool(crc32(name.encode()) % 2) == on_uvloop
