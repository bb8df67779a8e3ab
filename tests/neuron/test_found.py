"""What a machine has of Neuron: told by imports, with placeholders and near misses named."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aneuron import ConfigError
from aneuron.device.neuron import found as found_module
from aneuron.device.neuron.found import PLACEHOLDERS, find, open_neuron
from aneuron.device.neuron.native_runtime import NativeRuntime
from aneuron.device.neuron.nxd_runtime import ModelBuilderCompiler, NxdRuntime
from tests.neuron.stand_ins import install, neuron_classes

if TYPE_CHECKING:
    from collections.abc import Callable

    Machine = Callable[..., None]

REAL = {"torch-neuronx": "2.9.0.2.11", "neuronx-distributed": "0.17", "neuronx-cc": "2.24"}


class Wrong:
    """A package whose import fails, as the placeholders' do."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with these versions, device files and modules, and nothing else of Neuron."""

    def make(versions: dict[str, str], files: int = 1, **modules: Any) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        def imported(name: str) -> Any:
            if name not in modules:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if isinstance(modules[name], Wrong):
                raise modules[name].error
            return modules[name]

        paths = tuple(f"/dev/neuron{at}" for at in range(files))
        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(found_module, "import_module", imported)
        monkeypatch.setattr(found_module, "_device_files", lambda: paths)
        monkeypatch.setattr(torch, "neuron", None, raising=False)

    return make


def nxd_modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    neuron_classes(monkeypatch, None)
    traces = SimpleNamespace(trace=print)
    return {"torch_neuronx": traces, "torch_xla": object(), "neuronx_distributed": object()}


def test_nothing_is_there(machine: Machine) -> None:
    machine({}, 0)
    found = find()
    assert (found.kind, found.generation, found.why_not) == (
        None, None, "no Neuron runtime is installed",
    )  # fmt: skip
    assert "AWS" in found.advice
    with pytest.raises(ConfigError, match="can be opened: no Neuron runtime") as caught:
        open_neuron()
    assert caught.value.param == "device"


@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_placeholders_are_named(machine: Machine, name: str) -> None:
    wrong = Wrong(ImportError("this is the wrong package"))
    machine({name: PLACEHOLDERS[name]}, **{name.replace("-", "_"): wrong})
    found = find()
    assert found.placeholders == (name,)
    assert found.kind is None
    assert f"{name} {PLACEHOLDERS[name]} is the public index's placeholder" in found.why_not
    assert "wrong package" not in found.why_not  # said once


def test_a_real_version_is_no_placeholder(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(REAL, **nxd_modules(monkeypatch))
    found = find()
    assert found.placeholders == ()
    assert found.versions == REAL
    assert (found.generation, found.kind, found.why_not, found.advice) == ("nxd", "nxd", "", "")
    assert "neuronx-cc 2.24" in str(found)


def test_nxd_is_opened_with_its_compiler(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(REAL, **nxd_modules(monkeypatch))
    install(monkeypatch, "torch_neuronx")
    device = open_neuron()
    assert device.kind == "nxd"
    assert isinstance(device.compiler, ModelBuilderCompiler)
    assert isinstance(device.raw, NxdRuntime)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"torch_xla": Wrong(ImportError("undefined symbol: foo"))},
            "torch_xla cannot be",
        ),
        ({"torch_xla": Wrong(OSError("libfoo.so: no such file"))}, "libfoo.so"),
        (
            {"neuronx_distributed": Wrong(ModuleNotFoundError("No module named 'x'", name="x"))},
            "No module named 'x'",
        ),
        ({"torch_neuronx": SimpleNamespace()}, "it has no trace, and torch.neuron is not avail"),
        ({"torch_neuronx": Wrong(AttributeError("no 'xla'"))}, "AttributeError: no 'xla'"),
        (
            {"libtorch_neuronx_lite": Wrong(TypeError("2 given")), "torch_xla": Wrong(KeyError())},
            "torch_xla cannot be used: KeyError; libtorch_neuronx_lite cannot be used: TypeError",
        ),
    ],
)
def test_what_cannot_be_imported_says_why(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    machine(REAL, **{**nxd_modules(monkeypatch), **changes})
    found = find()
    assert found.kind is None
    assert said in found.why_not


def test_a_trace_without_its_classes_is_no_runtime(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = nxd_modules(monkeypatch)
    monkeypatch.setattr(torch.classes, "neuron", SimpleNamespace())
    machine(REAL, **modules)
    assert "torch.classes.neuron has no SPMDModel" in find().why_not


def test_one_name_is_two_packages(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(REAL, torch_neuronx=SimpleNamespace(trace=print))
    available = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(torch, "neuron", available)
    found = find()
    assert (found.generation, found.kind) == ("torch_neuron", "native")
    monkeypatch.setattr(torch, "neuron", SimpleNamespace(is_available=lambda: False))
    assert find().generation is None


def test_a_package_that_cannot_say_whether_it_is_available_says_why(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_available() -> bool:
        raise TypeError("is_available() of another version")

    machine(REAL, torch_neuronx=SimpleNamespace())
    monkeypatch.setattr(torch, "neuron", SimpleNamespace(is_available=is_available))
    with pytest.raises(ConfigError, match="TypeError: is_available"):
        open_neuron()


def test_the_lite_runtime_is_native(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = {"torch-neuronx": "1.0", "libtorch-neuronx-lite": "0.3"}
    wrong = Wrong(ImportError("wrong package"))
    machine(fake, torch_neuronx=wrong, libtorch_neuronx_lite=object())
    found = find()
    assert (found.generation, found.kind, found.why_not) == ("lite", "native", "")
    assert found.placeholders == ("torch-neuronx",)
    install(monkeypatch, "libtorch_neuronx_lite")
    monkeypatch.setattr(torch, "device", lambda name, at: SimpleNamespace(type=name, index=at))
    device = open_neuron()
    assert (device.kind, device.compiler) == ("native", None)
    assert isinstance(device.raw, NativeRuntime)


def test_a_runtime_without_a_device_compiles_only(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(REAL, 0, **nxd_modules(monkeypatch))
    found = find()
    assert found.kind == "nxd"
    assert "no /dev/neuron*" in found.why_not
    assert "driver" in found.advice
    with pytest.raises(ConfigError, match="no /dev/neuron"):
        open_neuron()
    assert open_neuron(to_compile=True).compiler is not None


def test_nothing_of_it_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, aneuron, aneuron.device; names = {'torch_neuronx', 'torch_xla', 'torch', "
        "'libtorch_neuronx_lite', 'aneuron.device.neuron'}; print(sorted(names & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "[]"
