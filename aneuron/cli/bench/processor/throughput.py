"""`aneuron bench throughput`: tokens per second of a real model, by concurrency and prompt length.

Comes in: a model and the cases. Goes out: rates, times to the first token and between tokens, as a
consumer sees them, memory, and how busy the device was. Prompts are ids at random, all submitted at
once; each answer has exactly the tokens asked for. The prefix cache is emptied before each run.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from aneuron.cli.bench.common import (
    JsonFlag,
    check_kept,
    check_number,
    default_loop,
    parse_counts,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.cli.ticker import StatsSettings

if TYPE_CHECKING:
    from aneuron.engine import Engine
    from aneuron.stream import TokenStream

__all__ = ["Run", "measure_run", "prepare", "prompts_at_random", "throughput"]

_MS = 1e3
_LOWEST_ID = 100  # the first ids of most vocabularies are special
_PREFILL_TOKENS = 40  # a step of the default configuration, beside many that decode
_STATS = StatsSettings()


def throughput(
    *,
    model: str = "smollm2-135m",
    concurrency: str = "1,8,32",
    prompt_tokens: str = "32,512",
    max_tokens: int = 128,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    num_threads: int | None = None,
    enforce_eager: bool = False,
    async_scheduling: bool = True,
    runs: int = 3,
    as_json: JsonFlag = False,
    stats: StatsSettings = _STATS,
) -> None:
    """Measure tokens per second, time to first token and between tokens, on the processor.

    Args:
        model: A built-in name, a directory, a .gguf file or a Hugging Face id.
        concurrency: Numbers of requests at once, separated by commas.
        prompt_tokens: Lengths of prompts, separated by commas.
        max_tokens: New tokens of each request.
        dtype: auto, float32 or bfloat16.
        quantization: int8 or int4.
        kv_cache_dtype: auto, as dtype, or int8.
        num_threads: That compute; one per core by default.
        enforce_eager: Compile nothing.
        async_scheduling: Schedule one step ahead.
        runs: Of each case, after one that does not count; the medians count.
        as_json: Print one JSON object in place of the table.
        stats: What is told of the engine while it is measured.
    """
    stats.check()
    counts = parse_counts("--concurrency", concurrency, at_most=512)
    lengths = parse_counts("--prompt-tokens", prompt_tokens, at_most=2**16)
    check_number("--max-tokens", max_tokens, at_least=2)
    check_number("--runs", runs)
    steps = max_tokens + 2 * max(counts) * (max(lengths) // _PREFILL_TOKENS + 1)
    check_kept("--max-tokens", steps)
    options: dict[str, Any] = {
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "num_threads": num_threads,
        "enforce_eager": enforce_eager,
        "async_scheduling": async_scheduling,
    }
    cases = [_Case(count, length, max_tokens) for length in lengths for count in counts]
    loop = default_loop()
    prepare()
    rows = run_on(loop, _measure(model, options, cases, runs, stats))
    if as_json:
        show_json({"model": model, "rows": rows})
    else:
        _show(model, rows, loop)


def prepare() -> None:
    """Compile what steps run on, so that none is measured before it has changed over."""
    from aneuron.models.native.build import compile_library

    tell("compiling, if need be")
    compile_library()


class _Case(NamedTuple):
    concurrency: int
    prompt_tokens: int
    max_tokens: int


class Run(NamedTuple):
    """What one run of a case took, in seconds."""

    total_s: float
    decode_tokens_per_s: float  # from when all requests have their first token
    ttft_s: list[float]
    gaps_s: list[float]  # between the tokens of each request
    busy_share: float  # of the device


async def _measure(
    model: str,
    options: dict[str, Any],
    cases: list[_Case],
    runs: int,
    stats: StatsSettings = _STATS,
) -> list[dict[str, Any]]:
    from aneuron.engine import Engine

    most = max(case.concurrency for case in cases)
    longest = max(case.prompt_tokens + case.max_tokens for case in cases)
    blocks = most * (-(-longest // 16) + 1)
    tell(f"loading {model}")
    engine = Engine(model, max_num_seqs=most, num_kv_blocks=blocks, timeline=True, **options)
    async with engine:
        with stats.ticker(engine):
            return [await _measure_case(engine, case, runs) for case in cases]


async def _measure_case(engine: Engine, case: _Case, runs: int) -> dict[str, Any]:
    done = []
    for number in range(runs + 1):
        tell(f"{case.concurrency} x {case.prompt_tokens}, run {number} of {runs}")
        done.append(await measure_run(engine, *case, seed=number))
    return _row(case, done[1:])


def prompts_at_random(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return prompts of ids at random, the same for the same seed."""
    import numpy as np

    draw = np.random.default_rng((seed, length)).integers
    prompts: list[list[int]] = draw(_LOWEST_ID, vocab_size, size=(count, length)).tolist()
    return prompts


