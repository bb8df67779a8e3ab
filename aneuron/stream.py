"""What a user holds of a request: the `TokenStream`.

Comes in: the columns that the engine writes to a `Request`. Goes out: `Token` items and a
`Completion`. Runs in the consumer's task; a slow or absent consumer costs the engine
nothing, since unread tokens are ids in a column and become text when they are read.
"""

from __future__ import annotations

import asyncio
import weakref
from asyncio import CancelledError, current_task
from typing import TYPE_CHECKING, Any, Protocol, Self

from aneuron.detokenize import Detokenizer
from aneuron.errors import AneuronError, InternalError
from aneuron.outputs import Choice, Completion, FinishReason, Timing, Token, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from aneuron.params import SamplingParams
    from aneuron.prompt import Ids, Tokenizer
    from aneuron.request import Request

__all__ = ["Consumers", "StopWatch", "StreamOwner", "TokenStream"]

_BUSY = "another task consumes this TokenStream; a stream has one consumer"
_YIELD_EVERY = 64  # ready tokens that a stream gives before it lets others run


class StreamOwner(Protocol):
    """What a stream needs of its engine, and why it keeps the engine alive."""

    loop: asyncio.AbstractEventLoop
    tokenizer: Tokenizer
    consumers: Consumers

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside: ABORT forgets it, STOP keeps what there is."""


class StopWatch:
    """The text of a request with stop strings, made as tokens arrive.

    Its stop must be found also when nobody reads.
    """

    __slots__ = ("detokenizer", "texts")

    def __init__(self, detokenizer: Detokenizer) -> None:
        """Watch the text that `detokenizer` gives."""
        self.detokenizer = detokenizer
        self.texts: list[str] = []

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt_ids: Ids, params: SamplingParams) -> Self:
        """Make one for a request.

        Raises:
            InternalError: the tokenizer's decoder cannot be made.
        """
        try:
            return cls(Detokenizer(tokenizer, prompt_ids, params))
        except Exception as fault:
            raise InternalError(f"decoding failed: {fault}") from fault

    def reader(self) -> Callable[[int], str]:
        """Return what gives the text of each token in turn, once it has been fed."""
        texts = iter(self.texts)
        return lambda _: next(texts)

    def feed(self, token_id: int) -> str | None:
        """Take one token; return the stop string that it completed, if any."""
        self.texts.append("")  # also if decoding fails: one text a token
        self.texts[-1] = self.detokenizer.feed(token_id)
        return self.detokenizer.stop_match


class Consumable(Protocol):
    """A stream that one task at a time consumes."""

    consumer: asyncio.Task[Any] | None

    def cancel(self) -> None:
        """End it, now."""


class Consumers:
    """The tasks that consume an engine's streams, so that a *cancelled* one ends them.

    Its traceback may keep a stream alive for a long time, so the stream's finaliser alone
    would be late. A consumer that ends normally may hand its stream on. Streams are held
    weakly here, and a stream lets go of a task that has ended.
    """

    def __init__(self) -> None:
        """Follow nobody yet."""
        self._streams: weakref.WeakKeyDictionary[asyncio.Task[Any], weakref.WeakSet[Consumable]] = (
            weakref.WeakKeyDictionary()
        )

    def follow(self, stream: Consumable) -> None:
        """Note that the current task consumes `stream` from now on."""
        task = asyncio.current_task()
        if task is None or stream.consumer is task:
            return
        stream.consumer = task
        streams = self._streams.get(task)
        if streams is None:
            streams = self._streams[task] = weakref.WeakSet()
            task.add_done_callback(self._ended)
        streams.add(stream)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        streams = self._streams.pop(task, ())
        for stream in list(streams):
            if stream.consumer is task:  # not handed on
                stream.consumer = None
                if task.cancelled():
                    stream.cancel()


class TokenStream:
    """One request's answer: iterate it for tokens, await it for the whole, or enter it.

    `async for token in stream` gives each `Token`; the last has a `finish_reason`.
    `await stream` gives the `Completion`, also after iterating. `async with stream` closes
    it at the end. There is one consumer at a time. Dropping or breaking out of an
    unfinished stream cancels its request.

    Raises (from iterating and awaiting alike):
        RequestError: the prompt was empty, too long, or malformed.
        DeviceError: a step of this request failed, or the device was lost.
        EngineClosed: the engine closed underneath.
        InternalError: a bug of aneuron or of the tokenizer.
        RuntimeError: a second task consumes it at the same time.
    """

    def __init__(self, owner: StreamOwner, request: Request) -> None:
        """Made by `Engine.generate` and `Engine.chat`."""
        self._owner = owner
        self._loop = owner.loop
        self._new_future = owner.loop.create_future
        self._request = request
        self._step: Callable[[int], str | None] | None = None
        self._detokenizer: Detokenizer | None = None
        self._pieces: list[str] = []
        self._num_read = 0
        self._num_ready = 0
        self._ended = False
        self._is_whole = False  # the pieces of an aborted answer hold its unread text, too
        self._fault: AneuronError | None = None
        self._busy = False
        self.consumer: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return f"<TokenStream {self._request!r}>"

    @property
    def request_id(self) -> str:
        """The request's name, yours or one that the engine chose."""
        return self._request.name

    # ── consuming ───────────────────────────────────────────────────────────────────────

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """Return the next token; cancelling the waiting task cancels the request."""
        # Every token of every consumer comes through here: one coroutine, few calls. Locals
        # come before calls, since 3.11 is slow at calling what an instance holds.
        if self._busy:
            raise RuntimeError(_BUSY)
        if self.consumer is not current_task(self._loop):
            self._owner.consumers.follow(self)
        request, index = self._request, self._num_read
        ids = request.output_ids
        if index == len(ids) and request.finish_reason is None:
            new_future = self._new_future
            self._num_ready = 0
            self._busy = True
            try:
                while True:
                    waiter = request.waiter = new_future()
                    await waiter
                    if index < len(ids) or request.finish_reason is not None:
                        break
            except CancelledError:
                self.cancel()
                raise
            finally:
                self._busy = False
                request.waiter = None  # also when this coroutine is closed
        elif self._num_ready < _YIELD_EVERY:
            self._num_ready += 1
        else:  # before a token is taken: none is lost here
            self._num_ready = 1
            await self._waiting(asyncio.sleep(0))
        if request.finish_reason is not None:
            return self._next_of_finished()
        token_id = ids[index]
        self._num_read = index + 1
        try:
            step = self._step or self._make_step()
            text = step(token_id) or ""
        except Exception as fault:
            raise self._decoding_failed(fault) from fault
        self._pieces.append(text)
        return Token(text, token_id, index)

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._collect().__await__()

    async def _collect(self) -> Completion:
        self._claim()
        if not self._request.is_finished:
            await self._waiting(self._request.wait_end(self._loop))
        error = self._fault or self._request.error
        if error is not None:
            self._ended = True
            raise error.copy()
        async for _ in self:
            pass
        if self._request.finish_reason is FinishReason.ABORT:
            await self._read_what_an_abort_left()
        return self._completion()

    async def _read_what_an_abort_left(self) -> None:
        """Turn unread tokens into text: they are no items any more, but in the completion."""
        request = self._request
        while self._num_read < len(request.output_ids):
            self._pieces.append(self._text(request.output_ids[self._num_read]))
            self._num_read += 1
            if self._num_read % _YIELD_EVERY == 0:
                await self._waiting(asyncio.sleep(0))
        if not self._is_whole:
            self._is_whole = True
            self._pieces.append(self._held_text())

    async def _waiting(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait as the one consumer; cancelled, the request ends with the wait."""
        self._busy = True
        try:
            await work
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._busy = False

    def _claim(self) -> None:
        if self._busy:
            raise RuntimeError(_BUSY)
        self._owner.consumers.follow(self)

    def _next_of_finished(self) -> Token:
        request = self._request
        index, ids, reason = self._num_read, request.output_ids, request.finish_reason
        if self._ended:
            raise StopAsyncIteration
        if index < len(ids) and reason is not FinishReason.ABORT:
            self._num_read += 1
            if index + 1 == len(ids) and reason in (FinishReason.STOP, FinishReason.LENGTH):
                return self._last(index, ids[index])
            text = self._text(ids[index])
            self._pieces.append(text)
            return Token(text, ids[index], index)
        if request.error is not None:
            self._ended = True
            raise request.error.copy()
        return self._last(index, None)

    def _text(self, token_id: int) -> str:
        """Return the text of the next token."""
        try:
            return (self._step or self._make_step())(token_id) or ""
        except Exception as fault:
            raise self._decoding_failed(fault) from fault

    def _held_text(self) -> str:
        try:
            return self._text_source().flush()
        except Exception as fault:
            raise self._decoding_failed(fault) from fault

    def _decoding_failed(self, fault: Exception) -> AneuronError:
        self._fault = InternalError(f"decoding failed: {fault}")
        self._fault.__cause__ = fault
        self._ended = True
        self.cancel()
        return self._fault.copy()

    def _make_step(self) -> Callable[[int], str | None]:
        watch, source = self._request.watch, self._text_source()
        if isinstance(watch, StopWatch):
            self._step = watch.reader()
        else:
            self._step = source.feed if self._request.params.stop else source.step
        return self._step

    def _text_source(self) -> Detokenizer:
        if self._detokenizer is None:
            request = self._request
            if isinstance(request.watch, StopWatch):
                self._detokenizer = request.watch.detokenizer
            else:
                prompt = () if request.prompt_ids is None else request.prompt_ids
                self._detokenizer = Detokenizer(self._owner.tokenizer, prompt, request.params)
        return self._detokenizer

    def _last(self, index: int, token_id: int | None) -> Token:
        """Return the last item: an end id shows no text, held-back text comes out.

        After an abort no token is given out any more; unread ones are in the completion.
        """
        self._ended = True
        request = self._request
        if request.finish_reason is FinishReason.ABORT:
            return Token("", None, index, 0, FinishReason.ABORT)
        by_string = isinstance(request.stop_reason, str)
        text = ""
        if token_id is not None and not request.last_is_end_id:
            text = self._text(token_id)
        if not by_string:
            text += self._held_text()
        self._pieces.append(text)
        return Token(text, token_id, index, 0, request.finish_reason, request.stop_reason)

    def _completion(self) -> Completion:
        request = self._request
        assert request.finish_reason is not None
        choice = Choice(
            0,
            "".join(self._pieces),
            request.output_ids.tolist(),
            request.finish_reason,
            request.stop_reason,
            request.abort_reason,
        )
        usage = Usage(request.prompt_len, len(request.output_ids))
        return Completion(request.name, [choice], usage, _timing(request))

    # ── ending ──────────────────────────────────────────────────────────────────────────

    def cancel(self) -> None:
        """Forget the request, now; from any task of the loop, as often as you like.

        Iteration ends with a last item whose `finish_reason` is "abort".
        """
        self._owner.end(self._request, FinishReason.ABORT)

    def stop(self) -> None:
        """End the answer and keep what there is; its `finish_reason` is "stop"."""
        self._owner.end(self._request, FinishReason.STOP)

    async def aclose(self) -> None:
        """Cancel if unfinished, and wait until the request's blocks are free."""
        self.cancel()
        await self._request.wait_released(self._owner.loop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        """Post a cancel for an abandoned request; may run in any thread."""
        request = getattr(self, "_request", None)
        if request is not None and not request.is_finished:
            try:
                self._owner.loop.call_soon_threadsafe(self._owner.end, request, FinishReason.ABORT)
            except RuntimeError:
                return  # the loop has closed, and the engine with it


def _timing(request: Request) -> Timing:
    def since_arrival(when_s: float | None) -> float | None:
        return None if when_s is None else when_s - request.arrival_s

    total_s = since_arrival(request.finished_s)
    assert total_s is not None
    return Timing(
        since_arrival(request.first_scheduled_s), since_arrival(request.first_token_s), total_s
    )
