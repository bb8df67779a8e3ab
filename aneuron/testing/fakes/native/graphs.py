"""Graphs of the played native runtime: functions of device tensors, traced once for each shape.

Comes in: a function, and cells of its arguments' shapes. Goes out: the shapes of its results, and
on the core's thread the results. It must be one graph: its Python may not depend on values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aneuron.testing.fakes.native.tensors import WIDE, on_core, plain, traced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.testing.fakes.entry import Times
    from aneuron.testing.fakes.faults import Watch
    from aneuron.testing.fakes.native.tensors import Cell

__all__ = ["Graph", "Program"]


class Program:
    """A graph for one set of shapes.

    Attributes:
        outputs: shapes and dtypes of the results, tensors on device "meta".
        is_single: it returns a tensor, no tuple.
        latency_s: how long it takes, modelled.
        has_run: whether it was launched, and so loaded.
    """

    def __init__(self, outputs: Any, latency_s: float) -> None:
        """Note what the trace told."""
        self.outputs = _as_tuple(outputs)
        self.is_single = isinstance(outputs, torch.Tensor)
        self.latency_s = latency_s
        self.has_run = False


class Graph:
    """What `compile` returns.

    Attributes:
        name: the function's.
        programs: what is compiled, by shapes and dtypes of the arguments.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        """Wrap a function; nothing is traced."""
        self.name = str(getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__))
        self.programs: dict[tuple[Any, ...], Program] = {}
        self._fn = fn

    def trace(self, inputs: Sequence[Cell], times: Times) -> Program:
        """Return the program for these shapes.

        Raises:
            Violation: it is not one graph, reads host tensors, or returns what a core narrows.
        """
        core = inputs[0].core
        metas = [cell.meta for cell in inputs]
        with traced(core):
            outputs = _mapped(plain, self._traced(metas, core.watch))
        for meta in _as_tuple(outputs):
            if meta.dtype in WIDE:
                text = f"graph {self.name} returns {meta.dtype}, which the device narrows"
                raise core.watch.broken(text)
        return Program(outputs, self._latency_s(times, metas[0].shape))

    def compute(self, inputs: Sequence[Cell], outputs: Sequence[Cell]) -> None:
        """Run on the values of cells; called on the core's thread."""
        with on_core(inputs[0].core):
            results = _as_tuple(_mapped(plain, self._fn(*(cell.value for cell in inputs))))
            for cell, result in zip(outputs, results, strict=True):
                if result.shape != cell.meta.shape:
                    raise RuntimeError(f"graph {self.name}: a shape that depends on values")
                cell.value = result.clone()  # it may be a view of what later launches change

    def _traced(self, metas: Sequence[torch.Tensor], watch: Watch) -> Any:
        try:
            return self._fn(*metas)
        except (NotImplementedError, RuntimeError) as error:
            if str(error) in watch.violations:
                raise
            raise watch.broken(f"graph {self.name} cannot be compiled: {error}") from error

    def _latency_s(self, times: Times, shape: torch.Size) -> float:
        length = shape[0] if shape else 0
        if "prefill" in self.name:
            return times.prefill(length)
        return times.decode(length) if "decode" in self.name else 0.0


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _mapped(fn: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return fn(result)
    return tuple(map(fn, result))
