"""Blocks that leave: detached from a session (POOL-3), evicted from the cache (POOL-5)."""

import copy

import pytest
from pool_state import GONE, DictPool, refs, refused, session

import lazykv as lk

# Detaching and restoring


def test_evicted_blocks_are_free_and_come_back_with_their_rows():
    pool = DictPool(6, 2)
    s = session(pool, 5)
    report = pool.evict(s)
    assert (report.freed, report.still_shared, pool.free_blocks()) == ([0, 1, 2], [], 6)
    assert pool.session_block_table(s) == [None, None, None]
    assert (pool.filled_tokens(s), pool.session_blocks(s), pool.resident_block(s, 1)) == (
        5,
        3,
        None,
    )
    other = session(pool, 4, first=50)
    assert pool.restore(s, report.handle) == [2, 3, 4]
    assert (pool.read(s), pool.read(other)) == ([0, 1, 2, 3, 4], [50, 51, 52, 53])


def test_shared_blocks_stay_and_are_reported():
    pool = DictPool(8, 2)
    s = session(pool, 8)
    pool.register_prefix(s, 1)
    child = pool.open()
    pool.splice(s, child, 2, 3)
    report = pool.evict(s)
    assert (report.freed, report.still_shared) == ([1, 3], [0, 2])
    assert pool.session_block_table(s) == [0, None, 2, None]
    assert (pool.evict(s).freed, pool.evict(s).still_shared) == ([], [0, 2])
    pool.restore(s, report.handle)
    assert pool.read(s) == list(range(8))
    pool.publish(s, range(8))
    with pool.lookup(range(4)):
        assert pool.evict(s).still_shared == [0, 1, 2]


def test_some_blocks_by_index_and_by_range():
    pool = DictPool(8, 2)
    s = session(pool, 10)
    some = pool.evict_blocks(s, [3, 0])
    assert (some.freed, some.handle.indices) == ([3, 0], (3, 0))
    part = pool.evict_range(s, 1, 3)
    assert (part.freed, pool.session_block_table(s)) == ([1, 2], [None, None, None, None, 4])
    assert (pool.evict_range(s, 2, 2).freed, pool.evict_blocks(s, []).freed) == ([], [])
    pool.restore(s, some.handle)
    assert pool.read(s) == [0, 1, None, None, None, None, 6, 7, 8, 9]
    pool.restore(s, part.handle)
    assert pool.read(s) == list(range(10))


def test_indices_name_resident_blocks_of_the_session_once():
    pool = DictPool(8, 2)
    s = session(pool, 5)
    for indices in ([3], [-1], [0, 3], [1, 1]):
        with refused(pool, lk.BadBlockIndex, "evict_blocks"):
            pool.evict_blocks(s, indices)
    for first, last in ((0, 4), (2, 1)):
        with refused(pool, lk.BadBlockIndex, f"{first}..{last}", "0..3"):
            pool.evict_range(s, first, last)
    for first, last in ((-1, 1), (0, -1)):
        with refused(pool, lk.BadBlockIndex, "evict_range"):
            pool.evict_range(s, first, last)
    pool.evict_blocks(s, [1])
    for call in (lambda: pool.evict_blocks(s, [0, 1]), lambda: pool.evict_range(s, 0, 2)):
        with refused(pool, lk.SessionNotResident, "block index 1"):
            call()


def test_a_handle_restores_once():
    pool = DictPool(6, 2)
    s = session(pool, 4)
    handle = pool.evict(s).handle
    pool.restore(s, handle)
    assert handle.payload is GONE
    with refused(pool, lk.StaleHandle, keep=(handle,)):
        pool.restore(s, handle)
    again = pool.evict(s).handle
    with refused(pool, lk.StaleHandle):
        pool.restore(s, handle)
    pool.restore(s, again)
    empty = pool.evict_blocks(s, []).handle
    assert pool.restore(s, empty) == []
    with refused(pool, lk.StaleHandle):
        pool.restore(s, empty)


def test_a_handle_restores_into_its_own_session():
    pool, far = DictPool(8, 2), DictPool(8, 2)
    s, other = session(pool, 4), session(pool, 4)
    handle, others, foreign = pool.evict(s).handle, pool.evict(other), far.evict(session(far, 4))
    for target, bad in ((other, handle), (s, others.handle), (s, foreign.handle)):
        with refused(pool, lk.StaleHandle, keep=(bad,)):
            pool.restore(target, bad)
    for bad in (int(s), None, far.open()):
        with refused(pool, lk.UnknownSession, "restore", keep=(handle,)):
            pool.restore(bad, handle)
    for bad in (None, 1, others):
        with refused(pool, lk.PoolError, "EvictHandle"):
            pool.restore(s, bad)
    pool.discard(other)
    with refused(pool, lk.StaleHandle):
        pool.restore(other, others.handle)
    pool.restore(s, handle)
    assert pool.read(s) == [0, 1, 2, 3]


