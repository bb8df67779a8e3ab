"""What is drawn under rules has the distribution of a float64 reference written another way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aneuron import SamplingParams
from aneuron.models.sampling.host import draw, noise_of
from aneuron.models.sampling.rules import SlotRules
from aneuron.plans import RuleWrite

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(60)]

VOCAB = 60
DRAWS = 100_000
PROMPT = [3, 3, 7, 11, 50]
OUTPUT = [1, 3, 3, 20, 1, 1, 59]

CASES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.4, "presence_penalty": 0.3},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "temperature": 1.4},
    {"logit_bias": {3: 2.0, 9: -3.0, 59: 1.0}, "temperature": 0.7},
    {"allowed_token_ids": [1, 2, 3, 20, 40, 41], "frequency_penalty": 0.5},
    {"bad_words": [(1, 59, 8), (30,)], "top_k": 20},
    {"min_tokens": 20, "stop_token_ids": [4, 5], "top_p": 0.9},
    {"presence_penalty": 0.8, "repetition_penalty": 1.3, "top_k": 25, "top_p": 0.95, "min_p": 0.02},
    {"frequency_penalty": 0.3, "logit_bias": {1: 4.0}, "min_p": 0.1, "temperature": 1.2},
]


def reference(row: np.ndarray, case: dict[str, Any]) -> np.ndarray:
    """The textbook way, id by id, in float64."""
    logits = {token: float(value) for token, value in enumerate(row)}
    if "allowed_token_ids" in case:
        logits = {t: v for t, v in logits.items() if t in case["allowed_token_ids"]}
    for word in case.get("bad_words", ()):
        begin = list(word[:-1])
        if OUTPUT[len(OUTPUT) - len(begin) :] == begin:
            logits.pop(word[-1], None)
    if len(OUTPUT) < case.get("min_tokens", 0):
        for token in case["stop_token_ids"]:
            logits.pop(token, None)
    for token in logits:
        logits[token] += case.get("logit_bias", {}).get(token, 0.0)
        if token in PROMPT or token in OUTPUT:
            strength = case.get("repetition_penalty", 1.0)
            positive = logits[token] > 0
            logits[token] = logits[token] / strength if positive else logits[token] * strength
        logits[token] -= case.get("frequency_penalty", 0.0) * OUTPUT.count(token)
        logits[token] -= case.get("presence_penalty", 0.0) * (token in OUTPUT)
    probs = {t: math.exp(v / case.get("temperature", 1.0)) for t, v in logits.items()}
    kept = sorted(probs, key=lambda token: (-probs[token], token))
    kept = kept[: case.get("top_k", 0) or None]
    total, before, nucleus = sum(probs[token] for token in kept), 0.0, []
    for token in kept:
        if before >= case.get("top_p", 1.0) * total:
            break
        nucleus.append(token)
        before += probs[token]
    least = case.get("min_p", 0.0) * max(probs.values())
    final = [token for token in nucleus if probs[token] >= least]
    weights = np.zeros(VOCAB)
    weights[final] = [probs[token] for token in final]
    share: np.ndarray = weights / weights.sum()
    return share


def chi_square_limit(freedom: int) -> float:
    """The value that 99.9 % stay below (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3)


@pytest.mark.parametrize("repeat", range(3))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_under_rules(case: dict[str, Any], repeat: int) -> None:
    row = np.random.default_rng(repeat).normal(scale=2.0, size=VOCAB).astype(np.float32)
    words = case.get("bad_words", ())
    params = SamplingParams(**{name: value for name, value in case.items() if name != "bad_words"})
    ids = np.array(PROMPT + OUTPUT, np.int32)
    rules = SlotRules(RuleWrite(0, params, ids, len(PROMPT), (), tuple(words)))
    expected = reference(row, case)
    rules.apply(row)
    noise = noise_of(np.full(DRAWS, 1000 + repeat), np.arange(DRAWS))
    drawn = draw(row, params.temperature, params.top_k, params.top_p, params.min_p, noise)
    counts = np.bincount(drawn, minlength=VOCAB)
    likely = expected * DRAWS >= 5  # the rule for chi-square; the rest is one class
    classes = np.append(counts[likely], counts[~likely].sum())
    hoped = np.append(expected[likely], expected[~likely].sum()) * DRAWS
    assert not counts[expected == 0].any()
    if hoped[-1] < 5:
        classes, hoped = classes[:-1], hoped[:-1]
    value = float(((classes - hoped) ** 2 / hoped).sum())
    assert value < chi_square_limit(len(hoped) - 1)
