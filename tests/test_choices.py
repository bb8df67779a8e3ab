"""Several choices of one prompt: each exact, with an end of its own, and all free in the end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import InvalidRequest
from aneuron.testing import Const, Script, Sum, count_engine, no_leaks, sim_engine
from tests.support import after, device_of, every_carry, items_of, patient, start, sum_reference

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aneuron import Completion, Token

BLOCK = 4
COUNTED: dict[str, Any] = {"block_size": BLOCK, "max_num_seqs": 8, "enable_prefix_caching": False}
every_n = pytest.mark.parametrize("n", [2, 3, 4, 5])


def by_choice(items: Iterable[Token]) -> dict[int, list[Token]]:
    """The items of each choice, in the order they came."""
    found: dict[int, list[Token]] = defaultdict(list)
    for item in items:
        found[item.choice].append(item)
    return dict(sorted(found.items()))


def ids_of(items: Iterable[Token]) -> list[int | None]:
    return [item.token_id for item in items]


def assert_whole(items: list[Token], answer: Completion) -> None:
    """The items are what the completion has: indices, texts, ids, one last item a choice."""
    found = by_choice(items)
    assert sorted(found) == [choice.index for choice in answer.choices]
    for choice in answer.choices:
        mine = found[choice.index]
        assert [item.index for item in mine] == list(range(len(mine)))
        assert [item.token_id for item in mine if item.token_id is not None] == choice.token_ids
        assert "".join(map(str, mine)) == choice.text
        ends = [(item.finish_reason, item.stop_reason) for item in mine]
        assert ends[:-1] == [(None, None)] * (len(mine) - 1)
        assert ends[-1] == (choice.finish_reason, choice.stop_reason)
    total = sum(len(choice.token_ids) for choice in answer.choices)
    assert answer.usage.completion_tokens == total


# ── exact ───────────────────────────────────────────────────────────────────────────────


@every_carry
@every_n
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 21])
async def test_each_choice_is_exact(n: int, length: int, carry: dict[str, Any]) -> None:
    """SUM reads the whole context: a block copied late or written twice shows in every id.

    Prompts fill their last block or not, and are cut into chunks of 8 or not.
    """
    prompt = [3 * at + 1 for at in range(length)]
    options: dict[str, Any] = {"prompt_token_ids": prompt, "n": n}
    expected = sum_reference(prompt, 11)
    async with (
        sim_engine(Sum(), **COUNTED, max_num_batched_tokens=8, **carry) as engine,
        no_leaks(engine),
    ):
        stream = engine.generate(**options, max_tokens=11)
        items = await items_of(stream)
        found = by_choice(items)
        assert list(found) == list(range(n))
        assert all(ids_of(mine) == expected for mine in found.values())
        assert_whole(items, await stream)
        assert device_of(engine).num_prefill_tokens == length, "the prompt is computed once"
        answer = await engine.generate(**options, max_tokens=1)
        assert [choice.token_ids for choice in answer.choices] == [expected[:1]] * n
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * n


@every_carry
async def test_choices_beside_others(carry: dict[str, Any]) -> None:
    """Requests of 1 to 5 choices come at once, more than fit: each is exact in every choice."""
    async with count_engine(**COUNTED, **carry) as engine, no_leaks(engine):
        streams = [start(engine, 1000 * k, 3 + 5 * k, n=1 + k % 5) for k in range(12)]
        for k, items in enumerate(await asyncio.gather(*map(items_of, streams))):
            found = {choice: ids_of(mine) for choice, mine in by_choice(items).items()}
            assert found == {choice: after(1000 * k, 3 + 5 * k) for choice in range(1 + k % 5)}
            assert_whole(items, await streams[k])


async def run_of_case_44(carry: dict[str, Any], model: Any) -> tuple[list[Token], Completion]:
    async with sim_engine(model, **carry) as engine, no_leaks(engine):
        # Ids 0 to 3 are alike; 3 ends an answer, so the choices end at different times.
        stream = engine.generate("?", n=4, seed=7, temperature=1.0, max_tokens=40)
        return await items_of(stream), await stream


@every_carry
async def test_case_44_choices_of_different_lengths(carry: dict[str, Any]) -> None:
    """n=4, seed=7, streamed twice: not all equal, both runs alike, each with its own finish."""
    model = Const([4.0, 4.0, 4.0, 2.0], eos_token_ids=(3,))
    items, answer = await run_of_case_44(carry, model)
    again, _ = await run_of_case_44(carry, model)
    assert by_choice(items) == by_choice(again)
    assert_whole(items, answer)
    ids = [tuple(choice.token_ids) for choice in answer.choices]
    assert len(set(ids)) == 4
    assert len({len(one) for one in ids}) > 1
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    for choice in answer.choices:
        assert (choice.token_ids[-1] == 3) == (choice.finish_reason == "stop")


@every_carry
@every_n
async def test_choices_that_end_at_different_times(n: int, carry: dict[str, Any]) -> None:
    """Stop ids end one choice after the other; those left go on to their own ends."""
    model = Const([3.0] * 8)
    async with sim_engine(model, **COUNTED, **carry) as engine, no_leaks(engine):
        for seed in range(5):
            stream = engine.generate(
                "?", n=n, seed=seed, temperature=1.0, max_tokens=30, stop_token_ids=[2, 5]
            )
            items = await items_of(stream)
            answer = await stream
            assert_whole(items, answer)
            for choice in answer.choices:
                *ids, last = choice.token_ids
                assert not {2, 5} & set(ids)
                assert choice.stop_reason == (last if last in (2, 5) else None)
                alone = await engine.generate(
                    "?", seed=seed + choice.index, temperature=1.0, max_tokens=30,
                    stop_token_ids=[2, 5],
                )  # fmt: skip
                assert alone.token_ids == choice.token_ids


@every_carry
@pytest.mark.parametrize("late", [True, False])
async def test_stop_strings_of_each_choice(late: bool, carry: dict[str, Any]) -> None:
    """Each choice looks for the string in its own text, read at once or late."""
    model = Const([-9.0] * 97 + [3.0, 3.0, 2.0])  # a, b, c
    async with sim_engine(model, **carry) as engine, no_leaks(engine):
        stream = engine.generate("?", n=4, seed=3, temperature=1.0, max_tokens=25, stop="ac")
        if late:
            await engine.wait_idle()
        items = await items_of(stream)
        answer = await stream
        assert_whole(items, answer)
        assert {choice.finish_reason for choice in answer.choices} == {"stop", "length"}
        for choice in answer.choices:
            told = bytes(choice.token_ids).decode()
            assert choice.text == told.partition("ac")[0]
            assert (choice.stop_reason == "ac") == told.endswith("ac") == ("ac" in told)


async def test_held_text_comes_out_for_each_choice() -> None:
    """The answer ends inside a character and a possible stop string: both are flushed."""
    async with sim_engine(Script("pleé".encode())) as engine, no_leaks(engine):
        stream = engine.generate("?", n=3, max_tokens=4, stop="pleased")
        items = await items_of(stream)
        assert [choice.text for choice in (await stream).choices] == ["ple\ufffd"] * 3
        assert_whole(items, await stream)


# ── as they arrive ──────────────────────────────────────────────────────────────────────


async def test_tokens_come_as_they_arrive() -> None:
    """Read at once or when all are there: no choice is more than a token ahead."""
    async with count_engine(latency=patient()) as engine, no_leaks(engine):
        for late in (False, True):
            stream = start(engine, 10, 200, n=4)
            if late:
                await engine.wait_idle()
            told = [0] * 4
            async for item in stream:
                told[item.choice] += 1
                assert max(told) - min(told) <= 1
            assert told == [200] * 4


async def test_many_ready_tokens_of_choices_yield_now_and_then() -> None:
    """1,000 unread tokens of 4 choices: others run in between, and may cancel it there."""
    async with count_engine() as engine, no_leaks(engine):
        stream = start(engine, 10, 250, n=4)
        await engine.wait_idle()
        turns = 0
        reading = asyncio.create_task(items_of(stream))
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 10
        assert_whole(await reading, await stream)


async def test_await_after_reading_a_part() -> None:
    """What was read is not lost, what was not is in it, and nothing comes after it."""
    async with sim_engine(Script(b"hello world")) as engine, no_leaks(engine):
        stream = engine.generate("?", n=3, request_id="mine")
        items = [await anext(stream) for _ in range(7)]
        assert {item.choice for item in items} == {0, 1, 2}
        answer = await stream
        assert [choice.text for choice in answer.choices] == ["hello world"] * 3
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.request_id == "mine"
        assert answer.text == "hello world"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 36)
        assert await items_of(stream) == []
        assert await stream == answer


@pytest.mark.parametrize("n", [1, 3])
async def test_usage_and_timing(n: int) -> None:
    """Cached tokens are those of the prompt; the times are the first and the last."""
    async with count_engine(block_size=BLOCK, latency=0.002) as engine, no_leaks(engine):
        prompt = list(range(9))
        first, second = [
            await engine.generate(prompt_token_ids=prompt, n=n, max_tokens=5) for _ in range(2)
        ]
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 8)
        assert second.usage.prompt_tokens == 9
        assert second.usage.completion_tokens == 5 * n
        timing = second.timing
        assert timing.queued_s is not None
        assert timing.ttft_s is not None
        assert 0 <= timing.queued_s < timing.ttft_s < timing.total_s
        unrun = start(engine, n=n)
        unrun.cancel()
        assert (await unrun).usage.cached_tokens == 0
        assert (await unrun).timing.ttft_s is None


async def test_more_choices_than_seats_are_refused() -> None:
    async with count_engine(max_num_seqs=3) as engine, no_leaks(engine):
        with pytest.raises(InvalidRequest) as caught:
            _ = start(engine, n=4)
        assert caught.value.param == "n"
        answer = await start(engine, 10, 3, n=3)
        assert [choice.token_ids for choice in answer.choices] == [after(10, 3)] * 3
