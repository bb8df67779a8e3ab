"""How much there is in JSON: counted in the text, or in values made of it, before it costs more.

Comes in: JSON text, or values of any kind. Goes out: numbers of values and characters. 1 MB of
empty lists is counted in 5 ms, built in 150 ms, and copied for a chat template in 400 ms. Pure;
runs in the caller's task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MOST_VALUES", "count_values", "holds_more", "measure"]

# In one field whose form is free, and in the arguments of all calls of a conversation.
MOST_VALUES = 20_000
_PLAIN = frozenset((list, tuple, int, float, bool, type(None)))  # to ask what is no mapping is slow


def holds_more(text: bytes, most: int) -> bool:
    """Return whether JSON holds more than so many values; see `count_values`."""
    if len(text) <= most or _count(text) <= most:  # commas inside strings are counted, too
        return False
    # A value has no more strings than itself and its name (and the outermost may be one), a string
    # has two quotes, and one behind a backslash is either no quote or the second of a string.
    if text.count(b'"') - text.count(b'\\"') > 4 * most + 2:
        return True
    return count_values(text) > most


def count_values(text: bytes) -> int:
    """Return how many values JSON holds; an empty object or list counts as two.

    The text need not be valid: it is looked at, not read.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _count(b"".join(text.split(b'"')[::2]))


def _count(text: bytes) -> int:
    """Return what begins a value: a comma, or what opens an object or a list."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def measure(value: Any, *, most: int) -> tuple[int, int]:
    """Return the characters of all strings in a value, keys among them, and how many values it has.

    Args:
        value: anything; what is no mapping, list, tuple or string is one value.
        most: values after which to stop: it may hold itself.
    """
    chars = count = 0
    stack = [value]
    while stack and count <= most:
        one = stack.pop()
        count += 1
        kind = type(one)
        if kind is str:
            chars += len(one)
        elif kind is dict or (kind not in _PLAIN and isinstance(one, Mapping)):
            chars += sum(len(key) for key in one if isinstance(key, str))
            stack += one.values()
        elif isinstance(one, list | tuple):
            stack += one
        elif isinstance(one, str):  # of a kind of its own
            chars += len(one)
    return chars, count
