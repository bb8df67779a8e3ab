"""Parsers: the same pieces however an answer is cut, as early as can be, and never an error."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser

from aneuron.errors import ConfigError, InvalidRequest
from aneuron.models.tokenizer import ByteTokenizer
from aneuron.server.tools import (
    TEMPLATES,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    OutputParser,
    Piece,
    Reasoning,
    answer_follows,
    opens_reasoning,
    parser_for,
    template_name,
)
from aneuron.server.tools.checkpoint import CheckpointParser
from aneuron.server.tools.parsers import TemplateParser

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("f", "get_weather")
SIMPLE = '{"name": "f", "arguments": {"x": 1}}'
CALL = [("call", 0, "f"), ("arguments", 0, '{"x": 1}'), ("end", 0, True)]
# Of a tokenizer of transformers 5.24 (cli/serving), shortened.
DECLARED = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def template_parser(name: str | None, *, begins: bool = False) -> TemplateParser:
    template = None if name is None else TEMPLATES[name]
    return TemplateParser(template, tool_names=NAMES, begins_in_reasoning=begins)


def checkpoint_parser(follows: str = "") -> CheckpointParser:
    return CheckpointParser(ResponseParser(DECLARED, prefix=follows), tool_names=NAMES)


def plain(piece: Piece) -> tuple[Any, ...]:
    match piece:
        case Content(text):
            return ("content", text)
        case Reasoning(text):
            return ("reasoning", text)
        case CallBegun(index, _, name):
            return ("call", index, name)
        case CallArguments(index, text):
            return ("arguments", index, text)
        case CallEnded(index, is_complete):
            return ("end", index, is_complete)


def joined(pieces: list[Piece]) -> list[tuple[Any, ...]]:
    """Pieces without ids, neighbours of a kind put together."""
    found: list[tuple[Any, ...]] = []
    for one in map(plain, pieces):
        assert one[-1] != "", "an empty piece"
        if found and one[0] in {"content", "reasoning", "arguments"} and found[-1][:-1] == one[:-1]:
            found[-1] = (*one[:-1], found[-1][-1] + one[-1])
        else:
            found.append(one)
    return found


def parsed(parser: OutputParser, *deltas: str) -> list[tuple[Any, ...]]:
    pieces = [piece for delta in deltas for piece in parser.feed(delta)]
    return joined(pieces + parser.close())


def hermes(text: str) -> list[tuple[Any, ...]]:
    return parsed(template_parser("hermes"), text)


# ── however it is cut ───────────────────────────────────────────────────────────────────

# What matters to parsers, and what comes near it.
FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<think>", "</think>",
    "<tool_", "</tool", "</", "<", "{", "}", "[", "]", ",", ";", ":", '"', "\\", "\\u0022", "é",
    " ", "\n", "\n\n", " " * 17, "x", "1", '"name"', '"arguments"', '"parameters"', '"f"',
    '"nope"', '"id"', '{"name": "f", "arguments": ', '{"arguments": {"x": "}"}, "name": "f"}',
    '{"x": "a\\"}<b"}', SIMPLE, '{"name": "f", "parameters": {}}', f"<tool_call>\n{SIMPLE}\n",
    '"' + "n" * 300 + '"',
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)
MAKERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": lambda: template_parser("hermes"),
    "hermes, begun": lambda: template_parser("hermes", begins=True),
    "llama3_json": lambda: template_parser("llama3_json"),
    "mistral": lambda: template_parser("mistral"),
    "reasoning": lambda: template_parser(None),
    "checkpoint": checkpoint_parser,
}


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("kind", MAKERS)
@given(deltas=cut_texts())
@example(deltas=["<tool_call>", '{"name"', ': "f"', ', "arguments": {"x', '": "\\', '""}', "}"])
@example(deltas=['<tool_call>{"name": "f", "arguments": {"a": 1</tool_', "call> b"])
@example(deltas=["<think>a", " " * 17, "</think>b"])
@example(deltas=[" ", "\n" * 16, "<think>a"])
def test_any_cut_gives_the_same_pieces(kind: str, deltas: list[str]) -> None:
    whole = parsed(MAKERS[kind](), "".join(deltas))
    assert parsed(MAKERS[kind](), *deltas) == whole
    assert parsed(MAKERS[kind](), *"".join(deltas)) == whole


@pytest.mark.parametrize("kind", MAKERS)
@given(text=TEXTS)
def test_calls_are_whole_and_numbered(kind: str, text: str) -> None:
    pieces = parsed(MAKERS[kind](), text)
    calls = [one for one in pieces if one[0] in {"call", "arguments", "end"}]
    for index, call in enumerate(one for one in calls if one[0] == "call"):
        assert call[1] == index
        assert call[2] in NAMES
        kinds = [one[0] for one in calls if one[1] == index]
        assert kinds in (["call", "arguments", "end"], ["call", "end"])
    assert [one[1] for one in calls] == sorted(one[1] for one in calls)


@pytest.mark.parametrize("kind", ["hermes", "mistral", "reasoning", "llama3_json"])
@given(text=st.text(alphabet=" \n<>[]{}|/abctolT_AL", max_size=60))
def test_plain_text_is_not_changed(kind: str, text: str) -> None:
    assert parsed(MAKERS[kind](), text) == ([("content", text)] if text else [])


@given(deltas=cut_texts())
def test_nothing_is_lost_but_tags_and_space_beside_them(deltas: list[str]) -> None:
    """Every letter of the answer is in some piece, in order, or belongs to a call's frame."""
    text = "".join(deltas)
    pieces = parsed(template_parser("hermes"), *deltas)
    at = 0
    for one in pieces:
        if one[0] not in {"content", "reasoning"}:
            continue
        found = text.find(one[1], at)
        assert found >= 0, (one, text)
        at = found + len(one[1])
    if not any(one[0] == "call" for one in pieces):
        left = "".join(one[1] for one in pieces)
        assert re.sub(r"\s|</?think>", "", text) == re.sub(r"\s|</?think>", "", left)


