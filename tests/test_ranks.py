"""Ranks: every step runs on all of them, one gives the tokens, any one can fail it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from aneuron import ConfigError, DeviceError, DeviceLost, Engine, LaunchFailed, OutOfMemory
from aneuron.device.thread import ThreadDevice
from aneuron.testing import (
    ByteTokenizer,
    Count,
    Fault,
    SimDevice,
    Sum,
    assert_idle,
    count_engine,
    no_leaks,
    sim_engine,
)
from tests.support import (
    CARRIES,
    after,
    assert_serves,
    break_counts,
    device_of,
    every_carry,
    exact,
    outcome,
    outcomes,
    patient,
    recorded,
    start,
    sum_reference,
    until,
)

if TYPE_CHECKING:
    from pathlib import Path

Carry = dict[str, Any]  # engine options

some_ranks = pytest.mark.parametrize("num_ranks", [2, 3])


class Lone(ThreadDevice):
    """A device that has no siblings."""

    name = "lone"

    def memory_budget(self) -> int:
        return 2**20


async def test_a_device_without_siblings_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"lone has no sibling .* `_sibling\(\)`") as caught:
        await Engine("sim:count", device=Lone(), num_ranks=2).open()
    assert caught.value.param == "num_ranks"


def steps_by_rank(engine: Engine) -> list[int]:
    return [device.num_steps for device in device_of(engine).ranks]


def reads_by_rank(engine: Engine) -> list[int]:
    return [device.num_reads for device in device_of(engine).ranks]


# ── every rank runs every step ──────────────────────────────────────────────────────────


@every_carry
@some_ranks
async def test_count_is_exact_while_requests_come_and_go(carry: Carry, num_ranks: int) -> None:
    async with (
        count_engine(latency=0.0005, num_ranks=num_ranks, max_num_seqs=3, **carry) as engine,
        no_leaks(engine),
    ):
        streams = [start(engine, 1000 * n, 3 + 5 * (n % 4)) for n in range(1, 13)]
        for n, stream in enumerate(streams, 1):
            assert (await stream).token_ids == after(1000 * n, 3 + 5 * (n % 4))
        await engine.wait_idle()
        assert len(device_of(engine).ranks) == num_ranks
        assert steps_by_rank(engine) == [engine.stats().steps] * num_ranks
        rows = {device.num_rows for device in device_of(engine).ranks}
        assert len(rows) == 1, "surplus rows are launched by all ranks alike"


@every_carry
@some_ranks
async def test_every_ranks_own_tokens_are_right(carry: Carry, num_ranks: int) -> None:
    """Each rank carries its own tokens and has its own cache: every one of them gives SUM."""
    model, told = recorded(Sum)
    prompts = [[31 * n + at for at in range(2 * n)] for n in range(1, 6)]
    async with (
        sim_engine(
            model, latency=patient(), num_ranks=num_ranks, max_num_seqs=3, block_size=4,
            **carry,
        ) as engine,
        no_leaks(engine),
    ):  # fmt: skip
        streams = [
            engine.generate(prompt_token_ids=prompt, max_tokens=4 * number)
            for number, prompt in enumerate(prompts, 1)
        ]
        for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True), 1):
            assert (await stream).token_ids == sum_reference(prompt, 4 * number)
        await engine.wait_idle()
        assert len(told) == num_ranks
        assert len(told[0]) == engine.stats().steps
        assert all(one == told[0] for one in told)


@every_carry
async def test_preempted_on_every_rank(carry: Carry) -> None:
    async with (
        sim_engine(
            Sum(), latency=0.0002, num_ranks=2, block_size=4, num_kv_blocks=14, **carry
        ) as engine,
        no_leaks(engine),
    ):
        prompts = [[17 * n + at for at in range(5 + n)] for n in range(6)]
        answers = await asyncio.gather(
            *(engine.generate(prompt_token_ids=prompt, max_tokens=30) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == sum_reference(prompt, 30)
        assert engine.stats().preemptions >= 1


@every_carry
async def test_ranks_are_counted_once(carry: Carry) -> None:
    """Breaks and steps are those of one rank: all do alike."""
    counts = []
    for num_ranks in (1, 3):
        async with (
            count_engine(latency=patient(), num_ranks=num_ranks, **carry) as engine,
            no_leaks(engine),
        ):
            await asyncio.gather(start(engine, 100, 4), start(engine, 200, 9))
            await engine.wait_idle()
            stats = engine.stats()
            steps = stats.steps, stats.async_steps, stats.sync_fallback_steps
            counts.append((steps, break_counts(engine)))
    assert counts[0] == counts[1]
    if carry is CARRIES["handoff"]:
        assert counts[0][1] == {"composition_changed": 1}


# ── what is copied ──────────────────────────────────────────────────────────────────────


@some_ranks
async def test_resident_copies_the_output_ranks_tokens_alone(num_ranks: int) -> None:
    async with (
        count_engine(latency=0.0005, num_ranks=num_ranks, max_num_seqs=3) as engine,
        no_leaks(engine),
    ):
        await asyncio.gather(*(start(engine, 1000 * n, 2 + n) for n in range(1, 9)))
        await engine.wait_idle()
        assert engine.stats().breaks.keys() <= {"drain"}
        assert reads_by_rank(engine) == [engine.stats().steps] + [0] * (num_ranks - 1)


@some_ranks
async def test_handoff_copies_the_others_tokens_only_where_it_breaks(num_ranks: int) -> None:
    async with (
        count_engine(latency=patient(), num_ranks=num_ranks, **CARRIES["handoff"]) as engine,
        no_leaks(engine),
    ):
        first, second = start(engine, 100, 4), start(engine, 200, 12)
        await asyncio.gather(first, second)
        await engine.wait_idle()
        assert break_counts(engine) == {"composition_changed": 1}
        reads = reads_by_rank(engine)
        assert reads[0] == engine.stats().steps == 12
        # The break asks for the step before it, and for what that one was fed with, if
        # nobody has let go of it yet.
        assert all(1 <= number <= 2 for number in reads[1:])


# ── skew ────────────────────────────────────────────────────────────────────────────────


@every_carry
@pytest.mark.parametrize("skew_s", [0.002, lambda rank: 0.0015 * (rank % 2)])
async def test_ranks_that_end_late_change_no_token(carry: Carry, skew_s: Any) -> None:
    device = SimDevice(latency=0.001, skew_s=skew_s)
    async with (
        Engine(Sum(), device=device, num_ranks=3, max_num_seqs=3, **carry) as engine,
        no_leaks(engine),
    ):
        prompts = [[7 * n, n] for n in range(1, 8)]
        streams = [
            engine.generate(prompt_token_ids=prompt, max_tokens=2 + number)
            for number, prompt in enumerate(prompts)
        ]
        for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            assert (await stream).token_ids == sum_reference(prompt, 2 + number)


@every_carry
async def test_a_step_has_ended_when_its_last_rank_has(carry: Carry) -> None:
    """Slots, blocks and buffers are free only then: tokens wait for the slowest rank."""
    late_s = 0.03
    device = SimDevice(skew_s=lambda rank: late_s * rank)
    async with Engine(Count(), device=device, num_ranks=2, **carry) as engine, no_leaks(engine):
        started_s = time.monotonic()
        assert (await start(engine, 10, 1)).token_ids == [11]
        assert time.monotonic() - started_s >= late_s


# ── faults of another rank ──────────────────────────────────────────────────────────────

ROW_FAULTS = [(2, LaunchFailed), (4, OutOfMemory), (1003, DeviceError), (1006, DeviceError)]


@every_carry
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("status", "kind"), ROW_FAULTS)
async def test_a_fault_on_any_rank_fails_the_rows_of_that_step(
    status: int, kind: type[DeviceError], rank: int, carry: Carry
) -> None:
    """B's prefill fails on one rank while A decodes: B alone fails, and life goes on."""
    async with count_engine(
        faults=[Fault(step=3, status=status, rank=rank)], num_ranks=3,
        max_num_batched_tokens=16, **carry,
    ) as engine:  # fmt: skip
        # Steps: 1 prefill A, 2 decode A, 3 prefill B, 4 decode both.
        streams = [
            engine.generate(prompt_token_ids=[last] * 16, max_tokens=40) for last in (100, 200)
        ]
        first, second = await outcomes(streams)
        assert exact(first, 100), first
        assert type(second) is kind
        assert str(status) in str(second)
        await assert_serves(engine)


