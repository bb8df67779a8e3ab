"""The yardstick of `aneuron bench serve`: a bare Starlette app that streams, and does nothing else.

Comes in: a request for a completion. Goes out: one chunk for each stream and tick, encoded by
msgspec, as a server would if its engine cost nothing. One tick wakes all streams; the next one
comes when the loop has been round, so it ticks as fast as the app can send.

A process of its own runs it: `python -m aneuron.cli.bench.server.floor`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from aneuron.cli.bench.common import default_loop, run_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

__all__ = ["MODEL", "Ticker", "build_floor", "main"]

MODEL = "floor"
_MAX_TOKENS = 2**20


class _Message(msgspec.Struct):
    role: str = "user"
    content: str = ""


class _Wanted(msgspec.Struct):
    """What the floor reads of a request."""

    prompt: list[int] = []
    messages: list[_Message] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    index: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    delta: _Delta | msgspec.UnsetType = msgspec.UNSET
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Chunk(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[_Choice]
    usage: _Usage | None = None


class Ticker:
    """One tick for all: wakes whoever waits, once a turn of the loop; idle when nobody does."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Wait for the next tick."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._tick)
        woken = loop.create_future()
        self._waiting.append(woken)
        await woken

    def _tick(self) -> None:
        waiting, self._waiting = self._waiting, []
        for woken in waiting:
            if not woken.done():  # its stream may be gone
                woken.set_result(None)


def build_floor() -> Starlette:
    """Return the app: both endpoints that stream, and the list of its one model."""
    ticker = Ticker()

    async def stream(request: Request) -> StreamingResponse:
        is_chat = request.url.path.endswith("/chat/completions")
        wanted = msgspec.json.decode(await request.body(), type=_Wanted)
        chunks = _chunks(ticker, wanted, is_chat=is_chat)
        return StreamingResponse(chunks, media_type="text/event-stream")

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", stream, methods=["POST"]),
            Route("/v1/chat/completions", stream, methods=["POST"]),
        ]
    )


async def _chunks(ticker: Ticker, wanted: _Wanted, *, is_chat: bool) -> AsyncIterator[bytes]:
    encode = msgspec.json.Encoder().encode
    last = min(wanted.max_completion_tokens or wanted.max_tokens or 16, _MAX_TOKENS)
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    for number in range(1, last + 1):
        await ticker.wait()
        choice = _Choice(0, finish_reason="length" if number == last else None)
        if is_chat:
            choice.delta = _Delta(f" {number}")
        else:
            choice.text = f" {number}"
        yield b"data: %s\n\n" % encode(_Chunk("cmpl-floor", kind, 0, MODEL, [choice]))
    words = sum(len(message.content.split()) for message in wanted.messages)
    num_prompt = len(wanted.prompt) or words
    usage = _Usage(num_prompt, last, num_prompt + last)
    yield b"data: %s\n\n" % encode(_Chunk("cmpl-floor", kind, 0, MODEL, [], usage))
    yield b"data: [DONE]\n\n"


def main() -> None:
    """Serve the floor on a port of the system's choice, until told to stop; say where on stderr."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        print(f"floor on {address}", file=sys.stderr, flush=True)
        config = uvicorn.Config(build_floor(), log_level="warning", access_log=False, ws="none")
        run_on(default_loop(), uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main()
