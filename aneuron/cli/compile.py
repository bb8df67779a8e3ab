"""`aneuron compile`: what an engine would otherwise do beside its first answers, done ahead.

Comes in: a model and how its weights are kept. Goes out: of a processor the compiled library and
the packed weights, of NeuronCores the compiled programs, in the cache directory; and a line, or
with `--json` an object, that says where.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from cyclopts import Group, Parameter

from aneuron.cli.loading import Told, opened, reporting
from aneuron.cli.options import EngineSettings, JsonFlag
from aneuron.cli.terminal import note, show_json
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.device.neuron.device import NeuronDevice

__all__ = ["ProgramSettings", "compile_model"]


@Parameter(name="*", group=Group("NeuronCores", sort_key=2))
@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """The sizes that programs for NeuronCores are compiled for; engines find them by the same.

    Attributes:
        tensor_parallel_size: NeuronCores that each program spans.
        max_num_seqs: Most requests in one step.
        max_model_len: Longest context in tokens; the model's own by default.
        max_num_batched_tokens: Most prompt tokens in one step; longer prompts are cut.
        block_size: Tokens in one block of the KV cache.
        num_kv_blocks: Blocks in the KV cache; by default enough, of up to 4 GiB.
        enable_prefix_caching: Share the KV cache of prompts that begin alike; without it, each
            request has a row of the cache, and its prompt is one program.
    """

    tensor_parallel_size: int = 1
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_kv_blocks: int | None = None
    enable_prefix_caching: bool = True


_PROGRAMS = ProgramSettings()


def compile_model(
    model: str,
    /,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    quantization: str | None = None,
    revision: str | None = None,
    programs: ProgramSettings = _PROGRAMS,
    as_json: JsonFlag = False,
) -> None:
    """Compile a model for this processor, its weights packed, or for NeuronCores.

    Args:
        model: A built-in name, a directory, a .gguf file or a Hugging Face id.
        device: What will run it: cpu or neuron; for neuron, none need be there.
        dtype: Of weights and KV cache: auto, float32 or bfloat16.
        quantization: Of the weights: int8 or int4; none by default.
        revision: Branch, tag or commit of a Hugging Face id.
        programs: Sizes of programs for NeuronCores.
        as_json: Print one JSON object on stdout, and no more on stderr.
    """
    _check(model, revision)
    if device == "neuron":
        if quantization is not None:
            raise ConfigError("quantization is for the processor", param="quantization")
        _compile_programs(model, dtype, revision, programs, as_json=as_json)
    elif device != "cpu":
        raise ConfigError(f"device must be cpu or neuron, not {device!r}", param="device")
    else:
        _check_unused(programs)
        _compile_steps(model, dtype, quantization, revision, as_json=as_json)


def _check_unused(programs: ProgramSettings) -> None:
    for name, value in asdict(programs).items():
        if value != getattr(_PROGRAMS, name):
            raise ConfigError(f"{name} is for device=neuron: steps have any size", param=name)


def _compile_steps(
    model: str, dtype: str, quantization: str | None, revision: str | None, *, as_json: bool
) -> None:
    from aneuron.models.native.build import compile_library, has_kernels

    started_s = perf_counter()
    say = _silent if as_json else note
    if not has_kernels():
        raise ConfigError(
            "this processor lacks AVX-512 with VNNI and BF16: there is nothing to compile, and "
            "models run eagerly"
        )
    say("compiling (some ten seconds, once for this processor)")
    with Told(quiet=True):  # what went wrong, and no more
        library = compile_library()
    if library is None:
        raise ConfigError(
            "nothing is compiled, so that models run eagerly: install g++ or clang, or name a "
            "compiler in CXX, and a directory that can be written in ANEURON_NATIVE_DIR"
        )
    compile_s = perf_counter() - started_s
    say(f"{library} after {compile_s:.1f} s")
    asyncio.run(_pack(model, dtype, quantization, revision, quiet=as_json))
    total_s = perf_counter() - started_s
    say(f"{model} is ready after {total_s:.1f} s")
    if as_json:
        times = {"compile_s": compile_s, "total_s": total_s}
        show_json({"model": model, "library": str(library), **times})


def _check(model: str, revision: str | None) -> None:
    """Find out what is wrong with the name before anything is compiled."""
    from aneuron.models.catalog import locate

    if model.startswith("sim:"):
        raise ConfigError(f"{model} is simulated: there is nothing to compile", param="model")
    locate(model, revision=revision)


def _silent(_: str) -> None:
    """Say nothing."""


async def _pack(
    model: str, dtype: str, quantization: str | None, revision: str | None, *, quiet: bool
) -> None:
    """Open the model once: that fetches it, and packs its weights into the cache."""
    settings = EngineSettings(
        device="cpu", dtype=dtype, quantization=quantization, revision=revision, num_kv_blocks=1
    )
    async with opened(model, settings, quiet=quiet):
        pass


# ── for NeuronCores ─────────────────────────────────────────────────────────────────────


def _compile_programs(
    model: str, dtype: str, revision: str | None, programs: ProgramSettings, *, as_json: bool
) -> None:
    from aneuron.config import EngineConfig
    from aneuron.device.neuron.found import open_neuron

    started_s = perf_counter()
    say = _silent if as_json else note
    settings = {"dtype": dtype, **asdict(programs)}
    config = EngineConfig(**settings)
    device = open_neuron(to_compile=True)
    told = {"model": model, "kind": device.kind}
    if device.compiler is not None:
        from aneuron.models.neuron.compiled import compile_artifact

        with reporting(model, quiet=as_json) as progress:
            artifact = compile_artifact(
                model, device.compiler, config, revision=revision, progress=progress
            )
        told |= {"artifact": str(artifact.folder), "compiler": device.compiler.version}
        say(str(artifact.folder))
    else:  # graphs are compiled by running them, and kept by the runtime
        asyncio.run(_warm_up(model, open_neuron(), settings, revision, quiet=as_json))
    total_s = perf_counter() - started_s
    say(f"{model} is ready after {total_s:.1f} s")
    if as_json:
        show_json({**told, "total_s": total_s})


async def _warm_up(
    model: str,
    device: NeuronDevice,
    settings: dict[str, Any],
    revision: str | None,
    *,
    quiet: bool,
) -> None:
    from aneuron.engine import Engine
    from aneuron.models.tokenizer import ByteTokenizer

    with reporting(model, quiet=quiet) as progress:
        engine = Engine(
            model,
            device=device,
            tokenizer=ByteTokenizer(),  # nobody asks it anything
            revision=revision,
            progress=progress,
            **settings,
        )
        async with engine:
            pass
