"""Keys, request ids, limits of bodies and the access log, over real sockets."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route

from aneuron.server.config import ServerConfig
from aneuron.server.http import bodies
from aneuron.server.http.bodies import BodyLimit
from aneuron.server.http.guard import RequestLog, guards
from aneuron.server.http.serving import serve

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

KEY = {"authorization": "Bearer one"}


class Site:
    """A small app behind the guards: what it was asked, and where it is."""

    def __init__(self, middleware: Sequence[Middleware]) -> None:
        self.bodies: list[bytes] = []
        self.ids: list[str] = []
        self.left = asyncio.Event()
        self.go_on = asyncio.Event()
        routes = [
            Route("/health", self.say, methods=["GET"]),
            Route("/v1/echo", self.echo, methods=["GET", "POST"]),
            Route("/v1/stream", self.stream, methods=["POST"]),
            Route("/v1/break", self.fail, methods=["POST"]),
            Route("/v1/break-late", self.fail_late, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, middleware=middleware)
        self.url = ""
        self.port = 0

    async def say(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def echo(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        self.ids.append(request.state.request_id)
        request.state.prompt_tokens, request.state.completion_tokens = 3, 7
        return PlainTextResponse(str(len(self.bodies[-1])))

    async def stream(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[str]:
            try:
                yield "one"
                await self.go_on.wait()
                yield "two"
            finally:
                self.left.set()

        return StreamingResponse(chunks())

    async def fail(self, request: Request) -> Response:
        raise ZeroDivisionError("a secret")

    async def fail_late(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[str]:
            yield "one"
            raise ZeroDivisionError("a secret")

        return StreamingResponse(chunks())


@asynccontextmanager
async def running(site: Site, app: Any = None) -> AsyncIterator[httpx2.AsyncClient]:
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(
            serve(app or site.app, port=0, on_started=started.set_result, stop=stop,
                  handles_signals=False)
        )  # fmt: skip
        site.url = await started
        site.port = int(site.url.rpartition(":")[2])
        async with httpx2.AsyncClient(base_url=site.url, trust_env=False) as client:
            yield client
        stop.set()


def site(**settings: Any) -> Site:
    return Site(guards(ServerConfig(**settings)))


async def raw(port: int, *parts: bytes) -> bytes:
    """Send bytes, and return all that comes until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *lines, "", ""]).encode()


async def texts(response: httpx2.Response) -> AsyncGenerator[str]:
    async for text in response.aiter_text():
        yield text


def fault(response: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ── request ids ─────────────────────────────────────────────────────────────────────────


async def test_a_plain_request_id_comes_back() -> None:
    async with running(here := site()) as client:
        for given in ("x", "a" * 128, "req-1/2:3~!"):
            response = await client.get("/v1/echo", headers={"x-request-id": given})
            assert response.headers["x-request-id"] == given == here.ids[-1]


@pytest.mark.parametrize("given", [b"", b"a b", b"a" * 129, "é".encode(), b"a\tb"])
async def test_other_request_ids_are_replaced(given: bytes) -> None:
    async with running(site()) as client:
        response = await client.get("/v1/echo", headers=[(b"x-request-id", given)])
    assert len(response.headers["x-request-id"]) == 32


async def test_two_clients_may_send_the_same_id() -> None:  # case 14
    async with running(here := site()) as client:
        asked = [
            client.post("/v1/echo", content=b"a" * n, headers={"x-request-id": "x"}) for n in (1, 2)
        ]
        responses = await asyncio.gather(*asked)
    assert [response.text for response in responses] == ["1", "2"]
    assert here.ids == ["x", "x"]


async def test_every_error_has_the_id() -> None:
    async with running(site(api_keys=("one",), max_body_bytes=10)) as client:
        sent = KEY | {"x-request-id": "x"}
        asked = [
            client.get("/none", headers=sent),
            client.get("/v1/echo", headers={"x-request-id": "x"}),
            client.post("/v1/echo", headers=sent, content=b"a" * 11),
            client.post("/v1/break", headers=sent),
        ]
        responses = [await one for one in asked]
    assert [response.status_code for response in responses] == [404, 401, 413, 500]
    assert {response.headers["x-request-id"] for response in responses} == {"x"}


# ── handlers that break ─────────────────────────────────────────────────────────────────


async def test_a_broken_handler_is_a_500_that_tells_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(site()) as client:
        response = await client.post("/v1/break", content=b"abc")
        assert (response.status_code, fault(response)["type"]) == (500, "server_error")
        assert (await client.get("/health")).text == "ok"
    assert "secret" not in response.text
    assert "ZeroDivisionError: a secret" in caplog.text


async def test_a_stream_that_breaks_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    async with running(site()) as client:
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post("/v1/break-late")
    assert "ZeroDivisionError: a secret" in caplog.text


async def test_chunks_pass_one_by_one() -> None:
    async with (
        running(here := site()) as client,
        client.stream("POST", "/v1/stream") as response,
        aclosing(texts(response)) as chunks,
    ):
        assert await anext(chunks) == "one"
        here.go_on.set()
        assert await anext(chunks) == "two"


async def test_what_is_no_request_passes() -> None:
    sent: list[Any] = []
    messages: list[Any] = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await site(api_keys=("one",)).app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# ── keys ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Bearer  one", 200),
        ("Bearer three", 401),
        ("Bearer on", 401),
        ("Bearer onee", 401),
        ("Bearer", 401),
        ("Basic one", 401),
        ("one", 401),
        (b"Bearer \xff\xfe", 401),
    ],
)
async def test_keys(given: Any, status: int) -> None:
    async with running(site(api_keys=("one", "two"))) as client:
        response = await client.get("/v1/echo", headers={"authorization": given})
    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        error = fault(response)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


