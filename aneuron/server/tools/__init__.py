"""Tool calls and reasoning: told apart in an answer's text, checked in requests, and forced.

A request's `tools` and `tool_choice` go through `validate_tools` and `validate_tool_choice`;
`forced_grammar` gives the form of an answer that must call; `parser_for` gives what takes the
answer apart into pieces. How models write calls stands in `templates.py`.
"""

from __future__ import annotations

from aneuron.server.tools.choosing import answer_follows, opens_reasoning, parser_for
from aneuron.server.tools.forced import forced_grammar
from aneuron.server.tools.pieces import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    OutputParser,
    Piece,
    Reasoning,
)
from aneuron.server.tools.request import (
    ToolChoice,
    template_messages,
    tool_names,
    validate_tool_choice,
    validate_tools,
)
from aneuron.server.tools.templates import TEMPLATES, ToolTemplate, template_name

__all__ = [
    "TEMPLATES",
    "CallArguments",
    "CallBegun",
    "CallEnded",
    "Content",
    "OutputParser",
    "Piece",
    "Reasoning",
    "ToolChoice",
    "ToolTemplate",
    "answer_follows",
    "forced_grammar",
    "opens_reasoning",
    "parser_for",
    "template_messages",
    "template_name",
    "tool_names",
    "validate_tool_choice",
    "validate_tools",
]
