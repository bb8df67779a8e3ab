"""Blocks of the KV pool: who holds which, which are free, and whose content is known.

The scheduler alone calls this, on the loop. Block 0 is the null block: padding reads and
writes it, no request ever gets it.

A full block whose content has been written, by steps that have resolved, can be found again
by that content (prefix caching): a later prompt that begins alike shares it in place of
computing it. Blocks are named by a keyed hash over the block before and their own ids, so
nobody can make two contents with one name. A block that nobody holds keeps its content until
it is needed: the least recently used goes first.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aneuron.request import Request

__all__ = ["ComingFree", "KVCacheManager"]

_ID_BYTES = 4  # int32
_DIGEST_BYTES = 32


class KVCacheManager:
    """A pool of `num_blocks` blocks of `block_size` tokens, held by slots.

    Attributes:
        num_held: int64 [slots], blocks that each slot holds.
        version: counts changes of what can be found, and of who holds what was found.
        num_queries, num_hits: prompt tokens looked up, and found, so far.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int, *, prefix_caching: bool = True
    ) -> None:
        """Make a pool in which every block is free."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.capacity = num_blocks * block_size  # tokens
        self.prefix_caching = prefix_caching
        # Last in, first out: a block handed on too early is overwritten at once, and a
        # test that looks for that finds it.
        self._free = list(range(num_blocks, 0, -1))
        # Content known, held by nobody; oldest use first. A plain dict would look through all
        # that were taken from its front, each time.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._held: list[list[int]] = [[] for _ in range(num_slots)]
        self.num_held = np.zeros(num_slots, np.int64)
        self._sharers: dict[int, int] = {}  # holders of a block beyond the first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._num_offered = [0] * num_slots  # leading blocks whose content is known, or shared
        self._epoch_of = [0] * num_slots
        self._epoch = 0  # counts resets: what was written in another one is not offered
        self._hasher = _keyed_hasher()
        self.num_queries = self.num_hits = self.version = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found."""
        return len(self._block_of)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of these nobody holds."""
        return sum(block in self._idle for block in blocks)

    def coming_free(self, slots: Iterable[int], but: Iterable[int] = ()) -> ComingFree:
        """Return a count of blocks that come free when these slots give theirs back.

        Args:
            slots: to begin with; more can be added.
            but: blocks that do not count.
        """
        count = ComingFree(self._held, self._sharers, frozenset(but))
        for slot in slots:
            count.add(slot)
        return count

    # ── taking and giving back ──────────────────────────────────────────────────────────

    def allocate(self, slot: int, count: int, found: Sequence[int] = ()) -> np.ndarray | None:
        """Give a slot that holds nothing the blocks found for it, and `count` free ones.

        Args:
            slot: of the new holder.
            count: of free blocks.
            found: what `find` returned for it, just now.

        Returns:
            int32 [len(found) + count]; or None, and nothing is given, if too few are free.
        """
        if count + self.num_idle(found) > self.num_free:
            return None
        self.version += 1
        for block in found:
            if block in self._idle:
                del self._idle[block]
            else:
                self._sharers[block] = self._sharers.get(block, 0) + 1
        blocks = [*found, *self._take(count)]
        self._held[slot] = blocks
        self.num_held[slot] = len(blocks)
        self._num_offered[slot] = len(found)
        self._epoch_of[slot] = self._epoch
        return np.array(blocks, np.int32)

    def share(self, slots: Sequence[int], owner: int, num_tokens: int) -> None:
        """Give slots the blocks that `num_tokens` tokens of another fill, and one to copy to.

        The last block of each is a free one if the tokens do not fill it: so many must be.
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        shared = self._held[owner][:num_full]
        for block in shared:
            self._sharers[block] = self._sharers.get(block, 0) + len(slots)
        for slot in slots:
            self._held[slot] = shared + self._take(1 if rest else 0)
            self.num_held[slot] = len(self._held[slot])
            self._num_offered[slot] = num_full
            self._epoch_of[slot] = self._epoch_of[owner]
        self.version += 1

    def blocks_of(self, slot: int) -> np.ndarray:
        """Return the blocks that a slot holds, int32 [blocks]."""
        return np.array(self._held[slot], np.int32)

    def extend(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give one block to each of these slots, int64 [n]; as many must be free.

        Returns:
            columns in the slots' block tables, int64 [n], and the blocks, int32 [n].
        """
        blocks = self._take(len(slots))
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            self._held[slot].append(block)
        columns = self.num_held[slots]
        self.num_held[slots] = columns + 1
        return columns, np.array(blocks, np.int32)

    def free(self, slot: int) -> None:
        """Take all blocks of a slot back; content that is known stays until it is needed."""
        self.version += 1
        for block in reversed(self._held[slot]):  # the ends of contents are forgotten first
            sharers = self._sharers.pop(block, 0)
            if sharers > 1:
                self._sharers[block] = sharers - 1
            elif not sharers and block in self._digest_of:
                self._idle[block] = None
            elif not sharers:
                self._free.append(block)
        self._held[slot] = []
        self.num_held[slot] = 0

    def _take(self, count: int) -> list[int]:
        free, idle = self._free, self._idle
        while len(free) < count:
            block, _ = idle.popitem(last=False)
            self.version += 1
            del self._block_of[self._digest_of.pop(block)]
            free.append(block)
        return [free.pop() for _ in range(count)]

    # ── content ─────────────────────────────────────────────────────────────────────────

    def find(self, request: Request, token_ids: np.ndarray) -> list[int]:
        """Return the blocks that hold the beginning of these tokens (int32 [n]), in order.

        At least one token is left out: without computing one there is nothing to sample from.
        """
        if not self.prefix_caching:
            return []
        found: list[int] = []
        ids = token_ids.data.cast("B")
        for index in range((len(token_ids) - 1) // self.block_size):
            block = self._block_of.get(self._digest(request, ids, index))
            if block is None:
                break
            found.append(block)
        return found

    def note_lookup(self, num_tokens: int, num_found: int) -> None:
        """Count a prompt that was admitted, and how many of its tokens had been found."""
        self.num_queries += num_tokens
        self.num_hits += num_found

    def offer(self, slot: int, request: Request, num_tokens: int) -> None:
        """Let the slot's full blocks be found: `num_tokens` of its request are in them."""
        offered, num_full = self._num_offered[slot], num_tokens // self.block_size
        if num_full <= offered or not self.prefix_caching or self._epoch_of[slot] != self._epoch:
            return
        self._num_offered[slot] = num_full
        self.version += 1
        ids, blocks = request.token_ids().data.cast("B"), self._held[slot]
        for index in range(offered, num_full):
            digest = self._digest(request, ids, index)
            if digest not in self._block_of:  # else the same was computed twice: one is enough
                self._block_of[digest] = blocks[index]
                self._digest_of[blocks[index]] = digest

    def reset(self) -> None:
        """Forget all content; holders keep their blocks, which are not offered any more."""
        self._free += self._idle
        self._idle.clear()
        self._block_of.clear()
        self._digest_of.clear()
        self._epoch += 1
        self.version += 1
        self._hasher = _keyed_hasher()

    def name_blocks(self, request: Request, forks: Iterable[Request]) -> None:
        """Name a request's full blocks so far, and let its other choices have the names."""
        ids = request.token_ids()
        if (num_full := len(ids) // self.block_size) and self.prefix_caching:
            self._digest(request, ids.data.cast("B"), num_full - 1)
        for fork in forks:
            fork.block_digests = request.block_digests.copy()
            fork.digest_epoch = request.digest_epoch

    def _digest(self, request: Request, ids: memoryview, index: int) -> bytes:
        """Return the name of a request's block; those before it are made once."""
        if request.digest_epoch != self._epoch:
            request.digest_epoch = self._epoch
            request.block_digests = []
        digests, size = request.block_digests, self.block_size * _ID_BYTES
        while len(digests) <= index:
            begin = len(digests) * size
            hashed = self._hasher.copy()  # half the time of one made with its key
            if digests:
                hashed.update(digests[-1])
            hashed.update(ids[begin : begin + size])
            digests.append(hashed.digest())
        return digests[index]


class ComingFree:
    """Counts blocks that come free as slots give theirs back, one slot after the other."""

    def __init__(
        self, held: Sequence[Sequence[int]], sharers: Mapping[int, int], but: frozenset[int]
    ) -> None:
        """Begin at none; made by `KVCacheManager.coming_free`."""
        self.count = 0
        self._held = held
        self._sharers = sharers
        self._but = but
        self._seen: dict[int, int] = {}  # shared blocks: how many of the slots hold them

    def add(self, slot: int) -> None:
        """Count a slot's blocks, too."""
        blocks = self._held[slot]
        if not (self._sharers or self._but):
            self.count += len(blocks)
            return
        for block in blocks:
            if sharers := self._sharers.get(block, 0):
                self._seen[block] = seen = self._seen.get(block, 0) + 1
                self.count += seen > sharers and block not in self._but
            else:
                self.count += block not in self._but


def _keyed_hasher() -> blake2b:
    return blake2b(digest_size=_DIGEST_BYTES, key=os.urandom(_DIGEST_BYTES))
