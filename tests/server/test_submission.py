"""From a body to streams and back: what a large one may cost, and every request ends once."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.server import build_app
from aneuron.testing import ByteTokenizer, Const, count_engine, no_leaks, sim_engine
from tests.server.raw import CHAT, COMPLETIONS, MODEL, connected
from tests.support import STEP_S, after, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    Serve = Callable[..., AbstractAsyncContextManager[Any]]


class Counting(ByteTokenizer):
    """A byte tokenizer that counts the words that it spells, and waits where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_spelled = 0
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()

    def encode_word(self, text: str) -> list[int]:
        self.num_spelled += 1
        return super().encode_word(text)

    async def encode(self, text: str, **options: Any) -> Any:
        self.begun.set()
        await self.gate.wait()
        return await super().encode(text, **options)


def scope_of(path: str) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json")]
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "http_version": "1.1", "headers": headers, "client": None,
        "server": None, "state": {},
    }  # fmt: skip


def receive_of(body: dict[str, Any]) -> Callable[[], Any]:
    """Return a `receive` of a client that sends this and stays."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()

    return receive


def ends_of(metrics: Any) -> tuple[int, int, int, int]:
    """Return how many requests came, and ended well, by failing and by leaving."""
    ends = (metrics.finished_by_reason, metrics.failed_by_code, metrics.aborted_by_reason)
    return (sum(metrics.received_by_endpoint.values()), *(sum(one.values()) for one in ends))


# ── what a large body may cost ──────────────────────────────────────────────────────────


async def test_bad_words_of_many_prompts_are_spelled_once(serve_engine: Serve) -> None:
    tokenizer = Counting()
    async with (
        sim_engine(Const(LIKELY), tokenizer=tokenizer) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        body = {"prompt": [[1]] * 100, "max_tokens": 1, "temperature": 0, "bad_words": ["ab", "cd"]}
        told = (await server.post(COMPLETIONS, **body)).json()
    assert [one["text"] for one in told["choices"]] == ["y"] * 100
    assert tokenizer.num_spelled == 4  # each without and behind a space


async def test_choices_of_all_prompts_have_a_limit(serve_engine: Serve) -> None:
    async with count_engine(max_num_seqs=64) as engine, serve_engine(engine) as server:
        answer = await server.post(COMPLETIONS, prompt=[[1]] * 100, n=11, max_tokens=1)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"
        assert "1100 choices" in answer.json()["error"]["message"]
        assert ends_of(server.state.metrics) == (0, 0, 0, 0)


async def test_bodies_are_gone_while_their_answers_come(serve_engine: Serve) -> None:
    """Case: 20 streams whose bodies had a megabyte of spaces hold none of it."""
    async with (
        count_engine(latency=STEP_S, max_num_seqs=20, num_kv_blocks=4096) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
        AsyncExitStack() as stack,
    ):
        raws = [await stack.enter_async_context(connected(server.url)) for _ in range(20)]
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for raw in raws:
                ask = {"model": MODEL, "prompt": [1], "max_tokens": 4000, "stream": True}
                body = json.dumps(ask).encode() + b" " * 2**20
                head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n"
                raw.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                assert await raw.answer() == 200
                await anext(raw.events())
            del body
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert engine.stats().running == 20
        for raw in raws:
            raw.leave()
    assert held - before < 4 * 2**20


async def test_log_probabilities_of_all_are_told_in_turns(serve_engine: Serve) -> None:
    """Case: an echo of many prompts, with 20 others for each token: the loop gets its turns."""
    async with (
        sim_engine(Const(LIKELY, max_model_len=2048), num_kv_blocks=4096) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        prompts = [[65 + at] * 1000 for at in range(16)]
        body = {"max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 20}
        gap = asyncio.create_task(largest_gap())
        told = (await server.post(COMPLETIONS, prompt=prompts, **body)).json()
        gap.cancel()
        choices = told["choices"]
        texts = [chr(65 + at) * 1000 + "yy" for at in range(16)]
        assert [one["text"] for one in choices] == texts
        assert {len(one["logprobs"]["token_logprobs"]) for one in choices} == {1002}
        assert {len(one["logprobs"]["text_offset"]) for one in choices} == {1002}
        assert {one["logprobs"]["token_logprobs"][0] for one in choices} == {None}
    assert GAPS.pop() < 0.25


LIKELY = [float(one == ord("y")) - one / 1000 for one in range(258)]
GAPS: list[float] = []


async def largest_gap() -> None:
    clock = asyncio.get_running_loop().time
    before_s, largest_s = clock(), 0.0
    try:
        while True:
            await asyncio.sleep(0)
            now_s = clock()
            largest_s, before_s = max(largest_s, now_s - before_s), now_s
    finally:
        GAPS.append(largest_s)


@pytest.mark.parametrize(("short", "long"), [([5], [5] * 100), ("ok", "x" * 100)])
async def test_an_echo_that_does_not_fit(serve_engine: Serve, short: Any, long: Any) -> None:
    """Case: it is refused before its text or its ids are made, and counted."""
    async with (
        sim_engine(Const([0.0] * 258, max_model_len=64)) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        for prompt, param in ((long, "prompt"), ([short, long], "prompt[1]")):
            body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}
            error = (await server.post(COMPLETIONS, **body)).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        received, _, failed, _ = ends_of(server.state.metrics)
        assert received == failed > 0


# ── every request ends once ─────────────────────────────────────────────────────────────


async def test_who_leaves_while_the_prompt_is_made_is_not_served(serve_engine: Serve) -> None:
    tokenizer = Counting()
    tokenizer.gate.clear()
    async with (
        count_engine(tokenizer=tokenizer) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        async with connected(server.url) as raw:
            body = {"model": MODEL, "prompt": "abc", "max_tokens": 5, "echo": True, "logprobs": 1}
            raw.send(COMPLETIONS, body)
            await tokenizer.begun.wait()
            assert server.state.num_open == 1
        await until(lambda: not server.state.num_open)
        assert ends_of(server.state.metrics) == (1, 0, 0, 1)
        tokenizer.gate.set()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_request_that_is_cancelled_from_outside_has_an_end(path: str) -> None:
    """Case: a middleware with a time-out round the app."""
    async with count_engine(latency=STEP_S, num_kv_blocks=4096) as engine, no_leaks(engine):
        app = build_app(engine)
        ask: dict[str, Any] = {"model": MODEL, "max_tokens": 4000, "stream": True}
        ask |= {"prompt": [1]} if path == COMPLETIONS else {
            "messages": [{"role": "user", "content": "a"}]
        }  # fmt: skip
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        task = asyncio.create_task(app(scope_of(path), receive_of(ask), send))
        await until(lambda: len(sent) > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends_of(app.state.server.metrics) == (1, 0, 0, 1)
        await engine.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_in_the_turn_of_the_last_byte(stream: bool) -> None:
    """Case: the deadline of a drain, just while an answer ends: nothing is sent behind it."""
    async with count_engine() as engine, no_leaks(engine):
        app = build_app(engine)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                for call in tuple(app.state.server._calls):
                    call.cut_off()

        ask = {"model": MODEL, "prompt": [1], "max_tokens": 2, "stream": stream}
        await app(scope_of(COMPLETIONS), receive_of(ask), send)
    kinds = [one["type"] for one in sent]
    assert kinds.count("http.response.start") == 1
    assert sent[0]["status"] == 200
    assert not sent[-1].get("more_body", False)
    assert [one.get("more_body", False) for one in sent[1:]].count(False) == 1
    text = b"".join(one["body"] for one in sent[1:]).decode()
    assert all(chr(one) in text or f"\\u{one:04x}" in text for one in after(1, 2))
    received, finished, failed, aborted = ends_of(app.state.server.metrics)
    assert (received, finished + failed + aborted) == (1, 1)
