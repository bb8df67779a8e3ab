"""Cases 28, 29, 54, 55, 57, 66, 67, 70 and 72 over a socket, the `openai` client as judge."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest

from aneuron.server import ServerConfig
from aneuron.testing import Const, Script, count_engine, no_leaks, sim_engine
from tests.server.scripted import Heard, Noise, events, user
from tests.support import CARRIES, after

if TYPE_CHECKING:
    from tests.server.conftest import Served
    from tests.server.scripted import Serve

REGEX = "[ab]{3}[0-9]{2}"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 64}
both_endpoints = pytest.mark.parametrize("path", ENDPOINTS, ids=["chat", "completions"])


def asked(path: str, text: str = "hi") -> dict[str, Any]:
    """The prompt of either endpoint."""
    return {"messages": [user(text)]} if path == ENDPOINTS[0] else {"prompt": text}


async def refused(server: Served, path: str, **body: Any) -> dict[str, Any]:
    """The error of a request that must be one, as OpenAI's envelope has it; the client's too."""
    response = await server.post(path, **body)
    assert response.status_code == 400, (body, response.text)
    [(name, error)] = response.json().items()
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        await create(server, path, **body)
    assert caught.value.body == error
    assert (caught.value.param, caught.value.code) == (error["param"], error["code"])
    return dict(error)


async def create(server: Served, path: str, **body: Any) -> Any:
    """What the `openai` client reads; fields of the engine's own may be among the others."""
    client: Any = server.openai
    make = client.chat.completions.create if path == ENDPOINTS[0] else client.completions.create
    first = "messages" if path == ENDPOINTS[0] else "prompt"
    sent = {"model": server.model, **body}
    known = {name: sent.pop(name) for name in ("model", first, "stream") if name in sent}
    return await make(**known, extra_body=sent)


# ── lengths ─────────────────────────────────────────────────────────────────────────────


@both_endpoints
async def test_case_28_a_prompt_longer_than_the_limit(serve_engine: Serve, path: str) -> None:
    """Case 28: 100 tokens of 64 are refused, with both numbers; the next request is served."""
    async with count_engine(**SMALL) as engine, no_leaks(engine), serve_engine(engine) as server:
        overhead = len(engine.tokenizer.render_chat([user("")])) if path == ENDPOINTS[0] else 0
        for more in ({}, {"stream": True}):
            error = await refused(server, path, **asked(path, "a" * (100 - overhead)), **more)
            assert error["code"] == "context_length_exceeded"
            assert {"64", "100"} <= set(re.findall(r"\d+", error["message"])), error["message"]
        assert (await server.post(path, **asked(path), max_tokens=1)).status_code == 200


@both_endpoints
async def test_case_29_max_tokens(serve_engine: Serve, path: str) -> None:
    """Case 29: what is too large is cut to the room left, in both endpoints, and so is null."""
    async with count_engine(**SMALL) as engine, no_leaks(engine), serve_engine(engine) as server:
        error = await refused(server, path, **asked(path), max_tokens=-1)
        assert error["param"] == "max_tokens"
        for limit in ({}, {"max_tokens": None}, {"max_tokens": 10_000}, {"max_tokens": 2**31 - 1}):
            told = (await server.post(path, **asked(path), **limit)).json()
            assert told["usage"]["total_tokens"] == 64, limit
            assert told["usage"]["completion_tokens"] == 64 - told["usage"]["prompt_tokens"]
            assert told["choices"][0]["finish_reason"] == "length"
            usage = {"include_usage": True}
            *_, last = await events(server, path, **asked(path), **limit, stream_options=usage)
            assert last["usage"] == told["usage"] | {
                "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
            }


async def test_case_29_max_completion_tokens_goes_first(serve_engine: Serve) -> None:
    """Case 29: with both limits, 5 tokens of 9; a limit that is none is named."""
    async with count_engine(**SMALL) as engine, serve_engine(engine) as server:
        told = await create(
            server, ENDPOINTS[0], messages=[user("hi")], max_completion_tokens=5, max_tokens=9,
            ignore_eos=True,
        )  # fmt: skip
        assert told.usage.completion_tokens == 5
        assert told.choices[0].finish_reason == "length"
        for name in ("max_tokens", "max_completion_tokens"):
            for value in (0, -1, 1.5, "5", True):
                error = await refused(server, ENDPOINTS[0], **asked(ENDPOINTS[0]), **{name: value})
                assert error["param"] == name
    async with count_engine(**SMALL) as engine, serve_engine(engine) as server:
        error = await refused(server, ENDPOINTS[1], prompt="hi", max_completion_tokens=5)
        assert error["param"] == "max_completion_tokens"


