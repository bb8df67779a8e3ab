"""A loaded model and its executables: what a torch device launches.

Comes in: a model directory, later each launch's `ModelInput`. Goes out: the sampled ids of
a step, on the device. Loading blocks and runs in a thread; executables run on the device's
launch thread, one at a time, since they share the KV cache.
"""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from aneuron.device import SplitExecutable
from aneuron.errors import ConfigError, OutOfMemory
from aneuron.models.architecture import ModelConfig
from aneuron.models.sampling.edits import edit_logits
from aneuron.models.sampling.host import check_finite, sample_on_host
from aneuron.models.sampling.logprobs import prompt_logprobs, raw_logprobs, sampled_logprobs
from aneuron.models.sampling.slots import SlotState
from aneuron.models.weights import kv_bytes_per_token, load_decoder
from aneuron.plans import BlockCopies, Logits, ModelInput, ModelSpec, Sampled

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.models.decoder import Decoder

__all__ = ["TorchExecutable", "TorchModel"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchModel:
    """A decoder with its KV cache, and one executable per bucket.

    Attributes:
        spec: what the engine needs to know.
        config: the decoder's configuration.
        decoder: the module.
        k_caches, v_caches: per layer [num_blocks + 1, block_size, num_kv_heads, head_dim],
            empty before `allocate_kv`.
        slots: what the carry `resident` keeps per slot, likewise.
    """

    def __init__(self, spec: ModelSpec, decoder: Decoder) -> None:
        self.spec = spec
        self.config = decoder.config
        self.decoder = decoder
        self.k_caches: list[torch.Tensor] = []
        self.v_caches: list[torch.Tensor] = []
        self.slots = SlotState(0)
        self._executables: dict[tuple[Any, ...], TorchExecutable] = {}

    @classmethod
    def load(cls, path: Path, *, dtype: str = "auto", name: str | None = None) -> TorchModel:
        """Load a model directory: config.json, generation_config.json, safetensors.

        Args:
            path: the directory, in Hugging Face layout.
            dtype: `float32`, `bfloat16`, or `auto`: bfloat16 where the processor multiplies
                it natively (AVX512-BF16, AMX), else float32. Norms, the rope's angles and
                sampling are float32 always.
            name: the model's name in the spec; the directory's if None.

        Raises:
            ConfigError: a file is missing or corrupt, or the model is not supported.
        """
        torch_dtype = _torch_dtype(dtype)
        path = Path(path)
        raw = _read_json(path / "config.json")
        config = ModelConfig.from_dict(raw)
        generation = path / "generation_config.json"
        sources = [_read_json(generation), raw] if generation.exists() else [raw]
        spec = ModelSpec(
            name=name or path.name,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            eos_token_ids=_eos_token_ids(sources, config.vocab_size),
            kv_bytes_per_token=kv_bytes_per_token(config, torch_dtype),
            dtype=str(torch_dtype).removeprefix("torch."),
            has_slots=True,
            has_logits=True,
            has_masks=True,
            verifies_drafts=True,
            is_split=True,
        )
        return cls(spec, load_decoder(path, config, torch_dtype))

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
        shape = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self.k_caches = [self._zeros(shape) for _ in range(config.num_layers)]
        self.v_caches = [self._zeros(shape) for _ in range(config.num_layers)]
        self.slots = SlotState(num_slots)

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
            found = TorchExecutable(self, _name(inputs))
            self._executables[bucket] = found
        return found

    def split(self, inputs: ModelInput) -> SplitExecutable:
        """Return the parts of that executable."""
        return self.executable(inputs).parts

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copy blocks of the cache, in all layers."""
        sources, targets = _tensor(copies.sources), _tensor(copies.targets)
        for cache in (*self.k_caches, *self.v_caches):
            cache[targets] = cache[sources]

    def discard(self) -> None:
        """Drop the KV cache and the executables."""
        self.k_caches, self.v_caches = [], []
        self._executables = {}

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        weight = self.decoder.embed.weight
        try:
            # numpy's zeros are pages not yet committed; torch's would be written here,
            # which took 15 s for a quarter of this machine's memory.
            cells = np.zeros(shape, np.float32 if weight.dtype == torch.float32 else np.uint16)
            return torch.from_numpy(cells).view(weight.dtype)
        except (MemoryError, RuntimeError) as error:
            self.discard()
            message = f"no memory for a KV cache of {shape[0]} blocks"
            raise OutOfMemory(message, device=str(weight.device)) from error


class _Part:
    """One part of a split executable."""

    sampled_dtype = "int32"

    def __init__(self, name: str, run: Callable[[ModelInput, Any], Any]) -> None:
        self.name = name
        self._run = run

    def __call__(self, inputs: ModelInput, fed: Any = None) -> Any:
        with torch.inference_mode():
            return self._run(inputs, fed)


class TorchExecutable:
    """One bucket's program: decoder and sampling, eagerly; and its parts.

    Attributes:
        name: kind and sizes, such as `decode[r8,b16]`.
        sampled_dtype: of the result.
        parts: the same in parts.
    """

    sampled_dtype = "int32"

    def __init__(self, model: TorchModel, name: str) -> None:
        self.name = name
        self._model = model
        self.parts = SplitExecutable(
            _Part(f"{name}.forward", self._forward),
            _Part(f"{name}.sampling", self._sampling),
            _Part(f"{name}.hooked", self._hooked),
        )

    def __call__(
        self, inputs: ModelInput, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor | Sampled:
        """Run one step and return the sampled ids, int32 [inputs.num_sampled].

        With logprobs if a sample wants them.

        The columns of `inputs` are read in place, so they must not change meanwhile. With
        `inputs.slots`, last tokens are read from and written to the model's slots.

        Args:
            inputs: of this executable's bucket.
            input_ids: int32 [T], a device value that takes the place of `inputs.input_ids`.

        Raises:
            FloatingPointError: a row's logits hold NaN.
        """
        with torch.inference_mode():
            return self._sampling(inputs, self._forward(inputs, input_ids))

    def _forward(self, inputs: ModelInput, fed: torch.Tensor | None) -> Logits:
        """Run the decoder; all that must be right before the next forward pass is, but tokens."""
        if inputs.writes is not None:
            self._model.slots.write(inputs.writes)
        logits = self._decode(inputs, fed)
        if inputs.copies is not None:
            self._model.copy_blocks(inputs.copies)
        return logits

    def _sampling(self, inputs: ModelInput, given: Logits) -> torch.Tensor | Sampled:
        slots, (logits, prompt) = self._model.slots, given
        raw, values = raw_logprobs(logits, inputs), logits.numpy()
        if inputs.rule_samples is not None or inputs.edits is not None:
            check_finite(values[: inputs.num_samples].max(axis=1))  # bans would hide it
            edit_logits(values, inputs, slots)
        if inputs.slots is not None and not inputs.all_greedy:
            inputs = slots.filled(inputs)
        sampled = _tensor(sample_on_host(values[: inputs.num_sampled], inputs))
        told = None if raw is None else sampled_logprobs(raw, sampled, inputs)
        slots.take(sampled.numpy(), inputs)
        return sampled if told is None and prompt is None else Sampled(sampled, told, prompt)

    def _hooked(self, inputs: ModelInput, given: Logits) -> torch.Tensor:
        """Return a copy of the logits that hooks want to see."""
        assert inputs.edits is not None
        wanted: torch.Tensor = given.values[_tensor(inputs.edits.hooked)]
        check_finite(wanted.numpy().max(axis=1))
        return wanted

    def _input_ids(self, inputs: ModelInput, fed: torch.Tensor | None) -> torch.Tensor:
        if fed is not None:
            return fed
        if inputs.input_ids is None:
            return _tensor(self._model.slots.last_tokens[inputs.slots])
        return _tensor(inputs.input_ids)

    def _decode(self, inputs: ModelInput, fed: torch.Tensor | None) -> Logits:
        """Return the logits of the samples, and what is wanted of prompts."""
        model = self._model
        before = (
            self._input_ids(inputs, fed),
            _tensor(inputs.positions),
            _tensor(inputs.slot_mapping),
            _tensor(inputs.query_start),
            _tensor(inputs.block_table),
            _tensor(inputs.context_lens),
        )
        caches, longest = (model.k_caches, model.v_caches), inputs.max_query_len
        indices = _tensor(inputs.logits_indices)
        if inputs.prompt_targets is None:
            return Logits(model.decoder(*before, indices, *caches, max_query_len=longest), None)
        decoder = model.decoder
        hidden = decoder.hidden(*before, *caches, max_query_len=longest)

        def logits_of(tokens: np.ndarray) -> torch.Tensor:
            return decoder.logits(hidden.index_select(0, _tensor(tokens)))

        logits = decoder.logits(hidden.index_select(0, indices))
        return Logits(logits, prompt_logprobs(logits_of, inputs))

    def __repr__(self) -> str:
        return f"<TorchExecutable {self.name}>"


def _tensor(column: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(column)


def _name(inputs: ModelInput) -> str:
    num_rows, num_blocks = inputs.block_table.shape
    sizes, num_samples = f"r{num_rows},b{num_blocks}", len(inputs.logits_indices)
    if num_samples != num_rows:
        sizes += f",n{num_samples}"
    if not inputs.is_decode:
        sizes = f"t{len(inputs.positions)},s{inputs.max_query_len},{sizes}"
    return f"{'decode' if inputs.is_decode else 'prefill'}[{sizes}]"


def _torch_dtype(dtype: str) -> torch.dtype:
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


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}", param=file.name) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold an object", param=file.name)
    return value


def _eos_token_ids(sources: list[dict[str, Any]], vocab_size: int) -> tuple[int, ...]:
    """Return the end ids of the first source that has some, as `transformers` does."""
    found = (source.get("eos_token_id") for source in sources)
    value: Any = next((ids for ids in found if ids is not None), [])
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            message = f"eos_token_id must be ids, not {value!r}"
            raise ConfigError(message, param="eos_token_id")
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)
