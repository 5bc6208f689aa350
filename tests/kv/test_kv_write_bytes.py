"""KvCache.write_bytes: raw rows into the storage a plan already holds, against plain NumPy."""

import array
import itertools

import numpy as np
import pytest
from kv_state import append_rows, line, raw_bytes, refused, rows

import lazykv as lk
from lazykv.kv.rows import to_head_major, to_position_major

HEADS, DIM, CAPACITY = 2, 3, 7
DTYPES = ["f32", "f16", "bf16", "f64", "i8", "u8", "i32", "u32", "i64", "f8_e4m3", "f8_e5m2"]


@pytest.fixture
def make(make):
    def cache(dtype="f32", capacity=CAPACITY, layers=2, heads=HEADS, dim=DIM):
        return make(capacity, layers=layers, heads=heads, dim=dim, dtype=dtype)

    return cache


def raw(cache: lk.KvCache, layer: int, slot: int) -> np.ndarray:
    """The bytes of a slot, ``[heads, capacity, dim * itemsize]``."""
    store = cache.slot_storage(layer, slot)
    return np.frombuffer(raw_bytes(store), np.uint8).reshape(HEADS, store.shape[2], -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_window_of_every_dtype_lands_and_nothing_else_changes(make, place, dtype):
    rng = np.random.default_rng(7)
    cache, width = make(dtype), DIM * lk.dtype(dtype).itemsize
    expected = {s: np.zeros((HEADS, CAPACITY, width), np.uint8) for s in (0, 1)}
    for start, n, slot in itertools.product(range(CAPACITY + 1), range(CAPACITY + 1), (0, 1)):
        if start + n > CAPACITY:
            continue
        data = rng.integers(0, 256, (HEADS, n, width), np.uint8)
        cache.write_bytes(1, slot, start, n, data.tobytes(), place)
        expected[slot][:, start : start + n] = data
        for s in (0, 1):
            np.testing.assert_array_equal(raw(cache, 1, s), expected[s])
    assert not raw(cache, 0, 0).any()
    assert not raw(cache, 0, 1).any()
    assert len(cache) == 0


def sources() -> dict[str, object]:
    """The same two rows in every form that a caller may hold them in."""
    values = np.arange(HEADS * 2 * DIM, dtype="<f4").reshape(1, HEADS, 2, DIM)
    read_only = values.copy()
    read_only.flags.writeable = False
    return {
        "bytes": values.tobytes(),
        "bytearray": bytearray(values.tobytes()),
        "memoryview": memoryview(values),
        "read-only memoryview": memoryview(values.tobytes()),
        "strided memoryview": memoryview(np.frombuffer(values.tobytes(), np.uint8).repeat(2))[::2],
        "column-major memoryview": memoryview(np.asfortranarray(values)),
        "array": values,
        "array of bytes": np.frombuffer(values.tobytes(), np.uint8),
        "read-only array": read_only,
        "transposed array": values.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
        "every other row": np.repeat(values, 2, axis=2)[:, :, ::2],
        "reversed twice": np.ascontiguousarray(values[:, :, ::-1])[:, :, ::-1],
        "big-endian array": values.astype(">f4"),
        "array.array": array.array("f", values.reshape(-1).tolist()),
        "unaligned": np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:],
        "storage": lk.Storage.from_array(values),
    }


@pytest.mark.parametrize("name", sources())
def test_data_in_every_form(make, name):
    cache = make()
    cache.write_bytes(0, lk.KvSlot.V, 3, 2, sources()[name])
    want = np.zeros((1, HEADS, CAPACITY, DIM), np.float32)
    want[:, :, 3:5] = np.arange(HEADS * 2 * DIM).reshape(1, HEADS, 2, DIM)
    np.testing.assert_array_equal(cache.layers[0].v.to_numpy(), want)