@every_carry
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("step", [2, 3, 5, 8])
async def test_a_fault_on_any_rank_at_any_step(step: int, rank: int, carry: Carry) -> None:
    """Also where a step fed by the failed one is in flight: exact, or the error."""
    async with count_engine(
        faults=[Fault(step=step, status=1003, rank=rank)], num_ranks=3, max_num_seqs=3, **carry
    ) as engine:
        streams = [start(engine, 100 * n, n + 2) for n in range(1, 7)]
        answers = await outcomes(streams)
        assert any(isinstance(answer, DeviceError) for answer in answers)
        for n, answer in enumerate(answers, 1):
            assert type(answer) is DeviceError or exact(answer, 100 * n, n + 2), answer
        await assert_serves(engine)


@every_carry
async def test_a_full_queue_of_another_rank_fails_nobody(carry: Carry) -> None:
    faults = [Fault(step=step, status=7, rank=1) for step in (1, 3)]
    async with (
        count_engine(faults=faults, num_ranks=2, latency=0.001, **carry) as engine,
        no_leaks(engine),
    ):
        for answer in await outcomes([start(engine, 100, 40), start(engine, 100, 40)]):
            assert exact(answer, 100)
        assert device_of(engine).ranks[1].num_queue_full == 2


@every_carry
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_lost_rank_is_a_lost_engine(rank: int, carry: Carry) -> None:
    async with count_engine(
        faults=[Fault(step=6, status=101, rank=rank)], num_ranks=2, max_num_seqs=3, **carry
    ) as engine:
        started_s = time.monotonic()
        for error in await outcomes([start(engine, 100 * n) for n in range(1, 6)]):
            assert type(error) is DeviceLost
            assert "101" in str(error.__cause__)
        assert time.monotonic() - started_s < 1
        with pytest.raises(DeviceLost):
            _ = start(engine, 1)
        await engine.aclose()
        assert_idle(engine)


