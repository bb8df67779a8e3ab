"""Each record comes from a stage's own logger, and docs/logging.md has them all."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from aneuron import ConfigError, Engine, EngineClosed
from aneuron.core import EngineCore

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


async def test_an_engine_says_when_it_is_open_and_when_it_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "aneuron")
    engine = Engine("sim:count", num_kv_blocks=32, token_carry="handoff")
    for _ in range(2):
        caplog.clear()
        async with engine:
            await engine.generate("abc", max_tokens=4)
            (is_open,) = caplog.records
        await engine.aclose()
        is_open, is_closed = caplog.records
        assert {record.name for record in caplog.records} == {"aneuron.core"}
        assert re.fullmatch(
            r"sim:count on sim is open after \d+\.\d\d s: int32, token carry handoff, "
            r"32 KV blocks of 16 tokens",
            is_open.getMessage(),
        )
        assert is_closed.getMessage() == "sim:count on sim is closed: 4 steps, 4 tokens"


@pytest.mark.parametrize("options", [{"async_scheduling": False}, {"num_ranks": 2}])
async def test_the_carry_of_every_engine_is_told(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "aneuron")
    async with Engine("sim:count", **options):
        carry = "host" if "async_scheduling" in options else "resident"
        assert f"token carry {carry}, " in caplog.text


async def test_what_was_never_open_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aneuron")
    with pytest.raises(ConfigError):
        await Engine("sim:count", max_model_len=2**30).open()
    assert not caplog.records


async def test_what_was_closed_before_it_was_open_is_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "aneuron")
    engine = Engine("sim:count")

    async def close(_: EngineCore) -> None:
        await engine.aclose()

    monkeypatch.setattr(EngineCore, "wait_started", close)
    with pytest.raises(EngineClosed):
        await engine.open()
    assert not caplog.records
