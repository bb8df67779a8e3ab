"""What all tests share: the event loops they run on, blocking-call checks, hypothesis."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.config import create_terminal_writer
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

from aneuron.models.files.cache import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

# The compiled library is that of the machine, whatever cache directory a test has.
os.environ.setdefault("ANEURON_NATIVE_DIR", str(cache_dir() / "native"))
# Before torch is first imported: a machine that runs tests has other work to do, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The core also runs in asyncio's debug mode (wrong-thread calls, slow callbacks, lost
# exceptions); an `asyncio-debug` variant of a test stays only in these files.
DEBUG_MODE_FILES = {
    "test_adversity.py",
    "test_bugs.py",
    "test_cancellation.py",
    "test_cancellation_inside.py",
    "test_carry.py",
    "test_carry_steps.py",
    "test_engine.py",
    "test_flow.py",
    "test_generate_many.py",
    "test_loops.py",
    "test_futures.py",
    "test_opening.py",
    "test_runner.py",
    "test_silence.py",
    "test_stream.py",
    "test_stream_text.py",
}

LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"use_uvloop": False},
    "uvloop": {"use_uvloop": True},
    "asyncio-debug": {"use_uvloop": False, "debug": True},
}

settings.register_profile(
    "dev",
    deadline=None,
    print_blob=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],  # two cores, shared
)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=300)
settings.register_profile("soak", settings.get_profile("dev"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


@pytest.fixture(
    scope="module",
    params=[pytest.param(("asyncio", options), id=name) for name, options in LOOPS.items()],
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Run each async test on every loop; a test file that needs one loop overrides this."""
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the debug-mode variants to the core's tests, of several carries to `resident`."""
    items[:] = [item for item in items if "[asyncio-debug" not in item.name or _debugs(item)]


def _debugs(item: pytest.Item) -> bool:
    others = {"host", "handoff"} & set(item.name.rstrip("]").split("-"))
    return item.path.name in DEBUG_MODE_FILES and not others


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let a worker tell the stacks of a test that hangs: its standard output leads nowhere."""
    if hasattr(session.config, "workerinput") and sys.__stderr__ is not None:
        # Not the reporter's own, or each worker would report all over again.
        writer = create_terminal_writer(session.config, sys.__stderr__)
        vars(session.config)["get_terminal_writer"] = lambda: writer


@pytest.fixture(scope="session", autouse=True)
def blocking_calls_raise() -> Iterator[BlockBuster]:
    """Make a blocking call of aneuron's code on a running loop raise `BlockingError`."""
    detector = BlockBuster("aneuron")
    # A command may write its answer to the terminal from the loop, as print() does.
    del detector.functions["io.TextIOWrapper.write"]
    for function in detector.functions.values():
        function.can_block_in("importlib._bootstrap>", "_find_and_load")  # a first import
    detector.activate()
    yield detector
    detector.deactivate()


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_collected_again() -> None:
    """Leave it out of collections: each would take 0.6 s, and hundreds of tests ask for one."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile what real models run on first: all tests then see the same steps."""
    if any(item.get_closest_marker("tiny") for item in session.items):
        from aneuron.models.native.build import compile_library

        compile_library()
