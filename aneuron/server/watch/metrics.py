"""Metrics of one server: what became of its requests, and the page that Prometheus scrapes.

Comes in: calls of the endpoints, a few a request and one for each delta that is streamed.
Goes out: the text of `/metrics`. The engine keeps counts of its own, which are read when
scraped (`collector`). Runs on the loop; no task, no lock. See docs/metrics.md.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from aneuron.outputs import AbortReason, FinishReason
from aneuron.server.watch.ends import Followed, code_of
from aneuron.server.watch.histogram import CHOICES, LATENCY, PER_TOKEN, TOKENS, TTFT, Histogram
from aneuron.server.watch.lag import LoopLag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import CollectorRegistry

    from aneuron.engine import Engine
    from aneuron.outputs import Completion, Timing, Usage

__all__ = ["HISTOGRAMS", "Metrics", "RequestMeter", "missing"]

_MISSING = "metrics need prometheus-client: pip install 'aneuron[metrics]'"
_ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models",
    "/v1/models/{model}", "/tokenize", "/detokenize", "/version", "/openapi.json",
    "/health", "/ready", "/metrics", "/timeline.json", "/timeline.svg", "/",
)  # fmt: skip
_ENDPOINTS = ("chat", "completions", "responses")
_OTHER = "other"

# Name, buckets, what it is.
HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (TTFT, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (PER_TOKEN, "Between two deltas of a stream."),
    "request_time_per_output_token_seconds": (
        PER_TOKEN,
        "Mean time per token after the first, of finished requests with one choice.",
    ),
    "e2e_request_latency_seconds": (LATENCY, "From arrival to end, of finished requests."),
    "request_queue_time_seconds": (LATENCY, "From arrival to the first step."),
    "request_prefill_time_seconds": (LATENCY, "From the first step to the first token."),
    "request_decode_time_seconds": (LATENCY, "From first token to end, of finished requests."),
    "request_inference_time_seconds": (LATENCY, "From first step to end, of finished requests."),
    "request_prompt_tokens": (TOKENS, "Prompt tokens of finished requests."),
    "request_generation_tokens": (TOKENS, "New tokens of finished requests, of all choices."),
    "request_params_n": (CHOICES, "`n` of each request."),
    "request_params_max_tokens": (TOKENS, "`max_tokens` of each request that says one."),
}


def missing() -> str | None:
    """Return what to answer (501) where the extra `metrics` is not installed; None if it is."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        return _MISSING
    return None


