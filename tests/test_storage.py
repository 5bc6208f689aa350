import array
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import lazykv as lk
from lazykv.dtypes import to_raw
from lazykv.errors import (
    BackendUnavailable,
    BindingError,
    DTypeError,
    OutOfMemory,
    ShapeError,
    StorageLockError,
    StorageTornError,
)
from lazykv.storage import acquire_all, as_host_bytes, overlapping, release_all


def storage(n: int = 4) -> lk.Storage:
    return lk.Storage.from_array(np.arange(n, dtype=np.float32))


def run_threads(*functions: Callable[[], None], timeout: float = 20) -> None:
    """Run functions at once; what one of them raises is raised here."""
    failures: list[BaseException] = []

    def guarded(f: Callable[[], None]) -> None:
        try:
            f()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout)
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    if failures:
        raise failures[0]


# Identity and versions


def test_ST1_ids_are_never_reused() -> None:
    ids = set()
    for _ in range(1000):
        ids.add(int(storage(1).id))
    assert len(ids) == 1000
    assert 0 not in ids


def test_identity_equality_and_repr() -> None:
    a, b = storage(), storage()
    assert a != b
    assert len({a, b, a}) == 2
    assert bool(lk.Storage.from_array(np.zeros(0)))
    assert repr(a) == f"Storage(id={a.id}, f32[4] on cpu)"
    assert (a.nbytes, a.shape, a.dtype, str(a.location), len(a)) == (16, (4,), lk.f32, "cpu", 4)
    with pytest.raises(ShapeError, match="rank-0"):
        len(lk.Storage.from_array(np.float32(1)))


@pytest.mark.parametrize("field", ["id", "dtype", "shape", "location", "nbytes", "spec"])
def test_ST1_what_a_storage_is_never_changes(field: str) -> None:
    store, other = storage(), lk.Storage.from_array(np.zeros((2, 2), np.int8), "sim:0")
    before = getattr(store, field)
    with pytest.raises(AttributeError):
        setattr(store, field, getattr(other, field))
    with pytest.raises(AttributeError):
        delattr(store, field)
    assert getattr(store, field) == before


def test_from_array_copies_and_to_numpy_is_fresh() -> None:
    data = np.arange(6, dtype=np.int32).reshape(2, 3).T
    store = lk.Storage.from_array(data)
    data[:] = -1
    first = store.to_numpy()
    first[:] = 9
    assert store.to_numpy().tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_odd_shapes_go_in_and_out(shape: tuple[int, ...]) -> None:
    data = np.ones(shape, ml_dtypes.bfloat16)
    out = lk.Storage.from_array(data).to_numpy()
    assert out.shape == shape
    assert out.dtype == data.dtype


def test_allocate_is_aligned_and_checked() -> None:
    store = lk.Storage.allocate((3, 5), "bf16")
    with store.read() as raw:
        assert raw.ctypes.data % 64 == 0
        assert raw.dtype == np.uint16
    with pytest.raises(ShapeError, match="extent -1"):
        lk.Storage.allocate((-1,), "f32")
    with pytest.raises(ShapeError, match="2\\*\\*63"):
        lk.Storage.allocate((2**40, 2**40), "f32")
    with pytest.raises(OutOfMemory, match=str(2**62)) as e:
        lk.Storage.allocate((2**62,), "u8")
    assert isinstance(e.value, MemoryError)
    with pytest.raises(BackendUnavailable, match="cuda"):
        lk.Storage.allocate((1,), "u8", "cuda:7")


def test_the_version_moves_with_every_completed_write() -> None:
    store = storage()
    with store.read():
        pass
    assert store.version == 0
    for n in range(3):
        with store.write() as a:
            a[0] = n
    assert store.version == 3
    with pytest.raises(RuntimeError, match="midway"), store.write():
        raise RuntimeError("midway")
    assert store.version == 3


# Torn and frozen


