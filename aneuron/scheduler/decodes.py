"""`Decodes`: which slots decode, how many tokens each has left, and what its blocks have room for.

Used by the scheduler alone, on the loop. Columns over slots, worked on whole; how these
operations are written is measured (docs/log.md): operands of one shape and dtype, int64 as
indices.
"""

from __future__ import annotations

import numpy as np

__all__ = ["Decodes"]


class Decodes:
    """Columns over slots, int32.

    Tokens in flight are off `left` and `room`, so a row that will end by length, and one that
    needs a block, are known one step ahead.

    Attributes:
        left: tokens until it ends by length; 0 where a slot is not active.
        room: tokens that its blocks take; 1 where a slot is not active.
        active: 1 where a slot decodes, and has tokens left.
        num_active: how many do.
        has_shortage: some active slot may have no room.
    """

    def __init__(self, num_slots: int, request_ids: np.ndarray) -> None:
        """Make empty columns; `request_ids`, int64 [slots], belong to the slots' holders."""
        self._request_ids = request_ids
        self._left_and_room = np.zeros((2, num_slots), np.int32)
        self.left, self.room = self._left_and_room
        self.room[:] = 1
        self._active_twice = np.zeros((2, num_slots), np.int32)
        self.active = self._active_twice[0]
        self.num_active = 0
        self.has_shortage = False
        self._decoding: tuple[np.ndarray, np.ndarray] | None = None  # active slots and ids

    def begin(self, slot: int, *, left: int, room: int) -> None:
        """Let a slot decode from now on."""
        self.left[slot], self.room[slot] = left, room
        self._set_active(slot, is_active=True)

    def end(self, slot: int) -> None:
        """Let a slot decode no more."""
        self._set_active(slot, is_active=False)
        self.left[slot], self.room[slot] = 0, 1

    def _set_active(self, slot: int, *, is_active: bool) -> None:
        self._decoding = None
        self.num_active += int(is_active) - int(self.active[slot])
        self._active_twice[:, slot] = is_active
        self.has_shortage = True  # maybe: to be looked at

    def spent(self) -> list[int]:
        """Return the active slots that have no token left."""
        spent: list[int] = (self.left < self.active).nonzero()[0].tolist()
        return spent

    def short(self) -> np.ndarray:
        """Return the active slots whose blocks have no room, int64 [k]."""
        short: np.ndarray = (self.room < self.active).nonzero()[0]
        return short

    def slots(self) -> list[int]:
        """Return the active slots, ascending."""
        active: list[int] = self.active.nonzero()[0].tolist()
        return active

    def take(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Take several tokens off slots, int32 [n]."""
        self.left[slots] -= counts
        self.room[slots] -= counts
        self.has_shortage = True  # maybe

    def give_back(self, slot: int, count: int) -> None:
        """Add tokens to a slot that were taken off."""
        self.left[slot] += count
        self.room[slot] += count

    def take_step(self, *, is_starved: bool) -> tuple[np.ndarray, np.ndarray] | None:
        """Take a token off every slot that can decode now.

        Args:
            is_starved: some have no room and sit this step out.

        Returns:
            slots and request ids, int64 [n], the same objects while the same ones decode; None
            if none can.
        """
        ready, decoding = self._active_twice, self._decoding
        if is_starved:
            ready, decoding = self._active_twice * (self.room > 0), None
        if decoding is None:
            slots = ready[0].nonzero()[0]
            decoding = slots, self._request_ids[slots]
        self._decoding = None if is_starved else decoding
        if not decoding[0].size:
            return None
        self._left_and_room -= ready
        if np.count_nonzero(self._left_and_room) < self.num_active + len(self.room):
            self.has_shortage = True
        return decoding
