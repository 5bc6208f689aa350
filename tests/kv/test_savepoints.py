"""Savepoints: a length to come back to, over all layers, without moving a byte."""

import pytest
from kv_state import append_rows, line, refused, rows, state

import lazykv as lk


def live(cache: lk.KvCache) -> list[float]:
    """The rows of every layer and slot, which hold the same numbers."""
    found = [[line(k), [x - 1000 for x in line(v)]] for k, v in map(cache.live, range(2))]
    assert all(pair == [found[0][0]] * 2 for pair in found)
    return found[0][0]


def test_rollback_returns_to_the_length_and_moves_no_byte(make):
    cache = make()
    append_rows(cache, [1, 2])
    sp = cache.savepoint()
    append_rows(cache, [3, 4, 5])
    before = state(cache)
    kernels = lk.stats().kernels_run
    sp.rollback()
    after = state(cache)
    assert lk.stats().kernels_run == kernels
    assert (after["alloc_id"], after["slots"]) == (before["alloc_id"], before["slots"])
    assert (live(cache), sp.is_open) == ([1, 2], False)
    append_rows(cache, [9])
    assert live(cache) == [1, 2, 9]


def test_commit_keeps_what_came_since(make):
    cache = make()
    sp = cache.savepoint()
    append_rows(cache, [1, 2])
    before = state(cache)
    sp.commit()
    assert state(cache) == before
    assert not sp.is_open


def test_savepoints_nest(make):
    cache = make()
    points = []
    for value in (1, 2, 3):
        points.append(cache.savepoint())
        append_rows(cache, [value])
    points[2].rollback()
    assert [sp.is_open for sp in points] == [True, True, False]
    append_rows(cache, [30])
    inner = cache.savepoint()
    points[1].commit()
    assert [sp.is_open for sp in (*points, inner)] == [True, False, False, False]
    assert live(cache) == [1, 2, 30]
    points[0].rollback()
    assert live(cache) == []


def test_two_savepoints_of_one_length_are_two(make):
    cache = make()
    append_rows(cache, [1])
    outer, inner = cache.savepoint(), cache.savepoint()
    append_rows(cache, [2])
    inner.rollback()
    assert (outer.is_open, inner.is_open, live(cache)) == (True, False, [1])
    append_rows(cache, [3])
    outer.rollback()
    assert live(cache) == [1]


def test_as_a_context_it_commits_or_rolls_back(make):
    cache = make()
    with cache.savepoint() as sp:
        append_rows(cache, [1])
    assert (live(cache), sp.is_open) == ([1], False)

    def overfill():
        with cache.savepoint():
            append_rows(cache, [2])
            append_rows(cache, [3] * 9)

    with pytest.raises(lk.RangeError):
        overfill()
    assert live(cache) == [1]
    with cache.savepoint() as sp:
        append_rows(cache, [3])
        sp.rollback()
        append_rows(cache, [4])
    assert live(cache) == [1, 4]


def replace_a_layer(cache: lk.KvCache) -> None:
    k, v = cache.layers[0].k, cache.layers[0].v
    cache.set_layer(0, lk.KvLayer(k, v))


@pytest.mark.parametrize(
    ("end", "open_after"),
    [
        (lambda c: c.truncate_to(2), True),
        (lambda c: c.truncate_to(1), False),
        (lambda c: setattr(c, "cached_len", 1), False),
        (lambda c: setattr(c, "cached_len", 6), True),
        (lambda c: c.reset(), False),
        (lambda c: c.clear(), False),
        (lambda c: c.grow(16), True),
        (lambda c: c.grow(8), True),
        (lambda c: c.repeat(2), False),
        (replace_a_layer, False),
        (lambda c: c.abort_step(), True),
    ],
)
def test_what_drops_its_rows_or_its_storage_ends_a_savepoint(make, end, open_after):
    cache = make()
    append_rows(cache, [1, 2])
    sp = cache.savepoint()
    append_rows(cache, [3])
    end(cache)
    assert sp.is_open is open_after
    if open_after:
        sp.rollback()
        assert live(cache) == [1, 2]
    else:
        for verb in (sp.rollback, sp.commit):
            with refused(cache, lk.GraphError, "got a savepoint that has ended"):
                verb()
        assert "ended" in repr(sp)


def test_a_savepoint_below_a_truncation_still_holds(make):
    cache = make()
    append_rows(cache, [1])
    low = cache.savepoint()
    append_rows(cache, [2])
    high = cache.savepoint()
    append_rows(cache, [3])
    cache.truncate_to(1)
    assert (low.is_open, high.is_open) == (True, False)
    # The rows that stand at the dropped savepoint's length are new ones: it must not bring them.
    append_rows(cache, [7, 8])
    with refused(cache, lk.GraphError, "has ended"):
        high.rollback()
    low.rollback()
    assert live(cache) == [1]


def test_an_open_step_is_dropped_by_a_rollback_and_kept_by_a_commit(make):
    cache = make()
    append_rows(cache, [1])

    def append_twice():
        with cache.savepoint():
            cache.append(0, rows([2]), rows([1002]))
            cache.append(0, rows([3]), rows([1003]))

    with pytest.raises(lk.GraphError):
        append_twice()
    append_rows(cache, [5])
    assert live(cache) == [1, 5]
    sp = cache.savepoint()
    cache.append(0, rows([6]), rows([1006]))
    sp.commit()
    cache.append(1, rows([6]), rows([1006]))
    assert live(cache) == [1, 5, 6]


def test_a_savepoint_of_another_cache_is_not_mine(make):
    one, other = make(), make()
    append_rows(one, [1])
    append_rows(other, [2])
    sp = one.savepoint()
    append_rows(one, [3])
    append_rows(other, [4])
    sp.rollback()
    assert (live(one), live(other)) == ([1], [2, 4])
    assert "length 1" in repr(sp)
