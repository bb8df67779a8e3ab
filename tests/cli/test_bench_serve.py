"""`aneuron bench serve`: its parser, its client against servers good and bad, its figures."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from array import array
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aneuron.cli.bench.server import serve as serve_module
from aneuron.cli.bench.server.arrivals import Shape, arrival_times
from aneuron.cli.bench.server.client import Client, Target
from aneuron.cli.bench.server.floor import build_floor
from aneuron.cli.bench.server.load import Load, LoadRun
from aneuron.cli.bench.server.options import LoadOptions, ReportOptions, RequestOptions
from aneuron.cli.bench.server.report import figures, middle
from aneuron.cli.bench.server.spawn import FLOOR, spawned
from aneuron.cli.bench.server.stream import Outcome
from aneuron.cli.http.http1 import BadAnswer, EventSplitter, ResponseParser
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from starlette.requests import Request

    from tests.cli.conftest import Command

SSE = "text/event-stream"
PATH = "/v1/completions"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def cut(data: bytes, at: Iterable[int]) -> list[bytes]:
    ends = [*sorted({point % (len(data) + 1) for point in at}), len(data)]
    parts = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return [part for part in parts if part]


cuts = st.lists(st.integers(0, 10**6), max_size=12)


# ── the bytes of an answer ──────────────────────────────────────────────────────────────


def chunked(pieces: Sequence[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    body = b"".join(b"%X%s\r\n%s\r\n" % (len(one), extension, one) for one in pieces if one)
    return body + b"0%s\r\n%s\r\n" % (extension, trailer)


@given(
    pieces=st.lists(st.binary(max_size=40), max_size=6),
    extension=st.sampled_from([b"", b";name=value", b" ;x"]),
    trailer=st.sampled_from([b"", b"x-cost: 3\r\n", b"a: 1\r\nb: 2\r\n"]),
    early=st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n"]),
    at=cuts,
)
def test_chunks_come_out_however_they_are_cut(
    pieces: list[bytes], extension: bytes, trailer: bytes, early: bytes, at: list[int]
) -> None:
    head = early + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A:  b \r\n\r\n"
    answer = head + chunked(pieces, extension, trailer)
    for parts in (cut(answer, at), [bytes([one]) for one in answer], [answer]):
        parser = ResponseParser()
        body = b""
        for part in parts:
            assert not parser.is_done
            body += parser.feed(part)
        assert body == b"".join(pieces)
        assert parser.is_done
        assert (parser.status, parser.headers["x-a"], parser.keeps_alive) == (200, "b", True)


@given(body=st.binary(max_size=60), at=cuts)
def test_a_counted_body_comes_out_however_it_is_cut(body: bytes, at: list[int]) -> None:
    answer = b"HTTP/1.1 429 \r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
    parser = ResponseParser()
    parts = cut(answer % (len(body), body), at)
    assert b"".join(parser.feed(part) for part in parts) == body
    assert parser.is_done
    assert (parser.status, parser.keeps_alive) == (429, False)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nab") + parser.feed(b"c") == b"abc"
    before = parser.is_done
    parser.feed_eof()
    assert (before, parser.is_done, parser.keeps_alive) == (False, True, False)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab", b"x" * 70_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n0x1\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1" * 2000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(BadAnswer):
        ResponseParser().feed(answer)
    parser = ResponseParser()
    with pytest.raises(BadAnswer):
        for one in answer:
            parser.feed(bytes([one]))


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\n", HEAD + b"content-length: 3\r\n\r\nab"]
)
def test_an_answer_that_is_cut_short_is_no_answer(answer: bytes) -> None:
    parser = ResponseParser()
    parser.feed(answer)
    with pytest.raises(BadAnswer):
        parser.feed_eof()


lines = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=12)
events = st.lists(st.lists(lines, min_size=1, max_size=3), max_size=5)


@given(events=events, end=st.sampled_from(["\n", "\r\n", "\r"]), ping=st.booleans(), at=cuts)
def test_events_come_out_however_they_are_cut(
    events: list[list[str]], end: str, *, ping: bool, at: list[int]
) -> None:
    text = ""
    for data in events:
        text += f": ping{end}{end}" * ping + f"event: x{end}" * ping
        text += "".join(f"data: {line}{end}" for line in data) + end
    body = text.encode() + b": end\n\n"
    expected = ["\n".join(data).encode() for data in events]
    for parts in (cut(body, at), [bytes([one]) for one in body]):
        splitter = EventSplitter()
        assert [data for part in parts for data in splitter.feed(part)] == expected


def test_an_event_may_have_no_space_and_no_colon() -> None:
    assert EventSplitter().feed(b"data:a\n\ndata\n\ndatum: b\n\n") == [b"a", b""]


def test_an_event_that_does_not_end_is_refused() -> None:
    splitter = EventSplitter()
    with pytest.raises(BadAnswer, match="too large"):
        for _ in range(100):
            splitter.feed(b"x" * 2**16)


# ── what is sent, and when ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_of_a_gamma_distribution(burstiness: float) -> None:
    times = arrival_times(20_000, 50.0, burstiness, np.random.default_rng(1))
    gaps = np.diff(times, prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    # Of a Poisson process, as many arrivals in a second vary as there are on average.
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1 / burstiness, rel=0.2)


def test_arrivals_come_again_with_their_seed() -> None:
    def drawn(seed: int) -> list[float]:
        return list(arrival_times(50, 3.0, 1.0, np.random.default_rng(seed)))

    assert drawn(1) == drawn(1) != drawn(2)
    assert arrival_times(4, np.inf, 1.0, np.random.default_rng(1)).tolist() == [0, 0, 0, 0]


def shape_of(path: str = PATH, output_len: int = 8, **changed: Any) -> Shape:
    options: dict[str, Any] = {"input_len": 5, "ignore_eos": True, "token_ids": (100, 200)}
    return Shape(endpoint=path, model="m", output_len=output_len, **{**options, **changed})


def test_a_request_of_ids() -> None:
    request = json.loads(shape_of(token_ids=(7, 9)).body(np.random.default_rng(1)))
    prompt = request.pop("prompt")
    assert len(prompt) == 5
    assert set(prompt) <= {7, 8}
    assert request == {
        "model": "m", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_a_request_of_words() -> None:
    shape = shape_of("/v1/chat/completions", ignore_eos=False)
    request = json.loads(shape.body(np.random.default_rng(1)))
    (message,) = request["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 5
    assert request["max_completion_tokens"] == 8
    assert not {"prompt", "max_tokens", "ignore_eos"} & set(request)


# ── a server in the test's own loop ─────────────────────────────────────────────────────


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        async with asyncio.TaskGroup() as group:
            group.create_task(server._serve([listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = server.force_exit = True


def posted(handler: Callable[[Request], Awaitable[Response]]) -> Starlette:
    return Starlette(routes=[Route(PATH, handler, methods=["POST"])])


def streamed(events: Iterable[str | dict[str, Any]]) -> Response:
    async def chunks() -> AsyncIterator[str]:
        for event in events:
            await asyncio.sleep(0)
            yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"

    return StreamingResponse(chunks(), media_type=SSE)


def text_of(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage_of(completion_tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": completion_tokens}
    return {"choices": [], "usage": usage}


async def loaded(
    url: str, num_prompts: int = 1, timeout_s: float = 15.0, **options: Any
) -> LoadRun:
    given = {"request_rate": np.inf, "burstiness": 1.0, "max_concurrency": None, "seed": 0}
    load = Load(num_prompts=num_prompts, **{**given, **options})
    async with Client(Target(url), timeout_s=timeout_s) as client:
        return await load.run(client, shape_of())


async def one_outcome(app: Starlette, **options: Any) -> Outcome:
    async with serving(app) as url:
        (outcome,) = (await loaded(url, **options)).outcomes
    return outcome


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize("options", [{}, {"max_concurrency": 3}, {"request_rate": 400.0}])
async def test_counts_are_exact(path: str, options: dict[str, Any]) -> None:
    given = {"request_rate": np.inf, "burstiness": 1.0, "max_concurrency": None, "seed": 0}
    load = Load(num_prompts=20, **{**given, **options})
    async with (
        serving(build_floor()) as url,
        Client(Target(f"{url}/v1/"), timeout_s=15) as client,
    ):
        assert await client.models() == ["floor"]
        run = await load.run(client, shape_of(path))
        # A place that comes free goes to the next one, with the connection.
        assert client.num_connections <= options.get("max_concurrency", 20) + 1
    told = figures(run, input_len=9, percentiles=[50, 99], slo_ms={})
    assert (told["completed"], told["failed"], told["errors"]) == (20, 0, {})
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (100, 160)
    assert told["output_throughput"] == pytest.approx(160 / told["duration"])
    assert told["max_concurrent_requests"] <= options.get("max_concurrency", 20)
    for outcome in run.outcomes:
        assert len(outcome.marks) == 8
        times = [outcome.due_s, outcome.sent_s, *outcome.marks, outcome.end_s]
        assert times == sorted(times)


async def test_connections_are_kept() -> None:
    async with serving(build_floor()) as url, Client(Target(url), timeout_s=15) as client:
        for number in range(5):
            body = shape_of().body(np.random.default_rng(number))
            outcome = await client.ask(PATH, body, due_s=0.0, max_events=100)
            assert outcome.error is None
        assert client.num_connections == 1


async def test_requests_are_sent_whatever_the_server_does() -> None:
    count, arrived, all_here = 40, 0, asyncio.Event()

    async def handler(request: Request) -> Response:
        nonlocal arrived
        await request.body()
        arrived += 1
        if arrived == count:
            all_here.set()
        await all_here.wait()
        return streamed([text_of("a", "stop"), usage_of(1)])

    async with serving(posted(handler)) as url:
        run = await loaded(url, count, request_rate=500.0)
    assert [one.error for one in run.outcomes] == [None] * count
    told = figures(run, input_len=5, percentiles=[99], slo_ms={})
    assert told["max_concurrent_requests"] == count
    assert told["p99_wait_ms"] == 0
    due = np.array([one.due_s for one in run.outcomes])
    expected = arrival_times(count, 500.0, 1.0, np.random.default_rng(0))
    np.testing.assert_allclose(np.diff(due), np.diff(expected), atol=1e-9)
    assert all(one.sent_s >= one.due_s for one in run.outcomes), "none is sent before its time"


async def test_waiting_for_a_place_is_not_the_clients_lateness() -> None:
    under_way, most = 0, 0

    async def handler(request: Request) -> Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await request.body()
        for _ in range(20):
            await asyncio.sleep(0)
        under_way -= 1
        return streamed([text_of("a", "stop")])

    async with serving(posted(handler)) as url:
        run = await loaded(url, 30, max_concurrency=2)
    assert most == 2
    assert run.waits_s[:2].tolist() == [0, 0]
    assert run.waits_s[-1] > run.waits_s[5] > 0
    late_s = [outcome.sent_s - outcome.due_s for outcome in run.outcomes]
    assert np.median(late_s) < run.waits_s[-1] / 4


async def test_merged_deltas_count_by_usage() -> None:
    async def handler(request: Request) -> Response:
        return streamed([text_of("abc"), text_of("de"), text_of("", "stop"), usage_of(5), "[DONE]"])

    outcome = await one_outcome(posted(handler))
    assert (outcome.error, outcome.completion_tokens, len(outcome.marks)) == (None, 5, 2)
    assert (outcome.prompt_tokens, outcome.has_usage) == (3, True)


async def test_only_text_is_a_token() -> None:
    def delta(**fields: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}], "usage": None}

    tool_call = {"index": 0, "function": {"name": "f"}}
    chunks = [
        delta(role="assistant", content=""), delta(reasoning="hm"), delta(reasoning_content="h"),
        delta(content='\n\ndata: [DONE]\n"b"'), delta(tool_calls=[tool_call]), delta(content=None),
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ]  # fmt: skip

    async def handler(request: Request) -> Response:
        return streamed(chunks)

    outcome = await one_outcome(posted(handler))
    assert outcome.error is None
    assert len(outcome.marks) == outcome.completion_tokens == 4
    assert not outcome.has_usage


ERRORS: dict[str, Response | list[str | dict[str, Any]]] = {
    "stream_error": [text_of("a"), {"error": {"message": "the device is lost"}}, "[DONE]"],
    "truncated": [text_of("a"), usage_of(1)],
    "empty": [text_of("", "stop"), usage_of(0), "[DONE]"],
    "no_stream": JSONResponse({"choices": []}),
    "protocol": [text_of("a"), "{not json"],
    "http_400": JSONResponse({"error": {"message": "no such field"}}, 400),
    "http_404": Response("nothing here", 404),
    "http_204": Response(status_code=204),
}


@pytest.mark.parametrize("kind", ERRORS)
async def test_each_failure_has_its_kind(kind: str) -> None:
    async def handler(request: Request) -> Response:
        answer = ERRORS[kind]
        return streamed(answer) if isinstance(answer, list) else answer

    outcome = await one_outcome(posted(handler))
    assert outcome.error == kind
    messages = {"stream_error": "the device is lost", "http_400": "no such field"}
    assert messages.get(kind, "") in outcome.detail
    assert outcome.end_s >= outcome.sent_s > 0


async def test_an_answer_that_goes_on_too_long_is_given_up() -> None:
    async def handler(request: Request) -> Response:
        return streamed(text_of("a") for _ in range(10**9))

    outcome = await one_outcome(posted(handler))
    assert outcome.error == "protocol"
    assert "more than 96 events" in outcome.detail


async def test_an_app_that_fails_in_its_stream() -> None:
    async def handler(request: Request) -> Response:
        async def chunks() -> AsyncIterator[str]:
            yield f"data: {json.dumps(text_of('a'))}\n\n"
            raise RuntimeError("the device is lost")

        return StreamingResponse(chunks(), media_type=SSE)

    outcome = await one_outcome(posted(handler))
    assert (outcome.status, outcome.error, len(outcome.marks)) == (200, "closed", 1)


async def test_an_overloaded_server_is_not_asked_again() -> None:
    num_asked = 0

    async def handler(request: Request) -> Response:
        nonlocal num_asked
        num_asked += 1
        headers = {"Retry-After": "2"} if num_asked % 2 else {"retry-after": "Fri, 01 Jan 2027"}
        return JSONResponse({"error": {"message": "full"}}, 429, headers)

    async with serving(posted(handler)) as url:
        run = await loaded(url, 10, max_concurrency=2)
    assert num_asked == 10
    told = figures(run, input_len=5, percentiles=[99], slo_ms={"ttft": 1.0})
    assert told["errors"] == {"http_429": {"count": 10, "first": "full"}}
    assert (told["completed"], told["failed"], told["num_retry_after"]) == (0, 10, 5)
    assert told["mean_retry_after_s"] == 2
    assert (told["output_throughput"], told["request_goodput"]) == (0, 0)
    assert told["mean_ttft_ms"] is told["p99_itl_ms"] is told["client_cpu_us_per_token"] is None


async def test_a_server_that_says_nothing_is_left() -> None:
    is_left = asyncio.Event()

    async def handler(request: Request) -> Response:
        await request.body()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_left.set()
        return Response()

    async with serving(posted(handler)) as url:
        (outcome,) = (await loaded(url, timeout_s=0.2)).outcomes
        assert outcome.error == "timeout"
        await is_left.wait()


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (outcome,) = (await loaded(f"http://127.0.0.1:{port}")).outcomes
    assert (outcome.error, outcome.status) == ("connect", 0)


# ── servers that are none ───────────────────────────────────────────────────────────────


@asynccontextmanager
async def raw_server(answers: Sequence[bytes]) -> AsyncIterator[tuple[str, list[int]]]:
    """Answer the requests of all connections with these bytes in turn; an empty one closes.

    Gives the address, and of each request the number of its connection.
    """
    asked: list[int] = []
    num_connections = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        number, num_connections = num_connections, num_connections + 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                asked.append(number)
                answer = answers[len(asked) - 1]
                if not answer:
                    return
                writer.write(answer)
                await writer.drain()
                if b"content-length" not in answer and not answer.endswith(b"0\r\n\r\n"):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


def whole(*events: str) -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    return HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body)


GOOD = whole(json.dumps(text_of("a", "stop")), json.dumps(usage_of(1)), "[DONE]")
MIDWAY = HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked([GOOD.split(b"\r\n\r\n")[1]])[:60]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (GOOD, None), (MIDWAY, "closed"), (HEAD, "closed"), (b"", "closed"),
        (b"220 mail\r\n\r\n", "protocol"), (HEAD + b"\r\n" + GOOD.split(b"\r\n\r\n")[1], None),
        (HEAD + b"\r\ndata: {", "truncated"), (GOOD + GOOD, "protocol"),
    ],
)  # fmt: skip
async def test_whatever_bytes_come_back(answer: bytes, error: str | None) -> None:
    async with raw_server([answer]) as (url, asked):
        (outcome,) = (await loaded(url)).outcomes
        assert asked == [0]
    assert outcome.error == error
    assert outcome.detail if error else outcome.completion_tokens == 1


async def test_a_kept_connection_may_close_while_it_is_asked() -> None:
    async with raw_server([GOOD, b"", GOOD]) as (url, asked):
        run = await loaded(url, 2, max_concurrency=1)
        assert asked == [0, 0, 1]
    assert [one.error for one in run.outcomes] == [None, None]


async def test_an_answer_that_had_begun_is_not_asked_for_again() -> None:
    async with raw_server([GOOD, MIDWAY]) as (url, asked):
        run = await loaded(url, 2, max_concurrency=1)
        assert asked == [0, 0]
    assert [one.error for one in run.outcomes] == [None, "closed"]


async def test_a_server_may_speak_unasked() -> None:
    may_speak, is_left = asyncio.Event(), asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(GOOD)
        await may_speak.wait()
        writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        try:
            while await reader.read(1000):
                pass
        except ConnectionError:
            pass
        is_left.set()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    target = Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server, Client(target, timeout_s=15) as client:
        for number in (1, 2):
            outcome = await client.ask(PATH, b"{}", due_s=0.0, max_events=9)
            assert (outcome.error, client.num_connections) == (None, number)
            may_speak.set()
            await is_left.wait()
            may_speak.clear()
            is_left.clear()


async def test_a_cancelled_load_closes_its_connections() -> None:
    is_asked, is_left = asyncio.Event(), asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        is_asked.set()
        try:
            while await reader.read(1000):
                pass
        except ConnectionError:
            pass
        is_left.set()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        loading = asyncio.create_task(loaded(f"http://127.0.0.1:{port}"))
        await is_asked.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await is_left.wait()


@pytest.mark.parametrize(
    ("url", "head"),
    [
        ("http://127.0.0.1:8000", b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n"),
        ("http://me:secret@box/a/v1/", b"POST /a/x HTTP/1.1\r\nHost: box\r\n"),
        ("https://[::1]", b"POST /x HTTP/1.1\r\nHost: [::1]\r\n"),
    ],
)
def test_a_target(url: str, head: bytes) -> None:
    assert Target(url).head("POST", "/x").startswith(head)
    assert b"\r\nAuthorization: Bearer k\r\n" in Target(url, "k").head("GET", "/x")
    assert Target(url).port == {"http://127.0.0.1:8000": 8000, "https://[::1]": 443}.get(url, 80)


@pytest.mark.parametrize(
    "url", ["box:80", "ftp://box", "http://", "http://b:x", "http://b?a", "http://b/é"]
)
def test_what_is_no_target(url: str) -> None:
    with pytest.raises(ConfigError):
        Target(url)


def test_a_key_cannot_add_headers() -> None:
    with pytest.raises(ConfigError, match="api-key"):
        Target("http://box", "k\r\nHost: other")


# ── figures ─────────────────────────────────────────────────────────────────────────────


def done(sent_s: float, *marks: float, tokens: int | None = None, **changed: Any) -> Outcome:
    facts: dict[str, Any] = {
        "due_s": sent_s - 0.001, "sent_s": sent_s, "end_s": max((*marks, sent_s)) + 0.25,
        "status": 200, "marks": array("d", marks), "completion_tokens": tokens or len(marks),
    }  # fmt: skip
    return Outcome(**{**facts, **changed})


def run_of(*outcomes: Outcome) -> LoadRun:
    waits_s = np.zeros(len(outcomes))
    return LoadRun(outcomes=list(outcomes), duration_s=2.0, cpu_s=0.5, waits_s=waits_s)


def test_figures_of_known_outcomes() -> None:
    first = done(10.0, 10.1, 10.2, 10.4, prompt_tokens=7, has_usage=True)
    merged = done(10.0, 10.3, 10.5, tokens=5)
    single = done(10.2, 10.6)
    failed = done(10.0, 10.1, error="closed", detail="why", retry_after_s=3.0)
    limits = {"ttft": 350.0, "tpot": 100.0}
    run = run_of(first, merged, single, failed)
    told = figures(run, input_len=9, percentiles=[0, 99.5], slo_ms=limits)
    counts = ("completed", "failed", "total_input_tokens", "total_output_tokens")
    assert [told[name] for name in counts] == [3, 1, 7 + 9 + 9, 3 + 5 + 1]
    rates = ("request_throughput", "output_throughput", "total_token_throughput")
    assert [told[name] for name in rates] == [1.5, 4.5, 17.0]
    assert told["mean_ttft_ms"] == pytest.approx((100 + 300 + 400) / 3)
    assert told["median_ttft_ms"] == pytest.approx(300)
    assert told["std_ttft_ms"] == pytest.approx(np.std([100, 300, 400]))
    assert told["p0_ttft_ms"] == pytest.approx(100)
    # 300 ms over two gaps; 200 ms over four tokens after the first; one token has none.
    assert told["mean_tpot_ms"] == pytest.approx((150 + 50) / 2)
    assert told["mean_itl_ms"] == pytest.approx((100 + 200 + 200) / 3)
    assert told["p99.5_e2el_ms"] == pytest.approx(np.percentile([650, 750, 650], 99.5))
    # The first is too slow token by token, the single one to its first; the failed one is none.
    assert told["request_goodput"] == pytest.approx(1 / 2.0)
    assert told["errors"] == {"closed": {"count": 1, "first": "why"}}
    assert (told["num_retry_after"], told["mean_retry_after_s"]) == (1, 3.0)
    assert told["p99_late_ms"] == pytest.approx(1.0)
    assert told["client_cpu_us_per_token"] == pytest.approx(0.5 / 9 * 1e6)
    assert told["client_busy_share"] == 0.25
    assert told["max_concurrent_requests"] == 4


def test_requests_one_after_the_other_are_never_two() -> None:
    run = run_of(done(1.0, 1.5), done(1.75, 2.0), done(5.0, 5.1))
    told = figures(run, input_len=1, percentiles=[99], slo_ms={})
    assert told["max_concurrent_requests"] == 1
    assert told["request_goodput"] is None
    assert told["mean_tpot_ms"] is told["mean_itl_ms"] is None


def test_a_late_client_is_told() -> None:
    late = done(1.0, 1.5, due_s=0.25)
    told = figures(run_of(*[done(1.0, 1.5)] * 3, late), input_len=1, percentiles=[99], slo_ms={})
    assert told["max_late_ms"] == pytest.approx(750)
    assert told["median_late_ms"] == pytest.approx(1)


def test_tokens_that_show_no_text_come_at_the_end() -> None:
    told = figures(run_of(done(1.0, tokens=3)), input_len=1, percentiles=[99], slo_ms={})
    assert told["mean_ttft_ms"] == pytest.approx(250)
    assert told["mean_tpot_ms"] == 0


def test_runs_in_one() -> None:
    runs = [
        figures(run, input_len=1, percentiles=[99], slo_ms={})
        for run in (
            run_of(done(1.0, 1.1)), run_of(done(1.0, 1.2)),
            run_of(done(1.0, 1.6), done(1.0, error="closed", detail="a")),
        )
    ]  # fmt: skip
    told = middle(runs)
    assert (told["completed"], told["failed"], told["duration"]) == (3, 1, 6.0)
    assert told["mean_ttft_ms"] == pytest.approx(200)
    assert told["max_concurrent_requests"] == 2
    assert told["errors"] == {"closed": {"count": 1, "first": "a"}}
    assert middle([runs[2], runs[2]])["errors"]["closed"]["count"] == 2
    assert told["mean_tpot_ms"] is None


# ── child processes, and the command ────────────────────────────────────────────────────

SAY = "import sys; print('on http://127.0.0.1:81', file=sys.stderr, flush=True); "


async def test_a_server_that_was_started_is_stopped() -> None:
    async with spawned(FLOOR) as url, Client(Target(url), timeout_s=15) as client:
        assert await client.models() == ["floor"]
    async with Client(Target(url), timeout_s=15) as client:
        outcome = await client.ask(PATH, b"{}", due_s=0.0, max_events=1)
    assert outcome.error == "connect"


async def test_a_cancelled_command_stops_its_servers() -> None:
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        async with spawned(FLOOR) as url:
            started.set_result(url)
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    async with Client(Target(await started), timeout_s=15) as client:
        assert await client.models() == ["floor"]
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        with pytest.raises(OSError, match=r"refused|failed|reset|closed"):
            await client.get("/v1/models")


async def test_a_server_that_does_not_stop_is_killed() -> None:
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    async with spawned(["-c", ignore + SAY + "signal.pause()"], stop_s=0.1) as url:
        assert url == "http://127.0.0.1:81"


async def test_a_server_may_say_a_lot() -> None:
    talk = "import sys; [print('x' * 999, file=sys.stderr) for _ in range(2000)]; "
    async with spawned(["-c", talk + SAY + talk + "import signal; signal.pause()"]) as url:
        assert url == "http://127.0.0.1:81"


@pytest.mark.parametrize(
    ("code", "start_s", "said"),
    [
        ("import sys; sys.exit('no such model')", 15.0, "no such model"),
        ("pass", 15.0, "nothing"),
        ("import signal; signal.pause()", 0.5, "nothing"),
    ],
)
async def test_a_server_that_does_not_serve(code: str, start_s: float, said: str) -> None:
    with pytest.raises(ConfigError, match=f"does not serve; it said: {said}"):
        async with spawned(["-c", code], start_s=start_s):
            pytest.fail("it named no address")


SMALL = ("--num-prompts=12", "--output-len=4", "--input-len=3", "--concurrency=4")


def test_the_floor_alone(aneuron: Command, tmp_path: Path) -> None:
    saved = tmp_path / "result.json"
    result = aneuron(
        "bench", "serve", "--floor", *SMALL, "--runs=2", f"--save-result={saved}", "--json",
        "--goodput", "ttft:60000", "e2el:60000", "--percentiles=50,99", "--api-key=hidden",
    )  # fmt: skip
    assert (result.status, result.err) == (0, "")
    told = json.loads(result.out)
    assert told == json.loads(saved.read_text("utf-8"))
    assert "hidden" not in result.out
    assert (told["name"], told["model"], told["completed"], told["failed"]) == (
        "floor",
        "floor",
        24,
        0,
    )
    assert [run["total_output_tokens"] for run in told["runs"]] == [48, 48]
    assert told["request_goodput"] == pytest.approx(told["request_throughput"])
    assert 0 < told["p50_ttft_ms"] <= told["p99_ttft_ms"]
    assert told["config"]["request_rate"] == "inf"
    assert "ratio" not in told


def test_a_result_that_cannot_be_saved_is_told_before_anything_is_measured(
    aneuron: Command, tmp_path: Path
) -> None:
    path = tmp_path / "no" / "result.json"
    result = aneuron("bench", "serve", "http://127.0.0.1:9", f"--save-result={path}", "--json")
    said = f"error: cannot write {path}: No such file or directory\n"
    assert (result.status, result.out, result.err) == (2, "", said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_takes_no_result_along(aneuron: Command) -> None:
    arguments = ("bench", "serve", "--floor", *SMALL, "--save-result=/dev/full", "--json")
    result = aneuron(*arguments)
    assert json.loads(result.out)["completed"] == 12
    assert (result.status, result.err) == (
        2,
        "error: cannot write /dev/full: No space left on device\n",
    )


def test_a_server_beside_the_floor(aneuron: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def own_server(words: list[str]) -> tuple[str, ...]:
        asked.append(words)
        return FLOOR

    monkeypatch.setattr(serve_module, "own_server", own_server)
    arguments = ("bench", "serve", "--spawn", "sim:count --served-model-name 'a b'", *SMALL)
    told = json.loads(aneuron(*arguments, "--json").out)
    assert asked == [["sim:count", "--served-model-name", "a b"]]
    assert told["name"] == "server"
    assert told["completed"] == told["floor"]["completed"] == 12
    assert told["target"] != told["floor"]["target"]
    ratio = told["output_throughput"] / told["floor"]["output_throughput"]
    assert told["ratio"] == pytest.approx(ratio)
    table = aneuron(*arguments, "--request-rate=500", "--endpoint=/v1/chat/completions")
    assert table.status == 0, table.err
    assert "Load: 12 requests, 500.0 a second" in table.out
    assert "output_throughput over the floor's" in table.out
    assert "p99_itl_ms" in table.out


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (JSONResponse({"data": []}), "lists no model"), (Response("hello", 404), "404"),
        (JSONResponse([]), "200"), (Response(b"x" * (9 << 20)), "too long"),
    ],
)  # fmt: skip
async def test_a_server_without_models(answer: Response, said: str) -> None:
    async def models(request: Request) -> Response:
        return answer

    app = Starlette(routes=[Route("/v1/models", models)])
    bench = serve_module._Bench(LoadOptions(), RequestOptions(), ReportOptions())
    async with serving(app) as url:
        with pytest.raises(serve_module.Unserved, match=said):
            await bench.measure(url, None, floor=False)


async def test_failures_after_the_warm_up_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    num_asked = 0

    async def handler(request: Request) -> Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 3:
            return JSONResponse({"error": {"message": "[full]"}}, 503)
        return streamed([text_of("a", "stop")])

    load = LoadOptions(num_prompts=4, num_warmups=2)
    bench = serve_module._Bench(load, RequestOptions(model="m"), ReportOptions(runs=2))
    async with serving(posted(handler)) as url:
        told = await bench.measure(url, None, floor=True)
    assert (told["completed"], told["failed"], told["floor"]["failed"]) == (1, 7, 0)
    told["config"] = {"num_prompts": 4, "request_rate": "inf"}
    serve_module._show(told, "asyncio")
    out = capsys.readouterr().out
    assert "server: 7 x http_503: [full]" in out
    assert "2 runs: medians" in out


@pytest.mark.parametrize(("num_failed", "status"), [(0, 0), (6, 0), (7, 1), (12, 1)])
def test_a_server_that_fails_most_requests_is_no_success(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch, num_failed: int, status: int
) -> None:
    def failing(*given: Any, **options: Any) -> dict[str, Any]:
        told = figures(*given, **options)
        return told | {"failed": num_failed, "completed": 12 - num_failed}

    monkeypatch.setattr("aneuron.cli.bench.server.report.figures", failing)
    result = aneuron("bench", "serve", "--floor", *SMALL, "--json")
    assert json.loads(result.out)["failed"] == num_failed
    said = f"error: {num_failed} of 12 requests failed\n" if status else ""
    assert (result.status, result.err) == (status, said)


def test_what_it_needs_may_be_missing(aneuron: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = aneuron("bench", "serve", "--floor")
    assert result.status == 2
    assert 'bench serve needs more packages: pip install "aneuron[serve]" (' in result.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--spawn"),
        (("http://box", "--spawn=sim:count"), "--spawn"),
        (("--spawn=a 'b",), "--spawn"),
        (("box:80",), "URL"),
        (("http://box", "--num-prompts=0"), "--num-prompts"),
        (("http://box", "--num-prompts=1000001"), "--num-prompts"),
        (("http://box", "--num-prompts=1000000", "--output-len=101"), "--num-prompts"),
        (("http://box", "--num-prompts=1000000", "--output-len=1"), "--max-concurrency"),
        (("http://box", "--request-rate=0"), "--request-rate"),
        (("http://box", "--request-rate=nan"), "--request-rate"),
        (("http://box", "--burstiness=0"), "--burstiness"),
        (("http://box", "--max-concurrency=0"), "--max-concurrency"),
        (("http://box", "--num-warmups=-1"), "--num-warmups"),
        (("http://box", "--timeout-s=0"), "--timeout-s"),
        (("http://box", "--seed=-1"), "--seed"),
        (("http://box", "--runs=0"), "--runs"),
        (("http://box", "--input-len=0"), "--input-len"),
        (("http://box", "--output-len=0"), "--output-len"),
        (("http://box", "--vocab-size=1"), "--vocab-size"),
        (("http://box", "--endpoint=/v1/embeddings"), "--endpoint"),
        (("http://box", "--goodput", "itl:3"), "--goodput"),
        (("http://box", "--goodput", "ttft:x"), "--goodput"),
        (("http://box", "--percentiles=50,101"), "--percentiles"),
        (("http://box", "--percentiles=x"), "--percentiles"),
    ],
)
def test_a_bad_option_is_named(aneuron: Command, arguments: tuple[str, ...], named: str) -> None:
    result = aneuron("bench", "serve", *arguments)
    assert result.status == 2
    assert named in result.err
