"""Decoders of ids answer as the simulated models do, and show what a cache does wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from aneuron.models.architecture import ModelConfig
from aneuron.models.decoder import Decoder
from aneuron.models.simulated import Sum
from aneuron.plans import ModelInput
from aneuron.testing.fakes import CountDecoder, ScriptDecoder, SumDecoder
from aneuron.testing.fakes.programs import UNWRITTEN
from tests.neuron.native_rig import fake
from tests.support import sum_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from aneuron.testing.fakes import FakeNative
    from aneuron.testing.fakes.programs import IdDecoder

__all__ = ["fake"]

BLOCK, PAGES, VOCAB = 4, 8, 4096


@dataclass
class Row:
    """A request: all its ids, how many are in the cache, and its blocks."""

    ids: list[int]
    blocks: list[int]
    computed: int = 0

    def slots(self, start: int, end: int) -> list[int]:
        return [self.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, end)]


@dataclass
class Runner:
    """A decoder over its own cache of 32 blocks; each step takes chunks of several rows."""

    decoder: IdDecoder
    dtype: torch.dtype = torch.float32
    k_caches: list[torch.Tensor] = field(default_factory=list)
    v_caches: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.decoder.config
        shape = (33, BLOCK, config.num_kv_heads, config.head_dim)
        self.k_caches, self.v_caches = ([torch.zeros(shape, dtype=self.dtype)] for _ in range(2))

    def step(self, rows: Sequence[Row], chunks: Sequence[int], *, pad: int = 0) -> list[int]:
        """Compute so many more tokens of each row, and padding; return the ids that follow."""
        logits = self.decoder(
            *map(torch.from_numpy, columns_of(rows, chunks, pad)),
            self.k_caches,
            self.v_caches,
            max_query_len=max(chunks),
        )
        assert logits.dtype == torch.float32
        assert (logits > 0).sum(dim=-1).tolist() == [1] * len(rows)
        chosen: list[int] = logits.argmax(dim=-1).tolist()
        return chosen


def columns_of(rows: Sequence[Row], chunks: Sequence[int], pad: int = 0) -> list[np.ndarray]:
    """Return a step's columns, as `Decoder` takes them, and count its tokens as computed."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends, tables, lens = [0], [], []
    for row, chunk in zip(rows, chunks, strict=True):
        start, end = row.computed, row.computed + chunk
        ids += row.ids[start:end]
        positions += range(start, end)
        slots += row.slots(start, end)
        ends.append(ends[-1] + chunk)
        tables.append(row.blocks + [0] * (PAGES - len(row.blocks)))
        lens.append(end)
        row.computed = end
    ids, positions, slots = ids + [0] * pad, positions + [0] * pad, slots + [-1] * pad
    columns = ids, positions, slots, ends, tables, lens, [end - 1 for end in ends[1:]]
    return [np.array(column, np.int32) for column in columns]


def is_computed(row: Row) -> bool:
    return row.computed == len(row.ids)


def random_rows(rng: np.random.Generator, vocab_size: int) -> list[Row]:
    blocks = iter(rng.permutation(np.arange(1, 33)).tolist())
    rows = []
    for _ in range(3):
        prompt = rng.integers(0, vocab_size, rng.integers(1, 14)).tolist()
        rows.append(Row(prompt, [next(blocks) for _ in range(PAGES)]))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("vocab_size", [199, VOCAB, 1 << 15])
