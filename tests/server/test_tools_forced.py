"""Forced calls: grammars that let calls of the tools through, and nothing else."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron.errors import InvalidRequest
from aneuron.grammar import GrammarCompiler, GrammarMatcher, fill_bitmask
from aneuron.models.tokenizer import ByteTokenizer
from aneuron.server.tools import (
    TEMPLATES,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
    ToolChoice,
    forced_grammar,
    parser_for,
    validate_tool_choice,
    validate_tools,
)

if TYPE_CHECKING:
    from aneuron.params import Grammar

VOCAB, END = 262, 257
SPECIAL = {258: "[TOOL_CALLS]", 259: "<tool_call>", 260: "</tool_call>", 261: "</think>"}
TOOLS = validate_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds. " * 2000,
                "parameters": {
                    "type": "object",
                    "title": "Add",
                    "$defs": {"number": {"type": "integer", "minimum": 0, "maximum": 99}},
                    "properties": {
                        "title": {"$ref": "#/$defs/number", "description": "the first"},
                        "y": {"enum": ["a", {"description": "b"}]},
                    },
                    "required": ["title"],
                    "additionalProperties": False,
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "log-it", "parameters": {}}},
    ]
)
REQUIRED = validate_tool_choice("required", TOOLS)
ADD = '{"name": "add", "KEY": {"title": 7}}'
NOW = '{"name": "now", "KEY": {}}'


class AddedToken:
    """What `tokenizers` has for one."""

    special = True


class SpecialTokenizer(ByteTokenizer):
    """Bytes, and tags that are special tokens."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB)
        self.tokenizer = self

    def token_to_id(self, text: str) -> int | None:
        return {name: number for number, name in SPECIAL.items()}.get(text)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict.fromkeys(SPECIAL, AddedToken())

    def spell_vocabulary(self) -> tuple[list[bytes], frozenset[int]]:
        spelled, special = super().spell_vocabulary()
        return [*spelled, *(name.encode() for name in SPECIAL.values())], special | set(SPECIAL)


def forced(name: str, choice: ToolChoice = REQUIRED, **kwargs: Any) -> Grammar:
    grammar = forced_grammar(name, TOOLS, choice, **kwargs)
    assert grammar is not None
    assert grammar.kind == "lark"
    return grammar


async def allowed(matcher: GrammarMatcher) -> list[int]:
    [row] = await fill_bitmask([matcher], VOCAB)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


async def accepts(grammar: Grammar, text: str | list[int]) -> bool:
    compiler = GrammarCompiler(SpecialTokenizer(), VOCAB, (END,))
    try:
        matcher = await compiler.compile(grammar)
    finally:
        compiler.close()
    for token_id in text.encode() if isinstance(text, str) else text:
        matcher.advance(token_id)
        if matcher.error is not None:
            return False
    return matcher.is_stopped or END in await allowed(matcher)


def framed(name: str, *objects: str) -> str:
    """Calls as a template has them."""
    calls = [one.replace("KEY", TEMPLATES[name].arguments_key) for one in objects]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(calls)}]"
        case _:
            return "; ".join(calls)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_calls_of_the_tools_are_let_through(name: str) -> None:
    grammar = forced(name)
    assert await accepts(grammar, framed(name, ADD))
    assert await accepts(grammar, framed(name, ADD.replace('"title": 7', '"title":7,"y":"a"')))
    assert await accepts(grammar, framed(name, ADD, NOW, NOW))
    assert await accepts(grammar, framed(name, ADD.replace("7}", '7, "y": {"description": "b"}}')))
    assert await accepts(grammar, framed(name, '{"name": "log-it", "KEY": {"a": [1, null]}}'))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"name": "nope", "KEY": {}}',
        '{"name": "add", "KEY": {}}',
        ADD.replace("7", "100"),
        ADD.replace("7", '"7"'),
        ADD.replace("7", "7, 'z': 1"),
        ADD.replace('{"title": 7}', '{"title": 7'),
        NOW.replace("{}", '{"x": 1}'),
        '{"name": "log-it", "KEY": []}',
        ADD.replace("{", "{" + " " * 40),
    ],
)
async def test_anything_else_is_not(name: str, text: str) -> None:
    assert not await accepts(forced(name), framed(name, text))


@pytest.mark.parametrize("name", TEMPLATES)
async def test_one_call_where_no_more_are_wanted(name: str) -> None:
    for grammar in (
        forced(name, allows_parallel=False),
        forced(name, ToolChoice("required", ("now",), is_named=True)),
    ):
        assert await accepts(grammar, framed(name, NOW))
        assert not await accepts(grammar, framed(name, NOW, NOW))


async def test_no_more_than_sixteen_calls() -> None:
    assert await accepts(forced("hermes"), framed("hermes", *[NOW] * 16))
    assert not await accepts(forced("hermes"), framed("hermes", *[NOW] * 17))


