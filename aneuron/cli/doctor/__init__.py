"""`aneuron doctor`: what this machine can run, and why not.

Comes in: nothing but the machine. Goes out: a table on stdout, or with `--json` one JSON
object; status 0 if the default device works, else 1. `facts` asks the machine, `checks` judges
what it said.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from aneuron.cli.doctor.checks import WORST, diagnose
from aneuron.cli.doctor.facts import gather
from aneuron.cli.terminal import show_json

if TYPE_CHECKING:
    from aneuron.cli.doctor.checks import Check

__all__ = ["doctor"]

_MARKS = {"ok": "[green]ok[/]", "note": "--", "warning": "[yellow]warning[/]", "no": "[red]no[/]"}


def doctor(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> int:
    """Tell what this machine can run, and why not; status 0 if the default device works.

    Args:
        as_json: Print one JSON object in place of the table.
    """
    facts = gather()
    checks = diagnose(facts)
    works = next(one for one in checks if one.name == "device cpu").status != WORST
    if as_json:
        show_json(
            {
                "works": works,
                "checks": [asdict(one) for one in checks],
                "facts": facts.as_json(),
            }
        )
    else:
        _show(checks)
    return 0 if works else 1


def _show(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("", "", "what"):
        table.add_column(column, overflow="fold", no_wrap=False)
    table.show_header = False
    for one in checks:
        text = one.found if not one.advice else f"{one.found}\n→ {one.advice}"
        table.add_row(Text.from_markup(_MARKS[one.status]), one.name, Text(text))
    Console(highlight=False).print(table)
