"""`ValueScanner`: finds where a JSON value ends, over any number of pieces of text.

It tracks strings, escapes and depth and looks at nothing else, so that what a model writes is
passed on unchanged, also where it is not quite JSON. Pure.
"""

from __future__ import annotations

import re

__all__ = ["ValueScanner"]

_STRUCTURE = re.compile(r'["{}\[\],<]')
_STRING_END = re.compile(r'["\\]')


class ValueScanner:
    """The place inside one value, between two pieces of text.

    Attributes:
        is_in_string: it stands inside a string.
    """

    __slots__ = ("_depth", "_is_escaped", "is_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._is_escaped = False
        self.is_in_string = False

    def scan(self, text: str, start: int, end: int) -> tuple[int, bool]:
        """Go on through `text[start:end]`.

        Returns:
            Where it stopped, and whether the value ended there. It also stops before a "<"
            outside strings, which no JSON has; to go on, start behind it.
        """
        at = start
        while at < end:
            if self.is_in_string:
                at, is_closed = self._in_string(text, at, end)
                if is_closed and not self._depth:
                    return at, True
                continue
            found = _STRUCTURE.search(text, at, end)
            if found is None:
                return end, False
            at, is_done = self._structure(found)
            if is_done or at == found.start():
                return at, is_done
        return end, False

    def _in_string(self, text: str, at: int, end: int) -> tuple[int, bool]:
        """Go on inside a string; where to, and whether it has ended there."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1, False
        found = _STRING_END.search(text, at, end)
        if found is None:
            return end, False
        self._is_escaped = found[0] != '"'
        self.is_in_string = self._is_escaped
        return found.end(), not self._is_escaped

    def _structure(self, found: re.Match[str]) -> tuple[int, bool]:
        """Take one character of structure; where to go on, and whether the value has ended."""
        match found[0]:
            case '"':
                self.is_in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]" if self._depth:
                self._depth -= 1
                return found.end(), not self._depth
            case "," if self._depth:
                pass
            case "<":
                return found.start(), False
            case _:  # behind a number or the like, and not part of it
                return found.start(), True
        return found.end(), False
