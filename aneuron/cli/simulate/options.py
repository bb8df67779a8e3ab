"""The options of `aneuron simulate`, checked: a load, and what each replica is.

Comes in: values as typed. Goes out: a `Load` and a `Setup`, or an error that names the option.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  cyclopts reads the types of options
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from aneuron.cli.bench.common import MAX_SEQS, check_number
from aneuron.cli.options import CARRIES
from aneuron.cli.simulate.load import Arrivals, Lengths, Load, read_workload
from aneuron.cli.simulate.replica import Setup
from aneuron.device.profiles import profile as find_profile
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts import Token

__all__ = ["LoadOptions", "ReplicaOptions", "Whole", "parse_carry"]

_PROMPTS, _OUTPUTS = "128", "64"
_DURATION_S = 3600.0
_MAX_DURATION_S = 30 * 86400.0
_MAX_BATCHED_TOKENS = 1_000_000
_MAX_BLOCK_SIZE = 65_536
_MAX_BLOCKS = 4_000_000  # 40 bytes each
_MAX_CONTEXT = 64 * 2**20  # tokens of all seats: an engine keeps a row of the longest for each
_DEPTH = 2  # steps in flight: so many may hold the blocks of requests that have ended
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


def _whole(_: object, tokens: Sequence[Token]) -> int:
    text = tokens[0].value
    if not _WHOLE.fullmatch(text):
        raise ValueError(f'"{text[:40]}" is no whole number of up to 18 digits')
    return int(text)


Whole = Annotated[int, Parameter(converter=_whole)]  # as it is, 1.5 would be rounded


@Parameter(name="*", group=Group("Load", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What comes to the fleet.

    Attributes:
        arrivals: poisson:RATE or even:RATE, requests a second, or closed:N, N clients that each
            wait for an answer and send again.
        prompt_tokens: Length of prompts: a number, A-B (all alike) or geo:MEAN (geometric); 128
            by default.
        output_tokens: Length of answers, likewise; 64 by default.
        duration: Seconds to simulate: 3600, or with --workload until the last answer's end.
        workload: A file of requests in place of arrivals and lengths: JSON lines with
            arrival_s, prompt_tokens and output_tokens.
        seed: The same seed gives the same figures.
    """

    arrivals: str | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    duration: float | None = None
    workload: Path | None = None
    seed: Whole = 0

    @property
    def duration_s(self) -> float | None:
        """Seconds to simulate; None: until the last answer's end."""
        if self.duration is None and self.workload is None:
            return _DURATION_S
        return self.duration

    def load(self) -> Load:
        """Return the requests that come within the duration.

        Raises:
            ConfigError: an option is wrong, or no request comes.
        """
        check_number("--seed", self.seed, at_least=0)
        duration_s = self.duration_s
        if duration_s is not None:
            check_number("--duration", duration_s, at_least=1e-3, at_most=_MAX_DURATION_S)
        if self.workload is None:
            assert duration_s is not None
            load = self._drawn(duration_s)
        else:
            self._check_nothing_is_drawn()
            load = read_workload(self.workload)
            load = load if duration_s is None else load.until(duration_s)
        if not len(load.prompt_tokens):
            raise ConfigError(
                f"--duration: no request comes in the first {duration_s:g} s", param="--duration"
            )
        return load

    def _drawn(self, duration_s: float) -> Load:
        if self.arrivals is None:
            raise ConfigError(
                "--arrivals: say when requests come, as poisson:20, or give --workload",
                param="--arrivals",
            )
        return Load.draw(
            Arrivals.parse(self.arrivals),
            Lengths.parse("--prompt-tokens", self._prompts),
            Lengths.parse("--output-tokens", self._outputs),
            duration_s=duration_s,
            seed=self.seed,
        )

    def _check_nothing_is_drawn(self) -> None:
        for option, value in (
            ("--arrivals", self.arrivals),
            ("--prompt-tokens", self.prompt_tokens),
            ("--output-tokens", self.output_tokens),
        ):
            if value is not None:
                raise ConfigError(
                    f"{option}: --workload says when requests come and how long they are; give "
                    "one of the two",
                    param=option,
                )

    @property
    def _prompts(self) -> str:
        return _PROMPTS if self.prompt_tokens is None else self.prompt_tokens

    @property
    def _outputs(self) -> str:
        return _OUTPUTS if self.output_tokens is None else self.output_tokens

    def __str__(self) -> str:
        if self.workload is not None:
            return f"workload {self.workload.name}"
        return f"arrivals {self.arrivals}, prompts {self._prompts}, answers {self._outputs}"


