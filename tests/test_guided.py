"""Requests that the host has a say in: grammars and hooks, beside free ones, on every carry."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import DeviceError, Engine, InvalidRequest
from aneuron.device.sim import Fault, SimDevice
from aneuron.models.simulated import LogitsModel
from aneuron.testing import Const, Count, no_leaks, sim_engine
from tests.support import CARRIES, every_carry

if TYPE_CHECKING:
    from aneuron.plans import ModelInput

VOCAB = 258
EOS = 257
REGEX = "[ab]{3}[0-9]{2}"
# Every carry with executables in two parts, and with fused ones.
GUIDED: dict[str, dict[str, Any]] = {
    f"{name}-{kind}": {"carry": carry, "is_split": kind == "split"}
    for name, carry in CARRIES.items()
    for kind in ("split", "fused")
}
every_way = pytest.mark.parametrize("way", GUIDED.values(), ids=GUIDED)


class Noise(LogitsModel):
    """Logits that look random, and are a function of the context read through the cache."""

    name = "noise"

    def __init__(self, **options: Any) -> None:
        super().__init__(vocab_size=VOCAB, eos_token_ids=(EOS,), **options)

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        context, counts = self._context(inputs)
        weights = np.where(counts, np.arange(1, context.shape[1] + 1), 0)
        sums = (context.astype(np.int64) * weights).sum(axis=1) & 0xFFFF
        mixed = (sums[:, None] * 40503 + np.arange(VOCAB) * 30011) % 65521
        rows: np.ndarray = (mixed / 65521.0).astype(np.float32) * 6
        return rows


def open_noise(way: dict[str, Any], **options: Any) -> Any:
    model = Noise(is_split=way["is_split"])
    return sim_engine(model, **way["carry"], **options)


async def ids_of(engine: Engine, prompt: list[int], **params: Any) -> list[int]:
    return list((await engine.generate(prompt_token_ids=prompt, **params)).token_ids)


@every_way
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_case_54_grammars_among_free_ones(way: dict[str, Any], temperature: float) -> None:
    """Twenty of each; every guided one matches in full, every free one is as alone."""
    prompts = [[1 + at, 2, 3] for at in range(20)]
    free = {"max_tokens": 10, "temperature": temperature, "seed": 5}
    async with open_noise({"carry": CARRIES["host"], "is_split": True}) as engine:
        alone = [await ids_of(engine, prompt, **free) for prompt in prompts]
    async with open_noise(way, max_num_seqs=16) as engine, no_leaks(engine):
        wanted = [
            ids_of(engine, prompt, **free, **more)
            for prompt in prompts
            for more in ({}, {"grammar": {"regex": REGEX}})
        ]
        told = await asyncio.gather(*wanted)
    assert told[::2] == alone
    for ids in told[1::2]:
        assert re.fullmatch(REGEX.encode(), bytes(ids)), bytes(ids)


@every_way
async def test_a_grammar_ends_its_request(way: dict[str, Any]) -> None:
    """With "stop" as soon as nothing can follow, or at an end id where it may end."""
    async with open_noise(way) as engine, no_leaks(engine):
        told = await engine.generate(prompt_token_ids=[1], grammar={"regex": REGEX})
        assert (told.finish_reason, len(told.token_ids)) == ("stop", 5)
        told = await engine.generate(prompt_token_ids=[1], grammar={"regex": "a*"}, max_tokens=99)
        text = bytes(token for token in told.token_ids if token < 256)
        assert set(text) <= {97}
        assert (told.finish_reason == "stop") == (told.token_ids[-1:] == (EOS,) or len(text) < 99)


@every_way
async def test_the_flow_says_what_a_grammar_cost(way: dict[str, Any]) -> None:
    """Fused programs wait (`grammar`); of split ones only the sampling does: no break."""
    async with open_noise(way) as engine, no_leaks(engine):
        await engine.generate(prompt_token_ids=[1], grammar={"regex": REGEX})
        await engine.wait_idle()
        stats = engine.stats()
        assert stats.breaks.get("grammar") is None if way["is_split"] else stats.breaks["grammar"]
        if way["carry"] is CARRIES["resident"]:
            assert (stats.async_steps > 0) == way["is_split"]
        before = stats.breaks
        free = await engine.generate(prompt_token_ids=[1], max_tokens=5, ignore_eos=True)
        assert len(free.token_ids) == 5
        after_it = engine.stats().breaks
        assert after_it.get("grammar") == before.get("grammar")


async def test_who_cannot_mask_refuses() -> None:
    for model in (Count(), Const(has_masks=False)):
        async with sim_engine(model) as engine:
            with pytest.raises(InvalidRequest, match=r"mask|logits") as caught:
                _ = engine.generate(prompt_token_ids=[1], grammar={"regex": "a"})
            assert caught.value.param == "grammar"
    for model in (Count(), Const(is_split=False)):
        async with sim_engine(model) as engine:
            with pytest.raises(InvalidRequest) as caught:
                _ = engine.generate(prompt_token_ids=[1], logits_processors=[lambda _, row: row])
            assert caught.value.param == "logits_processors"


@every_carry
async def test_case_55_bad_grammars(carry: dict[str, Any]) -> None:
    formats: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for schema in ({"type": 12}, "text", [1])
    ]
    async with open_noise({"carry": carry, "is_split": True}) as engine, no_leaks(engine):
        for bad in (*formats, {"json": {"type": 12}}, {"json": "text"}, {"regex": "("}):
            with pytest.raises(InvalidRequest) as caught:
                await engine.generate(prompt_token_ids=[1], grammar=bad)
            assert caught.value.param == "grammar"
            assert await ids_of(engine, [1], grammar={"choice": ["b"]}) == [98]


@every_way
async def test_case_94_one_among_thirty_one(way: dict[str, Any]) -> None:
    async with open_noise(way, max_num_seqs=32) as engine, no_leaks(engine):
        free = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
        alone = [await ids_of(engine, [at, 7], **free) for at in range(31)]
        told = await asyncio.gather(
            ids_of(engine, [9], grammar={"regex": "[ab]{12}"}),
            *(ids_of(engine, [at, 7], **free) for at in range(31)),
        )
        assert re.fullmatch(b"[ab]{12}", bytes(told[0]))
        assert told[1:] == alone
        assert engine.stats().steps > 0


# ── hooks ───────────────────────────────────────────────────────────────────────────────


@every_carry
async def test_hooks_see_all_tokens_and_change_logits(carry: dict[str, Any]) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def walk(prompt_ids: list[int], output_ids: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append((prompt_ids, output_ids))
        row = np.full_like(logits, -np.inf)
        row[10 + len(output_ids)] = 0.0
        return row

    def in_place(output_ids: list[int], logits: np.ndarray) -> None:
        logits[30] = np.float32(99.0)

    async with open_noise({"carry": carry, "is_split": True}) as engine, no_leaks(engine):
        told = await asyncio.gather(
            ids_of(engine, [1, 2], max_tokens=4, logits_processors=walk),
            ids_of(engine, [3], max_tokens=3, logits_processors=[in_place], temperature=0),
            ids_of(engine, [5], max_tokens=3, ignore_eos=True, temperature=0),
        )
        assert told[0] == [10, 11, 12, 13]
        assert told[1] == [30] * 3
        assert told[2] == await ids_of(engine, [5], max_tokens=3, ignore_eos=True, temperature=0)
        assert seen == [([1, 2], [10 + at for at in range(count)]) for count in range(4)]
        assert engine.stats().breaks["hook"].count >= 4


@every_carry
async def test_case_64_a_hook_raises_on_its_third_call(carry: dict[str, Any]) -> None:
    calls = 0

    def fails(output_ids: list[int], logits: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("third")
        return logits

    free = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    async with open_noise({"carry": carry, "is_split": True}) as engine, no_leaks(engine):
        alone = [await ids_of(engine, [at], **free) for at in range(7)]
        bad = engine.generate(prompt_token_ids=[1], logits_processors=[fails], **free)
        others = [ids_of(engine, [at], **free) for at in range(7)]
        with pytest.raises(InvalidRequest, match="third") as caught:
            await bad
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert caught.value.param == "logits_processors"
        with pytest.raises(InvalidRequest):
            _ = engine.generate(prompt_token_ids=[1], logits_processors=[len])
        assert await asyncio.gather(*others) == alone


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_a_hook_that_leaves_nothing_fails_its_request(value: float) -> None:
    async with open_noise({"carry": {}, "is_split": True}) as engine, no_leaks(engine):
        with pytest.raises(InvalidRequest, match="maximum"):
            await ids_of(engine, [1], logits_processors=lambda _, row: np.full_like(row, value))
        with pytest.raises(InvalidRequest, match="shape"):
            await ids_of(engine, [1], logits_processors=lambda _, row: row[:3])


async def test_rules_come_after_hooks_and_grammars_last() -> None:
    async with open_noise({"carry": {}, "is_split": True}) as engine, no_leaks(engine):
        told = await ids_of(
            engine,
            [1],
            max_tokens=3,
            temperature=0,
            logit_bias={98: 100.0},
            grammar={"regex": "a+"},
        )
        assert told == [97] * 3
        # What a grammar allows wins over what is banned.
        told = await ids_of(
            engine, [1], max_tokens=2, bad_words=["a"], grammar={"regex": "aa"}, temperature=0
        )
        assert told == [97, 97]
        told = await ids_of(engine, [1], min_tokens=9, grammar={"regex": "ab"}, temperature=0)
        assert told == [97, 98]


async def test_what_a_hook_leaves_wins_over_bans() -> None:
    def only_b(_: list[int], row: np.ndarray) -> np.ndarray:
        return np.where(np.arange(VOCAB) == 98, 0.0, -np.inf)

    async with open_noise({"carry": {}, "is_split": True}) as engine, no_leaks(engine):
        for temperature in (0.0, 1.0):
            told = await ids_of(
                engine, [1], max_tokens=2, temperature=temperature, logits_processors=only_b,
                allowed_token_ids=[97], bad_words=["b"],
            )  # fmt: skip
            assert told == [98, 98]


async def test_the_timeline_tells_how_long_the_device_waited_for_a_hook() -> None:
    def slow(_: list[int], row: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        return row

    device = SimDevice(latency=0.001)
    async with Engine(Noise(), device=device, timeline=True) as engine, no_leaks(engine):
        await ids_of(engine, [1], max_tokens=5, ignore_eos=True, logits_processors=slow)
        await engine.wait_idle()
        gaps = [one for one in engine.timeline.idle_gaps() if not one.is_rest]
        assert sum(one.seconds for one in gaps if one.reason == "hook") > 0.06
        metrics = engine.timeline.metrics()
        assert metrics.medians_s["program"] < 0.01
        assert metrics.idle_s > 0.06
        assert "idle" in engine.timeline.to_svg()


# ── between forward and sampling ────────────────────────────────────────────────────────


@every_way
async def test_aborts_and_closing_leave_no_half_step(way: dict[str, Any]) -> None:
    """At every point of a guided step, by count of the loop's turns."""
    for turns in range(0, 60, 3):
        async with open_noise(way) as engine:
            async with no_leaks(engine):
                guided = engine.generate(prompt_token_ids=[1], grammar={"regex": "[ab]{9}"})
                free = engine.generate(prompt_token_ids=[2], max_tokens=9, temperature=0)
                for _ in range(turns):
                    await asyncio.sleep(0)
                guided.cancel()
                assert len((await free).token_ids) <= 9
                assert (await guided).finish_reason in ("abort", "stop")
            left = engine.generate(prompt_token_ids=[1], grammar={"regex": "[ab]{99}"})
            for _ in range(turns):
                await asyncio.sleep(0)
        assert (await left).finish_reason == "abort"


