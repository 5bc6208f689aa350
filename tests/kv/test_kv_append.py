"""KvCache.append, append_all, live and abort_step: rows of one step, layer by layer."""

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from kv_state import append_rows, line, refused, rows, state

import lazykv as lk


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64", "i8", "i64", "f8_e4m3"])
def test_rows_land_at_the_live_length(make, dtype):
    cache, np_type = make(dtype=dtype), lk.dtype(dtype).numpy
    for first in (1, 3):
        k, v = rows([first, first + 1], dtype=np_type), rows([first + 8, first + 9], dtype=np_type)
        out = cache.append_all([k, k], [v, v])
        assert [(line(a), line(b)) for a, b in out] == [
            (list(range(1, first + 2)), list(range(9, first + 10)))
        ] * 2
        assert all(a.dtype == np_type for pair in out for a in pair)
    assert len(cache) == 4
    assert [(x.k_version, x.v_version) for x in cache.layers] == [(2, 2), (2, 2)]
    for view in cache.live(0):
        assert view.shape == (1, 2, 4, 4)


def test_a_step_is_open_from_the_first_layer_to_the_last(make):
    cache = make()
    append_rows(cache, [1])
    k, v = cache.append(1, rows([2]), rows([1002]))
    assert (line(k), line(v)) == ([1, 2], [1001, 1002])
    assert len(cache) == 1
    assert line(cache.live(1)[0]) == [1]
    k, v = cache.append(0, rows([3]), rows([1003]))
    assert (line(k), line(v)) == ([1, 3], [1001, 1003])
    assert len(cache) == 2
    assert line(cache.live(1)[0]) == [1, 2]


def test_a_layer_appends_once_per_step(make):
    cache = make(layers=3)
    cache.append(1, rows([1]), rows([1]))
    with refused(cache, lk.GraphError, "layers [1]", "abort_step()"):
        cache.append(1, rows([2]), rows([2]))
    with refused(cache, lk.GraphError, "got 2 rows while a step of 1 rows is open"):
        cache.append(0, rows([1, 2]), rows([1, 2]))
    with refused(cache, lk.GraphError, "open step", "abort_step()"):
        cache.append_all([rows([1])] * 3, [rows([1])] * 3)
    cache.append(0, rows([1]), rows([1]))
    cache.append(2, rows([1]), rows([1]))
    assert len(cache) == 1
    cache.append(1, rows([2]), rows([2]))


@pytest.mark.parametrize(
    "drop",
    [
        lambda c: c.abort_step(),
        lambda c: c.reset(),
        lambda c: c.savepoint().rollback(),
    ],
)
def test_a_dropped_step_was_never_counted(make, drop):
    cache = make()
    append_rows(cache, [1, 2])
    cache.append(0, rows([7]), rows([7]))
    drop(cache)
    length = len(cache)
    # The next step starts anew at the length there is now, for both layers alike.
    for layer in (1, 0):
        cache.append(layer, rows([9]), rows([9]))
    assert len(cache) == length + 1
    assert line(cache.live(0)[0]) == line(cache.live(1)[0]) == [*[1, 2][:length], 9]


@pytest.mark.parametrize(
    "verb",
    [
        lambda c: c.truncate_to(2),
        lambda c: c.truncate_to(3),
        lambda c: c.truncate_to(10**30),
        lambda c: setattr(c, "cached_len", c.cached_len),
        lambda c: c.grow(8),
        lambda c: c.repeat(1),
        lambda c: c.savepoint().commit(),
    ],
)
def test_what_changes_nothing_leaves_an_open_step_alone(make, verb):
    cache = make()
    append_rows(cache, [1, 2])
    cache.append(0, rows([3]), rows([3]))
    verb(cache)
    cache.append(1, rows([3]), rows([3]))
    assert len(cache) == 3


