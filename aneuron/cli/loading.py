"""Opening a model for a command, and telling on stderr how far it is.

Comes in: a model's name and the settings of its engine. Goes out: an open engine, which is
closed at the end.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Self

from aneuron.cli.terminal import note

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rich.progress import Progress as Bar

    from aneuron.cli.options import EngineSettings
    from aneuron.engine import Engine
    from aneuron.models.catalog import Progress

__all__ = ["Told", "opened", "reporting"]

_COUNTED = ("compile", "warm up")  # stages of programs, not of bytes


@contextlib.asynccontextmanager
async def opened(model: str, settings: EngineSettings, *, quiet: bool) -> AsyncIterator[Engine]:
    """Open an engine, telling on stderr how far it is, and close it at the end.

    Raises:
        ConfigError: a setting is wrong, or there is no such model.
    """
    from aneuron.engine import Engine

    with Told(quiet=quiet):
        with _Reporter(model, quiet=quiet) as reporter:
            engine = Engine(model, progress=reporter, **asdict(settings))
            await engine.open()
        try:
            yield engine
        finally:
            await engine.aclose()


def reporting(model: str, *, quiet: bool) -> contextlib.AbstractContextManager[Progress]:
    """Return, to be entered, what tells on stderr how far fetching and loading a model are."""
    return _Reporter(model, quiet=quiet)


class Told(logging.Handler):
    """Says on stderr what goes on behind an open engine: that its steps are being compiled.

    Args:
        quiet: say only what went wrong.
    """

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(logging.WARNING if quiet else logging.INFO)
        self._logger = logging.getLogger("aneuron.native")
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        """Say it; whatever comes of that, what goes on behind goes on."""
        try:
            note(record.getMessage())
        except Exception:  # noqa: BLE001  stderr may be gone
            self.handleError(record)

    def __enter__(self) -> Self:
        if not logging.getLogger().handlers:  # else they are shown already
            self._logger.addHandler(self)
            self._logger.setLevel(min(self.level, self._logger.getEffectiveLevel()))
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


class _Reporter:
    """Shows fetching and loading on stderr: a bar on a terminal, else a line per stage."""

    def __init__(self, model: str, *, quiet: bool) -> None:
        self._model = model
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()  # asked once: the bar puts a proxy there
        self._stage = ""
        self._bar: Bar | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Take the news; called in the thread that loads."""
        if self._is_over:  # Ctrl-C: raising here is what stops a download
            raise KeyboardInterrupt
        if self._quiet:
            return
        is_new, self._stage = stage != self._stage, stage
        if self._is_terminal:
            self._draw(done, total, is_new=is_new)
        elif is_new:
            size = "" if total is None else f" ({self._size(total)})"
            note(f"{self._model}: {stage}{size}")

    def _size(self, count: int) -> str:
        if self._stage in _COUNTED:
            return f"{count} programs"
        return f"{count / 1e6:.0f} MB"

    def _draw(self, done: int, total: int | None, *, is_new: bool) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress

            columns = ("{task.description}", BarColumn(), "{task.fields[size]}")
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        if is_new:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(f"{self._model}: {self._stage}", total=total, size="")
        size = "" if total is None else f"{self._size(done).split()[0]} of {self._size(total)}"
        self._bar.update(self._bar.task_ids[0], completed=done, size=size)
