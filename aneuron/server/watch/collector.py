"""`ServerCollector`: what a scrape shows, put together when it is asked for.

Comes in: a server's `Metrics` and its engine's counts. Goes out: prometheus-client's families,
and the page that they are written to. Importing it needs prometheus-client. Runs on the loop.
"""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from aneuron import __version__
from aneuron.errors import EngineClosed
from aneuron.plans import BreakReason
from aneuron.server.watch.metrics import HISTOGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry, Metric

    from aneuron.outputs import EngineStats
    from aneuron.server.watch.histogram import Histogram
    from aneuron.server.watch.metrics import Metrics

__all__ = ["ServerCollector", "write"]

_SLICE = 60  # samples that are written before others get a turn
_END = b"# EOF\n"  # of an OpenMetrics page

# Name, field of `EngineStats`, what it is.
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that were admitted."),
    ("generation_tokens", "generation_tokens", "New tokens given out."),
    ("num_preemptions", "preemptions", "Requests that gave their blocks up for others."),
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the cache."),
    ("spec_decode_num_draft_tokens", "draft_tokens", "Draft tokens verified."),
    ("spec_decode_num_accepted_tokens", "accepted_draft_tokens", "Draft tokens found right."),
    ("steps", "steps", "Steps launched."),
    ("decode_steps", "decode_steps", "Decode steps launched."),
    ("async_steps", "async_steps", "Steps fed with the device's own tokens."),
    ("sync_fallback_steps", "sync_fallback_steps", "Steps fed by the host."),
)


def _kv_use(stats: EngineStats) -> float:
    return stats.used_blocks / stats.num_blocks if stats.num_blocks else 0.0


# Of an open engine; of a closed one they are 0.
_GAUGES: tuple[tuple[str, Callable[[EngineStats], float], str], ...] = (
    ("num_requests_running", attrgetter("running"), "Requests that run; choices count."),
    ("num_requests_waiting", attrgetter("waiting"), "Requests that wait; choices count."),
    ("kv_cache_usage_perc", _kv_use, "Share of the KV blocks that are held, 0 to 1."),
    ("inflight_steps", attrgetter("in_flight_steps"), "Steps planned and not yet taken in."),
    ("stalled_seconds", attrgetter("stalled_s"), "Since the last step, while work waits."),
)


