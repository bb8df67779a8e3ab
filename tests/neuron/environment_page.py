"""docs/neuron-environment.md, made of the table of variables.

`python -m tests.neuron.environment_page` writes it; a test compares it.
"""

from __future__ import annotations

from pathlib import Path

from aneuron.device.neuron.environment import VARIABLES, Variable

FILE = Path(__file__).parents[2] / "docs" / "neuron-environment.md"
_HEAD = """\
# Environment variables of AWS Neuron

<!-- Made by `python -m tests.neuron.environment_page`; edit the table in the package. -->

Read by the runtime, its Python packages and the compiler, not by aneuron, unless a line says so.
`aneuron doctor` shows those that are set. Variables of aneuron: [environment](environment.md).

"""
_COLUMNS = ("variable", "what it does", "read by", "default")


def page() -> str:
    """What the file should hold."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_row, VARIABLES.values())]
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(variable: Variable) -> tuple[str, ...]:
    what = variable.what
    if variable.since:
        what += f". Since SDK {variable.since}"
    if variable.is_stale:
        what += f". **Stale**: up to SDK {variable.until}"
    if variable.advice:
        what += f". {variable.advice}"
    return f"`{variable.name}`", what.replace("|", "\\|"), variable.reader, variable.default


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
