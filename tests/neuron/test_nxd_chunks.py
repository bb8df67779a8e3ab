"""Prompts that are cut, in traced programs over blocks: budgets, lengths and sizes of blocks."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import ConfigError, LaunchFailed
from aneuron.config import EngineConfig
from aneuron.models.architecture import ModelConfig
from aneuron.models.neuron.artifact import Artifact
from aneuron.models.neuron.compiled import shape_for
from aneuron.models.neuron.nxd import NxdModel
from aneuron.testing import no_leaks
from aneuron.testing.fakes import FakeNxd, SumDecoder
from tests.neuron.artifacts import (
    BLOCK,
    LENGTH,
    MODEL,
    OURS,
    VOCAB,
    count_decoder,
    engine_over,
    finish,
    shape_of,
    write,
)
from tests.neuron.launching import launcher

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from aneuron import Engine
    from tests.neuron.artifacts import Kind

LENGTHS = (1, 2, 9, 11, 16, 17, 31, 33, 49, 50, 51, 61, 62, 63)


def sum_decoder(_: Any = None) -> SumDecoder:
    return SumDecoder(VOCAB, max_model_len=LENGTH)


def sum_of(ids: Sequence[int]) -> int:
    return sum(place * one for place, one in enumerate(ids, 1)) % VOCAB


def sizes_of(kind: Kind, block_size: int) -> dict[str, Any]:
    """Programs as we compile them; foreign ones whose longest prefix is that of whole blocks."""
    if kind == "blocks":
        config = EngineConfig(max_num_seqs=4, block_size=block_size, dtype="float32")
        return asdict(shape_for(config, ModelConfig.from_dict(MODEL)))
    return {
        "block_size": block_size,
        "num_blocks": 4 * LENGTH // block_size,
        "prefix_buckets": tuple(sorted({0, 32, LENGTH - block_size})),
        "token_buckets": (32, LENGTH),
    }


async def check(engine: Engine, length: int) -> None:
    """Every token of an answer is the sum of what was before it."""
    ids = [5 + length + one for one in range(length)]
    told = await engine.generate(prompt_token_ids=list(ids), max_tokens=3, temperature=0.0)
    assert len(told.token_ids) == min(3, LENGTH - length)
    for token_id in told.token_ids:
        assert token_id == sum_of(ids)
        ids.append(token_id)


@pytest.mark.parametrize("budget", [10, 23, 32, None])
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("kind", ["blocks", "nxdi blocks"])
async def test_prompts_of_every_length_are_cut_by_every_budget(
    tmp_path: Path, kind: Kind, block_size: int, budget: int | None
) -> None:
    sizes = sizes_of(kind, block_size)
    folder = await asyncio.to_thread(write, tmp_path / "a", kind, decoder=sum_decoder, **sizes)
    options = {} if budget is None else {"max_num_batched_tokens": budget}
    fake = FakeNxd(decoder=sum_decoder)
    if kind != "blocks" and budget is not None and budget % block_size:
        with pytest.raises(ConfigError, match=f"a multiple of {block_size}") as told:
            async with engine_over(folder, fake, **options):
                pass
        assert told.value.param == "max_num_batched_tokens"
        return
    async with engine_over(folder, fake, **options) as (engine, _), no_leaks(engine):
        for length in (50, 61, 62):  # alone, and then with what they left in the cache
            await check(engine, length)
        await asyncio.gather(*(check(engine, length) for length in LENGTHS))
        await engine.wait_idle()


@pytest.mark.parametrize(("kind", "step"), [("blocks", 1), ("nxdi blocks", BLOCK)])
def test_rule_07_every_cached_prefix_finds_a_compiled_shape(
    tmp_path: Path, kind: Kind, step: int
) -> None:
    """Ours go on behind any token; of these foreign ones the last prefix ends with a block."""
    folder = write(tmp_path / "a", kind, decoder=sum_decoder)
    with launcher(folder, FakeNxd(decoder=sum_decoder)) as on:
        ids = [3 + one for one in range(LENGTH)]
        for before in range(step, LENGTH, step):
            for count in {1, min(9, LENGTH - before), LENGTH - before}:
                one = on.place(1, LENGTH)
                on.run(on.prefill(one, ids[:before]))
                told = on.run(on.prefill(one, ids[before : before + count])).read()[0]
                assert told == sum_of(ids[: before + count])
        if step > 1:
            one = on.place(1, LENGTH)
            on.run(on.prefill(one, ids[:-1]))
            with pytest.raises(ValueError, match="for 63 cached prefixes"):
                on.run(on.prefill(one, ids[-1:]))


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, {}, (LENGTH, LENGTH)),
        ({}, {"max_num_batched_tokens": 12}, (12, 12)),
        ({"context_buckets": (8, 30)}, {}, (28, 28)),
        ({}, {"max_model_len": 60, "max_num_batched_tokens": 10}, (10, None)),
        ({"prefix_buckets": (0, LENGTH)}, {"max_num_batched_tokens": 10}, (10, None)),
        ({}, {"interleaved_prefill_tokens": LENGTH}, (LENGTH, LENGTH)),
    ],
)
def test_foreign_programs_are_given_chunks_that_they_have(
    tmp_path: Path,
    changes: dict[str, Any],
    options: dict[str, Any],
    expected: tuple[int, int | None],
) -> None:
    finish(tmp_path, replace(shape_of("nxdi blocks"), **changes), [{}], MODEL)
    config = Artifact.read(tmp_path).adapt(EngineConfig(**options))
    assert (config.max_num_batched_tokens, config.interleaved_prefill_tokens) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 10},
        {"max_num_batched_tokens": 3},
        {"interleaved_prefill_tokens": 8},
        {"interleaved_prefill_tokens": 63},
    ],
)
def test_chunks_that_foreign_programs_lack_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    finish(tmp_path, shape_of("nxdi blocks"), [{}], MODEL)
    (name,) = options
    with pytest.raises(ConfigError, match="between blocks only") as told:
        Artifact.read(tmp_path).adapt(EngineConfig(**options))
    assert told.value.param == name


@pytest.mark.parametrize("kind", ["blocks", "nxdi blocks"])
async def test_a_launch_without_a_program_fails_its_requests_and_no_others(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await asyncio.to_thread(write, tmp_path / "a", kind)
    async with engine_over(folder, FakeNxd(decoder=count_decoder)) as (engine, _), no_leaks(engine):
        with monkeypatch.context() as patch:
            narrow = shape_of(kind, context_buckets=(8, 16))
            real = NxdModel.executable

            def narrowed(self: NxdModel, inputs: Any) -> Any:
                wide, self.artifact = self.artifact, replace(self.artifact, shape=narrow)
                try:
                    return real(self, inputs)
                finally:
                    self.artifact = wide

            patch.setattr(NxdModel, "executable", narrowed)
            other = engine.generate(prompt_token_ids=[7], max_tokens=30, temperature=0.0)
            with pytest.raises(LaunchFailed, match="no program is compiled for 40 prompts"):
                # Decodes are behind it already, and have no token to go on from.
                await engine.generate(prompt_token_ids=[3] * 40, max_tokens=9, temperature=0.0)
            assert (await other).token_ids == list(range(8, 38))
        assert engine.failure is None
        told = await engine.generate(prompt_token_ids=[3] * 40, max_tokens=2, temperature=0.0)
        assert told.token_ids == [4, 5]


@pytest.mark.parametrize("kind", OURS)
def test_a_decode_behind_a_refused_prompt_reads_no_token_that_is_not_there(
    tmp_path: Path, kind: Kind
) -> None:
    """It is launched before anybody knows; its row is dropped, and the other's counts."""
    with launcher(write(tmp_path / "a", kind)) as one:
        good, last = one.begin(0, [7, 8, 9], writes=True)
        for _ in range(2):  # the second time, the slot has had an owner with a token
            bad = one.place(1)
            with pytest.raises(ValueError, match="no program"):
                one.run(one.prefill(bad, [3] * 70, writes=True))
            bad.count = 3
            ids = one.run(one.decode([bad, good], None)).read()
            assert ids[1] == (last := last + 1)
            bad.count = 0
            filled = one.run(one.prefill(bad, [20, 21], writes=True)).read()
            assert filled[0] == 22
