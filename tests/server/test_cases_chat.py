"""Cases 56, 68, 69 and 71 over a socket, the `openai` client as judge; and reasoning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from aneuron.server import ServerConfig
from aneuron.testing import Script, count_engine, no_leaks, sim_engine
from tests.models.test_tokenizer import TEMPLATE
from tests.server.scripted import (
    CALLS,
    FORMATS,
    PLAIN,
    TOOLS,
    Heard,
    Noise,
    Noted,
    Told,
    both_ways,
    byte_level,
    chat,
    events,
    parsed,
    user,
)  # fmt: skip
from tests.support import after

if TYPE_CHECKING:
    from tests.server.scripted import Serve

CHAT = "/v1/chat/completions"
THINKS = PLAIN + "{% if enable_thinking %}<think>\n{% endif %}"


# ── calls of tools ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", FORMATS)
async def test_case_56_one_call(serve_engine: Serve, form: str) -> None:
    """Case 56: stream and not; then tools given, but plain text produced."""
    config = ServerConfig(tool_parser=form)
    async with (
        sim_engine(Script(FORMATS[form][0].encode()), latency=0.001) as engine,
        no_leaks(engine),
        serve_engine(engine, config) as server,
    ):
        told = await both_ways(server, tools=TOOLS)
        assert told.finish_reason == "tool_calls"
        assert parsed(told.calls) == CALLS[:1]
        assert told.content == ""
        whole = await chat(server, tools=TOOLS)
        assert whole.choices[0].message.content is None
        heard = await Heard.of(await chat(server, tools=TOOLS, stream=True))
        deltas = [one.choices[0].delta for one in heard.chunks]
        pieces = [call for delta in deltas for call in delta.tool_calls or ()]
        assert {piece.index for piece in pieces} == {0}
        functions = [piece.function for piece in pieces if piece.function]
        assert json.loads("".join(one.arguments or "" for one in functions)) == {"x": 1}
        ends = [one.choices[0].finish_reason for one in heard.chunks]
        assert ends == [None] * (len(ends) - 1) + ["tool_calls"]
        assert [one.name for one in functions if one.name] == ["f"]
        assert not any(delta.content for delta in deltas)
    async with (
        sim_engine(Script(b"No, {thanks} [x] <b>")) as engine,
        serve_engine(engine, config) as server,
    ):
        told = await both_ways(server, tools=TOOLS)
        assert told == Told(
            "No, {thanks} [x] <b>", finish_reason="stop", stop_reason=told.stop_reason
        )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("n", [1, 2])
async def test_parallel_calls(serve_engine: Serve, form: str, n: int) -> None:
    """One after the other, with ids of their own; the arguments come in pieces."""
    async with (
        sim_engine(Script(FORMATS[form][1].encode()), latency=0.001) as engine,
        no_leaks(engine),
        serve_engine(engine, ServerConfig(tool_parser=form)) as server,
    ):
        told = await both_ways(server, tools=TOOLS, n=n)
        assert parsed(told.calls) == CALLS
        assert told.content == ("Let me see." if form == "hermes" else "")
        whole = await chat(server, tools=TOOLS, n=n)
        ids = [call.id for one in whole.choices for call in one.message.tool_calls]
        assert len(set(ids)) == 2 * n
        if form == "mistral":  # its templates refuse others
            assert all(len(one) == 9 and one.isalnum() for one in ids)
        heard = await Heard.of(await chat(server, tools=TOOLS, n=n, stream=True))
        pieces = [call for one in heard.chunks for choice in one.choices
                  for call in choice.delta.tool_calls or ()]  # fmt: skip
        assert len(pieces) > 2 * 2 * n


# ── templates ───────────────────────────────────────────────────────────────────────────


async def test_case_68_a_model_without_a_template(serve_engine: Serve) -> None:
    """Case 68: the server starts; chat gets advice; completions are served."""
    async with (
        count_engine(tokenizer=byte_level()) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        for more in ({}, {"stream": True}, {"tools": TOOLS}):
            with pytest.raises(openai.BadRequestError) as caught:
                await chat(server, max_tokens=2, **more)
            assert caught.value.type == "invalid_request_error"
            assert caught.value.param == "messages"
            assert "chat_template.jinja" in caught.value.message
            assert "/v1/completions" in caught.value.message
        told = await server.openai.completions.create(model=server.model, prompt="hi", max_tokens=2)
        assert told.usage is not None
        assert told.usage.completion_tokens == 2


async def test_case_69_one_start_token(serve_engine: Serve) -> None:
    """Case 69: the template prints it, the tokenizer adds it; `/tokenize` says the same."""
    noted = Noted(vocab_size=258)
    async with (
        sim_engine(noted, tokenizer=byte_level(TEMPLATE)) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        messages: list[Any] = [user("hi")]
        await chat(server, messages=messages, max_tokens=1)
        told = (await server.post("/tokenize", messages=messages)).json()["tokens"]
        assert told == noted.contexts[0]
        assert told[0] == 256
        assert told.count(256) == 1
        noted.contexts.clear()
        await server.openai.completions.create(model=server.model, prompt="hi", max_tokens=1)
        told = (await server.post("/tokenize", prompt="hi")).json()["tokens"]
        assert told == noted.contexts[0]
        assert told[0] == 256
        assert told.count(256) == 1


async def test_variables_of_the_template(serve_engine: Serve) -> None:
    noted = Noted(vocab_size=258)
    template = PLAIN + "{{ reasoning_effort }}/{{ enable_thinking }}/{{ mood }}"
    async with (
        sim_engine(noted, tokenizer=byte_level(template)) as engine,
        serve_engine(engine) as server,
    ):
        for body, ending in (
            ({}, "//"),
            ({"reasoning_effort": "low"}, "low/True/"),
            ({"reasoning_effort": "none"}, "none/False/"),
            ({"extra_body": {"chat_template_kwargs": {"mood": "calm"}}}, "//calm"),
            ({"extra_body": {"chat_template_kwargs": {"tokenizer": "x"}}}, "//"),
        ):
            noted.contexts.clear()
            await chat(server, max_tokens=1, **body)
            assert engine.tokenizer.decode(noted.contexts[0]).endswith(f"assistant:{ending}")
        for param, value in (
            ("messages", []),
            ("self", 1),
            ("chat_template", "x"),
            ("bos_token", "x"),
        ):
            response = await server.post(
                CHAT, messages=[user("hi")], chat_template_kwargs={param: value}
            )
            assert response.status_code == 400
            assert response.json()["error"]["param"].startswith("chat_template_kwargs")


# ── the stream, and reasoning ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 3])
async def test_case_71_the_shape_of_a_stream(serve_engine: Serve, n: int) -> None:
    """Case 71: role first, the finish alone in a chunk, one id, `[DONE]` (`events` looks)."""
    async with (
        count_engine(latency=0.001) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        chunks = await events(server, CHAT, messages=[user("hi")], max_tokens=5, n=n)
        assert len({one["id"] for one in chunks}) == 1
        assert chunks[0]["id"].startswith("chatcmpl-")
        assert {one["object"] for one in chunks} == {"chat.completion.chunk"}
        assert {one["model"] for one in chunks} == {server.model}
        for index in range(n):
            own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
            assert own[0]["delta"]["role"] == "assistant"
            assert not [one for one in own[1:] if "role" in one["delta"]]
            assert own[-1]["delta"] == {}
            assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + ["length"]
        body: dict[str, Any] = {"max_tokens": 5, "n": n, "stream": True}
        heard = await Heard.of(await chat(server, **body))
        assert sorted(heard.choices) == list(range(n))
        assert len({one.id for one in heard.chunks}) == 1
        ids = engine.tokenizer.render_chat([user("hi")])
        first = (await engine.tokenizer.encode_rendered(ids))[-1]
        wanted = engine.tokenizer.decode(after(int(first), 5))
        assert {one.content for one in heard.choices.values()} == {wanted}


@pytest.mark.parametrize("begins", [True, False])
async def test_reasoning_is_told_apart(serve_engine: Serve, begins: bool) -> None:
    """Whether the prompt opens it or the answer does; also where it is cut off."""
    said = "Hm, <b>.\n</think>\n\nFour."
    script = said if begins else f"<think>\n{said}"
    tokenizer = byte_level(THINKS)
    model = Script(tokenizer.encode_word(script), vocab_size=258)
    kwargs = {"extra_body": {"chat_template_kwargs": {"enable_thinking": begins}}}
    async with sim_engine(model, latency=0.001, tokenizer=tokenizer) as engine, no_leaks(engine):
        async with serve_engine(engine) as server:
            told = await both_ways(server, **kwargs)
            assert (told.reasoning.strip(), told.content) == ("Hm, <b>.", "Four.")
            assert told.finish_reason == "stop"
            cut = len(script) - len(said) + 6
            told = await both_ways(server, **kwargs, max_tokens=cut)
            assert (told.reasoning, told.content) == ("Hm, <b", "")
            assert told.finish_reason == "length"
        config = ServerConfig(reasoning_field="reasoning_content")
        async with serve_engine(engine, config) as server:
            message = (await chat(server, **kwargs)).choices[0].message
            assert message.reasoning_content.strip() == "Hm, <b>."
            assert not hasattr(message, "reasoning")
            deltas = [
                chunk.choices[0].delta async for chunk in await chat(server, **kwargs, stream=True)
            ]
            pieces = [getattr(one, "reasoning_content", "") for one in deltas]
            assert "".join(pieces) == message.reasoning_content
            assert len([one for one in pieces if one]) > 2


async def test_reasoning_tokens_do_not_depend_on_the_reader(serve_engine: Serve) -> None:
    """Fast or slow, streamed or not: tokens are counted up to the last that reasons."""
    script = "Hm.</think>Four."
    tokenizer = byte_level(THINKS)
    model = Script(tokenizer.encode_word(script), vocab_size=258)
    kwargs = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    counts = set()
    for latency in (0.0, 0.001):
        async with (
            sim_engine(model, latency=latency, tokenizer=tokenizer) as engine,
            serve_engine(engine) as server,
        ):
            usage = (await chat(server, **kwargs)).usage
            counts.add(usage.completion_tokens_details.reasoning_tokens)
            options = {"include_usage": True}
            heard = await Heard.of(
                await chat(server, **kwargs, stream=True, stream_options=options)
            )
            told = heard.chunks[-1].usage
            assert told is not None
            assert told.completion_tokens_details is not None
            counts.add(told.completion_tokens_details.reasoning_tokens)
    assert counts == {len("Hm.")}


async def test_a_form_leaves_no_room_for_reasoning(serve_engine: Serve) -> None:
    """The answer is what was asked for, and all content, though the prompt opens reasoning."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a", "b"]}}}
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    async with (
        sim_engine(Noise(), tokenizer=byte_level(THINKS)) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        for more in ({"response_format": form}, {"structured_outputs": {"regex": '"[ab]"'}}):
            told = await both_ways(server, extra_body={**kwargs, **more}, temperature=0)
            assert json.loads(told.content) in ("a", "b")
            assert told.reasoning == ""
