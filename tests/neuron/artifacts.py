"""Small artifacts in every layout, and engines and models over a played runtime."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from aneuron import Engine
from aneuron.device.neuron import NeuronDevice
from aneuron.models.architecture import ModelConfig
from aneuron.models.decoder import Decoder
from aneuron.models.neuron.artifact import Artifact, write_artifact
from aneuron.models.neuron.program import ProgramShape, traced_programs
from aneuron.models.neuron.sharding import rank_config, shard_state
from aneuron.models.tokenizer import ByteTokenizer
from aneuron.testing.fakes import CountDecoder, FakeCompiler, FakeNxd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    Kind = Literal["blocks", "rows", "nxdi blocks", "nxdi rows", "nxdi greedy", "nxdi logits"]

KINDS: tuple[Kind, ...] = (
    "blocks", "rows", "nxdi blocks", "nxdi rows", "nxdi greedy", "nxdi logits",
)  # fmt: skip
OURS: tuple[Kind, ...] = ("blocks", "rows")
VOCAB, LENGTH, BLOCK, BATCH = 512, 64, 4, 4
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
}


def shape_of(kind: Kind, **changes: Any) -> ProgramShape:
    """Sizes of a small artifact."""
    is_block_kv, is_ours = kind.endswith("blocks"), kind in OURS
    shape = ProgramShape(
        batch_size=BATCH,
        max_model_len=LENGTH,
        context_buckets=(8, 16, LENGTH),
        token_buckets=(16, 32, LENGTH),
        prefix_buckets=(0, 16, LENGTH if is_ours else LENGTH - BLOCK) if is_block_kv else (0,),
        is_block_kv=is_block_kv,
        block_size=BLOCK if is_block_kv else LENGTH,
        num_blocks=BATCH * LENGTH // BLOCK if is_block_kv else BATCH,
        num_slots=2 * BATCH if is_ours else 0,
        sampling_columns=6 if is_ours else 3,
        sampling={"nxdi greedy": "greedy", "nxdi logits": "none"}.get(kind, "drawn"),  # type: ignore[arg-type]
        is_ours=is_ours,
    )
    return replace(shape, **changes)


def count_decoder(_: Any = None) -> torch.nn.Module:
    """A decoder that counts."""
    return CountDecoder(VOCAB, max_model_len=LENGTH)


def write(
    folder: Path,
    kind: Kind,
    *,
    ranks: int = 1,
    decoder: Callable[[Any], torch.nn.Module] = count_decoder,
    vocab_size: int = VOCAB,
    **changes: Any,
) -> Path:
    """Compile an artifact of a decoder without weights into an empty folder."""
    shape = shape_of(kind, **changes)
    programs = traced_programs(shape, decoder, num_layers=1)
    _compile(folder, programs, ranks)
    model = {**MODEL, "num_hidden_layers": 1, "vocab_size": vocab_size}
    model["max_position_embeddings"] = shape.max_model_len
    finish(folder, shape, [{} for _ in range(ranks)], model)
    return folder


def write_real(folder: Path, kind: Kind, whole: Decoder, *, ranks: int) -> Path:
    """Compile an artifact of a real decoder into an empty folder."""
    shape, config = shape_of(kind), whole.config

    def part(_: int) -> torch.nn.Module:
        decoder = Decoder(rank_config(config, ranks), reduce=None if ranks == 1 else lambda x: x)
        return decoder.requires_grad_(requires_grad=False)

    _compile(folder, traced_programs(shape, part, num_layers=config.num_layers), ranks)
    state = whole.state_dict()
    shards = [shard_state(state, config, rank, ranks) for rank in range(ranks)]
    finish(folder, shape, shards, MODEL)
    return folder


def real_decoder(seed: int = 0) -> Decoder:
    """A tiny decoder with random weights."""
    decoder = Decoder(ModelConfig.from_dict(MODEL)).requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3, generator)
    return decoder.eval()


def _compile(folder: Path, programs: Any, ranks: int) -> None:
    folder.mkdir(exist_ok=True)
    FakeCompiler().compile(programs, folder, ranks=ranks)


def finish(
    folder: Path, shape: ProgramShape, weights: list[dict[str, torch.Tensor]], model: dict[str, Any]
) -> None:
    """Write the rest of an artifact; of NxDI's, without what is ours."""
    write_artifact(folder, shape, weights, model=model)
    (folder / "config.json").write_text(json.dumps(model), "utf-8")
    if not shape.is_ours:
        file = folder / "neuron_config.json"
        told = json.loads(file.read_text("utf-8"))
        del told["aneuron"]
        if shape.sampling == "none":
            del told["neuron_config"]["on_device_sampling_config"]
        elif shape.sampling == "greedy":
            told["neuron_config"]["on_device_sampling_config"] = {"do_sample": False}
        file.write_text(json.dumps(told), "utf-8")


def fake_device(fake: FakeNxd) -> NeuronDevice:
    """A device over a played runtime."""
    return NeuronDevice(lambda: fake, kind="nxd")


def artifact_of(folder: Path) -> Artifact:
    """What the folder says."""
    return Artifact.read(folder)


@asynccontextmanager
async def engine_over(
    folder: Path, fake: FakeNxd | None = None, **options: Any
) -> AsyncIterator[tuple[Engine, FakeNxd]]:
    """An engine over an artifact; at the end the runtime must have nothing to say."""
    fake = fake or FakeNxd(decoder=count_decoder)
    options = {"tokenizer": ByteTokenizer(), **options}
    async with Engine(str(folder), device=fake_device(fake), **options) as engine:
        yield engine, fake
    assert fake.violations == []
