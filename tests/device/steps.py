"""What the tests of the simulated device share: a program, a launch, a clock of their own."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron.device.sim import SimDevice
from aneuron.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aneuron import DeviceFuture

PROGRAM_S = 0.004
GAP_S = 0.00037
ENQUEUE_S = 0.0001


@dataclass
class Part:
    """A part of the inputs that has columns of its own."""

    slots: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int32))


@dataclass
class Inputs:
    """What the device and the program below look at."""

    input_ids: Any = field(default_factory=lambda: np.array([1, 2], np.int32))
    writes: Part | None = None
    is_decode: bool = True
    num_reqs: int = 2
    num_sampled: int = 2


class Program:
    """Adds one to its ids."""

    name = "plus one"
    sampled_dtype = "int32"

    def __call__(self, inputs: Any, input_ids: Any) -> np.ndarray:
        ids: np.ndarray = (inputs.input_ids if input_ids is None else input_ids) + 1
        return ids


def launch(device: SimDevice, feed: Any = None, *, read: bool = True, **columns: Any) -> Any:
    inputs: Any = Inputs(**columns) if feed is None else Inputs(feed)
    return device.launch(Program(), inputs, read=read)


async def fault_of(future: DeviceFuture) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        await future
    return caught.value


@asynccontextmanager
async def started(*devices: SimDevice, **options: Any) -> AsyncIterator[SimDevice]:
    devices = devices or (SimDevice(**options),)
    for device in devices:
        device.start(asyncio.get_running_loop())
    try:
        yield devices[0]
    finally:
        for device in devices:
            await device.close()


class Clock:
    """A clock that sleeping alone moves, by what is asked for and `late_s` more."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.late_s = 0.0
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        until_s = self.now_s + duration_s + self.late_s
        with self._lock:
            self.now_s = max(self.now_s, until_s)


def times(futures: list[DeviceFuture]) -> list[float]:
    """Start and end of each, as they were given."""
    return [at for future in futures for at in (future.device_start_s, future.device_end_s)]


def exactly(*expected: float) -> Any:
    return pytest.approx(list(expected), rel=0, abs=1e-9)


FOREIGN: set[threading.Thread] = set()  # of tests before this one, hanging for good maybe


def threads_of(name: str = "sim") -> list[str]:
    return sorted(
        thread.name.removeprefix("aneuron-")
        for thread in set(threading.enumerate()) - FOREIGN
        if thread.name.startswith(f"aneuron-{name}")
    )


async def gone(name: str = "sim") -> None:
    """A thread resolves its device's end as the last thing it does."""
    async with asyncio.timeout(5):
        while threads_of(name):
            await asyncio.sleep(0.001)
