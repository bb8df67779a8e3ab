"""The distributions as a picture: how many requests had to wait how long, per carry.

Comes in: times to the first token and per further token, by carry. Goes out: an SVG document
that needs nothing else and has a background of its own, as those of the timeline. The same
times give the same text.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, floor, log10
from typing import TYPE_CHECKING, NamedTuple
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Curves", "picture"]

_WIDTH, _HEIGHT = 960, 380
_TOP, _PLOT_HEIGHT = 52, 250
_PLOT_WIDTH = 400
_LEFTS = (62, 532)  # of the two plots
_LEGEND = _HEIGHT - 18
_INK, _PAPER, _LANE, _GREY = "#1f2430", "#ffffff", "#f3f4f6", "#c9ccd3"
# Told apart by their dashes, too.
_STYLES = {
    "host": ("#b5533f", "2 3"),
    "handoff": ("#8a63ad", "7 3"),
    "resident": ("#3f78b5", ""),
}
_SHARES = np.unique(np.concatenate([np.linspace(0, 1, 201), 1 - np.logspace(-2, -4, 17)]))
_CHAR = 6.2  # width of one at 11 px
_MAX_LABELS = 7
# Of the largest time over the smallest. Below the first, they are as good as one time.
_NARROW, _WIDE = 1.005, 2.0


class Curves(NamedTuple):
    """One plot: its title, and seconds by carry, float64 [n]; a carry may have none."""

    title: str
    times_s: Mapping[str, np.ndarray]


def picture(title: str, plots: Sequence[Curves]) -> str:
    """Return the SVG of two plots side by side: share of requests over time, on a log axis."""
    svg = _canvas(title)
    _text(svg, _LEFTS[0], 20, title)
    for left, plot in zip(_LEFTS, plots, strict=True):
        _draw_plot(SubElement(svg, "g", {"transform": f"translate({left} {_TOP})"}), plot)
    _draw_legend(svg, list(plots[0].times_s))
    indent(svg)
    return tostring(svg, encoding="unicode") + "\n"


def _draw_plot(svg: Element, plot: Curves) -> None:
    size = {"width": str(_PLOT_WIDTH), "height": str(_PLOT_HEIGHT)}
    SubElement(svg, "rect", {**size, "fill": _LANE})
    _text(svg, 0, -8, plot.title)
    _draw_shares(svg)
    curves = {
        carry: np.quantile(times, _SHARES) for carry, times in plot.times_s.items() if len(times)
    }
    if not curves:
        _text(svg, _PLOT_WIDTH / 2, _PLOT_HEIGHT / 2, "nothing completed", anchor="middle")
        return
    axis = _LogAxis.of(np.concatenate(list(curves.values())) * 1e3)
    _draw_times(svg, axis)
    for carry, times_s in curves.items():
        _draw_curve(svg, axis, carry, times_s * 1e3)


def _draw_curve(svg: Element, axis: _LogAxis, carry: str, times_ms: np.ndarray) -> None:
    points = " ".join(
        f"{_number(axis.x(ms))},{_number(_y(share))}"
        for ms, share in zip(times_ms.tolist(), _SHARES.tolist(), strict=True)
    )
    colour, dashes = _STYLES[carry]
    style = {"fill": "none", "stroke": colour, "stroke-width": "1.75", "stroke-dasharray": dashes}
    line = SubElement(svg, "polyline", {"class": f"curve {carry}", "points": points, **style})
    middle, high = np.interp((0.5, 0.99), _SHARES, times_ms)
    SubElement(line, "title").text = f"{carry}: p50 {middle:.4g} ms, p99 {high:.4g} ms"


class _LogAxis(NamedTuple):
    """Maps milliseconds to pixels, between two round numbers."""

    low: float  # log10 of ms
    high: float

    @classmethod
    def of(cls, times_ms: np.ndarray) -> _LogAxis:
        first, last = (max(float(ms), 1e-3) for ms in (times_ms.min(), times_ms.max()))
        if _NARROW < last / first < _WIDE:
            step = _round((last - first) / 4)
        else:
            step = 10.0 ** floor(log10(first))
        low = floor(first / step + 1e-9) * step
        if last / first >= _WIDE:
            step = 10.0 ** floor(log10(last))
        high = max(ceil(last / step - 1e-9) * step, low + step)
        return cls(log10(low), log10(high))

    def x(self, ms: float) -> float:
        return _PLOT_WIDTH * (log10(max(ms, 1e-3)) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return round numbers of ms: as many as can be read, up to a handful."""
        readable = [found for found in map(self._inside, self._candidates()) if self._fit(found)]
        return max(readable, key=len)

    def _candidates(self) -> Iterator[list[float]]:
        """Yield numbers of some decades, of each decade, and evenly spaced ones."""
        decades = range(floor(self.low), ceil(self.high) + 1)
        for every in range(len(decades), 1, -1):
            yield [10.0**decade for decade in decades[::every]]
        for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5), (1, 1.5, 2, 3, 5, 7)):
            yield [digit * 10.0**decade for decade in decades for digit in digits]
        low, high = 10**self.low, 10**self.high
        for count in range(1, 2 * _MAX_LABELS):
            step = _round((high - low) / count)
            first = floor(low / step)
            yield [number * step for number in range(first, first + 3 * _MAX_LABELS)]

    def _inside(self, found: Sequence[float]) -> list[float]:
        return [ms for ms in found if ms > 0 and -1e-6 < self.x(ms) / _PLOT_WIDTH < 1 + 1e-6]

    def _fit(self, found: Sequence[float]) -> bool:
        """Whether their labels stand side by side with room between them."""
        ends = [(self.x(ms), (len(_duration(ms)) + 0.8) * _CHAR / 2) for ms in found]
        return len(found) <= _MAX_LABELS and all(
            one_x + one_half <= next_x - next_half
            for (one_x, one_half), (next_x, next_half) in pairwise(ends)
        )


