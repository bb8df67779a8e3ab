"""Many prompts in one call: the `CompletionStream`.

Comes in: prompts, drawn from an iterable as earlier ones end. Goes out: each `Completion`
as it is finished. Runs in the consumer's task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from aneuron.errors import AneuronError, DeviceError, EngineClosed, InvalidRequest, Overloaded
from aneuron.stream import Consumers, TokenStream
from aneuron.stream.misuse import AnswersIterated
from aneuron.stream.reader import is_settled

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.outputs import Completion
    from aneuron.request import Request

__all__ = ["CompletionStream"]


class CompletionStream(AnswersIterated):
    """Answers to many prompts, each as it is finished: `(index of the prompt, Completion)`.

    A bounded number of prompts is submitted at a time. A prompt that is refused, or an
    answer that failed, raises its error from iteration in its turn, with the note which
    prompt it was; iterating on goes on with the others. Where the engine has no room
    (`max_waiting`), the next prompt waits until an answer of this call has been taken; only
    if there is none to come, `Overloaded` is its error. Leaving early, closing or dropping
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
        self._window = window
        self._num_drawn = 0
        self._held: list[Any] = []  # the last prompt drawn, if the engine had no room for it
        self._answers: dict[int, TokenStream | Exception] = {}
        self._news: asyncio.Queue[int] = asyncio.Queue()  # answers that may have settled
        self._busy = False
        self.consumer: asyncio.Task[Any] | None = None
        self._fill()

    def _fill(self) -> None:
        """Submit prompts until the window is full, or none is left, or none gets in now."""
        while len(self._answers) < self._window and self._submit_next():
            pass

    def _submit_next(self) -> bool:
        """Draw and submit a prompt; what that raises is an answer, too, in its turn.

        Returns:
            Whether there is an answer more.
        """
        index, tell = self._num_drawn, self._news.put_nowait  # a request must not hold us
        try:
            prompt = self._held.pop() if self._held else next(self._prompts)
        except StopIteration:
            return False
        except Exception as error:  # noqa: BLE001  the caller's own iterator may raise anything
            self._prompts = iter(())  # it is over
            self._refuse(index, error)
            return True
        try:
            self._answers[index] = stream = self._submit(prompt)
        except AneuronError as error:
            if isinstance(error, Overloaded) and self._streams():
                self._held.append(prompt)  # until one of ours has ended
                return False
            if isinstance(error, EngineClosed | DeviceError):
                self._prompts = iter(())  # the engine is over: draw no more
            self._refuse(index, error)
        else:
            for choice in _choices_of(stream):
                choice.on_finish.append(lambda _: tell(index))
        self._num_drawn += 1
        return True

    def _refuse(self, index: int, error: Exception) -> None:
        self._answers[index] = error
        self._news.put_nowait(index)

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
        index = await self._next_settled()
        answer = self._answers.pop(index)
        if isinstance(answer, TokenStream):
            answer.cancel()  # if one choice has failed: the others make room
        self._fill()
        try:
            if isinstance(answer, Exception):
                raise answer
            return index, await answer
        except AneuronError as error:
            error.prompt_index = index
            error.add_note(f"prompt {index} of generate_many")
            raise

    async def _next_settled(self) -> int:
        """Wait for an answer that is complete, or has failed; return its index."""
        while True:
            index = await self._news.get()
            if not self._answers:  # cancelled meanwhile
                raise StopAsyncIteration
            answer = self._answers.get(index)
            if isinstance(answer, Exception):
                return index
            # Each choice tells its end: one may be of an answer that was given already.
            if answer is not None and is_settled(_choices_of(answer)):
                return index

    def cancel(self) -> None:
        """Cancel what runs, now; from any task, as often as you like."""
        for stream in self._streams():
            stream.cancel()
        self._answers.clear()
        self._held.clear()
        self._prompts = iter(())
        self._news.put_nowait(-1)  # a consumer that waits looks again, whatever runs

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


def _choices_of(stream: TokenStream) -> tuple[Request, ...]:
    return stream._request.choices  # noqa: SLF001
