"""docs/neuron.md says of every status what the code says, and its examples go together."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import fields
from pathlib import Path

from aneuron.cli.compile import ProgramSettings
from aneuron.config import EngineConfig
from aneuron.device.neuron.status import COMPILER_CODES, STATUSES

PAGE = (Path(__file__).parents[2] / "docs" / "neuron.md").read_text("utf-8")


def test_every_status_is_in_the_table() -> None:
    for code, status in STATUSES.items():
        shown = "1200 to 1206" if code >= 1200 else str(code)
        row = (shown, status.name, status.meaning, f"`{status.error.__name__}`", status.advice)
        assert f"| {' | '.join(row)} |" in PAGE


def test_every_compiler_code_is_in_the_table() -> None:
    for code, advice in COMPILER_CODES.items():
        assert f"| {code} | {advice} |" in PAGE


def test_the_engine_of_the_page_finds_what_its_command_compiles() -> None:
    (command,) = re.findall(r"^\$ aneuron compile (.*)$", PAGE, re.MULTILINE)
    model, *words = command.split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    compiled = {name.removeprefix("--").replace("-", "_"): one for name, one in options.items()}
    (code,) = re.findall(r"```python\n(async with aneuron\.Engine.*?)```", PAGE, re.DOTALL)
    (call,) = [
        node
        for node in ast.walk(ast.parse(f"async def main():\n{textwrap.indent(code, '    ')}"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "aneuron.Engine"
    ]
    opened = {str(one.arg): str(ast.literal_eval(one.value)) for one in call.keywords}
    assert (ast.literal_eval(call.args[0]), opened) == (model, compiled)


def test_sizes_that_nobody_tells_are_the_same_for_both() -> None:
    for one in fields(ProgramSettings):
        assert one.default == getattr(EngineConfig(), one.name)
