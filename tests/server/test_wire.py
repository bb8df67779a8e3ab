"""Request bodies: what is taken, what is refused and by what name, and how chats become dicts."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase

from aneuron.params.messages import validate_messages
from aneuron.server.http.errors import ApiError
from aneuron.server.tools import template_messages, validate_tool_choice, validate_tools
from aneuron.server.wire.chat import ChatRequest
from aneuron.server.wire.completions import CompletionRequest
from aneuron.server.wire.decoding import decode
from aneuron.server.wire.messages import plain_messages
from aneuron.server.wire.misc import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from aneuron.server.wire.decoding import Request

KINDS: list[type[Request]] = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": HELLO, **fields}
    return decode(ChatRequest, json.dumps(body).encode())


def complete(**fields: Any) -> CompletionRequest:
    return decode(CompletionRequest, json.dumps({"model": "m", "prompt": "Hi", **fields}).encode())


def refusal(kind: type[Request], body: bytes | dict[str, Any]) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as raised:
        decode(kind, raw)
    error = raised.value
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert error.code == "invalid_value"
    assert len(error.message) <= 1000
    return error


def chat_refusal(**fields: Any) -> ApiError:
    return refusal(ChatRequest, {"model": "m", "messages": HELLO, **fields})


# ── the three lists ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_is_in_one_list_and_honoured_ones_are_the_types(kind: type[Request]) -> None:
    lists = kind.fields
    names = [*lists.honoured, *lists.ignored, *lists.refused]
    assert len(names) == len(set(names))
    assert set(lists.honoured) == set(kind.__struct_fields__)


def test_every_field_of_the_official_client_is_in_a_list() -> None:
    streaming = {"stream"}
    for kind, params in (
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, CompletionCreateParamsBase),
    ):
        lists = kind.fields
        known = {*lists.honoured, *lists.ignored, *lists.refused}
        assert set(params.__annotations__) | streaming <= known


@pytest.mark.parametrize("kind", KINDS)
def test_refused_fields_name_themselves_and_neutral_values_are_taken(kind: type[Request]) -> None:
    base = {"model": "m", "messages": HELLO} if kind is not CompletionRequest else {"model": "m"}
    if kind is CompletionRequest:
        base["prompt"] = "Hi"
    for name, refused in kind.fields.refused.items():
        assert refusal(kind, {**base, name: {"x": 1}}).param == name
        for value in (None, *refused.neutral):
            decode(kind, json.dumps({**base, name: value}).encode())


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_ignored_fields_take_anything_that_is_json(kind: type[Request]) -> None:
    base = (
        {"model": "m", "messages": HELLO} if kind is ChatRequest else {"model": "m", "prompt": ""}
    )
    for name in kind.fields.ignored:
        for value in (None, 5, ["x"], {"a": {"b": [1]}}):
            decode(kind, json.dumps({**base, name: value}).encode())
    bad = json.dumps(base).encode()[:-1] + b',"user":"\xff"}'
    assert "UTF-8" in refusal(kind, bad).message


def test_one_is_no_truth_value() -> None:
    assert chat_refusal(use_beam_search=0).param == "use_beam_search"
    assert chat_refusal(routed_experts_prompt_start=False).param == "routed_experts_prompt_start"
    chat(use_beam_search=False, length_penalty=1)


def test_best_of_is_taken_where_it_is_n() -> None:
    complete(best_of=1)
    complete(best_of=3, n=3)
    assert refusal(CompletionRequest, {"model": "m", "prompt": "", "best_of": 3}).param == "best_of"


def test_unknown_fields_are_named() -> None:
    for kind in KINDS:
        assert refusal(kind, {"nope": 1}).param == "nope"
    assert chat_refusal(stream=True, stream_options={"nope": 1}).param == "stream_options.nope"
    assert chat_refusal(messages=[{**HELLO[0], "prefix": True}]).param == "messages[0].prefix"


# ── types ───────────────────────────────────────────────────────────────────────────────

WRONG: list[tuple[str, Any, str]] = [
    ("max_tokens", "5", "max_tokens"),
    ("max_tokens", 5.0, "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 0, "max_tokens"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("max_tokens", 10**30, "max_tokens"),
    ("temperature", "0", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", -0.1, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_k", -2, "top_k"),
    ("n", 0, "n"),
    ("n", 1.0, "n"),
    ("seed", 2**63, "seed"),
    ("stream", 1, "stream"),
    ("stream", "true", "stream"),
    ("stop", [""], "stop[0]"),
    ("stop", ["a"] * 17, "stop"),
    ("stop", ["a", 5], "stop[1]"),
    ("stop", {}, "stop"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("logit_bias", {"a": 1}, "logit_bias"),
    ("logit_bias", {"-1": 5}, "logit_bias"),
    ("logit_bias", {"1": 101}, "logit_bias"),
    ("logit_bias", {"1": None}, "logit_bias"),
    ("logit_bias", [1], "logit_bias"),
    ("bad_words", [""], "bad_words[0]"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", [-1], "allowed_token_ids[0]"),
    ("logprobs", 1, "logprobs"),
    ("top_logprobs", 21, "top_logprobs"),
    ("top_logprobs", 2, "top_logprobs"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("priority", 2**31, "priority"),
    ("model", "", "model"),
    ("model", None, "model"),
    ("model", 5, "model"),
    ("messages", None, "messages"),
    ("messages", [], "messages"),
    ("messages", "Hi", "messages"),
    ("messages", HELLO * 1025, "messages"),
    ("messages", ["Hi"], "messages[0]"),
    ("messages", [{"content": "Hi"}], "messages[0].role"),
    ("messages", [{"role": "function", "content": "Hi"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [*HELLO, {"role": "user", "content": 5}], "messages[1].content"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        "messages[0].content[0].text",
    ),
    ("messages", [{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("tools", [{**TOOL, "type": "custom"}], "tools[0].type"),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ("tools", [TOOL] * 129, "tools"),
    ("tool_choice", "any", "tool_choice"),
    ("tool_choice", {"type": "custom"}, "tool_choice.type"),
    ("reasoning_effort", "huge", "reasoning_effort"),
    ("chat_template_kwargs", {"self": 1}, "chat_template_kwargs"),
    ("chat_template_kwargs", {"__class__": 1}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("name", "value", "param"), WRONG)
def test_wrong_values_are_named_as_the_client_wrote_them(name: str, value: Any, param: str) -> None:
    error = chat_refusal(**{name: value})
    assert error.param == param
    assert error.message.startswith(f"{param} ")


def test_fields_that_do_not_go_together() -> None:
    both = chat_refusal(add_generation_prompt=True, continue_final_message=True)
    assert both.param == "continue_final_message"
    forms = chat_refusal(response_format=SCHEMA, structured_outputs={"regex": "a"})
    assert forms.param == "structured_outputs"
    for form in ({}, {"regex": "a", "choice": ["b"]}, {"json_object": False}):
        assert chat_refusal(structured_outputs=form).param == "structured_outputs"
    chat(response_format={"type": "text"}, structured_outputs={"regex": "a"})


def test_a_form_leaves_no_room_for_tools_unless_no_choice_is_left() -> None:
    assert chat_refusal(tools=[TOOL], response_format=SCHEMA).param == "response_format"
    some = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    allowed = {"type": "allowed_tools", "allowed_tools": some}
    error = chat_refusal(tools=[TOOL], tool_choice=allowed, response_format=SCHEMA)
    assert error.param == "response_format"
    form = {"regex": "a"}
    assert chat_refusal(tools=[TOOL], structured_outputs=form).param == "structured_outputs"
    for choice in ("none", "required", {"type": "function", "function": {"name": "f"}}):
        chat(tools=[TOOL], tool_choice=choice, response_format=SCHEMA)
    chat(tools=[TOOL], response_format={"type": "text"})


def test_null_is_absent() -> None:
    optional = [name for name in ChatRequest.fields.honoured if name not in {"model", "messages"}]
    assert chat(**dict.fromkeys(optional)) == chat()
    assert chat().num_choices == 1
    assert not chat().wants_usage


def test_of_a_field_that_comes_twice_the_last_counts() -> None:
    body = b'{"model":"m","prompt":"a","max_tokens":1,"prompt":"b","max_tokens":2}'
    request = decode(CompletionRequest, body)
    assert (request.prompt, request.max_tokens) == ("b", 2)


def test_max_tokens_0_says_that_an_echo_alone_is_not_there() -> None:
    body = {"model": "m", "prompt": "", "max_tokens": 0, "echo": True}
    error = refusal(CompletionRequest, body)
    assert error.param == "max_tokens"
    assert "echo" in error.message


def test_usage_of_streams() -> None:
    for options, last, running in (
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_obfuscation": False}, False, False),
    ):
        request = chat(stream=True, stream_options=options)
        assert (request.wants_usage, request.wants_running_usage) == (last, running)


# ── hostile bodies ──────────────────────────────────────────────────────────────────────

DEEP = b"[" * 10_000 + b"]" * 10_000
HOSTILE = {
    "nothing": b"",
    "a list": b"[1]",
    "a number": b"5",
    "null": b"null",
    "cut short": b'{"model":"m"',
    "more than one": b"{}{}",
    "no UTF-8": b'{"model":"\xff"}',
    "no UTF-8 in a name": b'{"\xff":1}',
    "UTF-16": '{"model":"m"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"model":"m"}',
    "deep": b'{"messages":' + DEEP + b"}",
    "deep and ignored": b'{"user":' + DEEP + b"}",
    "deep and open": b'{"messages":' + b"[" * 1_000_000,
    "deep objects": b'{"tools":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    "a huge integer": b'{"max_tokens":' + b"9" * 100_000 + b"}",
    "a huge float": b'{"temperature":1e999}',
    "NaN": b'{"temperature":NaN}',
    "Infinity": b'{"temperature":-Infinity}',
    "half a pair": b'{"model":"\\ud800"}',
    "the other half": b'{"model":"\\udc00x"}',
    "a pair turned round": b'{"model":"\\udc00\\ud800"}',
    "a control character": b'{"model":"\x00"}',
    "a key that is no string": b"{1:2}",
    "many unknown fields": b"{" + b",".join(b'"%d":1' % i for i in range(200_000)) + b"}",
    "a long unknown field": b'{"' + b"x" * 1_000_000 + b'":1}',
    "a long role": b'{"model":"m","messages":[{"role":"' + b"x" * 10**6 + b'","content":""}]}',
    "many stop strings": b'{"stop":[' + b'"a",' * 500_000 + b'"a"]}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_hostile_bodies_are_refused_and_fast(kind: type[Request], body: bytes) -> None:
    started = time.perf_counter()
    error = refusal(kind, body)
    assert time.perf_counter() - started < 0.5
    assert len(error.param or "") <= 200


@pytest.mark.parametrize(
    "name", ["tools", "response_format", "structured_outputs", "chat_template_kwargs"]
)
def test_free_forms_are_at_most_64_levels_deep(name: str) -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = {"a": value}
        return value

    within = {
        "tools": lambda n: [{**TOOL, "function": {"name": "f", "parameters": nested(n - 3)}}],
        "response_format": lambda n: {
            "type": "json_schema",
            "json_schema": {"schema": nested(n - 2)},
        },
        "structured_outputs": lambda n: {"json": nested(n - 1)},
        "chat_template_kwargs": nested,
    }[name]
    chat(**{name: within(64)})
    error = chat_refusal(**{name: within(65)})
    assert error.param == name
    assert "64 levels" in error.message


def test_a_long_text_is_taken_and_a_long_schema_is_not() -> None:
    text = "x" * 5_000_000
    assert complete(prompt=text).prompt == text
    chat(messages=[{"role": "user", "content": text}])
    error = chat_refusal(response_format={"type": "json_schema", "json_schema": {"schema": text}})
    assert error.param == "response_format"
    assert chat_refusal(user=text).param == "user"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.data(), st.sampled_from(KINDS))
def test_any_value_of_any_field_is_taken_or_refused(
    data: st.DataObject, kind: type[Request]
) -> None:
    names = [*kind.fields.honoured, *kind.fields.ignored, *kind.fields.refused]
    base: dict[str, Any] = {"model": "m", "messages": HELLO, "prompt": "Hi", "tokens": [1]}
    body: dict[str, Any] = {name: value for name, value in base.items() if name in names}
    body |= data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=3))
    try:
        decode(kind, json.dumps(body).encode("utf-8", "surrogatepass"))
    except ApiError as error:
        refused = error
    else:
        return
    assert (refused.status, refused.code) == (400, "invalid_value")


@given(st.binary(), st.sampled_from(KINDS))
def test_any_bytes_are_refused(body: bytes, kind: type[Request]) -> None:
    with pytest.raises(ApiError) as raised:
        decode(kind, body)
    assert raised.value.status == 400


# ── messages ────────────────────────────────────────────────────────────────────────────

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def plain(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    made = plain_messages(chat(messages=list(messages)).messages)
    validate_messages(made)
    return made


def test_messages_become_plain_dicts() -> None:
    assert plain(
        {"role": "system", "content": "S"},
        {"role": "developer", "content": "D", "name": "dev"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "name": "bot"},
    ) == [
        {"role": "system", "content": "S"},
        {"role": "system", "content": "D", "name": "dev"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "no", "name": "bot"},
    ]


def test_reasoning_goes_back_under_both_names() -> None:
    told = {"reasoning": "hm", "reasoning_content": "hm"}
    for name in told:
        [turn] = plain({"role": "assistant", "content": "a", name: "hm"})
        assert turn == {"role": "assistant", "content": "a", **told}


def test_what_the_client_dumps_can_be_sent_back() -> None:
    from openai.types.chat import ChatCompletionMessage

    message = ChatCompletionMessage.model_validate({"role": "assistant", "content": "a"})
    assert plain(message.model_dump()) == [{"role": "assistant", "content": "a"}]
    called = ChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": [CALL]})
    [turn] = plain(called.model_dump())
    assert turn["tool_calls"] == [CALL]


def test_an_empty_turn_is_refused() -> None:
    request = chat(messages=[*HELLO, {"role": "assistant", "content": None}])
    with pytest.raises(ApiError) as raised:
        plain_messages(request.messages)
    assert raised.value.param == "messages[1].content"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "refusal", "refusal": "only the assistant says that"},
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
def test_parts_that_are_no_text_are_refused(kind: type[Request], part: dict[str, Any]) -> None:
    messages = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
    error = refusal(kind, {"model": "m", "messages": messages})
    assert error.param == "messages[1].content[1]"
    assert "nothing is fetched" in error.message


def test_tools_and_choices_are_what_the_tools_package_takes() -> None:
    many = [TOOL, {"type": "function", "function": {"name": "g", "description": "G"}}]
    choices: list[Any] = [
        None,
        "auto",
        "required",
        {"type": "function", "function": {"name": "g"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
        },
    ]
    for choice in choices:
        request = chat(tools=many, tool_choice=choice)
        tools = validate_tools(request.plain_tools)
        assert [tool["function"]["name"] for tool in tools] == ["f", "g"]
        assert request.plain_tool_choice == choice
        validate_tool_choice(request.plain_tool_choice, tools)
    assert tools[1]["function"]["parameters"]["additionalProperties"] is False
    [turn] = template_messages(plain({"role": "assistant", "tool_calls": [CALL]}))
    assert turn["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_variables_of_the_template() -> None:
    assert chat().template_kwargs == {}
    assert chat(reasoning_effort="none").template_kwargs == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    given = {"enable_thinking": False, "x": [1]}
    request = chat(reasoning_effort="high", chat_template_kwargs=given)
    assert request.template_kwargs == {"reasoning_effort": "high", **given}


def test_a_continued_message_begins_no_turn() -> None:
    assert chat().begins_turn
    assert not chat(continue_final_message=True).begins_turn
    assert not chat(add_generation_prompt=False).begins_turn


# ── prompts of completions ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([""], [""]),
    ],
)
def test_the_four_forms_of_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert complete(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([[1, "a"]], "prompt[0][1]"),
        ([2**31], "prompt[0]"),
        (["a"] * 1025, "prompt"),
    ],
)
def test_prompts_of_no_form(prompt: Any, param: str) -> None:
    assert refusal(CompletionRequest, {"model": "m", "prompt": prompt}).param == param


def test_what_to_tokenize() -> None:
    def body(**fields: Any) -> bytes:
        return json.dumps(fields).encode()

    assert decode(TokenizeRequest, body(prompt="a")).begins_turn
    assert not decode(
        TokenizeRequest, body(messages=HELLO, continue_final_message=True)
    ).begins_turn
    assert decode(TokenizeRequest, body(messages=HELLO, tools=[TOOL])).plain_tools
    for fields, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "messages"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
    ):
        assert refusal(TokenizeRequest, body(**fields)).param == param
    assert decode(DetokenizeRequest, body(tokens=[])).tokens == []
    assert refusal(DetokenizeRequest, body(tokens=[-1])).param == "tokens[0]"
