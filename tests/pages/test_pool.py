"""The verbs of a pool's sequences and what they count (POOL-1, POOL-2, POOL-8)."""

import copy
import pickle
import random
import threading

import numpy as np
import pytest
from pool_state import DictPool, geometry, refs, refused, session

import lazykv as lk

COUNTED = ["append", "append_required", "truncate"]


# Geometry


@pytest.mark.parametrize("number", [int, np.int32, np.uint16])
def test_addresses_are_python_ints_and_do_not_wrap_h7(number):
    g = lk.KvGeometry(1, number(4000), number(19), number(9), number(3040), number(2))
    assert g.slot_block_bytes == 1_039_680
    assert g.block_offset(number(2065)) == 2_146_939_200
    assert g.block_offset(number(2066)) == 2_147_978_880
    assert type(g.block_offset(number(2066))) is type(g.num_blocks) is int
    assert g.total_bytes == 4000 * 2 * 1_039_680


def test_sizes_of_a_geometry():
    g = lk.KvGeometry(3, 5, 4, 2, 6, 2)
    assert (g.shape, g.flat_shape) == ((5, 4, 2, 6), (20, 2, 6))
    assert (g.slot_block_bytes, g.block_bytes, g.total_bytes) == (96, 576, 2880)
    assert [g.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("field", range(6))
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, lk.RangeError), (-1, lk.RangeError), (1.0, lk.DTypeError), (True, lk.DTypeError)],
)
def test_a_geometry_is_of_whole_numbers_above_0(field, value, error):
    sizes = [1] * 6
    sizes[field] = value
    with pytest.raises(error, match="KvGeometry"):
        lk.KvGeometry(*sizes)


def test_a_pool_that_has_no_addresses_is_refused():
    assert lk.KvGeometry(1, 2**61, 1, 1, 1, 1).total_bytes == 2**62
    with pytest.raises(lk.ShapeError, match="need at most"):
        lk.KvGeometry(1, 2**61, 2, 2, 1, 1)
    with pytest.raises(lk.PoolError, match="KvGeometry"):
        lk.KvBlockPool((1, 4, 2, 1, 1, 1))


def test_blocks_that_were_never_taken_cost_nothing():
    pool = lk.KvBlockPool(lk.KvGeometry(1, 2**60, 1, 1, 1, 1))
    a, b = pool.open(), pool.open()
    assert [pool.append(s, n) for s, n in ((a, 2), (b, 2))] == [[0, 1], [2, 3]]
    pool.discard(a)
    assert pool.append(b, 3) == [0, 1, 4]
    pool.truncate(b, 4)
    assert pool.append(b, 2) == [4, 5]
    assert (pool.free_blocks(), pool.capacity()) == (2**60 - 6, 2**60)
    assert pool.kv_bytes_resident() == 6 * pool.geometry.block_bytes
    assert [pool.block_refcount(n) for n in (5, 6, 2**60 - 1)] == [1, 0, 0]
    pool.check()
    with refused(pool, lk.OutOfBlocks, f"got {2**60 - 6} free blocks, need {2**60 - 5}"):
        pool.append(b, 2**60 - 5)


# Growing and shortening


def test_append_takes_a_block_where_the_last_one_is_full():
    pool = DictPool(6, 4)
    s = pool.open()
    assert pool.append(s, 0) == []
    assert pool.append(s, 6) == [0, 1]
    assert (pool.append(s, 2), pool.append(s, np.int32(1))) == ([], [2])
    assert (pool.filled_tokens(s), pool.session_blocks(s)) == (9, 3)
    assert pool.session_block_table(s) == [0, 1, 2]
    assert [pool.resident_block(s, i) for i in range(3)] == [0, 1, 2]


def test_append_takes_all_or_nothing():
    pool = DictPool(3, 4)
    s = session(pool, 5)
    with refused(pool, lk.OutOfBlocks, "append", "got 1", "need 2") as caught:
        pool.append(s, 8)
    assert (caught.value.need, caught.value.have) == (2, 1)
    assert isinstance(caught.value, MemoryError)
    assert pool.append(s, 7) == [2]
    with refused(pool, lk.OutOfBlocks):
        pool.append(s, 10**30)


def test_check_append_raises_what_append_would():
    pool = DictPool(3, 4)
    s = session(pool, 5)
    with refused(pool, lk.OutOfBlocks, "who: got 1") as caught:
        pool.check_append("who", s, 8)
    assert (caught.value.need, caught.value.have) == (2, 1)
    pool.check_append("who", s, 7)
    assert pool.filled_tokens(s) == 5
    with refused(pool, lk.UnknownSession, "who"):
        pool.check_append("who", int(s), 1)


