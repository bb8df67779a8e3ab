"""docs/cli.md is what the commands say of themselves, and they all keep to the same few rules."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.cli import app
from aneuron.cli.options import EngineSettings
from aneuron.cli.serve import ServedEngine
from aneuron.config import EngineConfig
from tests.cli.manual import FILE, commands, manual

if TYPE_CHECKING:
    from tests.cli.conftest import Command

ALL: dict[str, Any] = dict(commands(app, "aneuron"))
# A conversation and a server have no one result that a machine would read.
WITHOUT_JSON = {"aneuron chat", "aneuron serve"}


def names_of(command: Any) -> set[str]:
    arguments = command.assemble_argument_collection(parse_docstring=True)
    return {name for one in arguments if one.show for name in one.names}


def test_the_page_is_up_to_date() -> None:
    assert FILE.read_text("utf-8") == manual(), "run: python -m tests.cli.manual"


def test_the_page_has_every_command() -> None:
    titles = set(re.findall(r"^## (.+)$", manual(), re.MULTILINE))
    assert titles == set(ALL)
    for name in ("run", "chat", "serve", "trace", "simulate", "compile", "doctor", "top"):
        assert f"aneuron {name}" in titles
    assert {f"aneuron models {name}" for name in ("list", "pull", "info", "rm")} <= titles


@pytest.mark.parametrize("name", sorted(set(ALL) - WITHOUT_JSON))
def test_machines_are_served(name: str) -> None:
    assert "--json" in names_of(ALL[name])


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_option_says_what_it_does(name: str) -> None:
    command = ALL[name]
    assert command.help
    for argument in command.assemble_argument_collection(parse_docstring=True):
        if argument.show:
            assert argument.parameter.help, argument.names


# vLLM's `serve --help`, of what means the same here.
VLLM = {
    "--host", "--port", "--uds", "--api-key", "--served-model-name", "--chat-template",
    "--tool-call-parser", "--dtype", "--quantization", "--kv-cache-dtype", "--enforce-eager",
    "--max-model-len", "--revision", "--async-scheduling", "--no-async-scheduling",
    "--enable-prefix-caching", "--no-enable-prefix-caching", "--max-num-batched-tokens",
    "--max-num-seqs", "--scheduling-policy", "--block-size", "--num-gpu-blocks-override",
    "--allowed-origins",
}  # fmt: skip


def test_options_have_vllm_s_names() -> None:
    assert names_of(ALL["aneuron serve"]) >= VLLM
    bench = {"--num-prompts", "--request-rate", "--burstiness", "--max-concurrency", "--seed"}
    bench |= {"--random-input-len", "--random-output-len", "--ignore-eos", "--save-result"}
    assert names_of(ALL["aneuron bench serve"]) >= bench | {"--metric-percentiles", "--goodput"}


@pytest.mark.parametrize("settings", [EngineSettings, ServedEngine])
def test_engine_options_are_those_of_the_engine(settings: type[Any]) -> None:
    known = set(inspect.signature(EngineConfig).parameters) | {"device", "revision"}
    assert {one.name for one in fields(settings)} <= known


def test_help_names_the_models_that_a_command_takes(aneuron: Command) -> None:
    for command, is_simulated in (("run", True), ("serve", True), ("compile", False)):
        text = " ".join(aneuron(command, "--help").out.split())
        assert "Hugging Face id (org/name)" in text
        assert text.endswith("or a simulated model (sim:count).") is is_simulated


# ── what is said to somebody who is wrong ───────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu", "sim:count"], '"run"'),
        (["run", "sim:count", "abc", "--max-token", "3"], "--max-tokens"),
        (["models", "lst"], '"list"'),
    ],
)
def test_a_misspelt_command_or_option_gets_the_close_one(
    aneuron: Command, words: list[str], said: str
) -> None:
    result = aneuron(*words)
    assert (result.status, result.out) == (2, "")
    assert "Did you mean" in result.err
    assert said in result.err


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("run", ["x"]),
        ("chat", []),
        ("serve", ["--port=0"]),
        ("trace", ["x", "--json"]),
        ("models info", []),
        ("models pull", []),
    ],
)
def test_a_misspelt_model_gets_the_close_one(
    aneuron: Command, command: str, more: list[str]
) -> None:
    result = aneuron(*command.split(), "smolm2-135m", *more)
    assert (result.status, result.out) == (2, "")
    assert "unknown model 'smolm2-135m'. Did you mean smollm2-135m?" in result.err
    simulated = aneuron(*command.split(), "sim:cout", *more)
    if command != "models pull":  # simulated models are nowhere to be fetched from
        assert "did you mean sim:count?" in simulated.err
    assert (simulated.status, simulated.out) == (2, "")