async def test_a_lost_rank_is_told_before_another_ones_rows() -> None:
    """The same step fails on the output rank and loses another one: the engine is lost."""
    faults = [Fault(step=4, status=1003), Fault(step=4, status=101, rank=1)]
    async with count_engine(faults=faults, num_ranks=2) as engine:
        assert type(await outcome(start(engine, 10))) is DeviceLost
        with pytest.raises(DeviceLost):
            _ = start(engine, 1)


@every_carry
async def test_a_rank_that_hangs_is_lost_in_time(carry: Carry) -> None:
    async with count_engine(
        faults=[Fault(step=5, status="hang", rank=1)], num_ranks=2, step_timeout_s=0.3,
        shutdown_s=0.2, **carry,
    ) as engine:  # fmt: skip
        started_s = time.monotonic()
        answers = await outcomes([start(engine, 1), start(engine, 2)])
        assert {type(error) for error in answers} == {DeviceLost}
        assert "step_timeout_s" in str(answers[0])
        assert 0.25 < time.monotonic() - started_s < 1


@every_carry
async def test_closing_while_a_rank_hangs(carry: Carry) -> None:
    async with count_engine(
        faults=[Fault(step=5, status="hang", rank=1)], num_ranks=2, step_timeout_s=60,
        shutdown_s=0.3, **carry,
    ) as engine:  # fmt: skip
        stream = start(engine, 10)
        assert [(await anext(stream)).token_id for _ in range(4)] == after(10, 4)
        await until(lambda: device_of(engine).ranks[1].num_steps == 5)
        started_s = time.monotonic()
        await engine.aclose()
        assert time.monotonic() - started_s < 0.3 + 0.5
        assert (await stream).token_ids == after(10, 4)
    await engine.open()
    await assert_serves(engine)
    await engine.aclose()