class ServerCollector(Collector):
    """Makes the families of one server."""

    def __init__(self, metrics: Metrics) -> None:
        """Show these metrics, and those of their engine."""
        self._metrics = metrics
        self._label = metrics.model_name

    def collect(self) -> Iterator[Metric]:
        """Yield each family once."""
        yield from self._requests()
        for name, histogram in self._metrics.histograms.items():
            yield self._histogram(name, HISTOGRAMS[name][1], histogram)
        yield from self._lag()
        yield from self._engine()

    def _requests(self) -> Iterator[Metric]:
        seen = self._metrics
        yield self._counter(
            "requests_received", "Requests submitted.", "endpoint", seen.received_by_endpoint
        )
        yield self._counter(
            "request_success", "Requests finished.", "finished_reason", seen.finished_by_reason
        )
        yield self._counter(
            "request_aborted", "Requests aborted, by whom.", "reason", seen.aborted_by_reason
        )
        yield self._counter(
            "request_failure", "Requests refused or failed.", "code", seen.failed_by_code
        )
        responses = CounterMetricFamily(
            "aneuron_http_responses",
            "HTTP responses.",
            labels=("model_name", "route", "status"),
        )
        for (route, status), number in seen.responses.items():
            responses.add_metric((self._label, route, str(status)), number)
        yield responses

    def _lag(self) -> Iterator[Metric]:
        lag = self._metrics.lag
        what = "Lateness of a timer on the engine's event loop"
        yield self._histogram("event_loop_lag_seconds", f"{what}.", lag.lateness)
        yield self._gauge("event_loop_lag_last_seconds", f"{what}, the last.", lag.last_s)
        yield self._gauge("event_loop_lag_max_seconds", f"{what}, the longest.", lag.max_s)

    def _engine(self) -> Iterator[Metric]:
        engine = self._metrics.engine
        is_open = engine.is_open
        yield self._gauge("engine_open", "1 while the engine takes requests.", float(is_open))
        try:
            stats = engine.stats()  # of a closed engine its last
        except EngineClosed:  # never opened: only what is about now is known
            for name, _, what in _GAUGES:
                yield self._gauge(name, what, 0.0)
            return
        for name, value, what in _GAUGES:
            yield self._gauge(name, what, value(stats) if is_open else 0.0)
        for name, source, what in _COUNTERS:
            yield self._counter(name, what, None, {"": getattr(stats, source)})
        yield from self._flow(stats)
        yield self._info(stats)

    def _flow(self, stats: EngineStats) -> Iterator[Metric]:
        counts: dict[str, float] = {reason.value: 0 for reason in BreakReason}
        seconds = dict(counts)
        for reason, one in stats.breaks.items():
            counts[reason], seconds[reason] = one.count, one.seconds
        yield self._counter("flow_breaks", "Breaks of the async flow.", "reason", counts)
        yield self._counter("flow_break_seconds", "Time they took.", "reason", seconds)
        yield self._gauge(
            "decode_async_share",
            "Share of decode steps that were fed with the device's own tokens.",
            stats.decode_async_share,
        )
        timeline = self._metrics.engine.timeline
        busy_s, idle_s = timeline.busy_s, timeline.idle_s
        what = "Time that programs ran on the device."
        yield self._counter("device_busy_seconds", what, None, {"": busy_s})
        what = "Time that the device waited for the next program; rests left out."
        yield self._counter("device_idle_seconds", what, None, {"": idle_s})
        if busy_s + idle_s > 0:
            what = "Share of that time that it waited, since the engine opened."
            yield self._gauge("device_idle_share", what, idle_s / (busy_s + idle_s))

    def _info(self, stats: EngineStats) -> Metric:
        engine = self._metrics.engine
        config = engine.config
        facts: dict[str, Any] = {
            "version": __version__,
            "device": engine.device.name,
            "async_scheduling": config.async_scheduling,
            "token_carry": config.token_carry,
            "max_num_seqs": config.max_num_seqs,
            "block_size": config.block_size,
            "num_blocks": stats.num_blocks,
        }
        family = InfoMetricFamily(
            "aneuron_engine", "What runs, and how it is set.", labels=("model_name",)
        )
        family.add_metric((self._label,), {name: str(fact) for name, fact in facts.items()})
        return family

    # ── families ────────────────────────────────────────────────────────────────────────

    def _counter(
        self, name: str, what: str, label: str | None, counts: Mapping[str, float]
    ) -> Metric:
        labels: Iterable[str] = ("model_name",) if label is None else ("model_name", label)
        family = CounterMetricFamily(f"aneuron_{name}", what, labels=tuple(labels))
        for key, number in counts.items():
            family.add_metric((self._label, key), number)
        return family

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"aneuron_{name}", what, labels=("model_name",))
        family.add_metric((self._label,), value)
        return family

    def _histogram(self, name: str, what: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"aneuron_{name}", what, labels=("model_name",))
        family.add_metric((self._label,), histogram.buckets(), histogram.total)
        return family


# ── the page ────────────────────────────────────────────────────────────────────────────


class _Slice(Collector):
    """Some families, for an encoder that asks a registry for all."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def write(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the page of a registry, as `accept` asks for it, and its content type."""
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is none
        encode, content_type = choose_encoder("")
    families, page = list(registry.collect()), bytearray()
    for some in _slices(families):
        await asyncio.sleep(0)
        page += encode(_Slice(some)).removesuffix(_END)
    if content_type.startswith("application/openmetrics-text"):
        page += _END
    return bytes(page), content_type


def _slices(families: Iterable[Metric]) -> Iterator[list[Metric]]:
    taken: list[Metric] = []
    for family in families:
        taken.append(family)
        if sum(len(one.samples) for one in taken) >= _SLICE:
            yield taken
            taken = []
    yield taken
