"""A folder of compiled NxD programs: what it says of itself, and what an engine makes of that.

Comes in: a folder, NxDI's or of ours, with model.pt, neuron_config.json, a safetensors file of
weights for each rank, and the tokenizer's files. Goes out: an `Artifact`, and the engine's
settings as it can run them. Blocking; runs in a thread while the engine opens.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from aneuron.config import EngineConfig
from aneuron.errors import ConfigError
from aneuron.models.neuron.program import DTYPES
from aneuron.models.neuron.sampler import CANDIDATES
from aneuron.models.neuron.settings import FORMAT_VERSION, count_of, program_shape
from aneuron.models.torch_model import eos_token_ids, read_json
from aneuron.plans import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

    from aneuron.models.neuron.program import ProgramShape

__all__ = ["CONFIG_FILE", "MODEL_FILES", "Artifact", "write_artifact"]

CONFIG_FILE = "neuron_config.json"
MODEL_FILES = (  # of the checkpoint, beside its weights; engines read them
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_DEFAULTS = {item.name: item.default for item in fields(EngineConfig)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """What an artifact's folder says.

    Attributes:
        folder: where it is.
        shape: sizes of its programs.
        ranks: cores that each program spans (`tp_degree`).
        start_rank: the first of them.
        config: all of neuron_config.json: the model's config.json, and NxDI's settings.
        spec: what the engine needs to know.
    """

    folder: Path
    shape: ProgramShape
    ranks: int
    start_rank: int
    config: Mapping[str, Any]
    spec: ModelSpec

    @classmethod
    def read(cls, folder: Path, *, name: str | None = None) -> Self:
        """Read a folder's neuron_config.json.

        Args:
            folder: of the artifact.
            name: of the model, for people; the folder's if None.

        Raises:
            ConfigError: it is corrupt, or asks for what is not done here; `param` names it.
        """
        config = read_json(folder / CONFIG_FILE)
        settings, ours = config.get("neuron_config", config), config.get("aneuron")
        if not isinstance(settings, dict):
            raise ConfigError("neuron_config must be an object", param="neuron_config")
        if config.get("fused_spec_config") is not None:
            raise ConfigError(
                "fused_spec_config of this artifact is not supported: speculation",
                param="fused_spec_config",
            )
        if ours is not None and not isinstance(ours, dict):
            raise ConfigError(f"{folder / CONFIG_FILE}: aneuron must be an object", param="model")
        if ours is not None and ours.get("version") != FORMAT_VERSION:
            raise ConfigError(
                f"{folder} was compiled by another release of aneuron: compile it again",
                param="version",
            )
        shape = program_shape(settings, ours)
        model = _model_config(folder, config)
        return cls(
            folder=folder,
            shape=shape,
            ranks=count_of(settings, "tp_degree", 1),
            start_rank=count_of(settings, "start_rank_id", 0, least=0),
            config=config,
            spec=_spec(name or folder.name, shape, model, folder),
        )

    def weights(self) -> list[dict[str, torch.Tensor]]:
        """Return each rank's weights, read from the files.

        Raises:
            ConfigError: a file is missing or corrupt; `param` is its name.
        """
        return [_shard(self.folder / shard_name(rank)) for rank in range(self.ranks)]

    def adapt(self, config: EngineConfig) -> EngineConfig:
        """Return an engine's settings with the artifact's sizes.

        Raises:
            ConfigError: one was changed from its default to what the artifact cannot do; `param`
                names it.
        """
        shape = self.shape
        needs_whole = shape.prefix_buckets == (0,)
        changed = {key for key, value in _DEFAULTS.items() if getattr(config, key) != value}
        longest = shape.context_buckets[-1]
        for key, most in (("max_num_seqs", shape.batch_size), ("num_kv_blocks", shape.num_blocks),
                          ("max_num_batched_tokens", longest)):  # fmt: skip
            if key in changed and getattr(config, key) > most:
                raise _fixed(key, getattr(config, key), f"at most {most}")
        exact = {"block_size": shape.block_size, "dtype": shape.dtype,
                 "tensor_parallel_size": self.ranks}  # fmt: skip
        for key, value in exact.items():
            if key in changed and getattr(config, key) != value:
                raise _fixed(key, getattr(config, key), str(value))
        for key in ("quantization", "kv_cache_dtype", "kv_cache_bytes", "num_seqs_buckets",
                    "num_tokens_buckets", "num_blocks_buckets"):  # fmt: skip
            if key in changed:
                raise _fixed(key, getattr(config, key), "left out")
        max_num_seqs = config.max_num_seqs if "max_num_seqs" in changed else shape.batch_size
        adapted = replace(
            config,
            max_num_seqs=max_num_seqs,
            **self._cuts(config, changed),
            enable_prefix_caching=config.enable_prefix_caching and not needs_whole,
            block_size=shape.block_size,
            num_kv_blocks=config.num_kv_blocks or shape.num_blocks,
            tensor_parallel_size=self.ranks,
            num_seqs_buckets=(max_num_seqs,),
            num_tokens_buckets=shape.context_buckets,
            num_blocks_buckets=tuple(size // shape.block_size for size in shape.token_buckets)
            if shape.is_block_kv
            else (1,),
        )
        if shape.num_slots and adapted.max_num_seqs * adapted.depth > shape.num_slots:
            most = shape.num_slots // max_num_seqs
            raise _fixed("max_in_flight_steps", config.max_in_flight_steps, f"at most {most}")
        return adapted

    def _cuts(self, config: EngineConfig, changed: set[str]) -> dict[str, Any]:
        """Return the settings of how prompts are cut: anywhere, between blocks, or not at all."""
        shape, names = self.shape, ("max_num_batched_tokens", "interleaved_prefill_tokens")
        limit = min(shape.max_model_len, config.max_model_len or shape.max_model_len)
        longest, between = shape.context_buckets[-1], config.interleaved_prefill_tokens
        most = config.max_num_batched_tokens if names[0] in changed else longest
        if shape.prefix_buckets == (0,):
            for key in names:
                if key in changed and getattr(config, key) < limit:
                    raise _fixed(key, getattr(config, key), f"at least {limit}: it cuts no prompts")
            between = longest
        elif shape.prefix_buckets[-1] < limit - 1:
            # Behind the last whole block there is no program: no chunk may begin there.
            size = shape.block_size
            if most < limit and names[0] not in changed:
                most -= most % size
            if not most or (most < limit and most % size):
                what = f"a multiple of {size}: it cuts prompts between blocks only"
                raise _fixed(names[0], most, what)
            if between is not None and between < min(most, limit):
                what = f"at least {min(most, limit)}: it cuts prompts between blocks only"
                raise _fixed(names[1], between, what)
            between = most  # with fewer the scheduler chooses sizes by what waits
        return dict(zip(names, (most, between), strict=True))


def write_artifact(
    folder: Path,
    shape: ProgramShape,
    weights: Iterable[Mapping[str, torch.Tensor]],
    *,
    model: Mapping[str, Any],
    source: Path | None = None,
) -> None:
    """Write all of an artifact but its model.pt.

    Args:
        folder: to write to.
        shape: of the programs.
        weights: each rank's part of the decoder's, by the decoder's names (`shard_state`).
        model: the model's config.json.
        source: the folder of the checkpoint, whose tokenizer's files are copied.
    """
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    ranks = 0
    for rank, shard in enumerate(weights):
        named = {f"decoder.{name}": tensor.contiguous() for name, tensor in shard.items()}
        save_file(named, folder / shard_name(rank))
        ranks += 1
    for name in MODEL_FILES if source is not None else ():
        assert source is not None
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    config = {
        **model,
        "neuron_config": _settings(shape, ranks),
        "aneuron": {
            "version": FORMAT_VERSION,
            "num_slots": shape.num_slots,
            "sampling_columns": shape.sampling_columns,
        },
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def shard_name(rank: int) -> str:
    """Return the file of a rank's weights, below the artifact's folder."""
    return f"weights/tp{rank}_sharded_checkpoint.safetensors"


def _settings(shape: ProgramShape, ranks: int) -> dict[str, Any]:
    """Return NxDI's settings for programs of ours."""
    settings: dict[str, Any] = {
        "batch_size": shape.batch_size,
        "ctx_batch_size": 1,
        "tkg_batch_size": shape.batch_size,
        "max_batch_size": shape.batch_size,
        "is_continuous_batching": True,
        "seq_len": shape.max_model_len,
        "max_context_length": shape.max_model_len,
        "enable_bucketing": True,
        "context_encoding_buckets": list(shape.context_buckets),
        "token_generation_buckets": list(shape.token_buckets),
        "torch_dtype": shape.dtype,
        "tp_degree": ranks,
        "local_ranks_size": ranks,
        "start_rank_id": 0,
        "save_sharded_checkpoint": True,
        "on_device_sampling_config": {
            "do_sample": True,
            "dynamic": True,
            "global_topk": CANDIDATES,
        },
    }
    if shape.is_block_kv:
        settings |= {
            "is_block_kv_layout": True,
            "is_prefix_caching": True,
            "pa_num_blocks": shape.num_blocks + 1,
            "pa_block_size": shape.block_size,
            "prefix_buckets": list(shape.prefix_buckets),
        }
    else:
        settings["kv_cache_batch_size"] = shape.num_blocks
    return settings


