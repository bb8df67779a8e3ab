"""The compiler of traced programs, played: it runs each module once and lists what it saw.

Comes in: `TracedProgram`s. Goes out: a model.pt that is a listing in JSON, which `FakeNxd` loads.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from aneuron.testing.fakes.entry import Times, pause
from aneuron.testing.fakes.faults import FaultPlan, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from aneuron.device.neuron.raw import TracedProgram
    from aneuron.testing.fakes.faults import Fault

__all__ = ["FakeCompiler"]


class FakeCompiler:
    """A played `NxdCompiler`.

    Args:
        times: modelled latency; `compile_s` for each program.
        faults: "compile" faults; their step is the number of the program, from 1.
        version: part of the key of caches.

    Attributes:
        num_compiled: programs that it compiled.
        watch: of what callers did wrong.
    """

    def __init__(
        self, times: Times | None = None, faults: Sequence[Fault] = (), *, version: str = "fake-1"
    ) -> None:
        """Make a compiler."""
        self.version = version
        self.num_compiled = 0
        self.watch = Watch()
        self._times = times or Times()
        self._faults = FaultPlan(faults)

    @property
    def violations(self) -> list[str]:
        """What callers did that they must not, oldest first."""
        return self.watch.violations

    def inject(self, *faults: Fault) -> None:
        """Plan faults; their steps count from the next program."""
        self._faults.add(*faults)

    def compile(
        self,
        programs: Sequence[TracedProgram],
        folder: Path,
        *,
        ranks: int,
        progress: Callable[[str, int, int | None], None] | None = None,
    ) -> None:
        """Write model.pt; see `NxdCompiler.compile`.

        Raises:
            RuntimeError: a fault, or a program that the compiler cannot take.
            Violation: the folder is not empty, or the caller is on an event loop's thread.
        """
        self.watch.check_caller("a compilation")
        if any(folder.iterdir()):
            raise self.watch.broken(f"compiled into a folder with files: {folder.name}")
        listed = []
        for done, program in enumerate(programs, 1):
            pause(self._times.compile_s)
            listed.append(self._compile(program, ranks))
            self.num_compiled += 1
            if progress is not None:
                progress("compile", done, len(programs))
        _check_routes(listed)
        told = json.dumps({"ranks": ranks, "programs": listed}, indent=1)
        (folder / "model.pt").write_text(told, "utf-8")

    def _compile(self, program: TracedProgram, ranks: int) -> dict[str, Any]:
        fault = self._faults.next_launch()
        if fault is not None:
            raise RuntimeError(
                f"neuronx-cc failed with exit code 70 on {program.tag}: [NCC_EBVF030] too many "
                "instructions"
            )
        buckets: list[dict[str, Any]] = []
        for rank in range(ranks):  # each rank's module is made, as on hardware
            module = program.module(rank).eval()
            traced = [_trace(module, inputs, program.aliases) for inputs in program.inputs]
            buckets = buckets or traced
            if traced != buckets:
                raise RuntimeError(f"{program.tag}: ranks differ in their shapes")
        return {"tag": program.tag, "aliases": list(program.aliases), "buckets": buckets}


def _trace(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], aliases: Sequence[str]
) -> dict[str, Any]:
    """Run a module on example inputs; return the shapes and dtypes of inputs and outputs."""
    if any(one.dtype == torch.int64 for one in inputs):
        raise RuntimeError("[NCC_EVRF051] an input is int64")
    with torch.no_grad():
        outputs = list(module(*inputs))
    num_plain = len(outputs) - len(aliases)
    if num_plain != 1:
        raise RuntimeError(f"{len(outputs)} outputs with {len(aliases)} aliases")
    for name, output in zip(aliases, outputs[1:], strict=True):
        buffer = module.get_buffer(name)
        if _told(buffer) != _told(output):
            raise RuntimeError(f"alias {name} is {_told(buffer)}, its output {_told(output)}")
    return {"inputs": [_told(one) for one in inputs], "outputs": [_told(outputs[0])]}


def _told(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _check_routes(listed: Sequence[dict[str, Any]]) -> None:
    """Refuse two programs of the same shapes: nothing would tell which to run."""
    routes = [
        json.dumps([shape for shape, _ in bucket["inputs"]])
        for program in listed
        for bucket in program["buckets"]
    ]
    if len(set(routes)) < len(routes):
        raise RuntimeError("AssertionError: two programs have inputs of the same shapes")
