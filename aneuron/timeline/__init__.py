"""The timeline: when each of the last steps reached each stage, and what the device did meanwhile.

Comes in: the record of each step, from the engine's two coroutines; a record is kept by
reference and goes on being filled in. Goes out: running totals, and, only when somebody asks,
idle gaps, medians, a Chrome trace and a picture. Runs on the loop; see docs/timeline.md.
"""

from __future__ import annotations

import math
from collections import deque
from copy import copy
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from aneuron.outputs import BreakStats
from aneuron.timeline.spans import STAGES, Gap, Span, has_run, programs, spans, whole_breaks

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from aneuron.plans import BreakReason, StepRecord

__all__ = ["RING_STEPS", "Gap", "Timeline", "TimelineMetrics"]

RING_STEPS = 4096
_PICTURE_STEPS = 24
_OFF = "no steps are kept: open the engine with timeline=True"
_SCALED = 'style="max-width:100%;height:auto"'  # not in the file: some renderers read auto as 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineMetrics:
    """A snapshot of a timeline; all times in seconds.

    The totals are over all steps since the engine opened. The medians are over the steps
    that are kept: by stage of the host's turn (`schedule`, `prepare` and `launch` without the
    breaks in them; `apply` from the tokens' arrival on the loop; `detokenize`, `deliver`) and
    `program`, the time on the device. A stage that no kept step has been through is not there.

    Attributes:
        steps: that have finished.
        busy_s: a program ran.
        idle_s: none ran between two programs, and the engine was not at rest.
        breaks: by reason.
        kept_steps: whose records there are.
        decode_async_share: of kept decode steps; None where the carry has no such.
        medians_s: by stage.
    """

    steps: int
    busy_s: float
    idle_s: float
    breaks: dict[str, BreakStats]
    kept_steps: int
    decode_async_share: float | None
    medians_s: dict[str, float]

    @property
    def idle_share(self) -> float:
        """Share of its time that the device idled; 0.0 if it has not run."""
        elapsed_s = self.busy_s + self.idle_s
        return self.idle_s / elapsed_s if elapsed_s else 0.0


