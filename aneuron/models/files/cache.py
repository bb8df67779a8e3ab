"""The model cache: entries appear whole or not at all.

Stage: before the engine opens. Comes in: a name and a function that fills a directory.
Goes out: the path of the finished directory. Run by the worker thread that resolves a model;
two threads or two processes that want the same entry build it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MANIFEST", "Progress", "cache_dir", "ensure", "is_complete", "quiet", "sha256_of"]

MANIFEST = "aneuron-manifest.json"
_LOCK_NOTICE_S = 1.0


class Progress(Protocol):
    """Told how far a slow stage is; an exception raised here stops the work cleanly."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None:
        """Take note that `done` of `total` (bytes or items; None: unknown) of `stage` is done."""


def quiet(stage: str, done: int, total: int | None, /) -> None:
    """Report nothing."""


def cache_dir() -> Path:
    """Return the cache directory: `ANEURON_CACHE_DIR`, or the platform's own for users.

    Raises:
        ConfigError: the variable names no directory that there can be.
    """
    if override := os.environ.get("ANEURON_CACHE_DIR"):
        try:
            return Path(override).expanduser().absolute()
        except RuntimeError as error:  # the home directory of nobody
            raise ConfigError(f"ANEURON_CACHE_DIR={override}: {error}") from error
    import platformdirs

    return platformdirs.user_cache_path("aneuron")


def ensure(name: str, build: Callable[[Path], None], *, progress: Progress = quiet) -> Path:
    """Return the entry `name`, built by `build` unless a sound one is there already.

    Args:
        name: the directory's name in the cache; it must change when the content would.
        build: fills the empty directory that it is given; what it leaves is published
            with one rename, so a process killed half-way leaves nothing that looks finished.
        progress: told now and then while another process builds the entry.

    Raises:
        ConfigError: the cache cannot be written, or what `build` raises.
    """
    path = cache_dir() / name
    if is_complete(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, progress):
            if not is_complete(path):
                _publish(path, build)
    except OSError as error:
        message = (
            f"cannot write the model cache {path.parent}: {error}. "
            "Make room or make it writable, or set ANEURON_CACHE_DIR to another directory."
        )
        raise ConfigError(message, param="model") from error
    return path


def is_complete(path: Path) -> bool:
    """Tell whether the entry has every file of its manifest, unchanged."""
    try:
        files = json.loads((path / MANIFEST).read_bytes())["files"]
        return all(_unchanged(path / name, facts) for name, facts in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unchanged(path: Path, facts: dict[str, Any]) -> bool:
    stat = path.stat()
    if stat.st_size != facts["size"]:
        return False
    if stat.st_mtime_ns == facts["mtime_ns"]:
        return True
    # Written to since, or only copied without its time stamp: the content decides, and the
    # time stamp is put back so that the next start need not hash again.
    if sha256_of(path) != facts["sha256"]:
        return False
    with contextlib.suppress(OSError):
        os.utime(path, ns=(stat.st_atime_ns, facts["mtime_ns"]))
    return True


def _publish(path: Path, build: Callable[[Path], None]) -> None:
    # The lock is held: a scratch directory of this entry belongs to a process that died.
    for stale in path.parent.glob(f"{path.name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    prefix = f"{path.name}."
    with tempfile.TemporaryDirectory(prefix=prefix, suffix=".tmp", dir=path.parent) as scratch:
        entry = Path(scratch) / "entry"
        entry.mkdir()
        build(entry)
        _write_manifest(entry)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        entry.replace(path)


def _write_manifest(entry: Path) -> None:
    files = {
        item.relative_to(entry).as_posix(): _facts(item)
        for item in sorted(entry.rglob("*"))
        if item.is_file()
    }
    manifest = entry / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    _facts(manifest)


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb+") as file:
        # Else a power cut after the rename could leave a finished-looking file of zeros.
        os.fsync(file.fileno())
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256_of(path)}


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f"{path.name}.lock"))
    while True:
        try:
            lock.acquire(timeout=_LOCK_NOTICE_S)
            break
        except Timeout:
            progress("waiting for another process", 0, None)
    try:
        yield
    finally:
        lock.release()