def test_the_layout_is_head_major_i1(make):
    for positions, heads, dim in ((3, 2, 2), (2, 2, 2)):
        p, h, d = np.ogrid[:positions, :heads, :dim]
        by_position = (100 * p + 10 * h + d).astype(np.float32)
        cache = make(capacity=4, layers=1, heads=heads, dim=dim)
        head_major = by_position.transpose(1, 0, 2)[None]
        np.testing.assert_array_equal(to_head_major(by_position), head_major)
        np.testing.assert_array_equal(to_position_major(head_major), by_position)
        cache.write_bytes(0, 0, 1, positions, head_major)
        cache.cached_len = positions + 1
        live = cache.live(0)[0]
        for (i, j, k), value in np.ndenumerate(by_position):
            assert live[0, j, 1 + i, k] == value
        cache.reset()
        cache.append(0, head_major, head_major)
        np.testing.assert_array_equal(cache.live(0)[1][0].transpose(1, 0, 2), by_position)


def test_heads_are_a_whole_capacity_apart_i2(make):
    cache = make(capacity=8, layers=1, dim=1)
    cache.write_bytes(0, 0, 0, 8, np.full((1, 2, 8, 1), -1, np.float32))
    cache.write_bytes(0, 0, 2, 3, np.array([1, 2, 3, 11, 12, 13], np.float32))
    flat = cache.layers[0].k.to_numpy().reshape(-1)
    want = np.full(16, -1, np.float32)
    want[2:5], want[10:13] = [1, 2, 3], [11, 12, 13]
    np.testing.assert_array_equal(flat, want)


def test_bits_are_kept_h1(make):
    cache = make("bf16", 2, layers=1, heads=1, dim=2)
    values = np.array([1.0, -2.0]).astype(lk.bf16.numpy).reshape(1, 1, 1, 2)
    cache.append(0, values, values)
    assert cache.live(0)[0].dtype == lk.bf16.numpy
    assert raw_bytes(cache.layers[0].k)[:4] == b"\x80\x3f\x00\xc0"
    # A signalling NaN arrives as the bits that it is.
    nan = np.array([0x7FA01234, 0xFF812345], np.uint32)
    plain = make("f32", 2, layers=1, heads=1, dim=2)
    plain.write_bytes(0, 0, 0, 1, nan)
    assert raw_bytes(plain.layers[0].k)[:8] == nan.tobytes()


def test_item_sizes_h2(make):
    cache = make("bf16", 8, layers=1, dim=4)
    assert cache.layers[0].k.nbytes == 128
    assert memoryview(cache.layers[0].k.to_numpy().view(np.uint16)).nbytes == 128
    cache.write_bytes(0, 0, 0, 1, bytes(16))
    for wrong in (15, 17, 32):
        with refused(cache, lk.ShapeError, f"got {wrong} bytes, need 16", "bf16[1,2,1,4]"):
            cache.write_bytes(0, 0, 0, 1, bytes(wrong))


def test_bits_are_not_values_h3(make):
    cache = make("bf16", 2, layers=1, heads=1, dim=1)
    bits = np.full((1, 1, 1, 1), 0x3F80, np.uint16)
    with refused(cache, lk.DTypeError, "uint16"):
        cache.append(0, bits, bits)
    cache.write_bytes(0, 0, 0, 1, bits)
    assert float(cache.layers[0].k.to_numpy()[0, 0, 0, 0]) == 1.0


def test_values_are_rounded_on_the_way_in_never_by_the_cache_h4(make):
    cache = make("bf16", 1, layers=1, heads=1, dim=5)
    wide = np.array([3.14, 0.26914087, 1.01171875, 0, np.finfo(np.float32).max], np.float32)
    wide.view(np.uint32)[3] = 0x7F800001
    wide = wide.reshape(1, 1, 1, 5)
    with refused(cache, lk.DTypeError, "f32[1,1,1,5]", "need bf16"):
        cache.append(0, wide, wide)
    narrow = lk.realize(lk.Graph().const(wide).cast("bf16"))
    cache.append(0, narrow, narrow)
    stored = cache.live(0)[0].reshape(-1)
    bits = [hex(x) for x in stored.view(np.uint16)]
    assert bits[:3] + bits[4:] == ["0x4049", "0x3e8a", "0x3f82", "0x7f80"]
    assert np.isnan(stored.astype(np.float32)[3])


