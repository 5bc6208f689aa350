"""LatentKvCache: construction, fields, identity, truncation, clearing, growing, savepoints."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from latent_state import append_rows, line, refused, rows, state

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.device import register_backend, registry

MLA = [(4,), (2,)]
PLACES = ["cpu", "sim:0"]


def make(
    capacity: int = 8, *, layers: int = 2, trailing: Any = MLA, dtype: str = "f32",
    device: Any = "cpu",
) -> lk.LatentKvCache:  # fmt: skip
    return lk.LatentKvCache.with_capacity(layers, capacity, trailing, dtype, device)


# Construction


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(
    "trailing", [[(4,), (2,)], [(6,)], [(2, 3), (1,), ()], ((5,), [7])], ids=str
)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "i8", "f8_e4m3"])
def test_every_slot_is_zeroed_and_has_capacity_first(
    dtype: str, trailing: Any, device: str
) -> None:
    cache = make(3, trailing=trailing, dtype=dtype, device=device)
    assert (cache.n_layers(), cache.max_seq_len, cache.capacity) == (2, 3, 3)
    assert cache.dtype is lk.dtype(dtype)
    assert cache.slot_trailing == tuple(tuple(t) for t in trailing)
    assert (len(cache), cache.cached_len, bool(cache)) == (0, 0, True)
    seen = set()
    for layer in range(2):
        for slot, shape in enumerate(trailing):
            store = cache.slot_storage(layer, slot)
            assert (store.shape, store.dtype) == ((3, *shape), cache.dtype)
            assert str(store.location) == device
            assert not store.to_numpy().astype(np.float32).any()
            assert cache.slot_version(layer, slot) == 0
            seen.add(int(store.id))
    assert len(seen) == 2 * len(trailing)
    total = sum(cache.slot_storage(i, s).nbytes for i in (0, 1) for s in range(len(trailing)))
    assert lk.LatentKvCache.footprint(2, 3, trailing, dtype) == total


def test_footprint_of_a_real_model_l14() -> None:
    """DeepSeek-V2-Lite: 27 layers, latent 512 and rotary key 64; one slot each, no factor of K and
    V."""
    got = lk.LatentKvCache.footprint(27, 4096, [(512,), (64,)], "bf16")
    assert got == 27 * 4096 * (512 + 64) * 2
    assert got == lk.LatentKvCache.footprint(27, 4096, [(576,)], "bf16")


def test_one_pass_allocates_everything() -> None:
    make()
    before = lk.stats()
    make()
    after = lk.stats()
    assert after.allocations == before.allocations + 4
    assert after.kernels_run == before.kernels_run + 4


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, 8, MLA, "f32"), lk.RangeError, "got n_layers 0, need 1 <= n_layers"),
        ((-1, 8, MLA, "f32"), lk.RangeError, "got n_layers -1"),
        ((1.0, 8, MLA, "f32"), lk.DTypeError, "got n_layers 1.0, need a whole number"),
        ((True, 8, MLA, "f32"), lk.DTypeError, "got n_layers True"),
        ((1, 0, MLA, "f32"), lk.RangeError, "got max_seq_len 0, need 1 <= max_seq_len"),
        ((1, -8, MLA, "f32"), lk.RangeError, "got max_seq_len -8"),
        ((1, 2**63, MLA, "f32"), lk.RangeError, "need 1 <= max_seq_len < 2**63"),
        ((1, 8, [], "f32"), lk.ShapeError, "got slot_trailing [], need one shape per slot"),
        ((1, 8, (512, 64), "f32"), lk.ShapeError, "got 512 for slot 0, need one shape per slot"),
        ((1, 8, 512, "f32"), lk.ShapeError, "got slot_trailing 512, need one shape per slot"),
        ((1, 8, None, "f32"), lk.ShapeError, "got slot_trailing None"),
        ((1, 8, "ab", "f32"), lk.ShapeError, "got slot_trailing 'ab'"),
        ((1, 8, ["ab"], "f32"), lk.ShapeError, "got 'ab' for slot 0"),
        ((1, 8, [(4,), (0,)], "f32"), lk.ShapeError, "got (0,) for slot 1, need extents >= 1"),
        ((1, 8, [(4,), (-2,)], "f32"), lk.ShapeError, "slot 1: got extent -2"),
        ((1, 8, [(4.0,)], "f32"), lk.ShapeError, "slot 0: got extent 4.0"),
        ((1, 8, MLA, "f33"), lk.DTypeError, "f33"),
        ((1, 8, MLA, "uint16"), lk.DTypeError, "uint16"),
        ((1, 8, MLA, "f32", "cuda:99"), lk.BackendUnavailable, "cuda"),
        ((1, 8, MLA, "f32", "sim:9"), lk.BackendUnavailable, "sim:9"),
        ((2, 8, MLA, "f32", ["cpu"]), lk.ShapeError, "got 1 devices, need one per layer (2)"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    before = lk.stats().allocations
    with pytest.raises(error) as caught:
        lk.LatentKvCache.with_capacity(*arguments)
    assert words in str(caught.value)
    assert isinstance(caught.value, lk.LazyKvError)
    if len(arguments) == 4:
        with pytest.raises(error) as caught:
            lk.LatentKvCache.footprint(*arguments)
        assert words in str(caught.value)
    assert lk.stats().allocations == before


def test_running_out_of_memory_leaves_nothing_behind() -> None:
    generations, old = dict(registry.generations), registry.find("sim")
    small = SimBackend(limit_bytes=4 * 8 * 6 + 10)
    register_backend("sim", small)
    try:
        place = lk.device("sim:0").location
        with pytest.raises(lk.OutOfMemory, match="128 bytes"):
            make(device="sim:0")
        assert small.used_bytes(place) == 0
        cache = make(layers=1, capacity=4, device="sim:0")
        append_rows(cache, [1, 2])
        with refused(cache, lk.OutOfMemory, "bytes"):
            cache.grow(100)
        assert small.used_bytes(place) == 4 * 4 * 6
    finally:
        register_backend("sim", old)
        registry.generations = generations


# Fields


def test_layers_and_slots_by_index() -> None:
    cache = make()
    assert cache.slot_storage(np.int64(1), np.int64(1)).shape == (8, 2)
    for index in (-1, 2, 2**70):
        assert cache.slot_storage(index, 0) is None
        assert cache.slot_version(index, 0) is None
        assert cache.layer_location(index) is None
    for slot in (-1, 2, 2**70):
        assert cache.slot_version(0, slot) is None
        assert cache.slot_storage(0, slot) is None
        assert cache.rebind_slot(0, slot) is None
    for name in ("max_seq_len", "slot_trailing", "dtype", "capacity"):
        with pytest.raises(AttributeError):
            setattr(cache, name, None)
    for bad in (0.0, "0", None, True):
        with pytest.raises(lk.DTypeError, match="need a whole number"):
            cache.slot_storage(bad, 0)
        for verb in (cache.slot_storage, cache.slot_version, cache.rebind_slot):
            with pytest.raises(lk.DTypeError, match="need a whole number"):
                verb(0, bad)


def test_it_is_a_rebind_source_and_says_what_a_plan_bakes() -> None:
    cache = make()
    assert isinstance(cache, lk.KvRebindSource)
    assert cache.rebind_slot(1, 0) is cache.slot_storage(1, 0)
    one = make(trailing=[(6,)])
    assert one.rebind_slot(0, 0).shape == (8, 6)
    assert one.rebind_slot(0, 1) is None
    assert cache.plan_facts() == {
        "layers": 2, "capacity": 8, "slots": ((4,), (2,)), "dtype": "f32"
    }  # fmt: skip


def test_repr_names_the_geometry_and_prints_no_rows() -> None:
    assert repr(make()) == "LatentKvCache(2 layers, rows of [4] + [2], length 0 of 8, f32)"


def test_versions_count_writes_through_the_cache() -> None:
    cache = make()
    cache.bump_version(0, 1)
    append_rows(cache, [1])
    cache.write_bytes(1, 0, 0, 1, bytes(16))
    got = [[cache.slot_version(i, s) for s in (0, 1)] for i in (0, 1)]
    assert got == [[1, 2], [2, 1]]
    cache.bump_version(7, 0)  # no such layer
    with refused(cache, lk.RangeError, "got slot 2, need 0 <= slot < 2"):
        cache.bump_version(0, 2)
    with refused(cache, lk.RangeError, "got slot -1"):
        cache.bump_version(0, -1)
    assert [[cache.slot_version(i, s) for s in (0, 1)] for i in (0, 1)] == got


def test_locations_are_proven_layer_by_layer() -> None:
    cache = make(layers=3, device=["cpu", "sim:1", None])
    assert cache.device_location() is None
    assert cache.rebind_location() is None
    assert [str(cache.layer_location(i)) for i in range(3)] == ["cpu", "sim:1", "None"]
    assert cache.slot_storage(2, 0) is None
    with refused(cache, lk.RangeError, "append(layer 2)", "absent layer", "0..2"):
        cache.append(2, rows([1], 4), rows([1], 2))
    cache.append_all([rows([1], 4)] * 2, [rows([1], 2)] * 2)
    assert len(cache) == 1
    for device in PLACES:
        assert str(make(device=device).device_location()) == device
        assert str(make(device=device).rebind_location()) == device


# Identity


def test_ids_name_the_allocation() -> None:
    ids = [int(make().alloc_id()) for _ in range(5)]
    assert len({0, *ids}) == 6
    cache = make()
    first = cache.alloc_id()
    append_rows(cache, [1, 2, 3])
    cache.write_bytes(0, 0, 0, 1, bytes(16))
    cache.truncate_to(1)
    cache.cached_len = 2
    cache.savepoint().rollback()
    cache.reset()
    cache.grow(8)
    assert cache.alloc_id() == first
    cache.grow(9)
    grown = cache.alloc_id()
    cache.clear()
    assert len({first, grown, cache.alloc_id()}) == 3


# Length


@pytest.mark.parametrize("device", PLACES)
def test_truncating_moves_the_length_and_no_byte_a1(device: str) -> None:
    cache = make(device=device)
    append_rows(cache, [0, 1, 2])
    before = state(cache)["slots"]
    for n, length in ((5, 3), (10**30, 3), (3, 3), (2, 2), (0, 0), (2, 0)):
        cache.truncate_to(n)
        assert len(cache) == length
    assert state(cache)["slots"] == before
    append_rows(cache, [7])
    assert line(cache.live(0)[0]) == [7]
    with refused(cache, lk.RangeError, "LatentKvCache.truncate_to: got length -5"):
        cache.truncate_to(-5)
    with refused(cache, lk.DTypeError, "got length 0.0"):
        cache.truncate_to(0.0)


def test_the_length_may_be_assigned_within_capacity() -> None:
    cache = make()
    cache.cached_len = 8
    assert len(cache) == 8
    with refused(cache, lk.RangeError, "LatentKvCache.cached_len: got 9", "capacity 8"):
        cache.cached_len = 9
    with refused(cache, lk.RangeError, "got length -1"):
        cache.cached_len = -1


def test_lengths_of_a_fresh_cache_d6_d7() -> None:
    cache = make()
    assert [v.shape for v in cache.live(0)] == [(0, 4), (0, 2)]
    append_rows(cache, [0, 0, 5])
    assert len(cache) == 3
    cache.reset()
    assert len(cache) == 0
    assert [v.shape for v in cache.live(1)] == [(0, 4), (0, 2)]
    assert cache.slot_storage(0, 0).to_numpy().any()


def test_savepoints_nest_and_rewind_all_layers() -> None:
    cache = make()
    append_rows(cache, [1, 2])
    outer = cache.savepoint()
    append_rows(cache, [3])
    with cache.savepoint() as inner:
        append_rows(cache, [4])
    assert (len(cache), inner.is_open, outer.is_open) == (4, False, True)
    outer.rollback()
    assert line(cache.live(1)[1]) == [101, 102]
    with refused(cache, lk.GraphError, "Savepoint.rollback: got a savepoint that has ended"):
        outer.rollback()
    doomed = cache.savepoint()
    cache.truncate_to(1)
    assert not doomed.is_open
    kept = cache.savepoint()
    cache.grow(20)
    append_rows(cache, [5])
    kept.rollback()
    assert line(cache.live(1)[1]) == [101]


# Clear and grow


@pytest.mark.parametrize("device", PLACES)
def test_clear_drops_storage_and_says_so(device: str) -> None:
    cache = make(device=device)
    append_rows(cache, [1])
    cache.append(0, rows([2], 4), rows([2], 2))
    cache.held["plan"] = Mock()
    cache.clear()
    assert (len(cache), cache.max_seq_len, cache.device_location()) == (0, 8, None)
    assert cache.slot_storage(0, 0) is None
    assert cache.slot_version(0, 0) is None
    assert not cache.held
    cache.bump_version(0, 0)
    words = ("got a cleared cache", "reset() rewinds and keeps it", "with_capacity makes a new one")
    with refused(cache, lk.GraphError, "append(layer 0)", *words):
        cache.append(0, rows([1], 4), rows([1], 2))
    with refused(cache, lk.GraphError, "append_all", *words):
        cache.append_all([], [])
    with refused(cache, lk.GraphError, "write_bytes(layer 1, slot 1)", *words):
        cache.write_bytes(1, 1, 0, 1, bytes(8))
    with refused(cache, lk.RangeError, "append(layer 2): got an absent layer"):
        cache.append(2, rows([1], 4), rows([1], 2))
    with refused(cache, lk.RangeError, "LatentKvCache.live: got layer 0, need a populated layer"):
        cache.live(0)


def test_a_reset_cache_is_like_a_new_one_c1_c4() -> None:
    cache, fresh = make(), make()
    append_rows(cache, [0, 1, 2, 3, 4, 5])
    version, alloc = cache.slot_version(0, 0), cache.alloc_id()
    cache.reset()
    assert cache.slot_version(0, 0) > version  # before any row is written too
    for each in (cache, fresh):
        append_rows(each, [20, 21, 22])
    assert len(cache) == 3
    for mine, theirs in zip(cache.live(1), fresh.live(1), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    assert cache.slot_version(0, 0) > version
    assert cache.alloc_id() == alloc


@pytest.mark.parametrize("device", ["cpu", "sim:0", ["cpu", "sim:1"]], ids=str)
def test_growing_keeps_rows_length_versions_and_places(device: Any) -> None:
    cache = make(4, device=device, trailing=[(4,), (2, 3), ()])
    append_rows(cache, [1, 2, 3])
    cache.write_bytes(0, 0, 3, 1, rows([9], 4))
    old = [cache.slot_storage(i, 0) for i in (0, 1)]
    places = [cache.layer_location(i) for i in (0, 1)]
    versions = [cache.slot_version(i, s) for i in (0, 1) for s in range(3)]
    cache.grow(7)
    assert (cache.max_seq_len, len(cache)) == (7, 3)
    assert [cache.layer_location(i) for i in (0, 1)] == places
    assert [cache.slot_version(i, s) for i in (0, 1) for s in range(3)] == [n + 1 for n in versions]
    assert cache.slot_storage(0, 0).to_numpy()[:, 0].tolist() == [1, 2, 3, 9, 0, 0, 0]
    assert cache.slot_storage(1, 1).shape == (7, 2, 3)
    assert old[0] is not cache.slot_storage(0, 0)
    assert old[0].shape == (4, 4)
    append_rows(cache, [4, 5, 6, 7])
    assert line(cache.live(1)[2]) == [201, 202, 203, 204, 205, 206, 207]


def test_growing_is_never_shrinking() -> None:
    cache = make()
    append_rows(cache, [1])
    with refused(cache, lk.RangeError, "LatentKvCache.grow: got capacity 7, need >= 8"):
        cache.grow(7)
    with refused(cache, lk.RangeError, "got capacity 0"):
        cache.grow(0)
    with refused(cache, lk.DTypeError, "got capacity 9.0"):
        cache.grow(9.0)
    before = state(cache)
    cache.grow(8)
    assert state(cache) == before


def test_growing_is_refused_in_an_open_step() -> None:
    cache = make()
    cache.append(0, rows([1], 4), rows([1], 2))
    for verb in (lambda: cache.grow(9), lambda: setattr(cache, "cached_len", 1)):
        with refused(cache, lk.GraphError, "open step of 1 rows for layers [0]", "abort_step()"):
            verb()
    cache.append(1, rows([1], 4), rows([1], 2))
    cache.grow(9)
    append_rows(cache, [2])
    assert line(cache.live(0)[0]) == [1, 2]
