from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from aneuron.cli.simulate.load import Arrivals
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--arrivals=often", "--arrivals must be poisson:RATE, even:RATE or closed:N"),
        ("--arrivals=poisson:0", "--arrivals must be poisson:RATE, RATE over 0"),
        ("--arrivals=even:inf", "--arrivals must be even:RATE, RATE over 0"),
        ("--arrivals=closed:1.5", "--arrivals must be closed:N"),
        ("--arrivals=poisson:1e9", "--arrivals poisson:1e+09 makes about 3.6e+12 requests"),
        ("--prompt-tokens=0", "--prompt-tokens must be a number, A-B or geo:MEAN"),
        ("--prompt-tokens=9-3", "--prompt-tokens must be A-B with A up to B"),
        ("--output-tokens=geo:0.5", "--output-tokens must be geo:MEAN"),
        ("--output-tokens=geo:x", "--output-tokens must be a number, A-B or geo:MEAN"),
        ("--output-tokens=1-99999999", "--output-tokens must be a number"),
        ("--duration=nan", "--duration must be a finite number, not nan"),
        ("--duration=inf", "--duration must be a finite number, not inf"),
        ("--duration=1e9", "--duration must be at most"),
        ("--replicas=0", "--replicas must be at least 1"),
        ("--carry=none", "--carry must be one of host, handoff, resident or all, not 'none'"),
        ("--profile=none", "--profile: unknown latency profile 'none'"),
        ("--num-seqs=0", "--num-seqs must be at least 1"),
        ("--max-num-batched-tokens=0", "--max-num-batched-tokens must be at least 1"),
        ("--block-size=0", "--block-size must be at least 1"),
        ("--num-kv-blocks=1000000000000", "--num-kv-blocks must be at most 4e+06"),
        ("--num-kv-blocks=3", "--num-kv-blocks must be at least 12, which the longest request"),
        ("--max-waiting=-1", "--max-waiting must be at least 0"),
        ("--seed=-1", "--seed must be at least 0"),
    ],
)
def test_a_bad_option_is_named(aneuron: Command, option: str, message: str) -> None:
    usual = () if option.startswith("--arrivals") else ("--arrivals=even:1",)
    result = aneuron("simulate", *usual, option)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--num-seqs=4096", "--prompt-tokens=1000000"),
            "--num-seqs: 4096 requests of up to 1000064 tokens are 4096262144 tokens",
        ),
        (
            ("--num-seqs=64", "--prompt-tokens=1000000"),
            "--num-kv-blocks: so that no request wants one there must be 8000576",
        ),
    ],
)
def test_what_memory_would_not_hold_is_refused(
    aneuron: Command, options: tuple[str, ...], message: str
) -> None:
    result = aneuron("simulate", "--arrivals=even:1", *options)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    "option",
    [
        "replicas",
        "num-seqs",
        "max-num-batched-tokens",
        "block-size",
        "num-kv-blocks",
        "max-waiting",
        "seed",
    ],
)
@pytest.mark.parametrize("value", ["1.5", "1e3", "x", "1" * 400])
def test_a_number_that_is_not_whole_is_refused(aneuron: Command, option: str, value: str) -> None:
    result = aneuron("simulate", "--arrivals=even:1", f"--{option}={value}")
    assert (result.status, result.out) == (2, "")
    assert f"Invalid value for --{option}" in result.err


@pytest.mark.parametrize(
    "option", ["--arrivals=poisson:20", "--prompt-tokens=128", "--output-tokens=64"]
)
def test_a_workload_goes_with_nothing_that_is_drawn(
    aneuron: Command, tmp_path: Path, option: str
) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 4}\n')
    result = aneuron("simulate", f"--workload={path}", option)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {option.partition('=')[0]}: --workload says when")


def test_something_must_arrive(aneuron: Command) -> None:
    assert aneuron("simulate").err.startswith("error: --arrivals: say when requests come")
    with pytest.raises(ConfigError) as caught:
        Arrivals.parse("")
    assert caught.value.param == "--arrivals"


def test_help_of_the_whole_imports_no_simulation() -> None:
    code = (
        "import sys; from aneuron.cli import main; main(['--help']);"
        "sys.exit(any(one.startswith('aneuron.cli.simulate') for one in sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert b"simulate" in shown.stdout
