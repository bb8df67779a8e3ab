"""Server-sent events: one line of data each, which holds no line break, being JSON."""

from __future__ import annotations

__all__ = ["DONE", "HEADERS", "PING", "event"]

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx keeps events back
]


def event(data: bytes, name: bytes = b"") -> bytes:
    """Return the event of some JSON; Responses' events have names."""
    if name:
        return b"event: " + name + b"\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"
