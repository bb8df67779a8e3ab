"""Many prompts in one call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import AneuronError, InvalidRequest
from aneuron.testing import assert_idle, count_engine, no_leaks
from tests.support import STEP_S, after, assert_idle_soon, both_schedulings

if TYPE_CHECKING:
    from collections.abc import Iterator


async def test_generate_many() -> None:
    """Answers come as they finish, each with its prompt's index, all of them, texts and ids."""
    async with count_engine(max_num_seqs=4) as engine, no_leaks(engine):
        prompts: list[Any] = [[1000 * n] for n in range(29)] + ["A"]
        answers = {}
        async for index, answer in engine.generate_many(prompts, max_tokens=7):
            assert index not in answers
            answers[index] = answer.token_ids
        assert sorted(answers) == list(range(30))
        assert all(answers[n] == after(1000 * n, 7) for n in range(29))
        assert answers[29] == after(65, 7)
        assert [item async for item in engine.generate_many([])] == []


async def test_generate_many_draws_prompts_as_it_goes() -> None:
    """The window is bounded: an endless iterator of prompts is drawn from little by little."""
    drawn = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal drawn
        while True:
            drawn += 1
            yield [drawn]

    async with count_engine(max_num_seqs=2) as engine:
        async with engine.generate_many(prompts(), max_tokens=2) as answers:
            for count in range(1, 20):
                await anext(answers)
                assert drawn <= count + 2 * 2
        assert_idle(engine)


@pytest.mark.parametrize("bad", [[-5], "", [1] * 100])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
async def test_generate_many_with_bad_prompts(bad: Any, max_num_seqs: int) -> None:
    """Bad prompts further on: each raises its error, with a note; all others are answered."""
    prompts: list[Any] = [[100 * n] for n in range(40)]
    places = (17, 20, 21, 22, 39)
    for place in places:
        prompts[place] = bad
    async with (
        count_engine(max_num_seqs=max_num_seqs, max_model_len=64) as engine,
        no_leaks(engine),
    ):
        many = engine.generate_many(prompts, max_tokens=3)
        answers, notes = {}, []
        indices: list[int | None] = []
        while True:
            try:
                index, answer = await anext(many)
            except StopAsyncIteration:
                break
            except AneuronError as error:
                notes += error.__notes__
                indices.append(error.prompt_index)
            else:
                answers[index] = answer.token_ids
        assert sorted(notes) == sorted(f"prompt {n} of generate_many" for n in places)
        assert notes == [f"prompt {index} of generate_many" for index in indices]
        assert answers == {n: after(100 * n, 3) for n in range(40) if n not in places}


def lengths() -> list[list[int]]:
    return [[1000 * n] for n in range(1, 21)]


async def test_generate_many_closed_early() -> None:
    """`async with` left after 2 answers: what ran is cancelled and its blocks are free."""
    async with count_engine(latency=0.002, max_num_seqs=4) as engine:
        async with engine.generate_many(lengths(), max_tokens=5) as answers:
            for _ in range(2):
                index, answer = await anext(answers)
                assert answer.token_ids[0] == 1000 * (index + 1) + 1
        assert_idle(engine)
        with pytest.raises(StopAsyncIteration):
            await anext(answers)
        async for _ in engine.generate_many(lengths(), max_tokens=5):
            break
        await assert_idle_soon(engine)


@pytest.mark.parametrize("where", ["waiting", "body"])
async def test_generate_many_cancelled(where: str) -> None:
    """Its consumer is cancelled, waiting or in the body: everything ends within 3 steps."""
    async with count_engine(latency=STEP_S, max_num_seqs=4) as engine:
        reached = asyncio.Event()

        async def consume() -> None:
            answers = engine.generate_many(lengths(), max_tokens=5)  # the frame keeps it
            async for _ in answers:
                reached.set()
                if where == "body":
                    await asyncio.sleep(60)

        task = asyncio.create_task(consume())
        await reached.wait()
        await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        await assert_idle_soon(engine)
        assert caught.traceback


# ── its one consumer ────────────────────────────────────────────────────────────────────


async def collected(answers: Any) -> list[int]:
    return [index async for index, _ in answers]


@both_schedulings
@pytest.mark.parametrize("how", ["cancel", "aclose"])
async def test_generate_many_ended_by_another_task(how: str, async_scheduling: bool) -> None:
    """cancel() or aclose() while the consumer waits: its loop ends by itself, all is free."""
    async with count_engine(
        latency=STEP_S, max_num_seqs=2, async_scheduling=async_scheduling
    ) as engine:
        answers = engine.generate_many(lengths(), max_tokens=8)
        task = asyncio.create_task(collected(answers))
        async with asyncio.timeout(5):
            while engine.stats().generation_tokens < 5:
                await asyncio.sleep(0.001)
            if how == "cancel":
                answers.cancel()
                answers.cancel()
            else:
                await answers.aclose()
                assert_idle(engine)
            assert len(await task) < 20
        await assert_idle_soon(engine)
        assert await collected(answers) == []


async def test_generate_many_has_one_consumer() -> None:
    """A second task that iterates meanwhile: RuntimeError for it, the first gets all."""
    async with count_engine(latency=0.002, max_num_seqs=2) as engine, no_leaks(engine):
        answers = engine.generate_many(lengths(), max_tokens=3)
        task = asyncio.create_task(collected(answers))
        await asyncio.sleep(0)
        for _ in range(3):
            async with asyncio.timeout(5):
                with pytest.raises(RuntimeError, match="one consumer"):
                    await anext(answers)
            await asyncio.sleep(0.003)
        assert sorted(await task) == list(range(20))


@pytest.mark.parametrize("max_num_seqs", [1, 8])
@pytest.mark.parametrize("good", [0, 1, 2, 3, 7])
async def test_generate_many_whose_prompts_raise(good: int, max_num_seqs: int) -> None:
    """The caller's iterator raises: it comes out once, and every answer before it is there."""

    class Bug(Exception):
        pass

    def prompts() -> Iterator[list[int]]:
        yield from lengths()[:good]
        raise Bug

    async with (
        count_engine(latency=0.001, max_num_seqs=max_num_seqs) as engine,
        no_leaks(engine),
    ):
        many = engine.generate_many(prompts(), max_tokens=3)
        answers: dict[int, list[int]] = {}
        num_bugs = 0
        async with asyncio.timeout(5):
            while True:
                try:
                    index, answer = await anext(many)
                except Bug:
                    num_bugs += 1
                except StopAsyncIteration:
                    break
                else:
                    answers[index] = answer.token_ids
        assert num_bugs == 1
        assert answers == {n: after(1000 * (n + 1), 3) for n in range(good)}


@pytest.mark.parametrize("prompts", ["abc", b"abc", {}, {"a": 1}, 5, None], ids=repr)
async def test_generate_many_takes_an_iterable_of_prompts(prompts: Any) -> None:
    """A text, a dict or no iterable at all is refused at the call, by name."""
    async with count_engine() as engine, no_leaks(engine):
        with pytest.raises(InvalidRequest) as caught:
            engine.generate_many(prompts)
        assert caught.value.param == "prompts"
        assert engine.stats().steps == 0
