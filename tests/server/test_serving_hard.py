"""Connections of people who wish the server ill, or know no better; over real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import h11
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from aneuron.server.http import reading
from aneuron.server.http.connection import Connection
from aneuron.server.http.reading import SHARE_BYTES, Flow, Parser
from aneuron.server.http.serving import Limits
from tests.server.raw import sites
from tests.server.test_serving import GET, HELD, Site, connect, running, to_the_end
from tests.support import until

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
TINY = b"1\r\na\r\n"


async def answer(site: Site, sent: bytes) -> tuple[int, bytes]:
    """Send it; return the status and the body of the answer, up to the connection's end."""
    reader, writer = await connect(site)
    writer.write(sent)
    start, _, body = (await to_the_end(reader)).partition(b"\r\n\r\n")
    writer.close()
    return int(start.split()[1] if start else 0), body


def message(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert error["code"] == "bad_http"
    return str(error["message"])


def echoing(site: Site) -> None:
    """Have the site answer with the size of a body."""

    async def echo(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    site.app._app.routes.insert(0, Route("/echo", echo, methods=["POST"]))  # type: ignore[attr-defined]


# ── heads ───────────────────────────────────────────────────────────────────────────────


def get(*, size: int = 0, lines: int = 1) -> bytes:
    """Return a request of so many bytes, or with so many lines before the empty one."""
    start = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * (lines - 2)
    start += b"b: " + b"b" * (size - len(start) - 7) + b"\r\n" if size else b""
    return start + b"\r\n"


@pytest.mark.parametrize("before", [b"", GET], ids=["first", "pipelined"])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (get(size=2**15 + 1), "over 32768 bytes"),
        (get(size=40_000), "over 32768 bytes"),
        (get(lines=100), "over 100 lines"),
        (get(lines=8000), "over 100 lines"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n" + b" b\r\n" * 5000 + b"\r\n", "over 100 lines"),
    ],
)
async def test_a_head_over_a_limit_that_comes_whole(before: bytes, bad: bytes, reason: str) -> None:
    async with running() as site:
        reader, writer = await connect(site)
        if before:
            writer.write(before + bad[:100])
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\nok")
            bad = bad[100:]
        writer.write(bad)
        start, _, body = (await to_the_end(reader)).partition(b"\r\n\r\n")
        writer.close()
    assert start.startswith(b"HTTP/1.1 400 ")
    assert reason in message(body)


@pytest.mark.parametrize("sent", [get(size=2**15), get(lines=99), GET], ids=["long", "many", "any"])
async def test_a_head_within_limits_is_served(sent: bytes) -> None:
    async with running() as site:
        reader, writer = await connect(site)
        body = b"\n" * 5000  # what lies behind a head has other limits
        for _ in range(2):  # a connection's second head is as good as its first
            writer.write(sent.replace(b"\r\n", b"\r\ncontent-length: 0\r\n", 0))
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\nok")
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n" + body)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\nok")
        writer.close()


# ── bodies ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(CHUNKED + TINY * 20_000 + b"0\r\n\r\n", id="tiny chunks"),
        pytest.param(CHUNKED + b"0\r\n" + b"a:\r\n" * 10_000 + b"\r\n", id="trailer"),
        pytest.param(CHUNKED + b"1;" + b"a" * 20_000 + b"\r\na\r\n0\r\n\r\n", id="extension"),
        pytest.param(CHUNKED + b"zz\r\n", id="malformed"),
    ],
)
async def test_bad_chunks_are_told_so(sent: bytes) -> None:
    sent = sent.replace(b"POST / ", b"POST /echo ")
    async with running() as site:
        echoing(site)
        status, body = await answer(site, sent)
        assert (status, bool(message(body))) == (400, True)


