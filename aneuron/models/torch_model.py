"""A loaded model for a torch device: its weights, its KV cache, and an executable per bucket.

Comes in: a model directory. Goes out: executables. Loading blocks and runs in a thread. Steps run
natively where that library is compiled, and eagerly until it is, or for ever (`enforce_eager`).
"""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from aneuron.device import limits
from aneuron.errors import ConfigError, OutOfMemory
from aneuron.models.architecture import ModelConfig
from aneuron.models.executables import TorchExecutable, bucket_name
from aneuron.models.native.program import fits
from aneuron.models.native.switch import WeightSource
from aneuron.models.sampling.slots import SlotState
from aneuron.models.weights import kv_bytes_per_token, kv_width
from aneuron.plans import ModelSpec

if TYPE_CHECKING:
    from aneuron.device import SplitExecutable
    from aneuron.models.decoder import Decoder
    from aneuron.models.native.program import NativeSteps
    from aneuron.plans import BlockCopies, ModelInput

__all__ = ["TorchModel", "as_torch_dtype", "default_threads", "eos_token_ids", "read_json"]

# Computed in less than the time of a decode step of 32 rows, also where their contexts are short.
_INTERLEAVED_TOKENS = 40
_CELLS = {1: np.uint8, 2: np.uint16, 4: np.float32}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchModel:
    """A decoder with its KV cache, and one executable per bucket.

    Attributes:
        spec: what the engine needs to know.
        config: the decoder's configuration.
        k_caches, v_caches: per layer [num_blocks + 1, block_size, num_kv_heads, width],
            empty before `allocate_kv`.
        slots: what the carry `resident` keeps per slot, likewise.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: ModelConfig,
        source: WeightSource,
        *,
        kv_dtype: torch.dtype | None = None,
        num_threads: int | None = None,
    ) -> None:
        self._kv_dtype = kv_dtype or _DTYPES[spec.dtype]
        self.spec = spec
        self.config = config
        self._source = source
        self._num_threads = num_threads or default_threads()
        self._steps: NativeSteps | None = None
        self._num_used = 1  # leading blocks that eager steps may have written
        self.k_caches: list[torch.Tensor] = []
        self.v_caches: list[torch.Tensor] = []
        self.slots = SlotState(0)
        self._executables: dict[tuple[Any, ...], TorchExecutable] = {}

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: str = "auto",
        name: str | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        enforce_eager: bool = False,
        num_threads: int | None = None,
    ) -> TorchModel:
        """Load a model directory: config.json, generation_config.json, safetensors.

        Args:
            path: the directory, in Hugging Face layout.
            dtype: `float32`, `bfloat16`, or `auto`: bfloat16 where the processor multiplies
                it natively (AVX512-BF16, AMX), else float32. Norms, the rope's angles and
                sampling are float32 always.
            name: the model's name in the spec; the directory's if None.
            quantization: of the matrices, int8 or int4, where steps run natively.
            kv_cache_dtype: `int8` keeps keys and values in 8 bits; `auto` is as `dtype`.
            block_size: of the engine's cache.
            enforce_eager: run torch's operators one by one, and compile nothing.
            num_threads: that compute; None is torch's number.

        Raises:
            ConfigError: a file is missing or corrupt, or the model is not supported.
        """
        torch_dtype = as_torch_dtype(dtype)
        kv_dtype = torch.uint8 if kv_cache_dtype == "int8" else torch_dtype
        path = Path(path)
        raw = read_json(path / "config.json")
        config = ModelConfig.from_dict(raw)
        generation = path / "generation_config.json"
        sources = [read_json(generation), raw] if generation.exists() else [raw]
        spec = ModelSpec(
            name=name or path.name,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            eos_token_ids=eos_token_ids(sources, config.vocab_size),
            kv_bytes_per_token=kv_bytes_per_token(config, kv_dtype),
            dtype=str(torch_dtype).removeprefix("torch."),
            has_slots=True,
            has_logits=True,
            has_masks=True,
            verifies_drafts=True,
            is_split=True,
            interleaved_prefill_tokens=_INTERLEAVED_TOKENS,
        )
        source = WeightSource(
            path,
            config,
            torch_dtype,
            quantization=quantization,
            block_size=block_size,
            is_eager=enforce_eager,
        )
        source.prepare()
        return cls(spec, config, source, kv_dtype=kv_dtype, num_threads=num_threads)

    @property
    def decoder(self) -> Decoder:
        """The module that runs eagerly; loaded when it is first asked for."""
        return self._source.decoder

    def allocate_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> None:
        """Allocate the paged cache: `num_blocks` for requests and block 0, the null block.

        Beside it the state of `num_slots` slots and a spare one. What was there before is
        dropped with all it holds.

        Raises:
            ConfigError: a number is not positive.
            OutOfMemory: the device has not that much memory.
        """
        for key, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{key} must be at least 1, not {value}", param=key)
        self.discard()
        config = self.config
        shape = (num_blocks + 1, block_size, config.num_kv_heads, kv_width(config, self._kv_dtype))
        self.k_caches = [self._zeros(shape) for _ in range(config.num_layers)]
        self.v_caches = [self._zeros(shape) for _ in range(config.num_layers)]
        self.slots = SlotState(num_slots)
        self._steps, self._num_used = None, 1

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        """Return it over a KV cache and slots of its own; the weights are shared.

        Raises:
            ConfigError: a number is not positive.
            OutOfMemory: the device has not that much memory.
        """
        model = copy(self)
        model.allocate_kv(num_blocks, block_size, num_slots)
        return model

    def executable(self, inputs: ModelInput) -> TorchExecutable:
        """Return the executable for the bucket of `inputs`, the same one each time."""
        num_rows, num_blocks = inputs.block_table.shape
        sizes = len(inputs.positions), inputs.max_query_len, len(inputs.logits_indices)
        bucket = (inputs.is_decode, *sizes, num_rows, num_blocks)
        found = self._executables.get(bucket)
        if found is None:
            found = TorchExecutable(self, bucket_name(inputs))
            self._executables[bucket] = found
        return found

    def split(self, inputs: ModelInput) -> SplitExecutable:
        """Return the parts of that executable."""
        return self.executable(inputs).parts

    def steps_for(self, inputs: ModelInput) -> NativeSteps | None:
        """Return what runs the step natively, or None: eagerly, for the time being or for ever."""
        if self._steps is None:
            caches = list(zip(self.k_caches, self.v_caches, strict=True))
            if fits(self.config, caches[0][0].shape[1]):
                self._steps = self._source.steps(
                    caches, num_used=self._num_used, num_threads=self._num_threads
                )
            if self._steps is None and len(inputs.block_table):
                self._num_used = max(self._num_used, 1 + int(inputs.block_table.max()))
        return self._steps

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copy blocks of the cache, in all layers."""
        if self._steps is None:  # a change-over must know of blocks that no table has yet
            self._num_used = max(self._num_used, 1 + int(copies.targets.max()))
        sources, targets = map(torch.from_numpy, (copies.sources, copies.targets))
        for cache in (*self.k_caches, *self.v_caches):
            cache[targets] = cache[sources]

    def discard(self) -> None:
        """Drop the KV cache and the executables."""
        self.k_caches, self.v_caches = [], []
        self._executables = {}
        self._steps = None

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            # numpy's zeros are pages not yet committed; torch's would be written here,
            # which took 15 s for a quarter of this machine's memory.
            cells = np.zeros(shape, _CELLS[self._kv_dtype.itemsize])
            return torch.from_numpy(cells).view(self._kv_dtype)
        except (MemoryError, RuntimeError) as error:
            self.discard()
            message = f"no memory for a KV cache of {shape[0]} blocks"
            raise OutOfMemory(message, device="cpu") from error


