"""Serving an app on sockets: uvicorn's HTTP/1.1 inside the loop that runs already.

Comes in: an ASGI app, an address, limits. Goes out: the app's answers, until a signal or the
caller ends it. Here is what an app cannot see of connections: how many there are, and how they
end; what happens on one is in `connection.py`. Runs in the caller's task; each request has a
task of uvicorn's. Nothing polls and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.server import ServerState

from aneuron.server.http.addresses import bind, cannot_listen, forget, url
from aneuron.server.http.bodies import refuse
from aneuron.server.http.connection import Connection
from aneuron.server.http.errors import ApiError
from aneuron.server.http.guard import OPEN_PATHS, RequestLog
from aneuron.server.http.reading import Turns

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Limits", "Site", "serve"]

_GIVE_UP_S = 1.0  # for handlers to see that their connection is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of connections, whatever is sent on them.

    Attributes:
        max_connections: beyond, requests are answered 503; twice as many are cut unheard.
        max_header_bytes: of a request line with its headers.
        header_s: seconds for a whole head to come, from the connection's start or its first byte.
        keep_alive_s: seconds that a connection may be idle between two requests; over a minute,
            as proxies keep theirs that long and must not meet one that is being closed.
        stall_s: seconds without progress after which a reader that does not read is cut.
        close_s: seconds for connections to end by themselves after the last answer.
        backlog: connections that the system holds until they are accepted.
    """

    max_connections: int = 4096
    max_header_bytes: int = 32 * 2**10
    header_s: float = 10.0
    keep_alive_s: int = 65
    stall_s: float = 120.0
    close_s: float = 5.0
    backlog: int = 2048


_LIMITS = Limits()


async def serve(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: str | None = None,
    sockets: Sequence[socket.socket] | None = None,
    on_started: Callable[[str], None] | None = None,
    drain: Callable[[], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
    handles_signals: bool = True,
    limits: Limits = _LIMITS,
) -> bool:
    """Serve an app until SIGTERM or SIGINT comes, `stop` is set, or the caller is cancelled.

    Then `drain` is awaited: the sockets stay open while it runs, so that new requests are told
    to go elsewhere. A second signal ends it, and every connection, at once. Where a loop has
    no signal handlers (Windows, not the main thread), signals are the caller's.

    Args:
        app: what answers; its lifespan is not run.
        host: a name or an address to listen on.
        port: to listen on; 0 lets the system choose.
        uds: path of a Unix socket, in place of host and port.
        sockets: that are bound, in place of all three; they are closed at the end.
        on_started: called with the URL when connections are accepted.
        drain: returns when no request is open any more; a deadline is its own matter.
        stop: set it to end as a first signal does.
        handles_signals: False leaves them to the caller.
        limits: of connections.

    Returns:
        Whether it ended in its own time; False after a second signal.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if sockets is None:
        sockets = await asyncio.to_thread(bind, host, port, uds=uds)
    ending = _Ending(stop or asyncio.Event())
    site = Site(app, limits)
    urls = [url(one) for one in sockets]  # a closed socket has none
    try:
        with ending.on_signals() if handles_signals else contextlib.nullcontext():
            async with ending.patience:
                await site.listen(sockets)
                if on_started is not None:
                    on_started(urls[0])
                await ending.wanted.wait()
                if drain is not None:
                    await drain()
                site.finish()
                await site.wait_closed(limits.close_s)
    except TimeoutError:
        if not ending.patience.expired():
            raise  # drain's own
        return False
    finally:
        await site.aclose()
        await asyncio.to_thread(forget, sockets, urls)
    return True


class _Ending:
    """What ends the serving: a first call asks for it, a second one does not wait."""

    def __init__(self, wanted: asyncio.Event) -> None:
        self.wanted = wanted
        self.patience = asyncio.timeout(None)

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let signals ask for it, as far as the platform can."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        try:
            for number in numbers:
                loop.add_signal_handler(number, self._ask)
        except (NotImplementedError, RuntimeError, ValueError):  # Windows; not the main thread
            yield
            return
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _ask(self) -> None:
        if self.wanted.is_set():
            self.patience.reschedule(asyncio.get_running_loop().time())
        self.wanted.set()


# ── connections ─────────────────────────────────────────────────────────────────────────


class Site:
    """The listening sockets and all their connections."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.limits = limits
        self.config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nobody's word is taken for who they are
            server_header=False,
            date_header=False,  # written below, when a request comes rather than ten times a second
            timeout_keep_alive=limits.keep_alive_s,
            h11_max_incomplete_event_size=limits.max_header_bytes,
        )
        self.config.load()
        self.state = ServerState()
        self.turns = Turns()
        self._app = app
        self._full_app = RequestLog(_turn_away)
        self._servers: list[asyncio.Server] = []
        self._date_s = 0
        self._is_over = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections from now on.

        Raises:
            ConfigError: another process listens there.
        """
        loop = asyncio.get_running_loop()
        for one in sockets:
            name = url(one)  # a failed call may close the socket
            try:
                one.listen(self.limits.backlog)  # here, as uvloop keeps its errors to itself
                server = await loop.create_server(
                    lambda: Connection(self), sock=one, backlog=self.limits.backlog
                )
            except OSError as error:
                raise cannot_listen(name, error) from error
            self._servers.append(server)

    def finish(self) -> None:
        """Accept no more, and close each connection after its answer."""
        self._is_over = True
        for server in self._servers:
            server.close()
        for connection in list(self.state.connections):
            connection.shutdown()

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait for connections to end by themselves."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()

    async def aclose(self) -> None:
        """Cut what is left, and wait until its handlers have seen it. Bounded."""
        self.finish()
        for connection in list(self.state.connections):
            connection.transport.abort()
        await self.wait_closed(_GIVE_UP_S)
        if self.state.tasks:
            await asyncio.wait(self.state.tasks, timeout=_GIVE_UP_S)
        for task in self.state.tasks:  # of handlers that would not see it
            task.cancel()
        if self.state.tasks:
            await asyncio.wait(self.state.tasks, timeout=_GIVE_UP_S)

    def made(self, connection: Connection) -> None:
        """Admit a new connection, or not."""
        self._is_empty.clear()
        connection.is_admitted = not self._is_full
        if self._is_over or len(self.state.connections) > 2 * self.limits.max_connections:
            connection.transport.abort()

    def app_for(self, connection: Connection, scope: Scope) -> ASGIApp:
        """Return what answers a request of a connection that was one too many when it came."""
        if not self._is_full:
            connection.is_admitted = True
            return self._app
        # A full server is no reason to restart it; an app that is mounted has its probes, too.
        is_probe = "/" + scope["path"].rpartition("/")[2] in OPEN_PATHS
        return self._app if is_probe else self._full_app

    @property
    def _is_full(self) -> bool:
        return len(self.state.connections) > self.limits.max_connections

    def lost(self) -> None:
        """Tell who waits for the last connection."""
        if not self.state.connections:
            self._is_empty.set()

    def date(self) -> None:
        """Renew the `date` header of answers."""
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s = now_s
            self.state.default_headers = [(b"date", formatdate(now_s, usegmt=True).encode())]


async def _turn_away(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(503, "too many connections are open", code="overloaded", retry_after_s=1.0)
    await refuse(error, scope, receive, send, closes=True)