def test_the_caller_may_reuse_the_buffer_at_once_p4(make):
    cache = make(capacity=4096, layers=1, dim=64)
    shape = (1, 2, 4096, 64)
    for _ in range(20):
        data = np.ones(shape, np.float32)
        cache.write_bytes(0, 0, 0, 4096, data)
        data.fill(9)
        del data
        assert (cache.layers[0].k.to_numpy() == 1).all()


# What a write counts and what it leaves


def test_a_write_moves_its_slot_alone_and_no_length(make):
    cache = make()
    cache.cached_len = 2
    before = cache.alloc_id()
    storage = cache.slot_storage(1, 1)
    version = storage.version
    cache.write_bytes(1, 1, 4, 3, rows([1, 2, 3], HEADS, DIM))
    assert [(x.k_version, x.v_version) for x in cache.layers] == [(0, 0), (0, 1)]
    assert (storage.version, cache.slot_storage(1, 0).version) == (version + 1, version)
    assert (len(cache), cache.alloc_id()) == (2, before)
    assert cache.slot_storage(1, 1) is storage


def test_no_rows_change_no_byte_and_launch_nothing_d5(make):
    cache = make()
    append_rows(cache, [1, 2, 3])
    stored = [raw(cache, i, s).tobytes() for i in (0, 1) for s in (0, 1)]
    before = lk.stats()
    for start in (0, 3, CAPACITY):
        cache.write_bytes(0, 0, start, 0, b"")
    empty = np.zeros((1, HEADS, 0, DIM), np.float32)
    cache.append_all([empty] * 2, [empty] * 2)
    assert lk.stats().kernels_run == before.kernels_run
    assert [raw(cache, i, s).tobytes() for i in (0, 1) for s in (0, 1)] == stored
    assert cache.live(0)[0][:, :, 3:3].shape == (1, HEADS, 0, DIM)
    with refused(cache, lk.RangeError, "need 8 <= capacity 7"):
        cache.write_bytes(0, 0, CAPACITY + 1, 0, b"")


def test_every_position_shares_one_compiled_plan_q2(make):
    cache = make(capacity=1000, layers=1)
    row = rows([1], HEADS, DIM)
    cache.write_bytes(0, 0, 0, 1, row)
    before = lk.stats()
    for start in range(1000):
        cache.write_bytes(0, start % 2, start, 1, row)
    after = lk.stats()
    assert after.plans_built == before.plans_built
    assert after.plan_cache_hits == before.plan_cache_hits + 1000


# Refusals

ROW = np.zeros((1, HEADS, 1, DIM), np.float32)


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((2, 0, 0, 1, ROW), lk.RangeError, "write_bytes(layer 2, K)"),
        ((-1, 0, 0, 1, ROW), lk.RangeError, "write_bytes(layer -1, K)"),
        ((0, 2, 0, 1, ROW), lk.RangeError, "got slot 2, need 0 (K) or 1 (V)"),
        ((0, -1, 0, 1, ROW), lk.RangeError, "got slot -1"),
        ((0, 0, 7, 1, ROW), lk.RangeError, "got rows 7..8, need 8 <= capacity 7"),
        ((0, 0, 8, 0, b""), lk.RangeError, "need 8 <= capacity 7"),
        ((0, 0, 2**62, 1, ROW), lk.RangeError, "capacity 7"),
        ((0, 0, -1, 1, ROW), lk.RangeError, "got start -1"),
        ((0, 0, 0, -1, ROW), lk.RangeError, "got n -1"),
        ((0, 0, 0, 1, b""), lk.ShapeError, "got 0 bytes, need 24 for f32[1,2,1,3]"),
        ((0, 0, 0, 1, ROW.astype(np.float64)), lk.ShapeError, "got 48 bytes, need 24"),
        ((0, 0, 0, 2, ROW), lk.ShapeError, "got 24 bytes, need 48"),
        ((0, 0, 0, 1, [0.0] * 3), lk.DTypeError, "got list, need bytes or an array"),
        ((0, 0, 0, 1, "x" * 24), lk.DTypeError, "got str"),
        ((0, 0, 0, 1, None), lk.DTypeError, "got NoneType"),
        ((0, 0, 0, 1, np.array([None] * 3)), lk.DTypeError, "need bytes or numbers"),
        ((0.0, 0, 0, 1, ROW), lk.DTypeError, "got layer 0.0"),
        (("0", 0, 0, 1, ROW), lk.DTypeError, "got layer '0'"),
        ((0, "K", 0, 1, ROW), lk.DTypeError, "got slot 'K'"),
        ((0, 0, 0.5, 1, ROW), lk.DTypeError, "got start 0.5"),
        ((0, 0, 0, True, ROW), lk.DTypeError, "got n True"),
        ((0, 0, 0, 1, ROW, "nowhere:0"), lk.BackendUnavailable, "nowhere"),
    ],
)
def test_a_bad_write_is_refused_before_anything_changes(make, args, error, words):
    cache = make()
    append_rows(cache, [1, 2])
    with refused(cache, error, "KvCache.write_bytes" if "nowhere" not in words else "", words):
        cache.write_bytes(*args)


