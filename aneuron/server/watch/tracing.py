"""One OpenTelemetry span for each request, named by the GenAI conventions.

Comes in: a request's headers and parameters, then its end. Goes out: a span, to whatever
provider the program has set; without the package or a provider nothing is made. Runs on the
loop. The names are still in development there, so they are constants of ours here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aneuron.outputs import AbortReason, FinishReason
from aneuron.server.watch.ends import Followed, code_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider
    from opentelemetry.util.types import AttributeValue

    from aneuron.outputs import Completion, Timing

__all__ = ["NO_SPAN", "RequestSpan", "Tracing"]

_PROVIDER = "aneuron"
_CHAT, _TEXT = "chat", "text_completion"
_OPERATIONS = {"chat": _CHAT, "completions": _TEXT, "responses": _CHAT}  # by endpoint
_ABORT_REASON = "aneuron.abort_reason"
# What a caller may say of a request, and how the conventions call it.
_PARAMS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "stop": "gen_ai.request.stop_sequences",
    "n": "gen_ai.request.choice.count",
    "stream": "gen_ai.request.stream",
}


class RequestSpan(Followed):
    """What is told of a request as it goes; this one tells nobody. See `Followed`."""

    __slots__ = ()

    def first_token(self) -> None:
        """Take note that the first token is there."""

    def finished(
        self, completion: Completion, *, response_id: str, reasons: Sequence[str] | None = None
    ) -> None:
        """End it.

        Args:
            completion: what came of it; if a choice was aborted, the request was.
            response_id: the id that the client saw.
            reasons: why each choice ended, as the wire says; None takes the engine's words.
        """


NO_SPAN = RequestSpan()


class Tracing:
    """Starts the spans of one app.

    Args:
        provider: who makes them; None takes the program's own, whenever that is set.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._made_by: TracerProvider | None = None
        self._tracer: Tracer | None = None
        try:
            from opentelemetry import trace
        except ImportError:
            self._trace = None
        else:
            self._trace = trace

    def begin(
        self,
        endpoint: str,
        model: str,
        headers: Mapping[str, str],
        params: Mapping[str, AttributeValue | None],
    ) -> RequestSpan:
        """Start the span of a request that is about to be submitted.

        Its parent is what the `traceparent` header names; or the current span, if there is no
        header, or the current span is of the same trace already: a middleware's.

        Args:
            endpoint: "chat", "completions" or "responses".
            model: as the request names it.
            headers: of the request, names in lower case.
            params: of max_tokens, temperature, top_p, top_k, seed, stop, n and stream what
                the request says; None is not said.

        Returns:
            The span, or `NO_SPAN`.
        """
        if (tracer := self._get_tracer()) is None:
            return NO_SPAN
        from opentelemetry.trace import SpanKind

        operation = _OPERATIONS[endpoint]
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": model,
        }
        for name, attribute in _PARAMS.items():
            if (value := params.get(name)) is not None:
                attributes[attribute] = value
        if isinstance(stop := params.get("stop"), str):
            attributes[_PARAMS["stop"]] = [stop]
        if params.get("n") == 1:  # said only where it is not
            del attributes[_PARAMS["n"]]
        began_ns = time.time_ns()
        span = tracer.start_span(
            f"{operation} {model}", _parent(headers), SpanKind.SERVER, attributes,
            start_time=began_ns,
        )  # fmt: skip
        return _Recording(span, model, began_ns) if span.is_recording() else NO_SPAN

    def _get_tracer(self) -> Tracer | None:
        """Return the provider's tracer; None if there is no provider."""
        if self._trace is None:
            return None
        provider = self._provider or self._trace.get_tracer_provider()
        if isinstance(provider, self._trace.ProxyTracerProvider):
            return None
        if provider is not self._made_by:
            from aneuron import __version__

            self._made_by, self._tracer = provider, provider.get_tracer("aneuron", __version__)
        return self._tracer


def _parent(headers: Mapping[str, str]) -> Context | None:
    """Return the context of a request's header, or None for the current one."""
    if "traceparent" not in headers:
        return None
    from opentelemetry import context
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    current = context.get_current()
    told = TraceContextTextMapPropagator().extract(carrier, current)
    here = get_current_span(current).get_span_context()
    there = get_current_span(told).get_span_context()
    return current if here.trace_id == there.trace_id else told


class _Recording(RequestSpan):
    """A span that somebody wants."""

    __slots__ = ("_began_ns", "_first_ns", "_has_ended", "_model", "_span")

    def __init__(self, span: Span, model: str, began_ns: int) -> None:
        self._span, self._model = span, model
        self._began_ns = began_ns
        self._first_ns: int | None = None
        self._has_ended = False

    def first_token(self) -> None:
        if self._first_ns is None:
            self._first_ns = time.time_ns()

    def finished(
        self, completion: Completion, *, response_id: str, reasons: Sequence[str] | None = None
    ) -> None:
        if self._has_ended:
            return
        choices, usage = completion.choices, completion.usage
        reasons = reasons or [one.finish_reason.value for one in choices]
        self._span.set_attributes({
            "gen_ai.response.id": response_id,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": list(reasons),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        })  # fmt: skip
        aborted = [one for one in choices if one.finish_reason is FinishReason.ABORT]
        if aborted:
            self._note_abort(aborted[0].abort_reason or AbortReason.CLIENT)
        self._end(completion.timing)

    def aborted(self, reason: str) -> None:
        if not self._has_ended:
            self._note_abort(reason)
            self._end(None)

    def failed(self, error: BaseException) -> None:
        if not self._has_ended:
            self._note_error(code_of(error), str(error))
            self._end(None)

    def _note_abort(self, reason: str) -> None:
        self._span.set_attribute(_ABORT_REASON, str(reason))
        if reason != AbortReason.CLIENT:  # a client that leaves is no fault
            self._note_error(str(reason), f"aborted: {reason}")

    def _note_error(self, code: str, message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", code)
        self._span.set_status(Status(StatusCode.ERROR, message))

    def _end(self, timing: Timing | None) -> None:
        """Write the stages as events, in the order of their times, and end."""
        self._has_ended = True
        self._event("queued", self._began_ns)
        if timing is None:
            self._event("first_token", self._first_ns)
            self._event("end", time.time_ns())
        else:  # the engine's own times, before any text was made
            self._event("scheduled", self._at(timing.queued_s))
            self._event("first_token", self._at(timing.ttft_s))
            self._event("end", self._at(timing.total_s))
        self._span.end()

    def _at(self, seconds: float | None) -> int | None:
        return None if seconds is None else self._began_ns + int(seconds * 1e9)

    def _event(self, name: str, at_ns: int | None) -> None:
        if at_ns is not None:
            self._span.add_event(name, timestamp=at_ns)
