"""An OpenAI-compatible HTTP server around an engine: `build_app` gives an ASGI app to mount.

    from aneuron.server import build_app

    app = build_app(engine)  # Starlette; serve it on the engine's loop, or mount it in your app

Needs the extra `serve`. `aneuron serve MODEL` runs it from the shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aneuron.server.config import ServerConfig

if TYPE_CHECKING:
    from aneuron.server.app import build_app

__all__ = ["ServerConfig", "build_app"]


def __getattr__(name: str) -> Any:
    """Import what needs the extra when it is asked for."""
    if name == "build_app":
        from aneuron.server.app import build_app

        return build_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
