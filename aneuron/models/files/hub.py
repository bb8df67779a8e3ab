"""Fetching a model from Hugging Face, through that library's own client and cache.

Stage: before the engine opens. Comes in: a Hugging Face id. Goes out: the directory with its
files, in the client's cache. Run by the worker thread that resolves a model; the client is
imported when it is needed.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aneuron.errors import ConfigError
from aneuron.models.files.bars import load_bars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aneuron.models.files.cache import Progress

__all__ = ["ALL_FILES", "SMALL_FILES", "NotFetched", "bar_class", "cached", "fetch"]

SMALL_FILES = ("config.json", "tokenizer_config.json")
ALL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*", "*.txt")
# Folders hold other formats; "consolidated" files are a second copy of the same weights.
_NOT = ("*/*", "consolidated*")
_REFUSALS = (401, 403)


class NotFetched(Exception):
    """Hugging Face did not give the model; the message says why."""


def cached(model: str, revision: str | None) -> Path | None:
    """Return the directory of a model that is in the client's cache; None if it is not."""
    load_bars()
    import huggingface_hub
    from huggingface_hub import errors

    try:
        found = huggingface_hub.snapshot_download(model, revision=revision, local_files_only=True)
    except (OSError, ValueError, errors.HfHubHTTPError, errors.EntryNotFoundError):
        return None
    return Path(found)


def fetch(model: str, revision: str | None, files: Sequence[str], *, progress: Progress) -> Path:
    """Return the directory of a model, these of its files fetched where they are not there yet.

    Args:
        model: its id.
        revision: branch, tag or commit.
        files: patterns of their names.
        progress: told how far the download is.

    Raises:
        ConfigError: there is no such revision.
        NotFetched: whatever else stands against it.
    """
    load_bars()
    import huggingface_hub
    from huggingface_hub import errors

    failures = (OSError, ValueError, errors.HfHubHTTPError, errors.EntryNotFoundError)
    try:
        found = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=list(_NOT),
            tqdm_class=bar_class(progress),
        )
    except errors.RevisionNotFoundError as error:
        message = f"{model} has no revision {revision!r} on Hugging Face"
        raise ConfigError(message, param="revision") from error
    except failures as error:
        raise NotFetched(_why_not(error)) from error
    return Path(found)


def _why_not(error: Exception) -> str:
    import huggingface_hub
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "access to it must be asked for on its page, then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        token = "may not see it" if huggingface_hub.get_token() else "is not set"
        return f"there is no such model, or it is private and HF_TOKEN {token}"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in _REFUSALS:
        return f"it refuses HF_TOKEN, with status {error.response.status_code}"
    if isinstance(error, UnicodeEncodeError):  # a header takes no more than ASCII
        return "HF_TOKEN is no token: it has characters that none has"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and the model is not in the local Hugging Face cache"
    first = str(error).strip().split("\n")[0]
    return f"{first} (is the machine offline?)"


def bar_class(progress: Progress) -> type[Any]:
    """Return what the client makes its progress bars of: they tell `progress`, and draw nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        """Passes on what the library would draw, and draws nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})  # type: ignore[no-untyped-call]

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            if self.unit == "B":
                progress("download", int(self.n), int(self.total) if self.total else None)

    return Bar
