"""`aneuron doctor --probe`: what the command prints and writes, on a played device."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from aneuron.cli.doctor import probe as probe_module
from aneuron.device.profile_files import load_profile
from tests.neuron.test_probe import QUICK, TIMES, native

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Command


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("aneuron.device.neuron.found.open_neuron", lambda: native([]))
    monkeypatch.setattr(probe_module.probe, "__kwdefaults__", QUICK)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("played")
def test_the_command_prints_the_report_and_writes_the_profile(
    aneuron: Command, tmp_path: Path
) -> None:
    path = tmp_path / "chip.json"
    result = aneuron("doctor", "--probe", "--profile", str(path))
    assert result.status == 0, result.err
    assert result.out.startswith("# aneuron doctor --probe\n")
    assert "probe: measure" in result.err
    assert load_profile(path).decode.ms >= 1e3 * TIMES.decode(1) - 1e3 * TIMES.decode_row_s


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("played")
def test_the_command_tells_machines(aneuron: Command) -> None:
    result = aneuron("doctor", "--probe", "--json")
    assert result.status == 0, result.err
    told = json.loads(result.out)
    assert (told["kind"], len(told["timings"])) == ("native", 4)


def test_without_a_device_the_command_says_what_is_missing(
    aneuron: Command, tmp_path: Path
) -> None:
    result = aneuron("doctor", "--probe")
    assert (result.status, result.out) == (2, "")
    assert "no Neuron device can be opened: no Neuron runtime is installed" in result.err
    assert aneuron("doctor", "--profile", "x.json").status == 2
    wrong = aneuron("doctor", "--probe", "--profile", str(tmp_path / "none" / "x.json"))
    assert "cannot write the profile" in wrong.err
