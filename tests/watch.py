"""What an engine's scheduler does, written down, and short ways to ask SUM."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support import sum_reference

if TYPE_CHECKING:
    from aneuron import Completion, Engine
    from aneuron.plans import ModelRunnerOutput, SchedulerOutput
    from aneuron.request import Request


@dataclass
class Watch:
    """What an engine's scheduler did, in order, by internal id of the request."""

    admitted: list[tuple[int, int]] = field(default_factory=list)  # by which step
    ended: dict[int, int] = field(default_factory=dict)  # with the token of which step
    steps: list[list[int]] = field(default_factory=list)  # who got a token in each
    preempted: list[int] = field(default_factory=list)  # in each pass that preempted some
    num_planned: int = 0

    def gap(self, request_id: int) -> int:
        """The most steps from one token of a request to the next."""
        at = [number for number, ids in enumerate(self.steps) if request_id in ids]
        return max(b - a for a, b in itertools.pairwise(at))


def watched(engine: Engine) -> Watch:
    """Look at what the scheduler of an engine does from now on."""
    scheduler, watch = engine._core.scheduler, Watch()
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def watch_schedule() -> SchedulerOutput | None:
        before = scheduler.num_preemptions
        plan = schedule()
        if scheduler.num_preemptions > before:
            watch.preempted.append(scheduler.num_preemptions - before)
        if plan is not None:
            watch.num_planned = plan.step_id
            watch.admitted += [(new.request_id, plan.step_id) for new in plan.new_requests]
        return plan

    def watch_update(plan: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        updated = update(plan, output)
        watch.steps.append([request.request_id for request in updated])
        for request in updated:
            if request.is_finished:
                watch.ended[request.request_id] = plan.step_id
        return updated

    scheduler.schedule = watch_schedule  # type: ignore[method-assign]
    scheduler.update_from_output = watch_update  # type: ignore[method-assign]
    return watch


async def together(engine: Engine, prompts: list[list[int]], count: int) -> list[Completion]:
    return await asyncio.gather(
        *(engine.generate(prompt_token_ids=prompt, max_tokens=count) for prompt in prompts)
    )


async def one_sum(engine: Engine, prompt: list[int], count: int = 8) -> int:
    """Check that a prompt's answer is as alone; return how much of it was cached."""
    async with asyncio.timeout(10):
        answer = await engine.generate(prompt_token_ids=prompt, max_tokens=count)
    assert answer.token_ids == sum_reference(prompt, count)
    return answer.usage.cached_tokens
