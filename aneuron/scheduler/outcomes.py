"""`Outcomes`: what a step's tokens mean for the requests that get them.

Used by the scheduler alone, on the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aneuron.errors import InvalidRequest
from aneuron.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from aneuron.plans import ModelRunnerOutput, SchedulerOutput
    from aneuron.request import Request
    from aneuron.scheduler.prompts import Prompts
    from aneuron.scheduler.slots import SlotTable

__all__ = ["Outcomes"]


class Outcomes:
    """Appends tokens, and ends the requests that they end."""

    def __init__(
        self,
        slots: SlotTable,
        prompts: Prompts,
        *,
        finish: Callable[..., None],
        length_limit: int,
        end_ids: Container[int],
        clock: Callable[[], float],
    ) -> None:
        """Make one; `finish` is the scheduler's."""
        self._slots = slots
        self._prompts = prompts
        self._finish = finish
        self._length_limit = length_limit
        self._end_ids = end_ids
        self._clock = clock

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        """Take tokens of a step; return the requests that got one, each with it appended."""
        self._slots.take_logprobs(output)  # before the tokens, which may end some
        updated, stopped = self._slots.append(output.slots, output.token_ids)
        if plan.is_prefill:
            self._note_prefill(plan, updated)
        for request in stopped:
            self._stop(request, request.output_ids[-1])
        for request in self._slots.guided:
            self._advance(request)
        if not output.more:
            for slot in plan.ending_slots:
                self._finish(self._slots[slot], FinishReason.LENGTH)  # unless it has ended
            self._slots.applied(plan.step_id)
        return updated

    def _note_prefill(self, plan: SchedulerOutput, updated: list[Request]) -> None:
        self._prompts.resolved(plan)
        now_s = self._clock()
        for request in updated:
            if request.first_token_s is None:
                request.first_token_s = now_s

    def _stop(self, request: Request, token: int) -> None:
        """End a request at an end id or stop id, unless it comes too early."""
        room = request.limit(self._length_limit) - request.prompt_len
        if request.is_finished or len(request.output_ids) < min(request.params.min_tokens, room):
            return
        request.last_is_end_id = True
        named = token in request.params.stop_token_ids
        self._finish(request, FinishReason.STOP, stop_reason=token if named else None)

    def _advance(self, request: Request) -> None:
        """Tell a grammar what its request was given; one that nothing can follow ends it."""
        matcher = request.matcher
        if request.is_finished or matcher is None:
            return
        token = request.output_ids[-1]
        matcher.advance(token)
        if matcher.error is not None:
            why = "; did hooks leave what it allows?" if request.params.logits_processors else ""
            error = InvalidRequest(f"the grammar failed: {matcher.error}{why}", param="grammar")
            self._finish(request, FinishReason.ERROR, error=error)
        elif matcher.is_stopped:
            request.last_is_end_id = token in self._end_ids  # also where they are ignored
            self._finish(request, FinishReason.STOP)
