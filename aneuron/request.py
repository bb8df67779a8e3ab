"""A request: the one record that the engine and the stream of its user share.

The engine writes (scheduler and materializer, on the loop), the stream reads. The request
never knows the stream: it wakes a bare future, so an abandoned stream can be collected
while its request is still in flight.
"""

from __future__ import annotations

from array import array
from collections import deque
from contextvars import copy_context
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aneuron.errors import InvalidRequest

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Iterator

    from aneuron.errors import AneuronError
    from aneuron.outputs import AbortReason, FinishReason
    from aneuron.params import SamplingParams

__all__ = [
    "Matcher",
    "Request",
    "RequestState",
    "TextWatch",
    "Waker",
    "make_request",
    "wake",
]

_WAKES_AT_ONCE = 64  # consumers that may run in one turn of the loop


class RequestState(Enum):
    """Where a request stands."""

    NEW = auto()  # generate() made it; its prompt is being turned into ids
    WAITING = auto()  # add(): has its ids, holds no slot and no block
    RUNNING = auto()  # schedule() admitted it: holds a slot and blocks
    PREEMPTED = auto()  # schedule() took its blocks; resumes once its tokens have arrived
    FINISHED = auto()  # finish(); slot and blocks come free with its last step in flight


class TextWatch(Protocol):
    """Turns tokens into text as they arrive; only requests with stop strings have one."""

    def feed(self, token_id: int) -> str | None:
        """Take one token; return the stop string that it completed, if any."""


class Matcher(Protocol):
    """Where a request stands in its grammar; only requests with a grammar have one."""

    error: str | None  # it broke, or was given a token that it does not allow

    @property
    def is_stopped(self) -> bool:
        """Nothing can follow."""

    def advance(self, token: int) -> None:
        """Take one token."""


