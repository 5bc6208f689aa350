"""What DecodeSession.build takes and refuses, and what an InferenceContext holds."""

import numpy as np
import pytest
from steps import attention_step, data, run

import lazykv as lk


@pytest.fixture
def make(new_cache):
    return new_cache


def build(step, cache, ctx=None, **changes):
    options = {"kv": cache, "kv_nodes": step.kv_nodes, "bound": step.bound} | changes
    return lk.DecodeSession.build(ctx or lk.InferenceContext(), step.target, **options)


def test_a_session_names_what_it_holds(make):
    cache = make()
    step = attention_step(cache)
    session = build(step, cache)
    assert session.alloc_id == cache.alloc_id()
    assert session.kv_nodes == tuple(step.kv_nodes)
    assert session.realize_count == 0
    assert "0 steps" in repr(session)
    run(session, step, cache, data(step, 1))
    assert (session.realize_count, session.node_count > 0) == (1, True)


def test_more_layers_than_nodes_is_a_graph_error(make):
    cache = make()
    step = attention_step(cache)
    with pytest.raises(lk.GraphError, match="got 2 layers in kv and 1 kv_nodes"):
        build(step, cache, kv_nodes=step.kv_nodes[:1])


def test_fewer_layers_than_nodes_are_refused(make):
    step = attention_step(make(2))
    with pytest.raises(lk.BindingError, match="no storage for layer 1, slot 0"):
        build(step, make(1))


def test_a_cleared_cache_is_refused(make):
    cache = make()
    step = attention_step(cache)
    cache.clear()
    with pytest.raises(lk.BindingError, match="no storage for layer 0"):
        build(step, cache)


def test_a_cache_of_another_geometry_is_refused(make):
    step = attention_step(make())
    other = make(capacity=9)
    with pytest.raises(lk.BindingError, match=r"got f32\[1,2,9,4\], need f32\[1,2,8,4\]"):
        build(step, other)


def test_what_is_neither_bound_nor_held_is_named(make):
    cache = make()
    step = attention_step(cache)
    q = step.bound.pop("q")
    with pytest.raises(lk.BindingError, match="placeholder q: got no binding"):
        build(step, cache)
    ctx = lk.InferenceContext("cpu")
    ctx.insert(q, lk.Storage.from_array(np.zeros(q.shape, np.float32)))
    session = build(step, cache, ctx)
    feed = data(step, 3)
    assert np.unique(session.step(feed, {step.pos: 0})).tolist() == [6.0]


def test_bound_names_must_be_placeholders_not_bound_elsewhere(make):
    cache = make()
    step = attention_step(cache)
    with pytest.raises(lk.GraphError, match="need a placeholder"):
        build(step, cache, bound={"q": step.target})
    with pytest.raises(lk.GraphError, match="need a placeholder"):
        build(step, cache, bound={"q": 3})
    with pytest.raises(lk.BindingError, match="bound both per step and to a storage"):
        build(step, cache, bound={**step.bound, "k0": step.kv_nodes[0][0]})


def test_a_constant_cannot_stand_for_a_slot(make):
    cache = make(1)
    step = attention_step(cache)
    const = step.target.graph.const(np.zeros((1, 2, 8, 4), np.float32))
    target = step.target + const.slice(2, 0, 1)
    with pytest.raises(lk.BindingError, match="need a placeholder"):
        lk.DecodeSession.build(
            lk.InferenceContext(), target, kv=cache, kv_nodes=[(const, step.kv_nodes[0][1])],
            bound=step.bound,
        )  # fmt: skip


# InferenceContext


def test_a_context_holds_storages_by_node():
    ctx = lk.InferenceContext(device="cpu")
    g = lk.Graph()
    x, y = g.placeholder((2,), "f32", "x"), g.placeholder((2,), "f32", "y")
    store = lk.Storage.from_array(np.array([1, 2], np.float32))
    assert bool(ctx)
    ctx.insert(x, store)
    ctx.insert(y.node_id, store)
    assert (len(ctx), ctx.contains(x), y in ctx, ctx.get(y)) == (2, True, True, store)
    assert ctx.get(x.node_id) is store
    assert ctx.remove(y) is store
    assert ctx.remove(y) is None
    assert (len(ctx), ctx.contains(y), ctx.get(y)) == (1, False, None)
    np.testing.assert_array_equal(ctx.realize(x * 2.0), [2, 4])
    pos = lk.Sym("pos")
    out = ctx.realize_many([x * 2.0, x.slice(0, pos, 1)], {pos: 1})
    np.testing.assert_array_equal(out[0], [2, 4])
    np.testing.assert_array_equal(out[1], [2])
    assert ctx.realize_many([]) == []
    ctx.clear_persistent()
    assert len(ctx) == 0
    with pytest.raises(lk.BindingError, match="placeholder x: got no binding"):
        ctx.realize(x * 2.0)


def test_a_context_refuses_what_it_cannot_bind():
    ctx, g = lk.InferenceContext(), lk.Graph()
    x = g.placeholder((2,), "f32", "x")
    with pytest.raises(lk.BindingError, match=r"got f32\[3\], need f32\[2\]"):
        ctx.insert(x, lk.Storage.from_array(np.zeros(3, np.float32)))
    with pytest.raises(lk.BindingError, match=r"got f64\[2\], need f32\[2\]"):
        ctx.insert(x, lk.Storage.from_array(np.zeros(2)))
    with pytest.raises(lk.BindingError, match="got ndarray, need a Storage"):
        ctx.insert(x, np.zeros(2, np.float32))
    for node in ("x", None, 1.0, True):
        with pytest.raises(lk.GraphError, match="need a Tensor or a node id"):
            ctx.insert(node, lk.Storage.from_array(np.zeros(2, np.float32)))
    assert len(ctx) == 0
    with pytest.raises(lk.BackendUnavailable):
        lk.InferenceContext("nowhere:0")


def test_writes_through_a_context_reach_the_cache(make):
    cache = make(1)
    g, pos = lk.Graph(), lk.Sym("pos")
    dest = g.placeholder((1, 2, 8, 4), "f32")
    row = g.const(np.full((1, 2, 1, 4), 7, np.float32))
    ctx = lk.InferenceContext()
    ctx.insert(dest, cache.slot_storage(0, lk.KvSlot.K))
    ctx.realize(dest.at[:, :, pos : pos + 1].set(row).slice(2, 0, 1), {pos: 3})
    cache.cached_len = 4
    assert cache.live(0)[0][0, 1, :, 0].tolist() == [0, 0, 0, 7]


def test_a_context_carries_one_session(make):
    ctx, cache = lk.InferenceContext(), make()
    step = attention_step(cache)
    assert not ctx.has_decode_session()
    assert ctx.take_decode_session() is None
    session = build(step, cache, ctx)
    ctx.put_decode_session(session)
    assert ctx.has_decode_session()
    assert ctx.take_decode_session() is session
    assert not ctx.has_decode_session()
    ctx.put_decode_session(session)
    ctx.clear_persistent()
    assert not ctx.has_decode_session()
