"""What the benchmarks' engines are mounted on: a tokenizer, programs, a load, and timers.

Nothing in here is a benchmark. Tokens are words of a tokenizer made in memory, programs compute
nothing, sequences decode steadily, and timers tell where the host's time goes.
"""

from __future__ import annotations

__all__: list[str] = []
