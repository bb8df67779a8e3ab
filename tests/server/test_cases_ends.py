"""What fails while requests run, and who stops them: device, engine, server; over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_page
from starlette.applications import Starlette
from starlette.routing import Mount

from aneuron import DeviceLost, Engine
from aneuron.server import ServerConfig, build_app
from aneuron.server.http.addresses import bind, url
from aneuron.server.http.serving import serve
from aneuron.testing import (
    ByteTokenizer,
    Count,
    Fault,
    SimDevice,
    assert_idle,
    count_engine,
    no_leaks,
    wait_all_idle,
)
from tests.server.raw import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Raw,
    aborted,
    all_gone,
    asks,
    connected,
    error_of,
    ids_of,
    statuses,
    text_of,
)
from tests.support import after, assert_exact, nothing_logged, patient, until

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


# ── the device and the engine ───────────────────────────────────────────────────────────


async def test_case_63_the_device_is_lost(serve_engine: Serve) -> None:
    """Case 63: five that run and three that wait have an error within a second."""
    gate = threading.Event()  # the first step ends when all are there
    latency = lambda _: STEP_S * gate.wait()  # noqa: E731
    faults = [Fault(step=10, status=101)]
    options: dict[str, Any] = {"faults": faults, "latency": latency, "max_num_seqs": 5}
    async with count_engine(**options) as engine, serve_engine(engine) as server:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(gate.set)
            raws = [await stack.enter_async_context(connected(server.url)) for _ in range(8)]
            for n, raw in enumerate(raws):
                raw.send(COMPLETIONS, asks(1000 * n, stream=n % 2 == 0))
            await until(lambda: server.state.num_open == 8)
            gate.set()
            await until(lambda: (engine.stats().running, engine.stats().waiting) == (5, 3))
            await until(lambda: engine.failure is not None)
            async with asyncio.timeout(1):
                told = [await error_of(raw) for raw in raws]
            assert [one["code"] for one in told] == ["device_error"] * 8
            assert {one["message"].partition(";")[0] for one in told} == {"the device is lost"}
        assert isinstance(engine.failure, DeviceLost)
        async with asyncio.timeout(0.5):
            refused = await server.post(COMPLETIONS, **asks())
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "device_error")
        health = await server.http.get("/health")
        assert (health.status_code, "device_lost" in health.text) == (503, True)
        assert (await server.http.get("/ready")).status_code == 503
        assert "aneuron" in (await server.http.get("/metrics")).text
        assert server.state.num_open == 0
        assert server.state.metrics.failed_by_code["device_error"] == 9
        async with asyncio.timeout(1):
            await server.state.drain(30)
            await engine.aclose()


@pytest.mark.parametrize("status", [4, 101])
async def test_case_65_the_device_fails_amid_a_stream(
    serve_engine: Serve, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 65: the tokens before it, an error event, no reason to finish, no connection."""
    faults = [Fault(step=4, status=status)]
    async with (
        count_engine(faults=faults, latency=patient()) as engine,  # no two tokens come as one
        serve_engine(engine) as server,
    ):
        async with connected(server.url) as raw:
            *told, error = await raw.stream(COMPLETIONS, asks(), count=4)
            assert ids_of(text_of(told)) == after(1000, 3)
            assert not [one for one in told if json.loads(one)["choices"][0]["finish_reason"]]
            assert json.loads(error)["error"]["code"] == "device_error"
            assert await raw.ended()
        assert statuses(caplog) == ["500"]
        assert server.state.metrics.failed_by_code["device_error"] == 1


async def test_case_65_the_official_client_raises(serve_engine: Serve) -> None:
    """Case 65: amid a stream, and at once for n=0."""
    options: dict[str, Any] = {"faults": [Fault(step=4, status=4)], "latency": STEP_S}
    async with count_engine(**options) as engine, serve_engine(engine) as server:
        client, ids = server.openai.completions, list[int]()
        ask = {"model": server.model, "prompt": [1000], "stream": True}
        with pytest.raises(openai.APIError, match="device failed") as failed:
            async for chunk in await client.create(**ask, max_tokens=100):
                ids += ids_of(chunk.choices[0].text)
        assert ids == after(1000, 3)
        assert not isinstance(failed.value, openai.APIConnectionError)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.create(**ask, n=0)
        assert refused.value.param == "n"
        assert refused.value.response.headers["content-type"] == "application/json"
        await wait_all_idle(engine)
        assert_idle(engine)
        await assert_exact(engine)


