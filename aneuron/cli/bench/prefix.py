"""`aneuron bench prefix`: what finding a prompt's beginning in the prefix cache saves.

Comes in: a model, the length of a prefix, how many requests share it. Goes out: the time to
first token with the cache on and off, as a consumer sees it. Two engines are open, and take
turns round by round on the same prompts, one request at a time.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from aneuron.cli.bench.common import (
    JsonFlag,
    check_number,
    default_loop,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.cli.bench.rig.workload import submit
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aneuron.engine import Engine

__all__ = ["prefix"]

_BLOCK_TOKENS = 16  # the cache finds whole blocks
_SUFFIX_TOKENS = 16
_MAX_TOKENS = 4
_SEED = 0
_MS = 1e3


def prefix(
    *,
    model: str = "smollm2-135m",
    prefix_tokens: int = 1024,
    requests: int = 8,
    rounds: int = 3,
    as_json: JsonFlag = False,
) -> None:
    """Measure the time to first token of prompts that begin alike, prefix cache on and off.

    Args:
        model: A built-in name, a directory, a .gguf file, a Hugging Face id, or sim:count.
        prefix_tokens: Tokens that the prompts share; each has 16 of its own.
        requests: Requests of a round, one after the other; the first fills the cache and
            does not count.
        rounds: Rounds of each, every one with another prefix; the medians count.
        as_json: Print one JSON object in place of the table.
    """
    check_number("--prefix-tokens", prefix_tokens, at_least=_BLOCK_TOKENS)
    check_number("--requests", requests, at_least=2)
    check_number("--rounds", rounds)
    case = _Case(model, prefix_tokens, requests)
    loop = default_loop()
    answers = run_on(loop, _measure(case, rounds))
    if as_json:
        show_json(_summary(answers))
    else:
        _show(case, answers, loop)


class _Case(NamedTuple):
    """What both engines do in each round."""

    model: str
    prefix_tokens: int
    requests: int

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""
        return self.prefix_tokens + _SUFFIX_TOKENS + _MAX_TOKENS

    def engine(self, *, is_cached: bool) -> Engine:
        """Return an engine, not open yet."""
        from aneuron.engine import Engine

        return Engine(
            self.model,
            enable_prefix_caching=is_cached,
            block_size=_BLOCK_TOKENS,
            max_model_len=self.max_model_len,
            num_kv_blocks=2 * (self.max_model_len // _BLOCK_TOKENS + 2),  # room for two
        )

    def prompts(self, number: int, vocab_size: int) -> list[list[int]]:
        """Return the prompts of a round, the same for both engines: ids at random."""
        import numpy as np

        draw = np.random.default_rng((_SEED, number)).integers
        shared = draw(vocab_size, size=self.prefix_tokens).tolist()
        suffixes = draw(vocab_size, size=(self.requests, _SUFFIX_TOKENS)).tolist()
        return [shared + suffix for suffix in suffixes]


class _Answer(NamedTuple):
    """What one request gave."""

    ttft_ms: float  # from the call to the first token in the consumer's hands
    cached_tokens: int


async def _measure(case: _Case, rounds: int) -> dict[str, list[_Answer]]:
    """Return what counts of each engine's answers, oldest first."""
    async with AsyncExitStack() as stack:
        engines = {}
        for name, is_cached in (("cache_on", True), ("cache_off", False)):
            tell(f"loading {case.model}")
            engines[name] = await stack.enter_async_context(_opened(case, is_cached=is_cached))
        answers: dict[str, list[_Answer]] = {name: [] for name in engines}
        for number in range(rounds):
            for name, engine in engines.items():
                tell(f"round {number + 1} of {rounds}, {name}")
                prompts = case.prompts(number, engine.spec.vocab_size)
                _, *counted = [await _ask(engine, prompt) for prompt in prompts]
                answers[name] += counted
    return answers


@asynccontextmanager
async def _opened(case: _Case, *, is_cached: bool) -> AsyncIterator[Engine]:
    engine = case.engine(is_cached=is_cached)
    try:
        await engine.open()
    except ConfigError as error:
        if error.param != "max_model_len":
            raise
        raise ConfigError(
            f"--prefix-tokens {case.prefix_tokens}: a request of {case.max_model_len} tokens is "
            f"longer than {case.model} takes",
            param="--prefix-tokens",
        ) from error
    try:
        yield engine
    finally:
        await engine.aclose()


async def _ask(engine: Engine, prompt: list[int]) -> _Answer:
    """Send one request and read its answer; the engine is idle before and after."""
    started_s = monotonic()
    (stream,) = submit(engine, [prompt], _MAX_TOKENS)
    await anext(stream)
    ttft_ms = (monotonic() - started_s) * _MS
    completion = await stream
    await engine.wait_idle()
    return _Answer(ttft_ms, completion.usage.cached_tokens)


def _summary(answers: dict[str, list[_Answer]]) -> dict[str, Any]:
    """Return medians; of the cached tokens the fewest that a request had."""
    return {
        "ttft_ms": {name: median(one.ttft_ms for one in done) for name, done in answers.items()},
        "cached_tokens": min(one.cached_tokens for one in answers["cache_on"]),
    }


def _show(case: _Case, answers: dict[str, list[_Answer]], loop: str) -> None:
    rows = []
    for name, done in answers.items():
        times = [one.ttft_ms for one in done]
        rows.append((name, median(times), min(times), max(times), done[0].cached_tokens))
    on_ms, off_ms = (row[1] for row in rows)
    title = f"Prefix, {case.model}, {case.prefix_tokens} tokens and {_SUFFIX_TOKENS} more"
    facts = [f"{len(answers['cache_on'])} requests of each", f"off over on {off_ms / on_ms:.1f}"]
    columns = ("prefix", "ttft ms", "least", "most", "cached tokens")
    show_table(title, columns, rows, loop=loop, facts=facts)
