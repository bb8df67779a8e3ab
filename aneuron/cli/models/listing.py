"""`aneuron models list`: what is built in, and what the caches hold.

Comes in: the catalog, our cache directory, and that of the Hugging Face client. Goes out: a row a
model. `gathered` is pure over what was found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aneuron.cli.options import JsonFlag  # noqa: TC001 (cyclopts reads them)
from aneuron.cli.terminal import show_json, stdout_console
from aneuron.models.catalog import BUILTIN
from aneuron.models.files.cache import cache_dir
from aneuron.models.files.inventory import entries, hub_cache, hub_models

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aneuron.models.catalog import BuiltinModel
    from aneuron.models.files.inventory import Entry, HubModel

__all__ = ["Row", "gathered", "list_models", "size_text"]


@dataclass(slots=True)
class Row:
    """A model, and what there is of it.

    Attributes:
        name: to give as MODEL, where it can be: a .gguf file's stem and a directory's name are
            not enough to find it again.
        source: "built in", ".gguf file", "Hugging Face" or "directory".
        kind: of the files: safetensors, or "" where nothing is here.
        path: of the safetensors, or None.
        num_bytes: of all of it here, in our cache or Hugging Face's.
        to_fetch: bytes of the download, if nothing is here.
        packed: for the compiled steps: what as, and how large.
    """

    name: str
    source: str
    kind: str = ""
    path: str | None = None
    num_bytes: int = 0
    to_fetch: int | None = None
    packed: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return it as `--json` has it."""
        return {name: getattr(self, name) for name in self.__slots__}


def list_models(*, as_json: JsonFlag = False) -> None:
    """List the models that are built in, and those in the caches.

    Args:
        as_json: Print one JSON object in place of the table.
    """
    found = entries()
    rows = gathered(BUILTIN, found, hub_models())
    num_bytes = sum(entry.num_bytes for entry in found)
    if as_json:
        show_json(
            {
                "cache_dir": str(cache_dir()),
                "num_bytes": num_bytes,
                "hub_cache_dir": str(hub_cache()),
                "models": [row.as_json() for row in rows],
            }
        )
        return
    _show(rows, num_bytes)


def gathered(
    builtin: Mapping[str, BuiltinModel], found: Iterable[Entry], hub: Iterable[HubModel]
) -> list[Row]:
    """Return a row for each model: those built in first, then by name.

    Args:
        builtin: of the catalog.
        found: in our cache.
        hub: in Hugging Face's.
    """
    rows = {
        name: Row(name, "built in", to_fetch=model.num_bytes) for name, model in builtin.items()
    }
    aliases = {}  # a snapshot's directory is named by its commit
    for model in hub:
        path = str(model.snapshots[-1])
        rows[model.name] = Row(
            model.name, "Hugging Face", "safetensors", path, num_bytes=model.num_bytes
        )
        aliases.update({snapshot.name: model.name for snapshot in model.snapshots})
    for entry in found:
        name = aliases.get(entry.model, entry.model)
        source = "directory" if entry.kind == "packed" else ".gguf file"
        row = rows.setdefault(name, Row(name, source))
        _add(row, entry)
    return sorted(rows.values(), key=lambda row: (row.source != "built in", row.name.lower()))


def _add(row: Row, entry: Entry) -> None:
    row.num_bytes += entry.num_bytes
    if entry.kind == "packed":
        packed = {"as": entry.detail, "path": str(entry.path), "num_bytes": entry.num_bytes}
        row.packed.append(packed)
        return
    if row.source == "directory":  # its packed copies came first
        row.source = ".gguf file"
    if entry.kind == "other":
        row.source, row.kind = "other programs", "other"
    if entry.kind == "converted":
        row.kind, row.path, row.to_fetch = "safetensors", str(entry.path), None


def _show(rows: list[Row], num_bytes: int) -> None:
    from rich.table import Table

    table = Table()
    for column in ("model", "files", "size", "from", "packed as"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for row in rows:
        size = size_text(row.num_bytes)
        if row.to_fetch is not None:
            size = f"{size_text(row.to_fetch)} to fetch"
        packed = ", ".join(f"{one['as']} ({size_text(one['num_bytes'])})" for one in row.packed)
        table.add_row(row.name, row.kind or "not here", size, row.source, packed)
    console = stdout_console()
    console.print(table, markup=False)
    console.print(f"{size_text(num_bytes)} in {cache_dir()}", markup=False, soft_wrap=True)


def size_text(num_bytes: float) -> str:
    """Return a number of bytes for people, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