# ── structured outputs ──────────────────────────────────────────────────────────────────


async def completed(server: Served, prompt: list[int], **params: Any) -> str:
    told = await create(server, ENDPOINTS[1], prompt=prompt, **params)
    return str(told.choices[0].text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_case_54_forms_among_free_requests(serve_engine: Serve, temperature: float) -> None:
    """Case 54: of twenty each at once, guided ones match in full, free ones are as alone."""
    prompts = [[1 + at, 2, 3] for at in range(20)]
    free: dict[str, Any] = {"max_tokens": 10, "temperature": temperature, "seed": 5}
    async with sim_engine(Noise(), **CARRIES["host"], enable_prefix_caching=False) as engine:
        alone = [(await engine.generate(prompt_token_ids=one, **free)).text for one in prompts]
    form = {"structured_outputs": {"regex": REGEX}}
    async with (
        sim_engine(Noise(), max_num_seqs=16) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        assert engine.config.async_scheduling  # a step ahead: depth 2
        wanted = [
            completed(server, prompt, **free, **more) for prompt in prompts for more in ({}, form)
        ]
        told = await asyncio.gather(*wanted)
    assert told[::2] == alone
    assert not [text for text in told[1::2] if not re.fullmatch(REGEX, text)]


async def test_case_54_forms_of_all_kinds(serve_engine: Serve) -> None:
    """Case 54, through `response_format` and `structured_outputs`, in both endpoints."""
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["big", "small"]}, "is_red": {"type": "boolean"}},
        "required": ["size", "is_red"],
        "additionalProperties": False,
    }
    named = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    forms: list[dict[str, Any]] = [
        {"response_format": named},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'start: "<" /[a-c]{2}/ ">"'}},
        {"structured_outputs": {"regex": REGEX}},
    ]
    shapes = [None, None, "yes|no", "<[a-c]{2}>", REGEX]
    async with sim_engine(Noise()) as engine, no_leaks(engine), serve_engine(engine) as server:
        for path in ENDPOINTS:
            for form, shape in zip(forms, shapes, strict=True):
                for seed in range(3):
                    sent = {**asked(path), **form, "temperature": 1.0, "seed": seed}
                    told = (await server.post(path, **sent)).json()["choices"][0]
                    text = told["text"] if "text" in told else told["message"]["content"]
                    assert told["finish_reason"] == "stop"
                    if shape is None:
                        thing = json.loads(text)
                        assert list(thing) == ["size", "is_red"]
                        assert thing["size"] in ("big", "small")
                        assert isinstance(thing["is_red"], bool)
                    else:
                        assert re.fullmatch(shape, text), text


@both_endpoints
async def test_case_54_who_cannot_mask_refuses(serve_engine: Serve, path: str) -> None:
    """Case 54: with a clear error, before anything runs."""
    async with sim_engine(Const(has_masks=False)) as engine, serve_engine(engine) as server:
        form = {"structured_outputs": {"regex": "a"}}
        error = await refused(server, path, **asked(path), **form)
        assert error["param"] == "structured_outputs.regex"
        assert "mask" in error["message"], error
        error = await refused(server, path, **asked(path), response_format={"type": "json_object"})
        assert error["param"] == "response_format"
        assert engine.stats().steps == 0
        assert (await server.post(path, **asked(path), max_tokens=2)).status_code == 200


@both_endpoints
async def test_case_55_bad_forms(serve_engine: Serve, path: str) -> None:
    """Case 55: 400, the field by its name; the next request is served each time."""
    schemas: list[Any] = [{"type": 12}, "text", [1]]
    place = "response_format.json_schema.schema"
    bad: list[tuple[dict[str, Any], str]] = [
        *(
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": one}}}, place)
            for one in schemas
        ),
        *(
            (
                {"response_format": {"type": "json_schema", "json_schema": one}},
                "response_format.json_schema",
            )
            for one in schemas[1:]
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": 12}}},
            "response_format.json_schema.type",
        ),
        ({"response_format": "text"}, "response_format"),
        ({"response_format": [1]}, "response_format"),
        ({"response_format": {"type": 12}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"type": 12}}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ]
    async with sim_engine(Noise()) as engine, no_leaks(engine), serve_engine(engine) as server:
        for form, param in bad:
            for more in ({}, {"stream": True}):
                error = await refused(server, path, **asked(path), **form, **more)
                assert error["param"] == param, (form, error)
                assert error["message"].startswith(param), error
            good = {"structured_outputs": {"choice": ["b"]}}
            assert (await server.post(path, **asked(path), **good)).status_code == 200