def fail_midway(store: lk.Storage) -> None:
    with store.write() as a:
        a[0] = 7
        raise KeyboardInterrupt


def test_ST1_a_torn_storage_refuses_reads_until_rewritten() -> None:
    store = storage()
    with pytest.raises(KeyboardInterrupt):
        fail_midway(store)
    assert "torn" in repr(store)
    with pytest.raises(StorageTornError, match="rewritten whole"):
        store.to_numpy()
    g = lk.Graph()
    p = g.placeholder((4,), "f32")
    with pytest.raises(StorageTornError):
        lk.realize(p + 1, {p: store})
    with store.write() as a:
        a[...] = 1
    assert store.to_numpy().tolist() == [1, 1, 1, 1]
    assert lk.realize(p + 1, {p: store}).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("dt", [lk.f32, lk.bf16, lk.u8], ids=str)
@pytest.mark.parametrize("place", ["cpu", "sim:0"])
def test_a_torn_storage_is_rewritten_as_the_docstring_says(dt: lk.DType, place: str) -> None:
    store = lk.Storage.allocate((2, 3), dt, place)
    with pytest.raises(RuntimeError), store.write():
        raise RuntimeError
    with pytest.raises(StorageTornError):
        store.to_numpy()
    data = np.arange(6).reshape(2, 3).astype(dt.numpy)
    with store.write() as a:
        lk.device(store.location).backend.copy_in(a, to_raw(data))
    assert store.to_numpy().tolist() == data.tolist()
    assert store.version == 1


def test_a_failed_reader_wedges_nobody() -> None:
    store = storage()
    with pytest.raises(ValueError, match="reader"), store.read():
        raise ValueError("reader")
    with store.write() as a:
        a[0] = 5
    assert store.to_numpy()[0] == 5


def test_frozen_storage_is_read_without_a_lock_and_never_written() -> None:
    data = np.arange(3.0)
    data.flags.writeable = False
    store = lk.Storage.wrap(data)
    assert "frozen" in repr(store)
    with pytest.raises(BindingError, match="read-only"), store.write():
        pass
    g = lk.Graph()
    p = g.placeholder((3,), "f64")
    with pytest.raises(BindingError, match="read-only"):
        lk.realize(p.zero_fill(), {p: store})
    assert store.to_numpy().tolist() == [0, 1, 2]
    assert store.version == 0


# What a reader gets


def try_to_write(a: np.ndarray) -> None:
    """By every way that NumPy knows."""
    for part in (a, a[...], a.reshape(-1), a.view(np.uint8)):
        with pytest.raises(ValueError, match="read-only"):
            part[...] = 5
        with pytest.raises(ValueError, match="WRITEABLE"):
            part.setflags(write=True)
    with pytest.raises(ValueError, match="read-only"):
        a += 1


@pytest.mark.parametrize("dt", ["f32", "bf16", "f8_e4m3", "bool", "i64"])
def test_ST1_nothing_is_written_under_a_read_lock(dt: str) -> None:
    store = lk.Storage.from_array(np.zeros(4, lk.dtype(dt).numpy))
    with store.read() as a:
        assert type(a) is np.ndarray
        assert np.shares_memory(a, store.array)
        assert (a.shape, a.dtype) == (store.array.shape, store.array.dtype)
        try_to_write(a)
    assert not store.to_numpy().any()
    with store.write() as a:
        a[...] = 1
    assert store.to_numpy().all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (2, 3)])
def test_a_reader_gets_the_shape_that_was_allocated(shape: tuple[int, ...]) -> None:
    store = lk.Storage.from_array(np.ones(shape, np.float32))
    with store.read() as a:
        assert (a.shape, a.flags.writeable) == (shape, False)
        assert a.tolist() == np.ones(shape).tolist()


