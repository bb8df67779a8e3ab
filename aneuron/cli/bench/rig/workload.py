"""The load of the benchmarks: sequences in steady decode, and marks along their steps.

Comes in: an engine and how many sequences. Goes out: samples that `StepMarks` takes on the
device's thread, at fixed numbers of steps: nothing polls, and the loop is left alone.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aneuron.cli.bench.rig.words import word_ids
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from aneuron.device.sim import SimDevice
    from aneuron.engine import Engine
    from aneuron.plans import ModelInput, StepRecord
    from aneuron.stream import TokenStream

__all__ = [
    "SHORT_PROMPT",
    "StepMarks",
    "max_tokens_for",
    "open_profile",
    "prompts_of",
    "read_all",
    "steady_windows",
    "submit",
]

S = TypeVar("S")
PROMPT_TOKENS, SHORT_PROMPT = 128, 16  # and i mod 16 more
_PREFILL_TOKENS = 512  # a step of the default configuration


class StepMarks(Generic[S]):
    """Takes a sample at every so many steps of steady decode.

    Called with the inputs of each program, on the device's thread. Steady is a decode step
    with all sequences: that begins when the last prompt is in, and ends when the first
    sequence ends.

    Args:
        num_seqs: how many sequences there are.
        take: returns the sample.
        warmup: steady steps before the first sample.
        every: steps from sample to sample: a window.
        windows: how many windows; one sample more is taken.

    Attributes:
        samples: those taken.
    """

    def __init__(
        self, num_seqs: int, take: Callable[[], S], *, warmup: int, every: int, windows: int
    ) -> None:
        """Count from zero."""
        self.samples: list[S] = []
        self._num_seqs = num_seqs
        self._take = take
        self._every = every
        self._wanted = windows + 1
        self._left = warmup + 1  # steps until the next sample

    def __call__(self, inputs: ModelInput) -> None:
        """Count a program."""
        if not inputs.is_decode or inputs.num_reqs != self._num_seqs:
            return
        self._left -= 1
        if self._left == 0:
            self.samples.append(self._take())
            self._left = self._every if len(self.samples) < self._wanted else -1

    def windows(self) -> Iterable[tuple[S, S]]:
        """Return the samples at the two ends of each window.

        Raises:
            RuntimeError: the sequences ended too early.
        """
        if len(self.samples) < self._wanted:
            raise RuntimeError(f"{len(self.samples)} of {self._wanted} samples were taken")
        return zip(self.samples, self.samples[1:], strict=False)


def max_tokens_for(num_seqs: int, steps: int, *, prompt: int = PROMPT_TOKENS) -> int:
    """Return how long answers must be so that all sequences decode together for `steps`.

    The first one decodes while the prompts of the others are computed, every second step.
    """
    prefills = -(-num_seqs * (prompt + 16) // _PREFILL_TOKENS)
    return steps + 2 * prefills + 32


def prompts_of(num_seqs: int, *, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """Return prompts of `length + i mod 16` ids, all words of `word_tokenizer`."""
    ids = word_ids()
    return [[ids[(i + at) % len(ids)] for at in range(length + i % 16)] for i in range(num_seqs)]


async def read_all(streams: Iterable[TokenStream], *others: Coroutine[Any, Any, None]) -> None:
    """Read each stream to its end, in a consumer task of its own with an empty body.

    Args:
        streams: the streams.
        others: what else is to run beside them, each in a task of its own.
    """
    async with asyncio.TaskGroup() as group:
        for consumer in (*others, *map(_read, streams)):
            group.create_task(consumer)


async def _read(stream: TokenStream) -> None:
    async for _ in stream:
        pass


def submit(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> list[TokenStream]:
    """Submit prompts whose answers have exactly `max_tokens` tokens."""
    return [
        engine.generate(
            prompt_token_ids=ids, max_tokens=max_tokens, ignore_eos=True, temperature=0.0
        )
        for ids in prompts
    ]


def steady_windows(
    records: Sequence[StepRecord], num_seqs: int, *, warmup: int, every: int
) -> list[list[StepRecord]]:
    """Return the whole windows of `every` steps of steady decode that a timeline kept.

    Args:
        records: oldest first.
        num_seqs: how many sequences there are; steady is a decode step with all of them.
        warmup: steady steps that are left out.
        every: steps in a window. It holds one record more: the last of the window before, so
            that a gap between two windows counts, and counts once.

    Raises:
        RuntimeError: there is not one whole window.
    """
    steady = [r for r in records if r.is_decode and len(r.request_ids) == num_seqs]
    steady = steady[warmup:]
    found = [steady[at : at + every + 1] for at in range(0, len(steady) - every, every)]
    if not found:
        raise RuntimeError(f"{len(steady)} steps of steady decode are under a window of {every}")
    return found


def open_profile(name: str) -> SimDevice:
    """Return the simulated device of a latency profile.

    Raises:
        ConfigError: no such profile.
    """
    from aneuron.device.profiles import profile
    from aneuron.device.sim import SimDevice

    try:
        return SimDevice.of_profile(profile(name, param="--profile"), checks_inputs=False)
    except ConfigError as error:
        raise ConfigError(f"--profile: {error}", param="--profile") from error
