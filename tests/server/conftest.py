"""Servers of the tests' own, on the tests' loop and a loopback socket, and clients of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from aneuron.server import ServerConfig, build_app
from aneuron.server.http.addresses import bind
from aneuron.server.http.serving import serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from aneuron import Engine
    from aneuron.server.app import ServerState


@dataclass
class Served:
    """A server that runs, and two clients."""

    url: str
    state: ServerState
    http: httpx2.AsyncClient
    openai: openai.AsyncOpenAI

    @property
    def model(self) -> str:
        return self.state.model_names[0]

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.http.post(path, json={"model": self.model, **body})


@asynccontextmanager
async def served(engine: Engine, config: ServerConfig | None = None) -> AsyncIterator[Served]:
    app = build_app(engine, config or ServerConfig())
    [socket] = bind("127.0.0.1", 0, uds=None)
    host, port = socket.getsockname()[:2]
    stop, started = asyncio.Event(), asyncio.Event()
    url = f"http://{host}:{port}"
    async with AsyncExitStack() as stack:
        serving = asyncio.create_task(
            serve(
                app, sockets=[socket], stop=stop, handles_signals=False,
                on_started=lambda _: started.set(),
            )
        )  # fmt: skip
        await started.wait()
        http = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=30))
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        await stack.enter_async_context(client)
        try:
            yield Served(url, app.state.server, http, client)
        finally:
            stop.set()
            await serving


@pytest.fixture
def serve_engine() -> Callable[..., AbstractAsyncContextManager[Served]]:
    """Serve an engine: `async with serve_engine(engine, config) as server`."""
    return served
