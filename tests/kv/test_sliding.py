"""SlidingKvCache: rows in rings, in temporal order, and how far a length may go back."""

from collections.abc import Callable

import numpy as np
import pytest
from kv_state import append_rows, line, refused, rows, state

import lazykv as lk


@pytest.fixture
def make(place) -> Callable[..., lk.SlidingKvCache]:
    def cache(window=4, *, layers=2, heads=2, dim=4, dtype="f32", **options):
        return lk.SlidingKvCache.with_capacity(
            layers, heads, dim, window, dtype, place, **options
        )  # fmt: skip

    return cache


def live(cache: lk.SlidingKvCache) -> list[float]:
    """The rows in view of every layer and slot, which hold the same numbers."""
    found = [[line(k), [x - 1000 for x in line(v)]] for k, v in map(cache.live, range(2))]
    assert all(pair == [found[0][0]] * 2 for pair in found)
    assert len(found[0][0]) == cache.resident_rows
    return found[0][0]


def everything(cache: lk.SlidingKvCache) -> list[object]:
    return [state(cache), live(cache), cache.resident_rows]


# Construction


def test_what_a_new_cache_is(make, place):
    cache = make(4, sink_tokens=2, rollback_slack=3, max_seq_len=100)
    assert (cache.window, cache.sink_tokens, cache.rollback_slack) == (4, 2, 3)
    assert (cache.ring_rows, cache.resident_rows, cache.max_seq_len) == (9, 0, 100)
    assert (cache.cached_len, len(cache), bool(cache), cache.n_layers()) == (0, 0, True, 2)
    assert (cache.n_kv_heads, cache.head_dim, cache.batch, cache.dtype) == (2, 4, 1, lk.f32)
    assert str(cache.device_location()) == place
    assert make().max_seq_len is None
    for layer in cache.layers:
        for store in (layer.k, layer.v):
            assert (store.shape, store.to_numpy().any()) == ((1, 2, 9, 4), False)
    assert "window 4 after 2 sinks" in repr(cache)


def test_it_is_allocated_in_one_pass_of_the_exact_size(make):
    before = lk.stats()
    cache = make(4, layers=3, dtype="bf16", sink_tokens=1, rollback_slack=2)
    after = lk.stats()
    assert (after.allocations - before.allocations, after.kernels_run - before.kernels_run) == (
        6,
        6,
    )
    held = sum(s.nbytes for layer in cache.layers for s in (layer.k, layer.v))
    want = lk.SlidingKvCache.footprint(3, 2, 4, 4, "bf16", sink_tokens=1, rollback_slack=2)
    assert held == want == 3 * 2 * 2 * 7 * 4 * 2


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"layers": 0}, lk.RangeError, "n_layers 0"),
        ({"heads": 0}, lk.RangeError, "n_kv_heads 0"),
        ({"dim": 0}, lk.RangeError, "head_dim 0"),
        ({"window": 0}, lk.RangeError, "window 0"),
        ({"window": 2.5}, lk.DTypeError, "window 2.5"),
        ({"sink_tokens": -1}, lk.RangeError, "sink_tokens -1"),
        ({"rollback_slack": -1}, lk.RangeError, "rollback_slack -1"),
        ({"rollback_slack": True}, lk.DTypeError, "rollback_slack True"),
        ({"max_seq_len": 0}, lk.RangeError, "max_seq_len 0"),
        ({"dtype": "f7"}, lk.DTypeError, "f7"),
        ({"window": 2**62}, lk.ShapeError, "2**63"),
    ],
)
def test_bad_arguments(make, changes, error, words):
    before = lk.stats().allocations
    with pytest.raises(error) as caught:
        make(**changes)
    assert words in str(caught.value)
    assert lk.stats().allocations == before


def test_one_device_per_layer():
    cache = lk.SlidingKvCache.with_capacity(
        3, 2, 4, 2, "f32", ["sim:0", None, "sim:1"], rollback_slack=1
    )
    assert [str(cache.layer_location(i)) for i in range(3)] == ["sim:0", "None", "sim:1"]
    assert (cache.device_location(), cache.layer(1)) == (None, None)
    for value in range(7):
        cache.append_all([rows([value])] * 2, [rows([value])] * 2)
    assert [line(cache.live(i)[0]) for i in (0, 2)] == [[5, 6], [5, 6]]
    with pytest.raises(lk.ShapeError, match="got 2 devices"):
        lk.SlidingKvCache.with_capacity(3, 2, 4, 2, "f32", ["cpu", "cpu"])


