"""What a slot keeps is its own request's: last token, parameters, through every change.

The device keeps last tokens with the carry `resident` alone, but what a request is answered must
be the same with every carry: as alone.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import DeviceError, FinishReason, OutOfMemory
from aneuron.models.sampling.host import draw, noise_of
from aneuron.testing import (
    Const,
    Count,
    Fault,
    Script,
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
    outcomes,
    patient,
    read,
    start,
    sum_reference,
    until,
)

if TYPE_CHECKING:
    from aneuron import Engine, TokenStream

Carry = dict[str, Any]  # engine options

# ── who was there before ────────────────────────────────────────────────────────────────


@every_carry
@pytest.mark.parametrize("tokens_read", [0, 1, 3])
async def test_case_88_a_prompt_of_one_token_starts_from_it(carry: Carry, tokens_read: int) -> None:
    """Its prefill looks like a decode; the slot's old owner has a step in flight."""
    async with (
        count_engine(latency=0.002, max_num_seqs=1, **carry) as engine,
        no_leaks(engine),
    ):
        for last in (500, 600, 700):
            old = start(engine, 10, 1000, request_id="x")
            await read(old, tokens_read)
            await until(lambda: engine.stats().in_flight_steps > 0)
            old.cancel()
            new = start(engine, last, 20, request_id="x")
            assert (await new).token_ids == after(last, 20)


@every_carry
@pytest.mark.parametrize("tokens_read", [0, 1, 3])
async def test_case_88_a_prompt_cached_but_for_one_token(carry: Carry, tokens_read: int) -> None:
    """It starts from that token, and reads what is cached: SUM of all of it."""
    head = [3, 1, 4, 1, 5, 9, 2, 6]
    async with (
        sim_engine(Sum(), latency=0.002, max_num_seqs=1, block_size=4, **carry) as engine,
        no_leaks(engine),
    ):
        await engine.generate(prompt_token_ids=[*head, 7], max_tokens=1)
        for last in (500, 600, 700):
            old = engine.generate(prompt_token_ids=[*head, 10], max_tokens=1000, request_id="x")
            await read(old, tokens_read)
            await until(lambda: engine.stats().in_flight_steps > 0)
            old.cancel()
            prompt = [*head, last]
            new = await engine.generate(prompt_token_ids=prompt, max_tokens=20, request_id="x")
            assert new.usage.cached_tokens == 8
            assert new.token_ids == sum_reference(prompt, 20)


@every_carry
async def test_a_slot_refilled_each_step_starts_from_its_own_prompt(carry: Carry) -> None:
    """Answers of one and two tokens, so that slots change hands all the time."""
    async with (
        count_engine(max_num_seqs=2, **carry) as engine,
        no_leaks(engine),
    ):
        streams = [start(engine, 1000 * n, 1 + n % 2) for n in range(1, 200)]
        for n, stream in enumerate(streams, 1):
            assert (await stream).token_ids == after(1000 * n, 1 + n % 2)


async def test_short_answers_never_break_the_flow() -> None:
    """Requests join and leave at almost every step: each decode is fed on the device."""
    async with (
        count_engine(latency=patient(), max_num_seqs=4, **CARRIES["resident"]) as engine,
        no_leaks(engine),
    ):
        rng = random.Random(8)
        lengths = [rng.randint(2, 14) for _ in range(60)]
        streams = [start(engine, 1000 * n, length) for n, length in enumerate(lengths)]
        for n, (length, stream) in enumerate(zip(lengths, streams, strict=True)):
            assert (await stream).token_ids == after(1000 * n, length)
        stats = engine.stats()
        assert stats.decode_async_share == 1.0
        assert stats.sync_fallback_steps == stats.steps - stats.decode_steps
        assert break_counts(engine).keys() <= {"drain"}


# ── case 95: parameters of the slot's old owner ─────────────────────────────────────────

