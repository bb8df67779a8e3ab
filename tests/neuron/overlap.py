"""What async scheduling hides on both played Neuron runtimes; `python -m tests.neuron.overlap`.

Not a test: it measures. Synchronous and asynchronous engines take turns, window by window; the
share of time that the device idles is that of the modelled timeline, from token to token in the
midst of an answer. With launches that block until their program has ended, the largest gap of the
event loop is told as well. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import uvloop

from tests.neuron.flows import fake_engine
from tests.scenarios import VOCAB

if TYPE_CHECKING:
    from aneuron import Engine, TokenStream
    from aneuron.testing.fakes import Times

EVENTS = "native, events"  # TorchNeuron
WAYS = [
    ("native", "resident"),
    ("native", "handoff"),
    (EVENTS, "resident"),
    (EVENTS, "handoff"),
    ("blocks", "resident"),
    ("rows", "handoff"),
    ("nxdi blocks", "handoff"),
]
LENGTH, FIRST, LAST = 512, 20, 220  # tokens of the context, and of a window
BEAT_S = 0.001


class Window(NamedTuple):
    """One answer of each sequence."""

    ms_per_step: float
    idle_share: float
    gap_ms: float  # largest, of the event loop


async def beat(gaps: list[float], every_s: float = BEAT_S) -> None:
    """Note how late the loop gives a coroutine its turn."""
    while True:
        before_s = monotonic()  # uvloop's own time counts milliseconds
        await asyncio.sleep(every_s)
        gaps.append(monotonic() - before_s - every_s)


async def read(stream: TokenStream, last: int, marks: list[tuple[float, ...]], core: Any) -> None:
    ids = []
    async for token in stream:
        ids.append(token.token_id)
        if token.index in (FIRST, LAST) and not token.choice:
            marks.append((monotonic(), core.busy_s, core.idle_s))
    assert ids == [(last + at) % VOCAB for at in range(1, len(ids) + 1)], "wrong tokens"


async def window(engine: Engine, fake: Any, num_seqs: int) -> Window:
    marks: list[tuple[float, ...]] = []
    gaps: list[float] = []
    heart = asyncio.create_task(beat(gaps))
    lasts = [100 * n for n in range(1, num_seqs + 1)]
    streams = [engine.generate(prompt_token_ids=[one], max_tokens=LAST + 20) for one in lasts]
    async with asyncio.TaskGroup() as group:
        for number, (stream, last) in enumerate(zip(streams, lasts, strict=True)):
            group.create_task(read(stream, last, marks if not number else [], fake.core))
    await engine.wait_idle()
    heart.cancel()
    (start_s, busy_0, idle_0), (end_s, busy_1, idle_1) = marks
    busy, idle = busy_1 - busy_0, idle_1 - idle_0
    steps = LAST - FIRST
    return Window(1e3 * (end_s - start_s) / steps, idle / (busy + idle), 1e3 * max(gaps))


async def measure(
    backend: str, carry: str, *, times: Times, num_seqs: int, windows: int, true_async: bool
) -> dict[str, Any]:
    options: dict[str, Any] = {"max_num_seqs": num_seqs, "max_model_len": LENGTH}
    if backend != "rows":
        options["block_size"] = 16
    if backend in ("native", EVENTS):
        options["has_events"] = backend == EVENTS
        options |= {"num_kv_blocks": num_seqs * LENGTH // 16, "num_seqs_buckets": [num_seqs]}
    played = backend.removesuffix(", events")
    open_one = {"times": times, "true_async": true_async, **options}
    sides: dict[str, list[Window]] = {"sync": [], "async": []}
    shares = []
    for _ in range(windows):  # one after the other: both want the same cores
        async with fake_engine(played, "host", "random count", **open_one) as opened:
            sides["sync"].append(await window(*opened, num_seqs))
        async with fake_engine(played, carry, "random count", **open_one) as opened:
            sides["async"].append(await window(*opened, num_seqs))
            shares.append(opened[0].stats().decode_async_share)
    result: dict[str, Any] = {"backend": backend, "carry": carry, "true_async": true_async}
    for name, seen in sides.items():
        result[name] = {
            field: median(getattr(one, field) for one in seen) for field in Window._fields
        }
    return result | {"decode_async_share": median(shares)}


async def main(args: argparse.Namespace) -> None:
    from tests.neuron.flows import fast

    times = fast(enqueue_s=100e-6, decode_s=args.decode_ms / 1e3, read_s=300e-6)
    for true_async in (True, False):
        for backend, carry in WAYS:
            found = await measure(
                backend, carry, times=times, num_seqs=args.num_seqs, windows=args.windows,
                true_async=true_async,
            )  # fmt: skip
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Overlap on played Neuron runtimes.")
    parser.add_argument("--num-seqs", type=int, default=4)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--decode-ms", type=float, default=6.4, help="of a program")
    uvloop.run(main(parser.parse_args()))
