"""Hard cases of drafts, grammars and hooks, made by hand: limits, ends and faults in between."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import DeviceError, DeviceLost, Engine, InvalidRequest
from aneuron.device.sim import Fault, SimDevice
from aneuron.grammar import fill_bitmask
from aneuron.testing import no_leaks, sim_engine
from tests.support import await_it, every_carry, outcome, until
from tests.test_grammar import VOCAB, compiler, form
from tests.test_guided import Noise, ids_of, open_noise
from tests.test_properties_guided import Babble
from tests.test_speculation import Loops, Repeat

if TYPE_CHECKING:
    import numpy as np

    from aneuron import TokenStream

COPY = [11, 12, 13, 14, 15, 16, 17]


def ngram(num_tokens: int) -> dict[str, Any]:
    return {"speculative": {"method": "ngram", "num_tokens": num_tokens}}


def copied(count: int, *, begin: int = 0) -> list[int]:
    """What REPEAT says after `COPY` twice, and the first `begin` of it once more."""
    return (COPY * (2 + count // 7))[begin : begin + count]


# ── drafts ──────────────────────────────────────────────────────────────────────────────


@every_carry
@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("num_tokens", [1, 16])
async def test_short_answers(carry: dict[str, Any], block_size: int, num_tokens: int) -> None:
    """One to three tokens, of which the last is no draft; blocks that a draft fills at once."""
    options = {**carry, **ngram(num_tokens), "block_size": block_size}
    async with sim_engine(Repeat(), **options) as engine, no_leaks(engine):
        for count in (1, 2, 3, 4, 19):
            told = await engine.generate(prompt_token_ids=COPY * 2, max_tokens=count)
            assert (told.token_ids, told.finish_reason) == (copied(count), "length")


@every_carry
@pytest.mark.parametrize("block_size", [1, 4, 16])
async def test_the_context_ends_in_a_verification(carry: dict[str, Any], block_size: int) -> None:
    """By the model's length, in a pool that holds no more than that."""
    options = {**carry, **ngram(16), "block_size": block_size, "max_model_len": 40}
    options["num_kv_blocks"] = -(-40 // block_size)
    async with sim_engine(Repeat(), **options) as engine, no_leaks(engine):
        prompts = [COPY * 2 + COPY[:more] for more in range(3)]
        told = await asyncio.gather(
            *(await_it(engine.generate(prompt_token_ids=prompt)) for prompt in prompts)
        )
        for more, one in enumerate(told):
            assert (one.token_ids, one.finish_reason) == (copied(26 - more, begin=more), "length")


@every_carry
@pytest.mark.parametrize("num_tokens", [1, 16])
async def test_prompts_shorter_than_what_is_looked_up(carry: Any, num_tokens: int) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt_token_ids": prompt, "max_tokens": 20, "temperature": temperature, "seed": 3}
        for prompt in ([1], [1, 1], [2, 2, 2])
        for temperature in (0.0, 1.0)
    ]
    async with sim_engine(Loops(), **carry) as engine:
        alone = [(await engine.generate(**one)).token_ids for one in asked]
    async with sim_engine(Loops(), **carry, **ngram(num_tokens)) as engine, no_leaks(engine):
        assert [(await engine.generate(**one)).token_ids for one in asked] == alone


