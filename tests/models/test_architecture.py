"""config.json: read as transformers reads it, refused where it cannot be honoured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aneuron.errors import ConfigError
from aneuron.models.architecture import ModelConfig
from aneuron.models.rope import cos_sin, inverse_frequencies, rotate

pytestmark = pytest.mark.tiny

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN = {**LLAMA, "model_type": "qwen2"}
SMOL = {**LLAMA, "model_type": "smollm3"}
MISTRAL = {**LLAMA, "model_type": "mistral"}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-all": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
}


def parse(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**base, **changes})


def test_plain_llama() -> None:
    config = parse(LLAMA, rope_theta=5000.0)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (4, 8, 2)
    assert (config.head_dim, config.max_model_len) == (8, 512)
    assert config.rope.theta == 5000.0
    assert config.windows == (None,) * 4
    assert config.rope_layers == (True,) * 4
    assert not (config.tied)
    assert not (config.qkv_bias)
    assert not (config.out_bias)
    assert not (config.qk_norm)


def test_families_have_their_traits() -> None:
    assert parse(QWEN).qkv_bias
    assert not parse(QWEN).out_bias
    assert parse(LLAMA, attention_bias=True).out_bias
    assert parse({**LLAMA, "model_type": "qwen3"}).qk_norm
    assert parse({**LLAMA, "model_type": "qwen3"}).head_dim == 128
    assert parse(SMOL).tied
    assert parse(SMOL).rope.theta == 2_000_000.0
    assert parse(SMOL).rope_layers == (True, True, True, False)
    assert parse(SMOL, no_rope_layers=[0, 1, 1, 0, 1]).rope_layers == (False, True, True, False)
    assert parse(LLAMA, num_key_value_heads=None).num_kv_heads == 8


def test_sliding_windows_are_per_layer() -> None:
    assert parse(MISTRAL, sliding_window=None).windows == (None,) * 4
    assert parse(MISTRAL, sliding_window=9).windows == (9,) * 4
    assert parse(MISTRAL).windows == (4096,) * 4
    assert parse(QWEN, sliding_window=9).windows == (None,) * 4
    sliding: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9}
    assert parse(QWEN, **sliding, max_window_layers=3).windows == (None, None, None, 9)
    types = ["sliding_attention", "full_attention"] * 2
    assert parse(QWEN, **sliding, layer_types=types).windows == (9, None, 9, None)
    assert parse(SMOL, **sliding).windows == (None, None, None, 9)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("style", ["rope_scaling", "type", "rope_parameters"])
def test_rope_frequencies_equal_transformers(scaling: str, style: str) -> None:
    rope = dict(SCALINGS[scaling])
    reference = transformers.LlamaConfig(
        **LLAMA, rope_parameters={**rope, "rope_theta": 7000.0, "rope_type": rope["rope_type"]}
    )
    expected, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](reference, torch.device("cpu"))
    if style == "type":
        rope["type"] = rope.pop("rope_type")
    if style == "rope_parameters":
        config = parse(LLAMA, rope_parameters={**rope, "rope_theta": 7000.0})
    else:
        config = parse(LLAMA, rope_scaling=rope, rope_theta=7000.0)
    torch.testing.assert_close(inverse_frequencies(config.rope, 8), expected, atol=0, rtol=1e-6)
    assert config.rope.attention_factor == pytest.approx(scale)


def test_stretched_ropes_lengthen_the_context() -> None:
    lengths = {
        name: parse(LLAMA, rope_scaling=rope).max_model_len for name, rope in SCALINGS.items()
    }
    assert lengths == {
        "linear": 2048,
        "dynamic": 512,
        "llama3": 512,
        "yarn": 512,
        "yarn-all": 512,
    }


def test_rotation_is_by_angle() -> None:
    inv_freq = torch.tensor([1.0, 0.5])
    cos, sin = cos_sin(torch.tensor([0, 3], dtype=torch.int32), inv_freq, 1.0, torch.float32)
    heads = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).expand(2, 1, 4)
    rotated = rotate(heads, cos, sin)
    assert rotated[0].tolist() == heads[0].tolist()
    expected = torch.complex(heads[1, 0, :2], heads[1, 0, 2:]) * torch.exp(1j * 3 * inv_freq)
    torch.testing.assert_close(rotated[1, 0], torch.cat((expected.real, expected.imag)))


@pytest.mark.parametrize(
    ("base", "changes", "param"),
    [
        (LLAMA, {"model_type": "gpt2"}, "model_type"),
        (LLAMA, {"model_type": None}, "model_type"),
        (LLAMA, {"model_type": "mixtral"}, "model_type"),
        (LLAMA, {"model_type": ["llama"]}, "model_type"),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads"),
        (LLAMA, {"num_attention_heads": 10}, "num_attention_heads"),
        (LLAMA, {"num_attention_heads": True}, "num_attention_heads"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size"),
        (LLAMA, {"hidden_size": None}, "hidden_size"),
        (LLAMA, {"vocab_size": -1}, "vocab_size"),
        (LLAMA, {"num_hidden_layers": 2.0}, "num_hidden_layers"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA, {"head_dim": 7}, "head_dim"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA, {"max_position_embeddings": None}, "max_position_embeddings"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (LLAMA, {"sliding_window": 64}, "sliding_window"),
        (LLAMA, {"rope_theta": 0}, "rope_theta"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling"),
        (LLAMA, {"rope_scaling": [1]}, "rope_scaling"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (LLAMA, {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
        (
            LLAMA,
            {"rope_scaling": {**SCALINGS["llama3"], "high_freq_factor": 1}},
            "high_freq_factor",
        ),
        (MISTRAL, {"layer_types": ["full_attention"] * 4}, "layer_types"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window"),
        (QWEN, {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        (QWEN, {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        (QWEN, {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN, {"max_window_layers": "3"}, "max_window_layers"),
        (SMOL, {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers"),
    ],
)
def test_unsupported_and_wrong_values_are_named(
    base: dict[str, Any], changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(ConfigError) as info:
        parse(base, **changes)
    assert info.value.param == param
    assert param in str(info.value)


def test_config_must_be_an_object() -> None:
    with pytest.raises(ConfigError):
        ModelConfig.from_dict([])  # type: ignore[arg-type]
