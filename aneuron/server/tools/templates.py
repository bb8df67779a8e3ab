"""`ToolTemplate`: how a family of models writes tool calls, and which one a model speaks.

Comes in: a name from the settings, or a tokenizer with a chat template. Goes out: one of a few
declarations that `parsers.py` reads and `forced.py` writes grammars of. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "TEMPLATES",
    "THINK",
    "THINK_END",
    "ToolTemplate",
    "chat_template_of",
    "response_template_of",
    "special_token_id",
    "template_name",
]

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolTemplate:
    """How calls stand in an answer: `begin`, `opens`, objects with `separator`, `closes`, `end`.

    An object has a "name" and its arguments, in any order. White space may stand between all
    of them.

    Attributes:
        name: what the settings call it.
        begin: the tag that calls begin with.
        end: the tag behind them; "" for none.
        opens: what opens a list of calls behind `begin`; "" where there is one call a tag.
        closes: what closes that list.
        separator: what stands between two objects; "" where there is one a tag.
        is_bare: an object at the start of the answer is a call, also without `begin`.
        arguments_key: the key of the arguments, for grammars; parsers take the usual ones.
        space: white space inside of the tags, for grammars.
        has_short_ids: the family's chat templates insist on ids of 9 letters and digits.
    """

    name: str
    begin: str
    end: str = ""
    opens: str = ""
    closes: str = ""
    separator: str = ""
    is_bare: bool = False
    arguments_key: str = "arguments"
    space: str = ""
    has_short_ids: bool = False


TEMPLATES: Mapping[str, ToolTemplate] = MappingProxyType(
    {
        one.name: one
        for one in (
            ToolTemplate("hermes", "<tool_call>", "</tool_call>", space="\n"),
            ToolTemplate(
                "llama3_json",
                "<|python_tag|>",
                separator=";",
                is_bare=True,
                arguments_key="parameters",
            ),
            ToolTemplate(
                "mistral",
                "[TOOL_CALLS]",
                opens="[",
                closes="]",
                separator=",",
                has_short_ids=True,
            ),
        )
    }
)

# In order: what a chat template must and must not hold. The same tags also surround calls that
# are no JSON (Qwen3-Coder, GLM-4.5, Mistral from 2025 on).
_SIGNS = (
    ("hermes", re.compile(r"<tool_call>"), re.compile(r"<function=|<arg_key>")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]"), re.compile(r"\[ARGS\]")),
    ("llama3_json", re.compile(r'<\|python_tag\|>|\\?"parameters\\?": '), None),
)


def chat_template_of(tokenizer: object) -> str:
    """Return a tokenizer's chat template; "" where it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else ""


def response_template_of(tokenizer: object) -> Mapping[str, Any] | None:
    """Return the checkpoint's own declaration of its answers, which few have so far."""
    template = getattr(tokenizer, "response_template", None)
    return template if isinstance(template, dict) else None


def template_name(name: str | None, tokenizer: object) -> str | None:
    """Return the name of the template of ours that a model's calls follow.

    Args:
        name: of one of `TEMPLATES`, or None or "auto": by the text of the chat template.
        tokenizer: the model's.

    Returns:
        It, or None where the chat template shows none.

    Raises:
        ConfigError: there is no template of this name; `param` is "tool_parser".
    """
    if name is not None and name != "auto":
        if name not in TEMPLATES:
            raise ConfigError(
                f"tool_parser must be one of {', '.join(TEMPLATES)} or auto, not {name!r:.100}",
                param="tool_parser",
            )
        return name
    text = chat_template_of(tokenizer)
    for found, sign, counter_sign in _SIGNS:
        if sign.search(text) and not (counter_sign and counter_sign.search(text)):
            return found
    return None


def special_token_id(tokenizer: object, text: str) -> int | None:
    """Return the id of a tag that is a special token; None where it is plain text."""
    inner = getattr(tokenizer, "tokenizer", None)
    if inner is None or (token_id := inner.token_to_id(text)) is None:
        return None
    token = inner.get_added_tokens_decoder().get(token_id)
    return token_id if token is not None and token.special else None
