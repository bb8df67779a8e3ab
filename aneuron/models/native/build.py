"""The C++ library: compiled once for this processor, kept in the cache directory.

Comes in: nothing but the sources beside this file. Goes out: a path to a shared library, or None
where no compiler is found or it fails; the caller then goes on without. Blocking: a compiler runs
for some ten seconds, at low priority, in a process of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from aneuron.models.files.cache import cache_dir

__all__ = ["built_library", "compile_library"]

_logger = logging.getLogger("aneuron.native")

_FOLDER = Path(__file__).parent
_MAIN = "step.cpp"
_SOURCES = (_MAIN, "attention.h", "matrix.h", "pool.h", "simd.h")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w")
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 300.0


def built_library() -> Path | None:
    """Return the library if it was compiled before, by this compiler for this processor."""
    key = _key()
    path = None if key is None else _path(key)
    return path if path is not None and path.exists() else None


def compile_library() -> Path | None:
    """Return the library, compiling it if need be; None if that cannot be."""
    key = _key()
    if key is None:
        _logger.info("no C++ compiler is installed: models run eagerly, which is slower")
        return None
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=_TIMEOUT_S):
            if not path.exists():
                _compile(path)
    except (OSError, Timeout, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        _logger.warning("compiling failed, models run eagerly: %s", str(detail)[:2000])
        return None
    return path


def _path(key: str) -> Path:
    folder = os.environ.get("ANEURON_NATIVE_DIR")
    return (Path(folder) if folder else cache_dir() / "native") / f"aneuron-{key}.so"


def _compile(path: Path) -> None:
    """Compile next to the place, and move it there: nobody meets half a library."""
    compiler = _compiler()
    assert compiler is not None
    nice = shutil.which("nice")
    before = [nice, "-n", "19"] if nice else []
    with TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / path.name
        command = [*before, compiler, *_FLAGS, str(_FOLDER / _MAIN), "-o", str(target)]
        subprocess.run(  # noqa: S603  a compiler of the user's own
            command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        target.replace(path)


@cache
def _compiler() -> str | None:
    """Return the compiler's path; one that CXX names comes first."""
    named = os.environ.get("CXX", "").split()
    return next((found for one in (*named[:1], *_COMPILERS) if (found := shutil.which(one))), None)


@cache
def _key() -> str | None:
    """Return what the library depends on, as a name; None without a compiler."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        version = subprocess.run(  # noqa: S603  likewise
            [compiler, "--version"], check=True, capture_output=True, text=True, timeout=10.0
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    parts = [version, *_FLAGS, platform.machine(), _processor(), sysconfig.get_platform()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for name in _SOURCES:
        digest.update((_FOLDER / name).read_bytes())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """Return what tells processors apart that a cache directory may be shared between."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(wanted)}))
