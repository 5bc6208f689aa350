"""KvCache: how it is made, what it says of itself, and its length."""

import gc
import weakref

import numpy as np
import pytest
from kv_state import append_rows, line, raw_bytes, refused, rows, state

import lazykv as lk
from lazykv.backends.cpu import CpuBackend

DTYPES = ["f32", "f16", "bf16", "f64", "i8", "u8", "i32", "u32", "i64", "f8_e4m3", "f8_e5m2"]


# Construction


def test_with_dims_starts_without_storage():
    cache = lk.KvCache.with_dims(3, 2, 4)
    assert cache.layers == (None, None, None)
    assert (cache.n_layers(), cache.n_kv_heads, cache.head_dim) == (3, 2, 4)
    assert (cache.max_seq_len, cache.dtype, cache.device_location()) == (None, None, None)
    assert cache.cached_len == len(cache) == 0


@pytest.mark.parametrize("name", DTYPES)
def test_with_capacity_holds_zeros_of_every_dtype(make, place, name):
    cache = make(5, heads=3, dtype=name)
    dt = lk.dtype(name)
    assert (cache.max_seq_len, cache.dtype, str(cache.device_location())) == (5, dt, place)
    stores = [cache.slot_storage(i, s) for i in range(2) for s in lk.KvSlot]
    for store in stores:
        assert (store.shape, store.dtype) == ((1, 3, 5, 4), dt)
        assert not np.frombuffer(raw_bytes(store), np.uint8).any()
    assert len({s.id for s in stores}) == 4
    assert sum(s.nbytes for s in stores) == lk.KvCache.footprint(2, 3, 4, 5, name)


def test_numpy_dtypes_devices_and_locations_are_taken_too():
    by_name = lk.KvCache.with_capacity(1, 1, 2, 3, "f16", device="cpu")
    for device in (lk.device("cpu"), lk.DeviceLocation("cpu")):
        cache = lk.KvCache.with_capacity(np.int64(1), 1, 2, np.int32(3), np.float16, device)
        assert (cache.dtype, cache.device_location()) == (lk.f16, by_name.device_location())


def test_the_documented_footprint():
    assert lk.KvCache.footprint(32, 8, 128, 4096, "bf16") == 512 << 20
    assert lk.KvCache.footprint(32, 8, 128, 4096, lk.bf16, batch=3) == 3 * (512 << 20)
    # A product beyond 32 and 64 bits is an exact Python integer.
    assert lk.KvCache.footprint(np.int32(2**30), 2**20, 2**10, 2**10, "f32") == 2**73


def test_all_buffers_come_from_one_pass(make):
    make(capacity=9)
    before = lk.stats()
    make(capacity=9)
    after = lk.stats()
    assert after.plans_built + after.plan_cache_hits == (
        before.plans_built + before.plan_cache_hits + 1
    )
    assert after.kernels_run == before.kernels_run + 4
    assert after.allocations == before.allocations + 4


@pytest.mark.parametrize("bad", [0, -1, 2**70])
@pytest.mark.parametrize("which", range(4))
def test_counts_out_of_range_are_refused(which, bad):
    counts = [1, 2, 4, 8]
    counts[which] = bad
    name = ("n_layers", "n_kv_heads", "head_dim", "max_seq_len")[which]
    with pytest.raises(lk.RangeError, match=rf"with_capacity: got {name} {bad}"):
        lk.KvCache.with_capacity(*counts, "f32")
    with pytest.raises(lk.RangeError, match=name):
        lk.KvCache.footprint(*counts, "f32")
    if which < 3:
        with pytest.raises(lk.RangeError, match=f"with_dims: got {name}"):
            lk.KvCache.with_dims(*counts[:3])


@pytest.mark.parametrize("bad", [1.0, "4", None, True])
def test_counts_that_are_not_whole_numbers_are_refused(bad):
    with pytest.raises(lk.DTypeError, match="need a whole number"):
        lk.KvCache.with_capacity(1, 2, 4, bad, "f32")
    with pytest.raises(lk.DTypeError, match="need a whole number"):
        lk.KvCache.with_dims(1, bad, 4)


@pytest.mark.parametrize("many", [2**16 + 1, 2**40, 2**62])
def test_more_layers_than_any_model_has_are_refused_at_once(many):
    for make in (lambda: lk.KvCache.with_dims(many, 1, 1),
                 lambda: lk.KvCache.with_capacity(many, 1, 1, 1, "f32")):  # fmt: skip
        with pytest.raises(lk.RangeError, match=f"got n_layers {many}, need <= 65536"):
            make()


