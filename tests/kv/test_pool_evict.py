"""Evicted blocks: their bytes come back as they went, whatever stores and kernels do midway."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
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
)

import lazykv as lk
from lazykv.kv.block_store import MemoryBlockStore
from lazykv.kv.envelope import seal


@pytest.fixture
def make(place) -> Callable[..., lk.DeviceKvPool]:
    return lambda *sizes, **options: make_pool(*sizes, place=place, **options)


class FlakyStore(MemoryBlockStore):
    """Fails the calls whose turn is in `failures`, as (verb, n-th call of it)."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: set[tuple[str, int]] = set()
        self.calls = {"put": 0, "get": 0, "delete": 0}

    def _turn(self, verb: str) -> None:
        self.calls[verb] += 1
        if (verb, self.calls[verb]) in self.failures:
            raise OSError(f"no {verb}")

    def put(self, key: str, data: Any) -> None:
        self._turn("put")
        super().put(key, data)

    def get(self, key: str) -> bytes:
        self._turn("get")
        return super().get(key)

    def delete(self, key: str) -> None:
        self._turn("delete")
        super().delete(key)


@pytest.fixture
def store() -> FlakyStore:
    return FlakyStore()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "i8"])
def test_evicted_blocks_come_back_byte_for_byte(make, dtype):
    pool = make(4, 4, dtype=dtype)
    session = pool.open()
    pool.append(session, 10)
    want = {}
    for n, (at, block) in enumerate([(at, b) for at in slots(pool) for b in range(3)]):
        want[at, block] = random_bytes(n, pool.geometry.slot_block_bytes)
        pool.write_block_bytes(*at, block, want[at, block])
    report = pool.evict(session)
    assert (report.freed, report.still_shared) == ([0, 1, 2], [])
    assert (pool.free_blocks(), pool.session_block_table(session)) == (4, [None] * 3)
    for at in slots(pool):
        for block in range(4):
            pool.write_block_bytes(*at, block, b"\xff" * pool.geometry.slot_block_bytes)
    other = pool.open()
    pool.append(other, 1)
    assert pool.restore(session, report.handle) == [1, 2, 3]
    for (at, block), data in want.items():
        assert pool.read_block_bytes(*at, block + 1) == data
    assert pool.read_block_bytes(0, 0, 0) == b"\xff" * pool.geometry.slot_block_bytes
    assert pool.filled_tokens(session) == 10
    pool.check()


def test_blocks_come_back_into_other_blocks_in_their_own_order(make, store):
    pool = make(7, 2, store=store)
    session = opened(pool, range(7))
    report = pool.evict_blocks(session, [2, 0])
    assert report.freed == [2, 0]
    assert read(pool, session) == [None, None, 2, 3, None, None, 6]
    squatter = opened(pool, [30, 31, 29, 28])
    assert pool.session_block_table(squatter) == [0, 2]
    blocks = pool.restore(session, report.handle)
    assert sorted(blocks) == [4, 5]
    assert read(pool, session) == list(range(7))
    assert read(pool, squatter) == [30, 31, 29, 28]
    assert store.keys() == []


def test_shared_blocks_stay_where_they_are(make):
    pool = make(8, 2)
    a = opened(pool, range(6))
    b = pool.fork(a)
    feed(pool, b, [20, 21])
    report = pool.evict(b)
    assert (report.freed, report.still_shared) == ([3], [0, 1, 2])
    assert read(pool, b) == [*range(6), None, None]
    pool.discard(a)
    more = pool.evict(b)
    assert (more.freed, more.still_shared) == ([0, 1, 2], [])
    pool.restore(b, report.handle)
    pool.restore(b, more.handle)
    assert read(pool, b) == [*range(6), 20, 21]


def test_an_eviction_of_nothing_stores_nothing(make, store):
    pool = make(store=store)
    a = opened(pool, range(4))
    pool.fork(a)
    report = pool.evict(a)
    assert (report.freed, report.still_shared, store.keys()) == ([], [0], [])
    assert pool.restore(a, report.handle) == []
    with refused(pool, lk.StaleHandle):
        pool.restore(a, report.handle)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_store_that_fails_midway_keeps_nothing_and_nothing_is_detached(make, store, nth):
    pool = make(4, 2, store=store)
    session = opened(pool, range(6))
    store.failures = {("put", nth)}
    with pytest.raises(OSError, match="no put"):
        pool.evict(session)
    assert (store.keys(), read(pool, session)) == ([], list(range(6)))
    assert tables(pool)["refs"] == [1, 1, 1, 0]
    assert pool.stats.blocks_evicted == 0
    report = pool.evict(session)
    assert len(store.keys()) == 3
    pool.restore(session, report.handle)
    assert (read(pool, session), store.keys()) == (list(range(6)), [])


