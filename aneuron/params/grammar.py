"""`Grammar`: the form that an answer must have, as a value that requests can share.

Comes in: a schema, a regex, choices or Lark source, from the caller. Goes out: one text,
checked as far as it can be without a compiler; `aneuron/grammar.py` has that. Pure; runs in
the caller's task.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from aneuron.errors import InvalidRequest

__all__ = ["Grammar"]

# Making text of a schema this long takes 4 ms on the loop; schemas in use have 1 to 20 KiB. A
# regex of that length, or a terminal of Lark's, can take a compiler 27 s, and 4 GB.
_MAX_CHARS = 2**16
_MAX_SOURCE_CHARS = 2**13
_SOURCES = ("regex", "lark")
_MAX_CHOICES = 1024
_MAX_DEPTH = 64  # of a schema: compilers recurse, and so do we

_KINDS = ("json", "regex", "choice", "lark")
_FORMATS = ("text", "json_object", "json_schema")
_HELP = (
    'grammar must be a mapping such as {"json": schema}, {"regex": text}, {"choice": [texts]}, '
    '{"lark": text} or {"type": "json_schema", ...}'
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must have: what `SamplingParams.grammar` is made into.

    Attributes:
        kind: "json", "regex", "choice" or "lark".
        text: a JSON schema as JSON, a regex, a JSON list of choices, or Lark source.

    Raises:
        InvalidRequest: the text is too long, or none of its kind; `param` is "grammar". What
            only a compiler sees is raised when the request is first awaited.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        """Check and normalise the text, as far as it goes without a compiler."""
        if self.kind not in _KINDS:
            _refuse(f"{self.kind!r} is none of {', '.join(_KINDS)}")
        text = _check_text(self.kind, self.text)
        if self.kind == "json":
            text = _schema_text(text)
        elif self.kind == "choice":
            text = _choice_text(_parse(self.kind, text))
        object.__setattr__(self, "text", text)

    @classmethod
    def of(cls, form: Grammar | Mapping[str, Any]) -> Grammar | None:
        """Return the grammar that `grammar=` means.

        Args:
            form: a grammar, a mapping of one kind to its content, or a response format.

        Returns:
            It, or None for the response format "text".

        Raises:
            InvalidRequest: it means none.
        """
        if isinstance(form, Grammar):
            return form
        if not isinstance(form, Mapping):
            raise InvalidRequest(f"{_HELP}, not {type(form).__name__}", param="grammar")
        if "type" in form:
            return cls.from_response_format(form)
        if len(form) != 1 or next(iter(form)) not in _KINDS:
            names = ", ".join(repr(key) for key in list(form)[:8]) or "nothing"
            raise InvalidRequest(f"{_HELP}; this one has {names}", param="grammar")
        [(kind, content)] = form.items()
        if kind == "json":
            return cls(kind, _schema_text(content))
        if kind == "choice":
            return cls(kind, _choice_text(content))
        return cls(kind, content)

    @classmethod
    def json_object(cls) -> Self:
        """Return the grammar of any JSON object."""
        return cls("json", '{"type":"object"}')

    @classmethod
    def from_response_format(cls, form: Mapping[str, Any]) -> Self | None:
        """Return what a `response_format` of OpenAI's chat completions asks for.

        Args:
            form: `{"type": "text"}`, `{"type": "json_object"}`, or
                `{"type": "json_schema", "json_schema": {"schema": {...}}}`; `name`,
                `description` and `strict` beside the schema change nothing here.

        Returns:
            A grammar, or None for text.

        Raises:
            InvalidRequest: it is none of them; the message names the field.
        """
        if not isinstance(form, Mapping):
            _refuse(f"a response format must be an object, not {type(form).__name__}")
        kind = form.get("type")
        if kind not in _FORMATS:
            _refuse(
                f"type must be one of {', '.join(_FORMATS)}, not {kind!r:.100}; "
                'a schema goes into {"json": schema}'
            )
        if kind == "text":
            return None
        if kind == "json_object":
            return cls.json_object()
        inner = form.get("json_schema")
        if not isinstance(inner, Mapping):
            _refuse(f"json_schema must be an object with a schema, not {_name(inner)}")
        schema = inner.get("schema")
        if not isinstance(schema, Mapping):
            _refuse(f"json_schema.schema must be an object, not {_name(schema)}")
        return cls("json", _schema_text(schema, where="json_schema.schema"))


def _refuse(fault: str) -> NoReturn:
    raise InvalidRequest(f"grammar: {fault}", param="grammar")


def _name(value: object) -> str:
    return "missing" if value is None else type(value).__name__


def _check_text(where: str, text: object) -> str:
    """Return a text that can be encoded and is not too long."""
    if not isinstance(text, str):
        _refuse(f"{where} must be a string, not {type(text).__name__}")
    if not text:
        _refuse(f"{where} is empty")
    limit = _MAX_SOURCE_CHARS if where in _SOURCES else _MAX_CHARS
    if len(text) > limit:
        _refuse(f"{where} has {len(text)} characters; at most {limit} are allowed")
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        _refuse(f"{where} holds half a surrogate pair at character {fault.start}")
    return text


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        _refuse(f"{where} is nested too deeply")
    except ValueError as fault:
        _refuse(f"{where} is no JSON: {fault}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _schema_text(schema: object, *, where: str = "json") -> str:
    """Return a schema as compact JSON; its keys keep their order, which answers follow."""
    model_json_schema = getattr(schema, "model_json_schema", None)
    if isinstance(schema, type) and callable(model_json_schema):  # a pydantic model
        schema = model_json_schema()
    if isinstance(schema, str):
        schema = _parse(where, _check_text(where, schema))
    if schema is not True and not isinstance(schema, Mapping):
        _refuse(f"{where} must be a schema: an object, or true, not {_name(schema)}")
    schema = _plain(schema, where)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except ValueError as fault:  # an integer of thousands of digits
        _refuse(f"{where} is no JSON: {fault}")
    return _check_text(where, text)


def _choice_text(choices: object) -> str:
    if not isinstance(choices, list | tuple) or not all(isinstance(one, str) for one in choices):
        _refuse("choice must be a list of strings")
    if not 0 < len(choices) <= _MAX_CHOICES:
        _refuse(f"choice must hold 1..{_MAX_CHOICES} strings, not {len(choices)}")
    for choice in choices:
        _check_text("choice: a string", choice)
    return _check_text("choice", json.dumps(choices, ensure_ascii=False, separators=(",", ":")))


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a JSON value made of dicts and lists of our own."""
    if depth > _MAX_DEPTH:
        _refuse(f"{where} is nested deeper than {_MAX_DEPTH} levels")
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            _refuse(f"{where} holds a key that is no string")
        return {key: _plain(one, where, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, where, depth + 1) for one in value]
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _refuse(f"{where} holds {value!r:.100}, which is no JSON value")
