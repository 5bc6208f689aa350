"""LatentKvCache: append, append_all, live and write_bytes, on the host and on a device."""

import itertools
from typing import Any

import numpy as np
import pytest
from latent_state import append_rows, line, refused, rows

import lazykv as lk

MLA = [(4,), (2,)]
PLACES = ["cpu", "sim:0"]
DTYPES = ["f32", "f16", "bf16", "f64", "i8", "i64", "f8_e4m3"]


def make(
    capacity: int = 8, *, layers: int = 2, trailing: Any = MLA, dtype: str = "f32",
    device: Any = "cpu",
) -> lk.LatentKvCache:  # fmt: skip
    return lk.LatentKvCache.with_capacity(layers, capacity, trailing, dtype, device)


def pair(values: list[float], dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    return rows(values, 4, dtype=dtype), rows([100 + x for x in values], 2, dtype=dtype)


# Append


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_land_at_the_live_length(dtype: str, device: str) -> None:
    cache, of = make(dtype=dtype, device=device), lk.dtype(dtype).numpy
    for first in (1, 3):
        latent, rope = rows([first, first + 1], 4, dtype=of), rows([8, 9], 2, dtype=of)
        out = cache.append_all([latent, latent], [rope, rope])
        assert [line(a) for a, _ in out] == [list(range(1, first + 2))] * 2
        assert all(x.dtype == of for both in out for x in both)
    assert len(cache) == 4
    assert line(cache.live(1)[1]) == [8, 9, 8, 9]
    assert [cache.slot_version(i, s) for i in (0, 1) for s in (0, 1)] == [2] * 4


@pytest.mark.parametrize("device", PLACES)
def test_rows_as_two_slots_and_as_one_folded_slot_m1(device: str) -> None:
    """Latent 4 and rotary 2: both layouts give the same rows back, and no neighbour changes."""
    rng = np.random.default_rng(1)
    new = rng.standard_normal((3, 6)).astype(np.float32)
    two, one = make(device=device, layers=1), make(device=device, layers=1, trailing=[(6,)])
    for cache in (two, one):
        for slot, (width,) in enumerate(cache.slot_trailing):
            cache.write_bytes(0, slot, 0, 8, rows([-7] * 8, width))
    two.append(0, new[:, :4], new[:, 4:])
    (folded,) = one.append(0, new)
    np.testing.assert_array_equal(np.concatenate(two.live(0), 1), folded)
    np.testing.assert_array_equal(folded, new)
    for cache in (two, one):
        for slot in range(len(cache.slot_trailing)):
            assert line(cache.slot_storage(0, slot).to_numpy()[3:]) == [-7] * 5
    wide = rng.standard_normal((1, 8)).astype(np.float32)
    with refused(one, lk.ShapeError, "got slot 0 f32[1,8], need f32[n,6]"):
        one.append(0, wide)
    with refused(two, lk.ShapeError, "got slot 0 f32[1,8], need f32[n,4]"):
        two.append(0, wide, wide[:, :2])
    with refused(two, lk.ShapeError, "LatentKvCache.append: got rows for 1 slots", "all 2"):
        two.append(0, wide)


def test_exactly_the_rows_move_and_the_canary_stands_l14() -> None:
    cache = make(16, layers=1, trailing=[(6,)])
    cache.write_bytes(0, 0, 8, 8, rows([-1] * 8, 6))
    values = np.arange(30, dtype=np.float32).reshape(5, 6)
    before = lk.stats().bytes_moved
    cache.append(0, values)
    assert lk.stats().bytes_moved - before == 5 * 6 * 4
    flat = cache.slot_storage(0, 0).to_numpy().reshape(-1)
    assert flat[:30].tolist() == list(range(30))
    assert flat[30:48].tolist() == [0] * 18
    assert flat[48:].tolist() == [-1] * 48


def test_rows_of_any_rank_and_memory_order() -> None:
    cache = make(layers=1, trailing=[(2, 3), ()])
    wide = np.arange(18, dtype=np.float32).reshape(3, 2, 3)
    flat = np.arange(3, dtype=np.float32)
    cache.append(0, np.asfortranarray(wide), flat.astype(">f4"))
    cache.append(0, wide[::-1], np.repeat(flat, 2)[::2])
    a, b = cache.live(0)
    np.testing.assert_array_equal(a, np.concatenate([wide, wide[::-1]]))
    assert b.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("device", PLACES)
def test_a_step_is_open_from_the_first_layer_to_the_last(device: str) -> None:
    cache = make(device=device)
    append_rows(cache, [1])
    latent, rope = cache.append(1, *pair([2]))
    assert (line(latent), line(rope)) == ([1, 2], [101, 102])
    assert len(cache) == 1
    assert line(cache.live(1)[0]) == [1]
    with refused(cache, lk.GraphError, "append(layer 1)", "layers [1]", "abort_step()"):
        cache.append(1, *pair([3]))
    with refused(cache, lk.GraphError, "got 2 rows while a step of 1 rows is open"):
        cache.append(0, *pair([3, 4]))
    with refused(cache, lk.GraphError, "append_all", "open step"):
        cache.append_all(*([x] * 2 for x in pair([3])))
    cache.append(0, *pair([3]))
    assert len(cache) == 2
    assert line(cache.live(0)[1]) == [101, 103]


@pytest.mark.parametrize(
    "drop",
    [
        lambda c: c.abort_step(),
        lambda c: c.reset(),
        lambda c: c.savepoint().rollback(),
    ],
)
def test_a_dropped_step_was_never_counted(drop: Any) -> None:
    cache = make()
    append_rows(cache, [1, 2])
    cache.append(0, *pair([7]))
    drop(cache)
    length = len(cache)
    for layer in (1, 0):
        cache.append(layer, *pair([9]))
    assert len(cache) == length + 1
    assert line(cache.live(0)[0]) == line(cache.live(1)[0]) == [*[1, 2][:length], 9]


def test_views_on_the_host_are_zero_copy_and_read_only() -> None:
    cache = make()
    append_rows(cache, [1, 2])
    latent, _ = cache.live(0)
    assert not latent.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        latent.setflags(write=True)
    assert np.shares_memory(latent, cache.slot_storage(0, 0).array)
    cache.write_bytes(0, 0, 0, 1, rows([8], 4))
    assert line(latent) == [8, 2]
    held, _ = cache.append(0, *pair([3]))
    cache.append(1, *pair([3]))
    append_rows(cache, [4])
    assert line(held) == [8, 2, 3]


def test_reads_of_a_device_are_copies() -> None:
    cache = make(device="sim:0")
    append_rows(cache, [1, 2])
    latent, _ = cache.live(0)
    cache.write_bytes(0, 0, 0, 1, rows([8], 4))
    assert line(latent) == [1, 2]
    assert line(cache.live(0)[0]) == [8, 2]


def test_a_torn_slot_is_not_read() -> None:
    cache = make()
    append_rows(cache, [1])
    store = cache.slot_storage(0, 1)
    with pytest.raises(ZeroDivisionError), store.write():
        raise ZeroDivisionError
    with pytest.raises(lk.StorageTornError):
        cache.live(0)
    assert line(cache.live(1)[1]) == [101]


def test_a_cache_may_append_its_own_rows() -> None:
    cache = make()
    append_rows(cache, [1, 2, 3])
    cache.append_all(*zip(*(cache.live(i) for i in range(2)), strict=True))
    assert line(cache.live(1)[1]) == [101, 102, 103] * 2


@pytest.mark.parametrize("device", PLACES)
def test_exactly_capacity_rows_fit_d2_d3(device: str) -> None:
    cache = make(device=device)
    append_rows(cache, [0, 1, 2, 3, 4])
    for n in (4, 9):
        with refused(cache, lk.RangeError, f"need {5 + n} <= capacity 8"):
            append_rows(cache, [1] * n)
        with refused(cache, lk.RangeError, f"got rows 5..{5 + n}, need {5 + n} <= capacity 8"):
            cache.append(1, *pair([1] * n))
    for value in (5, 6, 7):
        append_rows(cache, [value])
    with refused(cache, lk.RangeError, "got rows 8..9, need 9 <= capacity 8"):
        append_rows(cache, [8])
    before = lk.stats().kernels_run
    append_rows(cache, [])
    cache.write_bytes(0, 0, 8, 0, b"")
    assert lk.stats().kernels_run == before  # d5: no rows, no kernel
    assert line(cache.live(1)[0]) == list(range(8))


def test_a_thousand_appends_are_one_compiled_plan_q1() -> None:
    cache = make(1000)
    append_rows(cache, [0])
    before = lk.stats()
    for value in range(1, 200):
        append_rows(cache, [value])
    after = lk.stats()
    assert after.plans_built == before.plans_built
    assert after.kernels_run == before.kernels_run + 199 * 4
    assert line(cache.live(1)[0]) == list(range(200))


LATENT, ROPE = pair([7])


@pytest.mark.parametrize(
    ("latent", "rope", "error", "words"),
    [
        (LATENT[0], ROPE, lk.ShapeError, "got slot 0 f32[4], need f32[n,4]"),
        (LATENT[None], ROPE, lk.ShapeError, "got slot 0 f32[1,1,4]"),
        (LATENT, ROPE[:, :1], lk.ShapeError, "got slot 1 f32[1,1], need f32[n,2]"),
        (ROPE, LATENT, lk.ShapeError, "got slot 0 f32[1,2]"),
        (LATENT, rows([1, 2], 2), lk.ShapeError, "got 1 rows of slot 0 and 2 of slot 1"),
        (LATENT.astype(np.float64), ROPE, lk.DTypeError, "got slot 0 f64[1,4], need f32"),
        (LATENT, ROPE.astype(np.float16), lk.DTypeError, "got slot 1 f16[1,2], need f32"),
        (LATENT.astype(np.uint16), ROPE, lk.DTypeError, "uint16"),
        (LATENT.tolist(), ROPE, lk.DTypeError, "got slot 0 f64[1,4]"),
        (None, ROPE, lk.DTypeError, "need"),
        (LATENT, "text", lk.DTypeError, "need"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    latent: Any, rope: Any, error: type[lk.LazyKvError], words: str
) -> None:
    for device in PLACES:
        cache = make(device=device)
        append_rows(cache, [1, 2])
        with refused(cache, error, words):
            cache.append(0, latent, rope)
        other = "different numbers of rows" if "rows of slot" in words else words
        with refused(cache, error, other):
            cache.append_all([LATENT, latent], [ROPE, rope])


@pytest.mark.parametrize(
    ("layer", "error", "words"),
    [
        (2, lk.RangeError, "append(layer 2): got an absent layer, need a populated one in 0..1"),
        (-1, lk.RangeError, "append(layer -1)"),
        (0.0, lk.DTypeError, "LatentKvCache.append: got layer 0.0"),
        (None, lk.DTypeError, "got layer None"),
    ],
)
def test_layers_that_are_not_there(layer: Any, error: type[lk.LazyKvError], words: str) -> None:
    cache = make()
    append_rows(cache, [1])
    with refused(cache, error, words):
        cache.append(layer, LATENT, ROPE)
    with refused(cache, error):
        cache.live(layer)
    with refused(cache, error):
        cache.write_bytes(layer, 0, 0, 1, bytes(16))


def test_append_all_checks_everything_before_the_first_write() -> None:
    cache = make()
    append_rows(cache, [1])
    with refused(cache, lk.ShapeError, "got 1 slot 0 and 2 slot 1, need 2 of each"):
        cache.append_all([LATENT], [ROPE] * 2)
    with refused(cache, lk.ShapeError, "LatentKvCache.append_all: got rows for 1 slots"):
        cache.append_all([LATENT] * 2)
    with refused(cache, lk.ShapeError, "got rows for 3 slots, need them for all 2"):
        cache.append_all([LATENT] * 2, [ROPE] * 2, [ROPE] * 2)
    with refused(cache, lk.DTypeError, "append_all(layer 1)", "got slot 1 f16"):
        cache.append_all([LATENT] * 2, [ROPE, ROPE.astype(np.float16)])


# write_bytes


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "u8"])
def test_every_window_lands_and_nothing_else_changes(dtype: str, device: str) -> None:
    rng = np.random.default_rng(2)
    cache, size = make(5, dtype=dtype, device=device), lk.dtype(dtype).itemsize
    expected = {s: np.zeros((5, w * size), np.uint8) for s, (w,) in enumerate(MLA)}
    for start, n, slot in itertools.product(range(6), range(6), (0, 1)):
        if start + n > 5:
            continue
        data = rng.integers(0, 256, (n, MLA[slot][0] * size), np.uint8)
        cache.write_bytes(1, slot, start, n, data.tobytes(), device)
        expected[slot][start : start + n] = data
        for s in (0, 1):
            assert cache.slot_storage(1, s).to_numpy().tobytes() == expected[s].tobytes()
            assert not any(cache.slot_storage(0, s).to_numpy().tobytes())
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, 2, 0, 1, bytes(8)), lk.RangeError, "got slot 2, need 0 <= slot < 2"),
        ((0, -1, 0, 1, bytes(8)), lk.RangeError, "got slot -1"),
        ((0, None, 0, 1, bytes(8)), lk.DTypeError, "got slot None"),
        ((0, 0, -1, 1, bytes(16)), lk.RangeError, "got start -1"),
        ((0, 0, 0, -1, b""), lk.RangeError, "got n -1"),
        ((0, 0, 8, 1, bytes(16)), lk.RangeError, "got rows 8..9, need 9 <= capacity 8"),
        ((0, 0, 2**62, 2**62, b""), lk.RangeError, "<= capacity 8"),
        ((0, 0, 0, 1, bytes(15)), lk.ShapeError, "got 15 bytes, need 16 for f32[1,4]"),
        ((0, 1, 0, 2, bytes(32)), lk.ShapeError, "got 32 bytes, need 16 for f32[2,2]"),
        ((0, 0, 0, 1, None), lk.DTypeError, "got NoneType, need bytes or an array"),
        ((0, 0, 0, 1, bytes(16), "sim:1"), lk.BindingError, "got device sim:1"),
    ],
)
def test_write_bytes_refuses_whole(
    arguments: tuple[Any, ...], error: type[lk.LazyKvError], words: str
) -> None:
    for device in PLACES:
        cache = make(device=device)
        append_rows(cache, [1, 2])
        with refused(cache, error, "LatentKvCache.write_bytes", words):
            cache.write_bytes(*arguments)


def test_the_error_names_layer_and_slot_or_the_device() -> None:
    cache = make()
    with refused(cache, lk.BackendUnavailable, "tpu"):
        cache.write_bytes(0, 0, 0, 1, bytes(16), "tpu:0")
    with refused(cache, lk.ShapeError, "LatentKvCache.write_bytes(layer 1, slot 1): got 3 bytes"):
        cache.write_bytes(1, 1, 0, 1, bytes(3))
