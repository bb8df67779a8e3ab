"""A small model on a Neuron device, for `aneuron doctor --probe`: launches of a few fixed shapes.

Comes in: a device. Goes out: launches, unread. The model goes the way of any other (compiled
through the cache, warmed up), so whatever stops it there is a finding, too. All of it blocks; the
probe runs on a thread without an event loop.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.config import BatchShape, EngineConfig
from aneuron.models.files.cache import ensure
from aneuron.models.neuron.compiled import load_neuron
from aneuron.models.neuron.native_buckets import padding

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron.device.neuron.device import NeuronDevice
    from aneuron.device.neuron.raw import Launched
    from aneuron.models.catalog import Progress
    from aneuron.plans import ModelInput

__all__ = ["Rig", "Size"]

_PROMPT = 8  # tokens of each row before its decodes
_VERSION = 1  # of the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the model is, and its programs; by default its decode takes about 1 ms.

    Attributes:
        hidden, intermediate, num_layers, num_heads, vocab: of the model.
        max_model_len: tokens of a context, the one size that there is.
        tokens: of prefills, as buckets; the last one is `max_model_len`.
        rows: of decodes, as a bucket beside that of one row.
    """

    hidden: int = 1024
    intermediate: int = 2816
    num_layers: int = 6
    num_heads: int = 8
    vocab: int = 8192
    max_model_len: int = 512
    tokens: tuple[int, int] = (128, 512)
    rows: int = 8


class Rig:
    """The model, and what its launches are made of.

    Attributes:
        device: that it is on.
        size: of it.
        row_sizes: rows of the decodes that there are; of traced programs one number.
    """

    def __init__(self, device: NeuronDevice, size: Size, progress: Progress) -> None:
        """Make the checkpoint, load it and run every program once.

        Raises:
            ConfigError: it does not compile.
            DeviceError: the runtime refuses, or a program failed.
        """
        self.device = device
        self.size = size
        folder = ensure(
            f"aneuron-probe-v{_VERSION}-{_name(size)}",
            lambda into: _write_checkpoint(into, size),
            progress=progress,
        )
        asked = EngineConfig(
            max_num_seqs=size.rows,
            max_model_len=size.max_model_len,
            max_num_batched_tokens=size.max_model_len,
            num_tokens_buckets=size.tokens,
            enable_prefix_caching=False,
        )
        model, _, config = load_neuron(str(folder), device, asked, progress=progress)
        if device.kind == "native":
            width = size.max_model_len // config.block_size
            sizes = sorted({1, size.rows})
            config = replace(config, num_seqs_buckets=sizes, num_blocks_buckets=(width,))
        self._shape = BatchShape.of(config, size.max_model_len)
        self._width = self._shape.blocks.largest
        self.row_sizes = self._shape.rows.sizes
        self._model: Any = model.on(device)  # type: ignore[attr-defined]  # both kinds are placed
        num_blocks = size.rows * self._width
        self._model = self._model.with_kv(num_blocks, config.block_size, self._shape.num_slots)
        self._model.warm_up(self._shape, progress)

    def prefill(self, num_tokens: int, row: int = 0) -> Launched:
        """Launch a prompt of so many tokens in a row."""
        shape, num = self._shape, self._shape.tokens.fit(num_tokens)
        positions = np.arange(num_tokens)
        inputs = self._inputs(num, rows=1, is_decode=False)
        inputs.num_tokens, inputs.max_query_len = num_tokens, num
        inputs.input_ids[:num_tokens] = (positions * 7 + row * 13 + 1) % self.size.vocab
        inputs.positions[:num_tokens] = positions
        table = self._table(row)
        inputs.slot_mapping[:num_tokens] = self._cells(table, positions)
        inputs.query_start[1] = num_tokens
        inputs.block_table[0] = table
        inputs.context_lens[0] = num_tokens
        inputs.logits_indices[0] = num_tokens - 1
        assert inputs.slots is not None
        inputs.slots[0] = row
        assert num_tokens <= shape.max_model_len
        return self._launch(inputs, None)

    def begin(self, num_rows: int) -> np.ndarray:
        """Compute a short prompt in each of the rows; return their first ids, int32 [rows]."""
        return np.concatenate([self.prefill(_PROMPT, row).read() for row in range(num_rows)])

    def decode(self, step: int, num_rows: int, ids: np.ndarray | Launched) -> Launched:
        """Launch a decode of rows that have begun.

        Args:
            step: how many came before it.
            num_rows: how many rows; one of `row_sizes`.
            ids: of the step before, int32 [rows], or that step itself, unread.
        """
        inputs = self._inputs(num_rows, rows=num_rows, is_decode=True)
        position = _PROMPT + step
        inputs.num_reqs = inputs.num_samples = inputs.num_tokens = num_rows
        inputs.positions[:] = position
        inputs.context_lens[:] = position + 1
        inputs.query_start[:] = np.arange(num_rows + 1)
        inputs.logits_indices[:] = np.arange(num_rows)
        assert inputs.slots is not None
        inputs.slots[:] = np.arange(num_rows)
        for row in range(num_rows):
            table = self._table(row)
            inputs.block_table[row] = table
            inputs.slot_mapping[row] = self._cells(table, np.array([position]))[0]
        if isinstance(ids, np.ndarray):
            inputs.input_ids[:] = ids
            return self._launch(inputs, None)
        return self._launch(inputs, ids)

    def _launch(self, inputs: ModelInput, fed: Launched | None) -> Launched:
        launched: Launched = self._model.executable(inputs)(inputs, fed)
        return launched

    def _inputs(self, num_tokens: int, *, rows: int, is_decode: bool) -> ModelInput:
        """Return inputs of one real row, greedy, with nothing in them yet."""
        size = None if is_decode else num_tokens
        inputs = padding(self._shape, rows, self._width, num_tokens=size)
        inputs.num_reqs = inputs.num_samples = inputs.num_tokens = 1
        return inputs

    def _table(self, row: int) -> np.ndarray:
        return 1 + row * self._width + np.arange(self._width, dtype=np.int32)

    def _cells(self, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        size = self._shape.block_size
        cells: np.ndarray = table[positions // size] * size + positions % size
        return cells


def _name(size: Size) -> str:
    return f"{size.hidden}-{size.intermediate}-{size.num_layers}-{size.num_heads}-{size.vocab}"


def _write_checkpoint(folder: Path, size: Size) -> None:
    """Write a Llama of random weights; its output layer is its own, so that ids vary."""
    import torch
    from safetensors.torch import save_file

    config = {
        "model_type": "llama",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_heads,
        "max_position_embeddings": size.max_model_len,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    square, wide = (size.hidden, size.hidden), (size.intermediate, size.hidden)
    layer = {
        **dict.fromkeys((f"self_attn.{one}_proj" for one in "qkvo"), square),
        "mlp.gate_proj": wide,
        "mlp.up_proj": wide,
        "mlp.down_proj": wide[::-1],
    }
    ends = {"model.embed_tokens": (size.vocab, size.hidden), "lm_head": (size.vocab, size.hidden)}
    matrices = {
        **ends,
        **{
            f"model.layers.{index}.{name}": shape
            for index in range(size.num_layers)
            for name, shape in layer.items()
        },
    }
    noise = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=noise).mul_(shape[1] ** -0.5).bfloat16()
        for name, shape in matrices.items()
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    names = [f"model.layers.{at}.{norm}" for at in range(size.num_layers) for norm in norms]
    for name in ("model.norm", *names):
        weights[f"{name}.weight"] = torch.ones(size.hidden, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
