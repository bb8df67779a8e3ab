"""`--stats` while a command runs: one line per second of what its engine does.

Comes in: an open engine. Goes out: lines on stderr; to a terminal only, unless an interval is
asked for, or a server does it; and none of an interval in which there was nothing to do. A timer
handle on the loop writes them; no task, nothing waits.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cyclopts import Parameter

from aneuron.cli.options import Flag  # noqa: TC001 (cyclopts reads them)
from aneuron.cli.terminal import note
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.engine import Engine
    from aneuron.outputs import EngineStats
    from aneuron.server.watch.lag import LoopLag

__all__ = ["StatsSettings", "Ticker", "stats_line"]

_INTERVAL_S = 1.0
_LEAST_S = 0.05


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StatsSettings:
    """What is told of the engine.

    Attributes:
        stats: Say on stderr what the engine does, each second; `run` adds at its end how fast
            it was.
        stats_interval: Seconds between those lines; says them also where stderr is no terminal.
    """

    stats: Flag = False
    stats_interval: float | None = None

    def check(self) -> None:
        """Check the interval, before a model is loaded.

        Raises:
            ConfigError: it is no time.
        """
        if self.stats_interval is not None and not _LEAST_S <= self.stats_interval < 86_400:
            raise ConfigError(
                f"--stats-interval must be seconds from {_LEAST_S:g}, not {self.stats_interval:g}"
            )

    @property
    def is_wanted(self) -> bool:
        """Whether anything is to be said."""
        return self.stats or self.stats_interval is not None

    def ticker(self, engine: Engine, *, always: bool = False) -> Ticker:
        """Return what writes the lines while it is entered; nothing where nobody would look.

        Args:
            engine: open.
            always: write them also where stderr is no terminal.
        """
        is_read = always or self.stats_interval is not None or sys.stderr.isatty()
        interval_s = _INTERVAL_S if self.stats_interval is None else self.stats_interval
        return Ticker(engine, interval_s if self.is_wanted and is_read else None)


class Ticker:
    """Writes a line each interval, while it is entered on the engine's loop.

    Args:
        engine: open.
        interval_s: seconds from line to line; None writes nothing.
    """

    def __init__(self, engine: Engine, interval_s: float | None) -> None:
        """Make one at rest."""
        self._engine = engine
        self._interval_s = interval_s
        self._lag: LoopLag
        self._last: EngineStats
        self._last_s: float
        self._timer: asyncio.TimerHandle | None = None
        # An answer's text has no end of line yet where it comes to the same terminal.
        self._begin = "\n" if sys.stdout.isatty() else ""

    def __enter__(self) -> Self:
        if self._interval_s is not None:
            from aneuron.server.watch.lag import LoopLag

            loop = asyncio.get_running_loop()
            self._lag = LoopLag(self._engine)
            self._lag.start()
            self._last, self._last_s = self._engine.stats(), loop.time()
            self._timer = loop.call_later(self._interval_s, self._tick, loop)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._interval_s is not None
        self._timer = loop.call_later(self._interval_s, self._tick, loop)
        stats, now_s = self._engine.stats(), loop.time()
        before, elapsed_s, lag_s = self._last, now_s - self._last_s, self._lag.max_s
        self._last, self._last_s = stats, now_s
        self._lag.max_s = 0.0  # of the next interval
        if stats.running or stats.waiting or stats.prompt_tokens != before.prompt_tokens:
            note(f"{self._begin}{stats_line(before, stats, elapsed_s, lag_s)}")


def stats_line(before: EngineStats, after: EngineStats, elapsed_s: float, lag_s: float) -> str:
    """Return one line on what an engine did between two snapshots.

    Args:
        before: a snapshot.
        after: a later one.
        elapsed_s: seconds between them.
        lag_s: the event loop's, the longest between them.
    """
    rate_in = (after.prompt_tokens - before.prompt_tokens) / elapsed_s if elapsed_s > 0 else 0.0
    made = after.generation_tokens - before.generation_tokens
    rate_out = made / elapsed_s if elapsed_s > 0 else 0.0
    used = after.used_blocks / after.num_blocks if after.num_blocks else 0.0
    return (
        f"running {after.running}, waiting {after.waiting}; tokens/s in {rate_in:.0f}, "
        f"out {rate_out:.0f}; KV {used:.0%}; loop lag {lag_s * 1e3:.0f} ms"
    )
