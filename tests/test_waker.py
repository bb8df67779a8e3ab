"""`Waker`: consumers are woken in order, a few in each turn of the loop, and none is forgotten."""

from __future__ import annotations

import asyncio

from aneuron import SamplingParams
from aneuron.request import Request, Waker


def waiting(count: int) -> tuple[list[Request], list[asyncio.Future[None]]]:
    """Requests that a consumer waits for each."""
    requests = [Request(n, f"r{n}", SamplingParams(), arrival_s=0.0) for n in range(count)]
    waiters = [asyncio.get_running_loop().create_future() for _ in requests]
    for request, waiter in zip(requests, waiters, strict=True):
        request.waiter = waiter
    return requests, waiters


async def test_a_large_batch_is_woken_in_turns() -> None:
    requests, waiters = waiting(150)
    Waker(asyncio.get_running_loop()).wake(requests)
    counts = []
    for _ in range(3):
        done = [waiter.done() for waiter in waiters]
        counts.append(sum(done))
        assert done == sorted(done, reverse=True), "in order"
        await asyncio.sleep(0)
    assert counts == [64, 128, 150]


async def test_who_comes_meanwhile_is_behind_and_who_does_not_wait_takes_no_place() -> None:
    requests, waiters = waiting(130)
    late, [later] = waiting(1)
    for request in requests[:60]:
        request.waiter = None
    waker = Waker(asyncio.get_running_loop())
    waker.wake(requests)
    waker.wake(late)
    assert [one.done() for one in waiters[60:]] == [True] * 64 + [False] * 6
    assert not later.done()
    await asyncio.sleep(0)
    assert later.done()
    assert all(one.done() for one in waiters[60:])