def test_what_a_failed_store_could_not_delete_is_deleted_later(make, store):
    pool = make(4, 2, store=store)
    session = opened(pool, range(6))
    store.failures = {("put", 3), ("delete", 1)}
    with pytest.raises(OSError, match="no put") as caught:
        pool.evict(session)
    assert "stays in the store" in caught.value.__notes__[0]
    (left,) = store.keys()
    report = pool.evict(session)
    kept = store.keys()
    assert (len(kept), left in kept) == (3, False)
    pool.restore(session, report.handle)
    assert (read(pool, session), store.keys()) == (list(range(6)), [])


def test_a_memory_store_that_is_full_refuses_the_eviction(make):
    store = MemoryBlockStore(limit_bytes=700)
    pool = make(4, 2, store=store)  # a block is 256 bytes, 304 in its envelope
    session = opened(pool, range(6))
    with pytest.raises(lk.OutOfMemory):
        pool.evict(session)
    assert (store.keys(), read(pool, session)) == ([], list(range(6)))
    report = pool.evict_range(session, 1, 3)
    assert read(pool, session) == [0, 1, None, None, None, None]
    pool.restore(session, report.handle)
    assert read(pool, session) == list(range(6))


def test_a_read_that_fails_stores_nothing(make, store):
    pool = make(4, 2, store=store)
    session = opened(pool, range(6))
    pool.restore(session, pool.evict(session).handle)
    for failure, seen in failures(pool, pool._moves._read):
        with failure, refused(pool, seen):
            pool.evict(session)
    assert (store.calls["put"], store.keys()) == (3, [])


def corrupt(store: MemoryBlockStore, key: str, change: Callable[[bytes], bytes]) -> bytes:
    """Change a stored block behind its store's back; returns what it was."""
    before = store._blocks[key]
    store._blocks[key] = change(before)
    return before


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda b: b[:-1] + bytes([b[-1] ^ 1]), lk.BlockStoreError, "got SHA-256"),
        (lambda b: b[:48] + bytes([b[48] ^ 128]) + b[49:], lk.BlockStoreError, "got SHA-256"),
        (lambda b: b[:-1], lk.BlockStoreError, "bytes of payload"),
        (lambda b: b + b"\0", lk.BlockStoreError, "bytes of payload"),
        (lambda b: b"", lk.BlockStoreError, "got 0 bytes"),
        (lambda b: b"x" + b[1:], lk.BlockStoreError, "got magic"),
        (lambda b, key: seal(b[48:-4], key), lk.ShapeError, "restore: got 252 bytes, need 256"),
    ],
)
@pytest.mark.parametrize("which", [0, 2])
def test_a_corrupt_block_is_refused_and_the_handle_stays_good(make, change, error, words, which):
    store = MemoryBlockStore()
    pool = make(4, 2, store=store)
    session = opened(pool, range(6))
    report = pool.evict(session)
    key = store.keys()[which]
    takes_key = change.__code__.co_argcount == 2
    before = corrupt(store, key, (lambda b: change(b, key)) if takes_key else change)
    with refused(pool, error, words):
        pool.restore(session, report.handle)
    assert len(store.keys()) == 3
    store._blocks[key] = before
    pool.restore(session, report.handle)
    assert read(pool, session) == list(range(6))


def test_a_block_that_cannot_be_got_now_can_be_got_later(make, store):
    pool = make(4, 2, store=store)
    session = opened(pool, range(6))
    report = pool.evict(session)
    store.failures = {("get", 2)}
    with refused(pool, OSError, "no get"):
        pool.restore(session, report.handle)
    pool.restore(session, report.handle)
    assert read(pool, session) == list(range(6))


def test_a_block_the_store_has_lost_is_named(make, store):
    pool = make(4, 2, store=store)
    session = opened(pool, range(6))
    report = pool.evict(session)
    lost = store.keys()[1]
    store.delete(lost)
    with refused(pool, lk.BlockStoreError, "unknown key", lost):
        pool.restore(session, report.handle)
    pool.discard(session)
    assert store.keys() == []


def test_a_restore_without_room_does_not_read_the_store(make, store):
    pool = make(4, 2, store=store)
    session = opened(pool, range(6))
    report = pool.evict(session)
    other = opened(pool, [20, 21, 22, 23])
    with refused(pool, lk.OutOfBlocks, "need 3") as caught:
        pool.restore(session, report.handle)
    assert (caught.value.need, caught.value.have, store.calls["get"]) == (3, 2, 0)
    pool.discard(other)
    pool.restore(session, report.handle)
    assert read(pool, session) == list(range(6))


