"""The bytes of a paged pool: single blocks, copies on write, torn buffers, making one."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kv_state import raw_bytes
from paged_state import (
    failures,
    feed,
    make_pool,
    opened,
    random_bytes,
    read,
    refused,
    slots,
    storages,
    tables,
    tear,
)

import lazykv as lk
from lazykv.kv.rows import to_head_major, to_position_major

DTYPES = ["f32", "bf16", "f16", "i8"]


@pytest.fixture
def make(place) -> Callable[..., lk.DeviceKvPool]:
    return lambda *sizes, **options: make_pool(*sizes, place=place, **options)


# Single blocks


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_come_back_as_they_went(make, dtype):
    """Random bits, so NaNs of every kind are among them."""
    pool = make(3, 4, dtype=dtype)
    want: dict[Any, bytes] = {}
    for n, (at, block) in enumerate([(at, b) for at in slots(pool) for b in (2, 0, 1)]):
        want[at, block] = random_bytes(n, pool.geometry.slot_block_bytes)
        pool.write_block_bytes(*at, block, want[at, block])
    for (at, block), data in want.items():
        assert pool.read_block_bytes(*at, block) == data
    for at in slots(pool):
        whole = pool.slot_storage(*at)
        assert raw_bytes(whole) == b"".join(want[at, b] for b in range(3))
        assert whole.to_numpy().shape == pool.pool_shape


def test_a_new_pool_holds_zeros(make):
    pool = make(2, 3, dtype="bf16")
    assert {raw_bytes(s) for s in storages(pool)} == {bytes(2 * 3 * 2 * 4 * 2)}


def test_bytes_are_taken_in_any_form(make):
    pool = make(2, 2)
    data = random_bytes(0, pool.geometry.slot_block_bytes)
    little = np.frombuffer(data, "<f4").reshape(2, 2, 4)
    for n, form in enumerate([bytearray(data), memoryview(data), little, little.astype(">f4"),
                              np.asfortranarray(little), np.frombuffer(data, "<u2")]):  # fmt: skip
        pool.write_block_bytes(n % 2, 1, 1, form)
        assert pool.read_block_bytes(n % 2, 1, 1) == data
        pool.write_block_bytes(n % 2, 1, 1, bytes(len(data)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_typed_forms_are_the_same_bytes(make, dtype):
    pool = make(3, 4, dtype=dtype)
    array = np.arange(-16, 16).reshape(4, 2, 4).astype(pool.dtype.numpy)
    pool.write_block(1, lk.KvSlot.V, 2, array)
    assert pool.read_block_bytes(1, 1, 2) == array.tobytes()
    got = pool.read_block(np.int64(1), np.uint8(1), np.int32(2))
    assert (got.dtype, got.shape) == (pool.dtype.numpy, (4, 2, 4))
    np.testing.assert_array_equal(got, array)
    got[...] = 0
    np.testing.assert_array_equal(pool.read_block(1, 1, 2), array)
    pool.write_block(0, 0, 0, np.asfortranarray(array)[::-1])
    np.testing.assert_array_equal(pool.read_block(0, 0, 0), array[::-1])
    assert not any(pool.read_block(*at, b).any() for at in slots(pool) for b in range(3)
                   if (at, b) not in (((1, 1), 2), ((0, 0), 0)))  # fmt: skip


@pytest.mark.parametrize(("positions", "heads"), [(3, 2), (2, 2)])
def test_blocks_are_position_major_i1(make, positions, heads):
    pool = make(2, positions, heads=heads, dim=2)
    rows = np.array([[[100 * p + 10 * h + d for d in range(2)] for h in range(heads)]
                     for p in range(positions)], np.float32)  # fmt: skip
    pool.write_block(0, 0, 1, rows)
    flat = np.frombuffer(pool.read_block_bytes(0, 0, 1), np.float32)
    assert flat[: 2 * heads].tolist() == [10 * h + d for h in range(heads) for d in range(2)]
    major = to_head_major(pool.read_block(0, 0, 1))
    assert major.shape == (1, heads, positions, 2)
    for p in range(positions):
        for h in range(heads):
            assert major[0, h, p].tolist() == [100 * p + 10 * h, 100 * p + 10 * h + 1]
    cache = lk.KvCache.with_capacity(1, heads, 2, positions, "f32")
    for slot in lk.KvSlot:
        cache.write_bytes(0, slot, 0, positions, major)
    cache.cached_len = positions
    np.testing.assert_array_equal(to_position_major(cache.live(0)[0]), rows)


def test_shapes_and_identity(make, place):
    pool, twin = make(5, 3, dtype="f16"), make(5, 3, dtype="f16")
    assert pool.pool_shape == (5, 3, 2, 4)
    assert pool.pool_shape_flat == (15, 2, 4)
    assert {(s.shape, s.dtype, str(s.location)) for s in storages(pool)} == {
        ((5, 3, 2, 4), lk.f16, place)
    }
    assert len({s.id for s in storages(pool) + storages(twin)}) == 8
    assert pool.alloc_id() != twin.alloc_id()
    assert [pool.rebind_slot(*at) for at in slots(pool)] == storages(pool)
    assert str(pool.rebind_location()) == str(pool.device_location()) == place
    assert [pool.slot_storage(i, s) for i, s in ((2, 0), (-1, 0), (0, 2), (0, -1))] == [None] * 4
    for bad in (None, "K", 1.0, True):
        for at in ((0, bad), (bad, 0)):
            with pytest.raises(lk.DTypeError, match=r"slot_storage: got .*, need a whole number"):
                pool.slot_storage(*at)
    assert isinstance(pool, lk.KvBlockPool)
    assert isinstance(pool, lk.KvRebindSource)
    assert repr(pool) == "DeviceKvPool(5 blocks of 3 tokens, 5 free, 0 sessions)"


def test_nothing_a_pool_does_changes_its_allocation(make):
    pool = make(6, 2)
    known = pool.alloc_id(), [s.id for s in storages(pool)]
    a = opened(pool, [1, 2, 3])
    b = pool.fork(a)
    feed(pool, b, [4])
    pool.restore(b, pool.evict(b).handle)
    pool.truncate(a, 1)
    pool.discard(b)
    pool.use_model(("other",))
    assert (pool.alloc_id(), [s.id for s in storages(pool)]) == known


def test_one_block_is_replaced_by_a_write_slice_of_its_ranges(make):
    pool = make(4, 2)
    for at in slots(pool):
        g = lk.Graph()
        dest = g.placeholder(pool.pool_shape, pool.dtype)
        rows = np.full((1, 2, 2, 4), 10 + sum(at), np.float32)
        lk.realize(
            dest.write_slice(g.const(rows), pool.block_write_ranges(2)),
            {dest: pool.slot_storage(*at)}, device=pool.device_location(),
        )  # fmt: skip
        np.testing.assert_array_equal(pool.read_block(*at, 2), rows[0])
        assert not any(pool.read_block(*at, b).any() for b in (0, 1, 3))
    with pytest.raises(lk.BadBlockIndex, match="block_write_ranges: got block 4, need 0 <= block"):
        pool.block_write_ranges(4)


BLOCK = np.zeros((4, 2, 4), np.float32)
BAD_BLOCKS = [
    (lambda p: p.write_block(2, 0, 0, BLOCK), lk.RangeError, "write_block: got layer 2"),
    (lambda p: p.write_block(-1, 0, 0, BLOCK), lk.RangeError, "got layer -1"),
    (lambda p: p.write_block(0, 2, 0, BLOCK), lk.RangeError, "got slot 2"),
    (lambda p: p.write_block(0, "k", 0, BLOCK), lk.DTypeError, "slot"),
    (lambda p: p.write_block(0, 0, 6, BLOCK), lk.BadBlockIndex, "got block 6, need 0 <= block < 6"),
    (lambda p: p.write_block(0, 0, -1, BLOCK), lk.BadBlockIndex, "got block -1"),
    (lambda p: p.write_block(0, 0, 1.0, BLOCK), lk.DTypeError, "block"),
    (lambda p: p.write_block(0, 0, 0, BLOCK[:3]), lk.ShapeError, "got 3 rows, need 4"),
    (lambda p: p.write_block(0, 0, 0, BLOCK[None]), lk.ShapeError, "need f32[n,2,4]"),
    (lambda p: p.write_block(0, 0, 0, BLOCK.reshape(4, 4, 2)), lk.ShapeError, "need f32[n,2,4]"),
    (lambda p: p.write_block(0, 0, 0, BLOCK.astype("f8")), lk.DTypeError, "need f32"),
    (lambda p: p.write_block(0, 0, 0, BLOCK.view("i4")), lk.DTypeError, "need f32"),
    (lambda p: p.write_block(0, 0, 0, None), lk.DTypeError, "dtype('O')"),
    (lambda p: p.write_block_bytes(0, 0, 0, bytes(127)), lk.ShapeError, "got 127 bytes, need 128"),
    (lambda p: p.write_block_bytes(0, 0, 0, bytes(129)), lk.ShapeError, "got 129 bytes, need 128"),
    (lambda p: p.write_block_bytes(0, 0, 0, b""), lk.ShapeError, "got 0 bytes"),
    (lambda p: p.write_block_bytes(0, 0, 0, "text"), lk.DTypeError, "got str"),
    (lambda p: p.write_block_bytes(9, 0, 0, bytes(128)), lk.RangeError, "got layer 9"),
    (lambda p: p.read_block(0, 0, 6), lk.BadBlockIndex, "read_block: got block 6"),
    (lambda p: p.read_block(0, 3, 0), lk.RangeError, "read_block: got slot 3"),
    (lambda p: p.read_block_bytes(2, 0, 0), lk.RangeError, "read_block_bytes: got layer 2"),
    (lambda p: p.ensure_writable_block(None, 0), lk.UnknownSession, "ensure_writable_block: got"),
    (
        lambda p: p.splice_prefix_shifted(None, None, [0.5, 0.1]),
        lk.UnknownPrefix, "splice_prefix_shifted: got None",
    ),
    (lambda p: p.materialize_block_table(None), lk.DTypeError, "got None, need a list of sessions"),
    (lambda p: p.materialize_block_table(5), lk.DTypeError, "got 5, need a list of sessions"),
    (lambda p: p.begin_step(None, 1), lk.DTypeError, "begin_step: got None, need a list of"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BAD_BLOCKS)))
def test_a_bad_block_is_refused_and_nothing_changes(make, case):
    pool = make()
    session = opened(pool, range(8))
    pool.publish(session, range(8))
    call, error, words = BAD_BLOCKS[case]
    with refused(pool, error, words):
        call(pool)


# Copy on write


@pytest.mark.parametrize("dtype", DTYPES)
def test_forks_write_apart_l4(make, dtype):
    pool = make(dtype=dtype)
    a = opened(pool, [0, 1, 2, 3, 4, 5])
    b = pool.fork(a)
    assert feed(pool, b, [16]) == [2]
    feed(pool, a, [17])
    assert read(pool, a) == [0, 1, 2, 3, 4, 5, 17]
    assert read(pool, b) == [0, 1, 2, 3, 4, 5, 16]
    (first, tail), (same, other) = pool.session_block_table(a), pool.session_block_table(b)
    assert (first, tail != other) == (same, True)
    assert [pool.block_refcount(block) for block in (first, tail, other)] == [2, 1, 1]
    pool.check()


def test_a_copy_moves_every_byte_of_every_layer_and_slot(make):
    """Rows past the last token too: what they hold is nobody's, but it is the block's."""
    pool = make(4, 2, layers=3, dtype="bf16")
    a = pool.open()
    pool.append(a, 3)
    want = {}
    for n, (at, block) in enumerate([(at, b) for at in slots(pool) for b in range(4)]):
        want[at, block] = random_bytes(n, pool.geometry.slot_block_bytes)
        pool.write_block_bytes(*at, block, want[at, block])
    b = pool.fork(a)
    assert pool.ensure_writable_block(b, 1) == 2
    for at in slots(pool):
        assert pool.read_block_bytes(*at, 2) == want[at, 1]
        assert [pool.read_block_bytes(*at, n) for n in (0, 1, 3)] == [
            want[at, n] for n in (0, 1, 3)
        ]
    assert pool.session_block_table(b) == [0, 2]
    assert pool.stats.blocks_copied == 1


def test_a_block_made_writable_is_nobody_elses(make):
    pool = make()
    a = opened(pool, range(8))
    b, c = pool.fork(a), pool.fork(a)
    block = pool.ensure_writable_block(b, 0)
    pool.write_block(0, 0, block, np.full((4, 2, 4), -1, np.float32))
    for at in slots(pool)[1:]:
        np.testing.assert_array_equal(pool.read_block(*at, block), pool.read_block(*at, 0))
    assert read(pool, a) == read(pool, c) == list(range(8))
    assert pool.ensure_writable_block(b, 0) == block  # it is b's own now
    assert pool.stats.blocks_copied == 1
    with refused(pool, lk.BadBlockIndex, "got block index 2, need 0 <= index < 2"):
        pool.ensure_writable_block(b, 2)


@pytest.mark.parametrize("dtype", ["f32", "i8"])
def test_keys_and_values_stay_apart_when_sequences_are_reordered_and_repeated_j1(make, dtype):
    pool = make(12, 2, layers=1, heads=1, dim=2, dtype=dtype)

    def values(sessions: list[lk.SessionHandle]) -> list[list[list[int]]]:
        rows = []
        for s in sessions:
            block = pool.session_block_table(s)[0]
            rows.append([int(pool.read_block(0, slot, block)[0, 0, 0]) for slot in lk.KvSlot])
        return [[k for k, _ in rows], [v for _, v in rows]]

    two = []
    for k, v in ((1, 11), (2, 12)):
        two.append(pool.open())
        pool.append(two[-1], 1)
        (block,) = pool.session_block_table(two[-1])
        for slot, x in ((0, k), (1, v)):
            pool.write_block(0, slot, block, np.full((2, 1, 2), x, pool.dtype.numpy))
    swapped = [pool.fork(two[n]) for n in (1, 0)]
    repeated = [pool.fork(s) for s in two for _ in range(2)]
    for s in swapped + repeated:
        pool.append(s, 1)  # every tail but the last holder's is copied now
    assert values(swapped) == [[2, 1], [12, 11]]
    assert values(repeated) == [[1, 1, 2, 2], [11, 11, 12, 12]]
    assert values(two) == [[1, 2], [11, 12]]
    assert pool.stats.blocks_copied == 6


@pytest.mark.parametrize("verb", ["append", "ensure_writable_block", "begin_step"])
def test_a_copy_that_fails_midway_leaves_the_pool_as_it_was(make, verb):
    pool = make(8, 4)
    warm = opened(pool, [1])
    feed(pool, pool.fork(warm), [2])
    a = opened(pool, range(6))
    b = pool.fork(a)
    act = {
        "append": lambda: pool.append(b, 1),
        "ensure_writable_block": lambda: pool.ensure_writable_block(b, 1),
        "begin_step": lambda: pool.begin_step([warm, b], 1),
    }[verb]
    plan = pool._moves._copy
    before, rows = tables(pool), {s: read(pool, s) for s in (warm, a, b)}
    ways = list(failures(pool, plan))
    assert len(ways) >= 8
    for failure, seen in ways:
        with failure, pytest.raises(seen):
            act()
        assert tables(pool) == before
        assert not any(s.torn for s in storages(pool))
        assert {s: read(pool, s) for s in (warm, a, b)} == rows
        pool.check()
    feed(pool, b, [20])
    assert (read(pool, b), read(pool, a)) == ([*range(6), 20], list(range(6)))


# Truncation, and rows that were rejected


def test_shorter_and_longer_a1(make):
    pool = make()
    session = opened(pool, [0, 1, 2])
    pool.truncate(session, 5)
    assert read(pool, session) == [0, 1, 2]
    with refused(pool, lk.RangeError, "truncate: got n -5, need n >= 0"):
        pool.truncate(session, -5)
    pool.truncate(session, 0)
    assert (read(pool, session), pool.session_blocks(session)) == ([], 0)
    feed(pool, session, [9])
    assert read(pool, session) == [9]


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_rejected_drafts_are_overwritten_a3(make, size):
    pool = make(16, size)
    session = opened(pool, [0, 1, 2, 3, 4])
    feed(pool, session, [20, 21, 22, 23])
    pool.truncate(session, 6)
    feed(pool, session, [31])
    assert read(pool, session) == [0, 1, 2, 3, 4, 20, 31]


# A buffer that somebody else tore


@pytest.mark.parametrize("which", [0, 3])
def test_a_torn_buffer_stays_refused_until_it_is_rewritten(make, which):
    pool = make(8, 2)
    a, alone, evicted = opened(pool, [0, 1, 2]), opened(pool, [5, 6]), opened(pool, [9, 10, 11])
    b, empty, handle = pool.fork(a), pool.open(), pool.evict(evicted).handle
    prefix = pool.register_prefix(a, 1)
    pool.publish(a, [0, 1])
    torn, at = storages(pool)[which], slots(pool)[which]
    tear(torn)
    block = np.zeros((2, 2, 4), np.float32)
    for act in (
        lambda: pool.read_block(*at, 0), lambda: pool.read_block_bytes(*at, 5),
        lambda: pool.write_block(*at, 0, block),
        lambda: pool.write_block_bytes(*at, 0, block.tobytes()),
        lambda: pool.append(b, 1), lambda: pool.append(empty, 1), lambda: pool.evict(alone),
        lambda: pool.ensure_writable_block(b, 0), lambda: pool.restore(evicted, handle),
        lambda: pool.splice_prefix_shifted(prefix, empty, [1.0, 0.5]),
        lambda: pool.begin_step([alone, b], 1),
    ):  # fmt: skip
        with refused(pool, lk.StorageTornError, "need it rewritten whole"):
            act()
        assert [s.torn for s in storages(pool)] == [n == which for n in range(4)]
    backend = lk.device(torn.location).backend
    with torn.write() as memory:
        backend.copy_in(memory, backend.copy_out(memory))
    feed(pool, b, [20])
    pool.restore(evicted, handle)
    rows = [[0, 1, 2], [0, 1, 2, 20], [5, 6], [9, 10, 11]]
    assert [read(pool, s) for s in (a, b, alone, evicted)] == rows


# Making a pool


def test_elements_are_of_the_dtypes_size():
    for dtype, size in (("f32", 2), ("bf16", 4), ("i8", 2)):
        with pytest.raises(
            lk.DTypeError, match=rf"got {dtype} for elem_size {size}, need elements"
        ):
            lk.DeviceKvPool(lk.KvGeometry(1, 2, 2, 1, 2, size), dtype)


@pytest.mark.parametrize(
    ("geometry", "dtype", "device", "error", "words"),
    [
        (None, "f32", "cpu", lk.PoolError, "got NoneType, need a KvGeometry"),
        (lk.KvGeometry(1, 2, 2, 1, 2, 4), "f9", "cpu", lk.DTypeError, "f9"),
        (
            lk.KvGeometry(1, 2, 2, 1, 2, 4),
            "f32",
            "cuda:77",
            lk.BackendUnavailable,
            "cuda",
        ),
        (lk.KvGeometry(1, 2**32 - 1, 1, 1, 1, 1), "i8", "cpu", lk.RangeError, "need < 4294967295"),
        (lk.KvGeometry(2**17, 1, 1, 1, 1, 1), "i8", "cpu", lk.RangeError, "n_layers 131072"),
    ],
)
def test_what_cannot_be_a_pool_is_refused_before_anything_is_made(
    geometry, dtype, device, error, words
):
    before = lk.stats().allocations
    with pytest.raises(error, match=words):
        lk.DeviceKvPool(geometry, dtype, device)
    assert lk.stats().allocations == before


def test_a_pool_that_no_memory_holds_costs_nothing(place):
    """Nothing is kept for each of its million blocks before there are bytes."""
    geometry = lk.KvGeometry(1, 2**20, 2**10, 2**10, 2**18, 4)
    before = lk.stats().allocations
    tracemalloc.start()
    try:
        with pytest.raises(lk.OutOfMemory, match=f"got no memory for {2**60} bytes"):
            lk.DeviceKvPool(geometry, "f32", place)
        # NumPy counts what it asked for, and did not get, as well.
        assert tracemalloc.get_traced_memory()[1] % 2**60 < 2**20
    finally:
        tracemalloc.stop()
    assert lk.stats().allocations == before


@pytest.mark.parametrize(
    ("width", "error", "words"),
    [
        (2**59, lk.OutOfMemory, f"got no memory for {2**62} bytes"),
        (2**61, lk.ShapeError, f"got u32[2,{2**61}], need fewer than 2**63 bytes"),
        (2**90, lk.ShapeError, f"got u32[2,{2**90}], need fewer than 2**63 bytes"),
        (-1, lk.RangeError, "got max_blocks -1"),
        ("8", lk.DTypeError, "got max_blocks '8'"),
    ],
)
def test_a_table_of_a_width_that_cannot_be(make, width, error, words):
    pool = make()
    sessions = [opened(pool, [1]), opened(pool, [2])]
    with refused(pool, error, "materialize_block_table", words):
        pool.materialize_block_table(sessions, width)


@pytest.mark.parametrize("store", [5, "folder", object(), lk.MemoryBlockStore, {}])
def test_a_store_can_put_get_and_delete(store):
    before = lk.stats().allocations
    with pytest.raises(
        lk.DTypeError, match=r"DeviceKvPool: got store .*, need put, get and delete"
    ):
        lk.DeviceKvPool(lk.KvGeometry(1, 2, 2, 1, 2, 4), "f32", store=store)
    assert lk.stats().allocations == before


def test_a_pool_that_does_not_fit_leaves_nothing_behind(monkeypatch):
    """The fourth of six buffers has no room."""
    place = lk.DeviceLocation("sim:1")
    backend = lk.device(place).backend
    gc.collect()
    used = backend.used_bytes(place)
    geometry = lk.KvGeometry(3, 8, 4, 2, 4, 4)
    one = geometry.total_bytes // 6
    monkeypatch.setattr(backend, "limit_bytes", used + 3 * one + one // 2)
    before = lk.stats().allocations
    with pytest.raises(lk.OutOfMemory, match=f"got no memory for {one} bytes"):
        lk.DeviceKvPool(geometry, "f32", place)
    assert lk.stats().allocations == before + 3
    gc.collect()
    assert backend.used_bytes(place) == used
    monkeypatch.setattr(backend, "limit_bytes", used + 6 * one)
    pool = lk.DeviceKvPool(geometry, "f32", place)
    assert backend.used_bytes(place) == used + geometry.total_bytes
    del pool
    gc.collect()
    assert backend.used_bytes(place) == used
