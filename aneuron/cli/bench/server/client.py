"""The client of `aneuron bench serve`: HTTP/1.1 on bare asyncio protocols, connections kept.

Comes in: requests, encoded. Goes out: an `Outcome` each, also for those that failed: nothing a
server does raises here. A token costs a read of the socket and one decoded event; what a general
client adds on top would be the larger part of the load.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import urlsplit

import msgspec

from aneuron.cli.bench.server.http1 import BadAnswer, ResponseParser
from aneuron.cli.bench.server.stream import Outcome, StreamReader
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Client", "Target"]

_MAX_PLAIN = 8 * 2**20  # bytes of an answer that is read whole


class Target:
    """Where requests go, taken from a URL.

    Args:
        url: of the server, `http://HOST:PORT`; a path before the endpoints', and a final `/v1`
            that they begin with as well, may be part of it.
        api_key: sent as a bearer token.

    Raises:
        ConfigError: it is no such URL, or the key cannot be sent.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        try:
            parts = urlsplit(url)
            self.host = parts.hostname or ""
            port = parts.port
        except ValueError:
            self.host, port = "", None
        if not self.host or parts.scheme not in {"http", "https"} or parts.query:
            raise ConfigError(f"URL must be like http://127.0.0.1:8000, not {url!r}", param="url")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": "aneuron-bench"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        for text in (self.path, *headers.values()):  # a line's end would end the header
            if not (text.isascii() and text.isprintable()):
                raise ConfigError("URL and --api-key must be printable ASCII", param="api_key")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    def head(self, method: str, path: str) -> bytes:
        """Return the head of a request but for what depends on its body."""
        return f"{method} {self.path}{path} HTTP/1.1\r\n{self._headers}".encode("ascii")


class _Sink(Protocol):
    def take(self, answer: ResponseParser, body: bytes, now_s: float) -> None: ...


class _Connection(asyncio.Protocol):
    """One connection: carries one request at a time, and tells its client when it is lost."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._answer = ResponseParser()
        self._sink: _Sink | None = None
        self._done: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, sink: _Sink) -> ResponseParser:
        """Send a request; return its answer when that is complete.

        Cancelled, or after an error, the connection is closed.

        Raises:
            BadAnswer: what came is not an answer.
            ConnectionError: the connection was lost first.
        """
        self._answer = answer = ResponseParser()
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection was closed before the request")
        self._sink = sink
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._sink = self._done = None
            if answer.is_done and answer.keeps_alive:
                self._idle.append(self)
            else:
                self.abort()
        return answer

    @property
    def has_begun(self) -> bool:
        """Whether anything of the last answer came."""
        return self._answer.has_begun

    def abort(self) -> None:
        """Close at once; what is under way is lost."""
        if self._transport is not None:
            self._transport.abort()

    # ── called by the loop ──────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by its class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        sink = self._sink
        if sink is None:  # nobody asked
            self.abort()
            return
        answer = self._answer
        try:
            body = answer.feed(data)
            if body:
                sink.take(answer, body, now_s)
        except BadAnswer as error:
            answer.keeps_alive = False
            self._finish(error)
        else:
            if answer.is_done:
                self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._done is None:
            return
        try:
            if exc is None:
                self._answer.feed_eof()
        except BadAnswer as error:
            exc = ConnectionResetError(str(error))
        self._finish(exc)

    def _finish(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class _Whole:
    """An answer that is read as a whole."""

    def __init__(self) -> None:
        self.body = b""

    def take(self, answer: ResponseParser, body: bytes, now_s: float) -> None:
        self.body += body
        if len(self.body) > _MAX_PLAIN:
            raise BadAnswer("the answer is too long")


class Client:
    """Requests to one server, over connections that are kept; enter it to have them closed.

    Args:
        target: where they go.
        timeout_s: for a whole request, connecting included.
    """

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        self.target = target
        self.num_connections = 0
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of an answer to GET.

        Raises:
            OSError: no connection, it was lost, or it took too long.
            BadAnswer: what came is not an answer.
        """
        request = self.target.head("GET", path) + b"Accept: application/json\r\n\r\n"
        sink = _Whole()
        async with asyncio.timeout(self._timeout_s):
            answer = await self._exchange(request, sink)
        return answer.status, sink.body

    async def models(self) -> list[str]:
        """Return what the server calls its models.

        Raises:
            OSError: it cannot be reached.
            BadAnswer: it does not say.
        """
        status, body = await self.get("/v1/models")
        try:
            return [str(card["id"]) for card in msgspec.json.decode(body)["data"]]
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError, IndexError):
            raise BadAnswer(f"GET /v1/models: status {status}, {body[:200]!r}") from None

    async def ask(self, path: str, body: bytes, *, due_s: float, max_events: int) -> Outcome:
        """Send a request for a stream, read it to its end; whatever happens is in the outcome.

        Args:
            path: of the endpoint.
            body: JSON.
            due_s: when it was to be sent, of `time.perf_counter`.
            max_events: after which the answer is given up.
        """
        head = self.target.head("POST", path)
        request = b"%sContent-Type: application/json\r\nAccept: text/event-stream\r\n" % head
        request = b"%sContent-Length: %d\r\n\r\n%s" % (request, len(body), body)
        reader = StreamReader(max_events)
        outcome = reader.outcome
        outcome.due_s, outcome.sent_s = due_s, time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._exchange(request, reader)
            reader.close(answer)
        except TimeoutError:
            outcome.error, outcome.detail = "timeout", f"over {self._timeout_s:g} s"
        except BadAnswer as error:
            outcome.error, outcome.detail = "protocol", str(error)
        except _NoConnection as error:
            outcome.error, outcome.detail = "connect", str(error)
        except OSError as error:
            outcome.error, outcome.detail = "closed", str(error)
        outcome.end_s = time.perf_counter()
        return outcome

    async def _exchange(self, request: bytes, sink: _Sink) -> ResponseParser:
        """Exchange on a kept connection, or on a new one.

        A server closes what is idle when it likes, maybe while a request is on its way. So one
        that got nothing back on a kept connection is sent once more, on a new one.
        """
        if self._idle:
            kept = self._idle.pop()
            try:
                return await kept.exchange(request, sink)
            except ConnectionError:
                if kept.has_begun:
                    raise
        connection = await self._connect()
        return await connection.exchange(request, sink)

    async def _connect(self) -> _Connection:
        target = self.target
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self._idle), target.host, target.port, ssl=target.tls
            )
        except TimeoutError:
            raise
        except OSError as error:
            raise _NoConnection(str(error)) from error
        self.num_connections += 1
        return connection


class _NoConnection(OSError):
    """The server cannot be reached."""
