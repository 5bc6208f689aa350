"""A step over a paged pool: planned once, right for every set of sequences, whole or not at all."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from paged_state import (
    feed,
    make_pool,
    opened,
    read,
    refused,
    slots,
    tables,
)
from paged_steps import PagedStep, check, data, hold

import lazykv as lk


@pytest.fixture
def make(place) -> Callable[..., lk.DeviceKvPool]:
    return lambda *sizes, **options: make_pool(*sizes, place=place, **options)


def poison(pool: lk.DeviceKvPool) -> None:
    """NaN in all blocks that nobody holds."""
    nan = np.full(pool.pool_shape[1:], np.nan, np.float32).astype(pool.dtype.numpy)
    for block in range(pool.capacity()):
        if not pool.block_refcount(block):
            for at in slots(pool):
                pool.write_block(*at, block, nan)


# One plan


def test_one_plan_serves_every_set_of_sequences(make):
    pool = make(24, 2, dim=6)
    session = hold(pool)
    warm = opened(pool, [1, 2, 3])
    feed(pool, pool.fork(warm), [4])
    pool.restore(warm, pool.evict(warm).handle)
    rows: dict[lk.SessionHandle, list[int]] = {}

    def step(*some: lk.SessionHandle) -> None:
        new = [[n % 31] for n in range(len(rows[some[0]]), len(rows[some[0]]) + len(some))]
        out = session.step(some, data(pool, *new))
        for s, number in zip(some, new, strict=True):
            rows[s] += number
        check(pool, out, *(rows[s] for s in some))

    def opened_session() -> lk.SessionHandle:
        s = pool.open()
        rows[s] = []
        return s

    a, b = opened_session(), opened_session()
    step(a)
    known = session.plan.id, session.node_count
    before = lk.stats()
    for _ in range(9):  # into new blocks, together and alone
        step(a, b)
    step(b)
    c = pool.fork(a)
    rows[c] = list(rows[a])
    step(a, c, b)
    handle = pool.evict(c).handle
    step(b, a)
    pool.restore(c, handle)
    step(c, a)
    pool.truncate(a, 3)
    del rows[a][3:]
    step(a, b, c)
    d = opened_session()
    pool.splice(b, d, 1, 3)
    rows[d] = rows[b][2:6]
    step(d, a)
    e = opened_session()
    prefix = pool.register_prefix(b, 2)
    pool.splice_prefix_from(prefix, e)
    rows[e] = rows[b][:4]
    for s in (a, b, c):
        pool.discard(s)
    step(e, d)
    fresh = [opened_session() for _ in range(4)]
    step(*fresh)
    step(fresh[3])
    after = lk.stats()
    assert (session.plan.id, session.node_count) == known
    assert (after.plans_built, session.realize_count) == (before.plans_built, 19)
    pool.check()


def test_steps_allocate_nothing(make):
    pool = make(24, 2)
    session = hold(pool)
    a, b = pool.open(), pool.open()
    for _ in range(2):  # the second makes a recording, where the device can
        session.step([a, b], data(pool, [1], [2]))
    before = lk.stats().allocations
    for n in range(12):
        session.step([a, b] if n % 2 else [b], data(pool, *[[n]] * (1 + n % 2)))
    assert lk.stats().allocations == before


@pytest.mark.parametrize("seq", [1, 3])
@pytest.mark.parametrize(("size", "dtype"), [(1, "f32"), (4, "f32"), (4, "bf16"), (16, "f16")])
def test_ragged_batches_of_any_length(make, size, dtype, seq):
    pool = make(80, size, dtype=dtype)
    session = hold(pool, seq=seq, max_blocks=32)
    rows = [list(range(n)) for n in (0, 3, 4, 5)]
    sessions = [opened(pool, r) for r in rows]
    poison(pool)
    for n in range(5):
        new = [[(5 * n + 7 * i + t) % 31 for t in range(seq)] for i in range(4)]
        out = session.step(sessions, data(pool, *new))
        for r, more in zip(rows, new, strict=True):
            r += more
        check(pool, out, *rows)
    assert [read(pool, s) for s in sessions] == rows


def test_queries_weigh_the_rows_of_their_own_sequence():
    """Random queries and rows, against attention over the rows gathered one by one."""
    pool = make_pool(24, 4)
    session = hold(pool)
    rng = np.random.default_rng(0)
    sessions = [pool.open() for _ in range(3)]
    for s, n in zip(sessions, (5, 8, 1), strict=True):
        pool.append(s, n)
    for at in slots(pool):
        for block in range(24):
            pool.write_block(*at, block, rng.standard_normal((4, 2, 4)).astype(np.float32))
    feed_ = data(pool, [1], [2], [3], seed=1)
    out = session.step(sessions, feed_)
    for i, s in enumerate(sessions):
        table, filled = pool.session_block_table(s), pool.filled_tokens(s)
        want = np.zeros((2, 4))
        for layer in range(2):
            k, v = (
                np.concatenate([pool.read_block(layer, slot, b) for b in table])[:filled]
                for slot in lk.KvSlot
            )
            for h in range(2):
                scores = k[:, h].astype(np.float64) @ feed_["q"][i, h, 0] / 2.0
                share = np.exp(scores - scores.max())
                want[h] += share / share.sum() @ v[:, h]
        np.testing.assert_allclose(out[i, :, 0], want, rtol=1e-4, atol=1e-4)


def test_merged_sequences_keep_their_own_rows_j3(make):
    pool = make(8, 4)
    session = hold(pool, batch=2)
    a, b = opened(pool, [0, 1]), opened(pool, [10, 11, 12, 13, 14])
    out = session.step([a, b], data(pool, [20], [21]))
    rows = [0, 1, 20], [10, 11, 12, 13, 14, 21]
    check(pool, out, *rows)
    assert (read(pool, a), read(pool, b)) == rows
    assert [pool.filled_tokens(s) for s in (a, b)] == [3, 6]


@pytest.mark.parametrize("lengths", [(2, 5), (30, 25), (0, 7)])
def test_every_sequence_has_positions_of_its_own_j4_j5(make, lengths):
    pool = make(24, 4)
    session = hold(pool, max_blocks=10)
    sessions = [opened(pool, [1] * n) for n in lengths]
    seen = []

    def inputs(starts: np.ndarray) -> dict[str, Any]:
        assert starts.dtype == np.int64
        seen.append(starts.tolist())
        starts[:] = -9  # a copy: nothing of the step
        return data(pool, [1], [1])

    for _ in range(2):
        session.step(sessions, inputs)
    assert seen == [list(lengths), [n + 1 for n in lengths]]
    session.step(sessions[:1], lambda starts: seen.append(starts.tolist()) or data(pool, [1]))
    assert seen[-1] == [lengths[0] + 2]


def test_a_table_that_was_longer_writes_nothing_into_its_old_blocks_l9(make):
    pool = make(8, 2)
    session = hold(pool)
    a = opened(pool, range(6))
    session.step([a], data(pool, [6]))
    pool.truncate(a, 2)
    b = opened(pool, [20, 21, 22, 23, 24, 25])
    others = [opened(pool, [9]) for _ in range(1)]
    kept = read(pool, b)
    out = session.step([a, *others], data(pool, [7], [8]))
    check(pool, out, [0, 1, 7], [9, 8])
    assert read(pool, b) == kept == [20, 21, 22, 23, 24, 25]


def test_tables_made_before_a_queue_is_run_are_its_own_p5(make):
    pool = make(8, 2)
    step = PagedStep(pool, batch=1, max_blocks=4)
    nodes = {
        t: pool.slot_storage(layer, slot)
        for layer, pair in enumerate(step.kv_nodes) for slot, t in enumerate(pair)
    }  # fmt: skip
    plan = lk.plan(step.target, nodes, pool.device_location())
    a, gap, b = opened(pool, [1, 2, 3]), opened(pool, range(6)), opened(pool, [10, 20, 30])
    pool.discard(gap)
    queue = []
    for s, row in ((a, 3), (b, 15)):
        page = pool.materialize_block_table([s], 4)
        feeds = data(pool, [pool.filled_tokens(s) * 10])
        feeds |= {"block_table": page.block_table, "context_lens": page.context_lens}
        feeds |= {"rows": np.array([row]), "count": np.array(0)}
        queue.append({step.bound[name]: array for name, array in feeds.items()})
    check(pool, plan.run(queue[0]), [1, 2, 3])
    check(pool, plan.run(queue[1]), [10, 20, 30])
    assert pool.session_block_table(b) != pool.session_block_table(a)


def test_several_plans_share_a_pool(make):
    pool = make(16, 2)
    one, four, many = hold(pool, batch=1), hold(pool), hold(pool, batch=2, seq=3)
    a, b = pool.open(), pool.open()
    check(pool, many.step([a, b], data(pool, [1, 2, 3], [4, 5, 6])), [1, 2, 3], [4, 5, 6])
    check(pool, one.step([b], data(pool, [7])), [4, 5, 6, 7])
    check(pool, four.step([b, a], data(pool, [8], [9])), [4, 5, 6, 7, 8], [1, 2, 3, 9])


def test_results_are_fresh_memory_e6(make):
    pool = make(8, 4)
    session = hold(pool, batch=2)
    a = pool.open()
    first = session.step([a], data(pool, [2]))
    kept = first.copy()
    second = session.step([a], data(pool, [30]))
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept)
    first[...] = np.nan
    check(pool, session.step([a], data(pool, [1])), [2, 30, 1])


def test_data_is_not_kept_and_not_changed(make):
    pool = make(8, 4)
    session = hold(pool, batch=2)
    a = pool.open()
    given = data(pool, [5])
    copies = {name: array.copy() for name, array in given.items()}
    session.step([a], given)
    for name, array in given.items():
        np.testing.assert_array_equal(array, copies[name])
        array[...] = 0
    check(pool, session.step([a], data(pool, [7])), [5, 7])


def test_what_nobody_holds_never_matters(make):
    """NaN in every free block, again and again as blocks come and go."""
    pool = make(10, 2)
    session = hold(pool, seq=2)
    rows: dict[lk.SessionHandle, list[int]] = {}
    for n in range(12):
        poison(pool)
        if len(rows) == 3:
            s = next(iter(rows))
            pool.discard(s)
            del rows[s]
            poison(pool)
        rows[pool.open()] = []
        some = list(rows)
        out = session.step(some, data(pool, *[[n, n + 1]] * len(some)))
        for s in some:
            rows[s] += [n, n + 1]
        check(pool, out, *rows.values())
    assert np.isfinite(out).all()


# Sharing


@pytest.mark.parametrize("siblings", [2, 3, 4])
@pytest.mark.parametrize("parent_too", [True, False])
def test_siblings_that_step_together_take_exactly_the_blocks_they_need(make, siblings, parent_too):
    pool = make(5, 4)
    session = hold(pool)
    parent = opened(pool, [1, 2])
    children = [pool.fork(parent) for _ in range(siblings - 1)]
    some = [parent, *children]
    if not parent_too:
        outsider = pool.fork(parent)
    need = siblings - 1 if parent_too else siblings
    assert pool.step_required(some, 1) == need
    free = pool.free_blocks()
    out = session.step(some, data(pool, *[[10 + n] for n in range(siblings)]))
    assert free - pool.free_blocks() == need == pool.stats.blocks_copied
    check(pool, out, *([1, 2, 10 + n] for n in range(siblings)))
    assert [read(pool, s) for s in some] == [[1, 2, 10 + n] for n in range(siblings)]
    if not parent_too:
        assert read(pool, outsider) == [1, 2]
    assert pool.step_required(some, 1) == 0
    pool.check()


def test_a_step_without_room_changes_nothing(make):
    pool = make(4, 2)
    session = hold(pool)
    a = opened(pool, [1, 2, 3])
    b = pool.fork(a)
    c = opened(pool, [5, 6])
    assert pool.step_required([a, b, c], 1) == 2
    with refused(pool, lk.OutOfBlocks, "begin_step: got 1 free blocks, need 2") as caught:
        session.step([a, b, c], data(pool, [7], [8], [9]))
    assert (caught.value.need, caught.value.have) == (2, 1)
    check(pool, session.step([a, b], data(pool, [7], [8])), [1, 2, 3, 7], [1, 2, 3, 8])


def test_finished_blocks_are_found_and_shared(make):
    pool = make(12, 2)
    session = hold(pool)
    a = pool.open()
    for n in range(5):
        session.step([a], data(pool, [n]))
    assert pool.publish(a, range(5)) == 2
    b = pool.open()
    with pool.lookup([0, 1, 2, 3, 9]) as lease:
        assert lease.splice_into(b) == 4
    check(pool, session.step([b, a], data(pool, [9], [5])), [0, 1, 2, 3, 9], [0, 1, 2, 3, 4, 5])
    assert pool.publish(a, range(6)) == 3


# Refusals


def bad_sessions(pool: lk.DeviceKvPool, a: Any, b: Any) -> list[tuple[Any, Any, Any]]:
    gone = pool.open()
    pool.discard(gone)
    evicted = opened(pool, [1, 2, 3])
    pool.evict_blocks(evicted, [0])
    long = pool.open()
    pool.append(long, 16)
    return [
        ([], lk.ShapeError, "got 0 sessions, need 1..4"),
        ([a, b, a, b, a], lk.ShapeError, "got 5 sessions, need 1..4"),
        ([a, a], lk.PoolError, "need different ones"),
        ([a, b, a], lk.PoolError, "need different ones"),
        ([a, gone], lk.UnknownSession, "need an open session of this pool"),
        ([a, make_pool().open()], lk.UnknownSession, "need an open session of this pool"),
        ([a, None], lk.UnknownSession, "got None"),
        ([b, evicted], lk.SessionNotResident, "got block index 0 evicted"),
        ([b, long], lk.RangeError, "got 17 tokens of"),
    ]


@pytest.mark.parametrize("case", range(9))
def test_sessions_that_cannot_step_are_refused_and_nothing_changes(make, case):
    pool = make(24, 2)
    session = hold(pool)
    a = opened(pool, [1, 2, 3])
    b = pool.fork(a)
    some, error, words = bad_sessions(pool, a, b)[case]
    called = []
    with refused(pool, error, words):
        session.step(some, data(pool, *[[7]] * max(1, len(some))))
    with refused(pool, error, words):
        session.step(some, called.append)
    assert (called, session.realize_count) == ([], 0)
    check(pool, session.step([b, a], data(pool, [8], [9])), [1, 2, 3, 8], [1, 2, 3, 9])


def bad_data(good: dict[str, Any]) -> list[tuple[Any, Any, str]]:
    return [
        ({}, lk.BindingError, "bound 'numbers': got nothing"),
        ({"q": good["q"]}, lk.BindingError, "bound 'numbers': got nothing"),
        ({"numbers": good["numbers"]}, lk.BindingError, "bound 'q': got nothing"),
        ({**good, "q": good["q"][:1]}, lk.ShapeError, "bound 'q': got shape [1, 2, 1, 4], need 2"),
        ({**good, "q": np.zeros((4, 2, 1, 4), np.float32)}, lk.ShapeError, "need 2 on the first"),
        ({**good, "numbers": np.float32(1)}, lk.ShapeError, "bound 'numbers': got shape []"),
        (
            {**good, "q": good["q"][:, :1]},
            lk.BindingError,
            "q: got f32[2,1,1,4], need f32[2,2,1,4]",
        ),
        ({**good, "q": good["q"].astype("f8")}, lk.BindingError, "never cast"),
        ({**good, "numbers": np.array([1, 2])}, lk.BindingError, "got i64[2], need f32[2]"),
        ({**good, "q": None}, lk.LazyKvError, ""),
        (None, lk.BindingError, "got data NoneType, need a mapping"),
        ([1, 2], lk.BindingError, "got data list, need a mapping"),
    ]


@pytest.mark.parametrize("case", range(12))
def test_bad_data_is_refused_and_nothing_changes(make, case):
    """Also what a function gives: then the pool has made room already, and rewinds."""
    pool = make(24, 2)
    session = hold(pool)
    a, b = opened(pool, [1, 2]), opened(pool, [5, 6, 7])
    given, error, words = bad_data(data(pool, [3], [8]))[case]
    with refused(pool, error, words):
        session.step([a, b], given)
    before = tables(pool)
    with pytest.raises(error) as caught:
        session.step([a, b], lambda starts: given)
    assert words in str(caught.value)
    assert tables(pool) == before
    assert (read(pool, a), read(pool, b), session.realize_count) == ([1, 2], [5, 6, 7], 0)
    check(pool, session.step([a, b], data(pool, [3], [8])), [1, 2, 3], [5, 6, 7, 8])


@pytest.mark.parametrize(
    "sessions", [None, "ab", b"ab", 3, {}, {1}, lk.SessionHandle(), np.ones(2)]
)
def test_sessions_are_a_list_of_handles(make, sessions):
    pool = make(24, 2)
    session = hold(pool)
    a, called = opened(pool, [1, 2]), []
    with refused(pool, lk.PoolError, "step: got sessions", "need a list of handles"):
        session.step(sessions, data(pool, [3]))
    with refused(pool, lk.PoolError, "step: got sessions SessionHandle"):
        session.step(a, called.append)
    assert (called, session.realize_count) == ([], 0)
    check(pool, session.step((a,), data(pool, [3])), [1, 2, 3])


def test_what_was_given_is_named_and_not_what_fills_up_the_batch(make):
    """A batch of 4, of which one sequence is stepped."""
    pool = make(24, 2)
    session, good = hold(pool), data(pool, [3])
    a = opened(pool, [1, 2])
    for q, error, words in (
        (good["q"].astype("f8"), lk.BindingError, "q: got f64[1,2,1,4], need f32[1,2,1,4]"),
        (good["q"][:, :1], lk.BindingError, "q: got f32[1,1,1,4], need f32[1,2,1,4]"),
        (good["q"][0], lk.ShapeError, "got shape [2, 1, 4], need 1 on the first axis"),
    ):
        with refused(pool, error, words):
            session.step([a], {**good, "q": q})
    check(pool, session.step([a], good), [1, 2, 3])


@pytest.mark.parametrize("other", [None, "x", 3])
def test_validity_needs_a_pool(make, other):
    pool = make(8, 2)
    session = hold(pool)
    for verb in (session.validity_for, session.is_valid_for, session.differences):
        with pytest.raises(lk.BindingError, match="need a cache"):
            verb(other, model_key=("m",))
        with pytest.raises(lk.GraphError, match="model_key"):
            verb(pool, model_key=["m"])
        with pytest.raises(lk.RangeError, match="got seq 0"):
            verb(pool, seq=0, model_key=("m",))


def test_names_that_the_step_does_not_take_are_ignored(make):
    pool = make(8, 2)
    session = hold(pool)
    a = opened(pool, [1, 2])
    extra = {name: np.zeros(3) for name in ("rows", "count", "block_table", "context_lens", "x")}
    check(pool, session.step([a], {**data(pool, [3]), **extra}), [1, 2, 3])
    assert read(pool, a) == [1, 2, 3]
