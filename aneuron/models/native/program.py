"""`NativeDecoder`: a decoder's weights as the C++ library has them, and its steps.

Comes in: the weights of a `Decoder`, later each launch's `ModelInput`. Goes out: float32 logits.
Any number of tokens and rows is computed as it is: padding is left out, and nothing is compiled per
shape. Built in a worker thread; steps run on the device's launch thread, one at a time, since they
share buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aneuron.models.native import library as native
from aneuron.models.native.packing import Packed, interleave, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from aneuron.models.architecture import ModelConfig
    from aneuron.models.decoder import Decoder
    from aneuron.models.native.library import Library
    from aneuron.plans import ModelInput

__all__ = ["LANES", "NativeDecoder", "NativeSteps", "fits", "packed_weights", "part_kind"]

LANES = 16
_ALIGN = 64  # bytes
_CACHES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # CacheKind of step.cpp


def fits(config: ModelConfig, block_size: int) -> bool:
    """Whether the library computes models of these dimensions."""
    return config.head_dim % LANES == 0 and block_size % LANES == 0


class NativeDecoder:
    """The weights, shared by the engines that use them.

    Attributes:
        config: the decoder's.
        kind: of the matrices, one of `KINDS`.
        tensors: all weights by name, as they are stored.
    """

    def __init__(self, config: ModelConfig, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        """Take packed weights; see `packed_weights`."""
        self.config = config
        self.kind = kind
        self.tensors = tensors

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding: float32 or bfloat16."""
        return self.tensors["embedding"].dtype

    def structure(
        self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], block_size: int
    ) -> native.Decoder:
        """Return the structure that points at the weights and at these caches."""
        config, tensors = self.config, self.tensors
        heads = native.Heads(config.num_heads, config.num_kv_heads, config.head_dim, block_size)
        layers = (native.Layer * config.num_layers)(
            *(self._layer(index, *cache) for index, cache in enumerate(caches))
        )
        return native.Decoder(
            config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size,
            heads, int(self.dtype == torch.bfloat16), _CACHES[caches[0][0].dtype], config.norm_eps,
            config.rope.attention_factor, layers, tensors["inv_freq"].data_ptr(),
            tensors["norm"].data_ptr(), tensors["embedding"].data_ptr(),
            self._matrix("head", config.vocab_size, part_kind(self.kind, "head")),
        )  # fmt: skip

    def _layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> native.Layer:
        config, name = self.config, f"layers.{index}"
        columns = {
            "qkv": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            "out": config.hidden_size,
            "gate_up": 2 * -(-config.intermediate_size // LANES) * LANES,
            "down": config.hidden_size,
        }
        norms = (self.tensors.get(f"{name}.{norm}") for norm in _NORMS)
        return native.Layer(
            *(
                self._matrix(f"{name}.{part}", width, part_kind(self.kind, part))
                for part, width in columns.items()
            ),
            *(None if norm is None else norm.data_ptr() for norm in norms),
            keys.data_ptr(), values.data_ptr(), config.windows[index] or 0,
            int(config.rope_layers[index]),
        )  # fmt: skip

    def _matrix(self, name: str, columns: int, kind: str) -> native.Matrix:
        return Packed.of(name, kind, columns, self.tensors).matrix


# With int4. The others would cost much: smollm2-135m loses 7 % of perplexity so, 24 % with all.
_FOUR_BITS = ("gate_up", "out")
_NORMS = ("input_norm", "post_norm", "qk_norm")


def part_kind(kind: str, part: str) -> str:
    """Return the kind of one matrix: with int4, what 4 bits would harm most has 8."""
    return "int8" if kind == "int4" and part not in _FOUR_BITS else kind


def packed_weights(decoder: Decoder, kind: str) -> dict[str, torch.Tensor]:
    """Return a decoder's weights as `NativeDecoder` takes them; the embedding is shared.

    Args:
        decoder: whose weights they are.
        kind: one of `KINDS`.
    """
    head = decoder.embed if decoder.lm_head is None else decoder.lm_head
    with torch.inference_mode():
        tensors = {
            "embedding": decoder.embed.weight.detach(),
            "norm": decoder.norm.weight.float().contiguous(),
            "inv_freq": decoder.inv_freq.float().contiguous(),
            **pack(head.weight, part_kind(kind, "head")).tensors("head"),
        }
        for index, layer in enumerate(decoder.layers):
            tensors |= _layer_weights(layer, kind, f"layers.{index}")
    return tensors


def _layer_weights(layer: nn.Module, kind: str, name: str) -> dict[str, torch.Tensor]:
    attention: Any = layer.attention
    mlp: Any = layer.mlp
    bias = mlp.gate_up.bias
    both = pack(
        interleave(mlp.gate_up.weight),
        part_kind(kind, "gate_up"),
        None if bias is None else interleave(bias),
    )
    norms = (layer.input_norm, layer.post_norm, attention.qk_norm)
    return {
        **pack(attention.qkv.weight, part_kind(kind, "qkv"), attention.qkv.bias).tensors(
            f"{name}.qkv"
        ),
        **pack(attention.out.weight, part_kind(kind, "out"), attention.out.bias).tensors(
            f"{name}.out"
        ),
        **both.tensors(f"{name}.gate_up"),
        **pack(mlp.down.weight, part_kind(kind, "down"), mlp.down.bias).tensors(f"{name}.down"),
        **{
            f"{name}.{part}": norm.weight.float().contiguous()
            for part, norm in zip(_NORMS, norms, strict=True)
            if norm is not None
        },
    }


class NativeSteps:
    """One engine's steps: the weights over its cache, with its threads and buffers."""

    def __init__(
        self,
        decoder: NativeDecoder,
        library: Library,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        block_size: int,
        num_threads: int,
    ) -> None:
        """Make them.

        Args:
            decoder: the weights.
            library: that runs.
            caches: keys and values of each layer, in the library's layout.
            block_size: tokens in a block of them.
            num_threads: that compute, the launch thread among them.
        """
        self._decoder, self._caches = decoder, caches  # what the structure points at
        self._library = library
        self._structure = decoder.structure(caches, block_size)
        self._pool = library.new_pool(num_threads)
        self._hidden = np.zeros((0, decoder.config.hidden_size), np.float32)
        # Of a step, and of tokens of its prompts.
        self._logits = np.zeros((0, decoder.config.vocab_size), np.float32)
        self._others = self._logits
        self._scratch = np.zeros(0, np.uint8)

    def run(self, inputs: ModelInput, input_ids: np.ndarray) -> np.ndarray:
        """Run a step.

        Args:
            inputs: the launch.
            input_ids: int32 [tokens].

        Returns:
            The logits of its samples, float32 [S, vocab_size]: rows of padding hold anything.
            Valid until the next step.
        """
        tokens, rows, samples = inputs.num_tokens, inputs.num_reqs, inputs.num_samples
        ids = input_ids[:tokens]
        if tokens and not 0 <= int(ids.min()) <= int(ids.max()) < self._decoder.config.vocab_size:
            raise IndexError(
                f"an id of the step is outside 0..{self._decoder.config.vocab_size - 1}"
            )
        self._hidden = _at_least(self._hidden, tokens)
        self._logits = _at_least(self._logits, len(inputs.logits_indices))
        columns = (
            inputs.positions, inputs.slot_mapping, inputs.query_start, inputs.block_table,
            inputs.logits_indices,
        )  # fmt: skip
        sizes = tokens, rows, samples, inputs.block_table.shape[1]
        self._step(sizes, self._logits, input_ids, *columns)
        return self._logits[: len(inputs.logits_indices)]

    def logits_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits of tokens of the step before, int64 [n] → float32 [n, vocab_size]."""
        none = np.zeros(1, np.int32)
        self._others = _at_least(self._others, len(tokens))
        self._step((0, 0, len(tokens), 1), self._others, *[none] * 5, tokens)
        return self._others[: len(tokens)]

    def _step(
        self, sizes: tuple[int, int, int, int], logits: np.ndarray, *columns: np.ndarray
    ) -> None:
        tokens, rows, samples, _ = sizes
        needed = self._library.scratch_bytes(self._structure, max(tokens, samples), rows)
        if len(self._scratch) < needed + _ALIGN:
            self._scratch = np.empty(needed + _ALIGN, np.uint8)
        arrays = [np.ascontiguousarray(column, np.int32) for column in columns]
        scratch = self._scratch.ctypes.data
        step = native.Step(
            *sizes, *(array.ctypes.data for array in arrays),
            self._hidden.ctypes.data, logits.ctypes.data, scratch + -scratch % _ALIGN,
        )  # fmt: skip
        self._library.run(self._structure, step, self._pool)


def _at_least(buffer: np.ndarray, rows: int) -> np.ndarray:
    return buffer if len(buffer) >= rows else np.empty((rows, buffer.shape[1]), np.float32)