async def test_the_owner_closes_the_engine_while_requests_run(serve_engine: Serve) -> None:
    """Streams have an error, who waits for a whole is told 503, and the server lives on."""
    engine = Engine(Count(), device=SimDevice(latency=STEP_S), max_num_seqs=2)
    async with engine, serve_engine(engine) as server:
        async with contextlib.AsyncExitStack() as stack:
            raws = [await stack.enter_async_context(connected(server.url)) for _ in range(4)]
            for n, raw in enumerate(raws):
                raw.send(COMPLETIONS, asks(1000 * n, stream=n % 2 == 0))
                await until(lambda n=n: server.state.num_open == n + 1)  # type: ignore[misc]
            await until(lambda: engine.stats().generation_tokens > 5)
            await engine.aclose()
            async with asyncio.timeout(1):
                told = [await error_of(raw) for raw in raws]
        assert [one["code"] for one in told] == ["engine_unavailable"] * 4
        assert (raws[1].status, raws[1].headers["retry-after"]) == (503, "1")
        assert aborted(server) == {"shutdown": 4}
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.post(COMPLETIONS, **asks())).status_code == 503
        await engine.open()
        answer = await server.post(COMPLETIONS, **asks(1000, 3))
        assert ids_of(answer.json()["choices"][0]["text"]) == after(1000, 3)
        assert (await server.http.get("/health")).status_code == 200


# ── abort all, and drain ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["clients leave", "drain", "engine"])
async def test_case_79_all_are_aborted(serve_engine: Serve, how: str) -> None:
    """Case 79: 20 run and 10 wait; then nothing is left, and the counts add up."""
    async with (
        count_engine(latency=STEP_S, max_num_seqs=20) as engine,
        serve_engine(engine) as server,
    ):
        raws = [await Raw.connect(server.url) for _ in range(30)]
        for n, raw in enumerate(raws):
            raw.send(COMPLETIONS, asks(1000 * n, stream=n % 3 == 0))
        await until(lambda: (engine.stats().running, engine.stats().waiting) == (20, 10))
        if how == "drain":
            await server.state.drain(0)
        elif how == "engine":
            for name in list(engine._core.intake.requests):
                engine.abort(name)
        else:
            for raw in raws:
                raw.leave()
        await all_gone(server)
        totals = _totals((await server.http.get("/metrics")).text)
        assert totals["num_requests_running"] == totals["num_requests_waiting"] == 0
        assert totals["kv_cache_usage_perc"] == 0
        assert aborted(server) == {"shutdown" if how == "drain" else "client": 30}
        assert totals["request_aborted_total"] == totals["requests_received_total"] == 30
        assert totals["request_success_total"] == totals["request_failure_total"] == 0
        if how != "clients leave":
            for raw in raws:
                raw.leave()


def _totals(page: str) -> dict[str, float]:
    """Return the sums of samples by name, without their prefix; none may be negative."""
    totals: dict[str, float] = defaultdict(float)
    for sample in (one for family in parse_page(page) for one in family.samples):
        assert sample.value >= 0, sample
        totals[sample.name.removeprefix("aneuron").lstrip(":_")] += sample.value
    return totals


