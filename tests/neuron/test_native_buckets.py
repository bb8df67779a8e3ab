"""Neuron's buckets, and what its native PyTorch does not do; real graphs of `torch.compile`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch._dynamo

from aneuron import ConfigError
from aneuron.config import BatchShape, EngineConfig
from aneuron.device.neuron import NeuronDevice, native_runtime
from aneuron.models.architecture import ModelConfig
from aneuron.models.decoder import Decoder
from aneuron.models.neuron.native import NativeModel, adapt, native_spec
from aneuron.models.neuron.native_buckets import padding_of
from tests.neuron.native_steps import BLOCK_SIZE, SPARE, Row, Steps, shape_of

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 60


def shape_for(limit: int, **options: Any) -> BatchShape:
    return BatchShape.of(adapt(EngineConfig(**options)), limit)


def test_default_buckets_are_powers_of_two_and_multiples_of_128_tokens() -> None:
    shape = shape_for(2048, max_num_seqs=24, max_num_batched_tokens=1024, block_size=16)
    assert shape.rows.sizes == (1, 2, 4, 8, 16, 24)
    assert shape.tokens.sizes == (128, 256, 512, 1024)
    assert [size * 16 for size in shape.blocks.sizes] == [128, 256, 512, 1024, 2048]
    assert shape_for(2048, max_num_batched_tokens=100).tokens.sizes == (100,)
    assert shape_for(1000, block_size=48).blocks.sizes == (8, 16, 21)  # 384, 768; the limit
    assert shape_for(2048, block_size=256).blocks.sizes == (1, 2, 4, 8)
    assert shape_for(2048, block_size=65536).blocks.sizes == (1,)


def test_buckets_that_were_given_stay() -> None:
    given: dict[str, Sequence[int]] = {
        "num_seqs_buckets": [3, 5], "num_tokens_buckets": [7], "num_blocks_buckets": [2],
    }  # fmt: skip
    config = adapt(EngineConfig(**given))  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize(
    ("name", "value"),
    [("quantization", "int8"), ("kv_cache_dtype", "int8"), ("tensor_parallel_size", 2)],
)
def test_what_it_does_not_do_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as told:
        adapt(EngineConfig(**{name: value}))
    assert told.value.param == name


@pytest.mark.parametrize("name", ["num_seqs_buckets", "num_tokens_buckets", "num_blocks_buckets"])
def test_exact_sizes_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="exact sizes") as told:
        padding_of(shape_of(**{name: ()}))
    assert told.value.param == name


def test_padding_writes_nothing_and_counts_for_nothing() -> None:
    shape = shape_of()
    for inputs in padding_of(shape):
        assert (inputs.num_reqs, inputs.num_samples, inputs.num_tokens) == (0, 0, 0)
        assert (inputs.slot_mapping == -1).all()
        assert not inputs.block_table.any()
        assert set(np.asarray(inputs.slots).tolist()) == {shape.num_slots}
        assert {len(inputs.positions), len(inputs.context_lens)} <= {1, 4, 8}
    assert {one.is_decode for one in padding_of(shape)} == {True, False}


class Compiled(native_runtime.NativeRuntime):
    """Native PyTorch as on hardware, but for the device and for the compiler behind dynamo."""

    def __init__(self) -> None:
        self.index, self.has_events, self.queue_depth, self.version = 0, False, 8, "none"
        self._generation = native_runtime.TORCH_NEURON

    def to_device(self, tensor: torch.Tensor, *, non_blocking: bool = True) -> torch.Tensor:
        return tensor.clone()


def tiny_decoder() -> Decoder:
    config = ModelConfig.from_dict(
        {
            "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16,
            "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
        }
    )  # fmt: skip
    torch.manual_seed(3)
    decoder = Decoder(config)
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return decoder.requires_grad_(requires_grad=False)


@pytest.mark.timeout(180)
def test_graphs_compile_whole_and_change_state_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As dynamo traces them, with more buckets than it bears of its own accord."""
    monkeypatch.setitem(native_runtime._BACKENDS, native_runtime.TORCH_NEURON, "aot_eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        decoder = tiny_decoder()
        raw = Compiled()
        device = NeuronDevice(lambda: raw, kind="native")
        model = NativeModel(native_spec(decoder.config, name="tiny"), decoder).on(device)
        on = Steps(model.with_kv(64, BLOCK_SIZE, SPARE), raw, device)
        row, first = on.begin(0, [5, 9, 2])
        ids = [first]
        fed = on.run(on.decode([row], None, padded=2))
        ids.append(int(fed.read()[0]))
        ids.append(int(on.run(on.decode([row], [0], padded=2), fed).read()[0]))
        ids.append(int(on.run(on.decode([row], None, padded=1)).read()[0]))  # another shape
    assert ids == whole(decoder, [5, 9, 2], 4)
    assert len(set(ids)) > 1


def whole(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy ids, all of the context computed anew for each."""
    ids = list(prompt)
    for _ in range(count):
        size = decoder.config.num_kv_heads, decoder.config.head_dim
        caches = [[torch.zeros(16, BLOCK_SIZE, *size)], [torch.zeros(16, BLOCK_SIZE, *size)]]
        num = len(ids)
        columns = [
            ids, range(num), range(BLOCK_SIZE, BLOCK_SIZE + num), [0, num], [range(1, 9)], [num],
            [num - 1],
        ]  # fmt: skip
        tensors = [torch.from_numpy(np.array(column, np.int32)) for column in columns]
        logits = decoder(*tensors, *caches, max_query_len=num)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_rows_of_the_test_have_blocks_of_their_own() -> None:
    blocks = [block for slot in range(SPARE) for block in Row(slot).blocks]
    assert sorted(blocks) == list(range(1, 65))