LOGITS = [((7 * at) % 23) / 6 for at in range(23)]
OPPOSITES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 3.0, "seed": 1},
    {"temperature": 0.0, "seed": 2},
    {"temperature": 2.0, "seed": 3, "top_k": 2},
    {"temperature": 2.0, "seed": 4},
    {"temperature": 4.0, "seed": 5, "top_p": 0.3},
    {"temperature": 4.0, "seed": 6},
    {"temperature": 3.0, "seed": 7, "min_p": 0.8},
    {"temperature": 3.0, "seed": 7},
    {"temperature": 0.3, "seed": 8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
]


def asked_of(number: int) -> dict[str, Any]:
    return {
        "prompt_token_ids": [3] * (1 + number % 5),
        "max_tokens": 1 + number % 3,
        **OPPOSITES[number % len(OPPOSITES)],
    }


def alone(asked: list[dict[str, Any]]) -> list[list[int]]:
    """What CONST answers to each by itself, sampled without an engine."""
    return [
        [sampled_at(len(one["prompt_token_ids"]) + at, one) for at in range(one["max_tokens"])]
        for one in asked
    ]


def sampled_at(context_len: int, asked: dict[str, Any]) -> int:
    logits = np.full(258, -10.0, np.float32)
    logits[: len(LOGITS)] = LOGITS
    if not asked["temperature"]:
        return int(logits.argmax())
    filters = asked.get("top_k", 0), asked.get("top_p", 1.0), asked.get("min_p", 0.0)
    noise = noise_of(np.array([asked["seed"]]), np.array([context_len - 1]))
    return draw(logits, asked["temperature"], *filters, float(noise[0]))


@every_carry
@pytest.mark.parametrize("max_num_seqs", [1, 3])
async def test_case_95_a_slots_next_owner_has_opposite_parameters(
    carry: Carry, max_num_seqs: int
) -> None:
    asked = [asked_of(number) for number in range(40)]
    expected = alone(asked)
    assert len({tuple(ids) for ids in expected}) > 12, "parameters make a difference"
    async with (
        sim_engine(Const(LOGITS), max_num_seqs=max_num_seqs, **carry) as engine,
        no_leaks(engine),
    ):
        streams = [engine.generate(**one) for one in asked]
        assert [(await stream).token_ids for stream in streams] == expected


@every_carry
async def test_case_95_preempted_and_resumed_with_a_seed(carry: Carry) -> None:
    """The noise goes on at its position, in another slot and after others used it."""
    asked = [
        {"prompt_token_ids": [3] * (4 + number), "max_tokens": 24,
         **OPPOSITES[(3 * number + 1) % len(OPPOSITES)]}
        for number in range(6)
    ]  # fmt: skip
    expected = alone(asked)
    async with (
        sim_engine(
            Const(LOGITS), block_size=4, num_kv_blocks=14, max_num_seqs=4, **carry
        ) as engine,
        no_leaks(engine),
    ):
        streams = [engine.generate(**one) for one in asked]
        assert [(await stream).token_ids for stream in streams] == expected
        assert engine.stats().preemptions >= 1


@every_carry
async def test_a_resumed_request_has_its_old_prompt_length(carry: Carry) -> None:
    """SCRIPT counts from the prompt's end: tokens given before are not part of it."""
    script = bytes(range(65, 65 + 26))
    async with (
        sim_engine(
            Script(script), block_size=4, num_kv_blocks=14, max_num_seqs=4, **carry
        ) as engine,
        no_leaks(engine),
    ):
        streams = [engine.generate(prompt_token_ids=[3] * (4 + number)) for number in range(6)]
        for stream in streams:
            answer = await stream
            assert answer.token_ids[:-1] == [*script]
            assert answer.finish_reason is FinishReason.STOP
        assert engine.stats().preemptions >= 1


# ── faults ──────────────────────────────────────────────────────────────────────────────

STATUSES = pytest.mark.parametrize(("status", "kind"), [(1003, DeviceError), (4, OutOfMemory)])


def three(engine: Engine) -> list[TokenStream]:
    """A and B fill the first prefill, C has one of its own.

    Steps: 1 prefill A and B, 2 decode A and B, 3 prefill C, 4 decode all three.
    """
    return [
        engine.generate(prompt_token_ids=[last] * 16, max_tokens=30) for last in (1000, 2000, 3000)
    ]


