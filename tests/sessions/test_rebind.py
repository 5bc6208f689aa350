"""Re-binding a held plan to another cache: what is allowed, every refusal, and refresh."""

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_state import append_rows, machine_settings, raw_bytes, state
from steps import Step, attention_step, data, run

import lazykv as lk
from lazykv.device import register_backend, registry
from lazykv.sessions.decode import HISTORY
from lazykv.sessions.rebind import Absent, Dropped, Kept, Rebound

KEY = ("m",)
CPU, SIM0, SIM1 = (lk.DeviceLocation(name) for name in ("cpu", "sim:0", "sim:1"))
AllocationChanged, Stale, Valid = (
    lk.PlanValidity.AllocationChanged,
    lk.PlanValidity.Stale,
    lk.PlanValidity.Valid,
)


def make(*, layers=2, heads=2, dim=4, capacity=8, dtype="f32", device="cpu", batch=1):
    return lk.KvCache.with_capacity(layers, heads, dim, capacity, dtype, device, batch)


def hold(cache: lk.KvCache) -> tuple[Step, lk.DecodeSession]:
    step = attention_step(cache)
    return step, step.session(cache, model_key=KEY)


def mean(out: np.ndarray) -> float:
    """What a step returned, all of whose elements are one number."""
    (value,) = np.unique(out)
    return float(value)


@dataclass
class Source:
    """A source that has the three methods of the protocol and nothing else."""

    storages: list[tuple[lk.Storage | None, lk.Storage | None]]
    location: lk.DeviceLocation | None = CPU
    identity: int = 10**9

    @classmethod
    def of(cls, cache: lk.KvCache) -> "Source":
        slots = [(x.k, x.v) for x in cache.layers]
        return cls(slots, cache.rebind_location(), cache.alloc_id())

    def alloc_id(self):
        return self.identity

    def rebind_location(self):
        return self.location

    def rebind_slot(self, layer, which):
        return self.storages[layer][which]


def zeros(shape=(1, 2, 8, 4), dtype="f32", device="cpu") -> lk.Storage:
    return lk.Storage.from_array(np.zeros(shape, lk.dtype(dtype).numpy), device)


def tear(storage: lk.Storage) -> None:
    def fail_midway():
        with storage.write():
            raise KeyError

    with pytest.raises(KeyError):
        fail_midway()


# Success


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
def test_a_plan_moves_to_another_cache_of_the_same_kind(place):
    a, b, alone = (make(device=place) for _ in range(3))
    step, session = hold(a)
    for token in (5, 6):
        run(session, step, a, data(step, token, seed=token))
    append_rows(b, [1, 2, 3])
    append_rows(alone, [1, 2, 3])
    plan, nodes, kept, before = session.plan.id, session.node_count, state(a), lk.stats()
    assert session.rebind_kv(b) is None
    after = lk.stats()
    assert (after.plans_built, after.plan_cache_hits, after.allocations, after.kernels_run) == (
        before.plans_built, before.plan_cache_hits, before.allocations, before.kernels_run
    )  # fmt: skip
    assert (session.plan.id, session.node_count) == (plan, nodes)
    assert session.alloc_id == b.alloc_id()
    assert session.validity_for(b, model_key=KEY) is Valid
    assert session.validity_for(a, model_key=KEY) is AllocationChanged
    other_step, other = hold(alone)
    for token in range(5):
        feed = data(step, token, seed=token)
        want = run(other, other_step, alone, feed)
        np.testing.assert_array_equal(run(session, step, b, feed), want)
    assert [raw_bytes(x.v) for x in b.layers] == [raw_bytes(x.v) for x in alone.layers]
    assert state(a) == kept
    baked = session.manifest.baked
    assert baked["storage:k0"] == int(b.slot_storage(0, 0).id)
    assert baked["kv.alloc_id"] == int(b.alloc_id())


def test_a_plan_moves_back_and_forth():
    caches = [make() for _ in range(3)]
    step, session = hold(caches[0])
    for token in range(8):
        for n, cache in enumerate(caches):
            assert session.rebind_kv(cache) is None
            out = run(session, step, cache, data(step, 10 * token + n))
            assert mean(out) == 2 * (10 * token / 2 + n)
    assert session.rebind_count == 24
    assert session.realize_count == 24


