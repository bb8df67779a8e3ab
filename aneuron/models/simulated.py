"""Models for the simulated device, in which every lost, doubled or swapped token shows.

COUNT, SUM, CONST and SCRIPT keep a real paged KV cache of token ids: written through the
slot mapping, read back through the block table. They are named `sim:count`, `sim:sum`, …
wherever a model name goes; `aneuron.testing` re-exports them for users' own suites.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aneuron.device import SplitExecutable
from aneuron.errors import ConfigError
from aneuron.models.sampling.edits import edit_logits
from aneuron.models.sampling.host import sample_on_host
from aneuron.models.sampling.slots import SlotState
from aneuron.plans import Logits, ModelSpec, Sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.plans import ModelInput

__all__ = ["Const", "Count", "LogitsModel", "Script", "SimModel", "Sum", "simulated_model"]

_EOS = 257  # of the byte tokenizer
_BYTE_VOCAB = 258
_UNWRITTEN = 7_777_777  # id in cells and slots that nobody has written


class _Executable:
    """One bucket of a simulated model."""

    __slots__ = ("_run", "name", "sampled_dtype")

    def __init__(self, name: str, run: Callable[[ModelInput, Any], Any], dtype: str) -> None:
        self.name = name
        self.sampled_dtype = dtype
        self._run = run

    def __call__(self, inputs: ModelInput, fed: Any) -> Any:
        return self._run(inputs, fed)


class SimModel:
    """Base: the KV cache and the buckets; a subclass gives the next ids.

    Args:
        vocab_size: ids are below this.
        max_model_len: longest context in tokens.
        eos_token_ids: ids that end an answer.
        sampled_dtype: dtype of the sampled ids ("int64" shows a dtype mismatch).
        on_device_sampling: False makes the executables return logits.
    """

    name = "sim"
    has_logits = False  # and so nothing that rules could change

    def __init__(
        self,
        *,
        vocab_size: int = 1 << 20,
        max_model_len: int = 32768,
        eos_token_ids: Sequence[int] = (),
        sampled_dtype: str = "int32",
        on_device_sampling: bool = True,
    ) -> None:
        """Describe the model; `with_kv` gives it its cache."""
        self.spec = ModelSpec(
            name=f"sim:{self.name}",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=tuple(eos_token_ids),
            kv_bytes_per_token=4,
            dtype="int32",
            sampled_dtype=sampled_dtype if on_device_sampling else "float32",
            on_device_sampling=on_device_sampling,
            has_slots=on_device_sampling and sampled_dtype == "int32",
            verifies_drafts=on_device_sampling and sampled_dtype == "int32",
            has_logits=self.has_logits and on_device_sampling and sampled_dtype == "int32",
        )
        self._kv = np.zeros(0, np.int32)
        self._block_size = 0
        self._slots = SlotState(0)
        self._executables: dict[tuple[bool, int], _Executable] = {}

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        """Return it over its own cache of ids; unwritten ones spoil sums. See `Model.with_kv`."""
        model = copy(self)
        model._block_size = block_size  # noqa: SLF001  its own copy
        model._kv = np.full((num_blocks + 1) * block_size, _UNWRITTEN, np.int32)  # noqa: SLF001
        model._slots = SlotState(num_slots, unset=_UNWRITTEN)  # noqa: SLF001
        model._executables = {}  # noqa: SLF001
        return model

    def executable(self, inputs: ModelInput) -> _Executable:
        """Return the executable of this bucket, the same one each time."""
        bucket = inputs.is_decode, inputs.num_rows
        found = self._executables.get(bucket)
        if found is None:
            name = f"{'decode' if inputs.is_decode else 'prefill'}[r{inputs.num_rows}]"
            found = _Executable(name, self._run, self.spec.sampled_dtype)
            self._executables[bucket] = found
        return found

    def next_ids(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return the next id of each sample; int [samples], those with padding.

        Args:
            ids: int32 [T], the ids of this step.
            inputs: the launch.
        """
        raise NotImplementedError

    def _run(self, inputs: ModelInput, input_ids: Any) -> Any:
        ids = self._take_in(inputs, input_ids)
        inputs = self._filled(inputs)
        # A prefill's output has one entry per request and no padding.
        chosen = self.next_ids(ids, inputs)[: inputs.num_sampled]
        if self.spec.on_device_sampling:
            return self._give_out(chosen, inputs)
        logits = np.zeros((len(chosen), self.spec.vocab_size), np.float32)
        logits[np.arange(len(chosen)), chosen] = 1.0
        return logits

    def _take_in(self, inputs: ModelInput, input_ids: Any) -> np.ndarray:
        """Make the launch's writes and put its ids into the cache; return them, int32 [T]."""
        ids = inputs.input_ids if input_ids is None else input_ids
        if inputs.writes is not None:
            self._slots.write(inputs.writes)
        if ids is None:
            ids = self._slots.last_tokens[inputs.slots]
        written = inputs.slot_mapping >= 0
        self._kv[inputs.slot_mapping[written]] = ids[written]
        if inputs.copies is not None:
            cells = self._kv.reshape(-1, self._block_size)
            cells[inputs.copies.targets] = cells[inputs.copies.sources]
        return np.asarray(ids)

    def _filled(self, inputs: ModelInput) -> ModelInput:
        return inputs if inputs.slots is None else self._slots.filled(inputs)

    def _give_out(self, chosen: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return the ids of the samples, which slots and rules have taken note of."""
        ids: np.ndarray = chosen.astype(self.spec.sampled_dtype)
        self._slots.take(ids, inputs)
        return ids

    def _context(self, inputs: ModelInput) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's ids read through its row's table, and which of them count."""
        size, rows = self._block_size, inputs.sampled_rows
        table = inputs.block_table[rows]
        cells = table[:, :, None] * size + np.arange(size, dtype=np.int32)
        cells = cells.reshape(len(table), -1)
        counts = np.arange(cells.shape[1]) <= inputs.positions[inputs.logits_indices, None]
        return self._kv[cells], counts


class Count(SimModel):
    """The next id is the last id + 1."""

    name = "count"

    def next_ids(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return last + 1, modulo the vocabulary."""
        following: np.ndarray = (ids[inputs.logits_indices] + 1) % self.spec.vocab_size
        return following


class Sum(SimModel):
    """The next id is the position-weighted sum of all context ids, read from the cache."""

    name = "sum"

    def next_ids(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return sum((position + 1) * id) modulo the vocabulary."""
        context, counts = self._context(inputs)
        weights = np.where(counts, np.arange(1, context.shape[1] + 1), 0)
        total: np.ndarray = (context.astype(np.int64) * weights).sum(axis=1)
        return total % self.spec.vocab_size


class LogitsModel(SimModel):
    """Base of those that have logits, which rules change and ids are sampled from."""

    has_logits = True

    def __init__(self, *, has_masks: bool = True, is_split: bool = True, **options: Any) -> None:
        """Describe the model."""
        super().__init__(**options)
        can = self.spec.has_logits
        self.spec = replace(self.spec, has_masks=can and has_masks, is_split=can and is_split)
        self._splits: dict[tuple[bool, int], SplitExecutable] = {}

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        """Return it over its own cache of ids; see `SimModel.with_kv`."""
        model = super().with_kv(num_blocks, block_size, num_slots)
        model._splits = {}  # noqa: SLF001  its own copy
        return model

    def split(self, inputs: ModelInput) -> SplitExecutable:
        """Return the parts of this bucket's executable, the same ones each time."""
        bucket = inputs.is_decode, inputs.num_rows
        found = self._splits.get(bucket)
        if found is None:
            name, dtype = self.executable(inputs).name, self.spec.sampled_dtype
            found = self._splits[bucket] = SplitExecutable(
                _Executable(f"{name}.forward", self._forward, "float32"),
                _Executable(f"{name}.sampling", self._sampling, dtype),
                _Executable(f"{name}.hooked", self._hooked, "float32"),
            )
        return found

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return the logits of each sample, a new float32 [samples, vocabulary].

        Args:
            ids: int32 [T], the ids of this step.
            inputs: the launch.
        """
        raise NotImplementedError

    def _run(self, inputs: ModelInput, input_ids: Any) -> Any:
        logits = self._forward(inputs, input_ids)
        if not self.spec.on_device_sampling:
            return logits.values[: inputs.num_sampled]
        return self._sampling(inputs, logits)

    def _forward(self, inputs: ModelInput, input_ids: Any) -> Logits:
        ids = self._take_in(inputs, input_ids)
        inputs = self._filled(inputs)
        told = None
        if inputs.prompt_targets is not None:
            from torch import from_numpy  # only where needed

            from aneuron.models.sampling.logprobs import prompt_logprobs

            def logits_of(indices: np.ndarray) -> Any:
                return from_numpy(self.logits(ids, replace(inputs, logits_indices=indices)))

            told = prompt_logprobs(logits_of, inputs)
        return Logits(self.logits(ids, inputs), told)

    def _sampling(self, inputs: ModelInput, given: Logits) -> Any:
        inputs, logits = self._filled(inputs), given.values
        raw = None if inputs.logprob_samples is None else logits.copy()
        edit_logits(logits, inputs, self._slots)
        ids = self._give_out(sample_on_host(logits, inputs)[: inputs.num_sampled], inputs)
        if raw is None and given.prompt_logprobs is None:
            return ids
        from torch import from_numpy  # only where needed

        from aneuron.models.sampling.logprobs import raw_logprobs, sampled_logprobs

        told = None
        if raw is not None and (rows := raw_logprobs(from_numpy(raw), inputs)) is not None:
            told = sampled_logprobs(rows, from_numpy(ids), inputs)
        return Sampled(ids, told, given.prompt_logprobs)

    @staticmethod
    def _hooked(inputs: ModelInput, given: Logits) -> np.ndarray:
        """Return a copy of the logits that hooks want to see."""
        assert inputs.edits is not None
        wanted: np.ndarray = given.values[inputs.edits.hooked]
        return wanted


class Const(LogitsModel):
    """The same logits at every step.

    Args:
        logits: of the first ids; the others get -10.
    """

    name = "const"

    def __init__(self, logits: Sequence[float] = (1.0,), **options: Any) -> None:
        """Fix the logits."""
        super().__init__(**{"vocab_size": max(_BYTE_VOCAB, len(logits)), **options})
        self._fixed = np.full(self.spec.vocab_size, -10.0, np.float32)
        self._fixed[: len(logits)] = logits

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return them, once for each sample."""
        return np.tile(self._fixed, (len(inputs.logits_indices), 1))


class Script(SimModel):
    """The listed ids in order, then the end id.

    Args:
        script: ids, or bytes of the byte tokenizer.
    """

    name = "script"

    def __init__(self, script: Sequence[int] | bytes = b"Hello!", **options: Any) -> None:
        """Fix the script."""
        super().__init__(**{"vocab_size": _BYTE_VOCAB, "eos_token_ids": (_EOS,), **options})
        self.script = np.array([*script, _EOS])

    def next_ids(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return the entry at the sample's number of new tokens."""
        told = inputs.positions[inputs.logits_indices] + 1 - inputs.prompt_lens
        entries: np.ndarray = self.script[np.clip(told, 0, len(self.script) - 1)]
        return entries


def simulated_model(name: str) -> SimModel:
    """Return the model of a name like `sim:count`.

    Raises:
        ConfigError: no such model.
    """
    models: dict[str, type[SimModel]] = {
        "count": Count,
        "sum": Sum,
        "const": Const,
        "script": Script,
    }
    kind = name.removeprefix("sim:")
    if kind not in models:
        import difflib

        close = difflib.get_close_matches(kind.lower(), models, n=1)
        hint = f" did you mean sim:{close[0]}?" if close else ""
        raise ConfigError(
            f"unknown simulated model {name!r};{hint} known are "
            + ", ".join(f"sim:{known}" for known in models),
            param="model",
        )
    return models[kind]()
