"""`aneuron compile`: what an engine would otherwise do beside its first answers, done ahead.

Comes in: a model and how its weights are kept. Goes out: the compiled library and the packed
weights in the cache directory, and a line that says where.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

from aneuron.cli.terminal import note

__all__ = ["compile_model"]


def compile_model(
    model: str,
    /,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    revision: str | None = None,
) -> None:
    """Compile the steps of a model for this processor, and pack its weights.

    Args:
        model: A built-in name, a directory, a .gguf file or a Hugging Face id.
        dtype: Of weights and KV cache: auto, float32 or bfloat16.
        quantization: Of the weights: int8 or int4; none by default.
        revision: Branch, tag or commit of a Hugging Face id.
    """
    from aneuron.errors import ConfigError
    from aneuron.models.native.build import compile_library

    started_s = perf_counter()
    note("compiling (some ten seconds, once for this processor)")
    library = compile_library()
    if library is None:
        raise ConfigError(
            "no C++ compiler works here: install g++ or clang, or name one in CXX; without it "
            "models run eagerly"
        )
    note(f"{library} after {perf_counter() - started_s:.1f} s")
    asyncio.run(_pack(model, dtype, quantization, revision))
    note(f"{model} is ready after {perf_counter() - started_s:.1f} s")


async def _pack(model: str, dtype: str, quantization: str | None, revision: str | None) -> None:
    """Open the model once: that fetches it, and packs its weights into the cache."""
    from aneuron.cli.loading import opened
    from aneuron.cli.options import EngineSettings

    settings = EngineSettings(
        device="cpu", dtype=dtype, quantization=quantization, revision=revision, num_kv_blocks=1
    )
    async with opened(model, settings, quiet=False):
        pass