@pytest.mark.parametrize("size", [1, 70, 5000, 100_000])
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_large_bodies_come_whole(is_chunked: bool, size: int) -> None:
    body = b"a" * size * min(2000, 400_000 // size)
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\n"
    if is_chunked:
        chunks = (body[at : at + size] for at in range(0, len(body), size))
        framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        sent = head + b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    else:
        sent = head + b"content-length: %d\r\n\r\n" % len(body) + body
    async with running() as site:
        echoing(site)
        reader, writer = await connect(site)
        for _ in range(2):
            writer.write(sent)
            got = await reader.readuntil(b"\r\n\r\n%d" % len(body))
            assert got.startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_what_follows_a_last_request_is_dropped() -> None:
    async with running() as site:
        reader, writer = await connect(site)
        writer.write(HELD[:-2] + b"connection: close\r\n\r\n")
        await site.begun.wait()
        writer.write(b"zz\r\n" * 5000)
        closing = GET[:-2] + b"connection: close\r\n\r\n"
        assert (await answer(site, closing))[0] == 200  # and by now the other was read, too
        site.go_on.set()
        assert (await to_the_end(reader)).endswith(b"0\r\n\r\n")
        writer.close()


# ── the loop is not held ────────────────────────────────────────────────────────────────


@pytest.fixture
def events_per_turn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many events of bodies each call to a connection parsed."""
    counts: list[int] = []
    count, parse = Parser._count, Connection.handle_events

    def counted(parser: Parser, event: h11.Data) -> None:
        counts[-1] += 1
        count(parser, event)

    def parsed(connection: Connection) -> None:
        counts.append(0)
        parse(connection)

    monkeypatch.setattr(Parser, "_count", counted)
    monkeypatch.setattr(Connection, "handle_events", parsed)
    return counts


async def test_tiny_chunks_are_parsed_a_few_at_a_time(events_per_turn: list[int]) -> None:
    async with running() as site:
        echoing(site)
        reader, writer = await connect(site)
        writer.write(CHUNKED.replace(b"/", b"/echo", 1) + TINY * 4000 + b"0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n4000")
        writer.close()
    assert sum(events_per_turn) >= 4000
    assert max(events_per_turn) <= 32


async def test_who_is_behind_shares_a_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time to spend, one share is parsed in each turn: others go on meanwhile."""
    monkeypatch.setattr(reading, "_TURN_S", 1e-9)
    turns, is_done = 0, False

    async def count() -> None:
        nonlocal turns
        while not is_done:
            turns += 1
            await asyncio.sleep(0)

    async with running() as site:
        echoing(site)
        reader, writer = await connect(site)
        counting = asyncio.create_task(count())
        writer.write(CHUNKED.replace(b"/", b"/echo", 1) + TINY * 4000 + b"0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n4000")
        is_done = True
        await counting
        writer.close()
    assert turns > 4000 / 32


async def test_one_whose_parsing_fails_does_not_stop_the_others() -> None:
    turns, done = reading.Turns(), asyncio.Event()
    seen: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))

    def fail() -> None:
        raise ValueError("of one")

    turns.add(fail)
    turns.add(done.set)
    try:
        await done.wait()
    finally:
        loop.set_exception_handler(None)
    assert [str(error) for error in seen] == ["of one"]


def test_a_parser_takes_little_at_once() -> None:
    """Nothing that costs much fits into a share, with what a parser holds before it."""
    parser = Parser(2**15)
    parser.receive_data(CHUNKED + b"0\r\n")
    assert isinstance(parser.next_event(), h11.Request)
    parser.receive_data(b"a:\r\n" * (SHARE_BYTES // 4))
    assert parser.next_event() is h11.NEED_DATA
    parser.receive_data(b"a:\r\n")
    with pytest.raises(h11.RemoteProtocolError, match="trailer"):
        parser.next_event()


def test_nothing_is_read_while_there_is_something_to_parse() -> None:
    """An app that asks for its body does not make the server hold ever more of it."""

    class Wire(asyncio.Transport):
        is_read = True

        def pause_reading(self) -> None:
            self.is_read = False

        def resume_reading(self) -> None:
            self.is_read = True

    wire = Wire()
    flow = Flow(wire)
    flow.hold()
    flow.pause_reading()  # a body is large …
    flow.resume_reading()  # … and the app took it
    assert (wire.is_read, flow.is_paused) == (False, True)
    flow.release()
    assert (wire.is_read, flow.is_paused) == (True, False)
    flow.hold()
    flow.pause_reading()
    flow.release()
    assert (wire.is_read, flow.is_paused) == (False, True)


# ── who leaves, and who is one too many ─────────────────────────────────────────────────


@pytest.mark.parametrize("size", [20_000, 40_000, 1_000_000])
async def test_who_sent_much_ahead_is_seen_to_leave(size: int) -> None:
    async with running() as site:
        reader, writer = await connect(site)
        writer.write(HELD)
        await site.begun.wait()
        writer.write(GET[:-2] + b"content-length: %d\r\n\r\n" % size + bytes(size))
        if size < 2**15:
            writer.close()
        async with asyncio.timeout(5):
            await site.ended.wait()
        writer.close()
        del reader


async def test_what_was_sent_ahead_within_the_limit_is_served_after() -> None:
    async with running() as site:
        echoing(site)
        reader, writer = await connect(site)
        writer.write(HELD)
        await site.begun.wait()
        body = b"a" * 20_000
        writer.write(
            b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 20000\r\n\r\n" + body[:9000]
        )
        writer.write(body[9000:])
        writer.write(GET)
        site.go_on.set()
        await reader.readuntil(b"\r\n0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n20000")
        await reader.readuntil(b"\r\n\r\nok")
        writer.close()


async def test_a_full_server_answers_the_probes_of_a_mounted_app() -> None:
    async with running(Limits(max_connections=1)) as site:
        inner = Starlette(routes=[Route("/health", site.say), Route("/other", site.say)])
        site.app._app.routes.append(Mount("/llm", inner))  # type: ignore[attr-defined]
        first = await connect(site)
        first[1].write(GET)
        await first[0].readuntil(b"\r\n\r\nok")
        assert (await answer(site, GET.replace(b"/", b"/llm/other", 1)))[0] == 503
        reader, writer = await connect(site)
        writer.write(GET.replace(b"/", b"/llm/health", 1))
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\nok")
        first[1].close()
        [server] = sites()
        await until(lambda: len(server.state.connections) == 1)
        writer.write(GET)  # it came when the server was full, and is one of few now
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\nok")
        writer.close()