def default_threads() -> int:
    """Return how many threads compute: torch's number, or as many as this process may run."""
    quota = limits.core_quota()  # a container's share, if it has one
    share = None if quota is None else max(1, int(quota))
    allowed = (torch.get_num_threads(), limits.usable_cores(), share)
    return min(one for one in allowed if one is not None)


def as_torch_dtype(dtype: str) -> torch.dtype:
    """Return what weights are computed in here; `auto` is as `TorchModel.load` has it.

    Raises:
        ConfigError: there is no such dtype.
    """
    if dtype == "auto":
        return torch.bfloat16 if _has_bfloat16() else torch.float32
    if dtype not in _DTYPES:
        message = f"dtype must be auto, {' or '.join(_DTYPES)}, not {dtype!r}"
        raise ConfigError(message, param="dtype")
    return _DTYPES[dtype]


def _has_bfloat16() -> bool:
    # Private, and the only probe that torch has; absent ones mean "no".
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        ConfigError: it cannot be read, or is another value; `param` is the file's name.
    """
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}", param=file.name) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold an object", param=file.name)
    return value


def eos_token_ids(sources: list[dict[str, Any]], vocab_size: int) -> tuple[int, ...]:
    """Return the end ids of the first source that has some, as `transformers` does.

    Raises:
        ConfigError: they are no ids.
    """
    found = (source.get("eos_token_id") for source in sources)
    value: Any = next((ids for ids in found if ids is not None), [])
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            message = f"eos_token_id must be ids, not {value!r}"
            raise ConfigError(message, param="eos_token_id")
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)
