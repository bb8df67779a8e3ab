"""`forced_grammar`: the grammar of an answer that must call a tool.

Comes in: checked tools and what must be called. Goes out: a `Grammar` in Lark with a JSON schema
for each tool's arguments, or None where the answer is free. Pure.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aneuron.errors import InvalidRequest
from aneuron.params.grammar import Grammar
from aneuron.server.tools.templates import TEMPLATES, THINK_END, special_token_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aneuron.server.tools.request import ToolChoice
    from aneuron.server.tools.templates import ToolTemplate

__all__ = ["forced_grammar"]

_MAX_CALLS = 16  # else a model that likes to call would go on up to max_tokens
_NOTES = frozenset(("$comment", "default", "description", "examples", "title"))
_SCHEMAS = frozenset(("$defs", "definitions", "patternProperties", "properties"))
_VALUES = frozenset(("const", "enum"))
# White space of any length is no form at all to a model that likes it; most were trained on one
# space, as Python writes it.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_grammar(
    template_name: str | None,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    allows_parallel: bool = True,
    begins_in_reasoning: bool = False,
    tokenizer: object = None,
) -> Grammar | None:
    """Return the form of an answer that is a call, or calls, of the tools that may be called.

    Args:
        template_name: of one of `TEMPLATES`: how the model writes calls.
        tools: checked.
        choice: checked.
        allows_parallel: up to 16 calls; else, and for a named tool, exactly one.
        begins_in_reasoning: any text up to `</think>` comes first.
        tokenizer: the model's; tags that are special tokens there are asked for as such.

    Returns:
        It; None where nothing is forced.

    Raises:
        InvalidRequest: there is no template, so that nobody knows what a call looks like
            (`param` is "tool_choice"); or the schemas are too long (`param` is "tools").
    """
    if choice.mode != "required":
        return None
    if template_name is None:
        raise InvalidRequest(
            "tool_choice can be none or auto with this model: its chat template shows no form of "
            f"calls that is known; the server's tool_parser can be {', '.join(TEMPLATES)}",
            param="tool_choice",
        )
    template = TEMPLATES[template_name]
    most = _MAX_CALLS if allows_parallel and not choice.is_named else 1
    start = _reasoning(tokenizer) if begins_in_reasoning else ["start: calls"]
    chosen = [one["function"] for one in tools if one["function"]["name"] in choice.names]
    rules = [*start, *_answer(template, most, tokenizer), *_objects(template, chosen)]
    text = "\n".join(rules)
    try:
        return Grammar("lark", text)
    except InvalidRequest as fault:
        raise InvalidRequest(f"tools: their schemas as a {fault}", param="tools") from fault


def _reasoning(tokenizer: object) -> list[str]:
    if (token_id := special_token_id(tokenizer, THINK_END)) is not None:
        return [f"start: TEXT <[{token_id}]> SPACE calls", "TEXT: /(?s:.*)/", "SPACE: /\\s{0,4}/"]
    think = f"think[suffix={_quote(THINK_END)}]: /(?s:.*)/"
    return ["start: think SPACE calls", think, "SPACE: /\\s{0,4}/"]


def _answer(template: ToolTemplate, most: int, tokenizer: object) -> list[str]:
    """Return the rules from `calls` down to `object`."""
    begin = "" if template.is_bare else _tag(template.begin, template.space, tokenizer)
    end = _tag(template.end, "", tokenizer)
    more = f"{{0,{most - 1}}}"
    if template.separator:
        rest = f'({_quote(template.separator)} " "? object){more}' if most > 1 else ""
        parts = [begin, _quote(template.opens), "object", rest, _quote(template.closes), end]
        return [f"calls: {_sequence(parts)}"]
    rest = f"({_quote(template.space)} call){more}" if most > 1 else ""
    one = _sequence([begin, "object", _quote(template.space), end])
    return [f"calls: {_sequence(['call', rest])}", f"call: {one}"]


def _objects(template: ToolTemplate, functions: list[Mapping[str, Any]]) -> Iterable[str]:
    yield "object: " + " | ".join(f"object_{number}" for number in range(len(functions)))
    for number, function in enumerate(functions):
        opening = f'{{"name": "{function["name"]}", "{template.arguments_key}": '
        schema = json.dumps(_schema(function), ensure_ascii=False, separators=(",", ":"))
        yield f'object_{number}: {_quote(opening)} arguments_{number} "}}"'
        yield f"arguments_{number}: %json {schema}"


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    parameters = _NO_PARAMETERS if parameters is None else _without_notes(parameters)
    schema: dict[str, Any] = {"type": "object"} | parameters
    return schema | {"x-guidance": _SPACING}


def _without_notes(schema: Any) -> Any:
    """Return a schema without what does not change its meaning, since its length is limited."""
    if isinstance(schema, list):
        return [_without_notes(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _SCHEMAS and isinstance(value, dict):
            kept[key] = {name: _without_notes(one) for name, one in value.items()}
        elif key not in _NOTES:
            kept[key] = value if key in _VALUES else _without_notes(value)
    return kept


def _tag(text: str, space: str, tokenizer: object) -> str:
    """Return a tag in Lark: its token where it is a special one, else its text."""
    if (token_id := special_token_id(tokenizer, text)) is None:
        return _quote(text + space)
    return _sequence([f"<[{token_id}]>", _quote(space)])


def _quote(text: str) -> str:
    return json.dumps(text) if text else ""


def _sequence(parts: list[str]) -> str:
    return " ".join(part for part in parts if part)
