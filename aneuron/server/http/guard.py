"""What stands before every endpoint: request ids, the access log, CORS, keys, body limits.

Comes in: requests of anyone who can connect. Goes out: to the endpoints, requests with a known
key and a whole body of bounded size; to the client, answers that carry its request id, errors
in the envelope of `errors.py`. Runs in the task of each request, before a handler does. Plain
ASGI all through: a stream's chunks pass one by one, and a handler sees its client leave.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
from typing import TYPE_CHECKING
from uuid import uuid4

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from aneuron.server.http.bodies import BodyLimit, header_values, refuse
from aneuron.server.http.errors import ApiError, api_error, invalid_api_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from aneuron.server.config import ServerConfig

__all__ = ["OPEN_PATHS", "PAGE_PATHS", "ApiKeys", "RequestLog", "guards"]

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes have no key
# What a browser loads before it can ask its user for a key: the same for everyone.
PAGE_PATHS = frozenset(
    {"/", "/page/api.js", "/page/icon.svg", "/page/page.css", "/page/page.js", "/page/timeline.js"}
)
_KEYLESS = OPEN_PATHS | PAGE_PATHS
# Hosts that no domain's owner can point elsewhere.
_FIXED_HOST = re.compile(rb"(?:localhost|\d{1,3}(?:\.\d{1,3}){3}|\[[0-9a-f:.]+\])(?::\d{1,5})?")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_MOST_PATH_CHARS = 200  # of a path, in the log
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_EXPOSED = ("x-request-id", "retry-after", "retry-after-ms")
_ACCESS = logging.getLogger("aneuron.server.access")
_LOGGER = logging.getLogger("aneuron.server")


def guards(config: ServerConfig) -> list[Middleware]:
    """Return the middleware of an app, the outermost first.

    Args:
        config: whose keys, origins and body size hold.
    """
    stack = [Middleware(RequestLog)]
    if config.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=list(_EXPOSED),
        )
        stack.append(cors)
    keys = Middleware(ApiKeys, api_keys=config.api_keys, cors_origins=config.cors_origins)
    return [*stack, keys, Middleware(BodyLimit, max_bytes=config.max_body_bytes)]


# ── request ids and the log ─────────────────────────────────────────────────────────────


class RequestLog:
    """Names each request, writes one line about it, and answers for a handler that broke.

    The id is the client's `x-request-id` where that is short and plain, else a new one. It is
    on every answer and in `scope["state"]["request_id"]`, and only for people to read: two
    clients may send the same one. A handler that knows them leaves `prompt_tokens` and
    `completion_tokens` in `scope["state"]` for the line.

    Args:
        app: what comes next.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(scope, receive, send)
        try:
            await self._app(scope, call.receive, call.send)
        except Exception as error:
            _LOGGER.exception("request %s failed", call.request_id)
            if call.has_begun:  # the server cuts the connection: what came is not the whole
                raise
            answer = api_error(error)
            await refuse(answer, scope, call.receive, call.send, is_read=call.is_read)
        finally:
            call.log()


class _Call:
    """One request on its way through: what has been seen of it."""

    __slots__ = (
        "_has_left", "_is_whole", "_receive", "_scope", "_send", "_started_s", "_status",
        "has_begun", "is_read", "request_id",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._started_s = time.monotonic()
        self._status = 500
        self._has_left = False
        self._is_whole = False
        self.has_begun = False
        self.is_read = False
        self.request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = self.request_id

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.is_read = not message.get("more_body", False)
        elif not self._is_whole and not self._is_refused:
            self._has_left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self._is_whole = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            self.has_begun = True
            self._status = message["status"]
            name = (b"x-request-id", self.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), name]}
        await self._send(message)

    @property
    def _is_refused(self) -> bool:
        return self.has_begun and self._status >= 400

    def log(self) -> None:
        """Write the line: no query, no header and no body is in it."""
        if not _ACCESS.isEnabledFor(logging.INFO):
            return
        is_told = self._is_whole or self._is_refused
        status = 499 if self._has_left else self._status if is_told else 500
        state = self._scope["state"]
        _ACCESS.info(
            "%s %s %d %.3f s, %s + %s tokens, id %s",
            self._scope["method"],
            _logged_path(self._scope),
            status,
            time.monotonic() - self._started_s,
            state.get("prompt_tokens", "-"),
            state.get("completion_tokens", "-"),
            self.request_id,
        )


def _request_id(scope: Scope) -> str:
    given = next(header_values(scope, b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else uuid4().hex


def _logged_path(scope: Scope) -> str:
    """Return the path as it came, percent signs and all: decoded, it might hold a line end."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return ascii(raw[:_MOST_PATH_CHARS].decode("ascii", "backslashreplace"))[1:-1]


# ── keys ────────────────────────────────────────────────────────────────────────────────


class ApiKeys:
    """Lets pass who has a key; without keys, everyone but pages of other sites.

    A browser sends what any page asks it to, to this machine as well, and a page whose name
    has been pointed at this machine may read the answers. Without keys, nothing else tells it
    from a user: a request that writes and names an `Origin` needs that origin to be allowed, or
    to be this server's own, and a number: a name is what such a page has, too.

    Args:
        app: what comes next.
        api_keys: any of these is let in; none asks for no key.
        cors_origins: pages of these origins are let in; "*" is all.
    """

    def __init__(
        self, app: ASGIApp, *, api_keys: Sequence[str] = (), cors_origins: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._keys = tuple(key.encode(errors="surrogateescape") for key in api_keys)
        self._origins = frozenset(origin.encode() for origin in cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http" or _path(scope) in _KEYLESS:
            await self._app(scope, receive, send)
        elif self._keys and (error := self._key_fault(scope)) is not None:
            await refuse(error, scope, receive, send)
        elif not self._keys and self._is_foreign(scope):
            message = "pages of this origin may not send requests here: allow it (cors_origins)"
            await refuse(ApiError(403, message, code="origin_not_allowed"), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _key_fault(self, scope: Scope) -> ApiError | None:
        given = list(header_values(scope, b"authorization"))
        if not given:
            return invalid_api_key(missing=True)
        scheme, _, key = given[0].partition(b" ")
        is_one = len(given) == 1 and scheme.lower() == b"bearer"
        return None if self._is_known(key.strip()) and is_one else invalid_api_key()

    def _is_known(self, given: bytes) -> bool:
        is_known = False
        for key in self._keys:  # all of them: how long it takes tells nothing about which
            is_known |= hmac.compare_digest(given, key)
        return is_known

    def _is_foreign(self, scope: Scope) -> bool:
        if scope["method"] in _READS or b"*" in self._origins:
            return False
        origins = set(header_values(scope, b"origin"))
        return not origins <= self._origins and not origins <= _own_origins(scope)


def _own_origins(scope: Scope) -> set[bytes]:
    """Return the origins of pages that came from here, as far as the host can be trusted."""
    match list(header_values(scope, b"host")):
        case [host] if _FIXED_HOST.fullmatch(host):
            return {b"http://" + host, b"https://" + host}
    return set()


def _path(scope: Scope) -> str:
    """Return the path below where the app is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
