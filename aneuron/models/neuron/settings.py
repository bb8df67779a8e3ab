"""An artifact's neuron_config.json, with NxDI's names and defaults, as the sizes of its programs.

Comes in: the dictionary. Goes out: a `ProgramShape`. Whatever changes how programs are called and
is not done here is refused by its name, never ignored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from aneuron.device.neuron.nxd_runtime import logical_core_size
from aneuron.errors import ConfigError
from aneuron.models.neuron.program import DTYPES, ProgramShape

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FORMAT_VERSION", "Settings", "count_of", "program_shape"]

FORMAT_VERSION = 1  # of what we add to a neuron_config.json
_NXDI_COLUMNS = 3  # top_k, top_p, temperature
_LEAST_BUCKET = 128  # of buckets that are not told
_LEAST_2D_BUCKET = 512  # likewise, of prompts behind cached prefixes

Settings = dict[str, Any]

# Programs of other inputs and outputs than ours take, by the setting that asks for them.
_OFF = {
    "speculation_length": "speculation",
    "medusa_speculation_length": "speculation",
    "enable_fused_speculation": "speculation",
    "enable_eagle_speculation": "speculation",
    "enable_eagle_draft_input_norm": "speculation",
    "is_eagle_draft": "speculation",
    "is_eagle3": "speculation",
    "is_medusa": "speculation",
    "enable_token_tree": "speculation",
    "token_tree_config": "speculation",
    "is_chunked_prefill": "chunked prefill",
    "chunked_prefill_config": "chunked prefill",
    "windowed_context_encoding_size": "windowed context encoding",
    "lora_config": "adapters",
    "is_prefill_stage": "one of the two stages alone",
    "tensor_replacement_config": "tensors that are given in place of computed ones",
}
_ONE = {
    "pp_degree": "pipeline parallelism",
    "ep_degree": "expert parallelism",
    "moe_ep_degree": "expert parallelism",
    "cp_degree": "context parallelism",
    "attention_dp_degree": "data parallelism",
    "ctx_batch_size": "prompts side by side",
}
# Other settings are inside the programs, which are called as they are without them:
# * quantized, quantization_type, quantization_dtype, kv_cache_quant: weights come as the shards
#   have them, and the cache is the programs' own;
# * sliding_window, attention_chunk_size: positions become cells of the cache in the graph (windows
#   of prompts, windowed_context_encoding_size, are other calls);
# * output_logits, tensor_capture_config: more outputs, behind the ids;
# * apply_seq_ids_mask, kv_cache_padding_size: padding may write nothing, or elsewhere;
# * flash_decoding_enabled, sequence_parallel_enabled, kernels but those of `_takes_no_block`.
# `async_mode` is how NxDI calls them: here the engine's async_scheduling decides that.


def program_shape(settings: Settings, ours: Mapping[str, Any] | None) -> ProgramShape:
    """Return the sizes of an artifact's programs.

    Args:
        settings: of `neuron_config`, by NxDI's names.
        ours: what an artifact of ours adds; None of another.

    Raises:
        ConfigError: a setting is wrong, or asks for what is not done here; `param` names it.
    """
    batch_size = _batch_size(settings)
    _refuse(settings, batch_size)
    length = count_of(settings, "seq_len", 128)
    if count_of(settings, "max_context_length", length) < length:
        raise _unsupported(
            "max_context_length", f"prompts are shorter than the context, seq_len {length}"
        )
    sampling = _sampling(settings)
    if settings.get("async_mode") and sampling == "none":
        raise _unsupported("async_mode", "without on_device_sampling_config there are no ids")
    is_block_kv = bool(settings.get("is_block_kv_layout"))
    has_prefix = bool(settings.get("is_prefix_caching"))
    if is_block_kv != has_prefix:
        name = "is_prefix_caching" if is_block_kv else "is_block_kv_layout"
        raise _unsupported(name, "blocks of the KV cache go with prefix caching")
    rows = count_of(settings, "kv_cache_batch_size", batch_size)
    block_size = count_of(settings, "pa_block_size", length) if is_block_kv else length
    # Block 0 is the null block, which no request owns.
    num_blocks = count_of(settings, "pa_num_blocks", batch_size) - 1 if is_block_kv else rows
    if num_blocks < 1:
        raise ConfigError("pa_num_blocks must be at least 2", param="pa_num_blocks")
    if rows < batch_size and not is_block_kv:
        raise _unsupported("kv_cache_batch_size", f"it is under the batch of {batch_size}")
    context, prefix, tokens = _buckets(settings, length, has_prefix=has_prefix)
    _check_buckets(context, prefix, tokens, length, block_size if is_block_kv else None)
    return ProgramShape(
        batch_size=batch_size,
        max_model_len=length,
        context_buckets=context,
        token_buckets=tokens,
        prefix_buckets=prefix,
        is_block_kv=is_block_kv,
        block_size=block_size,
        num_blocks=num_blocks,
        num_slots=0 if ours is None else count_of(ours, "num_slots", 0, least=0),
        sampling_columns=_NXDI_COLUMNS
        if ours is None
        else count_of(ours, "sampling_columns", _NXDI_COLUMNS),
        sampling=sampling,
        dtype=_dtype(settings),
        is_ours=ours is not None,
        block_padding=-1 if _takes_no_block(settings) else 0,
    )


def count_of(settings: Mapping[str, Any], name: str, default: int, *, least: int = 1) -> int:
    """Return a setting that is a number.

    Raises:
        ConfigError: it is none, or less than `least`.
    """
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer from {least}, not {value!r}", param=name)
    return value


def _batch_size(settings: Settings) -> int:
    batch_size = count_of(settings, "batch_size", 1)
    return count_of(settings, "tkg_batch_size", batch_size)


def _refuse(settings: Settings, batch_size: int) -> None:
    for name, what in _OFF.items():
        value = settings.get(name)
        if value not in (None, False, 0) or (name == "is_prefill_stage" and value is not None):
            raise _unsupported(name, what)
    defaults = {"ctx_batch_size": count_of(settings, "batch_size", 1)}
    for name, what in _ONE.items():
        if count_of(settings, name, defaults.get(name, 1)) > 1:
            raise _unsupported(name, what)
    if batch_size > 1 and not settings.get("is_continuous_batching"):
        raise _unsupported("is_continuous_batching", "rows have no sequence ids without it")
    if settings.get("padding_side", "right") != "right":
        raise _unsupported("padding_side", "padding comes behind the tokens")
    if settings.get("token_generation_batches") and settings.get("is_block_kv_layout"):
        raise _unsupported("token_generation_batches", "buckets of rows over blocks")
    ranks = count_of(settings, "tp_degree", 1)
    if count_of(settings, "local_ranks_size", ranks) != ranks:
        raise _unsupported("local_ranks_size", "ranks on other machines")
    _refuse_core_size(settings)


def _refuse_core_size(settings: Settings) -> None:
    for name in ("logical_nc_config", "logical_neuron_cores"):  # the latter is the older name
        cores, here = count_of(settings, name, 0), logical_core_size()
        if cores and here is not None and cores != here:
            what = f"compiled for {cores} cores in a logical one, and the environment says {here}"
            raise _unsupported(name, what)


def _takes_no_block(settings: Settings) -> bool:
    """Whether the attention kernel wants -1 where a row has no block."""
    kernels = ("attn_block_tkg_nki_kernel_enabled", "attn_tkg_nki_kernel_enabled")
    return any(settings.get(name) for name in kernels)


def _sampling(settings: Settings) -> Any:
    """Return how programs sample: "drawn", "greedy" or "none"."""
    config = settings.get("on_device_sampling_config")
    if config is None:
        return "none"
    if not isinstance(config, dict):
        name = "on_device_sampling_config"
        raise ConfigError(f"{name} must be an object, not {config!r}", param=name)
    if not config.get("do_sample", False):
        return "greedy"
    if not config.get("dynamic", False):
        raise _unsupported("dynamic", "all requests are drawn with the parameters of the artifact")
    return "drawn"


def _dtype(settings: Settings) -> str:
    name = str(settings.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"torch_dtype must be one of {', '.join(DTYPES)}, not {name!r}", param="torch_dtype"
        )
    return name


def _buckets(
    settings: Settings, length: int, *, has_prefix: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of prefills, of cached prefixes and of decodes' contexts."""
    if not settings.get("enable_bucketing", False):
        return (length,), (0, length) if has_prefix else (0,), (length,)
    least = _LEAST_2D_BUCKET if has_prefix else _LEAST_BUCKET
    context = _sizes(settings, "context_encoding_buckets", _powers_of_two(least, length))
    tokens = _sizes(settings, "token_generation_buckets", _powers_of_two(_LEAST_BUCKET, length))
    if not has_prefix:
        return context, (0,), tokens
    prefix = _sizes(settings, "prefix_buckets", _powers_of_two(_LEAST_2D_BUCKET, length))
    return context, tuple(sorted({0, *prefix})), tokens


