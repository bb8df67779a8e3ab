"""A client at the level of bytes: it reads as slowly, and leaves as suddenly, as a test wants."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import pytest

from aneuron.server.http.serving import Site
from aneuron.testing import assert_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.conftest import Served

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODEL = "sim:count"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, and send nothing more


class Raw:
    """One connection.

    Attributes:
        status, headers: of the latest answer.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self._events: AsyncIterator[str] | None = None

    @classmethod
    async def connect(cls, url: str, *, narrow: bool = False) -> Self:
        """Connect; `narrow` has the system hold little of what is not read yet."""
        one = socket.socket()
        if narrow:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setblocking(False)
        host, port = url.removeprefix("http://").split(":")
        try:
            await asyncio.get_running_loop().sock_connect(one, (host, int(port)))
        except OSError:
            one.close()
            raise
        # A small limit: what is not asked for stays with the system.
        return cls(*await asyncio.open_connection(sock=one, limit=2048 if narrow else 2**16))

    def send(self, path: str, _body: Any = None, **headers: str) -> None:
        """Send a request: with a body, a POST."""
        body = b"" if _body is None else json.dumps(_body).encode()
        self.writer.write(head(path, len(body), "GET" if _body is None else "POST", **headers))
        self.writer.write(body)

    async def answer(self) -> int:
        """Read the head of an answer; return its status."""
        line, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.status, self._events = int(line.split()[1]), None
        pairs = (one.split(": ", 1) for one in lines if one)
        self.headers = {name.lower(): value for name, value in pairs}
        return self.status

    async def body(self) -> bytes:
        """Read the rest of an answer whose head was read."""
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        return b"".join([chunk async for chunk in self._chunks()])

    async def whole(self) -> Any:
        """Read a whole answer; return its JSON."""
        await self.answer()
        return json.loads(await self.body())

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readline() or b"-1", 16):
            if size < 0:
                raise EOFError("the connection ended amid an answer")
            chunk = await self.reader.readexactly(size)
            await self.reader.readexactly(2)
            yield chunk
        await self.reader.readexactly(2)

    def events(self) -> AsyncIterator[str]:
        """Return the data of each event of an answer whose head was read, from where one is."""
        if self._events is None:
            self._events = self._read_events()
        return self._events

    async def _read_events(self) -> AsyncIterator[str]:
        rest = b""
        async for chunk in self._chunks():
            *whole, rest = (rest + chunk).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    yield event.removeprefix(b"data: ").decode()
        assert not rest

    async def stream(self, path: str, body: Any, *, count: int) -> list[str]:
        """Ask for events and read some of them."""
        self.send(path, {**body, "stream": True})
        assert await self.answer() == 200
        found: list[str] = []
        events = self.events()
        while len(found) < count:
            found.append(await anext(events))
        return found

    async def ended(self) -> bool:
        """Whether the server ends the connection within a second."""
        try:
            async with asyncio.timeout(1):
                return await self.reader.read() == b""
        except ConnectionError:
            return True

    def leave(self, *, resets: bool = True) -> None:
        """Go, with no word (a reset), or with one."""
        if resets and not self.writer.transport.is_closing():
            one = self.writer.get_extra_info("socket")
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.writer.transport.abort()


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Raw]:
    """Be connected in the block."""
    raw = await Raw.connect(url, **options)
    try:
        yield raw
    finally:
        raw.leave()


def asks(
    last: int | str | list[list[int]] = 1000, max_tokens: int = 1000, **more: Any
) -> dict[str, Any]:
    """Return the body of a request for a completion of COUNT: by its last id, or its prompts."""
    prompt = [last] if isinstance(last, int) else last
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, **more}


def head(path: str, size: int, method: str = "POST", **headers: str) -> bytes:
    """Return the head of a request whose body has so many bytes."""
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {size}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def error_of(raw: Raw) -> Any:
    """Return the error of an answer, be it a stream of events with no end, or whole."""
    if await raw.answer() != 200:
        return json.loads(await raw.body())["error"]
    last = ""
    with pytest.raises(EOFError):
        async for event in raw.events():
            last = event
    return json.loads(last)["error"]


# ── what the server says ────────────────────────────────────────────────────────────────


def statuses(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the statuses of the access log."""
    lines = [one.getMessage() for one in caplog.records if one.name == "aneuron.server.access"]
    return [line.split()[2] for line in lines]


def aborted(server: Served) -> dict[str, int]:
    """Return how many requests were aborted, by reason; those that were."""
    return {reason: n for reason, n in server.state.metrics.aborted_by_reason.items() if n}


async def all_gone(server: Served) -> None:
    """Wait, a second at most, until no request is left anywhere, and check the engine."""
    async with asyncio.timeout(1):
        await server.state.engine.wait_idle()
        while server.state.num_open:
            await asyncio.sleep(0.001)
    assert_idle(server.state.engine)


def sites() -> list[Site]:
    """Return the servers of this process that listen."""
    found = [one for one in gc.get_objects() if type(one) is Site]
    return [site for site in found if not site._is_over]


def narrow_server() -> None:
    """Have the system hold little of what the server wrote and nobody read."""
    for site in sites():
        for server in site._servers:
            server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


# ── what is in an answer ────────────────────────────────────────────────────────────────


def text_of(events: list[str]) -> str:
    """Return the text of completion chunks, or of a chat's."""
    text = ""
    for event in events:
        for choice in [] if event == "[DONE]" else json.loads(event)["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


def ids_of(text: str) -> list[int]:
    """Return the ids that COUNT spelled: `<1001><1002>`."""
    assert re.fullmatch(r"(<\d+>)*", text), text[:100]
    return [int(one) for one in re.findall(r"\d+", text)]