async def test_two_keys_at_once_are_refused() -> None:
    async with running(site(api_keys=("one",))) as client:
        both = [("authorization", "Bearer one"), ("authorization", "Bearer x")]
        for headers in (both, both[::-1]):
            assert (await client.get("/v1/echo", headers=headers)).status_code == 401


async def test_a_key_need_not_be_ascii() -> None:
    async with running(site(api_keys=("clé",))) as client:
        headers = [(b"authorization", "Bearer clé".encode())]
        assert (await client.get("/v1/echo", headers=headers)).status_code == 200


async def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return given == key

    monkeypatch.setattr(hmac, "compare_digest", compare)
    async with running(site(api_keys=("one", "two", "three"))) as client:
        assert (await client.get("/v1/echo", headers=KEY)).status_code == 200
    assert compared == [b"one", b"two", b"three"]


@pytest.mark.parametrize("path", ["/version", "/metrics", "/none", "/openapi.json", "/health/x"])
async def test_all_but_probes_needs_a_key(path: str) -> None:
    async with running(site(api_keys=("one",))) as client:
        assert (await client.get(path)).status_code == 401
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 404  # there is none here


async def test_keys_where_the_app_is_mounted() -> None:
    here = site(api_keys=("one",))
    outer = Starlette(routes=[Mount("/inner", app=here.app)])
    async with running(here, outer) as client:
        assert (await client.get("/inner/health")).status_code == 200
        assert (await client.get("/inner/v1/echo")).status_code == 401
        assert (await client.get("/inner/v1/echo", headers=KEY)).status_code == 200


async def test_a_refused_body_is_not_given_to_the_handler() -> None:
    async with running(here := site(api_keys=("one",))) as client:
        response = await client.post("/v1/echo", content=b"a" * 100_000)
        assert response.status_code == 401
        assert response.headers["connection"] == "close"
    assert here.bodies == []


# ── browsers ────────────────────────────────────────────────────────────────────────────

PAGE = {"origin": "http://page.test"}


async def test_cors_is_off_by_default() -> None:
    async with running(site()) as client:
        asked = PAGE | {"access-control-request-method": "POST"}
        preflight = await client.options("/v1/echo", headers=asked)
        plain = await client.get("/v1/echo", headers=PAGE)
    for response in (preflight, plain):
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert preflight.status_code == 405


async def test_pages_of_other_sites_may_not_write() -> None:
    async with running(here := site()) as client:
        refused = await client.post("/v1/echo", headers=PAGE)
        assert (refused.status_code, fault(refused)["code"]) == (403, "origin_not_allowed")
        null = await client.post("/v1/echo", headers={"origin": "null"})
        assert null.status_code == 403
        assert here.bodies == []
        assert (await client.post("/v1/echo")).status_code == 200


@pytest.mark.parametrize(
    "settings",
    [{"cors_origins": ("http://page.test",)}, {"cors_origins": ("*",)}, {"api_keys": ("one",)}],
)
async def test_pages_that_may(settings: Any) -> None:
    async with running(site(**settings)) as client:
        assert (await client.post("/v1/echo", headers=PAGE | KEY)).status_code == 200


