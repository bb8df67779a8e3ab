"""Bodies of requests, read whole within limits; and refusals, which may leave a body unread.

Comes in: what a client sends after its headers, at its own pace. Goes out: one message of
bounded size to the handler, or an answer in the envelope of `errors.py`. Runs in the task of
the request, before its handler.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aneuron.server.http.errors import ApiError, body_too_large, error_response

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["BodyLimit", "header_values", "refuse"]

_IDLE_S = 30.0
_TOTAL_S = 60.0
_MOST_BODIES = 32  # of the largest size, that may be on their way at once
_LINGER_S = 2.0  # what a refused client still sends is read for so long, and dropped
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class BodyLimit:
    """Reads each body whole, within limits, before a handler runs.

    The handler gets it as one message, without a wait; after that it sees its client leave.

    Args:
        app: what comes next.
        max_bytes: of one body; more is refused, as soon as a header or the bytes say so.
        idle_s: after so long without a byte the client is told 408.
        total_s: the same, for the whole of a body.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int,
        idle_s: float = _IDLE_S,
        total_s: float = _TOTAL_S,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._total_s = total_s
        self._held_bytes = 0  # of all bodies that are on their way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http" or not _may_have_body(scope):
            await self._app(scope, receive, send)
            return
        try:
            self._check(_declared_bytes(scope))
            body = await self._read(receive)
        except ApiError as refused:
            await refuse(refused, scope, receive, send)
            return
        if body is not None:  # else the client has left
            replay, body = _Replay(body, receive), None  # gone once it was read: answers take long
            await self._app(scope, replay, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise body_too_large(self._max_bytes)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body, or None when the client left.

        Raises:
            ApiError: it is too large or too slow, or too many others are on their way.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(self._idle_s) as limit:
                await self._collect(body, receive, limit)
        except _Left:
            return None
        except TimeoutError:
            message = f"the body paused for {self._idle_s:g} s, or took over {self._total_s:g} s"
            raise ApiError(408, message, code="request_timeout") from None
        finally:
            self._held_bytes -= len(body)
        return bytes(body)

    async def _collect(self, body: bytearray, receive: Receive, limit: asyncio.Timeout) -> None:
        clock = asyncio.get_running_loop().time
        end_s = clock() + self._total_s
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Left
            chunk = message.get("body", b"")
            body += chunk
            self._held_bytes += len(chunk)
            more = message.get("more_body", False)
            self._check(len(body))
            if more and self._held_bytes > self._max_bytes * _MOST_BODIES:
                what = "too many large requests are being sent at once"
                raise ApiError(503, what, code="overloaded", retry_after_s=1.0)
            limit.reschedule(min(end_s, clock() + self._idle_s))


class _Left(Exception):
    """The client left while it sent its body."""


class _Replay:
    """A `receive` that gives a body that has been read, then what comes after it."""

    __slots__ = ("_body", "_receive")

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _may_have_body(scope: Scope) -> bool:
    if scope["method"] not in _READS:
        return True
    return _declared_bytes(scope) > 0 or any(header_values(scope, b"transfer-encoding"))


def _declared_bytes(scope: Scope) -> int:
    given = next(header_values(scope, b"content-length"), b"0")
    return int(given[:20]) if given.isdigit() else 0  # 20 digits are too many, too


def header_values(scope: Scope, name: bytes) -> Iterator[bytes]:
    """Return each value of a header; its name in lower case."""
    return (value for key, value in scope["headers"] if key.lower() == name)


# ── refusals ────────────────────────────────────────────────────────────────────────────


async def refuse(
    error: ApiError,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    is_read: bool = False,
    closes: bool = False,
) -> None:
    """Answer with an error; where its body may be on its way, end the connection as well.

    A connection that is closed with unread bytes loses the answer before the client reads it,
    so what still comes is read and dropped, for two seconds at most.

    Args:
        error: what is wrong.
        scope: of the request.
        receive: of the request.
        send: of the request.
        is_read: its body has been read to the end.
        closes: end the connection in any case.
    """
    response = error_response(error)
    lingers = not is_read and _may_have_body(scope)
    if (lingers or closes) and scope.get("http_version", "1.1").startswith("1"):
        response.headers["connection"] = "close"
    start: Message = {"type": "http.response.start", "status": response.status_code}
    await send({**start, "headers": response.raw_headers})
    body: Message = {"type": "http.response.body", "body": bytes(response.body)}
    await send({**body, "more_body": lingers})
    if lingers:
        await _drop_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop_body(receive: Receive) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body", False):
                pass
