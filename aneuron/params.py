"""What one request may ask for: validated once at the call, frozen, never changed.

Comes in: keyword arguments of `engine.generate()`. Goes out: a `SamplingParams` that
the scheduler and the batch read. Pure; runs in the caller's task.
"""

from __future__ import annotations

import math
import numbers
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aneuron.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "STATE_COLUMNS",
    "SamplingParams",
    "check_deadline",
    "check_priority",
    "check_vocabulary_of",
    "num_likeliest",
]

# What executables read of a request, beside its tokens: a column each, by name, and its dtype.
STATE_COLUMNS = {
    "prompt_lens": "int32",
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "seed": "int64",
}

_INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs")
_MAX_STOP_STRINGS = 16
_MAX_STOP_CHARS = 1024
_MAX_STOP_IDS = 64
_MAX_BIASED_IDS = 1024
_MAX_LOGPROBS = 20
_MAX_BAD_WORDS = 64
_MAX_ALLOWED_IDS = 2**18
_MAX_WORD_CHARS = 256
_MAX_DEADLINE_S = 1e6  # loops cannot set a timer for much later


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        max_tokens: most new tokens; `None` means up to the length limit.
        min_tokens: no stop of any kind before this many new tokens.
        temperature: 0 is greedy (argmax); otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set whose probability reaches this share, in (0, 1].
        min_p: drop tokens less likely than this share of the most likely, in [0, 1].
        presence_penalty: taken off the logits of tokens in the answer so far, in [-2, 2].
        frequency_penalty: taken off once for each time that they occurred, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in the
            prompt or the answer so far, in [0.01, 100]; 1 changes nothing.
        logit_bias: added to the logits of these ids, each in [-100, 100]; kept as pairs.
        allowed_token_ids: only these ids may be drawn.
        bad_words: texts that never appear in the answer as tokens spell them.
        seed: the noise is a function of (seed, position), so a seeded request repeats;
            `None` draws a seed. Choice i of several has seed + i.
        logprobs: give each token's log probability and those of so many likeliest ids, 0..20,
            as the model has them before any of the above; None gives none.
        prompt_logprobs: likewise, of the prompt's tokens given those before them; its prompt
            is computed whole, whatever of it is cached.
        stop: strings that end the answer; the match itself is not part of the text.
        include_stop: keep the matched string in the text.
        stop_token_ids: ids that end the answer, beside the model's own end ids.
        ignore_eos: do not end at the model's own end ids.
        n: how many answers (choices) to give to the prompt, which is computed once.
        detokenize: make text of the tokens; False gives ids alone, and takes no `stop`.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequest: a field is out of range; `param` names it.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Check every field and normalise sequences to tuples."""
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}",
                param="min_tokens",
            )
        _check_float("temperature", self.temperature, low=0.0, high=100.0)
        _check_int("top_k", self.top_k, low=-1)
        _check_float("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be over 0", param="top_p")
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_int("n", self.n, low=1)
        self._check_rules()
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        for name in _INTEGERS:  # numpy's would overflow
            value = getattr(self, name)
            if type(value) is not int and value is not None:
                object.__setattr__(self, name, int(value))
        for name in ("include_stop", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false", param=name)
        object.__setattr__(self, "stop", _check_stop(self.stop))
        if self.stop and not self.detokenize:
            raise InvalidRequest(
                "stop strings are found in text: detokenize must be true", param="stop"
            )
        object.__setattr__(self, "stop_token_ids", _check_stop_ids(self.stop_token_ids))

    def _check_rules(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _check_int(name, value, low=0, high=_MAX_LOGPROBS)
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_float("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _check_allowed(self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", _check_bad_words(self.bad_words))

    @property
    def has_penalties(self) -> bool:
        """Whether its own tokens change what it is given."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def rule(self) -> str | None:
        """The first field that changes logits before a token is drawn, or None."""
        for name, neutral in _RULES.items():
            value = getattr(self, name)
            if value != neutral and value is not None:
                return name
        return None

    @property
    def needs_logits(self) -> str | None:
        """The first field that needs a look at logits, or None."""
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                return name
        return self.rule

    @property
    def has_rules(self) -> bool:
        """Whether its logits are changed before a token is drawn."""
        return self.min_tokens > 0 or self.rule is not None

    @classmethod
    def build(cls, params: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
        """Return `params` with the keyword arguments of the call laid over it.

        Raises:
            InvalidRequest: an unknown name, or a value out of range.
        """
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"params must be SamplingParams, not {type(params).__name__}", param="params"
            )
        known = cls.__dataclass_fields__
        for name in sampling:
            if name not in known:
                raise InvalidRequest(
                    f"unknown parameter {name!r}; known are {', '.join(sorted(known))}",
                    param=name,
                )
        if params is None:
            return cls(**sampling)
        return replace(params, **sampling) if sampling else params

    def noise_seed(self, choice: int = 0) -> int:
        """Return the seed of a choice's noise as an int64: from the given one, or a fresh one."""
        if self.seed is None:
            return _NOISE.getrandbits(63)
        return (self.seed + choice + 2**63) % 2**64 - 2**63


_RULES = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": (),
}

# Seeds of requests without one; not a secret, and urandom would take 10 us each.
_NOISE = random.Random()  # noqa: S311
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_NOISE.seed)


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    # The exact type first: asking the abstract one takes 1 us a field.
    if type(value) is not int and (
        isinstance(value, bool) or not isinstance(value, numbers.Integral)
    ):
        raise InvalidRequest(f"{name} must be an integer, not {value!r}", param=name)
    number = int(value)
    if number < low or (high is not None and number > high):
        bound = f"at least {low}" if high is None else f"in {low}..{high}"
        raise InvalidRequest(f"{name} must be {bound}, not {number}", param=name)


