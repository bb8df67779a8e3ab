"""What a request to `/v1/responses` asks for, and what is refused, the `openai` client as judge."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel, ConfigDict

from aneuron.server import ServerConfig
from aneuron.server.http.errors import ApiError
from aneuron.server.wire.decoding import decode
from aneuron.server.wire.fields import RESPONSES
from aneuron.server.wire.responses import ResponsesRequest
from aneuron.testing import Script, count_engine, no_leaks, sim_engine
from tests.server.responding import (
    CALL,
    LOGPROBS,
    OTHER,
    PATH,
    THOUGHT,
    TOOLS,
    bare,
    both_ways,
    create,
    refused,
    thinking,
    tool,
)  # fmt: skip
from tests.server.scripted import HERMES, Noise, Noted, Spoken, byte_level
from tests.support import assert_exact

if TYPE_CHECKING:
    from tests.server.scripted import Serve


# ── what is asked for ───────────────────────────────────────────────────────────────────


async def test_log_probabilities(serve_engine: Serve) -> None:
    """They are those of the message's tokens, whether these come one by one or not."""
    tokenizer = byte_level("{{ messages[0].content }}")
    script = await tokenizer.encode_rendered("né <x")
    async with (
        sim_engine(Spoken(script.tolist()), tokenizer=tokenizer) as engine,
        no_leaks(engine),
    ):
        for config in (ServerConfig(tool_parser=None), HERMES):
            async with serve_engine(engine, config) as server:
                told = await both_ways(server, include=LOGPROBS, top_logprobs=2, temperature=0)
                [part] = told["output"][0]["content"]
                assert part["text"] == "né <x"
                spelled = b"".join(bytes(one["bytes"]) for one in part["logprobs"])
                assert spelled == "né <x</s>".encode()
                assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
                assert all(one["logprob"] <= 0 for one in part["logprobs"])
                plain = await both_ways(server, include=LOGPROBS, temperature=0)
                [part] = plain["output"][0]["content"]
                assert all(one["top_logprobs"] == [] for one in part["logprobs"])
                assert (await refused(server, top_logprobs=2)).param == "top_logprobs"


@pytest.mark.parametrize("latency", [0.0, 0.001])
async def test_log_probabilities_are_of_the_message_alone(
    serve_engine: Serve, latency: float
) -> None:
    """Not of the reasoning in front of it, nor of tags, nor of a call behind it."""
    script = f"{THOUGHT}k né\n{CALL}"
    async with (
        thinking(script, Spoken, latency=latency) as engine,
        serve_engine(engine, HERMES) as server,
    ):
        for tools, text in ((TOOLS, "k né"), ([], f"k né\n{CALL}")):
            told = await both_ways(
                server, include=LOGPROBS, top_logprobs=1, temperature=0, tools=tools
            )
            [part] = told["output"][1]["content"]
            assert part["text"] == text
            spelled = b"".join(bytes(one["bytes"]) for one in part["logprobs"])
            assert spelled.decode() == text + ("" if tools else "</s>")
    async with thinking("<think>\n</think>\n\nk", Spoken) as engine, serve_engine(engine) as server:
        told = await both_ways(server, include=LOGPROBS, temperature=0)
        [item] = told["output"]
        assert [one["token"] for one in item["content"][0]["logprobs"]] == ["k", "</s>"]


@pytest.mark.parametrize("limit", [{}, {"max_output_tokens": None}, {"max_output_tokens": 10_000}])
async def test_an_answer_may_take_the_room_left(serve_engine: Serve, limit: Any) -> None:
    async with count_engine(max_model_len=64) as engine, serve_engine(engine) as server:
        told = await both_ways(server, **limit)
        assert told["usage"]["total_tokens"] == 64
        assert told["status"] == "incomplete"
        assert told["max_output_tokens"] == limit.get("max_output_tokens")


