"""`WaitingQueue`: who is next, of the requests that wait for a slot and blocks.

New requests and preempted ones wait in one queue, in the order of their priority and then of
their calls: a preempted request was there before those that wait, and goes first. Used by
the scheduler alone, on the loop.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron.request import Request

__all__ = ["WaitingQueue", "rank"]


def rank(request: Request) -> tuple[int, int]:
    """Return what requests are served in order of: the least one first."""
    return request.priority, request.request_id


class WaitingQueue:
    """Requests by rank; one that stands for several choices counts as many.

    Attributes:
        num_requests: that wait.
        num_tokens: of theirs, prompts and what was generated before they were preempted.
    """

    def __init__(self) -> None:
        """Make an empty queue."""
        self._requests: dict[int, Request] = {}
        self._sizes: dict[int, int] = {}  # as they came: a step in flight may add a token
        # Those that left stay in the heap until they come up.
        self._heap: list[tuple[int, int]] = []
        self.num_requests = self.num_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def add(self, request: Request) -> None:
        """Let a request wait, with the choices that wait for its prompt."""
        self._requests[request.request_id] = request
        self.num_requests += 1 + len(request.unforked)
        size = self._sizes[request.request_id] = request.prompt_len + len(request.output_ids)
        self.num_tokens += size
        heappush(self._heap, rank(request))

    def discard(self, request: Request) -> None:
        """Take a request out, if it is there."""
        if self._requests.pop(request.request_id, None) is None:
            return
        self.num_requests -= 1 + len(request.unforked)
        self.num_tokens -= self._sizes.pop(request.request_id)
        if len(self._heap) > 2 * len(self._requests) + 16:
            self._heap = sorted(map(rank, self._requests.values()))

    def head(self) -> Request | None:
        """Return who is next."""
        while self._heap:
            found = self._requests.get(self._heap[0][1])
            if found is not None:
                return found
            heappop(self._heap)
        return None