@every_carry
@pytest.mark.parametrize("how", ["cancel", "stop", "abort"])
async def test_it_is_given_up_while_drafts_are_verified(carry: dict[str, Any], how: str) -> None:
    """At every point, by count of the loop's turns."""
    options = {**carry, **ngram(4), "block_size": 2}
    async with sim_engine(Repeat(), latency=0.0001, **options) as engine, no_leaks(engine):
        for turns in range(0, 40, 2):
            given_up, other = (
                engine.generate(prompt_token_ids=COPY * 2, max_tokens=40, request_id=name)
                for name in (f"one-{turns}", f"other-{turns}")
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            if how == "abort":
                engine.abort(f"one-{turns}")
            else:
                getattr(given_up, how)()
            told = (await given_up).token_ids
            assert told == copied(len(told))
            assert (await other).token_ids == copied(40)


@every_carry
@pytest.mark.parametrize("status", [2, 7, 1003])
async def test_a_fault_while_drafts_are_verified(carry: dict[str, Any], status: int) -> None:
    """It fails who is in the step, or nobody if the queue was full; the next one is served."""
    for step in range(2, 7):
        device = SimDevice(faults=[Fault(step, status)])
        options = {**carry, **ngram(4), "block_size": 2}
        async with Engine(Repeat(), device=device, **options) as engine, no_leaks(engine):
            streams = [engine.generate(prompt_token_ids=COPY * 2, max_tokens=30) for _ in "ab"]
            for told in [await outcome(stream) for stream in streams]:
                if status == 7 or not isinstance(told, DeviceError):
                    assert told.token_ids == copied(30)  # type: ignore[union-attr]
            told = await engine.generate(prompt_token_ids=COPY * 2, max_tokens=30)
            assert told.token_ids == copied(30)


async def test_a_finished_request_is_not_kept_for_its_rejected_drafts() -> None:
    async with sim_engine(Babble(), **ngram(4)) as engine, no_leaks(engine):
        for prompt in ([97], [98, 97], [97, 98, 99, 100]):
            await engine.generate(prompt_token_ids=prompt, temperature=0)
            await engine.wait_idle()
            assert not engine._core.scheduler.speculation._rejected


# ── grammars ────────────────────────────────────────────────────────────────────────────


@every_carry
async def test_a_grammar_is_cut_by_stops_and_lengths(carry: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "prompt_token_ids": [97],
        "grammar": {"regex": "[a-f]{20}"},
        "temperature": 0,
    }
    async with sim_engine(Babble(), **carry) as engine, no_leaks(engine):
        whole = (await engine.generate(**asked)).text
        stop = whole[5:8]
        told = await engine.generate(**asked, stop=stop)
        assert (told.text, told.stop_reason) == (whole[: whole.index(stop)], stop)
        told = await engine.generate(**asked, max_tokens=7)
        assert (told.text, told.finish_reason) == (whole[:7], "length")
        told = await engine.generate(**{**asked, "grammar": {"choice": ["abcd"]}}, max_tokens=4)
        assert (told.text, told.finish_reason) == ("abcd", "stop")


@every_carry
@pytest.mark.parametrize("drafts", [{}, ngram(4)], ids=["plain", "drafts"])
async def test_a_grammar_goes_on_behind_a_preemption(carry: Any, drafts: dict[str, Any]) -> None:
    asked: list[dict[str, Any]] = [
        {
            "prompt_token_ids": [97, 98 + at], "grammar": {"regex": "[a-f]{40}"}, "seed": at,
            "temperature": 0.8,
        }
        for at in range(4)
    ]  # fmt: skip
    async with sim_engine(Babble()) as engine:
        alone = [(await engine.generate(**one)).token_ids for one in asked]
    options = {**carry, **drafts, "block_size": 2, "num_kv_blocks": 34, "max_num_seqs": 4}
    async with sim_engine(Babble(), **options) as engine, no_leaks(engine):
        streams = [engine.generate(**one) for one in asked]
        assert [(await stream).token_ids for stream in streams] == alone
        assert engine.stats().preemptions > 0


# ── hooks ───────────────────────────────────────────────────────────────────────────────


def climb(output_ids: list[int], logits: np.ndarray) -> None:
    logits[10 + len(output_ids)] += 99.0


@every_carry
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_hooks_of_three_choices(carry: dict[str, Any], num_ranks: int) -> None:
    options = {**carry, **ngram(4), "num_ranks": num_ranks}
    async with sim_engine(Noise(), **options) as engine, no_leaks(engine):
        hooked = engine.generate(prompt_token_ids=[1], n=3, max_tokens=5, logits_processors=climb)
        free: dict[str, Any] = {"prompt_token_ids": [7, 8, 9], "max_tokens": 20, "temperature": 0}
        others = [engine.generate(**free) for _ in "ab"]
        assert [one.token_ids for one in (await hooked).choices] == [[10, 11, 12, 13, 14]] * 3
        assert (await others[0]).token_ids == (await others[1]).token_ids


class Gate:
    """A hook that waits for the test, at its second call."""

    def __init__(self) -> None:
        self.is_reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, output_ids: list[int], logits: np.ndarray) -> None:
        if len(output_ids) == 1:
            self.is_reached.set()
            self.go_on.wait(10)


@every_carry
async def test_a_hook_that_hangs_holds_nobody_for_ever(carry: dict[str, Any]) -> None:
    """The loop goes on, the device does not count as lost, and aborts are heard meanwhile."""
    gate = Gate()
    options = {**carry, "step_timeout_s": 0.2}
    async with open_noise({"carry": options, "is_split": True}) as engine, no_leaks(engine):
        alone = await ids_of(engine, [3], max_tokens=9, temperature=0, ignore_eos=True)
        free = engine.generate(prompt_token_ids=[3], max_tokens=9, temperature=0, ignore_eos=True)
        hooked = engine.generate(prompt_token_ids=[1], max_tokens=3, logits_processors=gate)
        given_up = engine.generate(prompt_token_ids=[2], max_tokens=99, ignore_eos=True)
        await until(gate.is_reached.is_set)
        given_up.cancel()
        assert (await given_up).finish_reason == "abort"
        with pytest.raises(InvalidRequest, match="step_timeout_s"):
            await hooked  # its function is left behind; the others go on without it
        assert list((await free).token_ids) == alone
        again = await ids_of(
            engine, [1], max_tokens=2, ignore_eos=True, logits_processors=lambda _, row: row
        )
        assert len(again) == 2
        gate.go_on.set()


