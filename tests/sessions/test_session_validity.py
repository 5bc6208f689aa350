"""Whether a held plan may run for a cache: everything it baked counts, nothing that it binds."""

import numpy as np
import pytest
from steps import attention_step, data, run
from toy_backends import Toy, registered

import lazykv as lk
from lazykv.device import register_backend, registry, unregister_backend

AllocationChanged, Stale, Valid = (
    lk.PlanValidity.AllocationChanged,
    lk.PlanValidity.Stale,
    lk.PlanValidity.Valid,
)


@pytest.fixture
def make(new_cache):
    return new_cache


def hold(cache: lk.KvCache, *, seq: int = 1, model_key: tuple = ("m",)) -> lk.DecodeSession:
    return attention_step(cache, seq=seq).session(cache, seq=seq, model_key=model_key)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"layers": 3}, "kv.layers"),
        ({"layers": 1}, "kv.layers"),
        ({"heads": 4}, "kv.heads"),
        ({"dim": 6}, "kv.head_dim"),
        ({"heads": 4, "dim": 2}, "kv.head_dim"),  # the same bytes
        ({"capacity": 9}, "kv.capacity"),
        ({"dtype": "f16"}, "kv.dtype"),
    ],
)
def test_another_geometry_is_stale(make, other, field):
    session, cache = hold(make()), make(**other)
    assert session.validity_for(cache, model_key=("m",)) is Stale
    assert not session.is_valid_for(cache, model_key=("m",))
    different = session.differences(cache, model_key=("m",))
    assert field in different
    assert "kv.alloc_id" in different


def test_another_number_of_tokens_is_stale(make):
    cache = make()
    session = hold(cache, seq=2)
    assert session.validity_for(cache, seq=2, model_key=("m",)) is Valid
    assert session.validity_for(cache, model_key=("m",)) is Stale
    assert session.differences(cache, seq=3, model_key=("m",)) == {"seq": (2, 3)}


ONE, OTHER = lk.ModelInstanceId(), lk.ModelInstanceId()
KEYS = [
    (), ("m",), ("n",), ("m", 1), ("m", True), ("m", 1.0), ("m", 0), ("m", False), ("m", 0.0),
    ("m", -0.0), ("m", 1.0000000000000002), ("m", None), ("m", float("nan")), ("m", ONE),
    ("m", OTHER), ("m", int(ONE) + 10**6), ("m", (1, 2)), ("m", (1, True)), ("m", (1,), 2),
    ("m", "1"), ("m", b"1"), (("m", 1),), ("m", 2**80), ("m", np.float64(1.0)),
]  # fmt: skip


@pytest.mark.parametrize("mine", range(len(KEYS)))
def test_model_keys_compare_by_value_and_type(make, mine):
    """Every pair of keys: the same one keeps the plan, any other makes it stale."""
    cache = make()
    session = hold(cache, model_key=KEYS[mine])
    for n, key in enumerate(KEYS):
        want = Valid if n == mine else Stale
        assert session.validity_for(cache, model_key=key) is want, (KEYS[mine], key)
        assert session.is_valid_for(cache, model_key=key) is (want is Valid)


def test_a_model_id_is_no_plain_number(make):
    cache = make()
    session = hold(cache, model_key=("m", ONE))
    assert session.validity_for(cache, model_key=("m", int(ONE))) is Stale


def test_another_allocation_alone_is_named_so(make):
    a, b = make(), make()
    session = hold(a)
    assert session.alloc_id == a.alloc_id()
    assert session.validity_for(b, model_key=("m",)) is AllocationChanged
    # With any other difference beside it, re-binding would not help.
    assert session.validity_for(b, model_key=("n",)) is Stale
    assert session.validity_for(b, seq=2, model_key=("m",)) is Stale
    assert not session.is_valid_for(b, model_key=("m",))
    assert session.validity_for(a, model_key=("m",)) is Valid


