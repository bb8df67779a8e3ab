"""The OpenAI-compatible API inside your app: `uvicorn --app-dir examples starlette_mount:app`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import aneuron
from aneuron.server import build_app


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[dict[str, aneuron.Engine | ASGIApp]]:
    async with aneuron.Engine(os.environ.get("MODEL", "smollm2-135m")) as engine:
        yield {"engine": engine, "api": build_app(engine)}  # the state of each request


async def home(request: Request) -> PlainTextResponse:
    stats = request.state.engine.stats()  # the same engine, for your own routes
    return PlainTextResponse(f"{stats.running} running, {stats.waiting} waiting")


async def api(scope: Scope, receive: Receive, send: Send) -> None:
    await scope["state"]["api"](scope, receive, send)  # that of this lifespan's engine


# /ai/v1/chat/completions, /ai/metrics, …
app = Starlette(routes=[Route("/", home), Mount("/ai", api)], lifespan=lifespan)
