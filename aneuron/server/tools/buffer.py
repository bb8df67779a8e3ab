"""`TextBuffer`: text that arrived and is not understood yet, taken from the front.

Comes in: deltas. Goes out: characters and JSON strings, once they are whole. What may be a tool
call is also kept as it was, since it may turn out to be plain text. Pure.
"""

from __future__ import annotations

import json
import re

__all__ = ["SPACE", "Malformed", "TextBuffer"]

SPACE = " \t\r\n"
_MAX_STRING = 256  # characters of a name or a key, in JSON
_MAX_KEPT = 2**16  # characters of a call that is not announced yet
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class Malformed(Exception):
    """What seemed to be a call is none, or not any more."""


class TextBuffer:
    """Base of a parser: the buffer, and what it keeps of a call that is not announced."""

    __slots__ = ("_buffer", "_kept", "_num_kept")

    def __init__(self) -> None:
        self._buffer = ""  # what nobody has taken yet
        self._kept: list[str] | None = None  # None where no call is pending
        self._num_kept = 0

    def _keep(self, num_chars: int) -> None:
        """Start to keep what may be a call, which begins with so much of the buffer."""
        self._kept, self._num_kept = [], 0
        self._take(num_chars)

    def _take(self, num_chars: int) -> str:
        """Take characters from the buffer; those of a call that is not announced are kept."""
        is_too_long = False
        if self._kept is not None:
            room = _MAX_KEPT - self._num_kept
            is_too_long = num_chars > room
            num_chars = min(num_chars, room)
            self._num_kept += num_chars
        text, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        if self._kept is not None:
            self._kept.append(text)
        if is_too_long:
            raise Malformed
        return text

    def _next_char(self) -> str:
        """Take white space; return the character behind it, or "" if it is not there yet."""
        if num_spaces := len(self._buffer) - len(self._buffer.lstrip(SPACE)):
            self._take(num_spaces)
        return self._buffer[:1]

    def _next_string(self) -> str | None:
        """Take a JSON string; None if it is not whole yet."""
        found = _STRING.match(self._buffer)
        length = len(self._buffer) if found is None else found.end()
        if self._buffer[0] != '"' or length > _MAX_STRING + 2:
            raise Malformed
        if found is None:
            return None
        try:
            text = json.loads(found[0])
        except ValueError:
            raise Malformed from None
        self._take(length)
        return str(text)