def test_rebinding_to_the_same_cache_changes_nothing():
    cache = make()
    step, session = hold(cache)
    run(session, step, cache, data(step, 3))
    before = state(cache)
    assert session.rebind_kv(cache) is None
    assert (state(cache), session.alloc_id) == (before, cache.alloc_id())
    assert mean(run(session, step, cache, data(step, 5))) == 8


def test_a_refused_or_done_rebind_leaves_no_hold_on_the_old_cache():
    a, b = make(), make()
    step, session = hold(a)
    session.rebind_kv(b)
    with a.layers[0].k.write() as k:  # the plan no longer claims it
        k[...] = 7
    assert mean(run(session, step, b, data(step, 1))) == 2


# Refusals


def replaced_layer() -> lk.KvCache:
    cache = make()
    cache.set_layer(1, lk.KvLayer(zeros(), zeros()))
    return cache


def by_replacement() -> lk.KvCache:
    cache = lk.KvCache.with_dims(2, 2, 4)
    for i in range(2):
        cache.set_layer(i, lk.KvLayer(zeros(), zeros()))
    return cache


def cleared() -> lk.KvCache:
    cache = make()
    cache.clear()
    return cache


def torn(layer: int, which: int) -> lk.KvCache:
    cache = make()
    tear(cache.slot_storage(layer, which))
    return cache


def with_slots(**changes: lk.Storage | None) -> Source:
    """A source of good storages but for the named ones (``k0 v0 k1 v1``)."""
    names = [("k0", "v0"), ("k1", "v1")]
    return Source(
        [
            tuple(changes.get(n, zeros()) if n in changes else zeros() for n in pair)
            for pair in names
        ]
    )


def frozen() -> lk.Storage:
    array = np.zeros((1, 2, 8, 4), np.float32)
    array.flags.writeable = False
    return lk.Storage.wrap(array)


SHARED = zeros()
F32, F16 = lk.f32, lk.f16
SHAPE = (1, 2, 8, 4)

REFUSALS: list[tuple[Callable[[], lk.KvRebindSource], lk.RebindRefusal, dict[str, object]]] = [
    (cleared, lk.ResidencyUnknown(), {"layer": 0}),
    (replaced_layer, lk.ResidencyUnknown(), {"layer": 1}),
    (by_replacement, lk.ResidencyUnknown(), {"layer": 0}),
    (lambda: Source.of(by_replacement()), lk.ResidencyUnknown(), {"layer": 0}),
    (lambda: make(device="sim:0"), lk.ResidencyDiffers(CPU, SIM0), {}),
    (lambda: make(device=["cpu", "sim:1"]), lk.ResidencyDiffers(CPU, SIM1), {}),
    (lambda: make(layers=1), lk.MissingSlot(1, 0), {}),
    (lambda: with_slots(v1=None), lk.MissingSlot(1, 1), {}),
    (lambda: with_slots(k0=None), lk.MissingSlot(0, 0), {}),
    (lambda: make(layers=3), lk.StorageDiffers(2, 0),
     {"what": "layers", "baked": 2, "incoming": 3}),
    (lambda: make(dtype="f16"), lk.StorageDiffers(0, 0),
     {"what": "dtype", "baked": F32, "incoming": F16}),
    (lambda: make(capacity=9), lk.StorageDiffers(0, 0),
     {"what": "shape", "baked": SHAPE, "incoming": (1, 2, 9, 4)}),
    (lambda: make(heads=4, dim=2), lk.StorageDiffers(0, 0),
     {"what": "shape", "baked": SHAPE, "incoming": (1, 4, 8, 2)}),
    (lambda: make(batch=2), lk.StorageDiffers(0, 0),
     {"what": "shape", "baked": SHAPE, "incoming": (2, 2, 8, 4)}),
    (lambda: with_slots(v1=zeros((1, 2, 4, 8))), lk.StorageDiffers(1, 1),
     {"what": "shape", "baked": SHAPE, "incoming": (1, 2, 4, 8)}),
    (lambda: with_slots(k1=zeros(dtype="i32")), lk.StorageDiffers(1, 0),
     {"what": "dtype", "baked": F32, "incoming": lk.i32}),
    (lambda: with_slots(v0=zeros(device="sim:1")), lk.StorageDiffers(0, 1),
     {"what": "location", "baked": CPU, "incoming": SIM1}),
    (lambda: with_slots(k1=frozen()), lk.StorageDiffers(1, 0),
     {"what": "frozen", "baked": False, "incoming": True}),
    (lambda: with_slots(k0=SHARED, v1=SHARED), lk.StorageDiffers(1, 1),
     {"what": "id", "incoming": SHARED.id}),
    (lambda: torn(0, 0), lk.StorageTorn(0, 0), {}),
    (lambda: torn(1, 1), lk.StorageTorn(1, 1), {}),
]  # fmt: skip


