"""latent_attention: kernel, body and lowering against float64 with one query and row at a time."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from toy_backends import FLOATS, TOLERANCE, check_everywhere, floats, run_everywhere

import lazykv as lk
from lazykv.backends import cpu_latent
from lazykv.errors import DTypeError, RangeError, ShapeError

N = lk.Sym("n")
SCALE = 0.3


def reference(
    q_latent: Any, q_rope: Any, latent: Any, rope: Any, *, length: int | None = None,
    causal: bool = True, scale: float = SCALE,
) -> Any:  # fmt: skip
    q_latent, q_rope, latent, rope = (
        a.astype(np.float64) for a in (q_latent, q_rope, latent, rope)
    )
    live = len(latent) if length is None else length
    _, heads, queries, _ = q_latent.shape
    out = np.zeros(q_latent.shape)
    for h, i in np.ndindex(heads, queries):
        seen = live - queries + i + 1 if causal else live
        weights = []
        for row in range(seen):
            score = q_latent[0, h, i] @ latent[row] + q_rope[0, h, i] @ rope[row]
            weights.append(math.exp(scale * score))
        for row, w in enumerate(weights):
            out[0, h, i] += w / sum(weights) * latent[row]
    return out


def operands(
    seed: int, dtype: str = "f32", rows_dtype: str | None = None, heads: int = 3, queries: int = 1,
    rows: int = 7, rank: int = 6, rope: int = 4,
) -> list[Any]:  # fmt: skip
    rng = np.random.default_rng(seed)
    shapes = [(1, heads, queries, rank), (1, heads, queries, rope), (rows, rank), (rows, rope)]
    of = [dtype, dtype, rows_dtype or dtype, rows_dtype or dtype]
    return [floats(rng, s, d) for s, d in zip(shapes, of, strict=True)]


def build(**options: Any) -> Any:
    return lambda *t: lk.latent_attention(*t, scale=SCALE, **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_every_dtype(causal: bool, queries: int, dtype: str) -> None:
    ins = operands(1, dtype, queries=queries)
    check_everywhere(build(causal=causal), ins, reference(*ins, causal=causal))


@pytest.mark.parametrize("rows_dtype", ["f16", "bf16"])
@pytest.mark.parametrize("queries", [1, 3])
def test_f32_queries_over_16_bit_rows(queries: int, rows_dtype: str) -> None:
    ins = operands(2, rows_dtype=rows_dtype, queries=queries)
    check_everywhere(build(length=5), ins, reference(*ins, length=5))


@pytest.mark.parametrize("shape", [
    {"heads": 1}, {"rank": 1}, {"rope": 1}, {"rope": 0}, {"rows": 1}, {"heads": 16, "rank": 2},
    {"queries": 7}, {"rank": 9, "rope": 12, "rows": 40, "queries": 5},
], ids=str)  # fmt: skip
def test_shapes(shape: dict[str, int]) -> None:
    ins = operands(3, **shape)
    check_everywhere(build(), ins, reference(*ins))
    check_everywhere(build(causal=False), ins, reference(*ins, causal=False))


def test_it_equals_attention_over_expanded_keys_and_values() -> None:
    """The identity that absorption rests on: q (W c) = (q W) c, and W (sum of c) = sum of W c."""
    rng = np.random.default_rng(4)
    q, q_rope = rng.standard_normal((3, 5)), rng.standard_normal((3, 4))
    up, latent = rng.standard_normal((3, 5, 6)), rng.standard_normal((7, 6))
    v_up, rope = rng.standard_normal((3, 6, 8)), rng.standard_normal((7, 4))
    keys = [np.concatenate([latent @ up[h].T, rope], 1) for h in range(3)]
    want = []
    for h in range(3):
        scores = keys[h] @ np.concatenate([q[h], q_rope[h]]) * SCALE
        share = np.exp(scores) / np.exp(scores).sum()
        want.append(share @ (latent @ v_up[h]))
    g = lk.Graph()
    absorbed = np.einsum("hn,hnr->hr", q, up)
    ins = [absorbed[None, :, None], q_rope[None, :, None], latent, rope]
    got = lk.realize(build()(*(g.const(a) for a in ins)))
    np.testing.assert_allclose(np.einsum("hr,hrv->hv", got[0, :, 0], v_up), want, rtol=1e-10)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("kind", ["int", "symbol", "tensor"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dead", [np.nan, np.inf, -np.inf])
def test_K2_rows_past_the_live_length_never_matter(
    dead: float, causal: bool, kind: str, queries: int
) -> None:
    ins = operands(5, queries=queries)
    ins[2][4:], ins[3][4:] = dead, dead
    want = reference(*ins, length=4, causal=causal)
    if kind == "tensor":
        check_everywhere(
            lambda *t: build(length=t[4], causal=causal)(*t[:4]), [*ins, np.int64(4)], want
        )
    else:
        length = 4 if kind == "int" else N + 1
        check_everywhere(build(length=length, causal=causal), ins, want, env={N: 3})


def test_K1_a_length_of_zero_gives_zeros() -> None:
    ins = operands(6, queries=2)
    zeros = np.zeros(ins[0].shape)
    check_everywhere(build(length=0, causal=False), ins, zeros)
    check_everywhere(build(length=N, causal=False), ins, zeros, env={N: 0})
    check_everywhere(build(causal=False), [*ins[:2], ins[2][:0], ins[3][:0]], zeros)


def test_no_queries_and_no_heads() -> None:
    for size in ({"queries": 0}, {"heads": 0}):
        ins = operands(7, **size)
        for got in run_everywhere(build(causal=False), ins).values():
            assert got.shape == ins[0].shape


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_both_parts_of_one_folded_row(dtype: str, queries: int) -> None:
    """Latent and rope key as views of one slot ``[S, R + P]``: rows lie R + P apart."""
    ins = operands(8, rows_dtype=dtype, queries=queries)
    folded = np.concatenate(ins[2:], 1)

    def split(q: lk.Tensor, r: lk.Tensor, both: lk.Tensor) -> lk.Tensor:
        return build(length=5)(q, r, both.slice(1, 0, 6), both.slice(1, 6, 4))

    check_everywhere(split, [*ins[:2], folded], reference(*ins, length=5))


def test_many_queries_are_split_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (1, 4 * 3 * 12 * 2, 4 * 3 * 12 * 4):  # 1, 2 and 4 of 9 queries
        monkeypatch.setattr(cpu_latent, "_SCORE_BYTES", limit)
        for rows_dtype in ("f32", "bf16"):
            ins = operands(9, rows_dtype=rows_dtype, queries=9, rows=12)
            for causal in (True, False):
                check_everywhere(build(causal=causal), ins, reference(*ins, causal=causal))


def test_large_scores_do_not_overflow() -> None:
    ins = [a * np.float32(100) for a in operands(10, queries=2)]
    got = run_everywhere(build(), ins)
    for values in got.values():
        assert np.isfinite(values).all()
        np.testing.assert_allclose(values, got["cpu"], rtol=1e-3)


@pytest.mark.parametrize("capacity", [5, 6, 20, 40])
def test_D4_the_unused_tail_takes_no_part(capacity: int) -> None:
    ins = operands(11, rows=40)
    results = []
    for rows in (5, capacity):
        g = lk.Graph()
        cut = [g.const(a) for a in (*ins[:2], ins[2][:rows], ins[3][:rows])]
        results.append(lk.realize(build(length=5)(*cut)))
    np.testing.assert_array_equal(results[0], results[1])


def test_a_step_allocates_nothing_that_grows_with_the_rows_Q4() -> None:
    rows, rank, rope = 65536, 16, 8
    rng = np.random.default_rng(12)
    g = lk.Graph()
    q, r = (g.placeholder((1, 2, 1, n), "f32") for n in (rank, rope))
    stores = [lk.Storage.from_array(floats(rng, (rows, n), "f32")) for n in (rank, rope)]
    plan = lk.plan(build(length=N)(q, r, *(g.const(s) for s in stores)))
    data = {q: floats(rng, (1, 2, 1, rank), "f32"), r: floats(rng, (1, 2, 1, rope), "f32")}
    plan.run(data, {N: 10})
    before = lk.stats().allocations
    tracemalloc.start()
    try:
        plan.run(data, {N: 10})
        tracemalloc.reset_peak()
        base = tracemalloc.get_traced_memory()[0]
        plan.run(data, {N: 60000})  # 480 KB of scores
        peak = tracemalloc.get_traced_memory()[1] - base
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10  # NumPy's own iteration buffers have a fixed size
    assert lk.stats().allocations == before


@pytest.mark.parametrize("queries", [1, 3])
def test_only_live_rows_are_widened_Q4(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    seen, real = [], cpu_latent.widen_rows

    def counted(rows: Any, *args: Any) -> Any:
        seen.append(rows.shape)
        return real(rows, *args)

    monkeypatch.setattr(cpu_latent, "widen_rows", counted)
    ins = operands(16, rows_dtype="bf16", rows=40, queries=queries)
    g = lk.Graph()
    got = lk.realize(build(length=N)(*(g.const(a) for a in ins)), env={N: 5})
    np.testing.assert_allclose(got, reference(*ins, length=5), rtol=1e-4)
    assert seen == [(5, 6), (5, 4)]


# What is refused


def shapes(*changes: tuple[int, tuple[int, ...]], dtypes: tuple[str, ...] = ("f32",) * 4) -> Any:
    g = lk.Graph()
    all_shapes = [(1, 3, 1, 6), (1, 3, 1, 4), (7, 6), (7, 4)]
    for n, shape in changes:
        all_shapes[n] = shape
    return [g.placeholder(s, d) for s, d in zip(all_shapes, dtypes, strict=True)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(0, (3, 1, 6))], r"got q_latent f32\[3,1,6\], need rank 4"),
        ([(1, (3, 1, 4))], r"got q_rope f32\[3,1,4\], need rank 4"),
        ([(2, (1, 7, 6))], r"got latent f32\[1,7,6\], need rank 2"),
        ([(3, (7,))], r"got rope f32\[7\], need rank 2"),
        ([(0, (2, 3, 1, 6)), (1, (2, 3, 1, 4))], r"got q_latent f32\[2,3,1,6\], need a batch of 1"),
        ([(1, (1, 2, 1, 4))], r"q_rope f32\[1,2,1,4\].*need \[1,H,Sq,R\]"),
        ([(1, (1, 3, 2, 4))], r"q_rope f32\[1,3,2,4\]"),
        ([(0, (1, 3, 1, 5))], r"q_latent f32\[1,3,1,5\].*latent f32\[7,6\]"),
        ([(3, (7, 5))], r"rope f32\[7,5\]"),
        ([(3, (8, 4))], r"latent f32\[7,6\] and rope f32\[8,4\]"),
    ],
)
def test_shapes_that_do_not_fit(changes: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        build()(*shapes(*changes))


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (("f32", "f16", "f32", "f32"), r"f32\[1,3,1,6\] and f16\[1,3,1,4\], need one dtype"),
        (("f32", "f32", "f32", "f16"), r"f32\[7,6\] and f16\[7,4\], need one dtype"),
        (("f32", "f32", "f64", "f64"), r"q_latent f32.* and latent f64"),
        (("f64", "f64", "f16", "f16"), "f32 queries on 16-bit rows"),
        (("f16", "f16", "f32", "f32"), "f32 queries on 16-bit rows"),
        (("i32", "i32", "i32", "i32"), "need a floating dtype"),
        (("f32", "f32", "f8_e4m3", "f8_e4m3"), "need a floating dtype"),
    ],
)
def test_dtypes_that_do_not_fit(dtypes: tuple[str, ...], message: str) -> None:
    with pytest.raises(DTypeError, match=message):
        build()(*shapes(dtypes=dtypes))


def test_lengths_out_of_bounds_when_built() -> None:
    for bad in (-1, 0, 8):
        with pytest.raises(RangeError, match=f"length.* {bad}, need 1 <= .* <= 7"):
            build(length=bad)(*shapes())
    with pytest.raises(RangeError, match=r"length.* 8, need 0 <= .* <= 7"):
        build(length=8, causal=False)(*shapes())
    with pytest.raises(RangeError, match=r"got 8 queries over 7 rows, need at least as many"):
        build()(*shapes((0, (1, 3, 8, 6)), (1, (1, 3, 8, 4))))
    ins = shapes()
    with pytest.raises(ShapeError, match=r"got length i64\[1\], need i64\[\]"):
        build(length=ins[0].graph.placeholder((1,), "i64"))(*ins)


def test_lengths_are_checked_before_anything_runs() -> None:
    ins = operands(13)
    g = lk.Graph()
    made = build(length=N)(*(g.const(a) for a in ins))
    before = lk.stats().kernels_run
    for bad in (0, 8):
        with pytest.raises(RangeError, match=f"length = {bad}, need 1 <= value <= 7"):
            lk.realize(made, env={N: bad})
    assert lk.stats().kernels_run == before


def test_a_length_read_at_run_time_is_checked_then() -> None:
    for place in ("cpu", "sim:0"):
        ins = operands(14)
        g = lk.Graph()
        n = g.placeholder((), "i64")
        stores = [lk.Storage.from_array(a, place) for a in ins]
        plan = lk.plan(build(length=n)(*(g.const(s) for s in stores)), device=place)
        for bad in (-1, 0, 8):
            with pytest.raises(RangeError, match=f"length {bad}, need 1 <= length <= 7"):
                plan.run({n: np.int64(bad)})
        np.testing.assert_allclose(plan.run({n: np.int64(7)}), reference(*ins), rtol=1e-4)


def test_the_cpu_kernel_runs_and_not_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the comparisons above compare three things and not one."""
    monkeypatch.setattr("lazykv.ops.latent_attention.LatentAttention.body", None)
    ins = operands(15)
    g = lk.Graph()
    got = lk.realize(build()(*(g.const(a) for a in ins)))
    np.testing.assert_allclose(got, reference(*ins), rtol=TOLERANCE["f32"])
