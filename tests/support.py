"""What several test files share: short ways to say a request, and what COUNT and SUM answer."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import Completion, DeviceFuture, SamplingParams
from aneuron.batch import InputBatch
from aneuron.carry import make_carry
from aneuron.config import BatchShape, EngineConfig
from aneuron.kv_cache import KVCacheManager
from aneuron.request import Request
from aneuron.runner import ModelRunner
from aneuron.scheduler import Scheduler
from aneuron.testing import Count, SimDevice, SimModel, assert_idle, wait_all_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from aneuron import Engine, Token, TokenStream
    from aneuron.inflight import InFlightStep
    from aneuron.plans import StepRecord

STEP_S = 0.005
both_schedulings = pytest.mark.parametrize("async_scheduling", [True, False])

# Engine options of each token carry; a test gets one as `carry` and opens with `**carry`.
CARRIES: dict[str, dict[str, Any]] = {
    "host": {"async_scheduling": False},
    "handoff": {"token_carry": "handoff"},
    "resident": {"token_carry": "resident"},
}
every_carry = pytest.mark.parametrize("carry", CARRIES.values(), ids=CARRIES)
both_async_carries = pytest.mark.parametrize(
    "carry", [CARRIES["handoff"], CARRIES["resident"]], ids=["handoff", "resident"]
)


def after(last: int, count: int) -> list[int]:
    """What COUNT says after a prompt that ends in `last`."""
    return list(range(last + 1, last + 1 + count))


def sum_reference(prompt: list[int], count: int, vocab_size: int = 1 << 20) -> list[int]:
    """What SUM says, computed without an engine."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(sum((at + 1) * token for at, token in enumerate(ids)) % vocab_size)
    return ids[len(prompt) :]


def start(engine: Engine, last: int = 10, max_tokens: int = 50, **options: Any) -> TokenStream:
    return engine.generate(prompt_token_ids=[last], max_tokens=max_tokens, **options)


def device_of(engine: Engine) -> SimDevice:
    assert isinstance(engine.device, SimDevice)
    return engine.device


def patient() -> Callable[[Any], float]:
    """A latency: a program ends only when the loop has done all it can without its end.

    So what is planned does not depend on how fast this machine is.
    """
    loop = asyncio.get_running_loop()

    def wait(_: Any) -> float:
        done = threading.Event()

        def turn(left: int) -> None:
            if left:
                loop.call_soon(turn, left - 1)
            else:
                done.set()

        loop.call_soon_threadsafe(turn, 12)
        done.wait()
        return 0.0

    return wait


def recorded(kind: type[SimModel], **options: Any) -> tuple[SimModel, list[list[list[int]]]]:
    """A model, and what each of its ranks samples: of every step the rows that count."""
    told: list[list[list[int]]] = []

    class Recorded(kind):  # type: ignore[misc, valid-type]
        def with_kv(self, *sizes: int) -> Recorded:
            model: Recorded = super().with_kv(*sizes)
            model.told = []
            told.append(model.told)
            return model

        def next_ids(self, ids: Any, inputs: Any) -> Any:
            chosen = super().next_ids(ids, inputs)
            self.told.append(chosen[: inputs.num_reqs].tolist())
            return chosen

    return Recorded(**options), told


def break_counts(engine: Engine) -> dict[str, int]:
    """How often the flow broke, by reason."""
    return {reason: one.count for reason, one in engine.stats().breaks.items()}


async def await_it(stream: TokenStream) -> Any:
    return await stream


async def read(stream: TokenStream, count: int) -> list[int | None]:
    return [(await anext(stream)).token_id for _ in range(count)]


async def items_of(stream: TokenStream) -> list[Token]:
    return [token async for token in stream]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def outcome(stream: TokenStream) -> Completion | BaseException:
    try:
        async with asyncio.timeout(5):
            return await stream
    except BaseException as error:
        return error


async def outcomes(streams: Iterable[TokenStream]) -> list[Any]:
    return await asyncio.gather(*map(outcome, streams))


def exact(answer: Any, last: int, count: int = 40) -> bool:
    return isinstance(answer, Completion) and answer.token_ids == after(last, count)


async def assert_exact(engine: Engine, last: int = 500, count: int = 5) -> None:
    assert exact(await start(engine, last, count), last, count)


async def assert_serves(engine: Engine) -> None:
    """Later requests are served exact, and the pool is full behind them."""
    streams = [start(engine, 1000 * n, 20) for n in range(1, 6)]
    for n, answer in enumerate(await outcomes(streams), 1):
        assert exact(answer, 1000 * n, 20), answer
    await wait_all_idle(engine)
    assert_idle(engine)


