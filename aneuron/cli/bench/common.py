"""What the benchmarks share: options, the event loop, and how results are shown.

Comes in: option values as typed, coroutines, rows of figures. Goes out: checked numbers, a
coroutine's result, a table or one JSON object on stdout.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from aneuron.cli.options import Flag, JsonFlag
from aneuron.cli.terminal import note, show_json, stdout_console
from aneuron.device.profiles import PROFILES
from aneuron.errors import ConfigError
from aneuron.timeline import RING_STEPS

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

__all__ = [
    "MAX_SEQS",
    "Flag",
    "JsonFlag",
    "ProfileName",
    "check_kept",
    "check_number",
    "default_loop",
    "machine",
    "parse_counts",
    "run_on",
    "show_json",
    "show_table",
    "tell",
]

T = TypeVar("T")
ProfileName = Annotated[
    str,
    Parameter(help=f"A latency profile of the simulated device: {', '.join(PROFILES)}."),
]
MAX_SEQS = 4096
_LOOPS = ("uvloop", "asyncio")


def parse_counts(option: str, text: str, *, at_most: int = MAX_SEQS) -> list[int]:
    """Return the numbers of a list like `1,8,64`.

    Args:
        option: its name on the command line, for the message.
        text: what was typed.
        at_most: the largest number there may be.

    Raises:
        ConfigError: it is no list of positive integers up to `at_most`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"{option} must be positive integers, separated by commas, not {text!r}", param=option
        )
    counts = [int(part) for part in parts]
    check_number(option, max(counts), at_most=at_most)
    return counts


def check_number(
    option: str, value: float, *, at_least: float = 1, at_most: float = math.inf
) -> None:
    """Check a number.

    Raises:
        ConfigError: it is not finite, under `at_least` or over `at_most`.
    """
    if not math.isfinite(value):
        raise ConfigError(f"{option} must be a finite number, not {value:g}", param=option)
    if value < at_least:
        raise ConfigError(f"{option} must be at least {at_least:g}, not {value:g}", param=option)
    if value > at_most:
        raise ConfigError(f"{option} must be at most {at_most:g}, not {value:g}", param=option)


def check_kept(option: str, steps: float) -> None:
    """Check that a timeline keeps all steps of a measurement.

    Args:
        option: that asks for most of them, for the message.
        steps: how many it takes at most, with prompts and warm-up.

    Raises:
        ConfigError: they are more than its ring holds.
    """
    if steps > RING_STEPS:
        raise ConfigError(
            f"{option}: this takes up to {steps:.0f} steps with prompts and warm-up, and a "
            f"timeline keeps the last {RING_STEPS}; ask for fewer",
            param=option,
        )


def tell(text: str) -> None:
    """Say at a terminal what is being measured now; it may take minutes."""
    if sys.stderr.isatty():
        note(text)


def run_on(loop: str, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new loop of this kind, "uvloop" or "asyncio"; return its result.

    Raises:
        ConfigError: no such loop here.
    """
    try:
        factory = _loop_factory(loop)
    except ConfigError:
        work.close()
        raise
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def default_loop() -> str:
    """Return "uvloop" where there is one, as the other commands use, else "asyncio"."""
    return "asyncio" if sys.platform == "win32" else "uvloop"


def _loop_factory(loop: str) -> Any:
    if loop not in _LOOPS:
        raise ConfigError(f"--loop must be {' or '.join(_LOOPS)}, not {loop!r}", param="--loop")
    if loop == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError as error:
        raise ConfigError("--loop uvloop: it is not installed here", param="--loop") from error
    return uvloop.new_event_loop


def machine(loop: str) -> str:
    """Return one line on what the figures were measured on, and how busy it was."""
    load = f"load {os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "load unknown"
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    return f"{system}; Python {platform.python_version()}, {loop}; {load}"


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    loop: str,
    facts: Iterable[str] = (),
) -> None:
    """Print a table under its title; below it facts, and what it was measured on."""
    from rich.table import Table

    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*map(_cell, row))
    printed = (title, table, *facts, machine(loop))
    stdout_console().print(*printed, sep="\n", markup=False)


def _cell(value: Any) -> str:
    if value is None:  # there was nothing to measure
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"
    return str(value)
