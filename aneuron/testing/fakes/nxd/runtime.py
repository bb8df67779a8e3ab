"""The traced NxD runtime, played: programs that `FakeCompiler` wrote, over ranks that are threads.

Comes in: the calls of `NxdRaw`, from any thread without an event loop. A `FakeCore` runs the
launches of all ranks together, first in, first out. Goes out: handles, and on `to_cpu` values.
"""

from __future__ import annotations

import json
import threading
import weakref
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from aneuron.testing.fakes.core import FakeCore, Times
from aneuron.testing.fakes.faults import claim_cores, cores_busy, nrt_error, release_cores
from aneuron.testing.fakes.nxd.ranks import RankGroup
from aneuron.testing.fakes.nxd.rules import PREFILL, LaunchRules, Layout
from aneuron.testing.fakes.nxd.tensor import FakeTensor, Flight, Output

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from aneuron.testing.fakes.core import Entry
    from aneuron.testing.fakes.faults import Fault, Watch

__all__ = ["FakeNxd"]

_OUT_OF_MEMORY = 4
_RING = 2  # outputs of a program that the device keeps
_DEPTH = 2  # launches that have not ended
_Shapes = tuple[torch.Size, ...]


class _Bucket:
    """One compiled shape of a program: of inputs and plain outputs, shape and dtype each."""

    def __init__(self, tag: str, told: Mapping[str, Any]) -> None:
        self.tag = tag
        self.inputs = [_typed(one) for one in told["inputs"]]
        self.outputs = [_typed(one) for one in told["outputs"]]
        self.is_loaded = False


def _typed(told: Sequence[Any]) -> tuple[torch.Size, torch.dtype]:
    return torch.Size(told[0]), getattr(torch, told[1])


