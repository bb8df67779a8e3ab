"""The web page at `/`: a chat, and a live picture of the timeline.

Comes in: nothing but a browser's requests. Goes out: this folder's files as they are, the same for
everyone, under headers that let them load nothing from elsewhere, run nothing inline and be put
in no frame. All addresses in them are relative, so that it works wherever the app is mounted.
They need no key (`guard.PAGE_PATHS`); what they ask for does, and is in `timeline` and the API.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

__all__ = ["HEADERS", "page_routes"]

_FOLDER = Path(__file__).parent
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/api.js": ("api.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/timeline.js": ("timeline.js", "text/javascript"),
}
_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    # No text becomes HTML: browsers that know this rule refuse innerHTML and its like.
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """Return the routes of the page's files; each is read when it is first asked for."""
    return [Route(path, _file(*one), methods=["GET"]) for path, one in _FILES.items()]


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = tag = None

    async def answer(request: Request) -> Response:
        nonlocal content, tag
        if content is None:
            content = await asyncio.to_thread((_FOLDER / name).read_bytes)
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        # Kept, and asked for again each time: a newer server's page is never mixed with an older's.
        headers = {**HEADERS, "cache-control": "no-cache", "etag": str(tag)}
        if _is_known(request.headers.get("if-none-match", ""), str(tag)):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return answer


def _is_known(given: str, tag: str) -> bool:
    """Return whether a client has this already; a proxy that compresses makes tags weak."""
    known = {one.strip().removeprefix("W/") for one in given.split(",")}
    return tag in known or "*" in known
