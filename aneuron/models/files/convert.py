"""From a GGUF file to the directory form that everything else reads.

Stage: before the engine opens, once per file. Comes in: a .gguf file of a dense Llama-family
model. Goes out: config.json, generation_config.json, tokenizer files and model.safetensors.
Run by the worker thread that resolves a model. Values stay exactly what the file says: plain
tensors keep their type, quantised ones become float32 (bfloat16 above a size limit).
"""

from __future__ import annotations

import json
import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.errors import ConfigError
from aneuron.models.files.cache import Progress, quiet
from aneuron.models.files.gguf_tokenizer import end_token_ids, write_tokenizer
from aneuron.models.files.tensor_files import GGUFFile, StoredTensor, read_gguf, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["convert_gguf"]

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# llama.cpp rotates neighbouring pairs for these and stores Q and K reordered for it.
_REORDERED = ("llama", "smollm3")
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PROJECTIONS = ("attn_q", "attn_k", "attn_v")
_ROPE_FACTORS = "rope_freqs.weight"
_MAX_FLOAT32_ELEMENTS = 2_000_000_000
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# What Llama 3.1 and later were made with; the file keeps only the factors that follow.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert_gguf(path: Path, into: Path, *, progress: Progress = quiet) -> None:
    """Write the model of the GGUF file into the directory.

    Raises:
        ConfigError: the file is damaged, or describes a model that is not known here.
        OSError: the file cannot be read, or the directory cannot be written.
    """
    file = read_gguf(path)
    try:
        model = _Model(file)
        config = model.config()
        tensors = model.stored_tensors()
        if write_tokenizer(file.metadata, into) > config["vocab_size"]:
            raise ConfigError("token_embd.weight has fewer rows than there are tokens")
        ends = end_token_ids(file.metadata)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", param="model") from error
    total = sum(tensor.num_bytes for tensor in tensors)
    write_safetensors(
        into / "model.safetensors", tensors, lambda done: progress("convert", done, total)
    )
    _write_json(into / "generation_config.json", _generation_config(config, ends))
    _write_json(into / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _generation_config(config: dict[str, Any], ends: list[int]) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": config["pad_token_id"],
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _as_float32(value: float) -> float:
    # The file holds float32; its shortest decimal (1e-05, not 9.9999997e-06) is what was meant.
    return float(str(np.float32(value)))


class _Model:
    """What the GGUF file says about the model, in transformers' terms."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._arch = str(file.metadata.get("general.architecture"))
        if self._arch not in _CLASSES:
            raise ConfigError(
                f"general.architecture is {self._arch!r}; known are {', '.join(_CLASSES)}",
                param="model",
            )
        self._num_layers = self._int("block_count")
        self._num_heads = self._int("attention.head_count")
        self._num_kv_heads = self._int("attention.head_count_kv", self._num_heads)
        self._hidden_size = self._int("embedding_length")
        self._intermediate_size = self._int("feed_forward_length")
        # Rows may be added past the last token, to a round number; never fewer.
        self._vocab_size = self._num_rows("token_embd.weight")
        self._head_dim = self._int("attention.key_length", self._hidden_size // self._num_heads)
        self._refuse_unknown_shapes()
        self._check_tensors()

    def _get(self, key: str) -> Any:
        return self._file.metadata.get(f"{self._arch}.{key}")

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(
                f"{self._arch}.{key} is {value!r}, not a positive number", param="model"
            )
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        value = self._get(key)
        value = default if value is None else value
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(
                f"{self._arch}.{key} is {value!r}, not a positive number", param="model"
            )
        return _as_float32(value)

    def _num_rows(self, name: str) -> int:
        if name not in self._file.tensors:
            raise ConfigError(f"the tensor {name} is missing", param="model")
        return self._file.tensors[name].shape[0]

    def _refuse_unknown_shapes(self) -> None:
        for key in ("expert_count", "attention.sliding_window"):
            if self._get(key):
                raise ConfigError(
                    f"{self._arch}.{key} is {self._get(key)}: mixtures of experts and sliding "
                    "windows cannot be read from a GGUF file; use the model's safetensors",
                    param="model",
                )
        rotated = self._int("rope.dimension_count", self._head_dim)
        values = self._int("attention.value_length", self._head_dim)
        if rotated != self._head_dim or values != self._head_dim:
            raise ConfigError(
                f"heads of {self._head_dim} with {rotated} dimensions rotated and values of "
                f"{values} are not known",
                param="model",
            )

    def _check_tensors(self) -> None:
        present = set(self._file.tensors)
        if missing := sorted(self._required() - present):
            raise ConfigError(
                f"{len(missing)} tensors are missing, such as {missing[0]}", param="model"
            )
        unknown = [name for name in present if self._hf_name(name) is None]
        if unknown := sorted(set(unknown) - {_ROPE_FACTORS}):
            raise ConfigError(f"it holds an unknown tensor {unknown[0]}", param="model")
        for name, info in self._file.tensors.items():
            if name != _ROPE_FACTORS and info.shape != (expected := self._shape(name)):
                raise ConfigError(
                    f"tensor {name} has the shape {info.shape}, not {expected}", param="model"
                )

    def _shape(self, name: str) -> tuple[int, ...]:
        part, suffix = name.split(".")[-2:]
        query, value = self._num_heads * self._head_dim, self._num_kv_heads * self._head_dim
        num_rows = {
            "token_embd": self._vocab_size,
            "output": self._vocab_size,
            "attn_q": query,
            "attn_k": value,
            "attn_v": value,
            "ffn_gate": self._intermediate_size,
            "ffn_up": self._intermediate_size,
        }.get(part, self._hidden_size)
        if part in ("attn_q_norm", "attn_k_norm"):
            return (self._head_dim,)
        if part.endswith("_norm") or suffix == "bias":
            return (num_rows,)
        columns = {"attn_output": query, "ffn_down": self._intermediate_size}
        return num_rows, columns.get(part, self._hidden_size)

    def _required(self) -> set[str]:
        parts = {f"{part}.weight" for part in _LAYER_NAMES}
        if self._arch != "qwen3":
            parts -= {"attn_q_norm.weight", "attn_k_norm.weight"}
        if self._arch == "qwen2" or self._has_bias:
            parts |= {f"{part}.bias" for part in _PROJECTIONS}
        if self._arch != "qwen2" and self._has_bias:
            parts.add("attn_output.bias")
        names = {f"blk.{index}.{part}" for index in range(self._num_layers) for part in parts}
        return names | {"token_embd.weight", "output_norm.weight"}

    @property
    def _has_bias(self) -> bool:
        return "blk.0.attn_q.bias" in self._file.tensors

    def _hf_name(self, name: str) -> str | None:
        top, _, suffix = name.rpartition(".")
        if top in _TOP_NAMES and suffix == "weight":
            return f"{_TOP_NAMES[top]}.weight"
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if not found or found[2] not in _LAYER_NAMES or int(found[1]) >= self._num_layers:
            return None
        return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}.{found[3]}"

    def config(self) -> dict[str, Any]:
        metadata = self._file.metadata
        ids = {
            f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        config = {
            "architectures": [_CLASSES[self._arch]],
            "model_type": self._arch,
            "vocab_size": self._vocab_size,
            "hidden_size": self._hidden_size,
            "intermediate_size": self._intermediate_size,
            "num_hidden_layers": self._num_layers,
            "num_attention_heads": self._num_heads,
            "num_key_value_heads": self._num_kv_heads,
            "head_dim": self._head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._int("context_length"),
            "rms_norm_eps": self._float("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._float("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": self._has_bias and self._arch != "qwen2",
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "dtype": _DTYPE_NAMES[self._dtype("token_embd.weight")],
            **ids,
        }
        return config | self._config_of_arch()

    def _config_of_arch(self) -> dict[str, Any]:
        if self._arch == "smollm3":
            # llama.cpp builds this in: each fourth layer has no rotary embedding.
            rotated = [int((index + 1) % 4 != 0) for index in range(self._num_layers)]
            return {"no_rope_layer_interval": 4, "no_rope_layers": rotated}
        return {"use_sliding_window": False} if self._arch.startswith("qwen") else {}

    def _rope_scaling(self) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._file.tensors:
            return self._llama3_scaling()
        kind = self._get("rope.scaling.type") or "none"
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._float("rope.scaling.factor")}
        if kind == "yarn":
            original = self._int("rope.scaling.original_context_length")
            return scaling | {"original_max_position_embeddings": original}
        if kind == "linear":
            return scaling
        raise ConfigError(
            f"{self._arch}.rope.scaling.type is {kind!r}; known are linear, yarn", param="model"
        )

    def _llama3_scaling(self) -> dict[str, Any] | None:
        factors = self._file.load(_ROPE_FACTORS).astype(np.float64)
        factor = _as_float32(factors.max())
        if factor == 1.0 and factors.min() == 1.0:
            return None
        theta = self._float("rope.freq_base", 10000.0)
        expected = _llama3_factors(theta, self._head_dim, factor)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
            raise ConfigError(
                f"{_ROPE_FACTORS} does not follow Llama 3's rule: use the model's safetensors",
                param="model",
            )
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}

    def _dtype(self, name: str) -> str:
        info = self._file.tensors[name]
        dtype = self._file.dtype(name)
        is_plain = info.kind.name == dtype
        return dtype if is_plain or not self._is_large else "BF16"

    @property
    def _is_large(self) -> bool:
        # float32 of a large quantised model would not fit where its GGUF file does.
        elements = sum(tensor.num_elements for tensor in self._file.tensors.values())
        return elements > _MAX_FLOAT32_ELEMENTS

    def stored_tensors(self) -> list[StoredTensor]:
        return [
            StoredTensor(hf_name, self._dtype(name), info.shape, partial(self._load, name))
            for name, info in self._file.tensors.items()
            if (hf_name := self._hf_name(name)) is not None
        ]

    def _load(self, name: str) -> NDArray[Any]:
        values = self._file.load(name)
        part = name.split(".")[-2]
        if self._arch in _REORDERED and part in ("attn_q", "attn_k"):
            return _in_halves(values, self._num_heads if part == "attn_q" else self._num_kv_heads)
        return values


def _in_halves(values: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Put each head's rows from neighbouring pairs (llama.cpp) into two halves (transformers)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _llama3_factors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    original = _LLAMA3_ROPE["original_max_position_embeddings"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors
