"""How many are let in, and until when each may run: `max_waiting`, `deadline_s`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import FinishReason, InvalidRequest, Overloaded
from aneuron.testing import ByteTokenizer, count_engine, no_leaks, run_virtual
from tests.support import STEP_S, after, assert_serves, device_of, every_carry, outcome, start

if TYPE_CHECKING:
    from aneuron import Engine, TokenStream

Carry = dict[str, Any]  # engine options


def is_full(engine: Engine) -> bool:
    try:
        start(engine, 7, 1).cancel()
    except Overloaded:
        return True
    return False


# ── max_waiting ─────────────────────────────────────────────────────────────────────────


@every_carry
async def test_case_75_three_of_fifteen_are_refused_at_once(carry: Carry) -> None:
    async with (
        count_engine(**carry, max_num_seqs=2, max_waiting=10, latency=0.0005) as engine,
        no_leaks(engine),
    ):
        streams, errors = [], []
        for n in range(15):
            try:
                streams.append(start(engine, 1000 * n, 3 if n == 0 else 20, request_id=f"r{n}"))
            except Overloaded as error:
                errors.append(error)
        assert len(streams) == 12
        assert [error.request_id for error in errors] == ["r12", "r13", "r14"]
        assert all(error.retry_after_s > 0 for error in errors)
        assert (await streams[0]).token_ids == after(0, 3)
        late = start(engine, 50_000, 20, request_id="r12")  # its name was never taken
        assert is_full(engine), "one was done, and one came"
        for n, stream in enumerate(streams):
            assert (await stream).token_ids == after(1000 * n, 3 if n == 0 else 20)
        assert (await late).token_ids == after(50_000, 20)


@every_carry
async def test_a_place_is_free_as_soon_as_a_request_is_given_up(carry: Carry) -> None:
    """Running or in the queue: not only once its last step in flight has come back."""
    async with (
        count_engine(**carry, max_num_seqs=1, max_waiting=1, latency=STEP_S) as engine,
        no_leaks(engine),
    ):
        running, waiting = start(engine, 100), start(engine, 200)
        kept: list[TokenStream] = []
        await anext(running)
        for stream in (waiting, running):
            assert is_full(engine)
            stream.cancel()
            assert not is_full(engine)
            kept.append(start(engine, 300))
        assert is_full(engine)
        for stream in kept:
            stream.cancel()


async def test_no_waiting_at_all_and_no_limit() -> None:
    async with count_engine(max_num_seqs=2, max_waiting=0) as engine, no_leaks(engine):
        streams = [start(engine, 100, 5), start(engine, 200, 5)]
        assert is_full(engine)
        assert [(await one).token_ids for one in streams] == [after(100, 5), after(200, 5)]
        assert not is_full(engine)
    async with count_engine(max_num_seqs=2) as engine, no_leaks(engine):
        streams = [start(engine, 10 * n, 2) for n in range(300)]
        assert not is_full(engine)
        assert [(await one).token_ids for one in streams] == [after(10 * n, 2) for n in range(300)]


async def test_a_refused_request_leaves_nothing_behind() -> None:
    async with count_engine(max_num_seqs=1, max_waiting=0, latency=STEP_S) as engine:
        running = start(engine, 100, 5)
        for _ in range(50):
            with pytest.raises(Overloaded):
                _ = start(engine, 200, request_id="refused", deadline_s=60)
        assert not engine._core.intake._deadlines
        assert list(engine._core.intake.requests) == [running.request_id]
        await running
        await assert_serves_one_by_one(engine)


async def assert_serves_one_by_one(engine: Engine) -> None:
    for n in (1, 2):
        assert (await start(engine, 1000 * n, 3)).token_ids == after(1000 * n, 3)


async def test_retry_after_follows_how_often_a_place_comes_free() -> None:
    async with count_engine(max_num_seqs=1, max_waiting=9, latency=0.01) as engine:
        streams = [start(engine, 100 * n, 2) for n in range(10)]
        await asyncio.gather(*streams[:5])  # one every 20 ms
        with pytest.raises(Overloaded) as caught:
            streams += [start(engine, 5, 50) for _ in range(11)]
        assert 0.01 < caught.value.retry_after_s < 0.5
        assert caught.value.code == "overloaded"


def test_retry_after_where_a_whole_batch_ends_together() -> None:
    """Clients that obey it do not knock in vain a thousand times."""

    async def main() -> tuple[float, int]:
        async with count_engine(max_num_seqs=8, max_waiting=8, latency=0.1) as engine:
            first = [start(engine, 100 * n, 50) for n in range(8)]
            await asyncio.gather(*first)
            full = [start(engine, 100 * n, 50) for n in range(16)]
            await asyncio.sleep(0.25)
            full[15].cancel()  # a place that nobody had to wait for
            full.append(start(engine, 7, 50))
            with pytest.raises(Overloaded) as caught:
                _ = start(engine, 5, 50)
            refused = [0]

            async def client(n: int) -> None:
                while True:
                    try:
                        await start(engine, 100 * n, 50)
                    except Overloaded as error:
                        refused[0] += 1
                        await asyncio.sleep(error.retry_after_s)
                    else:
                        return

            async with asyncio.TaskGroup() as group:
                for n in range(40):
                    group.create_task(client(n))
            return caught.value.retry_after_s, refused[0]

    retry_after_s, num_refused = run_virtual(main())
    assert 4 < retry_after_s < 5.5, "an answer takes 5.1 s, and those that run began 0.3 s ago"
    assert num_refused < 40 * 20


async def test_what_was_asked_for_is_in_the_message() -> None:
    async with count_engine(max_num_seqs=2, max_waiting=1, latency=STEP_S) as engine:
        running = [start(engine, 100 * n, 500) for n in (1, 2)]
        with pytest.raises(Overloaded, match="no room for 2 more: 2 of at most 3"):
            _ = engine.generate(prompt_token_ids=[1], n=2)
        for one in running:
            one.cancel()


# ── deadlines ───────────────────────────────────────────────────────────────────────────


async def expired(stream: TokenStream) -> list[int]:
    """Check that a deadline ended a stream; return the tokens until then."""
    async with asyncio.timeout(5):
        completion = await stream
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.abort_reason == "deadline"
    return completion.token_ids


@every_carry
async def test_a_deadline_ends_what_runs_and_keeps_its_tokens(carry: Carry) -> None:
    async with count_engine(**carry, latency=STEP_S) as engine, no_leaks(engine):
        other = start(engine, 500, 30)
        stream = start(engine, 10, 5000, deadline_s=20 * STEP_S)
        ids = await expired(stream)
        assert 0 < len(ids) < 100
        assert ids == after(10, len(ids))
        assert (await other).token_ids == after(500, 30)
        assert not engine._core.intake._deadlines


@pytest.mark.parametrize("kind", [float, np.float16, np.float32, np.float64, int])
def test_deadlines_of_any_number_type(kind: Any) -> None:
    async def main() -> None:
        async with count_engine(latency=0.1) as engine:
            await expired(start(engine, 10, 5000, deadline_s=kind(2)))
            short: Any = np.float32(0.1)
            await asyncio.sleep(short)

    run_virtual(main())


async def test_deadlines_beyond_all_numbers_are_refused() -> None:
    async with count_engine() as engine:
        for name in ("deadline_s", "temperature"):
            huge: dict[str, Any] = {name: 10**400}
            with pytest.raises(InvalidRequest) as caught:
                _ = engine.generate(prompt_token_ids=[1], **huge)
            assert caught.value.param == name


async def test_many_prompts_have_priority_and_a_deadline_each() -> None:
    async with count_engine(scheduling_policy="priority", latency=STEP_S) as engine:
        many = engine.generate_many([[10], [20]], max_tokens=5000, deadline_s=0.05, priority=3)
        priorities = {one.priority for one in engine._core.intake.requests.values()}
        assert priorities == {3}
        answers = [answer async for _, answer in many]
        assert [one.abort_reason for one in answers] == ["deadline"] * 2
        with pytest.raises(InvalidRequest):
            engine.generate_many([[10]], deadline_s=-1)


@every_carry
async def test_iterating_past_a_deadline_ends_with_a_last_item(carry: Carry) -> None:
    async with count_engine(**carry, latency=STEP_S) as engine, no_leaks(engine):
        items = [token async for token in start(engine, 10, 5000, deadline_s=20 * STEP_S)]
        assert items[-1].finish_reason is FinishReason.ABORT
        assert items[-1].token_id is None
        assert [token.token_id for token in items[:-1]] == after(10, len(items) - 1)


@every_carry
async def test_a_deadline_in_the_queue(carry: Carry) -> None:
    """It was never scheduled: the device has not seen one token of it."""
    async with count_engine(**carry, max_num_seqs=1, latency=STEP_S) as engine, no_leaks(engine):
        running = start(engine, 500, 40)
        await anext(running)
        before = device_of(engine).num_prefill_tokens
        assert await expired(start(engine, 10, 5, deadline_s=4 * STEP_S)) == []
        assert not running._request.is_finished
        assert (await running).token_ids == after(500, 40)
        assert device_of(engine).num_prefill_tokens == before


class SlowTokenizer(ByteTokenizer):
    """Turns text into ids when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_go = asyncio.Event(), asyncio.Event()

    async def encode(self, text: str, **options: Any) -> np.ndarray:
        self.asked.set()
        await self.may_go.wait()
        return await super().encode(text, **options)