@pytest.mark.parametrize(("source", "refusal", "fields"), REFUSALS)
def test_a_refusal_says_why_and_changes_nothing(source, refusal, fields):
    cache = make()
    step, session = hold(cache)
    for token in (5, 6):
        run(session, step, cache, data(step, token))
    incoming = source()
    both = [cache, incoming] if isinstance(incoming, lk.KvCache) else [cache]
    held = (session.plan, session.plan.id, session.alloc_id, session.node_count)
    before, calls = [state(c) for c in both], list(session.plan._calls)
    got = session.rebind_kv(incoming)
    assert got == refusal
    assert type(got) is type(refusal)
    assert isinstance(got, lk.RebindRefusal)
    assert {name: getattr(got, name) for name in fields} == fields
    assert [state(c) for c in both] == before
    assert (session.plan, session.plan.id, session.alloc_id, session.node_count) == held
    assert session.plan._calls == calls
    assert (session.rebind_count, session.realize_count) == (0, 2)
    assert session.history[-1] == ("refused", cache.alloc_id(), incoming.alloc_id(), got)
    assert session.validity_for(cache, model_key=KEY) is Valid
    assert mean(run(session, step, cache, data(step, 4))) == 2 * 5


def test_location_is_compared_before_storages_and_torn_comes_last():
    cache = make()
    _, session = hold(cache)
    # Everything differs: the location is named.
    assert session.rebind_kv(make(layers=3, dtype="f16", device="sim:0")) == (
        lk.ResidencyDiffers(CPU, SIM0)
    )
    unknown = with_slots(k0=None, v0=zeros(dtype="f16"))
    unknown.location = None
    assert session.rebind_kv(unknown) == lk.ResidencyUnknown()
    elsewhere = torn(0, 0)
    elsewhere.set_layer(1, lk.KvLayer(zeros(), zeros()))
    assert session.rebind_kv(elsewhere) == lk.ResidencyUnknown()
    # More layers come before the layers there are.
    assert session.rebind_kv(make(layers=3, dtype="f16")) == lk.StorageDiffers(2, 0)
    # A torn slot can be repaired, a different one cannot.
    broken = torn(0, 0)
    mixed = Source.of(broken)
    mixed.storages[1] = (zeros(), zeros((1, 2, 9, 4)))
    assert session.rebind_kv(mixed) == lk.StorageDiffers(1, 1)
    mixed.storages[1] = (zeros(), None)
    assert session.rebind_kv(mixed) == lk.MissingSlot(1, 1)
    mixed.storages[1] = (zeros(), zeros())
    assert session.rebind_kv(mixed) == lk.StorageTorn(0, 0)
    with broken.layers[0].k.write() as k:
        k[...] = 0
    assert session.rebind_kv(mixed) is None


def test_refusals_compare_by_what_they_name():
    assert lk.MissingSlot(1, 0) == lk.MissingSlot(1, 0) != lk.MissingSlot(0, 1)
    assert lk.MissingSlot(1, 0) != lk.StorageTorn(1, 0)
    assert lk.StorageDiffers(1, 0, "dtype", 1, 2) == lk.StorageDiffers(1, 0)
    assert "dtype" in repr(lk.StorageDiffers(1, 0, "dtype", "f32", "f16"))
    assert lk.ResidencyDiffers(CPU, SIM0) != lk.ResidencyDiffers(CPU, SIM1)
    assert len({lk.MissingSlot(1, 0), lk.MissingSlot(1, 0), lk.StorageTorn(1, 0)}) == 2


def test_refusals_are_reachable_by_their_kind():
    for name in (
        "ResidencyUnknown", "ResidencyDiffers", "MissingSlot", "StorageDiffers", "StorageTorn"
    ):  # fmt: skip
        assert getattr(lk.RebindRefusal, name) is getattr(lk, name)
    assert lk.RebindRefusal.MissingSlot(1, 0) == lk.MissingSlot(1, 0)
    assert [f.name for f in dataclasses.fields(lk.MissingSlot)] == ["layer", "which"]


def test_a_source_that_counts_its_layers_in_a_field():
    class Counted(Source):
        n_layers = 3

    _, session = hold(make())
    source = Counted([(zeros(), zeros())] * 3)
    assert session.rebind_kv(source) == lk.StorageDiffers(2, 0)