@pytest.mark.parametrize(("tokens", "stale"), [(8, False), (7, False), (6, True), (2, True)])
def test_a_handle_is_stale_when_a_slot_it_covers_is_dropped(tokens, stale):
    pool = DictPool(8, 2)
    s = session(pool, 8)
    handle = pool.evict_blocks(s, [1, 3]).handle
    pool.truncate(s, tokens)
    assert (handle.payload is GONE) == handle.spent == stale
    if stale:
        with refused(pool, lk.StaleHandle):
            pool.restore(s, handle)
        pool.truncate(s, 1)
        pool.discard(s)
    else:
        pool.restore(s, handle)
        assert pool.read(s) == list(range(tokens))


def test_slots_that_were_dropped_and_filled_anew_are_other_slots():
    pool = DictPool(8, 2)
    s = session(pool, 4)
    handle = pool.evict_blocks(s, [1]).handle
    pool.truncate(s, 2)
    pool.feed(s, [7, 8])
    with refused(pool, lk.StaleHandle):
        pool.restore(s, handle)
    assert pool.read(s) == [0, 1, 7, 8]


def test_a_session_grows_behind_evicted_full_blocks():
    pool = DictPool(8, 2)
    s = session(pool, 4)
    handle = pool.evict(s).handle
    assert pool.append_required(s, 1) == 1
    pool.feed(s, [4])
    pool.restore(s, handle)
    assert pool.read(s) == [0, 1, 2, 3, 4]


def test_nothing_grows_into_an_evicted_partial_tail():
    pool = DictPool(8, 2)
    s = session(pool, 3)
    handle = pool.evict_blocks(s, [1]).handle
    for verb in (pool.append, pool.append_required):
        with refused(pool, lk.SessionNotResident, "append", "block index 1"):
            verb(s, 1)
    for call in (lambda: pool.begin_step([s], 1), lambda: pool.check_append("who", s, 1)):
        with refused(pool, lk.SessionNotResident, "block index 1"):
            call()
    assert (pool.append(s, 0), pool.append_required(s, 0)) == ([], 0)
    pool.restore(s, handle)
    pool.feed(s, [3])
    assert pool.read(s) == [0, 1, 2, 3]


def test_evicted_blocks_are_not_shared():
    pool = DictPool(8, 2)
    s, empty = session(pool, 6), pool.open()
    pool.evict_blocks(s, [1])
    for call in (
        lambda: pool.fork(s), lambda: pool.splice(s, empty, 1, 2), lambda: pool.cow_break(s, 1),
        lambda: pool.splice_prefix(s, empty, 2), lambda: pool.register_prefix(s, 2),
    ):  # fmt: skip
        with refused(pool, lk.SessionNotResident, "block index 1"):
            call()
    assert (pool.splice(s, empty, 2, 3), pool.publish(s, range(6))) == (2, 1)
    pool.release_prefix(pool.register_prefix(s, 1))


def test_a_restore_without_room_can_be_tried_again():
    pool = DictPool(4, 2)
    s = session(pool, 6)
    handle = pool.evict(s).handle
    other = session(pool, 4)
    with refused(pool, lk.OutOfBlocks, "restore", keep=(handle,)) as caught:
        pool.restore(s, handle)
    assert (caught.value.need, caught.value.have) == (3, 2)
    pool.discard(other)
    pool.restore(s, handle)
    assert pool.read(s) == list(range(6))


@pytest.mark.parametrize("hook", ["_store_bytes", "_fetch_bytes", "_place_bytes"])
def test_moves_that_fail_leave_the_session_as_it_was(hook, monkeypatch):
    pool = DictPool(4, 2)
    s = session(pool, 4)
    handle = None if hook == "_store_bytes" else pool.evict(s).handle

    def fail(*args):
        raise OSError("no disk")

    with monkeypatch.context() as patch:
        patch.setattr(pool, hook, fail)
        with pytest.raises(OSError, match="no disk"):
            pool.evict(s) if handle is None else pool.restore(s, handle)
    pool.check()
    assert pool.free_blocks() == (2 if handle is None else 4)
    pool.restore(s, handle or pool.evict(s).handle)
    assert pool.read(s) == [0, 1, 2, 3]


# The cache of published blocks


def chain(pool: DictPool, tokens: list[int]) -> None:
    s = pool.open()
    pool.feed(s, tokens)
    pool.publish(s, tokens)
    pool.discard(s)


