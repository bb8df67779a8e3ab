"""Traced programs and who has the cores: an engine alone, until it is closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import DeviceLost, Engine, OutOfMemory
from aneuron.device.neuron import NeuronDevice
from aneuron.models.tokenizer import ByteTokenizer
from aneuron.testing.fakes import FakeNxd, Fault
from tests.neuron.artifacts import count_decoder, engine_over, fake_device, write
from tests.neuron.flows import cores_free
from tests.support import after, start

if TYPE_CHECKING:
    from pathlib import Path

    from tests.neuron.artifacts import Kind

KINDS = ["blocks", "nxdi rows"]


async def made(folder: Path, kind: Kind) -> str:
    return str(await asyncio.to_thread(write, folder / "a", kind, ranks=2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [("cores busy", DeviceLost, "another process has"), (4, OutOfMemory, "status 4")],
)
async def test_rule_15_what_fails_at_load_is_typed_and_can_be_tried_again(
    tmp_path: Path, kind: Kind, fault: Any, error: type[Exception], text: str
) -> None:
    fakes: list[FakeNxd] = []

    def connect() -> FakeNxd:
        faults = [] if fakes else [Fault(fault, step=0)]
        fakes.append(FakeNxd(decoder=count_decoder, faults=faults))
        return fakes[-1]

    device = NeuronDevice(connect, kind="nxd")
    engine = Engine(await made(tmp_path, kind), device=device, tokenizer=ByteTokenizer())
    with pytest.raises(error, match=text):
        await engine.open()
    async with engine:
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)
    await cores_free()
    assert [fake.violations for fake in fakes] == [[], []]


@pytest.mark.parametrize("kind", KINDS)
async def test_rule_20_cores_are_one_engines_alone(tmp_path: Path, kind: Kind) -> None:
    folder = await made(tmp_path, kind)
    async with engine_over(tmp_path / "a") as (engine, _):
        fake = FakeNxd(decoder=count_decoder)
        other = Engine(folder, device=fake_device(fake), tokenizer=ByteTokenizer())
        with pytest.raises(DeviceLost, match="another process has the NeuronCores"):
            await other.open()
        assert fake.violations == []
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)
    await cores_free()
    async with engine_over(tmp_path / "a") as (engine, _):
        assert (await start(engine, 10, 5)).token_ids == after(10, 5)
    await cores_free()
