"""What users get: tokens, completions and why they ended, counts of the engine.

Plain data, made by streams and by `Engine.stats()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "AbortReason",
    "BreakStats",
    "Choice",
    "Completion",
    "EngineStats",
    "FinishReason",
    "Timing",
    "Token",
    "TokenLogprobs",
    "Usage",
]


class FinishReason(StrEnum):
    """Why a request ended; each is a text, its name in lower case.

    Attributes:
        STOP: an end id, a stop id or a stop string, or `TokenStream.stop`.
        LENGTH: `max_tokens`, or the length limit.
        ABORT: see `AbortReason`.
        ERROR: its device step, or the engine, failed.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class AbortReason(StrEnum):
    """Who ended an aborted request; each is a text, its name in lower case.

    Attributes:
        CLIENT: whoever asked: cancelled, closed, dropped, or `Engine.abort`.
        DEADLINE: its `deadline_s` had passed.
        SHUTDOWN: the engine was closed.
    """

    CLIENT = "client"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


class TokenLogprobs(NamedTuple):
    """Log probabilities at one token, as the model has them before penalties and temperature.

    Attributes:
        logprob: of the token.
        top: pairs of id and log probability, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Token:
    """One item of a stream; `str(token)` is its text.

    Attributes:
        text: empty while a character or a possible stop string is incomplete; what was held
            back comes with a later item.
        token_id: None only on the last item of a request that was aborted or stopped from
            outside, which carries no token.
        index: its position among the new tokens of its choice, from 0.
        choice: which of several answers it belongs to, from 0.
        finish_reason: why the choice ended; on its last item only.
        stop_reason: the stop string or stop id that matched.
        logprobs: if asked for.
    """

    text: str
    token_id: int | None
    index: int
    choice: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: TokenLogprobs | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt_tokens: of the prompt.
        completion_tokens: new ones, of all choices.
        cached_tokens: of the prompt's, found in the prefix cache and not computed.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and new tokens together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of a request went, in seconds of the loop's clock, each from the call on.

    Attributes:
        queued_s: until it was first scheduled; None if it never was.
        ttft_s: until its first token; None if there was none.
        total_s: until its end.
    """

    queued_s: float | None
    ttft_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of a request.

    Attributes:
        index: which of several, from 0.
        text: the new text.
        token_ids: the new ids, an end id included.
        finish_reason: why it ended.
        stop_reason: the stop string or stop id that ended it.
        abort_reason: who aborted it.
        logprobs: of each token, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    abort_reason: AbortReason | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; the properties, and `str(completion)`, are those of choice 0.

    Attributes:
        request_id: the caller's name for it, or one that it was given.
        choices: one, or `n`, by index.
        usage: its token counts.
        timing: where its time went.
        prompt_logprobs: of each token of the prompt, if asked for; None for the first.
    """

    request_id: str
    choices: list[Choice]
    usage: Usage
    timing: Timing = field(repr=False)
    prompt_logprobs: list[TokenLogprobs | None] | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """The new text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """The new ids, an end id included."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop id that ended it."""
        return self.choices[0].stop_reason

    @property
    def abort_reason(self) -> AbortReason | None:
        """Who aborted it."""
        return self.choices[0].abort_reason

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class BreakStats:
    """How often the flow broke for one reason, and the time it cost.

    Attributes:
        count: of breaks.
        seconds: that the step coroutine waited in them, all together.
    """

    count: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine.

    `async_steps + sync_fallback_steps` is the number of steps launched, where the carry
    tells them apart; both are 0 in the synchronous baseline.

    Attributes:
        running, waiting: requests; each choice counts as one.
        in_flight_steps: planned, and not yet taken in.
        num_blocks: of the KV pool.
        free_blocks: that nobody holds, those with cached content included.
        cached_blocks: with content that a prompt may find, held or not.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up, and found.
        preemptions: of requests that gave their blocks up to be computed again.
        draft_tokens, accepted_draft_tokens: verified, and found right (`speculative`).
        steps, decode_steps, async_steps, sync_fallback_steps: launched.
        breaks: by reason.
        prompt_tokens, generation_tokens: of requests admitted, and given out, so far.
        stalled_s: seconds since a step was last taken in, or work came; 0.0 while idle.
    """

    running: int
    waiting: int
    in_flight_steps: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    draft_tokens: int
    accepted_draft_tokens: int
    steps: int
    decode_steps: int
    async_steps: int
    sync_fallback_steps: int
    breaks: dict[str, BreakStats]
    prompt_tokens: int
    generation_tokens: int
    stalled_s: float

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.free_blocks

    @property
    def decode_async_share(self) -> float:
        """Share of decode steps that were fed with a device future; 0.0 if there were none."""
        return self.async_steps / self.decode_steps if self.decode_steps else 0.0