def _round(ms: float) -> float:
    """Return the next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** floor(log10(ms))
    return power * next(digit for digit in (1, 2, 5, 10) if digit >= ms / power - 1e-9)


def _draw_times(svg: Element, axis: _LogAxis) -> None:
    for ms in axis.ticks():
        x = axis.x(ms)
        _line(svg, (x, x), (0, _PLOT_HEIGHT))
        _text(svg, x, _PLOT_HEIGHT + 15, _duration(ms), anchor="middle")
    _text(svg, _PLOT_WIDTH / 2, _PLOT_HEIGHT + 32, "time, log scale", anchor="middle")


def _duration(ms: float) -> str:
    return f"{ms / 1000:g} s" if ms >= 1000 else f"{ms:g} ms"


def _draw_shares(svg: Element) -> None:
    for percent in (0, 25, 50, 75, 99):
        y = _y(percent / 100)
        _line(svg, (0, _PLOT_WIDTH), (y, y))
        _text(svg, -8, y + 4, f"{percent} %", anchor="end")


def _draw_legend(svg: Element, carries: Sequence[str]) -> None:
    x = float(_LEFTS[0])
    for carry in carries:
        colour, dashes = _STYLES[carry]
        line = _line(svg, (x, x + 26), (_LEGEND - 4, _LEGEND - 4), colour)
        line.set("stroke-width", "1.75")
        line.set("stroke-dasharray", dashes)
        _text(svg, x + 32, _LEGEND, carry)
        x += 32 + len(carry) * _CHAR + 20
    _text(svg, x, _LEGEND, "share of completed requests that had to wait no longer")


# ── SVG ─────────────────────────────────────────────────────────────────────────────────


def _canvas(title: str) -> Element:
    size = {"width": str(_WIDTH), "height": str(_HEIGHT)}
    font = {"font-family": "system-ui, sans-serif", "font-size": "11"}
    view = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {_WIDTH} {_HEIGHT}"}
    svg = Element("svg", {**view, **size, **font, "role": "img"})
    SubElement(svg, "title").text = title
    SubElement(svg, "rect", {**size, "fill": _PAPER})
    return svg


def _y(share: float) -> float:
    return _PLOT_HEIGHT * (1 - share)


def _line(
    parent: Element, x: tuple[float, float], y: tuple[float, float], colour: str = _GREY
) -> Element:
    ends = {"x1": x[0], "x2": x[1], "y1": y[0], "y2": y[1]}
    at = {name: _number(value) for name, value in ends.items()}
    return SubElement(parent, "line", {**at, "stroke": colour, "stroke-width": "0.75"})


def _text(parent: Element, x: float, y: float, text: str, *, anchor: str = "start") -> None:
    at = {"x": _number(x), "y": _number(y), "text-anchor": anchor, "fill": _INK}
    SubElement(parent, "text", at).text = text


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
