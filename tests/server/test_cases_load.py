"""Many clients at once, slow ones, and large requests, over a real socket."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from aneuron.cli.serve import _settle
from aneuron.models.tokenizer import HFTokenizer
from aneuron.testing import (
    Count,
    Sum,
    assert_idle,
    count_engine,
    no_leaks,
    sim_engine,
    wait_all_idle,
)
from tests.server.raw import (
    CHAT,
    COMPLETIONS,
    MODEL,
    asks,
    connected,
    head,
    ids_of,
    narrow_server,
    sites,
    text_of,
)
from tests.server.scripted import PLAIN, user
from tests.support import after, device_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    Serve = Callable[..., AbstractAsyncContextManager[Any]]

STEP_S = 0.0001
HIGH_WATER = 2**16  # bytes that a transport holds before its writers wait
DELTA = 2**14  # bytes of one event; more than any here


def slack() -> float:
    """Return how many times as long a wait may take: there may be others on the machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


# ── many at once ────────────────────────────────────────────────────────────────────────


async def test_case_14_two_clients_with_one_request_id(serve_engine: Serve) -> None:
    """Case 14: both are served right, and their answers have that id on them."""
    async with (
        count_engine(latency=0.002) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
        connected(server.url) as first,
        connected(server.url) as second,
    ):
        for raw, last in ((first, 1000), (second, 5000)):
            raw.send(COMPLETIONS, asks(last, 50), x_request_id="x")
        await until(lambda: engine.stats().running == 2)
        told = [await raw.whole() for raw in (first, second)]
        assert [ids_of(one["choices"][0]["text"]) for one in told] == [
            after(1000, 50),
            after(5000, 50),
        ]
        assert first.headers["x-request-id"] == second.headers["x-request-id"] == "x"
        assert told[0]["id"] != told[1]["id"]


async def test_case_75_more_than_may_wait(serve_engine: Serve) -> None:
    """Case 75: 12 of 15 are taken, 3 told at once when to try again; then there is room."""
    gate = threading.Event()  # no step ends before all have been taken or refused
    latency = lambda _: 0.002 * gate.wait()  # noqa: E731
    options: dict[str, Any] = {"latency": latency, "max_num_seqs": 2, "max_waiting": 10}
    async with (
        count_engine(**options) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
        AsyncExitStack() as stack,
    ):
        stack.callback(gate.set)
        raws = [await stack.enter_async_context(connected(server.url)) for _ in range(15)]
        for n, raw in enumerate(raws):
            raw.send(COMPLETIONS, asks(1000 * (n + 1), 100, stream=True))
        metrics = server.state.metrics
        await until(lambda: metrics.failed_by_code["overloaded"] == 3)
        await until(lambda: server.state.num_open == 12)
        assert metrics.received_by_endpoint["completions"] == 15
        gate.set()
        texts = {}
        for n, raw in enumerate(raws):
            if await raw.answer() == 200:
                texts[n] = text_of([event async for event in raw.events()])
                continue
            assert raw.status == 429
            assert int(raw.headers["retry-after"]) >= 1
            error = json.loads(await raw.body())["error"]
            assert (error["code"], error["type"]) == ("overloaded", "rate_limit_error")
            await until(lambda: engine.stats().waiting < 10)
            raw.send(COMPLETIONS, asks(1000 * (n + 1), 100, stream=True))
            assert await raw.answer() == 200
            texts[n] = text_of([event async for event in raw.events()])
        for n in range(15):
            assert ids_of(texts[n]) == after(1000 * (n + 1), 100)


