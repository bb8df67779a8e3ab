"""Device tensors of the played NxD runtime: handles that tell their shape, and nothing else."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from aneuron.testing.fakes.entry import Entry
    from aneuron.testing.fakes.faults import Watch

__all__ = ["FakeTensor", "Flight", "Output"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Flight:
    """A launch: which rows it has, and where its outputs will be.

    Attributes:
        tag: of the program.
        ordinal: which launch of this program it is, from 1.
        seq_ids, positions: of each row, padding included; positions of the last token.
        is_real: which rows are no padding.
        first_blocks: of each row, with a block table; else 0.
        entry: on the core, once it is there.
        host: rank 0's outputs, by index, that were copied to the host.
    """

    tag: str
    ordinal: int
    seq_ids: list[int]
    positions: list[int]
    is_real: list[bool]
    first_blocks: list[int]
    entry: Entry | None = None
    host: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def is_settled(self) -> bool:
        """Whether somebody waited for it, or it failed."""
        return self.entry is not None and not self.entry.is_owed


class Output:
    """Memory of one output of a rank; dropped before its launch is settled, it is a violation.

    Attributes:
        flight: the launch that writes it.
        rank, index: whose output it is, and which.
    """

    def __init__(self, flight: Flight, rank: int, index: int, watch: Watch) -> None:
        """Allocate it."""
        self.flight = flight
        self.rank = rank
        self.index = index
        self.watch = watch
        what = f"output {index} of rank {rank} was dropped before its launch was waited for"
        weakref.finalize(self, _dropped, flight, watch, what).atexit = False


def _dropped(flight: Flight, watch: Watch, what: str) -> None:
    if flight.entry is not None and not flight.is_settled and not flight.entry.core.is_closed:
        flight.entry.fail(watch.broken(what))


class FakeTensor:
    """A tensor on the device: it has a shape and a dtype, and can be viewed in another shape.

    Attributes:
        output: the memory that it is.
        shape: of it.
        dtype: of its elements.
    """

    __slots__ = ("__weakref__", "dtype", "output", "shape")

    def __init__(self, output: Output, shape: torch.Size, dtype: torch.dtype) -> None:
        """Name the memory."""
        self.output = output
        self.shape = shape
        self.dtype = dtype

    def reshape(self, *shape: int) -> FakeTensor:
        """Return the same memory in another shape, of as many elements."""
        viewed = torch.empty(self.shape, dtype=self.dtype, device="meta").reshape(*shape)
        return FakeTensor(self.output, viewed.shape, self.dtype)

    view = reshape

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._unreadable(name)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._unreadable("__array__")

    def __bool__(self) -> NoReturn:
        raise self._unreadable("__bool__")

    def __getitem__(self, index: Any) -> NoReturn:
        raise self._unreadable("__getitem__")

    def __len__(self) -> NoReturn:
        raise self._unreadable("__len__")

    def __repr__(self) -> str:
        return f"FakeTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def _unreadable(self, name: str) -> Exception:
        return self.output.watch.broken(f"{name} of a device tensor: only to_cpu reads it")