def test_a_restore_that_fails_midway_leaves_the_pool_as_it_was(make):
    pool = make(6, 2)
    session = opened(pool, range(6))
    other = opened(pool, [30, 31])
    pool.restore(session, pool.evict(session).handle)
    report = pool.evict_range(session, 0, 2)
    plan, _ = pool._moves._write
    before = tables(pool)
    ways = list(failures(pool, plan))
    assert len(ways) >= 8
    for failure, seen in ways:
        with failure, pytest.raises(seen):
            pool.restore(session, report.handle)
        assert tables(pool) == before
        assert not any(s.torn for s in storages(pool))
        assert read(pool, session) == [None] * 4 + [4, 5]
        assert len(pool.store.keys()) == 2
        pool.check()
    pool.restore(session, report.handle)
    assert (read(pool, session), read(pool, other)) == (list(range(6)), [30, 31])


def test_stored_blocks_go_when_nothing_can_bring_them_back(make, store):
    pool = make(8, 2, store=store)
    a, b, c = (opened(pool, [10 * n, 10 * n + 1, 10 * n + 2]) for n in range(3))
    report = pool.evict(a)
    assert len(store.keys()) == 2
    pool.restore(a, report.handle)
    assert store.keys() == []
    pool.evict(b)
    pool.discard(b)
    assert store.keys() == []
    report = pool.evict(c)
    pool.truncate(c, 3)
    assert len(store.keys()) == 2
    pool.truncate(c, 2)  # the handle covers a slot that is gone
    assert store.keys() == []
    with refused(pool, lk.StaleHandle):
        pool.restore(c, report.handle)
    pool.discard(c)
    assert (store.keys(), read(pool, a)) == ([], [0, 1, 2])


def test_truncation_leaves_the_stored_blocks_below_it(make, store):
    pool = make(8, 2, store=store)
    session = opened(pool, range(7))
    low, high = pool.evict_range(session, 0, 1), pool.evict_range(session, 2, 4)
    pool.truncate(session, 4)
    assert len(store.keys()) == 1
    with refused(pool, lk.StaleHandle):
        pool.restore(session, high.handle)
    feed(pool, session, [20])
    pool.restore(session, low.handle)
    assert (read(pool, session), store.keys()) == ([0, 1, 2, 3, 20], [])


@pytest.mark.parametrize("verb", ["evict", "restore", "discard", "truncate"])
def test_deletes_that_fail_are_tried_again(make, store, verb):
    pool = make(8, 2, store=store)
    a, b = opened(pool, range(4)), opened(pool, range(10, 14))
    report = pool.evict(a)
    store.failures = {("delete", n) for n in (1, 2)}
    pool.restore(a, report.handle)  # what could not be deleted is no reason to fail
    assert (read(pool, a), len(store.keys())) == (list(range(4)), 2)
    if verb != "evict":
        store.failures |= {("delete", n) for n in (3, 4)}
    report = pool.evict(b)
    assert len(store.keys()) == (2 if verb == "evict" else 4)
    if verb == "restore":
        pool.restore(b, report.handle)
    elif verb != "evict":
        getattr(pool, verb)(b, *([0] if verb == "truncate" else []))
    assert len(store.keys()) == (2 if verb == "evict" else 0)


def test_one_store_serves_several_pools(make, store):
    pools = [make(4, 2, store=store) for _ in range(2)]
    sessions = [opened(pool, [n, n + 1, n + 2]) for n, pool in enumerate(pools)]
    reports = [pool.evict(s) for pool, s in zip(pools, sessions, strict=True)]
    assert len(store.keys()) == 4
    for n in (1, 0):
        pools[n].restore(sessions[n], reports[n].handle)
        assert read(pools[n], sessions[n]) == [n, n + 1, n + 2]
    assert store.keys() == []


def test_a_handle_is_of_its_pool(make):
    pool, other = make(4, 2), make(4, 2)
    session, stranger = opened(pool, range(4)), opened(other, range(4))
    report = pool.evict(session)
    with refused(other, lk.StaleHandle):
        other.restore(stranger, report.handle)
    pool.restore(session, report.handle)
    assert read(pool, session) == list(range(4))


def test_a_pool_that_goes_deletes_what_it_stored(make):
    store = MemoryBlockStore()
    other = make(4, 2, store=store)
    kept = other.evict(opened(other, range(4)))
    pool = make(4, 2, store=store)
    pool.evict(opened(pool, range(6)))
    assert len(store.keys()) == 5
    del pool
    gc.collect()
    assert len(store.keys()) == len(kept.freed) == 2
