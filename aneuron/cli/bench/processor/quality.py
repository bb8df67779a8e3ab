"""`aneuron bench quality`: what fewer bits cost, as perplexity of a text that comes with Python.

Comes in: a model. Goes out: its perplexity in float32, bfloat16, int8 and int4, and by how much
each is above float32. The text is the documentation of modules of the standard library, in pieces
that the model reads from their beginning; the log probabilities are those of `prompt_logprobs`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from aneuron.cli.bench.common import (
    JsonFlag,
    check_number,
    default_loop,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.cli.bench.processor.throughput import prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron.engine import Engine

__all__ = ["quality"]

_KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
# Of some age, so that their words are the same in all versions of Python.
_MODULES = (
    "argparse", "collections", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib",
    "doctest", "email", "fractions", "functools", "heapq", "inspect", "itertools", "json",
    "logging", "optparse", "os", "pathlib", "pickle", "random", "re", "shutil", "statistics",
    "string", "subprocess", "tempfile", "textwrap", "threading", "typing", "unittest", "urllib",
)  # fmt: skip


def quality(
    model: str = "smollm2-135m",
    /,
    *,
    tokens: int = 8192,
    piece: int = 512,
    kinds: str = ",".join(_KINDS),
    kv_cache_dtype: str = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Measure perplexity by kind of weights, on the documentation of the standard library.

    Args:
        model: A built-in name, a directory, a .gguf file or a Hugging Face id.
        tokens: Of the text.
        piece: Tokens that are read at a time.
        kinds: Of weights, separated by commas: float32, bfloat16, int8, int4.
        kv_cache_dtype: auto, as dtype, or int8; of all kinds.
        as_json: Print one JSON object in place of the table.
    """
    check_number("--piece", piece, at_least=16, at_most=4096)
    check_number("--tokens", tokens, at_least=piece, at_most=2**20)
    from aneuron.errors import ConfigError

    wanted = [kind.strip() for kind in kinds.split(",")]
    if not wanted or not set(wanted) <= set(_KINDS):
        raise ConfigError(f"--kinds must be some of {', '.join(_KINDS)}", param="--kinds")
    loop = default_loop()
    prepare()
    found = run_on(loop, _measure(model, wanted, tokens, piece, kv_cache_dtype))
    rows = [
        {"kind": kind, "perplexity": value, "over_first": value / found[wanted[0]] - 1}
        for kind, value in found.items()
    ]
    if as_json:
        show_json({"model": model, "rows": rows})
    else:
        lines = [(row["kind"], row["perplexity"], f"{row['over_first']:+.2%}") for row in rows]
        columns = ("weights", "perplexity", f"over {wanted[0]}")
        facts = [f"{tokens} tokens in pieces of {piece}"]
        show_table(f"Quality, {model}", columns, lines, loop=loop, facts=facts)


async def _measure(
    model: str, kinds: list[str], tokens: int, piece: int, kv_cache_dtype: str
) -> dict[str, float]:
    from aneuron.engine import Engine

    found = {}
    for kind in kinds:
        tell(f"{model}, {kind}")
        async with Engine(
            model, max_model_len=piece + 1, max_num_seqs=8, enable_prefix_caching=False,
            kv_cache_dtype=kv_cache_dtype, **_KINDS[kind],
        ) as engine:  # fmt: skip
            ids = (await engine.tokenizer.encode(documentation()))[:tokens].tolist()
            found[kind] = await _perplexity(engine, ids, piece)
    return found


async def _perplexity(engine: Engine, ids: list[int], piece: int) -> float:
    """Return e to the mean of what each token costs in nats, but for the first of each piece."""
    pieces = [ids[at : at + piece] for at in range(0, len(ids), piece)]
    streams = [
        engine.generate(prompt_token_ids=one, max_tokens=1, prompt_logprobs=0, temperature=0.0)
        for one in pieces
        if len(one) > 1
    ]
    costs = []
    for stream in streams:
        done = await stream
        assert done.prompt_logprobs is not None
        costs += [-one.logprob for one in done.prompt_logprobs if one is not None]
    return math.exp(math.fsum(costs) / len(costs))


def documentation() -> str:
    """Return what modules of the standard library say of themselves and of what is in them."""
    return "\n\n".join(_documentation())


def _documentation() -> Iterator[str]:
    from importlib import import_module
    from inspect import getdoc

    for name in _MODULES:
        module = import_module(name)
        yield f"{name}\n\n{getdoc(module) or ''}"
        for member in sorted(getattr(module, "__all__", ())):
            text = getdoc(getattr(module, member, None)) if not member.startswith("_") else None
            if text:
                yield f"{name}.{member}\n\n{text}"
