"""`Prompts`: how far the prompt of each slot is planned and written, and the next chunks.

Used by the scheduler alone, on the loop. A request that resumes after a preemption has its
output so far for part of its prompt.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aneuron.kv_cache import KVCacheManager
    from aneuron.plans import Fork, SchedulerOutput
    from aneuron.request import Request
    from aneuron.scheduler.slots import SlotTable

__all__ = ["Chunks", "Prompts"]

# Padded query positions of a prefill, per token of the budget. Attention pads every row to
# the longest: one long prompt beside many short ones would cost that many long ones.
_MAX_PADDING = 2
# Prefill steps in which all that waits now is let in, if decodes are not to be disturbed less.
# In a model of 2 cores, 64 clients with 512 + 128 tokens each, the first token took 25.6 s with 64
# tokens a step whatever waits, 13.8 s with this, 6.9 s with 32; docs/log.md.
_STEPS_TO_WAIT = 96
_UNKNOWN = -(2**30)  # tokens written; far enough below 0 for whatever is added


class Chunks:
    """What one step computes of prompts: at most `budget` tokens, without much padding."""

    def __init__(self, budget: int, max_prompts: int | None = None) -> None:
        """Begin with nothing."""
        self._most_padded = _MAX_PADDING * budget
        self._max_prompts = max_prompts
        self.left = budget
        self._longest = 0
        self.slots: list[int] = []
        self.counts: list[int] = []

    def room_for(self, num_tokens: int) -> int:
        """Return how many of these tokens fit in as one more row; 0 if the row does not."""
        if len(self.counts) == self._max_prompts:
            return 0
        count = min(num_tokens, self.left)
        padded = (len(self.counts) + 1) * max(self._longest, count)
        return count if padded <= self._most_padded or not self.counts else 0

    def add(self, slot: int, count: int) -> None:
        """Compute this many tokens of a slot's prompt."""
        self.slots.append(slot)
        self.counts.append(count)
        self.left -= count
        self._longest = max(self._longest, count)


class Prompts:
    """Columns over slots, int32: tokens planned, tokens of steps that resolved, and the end."""

    def __init__(
        self,
        num_slots: int,
        kv: KVCacheManager,
        slots: SlotTable,
        budget: tuple[int, int],
        max_prompts: int | None = None,
    ) -> None:
        """Make empty columns.

        Args:
            num_slots: of the columns.
            kv: whose blocks they fill.
            slots: who holds them.
            budget: tokens of a step that computes nothing else, and of one between decodes.
            max_prompts: in a step; None is any number.
        """
        self._most, self._most_between = budget
        self._max_prompts = max_prompts
        self._kv = kv
        self._slots = slots
        self.planned = np.zeros(num_slots, np.int32)
        self.written = np.zeros(num_slots, np.int32)
        self.end = np.zeros(num_slots, np.int32)
        self.unfinished: list[int] = []  # not all planned; first in line, first
        # Choices whose first step is in flight, and whose slot computes their prompt.
        self._waking: dict[int, int] = {}

    def begin(self, request: Request, done: int, num_tokens: int) -> None:
        """Note a prompt of which the cache has `done` tokens; other choices wait for it."""
        for one in (request, *request.unforked):
            self.planned[one.slot] = self.written[one.slot] = done
            self.end[one.slot] = num_tokens
        insort(self.unfinished, request.slot, key=self._slots.rank_of)

    def chunks(self, num_decodes: int, num_waiting: int) -> Chunks:
        """Return an empty step: smaller the more requests that decode wait for it.

        Larger the more tokens wait for their turn: with a fixed size, requests that keep coming
        would wait for ever longer while few of them decode.
        """
        waiting = num_waiting + int((self.end - self.planned)[self.unfinished].sum())
        between = max(self._most_between, waiting // _STEPS_TO_WAIT)
        budget = max(min(between, self._most), self._most // max(1, num_decodes))
        return Chunks(budget, self._max_prompts)

    def resume(self, slot: int, chunks: Chunks) -> None:
        """Go on with a prompt that was cut."""
        if count := chunks.room_for(int(self.end[slot] - self.planned[slot])):
            chunks.add(slot, count)

    def plan(self, chunks: Chunks) -> list[int]:
        """Note that a step computes these; return the slots whose prompt ends with it."""
        self.planned[chunks.slots] += np.array(chunks.counts, np.int32)
        ended = [slot for slot in chunks.slots if self.planned[slot] >= self.end[slot]]
        for slot in ended:
            self.unfinished.remove(slot)
        return ended

    def wake(self, fork: Fork) -> None:
        """Note choices that join with the last chunk of their prompt."""
        self.planned[fork.slots] = self.end[fork.slots]
        self._waking.update(dict.fromkeys(fork.slots.tolist(), fork.slot))

    def leave(self, slot: int) -> None:
        """Forget a prompt that is given up."""
        if slot in self.unfinished:
            self.unfinished.remove(slot)

    def resolved(self, plan: SchedulerOutput) -> None:
        """Note that a step has written its chunks: their blocks can be found now."""
        for fork in plan.forks:
            self.written[fork.slots] = self.end[fork.slots]
            for slot in fork.slots.tolist():
                del self._waking[slot]
        self.written[plan.slots] += plan.num_scheduled
        for slot, count in zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True):
            if count:
                self._kv.offer(slot, self._slots[slot], int(self.written[slot]))

    def failed(self, plan: SchedulerOutput) -> list[int]:
        """Return the slots that need what a step that failed should have written.

        Those of its rows, and of choices that were woken behind it. They offer nothing any
        more, not even once a later chunk, which was in flight behind it, has resolved.
        """
        slots: list[int] = plan.slots.tolist()
        for fork in plan.forks:
            for slot in fork.slots.tolist():
                del self._waking[slot]
        slots += [slot for slot, leader in self._waking.items() if leader in slots]
        self.written[slots] = _UNKNOWN
        return slots

    def abandon(self) -> None:
        """Wait for no step: none will come back."""
        self._waking.clear()

    def give_back(self, slot: int, request: Request) -> None:
        """Take the blocks of a slot that no step in flight holds; what they hold can be found.

        The last token of a request was never computed, or only by a step that came too late.
        """
        written = int(self.written[slot])
        if written >= self.end[slot]:
            written = max(written, request.prompt_len + len(request.output_ids) - 1)
        self._kv.offer(slot, request, written)
        self._kv.free(slot)
