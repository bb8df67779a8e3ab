"""Packed weights in the cache directory: quantised once, mapped into memory afterwards.

Comes in: a model directory and what its weights are packed as. Goes out: tensors by name. The file
is a safetensors file, so nothing in it is code; its name says what it was made of. Blocking.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aneuron.errors import ConfigError
from aneuron.models.files.cache import cache_dir
from aneuron.models.files.weight_files import weight_files

if TYPE_CHECKING:
    import torch

__all__ = ["load_packed", "packed_file", "save_packed"]

_logger = logging.getLogger("aneuron.native")

_CODE = ("packing.py", "program.py")  # what the layouts follow from
_PLACE_DIGITS, _CONTENT_DIGITS = 8, 12  # of hashes, in the file's name
_LEAST_BYTES = 2**24  # packed in no time
_MOST_PLAIN_BYTES = 2**30  # unquantised weights are packed anew each time beyond this


def packed_file(folder: Path, kind: str, dtype: str) -> Path:
    """Return where the packed weights of a model directory are kept.

    Args:
        folder: in Hugging Face layout.
        kind: of the matrices.
        dtype: of the embedding.

    Raises:
        ConfigError: one of its files is missing.
    """
    place = hashlib.sha256(f"{dtype}\0{folder.resolve()}".encode()).hexdigest()[:_PLACE_DIGITS]
    digest = hashlib.sha256(kind.encode())
    for name in _CODE:
        digest.update((Path(__file__).parent / name).read_bytes())
    for file in sorted({folder / "config.json", *weight_files(folder)}):
        try:
            facts = file.stat()
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error}", param=file.name) from error
        digest.update(f"{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    name = f"{folder.name}-{kind}-{place}{digest.hexdigest()[:_CONTENT_DIGITS]}.safetensors"
    return cache_dir() / "native" / name


def load_packed(file: Path) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a file, mapped and not read; None if it is not there or not sound."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        _logger.warning("packed weights are made again, %s is broken: %s", file, error)
        return None


def save_packed(file: Path, tensors: dict[str, torch.Tensor], kind: str) -> None:
    """Keep tensors; where that cannot be, they are packed again next time."""
    num_bytes = sum(one.numel() * one.element_size() for one in tensors.values())
    is_plain = kind not in ("int8", "int4")
    if num_bytes < _LEAST_BYTES or (is_plain and num_bytes > _MOST_PLAIN_BYTES):
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        os.close(descriptor)
        try:
            save_file({key: one.contiguous() for key, one in tensors.items()}, name)
            Path(name).chmod(0o644)
            Path(name).replace(file)
            _remove_older(file)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except (OSError, SafetensorError) as error:
        _logger.info("packed weights are not kept: %s", error)


def _remove_older(file: Path) -> None:
    """Remove what the same directory was packed as before, of this kind and dtype."""
    same = glob.escape(file.stem[:-_CONTENT_DIGITS])
    for other in file.parent.glob(f"{same}{'?' * _CONTENT_DIGITS}{file.suffix}"):
        if other != file:
            with contextlib.suppress(OSError):
                other.unlink()
