"""Engines over both played runtimes, with COUNT, SUM and SCRIPT: what tests of the flow open."""

from __future__ import annotations

import asyncio
import atexit
import shutil
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import Engine
from aneuron.device.neuron import NeuronDevice
from aneuron.models.neuron.native import NativeModel, native_spec
from aneuron.testing import ByteTokenizer
from aneuron.testing.fakes import (
    CountDecoder,
    FakeNative,
    FakeNxd,
    ScriptDecoder,
    SumDecoder,
    Times,
)
from aneuron.testing.fakes.faults import _claimed
from tests.neuron.artifacts import write
from tests.scenarios import MAX_LEN, VOCAB
from tests.support import CARRIES, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import torch

    from aneuron.testing.fakes import Fault

# Programs of ours with blocks and with rows, and foreign ones; native PyTorch.
BACKENDS = ("native", "blocks", "rows", "nxdi blocks", "nxdi rows")
OURS = ("native", "blocks", "rows")
WITH_BLOCKS = ("native", "blocks", "nxdi blocks")
WAYS = [
    (backend, carry)
    for backend in BACKENDS
    for carry in CARRIES
    if carry != "resident" or backend in OURS
]
every_way = pytest.mark.parametrize(("backend", "carry"), WAYS, ids=[" ".join(way) for way in WAYS])
every_way_with_blocks = pytest.mark.parametrize(
    ("backend", "carry"),
    [way for way in WAYS if way[0] in WITH_BLOCKS],
    ids=[" ".join(way) for way in WAYS if way[0] in WITH_BLOCKS],
)
# Each backend once, for what takes long.
MAIN_WAYS = [
    ("native", "resident"),
    ("native", "handoff"),
    ("blocks", "resident"),
    ("rows", "handoff"),
    ("nxdi blocks", "handoff"),
    ("nxdi rows", "handoff"),
    ("nxdi rows", "host"),
]
main_ways = pytest.mark.parametrize(
    ("backend", "carry"), MAIN_WAYS, ids=[" ".join(way) for way in MAIN_WAYS]
)
handoff_everywhere = pytest.mark.parametrize("backend", BACKENDS)

WIDE = 1 << 15  # ids of the cases go up to 16,200
VOCABS = {"count": WIDE, "sum": WIDE, "script": 258, "random count": VOCAB, "random sum": VOCAB}
KINDS: dict[str, Callable[..., torch.nn.Module]] = {
    "count": partial(CountDecoder, WIDE),
    "sum": partial(SumDecoder, WIDE),
    "script": partial(ScriptDecoder, b"ABCD"),  # and the end id
    "random count": partial(CountDecoder, VOCAB),  # of scenarios
    "random sum": partial(SumDecoder, VOCAB),
}


@cache
def artifact(backend: Any, kind: str, sizes: tuple[tuple[str, int], ...]) -> Path:
    """Programs for these sizes, compiled once in this process."""
    changed = dict(sizes)
    length = changed.pop("max_model_len", MAX_LEN)
    block_size = changed.get("block_size", 4) if backend.endswith("blocks") else length
    batch_size = changed.get("max_num_seqs", 4)
    folder = Path(mkdtemp(prefix="aneuron-artifact-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    num_rows = batch_size * -(-length // block_size)
    is_block_kv = backend.endswith("blocks")
    # Ours begin a chunk anywhere; foreign ones may have no program behind the last whole block.
    prefix = length if backend in OURS else (length - 1) // block_size * block_size
    steps = tuple(size for size in (8, 16, 32) if size < length)
    return write(
        folder / "artifact",
        backend,
        decoder=lambda _: KINDS[kind](max_model_len=length),
        batch_size=batch_size,
        max_model_len=length,
        context_buckets=(*steps, length),
        token_buckets=(*steps[1:], length),
        prefix_buckets=tuple(sorted({0, *steps[1:], prefix})) if is_block_kv else (0,),
        block_size=block_size,
        num_blocks=changed.get("num_kv_blocks", num_rows) if is_block_kv else batch_size,
        num_slots=2 * batch_size if backend in OURS else 0,
        vocab_size=VOCABS[kind],
    )


def fast(**times: float) -> Times:
    """As fast as it computes, but for what is said."""
    return Times(**{"enqueue_s": 0.0, **times})


@asynccontextmanager
async def fake_engine(
    backend: str,
    carry: str,
    kind: str = "count",
    *,
    times: Times | None = None,
    faults: Sequence[Fault] = (),
    true_async: bool = True,
    has_events: bool | None = None,
    expects_violations: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[Engine, Any]]:
    """An engine over a played runtime, and that; at the end no rule may have been broken.

    Sizes are engine options on every backend: traced programs are compiled for them. Of native
    PyTorch, one carry is that of TorchNeuron, with events, and the others are without, unless it
    is said.
    """
    played = {"times": times or fast(), "faults": faults, "true_async": true_async}
    engine, fake = await made_engine(backend, carry, kind, played, has_events, options)
    async with engine:
        yield engine, fake
    await cores_free()
    if not expects_violations:
        assert fake.violations == []


async def made_engine(
    backend: str,
    carry: str,
    kind: str = "count",
    played: dict[str, Any] | None = None,
    has_events: bool | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[Engine, Any]:
    """An engine that is not open yet, and the runtime that it will be over; see `fake_engine`."""
    fake: Any
    model: Any
    played = {"times": fast(), **(played or {})}
    options = {"tokenizer": ByteTokenizer(), **CARRIES[carry], **(options or {})}
    if backend == "native":
        length = options.pop("max_model_len", MAX_LEN)
        decoder: Any = KINDS[kind](max_model_len=length)
        events = carry == "handoff" if has_events is None else has_events
        fake = FakeNative(**played, has_events=events)
        model = NativeModel(native_spec(decoder.config, name=kind), decoder)
        options = {"max_num_seqs": 4, "block_size": 4, "num_kv_blocks": 64, **options}
        blocks = -(-length // options["block_size"])
        options = {
            "num_seqs_buckets": [1, 2, 4, 8],
            "num_tokens_buckets": [],
            "num_blocks_buckets": [blocks],
            **options,
        }
        options["num_tokens_buckets"] = options["num_tokens_buckets"] or [
            options.setdefault("max_num_batched_tokens", length)
        ]
        device = NeuronDevice(lambda: fake, kind="native")
    else:
        names = ("max_num_seqs", "block_size", "num_kv_blocks", "max_model_len")
        sizes = tuple((name, options.pop(name)) for name in names if name in options)
        model = str(await asyncio.to_thread(artifact, backend, kind, sizes))
        length = dict(sizes).get("max_model_len", MAX_LEN)
        decoder = partial(KINDS[kind], max_model_len=length)
        fake = FakeNxd(**played, decoder=lambda _: decoder())
        device = NeuronDevice(lambda: fake, kind="nxd")
    return Engine(model, device=device, **options), fake


async def cores_free() -> None:
    """Wait until no played runtime of this process has a core: the next test wants them."""
    await until(lambda: not _claimed)