@pytest.mark.parametrize("verb", COUNTED)
def test_counts_are_whole_numbers_of_at_least_0(verb):
    pool = DictPool(3, 4)
    s = session(pool, 5)
    for bad, error in ((-1, lk.RangeError), (1.0, lk.DTypeError), (True, lk.DTypeError)):
        with refused(pool, error, verb):
            getattr(pool, verb)(s, bad)


def test_blocks_required_needs_no_session():
    pool = DictPool(2, 4)
    assert [pool.blocks_required(filled, 1) for filled in (0, 3, 4, 5)] == [1, 0, 1, 0]
    assert pool.blocks_required(3, 10) == 3
    assert pool.blocks_required_batch([(0, 1), (3, 1), (4, 9)]) == 4
    assert pool.blocks_required_batch([]) == 0
    for bad in (None, 5, [None], [(1,)], "ab"):
        with refused(pool, lk.DTypeError, "blocks_required_batch: got", "need pairs (filled, n)"):
            pool.blocks_required_batch(bad)
    for filled, n in ((-1, 1), (1, -1)):
        with pytest.raises(lk.RangeError, match="blocks_required"):
            pool.blocks_required(filled, n)


def test_truncate_gives_back_the_blocks_past_the_end():
    pool = DictPool(4, 4)
    s = session(pool, 14)
    pool.truncate(s, 14)
    pool.truncate(s, 99)
    assert pool.filled_tokens(s) == 14
    pool.truncate(s, 5)
    assert (pool.filled_tokens(s), pool.session_block_table(s)) == (5, [0, 1])
    assert pool.read(s) == [0, 1, 2, 3, 4]
    pool.truncate(s, 4)
    assert (pool.session_block_table(s), pool.free_blocks()) == ([0], 3)
    pool.truncate(s, 0)
    assert (pool.session_block_table(s), pool.free_blocks()) == ([], 4)
    assert pool.feed(s, "abcde") == [0, 1]
    assert pool.read(s) == list("abcde")


def test_rejected_drafts_are_written_over():
    pool = DictPool(4, 4)
    s = session(pool, 9)
    pool.truncate(s, 6)
    assert pool.feed(s, [99]) == []
    assert pool.read(s) == [0, 1, 2, 3, 4, 5, 99]


# Ends, and handles of nobody


def test_a_discarded_session_is_dead_and_its_handle_never_returns():
    pool = DictPool(2, 2)
    handles = [pool.open() for _ in range(3)]
    pool.append(handles[1], 4)
    pool.discard(handles[1])
    assert pool.free_blocks() == 2
    with refused(pool, lk.UnknownSession, "discard", handles[1]):
        pool.discard(handles[1])
    handles += [pool.open(), DictPool(2, 2).open()]
    assert len(set(handles)) == 5


def test_only_handles_of_this_pool_name_a_session():
    pool = DictPool(4, 2)
    s = session(pool, 3)
    other = DictPool(4, 2)
    for bad in (int(s), True, None, "1", [s], other.open(), lk.PrefixId()):
        for verb in (pool.discard, pool.fork, pool.evict, pool.filled_tokens):
            with refused(pool, lk.UnknownSession, verb.__name__):
                verb(bad)
    assert pool.filled_tokens(copy.deepcopy(s)) == 3


def test_nothing_is_freed_twice_l1():
    pool = DictPool(4, 2)
    s = session(pool, 2)
    prefix, lease = pool.register_prefix(s, 1), pool.lookup([])
    with refused(pool, lk.BadBlockIndex, "once"):
        pool.evict_blocks(s, [0, 0])
    pool.release_prefix(prefix)
    pool.discard(s)
    lease.release()
    with refused(pool, lk.UnknownSession):
        pool.discard(s)
    with refused(pool, lk.UnknownPrefix):
        pool.release_prefix(prefix)
    with refused(pool, lk.StaleHandle, keep=(lease,)):
        lease.release()
    assert sorted(pool.append(pool.open(), 8)) == [0, 1, 2, 3]


# Sharing


def test_a_fork_takes_no_block_and_shares_all():
    pool = DictPool(3, 4)
    a = session(pool, 9)
    b = pool.fork(a)
    assert pool.free_blocks() == 0
    assert pool.session_block_table(b) == pool.session_block_table(a)
    assert (refs(pool), pool.read(b)) == ([2, 2, 2], list(range(9)))
    assert pool.kv_bytes_resident() == 3 * pool.geometry.block_bytes
    pool.discard(a)
    assert (refs(pool), pool.read(b)) == ([1, 1, 1], list(range(9)))


