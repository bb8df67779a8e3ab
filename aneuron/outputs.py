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
    """Why a request ended."""

    STOP = "stop"  # an end id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the length limit
    ABORT = "abort"  # see AbortReason
    ERROR = "error"  # its device step, or the engine, failed


class AbortReason(StrEnum):
    """Who ended an aborted request."""

    CLIENT = "client"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


class TokenLogprobs(NamedTuple):
    """Log probabilities at one token, as the model has them before penalties and temperature."""

    logprob: float  # of the token
    top: tuple[tuple[int, float], ...]  # (id, logprob), the likeliest first


@dataclass(slots=True)
class Token:
    """One item of a stream.

    `text` may be empty while a character or a possible stop string is incomplete; what
    was held back comes with a later item. `token_id` is None only on the last item of a
    request that was aborted or stopped from outside, which carries no token.
    """

    text: str
    token_id: int | None
    index: int  # position among the new tokens, from 0
    choice: int = 0
    finish_reason: FinishReason | None = None  # on the last item only
    stop_reason: str | int | None = None  # the stop string or stop id that matched
    logprobs: TokenLogprobs | None = None  # if asked for

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int  # of all choices
    cached_tokens: int = 0  # of the prompt's, found in the prefix cache and not computed

    @property
    def total_tokens(self) -> int:
        """Prompt and new tokens together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of a request went, in seconds of the loop's clock."""

    queued_s: float | None  # call → first scheduled
    ttft_s: float | None  # call → first token
    total_s: float  # call → end


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer: its text, ids and why it ended."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    abort_reason: AbortReason | None = None
    logprobs: list[TokenLogprobs] | None = None  # of each token, if asked for


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; the properties are those of choice 0."""

    request_id: str
    choices: list[Choice]
    usage: Usage
    timing: Timing = field(repr=False)
    # Of each token of the prompt but the first, if asked for.
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
    """How often the flow broke for one reason, and the time it cost."""

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
