"""From names to parts: a model, and the device that runs it.

Comes in: what the caller gave to `Engine`. Goes out: a loaded model with its KV pool, and
an opened device. Blocking (files, weights): the engine calls it in a worker thread.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from aneuron.config import MOST_CELLS, BatchShape
from aneuron.device import BUILTIN_DEVICES, OwnsCores, PlacedModel, open_device
from aneuron.errors import ConfigError
from aneuron.models.simulated import SimModel, simulated_model
from aneuron.models.tokenizer import ByteTokenizer, HFTokenizer
from aneuron.threads import use_compute_threads

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron.config import EngineConfig
    from aneuron.device import Device, Model
    from aneuron.device.neuron import NeuronDevice
    from aneuron.models.catalog import Progress
    from aneuron.prompt import Tokenizer

__all__ = ["Loaded", "check_source", "load"]

_logger = logging.getLogger("aneuron.models")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` found."""

    models: tuple[Model, ...]  # one per rank, each with device state of its own
    devices: tuple[Device, ...]
    tokenizer: Tokenizer
    num_blocks: int  # of the KV pool
    max_model_len: int
    config: EngineConfig  # as the model's programs allow

    def discard(self) -> None:
        """Give back what it holds, if no engine was started over it; may block."""
        if isinstance(self.devices[0], OwnsCores):
            self.devices[0].disconnect()


