"""Benchmarks of real models on the processor: speed, beside other engines, and quality."""

from __future__ import annotations

__all__: list[str] = []
