"""What is not generating: models, ids and texts, probes, metrics, the API's own description.

Comes in: an app's state. Goes out: its routes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from aneuron.errors import InvalidRequest, RequestError
from aneuron.params.messages import Conversation
from aneuron.prompt import tokenize, validate_text
from aneuron.server.asked import check_template
from aneuron.server.http.errors import ApiError, api_error, error_response, model_not_found
from aneuron.server.tools import template_messages
from aneuron.server.watch import health as probes
from aneuron.server.watch.metrics import missing
from aneuron.server.wire.common import encode
from aneuron.server.wire.decoding import decode, refuse
from aneuron.server.wire.messages import plain_messages
from aneuron.server.wire.misc import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    Version,
)
from aneuron.server.wire.openapi import openapi

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from aneuron.server.app import ServerState

__all__ = ["about_routes"]

_MOST_IDS = 2**17  # of one request: as lists of Python, they hold the loop some 10 ms
_JSON = "application/json"


def about_routes(state: ServerState) -> list[Route]:
    """Return the routes."""
    about = _About(state)
    return [
        Route("/v1/models", about.models, methods=["GET"]),
        Route("/v1/models/{model:path}", about.model, methods=["GET"]),
        Route("/tokenize", _guarded(about.tokenize), methods=["POST"]),
        Route("/detokenize", _guarded(about.detokenize), methods=["POST"]),
        Route("/version", about.version, methods=["GET"]),
        Route("/openapi.json", about.openapi, methods=["GET"]),
        Route("/health", about.health, methods=["GET"]),
        Route("/ready", about.ready, methods=["GET"]),
        Route("/metrics", about.metrics, methods=["GET"]),
    ]


def _guarded(
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Let what is wrong with a request be its answer."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except (ApiError, RequestError) as error:
            names = {"prompt_token_ids": "tokens"}
            return error_response(api_error(error, names))

    return answer


class _About:
    """The handlers."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._described: tuple[str, bytes] | None = None

    async def models(self, _: Request) -> Response:
        cards = [self._card(name) for name in self._state.model_names]
        return Response(encode(ModelList(data=cards)), media_type=_JSON)

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._state.model_names:
            return error_response(model_not_found(name))
        return Response(encode(self._card(name)), media_type=_JSON)

    def _card(self, name: str) -> ModelCard:
        state = self._state
        return ModelCard(
            id=name, created=state.created_s, root=state.engine.spec.name,
            max_model_len=state.max_model_len,
        )  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        asked = decode(TokenizeRequest, await request.body())
        state = self._state
        state.check(asked.model)
        tokenizer = state.engine.tokenizer
        if asked.messages is not None:
            check_template(tokenizer)
            conversation = Conversation.of(
                template_messages(plain_messages(asked.messages)), tools=asked.plain_tools or None,
                add_generation_prompt=asked.begins_turn,
                continue_final_message=bool(asked.continue_final_message),
                chat_template_kwargs=asked.chat_template_kwargs,
            )  # fmt: skip
            ids = await tokenize(tokenizer, conversation, check=_check_size)
        else:
            text = validate_text(asked.prompt)
            special = asked.add_special_tokens is not False
            encode_text = tokenizer.encode if special else tokenizer.encode_rendered
            ids = await encode_text(text, check=_check_size)
        spell = await state.spelling.load() if asked.return_token_strs else None
        tokens: list[int] = ids.tolist()
        names = None if spell is None else [spell(one).decode("utf-8", "replace") for one in tokens]
        told = TokenizeResponse(
            count=len(tokens), max_model_len=state.max_model_len, tokens=tokens,
            token_strs=names,
        )  # fmt: skip
        return Response(encode(told), media_type=_JSON)

    async def detokenize(self, request: Request) -> Response:
        asked = decode(DetokenizeRequest, await request.body())
        state = self._state
        state.check(asked.model)
        if len(asked.tokens) > _MOST_IDS:
            refuse("tokens", f"holds {len(asked.tokens)} ids; at most {_MOST_IDS} are taken")
        size = state.engine.spec.vocab_size
        for at, token_id in enumerate(asked.tokens):
            if token_id >= size:
                refuse(f"tokens[{at}]", f"is outside the vocabulary of {size}")
        decoder = state.engine.tokenizer.decode
        text = await asyncio.to_thread(decoder, asked.tokens, skip_special_tokens=False)
        return Response(encode(DetokenizeResponse(prompt=text)), media_type=_JSON)

    async def version(self, _: Request) -> Response:
        from aneuron import __version__

        return Response(encode(Version(version=__version__)), media_type=_JSON)

    async def openapi(self, request: Request) -> Response:
        root, state = request.scope.get("root_path", ""), self._state
        if self._described is None or self._described[0] != root:  # that of an app around this one
            made = openapi(state.config, model_names=state.model_names, root_path=root)
            self._described = root, encode(made)
        return Response(self._described[1], media_type=_JSON)

    async def health(self, _: Request) -> Response:
        return _probe(probes.health(self._state))

    async def ready(self, _: Request) -> Response:
        return _probe(probes.ready(self._state))

    async def metrics(self, request: Request) -> Response:
        if (advice := missing()) is not None:
            return error_response(ApiError(501, advice, code="not_implemented"))
        page, kind = await self._state.metrics.render(request.headers.get("accept"))
        return Response(page, headers={"content-type": kind})


def _probe(verdict: tuple[bool, str]) -> Response:
    status = 200 if verdict[0] else 503
    return Response(probes.body(verdict), status, media_type=_JSON)


def _check_size(num_tokens: int, *, at_least: bool = False) -> None:
    if num_tokens > _MOST_IDS:
        number = f"at least {num_tokens}" if at_least else num_tokens
        message = f"prompt makes {number} ids; at most {_MOST_IDS} are told"
        raise InvalidRequest(message, param="prompt")
