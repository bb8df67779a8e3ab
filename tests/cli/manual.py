"""docs/cli.md, made of what the commands say of themselves.

`python -m tests.cli.manual` writes it; a test compares it. It is made of names, types, defaults and
texts rather than of a printed `--help`, whose boxes differ with the version of what draws them.
"""

from __future__ import annotations

import re
import sys
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aneuron.cli import app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cyclopts import App, Argument

_ARGS = re.compile(r"\n\s*Args:")  # of a docstring; they have a table here
FILE = Path(__file__).parents[2] / "docs" / "cli.md"
_HEAD = """\
# Command line

<!-- Made by `python -m tests.cli.manual`; edit the docstrings of the commands. -->

What `aneuron COMMAND --help` says, of every command. Beside this:

* Only a command's result goes to stdout; what goes on, and what went wrong, is told on stderr.
* `--json`, where a command has it, prints one JSON object and nothing else on stdout.
* Status 0 is success, 1 a fault of the device or of aneuron, 2 a wrong argument or request, 130
  Ctrl-C. In a conversation Ctrl-C ends the answer; at the prompt, or twice within a second, it ends
  the conversation, with 130 (`/exit` and Ctrl-D end it with 0). A view that is left by Ctrl-C
  (`aneuron top`) ends with 0.
* Options have vLLM's names where they mean the same.
* A MODEL is a built-in name (`smollm2-135m`), a directory, a `.gguf` file, a Hugging Face id
  (`org/name`) or a simulated model (`sim:count`).

Variables that commands read: [environment](environment.md).
"""


def manual() -> str:
    """What the file should hold."""
    return _HEAD + "".join(_section(words, command) for words, command in commands(app, "aneuron"))


def commands(parent: App, words: str) -> Iterator[tuple[str, App]]:
    """Each command below, with what is typed for it."""
    for name in sorted(parent):
        if name.startswith("-"):
            continue
        found = parent[name]
        inner = [one for one in found if not one.startswith("-")]
        if inner:
            yield from commands(found, f"{words} {name}")
        else:
            yield f"{words} {name}", found


def _section(words: str, command: App) -> str:
    found = command.assemble_argument_collection(parse_docstring=True)
    arguments = [one for one in found if one.show]
    places = [one for one in arguments if not one.names[0].startswith("-")]
    options = [one for one in arguments if one.names[0].startswith("-")]
    usage = " ".join([words, *map(_place, places), *(["[OPTIONS]"] if options else [])])
    about = cleandoc(_ARGS.split(command.help or "", maxsplit=1)[0])
    return f"\n## {words}\n\n{about}\n\n```text\n{usage}\n```\n{_table(places)}{_table(options)}"


def _place(argument: Argument) -> str:
    name = argument.names[0]
    return name if argument.required else f"[{name}]"


def _table(arguments: list[Argument]) -> str:
    if not arguments:
        return ""
    is_places = not arguments[0].names[0].startswith("-")
    head = ("argument" if is_places else "option", "default", "what")
    rows = [head, ("---",) * 3, *map(_row, arguments)]
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(argument: Argument) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in argument.names)
    default = argument.field_info.default
    if argument.required or default in (None, False, ()) or default is argument.field_info.empty:
        shown = "required" if argument.required else ""
    else:
        shown = f"`{_default(default)}`"
    return names, shown, _escape((argument.parameter.help or "").strip())


def _default(value: Any) -> str:
    return "yes" if value is True else str(value)


def _escape(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(FILE.read_text("utf-8") != manual())
    FILE.write_text(manual(), encoding="utf-8")
