"""`aneuron compile --device neuron`, with a played compiler and a played device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.device.neuron import NeuronDevice
from aneuron.models.neuron.artifact import Artifact
from aneuron.testing.fakes import FakeCompiler, FakeNative, FakeNxd, Fault
from tests.neuron.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from tests.cli.conftest import Command

OPTIONS = ("--device=neuron", "--dtype=float32", "--max-num-seqs=2", "--block-size=4")


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(tmp_path / "cache"))
    return str(write_checkpoint(tmp_path / "tiny"))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """The compiler of the device that the command opens; no device need be there."""
    made = FakeCompiler()
    device = NeuronDevice(FakeNxd, kind="nxd", compiler=made)

    def open_neuron(*, to_compile: bool = False) -> Any:
        assert to_compile
        return device

    monkeypatch.setattr("aneuron.device.neuron.found.open_neuron", open_neuron)
    return made


def test_programs_are_compiled_once(
    aneuron: Command, checkpoint: str, compiler: FakeCompiler
) -> None:
    result = aneuron("compile", checkpoint, *OPTIONS, "--tensor-parallel-size=2")
    assert (result.status, result.out) == (0, ""), result.err
    lines = result.err.splitlines()
    assert f"{checkpoint}: compile (2 programs)" in lines
    artifact = Artifact.read(Path(lines[-2]))
    assert (artifact.ranks, artifact.shape.batch_size, artifact.shape.block_size) == (2, 2, 4)
    assert lines[-1].startswith(f"{checkpoint} is ready after ")
    again = aneuron("compile", checkpoint, *OPTIONS, "--tensor-parallel-size=2")
    assert again.err.splitlines()[-2] == lines[-2]
    assert compiler.num_compiled == 2


def test_machines_are_told(aneuron: Command, checkpoint: str, compiler: FakeCompiler) -> None:
    result = aneuron("compile", checkpoint, *OPTIONS, "--max-model-len=32", "--json")
    assert (result.status, result.err) == (0, "")
    told = json.loads(result.out)
    assert (told["model"], told["kind"]) == (checkpoint, "nxd")
    assert told["compiler"] == compiler.version
    assert Artifact.read(Path(told["artifact"])).shape.max_model_len == 32
    assert told["total_s"] > 0


def test_a_compiler_that_fails_says_what_to_do(
    aneuron: Command, checkpoint: str, compiler: FakeCompiler
) -> None:
    compiler.inject(Fault("compile"))
    result = aneuron("compile", checkpoint, *OPTIONS)
    assert (result.status, result.out) == (2, "")
    assert "NCC_EBVF030" in result.err
    assert "take smaller buckets" in result.err


def test_graphs_are_compiled_by_running_them(
    aneuron: Command, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeNative] = []

    def connect() -> FakeNative:
        made.append(FakeNative())
        return made[-1]

    device = NeuronDevice(connect, kind="native")
    monkeypatch.setattr("aneuron.device.neuron.found.open_neuron", lambda **_: device)
    sizes = ("--max-num-batched-tokens=128", "--num-kv-blocks=64")
    result = aneuron("compile", checkpoint, *OPTIONS, *sizes, "--json")
    assert result.status == 0, result.err
    assert json.loads(result.out)["kind"] == "native"
    assert made[0].compiles
    assert made[0].core.is_closed
    assert not made[0].violations


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device=neuron"], "no Neuron device can be opened: no Neuron runtime is installed"),
        (["--device=cuda"], "device must be cpu or neuron, not 'cuda'"),
        (["--max-num-seqs=2"], "max_num_seqs is for device=neuron"),
        (["--device=neuron", "--quantization=int8"], "--quantization is for the processor"),
        (["--device=neuron", "--max-num-seqs=0"], "max_num_seqs must be a positive integer"),
    ],
)
def test_what_does_not_go_together_is_told(
    aneuron: Command, checkpoint: str, options: list[str], said: str
) -> None:
    result = aneuron("compile", checkpoint, *options)
    assert (result.status, result.out) == (2, "")
    assert said in result.err
