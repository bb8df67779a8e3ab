"""What answers hold, streamed and not: texts, stops, seeds, echo, log probabilities."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron.models.tokenizer import ByteTokenizer
from aneuron.testing import Const, Script, count_engine, no_leaks, sim_engine
from tests.server.scripted import Heard, Noise, Spoken, Told, user

if TYPE_CHECKING:
    from tests.server.conftest import Served
    from tests.server.scripted import Serve

CHATS = "/v1/chat/completions"
TEXTS = "/v1/completions"
both_endpoints = pytest.mark.parametrize("path", [CHATS, TEXTS], ids=["chat", "completions"])
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def asked(path: str, text: str = "hi") -> dict[str, Any]:
    return {"messages": [user(text)]} if path == CHATS else {"prompt": text}


def create(server: Served, path: str) -> Any:
    """The `openai` client's method for an endpoint."""
    return server.openai.chat.completions.create if path == CHATS else (
        server.openai.completions.create
    )  # fmt: skip


async def texts(server: Served, path: str, **body: Any) -> list[tuple[str, str, Any]]:
    """Text, finish and stop of each choice; a stream must say the same as the whole."""
    call, sent = create(server, path), {"model": server.model, **body}
    whole = await call(**sent)
    told = [
        (one.message.content if path == CHATS else one.text, one.finish_reason, one.stop_reason)
        for one in whole.choices
    ]
    parts: dict[int, list[str]] = {}
    ends: dict[int, tuple[str, Any]] = {}
    async for chunk in await call(**sent, stream=True):
        for one in chunk.choices:
            assert one.index not in ends
            text = one.delta.content if path == CHATS else one.text
            parts.setdefault(one.index, []).append(text or "")
            if one.finish_reason is not None:
                ends[one.index] = (one.finish_reason, one.stop_reason)
    assert [("".join(parts[at]), *ends[at]) for at in sorted(parts)] == told
    return told


# ── texts ───────────────────────────────────────────────────────────────────────────────


@both_endpoints
async def test_chunks_join_to_the_whole_text(serve_engine: Serve, path: str) -> None:
    """Random prompts, broken characters, stop strings, several choices."""
    source = random.Random(7)
    async with sim_engine(Noise()) as engine, no_leaks(engine), serve_engine(engine) as server:
        seen = set()
        for seed in range(12):
            text = "".join(source.choices("abc é🔥\n", k=source.randint(1, 20)))
            stop = [None, ["\n"], [chr(source.randrange(32, 127)) for _ in range(8)]][seed % 3]
            told = await texts(
                server, path, **asked(path, text), seed=seed, max_tokens=40,
                temperature=(0.0, 1.0)[seed % 2], n=1 + seed % 3, stop=stop,
            )  # fmt: skip
            seen |= {(finish, type(why)) for _, finish, why in told}
        assert {("length", type(None)), ("stop", str)} <= seen