async def test_cors_answers_a_preflight_without_a_key() -> None:
    here = site(cors_origins=("http://page.test",), api_keys=("one",))
    async with running(here) as client:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, x-stainless-os",
        }
        preflight = await client.options("/v1/echo", headers=PAGE | asked)
        assert preflight.status_code == 200
        assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
        other = await client.options("/v1/echo", headers=asked | {"origin": "http://other.test"})
        assert other.status_code == 400
        refused = await client.post("/v1/echo", headers=PAGE)
        assert refused.status_code == 401  # and the page may read why
        assert refused.headers["access-control-allow-origin"] == "http://page.test"
        assert "x-request-id" in refused.headers["access-control-expose-headers"]


# ── bodies ──────────────────────────────────────────────────────────────────────────────


async def test_the_largest_body_and_one_byte_more() -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"a" * 1000

    async with running(here := site(max_body_bytes=100_000)) as client:
        for content in (b"a" * 100_000, pieces(100)):
            assert (await client.post("/v1/echo", content=content)).text == "100000"
        for content in (b"a" * 100_001, pieces(101)):
            response = await client.post("/v1/echo", content=content)
            assert (response.status_code, fault(response)["code"]) == (413, "request_too_large")
    assert len(here.bodies) == 2


async def test_a_header_is_enough_to_refuse_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_LINGER_S", 0.01)
    async with running(here := site()):
        for length in ("8388609", "9" * 19):
            answer = await raw(here.port, head("/v1/echo", f"content-length: {length}"))
            assert answer.startswith(b"HTTP/1.1 413 ")


async def test_who_is_refused_amid_a_large_body_reads_why() -> None:
    async with running(here := site(max_body_bytes=10)):
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(head("/v1/echo", "content-length: 4000000"))
        for _ in range(40):  # more than the sockets hold, while nobody reads the answer
            writer.write(b"a" * 100_000)
            await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        writer.close()


@pytest.mark.parametrize("limits", [{"idle_s": 0.05}, {"total_s": 0.05}])
async def test_a_slow_body_is_told_so(limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_LINGER_S", 0.01)
    here = Site([Middleware(RequestLog), Middleware(BodyLimit, max_bytes=100, **limits)])
    async with running(here):
        answer = await raw(here.port, head("/v1/echo", "content-length: 9"), b"a", b"b")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert here.bodies == []


async def test_bodies_on_their_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_MOST_BODIES", 1)
    monkeypatch.setattr(bodies, "_LINGER_S", 0.01)
    async with running(here := site(max_body_bytes=1000)) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(head("/v1/echo", "content-length: 1000", "expect: 100-continue"))
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"  # it is being read
        writer.write(b"a" * 999)
        second = raw(here.port, head("/v1/echo", "content-length: 1000"), b"b" * 999)
        answers = [await second]
        assert answers[0].startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answers[0]
        writer.write(b"a")
        assert b"200 OK" in await reader.readuntil(b"1000")
        writer.close()
        assert (await client.post("/v1/echo", content=b"a" * 1000)).text == "1000"  # all is free


async def test_who_leaves_amid_a_body_is_not_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aneuron.server.access")
    async with running(here := site()):
        _, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(head("/v1/echo", "content-length: 9") + b"a")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    assert here.bodies == []
    assert "POST /v1/echo 499 " in caplog.text


async def test_a_get_may_have_a_body() -> None:
    async with running(here := site()) as client:
        assert (await client.request("GET", "/v1/echo", content=b"abc")).text == "3"
        assert (await client.get("/v1/echo")).text == "0"
    assert here.bodies == [b"abc", b""]


# ── the log ─────────────────────────────────────────────────────────────────────────────


async def test_a_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aneuron.server.access")
    async with running(site(api_keys=("one",))) as client:
        headers = KEY | {"x-request-id": "x"}
        await client.post("/v1/echo?secret=1", content=b"a prompt", headers=headers)
        await client.get("/no%0Ane%1b" + "e" * 300, headers=KEY)
        await client.post("/v1/echo", content=b"a prompt")
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first.startswith("POST /v1/echo 200 0.")
    assert first.endswith(" s, 3 + 7 tokens, id x")
    assert second.startswith("GET /no%0Ane%1bee")
    assert " 404 0." in second
    assert len(second) < 300
    assert third.startswith("POST /v1/echo 401 0.")
    assert " - + - tokens," in third
    for word in ("secret", "prompt", "one", "\n"):
        assert word not in first + second.replace("none", "") + third


async def test_who_leaves_a_stream_is_logged_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aneuron.server.access")
    async with running(here := site()) as client:
        async with (
            client.stream("POST", "/v1/stream") as response,
            aclosing(texts(response)) as chunks,
        ):
            assert await anext(chunks) == "one"
        await here.left.wait()
    assert [record.getMessage()[:22] for record in caplog.records] == ["POST /v1/stream 499 0."]
