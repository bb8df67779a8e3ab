"""A timeline as a picture: lanes of the host above the device's, and what it idled in red.

Comes in: the records to draw, the gaps between their programs, the idle share. Goes out: an
SVG document that needs nothing else: no script, no style sheet, a background of its own. The
same records give the same text.
"""

from __future__ import annotations

from itertools import pairwise
from math import floor, inf, log10
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement, indent, tostring

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

    from aneuron.plans import StepRecord

__all__ = ["pieces"]

_WIDTH, _LEFT, _RIGHT = 1200, 104, 16
_INNER = _WIDTH - _LEFT - _RIGHT
_HEAD = 34
_LABEL_ROWS, _ROW = 3, 13  # of break labels above the lanes, at most
# From the first lane's top on, which is lower the more rows of labels there are:
_LANES = {STEP_LOOP: (0, 24), MATERIALIZER: (32, 24), "device": (64, 40)}
_AXIS = 64 + 40 + 8
_FOOT = 58
_CHAR = 6.2  # width of one at 11 px
_HAIR = 0.75  # the least width: what is there can be seen
_REST_SHARE = 0.05  # of the width that a rest may take
_MAX_TICKS = 10
_END = "</svg>\n"

_INK, _PAPER, _LANE, _GREY, _RED = "#1f2430", "#ffffff", "#f3f4f6", "#c9ccd3", "#d62728"
_PROGRAM = {"decode": "#3f78b5", "prefill": "#8a63ad"}
_FALLBACK = {"decode": "#c5d8ec", "prefill": "#ddcfe9"}
_STAGE = {
    "schedule": "#2a7f7b",
    "prepare": "#56a9a3",
    "launch": "#a3d3cf",
    "apply": "#7a8450",
    "detokenize": "#a5ae7a",
    "deliver": "#d2d8b4",
    "break": "#f2a03d",
}


def pieces(
    records: Sequence[StepRecord], gaps: Sequence[Gap], idle_share: float, *, empty: str
) -> Iterator[str]:
    """Yield the SVG of these steps, oldest first; `empty` is what it says if there are none.

    It comes in pieces, one for each step and a few more, so that a busy loop can do something
    else between them. The records must not change meanwhile.

    A rest is cut out of the time axis but for a twentieth of the width. Each idle gap is a
    rect of class `idle`, and each rest one of class `rest`, with its length in `data-seconds`.
    """
    times = known_times(records)
    if not times:
        svg = _canvas(_HEAD)
        _text(svg, _LEFT, 20, empty)
        yield _markup(svg)
        return
    axis = _Axis(min(times), max(times), _cuts(times, gaps))
    labels = list(_labels(axis, records))
    top = _HEAD + _ROW * max((row for row, *_ in labels), default=0)
    svg = _canvas(top + _AXIS + _FOOT)
    _text(svg, _LEFT, 20, _headline(records, idle_share))
    for row, x, reason in labels:
        label = _text(svg, x, top - (row - 1) * _ROW - 4, reason, colour="#9a5a00")
        label.set("class", "break-label")
    yield _markup(svg).removesuffix(_END)
    yield f'<g transform="translate(0 {top})">\n'
    for part in _lanes(axis, records, gaps):
        yield _markup(part)
    yield f"</g>\n{_END}"


def _lanes(axis: _Axis, records: Sequence[StepRecord], gaps: Sequence[Gap]) -> Iterator[Element]:
    """Yield what is in the lanes, from the back to the front."""
    body = Element("g")
    for name, (top, height) in _LANES.items():
        _text(body, _LEFT - 8, top + height / 2 + 4, name, anchor="end")
        _rect(body, (_LEFT, _WIDTH - _RIGHT), (top, height), _LANE)
    for gap in gaps:
        _draw_gap(body, axis, gap)
    yield body
    for record in records:
        body = Element("g")
        _draw_host(body, axis, record)
        _draw_program(body, axis, record)
        yield body
    body = Element("g")
    _draw_breaks(body, axis, records)
    _draw_ticks(body, axis)
    _draw_legend(body)
    yield body


def _headline(records: Sequence[StepRecord], idle_share: float) -> str:
    fed = [one.is_async for one in records if one.is_decode and one.is_async is not None]
    share = f", {sum(fed)} of {len(fed)} decode steps async" if fed else ""
    first, last = records[0].step_id, records[-1].step_id
    return f"steps {first} to {last}: the device idled {idle_share:.2%} of the time{share}"


# ── time → x ────────────────────────────────────────────────────────────────────────────