def test_what_mints_an_id_ends_validity_and_what_keeps_it_does_not(make):
    cache = make()
    step = attention_step(cache)
    session = step.session(cache, model_key=("m",))
    for token in range(5):
        run(session, step, cache, data(step, token))
    cache.truncate_to(3)
    cache.write_bytes(0, 0, 0, 1, bytes(32))
    cache.cached_len = 4
    cache.reset()
    assert session.validity_for(cache, model_key=("m",)) is Valid
    zeros = np.zeros((1, 2, 8, 4), np.float32)
    cache.set_layer(0, lk.KvLayer(lk.Storage.from_array(zeros), lk.Storage.from_array(zeros)))
    assert session.validity_for(cache, model_key=("m",)) is AllocationChanged
    cache.clear()
    assert session.validity_for(cache, model_key=("m",)) is AllocationChanged


def test_a_deleted_cache_is_never_mistaken_for_a_new_one_f5(make):
    cache = make(layers=1, capacity=2)
    session = hold(cache)
    del cache
    for _ in range(10_000):
        fresh = lk.KvCache.with_dims(1, 2, 4)
        assert session.alloc_id != fresh.alloc_id()
    for _ in range(100):
        fresh = make(layers=1, capacity=2)
        assert session.validity_for(fresh, model_key=("m",)) is AllocationChanged


def test_a_fresh_cache_never_sees_the_old_ones_rows(make):
    """SES-9: request A is retired, B comes with a cache of the same shape."""
    a, b = make(), make()
    step = attention_step(a)
    session = step.session(a, model_key=("m",))
    for token in (5, 6):
        run(session, step, a, data(step, token))
    assert session.validity_for(b, model_key=("m",)) is AllocationChanged
    held = step.session(b, model_key=("m",))
    out = run(held, step, b, data(step, 1))
    assert np.unique(out).tolist() == [2.0]
    assert session.validity_for(a, model_key=("m",)) is Valid


def test_bound_data_is_no_part_of_validity(make):
    cache = make()
    step = attention_step(cache)
    session = step.session(cache, model_key=("m",))
    plan = session.plan.id
    for token in range(8):
        run(session, step, cache, data(step, token, seed=token))
        assert session.differences(cache, model_key=("m",)) == {}
    assert session.plan.id == plan
    assert set(session.plan.manifest.bound) >= {"q", "k", "v", "pos"}


@pytest.fixture
def topology():
    """Other tests' plans were made under the generations there were before."""
    before = dict(registry.generations)
    yield
    registry.generations = before


@pytest.mark.usefixtures("topology")
def test_the_topology_is_part_of_validity(make):
    cache = make()
    step = attention_step(cache)
    session = step.session(cache, model_key=("m",))
    want = run(session, step, cache, data(step, 3))
    cache.truncate_to(0)
    backend = lk.device("cpu").backend
    with registered(Toy()):
        pass
    assert session.validity_for(cache, model_key=("m",)) is Valid
    np.testing.assert_array_equal(session.step(data(step, 3), {step.pos: 0}), want)
    register_backend("cpu", backend)
    assert session.validity_for(cache, model_key=("m",)) is Stale
    assert list(session.differences(cache, model_key=("m",))) == ["generation:cpu"]
    stored = cache.layers[0].k.to_numpy()
    with pytest.raises(lk.TopologyChanged, match="plan again"):
        session.step(data(step, 9), {step.pos: 0})
    np.testing.assert_array_equal(cache.layers[0].k.to_numpy(), stored)
    again = step.session(cache, model_key=("m",))
    np.testing.assert_array_equal(again.step(data(step, 3), {step.pos: 0}), want)


@pytest.mark.usefixtures("topology")
def test_a_lost_backend_makes_plans_stale_rather_than_failing(make):
    backend = lk.device("cpu").backend
    cache = make()
    session = hold(cache)
    unregister_backend("cpu")
    try:
        assert session.validity_for(cache, model_key=("m",)) is Stale
    finally:
        register_backend("cpu", backend)


def test_everything_in_the_manifest_is_named(make):
    cache = make(layers=1)
    baked = hold(cache).manifest.baked
    for name in ("structure", "seq", "model_key", "kv.alloc_id", "generation:cpu", "range:pos"):
        assert name in baked
    assert baked["storage:k0"] == int(cache.slot_storage(0, 0).id)
    assert baked["storage:v0"] == int(cache.slot_storage(0, 1).id)
