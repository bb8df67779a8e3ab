"""`LoopLag`: how late the event loop is.

Comes in: nothing but time. Goes out: a histogram of the lateness of a timer, ten times a second.
No task runs it: a timer handle on the loop that sets the next one. It holds the `LoopLag` by a
weak reference, so an app that is dropped takes its timer along.
"""

from __future__ import annotations

import asyncio
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from aneuron.clock import clock_of
from aneuron.server.watch.histogram import LAG, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoopLag", "Watched"]

_EVERY_S = 0.1


class Watched(Protocol):
    """What is asked of the engine whose loop is watched."""

    loop: asyncio.AbstractEventLoop

    @property
    def is_open(self) -> bool:
        """It takes requests."""


class LoopLag:
    """Lateness of a timer on the engine's loop, while the engine is open.

    uvloop's timers count in milliseconds, so there a millisecond of it is none.

    Attributes:
        lateness: of each timer, in seconds.
        last_s: of the last one.
        max_s: the longest so far.
    """

    def __init__(self, engine: Watched) -> None:
        """Make one at rest."""
        self.lateness = Histogram(LAG)
        self.last_s = self.max_s = 0.0
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None  # that a timer of ours is on
        self._clock: Callable[[], float]
        self._due_s: float

    @property
    def is_running(self) -> bool:
        """A timer is on the loop."""
        return self._loop is not None

    def start(self) -> None:
        """Begin, if it has not begun; nothing happens outside the loop of an open engine."""
        engine = self._engine
        if not engine.is_open or self._loop is engine.loop:
            return
        with suppress(RuntimeError):  # there is no loop
            if asyncio.get_running_loop() is engine.loop:
                self._loop, self._clock = engine.loop, clock_of(engine.loop)
                self._set_timer()

    def _set_timer(self) -> None:
        assert self._loop is not None
        self._due_s = self._clock() + _EVERY_S
        self._loop.call_later(_EVERY_S, _ring, weakref.ref(self), self._loop)

    def ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take note of a timer on `loop`, and set the next one if the engine is open still."""
        if loop is not self._loop:  # the engine was opened again, on another loop
            return
        self.last_s = max(0.0, self._clock() - self._due_s)
        self.max_s = max(self.max_s, self.last_s)
        self.lateness.observe(self.last_s)
        if self._engine.is_open:
            self._set_timer()
        else:
            self._loop = None


def _ring(lag: weakref.ref[LoopLag], loop: asyncio.AbstractEventLoop) -> None:
    if (found := lag()) is not None:
        found.ring(loop)