@every_way
@pytest.mark.parametrize("in_sampling", [False, True])
async def test_a_fault_between_forward_and_sampling(way: dict[str, Any], in_sampling: bool) -> None:
    """It fails what it touches; the next request is served."""
    if in_sampling and not way["is_split"]:
        in_sampling = False
    device = SimDevice(faults=[Fault(3, 1003, in_sampling=in_sampling)])
    model = Noise(is_split=way["is_split"])
    async with Engine(model, device=device, **way["carry"]) as engine, no_leaks(engine):
        with pytest.raises(DeviceError):
            await ids_of(engine, [1], grammar={"regex": "[ab]{9}"})
        assert len(await ids_of(engine, [1], grammar={"regex": "[ab]{9}"})) == 9


async def test_a_hang_before_the_logits_arrive_is_noticed() -> None:
    device = SimDevice(faults=[Fault(3, "hang")])
    engine = Engine(Noise(), device=device, step_timeout_s=0.2, shutdown_s=0.2)
    async with engine:
        with pytest.raises(DeviceError, match="step_timeout_s"):
            await ids_of(engine, [1], max_tokens=9, logits_processors=lambda _, row: row)


async def test_no_step_waits_for_the_loops_own_executor() -> None:
    """An application may fill it with work that takes for ever."""
    loop, release = asyncio.get_running_loop(), threading.Event()
    pool = ThreadPoolExecutor(1)
    loop.set_default_executor(pool)
    async with open_noise({"carry": {}, "is_split": True}) as engine, no_leaks(engine):
        busy = loop.run_in_executor(None, release.wait)
        told = await ids_of(engine, [1], grammar={"regex": "[ab]{9}"})
        assert len(told) == 9
        assert await ids_of(engine, [1], max_tokens=2, logits_processors=lambda _, row: row)
        release.set()
        await busy


async def test_closing_does_not_wait_for_a_hook() -> None:
    started, release = threading.Event(), threading.Event()

    def waits(_: list[int], row: np.ndarray) -> np.ndarray:
        started.set()
        release.wait()
        return row

    engine = await Engine(Noise(), device="sim", shutdown_s=0.1).open()
    stream = engine.generate(prompt_token_ids=[1], logits_processors=waits)
    await asyncio.to_thread(started.wait)
    begun_s = time.monotonic()
    await engine.aclose()
    assert time.monotonic() - begun_s < 2.0
    assert (await stream).finish_reason == "abort"
    release.set()


@every_carry
async def test_many_ranks_sample_alike(carry: dict[str, Any]) -> None:
    way = {"carry": carry, "is_split": True}
    async with open_noise(way, num_ranks=2) as engine, no_leaks(engine):
        told = await ids_of(engine, [1], grammar={"regex": REGEX})
        assert re.fullmatch(REGEX.encode(), bytes(told))
        told = await ids_of(engine, [1], max_tokens=3, logits_processors=lambda _, row: -row)
        assert len(told) == 3
