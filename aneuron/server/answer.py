"""One answer over HTTP: token streams in, events or one body out; who leaves is not served.

Comes in: what submits a request, and gives its token streams and a `Speaker` that says them as an
endpoint does. Goes out: the response. A stream's unread tokens come as one delta: a slow client
gets fewer, longer events, and nothing is queued for it but the tokens of its request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, Protocol

from aneuron.errors import RequestError
from aneuron.outputs import AbortReason, FinishReason
from aneuron.server.http.errors import ApiError, error_response, unavailable
from aneuron.server.http.sse import DONE, HEADERS, PING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import Message, Receive, Send

    from aneuron.outputs import Completion, Token, Usage
    from aneuron.server.call import Call
    from aneuron.stream import TokenStream

    Submitted = tuple[list[TokenStream], "Speaker", bool]  # the last: is it told as events?

__all__ = ["Answer", "Speaker"]

_MOST_ITEMS = 256  # of one delta
_LAST_WORD_S = 1.0  # for a client to take in what went wrong …
_READ_S = 0.25  # … and, once it is sent, to leave by itself


class Speaker(Protocol):
    """What an endpoint says of its streams; all of it is JSON as bytes.

    Attributes:
        ends_with_done: a stream of events ends with `[DONE]`; else its last event tells that it
            is, and how the answer ended.
    """

    ends_with_done: bool

    def delta(self, prompt: int, items: list[Token], usage: Usage) -> bytes:
        """Return the events of a prompt's next tokens; of an answer in one, keep them.

        `usage` may count tokens that come later.
        """

    def end(self, completions: list[Completion]) -> bytes:
        """Return the events behind all tokens."""

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error amid a stream."""

    async def whole(self, completions: list[Completion]) -> bytes:
        """Return the body of an answer that is not streamed; long ones let the loop in."""

    def reasons(self, completions: list[Completion]) -> list[str]:
        """Return why each choice ended, as it was said."""


class _Left(Exception):
    """The client is gone."""


