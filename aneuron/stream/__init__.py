"""What a user holds of a request: the `TokenStream`.

Comes in: the columns that the engine writes to a `Request`. Goes out: `Token` items and a
`Completion`. Runs in the consumer's task; a slow or absent consumer costs the engine
nothing, since unread tokens are ids in a column and become text when they are read.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError, current_task
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, Self

from aneuron.errors import AneuronError, InternalError
from aneuron.outputs import Completion, FinishReason, Token, Usage
from aneuron.stream.consumers import Consumers
from aneuron.stream.misuse import AsyncEntered, TokensAwaited
from aneuron.stream.reader import ChoiceReader, StopWatch, is_settled, timing_of, wait_settled

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    from aneuron.outputs import TokenLogprobs
    from aneuron.prompt import Tokenizer
    from aneuron.request import Request

__all__ = ["AsyncEntered", "Consumers", "StopWatch", "StreamOwner", "TokenStream"]

_BUSY = "another task consumes this TokenStream; a stream has one consumer"
_YIELD_EVERY = 64  # ready tokens that a stream gives before it lets others run


class StreamOwner(Protocol):
    """What a stream needs of its engine, and why it keeps the engine alive."""

    loop: asyncio.AbstractEventLoop
    tokenizer: Tokenizer
    consumers: Consumers

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside: ABORT forgets it, STOP keeps what there is."""


