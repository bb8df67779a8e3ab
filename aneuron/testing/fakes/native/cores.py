"""Cores of the played native runtime: what is queued, who depends on it, and who has read it.

Comes in: copies and launches, in order. Goes out: launches that were settled, that is waited for
in order, from when on the host may change what they read.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aneuron.testing.fakes.core import FakeCore
from aneuron.testing.fakes.faults import FaultPlan, Watch, claim_cores, cores_busy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.testing.fakes.entry import Entry
    from aneuron.testing.fakes.faults import Fault
    from aneuron.testing.fakes.native.tensors import Cell, Source

__all__ = ["Event", "HostCopy", "Launch", "NativeCore", "NativeCores"]

_GARBAGE = 0x80  # bytes of a host tensor before its copy arrives: negative, as ids
_NO_LAUNCHES = ("compile", "cores busy")  # faults that are none of a launch


class Launch:
    """One call of a graph: the copies before it, and which of its outputs nobody has read.

    Attributes:
        entry: in the core's queue, once it is there.
        sources: host tensors that were copied since the launch before.
    """

    entry: Entry

    def __init__(self, outputs: Sequence[Cell]) -> None:
        """Make it; `NativeCore.launch` queues it."""
        self.sources: list[Source] = []
        self._unread = [weakref.ref(cell) for cell in outputs]

    def run(self, compute: Callable[[], None]) -> None:
        """Compute, on the core's thread, on what was copied meanwhile."""
        for when in ("started", "ended"):
            for source in self.sources:
                if error := source.check(when):
                    raise error
            if when == "started":
                compute()

    def settle(self) -> None:
        """It was waited for, or one behind it: what it depended on may go, and change."""
        for source in self.sources:
            if error := source.check("read"):
                self.entry.fail(error)
        with suppress(RuntimeError):  # it stays with the entry, for who reads this launch
            self.entry.wait()

    def read(self, cell: Cell) -> None:
        """Wait, and give the place in the queue back with the last output that is read."""
        self._unread = [ref for ref in self._unread if ref() not in (None, cell)]
        (self.entry.wait if self._unread else self.entry.read)()

    def release_if_dropped(self) -> bool:
        """Give its place back if nobody can read its outputs; return whether it has none."""
        if self.entry.has_ended and all(ref() is None for ref in self._unread):
            self.entry.release()
        return not self.entry.is_in_queue


class HostCopy:
    """A queued copy to the host: its values are there when an event behind it was waited for.

    Attributes:
        has_arrived: whether that was so.
    """

    def __init__(self, cell: Cell, host: torch.Tensor) -> None:
        """Make it; `NativeCore.queue_copy` does."""
        self._cell = cell
        self._host = weakref.ref(host)
        self.has_arrived = False
        self._lock = threading.Lock()

    def arrive(self) -> None:
        """Write the values, once; what they are copied from is read by that.

        Raises:
            Violation: the host tensor was dropped.
            RuntimeError: the launch that computes them failed.
        """
        with self._lock:
            if self.has_arrived:
                return
            self.has_arrived = True
            cell, host = self._cell, self._host()
            if cell.launch is not None:
                cell.launch.read(cell)
            if host is None:
                text = "the target of a copy to the host was dropped before an event behind it"
                raise cell.core.watch.broken(f"{text} was waited for")
            assert cell.value is not None
            host.copy_(cell.value)


class Event(NamedTuple):
    """A place in a core's order of work.

    Attributes:
        last: the launch before it; None if there is none.
        copies: copies to the host before it that had not arrived.
    """

    last: Launch | None
    copies: tuple[HostCopy, ...]