class Answer:
    """One answer, from before its streams run until they do not."""

    def __init__(self, call: Call, receive: Receive, send: Send) -> None:
        """Answer a call whose body has been received."""
        self._call = call
        self._receive, self._send = receive, send
        self._streams: Sequence[TokenStream] = ()
        self._speaker: Speaker | None = None  # of a stream of events
        self._has_begun = False  # to write
        self._is_over = False  # all is written, or as good as
        self._wrote_s = 0.0
        self._lock = asyncio.Lock()  # events of several prompts, and pings
        self._group: asyncio.TaskGroup | None = None  # while there is work to cut off
        self._aborted: str | None = None  # why, where the engine says that it was

    def cut_off(self) -> None:
        """End it now, with an error: the server stops."""
        if self._group is not None:  # even if it waits for a client that does not read
            self._group.create_task(self._stop())
            self._group = None

    async def run(self, submit: Callable[[], Awaitable[Submitted]]) -> None:
        """Submit, and answer while the client is there; say what fails.

        Streams are cancelled when this ends, however it does. An error before the first event is
        a response of its own.
        """
        error: Exception | None = None
        try:
            async with asyncio.TaskGroup() as self._group:
                watcher = self._group.create_task(self._watch())
                if self._call.is_cut_off:
                    self.cut_off()
                self._streams, speaker, is_stream = await submit()
                await (self._speak(speaker) if is_stream else self._say(speaker))
                watcher.cancel()
        except ExceptionGroup as group:  # a server lives on
            error = _first(group)
            # Python 3.11 leaves a cycle of it and a frame: collecting many would hold the loop.
            group.__traceback__ = None
        finally:
            self._group = None
            for stream in self._streams:
                stream.cancel()
        if isinstance(error, _Left):
            self._call.aborted()
        elif error is not None:
            await self._fail(error)

    async def _watch(self) -> NoReturn:
        """Wait for the client to leave; on a silent stream of events, say that we are there."""
        ping_s, clock = self._call.state.config.ping_s or None, asyncio.get_running_loop().time
        while True:
            try:
                async with asyncio.timeout(ping_s):
                    message = await self._receive()
            except TimeoutError:
                if self._has_begun and clock() - self._wrote_s >= (ping_s or 0.0):
                    await self._write(PING)
            else:
                if message["type"] == "http.disconnect":
                    raise _Left

    # ── whole ───────────────────────────────────────────────────────────────────────────

    async def _say(self, speaker: Speaker) -> None:
        completions = await self._all(speaker, is_written=False)
        body = await speaker.whole(completions)
        size = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", size)]
        await self._respond(200, headers, body)
        self._call.finished(completions, speaker.reasons(completions))

    async def _respond(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self._has_begun = self._is_over = True
        await self._put({"type": "http.response.start", "status": status, "headers": headers})
        await self._put({"type": "http.response.body", "body": body})

    async def _all(self, speaker: Speaker, *, is_written: bool) -> list[Completion]:
        """Read all streams to their ends, together; one alone needs no task."""
        work = [
            self._pump(at, stream, speaker, is_written=is_written)
            for at, stream in enumerate(self._streams)
        ]
        if len(work) == 1:
            return [await work[0]]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
        return [task.result() for task in tasks]

    # ── events ──────────────────────────────────────────────────────────────────────────

    async def _speak(self, speaker: Speaker) -> None:
        self._speaker = speaker
        completions = await self._all(speaker, is_written=True)
        last = speaker.end(completions) + (DONE if speaker.ends_with_done else b"")
        await self._write(last, is_last=True)
        self._call.finished(completions, speaker.reasons(completions))

    async def _pump(
        self, at: int, stream: TokenStream, speaker: Speaker, *, is_written: bool
    ) -> Completion:
        """Let the speaker have the tokens of a stream, as they come."""
        call = self._call
        before_s: float | None = None
        try:
            while items := await stream.take(_MOST_ITEMS):
                if any(item.finish_reason is FinishReason.ABORT for item in items):
                    await self._raise_abort(stream)
                before_s = call.note_delta(at, before_s)
                events = speaker.delta(at, items, stream.usage)
                if events and is_written:
                    await self._write(events)
            return await stream
        except RequestError as error:
            raise call.error_of(error, at) from error

    async def _write(self, events: bytes, *, is_last: bool = False) -> None:
        async with self._lock:
            if not self._has_begun:
                self._has_begun = True
                headers = list(HEADERS)
                await self._put({"type": "http.response.start", "status": 200, "headers": headers})
            more, self._is_over = not is_last, is_last
            await self._put({"type": "http.response.body", "body": events, "more_body": more})
        self._wrote_s = asyncio.get_running_loop().time()

    async def _put(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:  # how servers say so from ASGI 2.4 on
            raise _Left from error

    # ── errors ──────────────────────────────────────────────────────────────────────────

    async def _stop(self) -> NoReturn:
        self._aborted = AbortReason.SHUTDOWN
        raise unavailable("the server is stopping")

    async def _raise_abort(self, stream: TokenStream) -> NoReturn:
        reasons = [choice.abort_reason for choice in (await stream).choices]
        self._aborted = next(filter(None, reasons), AbortReason.CLIENT)
        raise unavailable("the request was aborted")

    async def _fail(self, fault: Exception) -> None:
        if self._aborted is not None:
            self._call.aborted(self._aborted)
        error = self._call.failed(fault)
        if not self._is_over:  # else the server was told to stop while the last byte went out
            with suppress(_Left, TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await self._tell(error)

    async def _tell(self, error: ApiError) -> None:
        if not self._has_begun:
            response = error_response(error)
            await self._respond(error.status, response.raw_headers, bytes(response.body))
        elif self._speaker is not None:
            # The last event, but no end of the response: servers then close the connection, so
            # that nobody takes what came for the whole. Events that say so themselves may end.
            last = not self._speaker.ends_with_done
            await self._write(self._speaker.failed(error), is_last=last)
            # Browsers drop what a page has not read when its connection breaks: give it time.
            async with asyncio.timeout(_READ_S):
                while not last and (await self._receive())["type"] != "http.disconnect":
                    pass


def _first(group: BaseExceptionGroup) -> Exception:
    """Return the error that counts: what failed first, not what that brought about."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
