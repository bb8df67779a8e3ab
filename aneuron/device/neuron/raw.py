"""The seams to the Neuron runtimes: what an adapter calls, and nothing more.

Two generations are called in unlike ways, so there are two: traced NxD programs, and native
PyTorch. Each has one implementation over the real runtime and one that only plays it
(`aneuron.testing.fakes`); adapters cannot tell them apart. Every call here may block, so none is
made on the event loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import torch

__all__ = ["Launched", "NativeRaw", "NxdCompiler", "NxdRaw", "TracedProgram"]


class Launched(Protocol):
    """A launch whose sampled ids are on their way; keeps alive what the program reads.

    Both methods may be called again, and from two threads.
    """

    def read(self) -> np.ndarray:
        """Wait for the ids and return them, int32 [samples], in the launch's order of rows.

        Raises:
            RuntimeError: the program, or one that fed it, failed; the text has the status code.
            FloatingPointError: a row that counts had logits with NaN.
        """

    def wait(self) -> None:
        """Wait until the program has ended, and let go of its outputs if nothing needs them.

        Raises:
            RuntimeError: as `read` does.
        """

    def gather(self, order: np.ndarray) -> Launched:
        """Return the ids in another order, int32 [rows], to feed a launch; may wait for them."""


class NxdRaw(Protocol):
    """Traced NxD programs: one model, its weights and its KV state, over all local ranks.

    Attributes:
        layout: how ranked values are nested: [rank][value] of the legacy model, or
            [value][rank] of the V2 model; of arguments as of results.
        ranks: local ranks; known once loaded.
    """

    layout: Literal["rank_out", "out_rank"]
    ranks: int

    def load(self, path: Path) -> None:
        """Load the programs of an artifact folder (model.pt)."""

    def initialize(self, weights: list[dict[str, torch.Tensor]], start_rank: int) -> None:
        """Give each rank its weights and its zeroed state, on cores from `start_rank` on."""

    def forward(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run on host tensors, and wait."""

    def forward_async(self, ranked: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Launch on host tensors, or unread device tensors; return device tensors at once.

        Both nested as `layout` says. Which program runs follows from the shapes.

        Raises:
            torch.jit.Error, ValueError, KeyError: no program has these shapes.
            RuntimeError: the runtime refuses; the text has the status code.
        """

    def to_cpu(self, tensor: Any) -> torch.Tensor:
        """Wait for a device tensor and copy it to the host.

        Raises:
            RuntimeError: its program failed, or one that fed it.
        """

    def memory_stats(self) -> tuple[int, int]:
        """Return bytes used and free on the device; (-1, -1) if that is not known."""

    def close(self) -> None:
        """Give the cores back; nothing may be called after it."""


class TracedProgram(Protocol):
    """One program to compile: a module and example inputs of the shapes it will have."""

    @property
    def tag(self) -> str:
        """NxD's name of the model that it belongs to ("context_encoding_model", …)."""

    @property
    def module(self) -> Callable[[int], torch.nn.Module]:
        """Makes the module of a rank, on the host.

        Where parts of it have a `reduce` that is not None, the compiler puts its sum over the
        ranks there.
        """

    @property
    def inputs(self) -> Sequence[tuple[torch.Tensor, ...]]:
        """Example inputs of each bucket, smallest first."""

    @property
    def aliases(self) -> Sequence[str]:
        """Names of the module's buffers that the outputs behind the first one replace, in order."""


class NxdCompiler(Protocol):
    """Compiles traced programs (neuronx-distributed's ModelBuilder)."""

    version: str  # of all that a compiled program depends on; part of the cache's key

    def compile(
        self,
        programs: Sequence[TracedProgram],
        folder: Path,
        *,
        ranks: int,
        progress: Callable[[str, int, int | None], None] | None = None,
    ) -> None:
        """Write model.pt into an empty folder.

        Args:
            programs: what to compile.
            folder: to write to.
            ranks: tensor parallel degree.
            progress: called as `progress("compile", done, total)`, once for each program.

        Raises:
            RuntimeError: the compiler failed; the text has its NCC code.
        """


class NativeRaw(Protocol):
    """Native PyTorch on one NeuronCore: tensors on `neuron:index`, and compiled graphs.

    Attributes:
        index: of the core.
        has_events: whether events exist (TorchNeuron), and work is done in the order in which it
            was queued, copies to the host among it; else a host read is the only wait.
        queue_depth: launches that the runtime takes before it refuses.
        version: of all that a compiled graph depends on.
    """

    index: int
    has_events: bool
    queue_depth: int
    version: str

    def at(self, index: int) -> Self:
        """Return the same runtime on another core."""

    def to_device(self, tensor: torch.Tensor, *, non_blocking: bool = True) -> torch.Tensor:
        """Queue the copy of a host tensor; it must not change until a later launch was read."""

    def compile(
        self,
        fn: Callable[..., Any],
        *,
        fullgraph: bool = True,
        dynamic: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return a graph, compiled by its first call for each shape (`torch.compile`)."""

    def call(self, graph: Any, *tensors: torch.Tensor) -> Any:
        """Launch a graph; return device tensors at once.

        Raises:
            RuntimeError: the runtime refuses; the text has the status code.
        """

    def to_host(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        """Wait for a device tensor and copy it to the host; late errors appear here.

        With events it may wait for all that was queued before it, also behind the tensor.

        Args:
            tensor: on the core.
            non_blocking: queue the copy and return its target, which holds the values when an
                event that is recorded behind it has been waited for; only with `has_events`.

        Raises:
            RuntimeError: its program failed, or one that fed it.
        """

    def record_event(self) -> Any:
        """Return an event behind all launches and copies so far; only with `has_events`."""

    def synchronize(self, event: Any) -> None:
        """Wait for an event; late errors appear here, too. Only with `has_events`.

        Raises:
            RuntimeError: a program before it failed.
        """

    def memory_stats(self) -> Mapping[str, int]:
        """Return bytes by keys such as `allocated_bytes.all.current`; empty if not known."""

    def close(self) -> None:
        """Wait for what is queued and free the memory that nobody holds; nothing comes after it.

        Native PyTorch has no call that gives a core to another process: this one keeps it until
        it ends. Graphs, weights and caches go with the model that has them.
        """
