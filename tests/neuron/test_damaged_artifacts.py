"""Whatever is wrong with an artifact's files: an error about the model, not about the device."""

from __future__ import annotations

import asyncio
import json
import os
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aneuron import ConfigError, DeviceLost, Engine
from aneuron.device.neuron import NeuronDevice
from aneuron.device.neuron.nxd_runtime import NxdRuntime
from aneuron.models.neuron.artifact import Artifact
from aneuron.models.neuron.nxd import NxdModel
from aneuron.models.tokenizer import ByteTokenizer
from aneuron.testing.fakes import FakeNxd
from tests.neuron.artifacts import artifact_of, engine_over, fake_device, real_decoder, write_real
from tests.neuron.flows import cores_free
from tests.neuron.stand_ins import Recorder, install, neuron_classes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHARD = "weights/tp0_sharded_checkpoint.safetensors"


def rewrite(folder: Path, **changes: Any) -> None:
    file = folder / "neuron_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def without_weights(folder: Path) -> None:
    save_file({"decoder.embed.weight": torch.zeros(512, 24)}, folder / SHARD)


def with_another_weight(folder: Path) -> None:
    weights = load_file(folder / SHARD)
    save_file({**weights, "decoder.no.weight": torch.zeros(1)}, folder / SHARD)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights missing": (without_weights, "are not those of its programs.*missing"),
    "weights of another": (with_another_weight, r"are not those of its programs.*decoder\.no"),
    "programs corrupt": (lambda at: (at / "model.pt").write_text("{broken"), r"cannot read .*pt:"),
    "programs empty": (lambda at: (at / "model.pt").write_text("{}"), "cannot read"),
    "ours no object": (lambda at: rewrite(at, aneuron=[]), "aneuron must be an object"),
    "a number of the model": (lambda at: rewrite(at, head_dim="x"), "head_dim must be an integer"),
    "another of it": (lambda at: rewrite(at, num_hidden_layers=0), "num_hidden_layers must be"),
}


@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=DAMAGES)
async def test_a_damaged_file_is_told_and_leaves_the_cores_free(
    tmp_path: Path, damage: Callable[[Path], Any], text: str
) -> None:
    folder, whole = tmp_path / "a", tmp_path / "b"
    for one in (folder, whole):
        await asyncio.to_thread(write_real, one, "blocks", real_decoder(), ranks=1)
    damage(folder)
    with pytest.raises(ConfigError, match=text) as caught:
        async with engine_over(folder, FakeNxd()):
            pass
    assert caught.value.param == "model"
    await cores_free()
    async with engine_over(whole, FakeNxd()) as (engine, _):
        assert len((await engine.generate(prompt_token_ids=[5], max_tokens=3)).token_ids) == 3
    await cores_free()


async def test_an_artifact_for_another_number_of_cores_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    await asyncio.to_thread(write_real, folder, "blocks", real_decoder(), ranks=2)
    told = json.loads((folder / "neuron_config.json").read_text())["neuron_config"]
    rewrite(folder, neuron_config={**told, "tp_degree": 1, "local_ranks_size": 1})
    with pytest.raises(ConfigError, match=r"programs span 2 cores.*says 1") as caught:
        async with engine_over(folder, FakeNxd()):
            pass
    assert caught.value.param == "tp_degree"
    await cores_free()


class Absent(FakeNxd):
    """A runtime that finds no device when it gives weights to it."""

    def initialize(self, weights: list[dict[str, torch.Tensor]], start_rank: int) -> None:
        raise RuntimeError("the PyTorch Neuron runtime could not be initialized")


class Refused(FakeNxd):
    """A runtime that tells a status while it reads the programs."""

    def load(self, path: Path) -> None:
        raise RuntimeError("NRT_UNSUPPORTED_NEFF_VERSION (10)")


@pytest.mark.parametrize("kind", [Absent, Refused])
async def test_what_the_device_refuses_is_not_the_file_s_fault(
    tmp_path: Path, kind: type[FakeNxd]
) -> None:
    folder = tmp_path / "a"
    await asyncio.to_thread(write_real, folder, "blocks", real_decoder(), ranks=1)
    engine = Engine(str(folder), device=fake_device(kind()), tokenizer=ByteTokenizer())
    with pytest.raises(DeviceLost):
        await engine.open()
    await cores_free()


@pytest.mark.parametrize("content", ["text", "zip"])
def test_the_runtime_itself_reads_no_such_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """`torch.jit.load` and zipfile are the real ones."""
    monkeypatch.setattr(os, "environ", {**os.environ})  # the runtime sets some
    install(monkeypatch, "torch_neuronx")
    neuron_classes(monkeypatch, Recorder())
    folder = write_real(tmp_path / "a", "blocks", real_decoder(), ranks=1)
    if content == "zip":
        with zipfile.ZipFile(folder / "model.pt", "w") as archive:
            archive.writestr("model/data.pkl", b"")
    device = NeuronDevice(NxdRuntime, kind="nxd")
    with pytest.raises(ConfigError, match=r"cannot read .*model\.pt") as caught:
        NxdModel.load(artifact_of(folder), device)
    assert caught.value.param == "model"
    device.disconnect()


def test_a_config_that_is_no_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "neuron_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read") as caught:
        Artifact.read(tmp_path)
    assert caught.value.param == "neuron_config.json"
