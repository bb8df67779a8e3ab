"""The load of a simulation: when requests come, and how long they and their answers are.

Comes in: options as typed (`poisson:20`, `64-192`, `geo:64`), or a file of JSON lines. Goes
out: a `Load` of numpy columns, the same for the same seed; each replica gets its share.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["MAX_REQUESTS", "MAX_TOKENS", "Arrivals", "Lengths", "Load", "read_workload"]

MAX_REQUESTS = 2_000_000
MAX_TOKENS = 1_000_000  # of a prompt or an answer
_MAX_CLIENTS = 100_000
_MAX_BYTES = 64 * 2**20  # of a workload file
_POOL = 1 << 16  # lengths that the clients of a closed loop draw from, in turn
_MAX_SHOWN = 80  # characters of a value, in a message
_KINDS = "poisson:RATE, even:RATE or closed:N"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in the order of their arrival.

    Attributes:
        prompt_tokens, output_tokens: int64 [n].
        arrivals_s: float64 [n], seconds from the start; None: each of `num_clients` sends its
            next request, with the next lengths in turn, when its last one has ended.
        num_clients: of a closed loop.
    """

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    arrivals_s: np.ndarray | None = None
    num_clients: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return int((self.prompt_tokens + self.output_tokens).max())

    def share(self, replica: int, num_replicas: int) -> Load:
        """Return what a replica gets when requests, or clients, are dealt in turn."""
        own = slice(replica, None, num_replicas)
        return Load(
            self.prompt_tokens[own],
            self.output_tokens[own],
            None if self.arrivals_s is None else self.arrivals_s[own],
            len(range(self.num_clients)[own]),
        )

    def until(self, duration_s: float) -> Load:
        """Return those that arrive before this time."""
        assert self.arrivals_s is not None, "a closed loop has no arrivals"
        there = self.arrivals_s < duration_s
        return replace(
            self,
            prompt_tokens=self.prompt_tokens[there],
            output_tokens=self.output_tokens[there],
            arrivals_s=self.arrivals_s[there],
        )

    @classmethod
    def draw(
        cls, arrivals: Arrivals, prompts: Lengths, outputs: Lengths, *, duration_s: float, seed: int
    ) -> Load:
        """Return a random load; times and both lengths each have a generator of their own.

        Raises:
            ConfigError: these are more than `MAX_REQUESTS`.
        """
        for_times, for_prompts, for_outputs = np.random.default_rng(seed).spawn(3)
        times_s = arrivals.times_s(duration_s, for_times)
        count = _POOL if times_s is None else len(times_s)
        return cls(
            prompts.draw(count, for_prompts),
            outputs.draw(count, for_outputs),
            times_s,
            arrivals.num_clients,
        )


# ── options ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come: `kind` is poisson, even or closed; `amount` a rate, or clients."""

    kind: str
    amount: float

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Return what was typed for `--arrivals`.

        Raises:
            ConfigError: it is none of the kinds, or has no number that fits.
        """
        kind, _, number = text.partition(":")
        if kind not in ("poisson", "even", "closed"):
            raise _wrong("--arrivals", _KINDS, text)
        if kind == "closed":
            whole = f"closed:N, N from 1 to {_MAX_CLIENTS}"
            return cls(kind, _whole("--arrivals", number, whole, text, at_most=_MAX_CLIENTS))
        return cls(kind, _number("--arrivals", number, f"{kind}:RATE, RATE over 0", text))

    @property
    def num_clients(self) -> int:
        """Of a closed loop; else 0."""
        return int(self.amount) if self.kind == "closed" else 0

    def times_s(self, duration_s: float, generator: np.random.Generator) -> np.ndarray | None:
        """Return when requests come before the end; None for a closed loop.

        Raises:
            ConfigError: these are too many.
        """
        if self.kind == "closed":
            return None
        expected = self.amount * duration_s
        if expected > MAX_REQUESTS:
            raise ConfigError(
                f"--arrivals {self.kind}:{self.amount:g} makes about {expected:.3g} requests in "
                f"{duration_s:g} s; at most {MAX_REQUESTS} can be simulated",
                param="--arrivals",
            )
        if self.kind == "even":
            times_s = np.arange(math.ceil(expected) + 1) / self.amount
        else:  # more than come with any likelihood
            count = math.ceil(expected + 10 * math.sqrt(expected) + 10)
            times_s = generator.exponential(1 / self.amount, count).cumsum()
        return times_s[times_s < duration_s]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens: from `low` to `high` alike, or geometric with a mean."""

    low: int = 1
    high: int = 1
    mean: float | None = None

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """Return what was typed: `128`, `64-192` or `geo:64`.

        Args:
            option: its name on the command line, for the message.
            text: what was typed.

        Raises:
            ConfigError: it is none of them.
        """
        expected = f"a number, A-B or geo:MEAN, from 1 to {MAX_TOKENS} tokens"
        if text.startswith("geo:"):
            mean = _number(option, text[4:], expected, text)
            if not 1 <= mean <= MAX_TOKENS / 20:  # so that the longest drawn is no surprise
                raise _wrong(option, f"geo:MEAN, MEAN from 1 to {MAX_TOKENS // 20}", text)
            return cls(mean=mean)
        low, _, high = text.partition("-")
        first = _whole(option, low, expected, text, at_most=MAX_TOKENS)
        last = _whole(option, high, expected, text, at_most=MAX_TOKENS) if "-" in text else first
        if last < first:
            raise _wrong(option, "A-B with A up to B", text)
        return cls(first, last)

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """Return int64 [count]."""
        if self.mean is not None:
            return generator.geometric(1 / self.mean, count)
        return generator.integers(self.low, self.high, count, endpoint=True)


