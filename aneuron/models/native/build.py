"""The C++ library: compiled once for this processor, kept in the cache directory.

Comes in: nothing but the sources beside this file. Goes out: a path to a shared library, or None
where there can be none; the caller then goes on without. Blocking: a compiler runs for some ten
seconds, at low priority. It is started by a process of its own (`python -m` this module), which
ends what it began also if the one that asked for it is gone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from aneuron.models.files.cache import cache_dir

__all__ = ["NEEDED_FLAGS", "built_library", "compile_library", "compilers", "has_kernels"]

_logger = logging.getLogger("aneuron.native")

_FOLDER = Path(__file__).parent
_MAIN = "step.cpp"
_SOURCES = (_MAIN, "attention.h", "cache.h", "matrix.h", "pool.h", "simd.h")
# Products and sums are fused where the sources say so and nowhere else: else a row's last bits
# would depend on which loop the compiler happened to fuse.
_FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w",
)  # fmt: skip
_COMPILERS = ("c++", "g++", "clang++")
NEEDED_FLAGS = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}
_TIMEOUT_S = 600.0


def built_library() -> Path | None:
    """Return the library if it was compiled before for this processor, and nobody else wrote it."""
    path = _path()
    try:
        return path if path.exists() and _is_ours(path) else None
    except OSError:  # its folder cannot be read: compiling says so
        return None


def compile_library() -> Path | None:
    """Return the library, compiling it if need be; None if that cannot be."""
    if not has_kernels():
        _logger.warning(
            "this processor lacks AVX-512 with VNNI and BF16: models run eagerly, which is slower"
        )
        return None
    if (path := built_library()) is not None:
        return path
    if not compilers():
        _logger.warning("no C++ compiler is installed: models run eagerly, which is slower")
        return None
    started_s = time.perf_counter()
    _logger.info(
        "compiling the steps for this processor: once, some 15 s; models run eagerly meanwhile"
    )
    try:
        child = subprocess.run(  # noqa: S603  this module, by this interpreter
            [sys.executable, "-m", __name__], check=False, capture_output=True, text=True,
            timeout=2 * _TIMEOUT_S, stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        _logger.warning("compiling failed, models run eagerly: %s", error)
        return None
    if child.returncode != 0:
        _logger.warning("compiling failed, models run eagerly: %s", child.stderr[-2000:].strip())
        return None
    _logger.info("compiled in %.0f s", time.perf_counter() - started_s)
    return built_library()


def has_kernels() -> bool:
    """Whether there are kernels for this processor; plain loops would be slower than torch's."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(flags.split()) >= NEEDED_FLAGS


def _path() -> Path:
    folder = os.environ.get("ANEURON_NATIVE_DIR")
    return (Path(folder) if folder else cache_dir() / "native") / f"aneuron-{_key()}.so"


def _is_ours(path: Path) -> bool:
    """Whether only this user, or the administrator, can have written the file: it is code."""
    facts = path.stat()
    if os.name != "posix":
        return True
    if facts.st_uid in (os.geteuid(), 0) and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return True
    _logger.warning("%s may have been written by somebody else, and is not used", path)
    return False


@cache
def _key() -> str:
    """Return what the library depends on, as a name; not the compiler, which may be gone."""
    parts = [*_FLAGS, platform.machine(), sys.platform, _processor()]
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


def compilers() -> list[list[str]]:
    """Return the commands of compilers that are there; one that CXX names comes first."""
    named = shlex.split(os.environ.get("CXX", ""))
    commands = [named] if named and shutil.which(named[0]) else []
    return commands + [[found] for one in _COMPILERS if (found := shutil.which(one))]


# ── in the process that compiles ────────────────────────────────────────────────────────────


def _main() -> str | None:
    """Compile, unless another process did meanwhile; return what is wrong, or None."""
    if hasattr(os, "nice"):
        os.nice(19)
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _compile_once(path)
    except Timeout as error:
        return str(error)
    except OSError as error:
        return f"cannot write {path.parent}: {error.strerror or error}"


def _compile_once(path: Path) -> str | None:
    """Compile with the first compiler that can, one process at a time."""
    fault: str | None = "no C++ compiler is installed"
    with FileLock(path.with_suffix(".lock"), timeout=_TIMEOUT_S):
        if built_library() is not None:
            return None
        for left in path.parent.glob("compiling-*"):
            shutil.rmtree(left, ignore_errors=True)
        for command in compilers():
            fault = _compile(command, path)
            if fault is None:
                return None
    return fault


def _compile(compiler: list[str], path: Path) -> str | None:
    """Compile beside the place, and move it there: nobody meets half a library."""
    with TemporaryDirectory(dir=path.parent, prefix="compiling-") as folder:
        target = Path(folder) / path.name
        command = [*compiler, *_FLAGS, str(_FOLDER / _MAIN), "-o", str(target)]
        try:
            done = subprocess.run(  # noqa: S603  a compiler of the user's own
                command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        if done.returncode != 0:
            return f"{shlex.join(command)}: {done.stderr}"
        target.chmod(0o755)
        with target.open("rb") as file:
            os.fsync(file.fileno())
        target.replace(path)
    return None


if __name__ == "__main__":
    sys.exit(_main())
