"""`TokenStream.take`: all that is there at once, for readers that send several tokens in one."""

from __future__ import annotations

from typing import Any

import pytest

from aneuron import Engine, FinishReason
from aneuron.errors import DeviceError, InternalError, InvalidRequest
from aneuron.testing import ByteTokenizer, Fault, count_engine, no_leaks
from tests.support import after, every_carry, start


@every_carry
async def test_unread_tokens_come_together(carry: dict[str, Any]) -> None:
    async with count_engine(**carry) as engine, no_leaks(engine):
        stream = start(engine, 10, 200)
        first = await stream.take()
        assert [token.token_id for token in first] == after(10, len(first))
        await engine.wait_idle()
        rest = []
        sizes = []
        while items := await stream.take(most=50):
            sizes.append(len(items))
            rest += items
        assert [token.token_id for token in first + rest] == after(10, 200)
        assert rest[-1].finish_reason is FinishReason.LENGTH
        assert max(sizes) == 50
        assert await stream.take() == []
        assert len(sizes) <= 5  # what was there came in full takes


async def test_choices_come_in_turn_and_whole() -> None:
    async with count_engine() as engine, no_leaks(engine):
        stream = start(engine, 10, 9, n=3)
        items = []
        while taken := await stream.take():
            items += taken
        for choice in range(3):
            own = [one for one in items if one.choice == choice]
            assert [one.token_id for one in own] == after(10, 9)
            assert [one.index for one in own] == list(range(9))


async def test_an_error_comes_behind_what_was_there() -> None:
    async with count_engine(faults=[Fault(4, 2)]) as engine, no_leaks(engine):
        stream = start(engine, 10, 50)
        items = []
        with pytest.raises(DeviceError):
            while taken := await stream.take():
                items += taken
        assert [one.token_id for one in items] == after(10, len(items))
        assert len(items) == 3


async def test_what_was_decoded_comes_before_what_cannot_be() -> None:
    class Broken(ByteTokenizer):
        def decode_stream(self, prompt_ids: Any, **options: Any) -> Any:
            inner = super().decode_stream(prompt_ids, **options)

            class Failing:
                def step(self, token_id: int) -> str | None:
                    if token_id == 15:
                        raise ValueError("no text")
                    return inner.step(token_id)

                def __getattr__(self, name: str) -> Any:
                    return getattr(inner, name)

            return Failing()

    async with count_engine(tokenizer=Broken()) as engine, no_leaks(engine):
        stream = start(engine, 10, 50)
        await engine.wait_idle()
        assert [one.token_id for one in await stream.take()] == after(10, 4)
        with pytest.raises(InternalError, match="no text"):
            await stream.take()
        assert await stream.take() == []


async def test_an_abort_ends_it() -> None:
    async with count_engine() as engine, no_leaks(engine):
        stream = start(engine, 10, 5000)
        await stream.take()
        stream.cancel()
        last = await stream.take()
        assert [one.finish_reason for one in last] == [FinishReason.ABORT]
        assert await stream.take() == []


async def test_stalled_and_open_are_told() -> None:
    engine = Engine("sim:count")
    assert (engine.is_open, engine.failure) == (False, None)
    async with engine:
        assert (engine.is_open, engine.failure) == (True, None)
        assert engine.stats().stalled_s == 0.0
        stream = start(engine, 10, 100_000)
        await stream.take()
        assert 0.0 <= engine.stats().stalled_s < 5.0
        await stream.aclose()
        await engine.wait_idle()
        assert engine.stats().stalled_s == 0.0
    assert (engine.is_open, engine.failure) == (False, None)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"conversations": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_a_template_gets_what_is_the_callers_to_set(
    options: dict[str, Any], param: str
) -> None:
    async with count_engine() as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.chat([{"role": "user", "content": "Hi"}], **options)
        assert caught.value.param == param
