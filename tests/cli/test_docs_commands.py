"""Every `aneuron` command that README and docs show is one that the command line takes.

Those in blocks, and of README's table of figures those that made them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from aneuron.cli import app

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|console|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# The last cell of a row; before it, what the command measured.
IN_A_TABLE = re.compile(r"^\|.*\| `(aneuron [^`]+)` \|$", re.MULTILINE)
VARIABLES = re.compile(r"^(\w+=\S+\s+)*")


def commands_of(page: Path) -> list[str]:
    """Return them as they stand in blocks, lines that go on joined; cli.md is made by itself."""
    lines = [
        part
        for block in BLOCK.findall(page.read_text("utf-8"))
        for line in block.replace("\\\n", " ").splitlines()
        for part in re.split(r"&&|;", line.removeprefix("$ "))
    ]
    plain = [VARIABLES.sub("", line.strip()) for line in lines]
    return [line for line in plain if line.startswith("aneuron ") and "..." not in line]


FIGURES = IN_A_TABLE.findall(PAGES[0].read_text("utf-8"))
FOUND = [(page.name, one) for page in PAGES if page.name != "cli.md" for one in commands_of(page)]
FOUND += [("README.md", one) for one in FIGURES]


@pytest.mark.parametrize(("page", "command"), FOUND)
def test_it_is_taken(page: str, command: str) -> None:
    arguments = shlex.split(command, comments=True)[1:]
    app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_they_are_found() -> None:
    assert len(FOUND) > 40
    assert len(FIGURES) >= 7
    assert {"README.md", "serving.md", "benchmarks.md"} <= {page for page, _ in FOUND}
