"""What a request says about tools: faults are named by their field."""

from __future__ import annotations

from typing import Any

import pytest

from aneuron.errors import InvalidRequest
from aneuron.server.tools import (
    ToolChoice,
    template_messages,
    tool_names,
    validate_tool_choice,
    validate_tools,
)


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [tool("f"), tool("g", description="d", strict=True, parameters={"type": "object"})]


def test_sound_tools_come_back_as_they_are() -> None:
    assert validate_tools(TOOLS) == TOOLS
    assert validate_tools([tool("a" * 64), tool("A-_9", parameters=None)])
    assert validate_tools(None) == validate_tools([]) == []
    assert tool_names(TOOLS) == ("f", "g")
    assert len(validate_tools([tool(f"f{number}") for number in range(128)])) == 128


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([tool(f"f{number}") for number in range(129)], "tools"),
        ([tool(), "f"], "tools[1]"),
        ([{"function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "web_search", "function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool(None)], "tools[0].function.name"),
        ([tool("")], "tools[0].function.name"),
        ([tool("a b")], "tools[0].function.name"),
        ([tool("é")], "tools[0].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool("a" * 65)], "tools[0].function.name"),
        ([tool("f"), tool("g"), tool("f")], "tools[2].function.name"),
        ([tool(description=1)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type"),
        ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties"),
        ([tool(description="d" * 2**17)], "tools"),
    ],
)
def test_a_fault_in_tools_is_named(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_tools(tools)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


@pytest.mark.parametrize(
    ("choice", "mode", "names", "is_named"),
    [
        (None, "auto", ("f", "g"), False),
        ("none", "none", (), False),
        ("auto", "auto", ("f", "g"), False),
        ("required", "required", ("f", "g"), False),
        (tool("g"), "required", ("g",), True),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("g")] * 2}},
            "auto",
            ("g",),
            False,
        ),
    ],
)
def test_what_may_be_called(choice: Any, mode: str, names: Any, is_named: bool) -> None:
    assert validate_tool_choice(choice, TOOLS) == ToolChoice(mode, names, is_named=is_named)


def test_without_tools_nothing_is_called() -> None:
    assert validate_tool_choice(None, []) == ToolChoice("none", ())
    assert validate_tool_choice("auto", []) == ToolChoice("auto", ())


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("required", []),
        ("any", TOOLS),
        (1, TOOLS),
        ({}, TOOLS),
        (tool("h"), TOOLS),
        (tool(["f"]), TOOLS),
        ({"type": "function"}, TOOLS),
        ({"type": "allowed_tools"}, TOOLS),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, TOOLS),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [tool()]}}, TOOLS),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}}, TOOLS),
    ],
)
def test_a_fault_in_tool_choice_is_named(choice: Any, tools: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_tool_choice(choice, tools)
    assert caught.value.param == "tool_choice"


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_earlier_arguments_become_objects() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call('{"x": 1}'), call("")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    made = template_messages(messages)
    assert made[0] is messages[0]
    assert made[2] is messages[2]
    assert made[1] == {
        "role": "assistant", "content": None, "tool_calls": [call({"x": 1}), call({})],
    }  # fmt: skip
    assert messages[1]["tool_calls"] == [call('{"x": 1}'), call("")]


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ({}, "messages[0].tool_calls"),
        ([1], "messages[0].tool_calls[0].function"),
        ([{"function": {}}], "messages[0].tool_calls[0].function"),
        ([call("{}"), call("{")], "messages[0].tool_calls[1].function.arguments"),
        ([call("[1]")], "messages[0].tool_calls[0].function.arguments"),
        ([call("[" * 100_000)], "messages[0].tool_calls[0].function.arguments"),
        ([call(1)], "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_a_fault_in_earlier_calls_is_named(calls: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_messages([{"role": "assistant", "tool_calls": calls}])
    assert caught.value.param == param
