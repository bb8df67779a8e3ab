"""How a connection's bytes become requests: in shares, each of them small, and within limits.

Comes in: what a client sent, up to 256 KiB at once and before any key was seen. Goes out: h11's
events, no more of them in one go than cost about as much as a request does, so that nobody who
can connect can hold the loop. Pure but for `Turns`, whose callback runs in the loop.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SHARE_BYTES", "Flow", "Parser", "Turns"]

SHARE_BYTES = 4096  # given to a parser in one go; h11 reads a whole trailer at once
_SHARE_EVENTS = 32  # of a body: one byte may be a chunk
_TURN_S = 0.002  # for all connections that are behind, in one turn of the loop
_MOST_LINES = 100  # of a head
_MOST_SMALL_CHUNKS = 4096  # beyond those that the body's size excuses
_SMALL_BYTES = 64
_HEAD_END = re.compile(rb"\n\r?\n")  # what h11 takes for it


class Parser(h11.Connection):
    """h11's, with limits on what it costs to read a request.

    Attributes:
        fault: what was over a limit, to tell the client.
        is_behind: there is more to parse, in another turn.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes
        self.fault: str | None = None
        self.is_behind = False
        self._events_left = _SHARE_EVENTS
        self._is_amid_a_head = True
        self._request: h11.Request | None = None  # whose body is coming
        self._num_chunks = 0
        self._num_bytes = 0

    @property
    def num_held(self) -> int:
        """How many bytes it holds: of a body none, but for what stands between chunks."""
        return len(self.trailing_data[0])

    def receive_data(self, data: bytes) -> None:
        """Take a share of what came."""
        self._events_left = _SHARE_EVENTS
        super().receive_data(data)

    def go_on(self) -> None:
        """Allow another share of events."""
        self.is_behind = False
        self._events_left = _SHARE_EVENTS

    @property
    def is_whole(self) -> bool:
        """Whether the request is; more can only be of later ones."""
        return self._request is None and not self._is_amid_a_head

    @property
    def plain_bytes(self) -> int:
        """How much of a body is to come, where its length is known: nothing in it is parsed."""
        headers = {} if self._request is None else dict(self._request.headers)
        if b"transfer-encoding" in headers:  # it has the last word
            return 0
        return int(headers.get(b"content-length", 0)) - self._num_bytes

    def start_next_cycle(self) -> None:
        """Await another request."""
        super().start_next_cycle()
        self._is_amid_a_head = True

    def next_event(self) -> Any:
        """Return the next event, or that more is needed: data or, where it is behind, time.

        Raises:
            RemoteProtocolError: what came is no HTTP, or over a limit.
        """
        if self._events_left == 0:
            self.is_behind = True
            return h11.NEED_DATA
        if self._request is None:
            data = self.trailing_data[0]
            if not data:
                return h11.NEED_DATA  # h11 would say so, too, and take its time
            if self._is_amid_a_head:
                self._check_head(data)
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._count(event)
        elif isinstance(event, h11.Request):
            self._is_amid_a_head = False
            self._request, self._num_chunks, self._num_bytes = event, 0, 0
        elif isinstance(event, h11.EndOfMessage):
            self._request = None
        elif self._request is not None and self.num_held > SHARE_BYTES:
            self._refuse("the head of a chunk, or the trailer, is too long")
        return event

    def _check_head(self, data: bytes) -> None:
        """Refuse a head that is too long, be it whole or not: h11 minds those that are not."""
        most = self._max_header_bytes
        if len(data) <= most and data.count(b"\n") <= _MOST_LINES:
            return
        end = _HEAD_END.search(data)
        head = data[: end.end()] if end else data  # else it is a body's
        if len(head) > most:
            self._refuse(f"the request line and headers are over {most} bytes")
        if head.count(b"\n") > _MOST_LINES:
            self._refuse(f"the headers have over {_MOST_LINES} lines")

    def _count(self, event: h11.Data) -> None:
        self._events_left -= 1
        self._num_bytes += len(event.data)
        self._num_chunks += event.chunk_start
        if self._num_chunks > _MOST_SMALL_CHUNKS + self._num_bytes // _SMALL_BYTES:
            self._refuse("the body comes in chunks that are too small")

    def _refuse(self, fault: str) -> None:
        self.fault = fault
        raise h11.RemoteProtocolError(fault)


class Flow(FlowControl):
    """uvicorn's, with a second reason not to read: what came before is not parsed yet."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False

    def resume_reading(self) -> None:
        """Read on as soon as both reasons are gone."""
        if self._is_held:
            self.read_paused = False
        else:
            super().resume_reading()

    def hold(self) -> None:
        """Read nothing more for now; uvicorn may have gone past a hold."""
        self._is_held = True
        self._transport.pause_reading()

    @property
    def is_paused(self) -> bool:
        """Whether nothing is read, for either reason."""
        return self._is_held or self.read_paused

    def release(self) -> None:
        """End a hold."""
        if self._is_held:
            self._is_held = False
            if not self.read_paused:
                self._transport.resume_reading()


class Turns:
    """Gives connections that are behind their shares: a little in each turn of the loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def add(self, read_on: Callable[[], None]) -> None:
        """Have one share read soon: `read_on` adds itself again for the next."""
        self._waiting.append(read_on)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        end_s = time.perf_counter() + _TURN_S  # uvloop's own time stands still within a turn
        try:
            while self._waiting:
                self._waiting.popleft()()
                if time.perf_counter() >= end_s:
                    break
        finally:
            self._is_due = False
            self._schedule()