@pytest.mark.parametrize("bad", ["f8", "uint16", np.uint16, np.complex64, None, "float"])
def test_an_unknown_dtype_is_refused_by_name_h1(bad):
    with pytest.raises(lk.DTypeError, match=r"got .*need one of"):
        lk.KvCache.with_capacity(1, 2, 4, 8, bad)


def test_an_unwired_device_fails_before_anything_is_allocated():
    before = lk.stats()
    with pytest.raises(lk.BackendUnavailable, match="nowhere"):
        lk.KvCache.with_capacity(1, 2, 4, 8, "f32", "nowhere:0")
    with pytest.raises(lk.BackendUnavailable, match="cpu"):
        lk.KvCache.with_capacity(1, 2, 4, 8, "f32", "no such place")
    assert lk.stats() == before


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_failed_allocation_leaves_nothing_behind(make, monkeypatch, nth):
    made, real = [], CpuBackend.allocate

    def allocate(self, nbytes, location):
        if len(made) + 1 == nth:
            raise lk.OutOfMemory(f"allocate on {location}: got no memory for {nbytes} bytes")
        buffer = real(self, nbytes, location)
        made.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(CpuBackend, "allocate", allocate)
    with pytest.raises(lk.OutOfMemory, match=f"{2 * 8 * 4 * 4} bytes"):
        make()
    gc.collect()
    assert len(made) == nth - 1
    assert not any(ref() is not None for ref in made)


def test_more_memory_than_there_is_is_out_of_memory():
    with pytest.raises(lk.OutOfMemory, match=str(2**60 * 4)):
        lk.KvCache.with_capacity(1, 1, 1, 2**60, "f32")
    with pytest.raises(lk.ShapeError, match="2\\*\\*63"):
        lk.KvCache.with_capacity(1, 2**20, 2**20, 2**40, "f32")


# What the cache is


def test_an_empty_cache_is_a_cache(make):
    assert bool(make())
    assert bool(lk.KvCache.with_dims(1, 1, 2))
    assert "length 0 of 8" in repr(make())


def test_layers_and_slots_by_index(make):
    cache = make()
    found = cache.layer(np.int64(1))
    assert found is cache.layers[1] is cache.layer_mut(1)
    assert cache.slot_storage(1, lk.KvSlot.K) is found.k
    assert cache.slot_storage(1, 1) is found.v
    for index in (-1, 2, 2**70):
        assert cache.layer(index) is None
        assert cache.slot_storage(index, lk.KvSlot.K) is None
    for slot in (-1, 2, 2**70):
        assert cache.slot_storage(0, slot) is None
    assert lk.KvCache.with_dims(1, 2, 4).slot_storage(0, lk.KvSlot.K) is None
    for bad in (0.0, "0", None, True):
        with pytest.raises(lk.DTypeError, match="need a whole number"):
            cache.layer(bad)
        for at in ((bad, 0), (0, bad)):
            with pytest.raises(
                lk.DTypeError, match=r"slot_storage: got \w+ .*, need a whole number"
            ):
                cache.slot_storage(*at)


def test_set_layer_is_the_only_way_to_other_storage(make):
    cache = make()
    with pytest.raises(TypeError):
        cache.layers[0] = None
    for name in ("layers", "n_kv_heads", "head_dim", "max_seq_len", "dtype"):
        with pytest.raises(AttributeError):
            setattr(cache, name, None)
    for name in ("k", "v", "k_version", "k_layout", "k_authority", "anything"):
        with pytest.raises(AttributeError):
            setattr(cache.layers[0], name, None)


def test_a_layer_describes_its_allocation(make, place):
    one = make(capacity=8).layers[0]
    assert one.k_layout.shape == one.v_layout.shape == (1, 2, 8, 4)
    assert one.k_layout.strides == (64, 32, 4, 1)
    authority = lk.AuthorityState.Device(lk.DeviceLocation(place))
    assert one.k_authority == one.v_authority
    assert (one.k_authority == lk.AuthorityState.Host) is (place == "cpu")
    assert (one.k_authority == authority) is (place != "cpu")
    assert isinstance(one.k_authority, lk.AuthorityState)


