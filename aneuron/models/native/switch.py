"""Eager first, native as soon as it can be: where a model's weights are, and its steps change over.

Comes in: a model directory. Goes out: a decoder that runs eagerly, and `NativeSteps` once the
library is compiled and the weights are packed, which a thread of its own sees to if it takes long.
The caches are put into the library's layout between two steps, on the thread that runs them;
requests notice nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from aneuron.models.decoder import SCALE_BYTES
from aneuron.models.native.build import built_library, compile_library
from aneuron.models.native.library import load_library
from aneuron.models.native.program import LANES, NativeDecoder, NativeSteps, fits, packed_weights
from aneuron.models.native.store import load_packed, packed_file, save_packed
from aneuron.models.weights import load_decoder

if TYPE_CHECKING:
    from aneuron.models.architecture import ModelConfig
    from aneuron.models.decoder import Decoder
    from aneuron.models.native.library import Library

__all__ = ["WeightSource", "relayout"]

_logger = logging.getLogger("aneuron.native")


class WeightSource:
    """A model's weights, packed for the library once that is there; shared by its engines.

    Attributes:
        ready: library and packed weights, or None as long as steps run eagerly.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        quantization: str | None = None,
        block_size: int = LANES,
        is_eager: bool = False,
    ) -> None:
        """Note where they are; nothing is read yet.

        Args:
            folder: in Hugging Face layout.
            config: of the model.
            dtype: of the weights, the embedding and the cache.
            quantization: of the packed matrices, int8 or int4.
            block_size: of the engine's cache.
            is_eager: never compile nor pack anything.
        """
        self.ready: tuple[Library, NativeDecoder] | None = None
        self._folder, self._config, self._dtype = folder, config, dtype
        self._kind = quantization or _name(dtype)
        self._is_eager = is_eager or not fits(config, block_size)
        self._decoder: Decoder | None = None

    @classmethod
    def of(cls, decoder: Decoder) -> Self:
        """Return one that runs this decoder eagerly, for ever."""
        source = cls(Path(), decoder.config, decoder.embed.weight.dtype, is_eager=True)
        source._decoder = decoder
        return source

    @property
    def decoder(self) -> Decoder:
        """The module that runs eagerly.

        Raises:
            ConfigError: its files are missing or corrupt.
        """
        if self._decoder is None:
            self._decoder = load_decoder(self._folder, self._config, self._dtype)
        return self._decoder

    def prepare(self) -> None:
        """Load the weights: packed ones if the library is compiled; else it is, meanwhile.

        Raises:
            ConfigError: their files are missing or corrupt.
        """
        if self._is_eager and self._kind != _name(self._dtype):
            _logger.warning("this model runs eagerly, and so without quantization")
        path = None if self._is_eager else built_library()
        if path is not None and self._pack(path):
            return
        _ = self.decoder
        if not self._is_eager:
            threading.Thread(target=self._compile, name="aneuron-compile", daemon=True).start()

    def _compile(self) -> None:
        path = compile_library()
        if path is None:
            if self._kind != _name(self._dtype):
                _logger.warning("without the library there is no quantization")
            return
        try:
            self._pack(path)
        except Exception:  # a thread's own: nobody waits for it
            _logger.exception("packing the weights failed, models run eagerly")

    def _pack(self, path: Path) -> bool:
        """Load or make the packed weights; return whether that worked."""
        try:
            library = load_library(path)
        except OSError as error:
            _logger.warning("the compiled library does not load, and is removed: %s", error)
            with contextlib.suppress(OSError):  # it may be another user's
                path.unlink()
            return False
        file = packed_file(self._folder, self._kind, _name(self._dtype))
        tensors = load_packed(file)
        if tensors is None:
            tensors = packed_weights(self.decoder, self._kind)
            save_packed(file, tensors, self._kind)
        self.ready = library, NativeDecoder(self._config, self._kind, tensors)
        if self._decoder is not None:
            _logger.info("from the next step on, it runs what was compiled")
        self._decoder = None  # it has done its part, if it was there
        return True

    def steps(
        self, caches: list[tuple[torch.Tensor, torch.Tensor]], *, num_used: int, num_threads: int
    ) -> NativeSteps | None:
        """Return the steps of an engine, its caches put into the library's layout; or None.

        Args:
            caches: keys and values of each layer, [num_blocks + 1, block_size, num_kv_heads,
                width], as the eager decoder has them.
            num_used: leading blocks that may hold something.
            num_threads: that compute.
        """
        if self.ready is None:
            return None
        library, decoder = self.ready
        block_size = caches[0][0].shape[1]
        for keys, values in caches:
            relayout(keys[:num_used], is_keys=True)
            relayout(values[:num_used], is_keys=False)
        return NativeSteps(decoder, library, caches, block_size, num_threads)


def relayout(cache: torch.Tensor, *, is_keys: bool) -> None:
    """Put blocks [n, block_size, num_kv_heads, width] into the library's layout, in place."""
    num_blocks, size, heads, width = cache.shape
    if cache.dtype == torch.uint8:
        cells, scales = cache[..., :-SCALE_BYTES], cache[..., -SCALE_BYTES:]
        moved = torch.cat((_by_fours(cells, is_keys), scales.permute(0, 2, 1, 3).flatten(2)), 2)
    elif cache.dtype == torch.float32:
        moved = cache.permute(0, 2, 3, 1) if is_keys else cache.permute(0, 2, 1, 3)
    elif is_keys:
        moved = cache.view(num_blocks, size, heads, width // 2, 2).permute(0, 2, 3, 1, 4)
    else:
        moved = cache.view(num_blocks, size // 2, 2, heads, width).permute(0, 3, 1, 4, 2)
    cache.copy_(moved.contiguous().view(cache.shape))


def _by_fours(cells: torch.Tensor, is_keys: bool) -> torch.Tensor:  # noqa: FBT001
    """Return [n, block_size, heads, D] as [n, heads, D / 4, block_size, 4], or values' order."""
    num_blocks, size, heads, width = cells.shape
    if is_keys:
        cells = cells.reshape(num_blocks, size, heads, width // 4, 4).permute(0, 2, 3, 1, 4)
    else:
        cells = cells.reshape(num_blocks, size // 4, 4, heads, width).permute(0, 3, 1, 4, 2)
    return cells.flatten(2)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
