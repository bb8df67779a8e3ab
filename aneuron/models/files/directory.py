"""Whether a directory holds a model that is safe to read, and whole.

Comes in: a directory in Hugging Face layout. Goes out: nothing, or an error that says what is
wrong with it. Only heads of files are read. Run by the worker thread that resolves a model.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from aneuron.errors import ConfigError
from aneuron.models.files.weight_files import weight_files

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_directory", "check_no_code"]

_MAX_HEADER_BYTES = 100_000_000
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_directory(path: Path) -> None:
    """Refuse a directory that is no safe, whole model.

    Raises:
        ConfigError: config.json or the safetensors are missing or damaged, or need remote code.
    """
    if not (path / "config.json").is_file():
        raise _refuse(f"{path} holds no config.json{_gguf_hint(path)}")
    check_no_code(path)
    for file in _found_weights(path):
        _check_safetensors(file)


def _refuse(message: str) -> ConfigError:
    return ConfigError(message, param="model")


def _gguf_hint(path: Path) -> str:
    found = sorted(path.glob("*.gguf"))
    return f"; pass the file instead: {found[0]}" if found else ""


def check_no_code(path: Path) -> None:
    """Refuse a directory whose configuration asks for code of its own.

    Raises:
        ConfigError: it does, or a file cannot be read.
    """
    for name in ("config.json", "tokenizer_config.json"):
        if (path / name).is_file() and "auto_map" in _read_json(path / name):
            raise _refuse(
                f"{path / name} asks for code of its own (auto_map), which is never run here; "
                "use a model of a family that is built in"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _refuse(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise _refuse(f"{path} does not hold a JSON object")
    return content


def _found_weights(path: Path) -> list[Path]:
    if files := weight_files(path):
        return files
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise _refuse(
            f"{path} holds its weights as pickles only ({pickles[0]}), which may run code when "
            "read and are refused; convert them to safetensors"
        )
    raise _refuse(f"{path} holds no *.safetensors{_gguf_hint(path)}")


def _check_safetensors(path: Path) -> None:
    """Check that the file is as long as its own header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError("its header does not fit")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:
            raise ValueError(f"it has {size} bytes, its header says {end}")
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is not a sound safetensors file (damaged or cut off?): {error}"
        raise _refuse(message) from error
