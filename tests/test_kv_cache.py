"""The block pool: which content is found again, and what is shared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aneuron import SamplingParams
from aneuron.kv_cache import KVCacheManager
from aneuron.request import Request


def request_of(number: int, prompt: list[int]) -> Request:
    request = Request(number, f"r{number}", SamplingParams(), arrival_s=0.0)
    request.prompt_ids = np.array(prompt, np.int32)
    return request


def filled(kv: KVCacheManager, slot: int, number: int, prompt: list[int]) -> Request:
    """A slot that has computed a prompt, and whose blocks can be found."""
    request = request_of(number, prompt)
    assert kv.allocate(slot, kv.blocks_for(len(prompt))) is not None
    kv.offer(slot, request, len(prompt))
    return request


def found_for(kv: KVCacheManager, prompt: list[int], number: int = 99) -> list[int]:
    request = request_of(number, prompt)
    return kv.find(request, request.token_ids())


def test_one_token_is_always_left_to_compute() -> None:
    kv = KVCacheManager(8, 2, 2)
    filled(kv, 0, 1, [1, 2, 3, 4])
    blocks = kv.blocks_of(0).tolist()
    assert found_for(kv, [1, 2, 3, 4]) == blocks[:1]
    assert found_for(kv, [1, 2, 3, 4, 5]) == blocks
    assert found_for(kv, [1, 2]) == []


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    kv = KVCacheManager(4, 2, 2, prefix_caching=False)
    filled(kv, 0, 1, [1, 2, 3, 4])
    assert found_for(kv, [1, 2, 3, 4, 5]) == []
    kv.free(0)
    assert (kv.num_cached, kv.num_free) == (0, 4)


def test_what_was_computed_twice_is_kept_once() -> None:
    kv = KVCacheManager(4, 2, 2)
    filled(kv, 0, 1, [1, 2])
    filled(kv, 1, 2, [1, 2])
    assert kv.num_cached == 1
    kv.free(0)
    kv.free(1)
    assert found_for(kv, [1, 2, 3]) != []
    assert kv.num_idle(range(1, 5)) == 1


def test_a_slot_that_held_blocks_over_a_reset_offers_none_of_them() -> None:
    """Neither what it had computed, nor what it writes now: that is built on the old."""
    kv = KVCacheManager(8, 2, 3)
    request = filled(kv, 0, 1, [1, 2, 3])
    kv.reset()
    request.output_ids.extend([4, 5, 6])
    kv.extend(np.array([0], np.int64))
    kv.offer(0, request, 6)
    kv.share([1], 0, 3)  # nor what another choice of it writes
    kv.offer(1, request, 4)
    assert kv.num_cached == 0
    assert found_for(kv, [1, 2, 3, 4, 5, 6, 7]) == []
    kv.free(0)
    kv.free(1)
    assert (kv.num_free, kv.num_idle(range(1, 9))) == (8, 0)
    filled(kv, 2, 2, [1, 2, 3])
    assert found_for(kv, [1, 2, 3]) == kv.blocks_of(2).tolist()[:1], "a new holder does"


def test_the_end_of_a_content_is_forgotten_before_its_beginning() -> None:
    kv = KVCacheManager(4, 1, 2)
    filled(kv, 0, 1, [1, 2, 3, 4])
    first, second, *_ = kv.blocks_of(0).tolist()
    kv.free(0)
    assert kv.allocate(1, 2) is not None
    assert found_for(kv, [1, 2, 3, 4]) == [first, second]


def test_names_of_blocks_differ_between_pools_and_after_a_reset() -> None:
    """They are keyed with a secret: nobody can prepare two contents with one name."""
    kv, other = KVCacheManager(2, 2, 1), KVCacheManager(2, 2, 1)
    names: list[bytes] = []
    for pool in (kv, other):
        filled(pool, 0, 1, [1, 2])
        names += pool._block_of
        pool.free(0)
        pool.reset()
        filled(pool, 0, 2, [1, 2])
        names += pool._block_of
    assert len(set(names)) == 4
    assert all(len(name) >= 16 for name in names)


@given(
    one=st.lists(st.integers(0, 2), min_size=1, max_size=10),
    other=st.lists(st.integers(0, 2), min_size=1, max_size=10),
    block_size=st.integers(1, 3),
)
def test_exactly_what_two_prompts_begin_with_is_shared(
    one: list[int], other: list[int], block_size: int
) -> None:
    kv = KVCacheManager(32, block_size, 2)
    filled(kv, 0, 1, one)
    alike = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        alike += 1
    whole = min(alike // block_size, (len(other) - 1) // block_size)
    assert found_for(kv, other) == kv.blocks_of(0).tolist()[:whole]


def test_ids_that_look_alike_when_put_together_are_kept_apart() -> None:
    """Ids have a fixed width in a name: 1, 2 is not 258 or 513, nor a shift of either."""
    contents = [[1, 2], [2, 1], [258, 0], [513, 0], [0, 258], [0x10002, 0], [0, 0x10002], [12, 0]]
    kv = KVCacheManager(20, 2, len(contents))
    for slot, content in enumerate(contents):
        assert found_for(kv, [*content, 5]) == []
        filled(kv, slot, slot + 1, content)
    assert kv.num_cached == len(contents)


def test_the_same_ids_after_other_ones_are_another_content() -> None:
    kv = KVCacheManager(8, 2, 2)
    filled(kv, 0, 1, [1, 1, 5, 5])
    assert found_for(kv, [2, 2, 5, 5, 9]) == []
    assert found_for(kv, [5, 5, 9]) == []


def test_lookups_are_counted_in_tokens() -> None:
    kv = KVCacheManager(8, 2, 2)
    kv.note_lookup(10, 4)
    kv.note_lookup(3, 0)
    assert (kv.num_queries, kv.num_hits) == (13, 4)


@pytest.mark.parametrize("holders", [1, 2, 3])
def test_a_shared_block_comes_free_with_its_last_holder(holders: int) -> None:
    kv = KVCacheManager(4, 2, 3)
    filled(kv, 0, 1, [1, 2])
    for slot in range(1, holders):
        kv.share([slot], 0, 2)
        assert kv.blocks_of(slot).tolist() == kv.blocks_of(0).tolist()
    for slot in range(holders):
        assert kv.num_free == 3
        assert kv.coming_free(range(slot, holders)).count == 1
        assert kv.coming_free(range(slot + 1, holders)).count == 0
        kv.free(slot)
    assert kv.num_free == 4
