"""The options of `aneuron bench serve`: what is sent, how fast, and what is told of it.

Comes in: values as typed. Goes out: checked ones. Names are those of vLLM's `bench serve` where
they mean the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from aneuron.cli.bench.common import check_number
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LoadOptions", "ReportOptions", "RequestOptions", "parse_goodput", "parse_percentiles"]

_MAX_PROMPTS, _MAX_LEN, _MAX_TOKENS = 10**6, 2**20, 2 * 10**7
_SMALL_IDS = (100, 200)  # in any vocabulary, and no special ones


@Parameter(name="*", group=Group("Load", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How much is sent, and how fast.

    Attributes:
        num_prompts: Requests in a run.
        request_rate: Requests a second; inf sends all at once.
        burstiness: 1 is a Poisson process, less comes in bursts, more is more even.
        max_concurrency: Requests under way at most; later ones wait, and that is told apart.
        num_warmups: Requests at once before the first run, which do not count.
        seed: Of prompts and arrival times.
        timeout_s: For a whole request.
    """

    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: Annotated[
        int | None, Parameter(name=("--max-concurrency", "--concurrency"))
    ] = None
    num_warmups: int = 1
    seed: int = 0
    timeout_s: float = 600.0

    def check(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: one is out of range.
        """
        check_number("--num-prompts", self.num_prompts, at_most=_MAX_PROMPTS)
        check_number("--burstiness", self.burstiness, at_least=1e-3, at_most=1e6)
        check_number("--num-warmups", self.num_warmups, at_least=0, at_most=10_000)
        check_number("--seed", self.seed, at_least=0)
        check_number("--timeout-s", self.timeout_s, at_least=1e-3)
        if self.request_rate != math.inf:
            check_number("--request-rate", self.request_rate, at_least=1e-6)
        if self.max_concurrency is not None:
            check_number("--max-concurrency", self.max_concurrency, at_most=_MAX_PROMPTS)


@Parameter(name="*", group=Group("Requests", sort_key=2))
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What requests are like.

    Attributes:
        endpoint: /v1/completions or /v1/chat/completions.
        model: Its name in requests, else the first that the server lists.
        input_len: Token ids of a prompt; words with chat.
        output_len: Most tokens of an answer.
        ignore_eos: Ask for answers of full length; OpenAI's own servers refuse that.
        vocab_size: Draw token ids from 0 up to this, else from 100 to 199.
        api_key: Sent as a bearer token; by default what ANEURON_API_KEY or OPENAI_API_KEY says.
    """

    endpoint: str = "/v1/completions"
    model: str | None = None
    input_len: Annotated[int, Parameter(name=("--input-len", "--random-input-len"))] = 128
    output_len: Annotated[int, Parameter(name=("--output-len", "--random-output-len"))] = 128
    ignore_eos: bool = True
    vocab_size: int | None = None
    api_key: str | None = None

    def check(self, num_prompts: int) -> None:
        """Check the values, for so many requests.

        Raises:
            ConfigError: one is wrong, or there would be more tokens than the client keeps times of.
        """
        if self.endpoint not in ("/v1/completions", "/v1/chat/completions"):
            message = "--endpoint must be /v1/completions or /v1/chat/completions"
            raise ConfigError(f"{message}, not {self.endpoint!r}", param="--endpoint")
        check_number("--input-len", self.input_len, at_most=_MAX_LEN)
        check_number("--output-len", self.output_len, at_most=_MAX_LEN)
        if self.vocab_size is not None:
            check_number("--vocab-size", self.vocab_size, at_least=2, at_most=2**31)
        if num_prompts * self.output_len > _MAX_TOKENS:
            raise ConfigError(
                f"--num-prompts times --output-len must be at most {_MAX_TOKENS}: the time of each "
                f"token is kept",
                param="--num-prompts",
            )

    @property
    def token_ids(self) -> tuple[int, int]:
        """The range [first, last) of token ids in prompts."""
        return _SMALL_IDS if self.vocab_size is None else (0, self.vocab_size)


@Parameter(name="*", group=Group("Report", sort_key=3))
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What is told.

    Attributes:
        goodput: Limits of a good request in ms, like ttft:200 tpot:50 e2el:5000.
        percentiles: Of each metric, separated by commas.
        runs: Of each server; medians count.
    """

    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = ()
    percentiles: Annotated[str, Parameter(name=("--percentiles", "--metric-percentiles"))] = "99"
    runs: int = 1

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is wrong.
        """
        check_number("--runs", self.runs, at_most=1000)
        parse_goodput(self.goodput)
        parse_percentiles(self.percentiles)


def parse_goodput(pairs: Iterable[str]) -> dict[str, float]:
    """Return limits in milliseconds by metric, of pairs like `ttft:200`.

    Raises:
        ConfigError: one is no such pair.
    """
    limits = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if name not in ("ttft", "tpot", "e2el") or not 0 < limit < math.inf:
            raise ConfigError(
                f"--goodput must be pairs of ttft, tpot or e2el and milliseconds, like ttft:200, "
                f"not {pair!r}",
                param="--goodput",
            )
        limits[name] = limit
    return limits


def parse_percentiles(text: str) -> list[float]:
    """Return percentiles of a list like `50,99.9`.

    Raises:
        ConfigError: one is no number from 0 to 100.
    """
    try:
        wanted = [float(part) for part in text.split(",")]
    except ValueError:
        wanted = [-1.0]
    if not all(0 <= one <= 100 for one in wanted):
        message = f"--percentiles must be numbers from 0 to 100, separated by commas, not {text!r}"
        raise ConfigError(message, param="--percentiles")
    return list(dict.fromkeys(wanted))
