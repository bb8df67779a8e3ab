"""`Consumers`: which task consumes which stream, so that a cancelled task ends what it reads.

Used by the streams of one engine, in their consumers' tasks and when those end.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Protocol

__all__ = ["Consumable", "Consumers"]


class Consumable(Protocol):
    """A stream that one task at a time consumes."""

    consumer: asyncio.Task[Any] | None

    def cancel(self) -> None:
        """End it, now."""


class Consumers:
    """The tasks that consume an engine's streams, so that a *cancelled* one ends them.

    Its traceback may keep a stream alive for a long time, so the stream's finaliser alone
    would be late. A consumer that ends normally may hand its stream on. Streams are held
    weakly here, and a stream lets go of a task that has ended.
    """

    def __init__(self) -> None:
        """Follow nobody yet."""
        self._streams: weakref.WeakKeyDictionary[asyncio.Task[Any], weakref.WeakSet[Consumable]] = (
            weakref.WeakKeyDictionary()
        )

    def follow(self, stream: Consumable) -> None:
        """Note that the current task consumes `stream` from now on."""
        task = asyncio.current_task()
        if task is None or stream.consumer is task:
            return
        stream.consumer = task
        streams = self._streams.get(task)
        if streams is None:
            streams = self._streams[task] = weakref.WeakSet()
            task.add_done_callback(self._ended)
        streams.add(stream)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        streams = self._streams.pop(task, ())
        for stream in list(streams):
            if stream.consumer is task:  # not handed on
                stream.consumer = None
                if task.cancelled():
                    stream.cancel()
