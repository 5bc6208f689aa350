"""KvCache with one device per layer (KV-11)."""

import numpy as np
import pytest
from kv_state import append_rows, line, refused, rows

import lazykv as lk

SIM0, SIM1, CPU = (lk.DeviceLocation(name) for name in ("sim:0", "sim:1", "cpu"))


def make(*places: str | None, capacity: int = 8) -> lk.KvCache:
    return lk.KvCache.with_capacity(len(places), 2, 4, capacity, "f32", list(places))


def test_every_layer_lives_where_it_was_put():
    cache = make("sim:0", "sim:1", "cpu")
    assert [cache.layer_location(i) for i in range(3)] == [SIM0, SIM1, CPU]
    assert [s.location for x in cache.layers for s in (x.k, x.v)] == [
        SIM0, SIM0, SIM1, SIM1, CPU, CPU
    ]  # fmt: skip
    assert cache.device_location() is cache.rebind_location() is None
    for index in (-1, 3, 2**70):
        assert cache.layer_location(index) is None
    with pytest.raises(lk.DTypeError, match=r"layer_location: got layer 1\.5, need a whole number"):
        cache.layer_location(1.5)
    assert cache.layers[1].k_authority == lk.AuthorityState.Device(SIM1)


def test_devices_are_taken_in_every_form():
    cache = make(lk.device("sim:1"), SIM0, "cpu")
    assert [cache.layer_location(i) for i in range(3)] == [SIM1, SIM0, CPU]


def test_one_device_per_layer_is_proven_layer_by_layer():
    """Even if they are equal, only `layer_location` answers, and a rebind asks that."""
    for places in (("sim:1", "sim:1"), ("cpu",), ("cpu", "cpu")):
        cache = make(*places)
        assert cache.device_location() is cache.rebind_location() is None
        assert [str(cache.layer_location(i)) for i in range(len(places))] == list(places)
        assert str(cache.only_location()) == places[0]
    for places in (("sim:0", "sim:1"), ("cpu", None), (None, None)):
        assert make(*places).only_location() is None
    latent = lk.LatentKvCache.with_capacity(2, 4, [(2,)], "f32", ["cpu", "cpu"])
    ring = lk.SlidingKvCache.with_capacity(2, 1, 2, 4, "f32", ["cpu", "cpu"])
    assert latent.device_location() is ring.device_location() is None
    assert latent.layer_location(1) == ring.layer_location(1) == CPU


def test_rows_go_to_every_device_in_one_pass():
    cache, alone = make("sim:0", "sim:1"), make("cpu", "cpu")
    for values in ([1, 2, 3], [4], []):
        append_rows(cache, values)
        append_rows(alone, values)
    for i in range(2):
        for mine, other in zip(cache.live(i), alone.live(i), strict=True):
            np.testing.assert_array_equal(mine, other)
    before = lk.stats()
    append_rows(cache, [5])
    after = lk.stats()
    passes = after.plans_built + after.plan_cache_hits
    assert passes == before.plans_built + before.plan_cache_hits + 1
    k, v = cache.append(1, rows([6]), rows([1006]))
    assert (line(k), line(v)) == ([1, 2, 3, 4, 5, 6], [1001, 1002, 1003, 1004, 1005, 1006])
    assert len(cache) == 5
    cache.append(0, rows([6]), rows([1006]))
    assert len(cache) == 6
    cache.truncate_to(2)
    assert [line(cache.live(i)[1]) for i in range(2)] == [[1001, 1002]] * 2


def test_bytes_go_to_the_layers_own_device():
    cache = make("sim:0", "sim:1")
    cache.write_bytes(1, 0, 0, 1, rows([7]), "sim:1")
    with refused(cache, lk.BindingError, "got device sim:0, need the cache's own sim:1"):
        cache.write_bytes(1, 0, 0, 1, rows([8]), "sim:0")
    cache.cached_len = 1
    assert (line(cache.live(1)[0]), line(cache.live(0)[0])) == ([7], [0])


def test_a_process_may_lack_layers():
    cache = make(None, "sim:1", None)
    assert [x is None for x in cache.layers] == [True, False, True]
    assert [cache.layer_location(i) for i in range(3)] == [None, SIM1, None]
    assert cache.device_location() is None
    one = rows([1])
    assert len(cache.append_all([one], [one])) == 1
    cache.append(1, one, one)  # the only layer closes the step
    assert len(cache) == 2
    with refused(cache, lk.RangeError, "got an absent layer, need a populated one"):
        cache.append(0, one, one)
    with refused(cache, lk.RangeError, "need a populated layer"):
        cache.live(2)
    cache.bump_version(0, 0)


def test_grow_and_truncate_keep_every_place():
    cache = make("sim:0", "sim:1", None, capacity=2)
    append_first_two(cache, [1, 2])
    cache.grow(4)
    assert [cache.layer_location(i) for i in range(3)] == [SIM0, SIM1, None]
    assert [x and x.k.location for x in cache.layers] == [SIM0, SIM1, None]
    append_first_two(cache, [3, 4])
    assert [line(cache.live(i)[0]) for i in (0, 1)] == [[1, 2, 3, 4]] * 2


def append_first_two(cache: lk.KvCache, values: list[float]) -> None:
    cache.append_all([rows(values)] * 2, [rows(values)] * 2)


def test_batches_move_on_their_own_devices():
    cache = lk.KvCache.with_capacity(2, 2, 4, 8, "f32", ["sim:0", "sim:1"], batch=2)
    pair = np.concatenate([rows([1]), rows([2])])
    cache.append_all([pair] * 2, [pair] * 2)
    cache.reorder([1, 0])
    cache.select([0, 0, 1])
    for i, place in enumerate((SIM0, SIM1)):
        assert cache.layers[i].k.location == cache.layer_location(i) == place
        assert cache.live(i)[1][:, 0, 0, 0].tolist() == [2, 2, 1]


def test_replacing_a_layer_forfeits_its_own_location_alone():
    cache = lk.KvCache.with_capacity(2, 2, 4, 8, "f32", "sim:0")
    cache.set_layer(1, make("sim:0").layers[0])
    assert [cache.layer_location(i) for i in (0, 1)] == [SIM0, None]
    assert cache.device_location() is None
    cache.clear()
    assert [cache.layer_location(i) for i in (0, 1)] == [None, None]


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        (["cpu"], lk.ShapeError, "got 1 devices, need one per layer (2)"),
        (["cpu"] * 3, lk.ShapeError, "got 3 devices"),
        ([], lk.ShapeError, "got 0 devices"),
        (["cpu", "nowhere:0"], lk.BackendUnavailable, "nowhere"),
        (["cpu", "sim:2"], lk.BackendUnavailable, "sim:2"),
        (["cpu", 5], lk.BackendUnavailable, "5"),
        (None, lk.BackendUnavailable, "None"),
        (5, lk.BackendUnavailable, "5"),
    ],
)
def test_bad_devices_fail_before_anything_is_allocated(device, error, words):
    before = lk.stats().allocations
    with pytest.raises(error) as caught:
        lk.KvCache.with_capacity(2, 2, 4, 8, "f32", device)
    assert words in str(caught.value)
    assert lk.stats().allocations == before


def test_no_layer_anywhere_is_a_cache_without_storage():
    cache = make(None, None)
    assert cache.device_location() is None
    with refused(cache, lk.LazyKvError, "KvCache.append"):
        cache.append(0, rows([1]), rows([1]))
