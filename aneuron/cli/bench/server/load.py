"""Open-loop load: requests go out when they are due, whatever the server does with those before.

Comes in: a client, the shape of requests and their arrival times. Goes out: the outcome of each,
and how far the client itself fell behind. One task sends; each request has a task that reads it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aneuron.cli.bench.server.arrivals import arrival_times
from aneuron.cli.bench.server.stream import Outcome
from aneuron.cli.terminal import telling

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from aneuron.cli.bench.server.arrivals import Shape
    from aneuron.cli.bench.server.client import Client

__all__ = ["Load", "LoadRun"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How much is sent, and how fast.

    Attributes:
        num_prompts: how many requests.
        request_rate: requests a second; infinite: all at once.
        burstiness: see `arrival_times`.
        max_concurrency: requests under way at most; later ones wait for a place. None: any number.
        seed: of prompts and arrival times.
    """

    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    seed: int

    async def run(
        self, client: Client, shape: Shape, *, tell: Callable[[float], None] | None = None
    ) -> LoadRun:
        """Send all requests, wait until the last one has ended.

        Args:
            client: of the server.
            shape: of the requests.
            tell: called now and then, in another thread, with how many have ended.
        """
        rng = np.random.default_rng(self.seed)
        arrivals = arrival_times(self.num_prompts, self.request_rate, self.burstiness, rng)
        sender = _Sender(client, shape, self.max_concurrency, rng)
        with telling(lambda: sender.num_ended, tell):
            return await sender.run(arrivals)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRun:
    """What a load gave.

    Attributes:
        outcomes: by the order of arrival.
        duration_s: from the start, time zero of the arrivals, to the end of the last answer.
        cpu_s: processor time of the client's process meanwhile.
        waits_s: [num_prompts], how long each waited for a place under `max_concurrency`.
    """

    outcomes: list[Outcome]
    duration_s: float
    cpu_s: float
    waits_s: npt.NDArray[np.float64]


class _Sender:
    """One run of a load; `num_ended` of its requests have ended."""

    def __init__(
        self,
        client: Client,
        shape: Shape,
        max_concurrency: int | None,
        rng: np.random.Generator,
    ) -> None:
        self._client = client
        self._shape = shape
        self._rng = rng
        self._places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._max_events = 4 * shape.output_len + 64
        self.num_ended = 0

    async def run(self, arrivals: npt.NDArray[np.float64]) -> LoadRun:
        """Send requests at these times, in seconds from now."""
        outcomes = [Outcome() for _ in arrivals]
        waits_s = np.zeros(len(arrivals))
        body = self._shape.body(self._rng)
        cpu_s, start_s = time.process_time(), time.perf_counter()
        held_until_s = start_s  # by `max_concurrency`
        async with asyncio.TaskGroup() as group:
            for index, arrival_s in enumerate(arrivals.tolist()):
                due_s = start_s + arrival_s
                await _wait_until(due_s)
                if await self._take_place():
                    held_until_s = time.perf_counter()
                waits_s[index] = max(0.0, held_until_s - due_s)
                group.create_task(self._ask(outcomes, index, body, max(due_s, held_until_s)))
                body = self._shape.body(self._rng)  # the next one's, before it is due
        return LoadRun(
            outcomes=outcomes,
            duration_s=time.perf_counter() - start_s,
            cpu_s=time.process_time() - cpu_s,
            waits_s=waits_s,
        )

    async def _take_place(self) -> bool:
        """Take a place under `max_concurrency`; return whether that had to wait."""
        if self._places is None:
            return False
        is_full = self._places.locked()
        await self._places.acquire()
        return is_full

    async def _ask(self, outcomes: list[Outcome], index: int, body: bytes, due_s: float) -> None:
        try:
            outcomes[index] = await self._client.ask(
                self._shape.endpoint, body, due_s=due_s, max_events=self._max_events
            )
        finally:
            self.num_ended += 1
            if self._places is not None:
                self._places.release()


async def _wait_until(when_s: float) -> None:
    """Wait until a time of `time.perf_counter`; in any case let the loop have a turn.

    A loop's timers are only as fine as a millisecond, so one may end too early.
    """
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)
    while (left_s := when_s - time.perf_counter()) > 0:
        reached = loop.create_future()
        timer = loop.call_later(left_s, reached.set_result, None)
        try:
            await reached
        finally:
            timer.cancel()
