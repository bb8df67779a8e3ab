"""`aneuron models info`: what a model is, and how it would run here.

Comes in: a model that is here already. Goes out: its dimensions, what its weights and its KV cache
take, what the processor would run. Nothing is fetched, and no weight is read: the heads of the
files say enough.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

from aneuron.cli.models.listing import size_text
from aneuron.cli.options import JsonFlag  # noqa: TC001 (cyclopts reads them)
from aneuron.cli.terminal import show_json
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron.models.architecture import ModelConfig
    from aneuron.models.catalog import ResolvedModel

__all__ = ["describe_model", "stored_tensors"]

_BLOCK = 16  # tokens, of the default configuration


def describe_model(
    model: str,
    /,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Tell what a model is, and how it would run here; it must be here already.

    Args:
        model: A built-in name, a directory, a .gguf file, a Hugging Face id, or sim:count.
        revision: Branch, tag or commit of a Hugging Face id.
        dtype: Of weights and KV cache: auto, float32 or bfloat16.
        kv_cache_dtype: Of keys and values: auto, as dtype, or int8.
        as_json: Print one JSON object in place of the table.
    """
    if kv_cache_dtype not in ("auto", "int8"):
        raise ConfigError(f"--kv-cache-dtype must be auto or int8, not {kv_cache_dtype!r}")
    if model.startswith("sim:"):
        told = _simulated(model)
    else:
        from aneuron.models.catalog import locate

        found = locate(model, revision=revision)
        if found is None:
            raise ConfigError(
                f"{model} is not here: fetch it with `aneuron models pull {model}`", param="model"
            )
        told = _facts(found, dtype, kv_cache_dtype)
    if as_json:
        show_json(told)
    else:
        _show(told)


def _simulated(name: str) -> dict[str, Any]:
    from aneuron.models.simulated import simulated_model

    spec = simulated_model(name).spec
    return {
        "model": name,
        "architecture": "simulated: it computes no language",
        "vocab_size": spec.vocab_size,
        "max_model_len": spec.max_model_len,
        "chat_template": False,
        "tools": None,
        "runs": {"device": "sim", "dtype": spec.dtype, "steps": "simulated"},
    }


def _facts(found: ResolvedModel, dtype: str, kv_cache_dtype: str) -> dict[str, Any]:
    from aneuron.models.architecture import ModelConfig

    raw = json.loads((found.path / "config.json").read_bytes())
    config = ModelConfig.from_dict(raw)
    counts, num_bytes = stored_tensors(found.path)
    named = raw.get("architectures")
    return {
        "model": found.name,
        "path": str(found.path),
        "architecture": named[0] if isinstance(named, list) and named else config.model_type,
        "num_parameters": sum(counts.values()),
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_model_len": config.max_model_len,
        "weights": {"num_bytes": num_bytes, "parameters_by_dtype": counts},
        **_cache_and_run(config, dtype, kv_cache_dtype),
        **_template_facts(found.path),
    }


def stored_tensors(folder: Path) -> tuple[dict[str, int], int]:
    """Return parameters by dtype as they are stored, and the bytes of the files.

    Raises:
        ConfigError: a file is corrupt.
    """
    from aneuron.models.files.weight_files import weight_files

    counts: dict[str, int] = {}
    num_bytes = 0
    for file in weight_files(folder):
        num_bytes += file.stat().st_size
        for dtype, shape in _heads(file):
            counts[dtype] = counts.get(dtype, 0) + math.prod(shape)
    return counts, num_bytes


def _heads(file: Path) -> list[tuple[str, list[int]]]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        header.pop("__metadata__", None)
        return [(one["dtype"], one["shape"]) for one in header.values()]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no sound safetensors file: {error}", param="model") from error


def _cache_and_run(config: ModelConfig, dtype: str, kv_cache_dtype: str) -> dict[str, Any]:
    import torch

    from aneuron.device import open_device
    from aneuron.models.torch_model import as_torch_dtype
    from aneuron.models.weights import kv_bytes_per_token

    runs_as = as_torch_dtype(dtype)
    kv_dtype = torch.uint8 if kv_cache_dtype == "int8" else runs_as
    num_bytes = kv_bytes_per_token(config, kv_dtype)
    device = open_device("cpu")
    budget = device.memory_budget()
    name = str(runs_as).removeprefix("torch.")
    return {
        "kv_cache": {
            "dtype": "int8" if kv_cache_dtype == "int8" else name,
            "bytes_per_token": num_bytes,
            "budget_bytes": budget,
            "num_tokens": budget // (num_bytes * _BLOCK) * _BLOCK,
        },
        "runs": {"device": device.name, "dtype": name, "steps": _steps(config)},
    }


def _steps(config: ModelConfig) -> str:
    """Say whether steps would run compiled, and if not, why."""
    from aneuron.models.native import build
    from aneuron.models.native.program import fits

    if not fits(config, _BLOCK):
        return f"eager: heads of {config.head_dim} are not a multiple of 16"
    if not build.has_kernels():
        return "eager: this processor lacks AVX-512 with VNNI and BF16"
    if build.built_library() is not None:
        return "compiled"
    if build.compilers():
        return "compiled at its first run, or by `aneuron compile`"
    return "eager: no C++ compiler is installed"


def _template_facts(path: Path) -> dict[str, Any]:
    from aneuron.models.tokenizer import HFTokenizer

    tokenizer = HFTokenizer.load(path)
    try:
        from aneuron.server.tools import template_name
    except ImportError:  # without the extra `serve` there is no server that calls tools
        tools = None
    else:
        tools = template_name(None, tokenizer)
    return {"chat_template": tokenizer.chat_template is not None, "tools": tools}


def _show(told: dict[str, Any]) -> None:
    lines: dict[str, str] = {}
    lines |= {key: str(told[key]) for key in ("model", "path", "architecture") if key in told}
    if "weights" in told:
        weights = told["weights"]
        dtypes = ", ".join(f"{num / 1e6:.1f} M {dtype}" for dtype, num in _by_size(weights))
        lines["parameters"] = dtypes
        lines["weights"] = size_text(weights["num_bytes"])
        heads = f"{told['num_heads']} heads of {told['head_dim']}, {told['num_kv_heads']} for keys"
        lines["layers"] = f"{told['num_layers']}, {heads}; hidden size {told['hidden_size']}"
    lines["vocabulary"] = str(told["vocab_size"])
    lines["longest context"] = f"{told['max_model_len']} tokens"
    if "kv_cache" in told:
        cache = told["kv_cache"]
        lines["KV cache"] = f"{cache['bytes_per_token']} bytes per token, {cache['dtype']}"
        lines["KV room here"] = (
            f"{cache['num_tokens']} tokens in {size_text(cache['budget_bytes'])}, "
            "a quarter of the memory"
        )
    lines["chat template"] = "yes" if told["chat_template"] else "no"
    lines["tool calls"] = told["tools"] or "no form that is known"
    runs = told["runs"]
    lines["runs here on"] = f"{runs['device']}, {runs['dtype']}; steps: {runs['steps']}"
    print("\n".join(f"{name:<16} {value}" for name, value in lines.items()), flush=True)


def _by_size(weights: dict[str, Any]) -> list[tuple[str, int]]:
    return sorted(weights["parameters_by_dtype"].items(), key=lambda pair: -pair[1])