def test_a_shared_tail_is_copied_by_whoever_writes_first_l4():
    pool = DictPool(4, 4)
    a = session(pool, 6)
    b = pool.fork(a)
    assert [pool.append_required(s, 1) for s in (a, b)] == [1, 1]
    assert pool.feed(b, [60]) == [2]
    assert pool.append_required(a, 1) == 0
    assert pool.feed(a, [70]) == []
    assert (pool.read(a)[4:], pool.read(b)[4:]) == ([4, 5, 70], [4, 5, 60])
    assert refs(pool) == [2, 1, 1, 0]
    assert pool.stats.blocks_copied == 1


def test_the_copy_of_a_tail_is_counted():
    pool = DictPool(3, 4)
    a = session(pool, 6)
    b, other = pool.fork(a), session(pool, 1)
    with refused(pool, lk.OutOfBlocks) as caught:
        pool.append(b, 1)
    assert (caught.value.need, caught.value.have) == (1, 0)
    assert pool.append(b, 0) == []
    pool.discard(other)
    with refused(pool, lk.OutOfBlocks) as caught:
        pool.append(b, 3)
    assert (caught.value.need, caught.value.have) == (2, 1)
    assert pool.append(b, 2) == [2]


def test_full_blocks_are_shared_without_copies():
    pool = DictPool(4, 4)
    a = session(pool, 8)
    b = pool.fork(a)
    assert (pool.feed(b, [1]), pool.feed(a, [2])) == ([2], [3])
    assert pool.stats.blocks_copied == 0


@pytest.mark.parametrize("verb", ["append", "cow_break"])
def test_a_copy_that_fails_leaves_everything(verb):
    pool = DictPool(5, 4)
    a = session(pool, 6)
    b = pool.fork(a)
    before = (refs(pool), pool.free_blocks(), pool.session_block_table(b), dict(pool.rows))
    pool.fail = OSError("no bus")
    with pytest.raises(OSError, match="no bus"):
        pool.append(b, 7) if verb == "append" else pool.cow_break(b, 1)
    assert before == (refs(pool), pool.free_blocks(), pool.session_block_table(b), pool.rows)
    pool.check()
    assert pool.feed(b, [60]) == [2]
    assert (pool.read(a), pool.read(b)) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 60])


def test_cow_break_copies_what_others_hold_too():
    pool = DictPool(3, 2)
    a = session(pool, 4)
    assert pool.cow_break(a, 0) == 0
    b = pool.fork(a)
    assert pool.cow_break(b, np.int32(0)) == 2
    pool.write(b, 0, ["x"])
    assert (pool.read(a), pool.read(b)) == ([0, 1, 2, 3], ["x", 1, 2, 3])
    assert pool.cow_break(a, 0) == 0
    with refused(pool, lk.OutOfBlocks) as caught:
        pool.cow_break(b, 1)
    assert (caught.value.need, caught.value.have) == (1, 0)
    for i in (-1, 2):
        with refused(pool, lk.BadBlockIndex, "cow_break"):
            pool.cow_break(b, i)
        with refused(pool, lk.BadBlockIndex, "resident_block"):
            pool.resident_block(b, i)
    for block in (-1, 3):
        with refused(pool, lk.BadBlockIndex, "block_refcount"):
            pool.block_refcount(block)


def test_ends_of_two_sessions_that_share_l3():
    pool = DictPool(10, 2)

    def totals() -> list[int]:
        held = pool.kv_bytes_resident() // pool.geometry.block_bytes
        assert pool.free_blocks() + held == 10
        pool.check()
        return [held, pool.cached_blocks(), pool.free_blocks() - pool.cached_blocks()]

    a = session(pool, 8)
    assert (pool.publish(a, range(8)), totals()) == (4, [4, 0, 6])
    with pool.lookup(range(6)) as lease:
        b = pool.open()
        assert (lease.splice_into(b), totals()) == (6, [4, 0, 6])
    pool.feed(b, [70, 71])
    assert (pool.publish(b, [*range(6), 70, 71]), totals()) == (4, [5, 0, 5])
    pool.discard(a)
    assert totals() == [4, 1, 5]
    pool.discard(b)
    assert totals() == [0, 5, 5]


# The pool looks after itself


def broken(damage: str) -> DictPool:
    pool = DictPool(6, 2)
    s = session(pool, 4)
    pool.publish(s, range(4))
    pool.discard(session(pool, 2))
    exec(damage, {"pool": pool, "s": s, "seq": pool._sequences[s], "blocks": pool._blocks})
    return pool


