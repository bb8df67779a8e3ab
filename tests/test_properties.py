"""Random interleavings: whatever comes, every output is as alone, and nothing is left.

On COUNT and SUM one stale, doubled, lost or swapped token shows; SUM also reads the whole
context back through the block tables. The reference is arithmetic, not an engine.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from aneuron.engine import Engine
from aneuron.testing import Count, SimDevice, SimModel, Sum, assert_idle, wait_all_idle
from tests.scenarios import MAX_LEN, VOCAB, Job, beside, check_counts, hog, jobs, play, reference
from tests.support import CARRIES, recorded

if TYPE_CHECKING:
    from aneuron import TokenStream

PATIENCE_S = max(300, settings().max_examples)  # 0.1 s an example, and the loops' share


def model_of(kind: str) -> tuple[SimModel, list[list[list[int]]]]:
    """The model, and what each of its ranks samples."""
    return recorded(Count if kind == "count" else Sum, vocab_size=VOCAB, max_model_len=MAX_LEN)


engine_options = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 5),
        "block_size": st.sampled_from([1, 3, 4, 16]),
        "num_kv_blocks": st.just(0),  # replaced: enough for one to three long requests
        "max_num_batched_tokens": st.sampled_from([4, 16, 256]),
        "num_seqs_buckets": st.sampled_from([None, [], [1, 2, 4, 8], [8]]),
    }
)

# Of each rank and program, in seconds.
latencies = st.sampled_from([(0.0,), (0.0003,), (0.0, 0.0, 0.0004), (0.0002, 0.0008)])
skews = st.sampled_from([(0.0,), (0.0, 0.0005), (0.0, 0.0, 0.001)])


@dataclass(frozen=True)
class Ranks:
    """Devices: how many, how fast, and how far apart."""

    number: int
    latency: tuple[float, ...]
    skew: tuple[float, ...]
    seed: int

    def device(self) -> SimDevice:
        rng = random.Random(self.seed)
        return SimDevice(
            latency=lambda _: rng.choice(self.latency), skew_s=lambda _: rng.choice(self.skew)
        )


ranks_of_engines = st.builds(
    Ranks, number=st.integers(1, 3), latency=latencies, skew=skews, seed=st.integers(0, 1000)
)


def engine_of(
    model: SimModel, options: dict[str, Any], pool: float, carry: str, ranks: Ranks
) -> Engine:
    needed = -(-MAX_LEN // options["block_size"])
    options = {**options, **CARRIES[carry], "num_kv_blocks": int(needed * pool)}
    return Engine(model, device=ranks.device(), num_ranks=ranks.number, **options)


@settings(max_examples=settings().max_examples // 2)  # on each of two loops
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("carry", list(CARRIES))
@pytest.mark.parametrize("kind", ["count", "sum"])
@given(
    scenario=st.lists(jobs, min_size=1, max_size=8),
    options=engine_options,
    pool=st.sampled_from([1.0, 1.5, 3.0, 20.0]),
    ranks=ranks_of_engines,
    hogs=st.none() | st.integers(0, 1000),
)
async def test_every_output_is_as_alone_and_nothing_is_left(
    carry: str,
    kind: str,
    scenario: list[Job],
    options: dict[str, Any],
    pool: float,
    ranks: Ranks,
    hogs: int | None,
) -> None:
    model, told = model_of(kind)
    async with (
        engine_of(model, options, pool, carry, ranks) as engine,
        beside(None if hogs is None else hog(hogs)),
    ):
        await play(engine, scenario, kind, carry)
        assert len(told) == ranks.number
        assert all(one == told[0] for one in told), "ranks differ"


class EngineMachine(RuleBasedStateMachine):
    """Submit, read, give up, wait: in any order, against a live engine."""

    carry = "handoff"
    kind = "sum"

    def __init__(self) -> None:
        """Make the loop that the rules drive."""
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engine: Engine | None = None
        self.told: list[list[list[int]]] = []
        self.open: dict[int, tuple[TokenStream, list[int], list[int]]] = {}
        self.number = 0

    @initialize(
        options=engine_options, pool=st.sampled_from([1.0, 2.0, 20.0]), ranks=ranks_of_engines
    )  # fmt: skip
    def open_engine(self, options: dict[str, Any], pool: float, ranks: Ranks) -> None:
        model, self.told = model_of(self.kind)
        self.engine = engine_of(model, options, pool, self.carry, ranks)
        self.loop.run_until_complete(self.engine.open())

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 20),
    )
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        async def run() -> None:
            assert self.engine is not None
            stream = self.engine.generate(prompt_token_ids=prompt, max_tokens=max_tokens)
            self.open[self.number] = (stream, reference(self.kind, prompt, max_tokens), [])

        self.loop.run_until_complete(run())
        self.number += 1

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100), count=st.integers(1, 5))
    def read(self, which: int, count: int) -> None:
        async def run() -> None:
            key = list(self.open)[which % len(self.open)]
            stream, expected, got = self.open[key]
            for _ in range(count):
                token = await anext(stream, None)
                if token is None:
                    assert got == expected
                    del self.open[key]
                    return
                assert token.token_id is not None
                got.append(token.token_id)
                assert got == expected[: len(got)]

        self.loop.run_until_complete(asyncio.wait_for(run(), 10))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100), how=st.sampled_from(["cancel", "drop", "aclose"]))
    def give_up(self, which: int, how: str) -> None:
        async def run() -> None:
            key = list(self.open)[which % len(self.open)]
            stream, *_ = self.open.pop(key)
            if how == "cancel":
                stream.cancel()
            elif how == "aclose":
                await stream.aclose()

        self.loop.run_until_complete(asyncio.wait_for(run(), 10))

    @rule(turns=st.integers(1, 20))
    def let_it_run(self, turns: int) -> None:
        async def run() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(run())

    @rule(seconds=st.sampled_from([0.0002, 0.001]), turns=st.integers(0, 3))
    def block_the_loop(self, seconds: float, turns: int) -> None:
        async def run() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            time.sleep(seconds)
            await asyncio.sleep(0)

        self.loop.run_until_complete(run())

    @rule()
    def abandon_all_and_come_to_rest(self) -> None:
        async def run() -> None:
            assert self.engine is not None
            for stream, *_ in self.open.values():
                stream.cancel()
            self.open.clear()
            await wait_all_idle(self.engine)
            assert_idle(self.engine)

        self.loop.run_until_complete(run())

    def teardown(self) -> None:
        """Read what is open to its end, then close."""

        async def run() -> None:
            if self.engine is None:
                return
            async with aclosing(self.engine):
                for stream, expected, _ in self.open.values():
                    assert (await stream).token_ids == expected
                await wait_all_idle(self.engine)
                assert_idle(self.engine)
                check_counts(self.engine, self.carry)
                assert all(one == self.told[0] for one in self.told), "ranks differ"

        try:
            self.loop.run_until_complete(asyncio.wait_for(run(), 20))
        finally:
            self.loop.close()


class HandoffMachine(EngineMachine):
    """The published protocol."""


class HostMachine(EngineMachine):
    """The synchronous baseline."""

    carry = "host"


class ResidentMachine(EngineMachine):
    """Slots on the device."""

    carry = "resident"


def case_of(machine: type[EngineMachine]) -> Any:
    """Its test case; one example is up to 50 rules, so half as many do."""
    case = machine.TestCase
    case.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=50)
    return pytest.mark.timeout(PATIENCE_S)(case)


TestHandoffMachine = case_of(HandoffMachine)
TestHostMachine = case_of(HostMachine)
TestResidentMachine = case_of(ResidentMachine)