class NativeCore:
    """A core with its memory, and what was queued for it: copies, and launches behind them.

    Attributes:
        core: its queue.
        compile_faults: which compilation fails.
        cells: what is in its memory.
        compiles: graphs compiled for it, with their shapes, oldest first.
        last: the newest launch.
    """

    def __init__(self, core: FakeCore, compile_faults: FaultPlan) -> None:
        """Put memory to a core."""
        self.core = core
        self.compile_faults = compile_faults
        self.cells: weakref.WeakSet[Cell] = weakref.WeakSet()
        self.compiles: list[str] = []
        self.last: Launch | None = None
        self._lock = threading.Lock()
        self._copies: list[Source] = []  # that no launch is behind
        self._unsettled: list[Launch] = []
        self._queued: list[Launch] = []
        self._to_host: list[HostCopy] = []  # that have not arrived

    def queue_copy(self, cell: Cell) -> torch.Tensor:
        """Queue a copy to the host and return its target, which holds garbage."""
        host = torch.empty_like(cell.meta, device="cpu")
        host.reshape(-1).view(torch.uint8).fill_(_GARBAGE)
        with self._lock:
            self._to_host.append(HostCopy(cell, host))
        return host

    def event(self) -> Event:
        """Return an event behind all that is queued."""
        with self._lock:
            self._to_host = [copy for copy in self._to_host if not copy.has_arrived]
            return Event(self.last, tuple(self._to_host))

    def add_copy(self, source: Source) -> None:
        """Note a copy to the core's memory."""
        with self._lock:
            self._copies.append(source)

    def launch(self, launch: Launch, compute: Callable[[], None], **options: Any) -> None:
        """Submit it.

        Raises:
            RuntimeError: the queue is full.
        """
        self._queued = [one for one in self._queued if not one.release_if_dropped()]
        launch.sources = list(self._copies)
        launch.entry = self.core.submit(partial(launch.run, compute), **options)
        self._queued.append(launch)
        with self._lock:
            del self._copies[: len(launch.sources)]
            self._unsettled.append(launch)
            self.last = launch

    def wait(self, launch: Launch) -> None:
        """Wait until it has ended, and settle all up to it."""
        launch.entry.wait_ended()
        number = launch.entry.number
        with self._lock:
            done = [one for one in self._unsettled if one.entry.number <= number]
            self._unsettled = [one for one in self._unsettled if one.entry.number > number]
        for one in done:
            one.settle()

    def wait_for_copies(self) -> None:
        """Wait for all that was queued, and settle the copies that no launch is behind.

        Raises:
            Violation: the host tensor of one was dropped or changed.
        """
        if self.last is not None:
            self.wait(self.last)
        with self._lock:
            copies, self._copies = self._copies, []
        for source in copies:
            if error := source.check("read"):
                raise error

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all tensors in its memory."""
        return sum(cell.nbytes for cell in self.cells)


class NativeCores:
    """The cores of one fake.

    Args:
        first: index of the core of rank 0.
        faults: what goes wrong.
        options: of every `FakeCore`.

    Attributes:
        watch: where their violations go.
    """

    def __init__(self, first: int, faults: Sequence[Fault], **options: Any) -> None:
        """Take no core yet."""
        self.watch = Watch()
        self._first = first
        self._faults = list(faults)
        self._options = options
        self._cores: dict[int, NativeCore] = {}

    def core(self, index: int) -> NativeCore:
        """Return a core, which is this process's until it is closed; then its counters are left.

        Raises:
            RuntimeError: another runtime has it.
        """
        found = self._cores.get(index)
        if found is None:
            found = self._cores[index] = self._claimed(index)
        return found

    def _claimed(self, index: int) -> NativeCore:
        rank = index - self._first
        for fault in [one for one in self._faults if one.status == "cores busy"]:
            if fault.rank == rank:
                self._faults.remove(fault)
                raise cores_busy([index])
        core = FakeCore(
            faults=[fault for fault in self._faults if fault.status not in _NO_LAUNCHES],
            name=f"fake-neuron-{index}",
            rank=rank,
            watch=self.watch,
            tells_in_words=True,  # as the lite runtime does
            **self._options,
        )
        claim_cores([index], core)
        compile_faults = [fault for fault in self._faults if fault.status == "compile"]
        return NativeCore(core, FaultPlan(compile_faults, rank=rank))