@Parameter(name="*", group=Group("Each replica", sort_key=2))
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """The settings of each replica's engine.

    Attributes:
        num_seqs: Most sequences at a time.
        max_num_batched_tokens: Most prompt tokens in one step.
        block_size: Tokens in one block of the KV cache.
        num_kv_blocks: Blocks of the KV cache; by default so many that no request wants one.
        max_waiting: Requests that may be in beside num_seqs; more are refused.
    """

    num_seqs: Whole = 64
    max_num_batched_tokens: Whole = 512
    block_size: Whole = 16
    num_kv_blocks: Whole | None = None
    max_waiting: Whole | None = None

    def setup(self, profile: str, load: Load, *, carry: str, duration_s: float | None) -> Setup:
        """Return what each replica is for this load.

        Raises:
            ConfigError: an option is wrong; `param` names it.
        """
        check_number("--num-seqs", self.num_seqs, at_most=MAX_SEQS)
        check_number(
            "--max-num-batched-tokens", self.max_num_batched_tokens, at_most=_MAX_BATCHED_TOKENS
        )
        check_number("--block-size", self.block_size, at_most=_MAX_BLOCK_SIZE)
        if self.max_waiting is not None:
            check_number("--max-waiting", self.max_waiting, at_least=0)
        _check_profile(profile)
        self._check_seats(load.longest)
        return Setup(
            profile=profile,
            carry=carry,
            duration_s=duration_s,
            max_model_len=load.longest,
            num_seqs=self.num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            num_kv_blocks=self._num_kv_blocks(load.longest),
            max_waiting=self.max_waiting,
        )

    def _check_seats(self, longest: int) -> None:
        if self.num_seqs * longest > _MAX_CONTEXT:
            raise ConfigError(
                f"--num-seqs: {self.num_seqs} requests of up to {longest} tokens are "
                f"{self.num_seqs * longest} tokens; at most {_MAX_CONTEXT} can be simulated",
                param="--num-seqs",
            )

    def _num_kv_blocks(self, longest: int) -> int:
        blocks = -(-longest // self.block_size)  # of the longest request
        if self.num_kv_blocks is None:
            wanted = _DEPTH * self.num_seqs * blocks + self.num_seqs  # and one to grow by
            if wanted > _MAX_BLOCKS:
                raise ConfigError(
                    f"--num-kv-blocks: so that no request wants one there must be {wanted}, and at "
                    f"most {_MAX_BLOCKS} can be simulated; give what the device holds",
                    param="--num-kv-blocks",
                )
            return wanted
        check_number("--num-kv-blocks", self.num_kv_blocks, at_most=_MAX_BLOCKS)
        if self.num_kv_blocks < blocks:
            raise ConfigError(
                f"--num-kv-blocks must be at least {blocks}, which the longest request of "
                f"{longest} tokens fills, not {self.num_kv_blocks}",
                param="--num-kv-blocks",
            )
        return self.num_kv_blocks


def parse_carry(text: str) -> list[str]:
    """Return the carries to simulate.

    Raises:
        ConfigError: there is no such carry.
    """
    if text == "all":
        return list(CARRIES)
    if text not in CARRIES:
        raise ConfigError(
            f"--carry must be one of {', '.join(CARRIES)} or all, not {text!r}", param="--carry"
        )
    return [text]


def _check_profile(name: str) -> None:
    try:
        find_profile(name, param="--profile")
    except ConfigError as error:
        raise ConfigError(f"--profile: {error}", param="--profile") from error
