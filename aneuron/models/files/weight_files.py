"""Which files of a model directory hold its weights.

Comes in: a directory in Hugging Face layout. Goes out: its safetensors files. The catalog
asks before anything is loaded, the loader when it reads them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["weight_files"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a directory; none if it has none.

    A file for all wins, then the shards that the index names, then whatever is there.

    Raises:
        ConfigError: the index is corrupt or points out of the directory.
    """
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    index = path / _INDEX
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        outside = [name for name in names if (path / name).parent != path or name == ".."]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read {index}: {error!r}", param="model") from error
    if outside or not names:
        what = f"points outside: {outside[0]}" if outside else "names no file"
        raise ConfigError(f"{index} {what}", param="model")
    return [path / name for name in names]