# ── opening ─────────────────────────────────────────────────────────────────────────────


async def test_all_devices_are_opened_or_none() -> None:
    """A rank's device is in use: the engine refuses, and lets go of the ranks before it."""
    device = SimDevice()
    busy = device.for_rank(1, 2)
    busy.start(asyncio.get_running_loop())
    with pytest.raises(ConfigError):
        await Engine(Count(), device=device, num_ranks=2).open()
    await busy.close()
    async with Engine(Count(), device=device, num_ranks=2) as engine:
        await assert_serves(engine)


@pytest.mark.parametrize("num_ranks", [0, -1, 1.5, True])
def test_a_wrong_number_of_ranks(num_ranks: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine("sim:count", num_ranks=num_ranks)
    assert caught.value.param == "num_ranks"


# ── on the processor ────────────────────────────────────────────────────────────────────


@pytest.mark.tiny
@pytest.mark.timeout(120)
async def test_two_ranks_on_the_processor_give_the_ids_of_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    await asyncio.to_thread(transformers.LlamaForCausalLM(config).save_pretrained, tmp_path)
    asked: list[dict[str, Any]] = [
        {"prompt_token_ids": [n, 2 * n, 3], "max_tokens": 4 + 3 * n, "seed": n,
         "temperature": 0.9 * (n % 2)}
        for n in range(1, 7)
    ]  # fmt: skip
    answers: list[list[list[int]]] = []
    for options in ({"num_ranks": 1, **CARRIES["host"]}, *CARRIES.values()):
        async with (
            Engine(
                str(tmp_path),
                **{
                    "num_ranks": 2, "dtype": "float32", "tokenizer": ByteTokenizer(),
                    "max_num_seqs": 3, "num_kv_blocks": 64, **options,
                },
            ) as engine,
            no_leaks(engine),
        ):  # fmt: skip
            streams = [engine.generate(**one) for one in asked]
            answers.append([(await stream).token_ids for stream in streams])
            assert len(engine.device.ranks) == options.get("num_ranks", 2)  # type: ignore[attr-defined]
    assert all(one == answers[0] for one in answers[1:])
    assert len({tuple(ids[:4]) for ids in answers[0]}) > 1


async def test_a_break_lasts_until_the_last_rank_has_its_tokens() -> None:
    """The step loop waits for all ranks at once; the time counts as the break's."""
    device = SimDevice(latency=0.004, skew_s=0.012)
    options: dict[str, Any] = {"token_carry": "handoff", "timeline": True, "num_ranks": 2}
    async with Engine(Count(), device=device, **options) as engine:
        streams = [
            engine.generate(prompt_token_ids=[100 * n], max_tokens=3 * n) for n in range(1, 5)
        ]
        await asyncio.gather(*streams)
        records = [one for one in engine.timeline.steps if one.breaks]
        assert records
        waited_s = 0.0
        for record in records:
            # What is left before the inputs are ready is work, not a wait for another rank.
            assert record.prepared_s - record.breaks[-1].end_s < 0.004
            waited_s += sum(one.end_s - one.start_s for one in record.breaks)
        told_s = sum(one.seconds for one in engine.stats().breaks.values())
        assert told_s == pytest.approx(waited_s)
        # Rank 1 ends 12 ms after rank 0, and the flow stands still for it.
        assert waited_s > 0.008 * len(records)
