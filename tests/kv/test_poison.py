"""Debug poison (KV-15): unfilled memory is recognizable, and rows never written are never read."""

import os
import subprocess
import sys

import numpy as np
import pytest
from kv_state import append_rows, line, raw_bytes, refused, rows
from small_llama import small_llama

import lazykv as lk
from lazykv import config

DTYPES = ["f32", "f16", "bf16", "f64", "i8", "u8", "i32", "u32", "i64", "f8_e4m3", "f8_e5m2"]


@pytest.fixture
def poison(monkeypatch):
    monkeypatch.setattr(config, "POISON", True)


# Unfilled memory


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("name", DTYPES)
def test_unfilled_memory_holds_the_pattern_everywhere(place, name):
    store = lk.Storage.allocate((3, 5), name, place)
    assert raw_bytes(store) == b"\xff" * store.nbytes
    values = store.to_numpy().astype(np.float64)
    if lk.dtype(name).is_float:
        assert np.isnan(values).all()
    else:
        assert (values == (-1 if name.startswith("i") else np.iinfo(store.dtype.numpy).max)).all()


@pytest.mark.usefixtures("poison")
def test_an_alloc_is_poisoned_and_a_fill_is_not(place):
    g = lk.Graph()
    raw = g.alloc((2, 3), "f32", place)
    assert np.isnan(lk.realize(raw)).all()
    assert np.isnan(lk.realize(raw + 1.0)).all()
    assert not lk.realize(g.alloc((2, 3), "f32", place).zero_fill()).any()
    assert lk.Storage.from_array(np.ones(3), place).to_numpy().tolist() == [1, 1, 1]


@pytest.mark.usefixtures("poison")
def test_empty_memory_has_nothing_to_fill(place):
    assert lk.Storage.allocate((0, 4), "f32", place).to_numpy().shape == (0, 4)


@pytest.mark.usefixtures("poison")
def test_intermediates_are_poisoned_before_every_run():
    """A kernel that leaves its output alone is seen in every run, not only in the first."""
    g = lk.Graph()
    x = g.placeholder((4,), "f32", "x")
    plan = lk.plan((x * 2.0) + 1.0)
    feed = {x: np.ones(4, np.float32)}
    assert plan.run(feed).tolist() == [3] * 4
    plan._calls[0] = (lambda *args: None, plan._calls[0][1])
    for _ in range(2):
        assert np.isnan(plan.run(feed)).all()


def test_nothing_is_watched_without_it(make, monkeypatch):
    monkeypatch.setattr(config, "POISON", False)
    cache = make()
    append_rows(cache, [1])
    cache.cached_len = 5
    assert line(cache.live(0)[0]) == [1, 0, 0, 0, 0]
    assert cache.slot_storage(0, 0).row_log is None


@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False), ("", False)])
def test_the_switch_is_an_environment_variable(text, on):
    code = "import lazykv as lk; print(lk.Storage.allocate((2,), 'u8').to_numpy().tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "LAZYKV_POISON": text},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout.strip() == "[255, 255]") or not on


# Rows never written


@pytest.mark.usefixtures("poison")
def test_rows_that_were_counted_but_never_written_are_named(make):
    cache = make()
    append_rows(cache, [1, 2])
    cache.cached_len = 5
    with refused(cache, lk.RangeError, "KvCache.live(layer 1)", "row 2 of KvCache layer 1, K"):
        cache.live(1)
    one = rows([1])
    with refused(cache, lk.RangeError, "KvCache.append(layer 0)", "row 2 of KvCache layer 0, K"):
        cache.append(0, one, one)
    with refused(cache, lk.RangeError, "append_all(layer 0)", "row 2 of KvCache layer 0, K"):
        cache.append_all([one] * 2, [one] * 2)
    cache.write_bytes(1, 0, 2, 3, rows([3, 4, 5]))
    with refused(cache, lk.RangeError, "row 2 of KvCache layer 1, V"):
        cache.live(1)
    cache.write_bytes(1, 1, 2, 2, rows([3, 4]))
    with refused(cache, lk.RangeError, "row 4 of KvCache layer 1, V"):
        cache.live(1)
    cache.write_bytes(1, 1, 4, 1, rows([5]))
    assert line(cache.live(1)[0]) == [1, 2, 3, 4, 5]
    with refused(cache, lk.RangeError, "row 2 of KvCache layer 0, K"):
        cache.live(0)


@pytest.mark.usefixtures("poison")
def test_rows_past_the_length_are_nobodys_business(make):
    cache = make()
    assert cache.live(0)[0].shape == (1, 2, 0, 4)
    cache.write_bytes(0, 0, 6, 2, rows([6, 7]))
    append_rows(cache, [1])
    assert line(cache.live(0)[0]) == [1]


@pytest.mark.usefixtures("poison")
def test_written_rows_stay_written_when_the_length_moves(make):
    cache = make()
    append_rows(cache, [1, 2, 3])
    cache.truncate_to(1)
    cache.cached_len = 3
    assert line(cache.live(1)[1]) == [1001, 1002, 1003]
    with cache.savepoint() as sp:
        append_rows(cache, [4])
        sp.rollback()
    cache.reset()
    append_rows(cache, [9])
    assert line(cache.live(0)[0]) == [9]


