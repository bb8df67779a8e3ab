"""One connection of the server: uvicorn's, with what it has no limits for.

Comes in: bytes of anyone who can connect. Goes out: requests to the app, and its answers. Here
are heads that do not come, readers that do not read, clients that send more than is asked for,
and what is no HTTP. Runs in the loop's callbacks; its clocks end with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol

from aneuron.server.http.errors import ApiError, error_body
from aneuron.server.http.reading import SHARE_BYTES, Flow, Parser

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Receive, Scope, Send

    from aneuron.server.http.serving import Site

__all__ = ["Connection"]

_BAD_HTTP = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"


class Connection(H11Protocol):
    """uvicorn's connection: slow heads, stalled readers and great hurry are seen to.

    h11 rather than what else uvicorn may find installed: it can be held to limits.

    Attributes:
        is_admitted: whether the server was not full when it came, or has not been since.
    """

    flow: Flow
    conn: Parser

    def __init__(self, site: Site) -> None:
        super().__init__(config=site.config, server_state=site.state, app_state={})
        self.conn = Parser(site.limits.max_header_bytes)
        self.is_admitted = True
        self._site = site
        self._app, self.app = self.app, self._serve
        self._rest = bytearray()  # came, and was not given to the parser
        self._is_waiting = False  # for a turn to parse more
        self._head: asyncio.TimerHandle | None = None  # while a head is awaited
        self._stall: asyncio.TimerHandle | None = None  # while nobody reads

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin: a head is awaited."""
        super().connection_made(transport)
        self.flow = Flow(transport)
        self._site.made(self)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and leave no clock behind."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset, uvicorn's goes on
        self._rest.clear()
        self._stop_head()
        self._stop_stall()
        self.app = self._app  # no cycle is left: collecting many would hold the loop
        self._site.lost()

    # ── what comes ──────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        """Parse what came: at once if it is little and nothing waits, else in turns."""
        self._site.date()
        if self._rest or len(data) > SHARE_BYTES or self.conn.is_whole:
            self._rest += data
            if not self._is_waiting:
                self._read_on()
            return
        super().data_received(data)
        if self.conn.is_behind or self.flow.is_paused:
            self._settle()
        else:
            self._watch_head()

    def _read_on(self) -> None:
        """Parse a share of what came, and of a body whose length is known, all there is."""
        if self.conn.is_behind:
            self.conn.go_on()
            self.handle_events()
        elif not self.conn.is_whole:
            self._parse(SHARE_BYTES)
            if self._rest and (num_bytes := self.conn.plain_bytes) > 0:
                self._parse(num_bytes)  # costs little
        self._settle()

    def _parse(self, num_bytes: int) -> None:
        share = bytes(self._rest[:num_bytes])
        del self._rest[:num_bytes]
        super().data_received(share)

    def _take_turn(self) -> None:
        self._is_waiting = False
        if not self.transport.is_closing():
            self._read_on()

    def _settle(self) -> None:
        """Decide what happens to the rest, and whether to read more."""
        self._watch_head()
        if self.transport.is_closing():
            self._rest.clear()
        elif self.conn.is_whole:
            if len(self._rest) + self.conn.num_held > self._site.limits.max_header_bytes:
                self.transport.abort()  # read no more, it would not be seen to leave
            else:
                self._see_it_leave()
        elif self._rest or self.conn.is_behind:
            self.flow.hold()
            self._wait()
        else:
            self.flow.release()

    def _see_it_leave(self) -> None:
        """Read on, whatever uvicorn paused for: a connection that is not read never ends."""
        self.flow.release()
        self.flow.resume_reading()

    def _wait(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._site.turns.add(self._take_turn)

    # ── what goes ───────────────────────────────────────────────────────────────────────

    def pause_writing(self) -> None:
        """Run the clock: nobody reads."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop the clock."""
        super().resume_writing()
        self._stop_stall()

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        super().on_response_complete()
        if self.transport.is_closing():  # and stays so until what is written has been read
            self._watch_reader()
        elif self._rest or self.conn.num_held:  # of the next request
            self._settle()

    def timeout_keep_alive_handler(self) -> None:
        """Close what was idle for long."""
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def shutdown(self) -> None:
        """End it after the answer under way, or now."""
        if not self.transport.is_closing():
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the envelope of all errors."""
        if self._is_serving:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # its answer is this one
            self.cycle.message_event.set()
        error = ApiError(400, self.conn.fault or msg, code="bad_http")
        body = error_body(error)
        self.transport.write(_BAD_HTTP + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        self.transport.close()
        self._watch_reader()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; where its answer has no end, the connection ends."""
        cycle = self.cycle
        app = self._app if self.is_admitted else self._site.app_for(self, scope)
        try:
            await app(scope, receive, send)
        finally:
            if cycle.response_started and not cycle.response_complete:
                cycle.disconnected = True  # uvicorn need not complain: who left it so has said why
                self.transport.close()
                self._watch_reader()

    # ── clocks ──────────────────────────────────────────────────────────────────────────

    @property
    def _is_serving(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def _watch_head(self) -> None:
        """Run the clock while a head is awaited, and not while a request is served."""
        if self._is_serving:
            self._stop_head()
        elif self._head is None:
            self._head = self.loop.call_later(self._site.limits.header_s, self.transport.abort)

    def _watch_reader(self) -> None:
        """Run the clock while something is to be read; a lost connection is not kept by it."""
        if self._stall is None and self in self.connections:
            self._stall = self.loop.call_later(self._site.limits.stall_s, self.transport.abort)

    def _stop_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