def test_SCH7_a_snapshot_has_no_way_in() -> None:
    node = lk.Graph().const(np.arange(3, dtype=np.float32))
    assert node.data is not None
    with node.data.read() as a:
        try_to_write(a)
    try_to_write(np.asarray(node.data))
    try_to_write(np.from_dlpack(node.data))
    assert lk.realize(node).tolist() == [0, 1, 2]


# Locks


def test_P2_upgrade_is_a_named_error_and_not_a_deadlock() -> None:
    store = storage()

    def upgrade() -> None:
        own_read = pytest.raises(StorageLockError, match="inside this thread's own read")
        with store.read(), own_read, store.write():
            pass
        own_write = pytest.raises(StorageLockError, match="own write")
        with store.write(), own_write, store.write():
            pass

    run_threads(upgrade, timeout=1)
    assert not store.torn
    with store.write() as a:
        a[0] = 1


def test_reads_nest_also_inside_the_own_write() -> None:
    store = storage()
    with store.read(), store.read():
        pass
    with store.write() as a:
        a[0] = 8
        assert store.to_numpy()[0] == 8
    with store.write():
        pass


def test_P2_a_plan_that_writes_what_its_thread_reads_is_refused() -> None:
    store = storage()
    g = lk.Graph()
    p = g.placeholder((4,), "f32")
    with store.read(), pytest.raises(StorageLockError):
        lk.realize(p.zero_fill(), {p: store})
    assert store.to_numpy().tolist() == [0, 1, 2, 3]


def test_many_readers_at_once() -> None:
    store, inside = storage(), threading.Barrier(4)

    def read() -> None:
        with store.read():
            inside.wait(timeout=5)

    run_threads(*[read] * 4)


def test_P3_a_writer_is_not_starved_and_readers_see_whole_writes() -> None:
    store = lk.Storage.from_array(np.zeros(4096, np.int64))
    stop = threading.Event()
    waits: list[float] = []

    def read() -> None:
        while not stop.is_set():
            with store.read() as a:
                assert a.min() == a.max(), "half a write was seen"

    def write() -> None:
        try:
            for n in range(1, 20):
                start = time.perf_counter()
                with store.write() as a:
                    waits.append(time.perf_counter() - start)
                    a[:2048] = n
                    a[2048:] = n
        finally:
            stop.set()

    run_threads(read, read, read, read, write)
    assert len(waits) == 19
    assert max(waits) < 1


def test_a_reader_that_nests_is_not_blocked_by_a_waiting_writer() -> None:
    store, reading = storage(), threading.Event()

    def read() -> None:
        with store.read():
            reading.set()
            while len(store.lock.holds) < 2:
                time.sleep(0.001)
            with store.read():
                pass

    def write() -> None:
        reading.wait(5)
        with store.write() as a:
            a[0] = 1

    run_threads(read, write)


def test_writers_exclude_each_other() -> None:
    store = lk.Storage.from_array(np.zeros(1, np.int64))

    def add() -> None:
        for _ in range(300):
            with store.write() as a:
                value = int(a[0])
                time.sleep(0)
                a[0] = value + 1

    run_threads(add, add, add)
    assert store.to_numpy()[0] == 900
    assert store.version == 900


def test_what_acquire_all_took_is_ended_by_its_hold() -> None:
    a, b = storage(), storage()
    claims = [(a, True), (b, False)]
    b.torn = True
    with pytest.raises(StorageTornError):
        acquire_all(claims, 1)
    assert list(a.lock.holds) == list(b.lock.holds) == [1]
    release_all(claims, 1)
    b.torn = False
    acquire_all(claims, 2)
    assert list(a.lock.holds) == list(b.lock.holds) == [2]
    release_all(claims, 1)  # ends nothing of others
    assert list(a.lock.holds) == [2]
    release_all(claims, 2)
    with a.write(), b.write():
        pass


# Interchange


