"""The two coroutines of the engine: the step loop and the materializer.

Comes in: requests. Goes out: tokens, to the requests' consumers. Both run on the caller's
loop, inside the one TaskGroup of the engine's supervisor task. They share their state
without a lock: between two awaits nobody else runs. Cancelled at any await, both leave the
steps in flight where they are; the supervisor then fails what is open and lets go.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from aneuron.clock import clock_of
from aneuron.config import BatchShape
from aneuron.errors import (
    AneuronError,
    ConfigError,
    DeviceError,
    DeviceLost,
    EngineClosed,
    engine_failure,
)
from aneuron.futures import Mailbox, Signal, Watchdog
from aneuron.guidance import Guidance
from aneuron.intake import Intake
from aneuron.kv_cache import KVCacheManager
from aneuron.outputs import AbortReason, EngineStats, FinishReason
from aneuron.parallel.ranks import make_runner
from aneuron.plans import Break
from aneuron.request import Waker
from aneuron.scheduler import Scheduler
from aneuron.threads import check_loop, leave_at_fork
from aneuron.timeline import RING_STEPS, Timeline

if TYPE_CHECKING:
    from aneuron.config import EngineConfig
    from aneuron.futures import DeviceFuture
    from aneuron.inflight import InFlightStep
    from aneuron.models.loading import Loaded
    from aneuron.parallel.ranks import RankGroup, RankStep
    from aneuron.plans import ModelRunnerOutput, ModelSpec, SchedulerOutput
    from aneuron.runner import ModelRunner

__all__ = ["EngineCore"]

_logger = logging.getLogger("aneuron.core")


class EngineCore:
    """Scheduler, runner, and the steps in flight between them."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: ModelRunner | RankGroup,
        spec: ModelSpec,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Make a core at rest; `run` starts it."""
        self.scheduler = scheduler
        self.runner = runner
        self.intake = Intake(
            scheduler, max_waiting=config.max_waiting, can_fork=spec.can_fork, loop=loop,
            notify=self.notify,
        )  # fmt: skip
        self.timeline = Timeline(RING_STEPS if config.timeline else 0)
        self.depth, self.shutdown_s = config.depth, config.shutdown_s
        self.failure: AneuronError | None = None
        self.is_forked = False  # this is a child process: the device's threads are the parent's
        self._loop, self._waker = loop, Waker(loop)
        self._clock = clock_of(loop)
        self._num_in_flight = 0
        self._in_flight: Mailbox[InFlightStep | RankStep] = Mailbox()
        self._watchdog = Watchdog(config.step_timeout_s, self._clock)
        self._changed = Signal()  # for the step loop: look again
        self._guidance = Guidance(
            scheduler, runner, spec, changed=self._changed, watchdog=self._watchdog,
            clock=self._clock,
        )  # fmt: skip
        self._idle = asyncio.Event()
        self._started, self._stopping = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._progressed_s: float | None = None  # None: idle
        self._deadline_s: float | None = None
        self._has_device = False
        self._label = ""  # of an engine that has said it is open
        self._device_closed: list[DeviceFuture] = []  # they resolve at its threads' ends

    @classmethod
    def build(cls, loaded: Loaded, loop: asyncio.AbstractEventLoop) -> Self:
        """Put the parts together; nothing is started."""
        config, spec = loaded.config, loaded.models[0].spec
        shape = BatchShape.of(config, loaded.max_model_len)
        kv = KVCacheManager(
            loaded.num_blocks,
            config.block_size,
            shape.num_slots,
            prefix_caching=config.enable_prefix_caching,
        )
        scheduler = Scheduler(
            kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            interleaved_prefill_tokens=config.interleaved_prefill_tokens
            or spec.interleaved_prefill_tokens,
            max_prompts=spec.max_prompts,
            length_limit=min(loaded.max_model_len, kv.capacity),
            eos_token_ids=spec.eos_token_ids,
            num_slots=shape.num_slots,
            num_draft_tokens=shape.num_draft_tokens,
            clock=loop.time,
        )
        runner = make_runner(config, loaded, shape)
        return cls(config, scheduler, runner, spec, loop)

    async def supervise(self) -> None:
        """Run, and whatever ends it, fail what is open, each with a typed error of its own."""
        error: AneuronError = EngineClosed("the engine was closed")
        try:
            self.runner.start(asyncio.get_running_loop())
        except Exception as fault:  # noqa: BLE001  whatever the driver raises
            self._abandon(fault if isinstance(fault, AneuronError) else engine_failure(fault))
            self._has_device = not isinstance(fault, ConfigError)  # else it is another engine's
            self.let_go()
            return
        self._has_device = True
        leave_at_fork(self)
        try:
            await self.run()
        except AneuronError as failure:
            _logger.exception("the engine failed")
            error = failure
        finally:
            # Also when the loop shuts down and cancels this task.
            self._abandon(error)
            self._guidance.close()
            self.let_go()
        with suppress(TimeoutError):  # the device hangs: its threads are left behind
            async with asyncio.timeout_at(self._stop_deadline()):
                for closed in self._device_closed:
                    await closed
        if self._label:
            counts = self.runner.stats.steps, self.intake.num_generated
            _logger.info("%s is closed: %d steps, %d tokens", self._label, *counts)

    def log_open(self, label: str, spec: ModelSpec, took_s: float) -> None:
        """Write down what has been opened."""
        self._label, kv, carry = label, self.scheduler.kv, self.runner.stats.carry
        _logger.info(
            "%s is open after %.2f s: %s, token carry %s, %d KV blocks of %d tokens",
            label, took_s, spec.dtype, carry, kv.num_blocks, kv.block_size,
        )  # fmt: skip

    def let_go(self) -> None:
        """Close the device if this core has it open: once, and no other engine's."""
        if self._has_device:
            self._has_device = False
            self._device_closed = self.runner.close()

    def leave_to_parent(self) -> None:
        """Fail what is open in a forked child, and touch nothing that has a lock."""
        if self.is_forked:  # a child's child
            return
        self.failure = EngineClosed(
            f"the engine belongs to process {os.getppid()}, which this one was forked from: open "
            "one here, or start processes with the method 'spawn'"
        )
        self.is_forked, self._has_device = True, False
        self.intake.leave_to_parent(self.failure)

    @property
    def is_orphan(self) -> bool:
        """Nobody will ever run it again: its loop has closed, or is the parent process's."""
        return self.is_forked or self._loop.is_closed()

    def check_caller(self) -> None:
        """Check that a call comes from the process and the loop that the core runs on.

        Raises:
            EngineClosed: from a forked child.
            RuntimeError: from elsewhere; it names both loops.
        """
        if self.is_forked and self.failure is not None:
            raise self.failure.copy()
        check_loop(self._loop, what="the engine")

    def _stop_deadline(self) -> float:
        """Return when waiting for the device ends; one deadline for all of the closing."""
        self._deadline_s = self._deadline_s or self.scheduler.clock() + self.shutdown_s
        return self._deadline_s

    def _abandon(self, error: AneuronError) -> None:
        self.failure = error
        self._started.set()  # it may not have come to that
        self.intake.abandon(error)
        self.scheduler.abandon(error)
        self._num_in_flight = 0
        self._rest()

    async def run(self) -> None:
        """Run both coroutines until `stop`, or until one of them fails.

        Raises:
            DeviceLost: the device is gone.
            InternalError: a coroutine failed in another way.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._start(group)
                await self._stopping.wait()
                await self._drained()
                for task in self._tasks | self.intake.tasks:
                    task.cancel()
        except ExceptionGroup as failures:
            failure = engine_failure(failures)
            raise failure from failure.__cause__  # never the group: it says nothing to a user

    def _start(self, group: asyncio.TaskGroup) -> None:
        self.intake.start(group)
        self._tasks = {
            group.create_task(self._step_loop(), name="aneuron-step-loop"),
            group.create_task(self._materializer(), name="aneuron-materializer"),
        }
        self._started.set()

    async def wait_started(self) -> None:
        """Wait until both coroutines are on their way."""
        await self._started.wait()
        if self.failure is not None:
            raise self.failure.copy()

    async def _drained(self) -> None:
        """Wait until idle, for a time; a silent device is left behind."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._stop_deadline()):
                await self.wait_idle()

    def stop(self) -> None:
        """Abort all requests; `run` ends once the device is idle, or after `shutdown_s`."""
        for request in list(self.intake.requests.values()):
            self.intake.end(request, FinishReason.ABORT, AbortReason.SHUTDOWN)
        self._stopping.set()

    # ── the step loop ───────────────────────────────────────────────────────────────────

    async def _step_loop(self) -> None:
        while True:
            plan = await self._next_plan()  # room for a step, and something to do
            await self.runner.execute_model(plan)  # breaks of the flow happen in there
            grammar = None
            if (launch := self.runner.guided) is not None:  # it waits for the tokens before
                grammar = await self._guidance.output(plan, launch)
            self._in_flight.put(self.runner.sample_tokens(grammar))

    async def _next_plan(self) -> SchedulerOutput:
        """Wait for room and work; from here on the plan's step is in flight."""
        held_up: Break | None = None
        while True:
            if self._num_in_flight < self.depth:
                begun_s = self._clock()
                plan = self.scheduler.schedule()
                if plan is not None:
                    self._note_plan(plan, begun_s, held_up)
                    return plan
                if self._num_in_flight and (reason := self.scheduler.lacks) is not None:
                    held_up = held_up or Break(reason, begun_s, begun_s)
                else:
                    held_up = None
            await self._changed.wait()

    def _note_plan(self, plan: SchedulerOutput, begun_s: float, held_up: Break | None) -> None:
        record = plan.record
        record.begun_s, record.scheduled_s = begun_s, self._clock()
        self.timeline.add(record)
        if held_up is not None:
            wait = held_up._replace(end_s=record.scheduled_s)
            self.runner.stats.note_break(record, wait)
        self._num_in_flight += 1

    # ── the materializer ────────────────────────────────────────────────────────────────

    async def _materializer(self) -> None:
        while True:
            step = await self._in_flight.get()
            self._watchdog.watch(step)
            try:
                # Off the critical path: the device runs the next step meanwhile.
                output = await step.get_output()
            except DeviceError as error:
                step.plan.record.error = str(error)
                if isinstance(error, DeviceLost):
                    raise
                self.scheduler.fail(step.plan, error)
                self.timeline.finish(step.plan.record)
            else:
                self._take_in(step.plan, output)
            self._num_in_flight -= 1
            self._progressed_s = self._clock()
            self._watchdog.restart()
            self.notify()
            del step  # idle, nothing of it is kept

    def _take_in(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Let the scheduler have a step's tokens, look for stop strings, wake consumers."""
        if plan.draft_ids is not None:
            self.scheduler.speculation.settle(plan, output)
        for tokens in (output, *output.more):  # a request's one after the other
            self._give(plan, tokens)
        self.timeline.finish(plan.record)

    def _give(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        record, num_watched = plan.record, self.intake.num_watched  # those that end here, too
        updated = self.scheduler.update_from_output(plan, output)
        self.intake.num_generated += len(updated)
        self._changed.set()  # before the consumers: the device waits for none of them
        record.applied_s = self._clock()
        if num_watched:
            self.intake.look_for_stops(updated)
        record.detokenized_s = self._clock()
        self._waker.wake(updated)
        record.delivered_s = self._clock()

    # ── what the engine asks ────────────────────────────────────────────────────────────

    @property
    def is_idle(self) -> bool:
        """Nothing is prepared, runs, waits or is in flight."""
        return not (self._num_in_flight or self.intake.num_preparing) and self.scheduler.is_empty

    def notify(self) -> None:
        """Something changed (a request came or went, a step ended): look again."""
        self._changed.set()
        if not self._num_in_flight and self.is_idle:
            self._rest()
        elif self._progressed_s is None:
            self._progressed_s = self._clock()

    def _rest(self) -> None:
        self.scheduler.speculation.take_rejected()  # of requests that have ended
        self.runner.drain(self.scheduler.take_removed())
        self.timeline.rest()
        self._watchdog.rest()
        self._progressed_s = None
        self._idle.set()

    def records(self) -> dict[str, int]:
        """Return how many per-request records are kept, by kind; all 0 when idle."""
        return {
            "names": len(self.intake.requests),
            "prompts": self.intake.num_preparing,
            "scheduled": self.scheduler.num_held,
            **self.runner.records(),
        }

    async def wait_idle(self) -> None:
        """Wait until the engine is idle."""
        while not self.is_idle:
            self._idle.clear()
            await self._idle.wait()
            if self.failure is not None:
                raise self.failure.copy()

    def stats(self) -> EngineStats:
        """Return a snapshot of counts."""
        scheduler, flow, kv = self.scheduler, self.runner.stats, self.scheduler.kv
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            in_flight_steps=self._num_in_flight,
            num_blocks=kv.num_blocks,
            free_blocks=kv.num_free,
            cached_blocks=kv.num_cached,
            prefix_cache_queries=kv.num_queries,
            prefix_cache_hits=kv.num_hits,
            preemptions=scheduler.num_preemptions,
            draft_tokens=scheduler.speculation.num_drafted,
            accepted_draft_tokens=scheduler.speculation.num_accepted,
            steps=flow.steps,
            decode_steps=flow.decode_steps,
            async_steps=flow.async_steps,
            sync_fallback_steps=flow.sync_fallback_steps,
            breaks=flow.breaks(),
            prompt_tokens=self.intake.num_prompt_tokens,
            generation_tokens=self.intake.num_generated,
            stalled_s=0.0 if self._progressed_s is None else self._clock() - self._progressed_s,
        )
