"""Attention over rings against one query, one head, one row at a time, in float64."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from toy_backends import FLOATS, check_everywhere, floats, run_everywhere

import lazykv as lk
from lazykv.errors import RangeError, ShapeError
from lazykv.ops.write import ring_runs

N = lk.Sym("n")


def slot_of(p: int, rows: int, sinks: int) -> int:
    return p if p < sinks else sinks + (p - sinks) % (rows - sinks)


def reference(q: Any, k: Any, v: Any, window: int, sinks: int, scale: float | None = None) -> Any:
    """Full attention with a window mask: k and v ``[B, Hkv, L, D]`` hold every position so far."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    queries, length = q.shape[2], k.shape[2]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in np.ndindex(*q.shape[:3]):
        head, place = h // (q.shape[1] // k.shape[1]), length - queries + i
        near = [p for p in range(place + 1) if p > place - window or p < sinks]
        scores = np.array([scale * (q[b, h, i] @ k[b, head, p]) for p in near])
        share = np.exp(scores - scores.max())
        out[b, h, i] = share / share.sum() @ v[b, head, near]
    return out


def ring_of(rows: Any, size: int, sinks: int, dead: float = np.nan) -> Any:
    """A ring that was written one row at a time; slots never written hold `dead`."""
    ring = np.full((*rows.shape[:2], size, rows.shape[3]), dead).astype(rows.dtype)
    for p in range(rows.shape[2]):
        ring[:, :, slot_of(p, size, sinks)] = rows[:, :, p]
    return ring


def operands(
    seed: int, length: int, queries: int, dtype: str = "f32", batch: int = 1, dv: int = 8
) -> list[Any]:
    rng = np.random.default_rng(seed)
    shapes = [(batch, 4, queries, 8), (batch, 2, length, 8), (batch, 2, length, dv)]
    return [floats(rng, s, dtype) for s in shapes]


CASES = [
    (length, queries, sinks)
    for length in (1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 30)
    for queries in (1, 3)
    for sinks in (0, 2)
    if length >= queries
]


@pytest.mark.parametrize(("length", "queries", "sinks"), CASES)
def test_the_window_before_and_across_wraps(length: int, queries: int, sinks: int) -> None:
    """Window 4 in a ring of 6 rows; rows never written and rows out of view are NaN or stale."""
    q, k, v = operands(1, length, queries, batch=2, dv=5)
    want = reference(q, k, v, 4, sinks)
    rings = [ring_of(a, 6 + sinks, sinks) for a in (k, v)]
    check_everywhere(
        lambda *t: lk.ring_attention(*t, length=N, window=4, sinks=sinks), [q, *rings], want,
        env={N: length},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["int", "symbol", "tensor"])
def test_dtypes_and_kinds_of_length(kind: str, dtype: str) -> None:
    q, k, v = operands(2, 17, 2, dtype)
    rings = [ring_of(a, 9, 1) for a in (k, v)]
    want = reference(q, k, v, 5, 1, 0.4)
    options: dict[str, Any] = {"window": 5, "sinks": 1, "scale": 0.4}
    if kind == "tensor":
        check_everywhere(
            lambda *t: lk.ring_attention(*t[:3], length=t[3], **options),
            [q, *rings, np.int64(17)], want,
        )  # fmt: skip
    else:
        length = 17 if kind == "int" else N + 1
        check_everywhere(
            lambda *t: lk.ring_attention(*t, length=length, **options), [q, *rings], want,
            env={N: 16},
        )  # fmt: skip


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
@pytest.mark.parametrize("queries", [1, 3])
def test_f32_queries_over_16_bit_rows(queries: int, narrow: str) -> None:
    q, k, v = operands(3, 20, queries, batch=2)
    k, v = (a.astype(lk.dtype(narrow).numpy) for a in (k, v))
    rings = [ring_of(a, 9, 2) for a in (k, v)]
    for place, got in run_everywhere(
        lambda *t: lk.ring_attention(*t, length=20, window=5, sinks=2), [q, *rings]
    ).items():
        assert got.dtype == np.float32
        want = reference(q, k, v, 5, 2)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=place)


