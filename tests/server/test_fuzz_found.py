"""What `nox -s schemathesis` has found in the server, or in its OpenAPI document."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.server.config import ServerConfig
from aneuron.server.wire.chat import ChatRequest
from aneuron.server.wire.decoding import decode
from aneuron.server.wire.openapi import openapi
from aneuron.server.wire.responses import ResponsesRequest
from aneuron.testing import sim_engine
from tests.server.scripted import PLAIN, Noise, byte_level, user
from tests.server.test_openapi import holds

if TYPE_CHECKING:
    from aneuron.server.wire.decoding import Request
    from tests.server.scripted import Serve

DOCUMENT = openapi(ServerConfig())
SCHEMAS = DOCUMENT["components"]["schemas"]

# ── parts of a list that takes nothing else, without their type ─────────────────────────

LONE_PARTS: list[tuple[str, type[Request], dict[str, Any]]] = [
    ("TextPart", ChatRequest, {"messages": [{"role": "user", "content": [{"text": "a"}]}]}),
    (
        "InputText",
        ResponsesRequest,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"text": "a"}]}]},
    ),
    (
        "SummaryText",
        ResponsesRequest,
        {"input": [{"type": "reasoning", "summary": [{"text": "a"}]}]},
    ),
    (
        "ReasoningTextPart",
        ResponsesRequest,
        {"input": [{"type": "reasoning", "content": [{"text": "a"}]}]},
    ),
]


@pytest.mark.parametrize(("name", "kind", "body"), LONE_PARTS)
def test_a_type_that_may_be_left_out_is_not_required(
    name: str, kind: type[Request], body: dict[str, Any]
) -> None:
    request = decode(kind, json.dumps({"model": "m", **body}).encode())
    if isinstance(request, ResponsesRequest):
        request.as_chat()  # reads the items
    assert "type" not in SCHEMAS[name]["required"]


# ── events of a stream ──────────────────────────────────────────────────────────────────

STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [user("hi")], "logprobs": True, "max_tokens": 4}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_each_event_is_as_described(
    serve_engine: Serve, path: str, body: dict[str, Any]
) -> None:
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
    event = content["text/event-stream"]["schema"]
    *done, data = event["properties"]["data"]["anyOf"]
    tokenizer = byte_level(PLAIN)
    async with sim_engine(Noise(), tokenizer=tokenizer) as engine, serve_engine(engine) as server:
        told = (await server.post(path, stream=True, **body)).text
    *events, rest = told.split("\n\n")
    assert (len(events) > 2, rest) == (True, "")
    if done:
        assert events.pop() == f"data: {done[0]['const']}"
    for one in events:
        fields = dict(line.split(": ", 1) for line in one.split("\n"))
        assert set(fields) == set(event["required"])
        assert holds(data["contentSchema"], json.loads(fields["data"]))
