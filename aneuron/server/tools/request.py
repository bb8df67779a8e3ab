"""What a request says about tools: checked, and made fit for chat templates.

Comes in: `tools`, `tool_choice` and `messages` of a request's body, as builtins. Goes out: the
same, checked; errors name the field. Pure; runs in the endpoint's task.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from aneuron.errors import InvalidRequest
from aneuron.params.sizes import MOST_VALUES, count_values, holds_more

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "ToolChoice",
    "template_messages",
    "tool_names",
    "validate_tool_choice",
    "validate_tools",
]

_MAX_TOOLS = 128
# Rendering them is Python on the loop: 2 to 3 ms for this many.
_MAX_CHARS = 2**17
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the answer may and must call.

    Attributes:
        mode: "none", "auto" (calls or text) or "required" (calls alone).
        names: of the tools that may be called.
        is_named: one tool was asked for by its name, which means exactly one call.
    """

    mode: str
    names: tuple[str, ...]
    is_named: bool = False


def validate_tools(tools: object) -> list[dict[str, Any]]:
    """Return a request's tools if each is a function with a name and a schema of an object.

    Args:
        tools: as it came; None is none.

    Raises:
        InvalidRequest: one is not, two have the same name, there are more than 128, or they are
            too long; `param` is such as "tools[0].function.name".
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        _refuse("tools", f"must be a list, not {type(tools).__name__}")
    if len(tools) > _MAX_TOOLS:
        _refuse("tools", f"has {len(tools)} entries; at most {_MAX_TOOLS} are allowed")
    seen: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{index}]")
        if name in seen:
            _refuse(f"tools[{index}].function.name", f"is that of tools[{seen[name]}] too")
        seen[name] = index
    if (num_chars := len(json.dumps(tools))) > _MAX_CHARS:
        _refuse("tools", f"has {num_chars} characters; at most {_MAX_CHARS} are allowed")
    return tools


def _check_tool(tool: object, where: str) -> str:
    if not isinstance(tool, dict):
        _refuse(where, f"must be an object, not {type(tool).__name__}")
    if tool.get("type") != "function":
        _refuse(f"{where}.type", f'must be "function", not {tool.get("type")!r:.100}')
    where = f"{where}.function"
    function = tool.get("function")
    if not isinstance(function, dict):
        _refuse(where, f"must be an object, not {type(function).__name__}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(f"{where}.name", "must be 1 to 64 letters, digits, underscores or dashes")
    if not isinstance(function.get("description"), str | None):
        _refuse(f"{where}.description", "must be a string")
    if not isinstance(function.get("strict"), bool | None):
        _refuse(f"{where}.strict", "must be true or false")
    _check_parameters(function.get("parameters"), f"{where}.parameters")
    return name


def _check_parameters(parameters: object, where: str) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        _refuse(where, f"must be a schema, not {type(parameters).__name__}")
    if parameters.get("type", "object") != "object":
        _refuse(f"{where}.type", 'must be "object"')
    if not isinstance(parameters.get("properties", {}), dict):
        _refuse(f"{where}.properties", "must be an object")


def tool_names(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of checked tools."""
    return tuple(tool["function"]["name"] for tool in tools)


def validate_tool_choice(choice: object, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return what a request's `tool_choice` means.

    Args:
        choice: as it came: a mode; `{"type": "function", "function": {"name": ...}}`; or
            `{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`. None is
            "auto" with tools, and "none" without.
        tools: checked.

    Raises:
        InvalidRequest: it is nothing of these, or names a tool that is not there; `param` is
            "tool_choice".
    """
    names = tool_names(tools)
    if choice is None:
        choice = "auto" if names else "none"
    if isinstance(choice, str) and choice in _MODES:
        if choice == "required" and not names:
            _refuse("tool_choice", '"required" needs tools')
        return ToolChoice(choice, names if choice != "none" else ())
    if isinstance(choice, dict) and choice.get("type") == "function":
        return ToolChoice("required", (_named(choice, names),), is_named=True)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), names)
    return _refuse(
        "tool_choice",
        f"must be one of {', '.join(_MODES)}, or name a function, not {choice!r:.100}",
    )


def _named(choice: object, names: tuple[str, ...]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        _refuse("tool_choice", f"names {name!r:.100}, which is none of the tools")
    return name


def _allowed(choice: object, names: tuple[str, ...]) -> ToolChoice:
    mode = choice.get("mode") if isinstance(choice, dict) else None
    tools = choice.get("tools") if isinstance(choice, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        _refuse("tool_choice", "allowed_tools needs a mode, auto or required, and a list of tools")
    return ToolChoice(mode, tuple(dict.fromkeys(_named(one, names) for one in tools)))


def template_messages(messages: list[Any]) -> list[Any]:
    """Return messages in which the arguments of earlier calls are objects, as templates want them.

    On the wire they are JSON text, which a template would quote once more.

    Raises:
        InvalidRequest: the arguments of a call are not the JSON of an object, or those of all hold
            too many values; `param` is such as "messages[1].tool_calls[0].function.arguments".
    """
    _check_arguments(_arguments(messages))
    return [_with_objects(one, f"messages[{index}]") for index, one in enumerate(messages)]


def _check_arguments(arguments: Iterable[tuple[str, str]]) -> None:
    """Check how much calls hold, before it is made into objects.

    Args:
        arguments: of each call: its path, and its JSON.

    Raises:
        InvalidRequest: more than 20,000 values in all; `param` is the path of the first beyond.
    """
    given = [(where, text.encode("utf-8", "surrogatepass")) for where, text in arguments]
    if not holds_more(b",".join([text for _, text in given]), MOST_VALUES):
        return
    num_values = 0
    for where, text in given:
        num_values += 1 + count_values(text)
        if num_values > MOST_VALUES:
            _refuse(where, f"and those before hold more than {MOST_VALUES} JSON values")


def _arguments(messages: list[Any]) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for at, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            given = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(given, str):
                yield f"messages[{index}].tool_calls[{at}].function.arguments", given


def _with_objects(message: Any, where: str) -> Any:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if calls is None:
        return message
    if not isinstance(calls, list):
        _refuse(f"{where}.tool_calls", "must be a list")
    read = [_with_object(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message | {"tool_calls": read}


def _with_object(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(f"{where}.function", "needs a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments", "must be the JSON of an object")
    return call | {"function": function | {"arguments": arguments}}


def _refuse(param: str, fault: str) -> NoReturn:
    raise InvalidRequest(f"{param} {fault}", param=param)
