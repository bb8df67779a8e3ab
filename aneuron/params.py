"""What one request may ask for: validated once at the call, frozen, never changed.

Comes in: keyword arguments of `engine.generate()`. Goes out: a `SamplingParams` that
the scheduler and the batch read. Pure; runs in the caller's task.
"""

from __future__ import annotations

import math
import numbers
import os
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aneuron.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "STATE_COLUMNS",
    "SamplingParams",
    "check_deadline",
    "check_n",
    "check_priority",
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

_MAX_STOP_STRINGS = 16
_MAX_STOP_CHARS = 1024
_MAX_STOP_IDS = 64
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
        seed: the noise is a function of (seed, position), so a seeded request repeats;
            `None` draws a seed. Choice i of several has seed + i.
        stop: strings that end the answer; the match itself is not part of the text.
        include_stop: keep the matched string in the text.
        stop_token_ids: ids that end the answer, beside the model's own end ids.
        ignore_eos: do not end at the model's own end ids.
        n: how many answers (choices) to give to the prompt, which is computed once.
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
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
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
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "n"):  # numpy's would overflow
            value = getattr(self, name)
            if type(value) is not int and value is not None:
                object.__setattr__(self, name, int(value))
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false", param=name)
        object.__setattr__(self, "stop", _check_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _check_stop_ids(self.stop_token_ids))

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


def check_n(n: int, *, max_num_seqs: int) -> None:
    """Check that all choices of a request can run at the same time.

    Raises:
        InvalidRequest: they cannot.
    """
    if n > max_num_seqs:
        raise InvalidRequest(f"n {n} is over max_num_seqs {max_num_seqs}", param="n")


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
