"""`/v1/responses` over a socket, the `openai` client as judge: answers, whole and as events."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from aneuron.server.responses import ResponseSpeaker
from aneuron.testing import Fault, Script, count_engine, no_leaks, sim_engine
from tests.server.responding import (
    CALL,
    OTHER,
    PATH,
    THOUGHT,
    TOOLS,
    both_ways,
    create,
    events,
    kinds,
    refused,
    thinking,
)  # fmt: skip
from tests.server.scripted import HERMES, Noted, byte_level
from tests.support import assert_exact, until

if TYPE_CHECKING:
    from tests.server.scripted import Serve


# ── answers ─────────────────────────────────────────────────────────────────────────────


async def test_a_text(serve_engine: Serve) -> None:
    async with (
        sim_engine(Script(b"Well, hello."), latency=0.001) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        told = await create(server, metadata={"a": "b"}, instructions="Be kind.", store=False)
        assert told.output_text == "Well, hello."
        assert (told.object, told.status, told.error) == ("response", "completed", None)
        assert told.id.startswith("resp_")
        assert told.model == server.model
        assert told.metadata == {"a": "b"}
        assert told.instructions == "Be kind."
        assert told.completed_at is not None
        assert told.usage.output_tokens == 13
        assert told.usage.total_tokens == told.usage.input_tokens + 13
        assert told.usage.output_tokens_details.reasoning_tokens == 0
        await both_ways(server)
        found = await events(server)
        assert kinds(found) == [
            "created", "in_progress", "output_item.added", "content_part.added",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        assert [one["response"]["status"] for one in found[:2]] == ["in_progress"] * 2
        assert len({one["response"]["id"] for one in found if "response" in one}) == 1


async def test_an_answer_in_one_is_built_once(
    serve_engine: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each delta: all of its text is put together each time."""
    built = []
    build = ResponseSpeaker._response

    def counted(*args: Any, **kwargs: Any) -> Any:
        built.append(args)
        return build(*args, **kwargs)

    monkeypatch.setattr(ResponseSpeaker, "_response", counted)
    async with count_engine(latency=0.001) as engine, serve_engine(engine) as server:
        told = await create(server, max_output_tokens=20)
        assert (told.usage.output_tokens, len(built)) == (20, 1)


async def test_tokens_found_in_the_prefix_cache_are_told(serve_engine: Serve) -> None:
    async with count_engine(block_size=16) as engine, serve_engine(engine) as server:
        cached = [
            (await create(server, input="a" * 40, max_output_tokens=1)).usage
            for _ in range(2)
        ]  # fmt: skip
        assert [one.input_tokens_details.cached_tokens >= 32 for one in cached] == [False, True]
        assert cached[0].input_tokens == cached[1].input_tokens > 40


async def test_the_client_reads_a_stream(serve_engine: Serve) -> None:
    script = f"{THOUGHT}Let me see.\n{CALL}{OTHER}"
    async with (
        thinking(script) as engine,
        serve_engine(engine, HERMES) as server,
    ):
        stream: Any = server.openai.responses.stream
        async with stream(model=server.model, input="hi", tools=TOOLS) as events_of:
            snapshots = [one.snapshot async for one in events_of if hasattr(one, "snapshot")]
            final = await events_of.get_final_response()
        assert snapshots[-1] == "{}"
        assert final.output_text == "Let me see."
        assert [one.type for one in final.output] == [
            "reasoning", "message", "function_call", "function_call",
        ]  # fmt: skip
        assert final.output[0].content[0].text.strip() == "Hm."
        assert final.output[2].parsed_arguments == {"x": 1}


async def test_reasoning_and_calls_are_items(serve_engine: Serve) -> None:
    script = f"{THOUGHT}{CALL}{OTHER}"
    async with (
        thinking(script) as engine,
        serve_engine(engine, HERMES) as server,
    ):
        told = await both_ways(server, tools=TOOLS)
        reasoning, *calls = told["output"]
        assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
        assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [
            ("f", {"x": 1}), ("g", {}),
        ]  # fmt: skip
        assert len({one["call_id"] for one in calls}) == 2
        assert told["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>\nHm.")
        assert kinds(await events(server, tools=TOOLS)) == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "reasoning_text.delta",
            "reasoning_text.done", "content_part.done", "output_item.done",
            *["output_item.added", "function_call_arguments.delta",
              "function_call_arguments.done", "output_item.done"] * 2,
            "completed",
        ]  # fmt: skip


async def test_reasoning_tokens_do_not_depend_on_the_reader(serve_engine: Serve) -> None:
    """Fast or slow, streamed or not, with log probabilities or without."""
    counts = set()
    for latency in (0.0, 0.001):
        async with (
            thinking(f"{THOUGHT}Four.", latency=latency) as engine,
            serve_engine(engine) as server,
        ):
            for _ in range(5):
                told = await both_ways(server)
                counts.add(told["usage"]["output_tokens_details"]["reasoning_tokens"])
    assert counts == {len("<think>\nHm.")}


