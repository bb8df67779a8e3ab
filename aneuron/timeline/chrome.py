"""A timeline in Chrome's trace event format, as Perfetto and chrome://tracing open it.

Comes in: step records and the gaps between their programs. Goes out: one JSON object. The
format: "Trace Event Format", Google. Complete events (ph X) of one track must lie in or
beside each other, so times are whole nanoseconds here, and a stage that had to wait for the one
before on its track is drawn from when that ended; `waited_us` says how long that was.
"""

from __future__ import annotations

import json
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, Any

from aneuron.timeline.spans import (
    MATERIALIZER,
    STEP_LOOP,
    Gap,
    facts,
    has_run,
    kind,
    known_times,
    programs,
    spans,
    whole_breaks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aneuron.plans import Break, StepRecord

__all__ = ["chrome_trace", "dump"]

Event = dict[str, Any]
_PID = 1
_TRACKS = {STEP_LOOP: 1, "launch thread": 2, "device": 3, MATERIALIZER: 4}


def chrome_trace(records: Sequence[StepRecord], gaps: Sequence[Gap]) -> dict[str, Any]:
    """Return the trace of these steps, oldest first; `ts` and `dur` in us from the first event."""
    tracks = _Tracks(min(known_times(records), default=0.0))
    for record in records:
        tracks.draw_step(record)
    for gap in gaps:
        tracks.draw_gap(gap)
    # Of two that start together the outer one comes first.
    tracks.events.sort(key=lambda event: (event["ts"], -event.get("dur", 0), event["tid"]))
    return {
        "traceEvents": [*_names(), *tracks.events, *_arrows(records, tracks)],
        "displayTimeUnit": "ms",
    }


def dump(trace: dict[str, Any]) -> str:
    """Return a trace as JSON.

    Raises:
        ValueError: a number is not finite, which JSON cannot say.
    """
    return json.dumps(trace, allow_nan=False, separators=(",", ":"))


class _Tracks:
    """Events so far, and how far each track is filled."""

    def __init__(self, origin_s: float) -> None:
        self.events: list[Event] = []
        self._origin_s = origin_s
        self._filled_ns = dict.fromkeys(_TRACKS, 0)

    def ns(self, time_s: float) -> int:
        return round((time_s - self._origin_s) * 1e9)

    def draw_step(self, record: StepRecord) -> None:
        args = facts(record)
        for span in spans(record):
            self._stage(span.track, span.name, (span.start_s, span.end_s), args)
        for one in whole_breaks(record):
            self._break(record, one, args)
        start_s = record.device_start_s
        if isfinite(start_s - record.launched_s):
            # The program may start before the loop has noted that it launched it.
            self._stage("launch thread", "queued", (min(record.launched_s, start_s), start_s), args)
        if has_run(record):
            ids = {"request_ids": record.request_ids.tolist()}
            for part_s in programs(record):
                self._stage("device", kind(record), part_s, args | ids)
        elif times := known_times([record]):
            self._instant(f"step {record.step_id} has not run", max(times), args)

    def _break(self, record: StepRecord, one: Break, args: dict[str, Any]) -> None:
        """Draw a break; one that outlasts the stage it began in, on another rank, is cut there."""
        end_s = one.end_s
        for span in spans(record):
            if span.track == STEP_LOOP and span.start_s <= one.start_s < span.end_s < end_s:
                end_s = span.end_s
                args = args | {"lasted_us": (one.end_s - one.start_s) * 1e6}
        name = f"break: {one.reason}"
        self._add(STEP_LOOP, "break", name, self.ns(one.start_s), self.ns(end_s), args)

    def draw_gap(self, gap: Gap) -> None:
        args = {"step": int(gap.step_id), "reason": gap.reason}
        name = "rest" if gap.is_rest else "idle"
        self._add("device", name, name, self.ns(gap.start_s), self.ns(gap.end_s), args)

    def _stage(
        self, track: str, name: str, times_s: tuple[float, float], args: dict[str, Any]
    ) -> None:
        start_ns, end_ns = map(self.ns, times_s)
        free_ns = self._filled_ns[track]
        if free_ns > start_ns:
            args = args | {"waited_us": (min(free_ns, end_ns) - start_ns) / 1e3}
            start_ns, end_ns = free_ns, max(end_ns, free_ns)
        self._filled_ns[track] = end_ns
        self._add(track, "stage", name, start_ns, end_ns, args)

    def _add(
        self, track: str, category: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any]
    ) -> None:
        times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
        where = {"pid": _PID, "tid": _TRACKS[track]}
        self.events.append(
            {"ph": "X", "name": name, "cat": category, **times, **where, "args": args}
        )

    def _instant(self, name: str, time_s: float, args: dict[str, Any]) -> None:
        at = {"ts": self.ns(time_s) / 1e3, "pid": _PID, "tid": _TRACKS["device"]}
        self.events.append({"ph": "i", "s": "t", "name": name, "cat": "stage", **at, "args": args})


def _names() -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": "aneuron"}}
    for name, tid in _TRACKS.items():
        at = {"ph": "M", "pid": _PID, "tid": tid}
        yield {**at, "name": "thread_name", "args": {"name": name}}
        yield {**at, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _arrows(records: Sequence[StepRecord], tracks: _Tracks) -> Iterator[Event]:
    """Yield a flow per request, through the middle of each program that had a row of it."""
    stops: dict[int, list[float]] = {}
    for record in filter(has_run, records):
        middle_us = (tracks.ns(record.device_start_s) + tracks.ns(record.device_end_s)) // 2 / 1e3
        for request_id in record.request_ids.tolist():
            stops.setdefault(request_id, []).append(middle_us)
    return chain.from_iterable(_arrow(*stop) for stop in stops.items())


def _arrow(request_id: int, stops_us: list[float]) -> Iterator[Event]:
    if len(stops_us) < 2:
        return
    phases = ["s", *"t" * (len(stops_us) - 2), "f"]
    for phase, ts in zip(phases, stops_us, strict=True):
        at = {"ts": ts, "pid": _PID, "tid": _TRACKS["device"], "id": request_id}
        event = {"ph": phase, "name": f"request {request_id}", "cat": "request", **at}
        # "e": it belongs to the event around it, not to the next one on the track.
        yield event if phase == "s" else {**event, "bp": "e"}