def hits(pool: DictPool, *prompts: list[int]) -> list[int]:
    leases = [pool.lookup(p) for p in prompts]
    for lease in reversed(leases):
        lease.release()
    return [lease.tokens for lease in leases]


def test_a_chains_last_block_goes_first_l8():
    pool = DictPool(3, 2)
    chain(pool, [0, 1, 2, 3, 4, 5])
    s = pool.open()
    assert pool.append(s, 1) == [2]
    assert hits(pool, [0, 1, 2, 3, 4, 5]) == [4]


def test_a_chain_that_was_let_go_of_from_its_start_still_loses_its_end_first():
    pool = DictPool(3, 2)
    s = session(pool, 6)
    pool.publish(s, range(6))
    for i in range(3):
        pool.evict_blocks(s, [i])
    assert pool.append(pool.open(), 3) == [2, 1]
    assert hits(pool, [0, 1, 2, 3]) == [2]


def test_the_least_recently_used_goes_first():
    pool = DictPool(3, 2)
    for tokens in ([0, 1], [2, 3], [4, 5]):
        chain(pool, tokens)
    hits(pool, [0, 1])
    s = pool.open()
    assert pool.append(s, 2) == [1]
    assert [hits(pool, p) for p in ([0, 1], [2, 3], [4, 5])] == [[2], [0], [2]]
    pool.append(s, 2)
    assert [hits(pool, p) for p in ([0, 1], [2, 3], [4, 5])] == [[0], [0], [2]]


def test_unused_blocks_go_before_cached_ones():
    pool = DictPool(3, 2)
    chain(pool, [0, 1])
    assert pool.append(pool.open(), 4) == [1, 2]
    assert hits(pool, [0, 1]) == [2]


def test_a_block_in_use_is_never_taken_l2():
    pool = DictPool(4, 2)
    s = session(pool, 2)
    pool.publish(s, [0, 1])
    with pool.lookup([0, 1]) as lease:
        assert refs(pool)[0] == 2
        other = pool.open()
        assert lease.splice_into(other) == 2
        pool.discard(s)
    greedy = pool.open()
    assert (pool.append(greedy, 6), refs(pool)[0]) == ([1, 2, 3], 1)
    with refused(pool, lk.OutOfBlocks):
        pool.append(greedy, 1)
    assert (pool.read(other), hits(pool, [0, 1])) == ([0, 1], [2])


def test_a_held_block_behind_an_evicted_one_stays_with_its_holder():
    pool = DictPool(3, 2)
    chain(pool, [0, 1])
    s = session(pool, 4)
    assert pool.publish(s, [0, 1, 2, 3]) == 2
    pool.cow_break(s, 0)
    assert pool.append(pool.open(), 2) == [0]
    assert (hits(pool, [0, 1, 2, 3]), pool.read(s)) == ([0], [0, 1, 2, 3])
    pool.discard(s)
    assert (pool.cached_blocks(), pool.free_blocks()) == (0, 2)


def test_pressure_evicts_what_is_idle_and_no_more_l12_l13():
    pool = DictPool(7, 2)
    held = session(pool, 4)
    for token in range(5):
        chain(pool, [token, token])
    assert (pool.cached_blocks(), pool.free_blocks()) == (5, 5)
    s = pool.open()
    assert (len(pool.append(s, 4)), pool.cached_blocks()) == (2, 3)
    with refused(pool, lk.OutOfBlocks) as caught:
        pool.append(s, 20)
    assert (caught.value.need, caught.value.have) == (10, 3)
    assert (len(pool.append(s, 6)), pool.cached_blocks(), pool.free_blocks()) == (3, 0, 0)
    assert (pool.read(held), refs(pool)) == ([0, 1, 2, 3], [1] * 7)
    assert [e.kind for e in pool.events()] == ["stored"] * 5 + ["removed"] * 5


def test_an_evicted_block_is_found_until_it_is_taken():
    pool = DictPool(2, 2)
    s = session(pool, 4)
    pool.publish(s, range(4))
    handle = pool.evict(s).handle
    assert (pool.cached_blocks(), hits(pool, [0, 1, 2, 3])) == (2, [4])
    other = session(pool, 2, first=50)
    assert hits(pool, [0, 1, 2, 3]) == [2]
    pool.discard(other)
    pool.restore(s, handle)
    assert (pool.read(s), hits(pool, [0, 1, 2, 3])) == ([0, 1, 2, 3], [0])


def test_a_copied_handle_is_the_handle():
    pool = DictPool(6, 2)
    s = session(pool, 4)
    report = pool.evict(s)
    twin = copy.copy(report.handle)
    assert twin is report.handle
    assert copy.deepcopy(report).handle is report.handle
    pool.restore(s, twin)
    with refused(pool, lk.StaleHandle):
        pool.restore(s, report.handle)