# One device per layer


def test_two_stages_decode_like_one_device():
    """KV-11: a cache with a layer on each of two devices, and its session re-bound."""
    alone, first, second = make(), make(device=["sim:0", "sim:1"]), make(device=["sim:0", "sim:1"])
    lone_step, lone = hold(alone)
    step, session = hold(first)
    for cache in (first, second):
        if cache is second:
            assert session.rebind_kv(second) is None
            alone.reset()
        for token in range(8):
            feed = data(step, 0, seed=token)
            want = run(lone, lone_step, alone, feed)
            np.testing.assert_array_equal(run(session, step, cache, feed), want)
    assert first.layers[0].k.to_numpy().tobytes() == alone.layers[0].k.to_numpy().tobytes()


def test_residency_is_proved_layer_by_layer():
    _, session = hold(make(device=["sim:0", "sim:1"]))
    swapped = make(device=["sim:1", "sim:0"])
    assert session.rebind_kv(swapped) == lk.ResidencyDiffers(SIM0, SIM1)
    half = make(device=["sim:0", "sim:1"])
    half.set_layer(1, lk.KvLayer(zeros(device="sim:1"), zeros(device="sim:1")))
    refusal = session.rebind_kv(half)
    assert (refusal, refusal.layer) == (lk.ResidencyUnknown(), 1)
    one_place = make(device="sim:0")
    assert session.rebind_kv(one_place) == lk.ResidencyDiffers(SIM1, SIM0)
    # A source that cannot tell per layer proves nothing.
    assert session.rebind_kv(Source.of(make(device=["sim:0", "sim:1"]))) == lk.ResidencyUnknown()
    grown = make(device=["sim:0", "sim:1"], capacity=4)
    grown.grow(8)
    assert session.rebind_kv(grown) is None


def test_a_layer_that_this_process_lacks_is_not_asked_for():
    a, b = (make(device=["cpu", None]) for _ in range(2))
    step = attention_step(make(layers=1))
    nodes = [step.kv_nodes[0], None]
    session = lk.DecodeSession.build(
        lk.InferenceContext(), step.target, kv=a, kv_nodes=nodes, bound=step.bound, model_key=KEY
    )
    assert session.rebind_kv(b) is None
    assert mean(session.step(data(step, 3), {step.pos: 0})) == 3
    assert b.layers[0].k.to_numpy().any()
    assert not a.layers[0].k.to_numpy().any()


# Any source


def test_three_methods_make_a_source():
    source = with_slots()
    assert isinstance(source, lk.KvRebindSource)
    assert isinstance(make(), lk.KvRebindSource)
    assert not isinstance(object(), lk.KvRebindSource)
    cache = make()
    step, session = hold(cache)
    assert session.rebind_kv(source) is None
    assert session.alloc_id == 10**9
    assert mean(session.step(data(step, 3), {step.pos: 0})) == 6
    assert source.storages[1][1].to_numpy()[0, 0, 0].tolist() == [3] * 4
    assert not cache.layers[1].v.to_numpy().any()


def test_a_session_is_built_on_any_source():
    a, b = with_slots(), with_slots()
    b.identity += 1
    step = attention_step(make())
    session = lk.DecodeSession.build(
        lk.InferenceContext(), step.target, kv=a, kv_nodes=step.kv_nodes, bound=step.bound,
        model_key=KEY,
    )  # fmt: skip
    assert session.validity_for(a, model_key=KEY) is Valid
    assert session.validity_for(b, model_key=KEY) is AllocationChanged
    assert session.validity_for(b, model_key=()) is Stale
    # A KvCache tells more than this source did: that is a difference too.
    assert session.validity_for(make(), model_key=KEY) is Stale
    ctx = lk.InferenceContext()
    ctx.put_decode_session(session)
    assert ctx.refresh(b, model_key=KEY) == Rebound
    assert session.validity_for(b, model_key=KEY) is Valid


# Retiring and admitting


def test_a_fresh_request_never_sees_the_retired_ones_rows():
    """SES-9, by rebind: A's rows would weigh in the mean if any were read."""
    a, b = make(), make()
    step, session = hold(a)
    for _ in range(6):
        run(session, step, a, data(step, 100))
    kept = state(a)
    assert session.rebind_kv(b) is None
    for token in (1, 3):
        out = run(session, step, b, data(step, token))
    assert mean(out) == 4
    assert state(a) == kept
    assert session.rebind_kv(a) is None
    assert mean(run(session, step, a, data(step, 100))) == 200


