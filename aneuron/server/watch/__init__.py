"""What operators see: metrics, health, traces."""

from __future__ import annotations

__all__: list[str] = []
