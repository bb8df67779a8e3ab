"""AWS Neuron as a device: traced NxD programs, or native PyTorch.

`device` runs launches and reads on threads of its own; `raw` are the seams to the runtimes, and
`nxd_runtime` and `native_runtime` what is behind them on Neuron hardware; `status` makes typed
errors of status codes; `found` tells what this machine has, `environment` which variables matter.
What is launched, and with which arguments, is made in `aneuron.models.neuron`. docs/neuron.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aneuron.device.neuron.device import NeuronDevice

__all__ = ["NeuronDevice"]


def __getattr__(name: str) -> Any:
    """Import the device when it is asked for: `found` and `environment` do without numpy."""
    if name == "NeuronDevice":
        from aneuron.device.neuron.device import NeuronDevice

        return NeuronDevice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
