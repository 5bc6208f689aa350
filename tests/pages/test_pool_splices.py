"""Blocks shared by range and by registered prefix (POOL-1, POOL-2)."""

import pytest
from pool_state import DictPool, refs, refused, session

import lazykv as lk

# By range


def test_splice_shares_blocks_and_adds_the_tokens_they_hold():
    pool = DictPool(8, 4)
    a, b = session(pool, 10), session(pool, 4, first=50)
    assert pool.splice(a, b, 1, 3) == 6
    assert pool.session_block_table(b) == [3, 1, 2]
    assert (pool.filled_tokens(b), refs(pool)[:4]) == (10, [1, 2, 2, 1])
    assert pool.read(b) == [50, 51, 52, 53, 4, 5, 6, 7, 8, 9]


def test_a_spliced_partial_tail_is_copied_before_it_grows():
    pool = DictPool(8, 4)
    a, b = session(pool, 6), pool.open()
    assert pool.splice(a, b, 0, 2) == 6
    assert pool.append_required(b, 1) == 1
    assert pool.feed(b, [60]) == [2]
    assert pool.feed(a, [70]) == []
    assert (pool.read(a)[4:], pool.read(b)[4:]) == ([4, 5, 70], [4, 5, 60])


def test_a_session_can_hold_a_block_twice():
    pool = DictPool(4, 2)
    s = session(pool, 2)
    assert pool.splice(s, s, 0, 1) == 2
    assert (pool.session_block_table(s), refs(pool)[0]) == ([0, 0], 2)
    pool.truncate(s, 3)
    assert pool.feed(s, ["x"]) == [1]
    assert pool.read(s) == [0, 1, 0, "x"]
    pool.discard(s)
    assert pool.free_blocks() == 4


def test_an_empty_splice_shares_nothing():
    pool = DictPool(4, 2)
    a, b = session(pool, 4), pool.open()
    assert (pool.splice(a, b, 1, 1), pool.session_block_table(b)) == (0, [])
    assert pool.splice(pool.open(), b, 0, 0) == 0


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (0, 4), (2, 1), (4, 4), (-2, -1)])
def test_a_splice_lies_within_its_source(first, last):
    pool = DictPool(6, 2)
    a, b = session(pool, 5), pool.open()
    with refused(pool, lk.BadSpliceRange, f"{first}..{last}", "0..3"):
        pool.splice(a, b, first, last)


def test_only_whole_blocks_are_spliced_behind():
    pool = DictPool(6, 2)
    a, b = session(pool, 4), session(pool, 3)
    with refused(pool, lk.OffsetNotBlockAligned, "3 tokens", "block size 2"):
        pool.splice(a, b, 0, 1)
    pool.truncate(b, 2)
    assert pool.splice(a, b, 0, 1) == 2


@pytest.mark.parametrize("bad", [True, 1.0, "1", None])
def test_places_are_whole_numbers(bad):
    pool = DictPool(6, 2)
    a, b = session(pool, 4), pool.open()
    for call in (
        lambda: pool.splice(a, b, bad, 2), lambda: pool.splice(a, b, 0, bad),
        lambda: pool.splice_prefix(a, b, bad), lambda: pool.register_prefix(a, bad),
        lambda: pool.cow_break(a, bad), lambda: pool.evict_blocks(a, [bad]),
        lambda: pool.evict_range(a, 0, bad), lambda: pool.block_refcount(bad),
    ):  # fmt: skip
        with refused(pool, lk.DTypeError, repr(bad)):
            call()


# By prefix


def test_splice_prefix_goes_to_an_empty_session():
    pool = DictPool(6, 2)
    a, b = session(pool, 5), pool.open()
    assert pool.splice_prefix(a, b, 2) == 4
    assert (pool.read(b), pool.session_block_table(b)) == ([0, 1, 2, 3], [0, 1])
    with refused(pool, lk.PrefixTargetNotEmpty, "4 tokens"):
        pool.splice_prefix(a, b, 1)
    c = pool.open()
    for k in (3, 99):
        with refused(pool, lk.PrefixNotFullyFilled, f"{k} blocks", "5 tokens"):
            pool.splice_prefix(a, c, k)
    with refused(pool, lk.RangeError):
        pool.splice_prefix(a, c, -1)
    assert (pool.splice_prefix(a, c, 0), pool.filled_tokens(c)) == (0, 0)