async def measure_run(
    engine: Engine, concurrency: int, prompt_tokens: int, max_tokens: int, *, seed: int
) -> Run:
    """Run one case on an idle engine.

    Args:
        engine: open, with a timeline.
        concurrency: requests at once.
        prompt_tokens: of each.
        max_tokens: new tokens of each.
        seed: of the prompts.
    """
    engine.reset_prefix_cache()
    prompts = prompts_at_random(concurrency, prompt_tokens, engine.spec.vocab_size, seed)
    seen = engine.timeline.steps
    last_id = seen[-1].step_id if seen else 0
    started_s = perf_counter()
    streams = [
        engine.generate(
            prompt_token_ids=ids, max_tokens=max_tokens, ignore_eos=True, temperature=0.0
        )
        for ids in prompts
    ]
    times = await asyncio.gather(*map(_times_of, streams))
    total_s = perf_counter() - started_s
    await engine.wait_idle()
    records = [one for one in engine.timeline.steps if one.step_id > last_id]
    begun_s = max(stamps[0] for stamps in times)
    decoded = sum(stamp > begun_s for stamps in times for stamp in stamps)
    ended_s = max(stamps[-1] for stamps in times)
    gaps_s = [b - a for stamps in times for a, b in pairwise(stamps)]
    return Run(
        total_s, decoded / (ended_s - begun_s), [stamps[0] - started_s for stamps in times],
        gaps_s, 1 - engine.timeline.idle_share(records),
    )  # fmt: skip


async def _times_of(stream: TokenStream) -> list[float]:
    return [perf_counter() async for _ in stream]


def _row(case: _Case, runs: list[Run]) -> dict[str, Any]:
    gaps_ms = [gap * _MS for run in runs for gap in run.gaps_s]
    tokens = case.concurrency * case.max_tokens
    return {
        "concurrency": case.concurrency,
        "prompt_tokens": case.prompt_tokens,
        "decode_tokens_per_s": median(run.decode_tokens_per_s for run in runs),
        "total_tokens_per_s": median(tokens / run.total_s for run in runs),
        "ttft_ms": median(median(run.ttft_s) for run in runs) * _MS,
        "itl_ms": {"p50": median(gaps_ms), "p99": quantiles(gaps_ms, n=100)[-1]},
        "peak_rss_mib": _peak_rss_mib(),
        "device_busy_share": median(run.busy_share for run in runs),
    }


def _peak_rss_mib() -> float | None:
    """Return the most memory that this process had so far; None where nobody tells."""
    if sys.platform == "win32":
        return None
    from resource import RUSAGE_SELF, getrusage

    most = getrusage(RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)


def _show(model: str, rows: list[dict[str, Any]], loop: str) -> None:
    lines = [
        (
            row["concurrency"], row["prompt_tokens"], row["total_tokens_per_s"],
            row["decode_tokens_per_s"], row["ttft_ms"], row["itl_ms"]["p50"],
            row["itl_ms"]["p99"], row["peak_rss_mib"], row["device_busy_share"],
        )
        for row in rows
    ]  # fmt: skip
    columns = (
        "requests", "prompt", "tokens/s", "decoding", "first ms", "gap ms", "p99", "MiB", "busy",
    )  # fmt: skip
    import torch

    facts = [f"torch {torch.__version__}; tokens/s: new tokens over the whole call"]
    show_table(f"Throughput, {model}", columns, lines, loop=loop, facts=facts)
