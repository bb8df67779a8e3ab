"""Clients that leave before their answer is whole, and connections, over a real socket."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.testing import ByteTokenizer, count_engine
from tests.server.raw import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Raw,
    aborted,
    all_gone,
    asks,
    connected,
    head,
    ids_of,
    sites,
    statuses,
    text_of,
)
from tests.support import after, assert_exact, device_of, nothing_logged, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    Serve = Callable[..., AbstractAsyncContextManager[Any]]

STEP_S = 0.005
MESSAGES = [{"role": "user", "content": "A"}]


@pytest.fixture(autouse=True)
async def nothing_is_logged(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """No handler fails and no exception is lost, whatever clients do."""
    caplog.set_level(logging.INFO, "aneuron.server.access")
    async with nothing_logged(caplog):
        yield


# ── the client leaves ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("resets", [True, False])
async def test_case_2a_all_prompts_of_a_batch_leave(serve_engine: Serve, resets: bool) -> None:
    """Case 2a: the client of four streams leaves; they leave the engine within 3 steps."""
    async with count_engine(latency=STEP_S) as engine, serve_engine(engine) as server:
        raw = await Raw.connect(server.url)
        prompts = [[1000], [2000], [3000], [4000]]
        await raw.stream(COMPLETIONS, asks(prompts), count=1)
        assert engine.stats().running == 4
        raw.leave(resets=resets)
        seen = device_of(engine).num_steps
        await all_gone(server)
        assert device_of(engine).num_steps - seen <= 3
        assert aborted(server) == {"client": 4}
        await assert_exact(engine)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_case_3_a_whole_answer_whose_client_leaves(
    serve_engine: Serve, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 3: nobody waits for 5,000 tokens any more: under 300 are computed."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 5000}
    body |= {"prompt": [9]} if path == COMPLETIONS else {"messages": MESSAGES}
    async with count_engine(latency=STEP_S) as engine, serve_engine(engine) as server:
        async with connected(server.url) as raw:
            raw.send(path, body)
            await asyncio.sleep(0.2)
            assert engine.stats().running == 1
        await all_gone(server)
        assert engine.stats().generation_tokens < 300
        assert aborted(server) == {"client": 1}
        await until(lambda: statuses(caplog) == ["499"])


class GatedTokenizer(ByteTokenizer):
    """Encodes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.gate = asyncio.Event(), asyncio.Event()

    async def encode(self, text: str, **options: Any) -> Any:
        self.begun.set()
        await self.gate.wait()
        return await super().encode(text, **options)

    async def encode_rendered(self, text: str, **options: Any) -> Any:
        self.begun.set()
        await self.gate.wait()
        return await super().encode_rendered(text, **options)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_client_leaves_while_its_prompt_is_tokenised(
    serve_engine: Serve, path: str, stream: bool
) -> None:
    tokenizer = GatedTokenizer()
    body: dict[str, Any] = {"model": MODEL, "stream": stream}
    body |= {"prompt": "A"} if path == COMPLETIONS else {"messages": MESSAGES}
    async with count_engine(tokenizer=tokenizer) as engine, serve_engine(engine) as server:
        async with connected(server.url) as raw:
            raw.send(path, body)
            await tokenizer.begun.wait()
        await until(lambda: aborted(server) == {"client": 1} and not server.state.num_open)
        tokenizer.gate.set()
        await all_gone(server)
        assert device_of(engine).num_prefill_tokens == 0


