"""What one small body may cost: it is counted before it is built, rendered or encoded."""

from __future__ import annotations

import asyncio
import json
import random
import time
import traceback
import tracemalloc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from aneuron.errors import ContextTooLong, InvalidRequest
from aneuron.models.tokenizer import HFTokenizer
from aneuron.params.messages import Conversation, validate_messages
from aneuron.params.sizes import count_values, holds_more, measure
from aneuron.prompt import check_length, tokenize
from aneuron.server import ServerConfig, build_app
from aneuron.server.http.errors import ApiError
from aneuron.server.tools import template_messages
from aneuron.server.wire.chat import ChatRequest
from aneuron.server.wire.completions import CompletionRequest
from aneuron.server.wire.decoding import Request, decode
from aneuron.server.wire.messages import plain_messages
from aneuron.server.wire.misc import DetokenizeRequest, TokenizeRequest
from aneuron.server.wire.openapi import openapi
from aneuron.server.wire.responses import ResponsesRequest
from aneuron.testing import ByteTokenizer, count_engine, no_leaks
from tests.server.scripted import PLAIN, byte_level, user

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.scripted import Serve

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def call(arguments: str = "{}", **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "a", "type": "function", "function": function, **more}


def turn(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields}


def wide(size: int) -> str:
    """JSON of an object with a list of lists, of so many bytes."""
    return '{"a":[' + "[]," * (size // 3) + "1]}"


# ── counting ────────────────────────────────────────────────────────────────────────────


def some_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 5 else 4)
    if kind < 2:
        return "".join(rng.choices('ab,[]{}:"\\\n\té', k=rng.randrange(12)))
    if kind < 4:
        return rng.choice([None, True, 1, -2.5])
    if kind == 4:
        return [some_json(rng, depth + 1) for _ in range(rng.randrange(6))]
    keys = (f'{number}"\\,[' for number in range(rng.randrange(6)))
    return {key: some_json(rng, depth + 1) for key in keys}


