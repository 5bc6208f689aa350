"""Held plans: built once, run for every token, welded to whatever cache they are re-bound to."""

import numpy as np
import pytest

from lazykv.counters import stats
from lazykv.errors import KernelError, RangeError
from lazykv.kv.sliding import SlidingKvCache
from lazykv.testing.compare import check_bits
from lazykv.testing.held import Held, bytes_of
from lazykv.testing.target import Target

BY = pytest.mark.parametrize("by", ["symbol", "tensor"])


def held(target: Target, dtype: str = "f32", capacity: int = 8, **options: object) -> Held:
    target.need("f32", "i64")
    return Held(target.cache(capacity, dtype), target.location, **options)  # type: ignore[arg-type]


@BY
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_steps_equal_the_reference(target: Target, dtype: str, by: str) -> None:
    h = held(target, dtype, by=by)
    for _ in range(8):
        h.token()
    h.check_rows()


@BY
def test_nothing_is_planned_after_the_first_step(target: Target, by: str) -> None:
    h = held(target, by=by)
    h.token()
    before, plan = stats(), h.session.plan.id
    for _ in range(5):
        h.token()
    after = stats()
    assert after.plans_built == before.plans_built
    assert after.plan_cache_hits == before.plan_cache_hits
    assert after.allocations == before.allocations, "a step takes no memory"
    assert h.session.plan.id == plan


@BY
def test_a_step_is_bit_for_bit_what_planning_anew_gives(target: Target, by: str) -> None:
    h = held(target, by=by)
    for n in range(6):
        data = h.data()
        want = h.replanned(data)
        check_bits(f"step {n} beside a plan made anew", h.run(data), want)
        h.note(data)


def test_several_tokens_a_step(target: Target) -> None:
    h = held(target, capacity=12, seq=3)
    for _ in range(4):
        h.token()
    h.check_rows()


def test_results_are_fresh(target: Target) -> None:
    h = held(target)
    results = [h.token() for _ in range(2)]
    copies = [r.copy() for r in results]
    for _ in range(4):
        results.append(h.token())
        copies.append(results[-1].copy())
    for n, (result, copy) in enumerate(zip(results, copies, strict=True)):
        check_bits(f"result {n} after later steps", result, copy)
    results[-1][...] = 7  # the caller's own: what it does to it reaches nobody
    h.token()


@BY
def test_truncated_rows_are_not_seen(target: Target, by: str) -> None:
    h = held(target, by=by)
    for keep in (2, 0, 3):
        while len(h.rows) < 7:
            h.token()
        h.rewind(keep)
        h.token()
        h.check_rows()


@BY
def test_rows_past_the_live_length_never_matter(target: Target, by: str) -> None:
    """They hold NaN, as memory that was never written may."""
    target.need("f32", "i64")
    cache = target.cache(8)
    nan = np.full((1, 2, 8, 4), np.nan, np.float32)
    for layer in range(2):
        for slot in (0, 1):
            cache.write_bytes(layer, slot, 0, 8, nan.tobytes())
    h = Held(cache, target.location, by=by)
    for _ in range(8):
        h.token()


@BY
def test_a_rebound_plan_works_on_the_other_cache_only(target: Target, by: str) -> None:
    h = held(target, by=by)
    first, second = h.cache, target.cache(8)
    for _ in range(3):
        h.token()
    rows, before = list(h.rows), bytes_of(first)
    plan = h.session.plan.id
    h.use(second)
    for _ in range(4):
        h.token()
    h.check_rows()
    assert bytes_of(first) == before, "a step on one cache changed another"
    h.use(first, rows)
    for _ in range(3):
        h.token()
    h.check_rows()
    assert h.session.plan.id == plan


def test_two_sessions_take_turns(target: Target) -> None:
    a, b = held(target, name="a"), held(target, name="b")
    for _ in range(4):
        a.token()
        b.token()
        b.token()
    a.check_rows()
    b.check_rows()


def test_rows_written_beside_the_session_are_seen(target: Target) -> None:
    h = held(target)
    for _ in range(4):
        h.token()
    row = np.full((1, 2, 1, 4), 0.5, np.float32)
    h.cache.write_bytes(1, 0, 2, 1, row.tobytes())
    k, v = h.rows[2]
    h.rows[2] = (np.stack([k[0], row[0, :, 0].astype(np.float64)]), v)
    h.token()
    h.check_rows()


@BY
def test_a_step_past_the_capacity_writes_nothing(target: Target, by: str) -> None:
    h = held(target, by=by, capacity=4)
    for _ in range(4):
        h.token()
    data, before = h.data(), bytes_of(h.cache)
    with pytest.raises((RangeError, KernelError)):
        h.run(data)
    if any(s.torn for layer in h.cache.layers if layer for s in (layer.k, layer.v)):
        return  # it says itself that it has to be rewritten
    assert bytes_of(h.cache) == before, "a refused step changed the cache"
    h.rewind(2)
    h.token()


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_sliding_window_rolls_over(target: Target, dtype: str, sinks: int) -> None:
    target.need("f32", "i64", dtype)
    cache = SlidingKvCache.with_capacity(2, 2, 4, 4, dtype, target.location, sink_tokens=sinks)
    h = Held(cache, target.location)
    for _ in range(13):
        h.token()


def test_a_sliding_window_of_several_tokens(target: Target) -> None:
    target.need("f32", "i64")
    cache = SlidingKvCache.with_capacity(
        2, 2, 4, 4, "f32", target.location, sink_tokens=1, rollback_slack=2
    )
    h = Held(cache, target.location, seq=3)
    for _ in range(5):
        h.token()


def test_a_cache_is_appended_to_and_read(target: Target) -> None:
    cache, want = target.cache(6), np.zeros((0, 2, 4), np.float32)
    for n in range(1, 4):
        new = np.arange(8 * n, dtype=np.float32).reshape(1, 2, n, 4) + 100 * n
        for layer in range(2):
            cache.append(layer, new, -new)
        want = np.concatenate([want, np.moveaxis(new[0], 1, 0)])
        for layer in range(2):
            k, v = (np.moveaxis(np.array(a)[0], 1, 0) for a in cache.live(layer))
            check_bits(f"K after {n} appends", k, want)
            check_bits(f"V after {n} appends", v, -want)
    cache.truncate_to(1)
    cache.grow(9)
    k = np.moveaxis(np.array(cache.live(1)[0])[0], 1, 0)
    check_bits("K after truncate and grow", k, want[:1])


def test_sequences_of_a_batch_are_reordered(target: Target) -> None:
    target.need("f32", "i64")
    cache = type(target.cache()).with_capacity(1, 2, 4, 4, "f32", target.location, 3)
    rows = np.arange(3 * 2 * 2 * 4, dtype=np.float32).reshape(3, 2, 2, 4)
    cache.append(0, rows, rows + 1000)
    cache.reorder([2, 0, 0])
    check_bits("K in another order", np.array(cache.live(0)[0]), rows[[2, 0, 0]])
    cache.select([1])
    check_bits("V of one sequence", np.array(cache.live(0)[1]), rows[[0]] + 1000)
