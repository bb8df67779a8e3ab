"""`aneuron compile`: what an engine would otherwise do beside its first answers, done ahead.

Comes in: a model and how its weights are kept. Goes out: the compiled library and the packed
weights in the cache directory, and a line, or with `--json` an object, that says where.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Annotated

from cyclopts import Parameter

from aneuron.cli.terminal import note, show_json

__all__ = ["compile_model"]


def compile_model(
    model: str,
    /,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    revision: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Compile the steps of a model for this processor, and pack its weights.

    Args:
        model: A built-in name, a directory, a .gguf file or a Hugging Face id.
        dtype: Of weights and KV cache: auto, float32 or bfloat16.
        quantization: Of the weights: int8 or int4; none by default.
        revision: Branch, tag or commit of a Hugging Face id.
        as_json: Print one JSON object on stdout, and no more on stderr.
    """
    from aneuron.errors import ConfigError
    from aneuron.models.native.build import compile_library, has_kernels

    started_s = perf_counter()
    say = _silent if as_json else note
    if not has_kernels():
        raise ConfigError(
            "this processor lacks AVX-512 with VNNI and BF16: there is nothing to compile, and "
            "models run eagerly"
        )
    say("compiling (some ten seconds, once for this processor)")
    library = compile_library()
    if library is None:
        raise ConfigError(
            "no C++ compiler works here: install g++ or clang, or name one in CXX; without it "
            "models run eagerly"
        )
    compile_s = perf_counter() - started_s
    say(f"{library} after {compile_s:.1f} s")
    asyncio.run(_pack(model, dtype, quantization, revision, quiet=as_json))
    total_s = perf_counter() - started_s
    say(f"{model} is ready after {total_s:.1f} s")
    if as_json:
        times = {"compile_s": compile_s, "total_s": total_s}
        show_json({"model": model, "library": str(library), **times})


def _silent(_: str) -> None:
    """Say nothing."""


async def _pack(
    model: str, dtype: str, quantization: str | None, revision: str | None, *, quiet: bool
) -> None:
    """Open the model once: that fetches it, and packs its weights into the cache."""
    from aneuron.cli.loading import opened
    from aneuron.cli.options import EngineSettings

    settings = EngineSettings(
        device="cpu", dtype=dtype, quantization=quantization, revision=revision, num_kv_blocks=1
    )
    async with opened(model, settings, quiet=quiet):
        pass
