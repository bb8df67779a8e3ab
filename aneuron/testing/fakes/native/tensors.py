"""Tensors of the played native runtime: on device "neuron", and unreadable.

Comes in: host tensors. Goes out: `DeviceTensor`, which any PyTorch code can hold, and which only
a graph that runs on its core can compute with. A read, an operation or a print of its values
anywhere else is a violation, as it would be a stall or a compilation on hardware.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self
from zlib import crc32

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from aneuron.testing.fakes.core import FakeCore
    from aneuron.testing.fakes.faults import Violation, Watch

__all__ = ["WIDE", "Cell", "DeviceTensor", "Source", "on_core", "plain", "register", "traced"]

WIDE = (torch.int64, torch.float64)  # the device narrows them without a word

_DEVICE = "neuron"
_COMPARED_BYTES = 1 << 20  # of a host tensor: columns fully, of weights the first
_aten = torch.ops.aten
_SHARES = (_aten.detach.default, _aten.alias.default)  # what makes no work for the device
# What brings a constant into a graph; "_to_copy" is the operator's own name.
_MOVES = (_aten.detach, _aten.detach_, _aten.lift_fresh, _aten.to, _aten._to_copy)  # noqa: SLF001
_scope = threading.local()  # .run: which graph runs on this thread
_registering = threading.Lock()
_kernels: list[torch.library.Library] = []  # dropped, their kernels are gone


class Source:
    """A host tensor whose copy to the device the host cannot yet know to be done.

    The caller keeps it, or another tensor over its memory, and leaves it as it is, also where the
    launch that it is for was refused: the copy is under way.

    Args:
        tensor: on the host.
        watch: where it goes if the caller does not.
    """

    def __init__(self, tensor: torch.Tensor, watch: Watch) -> None:
        """Remember the memory, without keeping it, and what it holds."""
        self._is_broken = False
        self._memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype
        self._checksum = _checksum(tensor)
        self._watch = watch

    def check(self, when: str) -> Violation | None:
        """Return what the caller did to it, once; None if nothing."""
        if self._is_broken:
            return None
        pointer = self._memory.cdata
        memory: Any = torch.UntypedStorage._new_with_weak_ptr(pointer)  # noqa: SLF001  its only name
        if memory is None:
            return self._broken("dropped", when)
        tensor = torch.empty(0, dtype=self._dtype).set_(memory, *self._layout)
        return None if _checksum(tensor) == self._checksum else self._broken("changed", when)

    def _broken(self, what: str, when: str) -> Violation:
        self._is_broken = True
        shape = tuple(self._layout[1])
        text = f"a host tensor {shape} was {what} before a launch behind its copy was {when}"
        return self._watch.broken(f"{text} (nrt status 1002)")


class Cell:
    """Memory on a core that holds one tensor.

    Attributes:
        core: whose memory it is.
        meta: shape and dtype, a tensor on device "meta".
        value: what it holds; None before it is computed. Only graphs on the core change it.
        launch: the launch that computes it; None if it is a copy.
    """

    __slots__ = ("__weakref__", "core", "launch", "meta", "value")

    def __init__(self, core: FakeCore, meta: torch.Tensor) -> None:
        """Allocate it; it holds nothing yet."""
        self.core = core
        self.meta = meta
        self.value: torch.Tensor | None = None
        self.launch: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.meta.nbytes


class DeviceTensor(torch.Tensor):
    """A tensor on `neuron:index`, whose values the host does not have.

    Attributes:
        cell: its memory.
    """

    cell: Cell

    def __new__(cls, cell: Cell, index: int) -> Self:
        """Return a tensor over a cell of that core."""
        tensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  its only name
            cls, cell.meta.shape, dtype=cell.meta.dtype, device=torch.device(_DEVICE, index)
        )
        tensor.cell = cell
        return tensor

    def __init__(self, cell: Cell, index: int) -> None:
        """Made by `__new__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub has it without its function
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute on the memory itself where a graph runs; refuse anywhere else."""
        run: _Run | None = getattr(_scope, "run", None)
        if run is not None:
            named = {name: run.inner(value) for name, value in (kwargs or {}).items()}
            return func(*map(run.inner, args), **named)
        first = next(_device_tensors((args, *(kwargs or {}).values())))
        if func in _SHARES:
            return DeviceTensor(first.cell, first.device.index)
        raise first.refused(str(func))

    def refused(self, what: str) -> Violation:
        """Note that somebody tried that outside of a graph, and return what to raise."""
        text = f"{what} on a tensor of {self.device} outside of a graph: only to_host reads it"
        return self.cell.core.watch.broken(text)

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        raise self.refused("numpy")

    def tolist(self) -> NoReturn:
        """Refuse."""
        raise self.refused("tolist")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise self.refused("a conversion to an array")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


class _Run:
    """A graph on this thread: that traces shapes, or that computes."""

    def __init__(self, core: FakeCore, *, is_traced: bool) -> None:
        self.core = core
        self.is_traced = is_traced

    def inner(self, value: Any) -> Any:
        """Return what stands for a value in the graph."""
        if isinstance(value, DeviceTensor):
            return self._memory(value)
        if isinstance(value, list | tuple):
            return [self.inner(one) for one in value]
        return value

    def _memory(self, tensor: DeviceTensor) -> torch.Tensor:
        cell = tensor.cell
        if cell.core is not self.core:
            raise tensor.refused(f"a graph of another core than {tensor.device}")
        if self.is_traced:
            return cell.meta
        if cell.value is None:
            raise cell.launch.entry.error  # it failed
        return cell.value


class _HostTensorsRefused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """No tensor of the host takes part in a graph, but for numbers, unless it is moved there."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in _MOVES:
            for tensor in _tensors((args, *kwargs.values())):
                if tensor.device.type == "cpu" and tensor.dim():
                    text = f"{func} on a host tensor {tuple(tensor.shape)} inside a graph"
                    raise self._watch.broken(text)
        return func(*args, **kwargs)


@contextmanager
def traced(core: FakeCore) -> Iterator[None]:
    """Have this thread trace a graph, on tensors of device "meta"."""
    run = _Run(core, is_traced=True)
    with torch.inference_mode(), _HostTensorsRefused(core.watch), _running(run):
        yield


@contextmanager
def on_core(core: FakeCore) -> Iterator[None]:
    """Have this thread, the core's, run a graph on the tensors in its memory."""
    with torch.inference_mode(), _running(_Run(core, is_traced=False)):
        yield


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a result of the running graph as a tensor of its own; it may be a captured one."""
    run: _Run = _scope.run
    inner: torch.Tensor = run.inner(tensor)
    return inner


def register() -> None:
    """Make "neuron" a device of this process's PyTorch; again, nothing happens.

    Raises:
        RuntimeError: the process has another device of PyTorch's private kind.
    """
    with _registering:
        if _kernels:
            return
        name = torch._C._get_privateuse1_backend_name()  # noqa: SLF001  its only name
        if name not in ("privateuseone", _DEVICE) or hasattr(torch, _DEVICE):
            raise RuntimeError(f"this process has a PyTorch device already: {name!r}")
        _setup_privateuseone_for_python_backend(_DEVICE, backend_module=_Module(), hook=_Hook())
        _ = torch.zeros(1, device="meta") + 1  # it loads much, which no launch should wait for
        kernels = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        kernels.fallback(_made_on_device, "PrivateUse1")  # type: ignore[no-untyped-call]
        _kernels.append(kernels)


class _Module:
    """`torch.neuron`, as far as PyTorch itself asks it; the runtime is not there."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


class _Hook(torch._C._acc.PrivateUse1Hooks):  # noqa: SLF001
    def is_available(self) -> bool:
        return False

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True


def _made_on_device(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a new tensor inside a graph where the graph's other tensors are."""
    run: _Run | None = getattr(_scope, "run", None)
    if run is None:
        raise RuntimeError(f"{op} on device {_DEVICE} outside of a graph")
    device = "meta" if run.is_traced else "cpu"
    return op(*args, **{**kwargs, "device": device})


@contextmanager
def _running(run: _Run) -> Iterator[None]:
    _scope.run = run
    try:
        yield
    finally:
        _scope.run = None


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _device_tensors(values: Iterable[Any]) -> Iterator[DeviceTensor]:
    return (tensor for tensor in _tensors(values) if isinstance(tensor, DeviceTensor))


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return crc32(flat[:_COMPARED_BYTES].numpy().data)
