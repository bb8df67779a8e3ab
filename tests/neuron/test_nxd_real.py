"""A real decoder as traced programs on one and several ranks: the same as without them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from aneuron import ConfigError
from aneuron.models.neuron.program import Bucket, NxdProgram, padding_inputs
from aneuron.models.neuron.sharding import rank_config, shard_state
from aneuron.testing.fakes import FakeNxd
from tests.neuron.artifacts import VOCAB, engine_over, real_decoder, shape_of, write_real
from tests.neuron.launching import launcher

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron.models.decoder import Decoder
    from aneuron.models.neuron.program import ProgramShape
    from tests.neuron.artifacts import Kind

PROMPTS = ([5, 99, 7], [300, 2, 41, 8, 17, 400, 11, 12, 13], list(range(30, 47)))


def reference(whole: Decoder, ids: list[int]) -> torch.Tensor:
    """The logits behind ids, computed at once, without a cache of blocks."""
    caches = [torch.zeros(2, len(ids), 6, 4) for _ in range(4)]
    count = torch.arange(len(ids))
    with torch.no_grad():
        logits: torch.Tensor = whole(
            torch.tensor(ids), count, len(ids) + count, torch.tensor([0, len(ids)]),
            torch.tensor([[1]]), torch.tensor([len(ids)]), torch.tensor([len(ids) - 1]),
            caches[:2], caches[2:], max_query_len=len(ids),
        )  # fmt: skip
    return logits[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_logits_are_those_of_the_whole_decoder(tmp_path: Path, ranks: int) -> None:
    whole = real_decoder()
    folder = write_real(tmp_path / "a", "nxdi logits", whole, ranks=ranks)
    with launcher(folder, FakeNxd(layout="out_rank")) as on:
        placed, texts = [on.place(slot) for slot in (2, 0, 1)], [list(one) for one in PROMPTS]
        for one, ids in zip(placed, texts, strict=True):
            found = torch.from_numpy(on.run(on.prefill(one, ids)).read())
            assert found.shape == (1, VOCAB)
            torch.testing.assert_close(found[0], reference(whole, ids), atol=1e-5, rtol=1e-5)
            ids.append(int(found.argmax()))
        for _ in range(6):
            logits = torch.from_numpy(on.run(on.decode(placed, [ids[-1] for ids in texts])).read())
            assert logits.shape == (4, VOCAB)
            for row, ids in zip(logits, texts, strict=False):
                torch.testing.assert_close(row, reference(whole, ids), atol=1e-5, rtol=1e-5)
                ids.append(int(row.argmax()))


@pytest.mark.parametrize(
    ("kind", "ranks"), [("blocks", 1), ("blocks", 2), ("blocks", 3), ("rows", 3), ("nxdi rows", 2)]
)
async def test_greedy_ids_are_those_of_the_whole_decoder(
    tmp_path: Path, kind: Kind, ranks: int
) -> None:
    whole = real_decoder(seed=ranks)
    folder = await asyncio.to_thread(write_real, tmp_path / "a", kind, whole, ranks=ranks)
    async with engine_over(folder, FakeNxd()) as (engine, _):
        streams = [
            engine.generate(prompt_token_ids=list(ids), max_tokens=12, temperature=0.0)
            for ids in PROMPTS
        ]
        for ids, stream in zip(PROMPTS, streams, strict=True):
            told = [*ids]
            for token_id in (await stream).token_ids:
                assert token_id == int(reference(whole, told).argmax())
                told.append(token_id)
            assert len(told) == len(ids) + 12


def test_a_shard_has_the_rows_and_columns_of_its_heads() -> None:
    whole = real_decoder()
    state = whole.state_dict()
    shards = [shard_state(state, whole.config, rank, 3) for rank in range(3)]
    assert rank_config(whole.config, 3).num_kv_heads == 2
    size = 2 * 4
    name = "layers.0.attention.qkv.weight"
    for rank, shard in enumerate(shards):
        for part in range(3):  # queries, keys, values
            at = part * 6 * 4 + rank * size
            taken = shard[name][part * size : (part + 1) * size]
            assert torch.equal(taken, state[name][at : at + size])
        columns = state["layers.1.mlp.down.weight"][:, rank * 16 : (rank + 1) * 16]
        assert torch.equal(shard["layers.1.mlp.down.weight"], columns)
        assert torch.equal(shard["embed.weight"], state["embed.weight"])


def test_one_rank_alone_has_the_bias_of_a_sum() -> None:
    config = real_decoder().config
    bias = torch.ones(24)
    name = "layers.0.attention.out.bias"
    shards = [shard_state({name: bias}, config, rank, 2)[name] for rank in range(2)]
    assert [one.sum().item() for one in shards] == [24.0, 0.0]


@pytest.mark.parametrize("ranks", [4, 5])
def test_ranks_that_do_not_divide_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size {ranks} does not divide") as told:
        rank_config(real_decoder().config, ranks)
    assert told.value.param == "tensor_parallel_size"


def args_of(shape: ProgramShape, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """A launch with rows that count: a prompt of five tokens, or two rows at other positions."""
    args = [one.clone() for one in padding_inputs(shape, bucket)]
    ids, mask, positions, seq_ids, params, *others = args
    params[:] = torch.tensor([20.0, 0.9, 1.5, 0.0, 7.0, 9.0])
    if bucket.is_decode:
        ids[:2, 0], positions[:2, 0] = torch.tensor([-1, 33]), torch.tensor([3, 9])
        seq_ids[:2] = torch.tensor([1, 0])
        others[6][:2, 0] = 0
        if shape.is_block_kv:
            others[7][:2] = torch.arange(1, 9).view(2, 4)
        return tuple(args)
    ids[0, :5], positions[0, :5] = torch.arange(40, 45), torch.arange(5)
    if not shape.is_block_kv:
        mask[0, :5] = 1
    else:
        others[6][0, :5], others[8][:] = torch.arange(8, 13), 5
    return tuple(args)


@pytest.mark.parametrize("kind", ["blocks", "rows"])
@pytest.mark.parametrize("size", [8, 16], ids=["prefill", "decode"])
def test_a_program_that_was_captured_on_padding_runs_what_counts(kind: Kind, size: int) -> None:
    shape, bucket = shape_of(kind), Bucket(is_decode=size == 16, size=size)
    program = NxdProgram(real_decoder(), shape).eval()
    captured = torch.export.export(program, padding_inputs(shape, bucket)).module()
    args = args_of(shape, bucket)
    expected = NxdProgram(real_decoder(), shape).eval()(*args)
    idle = NxdProgram(real_decoder(), shape).eval()(*padding_inputs(shape, bucket))
    assert any(not torch.equal(one, other) for one, other in zip(expected, idle, strict=True))
    for one, other in zip(captured(*args), expected, strict=True):
        torch.testing.assert_close(one, other)
