"""What the cache directory holds, by model, and how to remove it.

Comes in: the cache directory, and that of the Hugging Face client, which is only read. Goes out:
names, kinds and sizes. Nothing here imports torch, numpy or a hub client. Blocking, and quick:
sizes are those of directory entries. A directory is ours only if it has our manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aneuron.errors import ConfigError
from aneuron.models.files.cache import MANIFEST, cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Entry", "HubModel", "entries", "hub_cache", "hub_models", "packed_of", "remove"]

_CONVERTED = re.compile(r"(?P<model>.+)-[0-9a-f]{12,16}-v\d+")
_SOURCE = re.compile(r"(?P<model>.+)-gguf-[0-9a-f]{12}")
_PACKED = re.compile(r"(?P<folder>.+)-(?P<kind>[a-z]+\d+)-[0-9a-f]{20}\.safetensors")
_HUB_FOLDER = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in the cache directory.

    Attributes:
        model: that it belongs to: a built-in name, a .gguf file's stem, or a directory's name.
        kind: "converted" (safetensors), "source" (as it was fetched), "packed" (for the compiled
            steps) or "other" (of a benchmark's peers).
        detail: what it is packed as; "" otherwise.
        path: a directory, or a packed file.
        num_bytes: that removing it frees.
    """

    model: str
    kind: str
    detail: str
    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model in the Hugging Face client's cache, which other programs use, too.

    Attributes:
        name: its id, `org/name`.
        path: its folder, with all revisions.
        snapshots: directories of its revisions that hold safetensors.
        num_bytes: on the disk.
    """

    name: str
    path: Path
    snapshots: tuple[Path, ...]
    num_bytes: int


# ── what is there ───────────────────────────────────────────────────────────────────────


def entries() -> list[Entry]:
    """Return what the cache directory holds of models, by name; [] where there is none."""
    root = cache_dir()
    folders = [*_listed(root), *_listed(root / "peers")]
    found = [_entry(path) for path in folders if _is_ours(path)]
    for path in _listed(root / "native"):
        if (packed := _PACKED.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
            model = _model_of(packed["folder"])[0]
            found.append(Entry(model, "packed", packed["kind"], path, _size(path)))
    return sorted(found, key=lambda one: (one.model, one.kind, one.path.name))


def packed_of(names: Iterable[str]) -> list[Entry]:
    """Return packed copies of directories with these names."""
    wanted = set(names)
    return [one for one in entries() if one.kind == "packed" and one.model in wanted]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_ours(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and (path / MANIFEST).is_file()


def _entry(path: Path) -> Entry:
    model, kind = _model_of(path.name)
    return Entry(model, kind, "", path, sum(_size(file) for file in _own_files(path)))


def _model_of(folder: str) -> tuple[str, str]:
    """Return model and kind of a directory in the cache, by the names that the catalog gives."""
    if found := _SOURCE.fullmatch(folder):
        return found["model"], "source"
    if found := _CONVERTED.fullmatch(folder):
        return found["model"], "converted"
    return folder, "other"


def _own_files(entry: Path) -> list[Path]:
    """Return the files that the entry's manifest names, and the manifest, as far as they exist."""
    try:
        names = json.loads((entry / MANIFEST).read_bytes())["files"]
        plain = [name for name in names if isinstance(name, str) and Path(name).name == name]
    except (OSError, ValueError, KeyError, TypeError):
        plain = []
    files = [entry / name for name in plain if name not in {"", ".", ".."}]
    return [file for file in (*files, entry / MANIFEST) if file.is_file() or file.is_symlink()]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


# ── the Hugging Face client's cache ─────────────────────────────────────────────────────


def hub_cache() -> Path:
    """Return where the Hugging Face client keeps models, as its variables say."""
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return (Path(os.environ.get("HF_HOME") or default) / "hub").expanduser()


def hub_models() -> list[HubModel]:
    """Return models of that cache that have safetensors; [] where there is none."""
    found = []
    for path in _listed(hub_cache()):
        named = _HUB_FOLDER.fullmatch(path.name)
        if named is None:
            continue
        snapshots = tuple(
            one for one in _listed(path / "snapshots") if any(one.glob("*.safetensors"))
        )
        if snapshots:
            num_bytes = sum(_size(blob) for blob in _listed(path / "blobs"))
            name = f"{named['owner']}/{named['name']}"
            found.append(HubModel(name, path, snapshots, num_bytes))
    return found


# ── removing ────────────────────────────────────────────────────────────────────────────


def remove(entry: Entry) -> int:
    """Remove an entry; return the bytes that this freed.

    Only what the manifest names is removed. What somebody else put into the directory stays, and
    with it the directory. Waits for nobody: what is being built is refused.

    Raises:
        ConfigError: it is no entry of the cache, is being built, or the disk refuses.
    """
    root = cache_dir()
    parents = {root / "native"} if entry.kind == "packed" else {root, root / "peers"}
    if entry.path.parent not in parents:
        raise ConfigError(f"{entry.path} is not in the cache directory {root}", param="model")
    try:
        if entry.kind == "packed":
            return _unlink(entry.path)
        with _lock(entry.path):
            return _remove_directory(entry.path)
    except OSError as error:
        raise ConfigError(f"cannot remove {entry.path}: {error}", param="model") from error


def _remove_directory(path: Path) -> int:
    if not _is_ours(path):
        raise ConfigError(f"{path} has no manifest of aneuron's: it stays", param="model")
    # The manifest last: what is left after a failure is still known as ours.
    freed = sum(_unlink(file) for file in _own_files(path))
    with contextlib.suppress(OSError):  # somebody else's file is in it
        path.rmdir()
    return freed


def _unlink(file: Path) -> int:
    num_bytes = _size(file)
    file.unlink(missing_ok=True)
    return num_bytes


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        message = f"another process is making {path.name} just now: try again when it is done"
        raise ConfigError(message, param="model") from None
    try:
        yield
    finally:
        lock.release()