def test_sum_over_packed_prompts_chunks_cached_blocks_and_decodes(
    vocab_size: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(vocab_size)
    runner = Runner(SumDecoder(vocab_size), dtype)
    rows = random_rows(rng, vocab_size)
    wanted = [sum_reference(row.ids, 6, vocab_size) for row in rows]
    answers: dict[int, list[int]] = {}
    # In chunks, packed with those of the other rows and padding.
    while left := [row for row in rows if row.computed < len(row.ids)]:
        chunks = [int(rng.integers(1, len(row.ids) - row.computed + 1)) for row in left]
        firsts = runner.step(left, chunks, pad=2)
        ended = [(row, one) for row, one in zip(left, firsts, strict=True) if is_computed(row)]
        answers |= {id(row): [one] for row, one in ended}
    for _ in range(5):
        for row in rows:
            row.ids.append(answers[id(row)][-1])
        for row, token in zip(rows, runner.step(rows, [1, 1, 1]), strict=True):
            answers[id(row)].append(token)
    assert [answers[id(row)] for row in rows] == wanted
    # Behind a cached prefix: another row has the first block of this one.
    shared = Row([*rows[0].ids[:BLOCK], 5, 6], [rows[0].blocks[0], 0])
    free = ({*range(1, 33)} - {block for row in rows for block in row.blocks}).pop()
    shared.blocks[1], shared.computed = free, BLOCK
    (chosen_id,) = runner.step([shared], [2])
    assert chosen_id == sum_reference(shared.ids, 1, vocab_size)[0]


def test_sum_equals_the_simulated_model() -> None:
    rows = [Row([700, 4000, 3, 77, 2048], [9, 4]), Row([4095] * 8, [2, 3])]
    ids, positions, slots, starts, table, lens, last = columns_of(rows, [5, 8], pad=2)
    inputs = ModelInput(
        is_decode=False,
        num_reqs=2,
        num_samples=2,
        num_tokens=13,
        max_query_len=8,
        all_greedy=True,
        input_ids=ids,
        positions=positions,
        slot_mapping=slots,
        query_start=starts,
        block_table=table,
        context_lens=lens,
        logits_indices=last,
        prompt_lens=lens,
        temperature=np.zeros(2, np.float32),
        top_k=np.zeros(2, np.int32),
        top_p=np.ones(2, np.float32),
        min_p=np.zeros(2, np.float32),
        seed=np.zeros(2, np.int64),
    )
    model = Sum(vocab_size=VOCAB).with_kv(32, BLOCK)
    wanted = model.executable(inputs)(inputs, None)
    for row in rows:
        row.computed = 0
    assert Runner(SumDecoder()).step(rows, [5, 8]) == wanted.tolist()


@pytest.mark.parametrize("cells", ["keys", "values"])
def test_cells_that_nobody_wrote_spoil_the_sum(cells: str) -> None:
    runner = Runner(SumDecoder())
    row = Row([1, 2, 3, 4, 5], [3, 7])
    runner.step([row], [4])
    caches = runner.k_caches if cells == "keys" else runner.v_caches
    caches[0][3, 1] = 0
    spoiled = sum_reference([1, UNWRITTEN, 3, 4, 5], 1, VOCAB)
    assert runner.step([row], [1]) == spoiled != sum_reference(row.ids, 1, VOCAB)


def test_a_wrong_block_spoils_the_sum() -> None:
    runner = Runner(SumDecoder())
    row = Row([1, 2, 3, 4, 5], [3, 7])
    runner.step([row], [4])
    row.blocks[0] = 4
    assert runner.step([row], [1]) == sum_reference([UNWRITTEN] * 4 + [5], 1, VOCAB)


def test_padding_writes_to_the_null_block_only() -> None:
    runner = Runner(CountDecoder())
    runner.step([Row([7], [2])], [1], pad=3)
    for cache in (*runner.k_caches, *runner.v_caches):
        written = cache.flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert written == [0, 2]


def test_count_wraps_at_the_vocabulary() -> None:
    runner = Runner(CountDecoder(100))
    assert runner.step([Row([7, 98], [1]), Row([99], [2])], [2, 1]) == [99, 0]
    with pytest.raises(ValueError, match="vocab_size"):
        CountDecoder((1 << 15) + 1)


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 9])
@pytest.mark.parametrize("chunk", [2, 16])
def test_script_follows_the_start_whatever_the_prompts_length(prompt_len: int, chunk: int) -> None:
    script = [72, 0, 105]  # the start's id in it is no second start
    runner = Runner(ScriptDecoder(script, start=0, end=257))
    row = Row([50] * (prompt_len - 1) + [0], [5, 3, 8, 1])
    while row.computed < prompt_len:
        (token,) = runner.step([row], [min(chunk, prompt_len - row.computed)])
    answer = [token]
    for _ in range(4):
        row.ids.append(answer[-1])
        answer += runner.step([row], [1])
    assert answer == [72, 0, 105, 257, 257]


def test_script_without_a_start_ends_at_once() -> None:
    assert Runner(ScriptDecoder(b"Hi")).step([Row([50, 51], [5])], [2]) == [257]


def on_device(module: nn.Module, fake: FakeNative) -> list[torch.Tensor]:
    """Move a module's tensors to the core; return the host's, which have to stay."""
    kept = []
    for part in module.modules():
        groups: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in groups:
            for name, tensor in tensors.items():
                if tensor is not None:
                    kept.append(tensor)
                    tensors[name] = fake.to_device(tensor.detach())
    return kept


def real_decoder() -> Decoder:
    config = {
        "model_type": "qwen3",
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    decoder = Decoder(ModelConfig.from_dict(config))
    torch.manual_seed(3)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return decoder.requires_grad_(requires_grad=False)


def script_decoder() -> ScriptDecoder:
    return ScriptDecoder(b"a")


@pytest.mark.parametrize("make", [real_decoder, SumDecoder, CountDecoder, script_decoder])
def test_a_decoder_computes_the_same_in_a_played_graph(fake: FakeNative, make: type) -> None:
    decoder = make()
    config = decoder.config
    shape = (9, BLOCK, config.num_kv_heads, config.head_dim)
    columns = [
        [5, 6, 7, 8, 9, 0],  # ids
        [0, 1, 2, 0, 1, 0],  # positions
        [8, 9, 10, 20, 21, -1],  # slots
        [0, 3, 5],  # starts
        [[2, 0], [5, 0]],  # blocks
        [3, 2],  # context
        [2, 4],  # sampled
    ]
    inputs = [torch.tensor(column, dtype=torch.int32) for column in columns]

    def caches() -> list[torch.Tensor]:
        return [torch.zeros(shape) for _ in range(config.num_layers)]

    wanted = decoder(*inputs, k_host := caches(), caches(), max_query_len=3)
    zeros = caches(), caches()
    k_caches, v_caches = ([fake.to_device(one) for one in some] for some in zeros)
    kept = on_device(decoder, fake)

    def prefill(*columns: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = decoder(*columns, k_caches, v_caches, max_query_len=3)
        return logits

    sent = [fake.to_device(column) for column in inputs]
    logits = fake.to_host(fake.call(fake.compile(prefill), *sent))
    assert torch.equal(logits, wanted)
    assert all(map(torch.equal, k_host, map(fake.to_host, k_caches)))
    assert len(kept) == sum(1 for _ in (*decoder.parameters(), *decoder.buffers()))
    assert not fake.violations