class Request:
    """One submission: prompt, what it asks for, its output columns and its end."""

    __slots__ = (
        "_release_waiters",
        "abort_reason",
        "arrival_s",
        "bad_word_ids",
        "block_digests",
        "cached_tokens",
        "choice",
        "digest_epoch",
        "end_ids",
        "error",
        "finish_reason",
        "finished_s",
        "first_scheduled_s",
        "first_token_s",
        "forks",
        "hook_context",
        "is_released",
        "last_is_end_id",
        "logprobs",
        "made_way_up_to",
        "matcher",
        "name",
        "on_finish",
        "output_ids",
        "params",
        "priority",
        "prompt_ids",
        "prompt_logprobs",
        "request_id",
        "seed",
        "slot",
        "state",
        "stop_reason",
        "unforked",
        "waiter",
        "watch",
    )

    def __init__(
        self,
        request_id: int,
        name: str,
        params: SamplingParams,
        *,
        arrival_s: float,
        priority: int = 0,
        choice: int = 0,
    ) -> None:
        """Make a new request.

        Args:
            request_id: internal, unique, in the order of the calls.
            name: the caller's.
            params: what to sample.
            arrival_s: when the call was made, on the scheduler's clock.
            priority: less is sooner.
            choice: which of the `params.n` answers it is; each is a request of its own.
        """
        self.request_id = request_id
        self.name = name
        self.params = params
        self.seed = params.noise_seed(choice)
        self.arrival_s = arrival_s
        self.priority = priority
        self.end_ids: tuple[int, ...] = ()  # that end its answer, beside its stop ids
        self.bad_word_ids: tuple[tuple[int, ...], ...] = ()  # how tokens spell its bad words
        self.choice = choice
        # Choice 0 has the others, and computes the prompt for all.
        self.forks: tuple[Request, ...] = ()
        self.unforked: tuple[Request, ...] = ()  # the same until its last chunk is planned
        self.made_way_up_to = 0  # the newest request's id when it was preempted
        self.cached_tokens: int | None = None  # of the prompt; None before it is scheduled
        self.block_digests: list[bytes] = []  # of its leading full blocks, as far as known
        self.digest_epoch = -1  # of the cache that they belong to
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.state = RequestState.NEW
        self.prompt_ids: np.ndarray | None = None  # int32 [prompt]
        self.output_ids = array("i")
        # Of each of them, if wanted: its own, and ids and values of the likeliest.
        self.logprobs: list[tuple[float, np.ndarray, np.ndarray]] | None = (
            None if params.logprobs is None else []
        )
        self.prompt_logprobs: list[tuple[float, np.ndarray, np.ndarray] | None] | None = None
        self.slot = -1
        self.watch: TextWatch | None = None
        self.matcher: Matcher | None = None  # of its grammar
        # Of the call, for its hooks; only those with hooks have one.
        self.hook_context = copy_context() if params.logits_processors else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.abort_reason: AbortReason | None = None
        self.error: AneuronError | None = None
        self.is_released = False
        self.last_is_end_id = False  # ended by an end or stop id, which shows no text
        self.on_finish: list[Callable[[Request], None]] = []
        self.waiter: asyncio.Future[None] | None = None  # the consumer's, for its next token
        self._release_waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<Request {self.name} {self.state.name} {len(self.output_ids)} tokens>"

    @property
    def choices(self) -> tuple[Request, ...]:
        """All answers to its prompt, from the first one's point of view."""
        return (self, *self.forks)

    @property
    def is_finished(self) -> bool:
        """No more tokens will come."""
        return self.state is RequestState.FINISHED

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt; 0 while it is not known."""
        return 0 if self.prompt_ids is None else len(self.prompt_ids)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether it must be computed whatever of it is cached: logprobs of it are missing."""
        if self.params.prompt_logprobs is None or self.choice:
            return False
        return self.prompt_logprobs is None or None in self.prompt_logprobs[1:]

    def limit(self, most: int) -> int:
        """Return at how many tokens it ends by length; `most` is what any request may have."""
        max_tokens = self.params.max_tokens
        return most if max_tokens is None else min(self.prompt_len + max_tokens, most)

    def token_ids(self) -> np.ndarray:
        """Return prompt and output so far, int32 [tokens]; not to be written to."""
        assert self.prompt_ids is not None, "its prompt is not known yet"
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.asarray(self.output_ids, np.int32)])

    def finish(
        self,
        reason: FinishReason,
        *,
        now_s: float,
        stop_reason: str | int | None = None,
        abort_reason: AbortReason | None = None,
        error: AneuronError | None = None,
    ) -> None:
        """Record the end; the caller sees to slot and blocks."""
        self.state = RequestState.FINISHED
        self.finish_reason = reason
        self.stop_reason, self.abort_reason, self.error = stop_reason, abort_reason, error
        self.finished_s = now_s
        wake(self)
        for callback in self.on_finish:
            callback(self)
        self.on_finish.clear()

    def amend(
        self,
        reason: FinishReason,
        *,
        stop_reason: str | None = None,
        error: AneuronError | None = None,
    ) -> None:
        """Let what the very last token's text showed win over an end by length."""
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def release(self) -> None:
        """Record that it holds nothing any more, and wake who waits for that."""
        self.is_released = True
        self.block_digests = []
        for waiter in self._release_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._release_waiters.clear()

    async def wait_released(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until slot and blocks are free."""
        if not self.is_released:
            waiter = loop.create_future()
            self._release_waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._release_waiters:
                    self._release_waiters.remove(waiter)


def make_request(
    ids: Iterator[int],
    name: str | None,
    params: SamplingParams,
    *,
    arrival_s: float,
    priority: int = 0,
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
) -> Request:
    """Return the request of a call: choice 0, which has the others.

    Args:
        ids: internal ids to come.
        name: the caller's, or None for one of ours.
        params: what to sample, and how many choices.
        arrival_s: when the call was made, on the scheduler's clock.
        priority: less is sooner.
        bad_word_ids: how tokens spell its bad words.

    Raises:
        InvalidRequest: the name is no name.
    """
    number = next(ids)
    name = f"req-{number}" if name is None else name
    if not name or type(name) is not str:
        raise InvalidRequest("request_id must be a non-empty string", param="request_id")
    numbers = (number, *(next(ids) for _ in range(params.n - 1)))
    first, *others = (
        Request(one, name, params, arrival_s=arrival_s, priority=priority, choice=choice)
        for choice, one in enumerate(numbers)
    )
    for one in (first, *others):
        one.bad_word_ids = bad_word_ids
    first.forks = first.unforked = tuple(others)
    return first


def wake(request: Request) -> bool:
    """Wake the consumer that waits for a request's next token, or end; say if there was one."""
    waiter = request.waiter
    if waiter is None:
        return False
    request.waiter = None
    if not waiter.done():  # cancelled
        waiter.set_result(None)
    return True


class Waker:
    """Wakes consumers, a few in each turn of the loop.

    All of a large batch at once would hold up everything else on the loop: 500 streams of a server
    take some 25 ms. Who is woken late finds its tokens all the same, perhaps those of two steps.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake consumers on this loop."""
        self._loop = loop
        self._left: deque[Request] = deque()

    def wake(self, requests: Iterable[Request]) -> None:
        """Wake the consumers of these, in order, and behind those that are to be woken yet."""
        is_at_it = bool(self._left)
        self._left.extend(requests)
        if not is_at_it:
            self._wake_some()

    def _wake_some(self) -> None:
        left, count = self._left, 0
        while left and count < _WAKES_AT_ONCE:
            count += wake(left.popleft())
        if left:
            self._loop.call_soon(self._wake_some)