@pytest.mark.parametrize("sinks", [0, 1])
@pytest.mark.parametrize("dead", [np.nan, np.inf, -np.inf])
def test_K2_rows_out_of_view_never_matter(dead: float, sinks: int) -> None:
    q, k, v = operands(4, 25, 2)
    k[:, :, sinks:20], v[:, :, sinks:20] = dead, dead
    rings = [ring_of(a, 10, sinks, dead) for a in (k, v)]
    shown = np.r_[0:sinks, 21:25]
    want = reference(q, k[:, :, shown], v[:, :, shown], 3, sinks)
    check_everywhere(
        lambda *t: lk.ring_attention(*t, length=25, window=3, sinks=sinks), [q, *rings], want
    )


@pytest.mark.parametrize("narrow", [False, True])
def test_many_queries_are_split_in_blocks(monkeypatch: pytest.MonkeyPatch, narrow: bool) -> None:
    monkeypatch.setattr("lazykv.backends.cpu_ring._SCORE_BYTES", 400)
    q, k, v = operands(5, 40, 9)
    if narrow:
        k, v = k.astype(np.float16), v.astype(np.float16)
    rings = [ring_of(a, 17, 1) for a in (k, v)]
    check_everywhere(
        lambda *t: lk.ring_attention(*t, length=40, window=7, sinks=1), [q, *rings],
        reference(q, k, v, 7, 1),
    )  # fmt: skip


def test_strided_operands() -> None:
    q, k, v = operands(6, 12, 2)
    turned = [a.transpose(0, 2, 1, 3).copy() for a in (q, ring_of(k, 8, 0), ring_of(v, 8, 0))]
    check_everywhere(
        lambda *t: lk.ring_attention(*(x.transpose(1, 2) for x in t), length=12, window=6), turned,
        reference(q, k, v, 6, 0),
    )  # fmt: skip


def test_no_queries_and_no_batch() -> None:
    for batch, queries in ((1, 0), (0, 1)):
        q, k = np.zeros((batch, 4, queries, 8), np.float32), np.zeros((batch, 2, 3, 8), np.float32)
        for got in run_everywhere(
            lambda *t: lk.ring_attention(*t, length=5, window=3), [q, k, k]
        ).values():
            assert got.shape == q.shape


def build(queries: int, rows: int, **options: Any) -> lk.Tensor:
    g = lk.Graph()
    q, k = g.placeholder((1, 4, queries, 8), "f32"), g.placeholder((1, 2, rows, 8), "f32")
    return lk.ring_attention(q, k, k, **{"length": 9, "window": 4, **options})


def test_a_ring_that_could_lose_a_row_in_view_is_refused_when_built() -> None:
    assert build(3, 6).shape == (1, 4, 3, 8)
    assert build(3, 8, sinks=2).shape == (1, 4, 3, 8)
    for queries, rows, sinks in ((4, 6, 0), (3, 5, 0), (1, 3, 0), (3, 7, 2)):
        with pytest.raises(RangeError) as caught:
            build(queries, rows, sinks=sinks)
        text = str(caught.value)
        assert f"got {queries} queries over rings of {rows} rows with window 4 and {sinks}" in text
        assert f"need rows - sinks >= window + queries - 1 = {queries + 3}" in text


def test_bad_parameters_are_refused_when_built() -> None:
    for options in ({"window": 0}, {"window": -1}, {"sinks": -1}):
        with pytest.raises(RangeError, match="need window >= 1 and sinks >= 0"):
            build(1, 8, **options)
    with pytest.raises(RangeError, match="length"):
        build(3, 8, length=2)
    with pytest.raises(RangeError, match="length"):
        build(3, 8, length=lk.Sym("short", 0, 2))
    g = lk.Graph()
    q, k = g.placeholder((1, 4, 1, 8), "f32"), g.placeholder((1, 3, 8, 8), "f32")
    with pytest.raises(ShapeError, match="4 query heads and 3 key heads"):
        lk.ring_attention(q, k, k, length=1, window=2)
    with pytest.raises(ShapeError, match=r"length f32\[1,4,1,8\], need i64\[\]"):
        lk.ring_attention(q, q, q, length=q, window=1)