def _model_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's own config: NxDI puts it beside its settings."""
    file = folder / "config.json"
    return {**(read_json(file) if file.is_file() else {}), **config}


def _spec(name: str, shape: ProgramShape, model: dict[str, Any], folder: Path) -> ModelSpec:
    if model.get("vocab_size") is None:
        raise ConfigError(f"{CONFIG_FILE} lacks vocab_size", param="vocab_size")
    vocab_size = count_of(model, "vocab_size", 1)
    generation = folder / "generation_config.json"
    sources = [read_json(generation), model] if generation.is_file() else [model]
    samples = shape.sampling != "none"
    is_drawn = shape.sampling == "drawn"
    return ModelSpec(
        name=name,
        vocab_size=vocab_size,
        max_model_len=shape.max_model_len,
        eos_token_ids=eos_token_ids(sources, vocab_size),
        kv_bytes_per_token=_kv_bytes_per_token(shape, model),
        dtype=shape.dtype,
        sampled_dtype="int32" if samples else "float32",
        on_device_sampling=samples,
        has_slots=shape.num_slots > 0,
        max_prompts=1,
        can_fork=False,
        unsupported_params=("min_p", "seed") if is_drawn and not shape.is_ours else (),
        greedy_only=shape.sampling == "greedy",
        bucket_edges=shape.token_buckets,
    )


def _kv_bytes_per_token(shape: ProgramShape, model: Mapping[str, Any]) -> int:
    """Return the cache's bytes of a token, over all ranks; of a model not described so, 1."""
    heads = _count_of_model(model, "num_attention_heads", 1)
    default = max(1, _count_of_model(model, "hidden_size", heads) // heads)
    cells = 2 * _count_of_model(model, "num_hidden_layers", 1)
    cells *= _count_of_model(model, "head_dim", default)
    cells *= _count_of_model(model, "num_key_value_heads", heads)
    return cells * DTYPES[shape.dtype].itemsize


def _count_of_model(model: Mapping[str, Any], name: str, default: int) -> int:
    try:
        return count_of(model, name, default)
    except ConfigError as error:
        raise ConfigError(f"the model's config is damaged: {error}", param="model") from error


def _shard(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {file}: {error}", param=file.name) from error


def _fixed(name: str, value: object, what: str) -> ConfigError:
    return ConfigError(f"{name} of this artifact must be {what}, not {value!r}", param=name)
