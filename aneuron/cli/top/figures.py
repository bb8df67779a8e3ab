"""From two pages to what happened between them: rates, shares, quantiles. Pure.

Comes in: two `Page`s of one server, the later one maybe of another process at the same address.
Goes out: `Figures`. A counter that fell began anew, as Prometheus' own `rate` has it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aneuron.cli.top.page import Page

__all__ = ["Figures", "as_json", "figures", "quantile", "restarted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a server did between two samples; None where there was nothing to measure.

    Attributes:
        model, device, version: what it runs.
        has_restarted: the counters began anew, so the figures are since then.
        is_open: the engine takes requests.
        seconds: between the samples.
        running, waiting: requests, at the later sample.
        finished_per_s, failed_per_s, aborted_per_s: requests.
        tokens_in_per_s, tokens_out_per_s: of prompts admitted, and given out.
        ttft_p50_s, ttft_p99_s: time to first token.
        itl_p50_s, itl_p99_s: between two deltas of a stream.
        kv_usage: share of the KV blocks held, 0 to 1, at the later sample.
        prefix_hit_rate: prompt tokens found over those looked up.
        steps_per_s: launched.
        async_share: of decode steps, fed with the device's own tokens.
        device_idle_share: of the device's time.
        breaks_per_s, break_seconds: of the async flow, by reason; those that happened.
        lag_p99_s, lag_last_s: the event loop's.
    """

    model: str
    device: str
    version: str
    has_restarted: bool
    is_open: bool
    seconds: float
    running: float
    waiting: float
    finished_per_s: float
    failed_per_s: float
    aborted_per_s: float
    tokens_in_per_s: float
    tokens_out_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    kv_usage: float
    prefix_hit_rate: float | None
    steps_per_s: float
    async_share: float | None
    device_idle_share: float | None
    breaks_per_s: dict[str, float]
    break_seconds: dict[str, float]
    lag_p99_s: float | None
    lag_last_s: float


def as_json(told: Figures) -> dict[str, Any]:
    """Return figures as `--json` has them."""
    return asdict(told)


def figures(before: Page, after: Page) -> Figures:
    """Return what happened between two samples."""
    has_restarted = restarted(before, after)
    span = _Span(before, after, since_start=has_restarted)
    info = after.info("engine")
    breaks = span.grown_by("flow_breaks_total", "reason")
    break_s = span.grown_by("flow_break_seconds_total", "reason")
    busy_s = span.grown("device_busy_seconds_total")
    idle_s = span.grown("device_idle_seconds_total")
    return Figures(
        model=info.get("model_name", ""),
        device=info.get("device", ""),
        version=info.get("version", ""),
        has_restarted=has_restarted,
        is_open=after.value("engine_open") > 0,
        seconds=span.seconds,
        running=after.value("num_requests_running"),
        waiting=after.value("num_requests_waiting"),
        finished_per_s=span.rate("request_success_total"),
        failed_per_s=span.rate("request_failure_total"),
        aborted_per_s=span.rate("request_aborted_total"),
        tokens_in_per_s=span.rate("prompt_tokens_total"),
        tokens_out_per_s=span.rate("generation_tokens_total"),
        ttft_p50_s=span.quantile("time_to_first_token_seconds", 0.5),
        ttft_p99_s=span.quantile("time_to_first_token_seconds", 0.99),
        itl_p50_s=span.quantile("inter_token_latency_seconds", 0.5),
        itl_p99_s=span.quantile("inter_token_latency_seconds", 0.99),
        kv_usage=after.value("kv_cache_usage_perc"),
        prefix_hit_rate=span.share("prefix_cache_hits_total", "prefix_cache_queries_total"),
        steps_per_s=span.rate("steps_total"),
        async_share=span.share("async_steps_total", "decode_steps_total"),
        device_idle_share=idle_s / (busy_s + idle_s) if busy_s + idle_s > 0 else None,
        breaks_per_s={name: span.per_s(count) for name, count in breaks.items() if count},
        break_seconds={name: seconds for name, seconds in break_s.items() if seconds},
        lag_p99_s=span.quantile("event_loop_lag_seconds", 0.99),
        lag_last_s=after.value("event_loop_lag_last_seconds"),
    )


def restarted(before: Page, after: Page) -> bool:
    """Whether the later page is of another engine: a counter of the earlier one fell."""
    names = ("steps_total", "prompt_tokens_total", "generation_tokens_total")
    counters = (*names, "requests_received_total", "event_loop_lag_seconds_count")
    return any(after.value(name) < before.value(name) for name in counters)


class _Span:
    """How much counters grew from one page to the next."""

    def __init__(self, before: Page, after: Page, *, since_start: bool) -> None:
        self._before, self._after = before, after
        self._since_start = since_start
        self.seconds = max(0.0, after.at_s - before.at_s)

    def grown(self, name: str) -> float:
        before = 0.0 if self._since_start else self._before.value(name)
        return max(0.0, self._after.value(name) - before)

    def grown_by(self, name: str, label: str) -> dict[str, float]:
        before = {} if self._since_start else self._before.by_label(name, label)
        after = self._after.by_label(name, label)
        return {key: max(0.0, count - before.get(key, 0.0)) for key, count in after.items()}

    def per_s(self, count: float) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0

    def rate(self, name: str) -> float:
        return self.per_s(self.grown(name))

    def share(self, part: str, whole: str) -> float | None:
        total = self.grown(whole)
        return self.grown(part) / total if total > 0 else None

    def quantile(self, name: str, q: float) -> float | None:
        before = {} if self._since_start else self._before.buckets(name)
        after = self._after.buckets(name)
        return quantile({bound: n - before.get(bound, 0.0) for bound, n in after.items()}, q)


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Return a quantile of a histogram, as Prometheus' `histogram_quantile` reckons it.

    Args:
        buckets: counts by upper bound, cumulative, ascending, the last bound infinite.
        q: from 0 to 1.

    Returns:
        A value within the bucket in which the quantile lies, as if its values were spread evenly;
        the last finite bound where it lies above that; None where nothing was counted.
    """
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    rank = q * total
    low, seen = 0.0, 0.0
    for bound, count in buckets.items():
        if count >= rank and count > seen:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - seen) / (count - seen)
        if not math.isinf(bound):
            low = bound
        seen = max(seen, count)
    return low
