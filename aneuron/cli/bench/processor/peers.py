"""`aneuron bench peers`: this engine beside other engines, in turns, on the same prompts.

Comes in: a model and the cases. Goes out: new tokens per second over the whole call, of each. Those
that are installed are loaded, and all take turns run by run, so that what else the machine does
meets them alike.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (the command line reads the annotation)
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

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
from aneuron.cli.bench.processor import engines
from aneuron.cli.bench.processor.throughput import measure_run, prepare, prompts_at_random
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.cli.bench.processor.engines import Generate, Peer, Wanted

__all__ = ["peers"]

_OURS = "aneuron"


def peers(
    *,
    model: str = "smollm2-135m",
    concurrency: str = "1,8,32",
    prompt_tokens: str = "32,512",
    max_tokens: int = 128,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    names: Annotated[str | None, Parameter(name="--peers")] = None,
    gguf: Path | None = None,
    runs: int = 3,
    as_json: JsonFlag = False,
) -> None:
    """Measure tokens per second beside other engines that are installed, in turns.

    Args:
        model: A built-in name, a directory, a .gguf file or a Hugging Face id.
        concurrency: Numbers of requests at once, separated by commas.
        prompt_tokens: Lengths of prompts, separated by commas.
        max_tokens: New tokens of each request.
        dtype: float32 or bfloat16, of all.
        quantization: int8 or int4, of this engine; OpenVINO and llama.cpp take their nearest kind.
        kv_cache_dtype: auto, as dtype, or int8; of this engine.
        names: Some of transformers, openvino, llama.cpp, separated by commas; else all there are.
        gguf: A file with the same weights, for llama.cpp; a built-in model has one.
        runs: Of each case and engine; the medians count.
        as_json: Print one JSON object in place of the table.
    """
    counts = parse_counts("--concurrency", concurrency, at_most=512)
    lengths = parse_counts("--prompt-tokens", prompt_tokens, at_most=2**16)
    check_number("--max-tokens", max_tokens, at_least=2)
    check_number("--runs", runs)
    _check_kinds(dtype, quantization, kv_cache_dtype)
    if gguf is not None and not gguf.is_file():
        raise ConfigError(f"--gguf: no such file: {gguf}", param="--gguf")
    chosen = _chosen(names)
    loop = default_loop()
    prepare()
    wanted = _wanted(model, dtype, quantization, gguf, max(counts), max(lengths) + max_tokens)
    generates, facts = _load(chosen, wanted, must=names is not None)
    cases = [(count, length, max_tokens) for length in lengths for count in counts]
    options = {
        "dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype
    }  # fmt: skip
    rows = run_on(loop, _measure(model, options, generates, cases, runs))
    if as_json:
        kinds = {"kind": quantization or dtype, "kv_cache_dtype": kv_cache_dtype}
        show_json({"model": model, **kinds, **facts, "rows": rows})
    else:
        cells = "" if kv_cache_dtype == "auto" else f"\n{kv_cache_dtype} cache"
        _show(model, f"{quantization or dtype}{cells}", facts, rows, loop)


def _check_kinds(dtype: str, quantization: str | None, kv_cache_dtype: str) -> None:
    """Refuse before others load what this engine would refuse after them."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype must be float32 or bfloat16, not {dtype!r}", param="--dtype")
    if quantization not in (None, "int8", "int4"):
        message = f"--quantization must be int8 or int4, not {quantization!r}"
        raise ConfigError(message, param="--quantization")
    if kv_cache_dtype not in ("auto", "int8"):
        message = f"--kv-cache-dtype must be auto or int8, not {kv_cache_dtype!r}"
        raise ConfigError(message, param="--kv-cache-dtype")


def _chosen(names: str | None) -> list[Peer]:
    if names is None:
        return list(engines.PEERS)
    known = {peer.name: peer for peer in engines.PEERS}
    parts = [part.strip() for part in names.split(",")]
    if not set(parts) <= set(known):
        message = f"--peers must be some of {', '.join(known)}, not {names!r}"
        raise ConfigError(message, param="--peers")
    return [known[part] for part in dict.fromkeys(parts)]


