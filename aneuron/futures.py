"""`DeviceFuture`: a value on its way on the device, awaitable on the loop.

This is the one place where device threads touch the event loop. A launch returns the
future at once; the device's thread resolves it through `call_soon_threadsafe`. Unread, it
can be fed to the next launch: then the value never leaves the device on its way.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

    from aneuron.errors import DeviceError

__all__ = ["DeviceFuture"]


class DeviceFuture:
    """An awaitable handle on a device value; `await` gives the host value.

    Each awaiter has a waiter of its own: cancelling one (a task, an `asyncio.timeout`)
    changes nothing for the others, or for the device. A result that arrives after all
    waiters left, or after the loop closed, is kept or dropped in silence.

    Attributes:
        shape: of the value, known at launch.
        dtype: name of the value's dtype, known at launch.
        device_value: what a following launch is fed with; written and read by the
            device's thread only.
        device_error: the fault that a following launch inherits; likewise.
    """

    __slots__ = (
        "_done",
        "_error",
        "_loop",
        "_value",
        "_waiters",
        "device_error",
        "device_value",
        "dtype",
        "shape",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, shape: tuple[int, ...], dtype: str
    ) -> None:
        """Make a pending future that belongs to `loop`."""
        self.shape = shape
        self.dtype = dtype
        self.device_value: Any = None
        self.device_error: DeviceError | None = None
        self._loop = loop
        self._done = False
        self._value: Any = None
        self._error: DeviceError | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error else "done"
        return f"<DeviceFuture {state} {self.dtype}{list(self.shape)}>"

    def done(self) -> bool:
        """Whether the host value, or the fault, has arrived."""
        return self._done

    def result(self) -> Any:
        """Return the host value of a future that is done.

        Raises:
            DeviceError: what the device reported; a fresh instance each time.
            asyncio.InvalidStateError: it is not done.
        """
        if not self._done:
            raise asyncio.InvalidStateError("the device value has not arrived; await it")
        if self._error is not None:
            raise self._error.copy()
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._done:
            if asyncio.get_running_loop() is not self._loop:
                raise RuntimeError("this DeviceFuture belongs to another event loop")
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                yield from waiter
            finally:
                # Cancelled: only this waiter goes. Resolved: the list is empty already.
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self.result()

    def post(self, value: Any, error: DeviceError | None = None) -> None:
        """Resolve from a device thread: the crossing from there to the loop."""
        try:
            self._loop.call_soon_threadsafe(self.resolve, value, error)
        except RuntimeError:
            # The loop has closed: nobody can be waiting.
            return

    def resolve(self, value: Any, error: DeviceError | None = None) -> None:
        """Resolve on the loop; the first result stands, later ones are dropped."""
        if self._done:
            return
        self._done = True
        self._value = value
        self._error = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