def _number(option: str, number: str, expected: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise _wrong(option, expected, text)
    return value


def _whole(option: str, number: str, expected: str, text: str, *, at_most: int) -> int:
    is_whole = number.isascii() and number.isdecimal() and len(number) <= len(str(at_most))
    if not (is_whole and 1 <= int(number) <= at_most):
        raise _wrong(option, expected, text)
    return int(number)


def _wrong(option: str, expected: str, text: str) -> ConfigError:
    return ConfigError(f"{option} must be {expected}, not {text!r}", param=option)


# ── a file ──────────────────────────────────────────────────────────────────────────────


def read_workload(path: Path) -> Load:
    """Return the requests of a file of JSON lines, in the order of their arrival.

    Each line is an object with `arrival_s`, `prompt_tokens` and `output_tokens`; other fields
    are left alone, and lines may stand in any order.

    Raises:
        ConfigError: it cannot be read, is too large, or has a wrong line; the message says
            which, and which field.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _fault(path, f"cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise _fault(path, f"is over {_MAX_BYTES // 2**20} MiB")
    rows = list(_rows(path, content))
    if not rows:
        raise _fault(path, "has no requests")
    if len(rows) > MAX_REQUESTS:
        raise _fault(path, f"has {len(rows)} requests; at most {MAX_REQUESTS} can be simulated")
    rows.sort(key=lambda row: row[0])
    times_s, prompts, outputs = zip(*rows, strict=True)
    return Load(np.array(prompts), np.array(outputs), np.array(times_s, np.float64))


def _rows(path: Path, content: bytes) -> Iterator[tuple[float, int, int]]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise _fault(path, f"line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise _fault(path, f"line {number} must be an object")
        yield (
            _arrival(path, number, row),
            _tokens(path, number, row, "prompt_tokens"),
            _tokens(path, number, row, "output_tokens"),
        )


def _arrival(path: Path, number: int, row: dict[str, Any]) -> float:
    value = _field(path, number, row, "arrival_s")
    if type(value) not in (int, float) or not 0 <= value <= 1e9:  # false for NaN
        raise _fault(path, f"line {number}: arrival_s must be seconds from 0, not {_shown(value)}")
    return float(value)


def _tokens(path: Path, number: int, row: dict[str, Any], name: str) -> int:
    value = _field(path, number, row, name)
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        expected = f"{name} must be an integer from 1 to {MAX_TOKENS}"
        raise _fault(path, f"line {number}: {expected}, not {_shown(value)}")
    return value


def _field(path: Path, number: int, row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise _fault(path, f"line {number} has no {name}")
    return row[name]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def _fault(path: Path, what: str) -> ConfigError:
    return ConfigError(f"--workload: {path} {what}", param="--workload")