def _wanted(
    model: str,
    dtype: str,
    quantization: str | None,
    gguf: Path | None,
    max_num_seqs: int,
    max_model_len: int,
) -> Wanted:
    from aneuron.models.catalog import resolve
    from aneuron.models.torch_model import default_threads

    path = resolve(model).path
    gguf = gguf or engines.gguf_of(model, path)
    threads = default_threads()
    return engines.Wanted(path, dtype, quantization, gguf, max_num_seqs, max_model_len, threads)


def _load(
    chosen: list[Peer], wanted: Wanted, *, must: bool
) -> tuple[dict[str, Generate], dict[str, Any]]:
    """Return what answers prompts, by the peer's name, and who was found and who was missing."""
    generates, found, missing = {}, {}, {}
    for peer in chosen:
        version = engines.installed(peer)
        if version is None:
            missing[peer.name] = f"{peer.package} is not installed"
            continue
        tell(f"loading for {peer.name}")
        try:
            generates[peer.name] = peer.load(wanted)
        except (ImportError, engines.Unavailable) as error:
            missing[peer.name] = str(error)
        else:
            kind = peer.kind(wanted)
            found[peer.name] = {"package": peer.package, "version": version, "kind": kind}
    if missing and (must or not found):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise ConfigError(f"--peers: {reasons}", param="--peers")
    return generates, {"peers": found, "missing": missing}


async def _measure(
    model: str,
    options: dict[str, Any],
    generates: dict[str, Generate],
    cases: list[tuple[int, int, int]],
    runs: int,
) -> list[dict[str, Any]]:
    from aneuron.engine import Engine

    most = max(count for count, _, _ in cases)
    longest = max(length + new for _, length, new in cases)
    tell(f"loading {model}")
    async with Engine(
        model, max_num_seqs=most, timeline=True, num_kv_blocks=most * (-(-longest // 16) + 1),
        **options,
    ) as engine:  # fmt: skip
        rows = []
        for case in cases:
            count, length, new = case
            rates: dict[str, list[float]] = {name: [] for name in (_OURS, *generates)}
            for number in range(runs):
                tell(f"{count} x {length}, run {number + 1} of {runs}")
                ours = await measure_run(engine, *case, seed=number)
                rates[_OURS].append(count * new / ours.total_s)
                prompts = prompts_at_random(count, length, engine.spec.vocab_size, number)
                for name, generate in generates.items():
                    rates[name].append(count * new / generate(prompts, new))
            rows.append(_row(count, length, {name: median(seen) for name, seen in rates.items()}))
        return rows


def _row(count: int, length: int, rates: dict[str, float]) -> dict[str, Any]:
    best = max((name for name in rates if name != _OURS), key=rates.__getitem__)
    ratio = rates[_OURS] / rates[best]
    return {"concurrency": count, "prompt_tokens": length, **rates, "best": best, "ratio": ratio}


def _show(
    model: str, kind: str, facts: dict[str, Any], rows: list[dict[str, Any]], loop: str
) -> None:
    import torch

    found, missing = facts["peers"], facts["missing"]
    names = (_OURS, *found)
    lines = [
        (
            row["concurrency"], row["prompt_tokens"], *(row[name] for name in names), row["best"],
            row["ratio"],
        )
        for row in rows
    ]  # fmt: skip
    heads = [f"{_OURS}\n{kind}", *(f"{name}\n{one['kind']}" for name, one in found.items())]
    columns = ("requests", "prompt", *heads, "best peer", "ratio")
    versions = [f"{one['package']} {one['version']}" for one in found.values()]
    said = [f"tokens/s, with the kind of weights; torch {torch.__version__}"]
    said.append(f"peers: {', '.join(versions)}")
    said += [f"without {name}: {reason}" for name, reason in missing.items()]
    show_table(f"Peers, {model}", columns, lines, loop=loop, facts=said)
