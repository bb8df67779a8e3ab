"""Decides what the next step computes, and what a step's tokens mean.

Comes in: requests, and the output of each step. Goes out: `SchedulerOutput`, the plan of
one step. Pure bookkeeping on the loop: no device, no await, no knowledge of async or sync.
State of running requests is columns by slot, worked on whole. How these operations are
written is measured (docs/log.md): operands of one shape and dtype, int64 as indices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.outputs import FinishReason, NewRequest, SchedulerOutput
from aneuron.request import Request, RequestState
from aneuron.slots import SlotTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aneuron.errors import AneuronError
    from aneuron.kv_cache import KVCacheManager
    from aneuron.outputs import ModelRunnerOutput

__all__ = ["Scheduler"]

_NO_SLOTS = np.zeros(0, np.int64)
_BlockUpdates = tuple[np.ndarray, np.ndarray, np.ndarray]  # slots, columns, blocks
_NO_UPDATES: _BlockUpdates = _NO_SLOTS, _NO_SLOTS, _NO_SLOTS
# Padded query positions of a prefill, per token of the budget. Attention pads every row to
# the longest: one long prompt beside many short ones would cost that many long ones.
_MAX_PADDING = 2


class Scheduler:
    """Continuous batching, first come, first served.

    Prefill and decode are separate steps and take turns, so a stream gets a token at least
    every second step while prompts are computed.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        length_limit: int,
        eos_token_ids: Iterable[int],
        num_slots: int,
        clock: Callable[[], float],
    ) -> None:
        """Make an empty scheduler; `clock` gives the time in seconds for request records."""
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.length_limit = length_limit
        self.eos_token_ids = tuple(eos_token_ids)
        self.clock = clock
        self._waiting: dict[int, Request] = {}
        self._preempted: dict[int, Request] = {}
        self._order: list[int] = []  # slots of running requests, oldest first
        self._prefilling: list[int] = []  # those whose prompt is not all planned, oldest first
        self._removed: list[int] = []  # slots that left since the last plan
        self._slots = SlotTable(num_slots, kv)
        self._computed = np.zeros(num_slots, np.int32)  # prompt tokens planned
        self._prefill_end = np.zeros(num_slots, np.int32)  # prompt tokens
        # Tokens in flight are off these two, so a row that will end by length, and one that
        # needs a block, are known one step ahead. Where a slot is not active: 0, and 1.
        self._left_and_room = np.zeros((2, num_slots), np.int32)
        self._left, self._room = self._left_and_room  # until it ends; that its blocks take
        self._room[:] = 1
        self._has_shortage = False  # some active slot has no room
        self._active_twice = np.zeros((2, num_slots), np.int32)
        self._active = self._active_twice[0]  # 1: decodes, and has tokens left
        self._num_active = 0
        self._decoding: tuple[np.ndarray, np.ndarray] | None = None  # active slots and ids
        self._ending: list[int] = []  # slots whose token of the plan being made is the last
        self._ones = np.ones(max_num_seqs, np.int32)
        self._prefilled_last = False
        self._step_id = 0
        self.num_preemptions = 0

    # ── what the engine asks ────────────────────────────────────────────────────────────

    @property
    def num_running(self) -> int:
        """Requests with tokens to compute; not those whose last token is in flight."""
        return len(self._order)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, preempted ones included."""
        return len(self._waiting) + len(self._preempted)

    @property
    def num_held(self) -> int:
        """Slots that a request, or a step in flight, holds."""
        return len(self._order) + len(self._slots.leaving)

    @property
    def is_empty(self) -> bool:
        """Nothing runs, waits, or is held by a step in flight."""
        return not (self.num_held or self.num_waiting)

    @property
    def wants_room(self) -> bool:
        """Somebody waits, or could go on: slots, blocks or tokens in flight are missing."""
        return bool(self.num_waiting or self._num_active)

    def add(self, request: Request) -> None:
        """Queue a request whose prompt is known and fits."""
        request.state = RequestState.WAITING
        self._waiting[request.request_id] = request

    def finish(self, request: Request, reason: FinishReason, **facts: Any) -> None:
        """End a request now, wherever it stands; late tokens of it are dropped.

        `facts` are those of `Request.finish`: stop_reason, abort_reason, error.
        """
        state = request.state
        if state is RequestState.FINISHED:
            return
        self._waiting.pop(request.request_id, None)
        self._preempted.pop(request.request_id, None)
        if state is RequestState.RUNNING:
            self._leave(request.slot)
        request.finish(reason, now_s=self.clock(), **facts)
        self._slots.forget_receivers()
        if request.slot < 0:
            request.release()
        elif self._slots.applied_step == self._step_id:  # else with a step in flight
            self._slots.release_unheld()

    def abandon(self, error: AneuronError) -> None:
        """End every request and free everything: no step in flight will come back."""
        holders = self._slots.holders
        for request in [*holders, *self._waiting.values(), *self._preempted.values()]:
            self.finish(request, FinishReason.ERROR, error=error.copy())
        self._slots.applied(self._step_id)

    def take_removed(self) -> tuple[int, ...]:
        """Return the slots that left the batch since the last plan, and forget them."""
        removed, self._removed = tuple(self._removed), []
        return removed

    # ── schedule ────────────────────────────────────────────────────────────────────────

    def schedule(self) -> SchedulerOutput | None:
        """Return the plan of the next step, or None when nothing can run now."""
        if self._prefilled_last:
            plan = self._schedule_decode() or self._schedule_prefill()
        else:
            plan = self._schedule_prefill() or self._schedule_decode()
        if plan is not None:
            self._prefilled_last = not plan.is_decode
        return plan

    def _schedule_prefill(self) -> SchedulerOutput | None:
        if not (self._prefilling or self._waiting or self._preempted):
            return None
        budget = self.max_num_batched_tokens
        slots, counts = self._continue_prefills(budget)
        budget -= sum(counts)
        new: list[NewRequest] = []
        while budget > 0 and (request := self._admissible()) is not None:
            count = min(budget, request.prompt_len + len(request.output_ids))
            if not self._packs(counts, count):
                break
            new.append(self._admit(request))
            slots.append(new[-1].slot)
            counts.append(count)
            budget -= count
        if not slots:
            return None
        slot_array, count_array = np.array(slots, np.int64), np.array(counts, np.int32)
        self._computed[slot_array] += count_array
        self._slots.hold(slot_array, self._step_id + 1)
        last = self._computed[slot_array] >= self._prefill_end[slot_array]
        self._begin_decode(slot_array[last].tolist())
        return self._plan(
            slot_array, self._slots.request_ids[slot_array], count_array, is_decode=False,
            new=tuple(new),
        )  # fmt: skip

    def _continue_prefills(self, budget: int) -> tuple[list[int], list[int]]:
        """Return slots and counts of prompts that were cut and go on."""
        slots: list[int] = []
        counts: list[int] = []
        for slot in self._prefilling:
            count = min(budget, int(self._prefill_end[slot] - self._computed[slot]))
            if count:
                slots.append(slot)
                counts.append(count)
                budget -= count
        return slots, counts

    def _begin_decode(self, slots: list[int]) -> None:
        """Note that these prompts are planned to their end, and so give their first token."""
        for slot in slots:
            self._prefilling.remove(slot)
            num_tokens = int(self._prefill_end[slot])
            self._left[slot] = self._limit_of(self._slots[slot]) - num_tokens - 1
            self._room[slot] = self.kv.num_held[slot] * self.kv.block_size - num_tokens
            self._set_active(slot, is_active=True)
        self._retire_spent()

    def _set_active(self, slot: int, *, is_active: bool) -> None:
        self._decoding = None
        self._num_active += int(is_active) - int(self._active[slot])
        self._active_twice[:, slot] = is_active
        self._has_shortage = True  # maybe: to be looked at

    def _retire_spent(self) -> None:
        """Let slots go whose last token is planned; their row of this plan ends by length.

        Their requests give their seats to others now, slots and blocks with this step.
        """
        spent = (self._left < self._active).nonzero()[0].tolist()
        self._ending += spent
        for slot in spent:
            self._order.remove(slot)
            self._set_active(slot, is_active=False)
            self._room[slot] = 1
            self._slots.leave(slot)

    def _packs(self, counts: list[int], count: int) -> bool:
        """Whether one more row of `count` tokens goes well with the others of a prefill."""
        padded = (len(counts) + 1) * max(*counts, count) if counts else 0
        return padded <= _MAX_PADDING * self.max_num_batched_tokens

    def _admissible(self) -> Request | None:
        """Return the request that is next in line, if it can be admitted now."""
        if len(self._order) >= self.max_num_seqs or not self._slots.num_free:
            return None
        queue = self._preempted or self._waiting  # preempted ones are older
        if not queue:
            return None
        request = queue[min(queue) if self._preempted else next(iter(queue))]
        if request.slot >= 0:  # its tokens in flight have not arrived
            return None
        # One block more for each running request, or the newcomer would be preempted at once.
        tokens = request.prompt_len + len(request.output_ids)
        wanted = self.kv.blocks_for(tokens) + len(self._order)
        return request if wanted <= self.kv.num_free else None

    def _admit(self, request: Request) -> NewRequest:
        """Give a request its slot and the blocks for all its tokens so far."""
        self._waiting.pop(request.request_id, None)
        self._preempted.pop(request.request_id, None)
        slot = self._slots.take(request)
        assert request.prompt_ids is not None
        token_ids = np.concatenate([request.prompt_ids, np.asarray(request.output_ids, np.int32)])
        blocks = self.kv.allocate(slot, self.kv.blocks_for(len(token_ids)))
        assert blocks is not None
        request.state = RequestState.RUNNING
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self.clock()
        self._computed[slot] = 0
        self._prefill_end[slot] = len(token_ids)
        end_ids = () if request.params.ignore_eos else self.eos_token_ids
        self._slots.set_stop_ids(slot, request.params.stop_token_ids + end_ids)
        self._order.append(slot)
        self._prefilling.append(slot)
        return NewRequest(
            request.request_id, slot, token_ids, request.prompt_len, blocks, request.params,
            request.seed,
        )  # fmt: skip

    def _limit_of(self, request: Request) -> int:
        """Return at how many tokens a request ends by length."""
        max_tokens, most = request.params.max_tokens, self.length_limit
        return most if max_tokens is None else min(request.prompt_len + max_tokens, most)

    def _schedule_decode(self) -> SchedulerOutput | None:
        if not self._num_active:
            return None
        updates, is_starved = self._grow() if self._has_shortage else (_NO_UPDATES, False)
        ready, decoding = self._active_twice, self._decoding
        if is_starved:  # some were preempted, or get no block and sit this step out
            ready, decoding = self._active_twice * (self._room > 0), None
        if decoding is None:
            slots = ready[0].nonzero()[0]
            decoding = slots, self._slots.request_ids[slots]
        self._decoding = None if is_starved else decoding
        slots, ids = decoding
        if not slots.size:
            return None
        self._left_and_room -= ready
        if np.count_nonzero(self._left_and_room) < self._num_active + len(self._room):
            self._has_shortage = True
            self._retire_spent()
        self._slots.hold(slots, self._step_id + 1)
        return self._plan(slots, ids, self._ones[: len(slots)], is_decode=True, updates=updates)

    def _grow(self) -> tuple[_BlockUpdates, bool]:
        """Give slots without room their next block.

        Returns:
            slots, columns of their tables and blocks, each [k]; whether some got none.
        """
        short = (self._room < self._active).nonzero()[0]
        self._has_shortage = is_starved = self.kv.num_free < short.size
        if is_starved:
            short = self._make_room(short)
        if not short.size:
            return _NO_UPDATES, is_starved
        self._room[short] = self.kv.block_size
        return (short, *self.kv.extend(short)), is_starved

    def _make_room(self, short: np.ndarray) -> np.ndarray:
        """Preempt, latest first, until enough blocks are or come free; return who gets one now.

        Blocks of requests that left come free with the step that holds them: waiting is
        cheaper than recomputing. A lone request is never preempted: its limit lets it fit.
        """
        wanted = len(short)
        coming = sum(int(self.kv.num_held[slot]) for slot in self._slots.leaving)
        while self.kv.num_free + coming < wanted and len(self._order) > 1:
            slot = self._order[-1]
            # The victim may be one of the rows that want a block, and then wants none.
            wanted -= not self._room[slot]
            coming += int(self.kv.num_held[slot]) if self._slots.is_held(slot) else 0
            self._preempt(self._slots[slot])
        wanting = set(short.tolist())
        oldest_first = [slot for slot in self._order if slot in wanting]
        return np.array(oldest_first[: self.kv.num_free], np.int64)

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._preempted[request.request_id] = request
        request.state = RequestState.PREEMPTED
        self._leave(request.slot)
        self._slots.release_unheld()

    def _plan(
        self,
        slots: np.ndarray,
        ids: np.ndarray,
        counts: np.ndarray,
        *,
        is_decode: bool,
        new: tuple[NewRequest, ...] = (),
        updates: _BlockUpdates = _NO_UPDATES,
    ) -> SchedulerOutput:
        self._step_id += 1
        removed, ending = self.take_removed(), tuple(self._ending)
        self._removed, self._ending = list(ending), []  # their rows are of this plan still
        return SchedulerOutput(
            self._step_id, is_decode, ids, slots, counts, new, removed, ending, *updates
        )

    # ── update ──────────────────────────────────────────────────────────────────────────

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        """Take a step's tokens; return the requests that got one, each with it appended."""
        updated, stopped = self._slots.append(output.slots, output.token_ids)
        if not plan.is_decode:
            now_s = self.clock()
            for request in updated:
                if request.first_token_s is None:
                    request.first_token_s = now_s
        for request in stopped:
            self._stop(request, request.output_ids[-1])
        for slot in plan.ending_slots:
            self.finish(self._slots[slot], FinishReason.LENGTH)  # unless it has ended
        self._slots.applied(plan.step_id)
        return updated

    def _stop(self, request: Request, token: int) -> None:
        """End a request at an end id or stop id, unless it comes too early."""
        room = self._limit_of(request) - request.prompt_len
        if request.is_finished or len(request.output_ids) < min(request.params.min_tokens, room):
            return
        request.last_is_end_id = True
        named = token in request.params.stop_token_ids
        self.finish(request, FinishReason.STOP, stop_reason=token if named else None)

    def fail(self, plan: SchedulerOutput, error: AneuronError) -> None:
        """End the requests of a step that failed on the device, and let go of the step."""
        for slot in plan.slots.tolist():
            self.finish(self._slots[slot], FinishReason.ERROR, error=error.copy())
        self._slots.applied(plan.step_id)

    def _leave(self, slot: int) -> None:
        if slot in self._slots.leaving:  # its last token is in flight
            return
        self._order.remove(slot)
        if slot in self._prefilling:
            self._prefilling.remove(slot)
        self._set_active(slot, is_active=False)
        self._left[slot], self._room[slot] = 0, 1
        self._removed.append(slot)
        self._slots.leave(slot)