def size_of(value: Any) -> int:
    """Values in a value, the inner ones; an empty list or object counts once more."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list):
        return 0
    return max(1, len(inner)) + sum(size_of(one) for one in inner)


def test_values_are_counted_as_if_they_were_built() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        value, indent = some_json(rng), rng.choice([None, 1])
        text = json.dumps(value, indent=indent, ensure_ascii=rng.random() < 0.5).encode()
        size = size_of(value)
        assert count_values(text) == size
        for most in {0, 1, size - 1, size, size + 1, 2 * size}:
            assert holds_more(text, most) == (size > most), (text, most)


def test_what_holds_itself_has_an_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert measure(endless, most=100)[1] == 101
    assert measure({"ab": ["c", ("de", 1)]}, most=100) == (5, 6)


# ── before it is built ──────────────────────────────────────────────────────────────────

BEGIN = b'{"model":"m","messages":[{"role":"user","content":"a"}],'
FORM = b'"response_format":{"type":"json_schema","json_schema":{"schema":%b}}}'
WIDE = wide(10**6).encode()
CALLS = json.dumps([call()] * 60_000).encode()
TOO_MANY: list[tuple[str, type[Request], bytes, str]] = [
    ("lists", CompletionRequest, b'{"prompt":[' + b"[1]," * 10**6 + b"[1]]}", "prompt"),
    ("empty lists", CompletionRequest, b'{"prompt":[' + b"[]," * 10**6 + b"[]]}", "prompt"),
    ("texts", CompletionRequest, b'{"prompt":[' + b'"",' * 10**6 + b'""]}', "prompt"),
    ("texts and ids", CompletionRequest, b'{"prompt":["",' + b"1," * 10**6 + b"1]}", "prompt"),
    ("ids", CompletionRequest, b'{"prompt":[' + b"1," * 10**6 + b"1]}", "prompt"),
    ("long lists", CompletionRequest, b'{"prompt":[[1],[' + b"1," * 10**6 + b"1]]}", "prompt[1]"),
    ("tools", ChatRequest, BEGIN + b'"tools":%b}' % WIDE, "tools"),
    ("variables", ChatRequest, BEGIN + b'"chat_template_kwargs":%b}' % WIDE,
     "chat_template_kwargs"),
    ("schema", ChatRequest, BEGIN + FORM % WIDE, "response_format"),
    ("refused", ChatRequest, BEGIN + b'"guided_json":%b}' % WIDE, "guided_json"),
    ("allowed", ChatRequest, BEGIN + b'"allowed_token_ids":[' + b"999," * 10**6 + b"1]}",
     "allowed_token_ids"),
    ("calls", ChatRequest,
     b'{"model":"m","messages":[{"role":"assistant","tool_calls":%b}]}' % CALLS, "messages"),
    ("parts", TokenizeRequest, b'{"messages":[{"role":"user","content":['
     + b'{"type":"text","text":""},' * 10**5 + b'{"type":"text","text":""}]}]}', "messages"),
    ("annotations", ChatRequest,
     b'{"model":"m","messages":[{"role":"assistant","annotations":[%b]}]}' % WIDE, "messages"),
    ("items", ResponsesRequest, b'{"model":"m","input":[' + b"1," * 10**6 + b"1]}", "input"),
    ("tokens", DetokenizeRequest, b'{"tokens":[' + b"1," * 10**6 + b"1]}", "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "body", "param"), [one[1:] for one in TOO_MANY], ids=[one[0] for one in TOO_MANY]
)
def test_what_is_too_much_is_never_built(kind: type[Request], body: bytes, param: str) -> None:
    """Copies of the body, pieces of it, but no objects: they take 8 to 60 bytes for each byte."""
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            decode(kind, body, max_model_len=4096)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (caught.value.status, caught.value.param) == (400, param)
    assert peak < 4 * len(body) + 2**20
    if b"1,1,1,1" in body and kind is CompletionRequest and b'""' not in body:
        assert caught.value.code == "context_length_exceeded"


def test_what_stands_in_strings_counts_for_nothing() -> None:
    """Texts may hold any number of commas, brackets, quotes and backslashes."""
    nasty = '[{,"\\' * 1000
    texts = [nasty] * 1024
    assert decode(CompletionRequest, dumped(prompt=texts), max_model_len=9).prompts == texts
    assert decode(CompletionRequest, dumped(prompt=nasty * 500), max_model_len=9).prompt
    for ids in ([5] * 140_000, [[5] * 140_000], [[5], [5] * 140_000]):
        asked = decode(CompletionRequest, dumped(prompt=ids), max_model_len=140_001)
        assert asked.prompts == ([ids] if isinstance(ids[0], int) else ids)
        with pytest.raises(ApiError, match="the prompt has 140000 tokens") as caught:
            decode(CompletionRequest, dumped(prompt=ids), max_model_len=140_000)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == ("prompt[1]" if len(ids) == 2 else "prompt")
    tool = {"type": "function", "function": {"name": "f", "description": nasty * 20}}
    message = turn(content=nasty * 50, tool_calls=[call(json.dumps({"a": nasty * 50}))])
    body = dumped(messages=[message] * 2, tools=[tool], chat_template_kwargs={"a": nasty * 50})
    request = decode(ChatRequest, body)
    read = template_messages(plain_messages(request.messages))
    assert read[1]["tool_calls"][0]["function"]["arguments"] == {"a": nasty * 50}
    decode(ResponsesRequest, dumped(input=nasty * 500))
    decode(ChatRequest, dumped(messages=[user("a")], allowed_token_ids=[1] * 2**18))


def dumped(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


# ── before it is rendered ───────────────────────────────────────────────────────────────

LONG = "a" * 2**20
LONG_MESSAGES = {
    "content": user(LONG + "a"),
    "parts": user("") | {"content": [{"type": "text", "text": LONG[:-9]}] * 2},
    "name": user(LONG) | {"name": "b"},
    "reasoning": turn(reasoning=LONG + "a"),
    "an id": turn(tool_calls=[call(id=LONG)]),
    "arguments": turn(tool_calls=[call({"a": LONG})]),  # type: ignore[arg-type]
    "a key": turn(tool_calls=[call({LONG: 1})]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", LONG_MESSAGES.values(), ids=LONG_MESSAGES)
def test_all_text_of_messages_counts(message: dict[str, Any]) -> None:
    for check in (Conversation.of, validate_messages):
        with pytest.raises(InvalidRequest, match=r"characters.*; at most 1048576") as caught:
            check([user("a"), message])
        assert caught.value.param == "messages"


def test_what_a_template_gets_counts_together() -> None:
    half = "a" * 2**19
    Conversation.of([turn(reasoning=LONG, reasoning_content=LONG)])  # the same under two names
    Conversation.of([user(half)], chat_template_kwargs={"a": half[:-1]})
    for fields, param in (
        ({"chat_template_kwargs": {"a": LONG}}, "chat_template_kwargs"),
        ({"tools": [{"a": LONG}]}, "tools"),
        ({"chat_template_kwargs": {"ab": half}}, "messages"),
        ({"chat_template_kwargs": {"a": [[]] * 20_000}}, "chat_template_kwargs"),
        ({"tools": [{"a": [[]] * 2**16}]}, "tools"),
        ({"tools": [{"a": [[]] * 2**15}]}, "messages"),
    ):
        values = turn(tool_calls=[call([1] * 2**15)])  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as caught:
            Conversation.of([user(half), values], **fields)
        assert caught.value.param == param
        assert caught.value.param in str(caught.value)


def test_arguments_of_all_calls_count_together() -> None:
    many = [turn(tool_calls=[call(wide(4500))] * 3)] * 2
    template_messages(many)
    with pytest.raises(InvalidRequest, match="hold more than 20000 JSON values") as caught:
        template_messages([*many, turn(tool_calls=[call(), call(wide(30_000))])])
    assert caught.value.param == "messages[2].tool_calls[1].function.arguments"
    text = json.dumps({"a": "[,{" * 20_000})
    template_messages([turn(tool_calls=[call(text)] * 3)])


def test_many_values_are_rendered_in_a_thread() -> None:
    for values in ([1] * 2000, {str(at): at for at in range(2000)}):
        assert Conversation.of([turn(tool_calls=[call(values)])]).is_long  # type: ignore[arg-type]
        tools = [{"function": {"parameters": values}}]
        assert Conversation.of([user("a")], tools=tools).is_long
        assert Conversation.of([user("a")], chat_template_kwargs={"a": values}).is_long
    assert not Conversation.of([user("a")] * 10, tools=[{"a": [1] * 100}]).is_long


async def test_long_conversations_are_rendered_one_by_one() -> None:
    """Each thread has the GIL for 5 ms at a time: the loop would wait for all of them."""

    class Slow(ByteTokenizer):
        num_now = most = 0

        def render_chat(self, *args: Any, **options: Any) -> str:
            self.num_now += 1
            self.most = max(self.most, self.num_now)
            time.sleep(0.01)  # in a thread
            self.num_now -= 1
            return super().render_chat(*args, **options)

    slow, conversation = Slow(), Conversation.of([user("a")] * 17)
    await asyncio.gather(*(tokenize(slow, conversation) for _ in range(8)))
    assert slow.most == 1


# ── before it is encoded ────────────────────────────────────────────────────────────────


class Watched:
    """A `tokenizers.Tokenizer` that notes what it encodes, and how much at a time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.sizes: list[int] = []
        self.num_now = self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def async_encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.sizes += map(len, texts)
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        await asyncio.sleep(0)
        made = await self._inner.async_encode_batch_fast(texts, **options)
        self.num_now -= 1
        return made


