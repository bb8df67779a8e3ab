"""The bytes of an HTTP/1.1 answer, taken apart as they come: head, body, server-sent events.

Comes in: whatever a read of the socket gave, cut anywhere. Goes out: status, headers, the pieces
of the body, the payload of each event. Plain code without I/O; the client calls it once a read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BadAnswer", "EventSplitter", "ResponseParser"]

_MAX_HEAD = 64 * 1024  # bytes
_MAX_LINE = 1024  # of a chunk's size or a trailer
_MAX_EVENT = 4 * 2**20
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;.*)?")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: .*)?")


class BadAnswer(Exception):
    """What the server sent is not HTTP/1.1, or not a stream of events."""


class ResponseParser:
    """The answer to one request.

    Attributes:
        status: of the head; 0 until it is here.
        headers: by lower-case name; of several with one name the last.
        is_done: the whole answer is here.
        keeps_alive: the connection can carry another request after this one.
        has_begun: some of it is here.
    """

    __slots__ = (
        "_feed", "_left", "_rest", "has_begun", "headers", "is_done", "keeps_alive", "status"
    )  # fmt: skip

    def __init__(self) -> None:
        self.has_begun = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_done = False
        self.keeps_alive = False
        self._rest = b""  # what cannot be told yet
        self._left = 0  # bytes of the body or of a chunk that are still to come
        self._feed: Callable[[bytes], bytes] = self._head

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they came; return those of the body among them.

        Raises:
            BadAnswer: this is no HTTP/1.1, or there is more than one answer.
        """
        return self._feed(data)

    def feed_eof(self) -> None:
        """Take the end of the connection, which ends a body of no other length.

        Raises:
            BadAnswer: the answer is not complete.
        """
        if self._feed == self._until_close:
            self.is_done = True
        elif not self.is_done:
            raise BadAnswer("the connection was closed before the answer was complete")

    # ── head ────────────────────────────────────────────────────────────────────────────

    def _head(self, data: bytes) -> bytes:
        self.has_begun = True
        data = self._rest + data
        head, mark, rest = data.partition(b"\r\n\r\n")
        if not mark:
            if len(data) > _MAX_HEAD:
                raise BadAnswer("the head of the answer is too long")
            self._rest = data
            return b""
        self._rest = b""
        lines = head.split(b"\r\n")
        found = _STATUS.fullmatch(lines[0])
        if found is None:
            raise BadAnswer(f"not a status line of HTTP/1.1: {lines[0][:80]!r}")
        if found[2][0] == ord("1"):  # 100, 103: the answer itself follows
            return self._head(rest) if rest else b""
        self.status = int(found[2])
        self.headers = dict(map(_header, lines[1:]))
        connection = self.headers.get("connection", "").lower()
        self.keeps_alive = found[1] == b"1" and "close" not in connection
        self._choose_body()
        return self._feed(rest) if rest else b""

    def _choose_body(self) -> None:
        length = self.headers.get("content-length")
        if self.status in {204, 304}:
            self._end()
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._feed = self._chunked
        elif length is None:
            self.keeps_alive = False
            self._feed = self._until_close
        elif not (length.isascii() and length.isdecimal() and len(length) <= 15):
            raise BadAnswer(f"no content-length: {length[:80]!r}")
        else:
            self._left = int(length)
            self._feed = self._counted
            if not self._left:
                self._end()

    # ── body ────────────────────────────────────────────────────────────────────────────

    def _until_close(self, data: bytes) -> bytes:
        return data

    def _counted(self, data: bytes) -> bytes:
        body, rest = data[: self._left], data[self._left :]
        self._left -= len(body)
        if not self._left:
            self._end(rest)
        return body

    def _chunked(self, data: bytes) -> bytes:
        if self._rest:
            data, self._rest = self._rest + data, b""
        pieces = []
        at, end = 0, len(data)
        while at < end:
            if self._left > 2:  # of the chunk itself; two more are the line's end after it
                piece = data[at : at + self._left - 2]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
            elif self._left:
                if data[at] != b"\r\n"[-self._left]:
                    raise BadAnswer("a chunk is longer than its size")
                at += 1
                self._left -= 1
            else:
                stop = data.find(b"\r\n", at)
                if stop < 0:
                    self._keep(data[at:])
                    break
                size = _chunk_size(data[at:stop])
                at = stop + 2
                if not size:
                    self._feed = self._trailers
                    self._feed(data[at:])
                    break
                self._left = size + 2
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _trailers(self, data: bytes) -> bytes:
        data, self._rest = self._rest + data, b""
        while True:
            line, mark, after = data.partition(b"\r\n")
            if not mark:
                self._keep(data)
                break
            if not line:
                self._end(after)
                break
            data = after
        return b""

    def _keep(self, rest: bytes) -> None:
        if len(rest) > _MAX_LINE:
            raise BadAnswer("the size of a chunk is too long")
        self._rest = rest

    def _end(self, rest: bytes = b"") -> None:
        self.is_done = True
        self._feed = self._surplus
        if rest:
            self._surplus(rest)

    def _surplus(self, data: bytes) -> bytes:
        if data:
            raise BadAnswer("there is more than one answer")
        return b""


def _header(line: bytes) -> tuple[str, str]:
    name, mark, value = line.partition(b":")
    if not mark:
        raise BadAnswer(f"not a header: {line[:80]!r}")
    return name.decode("latin-1").lower(), value.strip().decode("latin-1")


def _chunk_size(line: bytes) -> int:
    found = _CHUNK.fullmatch(line)
    if found is None:
        raise BadAnswer(f"not the size of a chunk: {line[:80]!r}")
    return int(found[1], 16)


class EventSplitter:
    r"""A body of `text/event-stream`: gives the data of each event, and drops all else.

    Lines end with \n, \r\n or \r, as the format has it; an event without data is none.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Take a piece of the body; return the data of the events that are now complete.

        Raises:
            BadAnswer: an event is larger than 4 MiB.
        """
        if self._rest:
            body, self._rest = self._rest + body, b""
        late = b""
        if b"\r" in body:
            if body.endswith(b"\r"):  # its \n may be yet to come
                body, late = body[:-1], b"\r"
            body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events = body.split(b"\n\n")
        self._rest = events.pop() + late
        if len(self._rest) > _MAX_EVENT:
            raise BadAnswer("an event is too large")
        return [data for event in events if (data := _data_of(event)) is not None]


def _data_of(event: bytes) -> bytes | None:
    if b"\n" not in event and event.startswith(b"data: "):  # nearly all are like this
        return event[6:]
    lines = [line for line in event.split(b"\n") if line == b"data" or line.startswith(b"data:")]
    if not lines:
        return None
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
