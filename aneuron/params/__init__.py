"""What one request may ask for: validated once at the call, frozen, never changed.

Comes in: keyword arguments of `engine.generate()`. Goes out: a `SamplingParams` that
the scheduler and the batch read. Pure; runs in the caller's task.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from aneuron.errors import InvalidRequest
from aneuron.params.checks import (
    check_allowed,
    check_bad_words,
    check_bias,
    check_deadline,
    check_float,
    check_hooks,
    check_int,
    check_priority,
    check_stop,
    check_stop_ids,
    takes_prompt,
)
from aneuron.params.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


__all__ = [
    "STATE_COLUMNS",
    "Grammar",
    "SamplingParams",
    "check_deadline",
    "check_priority",
    "check_vocabulary_of",
    "takes_prompt",
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
_MAX_LOGPROBS = 20
_LONG_FIELDS = ("logit_bias", "allowed_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        max_tokens: most new tokens; `None` means up to the length limit.
        min_tokens: no stop of any kind before this many new tokens, but where a grammar is at
            its end.
        temperature: 0 is greedy (argmax); otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set whose probability reaches this share, in (0, 1].
        min_p: drop tokens less likely than this share of the most likely, in [0, 1].
        presence_penalty: taken off the logits of tokens in the answer so far, in [-2, 2].
        frequency_penalty: taken off once for each time that they occurred, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in the
            prompt or the answer so far, in [0.01, 100]; 1 changes nothing.
        logit_bias: added to the logits of these ids, each in [-100, 100]; kept as pairs. An id
            may be a string of digits, as in JSON.
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
        grammar: the form of the answer: `{"json": schema}` (or a pydantic class),
            `{"regex": text}`, `{"choice": [texts]}`, `{"lark": text}`, a `response_format` as
            OpenAI has it, or a `Grammar`, which it is kept as.
        logits_processors: functions of yours that change logits on the host, at most 16, called
            in this order as `hook(output_ids, logits)`, or as `hook(prompt_ids, output_ids,
            logits)` where three arguments have no default. `logits` is a float32 [vocab] array
            of its own; a hook returns it changed, or None if it wrote into it. Called in a
            worker thread, before all of the above, and the flow waits for it.

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
    grammar: Grammar | Mapping[str, Any] | None = None
    logits_processors: Callable[..., Any] | tuple[Callable[..., Any], ...] | None = ()

    def __post_init__(self) -> None:
        """Check every field and normalise sequences to tuples."""
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, low=1)
        check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}",
                param="min_tokens",
            )
        check_float("temperature", self.temperature, low=0.0, high=100.0)
        check_int("top_k", self.top_k, low=-1)
        check_float("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be over 0", param="top_p")
        check_float("min_p", self.min_p, low=0.0, high=1.0)
        check_int("n", self.n, low=1)
        self._check_rules()
        if self.seed is not None:
            check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        for name in _INTEGERS:  # numpy's would overflow
            value = getattr(self, name)
            if type(value) is not int and value is not None:
                object.__setattr__(self, name, int(value))
        for name in ("include_stop", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false", param=name)
        object.__setattr__(self, "stop", check_stop(self.stop))
        if self.stop and not self.detokenize:
            raise InvalidRequest(
                "stop strings are found in text: detokenize must be true", param="stop"
            )
        object.__setattr__(self, "stop_token_ids", check_stop_ids(self.stop_token_ids))
        self._check_guidance()

    def _check_rules(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, low=0, high=_MAX_LOGPROBS)
        check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        check_float("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", check_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = check_allowed(self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", check_bad_words(self.bad_words))

    def _check_guidance(self) -> None:
        if self.grammar is not None:
            object.__setattr__(self, "grammar", Grammar.of(self.grammar))
        object.__setattr__(self, "logits_processors", check_hooks(self.logits_processors))

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
        """The first field that needs a look at logits, or None; a grammar comes last."""
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                return name
        field = "logits_processors" if self.logits_processors else self.rule
        return "grammar" if field is None and self.grammar is not None else field

    @property
    def is_guided(self) -> bool:
        """Whether the host has a say in each token, once it knows the one before."""
        return self.grammar is not None or bool(self.logits_processors)

    @property
    def has_rules(self) -> bool:
        """Whether its logits are changed before a token is drawn."""
        return self.min_tokens > 0 or self.rule is not None

    @classmethod
    def build(
        cls,
        params: SamplingParams | None,
        sampling: dict[str, Any],
        call: Callable[..., Any] | None = None,
    ) -> SamplingParams:
        """Return `params` with the keyword arguments of the call laid over it.

        Args:
            params: to begin with; None: the defaults.
            sampling: fields by name.
            call: whose arguments they were, so that a message can name the others.

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
                names = {*known, *_names_of(call)}
                raise InvalidRequest(
                    f"unknown parameter {name!r}; known are {', '.join(sorted(names))}",
                    param=name,
                )
        if params is None:
            return cls(**sampling)
        return _overlay(params, sampling) if sampling else params

    def noise_seed(self, choice: int = 0) -> int:
        """Return the seed of a choice's noise as an int64: from the given one, or a fresh one."""
        if self.seed is None:
            return _NOISE.getrandbits(63)
        return (self.seed + choice + 2**63) % 2**64 - 2**63


def _names_of(call: Callable[..., Any] | None) -> list[str]:
    """Return the names of a call's own arguments."""
    parameters = {} if call is None else signature(call).parameters
    return [name for name, one in parameters.items() if one.kind is not Parameter.VAR_KEYWORD]


def _overlay(params: SamplingParams, sampling: dict[str, Any]) -> SamplingParams:
    same: dict[str, Any] = {
        name: value
        for name in _LONG_FIELDS
        if (value := getattr(params, name)) is not None and name not in sampling
    }
    if not same:
        return replace(params, **sampling)
    # They are in order already, and their check takes ms where they are long.
    dropped: dict[str, Any] = dict.fromkeys(same)
    made = replace(params, **dropped, **sampling)
    for name, value in same.items():
        object.__setattr__(made, name, value)
    return made


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