async def test_stop_and_its_reason(serve_engine: Serve) -> None:
    """A string, an id, the end of the model; the string is kept where that is asked for."""
    async with (
        sim_engine(Script(b"one, two; three")) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        for path in (CHATS, TEXTS):
            body = asked(path)
            for more, wanted in (
                ({"stop": ";"}, ("one, two", "stop", ";")),
                ({"stop": [";", "tw"]}, ("one, ", "stop", "tw")),
                ({"stop": "thre", "max_tokens": 13}, ("one, two; thr", "length", None)),
                ({"extra_body": {"stop_token_ids": [ord("t")]}}, ("one, ", "stop", ord("t"))),
                (
                    {"stop": ";", "extra_body": {"include_stop_str_in_output": True}},
                    ("one, two;", "stop", ";"),
                ),
                ({"stop": ",", "extra_body": {"min_tokens": 5}}, ("one, two; three", "stop", None)),
                ({"max_tokens": 3}, ("one", "length", None)),
            ):
                [told] = await texts(server, path, **body, **more)
                assert told == wanted, more


@both_endpoints
async def test_a_seed_repeats(serve_engine: Serve, path: str) -> None:
    """Streamed or not, alone or in company; choices differ from each other."""
    async with sim_engine(Noise()) as engine, no_leaks(engine), serve_engine(engine) as server:
        body = {**asked(path), "temperature": 1.0, "max_tokens": 12, "n": 4}
        told = await texts(server, path, **body, seed=7)
        assert await texts(server, path, **body, seed=7) == told
        assert len({text for text, *_ in told}) > 1
        assert await texts(server, path, **body, seed=8) != told


async def test_echo(serve_engine: Serve) -> None:
    """The prompt's text comes first, of texts and of ids, in each choice."""
    async with count_engine() as engine, no_leaks(engine), serve_engine(engine) as server:
        for prompt, wanted in (
            ("ab", ["abc"] * 2),
            (["ab", "é"], ["abc"] * 2 + ["é\ufffd"] * 2),
            ([[65, 66], [67]], ["ABC"] * 2 + ["CD"] * 2),
        ):
            told = await texts(server, TEXTS, prompt=prompt, echo=True, n=2, max_tokens=1)
            assert [text for text, *_ in told] == wanted
        response = await server.post(TEXTS, prompt="ab", echo=True, max_tokens=0)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_tokens"


# ── log probabilities ───────────────────────────────────────────────────────────────────


def assert_sound(tokens: list[Any], text: str, *, most: int) -> None:
    """Bytes that spell the text, and as many alternatives as were asked for, in order."""
    spelled = b"".join(bytes(one.bytes) for one in tokens)
    assert spelled.decode("utf-8", "replace").removesuffix("<end>") == text
    for one in tokens:
        assert one.logprob <= 0
        assert len(one.top_logprobs) == most
        values = [other.logprob for other in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        if most:
            assert one.logprob <= values[0]


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("n", [1, 2])
async def test_chat_logprobs(serve_engine: Serve, most: int, n: int) -> None:
    """Streamed and not they are equal; half characters are told as bytes."""
    text = "é🔥ç, ok"
    model = Spoken(text.encode())
    async with sim_engine(model) as engine, no_leaks(engine), serve_engine(engine) as server:
        body = {
            "model": server.model, "messages": [user("hi")], "logprobs": True, "n": n,
            "top_logprobs": most, "temperature": 0,
        }  # fmt: skip
        whole = await create(server, CHATS)(**body)
        heard = await Heard.of(await create(server, CHATS)(**body, stream=True))
        assert [heard.choices[at] for at in range(n)] == [Told.of(one) for one in whole.choices]
        for choice in whole.choices:
            assert choice.message.content == text
            tokens = choice.logprobs.content
            assert_sound(tokens, text, most=most)
            assert [one.bytes for one in tokens[:2]] == [[0xC3], [0xA9]]
            assert tokens[0].token == "\ufffd"
            assert len(tokens) == len(text.encode()) + 1
        body["logprobs"] = False
        body.pop("top_logprobs")
        assert (await create(server, CHATS)(**body)).choices[0].logprobs is None


@pytest.mark.parametrize("n", [1, 2])
async def test_completion_logprobs(serve_engine: Serve, n: int) -> None:
    """In columns that a stream's chunks continue; offsets count characters of the text."""
    text = "é🔥ç, ok"
    model = Spoken(text.encode())
    async with sim_engine(model) as engine, no_leaks(engine), serve_engine(engine) as server:
        body = {
            "model": server.model, "prompt": ["a", "bc"], "logprobs": 2, "n": n, "temperature": 0
        }  # fmt: skip
        whole = await create(server, TEXTS)(**body)
        columns: dict[int, dict[str, list[Any]]] = {}
        async for chunk in await create(server, TEXTS)(**body, stream=True):
            for one in chunk.choices:
                if one.logprobs is not None:
                    own = columns.setdefault(one.index, {name: [] for name in COLUMNS})
                    for name in COLUMNS:
                        own[name] += getattr(one.logprobs, name)
        assert len(whole.choices) == len(columns) == 2 * n
        for one in whole.choices:
            told = {name: getattr(one.logprobs, name) for name in COLUMNS}
            assert columns[one.index] == told
            assert told["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]
            plain = [at for at, name in enumerate(told["tokens"][:-1]) if "bytes:" not in name]
            assert plain
            for at in plain:
                offset, name = told["text_offset"][at], told["tokens"][at]
                assert one.text[offset : offset + len(name)] == name
            assert all(2 <= len(row) <= 3 for row in told["top_logprobs"])


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], ["abc", "a"]])
async def test_logprobs_of_the_prompt(serve_engine: Serve, prompt: Any) -> None:
    """With echo in the columns, or as vLLM tells them; the first token has none."""
    logits = np.full(258, -10.0)
    logits[97:100] = (1.0, 0.5, 0.0)
    known = logits - math.log(np.exp(logits).sum())
    model = Const(logits.tolist())
    async with sim_engine(model) as engine, no_leaks(engine), serve_engine(engine) as server:
        body = {"model": server.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        told = await create(server, TEXTS)(**body, echo=True, logprobs=1)
        lengths = [3, 1] if isinstance(prompt, list) and isinstance(prompt[0], str) else [3]
        for choice, length in zip(told.choices, lengths, strict=True):
            assert choice.text == "abc"[:length] + "aa"
            own = choice.logprobs
            assert own.tokens == list(choice.text)
            assert own.text_offset == list(range(length + 2))
            assert own.token_logprobs[0] is own.top_logprobs[0] is None
            for name, logprob, top in list(
                zip(own.tokens, own.token_logprobs, own.top_logprobs, strict=True)
            )[1:]:
                assert logprob == pytest.approx(known[ord(name)], abs=1e-4)
                assert set(top) == {"a", name}
        told = await create(server, TEXTS)(**body, extra_body={"prompt_logprobs": 1})
        for choice, length in zip(told.choices, lengths, strict=True):
            first, *others = choice.prompt_logprobs
            assert (first, len(others)) == (None, length - 1)
            for token_id, row in enumerate(others, 98):
                own = row[str(token_id)]
                assert own["logprob"] == pytest.approx(known[token_id], abs=1e-4)
                assert own["decoded_token"] == chr(token_id)
                assert row["97"]["rank"] == 1
        for more, param in (({"echo": True, "logprobs": 1}, "echo"), (
            {"prompt_logprobs": 1}, "prompt_logprobs"
        )):  # fmt: skip
            response = await server.post(TEXTS, **body | {"stream": True} | more)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


async def test_offsets_of_an_echo_with_a_start_token(serve_engine: Serve) -> None:
    """It is among the tokens, and not in the text."""
    async with (
        sim_engine(Const(), tokenizer=ByteTokenizer(add_bos=True)) as engine,
        serve_engine(engine) as server,
    ):
        told = await create(server, TEXTS)(
            model=server.model, prompt="abc", max_tokens=1, echo=True, logprobs=0, temperature=0
        )
        own = told.choices[0].logprobs
        assert told.choices[0].text == "abc\0"
        assert own.tokens == ["<start>", "a", "b", "c", "\0"]
        assert own.text_offset == [0, 0, 1, 2, 3]
