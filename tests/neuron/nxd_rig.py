"""A played NxD runtime with a small artifact, and the arguments of its launches."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch

from aneuron.models.neuron.program import Bucket, padding_inputs, traced_programs
from aneuron.models.neuron.settings import program_shape
from aneuron.testing.fakes import CountDecoder, FakeCompiler, FakeNxd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aneuron.models.neuron.program import ProgramShape
    from aneuron.testing.fakes import Fault, Times

    Kind = Literal["blocks", "slots", "rows"]

VOCAB, BLOCK, LENGTH, BATCH = 512, 4, 64, 4
IDS, MASK, POSITIONS, SEQ_IDS, PARAMS = range(5)
SLOTS, TABLE, QUERIES, COMPUTED = range(11, 15)


@dataclass
class Row:
    """One request: its newest position, and where its tokens are in the cache."""

    seq_id: int
    position: int
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = self.blocks or [1 + self.seq_id * 16 + page for page in range(16)]

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK] * BLOCK + position % BLOCK


@dataclass
class Rig:
    """A runtime with what its launches need, which it keeps.

    Attributes:
        kept: the arguments of each launch.
    """

    fake: FakeNxd
    shape: ProgramShape
    kept: list[list[list[Any]]] = field(default_factory=list)

    def prefill(self, row: Row, prompt: Sequence[int], *, size: int = 8) -> list[torch.Tensor]:
        args = self._padding(Bucket(is_decode=False, size=size))
        count = len(prompt)
        args[IDS][0, :count] = torch.tensor(prompt)
        args[POSITIONS][0, :count] = torch.arange(count)
        args[POSITIONS][0, count:] = min(1, count - 1)
        args[SEQ_IDS][0] = row.seq_id
        if self.shape.is_block_kv:
            args[SLOTS][0, :count] = torch.tensor([row.slot(one) for one in range(count)])
            args[QUERIES][0] = count
        else:
            args[MASK][0, :count] = 1
        return args

    def decode(
        self, rows: Sequence[Row], ids: list[int] | tuple[Any, ...], *, size: int = 32
    ) -> list[Any]:
        """Arguments of a decode; rows by sequence id get padding behind them."""
        args: list[Any] = self._padding(Bucket(is_decode=True, size=size))
        for at, row in enumerate(rows):
            args[POSITIONS][at, 0] = row.position
            args[SEQ_IDS][at] = row.seq_id
            args[MASK][at, : row.position] = 1
            if len(args) > SLOTS:
                args[SLOTS][at, 0] = row.slot(row.position)
            if self.shape.is_block_kv:
                args[TABLE][at] = torch.tensor(row.blocks[: size // BLOCK])
                args[COMPUTED][at] = row.position
        if isinstance(ids, list):
            args[IDS][: len(rows), 0] = torch.tensor(ids)
        else:
            args[IDS] = ids
        if not self.shape.is_block_kv:
            self._pad_rows(args, len(rows))
        return args

    def launch(self, args: Sequence[Any]) -> list[list[Any]]:
        """Launch the same arguments on all ranks; device tensors are theirs already."""
        by_rank = [
            [arg[rank] if isinstance(arg, tuple) else arg for arg in args]
            for rank in range(self.fake.ranks)
        ]
        self.kept.append(by_rank)
        return self.by_rank(self.fake.forward_async(self.by_rank(by_rank)))

    def by_rank(self, nested: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Nest as the runtime does, or the other way round."""
        if self.fake.layout == "rank_out":
            return [list(one) for one in nested]
        return [list(one) for one in zip(*nested, strict=True)]

    def read(self, outputs: list[list[Any]]) -> list[int]:
        """The ids of a launch, padding included."""
        ids: list[int] = self.fake.to_cpu(outputs[0][0])[:, 0].tolist()
        return ids

    def tokens(self, outputs: list[list[Any]]) -> tuple[Any, ...]:
        """A launch's ids on the device, by rank, to feed the next one."""
        return tuple(rank[0].reshape(-1, 1) for rank in outputs)

    def begin(self, *rows: Row, first: int = 10) -> list[int]:
        """Prefill a prompt of one less than each row's position + 1; return the ids sampled."""
        found = []
        for row in rows:
            prompt = [first + row.seq_id * 50 + one for one in range(row.position)]
            found += self.read(self.launch(self.prefill(row, prompt, size=8)))
        return found

    def _padding(self, bucket: Bucket) -> list[torch.Tensor]:
        return [one.clone() for one in padding_inputs(self.shape, bucket)]

    def _pad_rows(self, args: list[Any], count: int) -> None:
        used = set(args[SEQ_IDS][:count].tolist())
        unused = [one for one in range(BATCH) if one not in used]
        for at in range(count, BATCH):
            args[SEQ_IDS][at] = unused.pop(0)
        order = args[SEQ_IDS].argsort()
        for index, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and arg.shape[:1] == (BATCH,):
                args[index] = arg[order]


