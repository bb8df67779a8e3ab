"""The OpenAI-compatible API inside your app: `uvicorn --app-dir examples starlette_mount:app`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import aneuron
from aneuron.server import build_app


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, aneuron.Engine]]:
    async with aneuron.Engine(os.environ.get("MODEL", "smollm2-135m")) as engine:
        app.mount("/ai", build_app(engine))  # /ai/v1/chat/completions, /ai/metrics, …
        yield {"engine": engine}


async def home(request: Request) -> PlainTextResponse:
    stats = request.state.engine.stats()  # the same engine, for your own routes
    return PlainTextResponse(f"{stats.running} running, {stats.waiting} waiting")


app = Starlette(routes=[Route("/", home)], lifespan=lifespan)