@given(deltas=st.lists(st.sampled_from(["a", " ", "\n", "<", "<t", "tool", "_call", ">x", "<<"])))
def test_no_more_is_held_back_than_may_become_a_tag(deltas: list[str]) -> None:
    parser = template_parser("hermes")
    parser.feed("a")
    text, given_out = "", ""
    for delta in deltas:
        text += delta
        given_out += "".join(one.text for one in parser.feed(delta) if isinstance(one, Content))
        if "<tool_call>" in text:
            return
        held = text[len(given_out) :]
        assert text.startswith(given_out)
        assert "<tool_call>".startswith(held.lstrip(" \n"))
        assert len(held) - len(held.lstrip(" \n")) <= 16


# ── hermes ──────────────────────────────────────────────────────────────────────────────


def test_a_call_streams_as_it_comes() -> None:
    parser = template_parser("hermes")
    assert parser.feed('<tool_call>\n{"name": "f", "argu') == []
    [begun, arguments] = parser.feed('ments": {"x": "a')
    assert isinstance(begun, CallBegun)
    assert re.fullmatch(r"call_[0-9a-f]{24}", begun.call_id)
    assert (begun.index, begun.name) == (0, "f")
    assert arguments == CallArguments(0, '{"x": "a')
    assert parser.feed("\\") == [CallArguments(0, "\\")]
    assert parser.feed('"}') == [CallArguments(0, '"}')]
    assert parser.feed('", "y": {}}') == [CallArguments(0, '", "y": {}}')]
    assert parser.feed("}") == [CallEnded(0, is_complete=True)]
    assert parser.feed("\n</tool_call>") == []
    assert parser.close() == []


def test_arguments_pass_unchanged() -> None:
    arguments = '{ "a" : [1, {"b": "}]</tool_call>\\\\"}],\n"é":"\\u00e9", "n": -1.5e3 }'
    text = f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>'
    assert hermes(text)[1] == ("arguments", 0, arguments)


def test_several_calls_with_text_around() -> None:
    call = f"<tool_call>\n{SIMPLE}\n</tool_call>\n"
    text = f"Let me see.\n\n{call}{call}Done."
    second = [(one[0], 1, one[2]) for one in CALL]
    assert hermes(text) == [("content", "Let me see."), *CALL, *second, ("content", "Done.")]


def test_ids_are_unique() -> None:
    pieces = template_parser("hermes").feed(f"<tool_call>{SIMPLE}</tool_call>" * 50)
    assert len({one.call_id for one in pieces if isinstance(one, CallBegun)}) == 50