def test_a_fresh_request_never_sees_the_retired_ones_rows_through_refresh():
    ctx, a = lk.InferenceContext(), make()
    step, session = hold(a)
    ctx.put_decode_session(session)
    for _ in range(6):
        run(session, step, a, data(step, 100))
    plan, plans = session.plan.id, lk.stats().plans_built
    for request in range(5):
        fresh = make()
        assert ctx.refresh(fresh, model_key=KEY) == Rebound
        for token in (request, request + 2):
            out = run(session, step, fresh, data(step, token))
        assert mean(out) == 2 * (request + 1)
    assert (session.plan.id, lk.stats().plans_built) == (plan, plans)


def test_a_session_that_was_not_refreshed_writes_only_its_own_cache():
    a, b = make(), make()
    step, session = hold(a)
    before = state(b)
    session.step(data(step, 9), {step.pos: 0})
    assert session.validity_for(b, model_key=KEY) is AllocationChanged
    assert state(b) == before


# refresh: the one decision


def context(cache: lk.KvCache) -> tuple[lk.InferenceContext, Step, lk.DecodeSession]:
    ctx = lk.InferenceContext()
    step, session = hold(cache)
    ctx.put_decode_session(session)
    return ctx, step, session


def test_nothing_held_is_absent():
    ctx = lk.InferenceContext()
    got = ctx.refresh(make(), model_key=KEY)
    assert got == Absent
    assert not ctx.has_decode_session()


@pytest.mark.parametrize(
    "change",
    [
        lambda c: None,
        lambda c: c.truncate_to(1),
        lambda c: c.reset(),
        lambda c: setattr(c, "cached_len", 5),
        lambda c: c.write_bytes(0, 0, 0, 8, bytes(256)),
        lambda c: append_rows(c, [1]),
        lambda c: c.savepoint().rollback(),
        lambda c: c.reorder([0]),
        lambda c: c.grow(8),
        lambda c: c.repeat(1),
    ],
)
def test_what_the_plan_did_not_bake_keeps_it(change):
    cache = make()
    ctx, step, session = context(cache)
    for token in (1, 2):
        run(session, step, cache, data(step, token))
    change(cache)
    assert ctx.refresh(cache, model_key=("m",)) == Kept
    assert ctx.take_decode_session() is session
    assert (session.rebind_count, len(session.history)) == (0, 1)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"layers": 3}, {"kv.layers"}),
        ({"heads": 4, "dim": 2}, {"kv.heads", "kv.head_dim"}),
        ({"capacity": 16}, {"kv.capacity"}),
        ({"dtype": "bf16"}, {"kv.dtype"}),
        ({"batch": 2}, {"kv.batch"}),
    ],
)
def test_what_the_plan_baked_drops_it(other, names):
    cache = make()
    ctx, _, session = context(cache)
    before = (session.alloc_id, session.plan.id, state(cache))
    got = ctx.refresh(make(**other), model_key=KEY)
    assert got == Dropped
    assert got.refusal is None
    assert set(got.differences) == names | {"kv.alloc_id"}
    assert not ctx.has_decode_session()
    assert (session.alloc_id, session.plan.id, state(cache)) == before
    assert session.rebind_count == 0


@pytest.mark.parametrize(
    ("key", "differences"),
    [
        ({"model_key": ("n",)}, {"model_key": (("m",), ("n",))}),
        ({"model_key": ("m", 1)}, {"model_key": (("m",), ("m", 1))}),
        ({"model_key": KEY, "seq": 2}, {"seq": (1, 2)}),
    ],
)
def test_another_model_or_step_drops_it(key, differences):
    cache = make()
    ctx, _, _ = context(cache)
    got = ctx.refresh(cache, **key)
    assert (got, got.refusal, got.differences) == (Dropped, None, differences)
    assert str(differences) in repr(got)
    assert ctx.refresh(cache, model_key=KEY) == Absent