@every_carry
async def test_a_deadline_while_its_prompt_is_prepared(carry: Carry) -> None:
    tokenizer = SlowTokenizer()
    async with count_engine(**carry, tokenizer=tokenizer) as engine, no_leaks(engine):
        stream = engine.generate("A", max_tokens=5, deadline_s=0.01)
        await tokenizer.asked.wait()
        assert await expired(stream) == []
        assert not engine._core.intake.requests
        tokenizer.may_go.set()
        await engine.wait_idle()
        assert device_of(engine).num_steps == 0, "it came too late to be admitted"
        assert (await engine.generate("A", max_tokens=2)).token_ids == [66, 67]


@pytest.mark.parametrize("how", ["length", "cancel", "abort", "stop", "error"])
async def test_the_timer_goes_with_its_request(how: str) -> None:
    async with count_engine(latency=0.0005) as engine, no_leaks(engine):
        intake = engine._core.intake
        prompt: dict[str, Any] = {"prompt": ""} if how == "error" else {"prompt_token_ids": [10]}
        stream = engine.generate(**prompt, max_tokens=20, deadline_s=60, request_id="x")
        timer = intake._deadlines["x"]
        match how:
            case "cancel":
                stream.cancel()
            case "abort":
                engine.abort("x")
            case "stop":
                await anext(stream)
                stream.stop()
        await outcome(stream)
        assert timer.cancelled()
        assert not intake._deadlines


async def test_a_name_that_comes_again_has_a_deadline_of_its_own() -> None:
    async with count_engine(latency=STEP_S) as engine, no_leaks(engine):
        start(engine, 10, request_id="x", deadline_s=3 * STEP_S).cancel()
        again = start(engine, 10, 30, request_id="x")
        assert (await again).token_ids == after(10, 30)


@pytest.mark.parametrize("deadline_s", [0, 0.0, -1, float("nan"), float("inf"), "1", True])
async def test_bad_deadlines_are_refused(deadline_s: Any) -> None:
    async with count_engine() as engine, no_leaks(engine):
        with pytest.raises(InvalidRequest) as caught:
            _ = start(engine, deadline_s=deadline_s)
        assert caught.value.param == "deadline_s"
        await assert_serves(engine)