# ── loops ───────────────────────────────────────────────────────────────────────────────


async def test_case_57_one_loop_for_all(serve_engine: Serve) -> None:
    """Case 57: (a) engine, server and client in a coroutine; (b) the client that blocks."""
    async with (
        count_engine(latency=0.001) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        body: dict[str, Any] = {"model": server.model, "prompt": [10], "max_tokens": 20}
        stream = await create(server, ENDPOINTS[1], **body, stream=True)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            complete: Any = client.completions.create
            blocking = asyncio.create_task(asyncio.to_thread(complete, **body))
            own = engine.generate(prompt_token_ids=[10], max_tokens=20)
            ids = [token.token_id async for token in own]
            texts = [chunk.choices[0].text async for chunk in stream]
            wanted = engine.tokenizer.decode(after(10, 20))
            assert (await blocking).choices[0].text == "".join(texts) == wanted
            assert ids == after(10, 20)


# ── usage, models, prompts, framing ─────────────────────────────────────────────────────


@both_endpoints
async def test_case_66_usage_of_a_stream(serve_engine: Serve, path: str) -> None:
    """Case 66: true gives one last chunk with the totals (`events` looks for `[DONE]` next)."""
    async with count_engine() as engine, no_leaks(engine), serve_engine(engine) as server:
        body = {**asked(path), "max_tokens": 5, "n": 2}
        whole = (await server.post(path, **body)).json()["usage"]
        for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
            chunks = await events(server, path, **body, stream_options=options)
            assert not [one for one in chunks if "usage" in one or not one["choices"]]
        chunks = await events(server, path, **body)
        assert not [one for one in chunks if "usage" in one or not one["choices"]]
        chunks = await events(server, path, **body, stream_options={"include_usage": True})
        *others, last = chunks
        assert last["choices"] == []
        assert {one["usage"] for one in others} == {None}
        assert all(one["choices"] for one in others)
        stream = await create(
            server, path, **body, stream=True, stream_options={"include_usage": True}
        )
        usages = [(bool(chunk.choices), chunk.usage) async for chunk in stream]
        assert [usage for _, usage in usages[:-1]] == [None] * (len(usages) - 1)
        assert not usages[-1][0]
        assert usages[-1][1].total_tokens == whole["total_tokens"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][name] == whole[name]
        assert last["usage"]["completion_tokens"] == 10
        error = await refused(server, path, **body, stream_options={"include_usage": True})
        assert error["param"] == "stream_options"


@both_endpoints
@pytest.mark.parametrize("n", [1, 2])
async def test_usage_in_every_chunk(serve_engine: Serve, path: str, n: int) -> None:
    """With continuous_usage_stats: it grows with what was told, and ends at the totals."""
    async with (
        count_engine(latency=0.001) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**asked(path), "max_tokens": 6, "n": n, "stream_options": options}
        chunks = await events(server, path, **body)
        usages = [one["usage"] for one in chunks]
        counts = [one["completion_tokens"] for one in usages]
        assert counts == sorted(counts)
        assert counts[-1] == 6 * n
        assert len(set(counts)) > 2
        assert {one["prompt_tokens"] for one in usages} == {usages[-1]["prompt_tokens"]}
        assert not [
            one for one in usages
            if one["total_tokens"] != one["prompt_tokens"] + one["completion_tokens"]
        ]  # fmt: skip


async def test_case_67_models(serve_engine: Serve) -> None:
    """Case 67: 404 for a model of no such name; the list has the served names."""
    config = ServerConfig(served_model_names=("main", "org/other"))
    async with count_engine(max_model_len=77) as engine, serve_engine(engine, config) as server:
        for path in ENDPOINTS:
            for more in ({}, {"stream": True}):
                response = await server.post(path, **{**asked(path), "model": "nope", **more})
                assert response.status_code == 404
                [(name, error)] = response.json().items()
                assert (name, error["code"]) == ("error", "model_not_found")
                assert "nope" in error["message"]
                with pytest.raises(openai.NotFoundError) as caught:
                    await create(server, path, **{**asked(path), "model": "nope", **more})
                assert caught.value.code == "model_not_found"
        listed = await server.openai.models.list()
        assert [one.id for one in listed.data] == ["main", "org/other"]
        for name in ("main", "org/other"):
            card = await server.openai.models.retrieve(name)
            assert (card.id, card.object, card.model_extra) == (
                name, "model", {"max_model_len": 77, "root": "sim:count", "parent": None},
            )  # fmt: skip
            for path in ENDPOINTS:
                told = await create(server, path, **asked(path), model=name, max_tokens=1)
                assert told.model == name
        with pytest.raises(openai.NotFoundError) as caught:
            await server.openai.models.retrieve("nope")
        assert caught.value.code == "model_not_found"


async def test_case_70_forms_of_prompts(serve_engine: Serve) -> None:
    """Case 70: choices are prompt-major; texts and ids, one or many, are all taken."""
    async with count_engine() as engine, no_leaks(engine), serve_engine(engine) as server:
        decode = engine.tokenizer.decode
        complete = partial(create, server, ENDPOINTS[1], max_tokens=3)
        wanted = [decode(after(last, 3)) for last in (10, 10, 500, 500, 900, 900)]
        told = await complete(prompt=[[10], [500], [900]], n=2)
        assert [one.index for one in told.choices] == list(range(6))
        assert [one.text for one in told.choices] == wanted
        assert told.usage.prompt_tokens == 3
        assert told.usage.completion_tokens == 18
        texts = [""] * 6
        async for chunk in await complete(prompt=[[10], [500], [900]], n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == wanted
        for prompt, lasts in (
            (["a", "b"], [97, 98]), ([7, 500], [500]), ("ab", [98]), (["x"], [120]),
        ):  # fmt: skip
            told = await complete(prompt=prompt)
            assert [one.text for one in told.choices] == [decode(after(one, 3)) for one in lasts]
            assert {one.finish_reason for one in told.choices} == {"length"}


@both_endpoints
async def test_one_bad_prompt_refuses_the_request(serve_engine: Serve, path: str) -> None:
    """Nothing of it runs; the next request is served."""
    bad: list[tuple[dict[str, Any], str]] = [({"messages": []}, "messages")]
    if path == ENDPOINTS[1]:
        bad = [
            ({"prompt": [[10], [1 << 20]]}, "prompt[1]"),
            ({"prompt": [[10], []]}, "prompt[1]"),
            ({"prompt": ["a", 3]}, "prompt[1]"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[10], list(range(100))]}, "prompt[1]"),
        ]
    async with count_engine(**SMALL) as engine, no_leaks(engine), serve_engine(engine) as server:
        for body, param in bad:
            assert (await refused(server, path, **body))["param"] == param, body
        assert (await server.post(path, **asked(path), max_tokens=1)).status_code == 200
        await engine.wait_idle()
        assert engine.stats().generation_tokens == 1


@pytest.mark.parametrize("more", ["", "\r\n\u2028\u0085: c"])
async def test_case_72_line_ends_in_a_stream(serve_engine: Serve, more: str) -> None:
    """Case 72: each event is one line of JSON (`events` looks); no text ends the stream early."""
    text = 'a\n\ndata: [DONE]\n"b"' + more
    async with (
        sim_engine(Script(text.encode())) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        told = await events(server, ENDPOINTS[1], prompt="hi")
        assert "".join(one["choices"][0]["text"] for one in told) == text
        told = await events(server, ENDPOINTS[0], messages=[user("hi")])
        deltas = [one["choices"][0]["delta"] for one in told]
        assert "".join(one.get("content", "") for one in deltas) == text
        stream = await create(server, ENDPOINTS[1], prompt="hi", stream=True)
        chunks = [one async for one in stream]
        assert "".join(one.choices[0].text for one in chunks) == text
        assert chunks[-1].choices[0].finish_reason == "stop"
        stream = await create(server, ENDPOINTS[0], messages=[user("hi")], stream=True)
        heard = await Heard.of(stream)
        assert heard.choices[0].content == text
        assert heard.choices[0].finish_reason == "stop"
