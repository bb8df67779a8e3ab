"""What tests of `/v1/responses` share: askers, readers of what came over the wire, scripts."""

from __future__ import annotations

import itertools
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from aneuron.testing import Script, no_leaks, sim_engine
from tests.server.scripted import PLAIN, byte_level

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aneuron import Engine
    from tests.server.conftest import Served

__all__ = [
    "CALL", "LOGPROBS", "OTHER", "PATH", "THOUGHT", "TOOLS", "bare", "both_ways", "create",
    "events", "kinds", "refused", "thinking", "tool",
]  # fmt: skip

PATH = "/v1/responses"
THOUGHT = "<think>\nHm.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
OTHER = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
LOGPROBS: list[Any] = ["message.output_text.logprobs"]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
THINKS = PLAIN + "{# <think> #}"


@asynccontextmanager
async def thinking(
    script: str, kind: Any = Script, *, latency: float = 0.001
) -> AsyncIterator[Engine]:
    """An engine that says a script, and whose chat template knows reasoning."""
    tokenizer = byte_level(THINKS)
    model = kind(tokenizer.encode_word(script), vocab_size=258)
    async with sim_engine(model, latency=latency, tokenizer=tokenizer) as engine, no_leaks(engine):
        yield engine


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "parameters": schema, "strict": True}


TOOLS = [tool("f", x={"type": "integer"}), tool("g")]


async def create(server: Served, **body: Any) -> Any:
    make: Any = server.openai.responses.create
    return await make(**{"model": server.model, "input": "hi", **body})


async def events(server: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked: one line of JSON that the client's types describe."""
    asked = {"model": server.model, "input": "hi", "stream": True, **body}
    async with server.http.stream("POST", PATH, json=asked) as response:
        whole = (await response.aread()).decode()
        assert response.status_code == 200, whole
        assert response.headers["content-type"].startswith("text/event-stream")
    *told, rest = whole.split("\n\n")
    assert rest == ""
    found = []
    for number, one in enumerate(told):
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
        EVENT.validate_python(found[-1])
    return found


def kinds(found: list[dict[str, Any]]) -> list[str]:
    """The types of events, those in a row once."""
    return [
        name.removeprefix("response.") for name, _ in itertools.groupby(e["type"] for e in found)
    ]


def bare(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two that say the same."""
    told = {k: v for k, v in response.items() if k not in {"id", "created_at", "completed_at"}}
    ids = {"id", "call_id"}
    told["output"] = [{k: v for k, v in one.items() if k not in ids} for one in told["output"]]
    told["usage"] = {k: v for k, v in told["usage"].items() if k != "input_tokens_details"}
    return told


async def both_ways(server: Served, **body: Any) -> dict[str, Any]:
    """Ask for the whole and for a stream; both must say the same, and so must the deltas."""
    response = await server.post(PATH, **{"input": "hi", **body})
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    Response.model_validate(whole)
    found = await events(server, **body)
    assert bare(found[-1]["response"]) == bare(whole)
    assert found[-1]["type"] == f"response.{whole['status']}"
    for index, item in enumerate(found[-1]["response"]["output"]):
        own = [one for one in found if one.get("output_index") == index]
        pieces = "".join(one["delta"] for one in own if one["type"].endswith(".delta"))
        wanted = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert pieces == wanted
        assert [one["item"] for one in own if one["type"].endswith("item.done")] == [item]
        assert {one["item_id"] for one in own if "item_id" in one} == {item["id"]}
        if item["type"] == "message":
            deltas = (one["logprobs"] for one in own if one["type"].endswith("text.delta"))
            assert [*itertools.chain(*deltas)] == item["content"][0]["logprobs"]
    return whole


async def refused(server: Served, **body: Any) -> Any:
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(server, **body, **more)
        assert caught.value.type == "invalid_request_error"
    return caught.value
