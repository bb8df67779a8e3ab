"""`aneuron bench longprompt`: how long a stream stands still while long prompts come in.

Comes in: a latency profile, prompts that arrive at once, how many of their tokens a step may
have. Goes out: the largest gap between two tokens of a stream that decodes meanwhile, with
prompts cut into chunks and with all of them in one step. Two engines are open, and take turns.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
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
from aneuron.cli.bench.rig.words import word_ids, word_tokenizer
from aneuron.cli.bench.rig.workload import SHORT_PROMPT, open_profile, prompts_of, read_all, submit
from aneuron.outputs import FinishReason

if TYPE_CHECKING:
    from aneuron.engine import Engine
    from aneuron.stream import TokenStream

__all__ = ["longprompt"]

_WARMUP = 16  # tokens of the stream before the prompts arrive
_ANSWER_TOKENS = 16
_BLOCK_TOKENS = 16
_SEED = 0
_MS = 1e3


def longprompt(
    *,
    profile: ProfileName = "trn1-llama3-8b",
    prompts: int = 10,
    prompt_tokens: int = 2000,
    max_num_batched_tokens: int = 512,
    rounds: int = 5,
    as_json: JsonFlag = False,
) -> None:
    """Measure the gaps in a stream while long prompts arrive, in real time.

    Args:
        profile: A latency profile; its programs' times.
        prompts: How many prompts arrive at once, all of them different.
        prompt_tokens: Tokens of each.
        max_num_batched_tokens: Most prompt tokens in one step: the size of a chunk.
        rounds: Rounds with chunks and without; the median of their largest gaps counts.
        as_json: Print one JSON object in place of the table.
    """
    check_number("--prompts", prompts, at_most=MAX_SEQS - 1)
    check_number("--prompt-tokens", prompt_tokens)
    check_number("--rounds", rounds)
    case = _Case(profile, prompts, prompt_tokens)
    # With a larger one no chunk would be full.
    check_number("--max-num-batched-tokens", max_num_batched_tokens, at_most=case.all_tokens)
    check_kept(
        "--prompts, --prompt-tokens or --max-num-batched-tokens",
        2 * case.stream_tokens(max_num_batched_tokens),
    )
    loop = default_loop()
    rounds_of = run_on(loop, _measure(case, max_num_batched_tokens, rounds))
    result = _summary(*rounds_of)
    if as_json:
        show_json(result)
    else:
        _show(case, max_num_batched_tokens, rounds_of, result, loop)


class _Case(NamedTuple):
    """What each engine does in each round."""

    profile: str
    prompts: int
    prompt_tokens: int

    @property
    def all_tokens(self) -> int:
        """Tokens of all prompts: with so many in a step none is cut."""
        return self.prompts * self.prompt_tokens

    def stream_tokens(self, chunk: int) -> int:
        """Return how long the stream may become: more than it gets in a round.

        It gets a token at every second step while prompts are computed, and at each step
        while they are answered.
        """
        return _WARMUP + 2 * -(-self.all_tokens // chunk) + 2 * _ANSWER_TOKENS + self.prompts

    def drawn(self, number: int) -> list[list[int]]:
        """Return the prompts of a round: words at random, so that no two begin alike."""
        import numpy as np

        draw = np.random.default_rng((_SEED, number)).choice
        drawn: list[list[int]] = draw(word_ids(), (self.prompts, self.prompt_tokens)).tolist()
        return drawn

    def engine(self, chunk: int) -> Engine:
        """Return an engine that computes `chunk` prompt tokens in a step, not open yet."""
        from aneuron.cli.bench.rig.programs import WordModel
        from aneuron.engine import Engine

        num_seqs = 1 + self.prompts
        stream_len = SHORT_PROMPT + self.stream_tokens(chunk)
        length = max(stream_len, self.prompt_tokens + _ANSWER_TOKENS)
        return Engine(
            WordModel(2 * num_seqs, length),
            device=open_profile(self.profile),
            tokenizer=word_tokenizer(),
            max_num_seqs=num_seqs,
            max_num_batched_tokens=chunk,
            block_size=_BLOCK_TOKENS,
            num_kv_blocks=num_seqs * (length // _BLOCK_TOKENS + 2),  # nobody is preempted
            timeline=True,
        )


class _Round(NamedTuple):
    """What one round gave."""

    largest_gap_ms: float  # between two tokens in the consumer's hands
    full_step_ms: float  # the longest program with as many prompt tokens as allowed
    answered_ms: float  # from the prompts' arrival to the end of the last answer


# ── measuring ───────────────────────────────────────────────────────────────────────────


async def _measure(case: _Case, chunk: int, rounds: int) -> tuple[list[_Round], list[_Round]]:
    """Return the rounds with chunks, and those without."""
    chunked: list[_Round] = []
    unchunked: list[_Round] = []
    async with case.engine(chunk) as cuts, case.engine(case.all_tokens) as cuts_none:
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            chunked.append(await _run(case, cuts, number))
            unchunked.append(await _run(case, cuts_none, number))
    return chunked, unchunked


async def _run(case: _Case, engine: Engine, number: int) -> _Round:
    """Let one stream decode, and all prompts of a round arrive.

    Raises:
        RuntimeError: the stream ended before the prompts were answered.
    """
    before = engine.stats().steps
    length = case.stream_tokens(engine.config.max_num_batched_tokens)
    prompts = case.drawn(number)
    (stream,) = submit(engine, prompts_of(1, length=SHORT_PROMPT), length)
    async with asyncio.TaskGroup() as group, stream:
        is_warm = asyncio.Event()
        reading = group.create_task(_times_of(stream, is_warm))
        await is_warm.wait()
        arrived_s = monotonic()
        await read_all(submit(engine, prompts, _ANSWER_TOKENS))
        answered_s = monotonic()
    if (await stream).finish_reason is not FinishReason.ABORT:
        raise RuntimeError(f"the stream's {length} tokens ended before the answers did")
    await engine.wait_idle()
    return _Round(
        largest_gap_ms=_largest_gap_s(reading.result(), arrived_s) * _MS,
        full_step_ms=_full_step_s(engine, before) * _MS,
        answered_ms=(answered_s - arrived_s) * _MS,
    )


async def _times_of(stream: TokenStream, is_warm: asyncio.Event) -> list[float]:
    """Read a stream to its end; return when each token was there."""
    times_s: list[float] = []
    async for token in stream:
        if token.token_id is not None:  # the last item of a cancelled stream has none
            times_s.append(monotonic())
        if len(times_s) == _WARMUP:
            is_warm.set()
    return times_s


def _full_step_s(engine: Engine, before: int) -> float:
    """Return how long the longest program ran with as many prompt tokens as allowed."""
    chunk = engine.config.max_num_batched_tokens
    return max(
        record.device_end_s - record.device_start_s
        for record in engine.timeline.steps
        if record.step_id > before
        and not record.is_decode
        and int(record.num_scheduled.sum()) == chunk
    )


def _largest_gap_s(times_s: list[float], arrived_s: float) -> float:
    """Return the largest gap that ends after `arrived_s`."""
    return max(
        later_s - earlier_s for earlier_s, later_s in pairwise(times_s) if later_s > arrived_s
    )


# ── showing ─────────────────────────────────────────────────────────────────────────────


def _summary(chunked: list[_Round], unchunked: list[_Round]) -> dict[str, float]:
    return {
        "chunk_step_ms": max(one.full_step_ms for one in chunked),
        "largest_gap_ms": median(one.largest_gap_ms for one in chunked),
        "largest_gap_ms_unchunked": median(one.largest_gap_ms for one in unchunked),
    }


def _show(
    case: _Case,
    chunk: int,
    rounds_of: tuple[list[_Round], list[_Round]],
    result: dict[str, Any],
    loop: str,
) -> None:
    rows = [
        (
            name,
            max(one.full_step_ms for one in rounds),
            median(gaps := [one.largest_gap_ms for one in rounds]),
            max(gaps),
            median(one.answered_ms for one in rounds),
        )
        for name, rounds in zip((f"{chunk} tokens", "all of them"), rounds_of, strict=True)
    ]
    title = (
        f"Long prompts, profile {case.profile}: {case.prompts} of {case.prompt_tokens} tokens "
        "beside one stream"
    )
    ratio = result["largest_gap_ms"] / result["chunk_step_ms"]
    facts = [f"{len(rounds_of[0])} rounds of each", f"largest gap over a chunk's step {ratio:.2f}"]
    columns = ("in one step", "step ms", "largest gap ms", "in any round", "answered after ms")
    show_table(title, columns, rows, loop=loop, facts=facts)
