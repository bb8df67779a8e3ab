"""Servers that the benchmark starts itself: child processes, stopped when it ends.

Comes in: a command that serves on 127.0.0.1 and says the address on stderr. Goes out: its URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

__all__ = ["FLOOR", "own_server", "spawned"]

FLOOR = ("-m", "aneuron.cli.bench.server.floor")
_ADDRESS = re.compile(rb"(https?://127\.0\.0\.1:\d+)\D")  # the number's end is here as well
_START_S = 300.0  # a model may have to be fetched
_STOP_S = 10.0
_KEPT = 4096  # bytes of what it said last


def own_server(words: Sequence[str]) -> tuple[str, ...]:
    """Return Python's arguments for `aneuron serve` with these, on a port of its choice."""
    return ("-m", "aneuron", "serve", *words, "--host", "127.0.0.1", "--port", "0")


class _Child(asyncio.SubprocessProtocol):
    """Reads stderr to its end, or the pipe would fill and the server stand still.

    Attributes:
        address: what it named first, or None if it ended before.
        has_ended: set when the process has ended.
        said: the end of what it said.
    """

    def __init__(self) -> None:
        self.address: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.has_ended = asyncio.Event()
        self.said = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        said = self.said + data
        self.said = said[-_KEPT:]
        if not self.address.done() and (found := _ADDRESS.search(said)):
            self.address.set_result(found[1].decode())

    def process_exited(self) -> None:
        if not self.address.done():
            self.address.set_result(None)
        self.has_ended.set()


@asynccontextmanager
async def spawned(
    arguments: Sequence[str], *, start_s: float = _START_S, stop_s: float = _STOP_S
) -> AsyncIterator[str]:
    """Run Python with these arguments; yield the address that it names on stderr, then stop it.

    Args:
        arguments: of the interpreter that runs us.
        start_s: that it may take to name its address.
        stop_s: that it may take to end when asked to; then it is killed.

    Raises:
        ConfigError: it ended, or took longer than `start_s`, without naming one.
    """
    transport, child = await asyncio.get_running_loop().subprocess_exec(
        _Child, sys.executable, *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        yield await _address(child, arguments, start_s)
    finally:
        await _stop(transport, child, stop_s)


async def _address(child: _Child, arguments: Sequence[str], start_s: float) -> str:
    url = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(start_s):
            url = await child.address
    if url is None:
        said = child.said.decode(errors="replace").strip() or "nothing"
        command = " ".join(("python", *arguments))
        raise ConfigError(f"`{command}` does not serve; it said: {said}", param="--spawn")
    return url


async def _stop(transport: asyncio.SubprocessTransport, child: _Child, stop_s: float) -> None:
    """Ask the process to end; make it end if it does not, or if we are cancelled meanwhile."""
    try:
        with contextlib.suppress(ProcessLookupError):
            transport.terminate()
        async with asyncio.timeout(stop_s):
            await child.has_ended.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            transport.kill()
        await child.has_ended.wait()
    finally:
        transport.close()  # which kills what still runs