def load(
    model: str | Model,
    device: str | Device,
    config: EngineConfig,
    tokenizer: Tokenizer | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Find, fetch and load a model, open its device, and make the KV pool.

    Raises:
        ConfigError: no such model or device, or they do not go together; `param` names it.
        OutOfMemory: the KV pool does not fit.
    """
    opened = _open_device(model, device)
    if not isinstance(opened, OwnsCores):
        return _load(model, opened, config, tokenizer, revision, progress)
    opened.reserve()
    try:
        return _load(model, opened, config, tokenizer, revision, progress)
    except BaseException:
        opened.disconnect()
        raise


def _load(
    model: str | Model,
    opened: Device,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    revision: str | None,
    progress: Progress | None,
) -> Loaded:
    path: Path | None = None
    if isinstance(model, str):
        if model.startswith("sim:"):
            model = simulated_model(model)
        elif opened.name == "neuron":
            from aneuron.models.neuron.compiled import load_neuron

            device = cast("NeuronDevice", opened)  # nothing else has that name
            model, path, config = load_neuron(
                model, device, config, revision=revision, progress=progress
            )
        else:
            model, path = _load_torch(model, config, revision, progress)
    _check_place(model, opened, config)
    _check_sampling(model, opened, config)
    _check_speculative(model, config)
    if tokenizer is None:
        tokenizer = ByteTokenizer() if path is None else HFTokenizer.load(path)
        if isinstance(tokenizer, HFTokenizer):  # the model's own
            model = _with_end_ids(model, tokenizer.eos_token_ids)
    limit = _length_limit(model, config)
    num_blocks = _pool_size(model, opened, config, limit)
    devices = tuple(opened.for_rank(rank, config.num_ranks) for rank in range(config.num_ranks))
    sizes = num_blocks, config.block_size, config.max_num_seqs * config.depth
    models = tuple(_placed(model, one).with_kv(*sizes) for one in devices)
    for one in models:
        if isinstance(one, PlacedModel) and not config.enforce_eager:
            one.warm_up(BatchShape.of(config, limit), progress)
    if config.enforce_eager and opened.name == "neuron":
        _warn_of_compiles(cast("NeuronDevice", opened), config.step_timeout_s)
    return Loaded(models, devices, tokenizer, num_blocks, limit, config)


def _warn_of_compiles(device: NeuronDevice, step_timeout_s: float) -> None:
    """Say that a compile within a step, which native graphs have, may be taken for a hang."""
    from aneuron.device.neuron.device import warm_up_limit_s

    if device.kind == "native" and step_timeout_s < (limit_s := warm_up_limit_s()):
        _logger.warning(
            "enforce_eager: the first step of each bucket compiles, which takes minutes on Neuron; "
            "after step_timeout_s, %g s, the device counts as lost: pass step_timeout_s=%g, or "
            "leave enforce_eager out",
            step_timeout_s,
            limit_s,
        )


def _placed(model: Model, device: Device) -> Model:
    return model.on(device) if isinstance(model, PlacedModel) else model


def _check_place(model: Model, device: Device, config: EngineConfig) -> None:
    is_placed = isinstance(model, PlacedModel)
    if isinstance(device, OwnsCores) and not is_placed:
        raise ConfigError(
            f"{model.spec.name} cannot be put on device {device.name}: pass its name or its folder",
            param="model",
        )
    if config.tensor_parallel_size > 1 and not is_placed:
        raise ConfigError(
            "tensor_parallel_size is for traced programs on NeuronCores",
            param="tensor_parallel_size",
        )


def _with_end_ids(model: Model, end_ids: tuple[int, ...]) -> Model:
    """Return the model with the tokenizer's end ids beside those of its own files."""
    known = dict.fromkeys((*model.spec.eos_token_ids, *end_ids))
    ends = tuple(one for one in known if one < model.spec.vocab_size)
    model.spec = replace(model.spec, eos_token_ids=ends)
    return model


def _check_sampling(model: Model, device: Device, config: EngineConfig) -> None:
    if config.token_carry == "resident" and not model.spec.has_slots:
        raise ConfigError(
            f"{model.spec.name}'s executables keep no tokens on the device, which "
            "token_carry='resident' needs: pass 'auto' or 'handoff'",
            param="token_carry",
        )
    if config.async_scheduling and not model.spec.on_device_sampling:
        raise ConfigError(
            f"{model.spec.name} on {device.name} does not sample on the device, which async "
            "scheduling needs: pass async_scheduling=False",
            param="async_scheduling",
        )


def _check_speculative(model: Model, config: EngineConfig) -> None:
    if config.speculative is not None and not model.spec.verifies_drafts:
        raise ConfigError(
            f"{model.spec.name}'s executables do not verify drafts, which speculative needs",
            param="speculative",
        )


def _length_limit(model: Model, config: EngineConfig) -> int:
    limit = model.spec.max_model_len
    if config.max_model_len is not None:
        if config.max_model_len > limit:
            raise ConfigError(
                f"max_model_len {config.max_model_len} is over the model's own {limit}",
                param="max_model_len",
            )
        limit = config.max_model_len
    return limit


def check_source(
    model: str | os.PathLike[str] | Model, device: str | Device
) -> tuple[str | Model, str | Device]:
    """Return model and device as `load` takes them.

    Raises:
        ConfigError: one is of a wrong type.
    """
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if not isinstance(model, str) and not hasattr(model, "with_kv"):
        raise ConfigError(f"model must be a name or a path, not {model!r}", param="model")
    if not isinstance(device, str) and not hasattr(device, "launch"):
        raise ConfigError(f"device must be a name, not {device!r}", param="device")
    return model, device


def _open_device(model: str | Model, device: str | Device) -> Device:
    is_simulated = isinstance(model, SimModel) or (
        isinstance(model, str) and model.startswith("sim:")
    )
    if isinstance(device, str):
        device = open_device(("sim" if is_simulated else "cpu") if device == "auto" else device)
    if device.name in BUILTIN_DEVICES and is_simulated != (device.name == "sim"):
        raise ConfigError(
            f"device {device.name!r} cannot run "
            + (
                "a simulated model" if is_simulated else "a real model; it runs sim:count and so on"
            ),
            param="device",
        )
    if not is_simulated and (isinstance(model, str) or device.name == "cpu"):
        use_compute_threads()
    return device


def _load_torch(
    name: str, config: EngineConfig, revision: str | None, progress: Progress | None
) -> tuple[Model, Path]:
    from aneuron.models.catalog import resolve
    from aneuron.models.torch_model import TorchModel

    found = resolve(name, revision=revision, progress=progress)
    if progress is not None:
        progress("load", 0, None)
    return TorchModel.load(
        found.path,
        dtype=config.dtype,
        name=found.name,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        enforce_eager=config.enforce_eager,
        num_threads=config.num_threads,
    ), found.path


def _pool_size(model: Model, device: Device, config: EngineConfig, max_model_len: int) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    # The ranks here share one memory, and each has a pool.
    budget = (config.kv_cache_bytes or device.memory_budget()) // config.num_ranks
    num_blocks = budget // (model.spec.kv_bytes_per_token * config.block_size)
    if num_blocks < 1:
        raise ConfigError(
            f"{budget} bytes do not hold one block of the KV cache", param="kv_cache_bytes"
        )
    # No more than all requests can use at their longest, or have an int32 number.
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    return int(min(num_blocks, useful, MOST_CELLS // config.block_size - 1))
