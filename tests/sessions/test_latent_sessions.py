"""DecodeSession over LatentKvCache: validity, re-binding and refresh, with one to three slots."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from latent_state import append_rows, state

import lazykv as lk
from lazykv import config

AllocationChanged, Stale, Valid = (
    lk.PlanValidity.AllocationChanged,
    lk.PlanValidity.Stale,
    lk.PlanValidity.Valid,
)
MLA, FOLDED = ((4,), (2,)), ((6,),)
KEY = {"model_key": ("m",)}


@dataclass
class Step:
    """One attention per layer over a cache's rows, a row written at `pos` first; outputs added.
    A cache of one slot holds latent and rotary key side by side."""

    target: lk.Tensor
    kv_nodes: list[Any]
    bound: dict[str, lk.Tensor]
    pos: lk.Sym
    ctx: lk.InferenceContext

    def session(self, cache: lk.LatentKvCache, **key: Any) -> lk.DecodeSession:
        return lk.DecodeSession.build(
            self.ctx, self.target, kv=cache, kv_nodes=self.kv_nodes, bound=self.bound,
            **(KEY | key),
        )  # fmt: skip


def latent_step(cache: lk.LatentKvCache, *, bare: bool = False, seq: int = 1) -> Step:
    g, pos, capacity = lk.Graph(), lk.Sym("pos", 0, cache.max_seq_len - seq), cache.max_seq_len
    bound = {
        "q": g.placeholder((1, 3, seq, 4), lk.f32, "q"),
        "r": g.placeholder((1, 3, seq, 2), lk.f32, "r"),
        "row": g.placeholder((seq, 6), lk.f32, "row"),
    }
    nodes: list[Any] = []
    total = None
    for _ in range(cache.n_layers()):
        slots = [g.placeholder((capacity, *t), cache.dtype) for t in cache.slot_trailing]
        parts = [bound["row"]]
        if len(slots) > 1:
            parts = [bound["row"].slice(1, 0, 4), bound["row"].slice(1, 4, 2), bound["row"]]
        new = [
            slot.at[pos : pos + seq].set(part.cast(cache.dtype))
            for slot, part in zip(slots, parts, strict=False)
        ]
        if len(slots) == 1:
            nodes.append((slots[0],) if bare else (slots[0], None))
            new = [new[0].slice(1, 0, 4), new[0].slice(1, 4, 2)]
        else:
            nodes.append(tuple(slots))
        seen = lk.latent_attention(
            bound["q"], bound["r"], new[0], new[1], length=pos + seq, scale=0.5
        )
        if len(slots) == 3:  # the third slot takes part too: the newest row of it
            extra = new[2].slice(0, pos, seq).slice(1, 0, 4)
            seen = seen + extra.reshape(1, 1, seq, 4).broadcast_to(1, 3, seq, 4)
        total = seen if total is None else total + seen
    return Step(total, nodes, bound, pos, lk.InferenceContext())


def data(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (1, 3, 1, 4), "r": (1, 3, 1, 2), "row": (1, 6)}
    return {name: rng.standard_normal(s, np.float32) for name, s in shapes.items()}


def run(session: lk.DecodeSession, step: Step, cache: lk.LatentKvCache, seed: int) -> np.ndarray:
    out = session.step(data(seed), {step.pos: cache.cached_len})
    cache.cached_len += 1
    return out


def make(
    trailing: Any = MLA, *, layers: int = 2, capacity: int = 8, dtype: str = "f32",
    device: Any = "cpu",
) -> lk.LatentKvCache:  # fmt: skip
    return lk.LatentKvCache.with_capacity(layers, capacity, trailing, dtype, device)


def solo(trailing: Any, seeds: list[int], **changes: Any) -> list[np.ndarray]:
    """The outputs of a cache that serves these tokens and nothing else."""
    cache = make(trailing, **changes)
    step = latent_step(cache)
    session = step.session(cache)
    return [run(session, step, cache, seed) for seed in seeds]


# Planned once


@pytest.mark.parametrize("trailing", [MLA, FOLDED, (*MLA, (6,))], ids=len)
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_one_plan_for_every_token_and_every_number_of_slots(trailing: Any, device: str) -> None:
    cache = make(trailing, device=device)
    step = latent_step(cache)
    session = step.session(cache)
    want = solo(trailing, list(range(8)))
    np.testing.assert_array_equal(run(session, step, cache, 0), want[0])
    before = lk.stats()
    for seed in range(1, 8):
        np.testing.assert_array_equal(run(session, step, cache, seed), want[seed])
    after = lk.stats()
    assert (after.plans_built, after.plan_cache_hits, after.allocations) == (
        before.plans_built, before.plan_cache_hits, before.allocations,
    )  # fmt: skip
    rows = np.concatenate([data(seed)["row"] for seed in range(8)])
    np.testing.assert_array_equal(np.concatenate(cache.live(1)[:2], 1)[:, :6], rows)


def test_two_slots_and_one_folded_slot_decode_alike_m1() -> None:
    for a, b in zip(solo(MLA, [1, 2, 3]), solo(FOLDED, [1, 2, 3]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_pair_with_none_and_a_bare_slot_are_the_same() -> None:
    for bare in (True, False):
        cache = make(FOLDED)
        step = latent_step(cache, bare=bare)
        session = step.session(cache)
        np.testing.assert_array_equal(run(session, step, cache, 5), solo(FOLDED, [5])[0])
        other = make(FOLDED)
        assert session.rebind_kv(other) is None
        assert session.alloc_id == other.alloc_id()


def test_written_bytes_and_truncated_rows_are_seen_by_the_next_step() -> None:
    cache = make()
    step = latent_step(cache)
    session = step.session(cache)
    for seed in (1, 2, 3):
        run(session, step, cache, seed)
    cache.truncate_to(1)
    cache.write_bytes(0, 0, 0, 1, data(9)["row"][:, :4])
    cache.write_bytes(0, 1, 0, 1, data(9)["row"][:, 4:])
    cache.write_bytes(1, 0, 0, 1, data(9)["row"][:, :4])
    cache.write_bytes(1, 1, 0, 1, data(9)["row"][:, 4:])
    assert session.validity_for(cache, **KEY) is Valid
    np.testing.assert_array_equal(run(session, step, cache, 4), solo(MLA, [9, 4])[1])


# Validity: both halves


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"layers": 3}, "kv.layers"),
        ({"layers": 1}, "kv.layers"),
        ({"capacity": 9}, "kv.capacity"),
        ({"dtype": "f16"}, "kv.dtype"),
        ({"trailing": ((2,), (4,))}, "kv.slots"),  # the same bytes
        ({"trailing": FOLDED}, "kv.slots"),  # the same bytes
        ({"trailing": ((4,), (2,), (1,))}, "kv.slots"),
        ({"trailing": ((4, 1), (2,))}, "kv.slots"),
    ],
    ids=str,
)
def test_another_geometry_is_stale(other: dict[str, Any], field: str) -> None:
    cache, changed = make(), make(**other)
    session = latent_step(cache).session(cache)
    assert session.validity_for(changed, **KEY) is Stale
    assert not session.is_valid_for(changed, **KEY)
    assert set(session.differences(changed, **KEY)) == {field, "kv.alloc_id"}
    assert session.validity_for(cache, **KEY) is Valid


def test_a_standard_cache_is_stale_for_a_latent_plan() -> None:
    cache = make()
    session = latent_step(cache).session(cache)
    other = lk.KvCache.with_capacity(2, 1, 4, 8, "f32")
    assert session.validity_for(other, **KEY) is Stale
    assert {"kv.slots", "kv.heads"} <= set(session.differences(other, **KEY))


def test_seq_and_model_are_part_of_the_key() -> None:
    cache = make()
    session = latent_step(cache).session(cache)
    assert session.validity_for(cache, seq=2, **KEY) is Stale
    assert session.validity_for(cache, model_key=("n",)) is Stale
    assert session.validity_for(cache, seq=1, **KEY) is Valid


def test_what_keeps_the_id_keeps_the_plan_and_what_mints_one_ends_it() -> None:
    cache = make()
    step = latent_step(cache)
    session = step.session(cache)
    for seed in range(4):
        run(session, step, cache, seed)
    cache.truncate_to(3)
    cache.write_bytes(0, 0, 0, 1, bytes(16))
    cache.bump_version(0, 0)
    append_rows(cache, [1])
    cache.savepoint().rollback()
    cache.cached_len = 1
    cache.reset()
    cache.grow(8)
    assert session.differences(cache, **KEY) == {}
    assert session.validity_for(cache, **KEY) is Valid
    cleared = make()
    assert session.validity_for(cleared, **KEY) is AllocationChanged
    cleared.clear()
    assert session.validity_for(cleared, **KEY) is AllocationChanged
    cache.grow(9)
    assert session.validity_for(cache, **KEY) is Stale
    assert set(session.differences(cache, **KEY)) == {"kv.capacity", "kv.alloc_id"}


# Re-binding


@pytest.mark.parametrize("trailing", [MLA, FOLDED, (*MLA, (6,))], ids=len)
@pytest.mark.parametrize("device", ["cpu", "sim:0", ["sim:0", "sim:1"]], ids=str)
def test_a_rebound_plan_runs_on_the_new_rows_only(device: Any, trailing: Any) -> None:
    a, b = make(trailing, device=device), make(trailing, device=device)
    step = latent_step(a)
    session = step.session(a)
    for seed in (1, 2, 3):
        run(session, step, a, seed)
    want, last = solo(trailing, [7, 8]), solo(trailing, [1, 2, 3, 4])[3]
    before, plans = state(a), lk.stats().plans_built
    assert session.validity_for(b, **KEY) is AllocationChanged
    assert session.rebind_kv(b) is None
    assert (session.alloc_id, session.validity_for(b, **KEY)) == (b.alloc_id(), Valid)
    assert session.validity_for(a, **KEY) is AllocationChanged
    for seed, out in zip((7, 8), want, strict=True):
        np.testing.assert_array_equal(run(session, step, b, seed), out)
    assert state(a) == before
    assert session.rebind_kv(a) is None
    np.testing.assert_array_equal(run(session, step, a, 4), last)
    assert lk.stats().plans_built == plans


def torn(which: int) -> lk.LatentKvCache:
    cache = make()
    with pytest.raises(ZeroDivisionError), cache.slot_storage(1, which).write():
        raise ZeroDivisionError
    return cache


def cleared() -> lk.LatentKvCache:
    cache = make()
    cache.clear()
    return cache


HERE, THERE = lk.DeviceLocation("cpu"), lk.DeviceLocation("sim:0")


@pytest.mark.parametrize(
    ("source", "refusal"),
    [
        (lambda: cleared(), lk.ResidencyUnknown()),
        (lambda: make(device=["cpu", None]), lk.ResidencyUnknown()),
        (lambda: make(layers=1), lk.MissingSlot(1, 0)),
        (lambda: make(device="sim:0"), lk.ResidencyDiffers(HERE, THERE)),
        (lambda: make(device=["cpu", "sim:0"]), lk.ResidencyDiffers(HERE, THERE)),
        (lambda: make(FOLDED, device="sim:0"), lk.ResidencyDiffers(HERE, THERE)),
        (lambda: make(((4,),)), lk.MissingSlot(0, 1)),
        (lambda: make(FOLDED), lk.StorageDiffers(0, 0)),
        (lambda: make(((4,), (3,))), lk.StorageDiffers(0, 1)),
        (lambda: make(((2,), (4,))), lk.StorageDiffers(0, 0)),
        (lambda: make(((4, 1), (2,))), lk.StorageDiffers(0, 0)),
        (lambda: make(capacity=9), lk.StorageDiffers(0, 0)),
        (lambda: make(dtype="i32"), lk.StorageDiffers(0, 0)),
        (lambda: make(layers=3), lk.StorageDiffers(2, 0)),
        (lambda: torn(0), lk.StorageTorn(1, 0)),
        (lambda: torn(1), lk.StorageTorn(1, 1)),
    ],
)
def test_refusals_leave_plan_and_cache_as_they_were(source: Any, refusal: Any) -> None:
    cache, other = make(), source()
    step = latent_step(cache)
    session = step.session(cache)
    run(session, step, cache, 1)
    alloc, ids = session.alloc_id, [int(other.alloc_id()), len(other)]
    got = session.rebind_kv(other)
    if isinstance(refusal, lk.ResidencyUnknown):
        assert isinstance(got, lk.ResidencyUnknown)
    else:
        assert got == refusal
    assert (session.alloc_id, session.rebind_count) == (alloc, 0)
    assert session.history[-1][0] == "refused"
    assert [int(other.alloc_id()), len(other)] == ids
    assert session.validity_for(cache, **KEY) is Valid
    np.testing.assert_array_equal(run(session, step, cache, 2), solo(MLA, [1, 2])[1])


def test_a_slot_that_the_plan_does_not_have_is_refused() -> None:
    cache = make(FOLDED)
    session = latent_step(cache).session(cache)
    wider = make(((6,), (1,)))
    assert session.rebind_kv(wider) == lk.StorageDiffers(0, 1)
    assert session.rebind_kv(make(FOLDED)) is None


def test_building_needs_a_node_for_every_slot_and_layer() -> None:
    folded = make(FOLDED)
    step = latent_step(folded)
    with pytest.raises(lk.GraphError, match="got no node for layer 0, slot 1"):
        step.session(make(((6,), (1,))))
    two = latent_step(make())
    with pytest.raises(lk.BindingError, match="got no storage for layer 0, slot 1"):
        two.session(make(((4,),)))
    with pytest.raises(lk.GraphError, match="got 3 layers in kv and 2 kv_nodes"):
        two.session(make(layers=3))


# Refresh


def test_refresh_keeps_rebinds_or_drops() -> None:
    a, b = make(), make()
    step = latent_step(a)
    ctx = step.ctx
    assert ctx.refresh(a, **KEY) == lk.SessionDisposition.Absent
    ctx.put_decode_session(step.session(a))
    assert ctx.refresh(a, **KEY) == lk.SessionDisposition.Kept
    a.truncate_to(0)
    assert ctx.refresh(a, **KEY) == lk.SessionDisposition.Kept
    assert ctx.refresh(b, **KEY) == lk.SessionDisposition.Rebound
    session = ctx.take_decode_session()
    np.testing.assert_array_equal(run(session, step, b, 3), solo(MLA, [3])[0])
    ctx.put_decode_session(session)
    moved = ctx.refresh(make(device="sim:0"), **KEY)
    assert moved == lk.SessionDisposition.Dropped
    assert moved.refusal == lk.ResidencyDiffers(HERE, THERE)
    assert not ctx.has_decode_session()


def test_refresh_drops_what_is_stale_and_names_it() -> None:
    cache = make()
    for other, field in (
        (make(FOLDED), "kv.slots"),
        (make(capacity=9), "kv.capacity"),
    ):
        step = latent_step(cache)
        step.ctx.put_decode_session(step.session(cache))
        dropped = step.ctx.refresh(other, **KEY)
        assert dropped == lk.SessionDisposition.Dropped
        assert dropped.refusal is None
        assert field in dropped.differences


def test_retired_requests_never_decode_over_each_others_rows() -> None:
    """SES-9, over a pool of caches that are truncated, cleared and replaced."""
    rng = np.random.default_rng(11)
    first = make()
    step = latent_step(first)
    ctx = step.ctx
    ctx.put_decode_session(step.session(first))
    caches, plans = [make() for _ in range(3)], lk.stats().plans_built
    for request in range(40):
        slot = int(rng.integers(3))
        if rng.random() < 0.3:
            caches[slot] = make()
        cache = caches[slot]
        cache.reset()
        seeds = [int(s) for s in rng.integers(0, 50, rng.integers(1, 8))]
        kept = ctx.refresh(cache, **KEY)
        assert kept in (lk.SessionDisposition.Kept, lk.SessionDisposition.Rebound), request
        session = ctx.take_decode_session()
        out = [run(session, step, cache, seed) for seed in seeds]
        ctx.put_decode_session(session)
        for got, want in zip(out, solo(MLA, seeds), strict=True):
            np.testing.assert_array_equal(got, want)
    assert lk.stats().plans_built == plans


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_under_poison_a_row_that_nobody_wrote_is_not_attended_to(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(config, "POISON", True)
    cache = make(device=device)
    step = latent_step(cache)
    session = step.session(cache)
    np.testing.assert_array_equal(run(session, step, cache, 1), solo(MLA, [1])[0])
    before = state(cache)
    with pytest.raises(lk.RangeError, match="row 1 of LatentKvCache layer 0, slot 0"):
        session.step(data(2), {step.pos: 2})
    assert state(cache) == before
    append_rows(cache, [5])
    session.step(data(2), {step.pos: 2})
    cache.cached_len = 4
    with pytest.raises(lk.RangeError, match="row 3 of LatentKvCache layer 1, slot 0"):
        cache.live(1)
