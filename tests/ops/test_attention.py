import math
from typing import Any

import numpy as np
import pytest
from toy_backends import (
    FLOATS,
    Portable,
    Primitive,
    check_everywhere,
    floats,
    registered,
    run_everywhere,
)

import lazykv as lk
from lazykv.errors import RangeError

N = lk.Sym("n")


def reference(
    q: Any, k: Any, v: Any, *, length: int | None = None, causal: bool = True,
    window: int | None = None, mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    """One query, one head, one row at a time, in float64."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    batch, heads, queries, dim = q.shape
    live = k.shape[2] if length is None else length
    scale = 1 / math.sqrt(dim) if scale is None else scale
    full = None if mask is None else np.broadcast_to(mask, (batch, heads, queries, live))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in np.ndindex(batch, heads, queries):
        head, place = h // (heads // k.shape[1]), live - queries + i
        scores = {}
        for row in range(live):
            if (causal and row > place) or (window is not None and row <= place - window):
                continue
            if full is not None and full.dtype == bool and not full[b, h, i, row]:
                continue
            scores[row] = scale * (q[b, h, i] @ k[b, head, row])
            if full is not None and full.dtype != bool:
                scores[row] += float(full[b, h, i, row])
        top = max(scores.values(), default=-math.inf)
        if top == -math.inf:
            continue
        weights = {row: math.exp(s - top) for row, s in scores.items()}
        for row, w in weights.items():
            out[b, h, i] += w / sum(weights.values()) * v[b, head, row]
    return out


def operands(
    seed: int, dtype: str = "f32", batch: int = 1, heads: int = 4, kv: int = 2, queries: int = 1,
    rows: int = 7, dim: int = 8, dv: int = 8,
) -> list[Any]:  # fmt: skip
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads, queries, dim), (batch, kv, rows, dim), (batch, kv, rows, dv)]
    return [floats(rng, s, dtype) for s in shapes]


OPTIONS: list[dict[str, Any]] = [
    {}, {"causal": False}, {"window": 2}, {"window": 100}, {"window": 2, "causal": False},
    {"scale": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], queries: int, dtype: str) -> None:
    qkv = operands(20, dtype, batch=2, queries=queries)
    check_everywhere(lambda *t: lk.attention(*t, **options), qkv, reference(*qkv, **options))


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("kind", ["int", "symbol", "tensor"])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 2}], ids=str)
@pytest.mark.parametrize("dead", [np.nan, np.inf, -np.inf])
def test_K2_rows_past_the_live_length_never_matter(
    dead: float, options: dict[str, Any], kind: str, queries: int
) -> None:
    q, k, v = operands(21, queries=queries)
    k[:, :, 4:], v[:, :, 4:] = dead, dead
    want = reference(q, k, v, length=4, **options)
    if kind == "tensor":
        n = np.int64(4)
        check_everywhere(
            lambda *t: lk.attention(*t[:3], length=t[3], **options), [q, k, v, n], want
        )
    else:
        length = 4 if kind == "int" else N + 1
        check_everywhere(
            lambda *t: lk.attention(*t, length=length, **options), [q, k, v], want, env={N: 3}
        )


def test_K2_zero_query_over_a_poisoned_buffer() -> None:
    for poison in (np.nan, np.inf):
        k, v = np.full((2, 1, 1, 8, 4), poison, np.float32)
        k[:, :, :3], v[0, 0, :3] = 0, np.array([1, 2, 3])[:, None]
        q = np.zeros((1, 1, 1, 4), np.float32)
        check_everywhere(lambda *t: lk.attention(*t, length=3), [q, k, v], np.full(q.shape, 2.0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "shape", [(3, 1), (5,), (1, 4, 1, 5), (2, 4, 3, 5), (), (1, 1, 1, 1)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_broadcast(kind: str, shape: tuple[int, ...], queries: int, dtype: str) -> None:
    shape = tuple(queries if n == 3 else n for n in shape)
    qkv = operands(22, dtype, batch=2, queries=queries)
    rng = np.random.default_rng(23)
    mask: Any = np.array(rng.random(shape) < 0.6)
    if kind == "additive":
        mask = np.where(mask, rng.standard_normal(shape), -np.inf).astype(lk.dtype(dtype).numpy)
    want = reference(*qkv, length=5, mask=mask, causal=False)
    check_everywhere(
        lambda *t: lk.attention(*t[:3], mask=t[3], length=5, causal=False), [*qkv, mask], want
    )
    want = reference(*qkv, length=5, mask=mask, window=3)
    check_everywhere(
        lambda *t: lk.attention(*t[:3], mask=t[3], length=t[4], window=3),
        [*qkv, mask, np.int64(5)], want,
    )  # fmt: skip


def test_K1_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k, v = operands(24, queries=2, rows=3)
    mask = np.array([[False] * 3, [True] * 3])
    want = reference(q, k, v, mask=mask, causal=False)
    assert not want[:, :, 0].any()
    check_everywhere(
        lambda *t: lk.attention(*t[:3], mask=t[3], causal=False), [q, k, v, mask], want
    )


@pytest.mark.parametrize("queries", [1, 2])
def test_K1_a_length_of_zero_gives_zeros(queries: int) -> None:
    q, k, v = operands(25, queries=queries)
    zeros = np.zeros((*q.shape[:3], v.shape[3]))
    check_everywhere(lambda *t: lk.attention(*t, length=0, causal=False), [q, k, v], zeros)
    check_everywhere(
        lambda *t: lk.attention(*t, length=N, causal=False), [q, k, v], zeros, env={N: 0}
    )
    empty = k[:, :, :0], v[:, :, :0]
    check_everywhere(lambda *t: lk.attention(*t, causal=False), [q, *empty], zeros)


def test_K3_mask_polarity() -> None:
    q, k = np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 1, 3, 2), np.float32)
    v = np.array([1, 2, 4], np.float32).reshape(1, 1, 3, 1)
    for mask in (np.array([True, False, True]), np.array([0, -np.inf, 0], np.float32)):
        check_everywhere(lambda *t: lk.attention(*t[:3], mask=t[3]), [q, k, v, mask], [[[[2.5]]]])


@pytest.mark.parametrize("dead", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_K2_rows_hidden_from_every_query_never_matter(kind: str, queries: int, dead: float) -> None:
    """Padding of a ragged batch: other rows of each sequence, the middle ones of one head too."""
    q, k, v = operands(28, queries=queries, batch=2)
    seen = np.ones((2, 4, queries, k.shape[2]), np.bool_)
    seen[0, :, :, 4:], seen[1, :2, :, 1:3] = False, False
    k[0, :, 4:], v[0, :, 4:], k[1, 0, 1:3], v[1, 0, 1:3] = dead, dead, dead, dead
    mask = seen if kind == "bool" else np.where(seen, 0, -np.inf).astype(np.float32)
    clean = [np.where(np.isfinite(a), a, 0) for a in (k, v)]
    want = reference(q, *clean, mask=mask, causal=False)
    check_everywhere(
        lambda *t: lk.attention(*t[:3], mask=t[3], causal=False), [q, k, v, mask], want
    )


def test_I3_head_mapping() -> None:
    q, k = np.zeros((1, 4, 1, 2), np.float32), np.zeros((1, 2, 3, 2), np.float32)
    v = np.broadcast_to(np.array([10, 20], np.float32).reshape(1, 2, 1, 1), (1, 2, 3, 1))
    for got in run_everywhere(lk.attention, [q, k, v]).values():
        assert got.reshape(-1).tolist() == [10, 10, 20, 20]


def test_H5_scores_of_16_bits_do_not_overflow() -> None:
    q = np.full((1, 1, 1, 64), 300, np.float16)
    k = np.stack([np.full(64, 300), np.full(64, 299)]).astype(np.float16).reshape(1, 1, 2, 64)
    v = np.array([1, 2], np.float16).reshape(1, 1, 2, 1)
    for got in run_everywhere(lambda *t: lk.attention(*t, causal=False), [q, k, v]).values():
        assert abs(float(got.item()) - 1.0) < 1e-3


def test_B5_a_window_counts_the_querys_own_position() -> None:
    q, k = np.zeros((1, 1, 6, 2), np.float32), np.zeros((1, 1, 6, 2), np.float32)
    v = np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1)
    want = np.array([0, 0.5, 1, 2, 3, 4]).reshape(1, 1, 6, 1)
    check_everywhere(lambda *t: lk.attention(*t, window=3), [q, k, v], want)


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
@pytest.mark.parametrize("queries", [1, 3])
def test_f32_queries_over_16_bit_rows(queries: int, narrow: str) -> None:
    q, k, v = operands(26, queries=queries, batch=2)
    k, v = (a.astype(lk.dtype(narrow).numpy) for a in (k, v))
    k[:, :, 6:] = np.nan
    want = reference(q, k, v, length=6, window=4)
    for place, got in run_everywhere(
        lambda *t: lk.attention(*t, length=6, window=4), [q, k, v]
    ).items():
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=place)


@pytest.mark.parametrize("queries", [1, 3])
def test_strided_rows_and_another_value_width(queries: int) -> None:
    rng = np.random.default_rng(27)
    q = floats(rng, (1, queries, 4, 8), "f32")
    k, v = floats(rng, (1, 5, 2, 8), "f32"), floats(rng, (1, 5, 2, 3), "f32")
    turned = [a.transpose(0, 2, 1, 3) for a in (q, k, v)]
    check_everywhere(
        lambda *t: lk.attention(*(x.permute(0, 2, 1, 3) for x in t)), [q, k, v], reference(*turned)
    )


def test_many_queries_are_split_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazykv.backends.cpu_attention._SCORE_BYTES", 200)
    qkv = operands(28, queries=9, rows=12)
    for options in ({}, {"window": 4}, {"causal": False}):
        check_everywhere(
            lambda *t, o=options: lk.attention(*t, **o), qkv, reference(*qkv, **options)
        )


def test_no_queries_and_no_batch() -> None:
    for shape in ((1, 4, 0, 8), (0, 4, 1, 8)):
        q = np.zeros(shape, np.float32)
        k = np.zeros((shape[0], 2, 3, 8), np.float32)
        for got in run_everywhere(lk.attention, [q, k, k]).values():
            assert got.shape == shape


def test_a_length_read_at_run_time_is_checked_then() -> None:
    q, k, v = operands(29)
    g = lk.Graph()
    n = g.placeholder((), "i64")
    plan = lk.plan(lk.attention(g.const(q), g.const(k), g.const(v), length=n))
    for bad in (-1, 0, 8):
        with pytest.raises(RangeError, match=f"length {bad}, need 1 <= length <= 7"):
            plan.run({n: np.int64(bad)})
    np.testing.assert_allclose(plan.run({n: np.int64(7)}), reference(q, k, v), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["portable:0", "primitive:0"])
@pytest.mark.parametrize("kind", ["linear", "masked", "latent", "ring"])
def test_bodies_and_lowerings_check_a_length_in_a_tensor_too(kind: str, place: str) -> None:
    """Two queries over six rows, or five under a mask; a ring has no most."""
    g = lk.Graph()
    n, q = g.placeholder((), "i64"), g.placeholder((1, 2, 2, 4), "f32")
    k, rows = g.placeholder((1, 2, 6, 4), "f32"), g.placeholder((6, 4), "f32")
    mask = g.placeholder((5,), "bool")
    made, bad, good = {
        "linear": lambda: (lk.attention(q, k, k, length=n), (-1, 0, 1, 7, 2**40), 6),
        "masked": lambda: (lk.attention(q, k, k, length=n, mask=mask), (1, 4, 6), 5),
        "latent": lambda: (lk.latent_attention(q, q, rows, rows, scale=1, length=n), (1, 7), 2),
        "ring": lambda: (lk.ring_attention(q, k, k, length=n, window=4), (-1, 1), 2**40),
    }[kind]()
    with registered(Primitive(), Portable()):
        data = {t: np.ones(t.shape, t.dtype.numpy) for t in (q, k, rows, mask)}
        plan = lk.plan(made, data, place)
        for length in bad:
            with pytest.raises(RangeError):
                plan.run({n: np.int64(length)})
        np.testing.assert_allclose(plan.run({n: np.int64(good)}), 1, rtol=1e-5)


def test_a_symbolic_length_is_checked_before_anything_runs() -> None:
    q, k, v = operands(30)
    g = lk.Graph()
    made = lk.attention(g.const(q), g.const(k), g.const(v), length=N)
    before = lk.stats().kernels_run
    for bad in (0, 8):
        with pytest.raises(RangeError, match=f"length = {bad}, need 1 <= value <= 7"):
            lk.realize(made, env={N: bad})
    assert lk.stats().kernels_run == before


def test_D4_the_unused_tail_takes_no_part() -> None:
    q, k, v = operands(31, rows=40)
    results = []
    for capacity in (5, 6, 20, 40):
        cut = [q, k[:, :, :capacity], v[:, :, :capacity]]
        results.append(lk.realize(lk.attention(*_consts(cut), length=5)))
    for got in results[1:]:
        np.testing.assert_allclose(got, results[0], rtol=1e-6, atol=1e-6)


def _consts(arrays: list[Any]) -> list[lk.Tensor]:
    g = lk.Graph()
    return [g.const(np.ascontiguousarray(a)) for a in arrays]