def test_another_device_than_the_caches_own_is_refused(make, layer, place):
    backend = lk.device("cpu").backend
    elsewhere = lk.Device(lk.DeviceLocation("other:3"), backend)
    cache = make()
    with refused(cache, lk.BindingError, f"got device other:3, need the cache's own {place}"):
        cache.write_bytes(0, 0, 0, 1, ROW, elsewhere)
    # A replaced layer still lies where it lies, though the cache as a whole proves nothing.
    cache.set_layer(0, layer(7, HEADS, DIM))
    cache.write_bytes(0, 0, 0, 1, ROW, place)


def test_a_cache_without_capacity_is_refused():
    cache = lk.KvCache.with_dims(1, HEADS, DIM)
    with refused(cache, lk.GraphError, "without fixed capacity", "with_capacity", "set_layer"):
        cache.write_bytes(0, 0, 0, 1, ROW)
    with refused(cache, lk.GraphError, "without fixed capacity"):
        cache.append(0, ROW, ROW)
    with refused(cache, lk.GraphError, "without fixed capacity"):
        cache.append_all([ROW], [ROW])
    with refused(cache, lk.GraphError, "without fixed capacity"):
        cache.append_all([], [])


def test_a_torn_slot_is_refused_until_it_is_rewritten_whole(make, place):
    cache = make()
    append_rows(cache, [1, 2])
    storage, fives = cache.layers[0].k, rows([5] * CAPACITY, HEADS, DIM)
    fill = lk.device(place).backend.copy_in

    def fail_midway():
        with storage.write() as a:
            fill(a, fives)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_midway()
    for call in (lambda: cache.live(0), lambda: cache.append(0, ROW, ROW),
                 lambda: cache.write_bytes(0, 0, 0, 1, ROW)):  # fmt: skip
        with refused(cache, lk.StorageTornError, "need it rewritten whole"):
            call()
    assert line(cache.live(1)[0]) == [1, 2]
    with storage.write() as a:
        fill(a, fives)
    assert line(cache.live(0)[0]) == [5, 5]


def test_a_write_inside_a_read_is_refused_p2(make):
    cache = make()
    with cache.layers[0].k.read(), refused(cache, lk.StorageLockError, "read to end first"):
        cache.write_bytes(0, 0, 0, 1, ROW)
    cache.write_bytes(0, 0, 0, 1, ROW)


# Bounds of the graph forms of the same write


@pytest.mark.parametrize("form", ["fixed", "symbolic", "device-held"])
def test_no_start_is_ever_clamped_d1(make, form):
    cache = make(capacity=8, layers=1, heads=1, dim=1)
    cache.write_bytes(0, 0, 0, 8, np.array([0, 1, 2, 3, 4, 5, -1, -1], np.float32))
    g, pos, offset = lk.Graph(), lk.Sym("pos"), np.asarray(6)
    dest, src = g.placeholder((1, 1, 8, 1), "f32"), g.const(np.full((1, 1, 3, 1), 9, np.float32))
    store = cache.slot_storage(0, 0)

    def write():
        if form == "fixed":
            target = dest.at[:, :, 6:9].set(src)
        elif form == "symbolic":
            target = dest.at[:, :, pos : pos + 3].set(src)
        else:
            target = dest.write_slice_at(src, 2, g.const(offset))
        lk.realize(target, {dest: store}, {pos: 6})

    with refused(cache, lk.RangeError, "6"):
        write()
