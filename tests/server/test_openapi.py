"""The OpenAPI document: whole, and true of what the types take and refuse."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.server.config import ServerConfig
from aneuron.server.http.errors import ApiError, error_body
from aneuron.server.http.guard import OPEN_PATHS
from aneuron.server.wire.chat import ChatRequest, ChatWriter
from aneuron.server.wire.completions import CompletionRequest, CompletionWriter
from aneuron.server.wire.decoding import decode
from aneuron.server.wire.misc import DetokenizeRequest, TokenizeRequest
from aneuron.server.wire.openapi import openapi
from aneuron.server.wire.responses import ResponsesRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron.server.wire.decoding import Request

DOCUMENT = openapi(ServerConfig())
SCHEMAS = DOCUMENT["components"]["schemas"]
PATHS = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models",
    "/v1/models/{model}", "/tokenize", "/detokenize", "/version",
    "/health", "/ready", "/metrics", "/openapi.json", "/timeline.json", "/timeline.svg",
}  # fmt: skip
HELLO = [{"role": "user", "content": "Hi"}]

# ── a validator of the keywords in use ──────────────────────────────────────────────────

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
NOTES = {"title", "description", "default", "discriminator"}


def is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES[name])


def holds(schema: dict[str, Any], value: Any) -> bool:
    return all(holds_one(schema, word, value) for word in schema)


def holds_one(schema: dict[str, Any], word: str, value: Any) -> bool:  # noqa: C901, PLR0911, PLR0912
    wanted = schema[word]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match word:
        case "$ref":
            return holds(SCHEMAS[wanted.rsplit("/", 1)[1]], value)
        case "anyOf":
            return any(holds(one, value) for one in wanted)
        case "type":
            return is_type(value, wanted)
        case "enum":
            return value in wanted
        case "const":
            return bool(value == wanted)
        case "minimum":
            return not is_number or value >= wanted
        case "maximum":
            return not is_number or value <= wanted
        case "exclusiveMinimum":
            return not is_number or value > wanted
        case "minLength":
            return not isinstance(value, str) or len(value) >= wanted
        case "maxLength":
            return not isinstance(value, str) or len(value) <= wanted
        case "pattern":
            return not isinstance(value, str) or re.search(wanted, value) is not None
        case "minItems":
            return not isinstance(value, list) or len(value) >= wanted
        case "maxItems":
            return not isinstance(value, list) or len(value) <= wanted
        case "items":
            return not isinstance(value, list) or all(holds(wanted, one) for one in value)
        case "maxProperties":
            return not isinstance(value, dict) or len(value) <= wanted
        case "propertyNames":
            return not isinstance(value, dict) or all(holds(wanted, name) for name in value)
        case "required":
            return not isinstance(value, dict) or set(wanted) <= set(value)
        case "properties":
            return not isinstance(value, dict) or all(
                holds(wanted[name], one) for name, one in value.items() if name in wanted
            )
        case "additionalProperties":
            known = schema.get("properties", {})
            others = (
                [v for k, v in value.items() if k not in known] if isinstance(value, dict) else []
            )
            if isinstance(wanted, bool):
                return wanted or not others
            return all(holds(wanted, one) for one in others)
    assert word in NOTES, f"the validator does not know {word}"
    return True


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from nodes(inner)


# ── the document ────────────────────────────────────────────────────────────────────────


def test_it_is_plain_json_with_every_route() -> None:
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT
    assert DOCUMENT["openapi"].startswith("3.1.")
    assert set(DOCUMENT["info"]) >= {"title", "version"}
    assert set(DOCUMENT["paths"]) == PATHS


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    found = {node["$ref"] for node in nodes(DOCUMENT) if isinstance(node.get("$ref"), str)}
    names = {reference.removeprefix("#/components/schemas/") for reference in found}
    assert names == set(SCHEMAS)


def test_operations_are_whole() -> None:
    names = []
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            assert method == ("post" if "requestBody" in operation else "get")
            names.append(operation["operationId"])
            assert "200" in operation["responses"]
            assert all(one["description"] for one in operation["responses"].values())
            told = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert told == set(re.findall(r"{(\w+)}", path))
            if method == "post":
                assert set(operation["responses"]) >= {"400", "404", "413", "429", "500", "503"}
                assert operation["requestBody"]["required"]
    assert len(names) == len(set(names))


def test_keys_are_asked_for_where_there_are_some() -> None:
    assert "security" not in str(DOCUMENT)
    guarded = openapi(ServerConfig(api_keys=("k",)))
    assert guarded["components"]["securitySchemes"] == {
        "bearer": {"type": "http", "scheme": "bearer"}
    }
    for path, operations in guarded["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in OPEN_PATHS)
            assert ("401" in operation["responses"]) == (path not in OPEN_PATHS)


def test_models_are_named_where_they_are_known() -> None:
    for document in (
        openapi(ServerConfig(served_model_names=("a", "b"))),
        openapi(ServerConfig(), model_names=("a", "b")),
    ):
        schemas = document["components"]["schemas"]
        assert schemas["ChatRequest"]["properties"]["model"]["enum"] == ["a", "b"]
        assert schemas["TokenizeRequest"]["properties"]["model"]["enum"] == ["a", "b", None]
    assert "enum" not in SCHEMAS["ChatRequest"]["properties"]["model"]


def test_fields_are_described_and_refused_ones_are_not_there() -> None:
    kinds = (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)
    for kind in kinds:
        schema = SCHEMAS[kind.__name__]
        assert set(schema["properties"]) == {*kind.fields.honoured, *kind.fields.ignored}
        assert all(one["description"] for one in schema["properties"].values())
        assert schema["additionalProperties"] == {"type": "null"}


# ── it is true ──────────────────────────────────────────────────────────────────────────

CHAT = {"model": "m", "messages": HELLO}
TEXT = {"model": "m", "prompt": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD: list[tuple[type[Request], dict[str, Any]]] = [
    (ChatRequest, CHAT),
    (ChatRequest, {**CHAT, "max_tokens": None, "user": 5, "stop": "x"}),
    (ChatRequest, {**CHAT, "nope": None, "stream": True, "stream_options": {"nope": None}}),
    (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": "a", "tool_calls": None}]}),
    (ChatRequest, {**CHAT, "stop": ["x"], "logit_bias": {"5": -100}, "temperature": 0}),
    (ChatRequest, {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    (
        ChatRequest,
        {
            **CHAT,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    (ChatRequest, {**CHAT, "response_format": {"type": "text"}}),
    (
        ChatRequest,
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    ),
    (ChatRequest, {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    (
        ChatRequest,
        {
            **CHAT,
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "refusal": "no", "annotations": []},
                {"role": "tool", "content": "a", "tool_call_id": "x"},
            ],
        },
    ),
    (ChatRequest, {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}),
    (CompletionRequest, TEXT),
    (CompletionRequest, {**TEXT, "prompt": ["a", "b"]}),
    (CompletionRequest, {**TEXT, "prompt": [1, 2]}),
    (CompletionRequest, {**TEXT, "prompt": [[1], [2]], "echo": True, "logprobs": 5}),
    (CompletionRequest, {**TEXT, "structured_outputs": {"regex": "a"}}),
    (ResponsesRequest, {"model": "m", "input": "a", "user": 5}),
    (ResponsesRequest, {"model": "m", "input": [{"role": "user", "content": "a"}]}),
    (
        ResponsesRequest,
        {
            "model": "m",
            "input": [
                {"type": "reasoning", "summary": [], "encrypted_content": None},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "a"},
            ],
        },
    ),
    (
        ResponsesRequest,
        {"model": "m", "input": "a", "text": {"format": {"type": "json_schema", "schema": {}}}},
    ),
    (TokenizeRequest, {"prompt": "a"}),
    (TokenizeRequest, {"messages": HELLO, "model": None}),
    (DetokenizeRequest, {"tokens": [1, 2]}),
    (DetokenizeRequest, {"tokens": [1, 2], "nope": None}),
]
BAD: list[tuple[type[Request], dict[str, Any]]] = [
    (ChatRequest, {}),
    (ChatRequest, {**CHAT, "messages": []}),
    (ChatRequest, {**CHAT, "max_tokens": 0}),
    (ChatRequest, {**CHAT, "max_tokens": 1.5}),
    (ChatRequest, {**CHAT, "max_tokens": True}),
    (ChatRequest, {**CHAT, "temperature": -1}),
    (ChatRequest, {**CHAT, "top_p": 0}),
    (ChatRequest, {**CHAT, "nope": 1}),
    (ChatRequest, {**CHAT, "chat_template": "x"}),
    (ChatRequest, {**CHAT, "chat_template_kwargs": {"self": 1}}),
    (ChatRequest, {**CHAT, "logit_bias": {"x": 1}}),
    (ChatRequest, {**CHAT, "stop": [""]}),
    (ChatRequest, {**CHAT, "stop": ["x"] * 17}),
    (ChatRequest, {**CHAT, "tool_choice": "any"}),
    (ChatRequest, {**CHAT, "response_format": {"type": "yaml"}}),
    (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": "a", "x": 1}]}),
    (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CompletionRequest, {"model": "m"}),
    (CompletionRequest, {**TEXT, "prompt": [1, "a"]}),
    (CompletionRequest, {**TEXT, "prompt": [[]]}),
    (CompletionRequest, {**TEXT, "prompt": []}),
    (ResponsesRequest, {"model": "m"}),
    (ResponsesRequest, {"model": "m", "input": []}),
    (ResponsesRequest, {"model": "m", "input": "a", "tools": [{"type": "web_search"}]}),
    (ResponsesRequest, {"model": "m", "input": "a", "include": ["x"]}),
    (DetokenizeRequest, {"tokens": [-1]}),
    (DetokenizeRequest, {"tokens": [1], "nope": 0}),
]


@pytest.mark.parametrize(("kind", "body"), GOOD)
def test_what_is_taken_is_described(kind: type[Request], body: dict[str, Any]) -> None:
    decode(kind, json.dumps(body).encode())
    assert holds(SCHEMAS[kind.__name__], body)


@pytest.mark.parametrize(("kind", "body"), BAD)
def test_what_is_described_as_wrong_is_refused(kind: type[Request], body: dict[str, Any]) -> None:
    assert not holds(SCHEMAS[kind.__name__], body)
    with pytest.raises(ApiError):
        decode(kind, json.dumps(body).encode())


def test_answers_are_as_described() -> None:
    facts: dict[str, Any] = {"created": 1, "model": "m"}
    chunk = ChatWriter(response_id="x", with_usage=True, **facts).content(0, "a")
    text = CompletionWriter(response_id="x", **facts).finish(0, "stop")
    for name, body in (
        ("ChatChunk", chunk),
        ("CompletionBody", text),
        ("ErrorBody", error_body(ApiError(404, "no"))),
    ):
        assert holds(SCHEMAS[name], json.loads(body))
    assert not holds(SCHEMAS["ErrorBody"], {"error": "no"})
