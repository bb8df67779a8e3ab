"""The checks of single fields: a value in, the value as the engine keeps it out.

What is wrong raises `InvalidRequest` that names the field. Pure; runs in the caller's task.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from inspect import Parameter, iscoroutinefunction, signature
from operator import countOf
from typing import TYPE_CHECKING, Any

from aneuron.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "check_allowed",
    "check_bad_words",
    "check_bias",
    "check_deadline",
    "check_float",
    "check_hooks",
    "check_int",
    "check_priority",
    "check_stop",
    "check_stop_ids",
    "takes_prompt",
]

_MAX_ID = 2**31 - 1
_MAX_ID_DIGITS = 10
_MAX_STOP_STRINGS = 16
_MAX_STOP_CHARS = 1024
_MAX_STOP_IDS = 64
_MAX_BIASED_IDS = 1024
_MAX_BAD_WORDS = 64
_MAX_ALLOWED_IDS = 2**18
_MAX_WORD_CHARS = 256
_MAX_HOOKS = 16
_MAX_DEADLINE_S = 1e6  # loops cannot set a timer for much later


def check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    """Check that a field is an integer in a range, both ends included.

    Raises:
        InvalidRequest: it is not.
    """
    # The exact type first: asking the abstract one takes 1 us a field.
    if type(value) is not int and (
        isinstance(value, bool) or not isinstance(value, numbers.Integral)
    ):
        raise InvalidRequest(f"{name} must be an integer, not {value!r}", param=name)
    number = int(value)
    if number < low or (high is not None and number > high):
        bound = f"at least {low}" if high is None else f"in {low}..{high}"
        raise InvalidRequest(f"{name} must be {bound}, not {number}", param=name)


def check_float(name: str, value: object, *, low: float, high: float) -> None:
    """Check that a field is a finite number in a range, both ends included.

    Raises:
        InvalidRequest: it is not.
    """
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


def check_priority(priority: int, *, policy: str) -> None:
    """Check the priority of a request.

    Raises:
        InvalidRequest: it is no integer, or the engine's policy takes no notice of it.
    """
    check_int("priority", priority, low=-(2**31), high=2**31 - 1)
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
    check_float("deadline_s", deadline_s, low=0.0, high=_MAX_DEADLINE_S)
    if deadline_s == 0:
        raise InvalidRequest("deadline_s must be over 0", param="deadline_s")
    return float(deadline_s)


def _is_none(value: object) -> bool:
    """Return whether a field names nothing. Arrays compare by element, so the type comes first."""
    return value is None or (type(value) is tuple and not value)


def check_stop(stop: object) -> tuple[str, ...]:
    """Return the stop strings.

    Raises:
        InvalidRequest: they are none, too many, empty or too long.
    """
    if _is_none(stop):
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


def check_stop_ids(ids: object) -> tuple[int, ...]:
    """Return the ids that end an answer.

    Raises:
        InvalidRequest: they are none, or too many.
    """
    if _is_none(ids):
        return ()
    if not isinstance(ids, tuple | list | set | frozenset):
        raise InvalidRequest("stop_token_ids must be a list of ids", param="stop_token_ids")
    if len(ids) > _MAX_STOP_IDS:
        raise InvalidRequest(
            f"stop_token_ids holds over {_MAX_STOP_IDS} ids", param="stop_token_ids"
        )
    for token_id in ids:
        check_int("stop_token_ids", token_id, low=0, high=_MAX_ID)
    return tuple(int(token_id) for token_id in ids)


def check_bias(bias: object) -> tuple[tuple[int, float], ...] | None:
    """Return biases as pairs, sorted by id; None where there are none.

    Ids may be strings of digits, as JSON has them.

    Raises:
        InvalidRequest: they are no mapping of ids to numbers in -100..100, name an id twice, or
            are too many.
    """
    if isinstance(bias, tuple):  # as pairs, of another SamplingParams
        try:
            bias = dict(bias)
        except (TypeError, ValueError):
            bias = None
    if not isinstance(bias, Mapping):
        raise InvalidRequest("logit_bias must map ids to numbers", param="logit_bias")
    if len(bias) > _MAX_BIASED_IDS:
        raise InvalidRequest(f"logit_bias holds over {_MAX_BIASED_IDS} ids", param="logit_bias")
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        token_id = _bias_id(key)
        check_float("logit_bias", value, low=-100.0, high=100.0)
        if token_id in pairs:
            raise InvalidRequest(f"logit_bias names id {token_id} twice", param="logit_bias")
        pairs[token_id] = float(value)
    return tuple(sorted(pairs.items())) or None


def _bias_id(key: Any) -> int:
    if isinstance(key, str) and len(key) <= _MAX_ID_DIGITS and key.isascii() and key.isdigit():
        key = int(key)
    check_int("logit_bias", key, low=0, high=_MAX_ID)
    return int(key)


def check_allowed(ids: object) -> tuple[int, ...]:
    """Return the allowed ids, sorted, each once.

    Raises:
        InvalidRequest: they are none, or too many.
    """
    name = "allowed_token_ids"
    if not isinstance(ids, tuple | list | set | frozenset | range):
        raise InvalidRequest(f"{name} must be a list of ids", param=name)
    if not 0 < len(ids) <= _MAX_ALLOWED_IDS:
        raise InvalidRequest(f"{name} must hold 1..{_MAX_ALLOWED_IDS} ids", param=name)
    column = tuple(ids)
    # A whole vocabulary may come, on the loop, so no call for each id. Of 150,000 this takes 5 ms
    # in any order; numpy's sort would take 4 if they are sorted, else 17.
    if countOf(map(type, column), int) != len(column):
        kinds = set(map(type, column))
        if bool in kinds or not all(issubclass(kind, numbers.Integral) for kind in kinds):
            for token_id in column:
                check_int(name, token_id, low=0)
        column = tuple(map(int, column))
    ordered = tuple(sorted(set(column)))
    check_int(name, ordered[0], low=0)
    check_int(name, ordered[-1], low=0, high=_MAX_ID)
    return ordered


def check_bad_words(words: object) -> tuple[str, ...]:
    """Return the bad words.

    Raises:
        InvalidRequest: they are no list of texts, too many, empty or too long.
    """
    words = () if words is None else words
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


def check_hooks(hooks: object) -> tuple[Callable[..., Any], ...]:
    """Return the logits processors; one alone may come without a list.

    Raises:
        InvalidRequest: one cannot be called with two or three arguments, or they are too many.
    """
    name = "logits_processors"
    if _is_none(hooks):
        return ()
    several = (hooks,) if callable(hooks) else hooks
    if not isinstance(several, tuple | list) or not all(callable(hook) for hook in several):
        raise InvalidRequest(f"{name} must be a callable or a list of callables", param=name)
    if len(several) > _MAX_HOOKS:
        raise InvalidRequest(f"{name} holds over {_MAX_HOOKS} callables", param=name)
    for hook in several:
        takes_prompt(hook)
    return tuple(several)


def takes_prompt(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is called `hook(prompt_ids, output_ids, logits)`.

    Else it is called without the prompt's ids. What counts are arguments without a default.

    Raises:
        InvalidRequest: neither fits, or it is `async`.
    """
    name = "logits_processors"
    if iscoroutinefunction(hook) or iscoroutinefunction(type(hook).__call__):
        raise InvalidRequest(
            f"{name}: {hook!r} is async; it is called in a worker thread and must be a plain "
            "function",
            param=name,
        )
    try:
        parameters = signature(hook).parameters.values()
    except (TypeError, ValueError) as fault:
        raise InvalidRequest(f"{name}: {hook!r} has no signature", param=name) from fault
    needed = [one for one in parameters if one.default is Parameter.empty]
    places = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    positional = [one for one in needed if one.kind in places]
    named = [one for one in needed if one.kind is Parameter.KEYWORD_ONLY]
    if len(positional) not in (2, 3) or named:
        raise InvalidRequest(
            f"{name}: {hook!r} must take (output_ids, logits) or (prompt_ids, output_ids, logits)",
            param=name,
        )
    return len(positional) == 3
