"""From outcomes to figures, under the names of vLLM's `bench serve`.

Comes in: what a load gave. Goes out: a flat dict of figures, and the lines of a table.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from aneuron.cli.bench.server.load import LoadRun
    from aneuron.cli.bench.server.stream import Outcome

    Times = dict[str, npt.NDArray[np.float64]]

__all__ = ["figures", "lines", "middle"]

_METRICS = ("ttft", "tpot", "itl", "e2el")
_TOTALS = (
    "completed", "failed", "duration", "total_input_tokens", "total_output_tokens",
    "num_retry_after",
)  # fmt: skip
_MS, _US = 1e3, 1e6
_Cell = int | float | None


def figures(
    run: LoadRun, *, input_len: int, percentiles: Sequence[float], slo_ms: dict[str, float]
) -> dict[str, Any]:
    """Return the figures of one load; those of tokens and times are of completed requests.

    Args:
        run: what the load gave.
        input_len: tokens of a prompt, where the server does not count them.
        percentiles: those of each metric, from 0 to 100.
        slo_ms: limits of a good request by metric, in milliseconds; empty: no goodput.
    """
    done = [one for one in run.outcomes if one.error is None]
    times = _times(done)
    num_output = sum(one.completion_tokens for one in done)
    num_input = sum(input_len if one.prompt_tokens is None else one.prompt_tokens for one in done)
    good = _num_good(times, slo_ms) if slo_ms else None
    return {
        "completed": len(done),
        "failed": len(run.outcomes) - len(done),
        "duration": run.duration_s,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / run.duration_s,
        "request_goodput": None if good is None else good / run.duration_s,
        "output_throughput": num_output / run.duration_s,
        "total_token_throughput": (num_input + num_output) / run.duration_s,
        "max_concurrent_requests": _peak(run.outcomes),
        **_spread_all(times, percentiles),
        **_failures(run.outcomes),
        **_own(run, num_output),
    }


def _times(done: list[Outcome]) -> Times:
    """Return milliseconds by metric: of each request, of `itl` each gap of all of them.

    A request of one token has no `tpot`; NaN stands for it.
    """
    firsts = np.array([one.marks[0] if one.marks else one.end_s for one in done])
    lasts = np.array([one.marks[-1] if one.marks else one.end_s for one in done])
    sent, ended = np.array([one.sent_s for one in done]), np.array([one.end_s for one in done])
    gaps = np.array([one.completion_tokens - 1.0 for one in done])
    gaps[gaps < 1] = np.nan
    itl = [np.diff(np.frombuffer(one.marks)) for one in done if one.marks]
    return {
        "ttft": (firsts - sent) * _MS,
        "tpot": (lasts - firsts) / gaps * _MS,
        "itl": np.concatenate(itl) * _MS if itl else np.empty(0),
        "e2el": (ended - sent) * _MS,
    }


def _num_good(times: Times, slo_ms: dict[str, float]) -> int:
    kept = np.ones(len(times["ttft"]), dtype=bool)
    for name, limit in slo_ms.items():
        kept &= ~(times[name] > limit)  # no time at all keeps any limit
    return int(kept.sum())


def _spread_all(times: Times, percentiles: Sequence[float]) -> dict[str, float | None]:
    told: dict[str, float | None] = {}
    for name in _METRICS:
        told |= _spread(name, times[name], percentiles)
    return told


def _spread(
    name: str, ms: npt.NDArray[np.float64], percentiles: Sequence[float]
) -> dict[str, float | None]:
    ms = ms[~np.isnan(ms)]
    names = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std")]
    names += [f"p{one:g}_{name}_ms" for one in percentiles]
    if not len(ms):
        return dict.fromkeys(names)
    found = [ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, percentiles)]
    return dict(zip(names, map(float, found), strict=True))


def _peak(outcomes: list[Outcome]) -> int:
    """Return how many requests were under way at most."""
    begins = np.sort([one.sent_s for one in outcomes])
    ends = np.sort([one.end_s for one in outcomes])
    ended = np.searchsorted(ends, begins, side="right")
    return int((np.arange(1, len(begins) + 1) - ended).max())


def _failures(outcomes: list[Outcome]) -> dict[str, Any]:
    counts = Counter(one.error for one in outcomes if one.error is not None)
    details = {one.error: one.detail for one in reversed(outcomes) if one.error is not None}
    asked = [one.retry_after_s for one in outcomes if one.retry_after_s is not None]
    return {
        "errors": {kind: {"count": n, "first": details[kind]} for kind, n in counts.most_common()},
        "num_retry_after": len(asked),
        "mean_retry_after_s": sum(asked) / len(asked) if asked else None,
    }


def _own(run: LoadRun, num_output: int) -> dict[str, float | None]:
    """Return what the client took, and how far it was behind: whether it is to blame."""
    late = np.array([one.sent_s - one.due_s for one in run.outcomes]) * _MS
    return {
        "median_late_ms": float(np.median(late)),
        "p99_late_ms": float(np.percentile(late, 99)),
        "max_late_ms": float(late.max()),
        "p99_wait_ms": float(np.percentile(run.waits_s, 99)) * _MS,
        "client_cpu_us_per_token": run.cpu_s / num_output * _US if num_output else None,
        "client_busy_share": run.cpu_s / run.duration_s,
    }


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the runs' figures in one: medians, but totals of counts and durations."""
    told: dict[str, Any] = {}
    for name in runs[0]:
        seen = [run[name] for run in runs if run[name] is not None]
        if name == "errors":
            told[name] = _all_errors(seen)
        elif name in _TOTALS:
            told[name] = sum(seen)
        elif name == "max_concurrent_requests":
            told[name] = max(seen)
        else:
            told[name] = median(seen) if seen else None
    return told


def _all_errors(seen: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    told: dict[str, dict[str, Any]] = {}
    for errors in seen:
        for kind, error in errors.items():
            before = told.get(kind, {"count": 0, "first": error["first"]})
            told[kind] = {**before, "count": before["count"] + error["count"]}
    return told


def lines(told: dict[str, dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the lines of a table: a figure's name, and its value for each target."""
    columns = list(told.values())
    common = [name for name in columns[0] if all(name in one for one in columns)]
    rows = [(name, [one[name] for one in columns]) for name in common]
    return [
        (name, *row)
        for name, row in rows
        if all(isinstance(value, _Cell) for value in row) and row != [None] * len(row)
    ]
