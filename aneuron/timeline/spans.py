"""What the pictures of a timeline are made of: stages, and gaps between programs.

Comes in: step records, also half filled ones (a step that failed, or has not come so far).
Goes out: spans with two known ends, so that nobody further on meets a NaN.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from aneuron.plans import Break, BreakReason, StepRecord

__all__ = [
    "MATERIALIZER",
    "STAGES",
    "STEP_LOOP",
    "Gap",
    "Span",
    "facts",
    "has_run",
    "kind",
    "known_times",
    "programs",
    "spans",
    "whole_breaks",
]

STEP_LOOP = "step loop"
MATERIALIZER = "materializer"

# Of the host's turn: name, track, and the two times of the record it lies between.
STAGES = (
    ("schedule", STEP_LOOP, "begun_s", "scheduled_s"),
    ("prepare", STEP_LOOP, "scheduled_s", "prepared_s"),
    ("launch", STEP_LOOP, "prepared_s", "launched_s"),
    ("apply", MATERIALIZER, "read_s", "applied_s"),
    ("detokenize", MATERIALIZER, "applied_s", "detokenized_s"),
    ("deliver", MATERIALIZER, "detokenized_s", "delivered_s"),
)
_TIMES = (
    "begun_s",
    "scheduled_s",
    "prepared_s",
    "launched_s",
    "device_start_s",
    "device_end_s",
    "read_s",
    "applied_s",
    "detokenized_s",
    "delivered_s",
)


class Span(NamedTuple):
    """One stage of one step, both ends known; seconds of the loop's clock (`clock_of`)."""

    name: str
    track: str
    start_s: float
    end_s: float


class Gap(NamedTuple):
    """A time between two programs, with nothing on the device; seconds as in the records.

    Attributes:
        start_s: when the program before ended.
        end_s: when the next one started.
        step_id: of the next one.
        reason: the break it was due to; None: the host's turn was too long.
        is_rest: whether the engine had nothing to do: then it is no idleness.
    """

    start_s: float
    end_s: float
    step_id: int
    reason: BreakReason | None
    is_rest: bool

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end_s - self.start_s


def has_run(record: StepRecord) -> bool:
    """Return whether both ends of the step's program are known."""
    return record.device_end_s >= record.device_start_s  # false for NaN


def programs(record: StepRecord) -> list[tuple[float, float]]:
    """Return when the device was at work on a step that has run: one time, or two parts."""
    start_s, end_s = record.device_start_s, record.device_end_s
    if record.sampling_start_s > record.forward_end_s:  # false for NaN
        return [(start_s, record.forward_end_s), (record.sampling_start_s, end_s)]
    return [(start_s, end_s)]


def kind(record: StepRecord) -> str:
    """Return "decode" or "prefill"."""
    return "decode" if record.is_decode else "prefill"


def spans(record: StepRecord) -> Iterator[Span]:
    """Yield the stages of the host's turn that the step has been through."""
    for name, track, start, end in STAGES:
        start_s, end_s = getattr(record, start), getattr(record, end)
        if end_s >= start_s:  # false for NaN
            yield Span(name, track, start_s, end_s)


def whole_breaks(record: StepRecord) -> list[Break]:
    """Return the breaks that have ended."""
    return [one for one in record.breaks if one.end_s >= one.start_s]


def known_times(records: Iterable[StepRecord]) -> list[float]:
    """Return all times in these records that are known, in seconds, unordered."""
    records = list(records)
    times = [getattr(record, name) for record in records for name in _TIMES]
    times += [t for record in records for one in record.breaks for t in (one.start_s, one.end_s)]
    return [t for t in times if isfinite(t)]


def facts(record: StepRecord) -> dict[str, int | str | bool | None]:
    """Return what a reader wants to know of a step besides its times; `error` if it failed."""
    known: dict[str, int | str | bool | None] = {
        "step": int(record.step_id),
        "kind": kind(record),
        "rows": len(record.request_ids),
        "tokens": int(record.num_scheduled.sum()),
        "async": record.is_async,
    }
    return known if record.error is None else {**known, "error": record.error}
