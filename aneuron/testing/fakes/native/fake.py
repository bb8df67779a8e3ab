"""`FakeNative`: `NativeRaw` with device tensors and graphs, on this processor.

Comes in: host tensors, functions. Goes out: device tensors, at once; what a graph computes shows
when it was read. Rules of the hardware that a caller breaks raise a `Violation`, and stay on
`violations`.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from aneuron.testing.fakes.entry import pause
from aneuron.testing.fakes.faults import nrt_error, release_cores
from aneuron.testing.fakes.native.cores import Event, Launch, NativeCores
from aneuron.testing.fakes.native.graphs import Graph
from aneuron.testing.fakes.native.tensors import WIDE, Cell, DeviceTensor, Source, register

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aneuron.testing.fakes.core import FakeCore
    from aneuron.testing.fakes.entry import Times
    from aneuron.testing.fakes.faults import Fault
    from aneuron.testing.fakes.native.graphs import Program

__all__ = ["FakeNative"]

_logger = logging.getLogger("aneuron.testing")
_MOST_DEPTH = 63  # of the runtime's queue
_MEMORY_BYTES = 256 * 2**20
_SMALL_BYTES = 1 << 16  # a column of a launch: there is room for it, and counting takes time
_LOST, _OUT_OF_MEMORY = 101, 4


class FakeNative:
    """One NeuronCore of a played native runtime; see `NativeRaw`.

    A graph's first call for each shape traces it, which takes `times.compile_s` and is logged as a
    warning: serving must not get there. Its latency is that of a prefill or a decode if its name
    has that word; rows, or tokens, are the length of its first argument.

    It sees tensors and no plan, so some rules it cannot hold a caller to. Whether fed ids are
    those of the launch's rows, in its order, it does not know: only another number of them shows,
    as another shape. Nor whether a cell of a cache belongs to a block of the launch's own table,
    or to a request that was given the block meanwhile. That a step is a prefill or a decode is a
    matter of which graph is called; it cannot be both, and what its rows are is not told. Wrong
    rows and wrong blocks show in the tokens of `CountDecoder` and `SumDecoder`.

    With events, as TorchNeuron has them, work is done in order: a read waits for all that was
    launched before it. A copy that is queued arrives when an event behind it was waited for; until
    then its target holds garbage, and has to stay.

    Args:
        times: modelled latency.
        faults: what goes wrong; a "compile" fault's step counts compilations.
        true_async: whether a call returns before the graph has ended.
        has_events: whether there are events.
        queues_copies: whether a copy to the host that need not block returns at once.
        queue_depth: launches whose outputs may be unread, at most 63.
        index: of the core.
        memory_bytes: of each core; beyond it copies fail with status 4.

    Attributes:
        index: of the core.
        has_events, queue_depth, version: as `NativeRaw` has them.
    """

    version = "fake"

    def __init__(
        self,
        *,
        times: Times | None = None,
        faults: Sequence[Fault] = (),
        true_async: bool = True,
        has_events: bool = False,
        queues_copies: bool = True,
        queue_depth: int = 8,
        index: int = 0,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> None:
        """Take the core.

        Raises:
            RuntimeError: another runtime has it.
        """
        register()
        self.index = index
        self.has_events = has_events
        self._queues_copies = queues_copies
        self.queue_depth = min(queue_depth, _MOST_DEPTH)
        self.memory_bytes = memory_bytes
        self._cores = NativeCores(
            index, faults, times=times, true_async=true_async, queue_depth=self.queue_depth
        )
        self._own = self._cores.core(index)

    @property
    def core(self) -> FakeCore:
        """The core, with its counters."""
        return self._own.core

    @property
    def violations(self) -> list[str]:
        """What callers did on any core that they must not, oldest first."""
        return self._cores.watch.violations

    @property
    def compiles(self) -> list[str]:
        """The graphs compiled for this core, with their shapes, oldest first."""
        return self._own.compiles

    def at(self, index: int) -> Self:
        """Return the same runtime on another core."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.index = index
        other._own = self._cores.core(index)
        return other

    def to_device(self, tensor: torch.Tensor, *, non_blocking: bool = True) -> torch.Tensor:
        """Copy a host tensor; see `NativeRaw.to_device`.

        Its memory has to stay, unchanged, until the copy or a launch behind it was read. Of a
        tensor over a numpy array, keep the tensor.
        """
        core = self.core
        core.watch.check_caller("a copy to the device")
        self._check_open()
        if isinstance(tensor, DeviceTensor) or tensor.device.type != "cpu":
            raise core.watch.broken(f"a copy to the device of a tensor on {tensor.device}")
        if tensor.dtype in WIDE:
            text = f"a copy to the device of {tensor.dtype}, which it would narrow"
            raise core.watch.broken(text)
        fault = core.faults.at_load()
        if fault is not None:
            raise nrt_error(int(fault.status), "at load")
        self._check_room(tensor.nbytes)
        cell = self._cell(torch.empty_like(tensor, device="meta", requires_grad=False))
        cell.value = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._own.add_copy(Source(tensor, core.watch))
        return DeviceTensor(cell, self.index)

    def compile(
        self,
        fn: Callable[..., Any],
        *,
        fullgraph: bool = True,
        dynamic: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Graph:
        """Return a graph; its first call for each shape compiles. See `NativeRaw.compile`."""
        if dynamic or not fullgraph:
            raise self.core.watch.broken("a graph with dynamic shapes, or in parts")
        return Graph(fn)

    def call(self, graph: Graph, *tensors: torch.Tensor) -> Any:
        """Launch a graph; see `NativeRaw.call`. The tensors have to stay until it was read."""
        own = self._own
        self.core.watch.check_caller("a launch")
        self._check_open()
        inputs = [self._cell_of(tensor) for tensor in tensors]
        shapes = tuple((cell.meta.shape, cell.meta.dtype) for cell in inputs)
        program = graph.programs.get(shapes)
        if program is None:
            program = graph.programs[shapes] = self._compiled(graph, inputs)
        outputs = [self._cell(meta) for meta in program.outputs]
        launch = Launch(outputs)
        own.launch(
            launch,
            partial(graph.compute, inputs, outputs),
            feeds=list({cell.launch.entry: None for cell in inputs if cell.launch is not None}),
            latency_s=program.latency_s + (0.0 if program.has_run else self.core.times.load_s),
            keepalive=[weakref.ref(tensor) for tensor in tensors],
        )
        program.has_run = True
        for cell in outputs:
            cell.launch = launch
        results = tuple(DeviceTensor(cell, self.index) for cell in outputs)
        return results[0] if program.is_single else results

    def to_host(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        """Copy a device tensor, and wait for it or not; see `NativeRaw.to_host`."""
        self.core.watch.check_caller("a read of a device value")
        cell = self._cell_of(tensor)
        if non_blocking and not self.has_events:
            raise self.core.watch.broken("a copy to the host whose end nothing tells")
        if non_blocking and self._queues_copies:
            return self._own.queue_copy(cell)
        if self.has_events:
            self._wait_in_order()
        if cell.launch is None:  # launches may have changed it
            self._own.wait_for_copies()
        else:
            self._own.wait(cell.launch)
            cell.launch.read(cell)
        assert cell.value is not None
        return cell.value.clone()

    def _wait_in_order(self) -> None:
        """Wait for all that is queued, as a read does."""
        event = self._own.event()
        if event.last is not None:
            self._own.wait(event.last)
        for copy in event.copies:
            with suppress(RuntimeError):  # it stays with the launch that failed
                copy.arrive()

    def record_event(self) -> Event:
        """Return an event behind all that is queued; see `NativeRaw.record_event`."""
        if not self.has_events:
            raise self.core.watch.broken("an event: this runtime has none")
        return self._own.event()

    def synchronize(self, event: Event) -> None:
        """Wait for an event; see `NativeRaw.synchronize`."""
        self.core.watch.check_caller("a wait for an event")
        if event.last is not None:
            self._own.wait(event.last)
        for copy in event.copies:
            copy.arrive()
        if event.last is not None:
            event.last.entry.wait()

    def memory_stats(self) -> Mapping[str, int]:
        """Return bytes in use, and of all the core's memory."""
        return {
            "allocated_bytes.all.current": self._own.allocated_bytes,
            "total_bytes": self.memory_bytes,
        }

    def close(self) -> None:
        """Run what is queued, and give the core back to this process.

        A program that hangs keeps it waiting, until `core.let_go`.

        Raises:
            Violation: nobody waited for a launch; the core is closed all the same.
        """
        try:
            self.core.close()
        finally:
            release_cores(self.core)

    def _check_open(self) -> None:
        if self.core.is_closed:
            raise self.core.watch.broken("a call after close")
        if self.core.is_lost:
            raise nrt_error(_LOST, "before")

    def _check_room(self, num_bytes: int) -> None:
        if num_bytes < _SMALL_BYTES:
            return
        used = self._own.allocated_bytes
        if used + num_bytes > self.memory_bytes:
            text = f"{num_bytes} bytes, of {self.memory_bytes} are {used} in use"
            raise nrt_error(_OUT_OF_MEMORY, text)

    def _cell(self, meta: torch.Tensor) -> Cell:
        cell = Cell(self.core, meta)
        self._own.cells.add(cell)
        return cell

    def _cell_of(self, tensor: Any) -> Cell:
        if not isinstance(tensor, DeviceTensor):
            where = tensor.device if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise self.core.watch.broken(f"neuron:{self.index} was given something of {where}")
        if tensor.cell.core is not self.core:
            raise tensor.refused(f"a call of neuron:{self.index}")
        return tensor.cell

    def _compiled(self, graph: Graph, inputs: Sequence[Cell]) -> Program:
        shapes = [tuple(cell.meta.shape) for cell in inputs]
        times = self.core.times
        self.compiles.append(f"{graph.name} {shapes}")
        _logger.warning("graph %s compiles for %s, %g s", graph.name, shapes, times.compile_s)
        pause(times.compile_s)
        if self._own.compile_faults.next_launch() is not None:
            text = f"neuronx-cc failed on {graph.name}: [NCC_EBVF030] too many instructions"
            raise RuntimeError(f"{text}; exit status 4")
        return graph.trace(inputs, times)
