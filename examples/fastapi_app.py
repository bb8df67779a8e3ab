"""A FastAPI app that opens its engine: `uvicorn --app-dir examples fastapi_app:app`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

import aneuron


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, aneuron.Engine]]:
    async with aneuron.Engine(os.environ.get("MODEL", "smollm2-135m"), max_waiting=100) as engine:
        yield {"engine": engine}  # as request.state.engine


app = FastAPI(lifespan=lifespan)


@app.post("/ask")
async def ask(messages: list[dict[str, str]], request: Request) -> StreamingResponse:
    stream = request.state.engine.chat(messages, max_tokens=64, temperature=0)
    first = await anext(stream)  # a prompt that is too long raises here, before the headers

    async def text() -> AsyncIterator[str]:
        yield first.text
        async for token in stream:  # a client that goes away cancels this, and the request
            yield token.text

    return StreamingResponse(text(), media_type="text/plain")


@app.exception_handler(aneuron.RequestError)
async def refuse(_: Request, error: Exception) -> JSONResponse:
    body = {"error": str(error)}
    if isinstance(error, aneuron.Overloaded):
        return JSONResponse(body, 429, {"Retry-After": str(1 + int(error.retry_after_s))})
    return JSONResponse(body, 400)