def test_ST6_wrap_shares_memory_and_keeps_the_exporter() -> None:
    data = np.arange(4, dtype=np.float32)
    store = lk.Storage.wrap(data)
    with store.write() as a:
        a[0] = 9
    assert data[0] == 9
    assert store.exporter is data
    buffer = bytearray(4)
    with lk.Storage.wrap(buffer).write() as a:
        a[...] = 255
    assert buffer == b"\xff" * 4
    assert lk.Storage.wrap(array.array("i", [1, 2])).to_numpy().tolist() == [1, 2]


def test_ST6_read_only_imports_are_frozen() -> None:
    assert lk.Storage.wrap(b"ab").frozen
    assert lk.Storage.wrap(memoryview(b"ab")).frozen
    assert lk.Storage.wrap(np.frombuffer(b"ab", np.uint8)).frozen


def test_wrap_refuses_what_it_would_have_to_copy() -> None:
    with pytest.raises(ShapeError, match="C-contiguous"):
        lk.Storage.wrap(np.zeros((2, 3)).T)
    with pytest.raises(ShapeError, match="byte order"):
        lk.Storage.wrap(np.zeros(2, ">f4"))
    with pytest.raises(DTypeError):
        lk.Storage.wrap(np.zeros(2, np.uint16))


class Exporter:
    """A DLPack producer that NumPy does not know."""

    def __init__(self, data: object) -> None:
        self.data = data

    def __dlpack__(self, **options: object) -> object:
        return self.data.__dlpack__(**options)  # type: ignore[attr-defined]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()  # type: ignore[attr-defined,no-any-return]


def test_ST6_dlpack_goes_both_ways_without_a_copy() -> None:
    source = np.arange(3, dtype=np.float64)
    store = lk.Storage.wrap(Exporter(source))
    back = np.from_dlpack(store)
    assert np.shares_memory(back, source)
    assert store.__dlpack_device__() == source.__dlpack_device__()
    assert lk.Graph().const(Exporter(source)).dtype is lk.f64
    read_only = source.copy()
    read_only.flags.writeable = False
    assert lk.Storage.wrap(Exporter(read_only)).frozen
    assert not np.from_dlpack(lk.Storage.wrap(read_only)).flags.writeable


def test_ST6_numpy_and_buffers_see_the_same_memory() -> None:
    store = lk.Storage.from_array(np.ones((2, 2), ml_dtypes.bfloat16))
    seen = np.asarray(store)
    assert seen.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(seen, store.array)
    assert not np.shares_memory(np.array(store), store.array)
    if sys.version_info >= (3, 12):
        assert memoryview(storage(2)).nbytes == 8


EXPORTS: dict[str, Callable[[lk.Storage], object]] = {
    "array": np.asarray,
    "array copy": np.array,
    "dlpack": np.from_dlpack,
    "wrap": lk.Storage.wrap,
    "from_array": lk.Storage.from_array,
    "bytes": lambda s: as_host_bytes("t", s),
}
if sys.version_info >= (3, 12):
    EXPORTS["buffer"] = memoryview


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_ST1_a_torn_storage_is_given_away_by_no_export(
    export: Callable[[lk.Storage], object],
) -> None:
    store = storage()
    with pytest.raises(KeyboardInterrupt):
        fail_midway(store)
    with pytest.raises(StorageTornError, match="rewritten whole"):
        export(store)
    with store.write() as a:
        a[...] = 1
    export(store)


@pytest.mark.parametrize("dt", ["f32", "bf16", "u8"])
def test_ST6_frozen_memory_is_exported_read_only(dt: str) -> None:
    g = lk.Graph()
    const = g.const(np.zeros(2, lk.dtype(dt).numpy)).data
    assert const is not None
    assert const.frozen
    seen = [np.asarray(const), *([np.from_dlpack(const)] if dt != "bf16" else [])]
    if sys.version_info >= (3, 12):
        seen.append(np.asarray(memoryview(const)))
    for view in seen:
        assert np.shares_memory(view, const.array)
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 9
    again = lk.Storage.wrap(const)
    assert again.frozen
    with pytest.raises(BindingError, match="read-only"), again.write():
        pass
    np.array(const)[0] = 9  # a copy is the caller's
    assert const.to_numpy().tolist() == [0, 0]
    assert np.asarray(storage()).flags.writeable


