"""Traced programs behind an engine: every layout, every carry, and what requests may ask for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import ConfigError, DeviceError, InvalidRequest, OutOfMemory, SamplingParams
from aneuron.device.neuron import NeuronDevice
from aneuron.models.neuron.nxd import NxdModel
from aneuron.testing.fakes import FakeNxd, Fault, SumDecoder
from tests.neuron.artifacts import (
    BLOCK,
    KINDS,
    LENGTH,
    OURS,
    VOCAB,
    artifact_of,
    count_decoder,
    engine_over,
    fake_device,
    real_decoder,
    write,
    write_real,
)
from tests.neuron.launching import launcher

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron import Engine
    from tests.neuron.artifacts import Kind


async def made(folder: Path, kind: Kind, **options: Any) -> Path:
    return await asyncio.to_thread(write, folder / "a", kind, **options)


async def count_on(engine: Engine, number: int = 6) -> None:
    """Several requests of unlike lengths, each of which must count."""

    async def one(start: int, length: int, most: int) -> None:
        prompt = list(range(start, start + length))
        told = await engine.generate(prompt_token_ids=prompt, max_tokens=most, temperature=0.0)
        assert told.token_ids == list(range(start + length, start + length + most))

    requests = [one(10 + 37 * at, 3 + 2 * at, 20 - 3 * at) for at in range(number)]
    await asyncio.gather(*requests)


@pytest.mark.parametrize(("ranks", "layout"), [(2, "out_rank"), (3, "rank_out")])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_layout_counts(tmp_path: Path, kind: Kind, ranks: int, layout: Any) -> None:
    folder = await made(tmp_path, kind, ranks=ranks)
    fake = FakeNxd(decoder=count_decoder, layout=layout)
    options = {} if kind != "nxdi logits" else {"async_scheduling": False}
    async with engine_over(folder, fake, **options) as (engine, _):
        await count_on(engine)
        await engine.wait_idle()
        stats = engine.stats()
        assert bool(stats.async_steps) == (kind != "nxdi logits")
        assert bool(stats.breaks) == (kind in ("nxdi blocks", "nxdi rows", "nxdi greedy"))


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    "options",
    [{"token_carry": "handoff"}, {"async_scheduling": False}, {"max_num_seqs": 3}],
    ids=["handoff", "sync", "fewer rows"],
)
async def test_ours_count_with_every_carry(
    tmp_path: Path, kind: Kind, options: dict[str, Any]
) -> None:
    async with engine_over(await made(tmp_path, kind, ranks=2), **options) as (engine, _):
        await count_on(engine)


@pytest.mark.parametrize("kind", ["blocks", "nxdi blocks"])
async def test_cached_prefixes_and_cut_prompts(tmp_path: Path, kind: Kind) -> None:
    def sums(_: Any = None) -> SumDecoder:
        return SumDecoder(VOCAB, max_model_len=LENGTH)

    folder = await made(tmp_path, kind, decoder=sums)
    options = {"max_num_batched_tokens": 8}
    async with engine_over(folder, FakeNxd(decoder=sums), **options) as (engine, _):
        for length in (30, 30, 33, 19):
            ids = list(range(5, 5 + length))
            told = await engine.generate(prompt_token_ids=ids, max_tokens=6, temperature=0.0)
            for token_id in told.token_ids:
                weighted = sum(place * one for place, one in enumerate(ids, 1))
                assert token_id == weighted % VOCAB
                ids.append(token_id)
        assert told.usage.cached_tokens == 16  # whole blocks of 19 tokens, but for the last one


@pytest.mark.parametrize("kind", OURS)
async def test_a_seed_gives_the_same_answer_in_any_company(tmp_path: Path, kind: Kind) -> None:
    folder = await asyncio.to_thread(write_real, tmp_path / "a", kind, real_decoder(), ranks=1)
    drawn = SamplingParams(max_tokens=8, temperature=1.2, top_p=0.95, min_p=0.01, top_k=90)
    async with engine_over(folder, FakeNxd()) as (engine, _):
        alone = await engine.generate(prompt_token_ids=[4, 9], params=drawn, seed=7)
        together = [
            engine.generate(prompt_token_ids=[4, 9], params=drawn, seed=seed) for seed in (8, 7, 9)
        ]
        told = [(await one).token_ids for one in together]
        assert told[1] == alone.token_ids
        assert told[0] != told[1] != told[2]


@pytest.mark.parametrize("name", ["min_p", "seed"])
async def test_nxdi_s_sampling_has_no_such_parameter(tmp_path: Path, name: str) -> None:
    async with engine_over(await made(tmp_path, "nxdi rows")) as (engine, _):
        asked: dict[str, Any] = {"temperature": 1.0, name: 0.5 if name == "min_p" else 5}
        with pytest.raises(InvalidRequest) as told:
            await engine.generate(prompt_token_ids=[1], **asked)
        assert told.value.param == name


async def test_greedy_programs_draw_nothing(tmp_path: Path) -> None:
    async with engine_over(await made(tmp_path, "nxdi greedy")) as (engine, _):
        with pytest.raises(InvalidRequest, match="pass temperature=0") as told:
            await engine.generate(prompt_token_ids=[1])  # as the defaults have it
        assert told.value.param == "temperature"


async def test_logits_are_sampled_by_the_host(tmp_path: Path) -> None:
    folder = await made(tmp_path, "nxdi logits")
    with pytest.raises(ConfigError) as told:
        async with engine_over(folder):
            pass
    assert told.value.param == "async_scheduling"
    async with engine_over(folder, async_scheduling=False) as (engine, _):
        wanted = SamplingParams(temperature=0.01, seed=3, min_p=0.5)
        answer = await engine.generate(prompt_token_ids=[40, 41], params=wanted, max_tokens=3)
        assert answer.token_ids == [42, 43, 44]


def test_nxdi_s_programs_are_told_three_parameters(tmp_path: Path) -> None:
    seen: list[np.ndarray] = []

    class Spy(FakeNxd):
        def forward_async(self, ranked: Any) -> Any:
            seen.append(ranked[0][4].numpy().copy())
            return super().forward_async(ranked)

    drawn: dict[str, Any] = {"temperature": [0.5, 0.0], "top_k": [0, 7], "top_p": [0.25, 0.5]}
    with launcher(write(tmp_path / "a", "nxdi rows"), Spy(decoder=count_decoder)) as on:
        rows = [on.begin(slot, [5])[0] for slot in (3, 1)]
        on.run(on.decode(rows, [6, 6], **drawn)).read()
    # By sequence id: padding, the greedy row, padding, and the one that is drawn.
    assert seen[-1].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [-1, 0.25, 0.5]]


def test_slots_keep_parameters_for_later_launches(tmp_path: Path) -> None:
    folder = write_real(tmp_path / "a", "blocks", real_decoder(), ranks=1)
    drawn: dict[str, Any] = {"temperature": 1.5, "seed": 11, "top_p": 0.9}
    with launcher(folder, FakeNxd()) as on:
        told: dict[bool, list[int]] = {}
        for is_written in (True, False):  # by the launch that admits it, or each time
            one = on.place(2)
            prompt = on.prefill(one, [5, 6, 7], **drawn, writes=is_written)
            if not is_written:
                on.model.slots.write(_writes_of(prompt, one.slot))
            told[is_written] = [int(on.run(prompt).read()[0])]
            for _ in range(5):
                told[is_written].append(
                    int(on.run(on.decode([one], None, temperature=1)).read()[0])
                )
        assert told[True] == told[False]


def _writes_of(inputs: Any, slot: int) -> Any:
    from aneuron.params import STATE_COLUMNS
    from aneuron.plans import SlotWrites

    columns = {name: getattr(inputs, name)[:1] for name in STATE_COLUMNS}
    return SlotWrites(np.array([slot]), **columns)


def test_nan_fails_the_step_that_has_it(tmp_path: Path) -> None:
    whole = real_decoder()
    whole.embed.weight.data[9] = float("nan")
    with launcher(write_real(tmp_path / "a", "blocks", whole, ranks=1), FakeNxd()) as on:
        good, _ = on.begin(0, [3])
        bad = on.place(1)
        with pytest.raises(FloatingPointError, match="the logits hold NaN"):
            on.run(on.prefill(bad, [9]))
        launched = on.run(on.decode([good, bad], None))
        with pytest.raises(FloatingPointError):
            launched.read()
        assert launched.values()[0] >= 0 > launched.values()[1]
        assert on.run(on.decode([good], None)).read()[0] >= 0


@pytest.mark.parametrize("kind", ["blocks", "nxdi rows"])
async def test_a_row_for_each_request_of_the_batch_is_used(tmp_path: Path, kind: Kind) -> None:
    async with engine_over(await made(tmp_path, kind)) as (engine, fake):
        before = fake.core.num_launches
        await count_on(engine, 4)
        assert fake.core.num_launches - before < 30  # two by two they would be 36


@pytest.mark.parametrize("kind", ["blocks", "nxdi rows"])
async def test_a_failed_step_fails_its_requests_and_no_others(tmp_path: Path, kind: Kind) -> None:
    fake = FakeNxd(decoder=count_decoder)
    async with engine_over(await made(tmp_path, kind), fake) as (engine, _):
        stream = engine.generate(prompt_token_ids=[5], max_tokens=30, temperature=0.0)
        async for _ in stream:
            break
        fake.inject(Fault(1003))
        with pytest.raises(DeviceError, match="status 1003"):
            await stream
        await count_on(engine, 4)


async def test_a_device_without_room_says_so(tmp_path: Path) -> None:
    folder = await made(tmp_path, "blocks")
    with pytest.raises(OutOfMemory, match="Allocation Failure"):
        async with engine_over(folder, FakeNxd(decoder=count_decoder, memory_bytes=100)):
            pass


def test_a_model_is_loaded_anew_for_another_runtime(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "blocks")
    made: list[FakeNxd] = []

    def connect() -> FakeNxd:
        made.append(FakeNxd(decoder=count_decoder))
        return made[-1]

    device = NeuronDevice(connect, kind="nxd")
    model = NxdModel.load(artifact_of(folder), device)
    assert model.on(device).raw is model.raw is made[0]
    device.disconnect()
    again = model.on(device)
    assert again.raw is made[1]
    assert again.with_kv(8, BLOCK, 2).raw is made[1]
    device.disconnect()


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "blocks", ranks=2)
    artifact = artifact_of(folder)
    with pytest.raises(ConfigError, match="runs native PyTorch") as told:
        NxdModel.load(artifact, NeuronDevice(FakeNxd, kind="native"))
    assert told.value.param == "device"
    shard = folder / "weights" / "tp1_sharded_checkpoint.safetensors"
    shard.write_bytes(b"no")
    with pytest.raises(ConfigError, match="cannot read") as told:
        NxdModel.load(artifact, fake_device(FakeNxd()))
    assert told.value.param == shard.name
    (folder / "model.pt").unlink()
    with pytest.raises(ConfigError, match=r"holds no model\.pt"):
        NxdModel.load(artifact, fake_device(FakeNxd()))


@pytest.mark.parametrize(
    ("sizes", "name"),
    [((64, 8, 8), "block_size"), ((65, 4, 8), "num_kv_blocks"), ((64, 4, 9), "max_num_seqs")],
)
def test_programs_have_the_sizes_they_were_compiled_for(
    tmp_path: Path, sizes: tuple[int, int, int], name: str
) -> None:
    with launcher(write(tmp_path / "a", "blocks")) as on:
        with pytest.raises(ConfigError, match="compiled for") as told:
            on.model.with_kv(*sizes)
        assert told.value.param == name
