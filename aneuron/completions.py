"""Many prompts in one call: the `CompletionStream`.

Comes in: prompts, drawn from an iterable as earlier ones end. Goes out: each `Completion`
as it is finished. Runs in the consumer's task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from aneuron.errors import AneuronError, DeviceError, EngineClosed, InvalidRequest
from aneuron.stream import Consumers, TokenStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.outputs import Completion

__all__ = ["CompletionStream"]


class CompletionStream:
    """Answers to many prompts, each as it is finished: `(index of the prompt, Completion)`.

    A bounded number of prompts is submitted at a time. A prompt that is refused, or an
    answer that failed, raises its error from iteration in its turn, with the note which
    prompt it was; iterating on goes on with the others. Leaving early, closing or dropping
    it cancels what runs. There is one consumer at a time.

    Raises (from iterating):
        AneuronError: as `TokenStream`; and whatever your own iterator of prompts raises.
        RuntimeError: a second task iterates at the same time.
    """

    def __init__(
        self,
        prompts: Iterable[Any],
        submit: Callable[[Any], TokenStream],
        consumers: Consumers,
        *,
        window: int,
    ) -> None:
        """Made by `Engine.generate_many`.

        Raises:
            InvalidRequest: `prompts` is no iterable of prompts.
        """
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise InvalidRequest("prompts must be a list of texts or of ids", param="prompts")
        self._consumers = consumers
        self._prompts = iter(prompts)
        self._submit = submit
        self._num_drawn = 0
        self._answers: dict[int, TokenStream | Exception] = {}
        self._finished: asyncio.Queue[int] = asyncio.Queue()
        self._busy = False
        self.consumer: asyncio.Task[Any] | None = None
        for _ in range(window):
            self._submit_next()

    def _submit_next(self) -> None:
        """Draw and submit a prompt; what that raises is an answer, too, in its turn."""
        finished, index = self._finished, self._num_drawn
        try:
            prompt = next(self._prompts)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  the caller's own iterator may raise anything
            self._prompts = iter(())  # it is over
            self._answers[index] = error
            finished.put_nowait(index)
            return
        try:
            self._answers[index] = stream = self._submit(prompt)
        except AneuronError as error:
            if isinstance(error, EngineClosed | DeviceError):
                self._prompts = iter(())  # the engine is over: draw no more
            self._answers[index] = error
            finished.put_nowait(index)
        else:
            stream._request.on_finish.append(lambda _: finished.put_nowait(index))  # noqa: SLF001
        self._num_drawn += 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Completion]:
        """Return the next finished answer."""
        if self._busy:
            raise RuntimeError("another task iterates this CompletionStream; it has one consumer")
        if not self._answers:
            raise StopAsyncIteration
        self._consumers.follow(self)
        self._busy = True
        try:
            return await self._next_answer()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._busy = False

    async def _next_answer(self) -> tuple[int, Completion]:
        index = await self._finished.get()
        answer = self._answers.pop(index, None)
        if answer is None:  # cancelled meanwhile
            raise StopAsyncIteration
        self._submit_next()
        try:
            if isinstance(answer, Exception):
                raise answer
            return index, await answer
        except AneuronError as error:
            error.add_note(f"prompt {index} of generate_many")
            raise

    def cancel(self) -> None:
        """Cancel what runs, now; from any task, as often as you like."""
        for stream in self._streams():
            stream.cancel()
        self._answers.clear()
        self._prompts = iter(())
        self._finished.put_nowait(-1)  # a consumer that waits looks again, whatever runs

    def _streams(self) -> list[TokenStream]:
        return [one for one in self._answers.values() if isinstance(one, TokenStream)]

    async def aclose(self) -> None:
        """Cancel what runs, and wait until its blocks are free."""
        streams = self._streams()
        self.cancel()
        for stream in streams:
            await stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