async def assert_idle_soon(engine: Engine, steps: int = 3) -> None:
    """The engine is idle no later than `steps` engine steps on."""
    before = device_of(engine).num_steps
    await engine.wait_idle()
    assert device_of(engine).num_steps - before <= steps
    assert_idle(engine)


@asynccontextmanager
async def nothing_logged(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """No InvalidStateError, no "exception was never retrieved", no destroyed task."""
    loop = asyncio.get_running_loop()
    seen: list[dict[str, Any]] = []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: seen.append(context))
    try:
        yield
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(before)
    assert not seen
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# ── the flow, driven by hand ────────────────────────────────────────────────────────────


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class HandDevice:
    """Runs a program when it is launched, and tells its end when the test says so."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, DeviceFuture]] = []  # input_ids, future

    def launch(self, executable: Any, inputs: Any, *, read: bool = True) -> DeviceFuture:
        fed = inputs.input_ids if isinstance(inputs.input_ids, DeviceFuture) else None
        future = self._future(inputs.num_sampled, executable.sampled_dtype)
        future.device_value = executable(inputs, None if fed is None else fed.device_value)
        self.launched.append((inputs.input_ids, future))
        return future

    def gather(self, tokens: DeviceFuture, order: np.ndarray) -> DeviceFuture:
        future = self._future(len(order), tokens.dtype)
        future.device_value = tokens.device_value[order]
        return future

    def _future(self, rows: int, dtype: str) -> DeviceFuture:
        return DeviceFuture(asyncio.get_running_loop(), shape=(rows,), dtype=dtype)


def swap_rows(batch: InputBatch, one: int, other: int) -> None:
    """Let two requests change places in the batch, by way of a row that is free."""
    free = batch.num_reqs
    for source, target in ((one, free), (other, one), (free, other)):
        batch._move(source, target)
    batch._layout = None


class Flow:
    """Scheduler, runner and COUNT at depth 2, over a device that is played by hand.

    The order is that of a device slower than the host: a step is launched as soon as there
    is room for it, and the oldest one ends when there is none.
    """

    def __init__(
        self, carry: str = "handoff", *, num_kv_blocks: int = 64, eos: int = 999, **options: Any
    ) -> None:
        config = EngineConfig(
            **{"max_num_seqs": 4, "block_size": 4, "max_num_batched_tokens": 64, **options}
        )
        shape = BatchShape.of(config, 64)
        self.scheduler = Scheduler(
            KVCacheManager(num_kv_blocks, 4, shape.num_slots),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            length_limit=64,
            eos_token_ids=(eos,),
            num_slots=shape.num_slots,
            clock=lambda: 1.0,
        )
        device: Any = HandDevice()
        self.device: HandDevice = device
        rule = make_carry(carry)
        self.batch = InputBatch(shape, tokens_on_device=rule.tokens_on_device)
        model = Count().with_kv(num_kv_blocks, 4, shape.num_slots)
        self.runner = ModelRunner(device, model, self.batch, rule)
        self.in_flight: list[InFlightStep] = []
        self.records: list[StepRecord] = []

    def add(self, number: int, *prompt: int, **params: Any) -> Request:
        request = Request(number, f"r{number}", SamplingParams(**params), arrival_s=0.0)
        request.prompt_ids = np.array(prompt, np.int32)
        self.scheduler.add(request)
        return request

    async def step(self) -> InFlightStep:
        """Launch the next plan; a break waits until the test resolves what it waits for."""
        plan = self.scheduler.schedule()
        assert plan is not None
        await self.runner.execute_model(plan)
        return self.runner.sample_tokens()

    async def turn(self) -> bool:
        """Launch what there is room for, then let the oldest step end; False at the end."""
        while len(self.in_flight) < 2 and (plan := self.scheduler.schedule()) is not None:
            self.records.append(plan.record)
            execution = asyncio.create_task(self.runner.execute_model(plan))
            await some_turns()
            if not execution.done():  # a break: it needs every step before this one
                for step in self.in_flight:
                    self._end(step)
            await execution
            self.in_flight.append(self.runner.sample_tokens())
        if not self.in_flight:
            return False
        step = self.in_flight.pop(0)
        self._end(step)
        self.scheduler.update_from_output(step.plan, await step.get_output())
        return True

    async def run(self, turns: int = 1000) -> None:
        """Take turns, at most so many, until nothing is left to do."""
        for _ in range(turns):
            if not await self.turn():
                return

    def _end(self, step: InFlightStep) -> None:
        future = step.sampled_token_ids
        future.resolve(future.device_value)