def _powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """Return NxDI's sizes where none are told: powers of two, and the longest."""
    if least >= most:
        return (most,)
    exponents = range(int(math.log2(least)), round(math.log2(most)))
    return (*(2**one for one in exponents), most)


def _sizes(settings: Settings, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    found = settings.get(name)
    if not found:
        return default
    if not isinstance(found, list) or not all(type(size) is int and size >= 0 for size in found):
        raise ConfigError(f"{name} must be a list of sizes, not {found!r}", param=name)
    return tuple(sorted(set(found)))


def _check_buckets(
    context: tuple[int, ...],
    prefix: tuple[int, ...],
    tokens: tuple[int, ...],
    length: int,
    block_size: int | None,
) -> None:
    """Refuse buckets into which some context would not fit."""
    if context[0] < 2 or (block_size is None and context[-1] != length):
        raise ConfigError(
            f"context_encoding_buckets must be 2 or more, up to {length}",
            param="context_encoding_buckets",
        )
    if tokens[-1] != length:
        raise ConfigError(
            f"token_generation_buckets must end with {length}", param="token_generation_buckets"
        )
    if block_size is None:
        return
    for name, sizes in (("prefix_buckets", prefix), ("token_generation_buckets", tokens)):
        if any(size % block_size for size in sizes):
            raise ConfigError(f"{name} must be multiples of pa_block_size {block_size}", param=name)
    longest = (length - 1) // block_size * block_size
    if prefix[-1] < longest:
        raise _unsupported("prefix_buckets", f"prefixes of up to {longest} tokens may be cached")


def _unsupported(name: str, what: str) -> ConfigError:
    return ConfigError(f"{name} of this artifact is not supported: {what}", param=name)
