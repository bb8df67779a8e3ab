"""More than one device for one engine: ranks."""

from __future__ import annotations

__all__: list[str] = []
