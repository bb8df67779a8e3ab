"""Spans of requests: names, attributes, parents, ends; and none where nobody asks."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from aneuron import DeviceLost
from aneuron.server.watch.tracing import NO_SPAN, Tracing
from aneuron.testing import count_engine
from tests.support import start

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.sdk.trace import ReadableSpan

    from aneuron import Completion

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}


class Traced:
    """A provider of the test's own, and what it was told."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(self.provider)

    def begin(self, headers: Mapping[str, str] | None = None, **params: Any) -> Any:
        return self.tracing.begin("chat", "m", headers or {}, params)

    @property
    def span(self) -> ReadableSpan:
        (span,) = self.exporter.get_finished_spans()
        return span


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.provider.shutdown()


async def answered(**options: Any) -> Completion:
    async with count_engine() as engine:
        return await start(engine, 10, 5, **options)


async def test_a_finished_request(traced: Traced) -> None:
    params: dict[str, Any] = {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7, "n": 2,
        "stop": "x", "stream": True, "logit_bias": {1: 2}, "unset": None,
    }  # fmt: skip
    with traced.begin(**params) as span:
        span.first_token()
        span.finished(await answered(n=2), response_id="chatcmpl-1", reasons=["length", "stop"])
    seen = traced.span
    assert seen.name == "chat m"
    assert seen.kind is SpanKind.SERVER
    assert seen.parent is None
    assert seen.status.status_code is StatusCode.UNSET
    assert dict(seen.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "aneuron",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("length", "stop"),
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert [event.name for event in seen.events] == ["queued", "scheduled", "first_token", "end"]
    times = [event.timestamp for event in seen.events]
    assert times == sorted(times)
    assert times[0] == seen.start_time


async def test_operations_and_defaults(traced: Traced) -> None:
    answer = await answered()
    for endpoint in ("chat", "completions", "responses"):
        span = traced.tracing.begin(endpoint, "m", {}, {"stop": ["a", "b"], "n": 1})
        span.finished(answer, response_id="r")
    seen = [dict(span.attributes or {}) for span in traced.exporter.get_finished_spans()]
    operations = [attributes["gen_ai.operation.name"] for attributes in seen]
    assert operations == ["chat", "text_completion", "chat"]
    assert seen[0]["gen_ai.request.stop_sequences"] == ("a", "b")
    assert seen[0]["gen_ai.response.finish_reasons"] == ("length",)
    assert "gen_ai.request.choice.count" not in seen[0]  # said only where it is not 1


def test_the_parent_is_the_headers(traced: Traced) -> None:
    with traced.begin(HEADERS):
        pass
    parent = traced.span.parent
    assert parent is not None
    assert f"{parent.trace_id:032x}" == TRACE
    assert f"{parent.span_id:016x}" == PARENT
    assert parent.trace_state.get("a") == "b"
    assert parent.is_remote


@pytest.mark.parametrize("header", ["", "x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "z" * 55])
def test_a_bad_header_is_none(traced: Traced, header: str) -> None:
    with traced.begin({"traceparent": header}):
        pass
    assert traced.span.parent is None


def test_the_parent_is_the_current_span_where_there_is_no_header(traced: Traced) -> None:
    tracer = traced.provider.get_tracer("test")
    with tracer.start_as_current_span("mine") as mine:
        traced.begin().aborted("client")
        traced.begin({"traceparent": "bad"}).aborted("client")
        traced.begin(HEADERS).aborted("client")  # an unrelated one: the header wins
    first, bad, told, _ = traced.exporter.get_finished_spans()
    for span in (first, bad):
        assert span.parent is not None
        assert span.parent.span_id == mine.get_span_context().span_id
    assert told.parent is not None
    assert f"{told.parent.span_id:016x}" == PARENT


def test_a_middlewares_span_of_the_same_trace_is_the_parent(traced: Traced) -> None:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer = traced.provider.get_tracer("middleware")
    told = TraceContextTextMapPropagator().extract(HEADERS)
    with tracer.start_as_current_span("POST", context=told) as middleware:
        traced.begin(HEADERS).aborted("client")
    ours, _ = traced.exporter.get_finished_spans()
    assert ours.parent is not None
    assert ours.parent.span_id == middleware.get_span_context().span_id


def raising(traced: Traced, error: BaseException) -> None:
    with traced.begin():
        raise error


def test_errors_and_aborts(traced: Traced) -> None:
    with pytest.raises(DeviceLost):
        raising(traced, DeviceLost("gone"))
    with pytest.raises(asyncio.CancelledError):
        raising(traced, asyncio.CancelledError())
    traced.begin().aborted("shutdown")
    failed, left, cut_off = traced.exporter.get_finished_spans()
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "gone"
    assert (failed.attributes or {})["error.type"] == "device_lost"
    assert left.status.status_code is StatusCode.UNSET
    assert (left.attributes or {})["aneuron.abort_reason"] == "client"
    assert "error.type" not in (left.attributes or {})
    assert cut_off.status.status_code is StatusCode.ERROR
    assert (cut_off.attributes or {})["aneuron.abort_reason"] == "shutdown"
    assert [event.name for event in left.events] == ["queued", "end"]


async def test_an_aborted_completion(traced: Traced) -> None:
    async with count_engine() as engine:
        stream = start(engine, 10, 10_000, deadline_s=0.05)
        answer = await stream
    traced.begin().finished(answer, response_id="r")
    attributes = dict(traced.span.attributes or {})
    assert attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert attributes["aneuron.abort_reason"] == "deadline"
    assert attributes["error.type"] == "deadline"
    assert traced.span.status.status_code is StatusCode.ERROR


async def test_only_the_first_end_counts(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    with traced.begin() as span:
        span.first_token()
        span.failed(DeviceLost("gone"))
        span.first_token()
        span.aborted("client")
        span.finished(await answered(), response_id="r")
    names = [event.name for event in traced.span.events]
    assert names == ["queued", "first_token", "end"]
    assert "aneuron.abort_reason" not in (traced.span.attributes or {})
    assert not caplog.records  # the SDK warns of what comes after an end


async def silent(tracing: Tracing) -> None:
    with tracing.begin("chat", "m", HEADERS, {"n": 2}) as span:
        assert span is NO_SPAN
        span.first_token()
        span.finished(await answered(), response_id="r")
    NO_SPAN.failed(DeviceLost("gone"))


async def test_off_without_a_provider() -> None:
    await silent(Tracing())


async def test_off_where_nothing_is_sampled() -> None:
    await silent(Tracing(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)))


async def test_off_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    await silent(Tracing())


def test_a_provider_that_is_set_later(monkeypatch: pytest.MonkeyPatch, traced: Traced) -> None:
    from opentelemetry import trace

    tracing = Tracing()
    assert tracing.begin("chat", "m", {}, {}) is NO_SPAN
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: traced.provider)
    tracing.begin("chat", "m", {}, {}).aborted("client")
    later = Traced()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: later.provider)
    tracing.begin("completions", "m", {}, {}).aborted("client")
    assert traced.span.name == "chat m"
    assert later.span.name == "text_completion m"
    assert traced.span.instrumentation_scope is not None
    assert traced.span.instrumentation_scope.name == "aneuron"
