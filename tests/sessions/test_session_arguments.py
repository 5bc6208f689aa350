"""Arguments that would weld a plan to the wrong rows, and memory that has to come back."""

import copy
import gc
import pickle
import threading

import numpy as np
import pytest

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.device import register_backend

ROW = np.ones((1, 1, 1, 4), np.float32)


def step_of(cache):
    g = lk.Graph()
    shape = (1, 1, cache.max_seq_len, 4)
    k, v = g.placeholder(shape, "f32", "k"), g.placeholder(shape, "f32", "v")
    q, row = g.placeholder((1, 1, 1, 4), "f32", "q"), g.placeholder((1, 1, 1, 4), "f32", "row")
    pos = lk.Sym("pos", 0, cache.max_seq_len - 1)
    k_all, v_all = k.at[:, :, pos : pos + 1].set(row), v.at[:, :, pos : pos + 1].set(row)
    return lk.attention(q, k_all, v_all, length=pos + 1), k, v, {"q": q, "row": row}, pos


def build(cache, kv_nodes=None, **changes):
    out, k, v, bound, pos = step_of(cache)
    call = {"kv": cache, "kv_nodes": kv_nodes(k, v) if kv_nodes else [(k, v)], "bound": bound}
    call = {"model_key": ("m",), **call, **changes}
    return lk.DecodeSession.build(call.pop("ctx", lk.InferenceContext()), out, **call), pos


@pytest.mark.parametrize(
    "kv_nodes",
    [lambda k, v: [(k, k)], lambda k, v: [(k, v), (k, v)], lambda k, v: [(k, v), (v, k)]],
)
def test_a_node_stands_for_one_slot(kv_nodes):
    cache = lk.KvCache.with_capacity(2, 1, 4, 8, "f32")
    with pytest.raises(lk.GraphError, match="got one node for several slots, need one each"):
        build(cache, kv_nodes)


@pytest.mark.parametrize(
    "change",
    [
        {"kv": None},
        {"bound": None},
        {"ctx": None},
        {"model_key": "abc"},
        {"model_key": ("a", [1])},
        {"model_key": ("a", ({},))},
    ],
)
def test_what_cannot_be_baked_is_refused_by_name(change):
    cache = lk.KvCache.with_capacity(1, 1, 4, 8, "f32")
    with pytest.raises((lk.GraphError, lk.BindingError), match=r"got .*, need "):
        build(cache, **change)


@pytest.mark.parametrize("data", [None, [1], "ids"])
def test_step_data_is_a_mapping(data):
    cache = lk.KvCache.with_capacity(1, 1, 4, 8, "f32")
    session, pos = build(cache)
    with pytest.raises(lk.BindingError, match="need a mapping of names"):
        session.step(data, {pos: 0})
    with pytest.raises(lk.SymbolError, match="need a SymEnv or a mapping"):
        session.step({"q": ROW, "row": ROW}, 5)
    assert session.step({"q": ROW, "row": ROW}, {pos: 0}).tolist() == ROW.tolist()


