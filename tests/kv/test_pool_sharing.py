"""What sequences of a pool with bytes share: tables, moved prefixes, blocks found by tokens."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from paged_state import (
    failures,
    feed,
    make_pool,
    opened,
    put,
    random_bytes,
    read,
    refused,
    slots,
    storages,
    tables,
)

import lazykv as lk


@pytest.fixture
def make(place) -> Callable[..., lk.DeviceKvPool]:
    return lambda *sizes, **options: make_pool(*sizes, place=place, **options)


# Block tables


def test_a_table_is_fresh_every_time_and_marks_what_no_block_is_l9(make):
    pool = make(8, 2)
    a, b = opened(pool, range(5)), opened(pool, [9])
    page = pool.materialize_block_table([a, b], 4)
    assert (page.block_table.dtype, page.context_lens.dtype) == (np.uint32, np.uint32)
    x = lk.NO_BLOCK
    assert x == 2**32 - 1
    assert page.block_table.tolist() == [[0, 1, 2, x], [3, x, x, x]]
    assert page.context_lens.tolist() == [5, 1]
    page.block_table[:], page.context_lens[:] = 7, 7
    pool.truncate(a, 2)
    again = pool.materialize_block_table([b, a, b])
    assert again.block_table.tolist() == [[3], [0], [3]]
    assert again.context_lens.tolist() == [1, 2, 1]
    assert pool.materialize_block_table([], 3).block_table.shape == (0, 3)
    assert pool.materialize_block_table([]).block_table.shape == (0, 0)
    assert pool.materialize_block_table([pool.open()]).block_table.shape == (1, 0)


def test_a_table_that_is_too_narrow_or_has_holes_is_refused(make):
    pool = make(8, 2)
    a, b = opened(pool, range(5)), opened(pool, [9])
    with refused(pool, lk.RangeError, "got a table of 3 blocks, need at most 2"):
        pool.materialize_block_table([b, a], 2)
    with refused(pool, lk.RangeError, "got max_blocks -1"):
        pool.materialize_block_table([b], -1)
    with refused(pool, lk.UnknownSession, "materialize_block_table: got SessionHandle"):
        pool.materialize_block_table([a, make(1, 1).open()])
    pool.evict_blocks(a, [1])
    with refused(pool, lk.SessionNotResident, "got block index 1 evicted, need it restored"):
        pool.materialize_block_table([b, a])


# Moved prefixes


def turned(keys: np.ndarray, positions: Any, freq: Any, interleaved: bool) -> np.ndarray:
    """Keys ``[n, heads, D]`` turned by their positions, in f64, pair by pair."""
    out, half = keys.astype(np.float64).copy(), keys.shape[-1] // 2
    for n, p in enumerate(positions):
        for pair, f in enumerate(freq):
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            cos, sin = math.cos(p * f), math.sin(p * f)
            a, b = keys[n, :, i].astype(np.float64), keys[n, :, j].astype(np.float64)
            out[n, :, i], out[n, :, j] = a * cos - b * sin, b * cos + a * sin
    return out


FREQ = [1.0, 0.31, 0.01]


@pytest.mark.parametrize("behind", [0, 4, 20, 400])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("dtype", "near"), [("f64", 1e-13), ("f32", 1e-6), ("f16", 2e-3), ("bf16", 2e-2)]
)
def test_a_moved_prefix_has_the_keys_of_its_new_positions(make, dtype, near, interleaved, behind):
    pool = make(106, 4, dim=6, dtype=dtype)
    first, second = pool.open(), pool.open()
    pool.append(first, 9)
    pool.append(second, behind)
    rng = np.random.default_rng(behind)
    raw = {at: rng.uniform(-1, 1, (8, 2, 6)) for at in slots(pool)}
    for (layer, slot), rows in raw.items():
        if slot == lk.KvSlot.K:
            rows = turned(rows, range(8), FREQ, interleaved)
        for i in range(2):
            part = rows[4 * i : 4 * i + 4].astype(pool.dtype.numpy)
            pool.write_block(layer, slot, pool.resident_block(first, i), part)
    prefix = pool.register_prefix(first, 2)
    before = [store.to_numpy() for store in storages(pool)]
    assert pool.splice_prefix_shifted(prefix, second, FREQ, interleaved) == 8
    assert pool.filled_tokens(second) == behind + 8
    source, table = pool.session_block_table(first), pool.session_block_table(second)
    fresh = table[behind // 4 :]
    assert [pool.block_refcount(b) for b in fresh] == [1, 1]
    for (layer, slot), rows in raw.items():
        for i in range(2):
            got = pool.read_block(layer, slot, fresh[i])
            if slot == lk.KvSlot.V or not behind:
                was = pool.read_block_bytes(layer, slot, source[i])
                assert got.tobytes() == was
                continue
            at = range(behind + 4 * i, behind + 4 * i + 4)
            want = turned(rows[4 * i : 4 * i + 4], at, FREQ, interleaved)
            np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=near)
    others = [b for b in range(106) if b not in fresh]
    for was, store in zip(before, storages(pool), strict=True):
        np.testing.assert_array_equal(store.to_numpy()[others], was[others])
    pool.check()


def test_the_pairings_differ(make):
    pool = make(8, 2, dim=6)
    first = pool.open()
    pool.append(first, 2)
    rows = np.random.default_rng(0).standard_normal((2, 2, 6)).astype(np.float32)
    pool.write_block(0, 0, 0, rows)
    prefix, keys = pool.register_prefix(first, 1), []
    for interleaved in (True, False):
        target = opened(pool, [1, 2])
        pool.splice_prefix_shifted(prefix, target, np.array(FREQ, np.float32), interleaved)
        keys.append(pool.read_block(0, 0, pool.resident_block(target, 1)))
    assert np.abs(keys[0] - keys[1]).max() > 0.1


def test_a_prefix_goes_behind_its_own_session(make):
    pool = make(8, 2, dim=6)
    session = opened(pool, range(4))
    prefix = pool.register_prefix(session, 2)
    assert pool.splice_prefix_shifted(prefix, session, [0.0] * 3) == 4
    assert read(pool, session) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_moved_blocks_are_not_found_by_their_tokens(make):
    """They have not seen what stands before them, so another sequence must not get them for it."""
    pool = make(8, 2, dim=6)
    first, target = opened(pool, range(4)), opened(pool, [20, 21])
    prefix = pool.register_prefix(first, 2)
    pool.splice_prefix_shifted(prefix, target, FREQ)
    feed(pool, target, [22, 23])
    assert pool.publish(target, [20, 21, 0, 1, 2, 3, 22, 23]) == 1
    same = pool.open()
    pool.splice_prefix_shifted(prefix, same, FREQ)  # moved by nothing
    pool.discard(target)
    assert pool.publish(same, range(4)) == 2


def test_moves_that_cannot_be_are_refused(make):
    pool = make(8, 2, dim=6)
    first, target = opened(pool, range(5)), opened(pool, [1, 2])
    prefix = pool.register_prefix(first, 2)

    def move(prefix=prefix, dst=target, freq=FREQ):
        return lambda: pool.splice_prefix_shifted(prefix, dst, freq)

    numbers = "need 3 finite numbers"
    for act, error, words in (
        (move(freq=[1.0, 2.0]), lk.ShapeError, f"got inv_freq of shape (2,), {numbers}"),
        (move(freq=[[1.0, 2.0, 3.0]]), lk.ShapeError, numbers),
        (move(freq=2.0), lk.ShapeError, numbers),
        (move(freq=[1.0, 2.0, np.nan]), lk.ShapeError, numbers),
        (move(freq=[1.0, 2.0, np.inf]), lk.ShapeError, numbers),
        (move(freq="abc"), lk.DTypeError, "got inv_freq of <U3, need real numbers"),
        (move(freq=[1.0, 2.0, 3j]), lk.DTypeError, "complex128"),
        (move(freq=[1.0, [2.0], 3.0]), lk.DTypeError, "need numbers"),
        (move(freq=None), lk.DTypeError, "object"),
        (move(dst=first), lk.OffsetNotBlockAligned, "got a session of 5 tokens"),
        (move(prefix=None), lk.UnknownPrefix, "got None"),
        (move(dst=None), lk.UnknownSession, "got None"),
    ):
        with refused(pool, error, words):
            act()
    room = opened(pool, range(5))
    with refused(pool, lk.OutOfBlocks, "got 1 free blocks, need 2"):
        move()()
    pool.discard(room)
    pool.use_model(("other",))
    with refused(pool, lk.StaleHandle, "another model"):
        move()()
    for options in ({"dtype": "i8"}, {"dim": 5}):
        pool = make(8, 2, **options)
        prefix, target = pool.register_prefix(opened(pool, range(2)), 1), pool.open()
        with refused(pool, lk.DTypeError, "need an even number of floats to rotate"):
            pool.splice_prefix_shifted(prefix, target, [1.0, 1.0])


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_move_that_fails_midway_leaves_the_pool_as_it_was(make, interleaved):
    pool = make(8, 2, dim=6)
    first, target = opened(pool, range(4)), opened(pool, [20, 21])
    prefix = pool.register_prefix(first, 2)
    pool.splice_prefix_shifted(prefix, pool.fork(target), [0.0] * 3, interleaved)
    moves = pool._moves
    plan, _ = moves._shift_interleaved if interleaved else moves._shift_halves
    before = tables(pool)
    ways = list(failures(pool, plan))
    assert len(ways) >= 8
    for failure, seen in ways:
        with failure, pytest.raises(seen):
            pool.splice_prefix_shifted(prefix, target, FREQ, interleaved)
        assert tables(pool) == before
        assert not any(s.torn for s in storages(pool))
        assert (read(pool, first), read(pool, target)) == ([0, 1, 2, 3], [20, 21])
        pool.check()
    pool.splice_prefix_shifted(prefix, target, [0.0] * 3, interleaved)
    assert read(pool, target) == [20, 21, 0, 1, 2, 3]


# Blocks found by their tokens: only those whose bytes are there


def found(pool: lk.DeviceKvPool, ids: Any) -> int:
    with pool.lookup(ids) as lease:
        return lease.tokens


def test_nothing_is_found_before_its_bytes_are_there(make):
    pool = make(8, 4)
    session = pool.open()
    pool.append(session, 9)
    assert (pool.publish(session, range(9)), found(pool, range(9))) == (0, 0)
    pool.mark_written(session)
    assert (pool.publish(session, range(9)), found(pool, range(9))) == (2, 8)
    pool.append(session, 3)
    assert pool.publish(session, range(12)) == 2
    pool.mark_written(session)
    assert (pool.publish(session, range(12)), found(pool, range(12))) == (3, 12)


def test_a_block_written_whole_in_every_slot_is_there(make):
    pool = make(8, 4)
    session = pool.open()
    pool.append(session, 8)
    for at in slots(pool)[:-1]:
        for block in (0, 1):
            pool.write_block_bytes(*at, block, random_bytes(block, 128))
    assert pool.publish(session, range(8)) == 0
    pool.write_block_bytes(*slots(pool)[-1], 1, bytes(128))
    assert pool.publish(session, range(8)) == 0  # a chain begins with its first block
    pool.write_block_bytes(*slots(pool)[-1], 0, bytes(128))
    assert pool.publish(session, range(8)) == 2


@pytest.mark.parametrize("whole", [True, False])
def test_rows_that_are_to_be_written_again_are_not_there(make, whole):
    pool = make(8, 4)
    session = pool.open()
    pool.append(session, 8)
    if whole:
        put(pool, session, 0, range(8))
    else:
        pool.mark_written(session)
    pool.truncate(session, 6)
    pool.append(session, 2)
    assert pool.publish(session, range(8)) == 1
    if whole:
        put(pool, session, 6, [6, 7])
    else:
        pool.mark_written(session)
    assert pool.publish(session, range(8)) == 2


def test_truncation_alone_unwrites_nothing(make):
    """Another holder still counts the rows."""
    pool = make(8, 4)
    a = pool.open()
    pool.append(a, 8)
    pool.mark_written(a)
    b = pool.fork(a)
    pool.truncate(b, 5)
    pool.mark_written(b)
    assert pool.publish(a, range(8)) == 2


def test_a_block_taken_anew_forgets_what_was_written(make):
    pool = make(2, 4)
    a = opened(pool, range(8))
    pool.discard(a)
    b = pool.open()
    pool.append(b, 8)
    assert pool.publish(b, range(8)) == 0


def test_copies_and_restored_blocks_are_as_finished_as_they_were(make):
    pool = make(9, 4)
    a = pool.open()
    pool.append(a, 11)
    pool.mark_written(a)
    b = pool.fork(a)
    pool.ensure_writable_block(b, 0)
    pool.append(b, 1)  # copies the tail, and leaves its last row unwritten
    assert pool.publish(b, range(12)) == 2
    pool.restore(b, pool.evict(b).handle)
    assert pool.publish(b, range(12)) == 2
    pool.mark_written(b)
    assert pool.publish(b, range(12)) == 3
    c = pool.open()
    pool.append(c, 4)
    pool.restore(c, pool.evict(c).handle)
    assert pool.publish(c, [9] * 4) == 0


def test_evicted_blocks_end_what_is_published(make):
    pool = make(8, 2)
    session = opened(pool, range(6))
    handle = pool.evict_blocks(session, [1]).handle
    assert pool.publish(session, range(6)) == 1
    pool.restore(session, handle)
    assert (pool.publish(session, range(6)), found(pool, range(6))) == (3, 6)


def test_found_blocks_have_the_bytes_of_their_tokens(make):
    pool = make(8, 2)
    session = opened(pool, range(6))
    pool.publish(session, range(6))
    pool.discard(session)
    assert (pool.free_blocks(), pool.cached_blocks()) == (8, 3)
    with pool.lookup([0, 1, 2, 3, 9, 9]) as lease:
        other = pool.open()
        assert lease.splice_into(other) == 4
    feed(pool, other, [20, 21])
    third = pool.open()
    with pool.lookup(range(6)) as lease:
        lease.splice_into(third)
    assert (read(pool, other), read(pool, third)) == ([0, 1, 2, 3, 20, 21], list(range(6)))


def test_the_last_token_of_a_prompt_found_whole_is_computed_into_a_copy(make):
    pool = make(8, 2)
    first = opened(pool, range(4))
    pool.publish(first, range(4))
    second = pool.open()
    with pool.lookup(range(4)) as lease:
        lease.splice_into(second)
        pool.truncate(second, 3)
        feed(pool, second, [30])
    assert (read(pool, second), read(pool, first)) == ([0, 1, 2, 30], [0, 1, 2, 3])
    assert found(pool, range(4)) == 4


@pytest.mark.parametrize("form", ["write_block", "write_block_bytes"])
def test_a_block_that_is_written_is_found_no_more(make, form):
    pool = make(8, 2)
    session = opened(pool, range(6))
    pool.publish(session, range(6))
    last = pool.events()[-1].number
    data = np.zeros((2, 2, 4), np.float32)
    getattr(pool, form)(1, 1, 1, data if form == "write_block" else data.tobytes())
    assert (found(pool, range(6)), pool.free_blocks()) == (2, 5)
    assert [(e.kind, e.block) for e in pool.events(last)] == [("removed", 2), ("removed", 1)]
    pool.check()


def test_a_cached_block_that_is_written_is_unused(make):
    pool = make(4, 2)
    session = opened(pool, range(6))
    pool.publish(session, range(6))
    pool.discard(session)
    pool.write_block(0, 0, 0, np.zeros((2, 2, 4), np.float32))
    assert (pool.cached_blocks(), pool.free_blocks(), found(pool, range(6))) == (0, 4, 0)
    pool.check()


def test_another_model_finds_nothing_of_the_old(make):
    pool = make(8, 2)
    pool.use_model(("m", 0))
    session = opened(pool, range(4))
    pool.publish(session, range(4))
    pool.use_model(("m", 0))
    assert found(pool, range(4)) == 4
    prefix = pool.register_prefix(session, 1)
    pool.use_model(("m", 1))
    assert (found(pool, range(4)), pool.publish(session, range(4))) == (0, 0)
    assert pool.events()[-1].kind == "cleared"
    assert read(pool, session) == [0, 1, 2, 3]
    empty = pool.open()
    with refused(pool, lk.StaleHandle, "another model"):
        pool.splice_prefix_from(prefix, empty)
    feed(pool, session, [4, 5])
    assert pool.publish(session, range(6)) == 0  # the chain begins with old blocks
    new = opened(pool, range(4))
    assert (pool.publish(new, range(4)), found(pool, range(4))) == (2, 4)
    # Bytes of the old weights stay the old's when they are copied or come back.
    pool.restore(session, pool.evict(session).handle)
    copied = pool.fork(session)
    pool.ensure_writable_block(copied, 0)
    assert [pool.publish(s, range(10, 16)) for s in (session, copied)] == [0, 0]


def test_keys_cover_the_dtype(make):
    """f16 and bf16 have elements of one size, and other bytes for the same numbers."""
    keys = {}
    for n, dtype in enumerate(["f16", "bf16", "f16"]):
        pool = make(4, 2, dtype=dtype)
        pool.publish(opened(pool, range(2)), range(2))
        keys[n] = pool.events()[0].key
    assert keys[0] == keys[2] != keys[1]


def test_writing_marks_need_an_idle_session_of_the_pool(make):
    pool = make(4, 2)
    session = opened(pool, range(2))
    step = pool.begin_step([session], 1)
    with refused(pool, lk.SessionBusy, "mark_written: got"):
        pool.mark_written(session)
    with refused(pool, lk.UnknownSession, "mark_written"):
        pool.mark_written(None)
    pool.end_step(step)
    pool.append(session, 1)
    assert pool.publish(session, range(4)) == 1
    pool.mark_written(session)
    assert pool.publish(session, range(4)) == 2


# Steps, as far as bytes go


def test_a_step_finishes_its_rows_and_a_cancelled_one_does_not(make):
    pool = make(8, 2)
    session = opened(pool, range(3))
    step = pool.begin_step([session], 1)
    put(pool, session, 3, [31])
    pool.cancel_step(step)
    assert (read(pool, session), pool.publish(session, range(4))) == ([0, 1, 2], 1)
    for ids in ([3], [4, 5]):
        step = pool.begin_step([session], len(ids))
        pool.end_step(step)
    assert pool.publish(session, range(6)) == 3


def test_a_step_needs_every_block(make):
    pool = make(8, 2)
    a, b = opened(pool, range(5)), opened(pool, [9])
    handle = pool.evict_blocks(a, [0]).handle
    with refused(pool, lk.SessionNotResident, "begin_step: got block index 0 evicted"):
        pool.begin_step([b, a], 1)
    pool.restore(a, handle)
    pool.end_step(pool.begin_step([b, a], 1))
    assert [pool.filled_tokens(s) for s in (a, b)] == [6, 2]
