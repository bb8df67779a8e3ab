"""A FastAPI app that opens its engine: `uvicorn --app-dir examples fastapi_app:app`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

import aneuron


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
    async with aneuron.Engine(os.environ.get("MODEL", "smollm2-135m")) as engine:
        yield {"engine": engine}  # as request.state.engine


app = FastAPI(lifespan=lifespan)


class Question(BaseModel):
    text: str
    max_tokens: int = 64


@app.post("/ask")
async def ask(question: Question, request: Request) -> StreamingResponse:
    messages = [{"role": "user", "content": question.text}]
    stream = request.state.engine.chat(messages, max_tokens=question.max_tokens)
    # A client that goes away cancels the response, and that cancels the request.
    return StreamingResponse((str(token) async for token in stream), media_type="text/plain")


@app.exception_handler(aneuron.RequestError)
async def refuse(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=400)