@pytest.mark.parametrize(
    "verb",
    [
        lambda c, new: c.truncate_to(1),
        lambda c, new: c.truncate_to(0),
        lambda c, new: setattr(c, "cached_len", 1),
        lambda c, new: setattr(c, "cached_len", 3),
        lambda c, new: c.grow(9),
        lambda c, new: c.set_layer(0, new),
        lambda c, new: c.set_layer(1, new),
        lambda c, new: c.reorder([0]),
        lambda c, new: c.select([0]),
        lambda c, new: c.select([0, 0]),
        lambda c, new: c.repeat(2),
    ],
)
def test_what_moves_length_or_rows_is_refused_in_an_open_step(make, layer, verb):
    """A step that went on after it would pair rows of two tokens."""
    cache = make()
    append_rows(cache, [1, 2])
    sp = cache.savepoint()
    cache.append(0, rows([3]), rows([1003]))
    with refused(cache, lk.GraphError, "open step of 1 rows for layers [0]", "abort_step()"):
        verb(cache, layer())
    assert sp.is_open
    cache.append(1, rows([3]), rows([1003]))
    assert line(cache.live(0)[0]) == line(cache.live(1)[0]) == [1, 2, 3]
    verb(cache, layer())


@pytest.mark.parametrize(
    "verb", [lambda c: c.abort_step(), lambda c: c.append_all([GOOD[0]] * 2, [GOOD[0]] * 2)]
)
def test_another_thread_neither_drops_nor_looks_at_a_step(make, verb):
    cache = make()
    cache.append(0, rows([1]), rows([1]))
    with ThreadPoolExecutor(1) as pool, cache.owned("a step"):
        assert isinstance(pool.submit(verb, cache).exception(), lk.SessionBusy)
    cache.append(1, rows([1]), rows([1]))
    assert len(cache) == 1


def test_no_step_of_two_tokens_ever_closes(make):
    cache = make()
    cache.append(0, rows([1]), rows([1]))
    with pytest.raises(lk.GraphError):
        cache.grow(16)
    cache.append(1, rows([1]), rows([1]))
    cache.append(0, rows([2]), rows([2]))
    cache.append(1, rows([2]), rows([2]))
    assert line(cache.live(0)[0]) == line(cache.live(1)[0]) == [1, 2]


def test_only_populated_layers_take_part(make, layer):
    cache = make(layers=3)
    cache.clear()
    for i in (0, 2):
        cache.set_layer(i, layer())
    assert len(cache.append_all([rows([1])] * 2, [rows([2])] * 2)) == 2
    cache.append(0, rows([2]), rows([2]))
    assert len(cache) == 1
    with refused(cache, lk.RangeError, "absent layer", "0..2"):
        cache.append(1, rows([2]), rows([2]))
    cache.append(2, rows([2]), rows([2]))
    assert len(cache) == 2
    with refused(cache, lk.ShapeError, "got 3 K and 3 V, need 2 of each"):
        cache.append_all([rows([1])] * 3, [rows([1])] * 3)


@pytest.mark.parametrize("place", ["cpu"], indirect=True)
def test_views_on_the_host_are_zero_copy_and_read_only(make):
    cache = make()
    append_rows(cache, [1, 2])
    k, _ = cache.live(0)
    assert not k.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        k[...] = 0
    assert np.shares_memory(k, cache.layers[0].k.array)
    cache.write_bytes(0, 0, 0, 1, rows([8]))
    assert line(k) == [8, 2]
    returned, _ = cache.append(0, rows([3]), rows([3]))
    assert not returned.flags.writeable
    assert np.shares_memory(returned, cache.layers[0].k.array)


@pytest.mark.parametrize("place", ["cpu"], indirect=True)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8_e4m3", "i8"])
def test_no_flag_makes_a_view_writable(make, dtype):
    cache = make(dtype=dtype)
    one = rows([1], dtype=cache.dtype.numpy)
    views = [*cache.append(0, one, one), *cache.append(1, one, one), *cache.live(0)]
    for view in (*views, *(v[:, 1:] for v in views), *cache.append_all([one] * 2, [one] * 2)[1]):
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)