@pytest.mark.parametrize(
    ("source", "refusal"),
    [
        (cleared, lk.ResidencyUnknown()),
        (replaced_layer, lk.ResidencyUnknown()),
        (lambda: make(device="sim:0"), lk.ResidencyDiffers(CPU, SIM0)),
        (lambda: torn(1, 0), lk.StorageTorn(1, 0)),
    ],
)
def test_a_refused_rebind_drops_it_with_the_refusal(source, refusal):
    cache = make()
    ctx, step, session = context(cache)
    run(session, step, cache, data(step, 1))
    before, incoming = state(cache), source()
    got = ctx.refresh(incoming, model_key=KEY)
    assert got == Dropped
    assert got.refusal == refusal
    assert set(got.differences) == {"kv.alloc_id"}
    assert got.differences["kv.alloc_id"] == (int(cache.alloc_id()), int(incoming.alloc_id()))
    assert not ctx.has_decode_session()
    assert state(cache) == before
    assert session.history[-1][0] == "refused"


def test_dispositions_compare_with_their_kinds():
    kinds = (Absent, Kept, Rebound, Dropped)
    assert kinds == tuple(
        getattr(lk.SessionDisposition, name) for name in ("Absent", "Kept", "Rebound", "Dropped")
    )
    for kind in kinds:
        value = kind()
        assert isinstance(value, lk.SessionDisposition)
        assert [value == other for other in kinds] == [kind is other for other in kinds]
        assert [value == other() for other in kinds] == [kind is other for other in kinds]
        assert value in {kind}
        assert repr(value).startswith(kind.__name__)
    assert Dropped(lk.MissingSlot(0, 0)) == Dropped()
    assert Kept() != "Kept"
    for member in lk.PlanValidity:
        assert [member == other for other in lk.PlanValidity].count(True) == 1


# What else a plan bakes


def lent_query() -> tuple[lk.InferenceContext, Step, lk.KvCache, lk.DecodeSession, lk.Tensor]:
    """A session whose query lies in a storage that the context lends."""
    ctx, cache = lk.InferenceContext(), make()
    step = attention_step(cache)
    q = step.bound.pop("q")
    ctx.insert(q, zeros(q.shape))
    session = lk.DecodeSession.build(
        ctx, step.target, kv=cache, kv_nodes=step.kv_nodes, bound=step.bound, model_key=KEY
    )
    ctx.put_decode_session(session)
    return ctx, step, cache, session, q


def test_a_storage_of_the_context_is_baked():
    ctx, step, cache, session, q = lent_query()
    first, other = ctx.get(q), zeros(q.shape)
    assert session.validity_for(cache, model_key=KEY) is Valid
    assert session.validity_for(make(), model_key=KEY) is AllocationChanged
    ctx.insert(q, other)
    assert session.validity_for(cache, model_key=KEY) is Stale
    assert session.differences(cache, model_key=KEY) == {
        f"ctx:q#{q.node_id}": (int(first.id), int(other.id))
    }
    assert session.validity_for(make(), model_key=KEY) is Stale
    ctx.insert(q, first)
    assert session.validity_for(cache, model_key=KEY) is Valid
    # Its bytes are not baked: the next step reads what is there.
    with first.write() as a:
        a[...] = 0
    assert mean(session.step(data(step, 4), {step.pos: 0})) == 8
    assert session.validity_for(cache, model_key=KEY) is Valid
    ctx.remove(q)
    assert session.differences(cache, model_key=KEY) == {
        f"ctx:q#{q.node_id}": (int(first.id), None)
    }
    assert ctx.refresh(cache, model_key=KEY) == Dropped


def test_a_storage_that_the_plan_does_not_need_is_not_baked():
    ctx, _, cache, session, _ = lent_query()
    g = lk.Graph()
    unused = g.placeholder((2,), "f32")
    ctx.insert(unused, zeros((2,)))
    assert session.validity_for(cache, model_key=KEY) is Valid
    assert ctx.refresh(cache, model_key=KEY) == Kept


class Tagged(lk.KvCache):
    """A cache whose plans bake one more thing."""

    tag: object = 1

    def plan_facts(self):
        return {**super().plan_facts(), "tag": self.tag}


NAN = float("nan")


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (1, 1, True), ("a", "a", True), (None, None, True), ((1, 2.0), (1, 2.0), True),
        (NAN, float("nan"), True), (0.0, 0.0, True),
        (1, 2, False), (1, True, False), (1, 1.0, False), ("1", 1, False), (1, None, False),
        (None, 0, False), (0.0, -0.0, False), ((1,), (True,), False), ((0.0,), (-0.0,), False),
    ],
)  # fmt: skip
def test_a_newly_baked_fact_invalidates_by_itself(then, now, same):
    """SES-5: nothing but the cache's own list of facts knows of the tag."""
    a = Tagged.with_capacity(2, 2, 4, 8, "f32")
    b = Tagged.with_capacity(2, 2, 4, 8, "f32")
    a.tag, b.tag = then, now
    _, session = hold(a)
    assert session.validity_for(b, model_key=KEY) is (AllocationChanged if same else Stale)
    a.tag = now
    assert session.validity_for(a, model_key=KEY) is (Valid if same else Stale)
    assert session.is_valid_for(a, model_key=KEY) is same
    assert set(session.differences(a, model_key=KEY)) == (set() if same else {"kv.tag"})


