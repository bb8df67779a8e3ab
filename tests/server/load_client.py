"""Many clients in a process of their own: `python load_client.py URL SETTINGS` (JSON).

Each round of a client is one streamed completion of COUNT on a connection of its own or one
that it keeps; some leave at a random point. Every token of the others is checked. A second
process like this one (`"probes": true`) asks for `/health` all the time. Both say at the end, as
one line of JSON, what they saw.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

_RESET = struct.pack("ii", 1, 0)
_NUMBER = re.compile(rb"<(\d+)>")
_OK = b"HTTP/1.1 200"
_MOST_S = 120  # for one, so that a server that falls silent is seen


class Client:
    """One client, request after request."""

    def __init__(self, url: str, seed: int, seen: Counter[str]) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._random = random.Random(seed)
        self._seen = seen
        self._pair: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, number: int, *, leaves: bool) -> None:
        """Send one request, and read its answer, or some of it."""
        if self._pair is None:
            self._pair = await asyncio.open_connection(*self._address)
        reader, writer = self._pair
        last, count = 1000 * (number % 1000 + 1), self._random.randrange(1, 80)  # COUNT's ids
        body = {
            "model": "sim:count", "prompt": [last] * self._random.randrange(1, 20),
            "max_tokens": count, "stream": True,
        }  # fmt: skip
        data = json.dumps(body).encode()
        text = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
        if leaves and self._random.random() < 0.1:
            writer.write((text + data)[: self._random.randrange(1, len(text + data))])
            self._leave("amid its request")
            return
        writer.write(text + data)
        # From before the head of the answer to just before its end; several tokens may be in one.
        enough = self._random.randrange(count) if leaves else count + 1
        found = bytearray()
        while found.count(b"<") < enough and not found.endswith(b"\r\n0\r\n\r\n"):
            chunk = await reader.read(self._random.randrange(1, 500) if leaves else 2**16)
            found += chunk
            if not chunk or not found.startswith(_OK[: len(found)]):
                print(bytes(found[:1000]), file=sys.stderr)
                self._leave("refused" if chunk else "cut")
                return
        if leaves:
            self._leave("amid its answer")
            return
        ids = [int(one) for one in _NUMBER.findall(found)]
        is_exact = ids == list(range(last + 1, last + 1 + count)) and b"[DONE]" in found
        self._seen["exact" if is_exact else "wrong"] += 1
        if not is_exact:
            print(bytes(found[:1000]), file=sys.stderr)

    def _leave(self, where: str) -> None:
        assert self._pair is not None
        writer = self._pair[1]
        if self._random.random() < 0.5:
            one = writer.get_extra_info("socket")
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
        self._pair = None
        self._seen[where] += 1

    async def aclose(self) -> None:
        if self._pair is not None:
            self._pair[1].close()
            with suppress(ConnectionError):
                await self._pair[1].wait_closed()


async def load(url: str, *, streams: int, requests: int, seed: int) -> dict[str, Any]:
    """Run so many requests on so many connections at a time; a third leaves."""
    seen: Counter[str] = Counter()
    numbers = iter(range(requests))
    choose = random.Random(seed)

    async def one(seed: int) -> None:
        client = Client(url, seed, seen)
        for number in numbers:
            async with asyncio.timeout(_MOST_S):
                await client.ask(number, leaves=choose.random() < 1 / 3)
        await client.aclose()

    begun_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for n in range(streams):
            group.create_task(one(1000 * seed + n))
    return {**seen, "taken_s": time.monotonic() - begun_s}


async def probe(url: str) -> dict[str, Any]:
    """Ask for `/health` 50 times a second until the standard input ends."""
    host, port = url.removeprefix("http://").split(":")
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)
    reader, writer = await asyncio.open_connection(host, int(port))
    taken_s, statuses = [], Counter[str]()
    while not over.is_set():
        begun_s = time.perf_counter()
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"content-length: (\d+)", head)
        assert size is not None
        await reader.readexactly(int(size.group(1)))
        taken_s.append(time.perf_counter() - begun_s)
        statuses[head[9:12].decode()] += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await over.wait()
    loop.remove_reader(sys.stdin.fileno())
    writer.close()
    return {"taken_s": taken_s, "statuses": statuses}


def main() -> None:
    """Do what the arguments say."""
    url, settings = sys.argv[1], json.loads(sys.argv[2])
    work = probe(url) if settings.pop("probes", False) else load(url, **settings)
    print(json.dumps(asyncio.run(work)))


if __name__ == "__main__":
    main()
