"""`Histogram`: counts by bucket, for what is counted once per token.

Comes in: values, from whoever serves a request. Goes out: bucket counts, when scraped. Runs on
the loop, so there is no lock; prometheus-client's own, which has one, takes five times as long.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CHOICES", "LAG", "LATENCY", "PER_TOKEN", "TOKENS", "TTFT", "Histogram"]

# Upper bounds: seconds as vLLM has them, with finer ones below, where small models live.
TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0,
    15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
LAG = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
TOKENS = tuple(
    float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)
)  # 1 to 500,000
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """How many values fell into each bucket, and their sum.

    Args:
        bounds: upper bounds of the buckets, ascending, each inclusive; one above all is added.

    Attributes:
        counts: of each bucket, the one above all bounds last.
        total: sum of the values.
    """

    __slots__ = ("_names", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self._names = (*map(str, self.bounds), "+Inf")

    def observe(self, value: float) -> None:
        """Count a value; 0.2 us."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def num_values(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return each upper bound as text, and how many values were no larger."""
        return list(zip(self._names, accumulate(self.counts), strict=True))
