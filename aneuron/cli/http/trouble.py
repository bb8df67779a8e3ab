"""What is wrong with a server, in one line, and what to do about it.

Comes in: an error's body, whoever's server sent it; an address that nobody answers at. Goes out:
text for people, and errors with advice. Also the key that is sent where none is given.
"""

from __future__ import annotations

import html
import json
import os
import re
from typing import TYPE_CHECKING, Any

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.cli.http.client import Target

__all__ = ["REFUSALS", "environment_key", "message_of", "refused", "unreachable", "words"]

REFUSALS = (401, 403)
_KEY_VARIABLES = ("ANEURON_API_KEY", "OPENAI_API_KEY")
_PLACES = ("error", "message", "detail", "msg")  # where servers keep what they say
_UNSEEN = re.compile(r"(?is)<(head|script|style)\b.*?</\1\s*>")
_TAG = re.compile(r"(?s)<[^>]*>")
_MOST_CHARS = 300


def message_of(body: bytes) -> str:
    """Return what an error's body says, on one line: its message, or else its beginning."""
    text = body.decode(errors="replace")
    try:
        text = _message(json.loads(text))
    except (ValueError, RecursionError):
        if text.lstrip().startswith("<"):  # a page
            text = html.unescape(_TAG.sub(" ", _UNSEEN.sub(" ", text)))
    # It is shown at a terminal: nothing in it may steer that.
    text = "".join(one if one.isprintable() else " " for one in text)
    return " ".join(text.split())[:_MOST_CHARS]


def _message(found: Any) -> str:
    if isinstance(found, str):
        return found
    if isinstance(found, list) and found:
        return _message(found[0])
    if isinstance(found, dict):
        for name in _PLACES:
            if found.get(name):
                return _message(found[name])
    return json.dumps(found, ensure_ascii=False)


def words(error: Exception | str) -> str:
    """Return an error's words; a time-out has none of its own."""
    return "it took too long" if isinstance(error, TimeoutError) else str(error)


def unreachable(url: str, error: Exception | str) -> ConfigError:
    """Return the error for a server that cannot be reached."""
    message = f"{url} cannot be reached: {words(error)}. Does `aneuron serve` run?"
    return ConfigError(message, param="url")


def refused(target: Target) -> ConfigError:
    """Return the error for a server that refuses us without a key, or with this one."""
    key = "another key" if target.has_key else "a key"
    message = f"{target.url} wants {key}: --api-key, or the variable ANEURON_API_KEY"
    return ConfigError(message, param="url")


def environment_key() -> str | None:
    """Return the first key that the environment has; a server takes any one of its keys."""
    for name in _KEY_VARIABLES:
        if found := os.environ.get(name, "").split():
            return found[0]
    return None
