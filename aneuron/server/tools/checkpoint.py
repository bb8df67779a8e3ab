"""`CheckpointParser`: takes answers apart by the checkpoint's own `response_template`.

Comes in: an answer's text, in deltas. Goes out: pieces. transformers reads the declaration and
finds the regions; here its events become pieces, and its faults plain text.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from aneuron.server.tools.pieces import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Piece,
    Reasoning,
    make_call_id,
)

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["CheckpointParser"]

_REASONING = frozenset(("reasoning", "reasoning_content", "thinking"))
_CALLS = "tool_calls"
# What transformers raises where a region does not hold what was declared.
_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class CheckpointParser:
    """An `OutputParser` around transformers' `ResponseParser`.

    The arguments of a call come in one piece, when its region closes: until then they may be
    anything but JSON. A region that cannot be read, or that calls no tool of the request, is
    given back as plain text, without its tags. After a fault all text is plain.

    Args:
        parser: fresh, for this answer.
        tool_names: a call of any other is plain text.
    """

    needs_special_tokens = True

    def __init__(self, parser: Any, *, tool_names: Collection[str] = ()) -> None:
        self._parser: Any = parser  # None: all text is plain
        self._tools = frozenset(tool_names)
        self._pieces: list[Piece] = []
        self._body: list[str] = []  # of the calls' region that is open
        self._index = 0

    def feed(self, text: str) -> list[Piece]:
        """Return what the next text of the answer completes."""
        if self._parser is None:
            return [Content(text)] if text else []
        before = copy.copy(self._parser)  # its state is strings, which a fault leaves as they were
        try:
            self._take(self._parser.feed(text))
        except _FAULTS:
            self._find_fault(before, text)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _find_fault(self, parser: Any, text: str) -> None:
        """Take the events up to the character at which the parser breaks, and the rest as it is."""
        for at, char in enumerate(text):
            try:
                self._take(parser.feed(char))
            except _FAULTS:
                self._parser = None
                self._give_back(text[at + 1 :])
                return

    def close(self) -> list[Piece]:
        """Return what was held back; a call that was cut off is plain text."""
        if self._parser is not None:
            try:
                self._take(self._parser.finalize()[1])
            except _FAULTS:
                self._give_back("")
            self._parser = None
        pieces, self._pieces = self._pieces, []
        return pieces

    def _take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_chunk" and field == _CALLS:
                self._body.append(event["text"])
            elif kind == "region_chunk":
                made = Reasoning if field in _REASONING else Content
                self._pieces.append(made(event["text"]))
            elif kind == "region_close" and field == _CALLS:
                self._take_calls(event["value"])

    def _take_calls(self, value: object) -> None:
        calls = [_read_call(one) for one in (value if isinstance(value, list) else [value])]
        found = [one for one in calls if one is not None and one[0] in self._tools]
        if not found or len(found) < len(calls):
            self._give_back("")
            return
        self._body.clear()
        for name, arguments in found:
            self._pieces.append(CallBegun(self._index, make_call_id(), name))
            self._pieces.append(CallArguments(self._index, arguments))
            self._pieces.append(CallEnded(self._index, is_complete=True))
            self._index += 1

    def _give_back(self, text: str) -> None:
        text = "".join(self._body) + text
        self._body.clear()
        if text:
            self._pieces.append(Content(text))


def _read_call(value: object) -> tuple[str, str] | None:
    """Return a call's name and its arguments as JSON; None where it is not such a thing."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(function, dict):
        return None
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        return name, arguments
    if not isinstance(arguments, dict):
        return None
    try:
        return name, json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None
