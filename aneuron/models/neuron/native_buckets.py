"""Sizes that graphs of native PyTorch are compiled for, and launches of nothing but padding.

Comes in: the engine's settings. Goes out: settings with Neuron's buckets, and for warm-up one
launch of each bucket. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.errors import ConfigError
from aneuron.plans import ModelInput

if TYPE_CHECKING:
    from aneuron.config import BatchShape, EngineConfig

__all__ = ["adapt", "padding", "padding_of"]

_UNIT = 128  # tokens: the partitions of a NeuronCore
_LONGEST = 1 << 20  # tokens of a context; the model's own limit cuts the list


def adapt(config: EngineConfig) -> EngineConfig:
    """Return the settings with Neuron's buckets in the place of the default ones.

    They are powers of two: rows from 1, prompt tokens from 128, contexts of multiples of 128
    tokens. Fewer compile faster: that takes minutes for each.

    Raises:
        ConfigError: a setting asks for what native PyTorch on Neuron does not do.
    """
    refused = {
        "quantization": config.quantization is not None,
        "kv_cache_dtype": config.kv_cache_dtype != "auto",
        "tensor_parallel_size": config.tensor_parallel_size > 1,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(f"native PyTorch on Neuron has no {name}: leave it out", param=name)
    unit = lcm(_UNIT, config.block_size) // config.block_size
    limits = {
        "num_seqs_buckets": (1, config.max_num_seqs),
        "num_tokens_buckets": (_UNIT, config.max_num_batched_tokens),
        "num_blocks_buckets": (unit, max(unit, _LONGEST // config.block_size)),
    }
    asked: dict[str, Any] = {
        name: _doubled(*limit) for name, limit in limits.items() if getattr(config, name) is None
    }
    return replace(config, **asked)


def padding_of(shape: BatchShape) -> list[ModelInput]:
    """Return a launch of each bucket that a step can have, in which nothing counts.

    Raises:
        ConfigError: a dimension has no buckets, so each size would be compiled while serving.
    """
    dimensions = {
        "num_seqs_buckets": shape.rows,
        "num_tokens_buckets": shape.tokens,
        "num_blocks_buckets": shape.blocks,
    }
    for name, buckets in dimensions.items():
        if not buckets.sizes:
            raise ConfigError(
                f"{name}=() means exact sizes, and each would be compiled while serving", param=name
            )
    tokens = shape.tokens.sizes
    prefills = [
        padding(shape, shape.rows.fit(1), width, num_tokens=size)
        for least, size in zip((1, *(one + 1 for one in tokens)), tokens, strict=False)
        for width in shape.blocks.sizes
        if width * shape.block_size >= least  # what is written fits into the table
    ]
    decodes = [
        padding(shape, rows, width) for rows in shape.rows.sizes for width in shape.blocks.sizes
    ]
    return prefills + decodes


def _doubled(first: int, limit: int) -> tuple[int, ...]:
    """Return powers of two times the first, and the limit."""
    sizes = []
    while first < limit:
        sizes.append(first)
        first *= 2
    return (*sizes, limit)


def padding(
    shape: BatchShape, num_rows: int, width: int, *, num_tokens: int | None = None
) -> ModelInput:
    """Return a decode without requests, or with `num_tokens` a prefill."""
    is_decode = num_tokens is None
    length = num_rows if num_tokens is None else num_tokens
    return ModelInput(
        is_decode=is_decode,
        num_reqs=0,
        num_samples=0,
        num_tokens=0,
        max_query_len=1 if is_decode else length,
        all_greedy=True,
        input_ids=np.zeros(length, np.int32),
        positions=np.zeros(length, np.int32),
        slot_mapping=np.full(length, -1, np.int32),
        query_start=np.zeros(num_rows + 1, np.int32),
        block_table=np.zeros((num_rows, width), np.int32),
        context_lens=np.ones(num_rows, np.int32),
        logits_indices=np.zeros(num_rows, np.int32),
        prompt_lens=np.zeros(num_rows, np.int32),
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.zeros(num_rows, np.int64),
        slots=np.full(num_rows, shape.num_slots, np.int32),
    )