def test_where_bytes_are_authoritative_is_a_value_of_one_type():
    host, device = lk.AuthorityState.Host, lk.AuthorityState.Device
    here, there = (device(lk.DeviceLocation(f"cuda:{n}")) for n in (0, 1))
    assert host() == host == host()
    assert hash(host()) == hash(host)
    assert there == device(lk.DeviceLocation("cuda:1"))
    assert len({host(), host, here, there, device(here.location)}) == 3
    assert not {here} & {there, host(), device}
    assert (repr(host()), there.location.index) == ("Host", 1)
    assert repr(there).startswith("Device(")
    assert "cuda:1" in repr(there)
    assert all(isinstance(x, lk.AuthorityState) for x in (host(), here))


def test_a_layer_checks_k_against_v():
    k = lk.Storage.from_array(np.zeros((1, 2, 8, 4), np.float32))
    for other in ((1, 2, 7, 4), (1, 8, 2, 4), (1, 2, 8)):
        with pytest.raises(lk.ShapeError, match=r"f32\[1,2,8,4\]"):
            lk.KvLayer(k, lk.Storage.from_array(np.zeros(other, np.float32)))
    with pytest.raises(lk.DTypeError, match="one dtype"):
        lk.KvLayer(k, lk.Storage.from_array(np.zeros((1, 2, 8, 4), np.float16)))
    with pytest.raises(lk.BindingError, match="two storages"):
        lk.KvLayer(k, k)
    with pytest.raises(lk.BindingError, match="got V ndarray, need a Storage"):
        lk.KvLayer(k, np.zeros((1, 2, 8, 4), np.float32))


def test_versions_count_per_slot(make):
    cache = make()
    cache.bump_version(1, lk.KvSlot.V)
    cache.bump_version(1, 1)
    assert [(x.k_version, x.v_version) for x in cache.layers] == [(0, 0), (0, 2)]
    for absent in (-1, 2):
        cache.bump_version(absent, lk.KvSlot.K)
    lk.KvCache.with_dims(1, 2, 4).bump_version(0, lk.KvSlot.K)
    assert [(x.k_version, x.v_version) for x in cache.layers] == [(0, 0), (0, 2)]
    with refused(cache, lk.RangeError, "got slot 2"):
        cache.bump_version(0, 2)


def test_a_version_is_never_seen_twice(make, layer):
    """Whatever becomes of the storage, who compares versions sees that it changed."""
    cache = make(4)
    shared = layer(9, batch=4)
    verbs = [
        lambda: append_rows(cache, [1, 2]), cache.reset, lambda: append_rows(cache, [1]),
        lambda: cache.grow(9), lambda: cache.repeat(2), lambda: cache.select([1]),
        lambda: cache.repeat(4), lambda: cache.reorder([3, 2, 1, 0]),
        lambda: cache.set_layer(0, shared), lambda: cache.set_layer(0, layer(9, batch=4)),
        lambda: cache.set_layer(0, shared),
    ]  # fmt: skip
    seen = [(0, 0)]
    for verb in verbs:
        verb()
        seen.append((cache.layers[0].k_version, cache.layers[0].v_version))
    cache.clear()
    cache.set_layer(0, layer(9, batch=4))
    seen.append((cache.layers[0].k_version, cache.layers[0].v_version))
    for half in zip(*seen, strict=True):
        assert sorted(set(half)) == list(half)
    assert cache.layers[1] is None


# The allocation's identity


def test_the_id_names_the_allocation(make, layer):
    cache = make()
    first = cache.alloc_id()
    append_rows(cache, [1, 2, 3])
    cache.write_bytes(0, 0, 0, 1, rows([5]))
    cache.truncate_to(2)
    cache.cached_len = 1
    cache.abort_step()
    cache.reset()
    assert cache.alloc_id() == first != 0
    cache.set_layer(0, layer())
    second = cache.alloc_id()
    cache.clear()
    third = cache.alloc_id()
    assert len({first, second, third, 0}) == 4


def test_ids_never_repeat_f5():
    seen = set()
    for _ in range(10_000):
        seen.add(lk.KvCache.with_dims(1, 1, 1).alloc_id())
    assert len(seen) == 10_000
    assert 0 not in seen


def test_the_location_is_proven_or_none(make, layer, place):
    cache = make()
    assert cache.device_location() == lk.DeviceLocation(place)
    cache.truncate_to(0)
    cache.reset()
    assert cache.device_location() == lk.DeviceLocation(place)
    cache.set_layer(0, layer())
    assert cache.device_location() is None
    cache = make()
    cache.clear()
    assert cache.device_location() is None


# set_layer and clear


