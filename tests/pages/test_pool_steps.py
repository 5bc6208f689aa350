"""Steps over several sequences: room for all, busy meanwhile, ended once; and fences."""

import pytest
from pool_state import DictPool, refs, refused, session

import lazykv as lk
from lazykv.ids import FenceId


@pytest.mark.parametrize("verb", ["begin_step", "step_required"])
def test_a_step_is_of_several_sessions(verb):
    pool = DictPool(6, 2)
    s = session(pool, 3)
    for bad in (None, 5, s):
        with refused(pool, lk.DTypeError, f"{verb}: got {bad!r}, need a list of sessions"):
            getattr(pool, verb)(bad, 1)
    with refused(pool, lk.RangeError, f"{verb}: got n -1"):
        getattr(pool, verb)([s], -1)


def test_sessions_of_a_step_may_come_one_by_one():
    pool = DictPool(6, 2)
    given = [session(pool, 3), session(pool, 2)]
    assert pool.step_required(iter(given), 1) == 1
    step = pool.begin_step(iter(given), 1)
    assert step.sessions == tuple(given)
    pool.end_step(step)


def test_a_step_makes_room_for_all_or_none():
    pool = DictPool(5, 2)
    a, b = session(pool, 2), session(pool, 3)
    assert pool.step_required([a, b], 2) == 2
    with refused(pool, lk.OutOfBlocks, "begin_step") as caught:
        pool.begin_step([a, b], 3)
    assert (caught.value.need, caught.value.have) == (3, 2)
    step = pool.begin_step([a, b], 2)
    assert (step.sessions, step.starts, step.tokens) == ((a, b), (2, 3), 2)
    assert [pool.filled_tokens(s) for s in (a, b)] == [4, 5]
    pool.end_step(step)
    pool.check()


def test_the_last_of_those_that_share_a_tail_keeps_it():
    pool = DictPool(4, 4)
    a = session(pool, 3)
    b, c = pool.fork(a), pool.fork(a)
    assert [pool.step_required(s, 1) for s in ([a], [a, b], [a, b, c], [])] == [1, 2, 2, 0]
    pool.end_step(pool.begin_step([a, b, c], 1))
    assert (refs(pool), pool.stats.blocks_copied) == ([1, 1, 1, 0], 2)
    for n, s in enumerate((a, b, c)):
        pool.write(s, 3, [90 + n])
    assert [pool.read(s) for s in (a, b, c)] == [[0, 1, 2, 90 + n] for n in range(3)]


def test_a_tail_that_is_held_otherwise_is_copied_for_all():
    pool = DictPool(4, 4)
    a = session(pool, 4)
    pool.register_prefix(a, 1)
    pool.truncate(a, 3)
    b = pool.fork(a)
    assert pool.step_required([a, b], 1) == 2
    pool.end_step(pool.begin_step([a, b], 1))
    assert refs(pool) == [1, 1, 1, 0]


def test_sessions_in_a_step_do_not_change():
    pool = DictPool(9, 2)
    a, b = session(pool, 3), session(pool, 2)
    prefix, handle, empty = pool.register_prefix(b, 1), pool.evict_blocks(a, []).handle, pool.open()
    lease = pool.lookup([])
    step = pool.begin_step([a, empty], 1)
    for call in (
        lambda: pool.append(a, 1), lambda: pool.truncate(a, 0), lambda: pool.fork(a),
        lambda: pool.cow_break(a, 0), lambda: pool.splice(a, b, 0, 1), lambda: pool.evict(a),
        lambda: pool.splice(b, a, 0, 1), lambda: pool.splice_prefix(a, b, 0),
        lambda: pool.splice_prefix(b, empty, 0), lambda: pool.register_prefix(a, 1),
        lambda: pool.splice_prefix_from(prefix, empty), lambda: pool.evict_blocks(a, []),
        lambda: pool.alloc_shifted_prefix_slots(prefix, a), lambda: pool.evict_range(a, 0, 0),
        lambda: pool.restore(a, handle), lambda: pool.publish(a, [0, 1]),
        lambda: lease.splice_into(empty), lambda: pool.begin_step([b, a], 1),
    ):  # fmt: skip
        with refused(pool, lk.SessionBusy, "step"):
            call()
    assert pool.append_required(a, 1) == 1
    pool.end_step(step)
    pool.append(a, 1)
    pool.publish(a, [0, 1])


def test_blocks_of_a_session_that_ends_within_its_step_wait_for_it_p7():
    pool = DictPool(4, 2)
    a, b = session(pool, 2), session(pool, 2)
    step = pool.begin_step([a, b], 1)
    pool.discard(a)
    empty = pool.open()
    assert pool.free_blocks() == 0
    with refused(pool, lk.OutOfBlocks):
        pool.append(empty, 1)
    pool.end_step(step)
    assert (pool.free_blocks(), pool.filled_tokens(b)) == (2, 3)


