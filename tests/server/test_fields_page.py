"""The page of fields says what the server does."""

from __future__ import annotations

from pathlib import Path

import pytest

from aneuron.server.wire.fields import CHAT, COMPLETIONS, DETOKENIZE, RESPONSES, TOKENIZE, Fields

PAGE = Path(__file__).parents[2] / "docs" / "serving-fields.md"
SECTIONS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(*rows: tuple[str, ...]) -> str:
    head, *others = rows
    return "\n".join([row(*head), "|" + "---|" * len(head), *(row(*one) for one in others)])


def literal(value: object) -> str:
    return (
        f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value!r}`".replace("'", '"')
    )


def section(path: str, fields: Fields) -> str:
    """What the page must hold for an endpoint, as it stands there."""
    honoured = [(f"`{name}`", text) for name, text in fields.honoured.items()]
    parts = [f"## `{path}`", table(("honoured", "what it does"), *honoured)]
    if fields.ignored:
        ignored = [(f"`{name}`", text) for name, text in fields.ignored.items()]
        parts.append(table(("accepted, no effect", "why"), *ignored))
    if fields.refused:
        refused = [
            (
                f"`{name}`",
                one.why,
                f"`{one.same_as}`" if one.same_as else ", ".join(map(literal, one.neutral)),
            )
            for name, one in fields.refused.items()
        ]
        parts.append(table(("refused", "why", "taken all the same"), *refused))
    return "\n\n".join(parts)


@pytest.mark.parametrize("path", list(SECTIONS))
def test_each_list_is_on_the_page(path: str) -> None:
    assert section(path, SECTIONS[path]) in PAGE.read_text("utf-8")


def test_there_are_no_other_rows() -> None:
    wanted = "\n".join(section(path, fields) for path, fields in SECTIONS.items())
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    assert rows == [line for line in wanted.splitlines() if line.startswith("|")]