def test_set_layer_replaces_storage_and_counts_on(make, layer):
    cache = make()
    append_rows(cache, [1, 2])
    new = layer()
    cache.set_layer(np.int64(1), new)
    assert cache.layers[1] is new
    assert cache.cached_len == 2
    assert line(cache.live(0)[0]) == [1, 2]
    assert line(cache.live(1)[0]) == [0, 0]
    assert (new.k_version, new.v_version) == (2, 2)
    other = layer()
    for _ in range(9):
        other.bump(lk.KvSlot.K)
    cache.set_layer(1, other)
    assert (other.k_version, other.v_version) == (9, 3)


@pytest.mark.parametrize(
    ("index", "other", "error", "words"),
    [
        (2, {}, lk.RangeError, "got layer 2"),
        (-1, {}, lk.RangeError, "got layer -1"),
        (0.0, {}, lk.DTypeError, "got layer 0.0"),
        (0, {"heads": 4, "dim": 2}, lk.ShapeError, "f32[1,4,8,2]"),
        (0, {"dim": 8}, lk.ShapeError, "f32[1,2,8,8]"),
        (0, {"batch": 2}, lk.ShapeError, "f32[2,2,8,4]"),
        (0, {"capacity": 9}, lk.ShapeError, "need capacity 8"),
        (0, {"dtype": "f16"}, lk.DTypeError, "got f16, need f32"),
        (0, None, lk.BindingError, "need a KvLayer"),
    ],
)
def test_set_layer_refuses_what_does_not_fit(make, layer, index, other, error, words):
    cache = make()
    append_rows(cache, [1, 2])
    with refused(cache, error, "KvCache.set_layer", words):
        cache.set_layer(index, None if other is None else layer(**other))


def test_a_layer_of_another_geometry_is_refused_i5(layer):
    cache = lk.KvCache.with_dims(2, 3, 2)
    cache.set_layer(0, layer(heads=3, dim=2))
    with refused(cache, lk.ShapeError, "need [1,3,n,2]"):
        cache.set_layer(1, layer(heads=4, dim=4))


def test_two_layers_never_share_storage_i6(make, layer):
    cache = make(layers=3)
    append_rows(cache, [1, 2])
    with refused(cache, lk.BindingError, "a storage that layer 0 holds"):
        cache.set_layer(2, cache.layers[0])
    # A read-only import may not be written either.
    view = np.zeros((1, 2, 8, 4), np.float32)
    view.flags.writeable = False
    cache.set_layer(2, lk.KvLayer(lk.Storage.wrap(view), layer().v))
    with refused(cache, lk.BindingError, "read-only"):
        cache.append(2, rows([1]), rows([1]))


@pytest.mark.parametrize("half", ["K", "V"])
def test_slots_never_share_memory_i6(make, layer, half):
    """Different storages over one array of the caller: each write would be in both."""
    memory = np.zeros((2, 1, 2, 8, 4), np.float32)
    wrap, cache = lk.Storage.wrap, make(layers=3)
    with refused(
        cache, lk.BindingError, "one memory for KvCache layer 1, K and KvCache layer 1, V"
    ):
        cache.set_layer(
            1, lk.KvLayer(wrap(memory[0]), wrap(memory.reshape(-1)[32:96].reshape(1, 2, 8, 4)))
        )
    cache.set_layer(1, lk.KvLayer(wrap(memory[0]), wrap(memory[1])))
    again = wrap(memory["KV".index(half)])
    pair = (again, layer().v) if half == "K" else (layer().k, again)
    with refused(cache, lk.BindingError, f"layer 2, {half} and KvCache layer 1, {half}"):
        cache.set_layer(2, lk.KvLayer(*pair))
    cache.set_layer(1, lk.KvLayer(wrap(memory[1]), wrap(memory[0])))  # its own memory, put anew
    first = cache.slot_storage(0, 0)
    own = wrap(first, first.location)
    with refused(cache, lk.BindingError, "layer 2, V and KvCache layer 0, K"):
        cache.set_layer(2, lk.KvLayer(layer().k, own))


def test_under_with_dims_the_dtype_follows_the_first_layer(layer):
    cache = lk.KvCache.with_dims(2, 2, 4)
    cache.set_layer(1, layer(capacity=3, dtype="f16"))
    assert cache.dtype == lk.f16
    with refused(cache, lk.DTypeError, "got f32, need f16"):
        cache.set_layer(0, layer(capacity=3))
    cache.set_layer(1, layer(capacity=6, dtype="f16"))  # grown by replacement
    cache.clear()
    assert cache.dtype is None
    cache.set_layer(0, layer(capacity=3))
    assert cache.dtype == lk.f32