@pytest.mark.usefixtures("poison")
def test_other_storage_keeps_what_is_known_of_its_rows(make):
    cache = make(batch=2)
    pair = np.concatenate([rows([1, 2]), rows([3, 4])])
    cache.append_all([pair] * 2, [pair] * 2)
    for change in (lambda: cache.grow(12), lambda: cache.reorder([1, 0]), lambda: cache.repeat(2),
                   lambda: cache.select([2])):  # fmt: skip
        change()
        cache.cached_len = 2
        assert cache.live(0)[0].shape[2] == 2
        cache.cached_len = 3
        with refused(cache, lk.RangeError, "row 2 of KvCache layer 0, K"):
            cache.live(0)
    cache.cached_len = 2
    assert line(cache.live(1)[1]) == [1, 2]


@pytest.mark.usefixtures("poison")
def test_a_callers_own_storage_counts_as_written(make, layer):
    cache = make()
    cache.set_layer(0, layer())
    cache.cached_len = 8
    assert line(cache.live(0)[0]) == [0] * 8
    with refused(cache, lk.RangeError, "row 0 of KvCache layer 1, K"):
        cache.live(1)
    # A storage that moves to another layer is named after it.
    moved = cache.layers[1]
    cache.clear()
    cache.set_layer(0, moved)
    cache.cached_len = 1
    with refused(cache, lk.RangeError, "row 0 of KvCache layer 0, K"):
        cache.live(0)


@pytest.mark.usefixtures("poison")
def test_a_block_that_writes_the_whole_buffer_writes_every_row():
    cache = lk.KvCache.with_capacity(1, 2, 4, 8, "f32")
    cache.cached_len = 8
    for store in (cache.layers[0].k, cache.layers[0].v):
        with store.write() as a:
            a[...] = 3
    assert line(cache.live(0)[0]) == [3] * 8


@pytest.mark.usefixtures("poison")
def test_a_failed_write_writes_no_row(make):
    cache = make()
    with refused(cache, lk.ShapeError):
        cache.write_bytes(0, 0, 0, 2, bytes(3))
    cache.cached_len = 1
    with refused(cache, lk.RangeError, "row 0 of KvCache layer 0, K"):
        cache.live(0)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("form", ["view", "offset", "ring"])
def test_writes_whose_rows_are_not_known_count_as_all_rows(form):
    cache = lk.KvCache.with_capacity(1, 2, 4, 8, "f32")
    g = lk.Graph()
    store = cache.slot_storage(0, 0)
    dest, src = g.placeholder((1, 2, 8, 4), "f32"), g.const(rows([5]))
    at = g.const(np.int64(3))
    target = {
        "view": lambda: dest.slice(1, 0, 1).at[:, :, 3:4].set(src.slice(1, 0, 1)),
        "offset": lambda: dest.write_slice_at(src, 2, at),
        "ring": lambda: dest.write_slice_rotating(src, 2, at, 8),
    }[form]()
    lk.realize(target, {dest: store})
    cache.write_bytes(0, 1, 0, 8, rows([1] * 8))
    cache.cached_len = 8
    assert cache.live(0)[0][0, 0, 3].tolist() == [5] * 4


# The other caches


@pytest.mark.usefixtures("poison")
def test_rows_of_a_latent_cache(place):
    cache = lk.LatentKvCache.with_capacity(2, 8, [(4,), (2,)], "f32", place)
    cache.write_bytes(1, 0, 0, 3, np.ones((3, 4), np.float32))
    cache.write_bytes(1, 1, 0, 2, np.ones((2, 2), np.float32))
    cache.cached_len = 2
    assert cache.live(1)[0].shape == (2, 4)
    cache.cached_len = 3
    with pytest.raises(lk.RangeError, match="row 2 of LatentKvCache layer 1, slot 1"):
        cache.live(1)


@pytest.mark.usefixtures("poison")
def test_tokens_that_a_layer_cache_skipped():
    cache = lk.LayerKvCache(lk.KVCacheConfig(8, 1, 2))
    cache.initialize(2)
    row = np.ones(2, np.float32)
    cache.write_kv(4, row, row)
    assert cache.len() == 5
    assert cache.read_range(0, 2)[0].tolist() == [[0, 0], [0, 0]]  # valid by declaration
    for read in (lambda: cache.read_range(0, 5), lambda: cache.read_kv(2)):
        with pytest.raises(lk.RangeError, match="read of row 2 of LayerKvCache"):
            read()
    cache.write_kv_batch([(2, row, row), (3, row, row)])
    assert cache.read_range(2, 5)[0].tolist() == [[1, 1]] * 3


def test_a_step_over_pool_rows_that_nobody_wrote_is_refused(monkeypatch):
    """The rows of a discarded session are still in the blocks."""
    monkeypatch.setattr(config, "POISON", True)
    model = small_llama()
    pool = model.new_pool(4, 4)
    decoder = lk.models.PagedDecoder(model, pool)
    old = pool.open()
    decoder.prefill(old, [1, 2, 3, 4, 5])
    decoder.decode([old], [6])
    pool.discard(old)
    session = pool.open()
    pool.append(session, 4)
    with pytest.raises(lk.RangeError, match="row 0 of SessionHandle"):
        decoder.decode([session], [1])
    assert pool.filled_tokens(session) == 4
    pool.mark_written(session)
    decoder.decode([session], [1])
