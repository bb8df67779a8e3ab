"""Is the server alive, and may it be given work: `/health` and `/ready`.

Comes in: the server's state. Goes out: yes or no, why, and the body that says so. Pure and
cheap, so that a probe costs nothing; both look at the engine, and wait for nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aneuron.errors import AneuronError
    from aneuron.outputs import EngineStats

__all__ = ["Probed", "ProbedEngine", "Settings", "body", "health", "ready"]

_CLOSED = "the engine is not open"


class ProbedEngine(Protocol):
    """What is asked of an engine."""

    @property
    def is_open(self) -> bool:
        """It takes requests."""

    @property
    def failure(self) -> AneuronError | None:
        """What ended it, if that was no closing."""

    def stats(self) -> EngineStats:
        """Return a snapshot of counts."""


class Settings(Protocol):
    """What is asked of a server's settings."""

    @property
    def stall_s(self) -> float:
        """Seconds without a step, while work waits, that are too many."""


class Probed(Protocol):
    """What is asked of a server's state."""

    @property
    def engine(self) -> ProbedEngine:
        """The engine it serves."""

    @property
    def config(self) -> Settings:
        """Its settings."""

    @property
    def is_draining(self) -> bool:
        """It takes no new work."""


def health(state: Probed) -> tuple[bool, str]:
    """Say whether the server is alive; if not, only a restart will help.

    Draining is alive. Not alive: a task of the engine has died or the device is lost, the
    engine is not open, or no step has ended for `stall_s` while work waits.

    Returns:
        Whether it is (200, else 503), and why not, or "ok".
    """
    engine = state.engine
    if (failure := engine.failure) is not None:
        # Its text may have something of a request's in it; probes are often open to all.
        return False, f"the engine has failed: {failure.code}"
    if not engine.is_open:
        return False, _CLOSED
    stalled_s = engine.stats().stalled_s
    if stalled_s > state.config.stall_s:
        return False, f"no step has ended for {stalled_s:.0f} s while work waits"
    return True, "ok"


def ready(state: Probed) -> tuple[bool, str]:
    """Say whether the server may be given work: the engine is open, and it is not draining.

    Returns:
        As `health`.
    """
    if state.is_draining:
        return False, "the server is draining"
    if not state.engine.is_open:
        return False, _CLOSED
    return True, "ok"


def body(verdict: tuple[bool, str]) -> bytes:
    """Return the JSON body of either answer."""
    is_well, reason = verdict
    return json.dumps({"status": "ok" if is_well else "unavailable", "reason": reason}).encode()
