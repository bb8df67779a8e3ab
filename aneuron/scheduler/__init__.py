"""Decides what the next step computes, and what a step's tokens mean.

Comes in: requests, and the output of each step. Goes out: `SchedulerOutput`, the plan of
one step. Pure bookkeeping on the loop: no device, no await, no knowledge of async or sync.
State of running requests is columns by slot, worked on whole. How these operations are
written is measured (docs/log.md): operands of one shape and dtype, int64 as indices.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.outputs import FinishReason
from aneuron.plans import BreakReason, SchedulerOutput
from aneuron.request import Request, RequestState
from aneuron.scheduler.admission import Admission
from aneuron.scheduler.decodes import Decodes
from aneuron.scheduler.outcomes import Outcomes
from aneuron.scheduler.prompts import Chunks, Prompts
from aneuron.scheduler.slots import SlotTable
from aneuron.scheduler.speculation import Speculation
from aneuron.scheduler.waiting import rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aneuron.errors import AneuronError
    from aneuron.kv_cache import KVCacheManager
    from aneuron.plans import Fork, ModelRunnerOutput, NewRequest
    from aneuron.scheduler.speculation import Verification

__all__ = ["Scheduler"]

_logger = logging.getLogger("aneuron.scheduler")
_NO_SLOTS = np.zeros(0, np.int64)
_BlockUpdates = tuple[np.ndarray, np.ndarray, np.ndarray]  # slots, columns, blocks
_NO_UPDATES: _BlockUpdates = _NO_SLOTS, _NO_SLOTS, _NO_SLOTS


class Scheduler:
    """Continuous batching: less priority is served first, and then who came first.

    Prefill and decode are separate steps and take turns, so a stream gets a token at least
    every second step while prompts are computed. When blocks are short, the last in that
    order give theirs up and are computed again later: the first one never waits for others.
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
        interleaved_prefill_tokens: int | None = None,
        max_prompts: int | None = None,
        num_draft_tokens: int = 0,
    ) -> None:
        """Make an empty scheduler; `clock` gives the time in seconds for request records."""
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.length_limit = length_limit
        self.eos_token_ids = tuple(eos_token_ids)
        self.clock = clock
        self._order: list[int] = []  # slots of running requests, as admitted
        self._removed: list[int] = []  # slots that left since the last plan
        self._slots = SlotTable(num_slots)
        most = max_num_batched_tokens
        budget = most, min(interleaved_prefill_tokens or most, most)
        self._prompts = Prompts(num_slots, kv, self._slots, budget, max_prompts)
        self._slots.on_release = self._prompts.give_back
        self._outcomes = Outcomes(
            self._slots,
            self._prompts,
            finish=self.finish,
            length_limit=length_limit,
            end_ids=self.eos_token_ids,
            clock=clock,
        )
        self._admission = Admission(kv, self._slots, max_num_seqs, length_limit)
        self._queue = self._admission.queue
        self._decodes = Decodes(num_slots, self._slots.request_ids)
        self.speculation = Speculation(num_draft_tokens, self._slots, self._decodes, kv)
        self._ending: list[int] = []  # slots whose token of the plan being made is the last
        self._ones = np.ones(max_num_seqs, np.int32)
        self._prefilled_last = False
        self._step_id = self._newest_id = 0
        self._lacks_tokens = False
        self.num_preemptions = 0

    # ── what the engine asks ────────────────────────────────────────────────────────────

    @property
    def num_running(self) -> int:
        """Requests with tokens to compute; not those whose last token is in flight."""
        return len(self._order)

    def holder(self, slot: int) -> Request:
        """Return the request that holds a slot; one that a plan in flight names."""
        return self._slots[slot]

    def running(self) -> Iterable[Request]:
        """Return those requests."""
        return map(self._slots.__getitem__, self._order)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, preempted ones included."""
        return self._queue.num_requests

    @property
    def num_held(self) -> int:
        """Slots that a request, or a step in flight, holds."""
        return len(self._order) + len(self._slots.leaving)

    @property
    def is_empty(self) -> bool:
        """Nothing runs, waits, or is held by a step in flight."""
        return not (self.num_held or self.num_waiting)

    @property
    def lacks(self) -> BreakReason | None:
        """Why nothing could be planned though somebody waits, or could go on."""
        if self._lacks_tokens:
            return BreakReason.SPECULATION
        # Slots, blocks, or how many tokens are in flight.
        return BreakReason.DRAIN if self.num_waiting or self._decodes.num_active else None

    def add(self, request: Request) -> None:
        """Queue a request whose prompt is known and fits, with all its choices."""
        for one in (request, *request.unforked):
            one.state = RequestState.WAITING
            one.end_ids = () if one.params.ignore_eos else self.eos_token_ids
            self._newest_id = max(self._newest_id, one.request_id)
        self._queue.add(request)

    def finish(self, request: Request, reason: FinishReason, **facts: Any) -> None:
        """End a request now, wherever it stands; late tokens of it are dropped.

        Choices that wait for its prompt end alike. `facts` are those of `Request.finish`.
        """
        state = request.state
        if state is RequestState.FINISHED:
            return
        self._admission.discard(request)
        sleeping, request.unforked = request.unforked, ()
        for one in sleeping:
            self.finish(one, reason, **facts)
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
        for request in [*self._slots.holders, *self._queue]:
            self.finish(request, FinishReason.ERROR, error=error.copy())
        self._prompts.abandon()
        self._slots.applied(self._step_id)
        self._removed = list(range(len(self._decodes.room)))  # a plan that broke off took some

    def take_removed(self) -> tuple[int, ...]:
        """Return the slots that left the batch since the last plan, and forget them."""
        removed, self._removed = tuple(self._removed), []
        return removed

    # ── schedule ────────────────────────────────────────────────────────────────────────

    def schedule(self) -> SchedulerOutput | None:
        """Return the plan of the next step, or None when nothing can run now."""
        self._lacks_tokens = False
        if self._prefilled_last:
            plan = self._schedule_decode()
            if plan is None and not self._lacks_tokens:  # else it is the decodes' turn soon
                plan = self._schedule_prefill()
        else:
            plan = self._schedule_prefill() or self._schedule_decode()
        if plan is not None:
            self._prefilled_last = plan.is_prefill
        return plan

    def _schedule_prefill(self) -> SchedulerOutput | None:
        if not (self._prompts.unfinished or self._queue):
            return None
        self._make_way()  # first: who goes is not planned here any more
        chunks = self._prompts.chunks(self._decodes.num_active, self._queue.num_tokens)
        new: list[NewRequest] = []
        for slot in tuple(self._prompts.unfinished):
            self._admit(chunks, new, ahead_of=self._slots.rank_of(slot))
            self._prompts.resume(slot, chunks)
        self._admit(chunks, new)
        if not chunks.slots:
            return None
        ended = self._prompts.plan(chunks)
        forks = tuple(self._fork(slot, new) for slot in ended if self._slots[slot].unforked)
        woken = [slot for fork in forks for slot in fork.slots.tolist()]
        slots = np.array(chunks.slots + woken, np.int64)
        counts = np.array(chunks.counts + [0] * len(woken), np.int32)
        self._slots.hold(slots, self._step_id + 1)
        self._begin_decode(ended + woken)
        return self._plan(
            slots, self._slots.request_ids[slots], counts, is_decode=False,
            new=tuple(new), forks=forks,
        )  # fmt: skip

    def _make_way(self) -> None:
        """Preempt those of less priority that keep out who is next in line."""
        one = self._admission.head()
        if one is not None and not self._admission.fits(one, self._order):
            self._preempt_all(self._admission.victims(one, self._order))

    def _admit(
        self, chunks: Chunks, new: list[NewRequest], *, ahead_of: tuple[int, int] | None = None
    ) -> None:
        """Let waiting requests in, of a better rank, and add what this step computes of them."""
        admission, size = self._admission, self.kv.block_size
        while chunks.left and (one := admission.head()) is not None:
            if ahead_of is not None and rank(one.request) > ahead_of:
                break
            done, num_tokens = len(one.found) * size, len(one.token_ids)
            count = chunks.room_for(num_tokens - done)
            if not count or not admission.fits(one, self._order):
                break
            new.append(admission.admit(one))
            self._enter(one.request)
            self._prompts.begin(one.request, done, num_tokens)
            chunks.add(one.request.slot, count)

    def _enter(self, request: Request) -> None:
        """Note a request that was let in, and its choices, which sleep."""
        now_s = self.clock()
        for one in (request, *request.unforked):
            if one.first_scheduled_s is None:
                one.first_scheduled_s = now_s
            self._slots.set_stop_ids(one.slot, one.params.stop_token_ids + one.end_ids)
            self._order.append(one.slot)

    def _fork(self, slot: int, new: list[NewRequest]) -> Fork:
        """Wake the choices that waited for this prompt."""
        fork, entries = self._admission.fork(self._slots[slot])
        new += entries
        self._prompts.wake(fork)
        return fork

    def _begin_decode(self, slots: list[int]) -> None:
        """Note that these prompts are planned to their end, and so give their first token."""
        for slot in slots:
            num_tokens = int(self._prompts.end[slot])
            left = self._slots[slot].limit(self.length_limit) - num_tokens - 1
            room = self.kv.num_held[slot] * self.kv.block_size - num_tokens
            self._decodes.begin(slot, left=left, room=room)
        self._retire_spent()

    def _retire_spent(self) -> None:
        """Let slots go whose last token is planned; their row of this plan ends by length.

        Their requests give their seats to others now, slots and blocks with this step.
        """
        spent = self._decodes.spent()
        self._ending += spent
        for slot in spent:
            self._order.remove(slot)
            self._decodes.end(slot)
            self._slots.leave(slot)

    def _schedule_decode(self) -> SchedulerOutput | None:
        decodes, speculation = self._decodes, self.speculation
        if not decodes.num_active:
            return None
        if speculation.wants_tokens():
            if self._slots.applied_step < self._step_id:
                self._lacks_tokens = True
                return None
            if (one := speculation.propose()) is not None:
                return self._verify(one)
        # Some may be preempted, or get no block and sit this step out.
        updates, is_starved = self._grow() if decodes.has_shortage else (_NO_UPDATES, False)
        taken = decodes.take_step(is_starved=is_starved)
        if taken is None:
            return None
        slots, ids = taken
        if decodes.has_shortage:
            self._retire_spent()
        self._slots.hold(slots, self._step_id + 1)
        return self._plan(slots, ids, self._ones[: len(slots)], is_decode=True, updates=updates)

    def _verify(self, one: Verification) -> SchedulerOutput:
        """Plan a step that verifies drafts."""
        self._retire_spent()
        self._slots.hold(one.slots, self._step_id + 1)
        ids = self._slots.request_ids[one.slots]
        plan = self._plan(one.slots, ids, one.num_scheduled, is_decode=False, updates=one.updates)
        plan.draft_ids = one.draft_ids
        plan.record.is_decode = True  # as far as anybody is concerned who looks at times
        return plan

    def _grow(self) -> tuple[_BlockUpdates, bool]:
        """Give slots without room their next block.

        Returns:
            slots, columns of their tables and blocks, each [k]; whether some got none.
        """
        decodes = self._decodes
        short = decodes.short()
        decodes.has_shortage = is_starved = self.kv.num_free < short.size
        if is_starved:
            short = self._make_room(short)
        if not short.size:
            return _NO_UPDATES, is_starved
        decodes.room[short] = self.kv.block_size
        return (short, *self.kv.extend(short)), is_starved

    def _make_room(self, short: np.ndarray) -> np.ndarray:
        """Preempt until enough blocks are or come free; return who gets one now."""
        self._preempt_all(self._admission.victims_of_growth(short, self._order))
        first = short[self._decodes.active[short] > 0].tolist()
        first.sort(key=self._slots.rank_of)
        return np.array(first[: self.kv.num_free], np.int64)

    def _preempt_all(self, victims: Iterable[Request]) -> None:
        for victim in victims:
            if victim.state is RequestState.RUNNING:  # choices that sleep go together
                self._preempt(victim)

    def _preempt(self, request: Request) -> None:
        """Take slots and blocks away; with a choice that sleeps, from all that wait with it."""
        self.num_preemptions += 1
        request = self._admission.leader_of.get(request.slot, request)
        _logger.debug(
            "request %d (%s) is preempted; %d of %d KV blocks are free",
            request.request_id, request.name, self.kv.num_free, self.kv.num_blocks,
        )  # fmt: skip
        for one in (request, *request.unforked):
            one.state = RequestState.PREEMPTED
            self._leave(one.slot)
        request.made_way_up_to = self._newest_id
        self._queue.add(request)
        self._slots.release_unheld()

    def _plan(
        self,
        slots: np.ndarray,
        ids: np.ndarray,
        counts: np.ndarray,
        *,
        is_decode: bool,
        new: tuple[NewRequest, ...] = (),
        forks: tuple[Fork, ...] = (),
        updates: _BlockUpdates = _NO_UPDATES,
    ) -> SchedulerOutput:
        self._step_id += 1
        removed, ending = self.take_removed(), tuple(self._ending)
        self._removed, self._ending = list(ending), []  # their rows are of this plan still
        plan = SchedulerOutput(
            self._step_id, is_decode, ids, slots, counts, new, removed, ending, forks, *updates
        )
        plan.rejected = self.speculation.take_rejected()
        return plan

    # ── update ──────────────────────────────────────────────────────────────────────────

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        """Take a step's tokens; return the requests that got one, each with it appended.

        Of a step that verified drafts, `output.more` come after it, one by one.
        """
        return self._outcomes.take(plan, output)

    def fail(self, plan: SchedulerOutput, error: AneuronError) -> None:
        """End the requests of a step that failed on the device, and let go of the step."""
        for slot in self._prompts.failed(plan):
            self.finish(self._slots[slot], FinishReason.ERROR, error=error.copy())
        self._slots.applied(plan.step_id)

    def _leave(self, slot: int) -> None:
        if slot in self._slots.leaving:  # its last token is in flight
            return
        self._order.remove(slot)
        self._prompts.leave(slot)
        self._admission.leader_of.pop(slot, None)
        self._decodes.end(slot)
        self._removed.append(slot)
        self._slots.leave(slot)