def test_arguments_before_the_name_wait_for_it() -> None:
    parser = template_parser("hermes")
    assert parser.feed('<tool_call>{"arguments": {"x": 1}, "name": "') == []
    assert joined(parser.feed('f", "id": 3}</tool_call>') + parser.close()) == CALL


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f"}',
        '{"type": "function", "id": "a,}", "name": "f"}',
        '{"id": [1, {"a": "]"}], "index": 0, "name" : "f" , }',
        '{"name": "\\u0066"}',
    ],
)
def test_a_call_may_lack_arguments_and_have_other_keys(text: str) -> None:
    call = [("call", 0, "f"), ("arguments", 0, "{}"), ("end", 0, True)]
    assert hermes(f"<tool_call>\n{text}\n</tool_call>") == call


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        '["f"]',
        "{}",
        '{"name": 1}',
        '{"name": null, "arguments": {}}',
        '{"name": "nope", "arguments": {"x": 1}}',
        '{"name": "f", "arguments": "text"}',
        '{"name": "f", "arguments": null}',
        '{"arguments": {"x": 1}}',
        '{"arguments": {"x": 1}, "arguments": {}, "name": "f"}',
        '{"answer": 42, "name": "f"}',
        "{name: f}",
        '{"name" "f"}',
        '{"name": "f" "arguments": {}}',
        '{"name": "\\x"}',
        '{"id": "a</tool_call>',
        f'{{"name": "{"f" * 300}"}}',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    text = f"a\n<tool_call>\n{text}\n</tool_call> b"
    assert hermes(text) == [("content", text)]


def test_a_name_without_end_is_text_at_once() -> None:
    parser = template_parser("hermes")
    parser.feed('<tool_call>{"name": "')
    for _ in range(256):
        assert parser.feed("f") == []
    assert joined(parser.feed("ff")) == [("content", '<tool_call>{"name": "' + "f" * 258)]
    assert parser.feed("f") == [Content("f")]


def test_what_is_kept_is_bounded() -> None:
    parser = template_parser("hermes")
    parser.feed('<tool_call>{"arguments": {"x": "')
    held = 0
    while not (pieces := parser.feed("y" * 1000)):
        held += 1000
        assert held < 2**16
    [(kind, text)] = joined(pieces)
    assert kind == "content"
    assert len(text) > held
    assert parser.feed("y") == [Content("y")]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ('{"name": "f", "arguments": {"x": 1', []),
        ('{"name": "f", "arguments": {"x": 1</tool_', []),
        ('{"name": "f", "arguments": {"x": 1</tool_call>\nb', [("content", "b")]),
        ('{"name": "f", "arguments": {"x": 1}, oops', None),
    ],
)
def test_a_call_that_breaks_off_keeps_what_was_streamed(text: str, rest: Any) -> None:
    pieces = hermes(f"a<tool_call>{text}")
    assert pieces[:2] == [("content", "a"), ("call", 0, "f")]
    if rest is None:
        assert pieces[2:] == [("arguments", 0, '{"x": 1}'), ("end", 0, False), ("content", "oops")]
    else:
        assert pieces[2:] == [("arguments", 0, '{"x": 1'), ("end", 0, False), *rest]


def test_a_call_after_a_broken_one_is_found() -> None:
    text = f"<tool_call>oops</tool_call><tool_call>{SIMPLE}</tool_call>"
    assert hermes(text) == [("content", "<tool_call>oops</tool_call>"), *CALL]


@pytest.mark.parametrize("end", ["", "\n", "</tool", "</tool_call>"])
def test_the_end_tag_may_be_cut_off(end: str) -> None:
    assert hermes(f"<tool_call>{SIMPLE}{end}") == CALL


def test_a_smaller_sign_in_arguments_is_passed_on() -> None:
    pieces = hermes('<tool_call>{"name": "f", "arguments": {a <b< c}}</tool_call>')
    assert pieces == [("call", 0, "f"), ("arguments", 0, "{a <b< c}"), ("end", 0, True)]


# ── the other templates ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("begin", ["", "\n", "<|python_tag|>", "<think>a</think>\n"])
def test_llama_calls_are_the_whole_answer(begin: str) -> None:
    pieces = parsed(template_parser("llama3_json"), begin + '{"name": "f", "parameters": {"x": 1}}')
    assert [one for one in pieces if one[0] != "reasoning"] == CALL


def test_llama_calls_stand_in_a_row() -> None:
    call = '{"name": "f", "parameters": {"x": 1}}'
    pieces = parsed(template_parser("llama3_json"), f"{call}; {call}")
    assert pieces == [*CALL, *((one[0], 1, one[2]) for one in CALL)]


def test_llama_json_that_calls_nothing_is_text_from_its_first_key_on() -> None:
    parser = template_parser("llama3_json")
    assert joined(parser.feed('{"answer":')) == [("content", '{"answer":')]
    assert parsed(template_parser("llama3_json"), f"See {SIMPLE}") == [("content", f"See {SIMPLE}")]


