"""From logits to ids: rules, sampling, and the state of slots."""

from __future__ import annotations

__all__: list[str] = []
