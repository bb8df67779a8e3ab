"""`Piece`: what an answer consists of, and `OutputParser`: what takes it apart.

Comes in: an answer's text, in deltas. Goes out: pieces, from which the endpoints make chunks.
Pure; a parser belongs to one choice of one request and runs in the task that writes the answer.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "CallArguments",
    "CallBegun",
    "CallEnded",
    "Content",
    "OutputParser",
    "Piece",
    "Reasoning",
    "make_call_id",
]

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Content:
    """Text that the user reads."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call of which the name is known.

    Attributes:
        index: of the call in this answer, from 0.
        call_id: unique; a client sends it back with the tool's result.
        name: one of the request's tools.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of a call's arguments as the model wrote them: JSON text of an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call; each that begun has one.

    Attributes:
        index: of the call.
        is_complete: False where the answer ended, or turned into something else, inside it.
    """

    index: int
    is_complete: bool


Piece = Content | Reasoning | CallBegun | CallArguments | CallEnded


class OutputParser(Protocol):
    """Takes an answer apart as it arrives; however the text is cut, the pieces join to the same.

    It never raises, whatever the model writes.

    Attributes:
        needs_special_tokens: its tags are special tokens, so that it needs the text of a request
            with `skip_special_tokens=False`.
    """

    needs_special_tokens: bool

    def feed(self, text: str) -> list[Piece]:
        """Return what the next text of the answer completes."""

    def close(self) -> list[Piece]:
        """Return what was held back, once the answer has ended."""


def make_call_id(*, is_short: bool = False) -> str:
    """Return a new id of a call: `call_` and 24 digits, or 9 characters where templates ask so."""
    if is_short:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
