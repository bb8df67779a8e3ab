"""`Admission`: who is let in, with which blocks, and who has to make way.

A prompt is admitted whole: all its blocks are its own from the start, so two half-computed
prompts never wait for each other (docs/decisions/0002). A request of several choices is
admitted with a slot for each; the others sleep until the first has computed the prompt. Used
by the scheduler alone, on the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aneuron.plans import Fork, NewRequest
from aneuron.request import RequestState
from aneuron.scheduler.waiting import WaitingQueue, rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aneuron.kv_cache import KVCacheManager
    from aneuron.request import Request
    from aneuron.scheduler.slots import SlotTable

__all__ = ["Admission", "Candidate"]


@dataclass(slots=True)
class Candidate:
    """The request that is next in line, and what it takes to let it in."""

    request: Request
    token_ids: np.ndarray  # int32, all that it has so far
    found: list[int]  # blocks with the beginning of them
    num_new: int  # blocks beside them, for itself
    num_blocks: int  # that are free now and would not be, its other choices' included

    @property
    def num_seats(self) -> int:
        """Slots, and seats among the running, that it needs."""
        return 1 + len(self.request.unforked)


class Admission:
    """The queue, and what those at its head need.

    Attributes:
        queue: who waits.
        leader_of: by slot, for choices that sleep: the one that computes their prompt.
    """

    def __init__(
        self, kv: KVCacheManager, slots: SlotTable, max_num_seqs: int, length_limit: int
    ) -> None:
        """Let in whom these slots and blocks allow, at most `max_num_seqs` at a time.

        Where a block holds the longest request, those that run never want another one.
        """
        self._grows = kv.blocks_for(length_limit) > 1
        self._kv = kv
        self._slots = slots
        self._max_num_seqs = max_num_seqs
        self.queue = WaitingQueue()
        self.leader_of: dict[int, Request] = {}
        self._seen: tuple[int, ...] = ()  # who was looked at last, and how things stood
        self._candidate: Candidate | None = None
        self._hopeless: tuple[int, ...] = ()  # likewise, where all victims would not do

    def discard(self, request: Request) -> None:
        """Forget a request, if it waits."""
        self.queue.discard(request)
        if self._candidate is not None and self._candidate.request is request:
            self._candidate = None

    def head(self) -> Candidate | None:
        """Return who is next in line; looked at anew only when something has changed."""
        request = self.queue.head()
        if request is None or request.slot >= 0:  # its tokens in flight have not arrived
            return None
        kv = self._kv
        seen = request.request_id, kv.version
        if seen != self._seen or self._candidate is None:
            self._seen, self._candidate = seen, self._look_at(request)
        return self._candidate

    def _look_at(self, request: Request) -> Candidate:
        kv, token_ids = self._kv, request.token_ids()
        found = [] if request.needs_whole_prompt else kv.find(request, token_ids)
        num_new = kv.blocks_for(len(token_ids)) - len(found)
        own = len(token_ids) % kv.block_size != 0  # a block that the prompt fills in part
        num_blocks = num_new + kv.num_idle(found) + own * len(request.unforked)
        return Candidate(request, token_ids, found, num_new, num_blocks)

    def fits(self, one: Candidate, running: Sequence[int]) -> bool:
        """Whether it can be let in now, beside those that run, given by slot.

        One block more for each of them, or the newcomer would be preempted at once. Who was
        preempted comes back when those of a better priority have ended that were there then.
        """
        num_running, request = len(running), one.request
        if (
            num_running + one.num_seats > self._max_num_seqs
            or one.num_seats > self._slots.num_free
            or one.num_blocks + num_running * self._grows > self._kv.num_free
        ):
            return False
        return request.state is not RequestState.PREEMPTED or not any(
            other.priority < request.priority and other.request_id <= request.made_way_up_to
            for other in map(self._slots.__getitem__, running)
        )

    def victims(self, one: Candidate, running: Sequence[int]) -> list[Request]:
        """Return whom to preempt for it: of less priority, the last first, as few as needed.

        Nobody, if what comes free anyway will do, or if all of them would not.
        """
        seen = one.request.request_id, self._kv.version, len(running)
        if seen == self._hopeless:
            return []
        requests = map(self._slots.__getitem__, running)
        worse = sorted((r for r in requests if r.priority > one.request.priority), key=rank)
        # What it found counts as needed once its holders are gone.
        free = self._kv.coming_free(self._slots.leaving, but=one.found)
        num_running = len(running)
        victims: list[Request] = []
        while not self._would_fit(one, num_running, free.count):
            if not worse:
                self._hopeless = seen
                return []
            victims.append(worse.pop())
            free.add(victims[-1].slot)
            num_running -= 1
        return victims

    def _would_fit(self, one: Candidate, num_running: int, coming: int) -> bool:
        room = self._kv.num_free + coming - num_running * self._grows
        return num_running + one.num_seats <= self._max_num_seqs and one.num_blocks <= room

    def victims_of_growth(self, short: np.ndarray, running: Sequence[int]) -> list[Request]:
        """Return whom to preempt so that slots without room, int64 [k], get a block: last first.

        Blocks of requests that left come free with the step that holds them: waiting is
        cheaper than recomputing. A lone request is never preempted: its limit lets it fit.
        """
        wanting, free = set(short.tolist()), self._kv.coming_free(self._slots.leaving)
        left, victims = sorted(running, key=self._slots.rank_of), []
        while self._kv.num_free + free.count < len(wanting) and len(left) > 1:
            slot = left.pop()
            free.add(slot)
            # The victim may be one of the rows that want a block, and then wants none.
            wanting.discard(slot)
            victims.append(self._slots[slot])
        return victims

    def admit(self, one: Candidate) -> NewRequest:
        """Give a request that fits, and its choices, slots and blocks."""
        request, kv = one.request, self._kv
        self.discard(request)
        slot = self._slots.take(request)
        blocks = kv.allocate(slot, one.num_new, one.found)
        assert blocks is not None
        num_found = len(one.found) * kv.block_size
        request.state = RequestState.RUNNING
        if request.cached_tokens is None:
            request.cached_tokens = num_found
            kv.note_lookup(len(one.token_ids), num_found)
        for fork in request.unforked:
            self._slots.take(fork)
            fork.state = RequestState.RUNNING
            self.leader_of[fork.slot] = request
        if request.unforked:
            kv.share([fork.slot for fork in request.unforked], slot, len(one.token_ids))
        return self._entry(request, one.token_ids, blocks, num_found)

    def fork(self, leader: Request) -> tuple[Fork, list[NewRequest]]:
        """Wake the choices of a request whose prompt is planned to its end."""
        forks, leader.unforked = leader.unforked, ()
        token_ids, kv = leader.token_ids(), self._kv
        kv.name_blocks(leader, forks)
        entries = []
        for fork in forks:
            del self.leader_of[fork.slot]
            fork.cached_tokens = leader.cached_tokens
            blocks = kv.blocks_of(fork.slot)
            entries.append(self._entry(fork, token_ids, blocks, len(token_ids)))
        partial = len(token_ids) % kv.block_size != 0
        copied = [entry.block_ids[-1] for entry in entries if partial]
        slots = np.array([entry.slot for entry in entries], np.int64)
        return Fork(leader.slot, slots, np.array(copied, np.int32)), entries

    @staticmethod
    def _entry(
        request: Request, token_ids: np.ndarray, blocks: np.ndarray, num_computed: int
    ) -> NewRequest:
        return NewRequest(
            request.request_id, request.slot, token_ids, request.prompt_len, blocks,
            request.params, request.seed, num_computed, request.end_ids, request.bad_word_ids,
        )  # fmt: skip