def settings(kind: Kind, ranks: int) -> dict[str, Any]:
    """A neuron_config.json: blocks, blocks with slots of ours, or rows as NxDI has them."""
    told: dict[str, Any] = {
        "batch_size": BATCH,
        "ctx_batch_size": 1,
        "seq_len": LENGTH,
        "tp_degree": ranks,
        "torch_dtype": "float32",
        "is_continuous_batching": True,
        "enable_bucketing": True,
        "context_encoding_buckets": [8, LENGTH],
        "token_generation_buckets": [16, 32, LENGTH],
        "on_device_sampling_config": {"do_sample": True, "dynamic": True},
    }
    if kind != "rows":
        told |= {
            "is_block_kv_layout": True,
            "is_prefix_caching": True,
            "pa_block_size": BLOCK,
            "pa_num_blocks": 1 + BATCH * LENGTH // BLOCK,
            "prefix_buckets": [LENGTH if kind == "slots" else LENGTH - BLOCK],
        }
    config: dict[str, Any] = {"neuron_config": told}
    if kind == "slots":
        config["aneuron"] = {"version": 1, "num_slots": BATCH, "sampling_columns": 6}
    return config


def make_decoder(_: Any = None) -> CountDecoder:
    return CountDecoder(VOCAB, max_model_len=LENGTH)


@cache
def compiled(kind: Kind, ranks: int, decoder: Callable[[Any], torch.nn.Module]) -> str:
    """What the compiler writes; it takes some time."""
    config = settings(kind, ranks)
    shape = program_shape(config["neuron_config"], config.get("aneuron"))
    with TemporaryDirectory() as folder:
        path = Path(folder)
        programs: Any = traced_programs(shape, decoder, num_layers=1)
        FakeCompiler().compile(programs, path, ranks=ranks)
        return (path / "model.pt").read_text("utf-8")


def write_artifact(
    folder: Path,
    kind: Kind = "blocks",
    *,
    ranks: int = 2,
    decoder: Callable[[Any], torch.nn.Module] = make_decoder,
) -> ProgramShape:
    """Write a small artifact; return what it was compiled for."""
    config = settings(kind, ranks)
    (folder / "model.pt").write_text(compiled(kind, ranks, decoder), "utf-8")
    (folder / "neuron_config.json").write_text(json.dumps(config), "utf-8")
    return program_shape(config["neuron_config"], config.get("aneuron"))


@contextmanager
def rig(
    folder: Path,
    kind: Kind = "blocks",
    *,
    ranks: int = 2,
    times: Times | None = None,
    faults: Sequence[Fault] = (),
    expect: str | None = None,
    decoder: Callable[[Any], torch.nn.Module] = make_decoder,
    **options: Any,
) -> Iterator[Rig]:
    """A runtime with a small artifact loaded.

    At its end nothing may have gone wrong that `expect` does not name.
    """
    shape = write_artifact(folder, kind, ranks=ranks, decoder=decoder)
    fake = FakeNxd(times, faults, decoder=decoder, **options)
    fake.load(folder)
    try:
        fake.initialize([{} for _ in range(ranks)], 0)
        yield Rig(fake, shape)
    finally:
        fake.core.go_on()
        fake.close()
    if expect is None:
        assert fake.violations == []
    else:
        assert [one for one in fake.violations if expect not in one] == []
        assert fake.violations
