"""How requests of several choices end: aborted, stopped, dropped, failed; one choice or all."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import ContextTooLong, FinishReason, InternalError, LaunchFailed
from aneuron.testing import (
    ByteTokenizer,
    Const,
    Fault,
    Script,
    assert_idle,
    count_engine,
    no_leaks,
    sim_engine,
)
from tests.support import (
    after,
    assert_exact,
    await_it,
    every_carry,
    items_of,
    outcome,
    patient,
    start,
    until,
)
from tests.test_choices import COUNTED, by_choice, ids_of

if TYPE_CHECKING:
    from aneuron import Token, TokenStream


@every_carry
@pytest.mark.parametrize("how", ["cancel", "abort", "deadline"])
async def test_aborted_in_the_middle(how: str, carry: dict[str, Any]) -> None:
    """One last item of each choice; the completion has what was there, and all is free."""
    async with count_engine(latency=0.001, **COUNTED, **carry) as engine, no_leaks(engine):
        deadline_s = 0.03 if how == "deadline" else None
        stream = start(engine, 10, 5000, n=4, request_id="x", deadline_s=deadline_s)
        items = []
        async for item in stream:
            items.append(item)
            if len(items) == 10 and how == "cancel":
                stream.cancel()
            if len(items) == 10 and how == "abort":
                engine.abort("x")
        assert [item.finish_reason for item in items[-4:]] == ["abort"] * 4
        assert sorted(item.choice for item in items[-4:]) == [0, 1, 2, 3]
        assert ids_of(items[-4:]) == [None] * 4
        answer = await stream
        for choice in answer.choices:
            *mine, _ = ids_of(by_choice(items)[choice.index])
            assert choice.token_ids == after(10, len(choice.token_ids))
            assert mine == choice.token_ids[: len(mine)]
            assert choice.abort_reason == ("deadline" if how == "deadline" else "client")
        await assert_exact(engine)


async def one_choice_ended(stream: TokenStream) -> None:
    await until(lambda: any(one.is_finished for one in stream._request.choices))


@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_ended_when_one_choice_has_ended_already(how: str) -> None:
    """That one keeps its own finish and all its tokens."""
    model = Const([3.0, 3.0, -2.0], eos_token_ids=(2,))
    async with sim_engine(model, latency=0.0005) as engine, no_leaks(engine):
        stream = engine.generate("?", n=4, seed=2, temperature=1.0, max_tokens=4000)
        await one_choice_ended(stream)
        getattr(stream, how)()
        ended = "abort" if how == "cancel" else "stop"
        items = await items_of(stream)
        answer = await stream
        reasons = [choice.finish_reason for choice in answer.choices]
        assert set(reasons) == {"stop", ended}
        for choice in answer.choices:
            mine = by_choice(items)[choice.index]
            assert mine[-1].finish_reason == choice.finish_reason
            if choice.finish_reason == "abort":
                assert ids_of(mine) == [None]
            else:
                assert [one for one in ids_of(mine) if one is not None] == choice.token_ids
            assert choice.text == bytes(choice.token_ids).replace(b"\2", b"").decode()


async def test_awaited_when_one_choice_has_ended_already() -> None:
    """It waits for the others."""
    model = Const([3.0, 3.0, -1.0], eos_token_ids=(2,))
    async with sim_engine(model, latency=0.0005) as engine, no_leaks(engine):
        stream = engine.generate("?", n=4, seed=2, temperature=1.0, max_tokens=4000)
        await one_choice_ended(stream)
        assert not all(one.is_finished for one in stream._request.choices)
        answer = await stream
        assert [choice.token_ids[-1] for choice in answer.choices] == [2] * 4


@pytest.mark.parametrize("n", [1, 3])
async def test_stopped_when_all_is_read(n: int) -> None:
    """The last items carry no token, and what was held back."""
    async with sim_engine(Script(b"please"), latency=patient()) as engine, no_leaks(engine):
        stream = engine.generate("?", n=n, stop="pleas!")
        items = []
        async for item in stream:
            items.append(item)
            if len(items) == 3 * n:
                break
        assert [str(item) for item in items] == [""] * 3 * n
        stream.stop()
        while any(reader.has_unread for reader in stream._readers):
            items.append(await anext(stream))
        rest = await items_of(stream)
        assert {item.finish_reason for item in rest} <= {None, "stop"}
        answer = await stream
        for choice in answer.choices:
            assert choice.text == bytes(choice.token_ids).decode()
            assert choice.text == "".join(map(str, by_choice([*items, *rest])[choice.index]))


@pytest.mark.parametrize("n", [1, 3])
async def test_aborted_with_many_unread(n: int) -> None:
    """They are no items any more; the completion has their ids and their text."""
    async with sim_engine(Script(b"ab" * 500), latency=0.0002) as engine, no_leaks(engine):
        stream = engine.generate("?", n=n)
        await until(lambda: len(stream._request.output_ids) > 150)
        stream.cancel()
        items = await items_of(stream)
        assert [(item.token_id, item.finish_reason) for item in items] == [(None, "abort")] * n
        for _ in range(2):
            answer = await stream
            for choice in answer.choices:
                assert len(choice.token_ids) > 150 - 1
                assert choice.text == bytes(choice.token_ids).decode()


@pytest.mark.parametrize("how", ["aclose", "drop", "cancel iterating", "cancel awaiting"])
async def test_all_choices_go_with_their_stream(how: str) -> None:
    """Also when choice 0 has ended and the others have not."""
    model = Const([3.0, 3.0, -2.0], eos_token_ids=(2,))
    async with sim_engine(model, latency=0.001) as engine, no_leaks(engine):
        stream = engine.generate("?", n=3, seed=2, temperature=1.0)
        choices = stream._request.choices
        if how == "aclose":
            await until(lambda: bool(choices[0].output_ids))
            await stream.aclose()
            assert_idle(engine)
        elif how == "drop":
            await until(lambda: bool(choices[0].output_ids))
            engine._core.scheduler.finish(choices[0], FinishReason.STOP)
            del stream
            gc.collect()
        else:
            work = items_of(stream) if how == "cancel iterating" else await_it(stream)
            task = asyncio.create_task(work)
            await until(lambda: all(one.output_ids for one in choices))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert all(one.waiter is None for one in choices)
        await until(lambda: all(one.is_released for one in choices))
        assert engine.stats().steps < 200


async def test_a_prompt_that_is_refused_late() -> None:
    """Its one error comes once from iterating, and from awaiting as often as one likes."""
    async with count_engine(max_model_len=16) as engine, no_leaks(engine):
        stream = engine.generate("x" * 40, n=3)
        with pytest.raises(ContextTooLong):
            await anext(stream)
        assert await items_of(stream) == []
        for _ in range(2):
            with pytest.raises(ContextTooLong):
                await stream


@every_carry
async def test_a_step_that_fails_in_the_middle(carry: dict[str, Any]) -> None:
    """Tokens that are there come first, of every choice, then the error, once."""
    faults = [Fault(step=8, status=2)]
    async with count_engine(latency=0.001, faults=faults, **carry) as engine, no_leaks(engine):
        stream = start(engine, 10, 50, n=3)
        await engine.wait_idle()
        items = await items_before(stream, LaunchFailed)
        found = by_choice(items)
        assert sorted(found) == [0, 1, 2]
        assert all(ids_of(mine) == after(10, 7) for mine in found.values())
        assert not any(item.finish_reason for item in items)
        assert isinstance(await outcome(stream), LaunchFailed)


@every_carry
async def test_the_step_fails_that_computes_their_prompt(carry: dict[str, Any]) -> None:
    """None of them has begun; what comes later finds nothing left of them."""
    faults = [Fault(step=1, status=2)]
    async with count_engine(latency=0.001, faults=faults, **carry) as engine, no_leaks(engine):
        stream = start(engine, 10, 50, n=3)
        assert await items_before(stream, LaunchFailed) == []
        found = by_choice(await items_of(start(engine, 10, 5, n=3)))
        assert {choice: ids_of(mine) for choice, mine in found.items()} == {
            choice: after(10, 5) for choice in range(3)
        }


async def items_before(stream: TokenStream, error: type[Exception]) -> list[Token]:
    """What iteration gives before it raises, once."""
    items: list[Token] = []
    with pytest.raises(error):
        while True:
            items.append(await anext(stream))
    assert await items_of(stream) == []
    return items


class BadDecoder:
    """Raises at one id."""

    def step(self, token_id: int) -> str:
        if token_id == 7:
            raise ZeroDivisionError
        return f"{token_id}"

    def flush(self) -> str:
        return ""


class BadTokenizer(ByteTokenizer):
    def decode_stream(self, prompt_ids: Any, *, skip_special_tokens: bool = True) -> Any:
        return BadDecoder()


BAD: dict[str, Any] = {"n": 4, "seed": 11, "temperature": 1.0, "max_tokens": 1000}


def seldom_bad() -> Const:
    """Id 7 comes with a chance of 1 in 100, and so to one choice first."""
    return Const([4.6] * 7 + [2.0])


@pytest.mark.parametrize("how", ["iterate", "await", "late"])
async def test_one_choice_fails(how: str) -> None:
    """Its tokens and what the others have so far come first, then its error; all ends."""
    async with (
        sim_engine(seldom_bad(), tokenizer=BadTokenizer(), latency=0.0005) as engine,
        no_leaks(engine),
    ):
        stream = engine.generate("?", stop="x", **BAD)
        choices = stream._request.choices
        ready = [0] * 4
        if how == "late":
            await until(lambda: any(one.error for one in choices))
            assert sum(one.is_finished for one in choices) == 1
            ready = [len(one.output_ids) for one in choices]
        if how == "await":
            assert isinstance(await outcome(stream), InternalError)
        else:
            found = by_choice(await items_before(stream, InternalError))
            for one in choices:
                mine = ids_of(found[one.choice])
                assert mine == one.output_ids.tolist()
                assert len(mine) >= ready[one.choice]
        assert [one.finish_reason for one in choices].count(FinishReason.ERROR) == 1
        assert [one.finish_reason for one in choices].count(FinishReason.ABORT) == 3
        assert isinstance(await outcome(stream), InternalError)
        assert await items_of(stream) == []


async def test_one_choice_has_failed_when_all_are_aborted() -> None:
    """Of those that were aborted nothing is given out any more."""
    async with (
        sim_engine(seldom_bad(), tokenizer=BadTokenizer(), latency=0.0005) as engine,
        no_leaks(engine),
    ):
        stream = engine.generate("?", stop="x", **BAD)
        choices = stream._request.choices
        await until(lambda: any(one.error for one in choices))
        stream.cancel()
        items = await items_before(stream, InternalError)
        (failed,) = [one for one in choices if one.error]
        told = by_choice(items)
        assert ids_of(told.pop(failed.choice)) == failed.output_ids.tolist()
        assert all(ids_of(mine) == [None] for mine in told.values())


@pytest.mark.parametrize("later", [0, 1, 2])
async def test_aborted_between_a_failure_and_its_turn(later: int) -> None:
    """All of the choice that failed is read, and the others go: its error, and no token more."""
    async with (
        sim_engine(seldom_bad(), tokenizer=BadTokenizer(), latency=0.0005) as engine,
        no_leaks(engine),
    ):
        stream = engine.generate("?", stop="x", **BAD)
        choices = stream._request.choices
        await until(lambda: any(one.error for one in choices))
        (failed,) = [reader for reader in stream._readers if reader.request.error]
        count = len(failed.request.output_ids)
        await until(lambda: sum(len(one.output_ids) > count + 2 for one in choices) == 3)
        while failed.has_unread:
            await anext(stream)
        for _ in range(later):
            await anext(stream)
        stream.cancel()
        assert set(ids_of(await items_before(stream, InternalError))) <= {None}


async def test_the_text_that_an_abort_left_fails() -> None:
    """It raises from awaiting, like any other text."""
    async with (
        sim_engine(Const([-9.0] * 7 + [9.0]), tokenizer=BadTokenizer(), latency=0.0005) as engine,
        no_leaks(engine),
    ):
        stream = engine.generate("?", n=2)
        await until(lambda: bool(stream._request.output_ids))
        stream.cancel()
        assert ids_of(await items_of(stream)) == [None, None]
        for _ in range(2):
            assert isinstance(await outcome(stream), InternalError)


async def test_the_text_of_one_choice_fails_in_the_reader() -> None:
    """Without stop strings text is made where it is read: the request ends there, too."""
    async with (
        sim_engine(seldom_bad(), tokenizer=BadTokenizer(), latency=0.0005) as engine,
        no_leaks(engine),
    ):
        stream = engine.generate("?", **BAD)
        items = await items_before(stream, InternalError)
        assert 7 not in ids_of(items)
        assert all(one.is_finished for one in stream._request.choices)
        assert isinstance(await outcome(stream), InternalError)
        unread = engine.generate("?", **BAD)
        assert isinstance(await outcome(unread), InternalError)