# ── readers ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(60)
async def test_case_53_however_it_is_read(serve_engine: Serve) -> None:
    """Case 53: 50 prompts of SUM as bytes; joined deltas are the text of the whole answer."""
    rng = random.Random(53)
    options: dict[str, Any] = {"num_kv_blocks": 16384, "max_model_len": 2048}
    async with (
        sim_engine(Sum(vocab_size=257), **options) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        narrow_server()
        merged = 0
        for number in range(50):
            prompt = "".join(rng.choices("aé€😀 ", k=rng.randrange(1, 40)))
            is_long = number % 10 == 0
            ask: dict[str, Any] = {
                "model": server.model, "temperature": 0,
                "max_tokens": 800 if is_long else rng.randrange(1, 40),
            }  # fmt: skip
            path = COMPLETIONS
            if number % 2:
                path = CHAT
                ask["messages"] = [{"role": "user", "content": prompt}]
            else:
                ask["prompt"] = prompt
            whole = (await server.post(path, **ask)).json()["choices"][0]
            expected = whole["text"] if "text" in whole else whole["message"]["content"]
            async with connected(server.url) as fast:
                fast.send(path, {**ask, "stream": True})
                assert await fast.answer() == 200
                assert text_of([event async for event in fast.events()]) == expected
            async with connected(server.url, narrow=True) as slow:
                [first] = await slow.stream(path, ask, count=1)
                await engine.wait_idle()
                rest = [event async for event in slow.events()]
                assert text_of([first, *rest]) == expected
                merged += is_long and len(rest) < 700
        assert merged == 5


async def test_case_78_a_slow_reader_beside_a_fast_one(serve_engine: Serve) -> None:
    """Case 78: the fast one has a token of every step; the slow one all of its own, merged."""
    async with (
        count_engine(latency=STEP_S, num_kv_blocks=2048) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        narrow_server()
        async with connected(server.url, narrow=True) as slow, connected(server.url) as fast:
            told = await slow.stream(COMPLETIONS, asks(10_000, 5000), count=1)
            begun = device_of(engine).num_steps
            told += await _read_slowly(slow, asyncio.create_task(_read_all(fast)))
            steps = device_of(engine).num_steps - begun
            assert steps <= 5500
            events = [event async for event in slow.events()]
            assert ids_of(text_of(told + events)) == after(10_000, 5000)
            assert len(told + events) < 2500


async def _read_all(raw: Any) -> None:
    raw.send(COMPLETIONS, asks(50_000, 5000, stream=True))
    assert await raw.answer() == 200
    assert ids_of(text_of([event async for event in raw.events()])) == after(50_000, 5000)


async def _read_slowly(raw: Any, beside: asyncio.Task[None]) -> list[str]:
    """Read an event now and then, until the task beside has ended."""
    events, told = raw.events(), list[str]()
    while not beside.done():
        told.append(await anext(events))
        await asyncio.wait([beside], timeout=0.1)
        assert max(_held_bytes()) < HIGH_WATER + DELTA
    await beside
    return told


@pytest.mark.timeout(60)
async def test_case_78_what_nobody_reads_is_not_held(serve_engine: Serve) -> None:
    """Case 78: 20,000 unread tokens are held as ids, and read in one go in under a second."""
    async with (
        count_engine(num_kv_blocks=2048) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        narrow_server()
        async with connected(server.url, narrow=True) as raw:
            told = await raw.stream(COMPLETIONS, asks(1000, 20_000), count=1)
            async with asyncio.timeout(40):
                await engine.wait_idle()
            await asyncio.sleep(0)
            assert max(_held_bytes()) < HIGH_WATER + DELTA
            assert server.state.num_open == 1
            begun_s = asyncio.get_running_loop().time()
            told += [event async for event in raw.events()]
            taken_s = asyncio.get_running_loop().time() - begun_s
            assert ids_of(text_of(told)) == after(1000, 20_000)
            assert len(told) < 2000
            assert taken_s < 1 * slack()


def _held_bytes() -> list[int]:
    """Return how much each connection of the server holds that was not sent."""
    connections = [one for site in sites() for one in site.state.connections]
    return [one.transport.get_write_buffer_size() for one in connections]


async def test_a_drain_does_not_wait_for_who_does_not_read(serve_engine: Serve) -> None:
    """Without grace it ends, with its connection, though its error cannot be sent."""
    async with (
        count_engine(num_kv_blocks=2048) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        narrow_server()
        async with connected(server.url, narrow=True) as raw:
            await raw.stream(COMPLETIONS, asks(1000, 20_000), count=1)
            connections: Any = sites()[0].state.connections
            [connection] = [one for one in connections if one.cycle]
            await until(lambda: connection.flow.write_paused)
            async with asyncio.timeout(2):
                await server.state.drain(0)
            assert server.state.num_open == 0
            assert server.state.metrics.aborted_by_reason["shutdown"] == 1
            await engine.wait_idle()


# ── the loop stays free ─────────────────────────────────────────────────────────────────


def byte_pairs() -> HFTokenizer:
    """A byte-level tokenizer with some merges, as models have them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rng = random.Random(62)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 9))) for _ in range(2000)]
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    return HFTokenizer(tokenizer, eos_token_ids=(), chat_template=PLAIN)


@pytest.mark.timeout(60)
async def test_case_62_a_prompt_of_5_mb(serve_engine: Serve) -> None:
    """Case 62: it ends in 400; meanwhile neither `/health` nor a stream waits 0.2 s.

    Messages may not be as long; the longest that may be are tokenised, and refused then.
    """
    tokenizer = byte_pairs()
    model = Count(vocab_size=tokenizer.vocab_size, max_model_len=2**15)
    options: dict[str, Any] = {"latency": 0.002, "num_kv_blocks": 4096, "tokenizer": tokenizer}
    rng = random.Random(62)
    words = ["".join(rng.choices("etaoinshrdlu", k=5)) for _ in range(5000)]
    text = " ".join(rng.choices(words, k=5_000_000 // 6))
    async with (
        sim_engine(model, **options) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
        connected(server.url) as raw,
    ):
        await raw.stream(COMPLETIONS, asks(5, 32_000), count=1)
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            gap = group.create_task(_largest_gap(raw, over))
            probes = group.create_task(_slowest_probe(server, over))
            for path, body, code in (
                (COMPLETIONS, {"prompt": text}, "context_length_exceeded"),
                (CHAT, {"messages": [user(text)]}, "invalid_value"),
                (CHAT, {"messages": [user(text[:1_000_000])]}, "context_length_exceeded"),
            ):
                async with connected(server.url) as large:
                    await _post(large, path, json.dumps({"model": MODEL, **body}).encode())
                    assert await large.answer() == 400
                    error = json.loads(await large.body())["error"]
                    assert error["code"] == code, error
            over.set()
        assert probes.result() < 0.2 * slack()
        assert 0 < gap.result() < 0.2 * slack()


async def _post(raw: Any, path: str, body: bytes) -> None:
    """Send in pieces: the client of a test shares the loop with the server."""
    raw.writer.write(head(path, len(body)))
    for at in range(0, len(body), 2**16):
        raw.writer.write(body[at : at + 2**16])
        await raw.writer.drain()


async def _largest_gap(raw: Any, over: asyncio.Event) -> float:
    clock = asyncio.get_running_loop().time
    before_s, largest_s = clock(), 0.0
    async for _ in raw.events():
        now_s = clock()
        largest_s, before_s = max(largest_s, now_s - before_s), now_s
        if over.is_set():
            return largest_s
    raise AssertionError("the stream was over too soon")


async def _slowest_probe(server: Any, over: asyncio.Event) -> float:
    clock = asyncio.get_running_loop().time
    slowest_s = 0.0
    while not over.is_set():
        begun_s = clock()
        assert (await server.http.get("/health")).status_code == 200
        slowest_s = max(slowest_s, clock() - begun_s)
        await asyncio.sleep(0.05)
    return slowest_s


# ── load ────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def child(url: str, **settings: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run clients in another process."""
    script = Path(__file__).with_name("load_client.py")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), url, json.dumps(settings), stdin=pipe, stdout=pipe
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def result_of(process: asyncio.subprocess.Process) -> dict[str, Any]:
    out, _ = await process.communicate(b"")  # closes its input: a prober ends
    assert process.returncode == 0
    told: dict[str, Any] = json.loads(out)
    return told


def resident_bytes() -> int:
    """Return how much memory this process has, with nothing in it that could be collected."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * 4096


async def _load(serve_engine: Serve, *, streams: int, requests: int) -> dict[str, Any]:
    """Serve so many requests, after some to warm up; return what was seen."""
    options: dict[str, Any] = {"max_num_seqs": streams, "num_kv_blocks": 16 * streams}
    async with settled(), count_engine(**options) as engine, serve_engine(engine) as server:

        async def run(number: int, seed: int) -> dict[str, Any]:
            async with child(server.url, streams=streams, requests=number, seed=seed) as process:
                told = await result_of(process)
            await wait_all_idle(engine)
            await until(lambda: server.state.num_open == 0)
            assert_idle(engine)
            return told

        await run(max(1000, requests), 1)  # from the second as many on, memory stays as it is
        before = resident_bytes()
        async with child(server.url, probes=True) as prober, peak_of(server) as open_:
            told = await run(requests, 2)
            probed = await result_of(prober)
        told["growth"] = resident_bytes() - before
        told["open"] = max(open_)
        told["statuses"] = probed["statuses"]
        told["health_s"] = sorted(probed["taken_s"])
        assert not sum(len(one.state.tasks) for one in sites())
        return told


@asynccontextmanager
async def settled() -> AsyncIterator[None]:
    """Collect garbage as `aneuron serve` does; this process has much more than that one."""
    thresholds = gc.get_threshold()
    _settle()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@asynccontextmanager
async def peak_of(server: Any) -> AsyncIterator[list[int]]:
    """Note how many requests are open, ten times a second."""
    noted: list[int] = []

    async def note() -> None:
        while True:
            noted.append(server.state.num_open)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(note())
    yield noted
    task.cancel()


def _check(told: dict[str, Any], streams: int, requests: int, within_s: float = 0.05) -> None:
    times = told.pop("health_s")
    median_s, most_s = (times[int(share * len(times))] for share in (0.5, 0.99))
    print({**told, "probes": len(times), "p50": median_s, "p99": most_s, "max": times[-1]})
    assert not told.keys() & {"wrong", "cut", "refused"}
    left = told["amid its request"] + told["amid its answer"]
    assert told["exact"] + left == requests
    assert 0.2 < left / requests < 0.4
    assert told["open"] > 0.9 * streams
    assert set(told["statuses"]) == {"200"}
    assert len(times) > 20
    assert most_s < within_s
    assert told["growth"] < 5_000_000


@pytest.mark.alone
@pytest.mark.timeout(60)
async def test_load(serve_engine: Serve) -> None:
    """50 streams at a time, 1,000 requests, a third of which leave at a random point."""
    _check(await _load(serve_engine, streams=50, requests=1000), 50, 1000, 0.05 * slack())


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_load_at_full_size(serve_engine: Serve) -> None:
    """500 streams at a time, 10,000 requests."""
    _check(await _load(serve_engine, streams=500, requests=10_000), 500, 10_000)
