"""Requests become the engine's keyword arguments, and its errors name the client's fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aneuron import SamplingParams
from aneuron.errors import InvalidRequest
from aneuron.grammar import GrammarCompiler
from aneuron.models.tokenizer import ByteTokenizer
from aneuron.params import Grammar
from aneuron.server.http.errors import ApiError, api_error
from aneuron.server.wire.chat import ChatRequest
from aneuron.server.wire.completions import CompletionRequest
from aneuron.server.wire.decoding import decode
from aneuron.server.wire.sampling import RENAMED, field_names, sampling_of

HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": HELLO, **fields}
    return decode(ChatRequest, json.dumps(body).encode())


def complete(**fields: Any) -> CompletionRequest:
    return decode(CompletionRequest, json.dumps({"model": "m", "prompt": "Hi", **fields}).encode())


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": of}}


def test_nothing_given_is_nothing_asked() -> None:
    assert sampling_of(chat()) == {}
    assert sampling_of(complete()) == {}
    assert sampling_of(chat(max_tokens=None, stop=None, logprobs=False, stream=True)) == {}


def test_all_of_it_is_what_the_engine_takes() -> None:
    shared = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2, "seed": -(2**63),
        "stop": ["a", "b"], "stop_token_ids": [7], "ignore_eos": True, "min_tokens": 3,
        "presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.1,
        "logit_bias": {"5": 2, "7": -100}, "allowed_token_ids": [1, 2], "bad_words": ["x"],
        "skip_special_tokens": False,
    }  # fmt: skip
    for request in (
        chat(
            **shared, include_stop_str_in_output=True, max_tokens=9, logprobs=True, top_logprobs=3
        ),
        complete(**shared, include_stop_str_in_output=True, max_tokens=9, logprobs=3),
    ):
        asked = sampling_of(request)
        assert asked == {**shared, "include_stop": True, "max_tokens": 9, "logprobs": 3}
        SamplingParams.build(None, asked)
    assert sampling_of(chat(priority=-4)) == {"priority": -4}


def test_the_newer_limit_wins() -> None:
    request = chat(max_tokens=9, max_completion_tokens=5)
    assert sampling_of(request) == {"max_tokens": 5}
    assert field_names(request)["max_tokens"] == "max_completion_tokens"
    assert "max_tokens" not in field_names(chat(max_tokens=9))


def test_logprobs_of_chats_and_completions() -> None:
    assert sampling_of(chat(logprobs=True)) == {"logprobs": 0}
    assert sampling_of(chat(logprobs=True, top_logprobs=20)) == {"logprobs": 20}
    assert sampling_of(chat(logprobs=False, top_logprobs=0)) == {}
    assert sampling_of(complete(logprobs=0)) == {"logprobs": 0}
    assert sampling_of(complete(prompt_logprobs=2)) == {"prompt_logprobs": 2}
    echoed = {"logprobs": 1, "prompt_logprobs": 1}
    assert sampling_of(complete(logprobs=1, echo=True)) == echoed
    assert sampling_of(complete(logprobs=1, echo=True, prompt_logprobs=2))["prompt_logprobs"] == 2


# ── forms of answers ────────────────────────────────────────────────────────────────────

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
FORMS: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"response_format": schema(SCHEMA)}, Grammar("json", json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json", json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar("json", json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, Grammar("regex", "[ab]{3}")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
]


@pytest.mark.parametrize(("fields", "grammar"), FORMS)
def test_forms_become_grammars(fields: dict[str, Any], grammar: Grammar) -> None:
    assert sampling_of(chat(**fields)) == {"grammar": grammar}
    assert sampling_of(complete(**fields)) == {"grammar": grammar}


def test_text_is_no_form() -> None:
    assert sampling_of(chat(response_format={"type": "text"})) == {}


def test_a_forced_call_goes_before_a_form() -> None:
    forced = Grammar("lark", 'start: "call"')
    request = chat(tools=[TOOL], tool_choice="required", response_format=schema(SCHEMA))
    assert sampling_of(request, forced=forced) == {"grammar": forced}
    assert field_names(chat(tools=[TOOL], tool_choice="required"))["grammar"] == "tool_choice"


async def fault_of(**fields: Any) -> ApiError:
    """What the client is told: by the body, by the grammar, or by the compiler, as it comes."""
    try:
        request = chat(**fields)
        grammar = sampling_of(request)["grammar"]
    except ApiError as error:
        return error
    compiler = GrammarCompiler(ByteTokenizer(), ByteTokenizer().vocab_size, (257,))
    try:
        with pytest.raises(InvalidRequest) as raised:
            await compiler.compile(grammar)
    finally:
        compiler.close()
    return api_error(raised.value, field_names(request))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema({"type": 12})}, "response_format.json_schema.schema"),
        ({"response_format": schema("text")}, "response_format.json_schema.schema"),
        ({"response_format": schema([1])}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": 12}}},
            "response_format.json_schema.type",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": "text"}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": [1]}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": "text"}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"type": 12}}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: nope"}}, "structured_outputs.grammar"),
    ],
)
async def test_case_55_forms_that_are_none_are_named(fields: dict[str, Any], param: str) -> None:
    error = await fault_of(**fields)
    assert (error.status, error.code, error.param) == (400, "invalid_value", param)
    assert error.message.startswith(param)


def test_other_names_of_the_engine() -> None:
    assert RENAMED["include_stop"] == "include_stop_str_in_output"
    assert field_names(complete())["prompt_token_ids"] == "prompt"
    assert field_names(complete())["prompt_logprobs"] == "logprobs"
    assert "prompt_logprobs" not in field_names(complete(prompt_logprobs=1))
    assert field_names(chat())["prompt"] == "messages"
    assert field_names(chat(logprobs=True, top_logprobs=1))["logprobs"] == "top_logprobs"


RANGES: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 2**31 - 1),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 128),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.text("ab", min_size=1) | st.lists(st.text("ab", min_size=1), max_size=16),
    "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=64),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.dictionaries(
        st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), max_size=8
    ),
    "allowed_token_ids": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8),
    "bad_words": st.lists(st.text("ab", min_size=1), max_size=8),
}


@given(st.fixed_dictionaries({}, optional=RANGES))
def test_what_the_types_take_the_engine_takes(fields: dict[str, Any]) -> None:
    SamplingParams.build(None, sampling_of(complete(**fields)))