async def test_an_answer_goes_back_as_input(serve_engine: Serve) -> None:
    """Items of one answer are one turn again, as the chat template sees it."""
    script = f"{THOUGHT}Let me see.\n{CALL}{OTHER}"
    async with (
        thinking(script) as engine,
        serve_engine(engine, HERMES) as server,
    ):
        stream: Any = server.openai.responses.stream
        async with stream(model=server.model, input="hi", tools=TOOLS) as coming:
            answers = [await create(server, tools=TOOLS), await coming.get_final_response()]
    noted = Noted(vocab_size=258)
    template = (
        "{% for m in messages %}{{ m.role }}={{ m.reasoning | default('') | trim }},{{ m.content }}"
        "{% for c in m.tool_calls or [] %},{{ c.function.arguments.x }}{% endfor %};{% endfor %}!"
    )
    async with (
        sim_engine(noted, tokenizer=byte_level(template)) as engine,
        serve_engine(engine) as server,
    ):
        for answer in answers:
            noted.contexts.clear()
            call = answer.output[2].call_id
            items = [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                *answer.output,
                {"type": "function_call_output", "call_id": call, "output": "two"},
                {"role": "developer", "content": "Go on."},
            ]
            await create(
                server, input=items, instructions="Be kind.", tools=TOOLS, max_output_tokens=1
            )
            assert engine.tokenizer.decode(noted.contexts[0]) == (
                "system=,Be kind.;user=,hi;assistant=Hm.,Let me see.,1,;tool=,two;system=,Go on.;!"
            )


async def test_turns_of_the_assistant_in_a_row_stay_apart(serve_engine: Serve) -> None:
    noted = Noted(vocab_size=258)
    template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.reasoning }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %};{% endfor %}"
    )
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]}
    said = {"type": "message", "role": "assistant", "content": "s"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}
    gave = {"type": "function_call_output", "call_id": "1", "output": "g"}
    refusal = {
        "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}],
    }  # fmt: skip
    async with (
        sim_engine(noted, tokenizer=byte_level(template)) as engine,
        serve_engine(engine) as server,
    ):
        for items, wanted in (
            ([said, said], "as;as;"),
            ([reasoning, said, reasoning, said], "ars;ars;"),
            ([said, call, call, said], "as(f)(f);as;"),
            ([call, gave, reasoning, call], "a(f);tg;ar(f);"),
            ([call, reasoning], "a(f);ar;"),
            ([refusal], "ano;"),
        ):
            noted.contexts.clear()
            await create(server, input=items, max_output_tokens=1)
            assert engine.tokenizer.decode(noted.contexts[0]) == wanted


async def test_an_answer_that_is_cut_off(serve_engine: Serve) -> None:
    """It is incomplete, and so is the item that was coming; those before it are not."""
    async with (
        sim_engine(Script(b"a long story"), latency=0.001) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        told = await both_ways(server, max_output_tokens=6)
        assert told["status"] == "incomplete"
        assert told["incomplete_details"] == {"reason": "max_output_tokens"}
        assert told["completed_at"] is None
        [item] = told["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", "a long")
    script = f"Yes.{CALL}"
    async with (
        sim_engine(Script(script.encode())) as engine,
        serve_engine(engine, HERMES) as server,
    ):
        told = await both_ways(server, tools=TOOLS, max_output_tokens=len(script) - 20)
        assert [one["status"] for one in told["output"]] == ["completed", "incomplete"]
        assert told["output"][1]["arguments"].startswith('{"x')


async def test_an_empty_answer_is_an_empty_message(serve_engine: Serve) -> None:
    async with sim_engine(Script(b"")) as engine, serve_engine(engine) as server:
        told = await both_ways(server)
        assert [one["content"][0]["text"] for one in told["output"]] == [""]
        assert (await create(server)).output_text == ""


# ── ends before its time ────────────────────────────────────────────────────────────────


async def test_a_fault_amid_a_stream(serve_engine: Serve) -> None:
    async with (
        count_engine(faults=[Fault(step=6, status=1003)]) as engine,
        serve_engine(engine) as server,
    ):
        found = await events(server, max_output_tokens=50)
        assert [one["type"] for one in found].count("response.failed") == 1
        last = found[-1]["response"]
        assert (found[-1]["type"], last["status"]) == ("response.failed", "failed")
        assert (last["error"]["code"], last["error"]["type"]) == ("server_error", "device_error")
        assert [one["status"] for one in last["output"]] == ["incomplete"]
        await assert_exact(engine)
    async with (
        count_engine(faults=[Fault(step=6, status=1003)]) as engine,
        serve_engine(engine) as server,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await create(server, max_output_tokens=50)
        assert caught.value.code == "device_error"


async def test_who_leaves_is_not_served(serve_engine: Serve) -> None:
    async with (
        count_engine(latency=0.002) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        stream = await create(server, stream=True)
        async for one in stream:
            if one.type == "response.output_text.delta":
                break
        await stream.close()
        await until(lambda: not server.state.num_open)
        waiting = asyncio.create_task(create(server))
        await until(lambda: bool(server.state.num_open))
        waiting.cancel()
        await until(lambda: not server.state.num_open)
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_server_that_stops(serve_engine: Serve) -> None:
    async with (
        count_engine(latency=0.002) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        stream = await create(server, stream=True)
        types = []
        async for one in stream:
            types.append(one.type)
            if one.type == "response.in_progress":
                await server.state.drain(0)
        assert types[-1] == "response.failed"
        with pytest.raises(openai.InternalServerError) as caught:
            await create(server)
        assert caught.value.status_code == 503
        assert caught.value.code == "engine_unavailable"


async def test_what_is_not_there(serve_engine: Serve) -> None:
    """Nothing was stored; a model that nobody serves; messages without a template."""
    async with count_engine() as engine, no_leaks(engine), serve_engine(engine) as server:
        stored: Any = server.openai.responses
        for method in (stored.retrieve, stored.cancel, stored.delete):
            with pytest.raises(openai.NotFoundError) as caught:
                await method("resp_1")
            assert caught.value.code == "not_found"
        for more in ({}, {"stream": True}):
            with pytest.raises(openai.NotFoundError) as caught:
                await create(server, model="nope", **more)
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        response = await server.http.get(PATH)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
    async with count_engine(tokenizer=byte_level()) as engine, serve_engine(engine) as server:
        error = await refused(server)
        assert error.param == "input"
        assert "chat_template.jinja" in error.body["message"]
