"""Fields of requests over a socket, wrong and null ones; paths, ids and texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aneuron.server.wire.fields import CHAT, COMPLETIONS
from aneuron.testing import count_engine, no_leaks
from tests.server.scripted import byte_level, user

if TYPE_CHECKING:
    from tests.server.scripted import Serve

CHATS = "/v1/chat/completions"
TEXTS = "/v1/completions"
both_endpoints = pytest.mark.parametrize("path", [CHATS, TEXTS], ids=["chat", "completions"])


def asked(path: str, text: str = "hi") -> dict[str, Any]:
    return {"messages": [user(text)]} if path == CHATS else {"prompt": text}


# ── fields ──────────────────────────────────────────────────────────────────────────────


@both_endpoints
async def test_null_is_as_good_as_absent(serve_engine: Serve, path: str) -> None:
    fields = CHAT if path == CHATS else COMPLETIONS
    names = {*fields.honoured, *fields.ignored, *fields.refused}
    nulls = dict.fromkeys(names - {"model", "messages", "prompt"})
    assert len(nulls) > 50
    async with count_engine() as engine, no_leaks(engine), serve_engine(engine) as server:
        body = {**asked(path), "max_tokens": 4}
        wanted = (await server.post(path, **body)).json()
        response = await server.post(path, **nulls | body)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        assert choices == wanted["choices"]
        for name in ("model", "messages" if path == CHATS else "prompt"):
            response = await server.post(path, **body | {name: None})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == name


@both_endpoints
async def test_fields_that_are_wrong(serve_engine: Serve, path: str) -> None:
    """400, the field at fault as `param`; nothing is computed."""
    bad: list[tuple[dict[str, Any], str]] = [
        ({"colour": "red"}, "colour"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.0}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stop": 3}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
    ]
    if path == CHATS:
        bad += [
            ({"logprobs": 5}, "logprobs"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"messages": "hi"}, "messages"),
            ({"messages": ["hi"]}, "messages[0]"),
            ({"messages": [{"content": "hi"}]}, "messages[0].role"),
            ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "messages[0].content[0]",
            ),
            ({"documents": [{"text": "a"}]}, "documents"),
            ({"functions": []}, "functions"),
        ]
    else:
        bad += [
            ({"logprobs": True}, "logprobs"),
            ({"logprobs": 21}, "logprobs"),
            ({"prompt": 3}, "prompt"),
            ({"suffix": "x"}, "suffix"),
        ]
    async with count_engine() as engine, no_leaks(engine), serve_engine(engine) as server:
        for fields, param in bad:
            response = await server.post(path, **asked(path) | fields)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), (fields, error)
            assert error["type"] == "invalid_request_error"
        for raw in (b"", b"{", b"[]", b"3", b'{"model": "\xff"}', b'{"seed": NaN}', b"[" * 99_999):
            response = await server.http.post(path, content=raw)
            assert response.status_code == 400, raw
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert engine.stats().steps == 0


# ── other endpoints ─────────────────────────────────────────────────────────────────────


async def test_paths_and_methods_that_are_not_there(serve_engine: Serve) -> None:
    async with count_engine() as engine, serve_engine(engine) as server:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("POST", "/v1/embeddings", 404),
            ("GET", CHATS, 405),
            ("DELETE", "/v1/models", 405),
        ):
            response = await server.http.request(method, path)
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert ("allow" in response.headers) == (status == 405), (method, path)


async def test_texts_to_ids_and_back(serve_engine: Serve) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}{{ tools | length if tools else '' }}"
    )
    tool = {"type": "function", "function": {"name": "f"}}
    async with (
        count_engine(tokenizer=byte_level(template), max_model_len=99) as engine,
        serve_engine(engine) as server,
    ):
        tokenizer = engine.tokenizer

        async def ids_of(**body: Any) -> str:
            told = (await server.post("/tokenize", **body)).json()
            assert told["max_model_len"] == 99
            assert told["count"] == len(told["tokens"])
            text: str = tokenizer.decode(told["tokens"], skip_special_tokens=False)
            return text

        assert await ids_of(prompt="é!") == "<s>é!"
        assert await ids_of(prompt="é!", add_special_tokens=False) == "é!"
        assert await ids_of(messages=[user("a"), user("b")]) == "<s>[a][b]>"
        assert await ids_of(messages=[user("a")], add_generation_prompt=False) == "<s>[a]"
        assert await ids_of(messages=[user("a")], tools=[tool]) == "<s>[a]>1"
        told = (await server.post("/tokenize", prompt="é", return_token_strs=True)).json()
        assert told["token_strs"] == ["<s>", "\ufffd", "\ufffd"]
        told = (await server.post("/detokenize", tokens=told["tokens"])).json()
        assert told == {"prompt": "<s>é"}
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": [user("a")]}, "messages"),
            ("/tokenize", {"prompt": 3}, "prompt"),
            ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
            ("/detokenize", {"tokens": [3, 1 << 20]}, "tokens[1]"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ):
            response = await server.post(path, **body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), body
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            response = await server.post(path, **body, model="nope")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "model_not_found"