class Timeline:
    """Totals over all steps, and the records of the last ones.

    Args:
        keep: how many records to keep, `RING_STEPS` for a ring of the usual size; 0 keeps
            none, and only the totals go on.
    """

    def __init__(self, keep: int = RING_STEPS) -> None:
        """Make an empty one."""
        self.keep = keep
        self._ring: deque[StepRecord] = deque(maxlen=keep)
        self._first_after_rest: deque[int] = deque(maxlen=keep)  # step ids
        self._is_at_rest = False
        self._resumed_at: float = math.inf  # the step id that ends a rest, until it has run
        self._num_steps = 0
        self._busy_s = self._idle_s = 0.0
        self._end_s = math.inf  # of the last program
        self._breaks: dict[BreakReason, list[float]] = {}  # count, seconds

    def __repr__(self) -> str:
        return f"<Timeline, {len(self._ring)} of {self.keep} steps>"

    # ── written while the engine runs: a few attributes a step ──────────────────────────

    def add(self, record: StepRecord) -> None:
        """Keep the record of a step that has been planned."""
        if self._is_at_rest:
            self._is_at_rest = False
            self._resumed_at = record.step_id
            self._first_after_rest.append(record.step_id)
        self._ring.append(record)

    def finish(self, record: StepRecord) -> None:
        """Count a step whose outputs have been delivered, or that has failed."""
        self._num_steps += 1
        start_s, end_s = record.device_start_s, record.device_end_s
        if end_s >= start_s:  # false for NaN: it never ran
            if record.step_id >= self._resumed_at:
                self._resumed_at = math.inf
            elif start_s > self._end_s:
                self._idle_s += start_s - self._end_s
            paused_s = max(0.0, record.sampling_start_s - record.forward_end_s)  # 0 for NaN
            self._idle_s += paused_s
            self._busy_s += end_s - start_s - paused_s
            self._end_s = end_s
        if record.breaks:
            self._count_breaks(record)

    def _count_breaks(self, record: StepRecord) -> None:
        for reason, start_s, end_s in record.breaks:
            counted = self._breaks.setdefault(reason, [0, 0.0])
            counted[0] += 1
            if end_s >= start_s:
                counted[1] += end_s - start_s

    def rest(self) -> None:
        """Take note that the engine has nothing to do: the gap that begins is no idle one."""
        self._is_at_rest = True

    # ── read ────────────────────────────────────────────────────────────────────────────

    @property
    def busy_s(self) -> float:
        """Seconds that programs ran on the device, in all."""
        return self._busy_s

    @property
    def idle_s(self) -> float:
        """Seconds that the device waited for the next program, in all; rests left out."""
        return self._idle_s

    @property
    def steps(self) -> list[StepRecord]:
        """The records that are kept, oldest first; the last ones may still be filled in."""
        return list(self._ring)

    def idle_gaps(self, records: Iterable[StepRecord] | None = None) -> list[Gap]:
        """Return the gaps between programs, rests among them (`is_rest`), in order.

        Args:
            records: of this timeline, oldest first; all that are kept by default. Steps that
                never ran are passed over.
        """
        resumed = set(self._first_after_rest)
        gaps, end_s, is_rest = [], math.inf, False
        for record in self.steps if records is None else records:
            is_rest = is_rest or record.step_id in resumed
            if not has_run(record):
                continue
            for start_s, next_end_s in programs(record):
                if start_s > end_s:
                    reason = None if is_rest else _cause(record, end_s)
                    gaps.append(Gap(end_s, start_s, record.step_id, reason, is_rest))
                end_s, is_rest = next_end_s, False
        return gaps

    def elapsed_s(self, records: Sequence[StepRecord] | None = None) -> float:
        """Return the seconds from the first program's start to the last one's end, less rests."""
        records = self.steps if records is None else records
        ran = [record for record in records if has_run(record)]
        if not ran:
            return 0.0
        rest_s = sum(gap.seconds for gap in self.idle_gaps(records) if gap.is_rest)
        return ran[-1].device_end_s - ran[0].device_start_s - rest_s

    def idle_share(self, records: Sequence[StepRecord] | None = None) -> float:
        """Return the share of `elapsed_s` that no program ran; 0.0 if none ever did.

        Args:
            records: a window of this timeline, oldest first; all that are kept by default.
        """
        records = self.steps if records is None else records
        elapsed_s = self.elapsed_s(records)
        idle_s = sum(gap.seconds for gap in self.idle_gaps(records) if not gap.is_rest)
        return idle_s / elapsed_s if elapsed_s > 0 else 0.0

    def metrics(self) -> TimelineMetrics:
        """Return a snapshot of the totals, with medians over the steps that are kept."""
        times: dict[str, list[float]] = {}
        kept = self.steps
        for record in kept:
            for span in spans(record):
                times.setdefault(span.name, []).append(_work_s(record, span))
            if has_run(record):
                program_s = sum(end_s - start_s for start_s, end_s in programs(record))
                times.setdefault("program", []).append(program_s)
        fed = [r.is_async for r in kept if r.is_decode and r.is_async is not None]
        return TimelineMetrics(
            steps=self._num_steps,
            busy_s=self._busy_s,
            idle_s=self._idle_s,
            breaks={
                reason.value: BreakStats(int(number), seconds)
                for reason, (number, seconds) in self._breaks.items()
            },
            kept_steps=len(kept),
            decode_async_share=sum(fed) / len(fed) if fed else None,
            medians_s={name: median(seen) for name, seen in times.items()},
        )

    def summary(self) -> str:
        """Return the metrics as a few lines of text."""
        now = self.metrics()
        share, medians = now.decode_async_share, now.medians_s
        breaks = [f"{name} {b.count} ({b.seconds * 1e3:.3f} ms)" for name, b in now.breaks.items()]
        turn = [f"{name} {medians[name] * 1e6:.0f} us" for name, *_ in STAGES if name in medians]
        program = f"{medians['program'] * 1e3:.3f} ms (median)" if "program" in medians else "-"
        lines = {
            "steps": f"{now.steps} ({now.kept_steps} kept)",
            "device busy": f"{now.busy_s * 1e3:.3f} ms",
            "device idle": f"{now.idle_s * 1e3:.3f} ms ({now.idle_share:.2%})",
            "program": program,
            "host turn": ", ".join(turn) + " (medians)" if turn else "-",
            "decode_async_share": "-" if share is None else f"{share:.3f}",
            "breaks": ", ".join(breaks) or "none",
        }
        if not self.keep:
            lines["timeline"] = _OFF
        return "\n".join(f"{name:<20} {value}" for name, value in lines.items())

    # ── exported ────────────────────────────────────────────────────────────────────────

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the kept steps in Chrome's trace event format, which Perfetto opens."""
        from aneuron.timeline.chrome import chrome_trace

        return chrome_trace(self.steps, self.idle_gaps())

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `to_chrome_trace()` to a file as JSON.

        Raises:
            OSError: it cannot be written.
        """
        from aneuron.timeline.chrome import dump

        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123  any PathLike
            file.write(dump(self.to_chrome_trace()))

    def to_svg(self, last: int = _PICTURE_STEPS) -> str:
        """Return a picture of the last steps that are kept, an SVG document of its own."""
        return "".join(self.svg_pieces(last))

    def svg_pieces(self, last: int = _PICTURE_STEPS, *, in_flight: bool = True) -> Iterator[str]:
        """Return the same in pieces, for who must not hold the event loop: others may run between.

        It is a picture of now, however long the pieces are in coming.

        Args:
            last: how many steps.
            in_flight: mark the last ones with an x if they have not run: of an engine that
                goes on, they are about to.
        """
        from aneuron.timeline.svg import pieces

        kept = self.steps
        while not in_flight and kept and not has_run(kept[-1]) and kept[-1].error is None:
            kept.pop()
        records = [copy(one) for one in kept[-last:]] if last > 0 else []
        empty = "no steps were recorded" if self.keep else _OFF
        return pieces(records, self.idle_gaps(records), self.idle_share(records), empty=empty)

    def save_svg(self, path: str | os.PathLike[str], last: int = _PICTURE_STEPS) -> None:
        """Write `to_svg(last)` to a file.

        Raises:
            OSError: it cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123  any PathLike
            file.write(self.to_svg(last))

    def _repr_html_(self) -> str:
        """Return the picture, as wide as there is room, and the summary, for a notebook."""
        from html import escape

        svg = self.to_svg().replace("<svg ", f"<svg {_SCALED} ", 1)
        return f"<div>{svg}<pre>{escape(self.summary())}</pre></div>"


def _cause(record: StepRecord, idle_from_s: float) -> BreakReason | None:
    """Return the reason of the longest break that went on while the device idled."""
    waits = [
        one for one in whole_breaks(record) if one.end_s > max(one.start_s, idle_from_s)
    ]  # one that took no time, as a reorder, is nobody's wait
    return max(waits, key=lambda one: one.end_s - one.start_s).reason if waits else None


def _work_s(record: StepRecord, span: Span) -> float:
    """Return a stage's seconds without the breaks in it."""
    waited_s = sum(
        max(0.0, min(one.end_s, span.end_s) - max(one.start_s, span.start_s))
        for one in whole_breaks(record)
    )
    return span.end_s - span.start_s - waited_s
