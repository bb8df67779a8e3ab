"""Native PyTorch on hardware: `NativeRaw` over libtorch_neuronx_lite or TorchNeuron.

Comes in: host tensors, functions. Goes out: device tensors, compiled graphs. One call of theirs
for one of ours. Only hardware can show that copies do not wait, and what an event's `query` says
before its time: `aneuron doctor --probe`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from aneuron.device.neuron.found import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["LITE", "TORCH_NEURON", "NativeRuntime"]

LITE: Literal["lite"] = "lite"
TORCH_NEURON: Literal["torch_neuron"] = "torch_neuron"

_BACKENDS = {LITE: "neuron_libtorch", TORCH_NEURON: "neuron"}
_PACKAGES = {
    LITE: ("torch", "libtorch-neuronx-lite", "neuronx-cc"),
    TORCH_NEURON: ("torch", "torch-neuronx", "neuronx-cc"),
}
_VARIABLES = ("NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG", "NEURON_PLATFORM_TARGET_OVERRIDE")
_DEPTH = "NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS"
_DEFAULT_DEPTH, _MOST_DEPTH = 8, 63  # of the runtime, which lowers what is above
_MOST_SHAPES = 4096  # of one graph


class NativeRuntime:
    """One NeuronCore as a PyTorch device.

    Args:
        generation: which runtime is there; `found` tells.
        index: of the core.

    Attributes:
        index: of the core.
        has_events: whether it has `torch.neuron.Event`, which the lite runtime lacks.
        queue_depth: launches that it takes before it refuses.
        version: of all that a compiled graph depends on.
    """

    def __init__(
        self, generation: Literal["lite", "torch_neuron"] = TORCH_NEURON, index: int = 0
    ) -> None:
        """Register the device with torch; no core is taken yet.

        Raises:
            ImportError, OSError: the runtime's package, or a library of it, cannot be loaded.
            RuntimeError: it refuses, or torch has no device of that name.
        """
        if generation == LITE:
            _import_lite()
        self._generation = generation
        self._device = torch.device("neuron", index)
        self.index = index
        self.has_events = generation == TORCH_NEURON and hasattr(_neuron(), "Event")
        asked = os.environ.get(_DEPTH, "")
        self.queue_depth = min(int(asked), _MOST_DEPTH) if asked.isdecimal() else _DEFAULT_DEPTH
        packages = [f"{name}-{version_of(name) or 'none'}" for name in _PACKAGES[generation]]
        variables = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
        self.version = " ".join((*packages, *variables))

    def at(self, index: int) -> Self:
        """Return the same runtime on another core."""
        return type(self)(self._generation, index)

    def to_device(self, tensor: torch.Tensor, *, non_blocking: bool = True) -> torch.Tensor:
        """Queue the copy of a host tensor; see `NativeRaw.to_device`."""
        return tensor.to(self._device, non_blocking=non_blocking)

    def compile(
        self,
        fn: Callable[..., Any],
        *,
        fullgraph: bool = True,
        dynamic: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return a graph of `torch.compile`; see `NativeRaw.compile`."""
        # Each bucket has shapes of its own, and torch gives a function up after eight of them.
        config = torch._dynamo.config  # noqa: SLF001  public, but for its name
        config.recompile_limit = max(config.recompile_limit, _MOST_SHAPES)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _MOST_SHAPES)
        return torch.compile(
            fn,
            backend=_BACKENDS[self._generation],
            fullgraph=fullgraph,
            dynamic=dynamic,
            options=None if options is None else dict(options),
        )

    def call(self, graph: Any, *tensors: torch.Tensor) -> Any:
        """Launch a graph; see `NativeRaw.call`."""
        return graph(*tensors)

    def to_host(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        """Copy a device tensor; see `NativeRaw.to_host`."""
        return tensor.to("cpu", non_blocking=non_blocking)

    def record_event(self) -> Any:
        """Return an event behind all that is queued; see `NativeRaw.record_event`."""
        event = _neuron().Event()
        event.record()
        return event

    def synchronize(self, event: Any) -> None:
        """Wait for an event; see `NativeRaw.synchronize`."""
        event.synchronize()

    def memory_stats(self) -> Mapping[str, int]:
        """Return bytes by keys; empty on the lite runtime, which does not tell."""
        stats = getattr(_neuron(), "memory_stats", None)
        return {} if stats is None else dict(stats(self._device))

    def close(self) -> None:
        """Wait for what is queued, and let the allocator give back what nobody holds.

        The process keeps the core: only its end gives that to another. Compiled graphs go with
        the model that has them. The lite runtime has no call for either.
        """
        try:
            if (synchronize := getattr(_neuron(), "synchronize", None)) is not None:
                synchronize(self._device)
        finally:  # also on a core that is lost
            if (empty := getattr(_neuron(), "empty_cache", None)) is not None:
                empty()


def _import_lite() -> None:
    """Import the lite runtime, which registers the device."""
    try:
        import libtorch_neuronx_lite  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        raise
    except Exception as error:  # a package of another version may raise anything
        text = f"libtorch_neuronx_lite cannot be loaded: {type(error).__name__}: {error}"
        raise ImportError(text) from error


def _neuron() -> Any:
    return getattr(torch, "neuron", None)
