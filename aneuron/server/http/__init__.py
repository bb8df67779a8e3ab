"""HTTP around the endpoints: errors, keys and limits, events of a stream, uvicorn."""

from __future__ import annotations

__all__: list[str] = []
