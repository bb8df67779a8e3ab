"""Random mixes of requests that the host has a say in, of drafts, and of all other kinds.

Whatever runs beside it, on whatever carry and at whatever depth, drafted or not: a request's
ids, and their log probabilities, are as alone, its grammar matches, and nothing is left.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aneuron import FinishReason
from aneuron.engine import Engine
from aneuron.models.simulated import LogitsModel
from aneuron.testing import SimDevice, assert_idle, sim_engine, wait_all_idle
from tests.support import CARRIES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aneuron import Completion, TokenStream
    from aneuron.outputs import Choice, TokenLogprobs
    from aneuron.plans import ModelInput

VOCAB, EOS = 258, 257
MAX_LEN = 64
PATIENCE_S = max(300, settings().max_examples)
FIRST = 97  # the letters a to f: what the model likes to say


class Babble(LogitsModel):
    """Repeats itself, over six letters, so that drafts come true; not always.

    What it likes depends on the two ids before and now and then on the whole context, read
    back through the block table, so that a wrong cell anywhere shows.
    """

    name = "babble"
    told: list[list[int]]

    def __init__(self, *, is_split: bool = True) -> None:
        super().__init__(
            vocab_size=VOCAB, eos_token_ids=(EOS,), max_model_len=MAX_LEN, is_split=is_split
        )
        self.ranks: list[list[list[int]]] = []

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Babble:
        model = super().with_kv(num_blocks, block_size, num_slots)
        model.told = []  # what this rank samples
        self.ranks.append(model.told)
        return model

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        context, counts = self._context(inputs)
        length, at = counts.sum(axis=1), np.arange(len(context))
        last, before = context[at, length - 1], context[at, np.maximum(length - 2, 0)]
        weights = np.where(counts, np.arange(1, context.shape[1] + 1), 0)
        sums = (context.astype(np.int64) * weights).sum(axis=1) % 65521
        noise = (sums[:, None] * 40503 + np.arange(VOCAB) * 30011) % 65521 / 65521.0
        rows: np.ndarray = noise.astype(np.float32) - 9
        turn = sums % 7 == 0
        for place in range(5):
            rows[at, FIRST + (last * 7 + before * 3 + place + turn) % 6] += 12 - 2 * place
        rows[at, EOS] += np.where(sums % 31 == 0, 14.0, 0.0)
        return rows

    def _give_out(self, chosen: np.ndarray, inputs: ModelInput) -> np.ndarray:
        ids: np.ndarray = super()._give_out(chosen, inputs)
        self.told.append(ids[: inputs.num_samples].tolist())
        return ids


# ── what is asked for ───────────────────────────────────────────────────────────────────


def sway(output_ids: list[int], logits: np.ndarray) -> None:
    """A hook that changes what it is given."""
    logits[FIRST + (sum(output_ids) + len(output_ids)) % 6] += 4.0


def turn_round(prompt_ids: list[int], output_ids: list[int], logits: np.ndarray) -> Any:
    """A hook that returns logits of its own."""
    return np.roll(logits, -((len(prompt_ids) + len(output_ids)) % 3))


FIXED, LONG, LOOSE = "[ab]{3}[0-9]{2}", "[a-f0-9]{6,30}", "([a-c]{1,9};)?d[a-f]{0,9}"
GRAMMARS = {"fixed": FIXED, "long": LONG, "loose": LOOSE, "both": LONG, "fixed pair": LOOSE}
HOOKED = {"hooked", "hooked three", "both"}
PAIRS = {"pair": 2, "fixed pair": 2, "hooked three": 3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "on and on": {"temperature": 0, "ignore_eos": True},
    "hot": {"temperature": 0.9, "ignore_eos": True},
    "wild": {"temperature": 2.0, "ignore_eos": True},  # says little twice
    "narrow": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "penalised": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "late": {"temperature": 0.7, "min_tokens": 9, "logit_bias": {FIRST: 2.0}},
    "few": {"temperature": 0.7, "allowed_token_ids": [97, 99, 102], "ignore_eos": True},
    "logprobs": {"temperature": 0.8, "logprobs": 2, "prompt_logprobs": 1},
    "pair": {"temperature": 1.0, "n": 2},
    "fixed": {"temperature": 0, "grammar": {"regex": FIXED}},
    "long": {"temperature": 1.1, "grammar": {"regex": LONG}, "logprobs": 1},
    "loose": {"temperature": 0.9, "grammar": {"regex": LOOSE}, "presence_penalty": 0.5},
    "fixed pair": {"temperature": 1.0, "n": 2, "grammar": {"regex": LOOSE}},
    "hooked": {"temperature": 0.8, "logits_processors": [sway, turn_round]},
    "hooked three": {"temperature": 1.0, "n": 3, "logits_processors": [sway]},
    "both": {"temperature": 0, "grammar": {"regex": LONG}, "logits_processors": [sway]},
}
# They begin alike, so that later ones find what earlier ones left; some say things twice.
BASE = [97, 98, 99, 100, 97, 98, 99, 100, 101, 102, 97, 98]
TURNS = [*b"aecaecafdefdefdeaecaecaedbcdbcdb"]  # the way in which the model itself goes on
PROMPTS = [[97], [98, 97], BASE[:4], TURNS, TURNS[:20], BASE, [*BASE, *BASE, 97, 97, 103, 103]]


class Alone(dict[tuple[str, int], "Completion"]):
    """What each kind answers to each prompt by itself, on the synchronous baseline."""

    def __repr__(self) -> str:
        """Be short: hypothesis shows it."""
        return "<alone>"


async def _run_alone() -> Alone:
    told, options = Alone(), {**CARRIES["host"], "enable_prefix_caching": False}
    async with sim_engine(Babble(), **options) as engine:
        for kind, params in KINDS.items():
            for number, prompt in enumerate(PROMPTS):
                told[kind, number] = await engine.generate(
                    prompt_token_ids=prompt, seed=9, **params
                )
    return told


@cache
def all_alone() -> Alone:
    """Return them; called where no loop runs."""
    return asyncio.run(_run_alone())


@pytest.fixture(scope="module")
def alone() -> Alone:
    """Every kind, every prompt."""
    return all_alone()


@dataclass(frozen=True)
class Job:
    """One request of a scenario."""

    kind: str
    prompt: int
    gap: int  # loop turns before it is submitted
    max_tokens: int | None
    stop: str | int | None  # a string, or an id
    leaves_at: int | None  # it is given up after so many of its tokens …
    how: str  # … like this

    def __post_init__(self) -> None:
        if self.kind == "late":  # for which stops, too, would have to wait
            object.__setattr__(self, "stop", None)
            object.__setattr__(self, "max_tokens", self.max_tokens and max(9, self.max_tokens))

    def expected(self, full: Choice) -> tuple[list[int], str, Any]:
        """Ids, finish and stop reason of a choice that is not given up."""
        ids, told = full.token_ids, b""
        for count, token in enumerate(ids, 1):
            told += bytes([token]) if token < 256 else b""
            is_stop = token == self.stop or (
                isinstance(self.stop, str) and self.stop.encode() in told
            )
            if is_stop:
                return ids[:count], "stop", self.stop
            if count == len(ids) and full.finish_reason == "stop":
                break  # an end wins over the length
            if count == self.max_tokens:
                return ids[:count], "length", None
        return ids, full.finish_reason, full.stop_reason


@dataclass(frozen=True)
class Scenario:
    """Jobs, and the engine that serves them."""

    jobs: tuple[Job, ...]
    carry: str
    is_split: bool
    draft_tokens: int
    depth: int
    num_ranks: int
    latency_s: float
    pool: float  # of what the longest request needs
    options: Mapping[str, Any]

    def engine(self, model: Babble) -> Engine:
        options = {**self.options, **CARRIES[self.carry]}
        if self.draft_tokens:
            options["speculative"] = {"method": "ngram", "num_tokens": self.draft_tokens}
        if self.carry != "host":
            options["max_in_flight_steps"] = self.depth
        needed = -(-MAX_LEN // options["block_size"])
        device = SimDevice(latency=self.latency_s, sampling_s=self.latency_s / 4)
        return Engine(
            model, device=device, num_ranks=self.num_ranks,
            num_kv_blocks=int(needed * self.pool), **options,
        )  # fmt: skip


JOB: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.integers(0, len(PROMPTS) - 1),
    "gap": st.sampled_from([0, 0, 1, 3, 8, 40]),
    "max_tokens": st.sampled_from([None, 25, None, 25, 9, 3, 2, 1]),
    "stop": st.sampled_from([None, None, None, "ba", "cfd", 98, 101, 102]),
    "leaves_at": st.sampled_from([None, None, None, None, 0, 1, 4, 12]),
    "how": st.sampled_from(["cancel", "abort", "stop", "drop", "task"]),
}


def jobs_of(kinds: list[str]) -> st.SearchStrategy[tuple[Job, ...]]:
    """Return requests of these kinds."""
    jobs = st.builds(Job, kind=st.sampled_from(kinds), **JOB)
    return st.lists(jobs, min_size=2, max_size=7).map(tuple)


few_kinds = st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=4, unique=True)
PARTS: dict[str, st.SearchStrategy[Any]] = {
    "jobs": few_kinds.flatmap(jobs_of),
    "carry": st.sampled_from(list(CARRIES)),
    "is_split": st.sampled_from([True, True, False]),
    "draft_tokens": st.sampled_from([0, 1, 4, 4, 16]),
    "depth": st.sampled_from([2, 2, 3]),
    "num_ranks": st.sampled_from([1, 1, 2]),
    "latency_s": st.sampled_from([0.0, 0.0, 0.0003]),
    "pool": st.sampled_from([1.0, 1.5, 3.0, 20.0]),
    "options": st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(3, 6),
            "block_size": st.sampled_from([1, 2, 4, 16]),
            "max_num_batched_tokens": st.sampled_from([4, 16, 256]),
            "num_seqs_buckets": st.sampled_from([None, [], [8]]),
            "enable_prefix_caching": st.booleans(),
        }
    ),
}


def scenarios(**fixed: Any) -> st.SearchStrategy[Scenario]:
    """Return scenarios of which some parts are given, or strategies for them."""
    given_parts = {
        name: one if isinstance(one, st.SearchStrategy) else st.just(one)
        for name, one in fixed.items()
    }
    return st.builds(Scenario, **{**PARTS, **given_parts})


# ── what must hold ──────────────────────────────────────────────────────────────────────


@settings(max_examples=settings().max_examples // 2)  # on each of two loops
@pytest.mark.timeout(PATIENCE_S)
@given(scenario=scenarios())
async def test_every_answer_is_as_alone_and_nothing_is_left(
    scenario: Scenario, alone: Alone
) -> None:
    await check(scenario, alone)


async def check(scenario: Scenario, alone: Alone) -> None:
    """Run a scenario; see the name of the test."""
    model = Babble(is_split=scenario.is_split)
    async with scenario.engine(model) as engine:
        wanted = [
            consume(engine, job, alone[job.kind, job.prompt], f"job-{number}")
            for number, job in enumerate(scenario.jobs)
            if scenario.is_split or job.kind not in HOOKED  # the others show no logits
        ]
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*map(asyncio.create_task, wanted), return_exceptions=True)
            for end in ends:
                if end is not None and not isinstance(end, asyncio.CancelledError):
                    raise end
            await wait_all_idle(engine)
        assert_idle(engine)
        check_counts(engine, scenario)
        assert len(model.ranks) == scenario.num_ranks
        assert all(one == model.ranks[0] for one in model.ranks), "ranks differ"


def check_counts(engine: Engine, scenario: Scenario) -> None:
    stats = engine.stats()
    assert 0 <= stats.accepted_draft_tokens <= stats.draft_tokens
    if not scenario.draft_tokens:
        assert stats.draft_tokens == 0
        assert "speculation" not in stats.breaks
    if scenario.carry != "host":
        assert stats.async_steps + stats.sync_fallback_steps == stats.steps
    if scenario.is_split:
        assert "grammar" not in stats.breaks
    assert not engine._core.scheduler.speculation._rejected, "kept although idle"


async def consume(engine: Engine, job: Job, full: Completion, name: str) -> None:
    """Ask, read, maybe give up; what was said is what would have been said alone."""
    for _ in range(job.gap):
        await asyncio.sleep(0)
    stops: dict[str, Any] = {"stop": job.stop} if isinstance(job.stop, str) else {}
    if isinstance(job.stop, int):
        stops = {"stop_token_ids": [job.stop]}
    stream = engine.generate(
        prompt_token_ids=PROMPTS[job.prompt], seed=9, request_id=name, max_tokens=job.max_tokens,
        **stops, **KINDS[job.kind],
    )  # fmt: skip
    if job.leaves_at == 0:
        if job.how == "drop":
            return
        leave(engine, stream, job.how, name)
    count = 0
    async for token in stream:
        count += token.token_id is not None
        if count == job.leaves_at:
            if job.how == "drop":
                return
            leave(engine, stream, job.how, name)
    answer = await stream
    assert len(answer.choices) == PAIRS.get(job.kind, 1)
    for choice, one in zip(answer.choices, full.choices, strict=True):
        check_choice(job, choice, one)
    if job.leaves_at is None:
        assert close(answer.prompt_logprobs, full.prompt_logprobs)


def check_choice(job: Job, choice: Choice, full: Choice) -> None:
    ids, finish, stop = job.expected(full)
    got = choice.token_ids
    assert got == ids[: len(got)], (job, got, ids)
    if job.leaves_at is None:
        assert (got, choice.finish_reason, choice.stop_reason) == (ids, finish, stop), job
    if full.logprobs is None:
        assert choice.logprobs is None
    else:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(got)
        assert close(choice.logprobs, full.logprobs[: len(got)])
    whole = choice.finish_reason is FinishReason.STOP and choice.stop_reason is None
    if job.kind in GRAMMARS and whole and job.leaves_at is None:
        text = bytes(token for token in got if token != EOS)
        assert re.fullmatch(GRAMMARS[job.kind].encode(), text), text


def close(ones: Any, others: Any) -> bool:
    """Whether log probabilities are the same, but for the last digits."""
    if ones is None or others is None:
        return ones is others
    return len(ones) == len(others) and all(map(_same, ones, others))


def _same(one: TokenLogprobs | None, other: TokenLogprobs | None) -> bool:
    if one is None or other is None:
        return one is other
    values = [[part.logprob, *(value for _, value in part.top)] for part in (one, other)]
    return [at for at, _ in one.top] == [at for at, _ in other.top] and np.allclose(
        values[0], values[1]
    )


def leave(engine: Engine, stream: TokenStream, how: str, name: str) -> None:
    if how == "cancel":
        stream.cancel()
    elif how == "stop":
        stream.stop()
    elif how == "abort":
        engine.abort(name)
    elif how == "task":
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
