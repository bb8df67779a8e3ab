"""docs/neuron.md says of every status what the code says."""

from __future__ import annotations

from pathlib import Path

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
