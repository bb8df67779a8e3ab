"""A model for native PyTorch on Neuron: a decoder on a core, its state, and its buckets.

Comes in: a model directory, or a module with the interface of `Decoder`. Goes out: executables
whose launches are unread. Loading and warm-up block and run in a worker thread, executables on
the device's launch thread. What is compiled is in `native_graphs`.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import numpy as np
import torch

from aneuron.device.neuron import NeuronDevice
from aneuron.device.neuron.status import as_config_error, classify, status_of
from aneuron.errors import ConfigError, DeviceError
from aneuron.models.architecture import ModelConfig
from aneuron.models.executables import bucket_name
from aneuron.models.neuron.native_buckets import adapt, padding_of
from aneuron.models.neuron.native_graphs import Graphs, NativeLaunch, Pool
from aneuron.models.torch_model import eos_token_ids, read_json
from aneuron.models.weights import kv_bytes_per_token, load_decoder
from aneuron.plans import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from aneuron.config import BatchShape
    from aneuron.device.neuron.raw import NativeRaw
    from aneuron.plans import ModelInput

__all__ = ["NativeModel", "adapt", "native_spec"]

_logger = logging.getLogger("aneuron.models")
_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MEASURED_STEPS = 3


class _Core(NamedTuple):
    """A core, and the copy of a decoder that is there."""

    device: NeuronDevice
    raw: NativeRaw
    decoder: torch.nn.Module


class NativeExecutable:
    """One bucket of a model.

    Attributes:
        name: kind and sizes, such as `decode[r8,b16]`.
        sampled_dtype: of the ids.
    """

    sampled_dtype = "int32"

    def __init__(self, graphs: Graphs, name: str) -> None:
        """Name a bucket; its first launch compiles it."""
        self.name = name
        self._graphs = graphs

    def __call__(self, inputs: ModelInput, fed: NativeLaunch | None) -> NativeLaunch:
        """Launch a step and return its unread ids; see `Graphs.launch`."""
        return self._graphs.launch(inputs, fed)

    def __repr__(self) -> str:
        return f"<NativeExecutable {self.name}>"


class NativeModel:
    """A decoder whose steps are graphs on a NeuronCore; see `PlacedModel`.

    Args:
        spec: what the engine needs to know, as `native_spec` makes it.
        decoder: a module with the interface of `Decoder`, on the host, where it stays: each
            core that `on` is called for has a copy.
        core: what `on` made.
        graphs: what `with_kv` made.

    Attributes:
        spec: as given.
        decoder: likewise.
    """

    def __init__(
        self,
        spec: ModelSpec,
        decoder: torch.nn.Module,
        *,
        core: _Core | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """Describe the model; `on` gives it a core, and `with_kv` graphs."""
        self.spec = spec
        self.decoder = decoder
        self._core = core
        self._graphs = graphs
        self._executables: dict[tuple[Any, ...], NativeExecutable] = {}
        self._is_warm = False

    @classmethod
    def load(
        cls, path: Path, device: NeuronDevice, *, name: str | None = None, dtype: str = "auto"
    ) -> Self:
        """Load a model directory, in Hugging Face layout, and put it on a device.

        Args:
            path: the directory: config.json, generation_config.json, safetensors.
            device: of the kind "native".
            name: the model's name in the spec; the directory's if None.
            dtype: of the weights and the KV cache: "float32", or "bfloat16", which "auto" is.

        Raises:
            ConfigError: a file is missing or corrupt, or the model is not supported.
            OutOfMemory: the device has no room for the weights.
        """
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype must be {', '.join(_DTYPES)}, not {dtype!r}", param="dtype")
        raw = read_json(path / "config.json")
        config = ModelConfig.from_dict(raw)
        generation = path / "generation_config.json"
        sources = [read_json(generation), raw] if generation.exists() else [raw]
        spec = native_spec(
            config,
            name=name or path.name,
            dtype=_DTYPES[dtype],
            eos_token_ids=eos_token_ids(sources, config.vocab_size),
        )
        return cls(spec, load_decoder(path, config, _DTYPES[dtype])).on(device)

    def on(self, device: Any) -> Self:
        """Return it on a device, the weights copied there; itself if it is there already.

        Raises:
            ConfigError: the device is not one of native PyTorch on Neuron.
            OutOfMemory: the device has no room for the weights.
        """
        if not isinstance(device, NeuronDevice) or device.kind != "native":
            raise ConfigError(
                f"{self.spec.name} needs a device of native PyTorch on Neuron", param="device"
            )
        raw = cast("NativeRaw", device.raw)
        if self._core is not None and self._core.raw is raw:
            return self
        with _typed(device):
            core = _Core(device, raw, _copied(self.decoder, raw))
        return type(self)(self.spec, self.decoder, core=core)

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        """Return it over a KV cache and slots of its own; see `Model.with_kv`.

        Raises:
            ConfigError: it is on no device yet.
            OutOfMemory: the device has no room for the cache.
        """
        if self._core is None:
            raise ConfigError(f"{self.spec.name} is on no Neuron device", param="device")
        device, raw, decoder = self._core
        pool = Pool(num_blocks, block_size, num_slots, _DTYPES[self.spec.dtype])
        with _typed(device):
            graphs = Graphs(raw, decoder, pool)
        return type(self)(self.spec, self.decoder, core=self._core, graphs=graphs)

    def executable(self, inputs: ModelInput) -> NativeExecutable:
        """Return the executable for the bucket of `inputs`, the same one each time."""
        assert self._graphs is not None, "with_kv comes first"
        bucket = inputs.is_decode, len(inputs.positions), inputs.block_table.shape
        found = self._executables.get(bucket)
        if found is None:
            found = NativeExecutable(self._graphs, bucket_name(inputs))
            self._executables[bucket] = found
            if self._is_warm:
                _logger.warning("%s: %s was not warmed up", self.spec.name, found.name)
        return found

    # ── warm-up ─────────────────────────────────────────────────────────────────────────

    def warm_up(
        self, shape: BatchShape, progress: Callable[[str, int, int | None], None] | None = None
    ) -> None:
        """Run every bucket once on padding, and measure what returns early.

        A copy to the host that is queued behind its launch must not make that wait: where it
        does, ids are copied by who reads them.

        Raises:
            ConfigError: a bucket cannot be compiled.
            DeviceError: one failed.
        """
        assert self._core is not None, "on and with_kv come first"
        device, buckets = self._core.device, padding_of(shape)
        for done, inputs in enumerate(buckets):
            if progress is not None:
                progress("warm up", done, len(buckets))
            with _typed(device, bucket_name(inputs)):
                device.run_bucket(partial(self._run, inputs))
        with _typed(device):
            device.true_async = device.run_bucket(partial(self._measure, buckets[-1]))
        if progress is not None:
            progress("warm up", len(buckets), len(buckets))
        self._is_warm = True

    def _run(self, inputs: ModelInput) -> tuple[float, float]:
        """Run a bucket; return the seconds of the launch, and of the wait behind it."""
        start_s = perf_counter()
        launched = self.executable(inputs)(inputs, None)
        launched_s = perf_counter()
        launched.read()
        read_s = perf_counter()
        if inputs.is_decode:
            launched.gather(np.arange(inputs.num_rows)).wait()
        return launched_s - start_s, read_s - launched_s

    def _measure(self, inputs: ModelInput) -> bool:
        """Return whether a launch returns early; have ids copied early only if that does, too."""
        assert self._graphs is not None
        graphs = self._graphs
        is_early = self._returns_early(inputs)
        if is_early and graphs.raw.has_events:
            graphs.copies_early = True
            graphs.copies_early = self._copies_early(inputs)
            if not graphs.copies_early:
                _logger.warning(
                    "%s: copies to the host cannot be queued behind launches; they are made by "
                    "reads, which may wait for the launch behind theirs; see docs/neuron.md",
                    self.spec.name,
                )
                self._run(inputs)  # if it is not for them that it failed, this tells
        return is_early

    def _copies_early(self, inputs: ModelInput) -> bool:
        """Return whether queued copies bring what a read does, and make no launch wait."""
        assert self._graphs is not None
        try:
            launched = self.executable(inputs)(inputs, None)
            early = launched.read()
            read = self._graphs.raw.to_host(launched.ids).numpy()
            return np.array_equal(early, read[: len(early)]) and self._returns_early(inputs)
        except RuntimeError as error:
            _logger.debug("%s: a queued copy failed: %s", self.spec.name, error)
            return False

    def _returns_early(self, inputs: ModelInput) -> bool:
        """Return whether a launch, its queued copy included, returns before it has ended."""
        launch_s = read_s = inf
        for _ in range(_MEASURED_STEPS):
            spent = self._run(inputs)
            launch_s, read_s = min(launch_s, spent[0]), min(read_s, spent[1])
        return launch_s < read_s


def native_spec(
    config: ModelConfig,
    *,
    name: str,
    dtype: torch.dtype = torch.float32,
    eos_token_ids: tuple[int, ...] = (),
) -> ModelSpec:
    """Return what the engine needs to know of a decoder of that configuration.

    One prompt a step, as prefill graphs are compiled for one row; no forks, as no graph copies
    blocks.
    """
    return ModelSpec(
        name=name,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=eos_token_ids,
        kv_bytes_per_token=kv_bytes_per_token(config, dtype),
        dtype=str(dtype).removeprefix("torch."),
        has_slots=True,
        has_masks=True,
        max_prompts=1,
        can_fork=False,
    )


def _copied(decoder: torch.nn.Module, raw: NativeRaw) -> torch.nn.Module:
    """Return the module with its tensors on a core; those that were shared still are."""
    found = (*decoder.parameters(), *decoder.buffers())
    sent: dict[int, Any] = {id(one): raw.to_device(one.detach()) for one in found}
    return deepcopy(decoder, sent)


@contextmanager
def _typed(device: NeuronDevice, bucket: str | None = None) -> Iterator[None]:
    """Raise what a runtime raises as a typed error.

    Args:
        device: whose runtime it is.
        bucket: what is compiled meanwhile, if anything is.
    """
    try:
        yield
    except (ConfigError, DeviceError):
        raise
    except Exception as error:
        is_compiled = bucket is not None and not isinstance(error, FloatingPointError)
        if is_compiled and status_of(error) is None:
            failed = RuntimeError(f"{bucket}: {error}")
            raise as_config_error(failed, param="model") from error
        raise classify(error, device.label) from error
