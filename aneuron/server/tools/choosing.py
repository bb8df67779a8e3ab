"""`parser_for`: which parser an answer gets, and how the answer begins.

Comes in: the settings' name, the request's tools, the tokenizer. Goes out: a fresh parser for
one choice, or None where all text is content.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from aneuron.errors import InvalidRequest
from aneuron.server.tools.checkpoint import CheckpointParser
from aneuron.server.tools.parsers import TemplateParser
from aneuron.server.tools.request import tool_names
from aneuron.server.tools.templates import (
    TEMPLATES,
    THINK,
    THINK_END,
    chat_template_of,
    response_template_of,
    special_token_id,
    template_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aneuron.prompt import Tokenizer
    from aneuron.server.tools.pieces import OutputParser

__all__ = ["answer_follows", "opens_reasoning", "parser_for"]

_LOGGER = logging.getLogger("aneuron.server")
_PROBE = [{"role": "user", "content": "?"}]


def parser_for(
    name: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tokenizer: object,
    follows: str = "",
) -> OutputParser | None:
    """Return a parser for one choice of an answer.

    Args:
        name: of a template of ours; None or "auto": the checkpoint's own `response_template`
            where it has one, else by the text of its chat template.
        tools: that may be called, checked; without any, only reasoning is told apart.
        tokenizer: the model's.
        follows: the text that the answer follows, or its end: see `answer_follows`.

    Returns:
        It, or None where all text is content.

    Raises:
        ConfigError: there is no template of this name.
    """
    names = tool_names(tools)
    if name in {None, "auto"} and (own := _own_parser(tokenizer, tools, follows)) is not None:
        return CheckpointParser(own, tool_names=names)
    found = template_name(name, tokenizer) if names else None
    template = None if found is None else TEMPLATES[found]
    begins = opens_reasoning(follows)
    reasons = begins or THINK in chat_template_of(tokenizer)
    if template is None and not reasons:
        return None
    tags = [THINK, THINK_END] if reasons else []
    tags += [template.begin, template.end] if template is not None else []
    return TemplateParser(
        template,
        tool_names=names,
        reasons=reasons,
        begins_in_reasoning=begins,
        needs_special_tokens=any(special_token_id(tokenizer, tag) is not None for tag in tags),
    )


def _own_parser(tokenizer: object, tools: Sequence[Mapping[str, Any]], follows: str) -> Any:
    """Return transformers' parser of the checkpoint's declaration; None if there is none."""
    declared = response_template_of(tokenizer)
    if declared is None:
        return None
    try:
        from transformers.utils.chat_parsing import ResponseParser
    except ImportError:  # before 5.13
        return None
    try:
        return ResponseParser(declared, prefix=follows, tools=list(tools))
    except (KeyError, TypeError, ValueError) as fault:
        _LOGGER.warning("the checkpoint's response_template cannot be read: %s", fault)
        return None


def opens_reasoning(follows: str) -> bool:
    """Return whether an answer that follows this text begins inside reasoning."""
    text = follows.strip()
    return text.endswith(THINK) or (text.startswith(THINK) and THINK_END not in text)


def answer_follows(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    /,  # variables of templates may have any name
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **template_kwargs: Any,
) -> str:
    """Return the end of the prompt that an answer follows, as far as parsers need it.

    Where a final message is continued, it is that; else the end of another, tiny conversation
    put through the same template with the same arguments, so that nothing a user wrote counts.
    Templates that know no reasoning are not asked, which costs nothing.
    """
    template = chat_template_of(tokenizer)
    if THINK not in template and response_template_of(tokenizer) is None:
        return ""
    if continue_final_message:
        content = messages[-1].get("content")
        return content if isinstance(content, str) else ""
    try:
        return tokenizer.render_chat(
            _PROBE, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
    except InvalidRequest:  # a template that wants more than a question
        return ""