def test_a_length_known_at_run_time_is_checked_before_anything_is_computed() -> None:
    q, k, v = operands(7, 8, 3)
    g = lk.Graph()
    n = g.placeholder((), "i64")
    t = [g.const(a) for a in (q, k, v)]
    plan = lk.plan(lk.ring_attention(*t, length=n, window=6))
    for bad in (-1, 0, 2):
        with pytest.raises(RangeError, match=f"length {bad}, need length >= 3 queries"):
            plan.run({n: np.int64(bad)})
    symbolic, before = lk.ring_attention(*t, length=N, window=6), lk.stats().kernels_run
    with pytest.raises(RangeError, match="length = 2"):
        lk.realize(symbolic, env={N: 2})
    assert lk.stats().kernels_run == before
    want = reference(q, k, v, 6, 0)
    np.testing.assert_allclose(plan.run({n: np.int64(8)}), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [0, 3])
def test_a_step_of_one_query_allocates_nothing_of_the_rings_size(sinks: int) -> None:
    """Any copy of the rows in view would be 64 KiB; views and numbers are what a step may make."""
    rows, window = 300 + sinks, 256
    g = lk.Graph()
    q, k, v = (g.placeholder((1, 2, n, 32), "f32") for n in (1, rows, rows))
    target = lk.ring_attention(q, k, v, length=N, window=window, sinks=sinks)
    plan = lk.plan(target, {t: lk.Storage.allocate(t.shape, "f32") for t in (q, k, v)})
    for length in (1, 290, 500):
        plan.run(env={N: length})
        tracemalloc.start()
        plan.run(env={N: length})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 << 10


def test_B3_means_of_the_rows_in_view() -> None:
    """Zero queries weigh all rows alike: three queries at positions 3, 4, 5 in a window of 4."""
    q = np.zeros((1, 1, 3, 2), np.float32)
    v = np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1)
    k = np.zeros((1, 1, 6, 2), np.float32)
    rings = ring_of(k, 6, 0), ring_of(v, 6, 0)
    for got in run_everywhere(
        lambda *t: lk.ring_attention(*t, length=6, window=4), [q, *rings]
    ).values():
        assert got.reshape(-1).tolist() == [1.5, 2.5, 3.5]


def test_B5_the_window_counts_the_querys_own_position() -> None:
    """Window 3; six zero queries in one chunk, and one by one in the smallest ring."""
    v = np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1)
    k, want = np.zeros((1, 1, 6, 2), np.float32), [0, 0.5, 1, 2, 3, 4]
    for first, rows in [(0, 8), *((n, 3) for n in range(6))]:
        last = 6 if rows == 8 else first + 1
        q = np.zeros((1, 1, last - first, 2), np.float32)
        rings = [ring_of(a[:, :, :last], rows, 0) for a in (k, v)]
        for got in run_everywhere(
            lambda *t, n=last: lk.ring_attention(*t, length=n, window=3), [q, *rings]
        ).values():
            assert got.reshape(-1).tolist() == want[first:last]


def test_runs_name_every_position_once_in_order() -> None:
    for sinks in (0, 1, 3):
        for ring in (1, 2, 5):
            for low in range(12):
                for high in range(low, max(low, sinks) + ring + 1):
                    runs = ring_runs(low, high, sinks + ring, sinks)
                    named = [(p + i, s + i) for s, p, n in runs for i in range(n)]
                    want = [(p, slot_of(p, sinks + ring, sinks)) for p in range(low, high)]
                    assert named == want
                    assert len(runs) <= 3
