"""`aneuron bench churn`: short answers, so that requests come and go at nearly every step.

Comes in: a latency profile, a mean length, a load. Goes out, for each token carry: tokens per
second, the share of decode steps that were fed on the device, idle time, breaks by reason. The
carries take turns, and answer the same requests in the same order.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from aneuron.cli.bench.common import (
    MAX_SEQS,
    JsonFlag,
    ProfileName,
    check_kept,
    check_number,
    default_loop,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.cli.bench.rig.words import word_tokenizer
from aneuron.cli.bench.rig.workload import SHORT_PROMPT, open_profile, prompts_of, read_all, submit
from aneuron.cli.options import CARRIES
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aneuron.engine import Engine
    from aneuron.outputs import EngineStats
    from aneuron.plans import StepRecord
    from aneuron.stream import TokenStream
    from aneuron.timeline import Timeline

__all__ = ["arrivals_of", "churn", "lengths_of"]

_SEED = 0


def churn(
    *,
    profile: ProfileName = "micro",
    num_seqs: int = 64,
    mean_tokens: float = 8.0,
    load: str = "closed",
    loop: str | None = None,
    requests: int = 20,
    rounds: int = 5,
    as_json: JsonFlag = False,
) -> None:
    """Measure short answers with each token carry, in real time, with a profile's programs.

    Args:
        profile: A latency profile; its programs' times.
        num_seqs: Most sequences at a time.
        mean_tokens: Mean length of the answers; lengths are geometric, at least 1.
        load: closed keeps all sequences busy; a number sends requests at random (Poisson),
            at this share of what the slowest carry can do.
        loop: uvloop (the default where there is one) or asyncio.
        requests: Requests of a round, per sequence.
        rounds: Rounds of each carry; the medians count.
        as_json: Print one JSON object in place of the table.
    """
    loop = loop or default_loop()
    check_number("--num-seqs", num_seqs, at_most=MAX_SEQS)
    check_number("--requests", requests, at_least=3)
    check_number("--rounds", rounds)
    check_number("--mean-tokens", mean_tokens)
    share = _parse_load(load)
    lengths = lengths_of(num_seqs * requests, mean_tokens)
    case = _Case(profile, num_seqs, lengths)
    check_kept("--requests", case.num_steps)
    rounds_of = run_on(loop, _measure(case, share, rounds))
    result = {carry: _summary(done) for carry, done in rounds_of.items()}
    if as_json:
        show_json(result)
    else:
        _show(case, load, result, loop)


def _parse_load(text: str) -> float | None:
    """Return the share of capacity, or None for a closed loop."""
    if text == "closed":
        return None
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ConfigError(
            f"--load must be closed, or a number over 0 and up to 1, not {text!r}", param="--load"
        )
    return share


def lengths_of(count: int, mean: float, *, seed: int = _SEED) -> list[int]:
    """Return geometric lengths, the same each time: at least 1 and `mean` on average.

    Geometric is what a model gives that ends each answer with the same chance at each token.
    """
    import numpy as np

    drawn: list[int] = np.random.default_rng(seed).geometric(1 / mean, count).tolist()
    return drawn


def arrivals_of(count: int, rate: float, *, seed: int = _SEED) -> list[float]:
    """Return seconds from the start at which requests come: Poisson, `rate` a second."""
    import numpy as np

    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    when: list[float] = np.cumsum(gaps).tolist()
    return when


# ── measuring ───────────────────────────────────────────────────────────────────────────


class _Case(NamedTuple):
    """What each carry does in each round."""

    profile: str
    num_seqs: int
    lengths: list[int]

    @property
    def num_steps(self) -> float:
        """About how many steps a round in a closed loop takes."""
        decodes = sum(self.lengths) / self.num_seqs
        return decodes + min(decodes, len(self.lengths))  # prefills take turns with them


class _Round(NamedTuple):
    """What one round of one carry gave."""

    tokens_per_s: float
    decode_async_share: float
    idle_share: float
    breaks: Counter[str]


async def _measure(case: _Case, share: float | None, rounds: int) -> dict[str, list[_Round]]:
    if share is None:
        return await _rounds(case, rounds, None)
    capacity = await _rounds(case, rounds, None)
    slowest = min(median(one.tokens_per_s for one in done) for done in capacity.values())
    rate = share * slowest * len(case.lengths) / sum(case.lengths)
    return await _rounds(case, rounds, arrivals_of(len(case.lengths), rate))


async def _rounds(
    case: _Case, rounds: int, arrivals: list[float] | None
) -> dict[str, list[_Round]]:
    done: dict[str, list[_Round]] = {carry: [] for carry in CARRIES}
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}, {'closed loop' if arrivals is None else 'Poisson'}")
        for carry, options in CARRIES.items():
            done[carry].append(await _run(case, options, arrivals))
    return done


async def _run(case: _Case, options: dict[str, Any], arrivals: list[float] | None) -> _Round:
    """Answer all requests once, on an engine of its own."""
    from aneuron.cli.bench.rig.programs import WordModel
    from aneuron.engine import Engine

    length = 64 + max(case.lengths)
    engine = Engine(
        WordModel(2 * case.num_seqs, length),
        device=open_profile(case.profile),
        tokenizer=word_tokenizer(),
        max_num_seqs=case.num_seqs,
        num_kv_blocks=2 * case.num_seqs * (length // 16 + 1),
        timeline=True,
        **options,
    )
    async with engine:
        load = _Load(engine, case)
        await (load.closed() if arrivals is None else load.poisson(arrivals))
        return load.result()


class _Load:
    """Sends the requests of a round, and looks in at both ends of its window.

    The window begins when as many answers have ended as there are sequences, and ends when
    the last request has been sent: so neither the start nor the tail counts.
    """

    def __init__(self, engine: Engine, case: _Case) -> None:
        self._engine = engine
        self._num_seqs = case.num_seqs
        prompts = prompts_of(case.num_seqs, length=SHORT_PROMPT)
        self._requests = iter(
            [(prompts[i % len(prompts)], length) for i, length in enumerate(case.lengths)]
        )
        self._num_left = len(case.lengths)
        self._num_ended = 0
        self._looks: list[tuple[float, EngineStats]] = []

    async def closed(self) -> None:
        """Let each of N clients send its next request when its last one has ended."""
        await read_all((), *(self._client() for _ in range(self._num_seqs)))

    async def poisson(self, arrivals: list[float]) -> None:
        """Send each request at its time, whatever has become of the others."""
        loop = asyncio.get_running_loop()
        started_s, all_sent = loop.time(), loop.create_future()
        async with asyncio.TaskGroup() as group:

            def send() -> None:
                group.create_task(self._answer(self._send()))
                if not self._num_left:
                    all_sent.set_result(None)

            for when_s in arrivals:
                loop.call_at(started_s + when_s, send)
            await all_sent

    async def _client(self) -> None:
        while self._num_left:
            await self._answer(self._send())

    def _send(self) -> TokenStream:
        prompt, length = next(self._requests)
        self._num_left -= 1
        if not self._num_left:
            self._look()
        return submit(self._engine, [prompt], length)[0]

    async def _answer(self, stream: TokenStream) -> None:
        async for _ in stream:
            pass
        self._num_ended += 1
        if self._num_ended == self._num_seqs:
            self._look()

    def _look(self) -> None:
        self._looks.append((monotonic(), self._engine.stats()))

    def result(self) -> _Round:
        """Return what happened between the two looks.

        Raises:
            ConfigError: the timeline no longer has the first steps of that time, as at a low
                load, where a step has few rows.
        """
        # With few requests at random times the last may be sent before any number has ended.
        (start_s, before), (end_s, after) = sorted(self._looks, key=lambda look: look[0])
        timeline = self._engine.timeline
        kept, num_steps = timeline.steps, timeline.metrics().steps
        if num_steps > len(kept) and not kept[0].device_end_s < start_s:
            check_kept("--requests", num_steps)
        window = [record for record in kept if start_s <= record.device_end_s <= end_s]
        return _round(before, after, end_s - start_s, window, timeline)


def _round(
    before: EngineStats,
    after: EngineStats,
    seconds: float,
    window: Sequence[StepRecord],
    timeline: Timeline,
) -> _Round:
    fed = [record.is_async for record in window if record.is_decode]
    counted = {
        reason: broke.count - (before.breaks[reason].count if reason in before.breaks else 0)
        for reason, broke in after.breaks.items()
    }
    return _Round(
        tokens_per_s=(after.generation_tokens - before.generation_tokens) / seconds,
        decode_async_share=sum(map(bool, fed)) / len(fed) if fed else 0.0,
        idle_share=timeline.idle_share(window),
        breaks=Counter({reason: count for reason, count in counted.items() if count}),
    )


def _summary(rounds: Sequence[_Round]) -> dict[str, Any]:
    """Return medians over the rounds, and the breaks of all of them."""
    breaks = sum((one.breaks for one in rounds), Counter[str]())
    return {
        "tokens_per_s": median(one.tokens_per_s for one in rounds),
        "decode_async_share": median(one.decode_async_share for one in rounds),
        "idle_share": median(one.idle_share for one in rounds),
        "breaks": dict(breaks),
    }


def _show(case: _Case, load: str, result: dict[str, Any], loop: str) -> None:
    rows = [
        (
            carry,
            one["tokens_per_s"],
            one["decode_async_share"],
            f"{100 * one['idle_share']:.2f} %",
            ", ".join(f"{reason} {count}" for reason, count in one["breaks"].items()) or "none",
        )
        for carry, one in result.items()
    ]
    mean = sum(case.lengths) / len(case.lengths)
    title = f"Churn, profile {case.profile}, num_seqs {case.num_seqs}, load {load}"
    facts = [f"{len(case.lengths)} answers of {mean:.1f} tokens on average in each round"]
    columns = ("carry", "tokens/s", "decode async share", "idle", "breaks")
    show_table(title, columns, rows, loop=loop, facts=facts)
