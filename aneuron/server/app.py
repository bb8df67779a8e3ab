"""`build_app`: the ASGI app around an engine, to serve or to mount; and what its parts share.

Comes in: an open engine, which somebody else opens and closes. Goes out: a Starlette app. All of
it runs on the engine's loop. The endpoints are in `chat`, `completions`, `responses`, `about`
and `page`; how an answer gets to its client is in `answer`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from aneuron.errors import EngineClosed
from aneuron.server.about import about_routes
from aneuron.server.chat import ChatEndpoint
from aneuron.server.completions import CompletionsEndpoint
from aneuron.server.config import ServerConfig
from aneuron.server.http.errors import api_error, error_response, model_not_found, unavailable
from aneuron.server.http.guard import guards
from aneuron.server.page import page_routes
from aneuron.server.page.timeline import timeline_routes
from aneuron.server.responses import ResponsesEndpoint
from aneuron.server.spelling import Spelling
from aneuron.server.tools.templates import template_name
from aneuron.server.watch.metrics import Metrics
from aneuron.server.watch.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from aneuron.engine import Engine
    from aneuron.server.call import Call

__all__ = ["ServerState", "build_app"]

_CONFIG = ServerConfig()
_CUT_OFF_S = 2.0  # for those that are cut off to end


class ServerState:
    """What the parts of one app share; `app.state.server`.

    Attributes:
        engine: that answers.
        config: of the server.
        model_names: that requests may ask for; metrics say the first.
        created_s: unix time at which the app was made.
        is_draining: new work is refused.
        metrics, tracing: of this app.
        spelling: of the ids.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        """Make the state of an app."""
        self.engine = engine
        self.config = config
        self.model_names = config.served_model_names or (engine.spec.name,)
        self.created_s = int(time.time())
        self.is_draining = False
        self.metrics = Metrics(engine, self.model_names[0])
        self.tracing = Tracing()
        self.spelling = Spelling(engine.tokenizer)
        self._calls: set[Call] = set()
        self._all_ended = asyncio.Event()

    @property
    def max_model_len(self) -> int:
        """The longest context, in tokens."""
        own, asked = self.engine.spec.max_model_len, self.engine.config.max_model_len
        return own if asked is None else min(own, asked)

    @staticmethod
    def now_s() -> int:
        """Return the unix time, for `created`."""
        return int(time.time())

    @property
    def num_open(self) -> int:
        """Requests to generate that are on their way."""
        return len(self._calls)

    def check(self, model: str | None) -> None:
        """Check that a request for this model can be taken now.

        Raises:
            ApiError: 503 while stopping, 404 if the model is not served.
        """
        if self.is_draining:
            raise unavailable("the server is stopping")
        if model is not None and model not in self.model_names:
            raise model_not_found(model)

    @contextmanager
    def open_call(self, call: Call) -> Iterator[None]:
        """Count a request as open while it is."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._all_ended.set()

    async def drain(self, deadline_s: float) -> None:
        """Take no new work, wait for what is open, then cut off the rest.

        Args:
            deadline_s: seconds to wait. A second call waits as well, and may be shorter.
        """
        self.is_draining = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._wait_ended()
        except TimeoutError:
            for call in tuple(self._calls):
                call.cut_off()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CUT_OFF_S):
                    await self._wait_ended()

    async def _wait_ended(self) -> None:
        while self._calls:
            self._all_ended.clear()
            await self._all_ended.wait()


class _Counted:
    """Counts responses by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: dict[object, str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = self._paths.get(scope.get("endpoint"))
                self._metrics.responded(route, message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


def build_app(engine: Engine, config: ServerConfig = _CONFIG) -> Starlette:
    """Return the ASGI app that serves an engine; it can be mounted in any other.

    Args:
        engine: open, and on the loop that the app will run on. Whoever opened it closes it.
        config: how the server behaves.

    Raises:
        ConfigError: there is no `config.tool_parser`.
        EngineClosed: the engine was never open.
    """
    if not hasattr(engine, "spec"):
        raise EngineClosed("build_app needs an engine that is open: await engine.open() before")
    state = ServerState(engine, config)
    if config.tool_parser is not None:
        template_name(config.tool_parser, engine.tokenizer)  # raises for a name of none
    routes = [
        Route("/v1/chat/completions", ChatEndpoint(state), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(state), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(state), methods=["POST"]),
        *about_routes(state),
        *timeline_routes(state),
        *page_routes(),
    ]
    paths: dict[object, str] = {route.endpoint: route.path for route in routes}
    counted = Middleware(_Counted, metrics=state.metrics, paths=paths)
    app = Starlette(
        routes=routes,
        middleware=[counted, *guards(config)],
        exception_handlers={404: _not_found, 405: _not_found},
    )
    app.router.redirect_slashes = False  # a client's POST would come back as a GET
    app.state.server = state
    return app


async def _not_found(_: Request, error: Exception) -> Response:
    response = error_response(api_error(error))
    response.headers.update(getattr(error, "headers", None) or {})  # Allow
    return response