class TokenStream(TokensAwaited):
    """One request's answer: iterate it for tokens, await it for the whole, or enter it.

    `async for token in stream` gives each `Token`; the last has a `finish_reason`.
    `await stream` gives the `Completion`, also after iterating. `async with stream` closes
    it at the end. There is one consumer at a time. Dropping or breaking out of an
    unfinished stream cancels its request.

    With several choices (`n`) their tokens come as they arrive, each with its `choice`, in
    turn where many are ready; each choice has a last item of its own. One that fails ends
    the others: tokens that are there come first, then its error.

    Raises (from iterating and awaiting alike):
        RequestError: the prompt was empty, too long, or malformed.
        DeviceError: a step of this request failed, or the device was lost.
        EngineClosed: the engine closed underneath.
        InternalError: a bug of aneuron or of the tokenizer.
        RuntimeError: a second task consumes it at the same time.
    """

    # Slots: the reader takes a cache line more a token, and these take one less.
    __slots__ = (
        "__weakref__",
        "_busy",
        "_failure",
        "_fault",
        "_live",
        "_loop",
        "_new_future",
        "_num_ready",
        "_owner",
        "_readers",
        "_request",
        "_sole",
        "consumer",
    )

    def __init__(self, owner: StreamOwner, request: Request) -> None:
        """Made by `Engine.generate` and `Engine.chat`; `request` is choice 0."""
        self._owner = owner
        self._loop = owner.loop
        self._new_future = owner.loop.create_future
        self._request = request
        self._readers = [ChoiceReader(owner.tokenizer, one) for one in request.choices]
        is_plain = not request.forks and request.logprobs is None
        self._sole = self._readers[0] if is_plain else None
        self._live = deque(self._readers)  # with items to come; whose turn it is, first
        self._num_ready = 0
        self._failure: AneuronError | None = None  # of a choice, to be raised after what is ready
        self._fault: AneuronError | None = None  # of the decoder
        self._busy = False
        self.consumer: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return f"<TokenStream {self._request!r}>"

    @property
    def request_id(self) -> str:
        """The request's name, yours or one that the engine chose."""
        return self._request.name

    @property
    def usage(self) -> Usage:
        """Tokens so far, those included that were not read yet."""
        request = self._request
        num_tokens = sum(len(one.output_ids) for one in request.choices)
        return Usage(request.prompt_len, num_tokens, request.cached_tokens or 0)

    # ── iterating ───────────────────────────────────────────────────────────────────────

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """Return the next token; cancelling the waiting task cancels the request."""
        # Every token of every consumer comes through here: one coroutine, few calls. Locals
        # come before calls, since 3.11 is slow at calling what an instance holds.
        if self._busy or self.consumer is not current_task(self._loop):
            self._claim()
        reader = self._sole
        if reader is None:
            return await self._next_of_several()
        request, index = reader.request, reader.num_read
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
            return self._take_turn()
        token_id = ids[index]
        reader.num_read = index + 1
        try:
            step = reader.step or reader.make_step()
            text = step(token_id) or ""
        except Exception as fault:
            raise self._decoding_failed(fault) from fault
        reader.pieces.append(text)
        return Token(text, token_id, index)

    async def _next_of_several(self) -> Token:
        """Return the next token of the choices, in turn among those that have one."""
        if not self._turn_to_ready():
            self._num_ready = 0
            await self._waiting(self._wait_ready())
        elif self._num_ready < _YIELD_EVERY:
            self._num_ready += 1
        else:  # before a token is taken, as above
            self._num_ready = 1
            await self._waiting(asyncio.sleep(0))
        return self._take_turn()

    def _turn_to_ready(self) -> bool:
        """Let it be the turn of a choice with an item, if any has one; False: to be waited for."""
        live = self._live
        for _ in range(len(live)):
            if live[0].is_ready:
                return True
            live.rotate(-1)
        return not live

    async def _wait_ready(self) -> None:
        """Wait until a choice has an item: one future wakes for all of them."""
        waiting = [reader.request for reader in self._live]
        try:
            while not self._turn_to_ready():
                waiter = self._new_future()
                for request in waiting:
                    request.waiter = waiter
                await waiter
        finally:
            for request in waiting:
                request.waiter = None  # also when this coroutine is closed

    def _take_turn(self) -> Token:
        """Return the item of the choice whose turn it is, and let it be the next one's."""
        live = self._live
        while live:
            reader = live.popleft()
            if (item := self._item_of(reader)) is not None:
                if item.finish_reason is None:
                    live.append(reader)
                return item
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure.copy()
        raise StopAsyncIteration

    def _item_of(self, reader: ChoiceReader) -> Token | None:
        """Return the next item of a choice that is ready; None if it has failed, or another."""
        request, has_failed = reader.request, self._failure is not None
        reason = request.finish_reason
        try:
            if reader.has_unread and (reason is not FinishReason.ABORT or has_failed):
                return reader.read()
            if request.error is None and not (reason is FinishReason.ABORT and has_failed):
                return reader.read_end()
        except Exception as fault:
            raise self._decoding_failed(fault) from fault
        if request.error is not None and not has_failed:
            self._fail(request.error)
        return None

    def _fail(self, error: AneuronError) -> None:
        """End the other choices with one that failed; their tokens so far still come."""
        aborted = [one for one in self._live if one.request.finish_reason is FinishReason.ABORT]
        for reader in aborted:  # before this: nothing more of it is given out
            self._live.remove(reader)
        self._failure = error
        self.cancel()

    def _decoding_failed(self, fault: Exception) -> AneuronError:
        self._fault = InternalError(f"decoding failed: {fault}")
        self._fault.__cause__ = fault
        self._give_up()
        return self._fault.copy()

    def _give_up(self) -> None:
        """Let nothing come after an error that is raised now."""
        self._live.clear()
        self._failure = None
        self.cancel()

    async def take(self, most: int = _YIELD_EVERY) -> list[Token]:
        """Return the next item and all others that are there already; nothing at the end.

        Raises what iterating does, once what came before has been given out.
        """
        try:
            items = [await self.__anext__()]
        except StopAsyncIteration:
            return []
        try:
            while len(items) < most and self._has_item():
                items.append(await self.__anext__())
        except AneuronError as error:  # decoding failed
            self._failure = error  # for the next call
        return items

    def _has_item(self) -> bool:
        """Whether the next item is there, and no error."""
        requests = [reader.request for reader in self._live]
        return not any(one.error for one in requests) and any(one.is_ready for one in self._live)

    # ── awaiting ────────────────────────────────────────────────────────────────────────

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._collect().__await__()

    async def _collect(self) -> Completion:
        self._claim()
        choices = self._request.choices
        if not is_settled(choices):
            await self._waiting(wait_settled(choices))
        error = self._fault or next((one.error for one in choices if one.error), None)
        if error is not None:
            self._give_up()
            raise error.copy()
        async for _ in self:
            pass
        for reader in self._readers:
            if reader.request.finish_reason is FinishReason.ABORT:
                await self._read_what_an_abort_left(reader)
        of_prompt = await self._readers[0].prompt_logprobs()
        return self._completion(of_prompt)

    async def _read_what_an_abort_left(self, reader: ChoiceReader) -> None:
        """Turn unread tokens into text: they are no items any more, but in the completion."""
        try:
            while reader.read_unseen():
                if reader.num_read % _YIELD_EVERY == 0:
                    await self._waiting(asyncio.sleep(0))
        except Exception as fault:
            raise self._decoding_failed(fault) from fault

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

    def _completion(self, of_prompt: list[TokenLogprobs | None] | None) -> Completion:
        request, choices = self._request, [reader.choice() for reader in self._readers]
        return Completion(request.name, choices, self.usage, timing_of(request.choices), of_prompt)

    # ── ending ──────────────────────────────────────────────────────────────────────────

    def cancel(self) -> None:
        """Forget the request, now; from any task of the loop, as often as you like.

        Iteration ends with a last item of each unfinished choice, whose `finish_reason` is
        "abort".
        """
        self._owner.end(self._request, FinishReason.ABORT)

    def stop(self) -> None:
        """End the answer and keep what there is; its `finish_reason` is "stop"."""
        self._owner.end(self._request, FinishReason.STOP)

    async def aclose(self) -> None:
        """Cancel if unfinished, and wait until the request's blocks are free."""
        self.cancel()
        for one in self._request.choices:
            await one.wait_released(self._owner.loop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        """Post a cancel for an abandoned request; may run in any thread."""
        request = getattr(self, "_request", None)
        if request is not None and not all(one.is_finished for one in request.choices):
            try:
                self._owner.loop.call_soon_threadsafe(self._owner.end, request, FinishReason.ABORT)
            except RuntimeError:
                return  # the loop has closed, and the engine with it