def watched(tokenizer: HFTokenizer) -> Watched:
    found = tokenizer.tokenizer = Watched(tokenizer.tokenizer)  # type: ignore[assignment]
    return found


def check(num_tokens: int, *, at_least: bool = False) -> None:
    check_length(num_tokens, max_model_len=4096, capacity=4096, at_least=at_least)


async def test_of_a_far_too_long_text_a_piece_is_encoded() -> None:
    tokenizer = byte_level()
    seen = watched(tokenizer)
    for encode in (tokenizer.encode, tokenizer.encode_rendered):
        with pytest.raises(ContextTooLong, match=r"has at least 32768 tokens, but .* 4096"):
            await encode("a" * 7_000_000, check=check)
    assert seen.sizes == [2**16] * 2
    with pytest.raises(ContextTooLong, match=r"has 7001 tokens"):
        await tokenizer.encode("a" * 7000, check=check)
    assert len(await tokenizer.encode("a" * 70_000)) == 70_001


async def test_a_text_of_long_tokens_is_taken() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"a" * 99: 0, "?": 1}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = HFTokenizer(inner)
    seen = watched(tokenizer)
    ids = await tokenizer.encode(("a" * 99 + " ") * 4095, check=check)
    assert ids.tolist() == [0] * 4095
    assert seen.sizes == [*[2**16] * 6, 409_500 - 6 * 2**16, 409_500]
    # Cut into pieces it has too many tokens, but not twice as many.
    assert len(await tokenizer.encode(("a" * 99 + " ") * 4090 + "a" * 99, check=check)) == 4091