def _check_float(name: str, value: object, *, low: float, high: float) -> None:
    if type(value) is not float and (
        isinstance(value, bool) or not isinstance(value, numbers.Real)
    ):
        raise InvalidRequest(f"{name} must be a number, not {value!r}", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise InvalidRequest(f"{name} must be in {low:g}..{high:g}, not {number}", param=name)


def _check_stop(stop: object) -> tuple[str, ...]:
    if stop == ():
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, tuple | list) or not all(isinstance(s, str) for s in strings):
        raise InvalidRequest("stop must be a string or a list of strings", param="stop")
    if len(strings) > _MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop holds over {_MAX_STOP_STRINGS} strings", param="stop")
    for string in strings:
        if not 0 < len(string) <= _MAX_STOP_CHARS:
            raise InvalidRequest(
                f"a stop string must have 1..{_MAX_STOP_CHARS} characters", param="stop"
            )
    return tuple(strings)


def _check_stop_ids(ids: object) -> tuple[int, ...]:
    if ids == ():
        return ()
    if not isinstance(ids, tuple | list | set | frozenset):
        raise InvalidRequest("stop_token_ids must be a list of ids", param="stop_token_ids")
    if len(ids) > _MAX_STOP_IDS:
        raise InvalidRequest(
            f"stop_token_ids holds over {_MAX_STOP_IDS} ids", param="stop_token_ids"
        )
    for token_id in ids:
        _check_int("stop_token_ids", token_id, low=0, high=2**31 - 1)
    return tuple(int(token_id) for token_id in ids)


def check_vocabulary_of(params: SamplingParams, vocab_size: int) -> None:
    """Check that the ids which a request names are in the vocabulary.

    Raises:
        InvalidRequest: one is not; `param` names the field.
    """
    biased = list(dict(params.logit_bias or ()))
    for name, ids in (("logit_bias", biased), ("allowed_token_ids", params.allowed_token_ids)):
        if ids and ids[-1] >= vocab_size:  # they are sorted
            raise InvalidRequest(
                f"{name} names id {ids[-1]}, of a vocabulary of {vocab_size}", param=name
            )


def check_priority(priority: int, *, policy: str) -> None:
    """Check the priority of a request.

    Raises:
        InvalidRequest: it is no integer, or the engine's policy takes no notice of it.
    """
    _check_int("priority", priority, low=-(2**31), high=2**31 - 1)
    if priority and policy != "priority":
        raise InvalidRequest(
            f"priority needs an engine with scheduling_policy='priority'; this one has {policy!r}",
            param="priority",
        )


def check_deadline(deadline_s: float | None) -> float | None:
    """Return the deadline of a request as a float, in seconds from now: over 0, up to 1e6.

    Raises:
        InvalidRequest: it is none.
    """
    if deadline_s is None:
        return None
    _check_float("deadline_s", deadline_s, low=0.0, high=_MAX_DEADLINE_S)
    if deadline_s == 0:
        raise InvalidRequest("deadline_s must be over 0", param="deadline_s")
    return float(deadline_s)


def _check_bias(bias: object) -> tuple[tuple[int, float], ...] | None:
    if isinstance(bias, tuple):  # checked before: of another SamplingParams
        bias = dict(bias)
    if not isinstance(bias, Mapping):
        raise InvalidRequest("logit_bias must map ids to numbers", param="logit_bias")
    if len(bias) > _MAX_BIASED_IDS:
        raise InvalidRequest(f"logit_bias holds over {_MAX_BIASED_IDS} ids", param="logit_bias")
    for token_id, value in bias.items():
        _check_int("logit_bias", token_id, low=0, high=2**31 - 1)
        _check_float("logit_bias", value, low=-100.0, high=100.0)
    return tuple(sorted((int(one), float(value)) for one, value in bias.items())) or None


def _check_allowed(ids: object) -> tuple[int, ...]:
    name = "allowed_token_ids"
    if not isinstance(ids, tuple | list | set | frozenset | range):
        raise InvalidRequest(f"{name} must be a list of ids", param=name)
    if not 0 < len(ids) <= _MAX_ALLOWED_IDS:
        raise InvalidRequest(f"{name} must hold 1..{_MAX_ALLOWED_IDS} ids", param=name)
    if not all(type(token_id) is int for token_id in ids):
        for token_id in ids:
            _check_int(name, token_id, low=0)
    column = sorted({int(token_id) for token_id in ids})
    _check_int(name, column[0], low=0)
    _check_int(name, column[-1], low=0, high=2**31 - 1)
    return tuple(column)


def _check_bad_words(words: object) -> tuple[str, ...]:
    if not isinstance(words, tuple | list) or not all(isinstance(one, str) for one in words):
        raise InvalidRequest("bad_words must be a list of strings", param="bad_words")
    if len(words) > _MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words holds over {_MAX_BAD_WORDS} words", param="bad_words")
    for word in words:
        if not 0 < len(word) <= _MAX_WORD_CHARS:
            raise InvalidRequest(
                f"a bad word must have 1..{_MAX_WORD_CHARS} characters", param="bad_words"
            )
        try:
            word.encode()
        except UnicodeEncodeError as fault:
            raise InvalidRequest(f"a bad word is no text: {fault}", param="bad_words") from fault
    return tuple(words)


def num_likeliest(temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> int | None:
    """Return how many of the likeliest tokens top-k and top-p of any row look at; None is all.

    Args:
        temperature: float32 [rows], 0 = greedy.
        top_k: int32 [rows], 0 = all.
        top_p: float32 [rows].
    """
    samples = temperature > 0
    if (samples & (top_k == 0) & (top_p < 1)).any():
        return None
    return int((top_k * samples).max(initial=0))
