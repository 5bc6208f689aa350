"""What the verbs of sessions and contexts refuse, by name and before anything changes."""

from typing import Any

import numpy as np
import pytest
from steps import attention_step, data

import lazykv as lk

Stale, Valid = lk.PlanValidity.Stale, lk.PlanValidity.Valid
KEY = ("m", 1)


@pytest.fixture
def cache() -> lk.KvCache:
    return lk.KvCache.with_capacity(2, 2, 4, 8, "f32")


def hold(cache: lk.KvCache, **changes: Any) -> tuple[lk.InferenceContext, lk.DecodeSession]:
    ctx, step = lk.InferenceContext(), attention_step(cache)
    options = {"kv_nodes": step.kv_nodes, "bound": step.bound, "model_key": KEY} | changes
    session = lk.DecodeSession.build(ctx, step.target, kv=cache, **options)
    ctx.put_decode_session(session)
    return ctx, session


VERBS = [
    lambda ctx, session, kv, **asked: session.validity_for(kv, **asked),
    lambda ctx, session, kv, **asked: session.is_valid_for(kv, **asked),
    lambda ctx, session, kv, **asked: session.differences(kv, **asked),
    lambda ctx, session, kv, **asked: ctx.refresh(kv, **asked),
    lambda ctx, session, kv, **asked: lk.InferenceContext().refresh(kv, **asked),
    lambda ctx, session, kv, **asked: hold(kv, **asked),
]


# How many tokens, and which model


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("seq", "error"),
    [
        (0, lk.RangeError),
        (-1, lk.RangeError),
        (1.5, lk.DTypeError),
        ("1", lk.DTypeError),
        (None, lk.DTypeError),
        (True, lk.DTypeError),
        (np.ones(1), lk.DTypeError),
    ],
)
def test_seq_is_a_whole_number_from_one_on(cache, verb, seq, error):
    ctx, session = hold(cache)
    with pytest.raises(error, match="got seq"):
        verb(ctx, session, cache, seq=seq, model_key=KEY)
    assert ctx.take_decode_session() is session


def test_seq_may_be_any_kind_of_integer(cache):
    ctx, session = hold(cache, seq=np.int64(2))
    assert session.manifest.baked["seq"] == 2
    for seq in (2, np.int64(2), np.uint8(2), np.array(2)):
        assert session.validity_for(cache, seq=seq, model_key=KEY) is Valid
        assert session.differences(cache, seq=seq, model_key=KEY) == {}
    assert session.validity_for(cache, seq=np.int64(3), model_key=KEY) is Stale
    assert ctx.refresh(cache, seq=np.int64(2), model_key=KEY) == lk.SessionDisposition.Kept


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "key",
    [["m", 1], "m", None, 1, {"m": 1}, ("m", np.ones(1)), ("m", [1]), ("m", ({},)), (object,)],
)
def test_a_key_that_cannot_be_baked_is_refused_and_not_taken_for_another(cache, verb, key):
    ctx, session = hold(cache)
    with pytest.raises(lk.GraphError, match=r"got .*model_key.*, need (a tuple of|plain) values"):
        verb(ctx, session, cache, model_key=key)
    assert ctx.take_decode_session() is session


@pytest.mark.parametrize("kv", [None, "x", object()])
@pytest.mark.parametrize("held", [True, False])
def test_refresh_needs_a_cache(cache, kv, held):
    ctx, session = hold(cache)
    if not held:
        ctx.take_decode_session()
    with pytest.raises(lk.BindingError, match="need a cache"):
        ctx.refresh(kv, model_key=KEY)
    assert ctx.take_decode_session() is (session if held else None)


# Contexts


@pytest.mark.parametrize("target", ["x", None, 3, [], [1]])
def test_a_context_realizes_tensors(target):
    ctx, g = lk.InferenceContext(), lk.Graph()
    t = g.const([1.0])
    with pytest.raises(lk.GraphError, match=r"got \w+, need a Tensor; realize_many"):
        ctx.realize(target)
    with pytest.raises(lk.GraphError, match="got list, need a Tensor; realize_many"):
        ctx.realize([t])
    for several in (["x"], [t, None], t, None, 3, "x"):
        with pytest.raises(lk.GraphError, match="need a list of Tensors"):
            ctx.realize_many(several)
        with pytest.raises(lk.GraphError, match="need a list of Tensors"):
            ctx.bindings_for(several)
    assert ctx.realize_many(iter([t, t]))[1].tolist() == [1]


@pytest.mark.parametrize("other", ["x", None, 3, lk.DecodeSession])
def test_a_context_holds_sessions_only(cache, other):
    ctx, session = hold(cache)
    with pytest.raises(lk.GraphError, match=r"put_decode_session: got .*, need a DecodeSession"):
        ctx.put_decode_session(other)
    assert ctx.take_decode_session() is session


# Building


def nodes_of(cache: lk.KvCache) -> list[Any]:
    return attention_step(cache).kv_nodes


@pytest.mark.parametrize(
    "kv_nodes",
    [None, 3, "ab", [1, 2], ["kv", "kv"], [(1, 2), (3, 4)], [None, (1, None)], {}, iter(())],
)
def test_kv_nodes_are_placeholders_by_layer_and_slot(cache, kv_nodes):
    with pytest.raises(lk.GraphError, match=r"got .*kv_nodes.*, need a (list of a )?tuple"):
        hold(cache, kv_nodes=kv_nodes)


def test_a_tensor_is_no_layer_of_slots(cache):
    step = attention_step(cache)
    flat = [n for pair in step.kv_nodes for n in pair]
    with pytest.raises(lk.GraphError, match="for layer 0, need a tuple"):
        hold(cache, kv_nodes=flat)
    with pytest.raises(lk.GraphError, match="got kv_nodes Tensor, need a list"):
        hold(cache, kv_nodes=flat[0])


@pytest.mark.parametrize("bound", [{"q": [1]}, {"q": None}, {"q": {}}, {"q": np.ones(2)}])
def test_bound_values_are_placeholders(cache, bound):
    with pytest.raises(lk.GraphError, match="for 'q', need a placeholder"):
        hold(cache, bound=bound)


@pytest.mark.parametrize("keep", [None, 3, "ab", [1], [None]])
def test_kept_tensors_are_tensors(cache, keep):
    with pytest.raises(lk.GraphError, match=r"got keep .*, need a list of Tensors"):
        hold(cache, keep=keep)


def test_a_refused_step_leaves_the_symbols_of_the_last(cache):
    """What moves with a symbol is still read where the last step had it."""
    step = attention_step(cache)
    row = step.kv_nodes[0][0].at[:, :, step.pos : step.pos + 1].set(step.bound["k"])
    row = row[:, :, step.pos : step.pos + 1]
    session = lk.DecodeSession.build(
        lk.InferenceContext(), step.target, kv=cache, kv_nodes=step.kv_nodes, bound=step.bound,
        keep=[row],
    )  # fmt: skip
    for n in range(4):
        session.step(data(step, n + 1), {step.pos: n})
    for feed, env, error in (
        (data(step, 9), {step.pos: 8}, lk.SymbolError),
        (data(step, 9), {}, lk.SymbolError),
        ({**data(step, 9), "q": None}, {step.pos: 0}, lk.BindingError),
        (None, {step.pos: 0}, lk.BindingError),
    ):
        with pytest.raises(error):
            session.step(feed, env)
        assert np.unique(session.read(row)).tolist() == [4]
