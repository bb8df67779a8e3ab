"""What a dense Llama-family model looks like: its config.json, checked and made exact.

Comes in: the dictionary of a Hugging Face config.json. Goes out: a frozen `ModelConfig`
that decoder and weights are built from. Pure, without torch; runs when a model is loaded.
Whatever could change the numbers and is not supported is refused, never ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from aneuron.errors import ConfigError

__all__ = ["ModelConfig", "RopeConfig"]

Config = dict[str, Any]

_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The defaults and fixed traits of a model_type, as `transformers` has them."""

    num_kv_heads: int | None = None  # where the key is missing; None = as many as heads
    head_dim: int | None = None
    theta: float = 10_000.0
    tied: bool = False
    qkv_bias: bool | None = None  # None = the key attention_bias says so
    mlp_bias: bool = False  # the key mlp_bias is read
    qk_norm: bool = False
    window: str = "none"  # none, all (every layer), or layer_types


_FAMILIES = {
    "llama": _Family(mlp_bias=True),
    "mistral": _Family(num_kv_heads=8, qkv_bias=False, window="all"),
    "qwen2": _Family(num_kv_heads=32, qkv_bias=True, window="layer_types"),
    "qwen3": _Family(num_kv_heads=32, head_dim=128, qk_norm=True, window="layer_types"),
    "smollm3": _Family(
        num_kv_heads=4, theta=2_000_000.0, tied=True, mlp_bias=True, window="layer_types"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base, scaling and the scaling's parameters.

    Attributes:
        kind: `default`, `linear`, `dynamic`, `llama3` or `yarn`.
        theta: base of the wavelengths.
        factor: how far the context is stretched; 1 for `default`.
        original_max_position: tokens of the context in pretraining (`llama3`, `yarn`).
        attention_factor: multiplies cos and sin (`yarn`).
        low_freq_factor, high_freq_factor: bounds of the blend (`llama3`).
        beta_fast, beta_slow, truncate: bounds of the ramp (`yarn`).
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions and traits of one dense decoder.

    Attributes:
        model_type: the family's name in config.json.
        num_layers, num_heads, num_kv_heads, head_dim: attention's shape.
        max_model_len: tokens of the longest context, the rope scaling included.
        qkv_bias, out_bias, mlp_bias: which linear layers have a bias.
        qk_norm: queries and keys are normalised per head.
        tied: the output layer is the embedding.
        windows: per layer, tokens of the sliding window, or None for the whole context.
        rope_layers: per layer, whether positions are rotated in (NoPE layers: false).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]
    rope_layers: tuple[bool, ...]

    @classmethod
    def from_dict(cls, config: Config) -> ModelConfig:
        """Return the checked configuration of a Hugging Face config.json.

        Keys and defaults are those of `transformers`' configuration classes (version 5;
        the older `rope_theta` and `rope_scaling` are read too).

        Raises:
            ConfigError: the model is of another kind, or a value is missing, wrong or not
                supported; `param` is the key.
        """
        family = _family(config)
        num_layers = _int(config, "num_hidden_layers")
        num_heads = _int(config, "num_attention_heads")
        rope = _rope(config, family)
        rope_layers = _rope_layers(config, num_layers)
        attention_bias = _bool(config, "attention_bias", default=False)
        qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
        return cls(
            model_type=config["model_type"],
            vocab_size=_int(config, "vocab_size"),
            hidden_size=_int(config, "hidden_size"),
            intermediate_size=_int(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(config, num_heads, family),
            head_dim=_head_dim(config, num_heads, family),
            max_model_len=_max_model_len(_int(config, "max_position_embeddings"), rope),
            norm_eps=_float(config, "rms_norm_eps", default=1e-6),
            rope=rope,
            qkv_bias=qkv_bias,
            out_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=_bool(config, "mlp_bias", default=False) and family.mlp_bias,
            qk_norm=family.qk_norm,
            tied=_bool(config, "tie_word_embeddings", default=family.tied),
            windows=_windows(config, num_layers, family, rope_layers),
            rope_layers=rope_layers,
        )


def _refuse(key: str, message: str) -> ConfigError:
    return ConfigError(f"config.json: {key} {message}", param=key)


def _family(config: object) -> _Family:
    """Find the family and refuse what no family here has."""
    if not isinstance(config, dict):
        message = f"config.json must hold an object, not {type(config).__name__}"
        raise ConfigError(message, param="config.json")
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(_FAMILIES)
        raise _refuse("model_type", f"{model_type!r} is not one of {known}")
    if config.get("hidden_act", "silu") != "silu":
        raise _refuse("hidden_act", f"{config['hidden_act']!r} is not silu")
    if config.get("quantization_config") is not None:
        raise _refuse("quantization_config", "is set: quantized checkpoints are not supported")
    for key in _MOE_KEYS:
        if config.get(key) is not None:
            raise _refuse(key, "is set: mixtures of experts are not supported")
    return family


def _int(config: Config, key: str, *, default: int | None = None) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refuse(key, f"must be a positive integer, not {value!r}")
    return value


def _float(config: Config, key: str, *, default: float | None = None) -> float:
    value = config.get(key, default)
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if not math.isfinite(number) or number <= 0:
        raise _refuse(key, f"must be a positive number, not {value!r}")
    return float(number)


def _bool(config: Config, key: str, *, default: bool) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _refuse(key, f"must be true or false, not {value!r}")
    return default if value is None else value


def _num_kv_heads(config: Config, num_heads: int, family: _Family) -> int:
    key = "num_key_value_heads"
    if config.get(key, family.num_kv_heads) is None:
        return num_heads
    num_kv_heads = _int(config, key, default=family.num_kv_heads)
    if num_heads % num_kv_heads:
        raise _refuse(key, f"{num_kv_heads} does not divide {num_heads} heads")
    return num_kv_heads


def _head_dim(config: Config, num_heads: int, family: _Family) -> int:
    hidden_size = _int(config, "hidden_size")
    if config.get("head_dim", family.head_dim) is None:
        if hidden_size % num_heads:
            message = f"{num_heads} does not divide hidden_size {hidden_size}"
            raise _refuse("num_attention_heads", message)
        config = {"head_dim": hidden_size // num_heads}
    head_dim = _int(config, "head_dim", default=family.head_dim)
    if head_dim % 2:
        raise _refuse("head_dim", f"must be even, not {head_dim}")
    return head_dim


def _per_layer(config: Config, key: str, num_layers: int) -> list[Any]:
    """Return the list under `key`, cut to the layers that there are."""
    values = config[key]
    if not isinstance(values, list) or len(values) < num_layers:
        raise _refuse(key, f"must list {num_layers} layers")
    return values[:num_layers]


def _rope_layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    if config["model_type"] != "smollm3":
        return (True,) * num_layers
    if config.get("no_rope_layers") is None:
        interval = _int(config, "no_rope_layer_interval", default=4)
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    values = _per_layer(config, "no_rope_layers", num_layers)
    if any(value not in (0, 1) for value in values):
        raise _refuse("no_rope_layers", "must list 0 (no rope) and 1 (rope)")
    return tuple(bool(value) for value in values)


def _windows(
    config: Config, num_layers: int, family: _Family, rope_layers: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """Return each layer's sliding window as `transformers` would apply it."""
    window = _window(config, family)
    if config.get("layer_types") is not None:
        types = _per_layer(config, "layer_types", num_layers)
    elif family.window == "all":
        types = [_LAYER_TYPES[window is not None]] * num_layers
    elif config["model_type"] == "smollm3":
        types = [_LAYER_TYPES[window is not None and not rope] for rope in rope_layers]
    else:
        # Read only where it decides anything; 0 is a usual value.
        first = config.get("max_window_layers", 28)
        types = [_LAYER_TYPES[window is not None and i >= first] for i in range(num_layers)]
    return tuple(_layer_window(kind, window, family) for kind in types)


def _window(config: Config, family: _Family) -> int | None:
    key = "sliding_window"
    if family.window == "none":
        if config.get(key) is not None:
            raise _refuse(key, f"is not supported for {config['model_type']}")
        return None
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise _refuse("max_window_layers", f"must be an integer, not {first!r}")
    used = family.window == "all" or _bool(config, "use_sliding_window", default=False)
    default = None if config["model_type"] == "smollm3" else 4096
    if not used or config.get(key, default) is None:
        return None
    return _int(config, key, default=default)


def _layer_window(kind: object, window: int | None, family: _Family) -> int | None:
    if kind not in _LAYER_TYPES:
        raise _refuse("layer_types", f"{kind!r} is not supported")
    sliding = kind == "sliding_attention"
    if sliding and window is None:
        raise _refuse("layer_types", "sliding_attention needs a sliding_window in use")
    if not sliding and window is not None and family.window == "all":
        raise _refuse("layer_types", "must agree with sliding_window for mistral")
    return window if sliding else None


def _rope(config: Config, family: _Family) -> RopeConfig:
    """Read rope_parameters (transformers 5) or rope_theta and rope_scaling (older)."""
    source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(source) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise _refuse(source, "must be one flat object for all layers")
    outer_theta = config.get("rope_theta")
    rope = {"rope_theta": family.theta if outer_theta is None else outer_theta, **rope}
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        raise _refuse(
            "partial_rotary_factor", "is set: partial rotary embeddings are not supported"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    reader = _ROPE_READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise _refuse(source, f"type {kind!r} is not one of {', '.join(_ROPE_READERS)}")
    return reader(rope, config)


def _plain_rope(rope: Config, _config: Config) -> RopeConfig:
    return RopeConfig(theta=_float(rope, "rope_theta"))


def _factor_rope(rope: Config, _config: Config) -> RopeConfig:
    kind = rope.get("rope_type", rope.get("type"))
    theta, factor = _float(rope, "rope_theta"), _float(rope, "factor")
    return RopeConfig(kind=str(kind), theta=theta, factor=factor)


def _llama3_rope(rope: Config, config: Config) -> RopeConfig:
    low, high = _float(rope, "low_freq_factor"), _float(rope, "high_freq_factor")
    if high <= low:
        raise _refuse("high_freq_factor", f"{high} is not over low_freq_factor {low}")
    return RopeConfig(
        kind="llama3",
        theta=_float(rope, "rope_theta"),
        factor=_float(rope, "factor"),
        original_max_position=_original_max_position(rope, config),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_rope(rope: Config, config: Config) -> RopeConfig:
    original = _original_max_position(rope, config)
    implied = _int(config, "max_position_embeddings") / original
    given = rope.get("factor")
    factor = implied if given is None else _float(rope, "factor")
    return RopeConfig(
        kind="yarn",
        theta=_float(rope, "rope_theta"),
        factor=factor,
        original_max_position=original,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=_float({"beta_fast": rope.get("beta_fast") or 32}, "beta_fast"),
        beta_slow=_float({"beta_slow": rope.get("beta_slow") or 1}, "beta_slow"),
        truncate=_bool(rope, "truncate", default=True),
    )


_ROPE_READERS = {
    "default": _plain_rope,
    "linear": _factor_rope,
    "dynamic": _factor_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
}


def _original_max_position(rope: Config, config: Config) -> int:
    key = "original_max_position_embeddings"
    if config.get(key) is not None:
        return _int(config, key)
    return _int(rope, key, default=_int(config, "max_position_embeddings"))


def _yarn_attention_factor(rope: Config, factor: float) -> float:
    """Return YaRN's scale of cos and sin (arXiv:2309.00071, equation 22; DeepSeek's mscale)."""
    if rope.get("attention_factor") is not None:
        return _float(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = _float(rope, "mscale"), _float(rope, "mscale_all_dim")
        return _mscale(factor, scales[0]) / _mscale(factor, scales[1])
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _max_model_len(max_position: int, rope: RopeConfig) -> int:
    """Return the longest context: linear and yarn stretch it, the others do not.

    With `dynamic`, transformers changes the frequencies of the whole batch once a row is
    longer than max_position_embeddings; up to there it is the default rope.
    """
    if rope.kind == "linear":
        return int(max_position * rope.factor)
    if rope.kind == "yarn":
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position
