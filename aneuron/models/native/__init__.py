"""The decoder in C++: compiled on the user's machine for its processor, called without the GIL."""

from __future__ import annotations

__all__: list[str] = []
