"""A decoder over several ranks: what each of them has of the heads and of the MLP.

Comes in: a model's configuration and its weights. Goes out: those of one rank. Queries, keys,
values, gate and up are cut by rows, the two matrices behind them by columns, so that a layer has
two sums over the ranks (`Decoder`'s `reduce`). Embedding, norms and output layer are on all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aneuron.models.architecture import ModelConfig

__all__ = ["rank_config", "shard_state"]

_SUMMED = ("attention.out", "mlp.down")  # whose outputs are added up


def rank_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return the configuration of each rank's part of a model.

    Raises:
        ConfigError: the ranks do not divide the heads or the MLP.
    """
    parts = {
        "heads": config.num_heads,
        "heads of keys and values": config.num_kv_heads,
        "columns of the MLP": config.intermediate_size,
    }
    for name, number in parts.items():
        if number % ranks:
            raise ConfigError(
                f"tensor_parallel_size {ranks} does not divide the model's {number} {name}",
                param="tensor_parallel_size",
            )
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=config.num_kv_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
    )


def shard_state(
    state: Mapping[str, torch.Tensor], config: ModelConfig, rank: int, ranks: int
) -> dict[str, torch.Tensor]:
    """Return one rank's part of a decoder's weights, in memory of their own.

    Args:
        state: of the whole decoder, by its names.
        config: of the whole model.
        rank: whose part.
        ranks: how many there are; they divide heads and MLP (`rank_config`).
    """
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    rows = {
        "attention.qkv": (heads * dim, kv_heads * dim, kv_heads * dim),
        "attention.qk_norm": (heads, kv_heads),
        "mlp.gate_up": (config.intermediate_size, config.intermediate_size),
    }
    shards = {}
    for name, tensor in state.items():
        owner, _, kind = name.rpartition(".")
        layer = next((one for one in (*rows, *_SUMMED) if owner.endswith(one)), None)
        if layer is None:
            shards[name] = tensor.clone()
        elif layer in rows:
            shards[name] = _rows(tensor, rows[layer], rank, ranks)
        elif kind == "weight":
            shards[name] = tensor.chunk(ranks, dim=1)[rank].clone()
        else:  # of all the summands one has the bias
            shards[name] = tensor.clone() if rank == 0 else torch.zeros_like(tensor)
    return shards


def _rows(tensor: torch.Tensor, sizes: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
    """Return the rank's rows of each of several matrices that lie behind one another."""
    return torch.cat([part.chunk(ranks)[rank] for part in torch.split(tensor, list(sizes))])
