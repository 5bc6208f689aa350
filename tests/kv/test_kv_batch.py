"""KvCache with several sequences: writing, and reorder, select and repeat (beam search)."""

from unittest.mock import Mock

import numpy as np
import pytest
from kv_state import refused, state

import lazykv as lk


def batch(values: list[list[float]], heads: int = 2, dim: int = 4, dtype=np.float32) -> np.ndarray:
    """``[B, heads, n, dim]`` where every element of row p of sequence b is ``values[b][p]``."""
    table = np.asarray(values, np.float64).reshape(len(values), 1, -1, 1)
    shape = (len(values), heads, table.shape[2], dim)
    return np.broadcast_to(table, shape).astype(dtype)


def append(cache: lk.KvCache, values: list[list[float]]) -> None:
    """One step; V rows hold 100 more than K rows, layer 1 holds 20 more than layer 0."""
    table, np_type = np.asarray(values, np.float64), cache.dtype.numpy
    ks = [batch(table + 20 * i, dtype=np_type) for i in range(cache.n_layers())]
    vs = [batch(table + 100 + 20 * i, dtype=np_type) for i in range(cache.n_layers())]
    cache.append_all(ks, vs)


def live(cache: lk.KvCache) -> list[list[float]]:
    """The live values of every sequence, which every layer and slot agrees on."""
    tables = []
    for i in range(cache.n_layers()):
        for view, offset in zip(cache.live(i), (0, 100), strict=True):
            assert view.shape == (cache.batch, 2, len(cache), 4)
            table = view[:, 0, :, 0].astype(np.float64)
            assert (view.astype(np.float64) == table[:, None, :, None]).all()
            tables.append((table - offset - 20 * i).tolist())
    assert all(t == tables[0] for t in tables)
    return tables[0]


def counts(cache: lk.KvCache) -> list[int]:
    return [n for x in cache.layers for n in (x.k_version, x.v_version)]


def test_a_batch_holds_every_sequence(make, place):
    cache = make(5, batch=3)
    assert (cache.batch, cache.max_seq_len, len(cache)) == (3, 5, 0)
    assert cache.slot_storage(0, 0).shape == (3, 2, 5, 4)
    assert str(cache.device_location()) == place
    held = sum(s.nbytes for x in cache.layers for s in (x.k, x.v))
    assert held == lk.KvCache.footprint(2, 2, 4, 5, "f32", batch=3)
    append(cache, [[1, 2], [3, 4], [5, 6]])
    append(cache, [[7], [8], [9]])
    assert live(cache) == [[1, 2, 7], [3, 4, 8], [5, 6, 9]]
    cache.truncate_to(1)
    assert live(cache) == [[1], [3], [5]]


def test_write_bytes_takes_the_rows_of_all_sequences(make):
    cache = make(4, batch=2, layers=1)
    cache.write_bytes(0, lk.KvSlot.V, 1, 2, batch([[1, 2], [3, 4]]).tobytes())
    v = cache.layers[0].v.to_numpy()
    np.testing.assert_array_equal(v[:, 0, :, 0], [[0, 1, 2, 0], [0, 3, 4, 0]])
    with refused(cache, lk.ShapeError, "got 64 bytes, need 128 for f32[2,2,2,4]"):
        cache.write_bytes(0, 0, 0, 2, bytes(64))


@pytest.mark.parametrize("sequences", [1, 3])
def test_rows_of_another_batch_are_refused(make, sequences):
    cache = make(4, batch=2)
    value = batch([[1.0]] * sequences)
    with refused(cache, lk.ShapeError, f"got K f32[{sequences},2,1,4], need f32[2,2,n,4]"):
        cache.append(0, value, value)


