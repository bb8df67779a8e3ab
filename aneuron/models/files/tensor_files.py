"""The two tensor file formats: GGUF is read, safetensors is written and checked.

Stage: before the engine opens. Comes in: a path. Goes out: metadata and tensors, or a clear
refusal of a file that is damaged or cut off. Run by the worker thread that resolves a model.
Every length in a GGUF file is checked against the file's size before it is believed.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import QuantError, dequantize

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["GGUFFile", "StoredTensor", "TensorInfo", "read_gguf", "write_safetensors"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_PLAIN: dict[GGMLQuantizationType, tuple[str, type[np.generic]]] = {
    GGMLQuantizationType.F32: ("F32", np.float32),
    GGMLQuantizationType.F16: ("F16", np.float16),
    # numpy has no bfloat16: its bits are carried as they are.
    GGMLQuantizationType.BF16: ("BF16", np.uint16),
}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor of a GGUF file lies; `shape` is in row-major order, as torch has it."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file whose directory was read: metadata, and tensors that are read on demand."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype that holds the tensor's values exactly."""
        return _PLAIN.get(self.tensors[name].kind, ("F32", np.float32))[0]

    def load(self, name: str) -> NDArray[Any]:
        """Return the tensor's values: as stored, or dequantised to float32.

        Raises:
            ConfigError: a quantisation that the `gguf` package cannot undo.
        """
        info = self.tensors[name]
        raw = np.memmap(self.path, np.uint8, "r", info.offset, (info.num_bytes,))
        if info.kind in _PLAIN:
            return raw.view(_PLAIN[info.kind][1]).reshape(info.shape)
        try:
            rows = raw.reshape(*info.shape[:-1], -1)
            values: NDArray[Any] = dequantize(rows, info.kind)
        except (QuantError, NotImplementedError) as error:
            message = f"{self.path}: cannot dequantise {name} ({info.kind.name}): {error}"
            raise ConfigError(message, param="model") from error
        return values.reshape(info.shape)


def read_gguf(path: Path) -> GGUFFile:
    """Read the directory of a GGUF file.

    Raises:
        ConfigError: not a GGUF file, damaged, cut off, or of a version that is not known.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Directory(view).read(path)
        except (ValueError, OverflowError) as error:
            message = f"{path} is not a sound GGUF file (damaged or cut off?): {error}"
            raise ConfigError(message, param="model") from error


class _Directory:
    """A cursor over the head of a GGUF file; raises ValueError where something is off."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._at = 0

    def read(self, path: Path) -> GGUFFile:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not start with the letters GGUF")
        version, num_tensors, num_pairs = self._unpack("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 (little-endian) are known")
        metadata = dict(self._pair() for _ in range(num_pairs))
        heads = [self._tensor_head() for _ in range(num_tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align <= 0 or align & (align - 1):
            raise ValueError(f"general.alignment is {align!r}")
        start = -(-self._at // align) * align
        tensors = [self._placed(start, *head) for head in heads]
        return GGUFFile(path, metadata, {tensor.name: tensor for tensor in tensors})

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._view):
            raise ValueError(f"it ends at byte {len(self._view)}, inside its own directory")
        taken = self._view[self._at : end]
        self._at = end
        return taken

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        return self._take(length).decode()

    def _pair(self) -> tuple[str, Any]:
        name = self._string()
        (kind,) = self._unpack("<I")
        return name, self._value(kind)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._unpack("<IQ")
            return self._array(item_kind, length)
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self._unpack("<" + _SCALARS[kind])[0]

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind in _SCALARS:
            # The bytes are taken first, so that a wild length cannot ask for memory.
            layout = _SCALARS[kind]
            taken = self._take(length * struct.calcsize("<" + layout))
            return list(struct.unpack(f"<{length}{layout}", taken))
        if kind == _ARRAY:
            raise ValueError("it holds an array of arrays")
        return [self._value(kind) for _ in range(length)]

    def _tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        dims = self._unpack(f"<{num_dims}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(dims)), kind, offset

    def _placed(
        self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> TensorInfo:
        quantisation = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        if 0 in shape:
            raise ValueError(f"tensor {name} is empty")
        if shape[-1] % block:
            raise ValueError(f"tensor {name}: rows of {shape[-1]} in blocks of {block}")
        num_bytes = math.prod(shape) // block * block_bytes
        if start + offset + num_bytes > len(self._view):
            raise ValueError(
                f"tensor {name} ends at byte {start + offset + num_bytes}, "
                f"the file at {len(self._view)}"
            )
        return TensorInfo(name, shape, quantisation, start + offset, num_bytes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to write: its values are asked for when their turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_safetensors(
    path: Path, tensors: Sequence[StoredTensor], wrote: Callable[[int], None]
) -> None:
    """Write the tensors into one file, one at a time, so that memory holds only one.

    Args:
        path: the file.
        tensors: what to write; "BF16" takes float32 values or the bits as uint16.
        wrote: told the bytes written so far after each tensor.
    """
    # Wider types first keep every tensor aligned to its own item size.
    ordered = sorted(tensors, key=lambda tensor: -_ITEM_BYTES[tensor.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            done += file.write(_bits(tensor).data)
            wrote(done)


def _bits(tensor: StoredTensor) -> NDArray[Any]:
    values = np.ascontiguousarray(tensor.load())
    if tensor.dtype == "BF16" and values.dtype == np.float32:
        values = _to_bfloat16(values)
    if values.nbytes != tensor.num_bytes:
        raise AssertionError(f"{tensor.name}: {values.nbytes} bytes, not {tensor.num_bytes}")
    return values.reshape(-1).view(np.uint8)


def _to_bfloat16(values: NDArray[Any]) -> NDArray[Any]:
    # Round to nearest, ties to even, on the bits; finite weights cannot wrap around.
    bits = values.view(np.uint32)
    rounded: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded
