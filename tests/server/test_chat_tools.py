"""Calls of tools over a socket: cut off, of no tool, forced, none; a conversation with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from aneuron.models.tokenizer import ByteTokenizer
from aneuron.server import ServerConfig
from aneuron.testing import Script, no_leaks, sim_engine
from tests.server.scripted import (
    CALLS,
    FORMATS,
    HERMES,
    PLAIN,
    TOOLS,
    Noise,
    Noted,
    both_ways,
    byte_level,
    chat,
    parsed,
    tool,
    user,
)  # fmt: skip

if TYPE_CHECKING:
    from tests.server.scripted import Serve


async def test_calls_that_are_cut_off_or_of_no_tool(serve_engine: Serve) -> None:
    """The finish says "length"; what is no call of the tools stays text."""
    text = FORMATS["hermes"][0]
    async with (
        sim_engine(Script(text.encode()), latency=0.001) as engine,
        no_leaks(engine),
        serve_engine(engine, HERMES) as server,
    ):
        told = await both_ways(server, tools=TOOLS, max_tokens=len(text) - 18)
        assert told.finish_reason == "length"
        assert told.calls
        assert told.calls[0][0] == "f"
        assert told.content == ""
        told = await both_ways(server, tools=TOOLS, max_tokens=5)
        assert (told.content, told.calls, told.finish_reason) == (text[:5], [], "length")
        told = await both_ways(server, tools=TOOLS[1:])
        assert (told.content, told.calls, told.finish_reason) == (text, [], "stop")


@pytest.mark.parametrize("form", FORMATS)
async def test_calls_beyond_the_one_that_is_allowed_go(serve_engine: Serve, form: str) -> None:
    """With parallel_tool_calls: false, where nothing forces the form of the answer."""
    async with (
        sim_engine(Script(FORMATS[form][1].encode()), latency=0.001) as engine,
        no_leaks(engine),
        serve_engine(engine, ServerConfig(tool_parser=form)) as server,
    ):
        told = await both_ways(server, tools=TOOLS, parallel_tool_calls=False)
        assert (parsed(told.calls), told.finish_reason) == (CALLS[:1], "tool_calls")


async def test_tool_choice_none_calls_nothing(serve_engine: Serve) -> None:
    """The text is as it came, and the template sees no tools."""
    text = FORMATS["hermes"][1]
    template = PLAIN + "{{ tools | length if tools else 0 }}<tool_call>"
    async with (
        sim_engine(Script(text.encode(), vocab_size=258), tokenizer=ByteTokenizer()) as engine,
        no_leaks(engine),
        serve_engine(engine, HERMES) as server,
    ):
        for tools in (TOOLS, None):
            told = await both_ways(server, tools=tools, tool_choice="none")
            assert (told.content, told.calls, told.finish_reason) == (text, [], "stop")
    noted = Noted(vocab_size=258)
    async with (
        sim_engine(noted, tokenizer=byte_level(template)) as engine,
        serve_engine(engine) as server,
    ):
        for choice, count in (("none", "0"), ("auto", "2"), (None, "2")):
            noted.contexts.clear()
            await chat(server, tools=TOOLS, tool_choice=choice, max_tokens=1)
            prompt = engine.tokenizer.decode(noted.contexts[0])
            assert prompt.endswith(f"assistant:{count}<tool_call>")


@pytest.mark.parametrize("form", FORMATS)
async def test_forced_calls(serve_engine: Serve, form: str) -> None:
    """A model that says anything calls what it must, with arguments that fit the schema."""
    config = ServerConfig(tool_parser=form)
    # Integers of any length are a form, too: this one has an end.
    tools = [tool("f", x={"type": "integer", "minimum": 0, "maximum": 99}), TOOLS[1]]
    named = {"type": "function", "function": {"name": "g"}}
    allowed = {
        "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]},
    }  # fmt: skip
    async with (
        sim_engine(Noise(), max_model_len=4096) as engine,
        no_leaks(engine),
        serve_engine(engine, config) as server,
    ):
        for seed in range(2):
            body = {"tools": tools, "temperature": 1.0, "seed": seed}
            told = await both_ways(server, **body, tool_choice=named)
            assert [name for name, _ in told.calls] == ["g"]
            assert told.finish_reason == "tool_calls"
            told = await both_ways(
                server, **body, tool_choice="required", parallel_tool_calls=False, logprobs=True
            )
            assert len(told.calls) == 1
            said = b"".join(bytes(one.bytes) for one in told.tokens)
            assert said.count(b'"name"') == 1  # no other was left out
            for choice in ("required", allowed):
                told = await both_ways(server, **body, tool_choice=choice, n=2)
                assert 1 <= len(told.calls) <= 16
                assert told.content == ""
                for name, arguments in parsed(told.calls):
                    if name == "f":
                        assert 0 <= arguments["x"] <= 99
                        assert choice == "required"
                    else:
                        assert (name, list(arguments)) == ("g", ["day"])
                        assert arguments["day"] in ("today", "never")


async def test_tool_choices_that_cannot_be(serve_engine: Serve) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": TOOLS},
         "tool_choice"),
        ({"tool_choice": "must", "tools": TOOLS}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [tool("f", x={"type": 12})], "tool_choice": "required"}, "tool_choice"),
    ]  # fmt: skip
    async with sim_engine(Noise()) as engine, no_leaks(engine):
        async with serve_engine(engine, HERMES) as server:
            for body, param in bad:
                with pytest.raises(openai.BadRequestError) as caught:
                    await chat(server, **body)
                assert caught.value.param == param, body
        async with serve_engine(engine) as server:  # nobody knows its form of calls
            with pytest.raises(openai.BadRequestError) as caught:
                await chat(server, tools=TOOLS, tool_choice="required")
            assert caught.value.param == "tool_choice"


async def test_a_conversation_with_calls_goes_on(serve_engine: Serve) -> None:
    """An answer with calls can be sent back as it came, with what the tool gave."""
    noted = Noted(vocab_size=258)
    template = (
        "{% for m in messages %}{{ m.role }}={% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.arguments.x }}{% else %}{{ m.content }}{% endif %};"
        "{% endfor %}<tool_call>"
    )
    script = FORMATS["hermes"][0].encode()
    async with sim_engine(Script(script)) as engine, serve_engine(engine, HERMES) as server:
        answer = (await chat(server, tools=TOOLS)).choices[0].message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "two"}
    async with (
        sim_engine(noted, tokenizer=byte_level(template)) as engine,
        serve_engine(engine) as server,
    ):
        messages = [user("hi"), answer.model_dump(), result]
        await chat(server, messages=messages, tools=TOOLS, max_tokens=1)
        wanted = "user=hi;assistant=1;tool=two;<tool_call>"
        assert engine.tokenizer.decode(noted.contexts[0]) == wanted
