"""What goes wrong on a played runtime on demand, and what callers of one must not do.

Faults are the runtime's: they surface as it would tell them, a `RuntimeError` with the status
code. A violation is the caller's: on hardware it might show as wrong tokens, late, or not at
all; here it raises at once and stays on a list.
"""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aneuron.device.neuron.status import STATUSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "QUEUE_FULL",
    "Fault",
    "FaultPlan",
    "Violation",
    "Watch",
    "claim_cores",
    "cores_busy",
    "nrt_error",
    "release_cores",
]

FaultStatus = int | Literal["hang", "compile", "cores busy"]
QUEUE_FULL = 7


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong once.

    Attributes:
        status: a status code of the runtime (4 out of memory, 5 time-out, 7 queue full, 101
            unrecoverable, 1003 NaN, 1006 out of bounds); "hang" for a program that never ends;
            "compile" for a compiler that fails; "cores busy" for cores that another has.
        step: which launch, from 1, of those that follow; 0 is at load. A launch that a full queue
            refuses is none.
        rank: whose core. One program of many ranks fails as a whole.
    """

    status: FaultStatus
    step: int = 1
    rank: int = 0


class FaultPlan:
    """Which launch of a core fails, and how.

    Args:
        faults: all that is planned.
        rank: of the core; None takes those of every rank.
    """

    def __init__(self, faults: Iterable[Fault] = (), *, rank: int | None = None) -> None:
        """Plan the faults; no launch has been counted."""
        self._rank = rank
        self._num_launches = 0
        self._planned: dict[int, list[Fault]] = {}
        self.add(*faults)

    def add(self, *faults: Fault) -> None:
        """Plan more faults; their steps count from the next launch on."""
        for fault in faults:
            if self._rank in (None, fault.rank):
                at = fault.step + self._num_launches if fault.step else 0
                self._planned.setdefault(at, []).append(fault)

    def at_load(self) -> Fault | None:
        """Return what fails at load, once."""
        return self._take(0)

    def next_launch(self) -> Fault | None:
        """Count a launch and return what fails it, once; one that is refused does not count."""
        fault = self._take(self._num_launches + 1)
        if fault is None or fault.status != QUEUE_FULL:
            self._num_launches += 1
        return fault

    def _take(self, step: int) -> Fault | None:
        left = self._planned.get(step)
        return left.pop(0) if left else None


def nrt_error(status: int, about: str = "") -> RuntimeError:
    """Return what the runtime raises for a status: its text has the code."""
    name = f"NRT_{STATUSES[status].name}" if status in STATUSES else "unknown"
    return RuntimeError(f"nrt status {status}: {name}" + (f", {about}" if about else ""))


class Violation(RuntimeError):
    """A caller broke a rule of the runtime; the message says which one, and how."""


class Watch:
    """What callers did that they must not.

    Attributes:
        violations: what was caught, oldest first.
    """

    def __init__(self) -> None:
        """Watch this process's calls."""
        self.violations: list[str] = []
        self._process_id = os.getpid()

    def broken(self, what: str) -> Violation:
        """Put a violation on the list and return what to raise for it."""
        self.violations.append(what)
        return Violation(what)

    def check_caller(self, what: str) -> None:
        """Check that a call that may block comes from a thread and a process that may make it.

        Args:
            what: the call does ("a read of a device value").

        Raises:
            Violation: an event loop runs on this thread, or this process was forked.
        """
        if os.getpid() != self._process_id:
            raise self.broken(f"{what} in a forked process: the runtime is its parent's, spawn")
        if asyncio._get_running_loop() is not None:  # noqa: SLF001  public, but for its name
            raise self.broken(f"{what} on the event loop's thread")


_claimed: dict[int, object] = {}  # core → who has it, in this process
_claims = threading.Lock()


def claim_cores(cores: Sequence[int], owner: object) -> None:
    """Take cores of this process.

    Raises:
        RuntimeError: somebody has one of them.
    """
    with _claims:
        if busy := [core for core in cores if _claimed.get(core, owner) is not owner]:
            raise cores_busy(busy)
        _claimed.update(dict.fromkeys(cores, owner))


def release_cores(owner: object) -> None:
    """Give back all cores of an owner; none is no error."""
    with _claims:
        for core in [core for core, by in _claimed.items() if by is owner]:
            del _claimed[core]


def cores_busy(cores: Sequence[int]) -> RuntimeError:
    """Return what the runtime raises where another has the cores."""
    listed = ", ".join(map(str, cores))
    return RuntimeError(f"nrt status 1005: NeuronCore(s) not available: {listed}")