@pytest.mark.parametrize("place", ["sim:0"], indirect=True)
def test_views_of_a_device_are_read_only_copies_of_the_live_rows(make):
    cache = make()
    append_rows(cache, [1, 2])
    k, _ = cache.live(0)
    assert not k.flags.writeable
    cache.write_bytes(0, 0, 0, 1, rows([8]))
    assert line(k) == [1, 2]
    assert line(cache.live(0)[0]) == [8, 2]
    base = k
    while base.base is not None:
        base = base.base
    assert base.nbytes == rows([1, 2]).nbytes
    with pytest.raises(lk.BindingError, match="got a host access, need a copy"):
        np.asarray(cache.layers[0].k.array)


def test_views_held_across_a_later_write_keep_their_extent_e6(make):
    cache = make()
    append_rows(cache, [1])
    first = cache.live(0)[0]
    append_rows(cache, [2])
    second = cache.live(0)[0]
    assert (line(first), line(second)) == ([1], [1, 2])


def test_a_cache_may_append_its_own_rows(make):
    cache = make()
    append_rows(cache, [1, 2, 3])
    cache.append_all(*zip(*(cache.live(i) for i in range(2)), strict=True))
    assert line(cache.live(0)[0]) == [1, 2, 3, 1, 2, 3]
    assert line(cache.live(1)[1]) == [1001, 1002, 1003] * 2


def test_rows_of_any_memory_order(make):
    cache = make(layers=1)
    values = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    cache.append(0, np.asfortranarray(values), values.astype(">f4"))
    cache.append(0, values[:, :, ::-1], np.repeat(values, 2, 2)[:, :, ::2])
    k, v = cache.live(0)
    np.testing.assert_array_equal(k, np.concatenate([values, values[:, :, ::-1]], 2))
    np.testing.assert_array_equal(v, np.concatenate([values, values], 2))


# Capacity


def test_exactly_capacity_rows_fit_d2_d3(make):
    cache = make(capacity=8)
    append_rows(cache, list(range(8)))
    for n in (1, 9):
        with refused(cache, lk.RangeError, f"need {8 + n} <= capacity 8"):
            append_rows(cache, [1] * n)
        with refused(cache, lk.RangeError, f"need {8 + n} <= capacity 8"):
            cache.append(0, rows([1] * n), rows([1] * n))
    append_rows(cache, [])
    assert len(cache) == 8
    one_by_one = make(capacity=8)
    for value in range(8):
        append_rows(one_by_one, [value])
    with refused(one_by_one, lk.RangeError, "got rows 8..9, need 9 <= capacity 8"):
        append_rows(one_by_one, [8])
    assert state(one_by_one)["slots"][1, "v"][3] == state(cache)["slots"][1, "v"][3]


def test_a_step_past_capacity_is_refused_at_its_first_layer(make):
    cache = make(capacity=3)
    append_rows(cache, [1, 2])
    with refused(cache, lk.RangeError, "append(layer 1)", "need 4 <= capacity 3"):
        cache.append(1, rows([3, 4]), rows([3, 4]))
    append_rows(cache, [3])


# Refusals

GOOD = rows([7])


@pytest.mark.parametrize(
    ("k", "v", "error", "words"),
    [
        (GOOD[0], GOOD, lk.ShapeError, "got K f32[2,1,4], need f32[1,2,n,4]"),
        (GOOD, GOOD[..., None], lk.ShapeError, "got V f32[1,2,1,4,1]"),
        (rows([1], heads=4, dim=2), GOOD, lk.ShapeError, "got K f32[1,4,1,2]"),
        (GOOD, rows([1], heads=1), lk.ShapeError, "got V f32[1,1,1,4]"),
        (np.concatenate([GOOD, GOOD]), GOOD, lk.ShapeError, "got K f32[2,2,1,4]"),
        (rows([1], dim=5), GOOD, lk.ShapeError, "got K f32[1,2,1,5]"),
        (GOOD, rows([1, 2]), lk.ShapeError, "got 1 rows of K and 2 of V"),
        (GOOD.astype(np.float64), GOOD, lk.DTypeError, "got K f64[1,2,1,4], need f32"),
        (GOOD, GOOD.astype(np.float16), lk.DTypeError, "got V f16[1,2,1,4], need f32"),
        (GOOD, GOOD.astype(np.int32), lk.DTypeError, "got V i32"),
        (GOOD.astype(np.uint16), GOOD, lk.DTypeError, "uint16"),
        (GOOD.tolist(), GOOD, lk.DTypeError, "got K f64[1,2,1,4]"),
        (None, GOOD, lk.DTypeError, "need"),
        ("text", GOOD, lk.DTypeError, "need"),
        ([[1.0], [1.0, 2.0]], GOOD, lk.LazyKvError, "need"),
    ],
)
def test_rows_that_do_not_fit_are_refused(make, k, v, error, words):
    cache = make()
    append_rows(cache, [1, 2])
    with refused(cache, error, words):
        cache.append(0, k, v)
    with refused(cache, error, words if "rows of K" not in words else "different numbers of rows"):
        cache.append_all([GOOD, k], [GOOD, v])


