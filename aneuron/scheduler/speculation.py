"""`Speculation`: drafts of what requests may say next, and how many of them came true.

Used by the scheduler alone, on the loop. A draft is what followed the same words earlier in the
request's own tokens (prompt lookup; Saxena 2023, and `prompt_lookup_num_tokens` of transformers).
The device verifies it: a sample that is as drafted lets the next one count, so what is given out
is what one token a step would have given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aneuron.request import RequestState

if TYPE_CHECKING:
    from aneuron.kv_cache import KVCacheManager
    from aneuron.plans import ModelRunnerOutput, SchedulerOutput
    from aneuron.request import Request
    from aneuron.scheduler.decodes import Decodes
    from aneuron.scheduler.slots import SlotTable

__all__ = ["Speculation", "Verification", "look_up"]

_NGRAMS = (3, 2)  # tokens that must be the same, the longer first
_MOST_TOKENS = 8192  # looked through, the latest: some 10 us


class Verification(NamedTuple):
    """A step that verifies drafts; the fields are those of a plan."""

    slots: np.ndarray  # int64 [n]
    num_scheduled: np.ndarray  # int32 [n], 1 and what is drafted
    draft_ids: np.ndarray  # int32 [sum]
    updates: tuple[np.ndarray, np.ndarray, np.ndarray]  # slots, columns and blocks


class Speculation:
    """Proposes drafts, and rolls back what was rejected.

    Attributes:
        num_drafted, num_accepted: tokens so far, of steps that were taken in.
    """

    def __init__(
        self, num_tokens: int, slots: SlotTable, decodes: Decodes, kv: KVCacheManager
    ) -> None:
        """Make one that drafts at most `num_tokens` for a request; 0 is none at all."""
        self._num_tokens = num_tokens
        self._slots = slots
        self._decodes = decodes
        self._kv = kv
        self._rejected: list[tuple[Request, int, int]] = []  # with its slot, and how many
        self.num_drafted = self.num_accepted = 0

    def wants_tokens(self) -> bool:
        """Whether some request that decodes may have drafts, once all its tokens are known."""
        if not self._num_tokens:
            return False
        return any(map(_can_draft, map(self._slots.__getitem__, self._decodes.slots())))

    def propose(self) -> Verification | None:
        """Return what to verify, its tokens taken off; None if no draft is found, or fits."""
        slots = self._decodes.slots()
        drafts = [self._draft(slot) for slot in slots]
        counts = np.array([len(ids) for ids in drafts], np.int32)
        if len(slots) == counts.sum():
            return None
        at, kv = np.array(slots, np.int64), self._kv
        short = at[self._decodes.room[at] < counts]
        if kv.num_free < len(short):
            return None
        updates = (short, *kv.extend(short))
        self._decodes.room[short] += kv.block_size
        self._decodes.take(at, counts)
        return Verification(at, counts, np.concatenate(drafts), updates)

    def _draft(self, slot: int) -> np.ndarray:
        """Return the last token of a request and what may follow, int32 [1 to num_tokens + 1]."""
        request, decodes = self._slots[slot], self._decodes
        room = int(decodes.room[slot]) + self._kv.block_size
        # Drafts never bring a request to its length: they may be rejected, and it would be over.
        most = min(self._num_tokens, int(decodes.left[slot]) - 2, room - 1)
        if most < 1 or not _can_draft(request):
            return np.array(request.output_ids[-1:], np.int32)
        ids = _latest(request)
        return np.append(ids[-1:], look_up(ids, most))

    def settle(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Give back what a step's requests did not get of what was taken off for them."""
        rounds = (output, *output.more)
        given = np.bincount(
            np.concatenate([one.slots for one in rounds]), minlength=int(plan.slots.max()) + 1
        )[plan.slots]
        self.num_drafted += int(plan.num_scheduled.sum()) - len(plan.slots)
        self.num_accepted += int(given.sum()) - len(plan.slots)
        for slot, count in zip(
            plan.slots.tolist(), (plan.num_scheduled - given).tolist(), strict=True
        ):
            if count and self._decodes.active[slot]:
                self._decodes.give_back(slot, count)
                self._rejected.append((self._slots[slot], slot, count))

    def take_rejected(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what rows that are still there must forget, for the next plan."""
        if not self._rejected:
            return None
        rejected, self._rejected = self._rejected, []
        there = [
            (slot, count)
            for request, slot, count in rejected
            if request.state is RequestState.RUNNING and request.slot == slot
        ]
        if not there:
            return None
        slots, counts = zip(*there, strict=True)
        return np.array(slots, np.int64), np.array(counts, np.int32)


def _latest(request: Request) -> np.ndarray:
    """Return the latest tokens of a request, int32 [at most _MOST_TOKENS]."""
    told = np.asarray(request.output_ids[-_MOST_TOKENS:], np.int32)
    assert request.prompt_ids is not None
    missing = _MOST_TOKENS - len(told)
    return np.concatenate([request.prompt_ids[-missing:], told]) if missing else told


def _can_draft(request: Request) -> bool:
    """Whether its samples depend on nothing but the tokens before."""
    params = request.params
    return not (params.is_guided or params.has_rules or params.logprobs is not None)


def look_up(ids: np.ndarray, most: int) -> np.ndarray:
    """Return what followed the last tokens where they occurred before, int32 [0 to most].

    Three equal tokens are looked for, then two; the latest place counts that has `most` tokens
    behind it, else the earliest.

    Args:
        ids: int32 [n], all tokens so far.
        most: how many to return.
    """
    for size in _NGRAMS:
        num_places = len(ids) - size
        if num_places < 1:
            continue
        found = ids[:num_places] == ids[-size]
        for offset in range(1, size):
            found &= ids[offset : offset + num_places] == ids[-size + offset]
        places = found.nonzero()[0]
        if places.size:
            full = places[places + size + most <= len(ids)]
            place = int(full[-1]) if full.size else int(places[0])
            return ids[place + size : place + size + most]
    return ids[:0]
