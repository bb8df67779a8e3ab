"""Modules in place of AWS's, which write down how they are called."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

    Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    """Put a module, and the packages above it, where `import` finds them."""
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    above, _, last = name.rpartition(".")
    if above:
        package = sys.modules.get(above) or install(monkeypatch, above)
        monkeypatch.setattr(package, last, module, raising=False)
    return module


class Recorder:
    """Writes down each call of each method, and returns what it was told to."""

    def __init__(self, **results: Any) -> None:
        self.calls: Calls = []
        self._results = results

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self._results.get(name)

        return call


def neuron_classes(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    """What importing torch_neuronx leaves in `torch.classes.neuron`."""
    names = SimpleNamespace(Runtime=lambda: runtime, SPMDModel=object)
    monkeypatch.setattr(torch.classes, "neuron", names, raising=False)