async def test_a_client_leaves_while_it_waits(serve_engine: Serve) -> None:
    """Not one token of its prompt is computed."""
    async with (
        count_engine(latency=STEP_S, max_num_seqs=1) as engine,
        serve_engine(engine) as server,
        connected(server.url) as first,
    ):
        await first.stream(COMPLETIONS, asks(1000, 100), count=1)
        async with connected(server.url) as waiting:
            waiting.send(COMPLETIONS, asks([[1, 2, 3, 4, 5, 6]]))
            await until(lambda: engine.stats().waiting == 1)
        await until(lambda: engine.stats().waiting == 0 and server.state.num_open == 1)
        events = [event async for event in first.events()]
        assert events[-1] == "[DONE]"
        await all_gone(server)
        assert device_of(engine).num_prefill_tokens == 1
        assert aborted(server) == {"client": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_leaves_between_two_prompts_of_a_batch(
    serve_engine: Serve, stream: bool
) -> None:
    """The first prompt has its answer, the second has not begun, or hardly."""
    options: dict[str, Any] = {"latency": STEP_S, "max_num_seqs": 1}
    async with count_engine(**options) as engine, serve_engine(engine) as server:
        async with connected(server.url) as raw:
            raw.send(COMPLETIONS, asks([[1000], [2000]], 20, stream=stream))
            await until(lambda: engine.stats().generation_tokens >= 20)
        await all_gone(server)
        assert engine.stats().generation_tokens < 40
        assert aborted(server) == {"client": 2}
        await assert_exact(engine)


@pytest.mark.parametrize("resets", [True, False])
async def test_a_client_leaves_amid_its_body(
    serve_engine: Serve, resets: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with count_engine() as engine, serve_engine(engine) as server:
        raw = await Raw.connect(server.url)
        raw.writer.write(head(COMPLETIONS, 1000) + b'{"prompt": [1')
        await raw.writer.drain()
        assert (await server.http.get("/health")).status_code == 200
        raw.leave(resets=resets)
        await until(lambda: "499" in statuses(caplog))
        assert server.state.metrics.received_by_endpoint["completions"] == 0
        await all_gone(server)


@pytest.mark.parametrize("count", [6, 7])
async def test_a_client_that_leaves_after_the_last_token_was_served(
    serve_engine: Serve, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves with the finish reason, or with `[DONE]`: its answer was whole."""
    options: dict[str, Any] = {"latency": STEP_S}
    async with count_engine(**options) as engine, serve_engine(engine) as server:
        async with connected(server.url) as raw:
            events = await raw.stream(COMPLETIONS, asks(1000, 5), count=count)
            assert ids_of(text_of(events)) == after(1000, 5)
        await until(lambda: bool(statuses(caplog)))
        assert statuses(caplog) == ["200"]
        assert server.state.metrics.finished_by_reason["length"] == 1
        assert not aborted(server)
        await all_gone(server)


# ── connections ─────────────────────────────────────────────────────────────────────────


async def test_pipelined_requests_are_answered_in_turn(serve_engine: Serve) -> None:
    async with (
        count_engine() as engine,
        serve_engine(engine) as server,
        connected(server.url) as raw,
    ):
        for n in range(1, 6):
            raw.send(COMPLETIONS, asks(1000 * n, 20, stream=bool(n % 2)))
        for n in range(1, 6):
            assert await raw.answer() == 200
            if n % 2:
                text = text_of([event async for event in raw.events()])
            else:
                text = json.loads(await raw.body())["choices"][0]["text"]
            assert ids_of(text) == after(1000 * n, 20)


@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_who_sent_another_request_ahead_is_seen_to_leave(
    serve_engine: Serve, stream: bool, resets: bool
) -> None:
    async with count_engine(latency=STEP_S) as engine, serve_engine(engine) as server:
        raw = await Raw.connect(server.url)
        raw.send(COMPLETIONS, asks(1000, 5000, stream=stream))
        await until(lambda: engine.stats().generation_tokens > 2)
        raw.send(COMPLETIONS, asks(2000, 5000, stream=stream))
        await until(lambda: engine.stats().generation_tokens > 20)
        raw.leave(resets=resets)
        await all_gone(server)
        assert aborted(server) == {"client": 1}


async def test_who_sends_more_ahead_than_a_head_may_hold_is_cut(serve_engine: Serve) -> None:
    """It would be held without end, or not be read: and who is not read is not seen to leave."""
    async with count_engine(latency=STEP_S) as engine, serve_engine(engine) as server:
        async with connected(server.url) as raw:
            await raw.stream(COMPLETIONS, asks(1000, 5000), count=1)
            for _ in range(40):
                raw.writer.write(head(COMPLETIONS, 2**20) + bytes(1000))
            await all_gone(server)
        assert aborted(server) == {"client": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_half_closed_socket_is_a_client_that_left(
    serve_engine: Serve, stream: bool
) -> None:
    async with (
        count_engine(latency=STEP_S) as engine,
        serve_engine(engine) as server,
        connected(server.url) as raw,
    ):
        raw.send(COMPLETIONS, asks(stream=stream))
        await until(lambda: engine.stats().generation_tokens > 5)
        raw.writer.write_eof()
        await all_gone(server)
        assert aborted(server) == {"client": 1}
        assert not (await raw.reader.read()).endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("amid", ["a stream", "a whole answer", "nothing"])
async def test_nothing_holds_a_connection_that_was_lost(
    serve_engine: Serve, amid: str, resets: bool
) -> None:
    """No clock of it runs on: those of readers that do not read take minutes."""
    async with count_engine(latency=STEP_S) as engine, serve_engine(engine) as server:
        raw = await Raw.connect(server.url)
        most = 1 if amid == "nothing" else 1000
        raw.send(COMPLETIONS, asks(1000, most, stream=amid == "a stream"))
        if amid == "nothing":
            await raw.whole()
        await until(lambda: engine.stats().generation_tokens > 0)
        connection: Any = next(iter(sites()[0].state.connections))
        raw.leave(resets=resets)
        await until(lambda: not sites()[0].state.connections)
        await all_gone(server)
        clocks = (connection._stall, connection._head, connection.timeout_keep_alive_task)
        assert clocks == (None, None, None)


async def test_requests_leave_no_cycles(serve_engine: Serve) -> None:
    """Whole or left amid: collecting what they leave would hold the loop."""
    async with count_engine(latency=STEP_S) as engine, serve_engine(engine) as server:
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            async with connected(server.url) as raw:
                await raw.stream(COMPLETIONS, asks(1000, 500), count=1)
            async with connected(server.url) as raw:
                raw.send(COMPLETIONS, asks(1000, 3, stream=True))
                await raw.answer()
                assert [event async for event in raw.events()][-1] == "[DONE]"
            await until(lambda: not server.state.num_open)
            await engine.wait_idle()
            await until(lambda: not sites()[0].state.connections)
            await asyncio.sleep(0)
            gc.collect()
            found = {type(one).__name__ for one in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.enable()
            gc.garbage.clear()
    assert not found & {"Answer", "Call", "Connection", "TokenStream", "RequestResponseCycle"}