@pytest.mark.parametrize("name", TEMPLATES)
async def test_only_tools_that_may_be_called(name: str) -> None:
    choice = ToolChoice("required", ("now",))
    assert await accepts(forced(name, choice), framed(name, NOW))
    assert not await accepts(forced(name, choice), framed(name, ADD))


@pytest.mark.parametrize("name", TEMPLATES)
async def test_reasoning_goes_before_calls(name: str) -> None:
    grammar = forced(name, begins_in_reasoning=True)
    assert await accepts(grammar, "Let <me> {see}.\n</think>\n\n" + framed(name, NOW))
    assert await accepts(grammar, "</think>" + framed(name, NOW))
    assert not await accepts(grammar, framed(name, NOW))
    assert not await accepts(grammar, "a</think>b" + framed(name, NOW))


async def test_tags_that_are_special_tokens() -> None:
    tokenizer = SpecialTokenizer()
    call = NOW.replace("KEY", "arguments").encode()
    grammar = forced("hermes", tokenizer=tokenizer)
    assert await accepts(grammar, [259, *b"\n", *call, *b"\n", 260])
    assert not await accepts(grammar, framed("hermes", NOW))
    grammar = forced("mistral", tokenizer=tokenizer, begins_in_reasoning=True)
    assert await accepts(grammar, [*b"Hm", 261, 258, *b"[", *call, *b"]"])
    assert not await accepts(grammar, [*b"Hm</think>", 258, *b"[", *call, *b"]"])
    assert parser_for("hermes", tools=TOOLS, tokenizer=tokenizer).needs_special_tokens  # type: ignore[union-attr]
    assert not parser_for("hermes", tools=TOOLS, tokenizer=ByteTokenizer()).needs_special_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begins", [False, True])
async def test_what_a_random_model_writes_is_read_back(name: str, begins: bool) -> None:
    compiler = GrammarCompiler(ByteTokenizer(vocab_size=VOCAB), VOCAB, (END,))
    start = await compiler.compile(forced(name, begins_in_reasoning=begins))
    compiler.close()
    for seed in range(4):
        text = await written(start.copy(), random.Random(seed), b"</think>" if begins else b"")
        parser = parser_for(
            name, tools=TOOLS, tokenizer=ByteTokenizer(), follows="<think>" if begins else ""
        )
        assert parser is not None
        pieces = [one for char in text for one in parser.feed(char)] + parser.close()
        assert not any(isinstance(one, Content | Reasoning) for one in pieces), text
        ends = [one for one in pieces if isinstance(one, CallEnded)]
        assert ends
        assert all(one.is_complete for one in ends)
        for begun in (one for one in pieces if isinstance(one, CallBegun)):
            parts = [one.text for one in pieces if isinstance(one, CallArguments)
                     and one.index == begun.index]  # fmt: skip
            arguments = json.loads("".join(parts))
            assert (begun.name, begun.name == "add") in {
                ("add", isinstance(arguments.get("title"), int)), ("now", bool(arguments)),
                ("log-it", False),
            }  # fmt: skip


async def written(matcher: GrammarMatcher, chance: random.Random, begin: bytes) -> str:
    """An answer drawn from what is allowed; it ends, and closes strings, when it may."""
    spelled = bytearray(begin)
    for byte in begin:
        matcher.advance(byte)
    for _ in range(1500):
        if matcher.is_stopped:
            return spelled.decode()
        ids = await allowed(matcher)
        if END in ids and chance.random() < 0.5:
            return spelled.decode()
        ids = [one for one in ids if one < 128]
        closing = [one for one in ids if one in b'"}]']
        spelled.append(chance.choice(closing if closing and chance.random() < 0.6 else ids))
        matcher.advance(spelled[-1])
        assert matcher.error is None
    pytest.fail(f"no end: {spelled.decode()[-200:]}")


def test_nothing_is_forced_where_calls_are_free() -> None:
    for mode in ("none", "auto"):
        assert forced_grammar(None, TOOLS, ToolChoice(mode, ("now",))) is None


def test_an_unknown_form_cannot_be_forced() -> None:
    with pytest.raises(InvalidRequest, match="tool_parser") as caught:
        forced_grammar(None, TOOLS, REQUIRED)
    assert caught.value.param == "tool_choice"


def test_schemas_may_be_too_long() -> None:
    properties = {f"property_{number}": {"type": "string"} for number in range(400)}
    tools = [{"type": "function", "function": {
        "name": "f", "parameters": {"type": "object", "properties": properties}}}]  # fmt: skip
    with pytest.raises(InvalidRequest, match="at most") as caught:
        forced_grammar("hermes", tools, ToolChoice("required", ("f",)))
    assert caught.value.param == "tools"
