"""`aneuron bench peers`: this engine beside `transformers`, in turns, on the same prompts.

Comes in: a model and the cases. Goes out: new tokens per second over the whole call, of each. Both
are loaded, and take turns run by run, so that what else the machine does meets both alike.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from aneuron.cli.bench.common import (
    JsonFlag,
    check_number,
    default_loop,
    parse_counts,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.cli.bench.processor.throughput import measure_run, prepare, prompts_at_random

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["peers"]


def peers(
    *,
    model: str = "smollm2-135m",
    concurrency: str = "1,8,32",
    prompt_tokens: str = "32,512",
    max_tokens: int = 128,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    runs: int = 3,
    as_json: JsonFlag = False,
) -> None:
    """Measure tokens per second beside transformers' generate, in turns.

    Args:
        model: A built-in name, a directory, a .gguf file or a Hugging Face id.
        concurrency: Numbers of requests at once, separated by commas.
        prompt_tokens: Lengths of prompts, separated by commas.
        max_tokens: New tokens of each request.
        dtype: float32 or bfloat16, of both.
        quantization: int8 or int4, of this engine alone.
        runs: Of each case and engine; the medians count.
        as_json: Print one JSON object in place of the table.
    """
    counts = parse_counts("--concurrency", concurrency, at_most=512)
    lengths = parse_counts("--prompt-tokens", prompt_tokens, at_most=2**16)
    check_number("--max-tokens", max_tokens, at_least=2)
    check_number("--runs", runs)
    cases = [(count, length, max_tokens) for length in lengths for count in counts]
    loop = default_loop()
    prepare()
    tell(f"loading {model}, twice")
    generate = _transformers(model, dtype)
    options = {"dtype": dtype, "quantization": quantization}
    rows = run_on(loop, _measure(model, options, generate, cases, runs))
    if as_json:
        show_json({"model": model, "rows": rows})
    else:
        names = ("aneuron", "transformers")
        lines = [
            (row["concurrency"], row["prompt_tokens"], *(row[name] for name in names), row["ratio"])
            for row in rows
        ]
        columns = ("requests", "prompt", *names, "ratio")
        import torch
        import transformers

        facts = [f"tokens/s; torch {torch.__version__}, transformers {transformers.__version__}"]
        show_table(f"Peers, {model}, {dtype}", columns, lines, loop=loop, facts=facts)


async def _measure(
    model: str,
    options: dict[str, Any],
    generate: Callable[[list[list[int]], int], float],
    cases: list[tuple[int, int, int]],
    runs: int,
) -> list[dict[str, Any]]:
    from aneuron.engine import Engine

    most = max(count for count, _, _ in cases)
    longest = max(length + new for _, length, new in cases)
    async with Engine(
        model, max_num_seqs=most, timeline=True, num_kv_blocks=most * (-(-longest // 16) + 1),
        **options,
    ) as engine:  # fmt: skip
        rows = []
        for case in cases:
            count, length, new = case
            rates: dict[str, list[float]] = {"aneuron": [], "transformers": []}
            for number in range(runs):
                tell(f"{count} x {length}, run {number + 1} of {runs}")
                ours = await measure_run(engine, *case, seed=number)
                rates["aneuron"].append(count * new / ours.total_s)
                prompts = prompts_at_random(count, length, engine.spec.vocab_size, number)
                rates["transformers"].append(count * new / generate(prompts, new))
            found = {name: median(seen) for name, seen in rates.items()}
            ratio = found["aneuron"] / found["transformers"]
            rows.append({"concurrency": count, "prompt_tokens": length, **found, "ratio": ratio})
        return rows


def _transformers(name: str, dtype: str) -> Callable[[list[list[int]], int], float]:
    """Return what answers prompts with transformers, and returns the seconds that took."""
    import torch
    from transformers import AutoModelForCausalLM

    from aneuron.models.catalog import resolve

    path = resolve(name).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], max_tokens: int) -> float:
        ids = torch.tensor(prompts)
        started_s = perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens,
                min_new_tokens=max_tokens, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return perf_counter() - started_s

    return generate