class _Axis:
    """Maps seconds to pixels, long rests cut short."""

    def __init__(self, start_s: float, end_s: float, cuts: list[tuple[float, float]]) -> None:
        self.start_s = start_s
        busy_s = end_s - start_s - sum(end - start for start, end in cuts)
        kept_s = max(busy_s, 1e-9) * _REST_SHARE
        # Start and end of each stretch that is left out.
        self.cuts = [(start + kept_s, end) for start, end in cuts if end - start > kept_s]
        self.shown_s = max(end_s - start_s - self._cut_s(end_s), 1e-9)

    def _cut_s(self, until_s: float) -> float:
        return sum(max(0.0, min(until_s, end) - start) for start, end in self.cuts)

    def x(self, time_s: float) -> float:
        shown_s = time_s - self.start_s - self._cut_s(time_s)
        return _LEFT + _INNER * shown_s / self.shown_s

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield x and label, at round numbers of ms from the start."""
        span_ms = self.shown_s * 1e3
        power = 10.0 ** floor(log10(span_ms / _MAX_TICKS))
        step_ms = next(power * k for k in (1, 2, 5, 10) if span_ms / (power * k) <= _MAX_TICKS)
        digits = max(0, -floor(log10(step_ms)))
        number, edge_x = 0, -inf
        while (x := self.x(at_s := self.start_s + number * step_ms / 1e3)) <= _WIDTH - _RIGHT:
            inside = [end for start, end in self.cuts if start < at_s < end]
            if not inside and x >= edge_x:
                label = f"{number * step_ms:.{digits}f}"
                edge_x = x + (len(label) + 2) * _CHAR
                yield x, label
            ahead_ms = (max(inside) - self.start_s) * 1e3 if inside else 0.0
            number = max(number + 1, floor(ahead_ms / step_ms))  # over a rest in one stride


def _cuts(times: Sequence[float], gaps: Sequence[Gap]) -> list[tuple[float, float]]:
    """Return the longest stretch of each rest in which nothing happened on the host either."""
    cuts = []
    for gap in gaps:
        if gap.is_rest:
            inside = sorted(time for time in times if gap.start_s <= time <= gap.end_s)
            cuts.append(max(pairwise(inside), key=lambda stretch: stretch[1] - stretch[0]))
    return cuts


# ── what is in the lanes ────────────────────────────────────────────────────────────────


def _draw_gap(svg: Element, axis: _Axis, gap: Gap) -> None:
    name = "rest" if gap.is_rest else "idle"
    why = f", {gap.reason}" if gap.reason else ""
    mark = _rect(
        svg,
        (axis.x(gap.start_s), axis.x(gap.end_s)),
        _LANES["device"],
        "url(#aneuron-rest)" if gap.is_rest else _RED,
        f"{name} {gap.seconds * 1e3:.3f} ms before step {gap.step_id}{why}",
    )
    mark.set("class", name)
    mark.set("data-seconds", repr(float(gap.seconds)))


def _draw_host(svg: Element, axis: _Axis, record: StepRecord) -> None:
    for span in spans(record):
        took = f"{(span.end_s - span.start_s) * 1e6:.0f} us"
        x = axis.x(span.start_s), axis.x(span.end_s)
        title = f"{span.name} step {record.step_id}, {took}"
        _rect(svg, x, _LANES[span.track], _STAGE[span.name], title).set("class", "stage")


def _draw_program(svg: Element, axis: _Axis, record: StepRecord) -> None:
    if not has_run(record):
        if times := known_times([record]):
            _draw_missing(svg, axis.x(max(times)), record)
        return
    is_fallback = record.is_async is False
    colour = (_FALLBACK if is_fallback else _PROGRAM)[kind(record)]
    parts = [(axis.x(start_s), axis.x(end_s)) for start_s, end_s in programs(record)]
    for part in parts:
        box = _rect(svg, part, _LANES["device"], colour, _title(record))
        box.set("class", "program")
        box.set("stroke", _PROGRAM[kind(record)] if is_fallback else _PAPER)
        box.set("stroke-width", "0.5")
        if is_fallback:
            box.set("stroke-dasharray", "3 2")
    x = parts[0]
    label = str(record.step_id)
    if x[1] - x[0] > len(label) * _CHAR + 2:
        ink = _INK if is_fallback else _PAPER
        middle = _LANES["device"][0] + _LANES["device"][1] / 2 + 4
        _text(svg, sum(x) / 2, middle, label, anchor="middle", colour=ink)
    if record.error is not None:
        _draw_failed(svg, sum(x) / 2, record.step_id, record.error)


def _draw_failed(svg: Element, x: float, step_id: int, error: str) -> None:
    """Put a red x on a program whose step failed, on paper so that it can be seen."""
    top, _ = _LANES["device"]
    _rect(svg, (x - 5, x + 5), (top + 2, 11), _PAPER)
    mark = _text(svg, x, top + 11, "x", anchor="middle", colour=_RED)
    mark.set("class", "failed")
    SubElement(mark, "title").text = f"step {step_id} failed: {_printable(error)}"


def _title(record: StepRecord) -> str:
    known = facts(record)
    fed = {True: "async", False: "sync fallback", None: "input ids from the host"}[record.is_async]
    took_ms = (record.device_end_s - record.device_start_s) * 1e3
    ids = record.request_ids[:8].tolist()
    more = ", …" if len(record.request_ids) > 8 else ""
    failed = "" if record.error is None else f"\nfailed: {_printable(record.error)}"
    return (
        f"step {known['step']}, {known['kind']}, {fed}: {took_ms:.3f} ms, "
        f"{known['rows']} rows, {known['tokens']} tokens\n"
        f"requests {', '.join(map(str, ids))}{more}{failed}"
    )


def _draw_missing(svg: Element, x: float, record: StepRecord) -> None:
    top, height = _LANES["device"]
    mark = _text(svg, x, top + height / 2 + 4, "x", anchor="middle", colour=_RED)
    mark.set("class", "missing")
    why = "" if record.error is None else f": {_printable(record.error)}"
    SubElement(mark, "title").text = f"step {record.step_id} has not run{why}"


def _draw_breaks(svg: Element, axis: _Axis, records: Sequence[StepRecord]) -> None:
    for record in records:
        for one in whole_breaks(record):
            x = axis.x(one.start_s), axis.x(one.end_s)
            cost = f"{(one.end_s - one.start_s) * 1e3:.3f} ms"
            title = f"break before step {record.step_id}: {one.reason}, {cost}"
            _rect(svg, x, _LANES[STEP_LOOP], _STAGE["break"], title).set("class", "break")


def _labels(axis: _Axis, records: Sequence[StepRecord]) -> Iterator[tuple[int, float, str]]:
    """Yield row (1 is the lowest), x and reason of each break that has room for its label.

    The tooltip has the reason anyway.
    """
    taken = [-inf] * _LABEL_ROWS  # how far each row is filled
    for one in (one for record in records for one in whole_breaks(record)):
        width = len(one.reason) * _CHAR
        x = min(axis.x(one.start_s), _WIDTH - _RIGHT - width)
        for row, end in enumerate(taken):
            if end <= x:
                taken[row] = x + width + _CHAR
                yield row + 1, x, one.reason
                break


def _draw_ticks(svg: Element, axis: _Axis) -> None:
    for x, label in axis.ticks():
        at = {"x1": _number(x), "x2": _number(x), "y1": str(_AXIS - 4), "y2": str(_AXIS)}
        SubElement(svg, "line", {**at, "stroke": _INK, "stroke-width": "0.75"})
        _text(svg, x, _AXIS + 13, label, anchor="middle")
    _text(svg, _LEFT - 8, _AXIS + 13, "ms", anchor="end")


def _draw_legend(svg: Element) -> None:
    plain = {**_STAGE, **_PROGRAM, "idle": _RED, "rest": "url(#aneuron-rest)"}
    x, y = float(_LEFT), _AXIS + 30
    for name in (*_STAGE, *_PROGRAM, "sync fallback", "idle", "rest"):
        if name == "sync fallback":  # of either kind
            for program, colour in _FALLBACK.items():
                swatch = _rect(svg, (x, x + 11), (y, 11), colour)
                swatch.set("stroke", _PROGRAM[program])
                swatch.set("stroke-dasharray", "3 2")
                x += 15
        else:
            _rect(svg, (x, x + 11), (y, 11), plain[name])
            x += 15
        _text(svg, x, y + 10, name)
        x += len(name) * _CHAR + 14


# ── SVG ─────────────────────────────────────────────────────────────────────────────────


def _canvas(height: int) -> Element:
    svg = Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {_WIDTH} {height}",
            "width": str(_WIDTH),
            "height": str(height),
            "font-family": "system-ui, sans-serif",
            "font-size": "11",
            "role": "img",
        },
    )
    SubElement(svg, "title").text = "Timeline of the last steps"
    size = {"width": "6", "height": "6", "patternUnits": "userSpaceOnUse"}
    hatch = SubElement(SubElement(svg, "defs"), "pattern", {"id": "aneuron-rest", **size})
    SubElement(hatch, "rect", {"width": "6", "height": "6", "fill": "#e6e8ec"})
    SubElement(hatch, "path", {"d": "M0 6L6 0", "stroke": "#9aa0ab", "stroke-width": "1"})
    SubElement(svg, "rect", {"width": str(_WIDTH), "height": str(height), "fill": _PAPER})
    return svg


def _rect(
    parent: Element, x: tuple[float, float], y: tuple[float, float], fill: str, title: str = ""
) -> Element:
    """Add a box: left and right, top and height."""
    size = {"width": _number(max(x[1] - x[0], _HAIR)), "height": _number(y[1])}
    at = {"x": _number(x[0]), "y": _number(y[0])}
    rect = SubElement(parent, "rect", {**at, **size, "fill": fill})
    if title:
        SubElement(rect, "title").text = title
    return rect


def _text(
    parent: Element, x: float, y: float, text: str, *, anchor: str = "start", colour: str = _INK
) -> Element:
    at = {"x": _number(x), "y": _number(y), "text-anchor": anchor, "fill": colour}
    element = SubElement(parent, "text", at)
    element.text = text
    return element


def _printable(text: str) -> str:
    """Return a device's words without what XML cannot hold."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _markup(svg: Element) -> str:
    indent(svg)
    return tostring(svg, encoding="unicode") + "\n"
