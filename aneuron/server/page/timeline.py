"""What the page's picture is made of, for the engine's operator: an SVG, and numbers beside it.

Comes in: the timeline of the engine, and its counts. Goes out: `/timeline.svg`, `/timeline.json`.
No prompt and no token is in them. Runs on the loop, in slices: others get their turns between.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from aneuron.errors import EngineClosed
from aneuron.server.http.errors import ApiError, api_error, error_response
from aneuron.server.page import HEADERS
from aneuron.server.wire.common import encode
from aneuron.server.wire.misc import MAX_TIMELINE_STEPS, TimelineBreak, TimelineNumbers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from aneuron.engine import Engine
    from aneuron.server.app import ServerState

__all__ = ["timeline_routes"]

_STEPS = 24  # as many as a notebook shows
_SLICE = 6  # pieces of the picture that are drawn in one go
_NOT_KEPT = {**HEADERS, "cache-control": "no-store"}


def timeline_routes(state: ServerState) -> list[Route]:
    """Return the routes."""
    return [
        Route("/timeline.svg", _answered(_Picture(state.engine).show), methods=["GET"]),
        Route("/timeline.json", _answered(_Numbers(state.engine).show), methods=["GET"]),
    ]


def _answered(
    show: Callable[[int], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await show(_asked_steps(request))
        except (ApiError, EngineClosed) as error:  # closed: it was never open
            return error_response(api_error(error))

    return answer


def _asked_steps(request: Request) -> int:
    """Return how many of the last steps are asked for.

    Raises:
        ApiError: that is no number, or too many.
    """
    given = request.query_params.getlist("steps") or [str(_STEPS)]
    is_number = len(given) == 1 and given[0].isascii() and given[0].isdigit() and len(given[0]) < 9
    if not is_number or not 1 <= int(given[0]) <= MAX_TIMELINE_STEPS:
        message = f"steps must be a number from 1 to {MAX_TIMELINE_STEPS}"
        raise ApiError(400, message, param="steps", code="invalid_value")
    return int(given[0])


class _Picture:
    """Draws the picture: those who ask while one is being drawn all share the next one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._num_asked = 0
        self._drawn: tuple[int, int, bytes] = (0, 0, b"")  # for whom (up to), steps, SVG

    async def show(self, steps: int) -> Response:
        self._num_asked += 1
        ticket = self._num_asked
        async with self._lock:
            upto, drawn_steps, picture = self._drawn
            if upto < ticket or drawn_steps != steps:
                upto = self._num_asked
                picture = await self._draw(steps)
                self._drawn = (upto, steps, picture)
        return Response(picture, headers=_NOT_KEPT, media_type="image/svg+xml")

    async def _draw(self, steps: int) -> bytes:
        drawn = []
        engine = self._engine
        pieces = engine.timeline.svg_pieces(steps, in_flight=not engine.is_open)
        for number, piece in enumerate(pieces, 1):
            drawn.append(piece)
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        return "".join(drawn).encode()


class _Numbers:
    """Counts what there is to count: about 0.1 ms."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def show(self, steps: int) -> Response:
        return Response(
            encode(_numbers(self._engine, steps)), headers=_NOT_KEPT, media_type="application/json"
        )


def _numbers(engine: Engine, steps: int) -> TimelineNumbers:
    stats, timeline = engine.stats(), engine.timeline
    kept = timeline.steps
    window = kept[-steps:]
    fed = [one.is_async for one in window if one.is_decode and one.is_async is not None]
    is_open = engine.is_open
    return TimelineNumbers(
        kept_steps=len(kept),
        window_steps=len(window),
        window_idle_share=timeline.idle_share(window),
        window_decode_async_share=sum(fed) / len(fed) if fed else None,
        running=stats.running if is_open else 0,
        waiting=stats.waiting if is_open else 0,
        in_flight_steps=stats.in_flight_steps if is_open else 0,
        num_blocks=stats.num_blocks,
        used_blocks=stats.used_blocks if is_open else 0,
        steps=stats.steps,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        breaks={
            reason: TimelineBreak(count=one.count, seconds=one.seconds)
            for reason, one in stats.breaks.items()
        },
    )
