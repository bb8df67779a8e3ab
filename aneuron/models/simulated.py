"""Models for the simulated device, in which every lost, doubled or swapped token shows.

COUNT, SUM, CONST and SCRIPT keep a real paged KV cache of token ids: written through the
slot mapping, read back through the block table. They are named `sim:count`, `sim:sum`, …
wherever a model name goes; `aneuron.testing` re-exports them for users' own suites.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aneuron.errors import ConfigError
from aneuron.models.sampling.slots import SlotState
from aneuron.plans import ModelSpec, Sampled

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

    def __call__(self, inputs: ModelInput, input_ids: Any) -> Any:
        return self._run(inputs, input_ids)


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
            has_logits=self.has_logits and on_device_sampling and sampled_dtype == "int32",
        )
        self._kv = np.zeros(0, np.int32)
        self._block_size = 0
        self._slots = SlotState(0)
        self._executables: dict[tuple[bool, int], _Executable] = {}

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        """Return it over its own cache of ids; what is unwritten there spoils every sum."""
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
        if inputs.slots is not None:
            inputs = self._slots.filled(inputs)
        # A prefill's output has one entry per request and no padding.
        chosen = self.next_ids(ids, inputs)[: inputs.num_sampled]
        if self.spec.on_device_sampling:
            ids_out: np.ndarray = chosen.astype(self.spec.sampled_dtype)
            if inputs.slots is not None:
                self._slots.last_tokens[inputs.slots[: len(ids_out)]] = ids_out
                self._slots.note_tokens(ids_out, inputs)
            return ids_out
        logits = np.zeros((len(chosen), self.spec.vocab_size), np.float32)
        logits[np.arange(len(chosen)), chosen] = 1.0
        return logits

    def _context(self, inputs: ModelInput) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's ids read through its row's table, and which of them count."""
        size, rows = self._block_size, inputs.sampled_rows
        table = inputs.block_table[rows]
        cells = table[:, :, None] * size + np.arange(size, dtype=np.int32)
        cells = cells.reshape(len(table), -1)
        counts = np.arange(cells.shape[1]) < inputs.context_lens[rows, None]
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
    _raw: np.ndarray | None = None  # logits of the step that runs, before rules

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return the logits of each sample, a new float32 [samples, vocabulary].

        Args:
            ids: int32 [T], the ids of this step.
            inputs: the launch.
        """
        raise NotImplementedError

    def _run(self, inputs: ModelInput, input_ids: Any) -> Any:
        tokens = super()._run(inputs, input_ids)
        if inputs.logprob_samples is None and inputs.prompt_targets is None:
            return tokens
        return self._with_logprobs(tokens, inputs)

    def _with_logprobs(self, tokens: np.ndarray, inputs: ModelInput) -> Sampled:
        from torch import from_numpy  # only where needed

        from aneuron.models.sampling import logprobs

        def logits_of(indices: np.ndarray) -> Any:
            part = copy(inputs)
            part.logits_indices = indices
            return from_numpy(self.logits(inputs.input_ids, part))

        told = None
        if self._raw is not None:
            raw = logprobs.raw_logprobs(from_numpy(self._raw), inputs)
            assert raw is not None
            told = logprobs.sampled_logprobs(raw, from_numpy(tokens), inputs)
            self._raw = None
        return Sampled(tokens, told, logprobs.prompt_logprobs(logits_of, inputs))

    def next_ids(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Return the argmax, or a sample for rows with a temperature."""
        logits = self.logits(ids, inputs)
        self._raw = logits.copy() if inputs.logprob_samples is not None else None
        self._slots.apply_rules(logits, inputs)
        if inputs.all_greedy:
            best: np.ndarray = logits.argmax(axis=1)
            return best
        from aneuron.models.sampling.sampler import sample_on_host  # torch, only where needed

        return sample_on_host(logits, inputs)


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
        told = inputs.context_lens[inputs.sampled_rows] - inputs.prompt_lens
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
        raise ConfigError(
            f"unknown simulated model {name!r}; known are "
            + ", ".join(f"sim:{known}" for known in models),
            param="model",
        )
    return models[kind]()