class FakeNxd:
    """A played `NxdRaw`.

    Args:
        times: modelled latency.
        faults: what goes wrong, on any rank.
        true_async: a launch returns before its program ends.
        layout: how ranked values are nested.
        decoder: makes the decoder of a rank from what config.json says; None is the real one.
        memory_bytes: of the device, all ranks together.

    Attributes:
        core: that runs the launches; it counts them.
        watch: of what callers did wrong.
        num_cold: launches that had to load their program first.
    """

    def __init__(
        self,
        times: Times | None = None,
        faults: Sequence[Fault] = (),
        *,
        true_async: bool = True,
        layout: Literal["rank_out", "out_rank"] = "rank_out",
        decoder: Callable[[dict[str, Any]], torch.nn.Module] | None = None,
        memory_bytes: int = 16 * 2**30,
    ) -> None:
        """Make a runtime that has loaded nothing."""
        self.layout: Literal["rank_out", "out_rank"] = layout
        self.ranks = 0
        self.num_cold = 0
        self.core = FakeCore(
            times, faults, true_async=true_async, queue_depth=_DEPTH, holds_unread=False,
            name="fake-nxd",
        )  # fmt: skip
        self.watch: Watch = self.core.watch
        self._decoder = decoder
        self._memory_bytes = memory_bytes
        self._folder: Path | None = None
        self._buckets: dict[_Shapes, _Bucket] = {}
        self._aliases: list[str] = []
        self._config: dict[str, Any] = {}
        self._model_config: dict[str, Any] = {}
        self._group: RankGroup | None = None
        self._rules: LaunchRules | None = None
        self._launching = threading.Lock()
        self._num_unrouted = 0
        self._garbage = count(1)
        self._vocab_size = 2

    @property
    def violations(self) -> list[str]:
        """What callers did that they must not, oldest first."""
        return self.watch.violations

    def inject(self, *faults: Fault) -> None:
        """Plan faults; their steps count from the next launch."""
        self.core.inject(*faults)

    # ── NxdRaw ──────────────────────────────────────────────────────────────────────────

    def load(self, path: Path) -> None:
        """Load the programs of an artifact folder; see `NxdRaw.load`."""
        self._check_open("a load")
        listing = path / "model.pt"
        if not listing.is_file():
            raise ValueError(f"The provided filename {listing} does not exist")
        told = json.loads(listing.read_text("utf-8"))
        self._folder = path
        self._config = json.loads((path / "neuron_config.json").read_text("utf-8"))
        of_model = path / "config.json"  # NxDI has it beside its own settings
        self._model_config = (
            json.loads(of_model.read_text("utf-8")) if of_model.is_file() else self._config
        )
        self.ranks = told["ranks"]
        self._aliases = told["programs"][0]["aliases"]
        for program in told["programs"]:
            for one in program["buckets"]:
                bucket = _Bucket(program["tag"], one)
                self._buckets[tuple(shape for shape, _ in bucket.inputs)] = bucket

    def initialize(self, weights: list[dict[str, torch.Tensor]], start_rank: int) -> None:
        """Claim the cores, load weights, zero the state; see `NxdRaw.initialize`."""
        self._check_open("an initialisation")
        if self._folder is None or len(weights) != self.ranks:
            raise self.watch.broken(f"{len(weights)} weights for {self.ranks} ranks")
        cores = range(start_rank, start_rank + self.ranks)
        fault = self.core.faults.at_load()
        if fault is not None:
            raise _load_error(fault, cores)
        claim_cores(cores, self)
        self._group = RankGroup(self.make_module, self._aliases, weights)
        if self._group.num_bytes() > self._memory_bytes:
            raise nrt_error(_OUT_OF_MEMORY, "Allocation Failure")
        widths = [one.inputs[1][0][1] for one in self._buckets.values() if one.tag != PREFILL]
        self._rules = LaunchRules(Layout.of_config(self._config, widths), self.watch)

    def forward(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run on host tensors, and wait; see `NxdRaw.forward`."""
        ranked = self._nested([list(args)] * self.ranks)
        outputs = self._by_rank(self.forward_async(ranked))
        return [self.to_cpu(output) for output in outputs[0]]

    def forward_async(self, ranked: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Launch; see `NxdRaw.forward_async`."""
        self._check_open("a launch")
        if self._group is None or self._rules is None:
            raise self.watch.broken("a launch before weights were loaded")
        by_rank = self._checked_args(ranked)
        with self._launching:
            bucket = self._route(by_rank[0])
            flight = self._rules.check(bucket.tag, by_rank[0])
            outputs = self._outputs(flight, bucket)
            self._submit(flight, bucket, by_rank)
            self._rules.accept()
        return self._nested(outputs)

    def to_cpu(self, tensor: Any) -> torch.Tensor:
        """Wait for a device tensor and copy it; see `NxdRaw.to_cpu`."""
        self._check_open("a read of a device value")
        if isinstance(tensor, torch.Tensor):
            return tensor
        output: Output = tensor.output
        flight = output.flight
        if output.watch is not self.watch or flight.entry is None or self._rules is None:
            raise self.watch.broken("a read of another runtime's tensor")
        if output.rank:
            raise self.watch.broken(f"a read of rank {output.rank}: only rank 0 is read")
        if output.index not in flight.host:
            if self._rules.num_newer(flight) >= _RING:
                raise self.watch.broken(
                    f"a read of launch {flight.ordinal} of {flight.tag}, whose output newer "
                    "launches have overwritten"
                )
            flight.host[output.index] = flight.entry.read()[0][output.index]
        return flight.host[output.index].reshape(tensor.shape).clone()

    def memory_stats(self) -> tuple[int, int]:
        """Return bytes used and free; see `NxdRaw.memory_stats`."""
        self._check_open("memory statistics")
        if self.core.is_lost:
            return -1, -1
        used = 0 if self._group is None else self._group.num_bytes()
        return used, self._memory_bytes - used

    def close(self) -> None:
        """Drain, and give the cores back; see `NxdRaw.close`."""
        try:
            self.core.close()
        finally:
            release_cores(self)
            self._group = None

    # ── modules ─────────────────────────────────────────────────────────────────────────

    def make_module(
        self, rank: int, reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.nn.Module:
        """Return what runs as the programs of a rank: an `NxdProgram` round its decoder."""
        from aneuron.models.neuron.program import NxdProgram
        from aneuron.models.neuron.settings import program_shape

        settings = self._config.get("neuron_config", self._config)
        shape = program_shape(settings, self._config.get("aneuron"))
        decoder = self._make_decoder(reduce)
        config: Any = decoder.config
        self._vocab_size = config.vocab_size
        return NxdProgram(decoder, shape)

    def _make_decoder(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
        from aneuron.models.architecture import ModelConfig
        from aneuron.models.decoder import Decoder
        from aneuron.models.neuron.sharding import rank_config

        if self._decoder is not None:
            return self._decoder(self._model_config)
        config = rank_config(ModelConfig.from_dict(self._model_config), self.ranks)
        return Decoder(config, reduce=reduce if self.ranks > 1 else None)

    # ── launches ────────────────────────────────────────────────────────────────────────

    def _check_open(self, what: str) -> None:
        self.watch.check_caller(what)
        if self.core.is_closed:
            raise self.watch.broken(f"{what} after close")

    def _nested(self, by_rank: Sequence[Sequence[Any]]) -> list[list[Any]]:
        if self.layout == "rank_out":
            return [list(values) for values in by_rank]
        return [list(values) for values in zip(*by_rank, strict=True)]

    def _by_rank(self, nested: Sequence[Sequence[Any]]) -> list[list[Any]]:
        if self.layout == "rank_out":
            return [list(values) for values in nested]
        return [list(values) for values in zip(*nested, strict=True)]

    def _checked_args(self, ranked: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Return arguments by rank, all of them nested right and where they belong."""
        sizes = {len(values) for values in ranked}
        num_ranks = len(ranked) if self.layout == "rank_out" else max(sizes)
        if len(sizes) != 1 or num_ranks != self.ranks:
            raise self.watch.broken(f"arguments nested otherwise than as {self.layout}")
        by_rank = self._by_rank(ranked)
        for rank, args in enumerate(by_rank):
            for index, arg in enumerate(args):
                self._check_arg(arg, rank, index)
        return by_rank

    def _check_arg(self, arg: Any, rank: int, index: int) -> None:
        if isinstance(arg, FakeTensor):
            output = arg.output
            if output.watch is not self.watch or output.rank != rank or index or output.index:
                raise self.watch.broken(
                    f"argument {index} of rank {rank} is output {output.index} of rank "
                    f"{output.rank}"
                )
            if self._rules is not None and self._rules.num_newer(output.flight) >= _RING:
                raise self.watch.broken("fed with an output that newer launches have overwritten")
        elif not isinstance(arg, torch.Tensor) or arg.device.type != "cpu":
            raise self.watch.broken(f"argument {index} of rank {rank} is a {type(arg).__name__}")
        elif arg.dtype == torch.int64:
            raise self.watch.broken(f"argument {index} of rank {rank} is int64: narrow it first")

    def _route(self, args: Sequence[Any]) -> _Bucket:
        shapes = tuple(arg.shape for arg in args)
        bucket = self._buckets.get(shapes)
        if bucket is None:
            raise self._unrouted(shapes)
        for index, (arg, (_, dtype)) in enumerate(zip(args, bucket.inputs, strict=True)):
            if arg.dtype != dtype:
                raise self.watch.broken(f"argument {index} is {arg.dtype}, compiled for {dtype}")
        return bucket

    def _unrouted(self, shapes: _Shapes) -> Exception:
        """Return one after the other what a router raises, scripted or not."""
        text = f"no program for the shapes {[tuple(shape) for shape in shapes]}"
        self.watch.broken(text)
        self._num_unrouted += 1
        return (
            torch.jit.Error(f"builtins.ValueError: {text}"),
            ValueError(text),
            KeyError(text),
        )[(self._num_unrouted - 1) % 3]

    def _outputs(self, flight: Flight, bucket: _Bucket) -> list[list[FakeTensor]]:
        return [
            [
                FakeTensor(Output(flight, rank, index, self.watch), shape, dtype)
                for index, (shape, dtype) in enumerate(bucket.outputs)
            ]
            for rank in range(self.ranks)
        ]

    def _submit(self, flight: Flight, bucket: _Bucket, by_rank: list[list[Any]]) -> None:
        group = cast("RankGroup", self._group)
        sources = [[_Source(arg) for arg in args] for args in by_rank]

        def run() -> list[list[torch.Tensor]]:
            outputs = group.run([[self._value(one) for one in rank] for rank in sources])
            for plain in outputs:
                self._spoil_padding(plain[0], flight)
            return outputs

        rows, tokens = bucket.inputs[0][0]
        times = self.core.times
        latency_s = times.prefill(tokens) if flight.tag == PREFILL else times.decode(rows)
        if not bucket.is_loaded:
            latency_s += times.load_s
        # Arguments are the caller's to keep until somebody has waited for the launch.
        memory = [getattr(arg, "output", arg) for args in by_rank for arg in args]
        keepalive = [weakref.ref(one) for one in memory]
        flight.entry = self.core.submit(run, latency_s=latency_s, keepalive=keepalive)
        self.num_cold += not bucket.is_loaded
        bucket.is_loaded = True

    # ── on the core's thread ────────────────────────────────────────────────────────────

    def _value(self, source: _Source) -> torch.Tensor:
        value = source.value()
        if source.was_written(value):
            raise self.watch.broken("an argument was written to while its launch was in flight")
        return value

    def _spoil_padding(self, tokens: torch.Tensor, flight: Flight) -> None:
        """Have rows that only pad give ids that mean nothing, others at each launch."""
        if tokens.dtype == torch.int32:
            for row, is_real in enumerate(flight.is_real):
                if not is_real:
                    tokens[row] = next(self._garbage) % self._vocab_size


class _Source:
    """Where a program reads an argument: on the host, or an output of an earlier launch."""

    def __init__(self, arg: Any) -> None:
        self.flight: Flight | None = None
        self._shape = arg.shape
        if isinstance(arg, FakeTensor):  # the memory itself is its caller's to keep
            self.flight, self._at = arg.output.flight, (arg.output.rank, arg.output.index)
        else:
            self._host = weakref.ref(arg)
            self._before: torch.Tensor = arg.clone()

    def value(self) -> torch.Tensor:
        """Return it as the program sees it; first in, first out, what it is fed has ended.

        Raises:
            RuntimeError: what it is fed has failed.
        """
        if self.flight is None:
            host = self._host()
            return self._before if host is None else host  # the core tells that it was dropped
        rank, index = self._at
        outputs = cast("Entry", self.flight.entry).value
        value: torch.Tensor = outputs[rank][index].reshape(self._shape)
        return value

    def was_written(self, value: torch.Tensor) -> bool:
        """Whether the host's memory is not as it was at the launch."""
        return self.flight is None and not torch.equal(value, self._before)


def _load_error(fault: Fault, cores: Sequence[int]) -> RuntimeError:
    if fault.status == "cores busy":
        return cores_busy(cores)
    assert isinstance(fault.status, int), f"loading cannot fail with {fault.status!r}"
    return nrt_error(fault.status, "Allocation Failure" if fault.status == _OUT_OF_MEMORY else "")
