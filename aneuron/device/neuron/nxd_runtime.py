"""Traced NxD programs on hardware: `NxdRaw` over torch_neuronx, `NxdCompiler` over ModelBuilder.

Comes in: artifact folders, host tensors. Goes out: device tensors. One call of theirs for one of
ours. Only hardware can show that `forward_async` returns early (up to SDK 2.30 it does), what a
third unread launch does, and that a blocking read lets go of the GIL: `aneuron doctor --probe`.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aneuron.device.neuron.found import version_of
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from aneuron.device.neuron.raw import TracedProgram

__all__ = ["ModelBuilderCompiler", "NxdRuntime", "logical_core_size"]

_V2_MARK = "extra/nxd_torchscript_metadata.json"  # NxDModel.save leaves it in the archive
_PACKAGES = ("torch", "torch-neuronx", "neuronx-distributed", "neuronx-cc")
# The compiler and the runtime must agree on it: the runtime refuses programs of another size.
_CORE_SIZES = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
_PLATFORM = "NEURON_PLATFORM_TARGET_OVERRIDE"
_CHIP = Path("/sys/devices/virtual/neuron_device/neuron0/info/architecture/instance_type")
_ASYNC = ("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "NEURON_RT_IO_RING_CACHE_SIZE")
_FLAGS = "--enable-saturate-infinity --auto-cast=none --model-type=transformer"
_PREFILL_TAG = "context_encoding_model"


def logical_core_size() -> int | None:
    """Return how many physical cores a logical one has, if the environment says so.

    Raises:
        ConfigError: it says something that is no number; `param` is the variable.
    """
    name = next((name for name in _CORE_SIZES if os.environ.get(name)), None)
    if name is None:
        return None
    value = os.environ[name].strip()
    if not value.isdecimal() or not int(value):
        raise ConfigError(f"{name} must be a number of cores, not {value!r}", param=name)
    return int(value)


class NxdRuntime:
    """The programs of one artifact, on NeuronCores.

    Attributes:
        layout: [rank][value] of a legacy model, [value][rank] of one that NxDModel saved.
        ranks: local ranks, from the artifact's configuration.
    """

    layout: Literal["rank_out", "out_rank"]
    ranks: int

    def __init__(self) -> None:
        """Register the runtime's classes with torch; no core is taken yet."""
        for name in _ASYNC:  # as NxDI does; read when the runtime starts
            os.environ.setdefault(name, "2")
        import torch_neuronx  # noqa: F401  (its import registers them)

        self.layout, self.ranks = "rank_out", 1
        self._file = Path()
        self._model: Any = None

    def load(self, path: Path) -> None:
        """Load model.pt; of NxDModel's format, when the ranks are known. See `NxdRaw.load`."""
        import torch

        self._file = path / "model.pt"
        self.ranks = _local_ranks(path / "neuron_config.json")
        self.layout = "out_rank" if _is_v2(self._file) else "rank_out"
        if self.layout == "rank_out":
            loaded: Any = torch.jit.load(str(self._file))  # type: ignore[no-untyped-call]
            self._model = loaded.nxd_model

    def initialize(self, weights: list[dict[str, torch.Tensor]], start_rank: int) -> None:
        """Put weights and zeroed state on the cores; see `NxdRaw.initialize`."""
        import torch

        if self.layout == "rank_out":
            self._model.initialize(weights, torch.tensor([start_rank], dtype=torch.int32))
            return
        from neuronx_distributed.trace.nxd_model.nxd_model import NxDModel

        self._model = NxDModel.load(
            str(self._file), start_rank=start_rank, local_ranks_size=len(weights)
        )
        self._model.set_weights(weights)
        self._model.to_neuron()

    def forward(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run on host tensors, and wait; see `NxdRaw.forward`."""
        given = (args,) if self.layout == "rank_out" else args
        found = self._model.forward(*given)
        return list(found) if isinstance(found, list | tuple) else [found]

    def forward_async(self, ranked: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Launch, nested as `layout` says; see `NxdRaw.forward_async`."""
        nested = [list(inner) for inner in ranked]  # TorchScript takes lists only
        found: list[list[Any]]
        if self.layout == "rank_out":
            found = self._model.forward_async(nested)
        else:
            found = self._model.forward(*nested, forward_mode="async")
        return found

    def to_cpu(self, tensor: Any) -> torch.Tensor:
        """Wait for a device tensor and copy it; see `NxdRaw.to_cpu`."""
        copied: torch.Tensor = tensor.cpu()
        return copied

    def memory_stats(self) -> tuple[int, int]:
        """Return bytes used and free; see `NxdRaw.memory_stats`."""
        used, free = _runtime().get_vnc_memory_stats()
        return int(used), int(free)

    def close(self) -> None:
        """Give the cores back; see `NxdRaw.close`."""
        self._model = None
        _runtime().unsafe_close()


class ModelBuilderCompiler:
    """Compiles traced programs with neuronx-distributed's ModelBuilder.

    All programs of an artifact are compiled by one call, which says nothing before its end.

    Attributes:
        version: of the packages, and what else a compiled program depends on: the chip, the size
            of a logical core, and flags.
    """

    version: str

    def __init__(self) -> None:
        """Find out the version.

        Raises:
            ConfigError: as `logical_core_size`.
        """
        self._cores = logical_core_size()
        packages = [f"{name}-{version_of(name) or 'none'}" for name in _PACKAGES]
        cores = "default" if self._cores is None else self._cores
        more = os.environ.get("NEURON_CC_FLAGS", "")
        self.version = " ".join((*packages, f"chip={_chip()}", f"lnc={cores}", _FLAGS, more))

    def compile(
        self,
        programs: Sequence[TracedProgram],
        folder: Path,
        *,
        ranks: int,
        progress: Callable[[str, int, int | None], None] | None = None,
    ) -> None:
        """Write model.pt; see `NxdCompiler.compile`."""
        import torch
        from neuronx_distributed.trace.model_builder import ModelBuilder

        if progress is not None:
            progress("compile", 0, len(programs))
        # Beside the artifact: what the compiler leaves there is no part of it.
        with tempfile.TemporaryDirectory(prefix="aneuron-neuron-") as work:
            builder = ModelBuilder(
                router=None,
                tp_degree=ranks,
                checkpoint_loader=None,  # the weights come with `initialize`
                compiler_workdir=work,
                **_core_size(ModelBuilder, self._cores),
            )
            for program in programs:
                _add(builder, program, self._cores)
            traced = builder.trace(initialize_model_weights=False)
            torch.jit.save(traced, str(folder / "model.pt"))
        if progress is not None:
            progress("compile", len(programs), len(programs))


def _core_size(builder: Any, cores: int | None) -> dict[str, int]:
    """Return the builder's argument for the size of a logical core, by the name it has there."""
    if cores is None:
        return {}
    older, newer = "logical_neuron_cores", "logical_nc_config"
    return {older if older in inspect.signature(builder).parameters else newer: cores}


def _add(builder: Any, program: TracedProgram, cores: int | None) -> None:
    """Add each bucket as a model of its own: shapes alone then tell which one runs."""
    level = "-O1" if program.tag == _PREFILL_TAG else "-O2"
    size = "" if cores is None else f" --lnc={cores}"  # else the chip's own
    for at, inputs in enumerate(program.inputs):
        builder.add(
            key=f"{program.tag}_{at}",
            model_instance=_instance(program),
            example_inputs=[tuple(inputs)],
            compiler_args=f"{_FLAGS} {level}{size}",
        )


def _instance(program: TracedProgram) -> Any:
    from neuronx_distributed.parallel_layers.mappings import (
        reduce_from_tensor_model_parallel_region,
    )
    from neuronx_distributed.trace.model_builder import BaseModelInstance

    class Instance(BaseModelInstance):  # type: ignore[misc]
        """Makes the module when the builder is ready for it; aliases are the module's buffers."""

        def load_module(self) -> None:
            self.module = program.module(0).eval()  # one program for all ranks
            for part in self.module.modules():
                if getattr(part, "reduce", None) is not None:
                    part.reduce = reduce_from_tensor_model_parallel_region

        def get(self, bucket_rank: int, **_: Any) -> tuple[Any, dict[Any, int]]:
            buffers = dict(self.module.named_buffers())
            return self.module, {buffers[name]: at for at, name in enumerate(program.aliases, 1)}

    return Instance(module_cls=None, input_output_aliases={})


def _runtime() -> Any:
    import torch

    return torch.classes.neuron.Runtime()


def _chip() -> str:
    """Return which chip is compiled for, as far as that can be told."""
    if told := os.environ.get(_PLATFORM):
        return told.lower()
    try:
        return _CHIP.read_text("utf-8").strip().lower()
    except (OSError, UnicodeDecodeError):
        return "unknown"


def _is_v2(file: Path) -> bool:
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith(_V2_MARK) for name in archive.namelist())


def _local_ranks(file: Path) -> int:
    told = json.loads(file.read_bytes())
    config = told.get("neuron_config", told)
    return int(config.get("local_ranks_size") or config.get("tp_degree", 1))