@pytest.mark.parametrize("form", ["[{}]", " [ {} ]", "{}"])
def test_mistral_calls_stand_in_a_list(form: str) -> None:
    parser = template_parser("mistral")
    pieces = parser.feed("Hm. [TOOL_CALLS]" + form.replace("{}", SIMPLE)) + parser.close()
    assert joined(pieces) == [("content", "Hm."), *CALL]
    [begun] = (one for one in pieces if isinstance(one, CallBegun))
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", begun.call_id)


def test_mistral_calls_of_one_list() -> None:
    pieces = parsed(template_parser("mistral"), f"[TOOL_CALLS] [{SIMPLE}, {SIMPLE}]")
    assert pieces == [*CALL, *((one[0], 1, one[2]) for one in CALL)]


# ── reasoning ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [None, *TEMPLATES])
def test_reasoning_is_told_apart(name: str | None) -> None:
    text = "\n<think>\nWell <b>\n</think>\n\nParis. <think>no"
    whole = [("reasoning", "Well <b>"), ("content", "Paris. <think>no")]
    assert parsed(template_parser(name), text) == whole
    after = text.removeprefix("\n<think>")
    assert parsed(template_parser(name, begins=True), after) == whole


def test_reasoning_that_never_ends() -> None:
    assert parsed(template_parser(None, begins=True), "a </thi") == [("reasoning", "a </thi")]


def test_empty_reasoning_gives_no_piece() -> None:
    text = f"<think>\n\n</think>\n\n<tool_call>\n{SIMPLE}\n</tool_call>"
    assert hermes(text) == CALL


def test_a_call_inside_reasoning_is_reasoning() -> None:
    text = f"<think>a <tool_call>{SIMPLE}</tool_call></think>b"
    assert [one[0] for one in hermes(text)] == ["reasoning", "content"]


# ── the checkpoint's own ────────────────────────────────────────────────────────────────


def test_a_declaration_of_the_checkpoint() -> None:
    text = f"<think>Well</think>Hm.\n<tool_call>\n{SIMPLE}\n</tool_call>"
    pieces = parsed(checkpoint_parser(), *text)
    assert pieces == [("reasoning", "Well"), ("content", "Hm."), *CALL]


def test_a_declaration_sees_what_the_prompt_opened() -> None:
    parser = checkpoint_parser("<|im_start|>assistant\n<think>\n")
    assert parsed(parser, "Well</think>Hm.") == [("reasoning", "Well"), ("content", "Hm.")]


@pytest.mark.parametrize("body", ["oops", '{"name": "nope", "arguments": {}}', '{"name": 1}', "[]"])
def test_a_region_that_cannot_be_read_is_text(body: str) -> None:
    text = f"a<tool_call>{body}</tool_call> b"
    assert parsed(checkpoint_parser(), text) == [("content", f"a{body} b")]


@pytest.mark.parametrize(
    ("arguments", "given"), [('"{}"', "{}"), ('{"é": 1}', '{"é": 1}'), ("[1]", None)]
)
def test_arguments_of_a_declaration_are_json_text(arguments: str, given: str | None) -> None:
    body = f'{{"name": "f", "arguments": {arguments}}}'
    pieces = parsed(checkpoint_parser(), f"<tool_call>{body}</tool_call>")
    call = [("call", 0, "f"), ("arguments", 0, given), ("end", 0, True)]
    assert pieces == (call if given else [("content", body)])


def test_a_region_that_is_cut_off_is_text() -> None:
    text = '<tool_call>{"name": "f", "arg'
    assert parsed(checkpoint_parser(), text) == [("content", '{"name": "f", "arg')]


# ── which parser ────────────────────────────────────────────────────────────────────────

TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Tokenizer(ByteTokenizer):
    """One with a chat template that says `role: content`, and what a generation prompt adds."""

    def __init__(self, chat_template: str | None = None, opens: str = "") -> None:
        super().__init__()
        self.chat_template = chat_template
        self.opens = opens

    def render_chat(self, messages: Any, **kwargs: Any) -> str:
        if kwargs.get("refuses"):
            raise InvalidRequest("no", param="messages")
        return super().render_chat(messages, **kwargs) + self.opens