def test_a_fact_that_only_one_side_has_is_a_difference():
    plain, tagged = make(), Tagged.with_capacity(2, 2, 4, 8, "f32")
    for a, b, pair in ((plain, tagged, (None, 1)), (tagged, plain, (1, None))):
        _, session = hold(a)
        assert session.validity_for(b, model_key=KEY) is Stale
        assert session.differences(b, model_key=KEY)["kv.tag"] == pair


# One owner, one topology


def inside_a_step(session: lk.DecodeSession, step: Step, action: Callable[[], None]) -> None:
    """Run `action` while the plan's first kernel runs."""
    kernel, args = session.plan._calls[0]

    def both(*given):
        action()
        return kernel(*given)

    session.plan._calls[0] = (both, args)
    try:
        session.step(data(step, 1), {step.pos: 0})
    finally:
        session.plan._calls[0] = (kernel, args)


def test_a_rebind_during_a_step_is_busy_p1():
    a, b = make(), make()
    ctx, step, session = context(a)
    caught = []

    def rebind():
        for call in (lambda: session.rebind_kv(b), lambda: ctx.refresh(b, model_key=KEY)):
            with pytest.raises(lk.SessionBusy, match="got a rebind while a step runs") as e:
                call()
            caught.append(e.value)

    inside_a_step(session, step, rebind)
    assert len(caught) == 2
    assert (session.alloc_id, session.rebind_count) == (a.alloc_id(), 0)
    assert ctx.has_decode_session()
    assert list(session.history) == [("built", a.alloc_id())]
    assert session.rebind_kv(b) is None


def test_a_rebind_in_another_thread_is_busy_and_the_step_is_whole_p1():
    a, b = make(), make()
    step, session = hold(a)
    started, finish = threading.Event(), threading.Event()

    def wait():
        started.set()
        finish.wait(30)

    worker = threading.Thread(target=inside_a_step, args=(session, step, wait))
    worker.start()
    try:
        assert started.wait(30)
        before = state(b)
        with pytest.raises(lk.SessionBusy):
            session.rebind_kv(b)
    finally:
        finish.set()
        worker.join(30)
    assert state(b) == before
    assert a.layers[1].v.to_numpy()[0, 0, 0, 0] == 1


@pytest.fixture
def topology():
    """Other tests' plans were made under the generations there were before."""
    before = dict(registry.generations)
    yield
    registry.generations = before


@pytest.mark.usefixtures("topology")
@pytest.mark.parametrize("place", ["cpu", "sim:0"])
def test_another_topology_is_an_error_and_no_refusal(place):
    a, b = make(device=place), make(device=place)
    ctx, _, session = context(a)
    before = [state(c) for c in (a, b)]
    location = lk.DeviceLocation(place)
    register_backend(location.kind, lk.device(place).backend)
    with pytest.raises(lk.TopologyChanged, match=f"of {place}.*plan again"):
        session.rebind_kv(b)
    assert [state(c) for c in (a, b)] == before
    assert (session.alloc_id, session.rebind_count) == (a.alloc_id(), 0)
    assert list(session.history) == [("built", a.alloc_id())]
    got = ctx.refresh(a, model_key=KEY)
    assert (got, got.refusal, list(got.differences)) == (Dropped, None, [f"generation:{place}"])


# Counters and history


def test_every_rebind_is_counted_and_remembered():
    caches = [make() for _ in range(2)]
    a, b = (c.alloc_id() for c in caches)
    _, session = hold(caches[0])
    empty = cleared()
    assert session.rebind_kv(caches[1]) is None
    refusal = session.rebind_kv(empty)
    assert list(session.history) == [
        ("built", a), ("rebound", a, b), ("refused", b, empty.alloc_id(), refusal),
    ]  # fmt: skip
    for n in range(200):
        assert session.rebind_kv(caches[n % 2]) is None
    assert session.rebind_count == 201
    assert len(session.history) == HISTORY
    assert session.history[-1] == ("rebound", a, b)
    assert session.history[0] == ("rebound", b, a)


