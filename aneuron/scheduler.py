"""Decides what the next step computes, and what a step's tokens mean.

Comes in: requests, and the output of each step. Goes out: `SchedulerOutput`, the plan of
one step. Pure bookkeeping on the loop: no device, no await, no knowledge of async or sync.
State of running requests is columns by slot; a slot is held from admission until the last
step in flight that holds it has been applied, so a late token always finds its request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.outputs import FinishReason, NewRequest, SchedulerOutput
from aneuron.request import Request, RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aneuron.errors import AneuronError
    from aneuron.kv_cache import KVCacheManager
    from aneuron.outputs import ModelRunnerOutput

__all__ = ["Scheduler"]

_NO_UPDATES = (np.zeros(0, np.int32),) * 3
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
        self._order_array = np.zeros(0, np.int32)
        self._removed: list[int] = []  # slots that left since the last plan
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._request_of: list[Request | None] = [None] * num_slots
        self._ids = np.zeros(num_slots, np.int64)  # internal request ids
        self._computed = np.zeros(num_slots, np.int32)  # tokens whose KV is planned
        self._prefill_end = np.zeros(num_slots, np.int32)  # decode state from here on
        self._known = np.zeros(num_slots, np.int32)  # tokens on the host
        self._pending = np.zeros(num_slots, np.int32)  # sampled tokens in flight
        self._limit = np.zeros(num_slots, np.int32)  # tokens at which it ends by length
        self._min_known = np.zeros(num_slots, np.int32)  # no stop before this
        self._stop_ids = np.full((num_slots, 1), -1, np.int32)
        self._held = np.zeros(num_slots, np.int32)  # steps in flight that hold the slot
        self._leaving = np.zeros(num_slots, np.bool_)  # finished or preempted, still held
        self._num_leaving = 0
        self._prefilled_last = False
        self._step_id = 0
        self.num_preemptions = 0

    # ── what the engine asks ────────────────────────────────────────────────────────────

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and are not finished."""
        return len(self._order)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, preempted ones included."""
        return len(self._waiting) + len(self._preempted)

    @property
    def num_held(self) -> int:
        """Slots that a request, or a step in flight, holds."""
        return len(self._order) + self._num_leaving

    @property
    def is_empty(self) -> bool:
        """Nothing runs, waits, or is held by a step in flight."""
        return not (self.num_held or self.num_waiting)

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
        if request.slot >= 0:
            self._release_if_unheld(request.slot)
        else:
            request.release()

    def abandon(self, error: AneuronError) -> None:
        """End every request and free everything: no step in flight will come back."""
        self._held[:] = 0
        holders = [request for request in self._request_of if request is not None]
        for request in [*holders, *self._waiting.values(), *self._preempted.values()]:
            self.finish(request, FinishReason.ERROR, error=error.copy())
            if request.slot >= 0:  # it had finished, and a step held it
                self._release_if_unheld(request.slot)

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
        slot_array, count_array = np.array(slots, np.int32), np.array(counts, np.int32)
        self._computed[slot_array] += count_array
        last = self._computed[slot_array] >= self._prefill_end[slot_array]
        self._pending[slot_array[last]] += 1  # a chunk that is not the last gives no token
        return self._plan(slot_array, count_array, is_decode=False, new=tuple(new))

    def _continue_prefills(self, budget: int) -> tuple[list[int], list[int]]:
        """Return slots and counts of prompts that were cut and go on."""
        slots: list[int] = []
        counts: list[int] = []
        order = self._order_array
        for slot in order[self._computed[order] < self._prefill_end[order]].tolist():
            count = min(budget, int(self._prefill_end[slot] - self._computed[slot]))
            if count:
                slots.append(slot)
                counts.append(count)
                budget -= count
        return slots, counts

    def _packs(self, counts: list[int], count: int) -> bool:
        """Whether one more row of `count` tokens goes well with the others of a prefill."""
        padded = (len(counts) + 1) * max(*counts, count) if counts else 0
        return padded <= _MAX_PADDING * self.max_num_batched_tokens

    def _admissible(self) -> Request | None:
        """Return the request that is next in line, if it can be admitted now."""
        if len(self._order) >= self.max_num_seqs or not self._free_slots:
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
        slot = self._free_slots.pop()
        assert request.prompt_ids is not None
        token_ids = np.concatenate([request.prompt_ids, np.asarray(request.output_ids, np.int32)])
        blocks = self.kv.allocate(slot, self.kv.blocks_for(len(token_ids)))
        assert blocks is not None
        request.slot = slot
        request.state = RequestState.RUNNING
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self.clock()
        self._request_of[slot] = request
        self._set_columns(slot, request, len(token_ids))
        self._order.append(slot)
        self._order_array = np.array(self._order, np.int32)
        return NewRequest(
            request.request_id, slot, token_ids, request.prompt_len, blocks, request.params,
            request.seed,
        )  # fmt: skip

    def _set_columns(self, slot: int, request: Request, num_known: int) -> None:
        params, prompt_len = request.params, request.prompt_len
        room = self.length_limit - prompt_len
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._ids[slot] = request.request_id
        self._computed[slot] = 0
        self._prefill_end[slot] = self._known[slot] = num_known
        self._pending[slot] = 0
        self._limit[slot] = prompt_len + max_tokens
        self._min_known[slot] = prompt_len + min(params.min_tokens, room)
        stop_ids = params.stop_token_ids + (() if params.ignore_eos else self.eos_token_ids)
        missing = len(stop_ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stop_ids)] = stop_ids

    def _schedule_decode(self) -> SchedulerOutput | None:
        slots = self._order_array
        ready = (self._computed[slots] >= self._prefill_end[slots]) & (
            # Tokens in flight count: a row that will end by length is not launched again.
            self._known[slots] + self._pending[slots] < self._limit[slots]
        )
        if not ready.all():
            slots = slots[ready]
        short = slots[self._computed[slots] >= self.kv.num_held[slots] * self.kv.block_size]
        slots, updates = self._grow(slots, short) if short.size else (slots, _NO_UPDATES)
        if not slots.size:
            return None
        self._computed[slots] += 1
        self._pending[slots] += 1
        return self._plan(slots, np.ones(len(slots), np.int32), is_decode=True, updates=updates)

    def _grow(
        self, slots: np.ndarray, short: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Give each short row its next block; rows that get none sit this step out."""
        if self._make_room(len(short)):
            slots = slots[np.isin(slots, self._order_array)]
            short = short[np.isin(short, self._order_array)]
        grown: dict[int, tuple[int, int]] = {}
        for slot in short.tolist():
            column = int(self.kv.num_held[slot])
            if (blocks := self.kv.allocate(slot, 1)) is not None:
                grown[slot] = (column, int(blocks[0]))
        if len(grown) < len(short):
            slots = slots[~np.isin(slots, [slot for slot in short.tolist() if slot not in grown])]
        columns = np.array(list(grown.values()), np.int32).reshape(-1, 2)
        return slots, (np.array(list(grown), np.int32), columns[:, 0], columns[:, 1])

    def _make_room(self, wanted: int) -> bool:
        """Preempt, latest first, until enough blocks are or come free; say if any was.

        Blocks of requests that left come free with the step that holds them: waiting is
        cheaper than recomputing. A lone request is never preempted: its limit lets it fit.
        """
        before = self.num_preemptions
        coming = int(self.kv.num_held[self._leaving].sum()) if self._num_leaving else 0
        while self.kv.num_free + coming < wanted and len(self._order) > 1:
            victim = self._request_of[self._order[-1]]
            assert victim is not None
            slot = victim.slot
            # The victim may be one of the rows that want a block, and then wants none.
            if self._computed[slot] >= self.kv.num_held[slot] * self.kv.block_size:
                wanted -= 1
            coming += int(self.kv.num_held[slot]) if self._held[slot] else 0
            self._preempt(victim)
        return self.num_preemptions > before

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._preempted[request.request_id] = request
        self._leave(request.slot)
        request.state = RequestState.PREEMPTED
        self._release_if_unheld(request.slot)

    def _plan(
        self,
        slots: np.ndarray,
        counts: np.ndarray,
        *,
        is_decode: bool,
        new: tuple[NewRequest, ...] = (),
        updates: tuple[np.ndarray, np.ndarray, np.ndarray] = _NO_UPDATES,
    ) -> SchedulerOutput:
        self._held[slots] += 1
        self._step_id += 1
        return SchedulerOutput(
            self._step_id, is_decode, self._ids[slots], slots, counts, new, self.take_removed(),
            *updates,
        )  # fmt: skip

    # ── update ──────────────────────────────────────────────────────────────────────────

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        """Take a step's tokens; return the requests that got one, each with it appended."""
        slots, tokens = output.slots, output.token_ids
        self._known[slots] += 1
        self._pending[slots] -= 1
        updated = self._append(slots, tokens)
        if not plan.is_decode:
            now_s = self.clock()
            for request in updated:
                if request.first_token_s is None:
                    request.first_token_s = now_s
        hit = tokens == self._stop_ids[slots].T
        stopped = hit.any(axis=0) & (self._known[slots] >= self._min_known[slots])
        ended = stopped | (self._known[slots] >= self._limit[slots])
        for row in ended.nonzero()[0].tolist():
            self._end(int(slots[row]), int(tokens[row]), stopped=bool(stopped[row]))
        self._drop(plan)
        return updated

    def _append(self, slots: np.ndarray, tokens: np.ndarray) -> list[Request]:
        updated: list[Request] = []
        request_of = self._request_of
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            request = request_of[slot]
            if request is not None and request.finish_reason is None:
                request.output_ids.append(token)
                updated.append(request)
        return updated

    def _end(self, slot: int, token: int, *, stopped: bool) -> None:
        request = self._request_of[slot]
        if request is None or request.is_finished:  # a surplus row: its end stands
            return
        named = token in request.params.stop_token_ids
        request.last_is_end_id = stopped
        self.finish(
            request,
            FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop_reason=token if stopped and named else None,
        )

    def fail(self, plan: SchedulerOutput, error: AneuronError) -> None:
        """End the requests of a step that failed on the device, and let go of the step."""
        for slot in plan.slots.tolist():
            request = self._request_of[slot]
            if request is not None:
                self.finish(request, FinishReason.ERROR, error=error.copy())
        self._drop(plan)

    def _drop(self, plan: SchedulerOutput) -> None:
        """Let go of a step: what left and is held by no other step comes free."""
        slots = plan.slots
        self._held[slots] -= 1
        if self._num_leaving:
            for slot in slots[self._leaving[slots]].tolist():
                self._release_if_unheld(slot)

    # ── leaving ─────────────────────────────────────────────────────────────────────────

    def _leave(self, slot: int) -> None:
        self._order.remove(slot)
        self._order_array = np.array(self._order, np.int32)
        self._removed.append(slot)
        self._leaving[slot] = True
        self._num_leaving += 1

    def _release_if_unheld(self, slot: int) -> None:
        """Free slot and blocks of a request that left, once no step in flight holds them."""
        if self._held[slot] or not self._leaving[slot]:
            return
        request = self._request_of[slot]
        assert request is not None
        self.kv.free(slot)
        self._leaving[slot] = False
        self._num_leaving -= 1
        self._request_of[slot] = None
        self._free_slots.append(slot)
        request.slot = -1
        if request.is_finished:
            request.release()