# What is in view


def test_B1_the_window_slides_from_the_first_row_too_many(make):
    cache = make(8)
    append_rows(cache, range(100, 106))
    for last in range(106, 110):
        append_rows(cache, [last])
        assert live(cache) == list(range(max(100, last - 7), last + 1))


def test_B2_chunks_of_any_length_in_temporal_order(make):
    cache, seen = make(4), []
    for chunk in ([0, 1], [2, 3, 4], [5], [6, 7, 8, 9]):
        append_rows(cache, chunk)
        seen.append(live(cache))
    assert seen == [[0, 1], [1, 2, 3, 4], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_B3_many_rows_at_once_evict_as_many_and_bytes_never_grow(make):
    cache = make(4, rollback_slack=2)
    append_rows(cache, [0, 1, 2])
    append_rows(cache, [3, 4, 5])
    assert live(cache) == [2, 3, 4, 5]
    stores = [(s.id, s.nbytes) for layer in cache.layers for s in (layer.k, layer.v)]
    plans = lk.stats().plans_built
    for first in range(6, 306, 3):
        append_rows(cache, [first % 250, (first + 1) % 250, (first + 2) % 250])
    assert live(cache) == [x % 250 for x in range(302, 306)]
    assert [(s.id, s.nbytes) for layer in cache.layers for s in (layer.k, layer.v)] == stores
    assert lk.stats().plans_built == plans


def test_B4_absolute_length_and_resident_rows_are_two_things(make, place):
    ring, full = make(4), lk.KvCache.with_capacity(2, 2, 4, 10, "f32", place)
    for value in range(7):
        append_rows(ring, [value])
        append_rows(full, [value])
    assert (ring.cached_len, full.cached_len) == (7, 7)
    assert (ring.resident_rows, full.live(0)[0].shape[2]) == (4, 7)
    assert live(ring) == line(full.live(0)[0])[-4:] == [3, 4, 5, 6]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8", "i64", "f8_e4m3"])
def test_sinks_stay_in_view_and_rows_keep_their_dtype(make, dtype):
    cache, np_type = make(3, dtype=dtype, sink_tokens=2), lk.dtype(dtype).numpy
    for last in range(12):
        value = rows([last], dtype=np_type)
        out = cache.append_all([value] * 2, [value] * 2)
        want = [p for p in range(last + 1) if p < 2 or p > last - 3]
        assert [[line(a) for a in pair] for pair in out] == [[want] * 2] * 2
        assert all(a.dtype == np_type for pair in out for a in pair)
    assert cache.resident_rows == 5


def test_one_append_longer_than_the_ring_keeps_sinks_and_last_rows(make):
    cache = make(3, sink_tokens=2, rollback_slack=1)
    append_rows(cache, range(20))
    assert (live(cache), cache.cached_len) == ([0, 1, 17, 18, 19], 20)
    append_rows(cache, range(20, 50))
    assert (live(cache), cache.cached_len) == ([0, 1, 47, 48, 49], 50)


def test_live_rows_are_read_only_and_copies_only_where_the_ring_wraps():
    cache = lk.SlidingKvCache.with_capacity(2, 2, 4, 4, "f32", sink_tokens=1, rollback_slack=3)
    copied = []
    for p in range(17):
        append_rows(cache, [p])
        views = cache.live(0)
        assert not any(a.flags.writeable for a in views)
        copied.append(not np.shares_memory(views[0], cache.layers[0].k.array))
    # A ring of 7 slots behind one sink: the window starts beside it at the lengths 5, 12, ...
    assert copied == [not (p < 5 or p == 11) for p in range(17)]
    cache = lk.SlidingKvCache.with_capacity(2, 2, 4, 4, "f32", rollback_slack=2)
    copied = []
    for p in range(14):
        append_rows(cache, [p])
        copied.append(not np.shares_memory(cache.live(1)[1], cache.layers[1].v.array))
    assert copied == [not (p < 6 or p % 6 >= 3) for p in range(14)]


def test_no_rows_change_nothing(make):
    cache = make()
    append_rows(cache, range(6))
    before = everything(cache)
    kernels = lk.stats().kernels_run
    append_rows(cache, [])
    assert lk.stats().kernels_run == kernels
    after = everything(cache)
    versions = [(layer.k_version, layer.v_version) for layer in cache.layers]
    assert versions == [(2, 2), (2, 2)]
    assert (after[1:], after[0]["fields"]) == (before[1:], before[0]["fields"])


# A step of several layers


def test_rows_of_an_open_step_wait_and_what_they_replace_stays_in_view(make):
    cache = make(3)
    append_rows(cache, range(5))
    before, value = state(cache), rows([7, 8])
    k, v = cache.append(1, value, rows([1007, 1008]))
    value[:] = -1
    assert (line(k), line(v)) == ([4, 7, 8], [1004, 1007, 1008])
    assert not any(a.flags.writeable for a in (k, v))
    assert (state(cache), live(cache)) == (before, [2, 3, 4])
    k, v = cache.append(0, rows([7, 8]), rows([1007, 1008]))
    assert (line(k), line(v)) == ([4, 7, 8], [1004, 1007, 1008])
    assert (live(cache), cache.cached_len) == ([4, 7, 8], 7)
    assert [(x.k_version, x.v_version) for x in cache.layers] == [(2, 2), (2, 2)]


@pytest.mark.parametrize("sinks", [0, 2, 6])
def test_what_append_returns_is_what_live_gives_later(make, sinks):
    cache, at = make(3, sink_tokens=sinks), 0
    for n in (1, 2, 1, 5, 1, 4, 2):
        value = rows([float(x) for x in range(at, at + n)])
        early, _ = cache.append(0, value, value)
        late, _ = cache.append(1, value, value)
        at += n
        want = [p for p in range(at) if p < sinks or p >= at - 3]
        assert line(early) == line(late) == line(cache.live(0)[0]) == want


@pytest.mark.parametrize("drop", [lambda c: c.abort_step(), lambda c: c.savepoint().rollback()])
def test_a_dropped_step_leaves_every_row_in_place(make, drop):
    cache = make(4)
    append_rows(cache, range(6))
    before = everything(cache)
    cache.append(0, rows([9] * 10), rows([9] * 10))
    drop(cache)
    assert everything(cache) == before
    cache.append(1, rows([6]), rows([1006]))
    cache.append(0, rows([6]), rows([1006]))
    assert live(cache) == [3, 4, 5, 6]


@pytest.mark.parametrize(
    "verb", [lambda c: c.truncate_to(5), lambda c: setattr(c, "cached_len", 5)]
)
def test_the_length_stays_while_a_step_is_open(make, verb):
    cache = make(4, rollback_slack=1)
    append_rows(cache, range(6))
    cache.append(0, rows([6]), rows([1006]))
    with refused(cache, lk.GraphError, "open step of 1 rows for layers [0]", "abort_step()"):
        verb(cache)
    cache.truncate_to(6)
    cache.cached_len = 6
    cache.append(1, rows([6]), rows([1006]))
    assert live(cache) == [3, 4, 5, 6]


def test_refused_appends_change_nothing(make):
    cache = make(4, max_seq_len=8)
    append_rows(cache, range(6))
    with refused(cache, lk.RangeError, "append_all", "got rows 6..9, need 9 <= max_seq_len 8"):
        append_rows(cache, [6, 7, 8])
    with refused(cache, lk.RangeError, "append(layer 1)", "got rows 6..9"):
        cache.append(1, rows([1, 2, 3]), rows([1, 2, 3]))
    with refused(cache, lk.ShapeError, "f32[1,3,1,4], need f32[1,2,n,4]"):
        cache.append(0, rows([1], heads=3), rows([1]))
    with refused(cache, lk.DTypeError, "f64[1,2,1,4], need f32"):
        cache.append(0, rows([1], dtype=np.float64), rows([1]))
    with refused(cache, lk.ShapeError, "2 rows of K and 1 of V"):
        cache.append(0, rows([1, 2]), rows([1]))
    with refused(cache, lk.ShapeError, "got 1 K and 2 V, need 2"):
        cache.append_all([rows([1])], [rows([1])] * 2)
    for layer in (-1, 2):
        with refused(cache, lk.RangeError, "absent layer"):
            cache.append(layer, rows([1]), rows([1]))
        with refused(cache, lk.RangeError, f"got layer {layer}"):
            cache.live(layer)
    cache.append(0, rows([6]), rows([1006]))
    with refused(cache, lk.GraphError, "layers [0]", "abort_step()"):
        cache.append(0, rows([6]), rows([1006]))
    with refused(cache, lk.GraphError, "got 2 rows while a step of 1 rows"):
        cache.append(1, rows([6, 7]), rows([1006, 1007]))
    with refused(cache, lk.GraphError, "open step"):
        append_rows(cache, [6])
    cache.append(1, rows([6]), rows([1006]))
    assert live(cache) == [3, 4, 5, 6]


def test_a_torn_slot_refuses_and_loses_no_row_of_the_others(make):
    cache = make(4)
    append_rows(cache, range(6))
    store = cache.layers[1].v
    with pytest.raises(ZeroDivisionError), store.write():
        raise ZeroDivisionError
    with refused(cache, lk.StorageTornError):
        append_rows(cache, [6])
    assert cache.resident_rows == 4
    assert line(cache.live(0)[0]) == [2, 3, 4, 5]
    with pytest.raises(lk.StorageTornError):
        cache.live(1)


def test_what_a_ring_cannot_do_is_refused(make):
    cache = make(4, max_seq_len=8)
    append_rows(cache, range(6))
    with refused(cache, lk.GraphError, "SlidingKvCache.grow: got a ring"):
        cache.grow(16)
    with refused(cache, lk.GraphError, "SlidingKvCache.write_bytes: got a ring"):
        cache.write_bytes(0, 0, 0, 1, b"")
    with refused(cache, lk.RangeError, "capacity 8"):
        cache.cached_len = 9


# Going back


def test_A2_a_rollback_of_overwritten_rows_is_refused(make):
    cache = make(8)
    for value in range(20):
        append_rows(cache, [value])
    for back in (lambda: cache.truncate_to(17), lambda: setattr(cache, "cached_len", 17)):
        with refused(cache, lk.RangeError, "got a rewind from 20 to 17, need at least 20"):
            back()
        assert live(cache) == list(range(12, 20))
    append_rows(cache, [20])
    assert live(cache) == list(range(13, 21))


@pytest.mark.parametrize("sinks", [0, 3])
def test_KV13_within_the_slack_a_rollback_is_a_change_of_length(make, sinks):
    cache = make(4, sink_tokens=sinks, rollback_slack=3)
    append_rows(cache, range(30))
    kept = list(range(sinks))
    with refused(cache, lk.RangeError, "need at least 27", f"or at most {sinks}", "slack above 3"):
        cache.truncate_to(26)
    before, kernels = state(cache), lk.stats().kernels_run
    for length in (30, 29, 28, 27):
        cache.truncate_to(length)
        assert live(cache) == [*kept, *range(length - 4, length)]
    after = state(cache)
    assert lk.stats().kernels_run == kernels
    assert (after["slots"], after["alloc_id"]) == (before["slots"], before["alloc_id"])
    # The rows that 27, 28, 29 had replaced do not come back by writing others in their place.
    append_rows(cache, [127])
    with refused(cache, lk.RangeError, "got a rewind from 28 to 26"):
        cache.truncate_to(26)
    cache.truncate_to(27)
    append_rows(cache, [227, 228])
    assert live(cache) == [*kept, 25, 26, 227, 228]


def test_rows_that_nothing_has_replaced_may_all_be_dropped(make):
    cache = make(4, rollback_slack=2)
    append_rows(cache, range(6))
    cache.truncate_to(1)
    append_rows(cache, [11, 12])
    assert live(cache) == [0, 11, 12]


@pytest.mark.parametrize("sinks", [0, 2])
def test_reset_and_the_sinks_are_always_there(make, sinks):
    cache = make(4, sink_tokens=sinks)
    append_rows(cache, range(20))
    held, where = cache.alloc_id(), [s.id for x in cache.layers for s in (x.k, x.v)]
    cache.truncate_to(sinks)
    assert live(cache) == list(range(sinks))
    append_rows(cache, range(50, 53))
    cache.truncate_to(sinks + 1)
    assert live(cache) == [*range(sinks), 50]
    cache.reset()
    assert (live(cache), cache.cached_len, cache.alloc_id()) == ([], 0, held)
    assert [s.id for x in cache.layers for s in (x.k, x.v)] == where
    append_rows(cache, range(9))
    assert live(cache) == [p for p in range(9) if p < sinks or p > 4]


def test_truncate_to_a_larger_length_does_nothing_and_negatives_are_refused(make):
    cache = make()
    append_rows(cache, range(6))
    before = everything(cache)
    for n in (6, 7, 100):
        cache.truncate_to(n)
        assert everything(cache) == before
    with refused(cache, lk.RangeError, "length -1"):
        cache.truncate_to(-1)


def test_savepoints_within_the_slack(make):
    cache = make(4, rollback_slack=3)
    append_rows(cache, range(20))
    outer = cache.savepoint()
    append_rows(cache, [20])
    inner = cache.savepoint()
    append_rows(cache, [21, 22])
    inner.rollback()
    assert (live(cache), outer.is_open) == ([17, 18, 19, 20], True)
    outer.rollback()
    assert live(cache) == [16, 17, 18, 19]


def test_a_savepoint_beyond_the_slack_is_refused_and_stays_open(make):
    cache = make(4, rollback_slack=3)
    append_rows(cache, range(20))
    sp, inner = cache.savepoint(), cache.savepoint()
    append_rows(cache, range(20, 24))
    with refused(cache, lk.RangeError, "got a rewind from 24 to 20, need at least 21"):
        sp.rollback()
    assert (sp.is_open, inner.is_open, live(cache)) == (True, True, [20, 21, 22, 23])
    sp.commit()
    assert not inner.is_open


def test_lengths_that_plans_of_others_have_written_count_as_written(make):
    cache = make(4, rollback_slack=1)
    append_rows(cache, range(5))
    cache.cached_len = 9
    with refused(cache, lk.RangeError, "from 9 to 7, need at least 8"):
        cache.cached_len = 7
    cache.cached_len = 8
    # A step that failed midway may have written: what it could have replaced is out of view.
    cache.note_written(11)
    assert (cache.cached_len, cache.resident_rows) == (8, 2)
    with refused(cache, lk.RangeError, "from 8 to 7, need at least 10"):
        cache.truncate_to(7)


def test_B6_a_shared_prefix_that_was_evicted_cannot_be_reused(make):
    """Reuse is a rewind to the prefix: refused, so the new run starts at 0 and equals a new one."""
    cache, fresh = make(4), make(4)
    append_rows(cache, range(10))
    with refused(cache, lk.RangeError, "got a rewind from 10 to 3"):
        cache.truncate_to(3)
    cache.reset()
    for c in (cache, fresh):
        append_rows(c, [0, 1, 2, 77, 78, 79])
    assert live(cache) == live(fresh) == [2, 77, 78, 79]


# Identity


def test_ids_and_versions_follow_the_rules_of_kv_cache(make, place):
    cache, other = make(), make()
    assert int(cache.alloc_id()) not in (0, int(other.alloc_id()))
    held = cache.alloc_id()
    append_rows(cache, range(6))
    cache.truncate_to(6)
    cache.reset()
    assert cache.alloc_id() == held
    cache.bump_version(0, 1)
    cache.bump_version(5, 1)
    assert [(x.k_version, x.v_version) for x in cache.layers] == [(2, 3), (2, 2)]
    assert cache.slot_storage(1, lk.KvSlot.V) is cache.layer(1).v is cache.rebind_slot(1, 1)
    assert (cache.slot_storage(-1, 0), cache.slot_storage(2, 0), cache.layer(-1)) == (None,) * 3
    assert isinstance(cache, lk.KvRebindSource)
    assert str(cache.rebind_location()) == str(cache.layer_location(0)) == place


def test_clear_drops_the_storage_and_mints_an_id(make):
    cache = make(sink_tokens=1)
    append_rows(cache, range(9))
    sp, held = cache.savepoint(), cache.alloc_id()
    cache.clear()
    assert (cache.cached_len, cache.resident_rows, cache.layers) == (0, 0, (None, None))
    assert (cache.alloc_id() != held, cache.device_location(), sp.is_open) == (True, None, False)
    with refused(cache, lk.GraphError, "with_capacity makes a new one"):
        append_rows(cache, [1])
    with refused(cache, lk.RangeError, "got layer 0"):
        cache.live(0)


def test_what_a_plan_bakes_of_a_ring(make):
    base = make().plan_facts()
    for change in ({"window": 5}, {"layers": 3}, {"heads": 1}, {"dim": 2}, {"dtype": "f16"},
                   {"sink_tokens": 1}, {"rollback_slack": 1}):  # fmt: skip
        assert make(**change).plan_facts() != base
    assert make(max_seq_len=9).plan_facts() == base
    assert make(5, rollback_slack=0).plan_facts() != make(4, rollback_slack=1).plan_facts()
