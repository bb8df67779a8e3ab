"""Sampling on the host, for devices whose executables return logits.

Without on-device sampling the engine runs synchronously: a step's tokens exist only once
its logits have been read back. The same sampler as on the device, in numpy's clothes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aneuron.models.sampler import sample

if TYPE_CHECKING:
    from aneuron.outputs import ModelInput

__all__ = ["sample_on_host"]


def sample_on_host(logits: np.ndarray, inputs: ModelInput) -> np.ndarray:
    """Return one id per row.

    Args:
        logits: float32 [n, vocab], n at most the rows of the launch.
        inputs: the launch that gave them.

    Returns:
        int32 [n].
    """
    columns = [
        torch.from_numpy(column[: len(logits)])
        for column in (
            inputs.temperature,
            inputs.top_k,
            inputs.top_p,
            inputs.min_p,
            inputs.seed,
            inputs.context_lens - 1,
        )
    ]
    temperature, top_k, top_p, min_p, seed, position = columns
    sampled = sample(
        torch.from_numpy(logits), temperature, top_k, top_p, min_p, seed, position
    ).numpy()
    return np.asarray(sampled)
