"""The C++ library from Python: its structures, and calls that let the GIL go.

Comes in: addresses and sizes. Goes out: nothing; the library writes where it is told. The
structures mirror those of matrix.h, cache.h and step.cpp, field by field.
"""

from __future__ import annotations

import ctypes as c
from functools import cache
from typing import TYPE_CHECKING, Any

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Decoder", "Heads", "Layer", "Library", "Matrix", "Pool", "Step", "load_library"]

_int, _float, _pointer = c.c_int32, c.c_float, c.c_void_p


def _fields(**kinds: Any) -> list[tuple[str, Any]]:
    """Return fields by kind, in the order given: `name=kind`."""
    return list(kinds.items())


class Matrix(c.Structure):
    """Packed weights; see matrix.h."""

    _fields_ = _fields(
        kind=_int, columns=_int, depth=_int, group=_int, data=_pointer, scales=_pointer,
        zeros=_pointer, bias=_pointer,
    )  # fmt: skip


class Heads(c.Structure):
    """Attention's shape; see cache.h."""

    _fields_ = _fields(queries=_int, keys=_int, size=_int, block_size=_int)


class Layer(c.Structure):
    """One layer; see step.cpp."""

    _fields_ = _fields(
        qkv=Matrix, out=Matrix, gate_up=Matrix, down=Matrix, input_norm=_pointer,
        post_norm=_pointer, qk_norm=_pointer, k_cache=_pointer, v_cache=_pointer, window=_int,
        use_rope=_int,
    )  # fmt: skip


class Decoder(c.Structure):
    """A model; see step.cpp."""

    _fields_ = _fields(
        num_layers=_int, hidden_size=_int, intermediate_size=_int, vocab_size=_int, heads=Heads,
        is_bf16=_int, cache=_int, eps=_float, rope_factor=_float, layers=c.POINTER(Layer),
        inv_freq=_pointer, final_norm=_pointer, embedding=_pointer, head=Matrix,
    )  # fmt: skip


class Step(c.Structure):
    """One launch; see step.cpp."""

    _fields_ = _fields(
        num_tokens=_int, num_rows=_int, num_samples=_int, table_width=_int, input_ids=_pointer,
        positions=_pointer, slot_mapping=_pointer, query_start=_pointer, block_table=_pointer,
        logits_indices=_pointer, hidden=_pointer, logits=_pointer, scratch=_pointer,
    )  # fmt: skip


class Library:
    """The functions of a compiled library."""

    def __init__(self, path: Path) -> None:
        """Load it.

        Raises:
            OSError: it cannot be loaded.
        """
        self._library = c.CDLL(str(path))
        self._new_pool = self._function("aneuron_pool", [c.c_int], _pointer)
        self._end_pool = self._function("aneuron_end_pool", [_pointer], None)
        self._scratch = self._function("aneuron_scratch", [_pointer, c.c_int, c.c_int], c.c_int64)
        self._step = self._function("aneuron_step", [_pointer, _pointer, _pointer], None)
        self.has_avx512 = bool(self._function("aneuron_has_avx512", [], c.c_int)())

    def _function(self, name: str, arguments: list[Any], result: Any) -> Any:
        function = getattr(self._library, name)
        function.argtypes, function.restype = arguments, result
        return function

    def new_pool(self, num_threads: int) -> Pool:
        """Start threads that steps run on; the caller's own is one of them.

        Raises:
            ConfigError: the system gives no more threads.
        """
        handle = self._new_pool(num_threads)
        if not handle:
            raise ConfigError(f"no {num_threads} threads can be started", param="num_threads")
        return Pool(handle, self._end_pool, num_threads)

    def scratch_bytes(self, model: Decoder, num_tokens: int, num_rows: int) -> int:
        """Return the bytes of scratch memory that a step of this size needs."""
        return int(self._scratch(c.byref(model), num_tokens, num_rows))

    def run(self, model: Decoder, step: Step, pool: Pool) -> None:
        """Run a step; without the GIL, on the pool's threads and this one."""
        self._step(c.byref(model), c.byref(step), pool.handle)


class Pool:
    """Threads of the library; they end with this object."""

    def __init__(self, handle: Any, end: Any, num_threads: int) -> None:
        self.handle = handle
        self.num_threads = num_threads
        self._end = end

    def __del__(self) -> None:
        if self.handle:
            self._end(self.handle)
            self.handle = None


@cache
def load_library(path: Path) -> Library:
    """Return the library at a path, loaded once."""
    return Library(path)
