"""Standard input as text, awaited.

Comes in: what is typed or piped in. Goes out: all of it, or line by line. The loop watches it
rather than a thread: a thread that waits for input cannot be stopped, and would keep the
process alive after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from typing import Any

from aneuron.errors import InvalidRequest

__all__ = ["Stdin"]

_CHUNK_BYTES = 1 << 16


class Stdin:
    """Standard input as text, awaited."""

    def __init__(self) -> None:
        """Take the process's stdin; nothing is read yet."""
        self._file = sys.stdin
        self._watched = _watchable(self._file)
        self._pending = b""  # read, and not given out

    @property
    def is_terminal(self) -> bool:
        """Whether a person types; True where there is no stdin at all."""
        return self._file is None or self._file.closed or self._file.isatty()

    async def read(self, *, patience_s: float | None = None) -> str:
        """Return all there is, up to the end.

        Args:
            patience_s: wait this long for the first byte; None waits for ever.

        Raises:
            TimeoutError: nothing came in that time.
            InvalidRequest: it is not UTF-8.
        """
        async with asyncio.timeout(patience_s):
            chunks = [await self._next_chunk()]
        while chunks[-1]:
            chunks.append(await self._next_chunk())
        return _decode(b"".join(chunks))

    async def readline(self) -> str | None:
        """Return the next line without its end, or None when there is none.

        Raises:
            InvalidRequest: it is not UTF-8; the next call returns the line after it.
        """
        while b"\n" not in self._pending:
            chunk = await self._next_chunk()
            if not chunk:
                rest, self._pending = self._pending, b""
                return _decode(rest) if rest else None
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return _decode(line.removesuffix(b"\r"))

    async def _next_chunk(self) -> bytes:
        if self._watched is None:
            return await asyncio.to_thread(self._read_blocking)
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._watched, ready.set)
        try:
            await ready.wait()  # cancelled here, no input is lost
        finally:
            loop.remove_reader(self._watched)
        try:
            return os.read(self._watched, _CHUNK_BYTES)
        except OSError:  # the terminal is gone
            return b""

    def _read_blocking(self) -> bytes:
        if self._file is None or self._file.closed:
            return b""
        buffer = getattr(self._file, "buffer", None)
        if buffer is None:  # an object of text alone, in place of stdin
            return self._file.read(_CHUNK_BYTES).encode()
        return bytes(buffer.read1(_CHUNK_BYTES))


def _watchable(file: Any) -> int | None:
    """Return the descriptor if an event loop can watch it: a terminal, a pipe, a socket.

    Others (files, /dev/null) are always ready, so a thread that reads them comes back.
    """
    if sys.platform == "win32":
        return None
    try:
        descriptor = int(file.fileno())
        mode = os.fstat(descriptor).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    can_wait = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
    return descriptor if can_wait else None


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"stdin is not UTF-8 text (byte {error.start} is {raw[error.start]:#04x})",
            param="prompt",
        ) from None
