"""The state of an engine at a glance, for notebooks.

Comes in: the engine's counts and the timeline's totals. Goes out: HTML with its style inside,
in the colours of the page that shows it, light or dark. The same counts give the same text.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aneuron.outputs import EngineStats
    from aneuron.timeline import Timeline

__all__ = ["card"]

_GREEN, _GREY, _RED = "#2e9e5b", "#8a8f98", "#d62728"
_COLOUR = {"open": _GREEN, "failed": _RED}
_NONE = "-"
_BOX = (
    "display:inline-block;border:1px solid rgba(128,128,128,.4);border-radius:6px;"
    "padding:8px 14px;font-size:13px;line-height:1.5"
)
_GRID = "display:grid;grid-template-columns:auto auto;column-gap:16px;margin-top:4px"
_TRACK = (
    "display:inline-block;vertical-align:middle;width:90px;height:7px;margin-right:7px;"
    "border-radius:4px;background:rgba(128,128,128,.3)"
)
_BAR = "display:block;height:7px;border-radius:4px;background:#3f78b5"
_NAME = "opacity:.65"
_VALUE = "font-variant-numeric:tabular-nums"


def card(
    label: str, state: str, stats: EngineStats | None = None, timeline: Timeline | None = None
) -> str:
    """Return an engine's state as a small table.

    Args:
        label: model and device.
        state: a word: "new", "open", "failed", …
        stats: of the engine; None if it was never open.
        timeline: likewise.
    """
    dot = f'<span style="color:{_COLOUR.get(state, _GREY)}">●</span>'
    head = f"<div>{dot} <b>{escape(label)}</b> {escape(state)}</div>"
    if stats is None or timeline is None:
        return f'<div style="{_BOX}">{head}</div>'
    cells = "".join(
        f'<span style="{_NAME}">{name}</span><span style="{_VALUE}">{value}</span>'
        for name, value in _rows(stats, timeline.busy_s + timeline.idle_s).items()
    )
    return f'<div style="{_BOX}">{head}<div style="{_GRID}">{cells}</div></div>'


def _rows(stats: EngineStats, at_work_s: float) -> dict[str, str]:
    """Return what to show, each value as HTML; `at_work_s` is without the rests."""
    number = stats.generation_tokens
    rate = f" ({number / at_work_s:,.0f}/s while at work)" if at_work_s and number else ""
    return {
        "requests": f"{stats.running} running, {stats.waiting} waiting",
        "KV cache": _share(stats.used_blocks, stats.num_blocks),
        "tokens": f"{number:,}{rate}",
        "steps": f"{stats.steps:,}, {stats.in_flight_steps} in flight",
        "async decodes": f"{stats.decode_async_share:.1%}" if stats.decode_steps else _NONE,
        "breaks": _breaks(stats),
    }


def _share(used: int, total: int) -> str:
    percent = 100 * used / total
    bar = f'<span style="{_BAR};width:{percent:.1f}%"></span>'
    return f'<span style="{_TRACK}">{bar}</span>{used:,} of {total:,} blocks'


def _breaks(stats: EngineStats) -> str:
    told = [f"{escape(reason)} {one.count:,}" for reason, one in stats.breaks.items()]
    return ", ".join(told) or "none"