async def test_sampling_is_that_of_chats(serve_engine: Serve) -> None:
    """A seed repeats, a stop string stops; both have the same names as elsewhere."""
    async with sim_engine(Noise()) as engine, no_leaks(engine), serve_engine(engine) as server:
        body: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "max_output_tokens": 9}
        told = [await both_ways(server, **body, seed=seed) for seed in (7, 7, 8)]
        one, same, other = [each["output"][0]["content"][0]["text"] for each in told]
        assert one == same != other
        assert (told[0]["temperature"], told[0]["top_p"]) == (0.7, 0.9)
        chat: Any = server.openai.chat.completions.create
        more = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 9, "seed": 7}
        messages = [{"role": "user", "content": "hi"}]
        answer = await chat(model=server.model, messages=messages, **more)
        assert answer.choices[0].message.content == one
    async with sim_engine(Script(b"one; two")) as engine, serve_engine(engine) as server:
        stopped = await both_ways(server, stop=["; "])
        assert stopped["output"][0]["content"][0]["text"] == "one"
        assert stopped["status"] == "completed"


async def test_a_form(serve_engine: Serve) -> None:
    class Day(BaseModel):
        model_config = ConfigDict(extra="forbid")
        month: bool

    async with (
        sim_engine(Noise(), max_model_len=512) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        parse: Any = server.openai.responses.parse
        told = await parse(model=server.model, input="hi", text_format=Day)
        assert isinstance(told.output_parsed, Day)
        stream: Any = server.openai.responses.stream
        async with stream(model=server.model, input="hi", text_format=Day) as coming:
            assert isinstance((await coming.get_final_response()).output_parsed, Day)
        for schema in ({"type": "no"}, {"$ref": "https://example.com/schema"}):
            form = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
            assert (await refused(server, text=form)).param == "text.format.schema"
        named = {"type": "json_schema", "name": "s", "schema": {"enum": ["a", "b"]}}
        whole = await both_ways(server, text={"format": named}, temperature=0)
        assert whole["output"][0]["content"][0]["text"] in {'"a"', '"b"'}
        assert whole["text"]["format"]["schema"] == {"enum": ["a", "b"]}
        told = await create(server, text={"format": {"type": "text"}}, max_output_tokens=3)
        assert told.text.format.type == "text"
        pattern: Any = {"structured_outputs": {"regex": "a[bc]"}}
        told = await create(server, extra_body=pattern)
        assert told.output_text in {"ab", "ac"}


async def test_calls_can_be_forced(serve_engine: Serve) -> None:
    async with (
        sim_engine(Noise(), max_model_len=1024) as engine,
        no_leaks(engine),
        serve_engine(engine, HERMES) as server,
    ):
        g: dict[str, Any] = {"type": "function", "name": "g"}
        for choice in (g, {"type": "allowed_tools", "mode": "required", "tools": [g]}):
            told = await create(server, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
            [call] = told.output
            assert (call.type, call.name, call.arguments) == ("function_call", "g", "{}")
            assert told.tool_choice.type == choice["type"]
        told = await create(server, tools=TOOLS, tool_choice="none", max_output_tokens=2)
        assert told.tool_choice == "none"
        assert [one.type for one in told.output] == ["message"]
        required = await both_ways(
            server, tools=TOOLS[1:], tool_choice="required", parallel_tool_calls=False,
            temperature=0,
        )  # fmt: skip
        assert [one["name"] for one in required["output"]] == ["g"]
    async with (
        thinking(f"{THOUGHT}Yes.{CALL}{OTHER}") as engine,
        serve_engine(engine, HERMES) as server,
    ):
        single = await both_ways(server, tools=TOOLS, parallel_tool_calls=False)
        assert single["parallel_tool_calls"] is False
        assert [one["type"] for one in single["output"]] == [
            "reasoning", "message", "function_call",
        ]  # fmt: skip


async def test_effort_reaches_the_template(serve_engine: Serve) -> None:
    noted = Noted(vocab_size=258)
    template = "{{ reasoning_effort }}{{ enable_thinking }}{{ messages[0].content }}"
    async with (
        sim_engine(noted, tokenizer=byte_level(template)) as engine,
        serve_engine(engine) as server,
    ):
        await create(server, reasoning={"effort": "none", "summary": "auto"}, max_output_tokens=1)
        assert engine.tokenizer.decode(noted.contexts[0]) == "noneFalsehi"


# ── what is refused ─────────────────────────────────────────────────────────────────────

CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
IMAGE = {"type": "input_image", "image_url": "https://example.com/a.png"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"extra_body": {"messages": []}}, "messages"),
    ({"extra_body": {"nope": 1}}, "nope"),
    ({"extra_body": {"n": 2}}, "n"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [CALLED, {"type": "web_search_call", "id": "x"}]}, "input[1].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
    (
        {"input": [CALLED, {"type": "function_call_output", "call_id": "1", "output": [IMAGE]}]},
        "input[1].output[0]",
    ),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{**CALLED, "arguments": "[1]"}]}, "input[0].arguments"),
    ({"input": [{**CALLED, "x": 1}]}, "input[0].x"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
     "input[0].encrypted_content"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"include": ["all"]}, "include[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [tool("f"), tool("f")]}, "tools[1].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
     "tools[0].parameters.type"),
    ({"tools": [tool("f")], "tool_choice": {"type": "function", "name": "h"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_object"}}, "tools": [tool("f")]}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "tools": [tool("f")], "tool_choice": ALLOWED},
     "text.format"),
    ({"extra_body": {"structured_outputs": {"regex": "a"}}, "tools": [tool("f")]},
     "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"regex": "a"}},
      "text": {"format": {"type": "json_object"}}}, "structured_outputs"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"instructions": 5}, "instructions"),
    ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
    ({"extra_body": {"response_format": {"type": "text"}}}, "response_format"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
]  # fmt: skip


