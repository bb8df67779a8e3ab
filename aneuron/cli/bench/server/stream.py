"""One answer of the server, read event by event: when text came, how it ended, what it counted.

Comes in: pieces of a body with the time they were read at. Goes out: an `Outcome`. Each event is
decoded, since only that tells text from a role, a ping, usage or an error; msgspec skips what is
not asked for, and takes well under a microsecond.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from aneuron.cli.http.http1 import BadAnswer, EventSplitter
from aneuron.cli.http.trouble import message_of

if TYPE_CHECKING:
    from aneuron.cli.http.http1 import ResponseParser

__all__ = ["Outcome", "StreamReader"]

_MAX_BODY = 64 * 1024  # bytes of an answer that is no stream: an error's


@dataclass(slots=True)
class Outcome:
    """What one request gave.

    Attributes:
        due_s: when it was to be sent; of `time.perf_counter`, as all times here.
        sent_s: when the client began with it, before it connected.
        end_s: when its answer was complete, or it failed.
        status: of the answer; 0 if none came.
        error: what kind of failure, else None.
        detail: what was said of it.
        retry_after_s: what the server asked for, with a failure.
        marks: when each event with text came, in seconds.
        prompt_tokens: as the server counted; None if it did not say.
        completion_tokens: likewise, else the number of events with text.
        has_usage: the server counted.
    """

    due_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    status: int = 0
    error: str | None = None
    detail: str = ""
    retry_after_s: float | None = None
    marks: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    has_usage: bool = False


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def _has_text(choice: _Choice) -> bool:
    if choice.text:
        return True
    delta = choice.delta
    return delta is not None and bool(
        delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls
    )


class StreamReader:
    """Takes the body of one answer; `outcome` is what is known so far.

    Args:
        max_events: events with text after which the server is taken to be out of its mind.
    """

    __slots__ = ("_body", "_ended", "_events", "_max_events", "_said_done", "outcome")

    def __init__(self, max_events: int) -> None:
        self.outcome = Outcome()
        self._max_events = max_events
        self._events: EventSplitter | None = None
        self._body = b""  # of an answer that is no stream
        self._ended = False  # a choice had a finish_reason
        self._said_done = False

    def take(self, answer: ResponseParser, body: bytes, now_s: float) -> None:
        """Take a piece of the body of an answer.

        Raises:
            BadAnswer: it is no stream of events, or one that does not end.
        """
        if self._events is None:
            self.outcome.status = answer.status
            if not _is_stream(answer):
                self._body = (self._body + body)[:_MAX_BODY]
                return
            self._events = EventSplitter()
        for data in self._events.feed(body):
            if data == b"[DONE]":
                self._said_done = True
            else:
                self._take_event(data, now_s)

    def _take_event(self, data: bytes, now_s: float) -> None:
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadAnswer(f"an event that is no chunk: {error}") from None
        outcome = self.outcome
        if event.error is not None and outcome.error is None:
            outcome.error, outcome.detail = "stream_error", message_of(data)
        for choice in event.choices or ():
            if _has_text(choice):
                outcome.marks.append(now_s)
            if choice.finish_reason is not None:
                self._ended = True
        if len(outcome.marks) > self._max_events:
            raise BadAnswer(f"more than {self._max_events} events with text")
        if event.usage is not None:
            outcome.has_usage = True
            outcome.prompt_tokens = event.usage.prompt_tokens
            outcome.completion_tokens = event.usage.completion_tokens

    def close(self, answer: ResponseParser) -> None:
        """Take the end of a complete answer: say what was wrong with it, if anything was."""
        outcome = self.outcome
        outcome.status = answer.status
        if answer.status != 200:
            outcome.error, outcome.detail = f"http_{answer.status}", message_of(self._body)
            outcome.retry_after_s = _seconds(answer.headers.get("retry-after"))
        elif not _is_stream(answer):
            outcome.error, outcome.detail = "no_stream", message_of(self._body)
        if not outcome.has_usage:
            outcome.completion_tokens = len(outcome.marks)
        if outcome.error is None:
            if not (self._said_done or self._ended):
                outcome.error, outcome.detail = "truncated", "neither [DONE] nor a finish_reason"
            elif not outcome.completion_tokens:
                outcome.error, outcome.detail = "empty", "an answer without a token"


def _is_stream(answer: ResponseParser) -> bool:
    kind = answer.headers.get("content-type", "")
    return answer.status == 200 and kind.partition(";")[0].strip() == "text/event-stream"


def _seconds(text: str | None) -> float | None:
    """Return the seconds of a Retry-After; of a date, or of nothing, None."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
