"""The block pool alone, in any order of calls, against a model of what it promises."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aneuron import SamplingParams
from aneuron.kv_cache import KVCacheManager
from aneuron.request import Request

Prefix = tuple[int, ...]

NUM_SLOTS = 5
# Contents repeat, and differ in one place only.
prompts = st.builds(
    lambda base, length, tail: [*base[:length], *tail],
    st.sampled_from([[0] * 8, [0, 0, 1, 0, 0, 0, 1, 1], [1] * 8]),
    st.integers(1, 8),
    st.sampled_from([[], [], [0], [1]]),
)


def request_of(number: int, prompt: list[int]) -> Request:
    request = Request(number, f"r{number}", SamplingParams(), arrival_s=0.0)
    request.prompt_ids = np.array(prompt, np.int32)
    return request


@dataclass
class Holder:
    """A slot's request, its blocks, and what the model knows of them."""

    request: Request
    blocks: list[int]
    epoch: int
    num_offered: int  # leading blocks that are offered, or that another slot writes
    num_shared: int = 0
    ids: list[int] = field(default_factory=list)

    def prefix(self, num_tokens: int) -> Prefix:
        assert num_tokens <= len(self.ids)
        return tuple(self.ids[:num_tokens])


class PoolMachine(RuleBasedStateMachine):
    """Allocate, share, extend, offer, find, free and reset, in any order."""

    def __init__(self) -> None:
        """Begin without a pool: its size is drawn."""
        super().__init__()
        self.holders: dict[int, Holder] = {}
        self.known: dict[Prefix, int] = {}  # content that can be found, and where
        self.idle: list[int] = []  # known and held by nobody, least recently used first
        # What was written to a block last: the holder's ids up to the end of the block.
        self.written: dict[int, Prefix] = {}
        self.written_in: dict[int, int] = {}  # in which epoch
        self.epoch = 0
        self.numbers = itertools.count(1)

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3))
    def make_pool(self, num_blocks: int, block_size: int) -> None:
        self.size, self.num_blocks = block_size, num_blocks
        self.kv = KVCacheManager(num_blocks, block_size, NUM_SLOTS)

    # ── the model ───────────────────────────────────────────────────────────────────────

    def held(self) -> set[int]:
        return {block for holder in self.holders.values() for block in holder.blocks}

    def free(self) -> set[int]:
        """Blocks that nobody holds and whose content nobody can find."""
        return set(range(1, self.num_blocks + 1)) - self.held() - set(self.idle)

    def take(self, blocks: list[int], *, held: set[int], free: set[int]) -> None:
        """The pool gave these out as new ones: nobody's, and the least recently used last."""
        assert len(set(blocks)) == len(blocks), "a block was given out twice"
        assert not held & set(blocks), "a block that somebody holds was given out"
        evicted = self.idle[: max(0, len(blocks) - len(free))]
        if evicted:
            assert set(blocks) == free | set(evicted), "not the least recently used"
        else:
            assert set(blocks) <= free, "content was forgotten without need"
        for block in evicted:
            self.idle.remove(block)
            self.known = {prefix: at for prefix, at in self.known.items() if at != block}
        for block in blocks:
            self.written.pop(block, None)

    def write(self, holder: Holder) -> None:
        """The holder's own blocks now have its ids, as far as they are full."""
        for index in range(holder.num_shared, len(holder.ids) // self.size):
            self.written[holder.blocks[index]] = holder.prefix((index + 1) * self.size)
            self.written_in[holder.blocks[index]] = self.epoch

    def expected(self, prompt: list[int]) -> list[int]:
        """The blocks in which a prompt's beginning can be found, one token left out."""
        found = []
        for end in range(self.size, len(prompt), self.size):
            block = self.known.get(tuple(prompt[:end]))
            if block is None:
                break
            found.append(block)
        return found

    # ── rules ───────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: len(self.holders) < NUM_SLOTS)
    @rule(prompt=prompts)
    def admit(self, prompt: list[int]) -> None:
        """Find a prompt's beginning and allocate the rest, as admission does."""
        slot = min(set(range(NUM_SLOTS)) - set(self.holders))
        request = request_of(next(self.numbers), prompt)
        found = self.kv.find(request, request.token_ids())
        assert found == self.expected(prompt)
        for index, block in enumerate(found):
            assert self.written[block] == tuple(prompt[: (index + 1) * self.size])
            assert self.written_in[block] == self.epoch, "written before the reset"
        held, free = self.held(), self.free()
        count = self.kv.blocks_for(len(prompt)) - len(found)
        room = self.num_blocks - len(held)
        blocks = self.kv.allocate(slot, count, found)
        if count + sum(block in self.idle for block in found) > room:
            assert blocks is None
            return
        assert blocks is not None
        assert blocks[: len(found)].tolist() == found
        self.idle = [block for block in self.idle if block not in found]
        self.take(blocks[len(found) :].tolist(), held=held | set(found), free=free)
        holder = Holder(request, blocks.tolist(), self.epoch, len(found), len(found), list(prompt))
        self.holders[slot] = holder
        self.write(holder)

    @precondition(lambda self: len(self.holders) < NUM_SLOTS)
    @rule(prompt=prompts)
    def serve(self, prompt: list[int]) -> None:
        """A whole request: it is admitted, computed, and gives its blocks back."""
        before = sorted(self.holders)
        self.admit(prompt)
        if sorted(self.holders) != before:
            (slot,) = set(self.holders) - set(before)
            which = sorted(self.holders).index(slot)
            self.offer(which, 3)
            self.give_back(which)

    @precondition(lambda self: 0 < len(self.holders) < NUM_SLOTS)
    @rule(which=st.integers(0, NUM_SLOTS - 1))
    def share(self, which: int) -> None:
        """Let another choice have the prompt of a request, as admission does."""
        owner_slot = sorted(self.holders)[which % len(self.holders)]
        owner = self.holders[owner_slot]
        slot = min(set(range(NUM_SLOTS)) - set(self.holders))
        prompt_len = owner.request.prompt_len
        num_full, rest = divmod(prompt_len, self.size)
        held, free, room = self.held(), self.free(), self.kv.num_free
        if rest and not room:
            return
        self.kv.share([slot], owner_slot, prompt_len)
        blocks = self.kv.blocks_of(slot)
        assert blocks[:num_full].tolist() == owner.blocks[:num_full]
        own = blocks[num_full:].tolist()
        assert len(own) == (1 if rest else 0), "a block that is not full is never shared"
        self.take(own, held=held, free=free)
        ids = owner.ids[:prompt_len]
        request = request_of(next(self.numbers), ids)
        holder = Holder(request, blocks.tolist(), owner.epoch, num_full, num_full, ids)
        self.holders[slot] = holder
        assert self.kv.blocks_of(slot).tolist() == holder.blocks

    @precondition(lambda self: self.holders)
    @rule(which=st.sets(st.integers(0, NUM_SLOTS - 1), min_size=1), token=st.integers(0, 1))
    def decode(self, which: set[int], token: int) -> None:
        """Give slots one more token each, and those without room one more block."""
        slots = [slot for slot in sorted(self.holders) if slot in which]
        short = [
            slot
            for slot in slots
            if len(self.holders[slot].ids) == len(self.holders[slot].blocks) * self.size
        ]
        if len(short) > self.kv.num_free:
            return
        held, free = self.held(), self.free()
        columns, blocks = self.kv.extend(np.array(short, np.int64))
        self.take(blocks.tolist(), held=held, free=free)
        assert columns.tolist() == [len(self.holders[slot].blocks) for slot in short]
        for slot, block in zip(short, blocks.tolist(), strict=True):
            self.holders[slot].blocks.append(block)
        for slot in slots:
            holder = self.holders[slot]
            holder.ids.append(token)
            holder.request.output_ids.append(token)
            self.write(holder)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, NUM_SLOTS - 1), share=st.integers(0, 3))
    def offer(self, which: int, share: int) -> None:
        """Let a slot's blocks be found, as far as steps have resolved."""
        slot = sorted(self.holders)[which % len(self.holders)]
        holder = self.holders[slot]
        num_tokens = len(holder.ids) * share // 3
        self.kv.offer(slot, holder.request, num_tokens)
        if holder.epoch != self.epoch:
            return
        for index in range(holder.num_offered, num_tokens // self.size):
            self.known.setdefault(holder.prefix((index + 1) * self.size), holder.blocks[index])
        holder.num_offered = max(holder.num_offered, num_tokens // self.size)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, NUM_SLOTS - 1))
    def give_back(self, which: int) -> None:
        """Free a slot; what can be found stays, and the ends of contents go first."""
        slot = sorted(self.holders)[which % len(self.holders)]
        self.kv.free(slot)
        holder = self.holders.pop(slot)
        still_held, places = self.held(), set(self.known.values())
        self.idle += [
            block
            for block in reversed(holder.blocks)
            if block in places and block not in still_held
        ]

    @rule()
    def reset(self) -> None:
        """Forget all content."""
        self.kv.reset()
        self.known.clear()
        self.idle.clear()
        self.epoch += 1

    # ── always ──────────────────────────────────────────────────────────────────────────

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv, held = self.kv, self.held()
        pool = [*held, *kv._free, *kv._idle]
        assert sorted(pool) == list(range(1, self.num_blocks + 1)), "lost, doubled, or block 0"
        assert kv.num_free == self.num_blocks - len(held)
        assert kv.num_cached == len(self.known)
        assert list(kv._idle) == self.idle
        for slot in range(NUM_SLOTS):
            holder = self.holders.get(slot)
            blocks = [] if holder is None else holder.blocks
            assert kv.blocks_of(slot).tolist() == blocks
            assert kv.num_held[slot] == len(blocks)

    @invariant()
    def what_would_come_free_is_known(self) -> None:
        if not hasattr(self, "kv"):
            return
        for some in (
            set(self.holders),
            set(sorted(self.holders)[:2]),
            set(sorted(self.holders)[1:]),
        ):
            others = {b for s, one in self.holders.items() if s not in some for b in one.blocks}
            mine = {b for s, one in self.holders.items() if s in some for b in one.blocks}
            assert self.kv.coming_free(some).count == len(mine - others)
            but = set(sorted(mine)[::2])
            assert self.kv.coming_free(some, but).count == len(mine - others - but)
        everything = range(1, self.num_blocks + 1)
        assert self.kv.num_idle(everything) == len(self.idle)

    def teardown(self) -> None:
        """Give everything back: the pool is full, and all of it can be had at once."""
        if not hasattr(self, "kv"):
            return
        for _ in range(len(self.holders)):
            self.give_back(0)
        assert self.kv.num_free == self.num_blocks
        blocks = self.kv.allocate(0, self.num_blocks)
        assert blocks is not None
        assert sorted(blocks.tolist()) == list(range(1, self.num_blocks + 1))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=2 * settings().max_examples, stateful_step_count=60
)
TestPoolMachine = pytest.mark.timeout(max(300, settings().max_examples))(TestPoolMachine)
