"""What NxD Inference really writes is read, with every setting that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aneuron import ConfigError
from aneuron.models.neuron import settings as settings_module
from aneuron.models.neuron.artifact import Artifact
from aneuron.models.neuron.settings import program_shape
from tests.neuron.nxdi_config import BLOCK_KV, CONTINUOUS, EXPERTS, NEURON, write_config

if TYPE_CHECKING:
    from pathlib import Path

KINDS: dict[str, dict[str, Any]] = {
    "batch 1": {},
    "continuous batching": CONTINUOUS,
    "block KV": BLOCK_KV,
}
every_kind = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def no_core_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_batch_1(tmp_path: Path) -> None:
    artifact = Artifact.read(write_config(tmp_path))
    shape, spec = artifact.shape, artifact.spec
    assert "Infinity" in (tmp_path / "neuron_config.json").read_text()
    assert (shape.batch_size, shape.max_model_len, shape.num_blocks) == (1, 128, 1)
    assert (shape.context_buckets, shape.token_buckets) == ((128,), (128,))
    assert (shape.sampling, shape.dtype, shape.is_ours) == ("greedy", "bfloat16", False)
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert spec.kv_bytes_per_token == 2 * 16 * 8 * 64 * 2  # K and V, layers, heads, cells, bfloat16


def test_continuous_batching(tmp_path: Path) -> None:
    shape = Artifact.read(write_config(tmp_path, **CONTINUOUS)).shape
    assert (shape.batch_size, shape.num_blocks, shape.sampling) == (4, 4, "drawn")
    assert not shape.is_block_kv


def test_block_kv(tmp_path: Path) -> None:
    shape = Artifact.read(write_config(tmp_path, **BLOCK_KV)).shape
    assert (shape.is_block_kv, shape.block_size, shape.num_blocks) == (True, 32, 16)
    assert shape.prefix_buckets == (0, 128)


@every_kind
@pytest.mark.parametrize("has_buckets", [False, True])
def test_a_default_that_is_told_is_one_that_is_left_out(
    changes: dict[str, Any], has_buckets: bool
) -> None:
    told = {**NEURON, **EXPERTS, **changes, "enable_bucketing": has_buckets}
    shape = program_shape(told, None)
    for name in NEURON.keys() - BLOCK_KV.keys() - {"enable_bucketing"}:
        assert program_shape({key: told[key] for key in told if key != name}, None) == shape


@every_kind
def test_what_is_refused_is_a_setting_of_nxdi_and_not_its_default(changes: dict[str, Any]) -> None:
    told = {**NEURON, **EXPERTS, **changes}
    refused = [*settings_module._OFF, *settings_module._ONE]
    assert set(refused) <= set(told)
    for name in refused:
        with pytest.raises(ConfigError) as caught:
            program_shape({**told, name: True if name in settings_module._OFF else 2}, None)
        assert caught.value.param == name
