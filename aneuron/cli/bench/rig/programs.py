"""Programs that compute nothing: what they return was made before the first launch.

Comes in: launches. Goes out: ids of words, another output at each step. So a benchmark
measures the engine: on `cpu` the program costs nothing, on `sim` exactly its latency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aneuron.cli.bench.rig.words import word_ids
from aneuron.models.simulated import SimModel
from aneuron.plans import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.plans import ModelInput

__all__ = ["FreeModel", "WordModel"]

_NUM_OUTPUTS = 16
_VOCAB_SIZE = 4096  # more than the words' ids


class _Program:
    """Every bucket's executable: returns one output after the other."""

    name = "words"
    sampled_dtype = "int32"

    def __init__(self, outputs: list[Any], seen: Callable[[ModelInput], None] | None) -> None:
        self._outputs = outputs
        self._cut: dict[int, list[Any]] = {}  # by number of rows: cutting costs time, too
        self._seen = seen
        self._turn = 0

    def __call__(self, inputs: ModelInput, input_ids: Any) -> Any:
        if self._seen is not None:
            self._seen(inputs)
        self._turn = (self._turn + 1) % len(self._outputs)
        num = inputs.num_sampled
        cut = self._cut.get(num)
        if cut is None:
            cut = self._cut[num] = [output[:num] for output in self._outputs]
        return cut[self._turn]


def _outputs(num_rows: int) -> list[np.ndarray]:
    """Return int32 [num_rows] arrays of words; no row says the same word twice in turn."""
    words, rows = np.array(word_ids(), np.int32), np.arange(num_rows)
    return [words[(rows + turn) % len(words)] for turn in range(_NUM_OUTPUTS)]


class FreeModel:
    """For `cpu`: torch tensors, and a look at each launch's inputs on the device's thread.

    Args:
        num_rows: the most rows of a launch.
        max_model_len: longest context in tokens.
        seen: called with the inputs of each launch.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, seen: Callable[[ModelInput], None]
    ) -> None:
        """Make the outputs."""
        import torch

        self._program = _Program([torch.from_numpy(one) for one in _outputs(num_rows)], seen)
        self.spec = ModelSpec(
            name="free",
            vocab_size=_VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=(),
            kv_bytes_per_token=4,
            dtype="int32",
            has_slots=True,
        )

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        """Return itself: it has no cache and no slots."""
        return self

    def executable(self, inputs: ModelInput) -> _Program:
        """Return the one program."""
        return self._program


class WordModel(SimModel):
    """For `sim`: the same in numpy, without cache and slots to keep.

    Args:
        num_rows: the most rows of a launch.
        max_model_len: longest context in tokens.
    """

    name = "words"

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        """Make the outputs."""
        super().__init__(vocab_size=_VOCAB_SIZE, max_model_len=max_model_len)
        self._program = _Program(_outputs(num_rows), None)

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        """Return itself: it has no cache and no slots."""
        return self

    def executable(self, inputs: ModelInput) -> Any:
        """Return the one program."""
        return self._program
