"""Connections: how they begin, how long they may take, and how they end; over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from aneuron.errors import ConfigError
from aneuron.server.http import serving
from aneuron.server.http.addresses import bind, forget, url
from aneuron.server.http.guard import RequestLog
from aneuron.server.http.serving import Limits, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and sockets of POSIX")


class Site:
    """A small app: what became of its requests, and the server's task."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.ended = asyncio.Event()
        self.is_draining = False
        routes = [
            Route("/", self.say, methods=["GET", "POST"]),
            Route("/health", self.say),
            Route("/wait", self.wait),
            Route("/flood", self.flood),
            Route("/stubborn", self.stubborn),
        ]
        self.app = RequestLog(Starlette(routes=routes))
        self.stop = asyncio.Event()
        self.url = ""
        self.port = 0
        self.task: asyncio.Task[bool]

    async def say(self, request: Request) -> Response:
        return PlainTextResponse(
            "no" if self.is_draining else "ok", 503 if self.is_draining else 200
        )

    async def wait(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                yield b"one"
                self.begun.set()
                await self.go_on.wait()
                yield b"two"
            finally:
                self.ended.set()

        return StreamingResponse(chunks())

    async def flood(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"a" * 100_000
                    await asyncio.sleep(0)
            finally:
                self.ended.set()

        return StreamingResponse(chunks())

    async def stubborn(self, request: Request) -> Response:
        self.begun.set()
        try:
            await self.go_on.wait()  # whether its client is there or not
        finally:
            self.ended.set()
        return PlainTextResponse("ok")


@asynccontextmanager
async def running(
    limits: Limits | None = None,
    drain: Callable[[Site], Awaitable[None]] | None = None,
    **options: Any,
) -> AsyncIterator[Site]:
    site = Site()
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    given: dict[str, Any] = {"port": 0, "stop": site.stop, "handles_signals": False, **options}
    if drain is not None:
        given["drain"] = lambda: drain(site)
    async with asyncio.TaskGroup() as group:
        site.task = group.create_task(
            serve(site.app, on_started=started.set_result, limits=limits or Limits(), **given)
        )
        site.url = await started
        site.port = int(site.url.rpartition(":")[2]) if "http" in site.url else 0
        yield site
        site.stop.set()


def client(site: Site, **options: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=site.url, trust_env=False, **options)


async def connect(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", site.port)


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HELD = b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"


async def to_the_end(reader: asyncio.StreamReader) -> bytes:
    """Return what comes; a connection that is cut ends, too."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


# ── addresses ───────────────────────────────────────────────────────────────────────────


async def test_it_answers_with_a_date() -> None:
    async with running() as site, client(site) as http:
        response = await http.get("/")
        assert (response.text, "date" in response.headers) == ("ok", True)
        assert "server" not in response.headers
    with pytest.raises(ConnectionRefusedError):
        await connect(site)


@pytest.mark.parametrize(
    ("family", "address", "shown"),
    [
        (socket.AF_INET, ("127.0.0.1", 8000), "http://127.0.0.1:8000"),
        (socket.AF_INET6, ("::1", 8000, 0, 0), "http://[::1]:8000"),
        (socket.AF_UNIX, "a/socket", "unix:a/socket"),
    ],
)
def test_urls(family: int, address: Any, shown: str) -> None:
    class Bound:
        def __init__(self) -> None:
            self.family = family

        def getsockname(self) -> Any:
            return address

    bound: Any = Bound()
    assert url(bound) == shown


def test_all_of_a_name_s_addresses_have_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, 1, 6, "", (host, 0)) for host in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    sockets = bind("localhost", 0)
    hosts, ports = zip(*(one.getsockname() for one in sockets), strict=True)
    assert hosts == ("127.0.0.1", "127.0.0.2")
    assert ports[0] == ports[1] != 0
    forget(sockets, [])


async def test_a_bound_address_refuses_connections_until_it_is_served() -> None:
    sockets = bind("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    async with running(sockets=sockets) as site, client(site) as http:
        assert site.port == port
        assert (await http.get("/")).text == "ok"


async def test_an_address_in_use_is_an_error() -> None:
    async with running() as site:
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{site.port}: the address is in use"):
            bind("127.0.0.1", site.port)
        with pytest.raises(ConfigError, match="the address is in use"):
            await serve(site.app, port=site.port)


async def test_of_two_that_bound_an_address_one_serves() -> None:
    first = bind("127.0.0.1", 0)
    second = bind("127.0.0.1", first[0].getsockname()[1])
    async with running(sockets=first) as site, client(site) as http:
        with pytest.raises(ConfigError, match="the address is in use"):
            await serve(site.app, sockets=second, handles_signals=False)
        assert (await http.get("/")).text == "ok"


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no.such.host.invalid", 0), ("127.0.0.1", 70_000)]
)
def test_other_addresses_that_cannot_be(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}") as caught:
        bind(host, port)
    assert caught.value.param == "port"


@needs_posix
async def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with running(uds=path) as site:
        assert site.url == f"unix:{path}"
        transport = httpx2.AsyncHTTPTransport(uds=path)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
            assert (await http.get("/")).text == "ok"
        with pytest.raises(ConfigError, match="the address is in use"):
            await asyncio.to_thread(bind, "", 0, uds=path)
    assert not Path(path).exists()


@needs_posix
def test_a_unix_socket_that_nobody_serves_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    sockets = bind("", 0, uds=str(path))
    forget(sockets, [url(sockets[0])])
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(ConfigError, match="the address is in use"):
        bind("", 0, uds=str(path))
    assert path.read_text() == "a file"


# ── limits of a connection ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET + GET[:9]])
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async with running(Limits(header_s=0.4)) as site:
        reader, writer = await connect(site)
        writer.write(sent)
        assert (await to_the_end(reader)).count(b"200 OK") == sent.count(GET)
        writer.close()


async def test_bytes_one_by_one_do_not_keep_it_open() -> None:
    async with running(Limits(header_s=0.2)) as site:
        reader, writer = await connect(site)
        ends = asyncio.create_task(to_the_end(reader))
        writer.write(b"GET / HTTP/1.1\r\n")
        while not ends.done():
            writer.write(b"x: y\r\n")
            await asyncio.wait([ends], timeout=0.01)
        assert ends.result() == b""
        writer.close()


async def test_a_slow_answer_is_not_a_slow_head() -> None:
    async with running(Limits(header_s=0.4)) as site:
        reader, writer = await connect(site)
        writer.write(HELD)
        await site.begun.wait()
        asyncio.get_running_loop().call_later(0.6, site.go_on.set)
        assert b"two" in await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()


async def test_an_idle_connection_is_kept_for_a_while() -> None:
    async with running(Limits(header_s=0.4, keep_alive_s=1)) as site:
        reader, writer = await connect(site)
        loop = asyncio.get_running_loop()
        for pause_s in (0.6, 0.0):  # longer than a head may take
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\nok")
            await asyncio.sleep(pause_s)
        idle_s = loop.time()
        assert await to_the_end(reader) == b""
        assert 0.8 < loop.time() - idle_s < 10
        writer.close()


@pytest.mark.parametrize(
    "sent", [b"what is this\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 40_000]
)
async def test_what_is_no_http_is_told_so(sent: bytes) -> None:
    async with running() as site:
        reader, writer = await connect(site)
        writer.write(sent)
        start, _, body = (await to_the_end(reader)).partition(b"\r\n\r\n")
        writer.close()
    assert start.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(body)["error"]["code"] == "bad_http"


async def test_garbage_amid_an_answer_does_not_garble_it() -> None:
    async with running() as site:
        reader, writer = await connect(site)
        writer.write(HELD[:-2] + b"transfer-encoding: chunked\r\n\r\n")
        await site.begun.wait()
        writer.write(b"zz\r\n")
        assert b"400" not in await to_the_end(reader)
        writer.close()


async def test_a_reader_that_does_not_read_is_cut() -> None:
    async with running(Limits(stall_s=0.1)) as site:
        reader, writer = await connect(site)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        await site.ended.wait()
        writer.close()
        del reader


async def test_too_many_connections() -> None:
    async with running(Limits(max_connections=1)) as site:
        held = await connect(site)
        held[1].write(HELD)
        await site.begun.wait()
        reader, writer = await connect(site)
        writer.write(GET)
        start, _, body = (await to_the_end(reader)).partition(b"\r\n\r\n")
        assert start.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in start
        assert json.loads(body)["error"]["code"] == "overloaded"
        writer.close()
        reader, writer = await connect(site)
        writer.write(GET.replace(b"/", b"/health", 1))
        assert b"200 OK" in await reader.readuntil(b"ok")
        unheard = await connect(site)  # the third one that is open
        assert await to_the_end(unheard[0]) == b""
        for one in (writer, unheard[1]):
            one.close()
        site.go_on.set()
        await held[0].readuntil(b"\r\n0\r\n\r\n")
        held[1].close()


async def test_an_idle_server_has_no_timer() -> None:
    async with running():
        timers = getattr(asyncio.get_running_loop(), "_scheduled", [])  # uvloop has none to see
        assert [timer for timer in timers if not timer.cancelled()] == []


# ── the end ─────────────────────────────────────────────────────────────────────────────


async def test_new_requests_are_answered_while_it_drains() -> None:  # case 80
    async def drain(site: Site) -> None:
        site.is_draining = True
        reader, writer = await connect(site)
        writer.write(GET)
        assert b" 503 " in await reader.readuntil(b"no")
        writer.close()
        site.go_on.set()
        await site.ended.wait()

    async with running(drain=drain) as site:
        reader, writer = await connect(site)
        writer.write(HELD)
        await site.begun.wait()
        site.stop.set()
        assert b"two" in await to_the_end(reader)  # whole, and the connection is closed after it
        writer.close()
    assert site.task.result() is True


async def test_without_a_drain_answers_have_a_while() -> None:
    async with running(Limits(close_s=0.1)) as site:
        reader, writer = await connect(site)
        writer.write(HELD)
        await site.begun.wait()
        site.stop.set()
        assert b"two" not in await to_the_end(reader)
        await site.ended.wait()
        writer.close()
    assert site.task.result() is True


async def test_an_idle_connection_does_not_delay_the_end() -> None:
    async with running(Limits(close_s=60)) as site:
        reader, writer = await connect(site)
        writer.write(GET)
        await reader.readuntil(b"ok")
        site.stop.set()
        assert await to_the_end(reader) == b""
        writer.close()


async def test_a_cancelled_server_cuts_everything() -> None:
    async with running() as site:
        reader, writer = await connect(site)
        writer.write(HELD)
        await site.begun.wait()
        site.task.cancel()
        assert b"two" not in await to_the_end(reader)
        await asyncio.wait([site.task])
        assert site.task.cancelled()
        assert site.ended.is_set()
        writer.close()


async def test_a_handler_that_sees_nothing_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "_GIVE_UP_S", 0.05)
    async with running(Limits(close_s=0.05)) as site:
        _, writer = await connect(site)
        writer.write(GET.replace(b"/", b"/stubborn", 1))
        await site.begun.wait()
        site.stop.set()
        await asyncio.wait([site.task])
        assert site.ended.is_set()
        writer.close()


async def test_an_error_of_the_drain_is_raised() -> None:
    async def drain(site: Site) -> None:
        raise TimeoutError("of its own")

    with pytest.raises(ExceptionGroup) as caught:
        async with running(drain=drain) as site:
            site.stop.set()
    assert caught.group_contains(TimeoutError, match="of its own")


@needs_posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    drained = asyncio.Event()

    async def drain(site: Site) -> None:
        drained.set()

    async with running(drain=drain, handles_signals=True) as site:
        os.kill(os.getpid(), number)
        await drained.wait()
        assert await asyncio.shield(site.task) is True
    assert signal.getsignal(number) in (before, signal.SIG_DFL, signal.default_int_handler)


@needs_posix
async def test_a_second_signal_does_not_wait() -> None:
    draining = asyncio.Event()

    async def drain(site: Site) -> None:
        draining.set()
        await site.go_on.wait()

    async with running(Limits(close_s=60), drain=drain, handles_signals=True) as site:
        reader, writer = await connect(site)
        writer.write(HELD)
        await site.begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await draining.wait()
        os.kill(os.getpid(), signal.SIGINT)
        assert b"two" not in await to_the_end(reader)
        assert await asyncio.shield(site.task) is False
        assert site.ended.is_set()
        writer.close()


async def test_where_there_are_no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    loop = asyncio.get_running_loop()
    site = Site()
    stop = asyncio.Event()

    class Without:
        """A loop that has none, as on Windows."""

        add_signal_handler = staticmethod(refuse)

        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

    monkeypatch.setattr(asyncio, "get_running_loop", Without)
    stop.set()
    assert await serve(site.app, port=0, stop=stop) is True
