"""Blocks of the KV pool: who holds which, and which are free.

The scheduler alone calls this, on the loop. Block 0 is the null block: padding reads and
writes it, no request ever gets it.
"""

from __future__ import annotations

import numpy as np

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """A pool of `num_blocks` blocks of `block_size` tokens, held by slots."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        """Make a pool in which every block is free."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.capacity = num_blocks * block_size  # tokens
        # Last in, first out: a block handed on too early is overwritten at once, and a
        # test that looks for that finds it.
        self._free = list(range(num_blocks, 0, -1))
        self._held: list[list[int]] = [[] for _ in range(num_slots)]
        self.num_held = np.zeros(num_slots, np.int64)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, slot: int, count: int) -> np.ndarray | None:
        """Give `count` blocks to a slot; int32 [count], or None, and nothing, if short."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self._held[slot] += blocks
        self.num_held[slot] += count
        return np.array(blocks, np.int32)

    def extend(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give one block to each of these slots, int64 [n]; as many must be free.

        Returns:
            columns in the slots' block tables, int64 [n], and the blocks, int32 [n].
        """
        blocks = [self._free.pop() for _ in range(len(slots))]
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            self._held[slot].append(block)
        columns = self.num_held[slots]
        self.num_held[slots] = columns + 1
        return columns, np.array(blocks, np.int32)

    def free(self, slot: int) -> None:
        """Take all blocks of a slot back."""
        self._free += reversed(self._held[slot])
        self._held[slot] = []
        self.num_held[slot] = 0