def test_queued_steps_have_tables_of_their_own_p5():
    pool = DictPool(8, 2)
    a, b = session(pool, 2), session(pool, 2)
    first = pool.begin_step([a], 2)
    second = pool.begin_step([b], 2)
    assert [pool.session_block_table(s) for s in (a, b)] == [[0, 2], [1, 3]]
    pool.discard(a)
    pool.end_step(second)
    pool.append(b, 2)
    assert pool.session_block_table(b) == [1, 3, 4]
    pool.end_step(first)
    assert pool.append(b, 2) == [0]


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_cancelled_step_leaves_every_session_as_long_as_it_was(tokens):
    pool = DictPool(12, 2)
    a = session(pool, 3)
    b, gone = pool.fork(a), session(pool, 1)
    step = pool.begin_step([a, b, gone], tokens)
    pool.discard(gone)
    pool.cancel_step(step)
    assert ([pool.read(s) for s in (a, b)], pool.free_blocks()) == ([[0, 1, 2]] * 2, 9)
    pool.check()
    pool.feed(a, [9])
    assert (pool.read(a), pool.read(b)) == ([0, 1, 2, 9], [0, 1, 2])


def test_a_copy_that_fails_leaves_every_session_as_long_as_it_was(monkeypatch):
    pool = DictPool(12, 4)
    a = session(pool, 3)
    b, c = pool.fork(a), session(pool, 4)

    def fail(source, dest):
        raise OSError("no bus")

    monkeypatch.setattr(pool, "_copy_block", fail)
    with pytest.raises(OSError, match="no bus"):
        pool.begin_step([c, a, b], 2)
    monkeypatch.undo()
    pool.check()
    assert [pool.filled_tokens(s) for s in (a, b, c)] == [3, 3, 4]
    assert (pool.free_blocks(), pool.read(a), pool.read(b)) == (10, [0, 1, 2], [0, 1, 2])
    pool.end_step(pool.begin_step([a, b, c], 2))


def test_a_step_ends_once():
    pool, other = DictPool(6, 2), DictPool(6, 2)
    step = pool.begin_step([pool.open()], 1)
    foreign = other.begin_step([other.open()], 1)
    pool.end_step(step)
    for verb in (pool.end_step, pool.cancel_step):
        for bad in (step, foreign):
            with refused(pool, lk.PoolError, "fence"):
                verb(bad)
    other.cancel_step(foreign)


def test_a_step_is_of_different_sessions_and_some_tokens():
    pool = DictPool(6, 2)
    a = session(pool, 1)
    for sessions in ([], [a, a]):
        with refused(pool, lk.PoolError, "different ones"):
            pool.begin_step(sessions, 1)
    for n, error in ((0, lk.RangeError), (-1, lk.RangeError), (1.0, lk.DTypeError)):
        with refused(pool, error):
            pool.begin_step([a], n)
    for verb in (pool.begin_step, pool.step_required):
        with refused(pool, lk.UnknownSession, verb.__name__):
            verb([a, int(a)], 1)


# Fences


def test_blocks_wait_for_the_step_that_may_touch_them_p7():
    pool = DictPool(2, 2)
    s = session(pool, 4)
    fence = pool.open_fence()
    pool.discard(s)
    other = pool.open()
    assert (pool.free_blocks(), pool.kv_bytes_resident()) == (0, 2 * pool.geometry.block_bytes)
    with refused(pool, lk.OutOfBlocks) as caught:
        pool.append(other, 1)
    assert (caught.value.need, caught.value.have) == (1, 0)
    pool.close_fence(fence)
    assert (pool.free_blocks(), pool.append(other, 1)) == (2, [0])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_block_waits_for_every_fence_that_was_open(order):
    pool = DictPool(3, 2)
    s = session(pool, 6)
    fences = [pool.open_fence()]
    pool.truncate(s, 4)
    fences.append(pool.open_fence())
    pool.truncate(s, 2)
    late = pool.open_fence()
    free = []
    for i in order:
        pool.close_fence(fences[i])
        free.append(pool.free_blocks())
    assert free == ([1, 2] if order == (0, 1) else [0, 2])
    pool.close_fence(late)
    assert pool.free_blocks() == 2


def test_blocks_that_were_free_already_wait_for_nothing():
    pool = DictPool(3, 2)
    s = session(pool, 2)
    pool.publish(s, [0, 1])
    pool.discard(s)
    fence = pool.open_fence()
    assert len(pool.append(pool.open(), 6)) == 3
    pool.close_fence(fence)


def test_a_waiting_block_is_found_and_then_cached():
    pool = DictPool(3, 2)
    s = session(pool, 4)
    pool.publish(s, range(4))
    fence = pool.open_fence()
    pool.discard(s)
    assert (pool.free_blocks(), pool.cached_blocks()) == (1, 0)
    with pool.lookup(range(4)) as lease:
        assert (lease.tokens, refs(pool)) == (4, [1, 1, 0])
        pool.check()
    assert pool.free_blocks() == 1
    pool.close_fence(fence)
    assert (pool.free_blocks(), pool.cached_blocks()) == (3, 2)


def test_a_waiting_block_that_left_the_index_is_unused_in_the_end():
    pool = DictPool(3, 2)
    s = session(pool, 4)
    pool.publish(s, range(4))
    fence = pool.open_fence()
    pool.discard(s)
    pool.use_model(("m",))
    pool.close_fence(fence)
    assert (pool.free_blocks(), pool.cached_blocks()) == (3, 0)
    pool.check()


def test_a_fence_closes_once():
    pool, other = DictPool(3, 2), DictPool(3, 2)
    fence, open_one = pool.open_fence(), pool.open_fence()
    pool.close_fence(fence)
    for bad in (fence, other.open_fence(), FenceId(), int(open_one), None, [open_one]):
        with refused(pool, lk.PoolError, "close_fence"):
            pool.close_fence(bad)
    pool.close_fence(open_one)
