"""Load on a server, and the figures that its users would see: `aneuron bench serve`."""

from __future__ import annotations

__all__: list[str] = []