def test_beams_are_reordered_j1(make):
    cache = make(2, layers=1, batch=2)
    cache.append(0, batch([[1], [2]]), batch([[11], [12]]))
    cache.reorder([1, 0])
    k, v = cache.live(0)
    assert (k[:, 0, 0, 0].tolist(), v[:, 0, 0, 0].tolist()) == ([2, 1], [12, 11])
    cache.reorder((1, 0))
    cache.repeat(2)
    k, v = cache.live(0)
    assert v[:, 0, 0, 0].tolist() == [11, 11, 12, 12]
    assert k[:, 0, 0, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("index", [[1, 2, 0], [0, 0, 2], [2, 2, 2], [0, 1, 2], [0, 2, 1]])
def test_reorder_keeps_the_allocation(make, index, dtype):
    cache = make(5, batch=3, dtype=dtype)
    append(cache, [[1, 2], [3, 4], [5, 6]])
    before, stores = state(cache), [s for x in cache.layers for s in (x.k, x.v)]
    cache.reorder(np.asarray(index))
    assert live(cache) == [[[1, 2], [3, 4], [5, 6]][i] for i in index]
    assert state(cache)["fields"] == before["fields"]
    assert cache.alloc_id() == before["alloc_id"]
    assert [s for x in cache.layers for s in (x.k, x.v)] == stores
    assert counts(cache) == [2] * 4
    append(cache, [[7], [8], [9]])
    assert [row[-1] for row in live(cache)] == [7, 8, 9]


def test_only_live_rows_move(make):
    """At most 63 dead rows are moved along, so that few structures are planned."""
    cache = make(1000, layers=1, batch=2)
    cache.append(0, batch([[1] * 70, [2] * 70]), batch([[1] * 70, [2] * 70]))
    for slot in (0, 1):
        cache.write_bytes(0, slot, 128, 872, batch([[8] * 872, [9] * 872]))
    before = lk.stats().bytes_moved
    cache.reorder([1, 0])
    row = 2 * 2 * 4 * 4
    assert lk.stats().bytes_moved - before <= 2 * 2 * 128 * row + 16  # 16: the two indices
    k = cache.layers[0].k.to_numpy()[:, 0, :, 0]
    np.testing.assert_array_equal(k[:, :70], [[2] * 70, [1] * 70])
    np.testing.assert_array_equal(k[:, 128:], [[8] * 872, [9] * 872])


def test_nothing_live_launches_nothing(make):
    cache = make(4, batch=2)
    before = lk.stats().kernels_run
    cache.reorder([1, 0])
    append(cache, [[1], [2]])
    after_append = lk.stats().kernels_run
    cache.reorder([0, 1])
    cache.select([0, 1])
    assert before < after_append == lk.stats().kernels_run
    assert live(cache) == [[1], [2]]


def test_lengths_of_one_structure_share_a_plan(make):
    cache = make(64, layers=1, batch=2)
    append(cache, [[1], [2]])
    cache.reorder([1, 0])
    before = lk.stats().plans_built
    for n in range(2, 64):
        if len(cache) == 1 and n == 2:
            append(cache, [[n], [n]])  # the same structure as the first append
        cache.cached_len = n
        cache.reorder([1, 0])
    assert lk.stats().plans_built == before


@pytest.mark.parametrize("index", [[2], [0, 2], [1, 1, 0, 2]])
def test_select_of_another_batch_is_another_allocation(make, place, index):
    cache = make(5, batch=3)
    rows = [[1, 2], [3, 4], [5, 6]]
    append(cache, rows)
    first, sp = cache.alloc_id(), cache.savepoint()
    cache.select(index)
    assert live(cache) == [rows[i] for i in index]
    assert (cache.batch, len(cache), cache.max_seq_len) == (len(index), 2, 5)
    assert cache.alloc_id() != first
    assert str(cache.device_location()) == place
    assert not sp.is_open
    assert counts(cache) == [2] * 4
    append(cache, [[n] for n in range(len(index))])
    assert [row[-1] for row in live(cache)] == list(range(len(index)))


def test_select_of_as_many_keeps_the_allocation(make):
    cache = make(5, batch=2)
    append(cache, [[1], [2]])
    first = cache.alloc_id()
    cache.select([1, 1])
    assert (live(cache), cache.alloc_id()) == ([[2], [2]], first)


def test_one_prompt_becomes_many(make):
    cache = make(5)
    append(cache, [[1, 2]])
    cache.repeat(3)
    append(cache, [[3], [4], [5]])
    assert live(cache) == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    cache.select([1])
    assert live(cache) == [[1, 2, 4]]
    before = cache.alloc_id()
    cache.repeat(1)
    assert (live(cache), cache.alloc_id()) == ([[1, 2, 4]], before)


def test_another_batch_makes_a_held_plan_stale(make):
    cache = make(5)
    assert cache.plan_facts()["batch"] == 1
    cache.held["plan"] = Mock()
    cache.reorder([0])
    assert "plan" in cache.held
    cache.repeat(2)
    assert cache.plan_facts()["batch"] == 2
    assert cache.held == {}


@pytest.mark.parametrize(
    ("verb", "argument", "error", "words"),
    [
        ("reorder", [0], lk.ShapeError, "got 1 indices, need 2; use select"),
        ("reorder", [0, 1, 0], lk.ShapeError, "got 3 indices, need 2"),
        ("reorder", [], lk.ShapeError, "got 0 indices, need 2"),
        ("reorder", [0, 2], lk.RangeError, "got sequence 2, need 0 <= index < 2"),
        ("reorder", [-1, 0], lk.RangeError, "got sequence -1"),
        ("reorder", [0, 1.0], lk.DTypeError, "got index 1.0"),
        ("reorder", [True, False], lk.DTypeError, "got index True"),
        ("reorder", ["0", "1"], lk.DTypeError, "got index '0'"),
        ("reorder", 1, lk.DTypeError, "got int, need a sequence"),
        ("select", [], lk.ShapeError, "got no indices"),
        ("select", [2], lk.RangeError, "got sequence 2"),
        ("select", [0, 1, None], lk.DTypeError, "got index None"),
        ("select", None, lk.DTypeError, "got NoneType, need a sequence"),
        ("repeat", 0, lk.RangeError, "got n 0"),
        ("repeat", -1, lk.RangeError, "got n -1"),
        ("repeat", 1.5, lk.DTypeError, "got n 1.5"),
    ],
)
def test_bad_arguments_are_refused(make, verb, argument, error, words):
    cache = make(5, batch=2)
    append(cache, [[1], [2]])
    with refused(cache, error, "KvCache.", words):
        getattr(cache, verb)(argument)


def test_a_read_only_layer_is_refused(make):
    cache = lk.KvCache.with_capacity(1, 2, 4, 3, "f32", batch=2)
    append(cache, [[1], [2]])
    array = np.zeros((2, 2, 3, 4), np.float32)
    array.flags.writeable = False
    cache.set_layer(0, lk.KvLayer(cache.layers[0].k, lk.Storage.wrap(array)))
    with refused(cache, lk.BindingError, "read-only"):
        cache.reorder([1, 0])
    cache.repeat(2)  # a copy of it may be written
    cache.reorder([3, 2, 1, 0])


def test_more_memory_than_there_is_changes_nothing(make):
    cache = make(1 << 12, layers=1)
    append(cache, [[1]])
    with refused(cache, lk.LazyKvError):
        cache.repeat(1 << 36)
