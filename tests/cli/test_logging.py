"""Each record comes from a stage's own logger, and docs/logging.md has them all."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "logging.md").read_text("utf-8")
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def loggers() -> dict[str, dict[str, set[str]]]:
    """By file: the loggers that records come from, and the levels of their records."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in sorted((ROOT / "aneuron").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        names = {
            ast.unparse(node.targets[0]): node.value.args[0].value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "logging.getLogger"
            and node.value.args
            and isinstance(node.value.args[0], ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, method = ast.unparse(node.func.value), node.func.attr
                if method in METHODS and owner in {*names, "logging"}:
                    name = str(names.get(owner, "root"))
                    level = "error" if method == "exception" else method
                    found.setdefault(str(path), {}).setdefault(name, set()).add(level)
    return found


def test_each_logger_of_the_code_is_in_the_docs_and_the_other_way_round() -> None:
    rows = dict(re.findall(r"^\| `(aneuron[\w.]*)` \| ([\w, ]+) \|", PAGE, re.MULTILINE))
    told = {name: set(levels.split(", ")) for name, levels in rows.items()}
    used: dict[str, set[str]] = {}
    for by_name in loggers().values():
        for name, levels in by_name.items():
            used.setdefault(name, set()).update(levels)
    assert used == told


def test_no_record_comes_from_the_root_or_from_no_stage() -> None:
    names = {name for by_name in loggers().values() for name in by_name}
    assert len(names) >= 5  # they were found
    assert all(re.fullmatch(r"aneuron\.[a-z]+(\.[a-z]+)?", name) for name in names)