def test_ST6_read_only_memory_is_refused_to_who_cannot_be_told() -> None:
    """DLPack before 1.0 has no word for it."""
    const = lk.Graph().const(np.zeros(2, np.float32)).data
    frozen = np.zeros(2, np.float32)
    frozen.flags.writeable = False
    for store in (const, lk.Storage.wrap(frozen)):
        assert store is not None
        for options in ({}, {"max_version": None}, {"max_version": (0, 8)}):
            with pytest.raises((BindingError, BufferError)):
                store.__dlpack__(**options)
    storage().__dlpack__()


@pytest.mark.parametrize("dt", ["f32", "bf16", "f8_e4m3"])
def test_ST1_from_array_copies_a_storage_under_its_lock(dt: str) -> None:
    store = lk.Storage.from_array(np.zeros(4, lk.dtype(dt).numpy))
    copies: list[lk.Storage] = []
    reader = threading.Thread(target=lambda: copies.append(lk.Storage.from_array(store)))
    with store.write() as a:
        a[:2] = 1
        reader.start()
        reader.join(0.05)
        assert not copies
        a[2:] = 1
    reader.join(20)
    np.testing.assert_array_equal(copies[0].to_numpy(), store.to_numpy())
    assert copies[0].spec == store.spec
    assert not np.shares_memory(copies[0].array, store.array)
    assert lk.Storage.from_array(store, "sim:0").to_numpy().tolist() == store.to_numpy().tolist()


@pytest.mark.parametrize("seed", range(20))
def test_storages_over_one_memory_are_found(seed: int) -> None:
    rng = random.Random(seed)
    memories = [np.zeros(64, np.uint8) for _ in range(2)]
    storages: list[lk.Storage | None] = []
    elements: list[set[tuple[int, int]]] = []
    writable: list[bool] = []
    for n in range(12):
        kind = rng.choice(["none", "own", "again", "lent", "lent", "lent", "frozen"])
        which, start, size = rng.randint(0, 1), rng.randint(0, 60), rng.randint(0, 8)
        part = memories[which][start : start + size]
        part.flags.writeable = kind != "frozen"
        if kind == "again" and n:
            at = rng.randrange(n)
            storages.append(storages[at])
            elements.append(elements[at])
            writable.append(writable[at])
            continue
        lent = kind in ("lent", "frozen")
        own = lk.Storage.from_array(part) if kind != "none" else None
        storages.append(lk.Storage.wrap(part) if lent else own)
        elements.append({(which, i) for i in range(start, start + len(part))} if lent else set())
        writable.append(kind == "lent")
    want = [
        (n, m)
        for n, m in itertools.combinations(range(12), 2)
        if storages[n] is not storages[m]
        and elements[n] & elements[m]
        and (writable[n] or writable[m])
    ]
    assert overlapping(storages) == want


def test_shapes_that_no_array_has_are_refused() -> None:
    with pytest.raises(ShapeError, match="65 extents, need at most 64"):
        lk.Storage.allocate((1,) * 65, "u8")
    assert lk.Storage.allocate((1,) * 64, "u8").to_numpy().ndim == 64
    for shape, dt in (((2**62, 0), "f64"), ((2**60, 0, 1), "f64"), ((2**61,), "f32")):
        with pytest.raises(ShapeError, match=r"fewer than 2\*\*63 bytes"):
            lk.Storage.allocate(shape, dt)
    with pytest.raises(ShapeError, match=r"fewer than 2\*\*63 elements"):
        lk.Storage.allocate((2**63, 0), "u8")
    assert lk.Storage.allocate((2**59, 0, 1), "f64").to_numpy().shape == (2**59, 0, 1)
