"""The table of Neuron's environment variables: whole, and what its page says."""

from __future__ import annotations

import re
from pathlib import Path

import aneuron
from aneuron.device.neuron.environment import VARIABLES
from tests.neuron.environment_page import FILE, page

_NAMES = re.compile(r"\b(?:NEURON|TORCH_NEURONX|VLLM_NEURON|NXD)_[A-Z_]+[A-Z]\b")


def test_the_page_is_up_to_date() -> None:
    assert FILE.read_text("utf-8") == page(), "run: python -m tests.neuron.environment_page"


def test_every_variable_that_the_package_names_is_in_the_table() -> None:
    package = Path(aneuron.__file__).parent
    named = {
        name for file in package.rglob("*.py") for name in _NAMES.findall(file.read_text("utf-8"))
    }
    assert "NEURON_RT_VISIBLE_CORES" in named
    assert named <= set(VARIABLES)


def test_every_variable_says_what_it_does() -> None:
    for name, variable in VARIABLES.items():
        assert _NAMES.fullmatch(name), name
        assert variable.what, name
        assert variable.advice or not variable.is_stale, name
    assert {one.reader for one in VARIABLES.values()} == {
        "NxD", "TorchNeuron", "compiler", "lite", "runtime", "vLLM's plugin",
    }  # fmt: skip


def test_implicit_async_is_told_to_be_gone() -> None:
    variable = VARIABLES["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"]
    assert (variable.is_stale, variable.until) == (True, "2.30")
    assert not VARIABLES["NEURON_RT_IO_RING_CACHE_SIZE"].is_stale
