"""Traced programs as a model: executables that launch them, and launches that can be read.

Comes in: an `Artifact`, and each launch's `ModelInput`. Goes out: launches. KV cache and last
tokens are the programs' own, hidden on the device; only the order of launches protects them.
Loading and warming up block; executables run on the device's launch thread.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from aneuron.device.neuron.status import classify, status_of
from aneuron.errors import ConfigError, DeviceError, LaunchFailed
from aneuron.models.neuron.launches import (
    LAST_TOKEN,
    LaunchWriter,
    NxdLaunched,
    bucket_name,
    bucket_of,
)
from aneuron.models.sampling.slots import SlotState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.config import BatchShape
    from aneuron.device.neuron.device import NeuronDevice
    from aneuron.device.neuron.raw import NxdRaw
    from aneuron.models.neuron.artifact import Artifact
    from aneuron.models.neuron.launches import LaunchInputs, NxdGathered
    from aneuron.models.neuron.program import Bucket
    from aneuron.plans import ModelInput

__all__ = ["NxdExecutable", "NxdModel", "NxdRefusal"]

_MEASUREMENTS = 3


class NxdModel:
    """The programs of an artifact on a device; see `aneuron.device.PlacedModel`.

    Attributes:
        spec: what the engine needs to know.
        artifact: where the programs come from.
    """

    def __init__(self, artifact: Artifact, device: NeuronDevice, raw: NxdRaw) -> None:
        """Take programs that are loaded; `load` loads them."""
        self.spec = artifact.spec
        self.artifact = artifact
        self._device = device
        self.raw = raw
        self.writer = LaunchWriter(artifact.shape)
        self.slots = SlotState(0)
        self.has_token = np.zeros(1, np.bool_)
        self._executables: dict[Bucket, NxdExecutable] = {}

    @classmethod
    def load(cls, artifact: Artifact, device: NeuronDevice) -> Self:
        """Load an artifact's programs and weights onto a device.

        Raises:
            ConfigError: a file is missing or corrupt, weights are not those of the programs, or the
                device runs no traced programs.
            DeviceError: the runtime refuses.
        """
        return cls(artifact, device, _load(artifact, device))

    def on(self, device: NeuronDevice) -> Self:
        """Return it on a device; loaded anew, if that has another runtime by now.

        Raises:
            ConfigError, DeviceError: as `load`.
        """
        model = copy(self)
        model._device = device  # noqa: SLF001  its own copy
        if device.kind != "nxd" or device.raw is not self.raw:
            model.raw = _load(self.artifact, device)
        return model

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        """Return it with slots of its own; the cache is as compiled. See `Model.with_kv`.

        Raises:
            ConfigError: the programs have fewer blocks or slots, or blocks of another size.
        """
        shape = self.artifact.shape
        sizes = {
            "block_size": (block_size, block_size == shape.block_size, shape.block_size),
            "num_kv_blocks": (num_blocks, num_blocks <= shape.num_blocks, shape.num_blocks),
            "max_num_seqs": (num_slots, num_slots <= shape.num_slots, shape.num_slots),
        }
        if not shape.num_slots:
            del sizes["max_num_seqs"]
        for name, (given, holds, compiled) in sizes.items():
            if not holds:
                what = f"{given} slots for" if name == "max_num_seqs" else f"{name} {given} with"
                raise ConfigError(f"{what} programs compiled for {compiled}", param=name)
        model = copy(self)
        model.slots = SlotState(num_slots)
        model.has_token = np.zeros(num_slots + 1, np.bool_)
        model._executables = {}  # noqa: SLF001  its own copy
        return model

    def executable(self, inputs: ModelInput) -> NxdExecutable | NxdRefusal:
        """Return the executable of the bucket that a launch runs in, the same one each time.

        Where there is no such program it is one that raises when it is launched: that fails the
        requests of the launch, and no others.
        """
        try:
            bucket = bucket_of(self.artifact.shape, inputs)
        except ValueError as error:
            return NxdRefusal(self, error)
        found = self._executables.get(bucket)
        if found is None:
            found = self._executables[bucket] = NxdExecutable(self, bucket)
        return found

    def warm_up(
        self, shape: BatchShape, progress: Callable[[str, int, int | None], None] | None
    ) -> None:
        """Run every program once; see `PlacedModel.warm_up`.

        Then measure whether a launch returns while its program runs: `device.true_async`.
        """
        buckets = (*self.artifact.shape.prefills, *self.artifact.shape.decodes)
        try:
            for done, bucket in enumerate(buckets):
                if progress is not None:
                    progress("warm up", done, len(buckets))
                self._device.run_bucket(partial(self._run_padding, bucket))
            again = partial(self._run_padding, buckets[-1])
            shares = [self._device.run_bucket(again) for _ in range(_MEASUREMENTS)]
        except DeviceError:
            raise
        except Exception as error:
            raise classify(error, self._device.label) from error
        if progress is not None:
            progress("warm up", len(buckets), len(buckets))
        self._device.true_async = min(shares) < 0.5

    def with_slots(self, inputs: ModelInput) -> ModelInput:
        """Return a launch's inputs with what is known of its slots, in queue order.

        A decode may be behind a launch that was refused. Its rows have no last token on the device,
        and theirs, which nobody will see, is computed from id 0.
        """
        if inputs.writes is not None:
            self.slots.write(inputs.writes)
            self.has_token[inputs.writes.slots] = False
        if (slots := inputs.slots) is None:
            return inputs
        if not inputs.all_greedy:
            inputs = self.slots.filled(inputs)
        if inputs.input_ids is None and not self.has_token[slots[: inputs.num_reqs]].all():
            ids = np.where(self.has_token[slots], LAST_TOKEN, 0).astype(np.int32)
            inputs = replace(inputs, input_ids=ids)
        return inputs

    def launch(
        self,
        launch: LaunchInputs,
        num_rows: int,
        num_counts: int,
        fed: NxdLaunched | NxdGathered | None = None,
    ) -> NxdLaunched:
        """Launch inputs on all ranks.

        Args:
            launch: the inputs.
            num_rows: of the result, the first of the launch.
            num_counts: of these, the rows that are no padding.
            fed: whose tokens take the place of the ids.
        """
        tokens: Sequence[Any] = [launch.args[0]] * self.raw.ranks
        if fed is not None:
            tokens = fed.tokens_for(launch, self.raw.ranks)
        args = [[one, *launch.args[1:]] for one in tokens]
        outputs = self.raw.forward_async(self._nested(args))
        return NxdLaunched(
            self.raw,
            launch,
            self._firsts(outputs),
            num_rows=num_rows,
            num_counts=num_counts,
            keep=(args, outputs, fed),
        )

    def _run_padding(self, bucket: Bucket) -> float:
        """Run a program on padding; return which part of the time the launch itself took."""
        start = perf_counter()
        launched = self.launch(self.writer.padding(bucket), 0, 0)
        middle = perf_counter()
        launched.wait()
        return (middle - start) / (perf_counter() - start)

    def _nested(self, by_rank: list[list[Any]]) -> list[list[Any]]:
        if self.raw.layout == "rank_out":
            return by_rank
        return [list(values) for values in zip(*by_rank, strict=True)]

    def _firsts(self, outputs: list[list[Any]]) -> list[Any]:
        """Return the first output of each rank: ids, or logits."""
        is_by_rank = self.raw.layout == "rank_out"
        firsts = [rank[0] for rank in outputs] if is_by_rank else list(outputs[0])
        if len(firsts) != self.raw.ranks:
            raise ValueError(f"outputs of {len(firsts)} ranks, of {self.raw.ranks} launched")
        return firsts


class NxdExecutable:
    """One bucket's program.

    Attributes:
        name: kind and sizes, such as `decode[r4,c128]`.
        sampled_dtype: of the result.
    """

    def __init__(self, model: NxdModel, bucket: Bucket) -> None:
        """Name it."""
        self.name = bucket_name(model.artifact.shape, bucket)
        self.sampled_dtype = model.spec.sampled_dtype
        self._model = model
        self._bucket = bucket

    def __call__(
        self, inputs: ModelInput, fed: NxdLaunched | NxdGathered | None = None
    ) -> NxdLaunched:
        """Launch; a prefill has been read when this returns.

        Args:
            inputs: of this bucket.
            fed: whose tokens take the place of `inputs.input_ids`.

        Raises:
            RuntimeError, ValueError, KeyError, torch.jit.Error: see `NxdRaw.forward_async`.
        """
        model = self._model
        inputs = model.with_slots(inputs)
        launch = model.writer.write(self._bucket, inputs)
        launched = model.launch(launch, inputs.num_sampled, inputs.num_samples, fed)
        if inputs.slots is not None:
            model.has_token[inputs.slots[: inputs.num_samples]] = True
        if not self._bucket.is_decode:
            launched.wait()
        return launched

    def __repr__(self) -> str:
        return f"<NxdExecutable {self.name}>"


class NxdRefusal:
    """A launch that no program is compiled for.

    Attributes:
        name: of all of them.
        sampled_dtype: of the result, if there were one.
    """

    name = "refused"

    def __init__(self, model: NxdModel, error: ValueError) -> None:
        """Keep the reason."""
        self.sampled_dtype = model.spec.sampled_dtype
        self._model = model
        self._error = error

    def __call__(
        self, inputs: ModelInput, fed: NxdLaunched | NxdGathered | None = None
    ) -> NxdLaunched:
        """Refuse it.

        Raises:
            ValueError: always.
        """
        self._model.with_slots(inputs)  # they have new owners all the same
        raise self._error


def _load(artifact: Artifact, device: NeuronDevice) -> NxdRaw:
    """Put an artifact's programs and weights on a device; return its runtime."""
    if device.kind != "nxd":
        raise ConfigError(
            f"device {device.label} runs native PyTorch, and {artifact.spec.name} is traced "
            "programs",
            param="device",
        )
    if not (artifact.folder / "model.pt").is_file():
        raise ConfigError(f"{artifact.folder} holds no model.pt", param="model")
    weights = artifact.weights()
    raw = cast("NxdRaw", device.raw)
    try:
        raw.load(artifact.folder)
    except Exception as error:
        if status_of(error) is not None or isinstance(error, MemoryError):
            raise classify(error, device.label) from error
        what = f"cannot read {artifact.folder / 'model.pt'}"  # no core has been asked yet
        raise _damaged(what, error) from error
    if raw.ranks != artifact.ranks:
        raise ConfigError(
            f"the programs span {raw.ranks} cores, neuron_config.json says {artifact.ranks}",
            param="tp_degree",
        )
    try:
        raw.initialize(weights, artifact.start_rank)
    except Exception as error:
        told = classify(error, device.label)
        if isinstance(told, LaunchFailed) and status_of(error) is None:  # the arguments are wrong
            what = f"the weights in {artifact.folder} are not those of its programs"
            raise _damaged(what, error) from error
        raise told from error
    return raw


def _damaged(what: str, error: Exception) -> ConfigError:
    return ConfigError(f"{what}: {type(error).__name__}: {error}", param="model")
