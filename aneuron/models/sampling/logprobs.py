"""Log probabilities: of sampled tokens, of prompts, and of the likeliest alternatives.

Comes in: logits as the model gave them, before any rule and temperature (as vLLM's
`raw_logprobs`). Goes out: columns that travel to the host with the tokens. Used by
executables, so on the device's thread alone; only rows that asked for it are looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aneuron.plans import PromptLogprobs, SampledLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.plans import ModelInput

__all__ = ["prompt_logprobs", "raw_logprobs", "sampled_logprobs"]

_SLICE = 64  # tokens of a prompt whose logits are in memory at a time


def raw_logprobs(logits: torch.Tensor, inputs: ModelInput) -> torch.Tensor | None:
    """Return the log probabilities of the samples that want them.

    Args:
        logits: float32 [S, V]; not changed.
        inputs: the launch.

    Returns:
        float32 [L, V], for `inputs.logprob_samples`; None if no sample wants them.
    """
    if inputs.logprob_samples is None:
        return None
    return logits[torch.from_numpy(inputs.logprob_samples)].log_softmax(dim=-1)


def sampled_logprobs(
    rows: torch.Tensor, tokens: torch.Tensor, inputs: ModelInput
) -> SampledLogprobs:
    """Return what the launch's tokens, and the likeliest ids, had.

    Args:
        rows: of `raw_logprobs`.
        tokens: int32 [samples], all that were sampled.
        inputs: the launch.
    """
    samples = inputs.logprob_samples
    assert samples is not None
    picked = _pick(rows, tokens[torch.from_numpy(samples)], inputs.num_logprobs)
    return SampledLogprobs(samples, *picked)


def prompt_logprobs(
    logits_of: Callable[[np.ndarray], torch.Tensor], inputs: ModelInput
) -> PromptLogprobs | None:
    """Return what the tokens of prompts had, given those before them.

    Args:
        logits_of: gives the logits of tokens of the launch, int64 [k] → float32 [k, V]; called
            for a few at a time.
        inputs: the launch.

    Returns:
        For `inputs.prompt_targets`; None if no prompt wants them.
    """
    wanted = inputs.prompt_targets
    if wanted is None:
        return None
    parts = [
        _pick(
            logits_of(wanted.indices[begin : begin + _SLICE]).log_softmax(dim=-1),
            torch.from_numpy(wanted.targets[begin : begin + _SLICE]),
            wanted.num_logprobs,
        )
        for begin in range(0, len(wanted.indices), _SLICE)
    ]
    return PromptLogprobs(*map(np.concatenate, zip(*parts, strict=True)))


def _pick(
    rows: torch.Tensor, tokens: torch.Tensor, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows' values at the tokens; and the likeliest ids and theirs, best first."""
    chosen = rows.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
    likeliest = rows.topk(min(most, rows.shape[1]), dim=-1)
    return chosen.numpy(), likeliest.indices.int().numpy(), likeliest.values.numpy()
