"""Logits made before, in place of a model's: what comes after a forward pass can be timed alone.

Comes in: how many rows, of how large a vocabulary. Goes out: a `TorchModel` whose executables
are the real ones; the decoder in it runs one tiny layer, and gives copies of the same logits.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from aneuron.models.architecture import ModelConfig
from aneuron.models.decoder import Decoder
from aneuron.models.native.switch import WeightSource
from aneuron.models.torch_model import TorchModel
from aneuron.plans import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LogitsClock", "falling_logits", "logits_model"]

# By how much the logits of SmolLM2-135M lie under the best one, by rank: medians over an English
# text. Its vocabulary has 49,152 ids; a larger one has the more of the unlikely ones.
_RANKS = (1, 2, 5, 10, 50, 100, 500, 1000, 5000, 20_000)
_DROPS = (0.0, 0.82, 2.33, 3.73, 6.45, 7.39, 9.91, 11.17, 14.22, 18.01)
_LAST_DROP = 36.71  # of the least likely one
_BEST = 16.0
_SEED = 0


def falling_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Return float32 [num_rows, vocab_size]: a model's fall by rank, on other ids in each row."""
    ranks = [rank for rank in _RANKS if rank < vocab_size]
    drops = (*_DROPS[: len(ranks)], _LAST_DROP)
    known = np.log([*ranks, vocab_size])
    fall = _BEST - np.interp(np.log(np.arange(1, vocab_size + 1)), known, drops)
    shuffled = np.random.default_rng(_SEED).permuted(np.tile(fall, (num_rows, 1)), axis=1)
    return torch.from_numpy(shuffled.astype(np.float32))


class LogitsClock(Decoder):
    """A decoder whose logits were made before, and that notes when it has given them.

    Attributes:
        given_s: when logits were given last, of the performance counter.
    """

    def __init__(self, config: ModelConfig, prepared: torch.Tensor) -> None:
        """Make the one layer, with random weights.

        Args:
            config: of the decoder.
            prepared: float32 [R, V].
        """
        super().__init__(config)
        self.given_s = math.nan
        self._prepared = prepared

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a copy of the first n rows, [n, hidden_size] → float32 [n, V].

        A copy, because rules change logits in place; and new memory, as a model's are.
        """
        logits = self._prepared[: len(hidden)].clone()
        self.given_s = time.perf_counter()
        return logits

    def us_after(self, work: Callable[[], object]) -> float:
        """Return how long `work` still took after it had been given logits, in microseconds."""
        result = work()
        took_s = time.perf_counter() - self.given_s
        del result  # not before the clock was read: whoever calls an executable keeps its tokens
        return took_s * 1e6


def logits_model(prepared: torch.Tensor, max_model_len: int) -> TorchModel:
    """Return a model that gives these logits, float32 [R, V]; its decoder is a `LogitsClock`."""
    vocab_size = prepared.shape[1]
    config = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 2,
            "intermediate_size": 2,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": max_model_len,
            "tie_word_embeddings": True,
        }
    )
    spec = ModelSpec(
        name="logits",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(),
        kv_bytes_per_token=16,
        dtype="float32",
        has_slots=True,
        has_logits=True,
    )
    return TorchModel(spec, config, WeightSource.of(LogitsClock(config, prepared).eval()))
