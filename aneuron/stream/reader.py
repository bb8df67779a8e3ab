"""`ChoiceReader`: one choice of a request, as its consumer reads it.

Comes in: the columns that the engine writes to a `Request`. Goes out: text, `Token` items and
the `Choice`. Runs in the consumer's task; with stop strings, the text is made where the tokens
arrive, by a `StopWatch`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from aneuron.detokenize import Detokenizer
from aneuron.errors import InternalError
from aneuron.futures import Signal
from aneuron.outputs import Choice, FinishReason, Timing, Token, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from aneuron.params import SamplingParams
    from aneuron.prompt import Ids, Tokenizer
    from aneuron.request import Request

__all__ = ["ChoiceReader", "StopWatch", "is_settled", "timing_of", "wait_settled"]


_SLICE = 256  # tokens of a prompt that are told of before others get a turn


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


class ChoiceReader:
    """Turns the ids of one choice into text and items, each once and in order.

    What the tokenizer's decoder raises comes out of every method that makes text.

    Attributes:
        request: the choice.
        num_read: tokens of it that were read.
        pieces: their texts.
        logprobs: theirs, if asked for.
        step: gives the text of the next token; None before `make_step`.
    """

    __slots__ = (
        "_detokenizer",
        "_is_whole",
        "_tokenizer",
        "logprobs",
        "num_read",
        "pieces",
        "request",
        "step",
    )

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        """Begin before the first token; the decoder is made when it is needed."""
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        self._is_whole = False  # the pieces of an aborted answer hold its unread text, too
        self.request = request
        self.num_read = 0
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] | None = None if request.logprobs is None else []
        self.step: Callable[[int], str | None] | None = None

    @property
    def has_unread(self) -> bool:
        """Tokens are there that were not read."""
        return self.num_read < len(self.request.output_ids)

    @property
    def is_ready(self) -> bool:
        """The next item need not be waited for."""
        return self.has_unread or self.request.finish_reason is not None

    def read(self) -> Token:
        """Return the next unread token; it is the last item if its choice ended with it."""
        request, index = self.request, self.num_read
        token_id = request.output_ids[index]
        self.num_read = index + 1
        ended = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if ended and not self.has_unread:
            return self._last(index, token_id)
        text = self._text(token_id)
        self.pieces.append(text)
        return Token(text, token_id, index, request.choice, logprobs=self._logprobs(index))

    def read_end(self) -> Token:
        """Return the last item of a choice that ended without a token for it.

        After an abort no token is given out any more; unread ones are in the completion.
        """
        request = self.request
        if request.finish_reason is FinishReason.ABORT:
            return Token("", None, self.num_read, request.choice, FinishReason.ABORT)
        return self._last(self.num_read, None)

    def _last(self, index: int, token_id: int | None) -> Token:
        """Return the last item: an end id shows no text, held-back text comes out."""
        request = self.request
        text = ""
        if token_id is not None and not request.last_is_end_id:
            text = self._text(token_id)
        if not isinstance(request.stop_reason, str):
            text += self._held_text()
        self.pieces.append(text)
        return Token(
            text,
            token_id,
            index,
            request.choice,
            request.finish_reason,
            request.stop_reason,
            None if token_id is None else self._logprobs(index),
        )

    def _logprobs(self, index: int) -> TokenLogprobs | None:
        """Return those of the token that is read now."""
        if self.logprobs is None or self.request.logprobs is None:
            return None
        self.logprobs.append(_told(self.request.logprobs[index]))
        return self.logprobs[-1]

    async def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Return those of the prompt, if asked for; None where there are none."""
        request = self.request
        if request.params.prompt_logprobs is None or request.prompt_ids is None:
            return None
        told: list[TokenLogprobs | None] = []
        for index, one in enumerate(request.prompt_logprobs or [None] * request.prompt_len):
            told.append(None if one is None else _told(one))
            if index % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        return told

    def read_unseen(self) -> bool:
        """Turn one token that an abort left into text, or at the end what was held back.

        Such tokens are no items any more, but in the completion.

        Returns:
            Whether there is more.
        """
        if self.has_unread:
            self._logprobs(self.num_read)
            self.num_read += 1
            self.pieces.append(self._text(self.request.output_ids[self.num_read - 1]))
        elif not self._is_whole:
            self._is_whole = True
            self.pieces.append(self._held_text())
        return not self._is_whole

    def choice(self) -> Choice:
        """Return the whole of what was read of a finished choice."""
        request = self.request
        assert request.finish_reason is not None
        return Choice(
            request.choice,
            "".join(self.pieces),
            request.output_ids.tolist(),
            request.finish_reason,
            request.stop_reason,
            request.abort_reason,
            self.logprobs,
        )

    def make_step(self) -> Callable[[int], str | None]:
        """Return what gives the text of each token in turn."""
        if not self.request.params.detokenize:
            self.step = _no_text
            return self.step
        watch, source = self.request.watch, self._text_source()
        if isinstance(watch, StopWatch):
            self.step = watch.reader()
        else:
            self.step = source.feed if self.request.params.stop else source.step
        return self.step

    def _text(self, token_id: int) -> str:
        return (self.step or self.make_step())(token_id) or ""

    def _held_text(self) -> str:
        return self._text_source().flush() if self.request.params.detokenize else ""

    def _text_source(self) -> Detokenizer:
        if self._detokenizer is None:
            request = self.request
            if isinstance(request.watch, StopWatch):
                self._detokenizer = request.watch.detokenizer
            else:
                prompt = () if request.prompt_ids is None else request.prompt_ids
                self._detokenizer = Detokenizer(self._tokenizer, prompt, request.params)
        return self._detokenizer


def _no_text(_: int) -> None:
    """Give no text to a token."""


def _told(entry: tuple[float, np.ndarray, np.ndarray]) -> TokenLogprobs:
    chosen, ids, values = entry
    return TokenLogprobs(chosen, tuple(zip(ids.tolist(), values.tolist(), strict=True)))


# ── all choices of a request ────────────────────────────────────────────────────────────


def is_settled(choices: Sequence[Request]) -> bool:
    """Whether all choices have ended, or one has failed, and so the whole answer has."""
    return all(one.is_finished for one in choices) or any(one.error for one in choices)


async def wait_settled(choices: Sequence[Request]) -> None:
    """Wait until `is_settled`; cancelled, nothing has changed."""
    news = Signal()
    for one in choices:
        if not one.is_finished:
            one.on_finish.append(lambda _: news.set())
    while not is_settled(choices):  # looked at later than an end is amended
        await news.wait()


def timing_of(choices: Sequence[Request]) -> Timing:
    """Return the times of an answer: its first token is that of the first choice to have one."""
    arrival_s = choices[0].arrival_s

    def first(times_s: list[float | None]) -> float | None:
        known_s = [when_s for when_s in times_s if when_s is not None]
        return min(known_s) - arrival_s if known_s else None

    ends_s = [one.finished_s for one in choices if one.finished_s is not None]
    assert len(ends_s) == len(choices), "its choices have not all ended"
    return Timing(
        first([one.first_scheduled_s for one in choices]),
        first([one.first_token_s for one in choices]),
        max(ends_s) - arrival_s,
    )