def test_clear_drops_storage_and_length(make):
    cache = make()
    append_rows(cache, [1, 2])
    gone = weakref.ref(cache.layers[0].k)
    cache.clear()
    gc.collect()
    assert gone() is None
    assert cache.layers == (None, None)
    assert (cache.cached_len, cache.max_seq_len, cache.dtype) == (0, 8, lk.f32)
    one = rows([1])
    for call in (
        lambda: cache.append(0, one, one),
        lambda: cache.append_all([one, one], [one, one]),
        lambda: cache.append_all([], []),
        lambda: cache.write_bytes(0, 0, 0, 1, one),
    ):
        with refused(cache, lk.GraphError, "cleared", "reset()"):
            call()
    with refused(cache, lk.RangeError, "need a populated layer"):
        cache.live(0)


def test_reset_keeps_buffers_and_a_new_prompt_sees_none_of_the_old_c1(make):
    cache, new = make(), make()
    append_rows(cache, [0, 1, 2, 3, 4, 5])
    versions = cache.layers[0].k_version
    stores = [cache.slot_storage(0, s).id for s in lk.KvSlot]
    cache.reset()
    append_rows(cache, [20, 21, 22])
    append_rows(new, [20, 21, 22])
    assert [cache.slot_storage(0, s).id for s in lk.KvSlot] == stores
    assert len(cache) == 3
    assert cache.layers[0].k_version > versions
    for mine, fresh in zip(cache.live(1), new.live(1), strict=True):
        np.testing.assert_array_equal(mine, fresh)


# Length


def test_truncate_only_lowers_a1(make):
    cache = make()
    append_rows(cache, [0, 1, 2])
    unchanged = state(cache)
    for n in (3, 5, 2**62, 2**63, 10**30):
        cache.truncate_to(n)
        assert state(cache) == unchanged
    for n in (-5, -(10**30)):
        with refused(cache, lk.RangeError, f"truncate_to: got length {n}, need length >= 0"):
            cache.truncate_to(n)
    with refused(cache, lk.DTypeError, "truncate_to"):
        cache.truncate_to(1.0)
    cache.truncate_to(np.int64(0))
    assert len(cache) == 0
    before = state(cache)["slots"]
    append_rows(cache, [9])
    assert line(cache.live(0)[0]) == [9]
    kept = np.frombuffer(before[0, "k"][3], np.float32).reshape(2, 8, 4)
    np.testing.assert_array_equal(cache.layers[0].k.to_numpy()[0, :, 1:], kept[:, 1:])


def test_truncating_touches_no_storage(make):
    cache = make()
    append_rows(cache, [0, 1, 2])
    before = state(cache)
    cache.truncate_to(1)
    after = state(cache)
    assert (after["alloc_id"], after["slots"]) == (before["alloc_id"], before["slots"])
    assert line(cache.live(0)[0]) == [0]


def test_the_length_may_be_assigned_within_capacity(make):
    cache = make()
    cache.cached_len = 8
    assert len(cache) == 8
    cache.cached_len = np.int32(2)
    assert len(cache) == 2
    with refused(cache, lk.RangeError, "got 9", "capacity 8"):
        cache.cached_len = 9
    with refused(cache, lk.RangeError, "got length -1"):
        cache.cached_len = -1
    for bad in (1.5, "1", None, True):
        with refused(cache, lk.DTypeError, "need a whole number"):
            cache.cached_len = bad


def test_live_rows_of_a_layer_shorter_than_the_length_are_refused(layer):
    cache = lk.KvCache.with_dims(1, 2, 4)
    cache.set_layer(0, layer(capacity=3))
    cache.cached_len = 3
    assert cache.live(0)[0].shape == (1, 2, 3, 4)
    cache.cached_len = 4
    with refused(cache, lk.RangeError, "need 4 <= capacity 3"):
        cache.live(0)


def test_the_length_is_counted_never_inferred_d6_d7(make):
    empty = make(layers=1, heads=4, dim=2)
    assert len(empty) == 0
    assert empty.live(0)[0].shape == (1, 4, 0, 2)
    cache = make()
    append_rows(cache, [0, 0, 5])
    assert len(cache) == 3
    cache.reset()
    assert len(cache) == 0
    assert cache.layers[0].k.to_numpy().any()


def test_a_length_handed_out_does_not_move_e7(make):
    cache = make()
    append_rows(cache, [0, 1, 2, 3, 4])
    taken = cache.cached_len
    append_rows(cache, [5])
    assert (taken, cache.cached_len) == (5, 6)