# Against plain lists


class Request:
    """A cache and the numbers it should hold: K and V rows of every layer are ``rows[p]``."""

    def __init__(self, device: str) -> None:
        self.cache = make(device=device)
        self.rows = [0.0] * 8
        self.length = 0
        self.proven = True


class RebindMachine(RuleBasedStateMachine):
    """Requests share one context: whatever happens to their caches, a step after `refresh` gives
    the mean of exactly the rows that its own cache holds."""

    @initialize(device=st.sampled_from(["cpu", "sim:0"]))
    def start(self, device: str) -> None:
        self.device = device
        self.ctx = lk.InferenceContext()
        self.step = attention_step(make())
        self.requests = [Request(device) for _ in range(3)]
        self.owner: tuple[int, int] | None = None
        self.built = 0
        self.next_value = 0.0

    def expected(self, request: Request) -> lk.SessionDisposition:
        if self.owner is None:
            return Absent
        if self.owner == (int(request.cache.alloc_id()), 8):
            return Kept
        return Rebound if request.proven else Dropped

    @rule(which=st.integers(0, 2))
    def decode(self, which: int) -> None:
        request = self.requests[which]
        if request.length == 8:
            return
        want = self.expected(request)
        got = self.ctx.refresh(request.cache, model_key=KEY)
        assert got == want
        if got == Dropped:
            assert got.refusal == lk.ResidencyUnknown()
        if not self.ctx.has_decode_session():
            session = self.step.session(request.cache, model_key=KEY)
            self.ctx.put_decode_session(session)
            self.built += 1
        self.owner = (int(request.cache.alloc_id()), 8)
        session = self.ctx.take_decode_session()
        self.ctx.put_decode_session(session)
        self.next_value += 1
        out = run(session, self.step, request.cache, data(self.step, self.next_value))
        request.rows[request.length] = self.next_value
        request.length += 1
        live = np.array(request.rows[: request.length], np.float32)
        np.testing.assert_allclose(out, 2 * live.mean(), rtol=1e-5)

    @rule(which=st.integers(0, 2), n=st.integers(0, 8))
    def truncate(self, which: int, n: int) -> None:
        request = self.requests[which]
        request.cache.truncate_to(n)
        request.length = min(request.length, n)

    @rule(which=st.integers(0, 2), start=st.integers(0, 7))
    def write(self, which: int, start: int) -> None:
        request = self.requests[which]
        self.next_value += 1
        row = np.full((1, 2, 1, 4), self.next_value, np.float32)
        for layer in range(2):
            for slot in range(2):
                request.cache.write_bytes(layer, slot, start, 1, row)
        request.rows[start] = self.next_value

    @rule(which=st.integers(0, 2))
    def admit(self, which: int) -> None:
        self.requests[which] = Request(self.device)

    @rule(which=st.integers(0, 2), layer=st.integers(0, 1))
    def replace_a_layer(self, which: int, layer: int) -> None:
        """The same rows in a storage whose location is not proven."""
        request = self.requests[which]
        rows = np.array(request.rows, np.float32).reshape(1, 1, 8, 1) + np.zeros((1, 2, 1, 4), "f4")
        pair = [lk.Storage.from_array(rows.astype(np.float32), self.device) for _ in range(2)]
        request.cache.set_layer(layer, lk.KvLayer(*pair))
        request.proven = False

    @rule(which=st.integers(0, 2), other=st.integers(0, 2))
    def swap_owner(self, which: int, other: int) -> None:
        """The held session is offered another cache directly."""
        session = self.ctx.take_decode_session()
        if session is None:
            return
        self.ctx.put_decode_session(session)
        request = self.requests[which]
        refusal = session.rebind_kv(request.cache)
        if request.proven:
            assert refusal is None
            self.owner = (int(request.cache.alloc_id()), 8)
        else:
            assert refusal == lk.ResidencyUnknown()

    @invariant()
    def same_rows(self) -> None:
        for request in getattr(self, "requests", ()):
            rows = np.array(request.rows, np.float32).reshape(1, 1, 8, 1)
            whole = np.broadcast_to(rows, (1, 2, 8, 4)).tobytes()
            assert len(request.cache) == request.length
            for layer in request.cache.layers:
                assert raw_bytes(layer.k) == raw_bytes(layer.v) == whole


RebindMachine.TestCase.settings = machine_settings()
TestRebindMachine = RebindMachine.TestCase
