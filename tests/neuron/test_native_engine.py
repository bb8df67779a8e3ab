"""Engines over native models on a played core: what the rules are kept for."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import ConfigError, Engine
from aneuron.device.neuron import NeuronDevice
from aneuron.models.neuron.native import NativeModel, native_spec
from aneuron.testing import ByteTokenizer
from aneuron.testing.fakes import CountDecoder, FakeNative, Fault, SumDecoder
from tests.device.test_cpu import tiny_llama
from tests.support import CARRIES, after, every_carry, some_turns, sum_reference

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import torch

VOCAB = 300
SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 16, "block_size": 4,
    "num_kv_blocks": 64, "num_seqs_buckets": [1, 4], "num_tokens_buckets": [16],
    "num_blocks_buckets": [16],
}  # fmt: skip


@asynccontextmanager
async def engine_over(
    fake: FakeNative, decoder: Any = None, **options: Any
) -> AsyncIterator[Engine]:
    """An engine; at the end nothing may be on the core, and nobody may have broken a rule."""
    decoder = decoder or CountDecoder(VOCAB)
    model = NativeModel(native_spec(decoder.config, name="played"), decoder)
    device = NeuronDevice(lambda: fake, kind="native")
    given = {**SIZES, "tokenizer": ByteTokenizer(), **options}
    async with Engine(model, device=device, **given) as engine:
        yield engine
    assert fake.core.is_closed
    assert fake.violations == []


async def all_of(*streams: Any) -> list[list[int]]:
    return [answer.token_ids for answer in await asyncio.gather(*streams)]


PROMPTS = [[7, 250, 3], [1], [9, 9, 9, 9, 9], list(range(40, 61)), [5, 250]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small random Llama: where it lies, and as a model of the processor."""
    path = tmp_path_factory.mktemp("tiny")
    return path, tiny_llama(path)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_ranks", [1, 2])
@every_carry
async def test_greedy_ids_are_those_of_the_processor(
    carry: dict[str, Any], num_ranks: int, tiny: tuple[Path, Any]
) -> None:
    path, model = tiny
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
    async with Engine(model, device="cpu", **{**SIZES, "tokenizer": ByteTokenizer()}) as engine:
        streams = [engine.generate(prompt_token_ids=prompt, **asked) for prompt in PROMPTS]
        told = await all_of(*streams)
    fake = FakeNative()
    device = NeuronDevice(lambda: fake, kind="native")
    placed = await asyncio.to_thread(NativeModel.load, path, device, name="tiny", dtype="float32")
    assert placed.spec.kv_bytes_per_token == model.spec.kv_bytes_per_token
    given = {**SIZES, **carry, "tokenizer": ByteTokenizer(), "num_ranks": num_ranks}
    async with Engine(placed, device=device, **given) as engine:
        streams = [engine.generate(prompt_token_ids=prompt, **asked) for prompt in PROMPTS]
        assert await all_of(*streams) == told
        assert engine.spec.name == "tiny"
    assert fake.violations == []


@every_carry
async def test_samples_do_not_depend_on_company(carry: dict[str, Any]) -> None:
    class Spread(CountDecoder):
        """The next id is the likeliest, and the others are not much less so."""

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs) / 500

    given: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 9},
        {"top_p": 0.4},
        {"min_p": 0.5},
        {"top_k": 2},
    )
    asked: list[dict[str, Any]] = [
        {"prompt_token_ids": [at, at + 1], "seed": at, "max_tokens": 12, "temperature": 1.0, **more}
        for at, more in enumerate(given)
    ]
    async with engine_over(FakeNative(), Spread(VOCAB), **carry) as engine:
        alone = [await all_of(engine.generate(**one)) for one in asked]
        together = await all_of(*(engine.generate(**one) for one in asked))
        assert [[ids] for ids in together] == [ids[0:1] for ids in alone]
    assert len({tuple(ids) for ids in together}) == 5
    assert len(set(together[0])) > 6


async def test_a_grammar_is_kept_to() -> None:
    async with engine_over(FakeNative()) as engine:
        other = engine.generate(prompt_token_ids=[10], max_tokens=20)
        told = await engine.generate(prompt_token_ids=[1], grammar={"choice": ["yes", "no"]})
        assert told.text in {"yes", "no"}
        assert (await other).token_ids == after(10, 20)


@every_carry
async def test_choices_compute_their_prompt_each(carry: dict[str, Any]) -> None:
    async with engine_over(FakeNative(), SumDecoder(VOCAB), **carry) as engine:
        answer = await engine.generate(prompt_token_ids=[5, 6, 7, 8, 9], n=3, max_tokens=9)
        expected = sum_reference([5, 6, 7, 8, 9], 9, VOCAB)
        assert [choice.token_ids for choice in answer.choices] == [expected] * 3


# ── the rules of the runtime ────────────────────────────────────────────────────────────


@every_carry
async def test_rule_04_the_queue_is_never_full(carry: dict[str, Any]) -> None:
    """Although more steps may be in flight than it takes launches, on both ranks."""
    fake = FakeNative(queue_depth=3)
    depth = {} if carry == CARRIES["host"] else {"max_in_flight_steps": 5}
    async with engine_over(fake, **{**carry, **depth, "num_ranks": 2}) as engine:
        streams = [engine.generate(prompt_token_ids=[at], max_tokens=20) for at in range(6)]
        assert await all_of(*streams) == [after(at, 20) for at in range(6)]
        assert fake.core.num_queue_full == fake.at(1).core.num_queue_full == 0


