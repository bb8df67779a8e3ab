"""Which Neuron runtime this machine has, if any; and the device over it.

Comes in: what is installed, and /dev. Goes out: `Found`, which says what can be opened, or why
nothing can and what to do. Only an import tells: the public index has placeholders by the names of
AWS's packages, and two generations share a name. Nothing of it is imported before somebody asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.device.neuron.device import NeuronDevice

__all__ = ["PLACEHOLDERS", "Found", "find", "open_neuron", "version_of"]

Generation = Literal["nxd", "lite", "torch_neuron"]

# By these names and versions the public index has packages that only say that they are wrong.
PLACEHOLDERS = {
    "torch-neuronx": "1.0",
    "torch-neuron": "1.0",
    "neuronx-distributed": "0.1",
    "neuronx-distributed-inference": "0.1.0",
    "neuronx-cc": "1.0.post1",
    "libneuronxla": "1.0",
    "transformers-neuronx": "0.1",
    "vllm-neuron": "0.1.0",
}
_PACKAGES = (*PLACEHOLDERS, "libtorch-neuronx-lite", "torch-xla")
_NAMES = {
    "nxd": "NxD on torch-xla",
    "lite": "native PyTorch, lite runtime",
    "torch_neuron": "TorchNeuron",
}
_NEEDED = ("torch_xla", "neuronx_distributed")
_INSTALL = "install the Neuron SDK's packages from AWS's own package index"
_DRIVER = "look at neuron-ls; the driver is AWS's package aws-neuronx-dkms"


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of Neuron.

    Attributes:
        generation: of the runtime that can be imported; None if none can.
        versions: of AWS's packages that are installed.
        placeholders: those that are not AWS's, but the public index's.
        device_files: such as /dev/neuron0.
        why_not: why no device can be opened; "" if one can.
        advice: what to do about that.
    """

    generation: Generation | None
    versions: dict[str, str]
    placeholders: tuple[str, ...]
    device_files: tuple[str, ...]
    why_not: str
    advice: str

    @property
    def kind(self) -> Literal["nxd", "native"] | None:
        """What `NeuronDevice` calls it, whether or not a device is there; None if there is none."""
        if self.generation is None:
            return None
        return "nxd" if self.generation == "nxd" else "native"

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        name = "no runtime" if self.generation is None else _NAMES[self.generation]
        return f"{name} ({versions or 'nothing is installed'}), {len(self.device_files)} devices"


def find() -> Found:
    """Import what is there, and tell what that is; some seconds where the SDK is."""
    versions = {name: version for name in _PACKAGES if (version := version_of(name)) is not None}
    fakes = tuple(name for name, version in PLACEHOLDERS.items() if versions.get(name) == version)
    files = _device_files()
    generation, failures = _generation()
    why_not, advice = "", ""
    if generation is None:
        why_not, advice = _no_runtime(versions, fakes, failures), _INSTALL
    elif not files:
        why_not = f"{_NAMES[generation]} is installed, but there is no /dev/neuron*"
        advice = _DRIVER
    return Found(generation, versions, fakes, files, why_not, advice)


def open_neuron(*, to_compile: bool = False) -> NeuronDevice:
    """Return the device of this machine; it takes no core before it is used.

    Args:
        to_compile: it is only for its compiler, which needs no device.

    Raises:
        ConfigError: there is none, with what to do about it; or it has no compiler apart.
    """
    found = find()
    if found.generation is None or (found.why_not and not to_compile):
        message = f"no Neuron device can be opened: {found.why_not}; {found.advice}"
        raise ConfigError(message, param="device")
    from aneuron.device.neuron.device import NeuronDevice

    if found.generation == "nxd":
        from aneuron.device.neuron.nxd_runtime import ModelBuilderCompiler, NxdRuntime

        return NeuronDevice(NxdRuntime, kind="nxd", compiler=ModelBuilderCompiler())
    from aneuron.device.neuron.native_runtime import NativeRuntime

    generation = found.generation
    return NeuronDevice(lambda: NativeRuntime(generation), kind="native")


def _generation() -> tuple[Generation | None, dict[str, str]]:
    """Return which generation can be imported, and of those that cannot, why."""
    failures: dict[str, str] = {}
    torch_neuronx = _imported("torch_neuronx", failures)
    if torch_neuronx is not None:  # of NxD, or of TorchNeuron: their packages share the name
        if _is_torch_neuron(failures):
            return "torch_neuron", failures
        if not hasattr(torch_neuronx, "trace"):
            why = "it has no trace, and torch.neuron is not available"
            failures.setdefault("torch_neuronx", why)
        elif None not in [_imported(name, failures) for name in _NEEDED] and _has_classes(failures):
            return "nxd", failures
    if _imported("libtorch_neuronx_lite", failures) is not None:
        return "lite", failures
    return None, failures


def _imported(name: str, failures: dict[str, str]) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # it is there, and something that it needs is not
            failures[name] = str(error)
    except Exception as error:  # noqa: BLE001  a package of another version may raise anything
        failures[name] = _why(error)
    return None


def _why(error: Exception) -> str:
    """Return an error's first line, with its kind where that is not what imports raise."""
    kind, line = type(error).__name__, str(error).strip().split("\n")[0]
    if not line:
        return kind
    return line if isinstance(error, ImportError | OSError | RuntimeError) else f"{kind}: {line}"


def _is_torch_neuron(failures: dict[str, str]) -> bool:
    try:
        import torch

        neuron = getattr(torch, "neuron", None)
        return neuron is not None and bool(neuron.is_available())
    except Exception as error:  # noqa: BLE001  likewise
        failures["torch_neuronx"] = f"torch.neuron.is_available(): {_why(error)}"
        return False


def _has_classes(failures: dict[str, str]) -> bool:
    import torch

    try:
        return torch.classes.neuron.SPMDModel is not None
    except Exception:  # noqa: BLE001  likewise
        failures["torch_neuronx"] = "torch.classes.neuron has no SPMDModel: not the runtime of NxD"
        return False


def _no_runtime(versions: dict[str, str], fakes: tuple[str, ...], failures: dict[str, str]) -> str:
    parts = []
    if fakes:
        names = ", ".join(f"{name} {versions[name]}" for name in fakes)
        parts.append(f"{names} is the public index's placeholder, not AWS's package")
    known = {name.replace("-", "_") for name in fakes}
    parts += [
        f"{name} cannot be used: {why}" for name, why in failures.items() if name not in known
    ]
    return "; ".join(parts) or "no Neuron runtime is installed"


def version_of(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device_files() -> tuple[str, ...]:
    return tuple(sorted(str(path) for path in Path("/dev").glob("neuron[0-9]*")))