async def test_what_is_refused_is_named(serve_engine: Serve) -> None:
    async with (
        count_engine(max_model_len=256) as engine,
        no_leaks(engine),
        serve_engine(engine, HERMES) as server,
    ):
        for body, param in REFUSED:
            error = await refused(server, **body)
            assert error.param == param, body
            assert error.body["message"].startswith(param), (body, error.message)
        error = await refused(server, input="a" * 600)
        assert (error.param, error.code) == ("input", "context_length_exceeded")
        for form in ({"type": "json_object"}, {"type": "json_schema", "name": "s", "schema": {}}):
            error = await refused(server, text={"format": form})  # COUNT has no logits to mask
            assert error.param in {"text.format", "text.format.schema"}, error.message
        assert engine.stats().steps == 0
        await assert_exact(engine)


async def test_null_is_as_good_as_absent(serve_engine: Serve) -> None:
    names = {*RESPONSES.honoured, *RESPONSES.ignored, *RESPONSES.refused} - {"model", "input"}
    async with count_engine() as engine, no_leaks(engine), serve_engine(engine) as server:
        wanted = await server.post(PATH, input="hi", max_output_tokens=4)
        nulls = dict.fromkeys(names - {"max_output_tokens"})
        told = await server.post(PATH, input="hi", max_output_tokens=4, **nulls)
        assert told.status_code == 200, told.text
        assert bare(told.json()) == bare(wanted.json())
        item = {"type": None, "role": "user", "content": "hi", "id": None, "status": None}
        told = await server.post(PATH, input=[item], max_output_tokens=4)
        assert bare(told.json()) == bare(wanted.json())
        for name in ("model", "input"):
            response = await server.post(PATH, **{"input": "hi", name: None})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def taken(**fields: Any) -> ResponsesRequest:
    return decode(ResponsesRequest, json.dumps({"model": "m", "input": "", **fields}).encode())


def test_the_lists_are_kept() -> None:
    """Refused fields take values that ask for nothing; ignored ones take anything."""
    assert set(RESPONSES.honoured) == set(ResponsesRequest.__struct_fields__)
    names = [*RESPONSES.honoured, *RESPONSES.ignored, *RESPONSES.refused]
    assert len(names) == len(set(names))
    for name, one in RESPONSES.refused.items():
        with pytest.raises(ApiError) as caught:
            taken(**{name: {"x": 1}})
        assert caught.value.param == name
        for value in (None, *one.neutral):
            taken(**{name: value})
    for name in RESPONSES.ignored:
        for value in (None, 5, ["x"], {"a": {"b": [1]}}):
            assert taken(**{name: value}) == taken()


def test_every_field_of_the_official_client_is_in_a_list() -> None:
    known = {*RESPONSES.honoured, *RESPONSES.ignored, *RESPONSES.refused}
    assert {*ResponseCreateParamsBase.__annotations__, "stream"} <= known