@pytest.mark.parametrize(
    ("chat_template", "name"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("… <tool_call>\n{{ tool_call }}\n</tool_call> …", "hermes"),
        ("[AVAILABLE_TOOLS] … [TOOL_CALLS] …", "mistral"),
        ("… <|python_tag|> …", "llama3_json"),
        ('format {"name": function name, "parameters": dictionary}', "llama3_json"),
        (r"'{\"name\": function name, \"parameters\": dictionary}'", "llama3_json"),
        ('tool["parameters"]', None),
        ("<tool_call>\n<function=example>", None),
        ("<tool_call>{name}\n<arg_key>", None),
        ("[TOOL_CALLS]name[ARGS]{}", None),
    ],
)
def test_the_chat_template_tells_the_form(chat_template: str | None, name: str | None) -> None:
    assert template_name(None, Tokenizer(chat_template)) == name
    assert template_name("auto", Tokenizer(chat_template)) == name
    assert template_name("mistral", Tokenizer(chat_template)) == "mistral"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="hermes, llama3_json, mistral or auto") as caught:
        parser_for("hermse", tools=TOOLS, tokenizer=Tokenizer())
    assert caught.value.param == "tool_parser"


def test_without_tools_only_reasoning_is_told_apart() -> None:
    assert parser_for(None, tokenizer=Tokenizer("<tool_call>")) is None
    assert parser_for("hermes", tokenizer=Tokenizer()) is None
    assert parser_for(None, tools=TOOLS, tokenizer=Tokenizer()) is None
    parser = parser_for(None, tokenizer=Tokenizer("<think><tool_call>"))
    assert parser is not None
    text = f"<think>a</think>b <tool_call>{SIMPLE}</tool_call>"
    rest = text.partition("</think>")[2]
    assert parsed(parser, text) == [("reasoning", "a"), ("content", rest)]


def test_a_declaration_goes_before_the_chat_template() -> None:
    tokenizer = Tokenizer("<tool_call>")
    assert isinstance(parser_for("auto", tools=TOOLS, tokenizer=tokenizer), TemplateParser)
    tokenizer.response_template = DECLARED  # type: ignore[attr-defined]
    own = parser_for(None, tools=TOOLS, tokenizer=tokenizer)
    assert isinstance(own, CheckpointParser)
    assert parsed(own, f"<tool_call>{SIMPLE}</tool_call>") == CALL
    assert isinstance(parser_for("hermes", tools=TOOLS, tokenizer=tokenizer), TemplateParser)


def test_a_declaration_that_cannot_be_read_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer("<tool_call>")
    tokenizer.response_template = {"fields": {}}  # type: ignore[attr-defined]
    assert isinstance(parser_for(None, tools=TOOLS, tokenizer=tokenizer), TemplateParser)
    assert "response_template cannot be read" in caplog.text


def test_transformers_before_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    tokenizer = Tokenizer("<tool_call>")
    tokenizer.response_template = DECLARED  # type: ignore[attr-defined]
    assert isinstance(parser_for(None, tools=TOOLS, tokenizer=tokenizer), TemplateParser)


@pytest.mark.parametrize(
    ("text", "opens"),
    [
        ("assistant\n<think>\n", True),
        ("assistant\n<think>\n\n</think>\n\n", False),
        ("assistant\n", False),
        ("<think>half a thought", True),
        ("<think>a thought</think> and", False),
        ("what does <think> mean", False),
    ],
)
def test_whether_a_prompt_opens_reasoning(text: str, opens: bool) -> None:
    assert opens_reasoning(text) is opens


def test_what_an_answer_follows() -> None:
    messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "So"}]
    knows = Tokenizer("… <think> …", opens="<think>\n")
    assert opens_reasoning(answer_follows(knows, messages))
    assert answer_follows(knows, messages, continue_final_message=True) == "So"
    assert answer_follows(knows, messages, refuses=True) == ""
    assert answer_follows(Tokenizer(), messages) == ""


def test_one_call_streamed_and_not() -> None:
    """Case 56, as far as text goes."""
    text = '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>'
    for deltas in (text,), tuple(text):
        parser = parser_for("hermes", tools=TOOLS, tokenizer=ByteTokenizer())
        assert parser is not None
        pieces = parsed(parser, *deltas)
        assert [one[0] for one in pieces] == ["call", "arguments", "end"]
        assert {one[1] for one in pieces} == {0}
        assert json.loads(pieces[1][2]) == {"x": 1}
    parser = parser_for("hermes", tools=TOOLS, tokenizer=ByteTokenizer())
    assert parser is not None
    assert parsed(parser, "Plain.") == [("content", "Plain.")]
