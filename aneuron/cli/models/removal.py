"""`aneuron models rm`: remove a model from our own cache directory.

Comes in: a model's name. Goes out: how many bytes that freed. Never touched: a directory or a file
of the user's, and the Hugging Face client's cache, which other programs use, too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from aneuron.cli.models.listing import size_text
from aneuron.cli.options import JsonFlag  # noqa: TC001 (cyclopts reads them)
from aneuron.cli.terminal import note, show_json
from aneuron.errors import ConfigError
from aneuron.models.files.cache import cache_dir
from aneuron.models.files.inventory import entries, hub_models, remove

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aneuron.models.files.inventory import Entry, HubModel

__all__ = ["remove_model", "targets"]


def remove_model(
    model: str,
    /,
    *,
    yes: Annotated[bool, Parameter(name=("--yes", "-y"), negative="")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove a model from aneuron's cache directory, and its packed copies; asks first.

    A directory or .gguf file of yours stays, and so does what Hugging Face's client keeps.

    Args:
        model: As `aneuron models list` names it.
        yes: Do not ask.
        as_json: Print one JSON object in place of the text.
    """
    found = targets(model, entries(), hub_models())
    if not yes and not _agreed(found):
        note("nothing is removed")
        return
    freed = sum(remove(entry) for entry in found)
    removed = [str(entry.path) for entry in found]
    if as_json:
        show_json({"model": model, "freed_bytes": freed, "removed": removed})
    else:
        print(f"{size_text(freed)} freed", flush=True)


def targets(model: str, found: Iterable[Entry], hub: Iterable[HubModel]) -> list[Entry]:
    """Return what there is of a model in our cache.

    Args:
        model: as the list names it, or a path.
        found: in our cache.
        hub: in Hugging Face's.

    Raises:
        ConfigError: there is nothing; the message says where else it is.
    """
    of_hub = next((one for one in hub if one.name.lower() == model.strip().lower()), None)
    name = model.strip().rstrip("/\\").lower()
    if of_hub is not None:
        names = {snapshot.name for snapshot in of_hub.snapshots}
        chosen = [entry for entry in found if entry.model.lower() in names]
    elif name.endswith(".gguf"):
        stem = re.sub(r"[^\w.-]+", "-", Path(name).stem)[:60]  # as the catalog names entries
        chosen = [entry for entry in found if entry.model.lower() == stem]
    elif Path(name).name != name:  # a directory: only its packed copies are in the cache
        chosen = [entry for entry in found if _is_packed_of(Path(name).name, entry)]
    else:
        chosen = [entry for entry in found if entry.model.lower() == name]
    if not chosen:
        raise ConfigError(_nothing(model, of_hub), param="model")
    return chosen


def _is_packed_of(folder: str, entry: Entry) -> bool:
    begin = f"{folder}-{entry.detail}-"
    return entry.kind == "packed" and entry.path.name.lower().startswith(begin)


def _nothing(model: str, of_hub: HubModel | None) -> str:
    said = f"there is nothing of {model!r} in {cache_dir()}"
    if of_hub is not None:
        return (
            f"{said}; what Hugging Face's client keeps is not removed here: "
            f"`hf cache rm model/{of_hub.name}`"
        )
    if Path(model).expanduser().exists():
        return f"{said}; files of your own are not removed here"
    return f"{said}: see `aneuron models list`"


def _agreed(found: list[Entry]) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("nobody can be asked here: pass --yes to remove it")
    for entry in found:
        note(f"{size_text(entry.num_bytes):>8}  {entry.path}")
    note("Remove this? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
