"""What a torch device launches: a step of a model, from ids to sampled ids.

Comes in: each launch's `ModelInput`. Goes out: the sampled ids of the step, on the device.
Executables run on the device's launch thread, one at a time, since they share the KV cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aneuron.device import SplitExecutable
from aneuron.models.sampling.edits import edit_logits
from aneuron.models.sampling.host import check_finite, sample_on_host
from aneuron.models.sampling.logprobs import prompt_logprobs, raw_logprobs, sampled_logprobs
from aneuron.plans import Logits, ModelInput, Sampled

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from aneuron.models.torch_model import TorchModel

__all__ = ["TorchExecutable", "bucket_name"]


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
        if (steps := model.steps_for(inputs)) is not None:
            ids = self._input_ids(inputs, fed).numpy()
            native = torch.from_numpy(steps.run(inputs, ids))
            told = prompt_logprobs(lambda one: torch.from_numpy(steps.logits_of(one)), inputs)
            return Logits(native, told)
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


def bucket_name(inputs: ModelInput) -> str:
    """Return what people call the bucket of a launch, such as `decode[r8,b16]`."""
    num_rows, num_blocks = inputs.block_table.shape
    sizes, num_samples = f"r{num_rows},b{num_blocks}", len(inputs.logits_indices)
    if num_samples != num_rows:
        sizes += f",n{num_samples}"
    if not inputs.is_decode:
        sizes = f"t{len(inputs.positions)},s{inputs.max_query_len},{sizes}"
    return f"{'decode' if inputs.is_decode else 'prefill'}[{sizes}]"