@every_carry
@STATUSES
@pytest.mark.parametrize(
    ("step", "failing"),
    [(1, {0, 1}), (2, {0, 1}), (3, {2}), (4, {0, 1, 2}), (9, {0, 1, 2})],
)
async def test_a_fault_fails_the_rows_of_its_step_alone(
    step: int, failing: set[int], status: int, kind: type[DeviceError], carry: Carry
) -> None:
    """Who is in a step behind it and not in it goes on exact; slots are reset."""
    async with count_engine(
        latency=patient(), faults=[Fault(step=step, status=status)],
        max_num_batched_tokens=32, max_num_seqs=3, **carry,
    ) as engine:  # fmt: skip
        answers = await outcomes(three(engine))
        for number, answer in enumerate(answers):
            if number in failing:
                assert type(answer) is kind
                assert str(status) in str(answer)
            else:
                assert exact(answer, 1000 * (number + 1), 30), answer
        await assert_serves(engine)


@every_carry
@STATUSES
@pytest.mark.parametrize("step", [1, 2, 3, 4])
async def test_slots_are_reset_after_a_fault(
    step: int, status: int, kind: type[DeviceError], carry: Carry
) -> None:
    """Hot rows fail, the launch that admits them too: their slots' next owners are as alone."""
    asked = [asked_of(number) for number in range(20)]
    expected = alone(asked)
    async with sim_engine(
        Const(LOGITS), faults=[Fault(step=step, status=status)], max_num_seqs=2, **carry
    ) as engine:
        first = [
            engine.generate(prompt_token_ids=[5], max_tokens=9, **OPPOSITES[number])
            for number in (3, 5)
        ]
        assert {type(one) for one in await outcomes(first)} == {kind}
        streams = [engine.generate(**one) for one in asked]
        assert [(await stream).token_ids for stream in streams] == expected
        await engine.wait_idle()
        assert_idle(engine)


# ── prompts in chunks ───────────────────────────────────────────────────────────────────


@every_carry
async def test_a_chunk_leaves_every_other_slot_alone(carry: Carry) -> None:
    """The token of a chunk that is not the last counts for nobody."""
    async with (
        sim_engine(
            Sum(), max_num_batched_tokens=5, max_num_seqs=3, block_size=4, **carry
        ) as engine,
        no_leaks(engine),
    ):
        prompts = [[n, *range(3 * n)] for n in range(1, 9)]
        streams = [engine.generate(prompt_token_ids=prompt, max_tokens=6) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert (await stream).token_ids == sum_reference(prompt, 6)


# ── rows that nobody asked for ──────────────────────────────────────────────────────────


@every_carry
@pytest.mark.parametrize("buckets", [[8], [1, 2, 4, 8], []])
async def test_padding_rows_touch_no_slot(carry: Carry, buckets: list[int]) -> None:
    """One to five requests in a bucket of eight: padding has the spare slot's token."""
    async with (
        sim_engine(Sum(), num_seqs_buckets=buckets, max_num_seqs=8, **carry) as engine,
        no_leaks(engine),
    ):
        for number in range(1, 6):
            prompts = [[n, 3 * n] for n in range(1, number + 1)]
            streams = [
                engine.generate(prompt_token_ids=prompt, max_tokens=3 + n)
                for n, prompt in enumerate(prompts)
            ]
            for n, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
                assert (await stream).token_ids == sum_reference(prompt, 3 + n)


@every_carry
async def test_a_surplus_row_writes_into_no_other_slot(carry: Carry) -> None:
    """A ends by an end id with a step in flight; B and C go on beside it and after it."""
    async with (
        sim_engine(
            Count(eos_token_ids=(257,)), latency=patient(), max_num_seqs=2, **carry
        ) as engine,
        no_leaks(engine),
    ):
        beside = start(engine, 1000, 60)
        for number in range(10):
            assert (await start(engine, 252 + number % 4, 50)).token_ids[-1] == 257
        assert (await beside).token_ids == after(1000, 60)
        if carry is not CARRIES["host"]:
            assert device_of(engine).num_rows > 60 + sum(257 - 252 - n % 4 for n in range(10))
