"""A checkpoint of a tiny Llama, in Hugging Face layout, with a byte tokenizer beside it or none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def write_checkpoint(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a folder with config.json and random weights."""
    folder.mkdir(exist_ok=True)
    config = {**CONFIG, **changes}
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    width = config["head_dim"] * config["num_attention_heads"]
    kept = config["head_dim"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kept, hidden),
        "self_attn.v_proj": (kept, hidden),
        "self_attn.o_proj": (hidden, width),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in layer.items()}
    noise = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
