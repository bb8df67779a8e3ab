"""Requests over HTTP/1.1 on bare asyncio protocols, with connections that are kept.

Comes in: a URL and paths. Goes out: answers, read whole, or given to a sink as they come. What a
server does wrong is an `OSError` or a `BadAnswer`, nothing else.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import urlsplit

from aneuron.cli.http.http1 import BadAnswer, ResponseParser
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Client", "NoConnection", "Sink", "Target"]

_MAX_PLAIN = 8 * 2**20  # bytes of an answer that is read whole


class Target:
    """Where requests go, taken from a URL.

    Args:
        url: of the server, `http://HOST:PORT`; a path before the endpoints', and a final `/v1`
            that they begin with as well, may be part of it.
        api_key: sent as a bearer token.
        agent: what the client calls itself.

    Raises:
        ConfigError: it is no such URL, or the key cannot be sent.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, agent: str = "aneuron-bench"
    ) -> None:
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
        headers = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": agent}
        self.has_key = bool(api_key)
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        for text in (self.path, *headers.values()):  # a line's end would end the header
            if not (text.isascii() and text.isprintable()):
                raise ConfigError("URL and --api-key must be printable ASCII", param="api_key")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    def head(self, method: str, path: str) -> bytes:
        """Return the head of a request but for what depends on its body."""
        return f"{method} {self.path}{path} HTTP/1.1\r\n{self._headers}".encode("ascii")


class Sink(Protocol):
    """Takes an answer's body as it comes."""

    def take(self, answer: ResponseParser, body: bytes, now_s: float) -> None:
        """Take some of it.

        Raises:
            BadAnswer: it is not what was asked for.
        """


class _Connection(asyncio.Protocol):
    """One connection: carries one request at a time, and tells its client when it is lost."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._answer = ResponseParser()
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, sink: Sink) -> ResponseParser:
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

    Attributes:
        num_connections: opened so far.
    """

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        self.target = target
        self.num_connections = 0
        self.timeout_s = timeout_s
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

    async def get(self, path: str, *, accept: str = "application/json") -> tuple[int, bytes]:
        """Return status and body of an answer to GET.

        Args:
            path: of the endpoint.
            accept: the content type that is asked for.

        Raises:
            OSError: no connection, it was lost, or it took too long.
            BadAnswer: what came is not an answer.
        """
        request = self.target.head("GET", path) + f"Accept: {accept}\r\n\r\n".encode()
        sink = _Whole()
        async with asyncio.timeout(self.timeout_s):
            answer = await self.exchange(request, sink)
        return answer.status, sink.body

    async def exchange(self, request: bytes, sink: Sink) -> ResponseParser:
        """Exchange on a kept connection, or on a new one.

        A server closes what is idle when it likes, maybe while a request is on its way. So one
        that got nothing back on a kept connection is sent once more, on a new one.

        Raises:
            OSError: no connection, or it was lost.
            BadAnswer: what came is not an answer.
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
            raise NoConnection(str(error)) from error
        self.num_connections += 1
        return connection


class NoConnection(OSError):
    """The server cannot be reached."""