async def test_rule_06_inputs_stay_until_their_step_was_read() -> None:
    """All requests leave while their steps are still to run."""
    fake = FakeNative()
    async with engine_over(fake, max_in_flight_steps=4) as engine:
        await engine.generate(prompt_token_ids=[5], max_tokens=3)
        fake.core.hold()
        streams = [engine.generate(prompt_token_ids=[at], max_tokens=30) for at in range(3)]
        await some_turns()
        closing = [asyncio.ensure_future(stream.aclose()) for stream in streams]
        await some_turns()
        gc.collect()
        fake.core.go_on()
        await asyncio.gather(*closing)
        assert (await engine.generate(prompt_token_ids=[9], max_tokens=5)).token_ids == after(9, 5)


@every_carry
async def test_rule_12_blocks_are_in_the_table_of_the_launch(carry: dict[str, Any]) -> None:
    """SUM reads its whole context from the cache, 4 tokens a block."""
    async with engine_over(FakeNative(), SumDecoder(VOCAB), **carry) as engine:
        prompts = [[3, 1, 4], [1, 5, 9, 2], [6, 5, 3, 5, 8], list(range(30))]
        streams = [engine.generate(prompt_token_ids=ids, max_tokens=30) for ids in prompts]
        assert await all_of(*streams) == [sum_reference(ids, 30, VOCAB) for ids in prompts]
        stats = engine.stats()
        if carry == CARRIES["resident"]:
            assert stats.async_steps == stats.decode_steps


class Entered(FakeNative):
    """Tells when a call has come."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.entered = threading.Event()

    def call(self, graph: Any, *tensors: torch.Tensor) -> Any:
        self.entered.set()
        return super().call(graph, *tensors)


@every_carry
async def test_rule_14_a_launch_that_blocks_does_not_stop_the_loop(carry: dict[str, Any]) -> None:
    fake = Entered(true_async=False)
    async with engine_over(fake, **carry) as engine:
        fake.core.hold()
        fake.entered.clear()
        stream = engine.generate(prompt_token_ids=[5], max_tokens=20)
        await asyncio.to_thread(fake.entered.wait)
        await some_turns()
        assert fake.core.in_flight == 1  # its launch thread waits; this one does not
        fake.core.go_on()
        assert (await stream).token_ids == after(5, 20)


async def test_rule_19_nothing_is_compiled_while_it_serves() -> None:
    fake = FakeNative()
    steps: list[tuple[str, int, int | None]] = []
    async with engine_over(fake, progress=lambda *step: steps.append(step)) as engine:
        assert [one for one in steps if one[0] == "warm up"][-1] == ("warm up", 3, 3)
        compiled = list(fake.compiles)
        assert len(compiled) == 1 + 2 + 2  # prefill, decodes, gathers
        streams = [
            engine.generate(prompt_token_ids=[1] * length, max_tokens=12, temperature=temperature)
            for length, temperature in ((1, 0), (16, 0.5), (30, 1), (17, 0), (2, 0))
        ]
        await asyncio.gather(
            *streams, engine.generate(prompt_token_ids=[1], grammar={"regex": "a"})
        )
        assert fake.compiles == compiled


async def test_rule_19_an_engine_does_not_open_over_what_does_not_compile() -> None:
    fake = FakeNative(faults=[Fault("compile", step=2)])
    with pytest.raises(ConfigError, match=r"(?s)cannot compile: decode.*smaller buckets"):
        async with engine_over(fake):
            pass
    assert fake.core.is_closed


# ── ranks, and anew ─────────────────────────────────────────────────────────────────────


@every_carry
async def test_ranks_have_cores_of_their_own(carry: dict[str, Any]) -> None:
    fake = FakeNative()
    async with engine_over(fake, SumDecoder(VOCAB), **{**carry, "num_ranks": 2}) as engine:
        cores = [fake.core, fake.at(1).core]
        streams = [engine.generate(prompt_token_ids=[at, 7], max_tokens=20) for at in range(5)]
        expected = [sum_reference([at, 7], 20, VOCAB) for at in range(5)]
        assert await all_of(*streams) == expected
        assert cores[0].num_launches == cores[1].num_launches > 20
    assert all(core.is_closed for core in cores)


async def test_a_model_serves_again_on_the_same_device() -> None:
    decoder = SumDecoder(VOCAB)
    model = NativeModel(native_spec(decoder.config, name="sum"), decoder)
    fakes: list[FakeNative] = []

    def connect() -> FakeNative:
        fakes.append(FakeNative())
        return fakes[-1]

    device = NeuronDevice(connect, kind="native")
    for _ in range(2):
        async with Engine(model, device=device, **{**SIZES, "tokenizer": ByteTokenizer()}) as one:
            answer = await one.generate(prompt_token_ids=[3, 5], max_tokens=9)
            assert answer.token_ids == sum_reference([3, 5], 9, VOCAB)
    assert [fake.core.is_closed for fake in fakes] == [True, True]
    assert not any(fake.violations for fake in fakes)