async def test_few_texts_are_encoded_at_a_time() -> None:
    tokenizer = byte_level()
    seen = watched(tokenizer)
    found = await asyncio.gather(*(tokenizer.encode("a" * 100, check=check) for _ in range(64)))
    assert {len(ids) for ids in found} == {101}
    assert seen.most == 4


async def test_an_error_keeps_no_encoding() -> None:
    """It is kept with its request; 7000 tokens are a megabyte."""
    import tokenizers

    with pytest.raises(ContextTooLong) as caught:
        await byte_level().encode("a" * 7000, check=check)
    kept: list[type] = []
    for frame, _ in traceback.walk_tb(caught.tb):
        kept += map(type, frame.f_locals.values())
    assert tokenizers.Encoding not in kept


# ── all of it, over a socket ────────────────────────────────────────────────────────────


class Held:
    """The longest that the loop's thread worked between two turns of it, in seconds of its time."""

    most_s = 0.0


@asynccontextmanager
async def held() -> AsyncIterator[Held]:
    told = Held()

    async def turns() -> None:
        while True:
            began_s = time.thread_time()
            await asyncio.sleep(0.001)
            told.most_s = max(told.most_s, time.thread_time() - began_s)

    task = asyncio.create_task(turns())
    await asyncio.sleep(0.01)
    try:
        yield told
    finally:
        task.cancel()


def conversation(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [*messages, user("a")], "max_tokens": 1, **fields}


