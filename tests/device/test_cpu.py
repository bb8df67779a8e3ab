"""The processor as a device: what its programs raise, who fails by it, and NaN in a model."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import DeviceError, DeviceLost, Engine, LaunchFailed, OutOfMemory
from aneuron.device.cpu import CpuDevice
from aneuron.testing import ByteTokenizer, no_leaks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from aneuron import DeviceFuture


class Value:
    """A device value, as far as the device looks at it."""

    def __init__(self, ids: Any) -> None:
        self.ids = np.asarray(ids, np.int32)

    def numpy(self) -> np.ndarray:
        return self.ids


class Program:
    """Returns what it is fed plus one, or its own ids; or raises."""

    name = "fake"
    sampled_dtype = "int32"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __call__(self, inputs: Any, input_ids: Any) -> Value:
        if self.error is not None:
            raise self.error
        return Value((inputs.input_ids if input_ids is None else input_ids.ids) + 1)


@asynccontextmanager
async def started() -> AsyncIterator[CpuDevice]:
    device = CpuDevice()
    device.start(asyncio.get_running_loop())
    try:
        yield device
    finally:
        await device.close()


def launch(
    device: CpuDevice, error: Exception | None = None, feed: Any = None, *, read: bool = True
) -> DeviceFuture:
    ids = np.array([1, 2], np.int32) if feed is None else feed
    inputs: Any = SimpleNamespace(input_ids=ids, num_sampled=2)
    return device.launch(Program(error), inputs, read=read)


async def fault_of(future: DeviceFuture) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        await future
    return caught.value


FAULTS: list[tuple[Exception, type[DeviceError]]] = [
    (FloatingPointError("NaN"), DeviceError),
    (IndexError("out of range"), DeviceError),
    (MemoryError(), OutOfMemory),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), OutOfMemory),
    (ValueError("shape"), LaunchFailed),
    (TypeError("argument"), LaunchFailed),
]


@pytest.mark.parametrize(("error", "kind"), FAULTS, ids=repr)
async def test_a_fault_is_that_step_s_and_of_those_it_feeds(
    error: Exception, kind: type[DeviceError]
) -> None:
    async with started() as device:
        failed = launch(device, error)
        fed = launch(device, feed=failed)
        fed_again = launch(device, feed=fed)
        apart = launch(device)
        for future in (failed, fed, fed_again):
            fault = await fault_of(future)
            assert type(fault) is kind
            assert fault.__cause__ is error
            assert fault.device == "cpu"
            assert type(error).__name__ in str(fault)
        assert (await apart).tolist() == [2, 3]
        assert (await launch(device, feed=apart)).tolist() == [3, 4]


@pytest.mark.parametrize(
    "error", [RuntimeError("mkl"), KeyError("x"), OSError("gone"), ZeroDivisionError()], ids=repr
)
async def test_what_is_not_known_loses_the_device(error: Exception) -> None:
    async with started() as device:
        before, failed, after = launch(device), launch(device, error), launch(device)
        assert (await before).tolist() == [2, 3]
        for future in (failed, after):
            fault = await fault_of(future)
            assert type(fault) is DeviceLost
            assert fault.__cause__ is error


async def test_a_fault_goes_through_a_gather() -> None:
    async with started() as device:
        failed = launch(device, FloatingPointError("NaN"))
        gathered = device.gather(failed, np.array([1, 0], np.int32))
        assert type(await fault_of(launch(device, feed=gathered))) is DeviceError
        assert (await launch(device)).tolist() == [2, 3]


async def test_times_are_measured_also_of_what_fails() -> None:
    async with started() as device:
        before_s = time.monotonic()
        futures = [launch(device), launch(device, FloatingPointError("NaN")), launch(device)]
        await futures[2]
        edges = [at for one in futures for at in (one.device_start_s, one.device_end_s)]
        assert sorted(edges) == edges
        assert before_s <= edges[0]
        assert edges[-1] <= futures[2].read_s <= time.monotonic()


async def test_an_unread_launch_is_read_when_asked_for() -> None:
    async with started() as device:
        futures = [launch(device, read=False) for _ in range(2)]
        await futures[0].discard()
        assert not futures[0].done()
        for future in futures:
            assert (await future).tolist() == [2, 3]


async def test_a_fault_of_an_unread_launch() -> None:
    async with started() as device:
        failed = launch(device, IndexError("out of range"), read=False)
        with pytest.raises(DeviceError):
            await failed.discard()
        assert type(await fault_of(failed)) is DeviceError
        assert type(await fault_of(launch(device, feed=failed))) is DeviceError


async def test_ranks_are_devices_of_their_own() -> None:
    async with started() as device:
        other = device.for_rank(1, 2)
        assert device.for_rank(0, 2) is device
        assert device.ranks == [device, other]
        other.start(asyncio.get_running_loop())
        assert "aneuron-cpu-rank1" in [thread.name for thread in threading.enumerate()]
        fault = await fault_of(launch(other, RuntimeError("mkl")))
        assert type(fault) is DeviceLost
        assert fault.device == "cpu-rank1"
        assert (await launch(device)).tolist() == [2, 3]
        await other.close()


# ── a real model ────────────────────────────────────────────────────────────────────────


def tiny_llama(into: Path) -> Any:
    """Write a small random Llama and load it as a model object."""
    import torch
    import transformers

    from aneuron.models.torch_model import TorchModel

    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(into)
    return TorchModel.load(into, dtype="float32")


@pytest.mark.tiny
@pytest.mark.timeout(120)
@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_nan_in_the_weights_fails_the_requests_and_not_the_engine(
    async_scheduling: bool, temperature: float, tmp_path: Path
) -> None:
    model = await asyncio.to_thread(tiny_llama, tmp_path)
    options: dict[str, Any] = {"max_tokens": 6, "temperature": temperature, "seed": 1}
    prompts = [[random.Random(n).randrange(300) for _ in range(n)] for n in (3, 20)]
    async with (
        Engine(model, tokenizer=ByteTokenizer(), async_scheduling=async_scheduling) as engine,
        no_leaks(engine),
    ):

        async def run() -> list[Any]:
            streams = [engine.generate(prompt_token_ids=ids, **options) for ids in prompts]
            return await asyncio.gather(*streams, return_exceptions=True)

        sound = [answer.token_ids for answer in await run()]
        weight = model.decoder.norm.weight
        kept = weight.data.clone()
        weight.data.fill_(float("nan"))
        for error in await run():
            assert type(error) is DeviceError
            assert "NaN" in str(error)
            assert isinstance(error.__cause__, FloatingPointError)
        weight.data.copy_(kept)
        assert [answer.token_ids for answer in await run()] == sound