class Metrics:
    """Counts of one app, and how they are shown; needs prometheus-client to be shown only.

    Args:
        engine: whose counts are shown beside them.
        model_name: the label of every sample.
        routes: paths that responses are counted by; all others count as "other".

    Attributes:
        histograms: by the names of `HISTOGRAMS`.
        received_by_endpoint, finished_by_reason, aborted_by_reason, failed_by_code: requests.
        responses: by route and status.
        lag: lateness of the engine's loop.
        registry: this app's own, for collectors of yours; None without prometheus-client.
    """

    def __init__(self, engine: Engine, model_name: str, *, routes: Iterable[str] = _ROUTES) -> None:
        self.engine, self.model_name = engine, model_name
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self.received_by_endpoint = Counter(dict.fromkeys(_ENDPOINTS, 0))
        self.finished_by_reason = Counter({"stop": 0, "length": 0, "tool_calls": 0})
        self.aborted_by_reason = Counter({reason.value: 0 for reason in AbortReason})
        self.failed_by_code: Counter[str] = Counter()
        self.responses: Counter[tuple[str, int]] = Counter()
        self.lag = LoopLag(engine)
        self.registry = None if missing() else self._make_registry()
        self._routes = frozenset(routes)
        self._gap = self.histograms["inter_token_latency_seconds"].observe

    def _make_registry(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry

        from aneuron.server.watch.collector import ServerCollector

        registry = CollectorRegistry()
        registry.register(ServerCollector(self))
        return registry

    # ── counted ─────────────────────────────────────────────────────────────────────────

    def received(self, endpoint: str, *, n: int = 1, max_tokens: int | None = None) -> RequestMeter:
        """Count a request that is about to be submitted to the engine.

        Args:
            endpoint: "chat", "completions" or "responses".
            n: choices asked for.
            max_tokens: the limit asked for, if one was.

        Returns:
            What follows it to its end.
        """
        self.lag.start()
        self.received_by_endpoint[endpoint] += 1
        self.histograms["request_params_n"].observe(n)
        if max_tokens is not None:
            self.histograms["request_params_max_tokens"].observe(max_tokens)
        return RequestMeter(self, n)

    def responded(self, route: str | None, status: int) -> None:
        """Count an HTTP response, when its status is sent.

        Args:
            route: the path of the route that answered, as it was declared; None if none did.
            status: what was sent.
        """
        known = route if route in self._routes else None
        self.responses[known or _OTHER, status] += 1

    # ── shown ───────────────────────────────────────────────────────────────────────────

    async def render(self, accept: str | None) -> tuple[bytes, str]:
        """Return the page and its content type; the engine may be closed, or failed.

        All counts are of the moment of the call. Writing them takes 2 to 4 ms, so it is done
        in slices, and others get their turns between.

        Args:
            accept: the scraper's Accept header; it decides between the text format of
                Prometheus and OpenMetrics.

        Raises:
            RuntimeError: prometheus-client is not installed, see `missing`.
        """
        if self.registry is None:
            raise RuntimeError(_MISSING)
        from aneuron.server.watch.collector import write

        self.lag.start()
        return await write(self.registry, accept or "")


class RequestMeter(Followed):
    """Counts one request, to its end; see `Followed`.

    Attributes:
        observe_gap: counts the seconds from one delta to the next; 0.2 us.
    """

    __slots__ = ("_has_ended", "_has_first", "_metrics", "_n", "observe_gap")

    def __init__(self, metrics: Metrics, n: int) -> None:
        """Made by `Metrics.received`."""
        self._metrics, self._n = metrics, n
        self._has_first = self._has_ended = False
        # Bound here, for what is called for each delta.
        self.observe_gap = metrics._gap  # noqa: SLF001  one thing in two classes

    def observe_first(self, seconds: float) -> None:
        """Count the time to the first token, when it comes; else its end tells of it."""
        if not self._has_first:
            self._has_first = True
            self._observe("time_to_first_token_seconds", seconds)

    def finished(self, completion: Completion, reason: str | None = None) -> None:
        """Count an end that is no error.

        Args:
            completion: if any choice of it was aborted, the request was.
            reason: what the wire says, such as "tool_calls"; None takes choice 0's.
        """
        if self._has_ended:
            return
        self._observe_waits(completion.timing)
        for choice in completion.choices:
            if choice.finish_reason is FinishReason.ABORT:
                self.aborted(choice.abort_reason or AbortReason.CLIENT)
                return
        self._end(self._metrics.finished_by_reason, reason or completion.finish_reason.value)
        self._observe_whole(completion.usage, completion.timing)

    def aborted(self, reason: str) -> None:
        """Count an abort: "client", "deadline" or "shutdown"; of a completion, see `finished`."""
        self._end(self._metrics.aborted_by_reason, str(reason))

    def failed(self, error: BaseException) -> None:
        """Count a refusal or an error, by its code."""
        self._end(self._metrics.failed_by_code, code_of(error))

    def _end(self, counter: Counter[str], key: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            counter[key] += 1

    def _observe(self, name: str, value: float) -> None:
        self._metrics.histograms[name].observe(value)

    def _observe_waits(self, timing: Timing) -> None:
        """Count times that are true however the request ended."""
        queued_s, ttft_s = timing.queued_s, timing.ttft_s
        if queued_s is not None:
            self._observe("request_queue_time_seconds", queued_s)
        if ttft_s is not None:
            self.observe_first(ttft_s)
            if queued_s is not None:
                self._observe("request_prefill_time_seconds", max(0.0, ttft_s - queued_s))

    def _observe_whole(self, usage: Usage, timing: Timing) -> None:
        """Count times and sizes that only a finished request has."""
        total_s, num_new = timing.total_s, usage.completion_tokens
        self._observe("e2e_request_latency_seconds", total_s)
        self._observe("request_prompt_tokens", usage.prompt_tokens)
        self._observe("request_generation_tokens", num_new)
        if timing.queued_s is not None:
            self._observe("request_inference_time_seconds", max(0.0, total_s - timing.queued_s))
        if timing.ttft_s is not None:
            decode_s = max(0.0, total_s - timing.ttft_s)
            self._observe("request_decode_time_seconds", decode_s)
            if num_new > 1 and self._n == 1:
                self._observe("request_time_per_output_token_seconds", decode_s / (num_new - 1))
