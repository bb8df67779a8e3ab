"""Many prompts in one call: with several choices each, and where the engine has no room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aneuron import AneuronError, InternalError, Overloaded
from aneuron.stream.many import CompletionStream
from aneuron.testing import Const, Count, count_engine, no_leaks, sim_engine
from tests.support import after, every_carry, start
from tests.test_choices_ends import BadTokenizer

if TYPE_CHECKING:
    from aneuron import Completion, Engine, TokenStream


def prompts(count: int) -> list[list[int]]:
    return [[1000 * n] for n in range(count)]


async def collect(many: CompletionStream) -> tuple[dict[int, Completion], list[AneuronError]]:
    answers: dict[int, Completion] = {}
    errors: list[AneuronError] = []
    while True:
        try:
            index, answer = await anext(many)
        except StopAsyncIteration:
            return answers, errors
        except AneuronError as error:
            errors.append(error)
        else:
            assert index not in answers
            answers[index] = answer


@every_carry
@pytest.mark.parametrize("max_num_seqs", [3, 8])
async def test_generate_many_with_choices(max_num_seqs: int, carry: dict[str, Any]) -> None:
    """Each prompt's answer comes once, whole, with all its choices."""
    async with count_engine(max_num_seqs=max_num_seqs, **carry) as engine, no_leaks(engine):
        answers, errors = await collect(engine.generate_many(prompts(25), max_tokens=6, n=3))
        assert not errors
        assert sorted(answers) == list(range(25))
        for index, answer in answers.items():
            assert [one.token_ids for one in answer.choices] == [after(1000 * index, 6)] * 3


async def test_generate_many_with_choices_that_end_at_different_times() -> None:
    """An answer comes when its last choice has ended, and is whole then."""
    model = Const([3.0, 3.0, 1.0], eos_token_ids=(2,))
    async with sim_engine(model, latency=0.0005, max_num_seqs=8) as engine, no_leaks(engine):
        async for _, answer in engine.generate_many(["?"] * 20, temperature=1.0, n=4):
            assert [one.finish_reason for one in answer.choices] == ["stop"] * 4
            assert [one.token_ids[-1] for one in answer.choices] == [2] * 4


@pytest.mark.parametrize("options", [{}, {"stop": "x"}], ids=repr)
async def test_generate_many_where_a_choice_fails(options: dict[str, Any]) -> None:
    """It is that prompt's error, once; its other choices end, and other prompts are answered."""
    async with (
        sim_engine(Count(), tokenizer=BadTokenizer(), max_num_seqs=8) as engine,
        no_leaks(engine),
    ):
        places = [[5] if n % 4 == 1 else [1000 * n] for n in range(16)]
        many = engine.generate_many(places, max_tokens=6, n=2, **options)
        answers, errors = await collect(many)
        assert sorted(answers) == [n for n in range(16) if n % 4 != 1]
        assert [type(error) for error in errors] == [InternalError] * 4
        notes = sorted(int(error.__notes__[0].split()[1]) for error in errors)
        assert notes == [1, 5, 9, 13]


@every_carry
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_waiting", [0, 1])
async def test_generate_many_waits_for_room(
    n: int, max_waiting: int, carry: dict[str, Any]
) -> None:
    """The engine takes fewer than the window: no prompt is refused, and each is drawn once."""
    async with (
        count_engine(max_num_seqs=2, max_waiting=max_waiting, **carry) as engine,
        no_leaks(engine),
    ):
        answers, errors = await collect(engine.generate_many(prompts(30), max_tokens=4, n=n))
        assert not errors
        assert {index: one.token_ids for index, one in answers.items()} == {
            index: after(1000 * index, 4) for index in range(30)
        }


async def test_generate_many_beside_others_that_fill_the_engine() -> None:
    """While ours runs, the next waits; with all places taken by others, it is refused."""
    async with (
        count_engine(max_num_seqs=2, max_waiting=0, latency=0.0005) as engine,
        no_leaks(engine),
    ):
        other = start(engine, 10, 100_000)
        answers, errors = await collect(engine.generate_many(prompts(10), max_tokens=3))
        assert not errors
        assert sorted(answers) == list(range(10))
        both = start(engine, 10, 100_000)
        answers, errors = await collect(engine.generate_many(prompts(10), max_tokens=3))
        assert not answers
        assert [type(error) for error in errors] == [Overloaded] * 10
        assert [error.__notes__ for error in errors] == [
            [f"prompt {index} of generate_many"] for index in range(10)
        ]
        other.cancel()
        both.cancel()


def refused_at(engine: Engine, *calls: int) -> tuple[list[Any], Any]:
    """A way to submit that has no room at these calls; and the prompts it was called with."""
    told: list[Any] = []

    def submit(prompt: Any) -> TokenStream:
        told.append(prompt)
        if len(told) - 1 in calls:
            raise Overloaded("full", retry_after_s=1.0)
        return engine.generate(prompt_token_ids=prompt, max_tokens=3)

    return told, submit


async def test_generate_many_fills_its_window_again() -> None:
    """A prompt that was held back goes first, and then those that its window lacks."""
    async with count_engine() as engine, no_leaks(engine):
        told, submit = refused_at(engine, 2, 3)
        many = CompletionStream(prompts(9), submit, engine.consumers, window=4)
        assert told == [[0], [1000], [2000]]
        await anext(many)
        assert told == [[0], [1000], [2000], [2000]], "held back twice"
        await anext(many)
        assert told[4:] == [[2000], [3000], [4000], [5000]]
        answers, errors = await collect(many)
        assert (len(answers), errors) == (7, [])


async def test_generate_many_cancelled_with_a_prompt_held_back() -> None:
    """It is not submitted any more."""
    async with count_engine(max_num_seqs=1, max_waiting=0) as engine, no_leaks(engine):
        many = engine.generate_many(prompts(5), max_tokens=3)
        await anext(many)
        await many.aclose()
        assert await collect(many) == ({}, [])
        assert engine.stats().prompt_tokens <= 2