def test_a_second_thread_is_refused_while_one_appends():
    cache = lk.KvCache.with_capacity(1, 1, 4, 8, "f32")
    seen = []

    def other():
        try:
            cache.append(0, ROW, ROW)
        except lk.SessionBusy as e:
            seen.append(str(e))

    with cache.owned("test"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(seen) == 1
    assert len(cache) == 0


def test_memory_of_dropped_caches_and_plans_comes_back_without_a_collection():
    backend = SimBackend()
    register_backend("sim", backend)
    place = backend.locations()[0]
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            before = backend.used_bytes(place)
            cache = lk.KvCache.with_capacity(2, 1, 4, 64, "f32", "sim:0")
            cache.append_all([ROW] * 2, [ROW] * 2)
            cache.write_bytes(0, lk.KvSlot.K, 3, 1, ROW)
            cache.grow(128)
            cache.clear()
            del cache
            assert backend.used_bytes(place) == before
    finally:
        gc.enable()


def test_copies_of_handles_do_not_half_work():
    cache = lk.KvCache.with_capacity(1, 1, 4, 8, "f32")
    storage = cache.slot_storage(0, 0)
    assert copy.copy(storage) is storage
    assert copy.deepcopy(storage) is storage
    for thing in (cache, lk.Graph(), lk.Graph().const([1.0])):
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(lk.GraphError, match="got a copy or a pickle"):
                make(thing)
    with pytest.raises(lk.BindingError, match="got a pickle"):
        pickle.dumps(storage)


def test_a_refused_run_leaves_the_bindings_as_they_were():
    g = lk.Graph()
    p, o = g.placeholder((4,), "f32", "p"), g.placeholder((4,), "f32", "o")
    store, frozen = lk.Storage.from_array(np.zeros(4, np.float32)), np.zeros(4, np.float32)
    frozen.flags.writeable = False
    plan = lk.plan(p.at[0:1].set(o[1:2]) + o, {p: store, o: np.arange(4, dtype=np.float32)})
    first = plan.run()
    with pytest.raises(lk.BindingError):
        plan.run({o: np.full(4, 9, np.float32), p: lk.Storage.wrap(frozen)})
    assert plan.run().tolist() == first.tolist()


def test_storages_over_one_memory_are_one_storage_to_a_plan_that_writes():
    memory = np.zeros(6, np.float32)
    whole, part = lk.Storage.wrap(memory), lk.Storage.wrap(memory[:3])
    g = lk.Graph()
    a, b = g.placeholder((6,), "f32", "a"), g.placeholder((3,), "f32", "b")
    write = a.at[0:3].set(g.const(np.ones(3, np.float32)))
    with pytest.raises(lk.BindingError, match="a and b: got the same memory"):
        lk.realize([write, b + 0], {a: whole, b: part})
    assert lk.realize([a + 0, b + 0], {a: whole, b: part})[1].tolist() == [0, 0, 0]


def test_queries_that_overflow_give_zeros_not_nan():
    g = lk.Graph()
    big = np.full((1, 1, 1, 4), 1e20, np.float32)
    k, v = g.const(np.repeat(-big, 3, axis=2)), g.const(np.ones((1, 1, 3, 4), np.float32))
    assert lk.realize(lk.attention(g.const(big), k, v)).tolist() == [[[[0.0] * 4]]]


@pytest.mark.parametrize("data", [b"\0\0\x80?", memoryview(np.array([1 / 3]))])
def test_typed_buffers_are_not_numbers_to_convert(data):
    with pytest.raises(lk.DTypeError, match="need dtype f32"):
        lk.Graph().const(data, "f32")


@pytest.mark.parametrize(
    "verb",
    [
        lambda c: c.truncate_to(0),
        lambda c: c.reset(),
        lambda c: setattr(c, "cached_len", 1),
        lambda c: c.clear(),
        lambda c: c.grow(16),
        lambda c: c.write_bytes(0, 0, 0, 1, ROW),
        lambda c: c.append(0, ROW, ROW),
        lambda c: c.reorder([0]),
        lambda c: c.repeat(2),
        lambda c: c.savepoint(),
    ],
)
def test_no_verb_of_another_thread_runs_during_a_step(verb):
    cache = lk.KvCache.with_capacity(1, 1, 4, 8, "f32")
    cache.append(0, ROW, ROW)
    before = (len(cache), cache.alloc_id(), cache.live(0)[0].tolist())
    seen = []

    def other():
        try:
            verb(cache)
        except lk.SessionBusy as e:
            seen.append(str(e))

    with cache.owned("a step"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(seen) == 1
    assert (len(cache), cache.alloc_id(), cache.live(0)[0].tolist()) == before


def test_a_context_belongs_to_one_thread_from_refresh_to_step():
    ctx, seen = lk.InferenceContext(), []
    cache = lk.KvCache.with_capacity(1, 1, 4, 8, "f32")

    def other():
        try:
            ctx.refresh(cache, model_key=("m",))
        except lk.SessionBusy as e:
            seen.append(str(e))

    with ctx.owned("decode"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(seen) == 1


class Source:
    """A cache behind three methods, one of which misbehaves."""

    def __init__(self, cache, **changes):
        self.cache, self.reads = cache, []
        self.changes = changes

    def alloc_id(self):
        return self.changes.get("alloc_id", self.cache.alloc_id())

    def rebind_location(self):
        return self.cache.rebind_location()

    def rebind_slot(self, layer, which):
        self.reads.append((layer, which))
        return self.cache.rebind_slot(layer, which)


def test_a_rebind_reads_its_source_once_and_commits_all_or_nothing():
    old, new = (lk.KvCache.with_capacity(1, 1, 4, 8, "f32") for _ in range(2))
    session, pos = build(old)
    good = Source(new)
    assert session.rebind_kv(good) is None
    assert sorted(good.reads) == [(0, 0), (0, 1), (0, 2), (1, 0)]  # what there must not be too
    before = (session.alloc_id, session.rebind_count, list(session.history))
    with pytest.raises(lk.DTypeError, match="got alloc_id 'x', need a whole number"):
        session.rebind_kv(Source(old, alloc_id="x"))
    with pytest.raises(lk.BindingError, match="got NoneType, need a cache"):
        session.rebind_kv(None)
    assert (session.alloc_id, session.rebind_count, list(session.history)) == before
    session.step({"q": ROW, "row": ROW}, {pos: 0})
    assert new.slot_storage(0, 0).to_numpy()[0, 0, 0].tolist() == [1] * 4
    assert old.slot_storage(0, 0).to_numpy().max() == 0


def test_a_new_kind_of_baked_fact_needs_a_reader(monkeypatch):
    from_plan = lk.Plan.manifest.fget
    monkeypatch.setattr(
        lk.Plan, "manifest", property(lambda p: from_plan(p).with_baked({"window": 4}))
    )
    with pytest.raises(lk.GraphError, match="got baked 'window', need a way to read"):
        build(lk.KvCache.with_capacity(1, 1, 4, 8, "f32"))
