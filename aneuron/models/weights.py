"""From a directory of safetensors to a decoder with its weights.

Comes in: a directory with model.safetensors, or shards and their index, under Hugging Face
names. Goes out: a `Decoder` that owns its memory (nothing stays mapped to the files).
Blocking; runs in a thread while the engine opens. Pickle files are never read.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from aneuron.errors import ConfigError
from aneuron.models.decoder import SCALE_BYTES, Decoder
from aneuron.models.files.weight_files import weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aneuron.models.architecture import ModelConfig

__all__ = ["kv_bytes_per_token", "kv_width", "load_decoder"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HEAD = "lm_head.weight"
# Old checkpoints carry the rope frequencies, which follow from config.json.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of the checkpoint that makes up (a part of) one of the decoder's."""

    name: str
    shape: tuple[int, ...]
    repeat: int = 0  # rows that all get this tensor; 0 = take it as it is


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes that one token takes in the K and V caches, of `dtype`, of all layers."""
    cells = 2 * config.num_layers * config.num_kv_heads
    return cells * kv_width(config, dtype) * dtype.itemsize


def kv_width(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the cells of one key or value: head_dim, and with 8 bits those of its scale."""
    return config.head_dim + (SCALE_BYTES if dtype == torch.uint8 else 0)


def load_decoder(path: Path, config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """Build the decoder of `config` with the weights under `path`.

    Args:
        path: directory with model.safetensors, or with model.safetensors.index.json and
            its shards; the single file wins, as in `transformers`.
        config: the model's configuration.
        dtype: of the weights and the computation; the files may hold float16, bfloat16,
            float32 or float64.

    Raises:
        ConfigError: a file is missing or corrupt (`param` is the file's name), or a tensor
            is missing, unexpected or of a wrong shape or dtype (`param` is its name).
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    recipe = dict(_recipe(config))
    with ExitStack() as stack:
        checkpoint = _Checkpoint(path, stack)
        _check_names(checkpoint, recipe, config)
        state = {name: _build(checkpoint, parts, dtype) for name, parts in recipe.items()}
    decoder.load_state_dict(state, assign=True)
    return decoder.eval().requires_grad_(requires_grad=False)


class _Checkpoint:
    """The tensors of a directory by name; its files close with `stack`."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        files = weight_files(path)
        if not files:
            raise ConfigError(f"{path} holds no *.safetensors", param="model")
        for file in files:
            handle = stack.enter_context(_open(file))
            self._files.update(dict.fromkeys(handle.keys(), handle))

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def read(self, part: _Part, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor in `dtype`, in memory of its own.

        Raises:
            ConfigError: its shape or dtype is wrong.
        """
        try:
            tensor: torch.Tensor = self._files[part.name].get_tensor(part.name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {part.name}: {error}", param=part.name) from error
        if tuple(tensor.shape) != part.shape:
            message = f"{part.name} has shape {tuple(tensor.shape)}, config.json says {part.shape}"
            raise ConfigError(message, param=part.name)
        if tensor.dtype not in _DTYPES:
            message = f"{part.name} has dtype {tensor.dtype}, which is not supported"
            raise ConfigError(message, param=part.name)
        return tensor.to(dtype, copy=True)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {file}: {error}", param=file.name) from error


def _check_names(
    checkpoint: _Checkpoint, recipe: dict[str, list[_Part]], config: ModelConfig
) -> None:
    """Refuse a checkpoint that lacks a tensor, or has one that nothing would use."""
    needed = {part.name for parts in recipe.values() for part in parts}
    missing = sorted(needed - checkpoint.names)
    if missing:
        raise ConfigError(
            f"the weights lack {missing[0]} ({len(missing)} in all)", param=missing[0]
        )
    unused = checkpoint.names - needed
    unexpected = sorted(name for name in unused if not name.endswith(_IGNORED_SUFFIX))
    if config.tied and unexpected == [_HEAD]:
        return _check_tied(checkpoint, config)
    if unexpected:
        message = f"nothing uses the tensor {unexpected[0]} ({len(unexpected)} in all)"
        raise ConfigError(message, param=unexpected[0])
    return None


def _check_tied(checkpoint: _Checkpoint, config: ModelConfig) -> None:
    """Refuse an output layer that config.json calls tied and that is not."""
    shape = (config.vocab_size, config.hidden_size)
    head = checkpoint.read(_Part(_HEAD, shape), torch.float32)
    embed = checkpoint.read(_Part("model.embed_tokens.weight", shape), torch.float32)
    if not torch.equal(head, embed):
        raise ConfigError(f"{_HEAD} differs from the embedding it is tied to", param=_HEAD)


def _build(checkpoint: _Checkpoint, parts: list[_Part], dtype: torch.dtype) -> torch.Tensor:
    tensors = [checkpoint.read(part, dtype) for part in parts]
    if parts[0].repeat:
        rows = [t.expand(p.repeat, -1) for t, p in zip(tensors, parts, strict=True)]
        return torch.cat(rows)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _recipe(config: ModelConfig) -> Iterator[tuple[str, list[_Part]]]:
    """Yield each of the decoder's tensors with the checkpoint's tensors it is made of."""
    embedding = (config.vocab_size, config.hidden_size)
    yield "embed.weight", [_Part("model.embed_tokens.weight", embedding)]
    for index in range(config.num_layers):
        yield from _layer_recipe(config, f"layers.{index}", f"model.layers.{index}")
    yield "norm.weight", [_Part("model.norm.weight", (config.hidden_size,))]
    if not config.tied:
        yield _HEAD, [_Part(_HEAD, embedding)]


def _layer_recipe(config: ModelConfig, to: str, source: str) -> Iterator[tuple[str, list[_Part]]]:
    hidden, size, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    attention = f"{source}.self_attn"
    qkv = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    yield from _linear(f"{to}.attention.qkv", attention, qkv, hidden, bias=config.qkv_bias)
    out = {"o_proj": hidden}
    yield from _linear(f"{to}.attention.out", attention, out, queries, bias=config.out_bias)
    if config.qk_norm:
        heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
        parts = [_Part(f"{attention}.{k}.weight", (dim,), n) for k, n in heads.items()]
        yield f"{to}.attention.qk_norm.weight", parts
    mlp, gate_up = f"{source}.mlp", {"gate_proj": size, "up_proj": size}
    yield from _linear(f"{to}.mlp.gate_up", mlp, gate_up, hidden, bias=config.mlp_bias)
    yield from _linear(f"{to}.mlp.down", mlp, {"down_proj": hidden}, size, bias=config.mlp_bias)
    for norm, name in (("input", "input_layernorm"), ("post", "post_attention_layernorm")):
        yield f"{to}.{norm}_norm.weight", [_Part(f"{source}.{name}.weight", (hidden,))]


def _linear(
    to: str, source: str, outputs: dict[str, int], inputs: int, *, bias: bool
) -> Iterator[tuple[str, list[_Part]]]:
    """Yield the fused weight (and bias) of linear layers that share their input."""
    yield f"{to}.weight", [_Part(f"{source}.{k}.weight", (n, inputs)) for k, n in outputs.items()]
    if bias:
        yield f"{to}.bias", [_Part(f"{source}.{k}.bias", (n,)) for k, n in outputs.items()]