@every_carry
@pytest.mark.parametrize("goes_on", [True, False])
async def test_closing_while_a_hook_runs(carry: dict[str, Any], goes_on: bool) -> None:
    gate = Gate()
    engine = await Engine(Noise(), device=SimDevice(), shutdown_s=0.2, **carry).open()
    hooked = engine.generate(prompt_token_ids=[1], max_tokens=9, logits_processors=gate)
    free = engine.generate(prompt_token_ids=[1], max_tokens=99)
    await until(gate.is_reached.is_set)
    if goes_on:
        gate.go_on.set()
    async with asyncio.timeout(5):
        await engine.aclose()
    gate.go_on.set()
    assert {(await hooked).finish_reason, (await free).finish_reason} == {"abort"}


@every_carry
@pytest.mark.parametrize("status", [2, 7, 1003])
async def test_a_copy_of_logits_that_fails_gives_no_token(carry: Any, status: int) -> None:
    """The forward part is well, and so would be its sampling: of logits that nobody has seen."""
    device = SimDevice(faults=[Fault(3, status, in_sampling=True)])
    asked: dict[str, Any] = {"prompt_token_ids": [1, 2], "max_tokens": 5, "temperature": 0}
    async with Engine(Noise(), device=device, **carry) as engine, no_leaks(engine):
        told = await outcome(engine.generate(**asked, logits_processors=lambda _, row: row))
        alone = (await engine.generate(**asked)).token_ids
        if status == 7:
            assert told.token_ids == alone  # type: ignore[union-attr]
        else:
            assert isinstance(told, DeviceError)


@pytest.mark.parametrize("fault", [asyncio.CancelledError, GeneratorExit, SystemExit])
async def test_whatever_a_hook_raises_is_its_own_requests(fault: type[BaseException]) -> None:
    def fails(_: list[int], logits: np.ndarray) -> None:
        raise fault

    async with open_noise({"carry": {}, "is_split": True}) as engine, no_leaks(engine):
        stream = engine.generate(prompt_token_ids=[1], logits_processors=fails)
        assert isinstance(await outcome(stream), InvalidRequest)
        assert len(await ids_of(engine, [1], max_tokens=3, ignore_eos=True)) == 3


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("in_sampling", [True, False])
async def test_a_hang_behind_other_steps_is_noticed(depth: int, in_sampling: bool) -> None:
    """Logits are waited for before the steps ahead have come back: those are well."""
    device = SimDevice(faults=[Fault(depth, "hang", in_sampling=in_sampling)], latency=0.01)
    engine = Engine(
        Noise(), device=device, step_timeout_s=0.2, shutdown_s=0.2, max_in_flight_steps=depth,
        max_num_batched_tokens=4,
    )  # fmt: skip

    def ask(first: int, **params: Any) -> TokenStream:
        return engine.generate(prompt_token_ids=[first] * 4, temperature=0, **params)

    async with engine:
        ahead = [ask(number, max_tokens=1) for number in range(1, depth)]
        hooked = ask(0, max_tokens=9, logits_processors=lambda _, row: row)
        for stream in ahead:
            assert len((await stream).token_ids) == 1
        assert isinstance(await outcome(hooked), DeviceLost)


async def test_a_hook_whose_error_cannot_be_told_fails_alone() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise TypeError("no words")

    def fails(_: list[int], row: np.ndarray) -> np.ndarray:
        raise Mute

    async with open_noise({"carry": {}, "is_split": True}) as engine, no_leaks(engine):
        free = engine.generate(prompt_token_ids=[3], max_tokens=9, temperature=0, ignore_eos=True)
        with pytest.raises(InvalidRequest, match="Mute"):
            await ids_of(engine, [1], logits_processors=fails)
        assert len((await free).token_ids) == 9


async def test_an_ambiguous_grammar_does_not_hold_the_loop() -> None:
    """A token takes some ms of the loop at most; the library's own limits would allow 60."""
    matcher = await compiler().compile(form(lark='start: start start | "a" | "b"'))
    took_s = []
    for _ in range(60):
        await fill_bitmask([matcher], VOCAB)
        begun_s = time.thread_time()
        matcher.advance(97)
        took_s.append(time.thread_time() - begun_s)
    assert max(took_s) < 0.02