def test_a_registered_prefix_outlives_its_session():
    pool = DictPool(6, 2)
    a = session(pool, 5)
    prefix = pool.register_prefix(a, 2)
    assert refs(pool) == [2, 2, 1, 0, 0, 0]
    pool.discard(a)
    assert (refs(pool), pool.free_blocks()) == ([1, 1, 0, 0, 0, 0], 4)
    b = pool.open()
    assert pool.splice_prefix_from(prefix, b) == 4
    assert (pool.read(b), refs(pool)[:2]) == ([0, 1, 2, 3], [2, 2])
    with refused(pool, lk.PrefixTargetNotEmpty):
        pool.splice_prefix_from(prefix, b)
    pool.release_prefix(prefix)
    assert (pool.read(b), refs(pool)[:2]) == ([0, 1, 2, 3], [1, 1])
    pool.discard(b)
    assert pool.free_blocks() == 6


def test_a_prefix_is_made_of_full_blocks():
    pool = DictPool(6, 2)
    a = session(pool, 5)
    for k in (0, 3):
        with refused(pool, lk.PrefixNotFullyFilled, f"{k} blocks"):
            pool.register_prefix(a, k)
    with refused(pool, lk.RangeError):
        pool.register_prefix(a, -1)
    assert pool.register_prefix(a, 1) != pool.register_prefix(a, 1)


def test_only_registered_prefixes_are_known():
    pool, other = DictPool(6, 2), DictPool(6, 2)
    s = session(pool, 2)
    prefix = pool.register_prefix(s, 1)
    gone = pool.register_prefix(s, 1)
    pool.release_prefix(gone)
    foreign = other.register_prefix(session(other, 2), 1)
    empty = pool.open()
    for bad in (gone, foreign, int(prefix), True, None, [prefix], s):
        with refused(pool, lk.UnknownPrefix, "release_prefix"):
            pool.release_prefix(bad)
        with refused(pool, lk.UnknownPrefix, "splice_prefix_from"):
            pool.splice_prefix_from(bad, empty)
        with refused(pool, lk.UnknownPrefix, "alloc_shifted_prefix_slots"):
            pool.alloc_shifted_prefix_slots(bad, empty)


def test_shifted_slots_are_new_blocks_behind_the_session():
    pool = DictPool(6, 2)
    a = session(pool, 4)
    prefix, b = pool.register_prefix(a, 2), session(pool, 2)
    assert pool.alloc_shifted_prefix_slots(prefix, b) == (2, [(0, 3), (1, 4)])
    assert (pool.filled_tokens(b), pool.session_block_table(b)) == (6, [2, 3, 4])
    assert refs(pool) == [2, 2, 1, 1, 1, 0]
    with refused(pool, lk.OutOfBlocks, "alloc_shifted_prefix_slots") as caught:
        pool.alloc_shifted_prefix_slots(prefix, b)
    assert (caught.value.need, caught.value.have) == (2, 1)
    pool.append(b, 1)
    with refused(pool, lk.OffsetNotBlockAligned, "7 tokens"):
        pool.alloc_shifted_prefix_slots(prefix, b)


def test_a_prefix_of_another_model_is_stale_until_it_is_registered_anew():
    pool = DictPool(8, 2)
    a = session(pool, 2)
    old = pool.register_prefix(a, 1)
    pool.use_model(("m", 1))
    b = session(pool, 2)
    new, mixed = pool.register_prefix(b, 1), pool.open()
    pool.splice(b, mixed, 0, 1)
    pool.splice(a, mixed, 0, 1)
    of_both, empty = pool.register_prefix(mixed, 2), pool.open()
    for stale in (old, of_both, pool.register_prefix(a, 1)):
        with refused(pool, lk.StaleHandle, "another model"):
            pool.splice_prefix_from(stale, empty)
        with refused(pool, lk.StaleHandle, "another model"):
            pool.alloc_shifted_prefix_slots(stale, empty)
    assert pool.splice_prefix_from(new, empty) == 2
    pool.release_prefix(old)
