"""Answers and chunks are what the official client reads, and the quick way writes the same."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion as OfficialChat
from openai.types.chat import ChatCompletionChunk

from aneuron import outputs
from aneuron.outputs import TokenLogprobs
from aneuron.server.wire.chat import (
    AnsweredCall,
    AnsweredFunction,
    CallDelta,
    CalledFunctionDelta,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatWriter,
    Delta,
)
from aneuron.server.wire.common import Usage, encode
from aneuron.server.wire.completions import CompletionBody, CompletionChoice, CompletionWriter
from aneuron.server.wire.logprobs import LogprobColumns, chat_logprobs, prompt_logprobs
from aneuron.server.wire.misc import ModelCard, ModelList, TokenizeResponse

if TYPE_CHECKING:
    from pydantic import BaseModel

FACTS: dict[str, Any] = {"created": 1_800_000_000, "model": 'm"\n', "system_fingerprint": "fp_1"}
USAGE = Usage.of(outputs.Usage(5, 3, 2), outputs.Usage(7, 1), reasoning_tokens=2)
TOP = TokenLogprobs(-0.5, ((97, -0.5), (0xF0, -1.0)))


def spell(token_id: int) -> bytes:
    return bytes([token_id])


def read(official: type[BaseModel], body: bytes) -> dict[str, Any]:
    """What the client makes of it, strictly; no field of the official type may be odd."""
    assert b"\n" not in body
    made = official.model_validate_json(body, strict=True)
    again = made.model_dump(mode="json", exclude_unset=True, warnings="error")
    told: dict[str, Any] = json.loads(body)
    assert again == told
    return told


# ── whole answers ───────────────────────────────────────────────────────────────────────


def test_usage_adds_up() -> None:
    assert json.loads(encode(USAGE)) == {
        "prompt_tokens": 12,
        "completion_tokens": 4,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_a_chat() -> None:
    call = AnsweredCall(id="c", function=AnsweredFunction(name="f", arguments="{}"))
    choices = [
        ChatChoice(index=0, message=ChatMessage(content="Hi"), finish_reason="stop"),
        ChatChoice(
            index=1,
            message=ChatMessage(content=None, reasoning="hm", tool_calls=[call]),
            logprobs=chat_logprobs([97], [TOP], spell),
            finish_reason="tool_calls",
            stop_reason=257,
        ),
    ]
    body = encode(ChatCompletion(id="chatcmpl-1", choices=choices, usage=USAGE, **FACTS))
    told = read(OfficialChat, body)
    assert list(told) == [
        "id", "object", "created", "model", "choices", "usage", "system_fingerprint",
    ]  # fmt: skip
    assert told["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hi", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert told["choices"][1]["message"]["tool_calls"][0]["type"] == "function"


def test_a_completion() -> None:
    columns = LogprobColumns(spell).add([97], [TOP])
    choices = [CompletionChoice(index=0, text="a", finish_reason="length", logprobs=columns)]
    told = read(
        Completion, encode(CompletionBody(id="cmpl-1", choices=choices, usage=USAGE, **FACTS))
    )
    assert told["object"] == "text_completion"
    assert "prompt_logprobs" not in told["choices"][0]


def test_models() -> None:
    card = ModelCard(id="m", created=5, root="m", max_model_len=64)
    told = read(Model, encode(card))
    assert told["max_model_len"] == 64
    assert json.loads(encode(ModelList(data=[card]))) == {"object": "list", "data": [told]}


def test_ids() -> None:
    told = json.loads(encode(TokenizeResponse(count=1, max_model_len=64, tokens=[5])))
    assert told == {"count": 1, "max_model_len": 64, "tokens": [5], "token_strs": None}


# ── chunks ──────────────────────────────────────────────────────────────────────────────


def chat_writer(**more: Any) -> ChatWriter:
    return ChatWriter(response_id="chatcmpl-1", **FACTS, **more)


def text_writer(**more: Any) -> CompletionWriter:
    return CompletionWriter(response_id="cmpl-1", **FACTS, **more)


@pytest.mark.parametrize("with_usage", [False, True])
def test_chunks_of_a_chat(with_usage: bool) -> None:
    writer = chat_writer(with_usage=with_usage)
    first = CallDelta(
        index=0, id="c", type="function", function=CalledFunctionDelta(name="f", arguments="")
    )
    more = CallDelta(index=0, function=CalledFunctionDelta(arguments='{"x'))
    chunks = [
        writer.role(1),
        writer.content(1, "Hi"),
        writer.reasoning(1, "hm"),
        writer.delta(1, Delta(tool_calls=[first])),
        writer.delta(1, Delta(tool_calls=[more])),
        writer.delta(1, Delta(content="a"), logprobs=chat_logprobs([97], [TOP], spell)),
        writer.finish(1, "tool_calls"),
    ]
    told = [read(ChatCompletionChunk, chunk) for chunk in chunks]
    deltas = [one["choices"][0]["delta"] for one in told]
    assert deltas[:3] == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
        {"reasoning": "hm"},
    ]
    assert deltas[4] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"x'}}]}
    assert deltas[-1] == {}
    reasons = [one["choices"][0]["finish_reason"] for one in told]
    assert reasons == [None] * 6 + ["tool_calls"]
    assert {one["id"] for one in told} == {"chatcmpl-1"}
    assert [one.get("usage", "none") for one in told] == [None if with_usage else "none"] * 7


def test_the_last_chunk_has_the_totals_and_others_may() -> None:
    for told in (
        read(ChatCompletionChunk, chat_writer(with_usage=True).usage(USAGE)),
        read(Completion, text_writer(with_usage=True).usage(USAGE)),
    ):
        assert told["choices"] == []
        assert told["usage"]["total_tokens"] == 16
    running = chat_writer(with_usage=True).delta(0, Delta(content="a"), usage=USAGE)
    assert read(ChatCompletionChunk, running)["usage"]["total_tokens"] == 16
    ended = chat_writer(with_usage=True).finish(0, "stop", "x", usage=USAGE)
    assert read(ChatCompletionChunk, ended)["choices"][0]["stop_reason"] == "x"


def test_reasoning_has_the_name_that_the_server_gives_it() -> None:
    writer = chat_writer(reasoning_field="reasoning_content")
    told = read(ChatCompletionChunk, writer.reasoning(0, "hm"))
    assert told["choices"][0]["delta"] == {"reasoning_content": "hm"}


def test_chunks_of_a_completion() -> None:
    writer = text_writer()
    columns = LogprobColumns(spell).add([97], [TOP])
    ended = read(
        Completion,
        writer.chunk(CompletionChoice(index=3, text="a", logprobs=columns, finish_reason="stop")),
    )
    assert ended["choices"][0]["logprobs"]["tokens"] == ["a"]
    told = json.loads(writer.finish(3, "length"))
    assert told["choices"] == [
        {"index": 3, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]


@given(st.text(), st.integers(0, 2**31), st.booleans())
def test_the_quick_way_writes_what_the_types_do(text: str, choice: int, with_usage: bool) -> None:
    chat, completion = chat_writer(with_usage=with_usage), text_writer(with_usage=with_usage)
    assert chat.content(choice, text) == chat.delta(choice, Delta(content=text))
    plain = CompletionChoice(index=choice, text=text)
    assert completion.text(choice, text) == completion.chunk(plain)
    assert json.loads(completion.text(choice, text))["choices"][0]["text"] == text


def test_a_chunk_is_cheap() -> None:
    writer = chat_writer(with_usage=True)
    best_s = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(1000):
            writer.content(0, " token")
        best_s = min(best_s, (time.perf_counter() - started) / 1000)
    assert best_s < 3e-6


# ── log probabilities ───────────────────────────────────────────────────────────────────


def test_half_characters_are_told_as_bytes() -> None:
    fire = "🔥".encode()
    entries = [TokenLogprobs(-0.1, ()) for _ in fire]
    told = chat_logprobs(list(fire), entries, spell).content
    assert b"".join(bytes(one.bytes) for one in told) == fire
    columns = LogprobColumns(spell).add(list(fire), entries)
    assert columns.tokens[0] == r"bytes:\xf0"
    assert columns.top_logprobs[0] == {r"bytes:\xf0": -0.1}


def test_offsets_go_on_from_piece_to_piece() -> None:
    columns = LogprobColumns(spell)
    text = "aé🔥b".encode()
    offsets = []
    for start in range(0, len(text), 2):
        ids = list(text[start : start + 2])
        offsets += columns.add(ids, [TOP] * len(ids)).text_offset
    assert offsets == [0, 1, 1, 2, 2, 2, 2, 3]


def test_the_first_token_of_a_prompt_has_none() -> None:
    columns = LogprobColumns(spell).add([97, 98], [None, TOP])
    assert columns.token_logprobs == [None, -0.5]
    assert columns.top_logprobs == [None, {"a": -0.5, r"bytes:\xf0": -1.0, "b": -0.5}]
    told = json.loads(encode(prompt_logprobs([97, 98], [None, TOP], spell)))
    assert told == [
        None,
        {
            "98": {"logprob": -0.5, "rank": None, "decoded_token": "b"},
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "240": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
        },
    ]


def test_of_two_tokens_of_one_spelling_the_likelier_is_told() -> None:
    entry = TokenLogprobs(-3.0, ((1, -1.0), (2, -2.0)))
    row = LogprobColumns(lambda token_id: b"x").add([3], [entry]).top_logprobs
    assert row == [{"x": -1.0}]


@pytest.mark.parametrize("impossible", [float("-inf"), float("nan"), -1e30])
def test_what_json_cannot_say_is_a_very_small_number(impossible: float) -> None:
    entry = TokenLogprobs(impossible, ((97, impossible),))
    told = chat_logprobs([97], [entry], spell).content[0]
    assert told.logprob == told.top_logprobs[0].logprob == -9999.0
    assert LogprobColumns(spell).add([97], [entry]).token_logprobs == [-9999.0]
