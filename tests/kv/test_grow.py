"""KvCache.grow: more capacity in other storage, the same rows."""

import gc
import weakref

import numpy as np
import pytest
from kv_state import append_rows, line, refused, rows, state

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.device import register_backend, registry


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
def test_rows_stay_and_the_rest_is_zero(make, place, dtype):
    cache = make(4, dtype=dtype)
    append_rows(cache, [1, 2, 3])
    old, first = [s for x in cache.layers for s in (x.k, x.v)], cache.alloc_id()
    cache.grow(9)
    assert (cache.max_seq_len, cache.capacity, len(cache)) == (9, 9, 3)
    assert cache.alloc_id() != first
    assert str(cache.device_location()) == place
    for i, one in enumerate(cache.layers):
        k = one.k.to_numpy()
        assert (k.shape, k.dtype) == ((1, 2, 9, 4), lk.dtype(dtype).numpy)
        np.testing.assert_array_equal(k[:, :, :3], rows([1, 2, 3], dtype=k.dtype))
        assert not k[:, :, 3:].astype(np.float32).any()
        assert one.k not in old
        assert one.v not in old
        assert line(cache.live(i)[0]) == [1, 2, 3]
    append_rows(cache, [4, 5, 6, 7, 8, 9])
    assert line(cache.live(1)[0]) == list(range(1, 10))
    with refused(cache, lk.RangeError, "capacity 9"):
        append_rows(cache, [10])


def test_the_old_storage_is_let_go(make):
    cache = make(4)
    gone = [weakref.ref(s) for x in cache.layers for s in (x.k, x.v)]
    cache.grow(5)
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_the_same_capacity_changes_nothing(make):
    cache = make(4)
    append_rows(cache, [1])
    cache.append(0, rows([2]), rows([1002]))
    before = state(cache)
    cache.grow(np.int64(4))
    assert state(cache) == before
    cache.append(1, rows([2]), rows([1002]))  # the step is still open
    assert len(cache) == 2


def test_versions_go_on(make):
    cache = make(4)
    append_rows(cache, [1])
    cache.bump_version(1, 1)
    cache.grow(8)
    assert [(x.k_version, x.v_version) for x in cache.layers] == [(2, 2), (2, 3)]


def test_savepoints_stay(make):
    cache = make(4)
    append_rows(cache, [1])
    outer = cache.savepoint()
    append_rows(cache, [2])
    inner = cache.savepoint()
    cache.grow(8)
    append_rows(cache, [3, 4, 5])
    inner.rollback()
    assert line(cache.live(1)[0]) == [1, 2]
    append_rows(cache, [6])
    outer.rollback()
    assert [line(cache.live(i)[0]) for i in range(2)] == [[1]] * 2


@pytest.mark.parametrize(
    ("capacity", "error", "words"),
    [
        (3, lk.RangeError, "got capacity 3, need >= 4"),
        (0, lk.RangeError, "got capacity 0"),
        (-1, lk.RangeError, "got capacity -1"),
        (2**63, lk.RangeError, "2**63"),
        (4.5, lk.DTypeError, "need a whole number"),
        (True, lk.DTypeError, "need a whole number"),
        (None, lk.DTypeError, "need a whole number"),
    ],
)
def test_bad_capacities_are_refused(make, capacity, error, words):
    cache = make(4)
    append_rows(cache, [1, 2])
    with refused(cache, error, "KvCache.grow", words):
        cache.grow(capacity)


def test_a_cache_without_fixed_capacity_is_refused(layer):
    cache = lk.KvCache.with_dims(1, 2, 4)
    cache.set_layer(0, layer(4))
    with refused(cache, lk.GraphError, "KvCache.grow: got a cache without fixed capacity"):
        cache.grow(8)


def test_more_memory_than_there_is_changes_nothing(make):
    cache = make(4)
    append_rows(cache, [1, 2])
    sp = cache.savepoint()
    with refused(cache, lk.OutOfMemory):
        cache.grow(2**48)
    assert sp.is_open


@pytest.fixture
def small_sim():
    """Two simulated devices of 4000 bytes each."""
    before, generations = lk.device("sim:0").backend, dict(registry.generations)
    backend = SimBackend(limit_bytes=4000)
    register_backend("sim", backend)
    yield backend
    register_backend("sim", before)
    registry.generations = generations


@pytest.mark.parametrize("enough", [0, 1, 2, 3])
def test_a_device_that_runs_full_midway_loses_nothing(small_sim, enough):
    """Room for some of the four new buffers, never for all: the old cache is whole, and the new
    buffers are given back."""
    cache = lk.KvCache.with_capacity(2, 2, 4, 4, "f32", "sim:0")
    append_rows(cache, [1, 2])
    per_row = 2 * 4 * 4
    used = small_sim.used_bytes(lk.DeviceLocation("sim:0"))
    assert used == 4 * 4 * per_row
    capacity = (4000 - used) // per_row // (enough + 1) + 1
    with refused(cache, lk.OutOfMemory, "sim:0", f"{capacity * per_row} bytes"):
        cache.grow(capacity)
    gc.collect()
    assert small_sim.used_bytes(lk.DeviceLocation("sim:0")) == used


def test_a_cleared_cache_grows_too(make, layer):
    cache = make(4)
    cache.clear()
    first = cache.alloc_id()
    cache.grow(6)
    assert cache.max_seq_len == 6
    assert cache.alloc_id() != first
    cache.set_layer(0, layer(6))
    cache.set_layer(1, layer(6))
    append_rows(cache, [1, 2, 3, 4, 5, 6])


def test_a_torn_slot_is_not_carried_over(make, place):
    cache = make(4)
    append_rows(cache, [1])

    def fail_midway():
        with cache.layers[1].v.write():
            raise KeyError

    with pytest.raises(KeyError):
        fail_midway()
    with refused(cache, lk.StorageTornError):
        cache.grow(8)