HEAVY: list[tuple[str, str, dict[str, Any], int]] = [
    ("arguments", CHAT, conversation(turn(tool_calls=[call(wide(10**6))])), 400),
    ("seven arguments", CHAT, conversation(turn(tool_calls=[call(wide(10**6))] * 7)), 400),
    ("as many arguments as may be", CHAT, conversation(turn(tool_calls=[call(wide(29_900))])), 200),
    ("variables", CHAT, conversation(chat_template_kwargs=json.loads(wide(10**6))), 400),
    ("reasoning", CHAT, conversation(turn(reasoning="a" * 7_000_000)), 400),
    ("tokenize", "/tokenize", {"messages": [turn(tool_calls=[call(wide(10**6))])]}, 400),
    ("items", RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "f",
     "arguments": wide(10**6)}] * 7}, 400),
    ("lists", COMPLETIONS, {"prompt": [[1]] * 2 * 10**6}, 400),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "status"), [one[1:] for one in HEAVY], ids=[one[0] for one in HEAVY]
)
async def test_nobody_waits_for_a_heavy_body(
    serve_engine: Serve, path: str, fields: dict[str, Any], status: int
) -> None:
    # What the template writes is short: what it gets is copied all the same.
    tokenizer = byte_level(PLAIN)
    async with (
        count_engine(tokenizer=tokenizer, max_model_len=4096, max_waiting=1024) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        assert (await server.post(CHAT, **conversation())).status_code == 200  # imports
        asked = {"model": server.model, **fields}
        body = json.dumps(asked, separators=(",", ":")).encode()
        async with held() as told:
            response = await server.http.post(path, content=body)
        assert response.status_code == status, response.text
        assert told.most_s < 0.25
        assert engine.stats().running == 0


# ── nulls ───────────────────────────────────────────────────────────────────────────────


async def test_null_is_as_good_as_absent_in_messages_too(serve_engine: Serve) -> None:
    """Clients with one type for all messages send the fields of all."""
    nulls = dict.fromkeys(
        ("tool_calls", "tool_call_id", "name", "refusal", "reasoning", "provider_specific_fields")
    )
    schema = {"type": "object", "properties": {"x": {"default": None, "enum": [None, 1]}}}
    function = {"name": "f", "parameters": schema}
    tool = {"type": "function", "function": {**function, "x": None}, "custom": None}
    wire_call = call() | {"custom": None}
    wire_call["function"]["x"] = None
    messages = [
        {**nulls, **user("a")},
        {**nulls, "role": "user", "content": [{"type": "text", "text": "b", "image_url": None}]},
        {**nulls, "role": "assistant", "content": None, "tool_calls": [wire_call]},
        {**nulls, "role": "tool", "content": "c", "tool_call_id": "a"},
    ]
    body = {"messages": messages, "tools": [tool], "nope": None}
    request = decode(ChatRequest, dumped(**body))
    read = plain_messages(request.messages)
    assert [one["role"] for one in read] == ["user", "user", "assistant", "tool"]
    assert read[2]["tool_calls"] == [call()]
    assert request.plain_tools[0]["function"] == function, "nulls in a schema are values"
    items = [
        {"role": "user", "content": "a", "call_id": None, "arguments": None},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "role": None},
        {"type": "function_call_output", "call_id": "a", "output": "b", "content": None},
    ]
    async with count_engine(tokenizer=byte_level(PLAIN)) as engine, serve_engine(engine) as server:
        for path, fields in (
            (CHAT, {**body, "max_tokens": 2}),
            (RESPONSES, {"input": items, "max_output_tokens": 2, "nope": None}),
            (COMPLETIONS, {"prompt": [5], "max_tokens": 2, "nope": None}),
            ("/tokenize", {"messages": messages, "nope": None}),
        ):
            response = await server.post(path, **fields)
            assert response.status_code == 200, response.text


def test_what_is_unknown_and_no_null_is_named_all_the_same() -> None:
    for fields, param in (
        ({"messages": [user("a") | {"x": None, "y": 1}]}, "messages[0].y"),
        ({"messages": [user("a")], "x": None, "y": 1}, "y"),
        ({"messages": [user("a")], "x": None, "logit_bias": {"1": None}}, "logit_bias"),
        ({"messages": [user("a"), {"role": "user", "content": None, "x": None}]},
         "messages[1].content"),
        ({"messages": [user("a")], "x": None, "stop": [None]}, "stop[0]"),
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            decode(ChatRequest, dumped(**fields))
        assert caught.value.param == param


# ── the description ─────────────────────────────────────────────────────────────────────


async def test_a_mounted_app_says_where_it_is() -> None:
    assert openapi(ServerConfig())["servers"] == [{"url": "/"}]
    async with count_engine() as engine:
        app = build_app(engine)
        mounted = Starlette(routes=[Mount("/llm", app)])
        for asgi, root in ((mounted, "/llm"), (app, ""), (mounted, "/llm")):
            async with httpx2.AsyncClient(
                transport=httpx2.ASGITransport(asgi), base_url="http://127.0.0.1"
            ) as client:
                told = (await client.get(f"{root}/openapi.json")).json()
                [place] = told["servers"]
                assert place == {"url": root or "/"}