@pytest.mark.parametrize("damage", [
    "pass",
    "blocks.refs[0] += 1",
    "blocks.refs[0] -= 1",
    "blocks.refs[2] = -1",
    "blocks.refs.append(0)",
    "blocks.num_blocks = 2",
    "blocks._unused.append(0)",
    "blocks._unused.pop()",
    "blocks._cached[2] = None; blocks._unused.remove(2)",
    "blocks._unused.append(0); blocks.refs[0] = 0; seq.table[0] = 1; blocks.refs[1] = 2",
    "seq.filled = 5",
    "seq.table.pop()",
    "seq.table[0] = pool.evict(pool.open()).handle; blocks.release([0])",
    "pool.evict_blocks(s, [0, 1]).handle.indices = (0,)",
    "pool._pins[0] = 1",
    "blocks.index[0].key = b''",
    "blocks.index[1].block = 5",
    "blocks.index[0].children.clear()",
    "blocks.index[1].parent = None",
    "del blocks.index._by_key[blocks.index[0].key]",
    "del blocks.index._by_block[1]",
])  # fmt: skip
def test_check_finds_damage(damage):
    pool = broken(damage)
    if damage == "pass":
        pool.check()
    else:
        with pytest.raises(lk.PoolError, match="check: got a broken pool"):
            pool.check()


def test_counters_and_repr():
    pool = DictPool(6, 2)
    s = session(pool, 5)
    pool.append(pool.fork(s), 1)
    pool.restore(s, pool.evict(s).handle)
    pool.publish(s, range(4))
    pool.lookup([0, 1, 9, 9]).release()
    assert pool.stats == lk.PoolStats(5, 1, 1, 1, 1, 4, 2)
    assert repr(pool) == "DictPool(6 blocks of 2 tokens, 2 free, 2 sessions)"
    assert repr(pool.lookup([])) == "PrefixLease(0 tokens, open)"


def test_a_verb_waits_for_the_one_that_runs():
    """A copy on write stops in the middle; another thread's verb must not see half of it."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(DictPool):
        def _copy_block(self, source: int, dest: int) -> None:
            inside.set()
            assert go_on.wait(30)
            super()._copy_block(source, dest)

    pool = Slow(6, 2)
    s = pool.open()
    pool.append(s, 1)
    pool.fork(s)
    writer = threading.Thread(target=pool.append, args=(s, 1))
    writer.start()
    assert inside.wait(30)
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.append(pool.free_blocks()))
    reader.start()
    reader.join(0.2)
    assert (reader.is_alive(), seen) == (True, [])
    go_on.set()
    for thread in (writer, reader):
        thread.join(30)
    assert seen == [4]
    pool.check()


def test_threads_share_a_pool():
    pool = DictPool(40, 2)
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        rng, s = random.Random(seed), pool.open()
        start.wait()
        try:
            for _ in range(300):
                try:
                    s = turn(rng, s)
                except lk.OutOfBlocks:
                    # The others hold the rest, or their fences keep it waiting.
                    pool.discard(s)
                    s = pool.open()
        except BaseException as error:
            failures.append(error)

    def turn(rng: random.Random, s: lk.SessionHandle) -> lk.SessionHandle:
        """A verb on the thread's own session; the session it goes on with."""
        n, verb = pool.filled_tokens(s), rng.randrange(7)
        if verb == 0:
            pool.append(s, min(rng.randrange(6), 16 - n))
        elif verb == 1:
            pool.truncate(s, rng.randrange(n + 1))
        elif verb == 2 and n:
            pool.restore(s, pool.evict(s).handle)
        elif verb == 3:
            pool.publish(s, range(n))
        elif verb == 4:
            child = pool.fork(s)
            pool.discard(s)
            return child
        elif verb == 5:
            pool.close_fence(pool.open_fence())
        else:
            with pool.lookup(range(16)) as lease:
                pool.discard(s)
                s = pool.open()
                lease.splice_into(s)
        return s

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    pool.check()
    for s in list(pool._sequences):
        pool.discard(s)
    assert pool.free_blocks() == 40
    assert geometry(40, 2) == pool.geometry


# One pool, one object


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_second_object_for_the_same_blocks_is_refused(way):
    pool = DictPool(4, 2)
    s = session(pool, 3)
    with refused(pool, lk.PoolError, "DictPool(4 blocks", "got a copy or a pickle"):
        way(pool)
    assert pool.append(s, 2) == [2]
