"""Building a paged step, when its plan may run again, and moving it to another pool."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from paged_state import (
    failures,
    make_pool,
    opened,
    read,
    refused,
    state,
    storages,
    tables,
    tear,
)
from paged_steps import KEY, PagedStep, check, data, hold
from toy_backends import Toy, registered

import lazykv as lk
from lazykv.device import register_backend
from lazykv.sessions.rebind import Dropped, Kept, Rebound

AllocationChanged, Stale, Valid = (
    lk.PlanValidity.AllocationChanged,
    lk.PlanValidity.Stale,
    lk.PlanValidity.Valid,
)


@pytest.fixture
def make(place) -> Callable[..., lk.DeviceKvPool]:
    return lambda *sizes, **options: make_pool(*sizes, place=place, **options)


# When a held plan may run again


SIZES = {"blocks": 8, "size": 2, "layers": 2, "heads": 2, "dim": 4, "dtype": "f32"}


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"layers": 3}, "kv.layers"), ({"layers": 1}, "kv.layers"),
        ({"blocks": 9}, "kv.blocks"), ({"size": 4}, "kv.block_size"),
        ({"size": 4, "blocks": 4}, "kv.block_size"),  # the same bytes
        ({"heads": 4}, "kv.heads"), ({"dim": 6}, "kv.head_dim"),
        ({"heads": 4, "dim": 2}, "kv.head_dim"), ({"dtype": "bf16"}, "kv.dtype"),
    ],
)  # fmt: skip
def test_another_geometry_is_stale(make, other, field):
    session, pool = hold(make(**SIZES)), make(**{**SIZES, **other})
    assert session.validity_for(pool, model_key=KEY) is Stale
    assert not session.is_valid_for(pool, model_key=KEY)
    different = session.differences(pool, model_key=KEY)
    assert {field, "kv.alloc_id"} <= set(different)
    refusal = session.rebind_kv(pool)
    assert isinstance(refusal, lk.RebindRefusal)
    assert session.pool is not pool


def test_two_dtypes_of_one_size_differ(make):
    session = hold(make(**{**SIZES, "dtype": "f16"}))
    pool = make(**{**SIZES, "dtype": "bf16"})
    assert session.validity_for(pool, model_key=KEY) is Stale
    assert session.rebind_kv(pool) == lk.StorageDiffers(0, 0)


def test_the_same_facts_keep_the_plan(make):
    pool = make(**SIZES)
    session = hold(pool)
    a = opened(pool, [1, 2, 3])
    pool.publish(a, [1, 2])
    pool.discard(a)
    pool.use_model(("another",))
    assert session.validity_for(pool, seq=1, model_key=KEY) is Valid
    assert session.is_valid_for(pool, model_key=KEY)
    assert session.differences(pool, model_key=KEY) == {}
    assert session.alloc_id == pool.alloc_id()


@pytest.mark.parametrize("key", [(), ("n",), ("m", 0), (("m",),)])
def test_another_model_is_stale(make, key):
    pool = make(**SIZES)
    session = hold(pool)
    assert session.validity_for(pool, model_key=key) is Stale
    assert session.differences(pool, model_key=key) == {"model_key": (KEY, key)}


def test_another_number_of_tokens_is_stale(make):
    pool = make(**SIZES)
    session = hold(pool, seq=2)
    assert session.validity_for(pool, seq=2, model_key=KEY) is Valid
    assert session.validity_for(pool, model_key=KEY) is Stale
    assert session.differences(pool, seq=3, model_key=KEY) == {"seq": (2, 3)}


def test_a_cache_is_no_pool(make):
    session = hold(make(**SIZES))
    cache = lk.KvCache.with_capacity(2, 2, 4, 8, "f32")
    assert session.validity_for(cache, model_key=KEY) is Stale
    for other in (cache, None, lk.KvBlockPool(lk.KvGeometry(2, 8, 2, 2, 4, 4))):
        with pytest.raises(lk.PoolError, match=r"rebind_kv: got .*, need a DeviceKvPool"):
            session.rebind_kv(other)


def test_a_backend_that_was_replaced_makes_it_stale():
    with registered(Toy()):
        pool = make_pool(place="toy:0", **SIZES)
        session = hold(pool)
        a = opened(pool, [1, 2, 3])
        check(pool, session.step([a], data(pool, [4])), [1, 2, 3, 4])
        register_backend("toy", Toy())
        assert session.validity_for(pool, model_key=KEY) is Stale
        assert list(session.differences(pool, model_key=KEY)) == ["generation:toy:0"]
        before = tables(pool)
        with pytest.raises(lk.TopologyChanged, match="plan again"):
            session.step([a], data(pool, [5]))
        with pytest.raises(lk.TopologyChanged):
            session.rebind_kv(make_pool(place="toy:0", **SIZES))
        assert tables(pool) == before


def test_a_plan_moves_to_another_pool_and_leaves_the_old_alone_ses_9(make):
    pool, other = make(**SIZES), make(**SIZES)
    session = hold(pool)
    a = opened(pool, [1, 2, 3])
    session.step([a], data(pool, [4]))
    gap = opened(other, [30])
    b = opened(other, [5, 6])
    other.discard(gap)
    assert session.validity_for(other, model_key=KEY) is AllocationChanged
    with refused(pool, lk.UnknownSession):
        session.step([b], data(pool, [7]))
    kept, before = state(pool), lk.stats()
    known = session.plan.id, session.node_count
    assert session.rebind_kv(other) is None
    assert (session.pool, session.alloc_id) == (other, other.alloc_id())
    assert session.validity_for(other, model_key=KEY) is Valid
    assert session.validity_for(pool, model_key=KEY) is AllocationChanged
    for n in (7, 8, 9):
        out = session.step([b], data(other, [n]))
    check(other, out, [5, 6, 7, 8, 9])
    after = lk.stats()
    assert (session.plan.id, session.node_count) == known
    assert after.plans_built == before.plans_built
    if not session.plan.captured:  # a new recording has memory for its results
        assert after.allocations == before.allocations
    assert state(pool) == kept
    assert read(other, b) == [5, 6, 7, 8, 9]
    assert session.rebind_count == 1
    # A failed step tears nothing here either.
    failure, seen = next(failures(other, session.plan))
    with failure, pytest.raises(seen):
        session.step([b], data(other, [10]))
    assert not any(s.torn for s in storages(other))
    assert session.rebind_kv(pool) is None
    check(pool, session.step([a], data(pool, [5])), [1, 2, 3, 4, 5])


def test_refusals_have_names_and_change_nothing(make, place):
    pool = make(**SIZES)
    session = hold(pool)
    a = opened(pool, [1, 2, 3])
    session.step([a], data(pool, [4]))
    elsewhere = make_pool(**SIZES, place="sim:1")
    torn = make(**SIZES)
    tear(torn.slot_storage(1, lk.KvSlot.V))
    here, there = pool.device_location(), elsewhere.device_location()
    kept = state(pool)
    assert session.validity_for(elsewhere, model_key=KEY) in (AllocationChanged, Stale)
    assert session.rebind_kv(elsewhere) == lk.ResidencyDiffers(here, there)
    assert session.rebind_kv(torn) == lk.StorageTorn(1, 1)
    assert session.rebind_kv(make(**{**SIZES, "blocks": 9})) == lk.StorageDiffers(0, 0)
    assert session.rebind_kv(make(**{**SIZES, "layers": 3})) == lk.StorageDiffers(2, 0)
    assert session.rebind_kv(make(**{**SIZES, "layers": 1})) == lk.MissingSlot(1, 0)
    assert [event[0] for event in session.history] == ["built"] + ["refused"] * 5
    assert (session.pool, session.alloc_id, state(pool)) == (pool, pool.alloc_id(), kept)
    check(pool, session.step([a], data(pool, [5])), [1, 2, 3, 4, 5])


def test_a_plan_is_not_rebound_under_its_step(make):
    pool, other = make(**SIZES), make(**SIZES)
    session = hold(pool)
    a = opened(pool, [1])
    kept = state(other)

    def inputs(starts: np.ndarray) -> dict[str, Any]:
        for call in (lambda: session.rebind_kv(other), lambda: session.step([a], {})):
            with pytest.raises(lk.SessionBusy, match="while a step runs"):
                call()
        return data(pool, [2])

    check(pool, session.step([a], inputs), [1, 2])
    assert (session.pool, state(other)) == (pool, kept)


def test_a_context_can_carry_it(make):
    pool, same, other = make(**SIZES), make(**SIZES), make(**{**SIZES, "blocks": 9})
    ctx = lk.InferenceContext(pool.device_location())
    ctx.put_decode_session(hold(pool))
    assert ctx.refresh(pool, model_key=KEY) == Kept
    assert ctx.refresh(same, model_key=KEY) == Rebound
    session = ctx.take_decode_session()
    assert session.pool is same
    a = same.open()
    check(same, session.step([a], data(same, [4])), [4])
    ctx.put_decode_session(session)
    gone = ctx.refresh(other, model_key=KEY)
    assert gone == Dropped
    assert set(gone.differences) == {"kv.blocks", "kv.alloc_id"}
    assert not ctx.has_decode_session()


def test_the_manifest_names_what_is_baked_and_what_is_bound(make):
    pool = make(**SIZES)
    session = hold(pool)
    baked, bound = session.manifest.baked, session.manifest.bound
    facts = {f"kv.{name}": value for name, value in pool.plan_facts().items()}
    assert facts.items() <= baked.items()
    assert baked["kv.alloc_id"] == int(pool.alloc_id())
    assert {baked["storage:k0"], baked["storage:v1"]} == {
        int(pool.slot_storage(0, 0).id), int(pool.slot_storage(1, 1).id)
    }  # fmt: skip
    assert set(bound) == {"numbers", "q", "rows", "count", "block_table", "context_lens"}
    assert repr(session) == f"PagedDecodeSession(plan {session.plan.id}, batch 4, seq 1, 0 steps)"


# Building


def test_what_cannot_be_a_paged_step_is_refused(make):
    pool = make(**SIZES)
    step = PagedStep(pool, seq=2)
    g, bound = step.graph, step.bound

    def other(**changes: Any) -> dict[str, Any]:
        return {**bound, **changes}

    def inputs(shape: tuple[int, ...], dtype: str) -> lk.Tensor:
        return g.placeholder(shape, dtype)

    shapes = "need rows i64[batch*seq], count i64[], block_table u32[batch,M]"
    for changes, error, words in (
        (
            {"bound": {n: t for n, t in bound.items() if n != "count"}},
            lk.BindingError,
            "no 'count'",
        ),
        ({"bound": 5}, lk.BindingError, "got bound int, need a mapping"),
        ({"bound": other(q=5)}, lk.GraphError, "got int for 'q', need a Tensor"),
        ({"bound": other(rows=inputs((8,), "i32"))}, lk.ShapeError, shapes),
        ({"bound": other(rows=inputs((7,), "i64"))}, lk.ShapeError, shapes),
        ({"bound": other(rows=inputs((0,), "i64"))}, lk.ShapeError, shapes),
        ({"bound": other(rows=inputs((4, 2), "i64"))}, lk.ShapeError, shapes),
        ({"bound": other(count=inputs((1,), "i64"))}, lk.ShapeError, shapes),
        ({"bound": other(block_table=inputs((4,), "u32"))}, lk.ShapeError, shapes),
        ({"bound": other(block_table=inputs((4, 8), "i64"))}, lk.ShapeError, shapes),
        ({"bound": other(context_lens=inputs((3,), "u32"))}, lk.ShapeError, shapes),
        ({"bound": other(x=inputs((3, 2), "f32"))}, lk.ShapeError, "got x f32[3,2], need a first"),
        ({"bound": other(x=inputs((), "f32"))}, lk.ShapeError, "got x f32[], need a first axis"),
        ({"kv_nodes": step.kv_nodes[:1]}, lk.GraphError, "got 2 layers in kv and 1 kv_nodes"),
        ({"bound": other(q=step.kv_nodes[0][0])}, lk.BindingError, "got 'q' bound both per step"),
    ):
        with refused(pool, error, words):
            step.session(pool, **changes)
    ctx = lk.InferenceContext(pool.device_location())
    for target, words in (
        (None, "got NoneType for 'target'"),
        (step.target.slice(0, 0, 3), "got target"),
    ):
        with pytest.raises(lk.LazyKvError) as caught:
            lk.PagedDecodeSession.build(ctx, target, pool=pool, kv_nodes=step.kv_nodes, bound=bound)
        assert words in str(caught.value)
    cache = lk.KvCache.with_capacity(2, 2, 4, 8, "f32")
    with pytest.raises(lk.PoolError, match="got KvCache, need a DeviceKvPool"):
        lk.PagedDecodeSession.build(
            ctx, step.target, pool=cache, kv_nodes=step.kv_nodes, bound=bound
        )