@pytest.mark.parametrize("bad", [None, 1, 1.5, np.array(1.5), object()])
def test_rows_of_all_layers_come_in_lists(make, bad):
    cache = make()
    got = type(bad).__name__
    with refused(cache, lk.DTypeError, f"append_all: got K of {got}, need a list of rows"):
        cache.append_all(bad, [GOOD] * 2)
    with refused(cache, lk.DTypeError, f"append_all: got V of {got}, need a list of rows"):
        cache.append_all([GOOD] * 2, bad)


@pytest.mark.parametrize(
    ("layer", "error", "words"),
    [
        (2, lk.RangeError, "append(layer 2)"),
        (-1, lk.RangeError, "append(layer -1)"),
        (0.0, lk.DTypeError, "got layer 0.0"),
        (None, lk.DTypeError, "got layer None"),
    ],
)
def test_layers_that_are_not_there_are_refused(make, layer, error, words):
    cache = make()
    append_rows(cache, [1, 2])
    with refused(cache, error, words):
        cache.append(layer, GOOD, GOOD)
    with pytest.raises(error):
        cache.live(layer)


def test_append_all_checks_everything_before_the_first_write(make):
    cache = make()
    append_rows(cache, [1, 2])
    for ks, vs in (([GOOD], [GOOD]), ([GOOD] * 2, [GOOD]), ([GOOD] * 2, [GOOD] * 3)):
        with refused(cache, lk.ShapeError, "need 2 of each"):
            cache.append_all(ks, vs)
    with refused(cache, lk.ShapeError, "need 1 everywhere"):
        cache.append_all([GOOD, rows([1, 2])], [GOOD, rows([1, 2])])
    with refused(cache, lk.DTypeError, "append_all(layer 1)", "got V f16"):
        cache.append_all([GOOD] * 2, [GOOD, GOOD.astype(np.float16)])


def test_an_append_is_one_pass_and_one_compiled_plan(make, place):
    cache = make(capacity=64)
    append_rows(cache, [0])
    before = lk.stats()
    for value in range(1, 64):
        append_rows(cache, [value])
    after = lk.stats()
    assert after.plans_built == before.plans_built
    assert after.plan_cache_hits == before.plan_cache_hits + 63
    per_slot = 1 if place == "cpu" else 2  # rows of the host travel first
    assert after.kernels_run == before.kernels_run + 63 * 4 * per_slot
    assert line(cache.live(1)[0]) == list(range(64))


@pytest.mark.parametrize("place", ["sim:0"], indirect=True)
def test_memory_of_a_device_is_given_back_at_once(make, place):
    """By reference counts alone: a device's memory may be gone before the collector runs."""
    location = lk.DeviceLocation(place)
    used = partial(lk.device(place).backend.used_bytes, location)
    gc.collect()
    gc.disable()
    try:
        before = used()
        cache = make()
        held = used()
        append_rows(cache, [1, 2])
        cache.write_bytes(0, 0, 0, 1, rows([3]))
        cache.live(0)
        assert used() == held == before + 4 * 2 * 8 * 4 * 4
        cache.grow(16)
        assert used() == before + 2 * (held - before)
        del cache
        assert used() == before
    finally:
        gc.enable()
