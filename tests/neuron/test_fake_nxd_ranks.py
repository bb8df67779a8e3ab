"""The played NxD runtime: programs over several ranks."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aneuron.device.neuron.status import status_of
from aneuron.models.architecture import ModelConfig
from aneuron.models.decoder import Decoder
from aneuron.models.neuron.program import traced_programs
from aneuron.models.neuron.settings import program_shape
from aneuron.models.neuron.sharding import rank_config, shard_state
from aneuron.testing.fakes import FakeCompiler, FakeNxd
from tests.neuron.nxd_rig import VOCAB, Rig, Row, rig, settings

if TYPE_CHECKING:
    from pathlib import Path

TINY = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def test_a_real_decoder_gives_the_same_ids_on_one_rank_and_on_two(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(TINY)
    torch.manual_seed(3)
    whole = Decoder(config)
    state = {name: torch.randn(one.shape) for name, one in whole.state_dict().items()}
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        told = settings("blocks", ranks)
        shape = program_shape(told["neuron_config"], None)
        part = rank_config(config, ranks)
        programs: Any = traced_programs(shape, partial(a_decoder, part), num_layers=2)
        FakeCompiler().compile(programs, folder, ranks=ranks)
        (folder / "neuron_config.json").write_text(json.dumps(told), "utf-8")
        (folder / "config.json").write_text(json.dumps(TINY), "utf-8")
        shards = [shard_state(state, config, rank, ranks) for rank in range(ranks)]
        fake = FakeNxd()
        fake.load(folder)
        weights = [
            {f"decoder.{name}": tensor for name, tensor in shard.items()} for shard in shards
        ]
        fake.initialize(weights, 0)
        found.append(generate(Rig(fake, shape)))
        fake.close()
        assert fake.violations == []
    assert found[0] == found[1]
    assert len(set(found[0])) > 3


def a_decoder(config: ModelConfig, _: int) -> Decoder:
    return Decoder(config)


def generate(one: Rig) -> list[int]:
    row = Row(0, 5)
    ids = one.read(one.launch(one.prefill(row, [3, 1, 4, 1, 5])))
    for _ in range(8):
        ids += one.read(one.launch(one.decode([row], ids[-1:])))[:1]
        row.position += 1
    return ids


def test_a_rank_that_fails_fails_the_launch_of_all(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        newest = one.begin(row)
        group = one.fake._group
        assert group is not None
        modules: list[Any] = group._modules
        forwards = [module.forward for module in modules]
        # The others wait for its part of a sum, and must not wait for ever.
        modules[0].forward = lambda *_: group._reduce(0, torch.zeros(1))
        modules[1].forward = lambda *_: 1 // 0
        failed = one.launch(one.decode([row], newest))
        with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
            one.read(failed)
        assert status_of(caught.value) == 1004
        for module, forward in zip(modules, forwards, strict=True):
            module.forward = forward
        assert one.read(one.launch(one.decode([row], newest)))[0] == newest[0] + 1
