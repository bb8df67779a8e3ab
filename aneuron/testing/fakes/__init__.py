"""Played Neuron runtimes and compilers, for machines without one.

    device = NeuronDevice(FakeNxd, kind="nxd", compiler=FakeCompiler())
    async with Engine("a-folder-with-an-artifact", device=device) as engine: ...

They implement the seams of `aneuron.device.neuron.raw` and are stricter than the hardware: a rule
that a caller breaks raises at once, and stays on the fake's `violations`. How fast hardware is
they do not show.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aneuron.testing.fakes.compiler import FakeCompiler
    from aneuron.testing.fakes.core import FakeCore, Times
    from aneuron.testing.fakes.faults import Fault, Violation
    from aneuron.testing.fakes.native import FakeNative
    from aneuron.testing.fakes.nxd import FakeNxd
    from aneuron.testing.fakes.programs import CountDecoder, ScriptDecoder, SumDecoder

__all__ = [
    "CountDecoder",
    "FakeCompiler",
    "FakeCore",
    "FakeNative",
    "FakeNxd",
    "Fault",
    "ScriptDecoder",
    "SumDecoder",
    "Times",
    "Violation",
]

# The native one sets up a device of torch's when it is imported.
_HOMES = {
    "CountDecoder": "programs",
    "FakeCompiler": "compiler",
    "FakeCore": "core",
    "FakeNative": "native",
    "FakeNxd": "nxd",
    "Fault": "faults",
    "ScriptDecoder": "programs",
    "SumDecoder": "programs",
    "Times": "core",
    "Violation": "faults",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