async def test_case_80_a_drain_lets_streams_end(serve_engine: Serve) -> None:
    """Case 80, with grace: streams and who waits end whole, new ones are refused."""
    async with (
        count_engine(latency=STEP_S, max_num_seqs=2) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        raws = [await stack.enter_async_context(connected(server.url)) for _ in range(4)]
        for n, raw in enumerate(raws):
            raw.send(COMPLETIONS, asks(1000 + 1000 * n, 100, stream=n != 3))
            await until(lambda n=n: server.state.num_open == n + 1)  # type: ignore[misc]
        await until(lambda: engine.stats().waiting == 2)
        draining = asyncio.create_task(server.state.drain(5))
        await until(lambda: server.state.is_draining)
        for path, body in ((COMPLETIONS, asks()), (CHAT, {"messages": MESSAGES})):
            refused = await server.post(path, **body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200
        assert not draining.done()
        for n, raw in enumerate(raws):
            assert await raw.answer() == 200
            if n == 3:
                text = json.loads(await raw.body())["choices"][0]["text"]
            else:
                text = text_of([event async for event in raw.events()])
            assert ids_of(text) == after(1000 + 1000 * n, 100)
        async with asyncio.timeout(1):
            await draining
            await server.state.drain(5)  # again: at once


async def test_case_80_a_drain_without_grace(serve_engine: Serve) -> None:
    """Case 80: all have an error within a second; two more calls meanwhile are no matter."""
    async with (
        count_engine(latency=STEP_S, max_num_seqs=2) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        raws = [await stack.enter_async_context(connected(server.url)) for _ in range(3)]
        for n, raw in enumerate(raws):
            raw.send(COMPLETIONS, asks(1000 * n, stream=n != 1))
            await until(lambda n=n: server.state.num_open == n + 1)  # type: ignore[misc]
        patient = asyncio.create_task(server.state.drain(60))
        await until(lambda: server.state.is_draining)
        async with asyncio.timeout(1):
            await asyncio.gather(server.state.drain(0), server.state.drain(0))
            await patient
            told = [await error_of(raw) for raw in raws]
        assert [one["message"] for one in told] == ["the server is stopping"] * 3
        assert raws[1].status == 503
        assert aborted(server) == {"shutdown": 3}


class GatedRenderer(ByteTokenizer):
    """Is ready to render when it is told to; the handler waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.gate = asyncio.Event(), asyncio.Event()

    async def load_renderer(self) -> None:
        self.begun.set()
        await self.gate.wait()


@pytest.mark.parametrize("grace_s", [5.0, 0.0])
async def test_a_drain_counts_who_is_still_being_prepared(
    serve_engine: Serve, grace_s: float
) -> None:
    """A request without a place in the engine is waited for as well, and cut off as well."""
    tokenizer = GatedRenderer()
    async with (
        count_engine(tokenizer=tokenizer) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
        connected(server.url) as raw,
    ):
        raw.send(CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": 3})
        await tokenizer.begun.wait()
        draining = asyncio.create_task(server.state.drain(grace_s))
        await until(lambda: server.state.is_draining)
        if grace_s:
            for _ in range(10):
                await asyncio.sleep(0)
            assert not draining.done()
            tokenizer.gate.set()
        assert await raw.answer() == (200 if grace_s else 503)
        await draining


async def test_a_stop_drains_and_then_closes(serve_engine: Serve) -> None:
    """As on SIGTERM: what runs ends whole, then no connection is left and nobody listens."""
    async with count_engine(latency=STEP_S) as engine, no_leaks(engine):
        app = build_app(engine)
        [listening] = bind("127.0.0.1", 0, uds=None)
        address, stop, started = url(listening), asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(
                serve(
                    app, sockets=[listening], stop=stop, handles_signals=False,
                    on_started=lambda _: started.set(), drain=lambda: app.state.server.drain(5),
                )
            )  # fmt: skip
            await started.wait()
            async with connected(address) as raw, connected(address) as idle:
                await raw.stream(COMPLETIONS, asks(1000, 50), count=1)
                stop.set()
                await until(lambda: app.state.server.is_draining)
                idle.send("/ready")
                assert await idle.answer() == 503
                events = [event async for event in raw.events()]
                assert events[-1] == "[DONE]"
                assert ids_of(text_of(events))[-1] == 1050
                assert await raw.ended()
            assert await serving
        with pytest.raises(ConnectionRefusedError):
            await Raw.connect(address)


# ── mounted ─────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def outer(app: Starlette) -> AsyncIterator[tuple[str, Starlette]]:
    """Serve an app with its lifespan, as a server does."""
    [listening] = bind("127.0.0.1", 0, uds=None)
    address, stop, started = url(listening), asyncio.Event(), asyncio.Event()
    async with app.router.lifespan_context(app), asyncio.TaskGroup() as group:
        group.create_task(
            serve(
                app, sockets=[listening], stop=stop, handles_signals=False,
                on_started=lambda _: started.set(),
            )
        )  # fmt: skip
        await started.wait()
        yield address, app
        stop.set()


async def test_mounted_under_a_prefix_with_an_engine_of_the_lifespan() -> None:
    """Another app mounts it when its lifespan opens the engine; streams, keys, leaving hold."""
    opened: list[Engine] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with count_engine(latency=STEP_S) as engine:
            opened.append(engine)
            config = ServerConfig(api_keys=("key",), served_model_names=("mine",))
            app.router.routes.append(Mount("/llm", build_app(engine, config)))
            yield
            await wait_all_idle(engine)
            assert_idle(engine)

    async with outer(Starlette(lifespan=lifespan)) as (address, _):
        [engine] = opened
        async with openai.AsyncOpenAI(
            base_url=f"{address}/llm/v1", api_key="key", max_retries=0
        ) as client:
            ask = {"model": "mine", "prompt": [1000], "max_tokens": 20}
            assert [one.id async for one in client.models.list()] == ["mine"]
            whole = await client.completions.create(**ask)  # type: ignore[call-overload]
            assert ids_of(whole.choices[0].text) == after(1000, 20)
            chunks = await client.completions.create(**ask, stream=True)  # type: ignore[call-overload]
            text = "".join([chunk.choices[0].text async for chunk in chunks])
            assert ids_of(text) == after(1000, 20)
            bad = client.with_options(api_key="other")
            with pytest.raises(openai.AuthenticationError):
                await bad.models.list()
        async with connected(address) as raw:
            raw.send("/llm/health")
            assert (await raw.whole())["status"] == "ok"
            raw.send("/health")
            assert await raw.answer() == 404
        async with connected(address) as raw:
            raw.send(
                "/llm" + COMPLETIONS, asks(model="mine", stream=True), authorization="Bearer key"
            )
            assert await raw.answer() == 200
            await until(lambda: engine.stats().running == 1)
        async with asyncio.timeout(1):
            await engine.wait_idle()


async def test_two_apps_of_one_engine_are_apart(serve_engine: Serve) -> None:
    """Mounted beside each other: each has its own names, counts, and drain."""
    async with count_engine() as engine:
        apps = {name: build_app(engine, ServerConfig(served_model_names=(name,))) for name in "ab"}
        routes = [Mount(f"/{name}", app) for name, app in apps.items()]
        async with outer(Starlette(routes=routes)) as (address, _), connected(address) as raw:
            await apps["a"].state.server.drain(0)
            for name, status in (("a", 503), ("b", 200)):
                raw.send(f"/{name}{COMPLETIONS}", asks(1000, 3, model=name))
                assert await raw.answer() == status
                await raw.body()
            counts = [
                app.state.server.metrics.finished_by_reason["length"] for app in apps.values()
            ]
            assert counts == [0, 1]
