"""Sizes that real models have: more elements than one launch has threads, rows longer than a block
of threads, heads of 128, many rows and queries, five axes.

Operands are contiguous but where axes are the point; the small cases beside these have every
layout. References are whole arrays in float64.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from lazykv.dtypes import dtype as find_dtype
from lazykv.functions import attention, concat, latent_attention, ring_attention, where
from lazykv.graph import Graph, Tensor
from lazykv.ops.move import Copy
from lazykv.runtime.realize import plan
from lazykv.storage import Storage
from lazykv.testing import reference
from lazykv.testing.compare import ROUNDING, check_bits, check_close, check_equal
from lazykv.testing.golden import (
    Array,
    Case,
    Operand,
    Param,
    check_case,
    every,
    numbers,
    patterns,
    random_of,
)
from lazykv.testing.target import Target

DTYPES = ("f32", "bf16")

Op = tuple[Callable[..., Tensor], Callable[..., Any]]
"""What builds it, and its reference."""


@cache
def some(name: str, dtype: str, *shape: int) -> Array:
    """Floats of order 1."""
    out = numbers(random_of("sizes", name), shape, find_dtype(dtype))
    out.flags.writeable = False
    return out


def run(target: Target, build: Callable[..., Any], *arrays: Array) -> Any:
    """An op on contiguous operands."""
    g = Graph()
    operands = {g.placeholder(a.shape, a.dtype): target.storage(a) for a in arrays}
    return target.run(build(*operands), operands)


def wide(*arrays: Array) -> list[Array]:
    return [a.astype(np.float64) for a in arrays]


def check(target: Target, what: str, op: Op, *arrays: Array) -> None:
    build, want = op
    check_close(what, run(target, build, *arrays), np.asarray(want(*wide(*arrays))))


# Many elements


ELEMENTWISE: dict[str, Op] = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "add_scalar": (lambda a, b: a + 3.0, lambda a, b: a + 3),
    "neg": (lambda a, b: -a, lambda a, b: -a),
    "exp": (lambda a, b: a.exp(), lambda a, b: np.exp(a)),
    "silu": (lambda a, b: a.silu(), lambda a, b: reference.silu(a)),
    "lt": (lambda a, b: a.lt(b), lambda a, b: a < b),
    "where": (lambda a, b: where(a.lt(b), a, b), lambda a, b: np.minimum(a, b)),
    "cast": (lambda a, b: a.cast("i32"), lambda a, b: np.trunc(a)),
    "copy": (lambda a, b: a.graph.apply(Copy(), a), lambda a, b: a),
    "concat": (lambda a, b: concat([a, b]), lambda a, b: np.concatenate([a, b])),
    "take": (lambda a, b, ids: a.take(ids), lambda a, b, ids: a[::-1]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [65_537, 1_000_003])
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_many_elements(target: Target, op: str, size: int, dtype: str) -> None:
    needs = {"lt": ("bool",), "where": ("bool",), "cast": ("i32",), "take": ("i64",)}
    target.need(dtype, *needs.get(op, ()))
    ids = [np.arange(size)[::-1].copy()] if op == "take" else []
    operands = [some(n, dtype, size) for n in "ab"] + ids
    check(target, f"{op} of {size} elements in {dtype}", ELEMENTWISE[op], *operands)


# Long rows


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(e / e.sum(axis, keepdims=True))


def rms_norm(x: Array, w: Array, b: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w)


def layer_norm(x: Array, w: Array, b: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w + b)


def reductions(axis: int) -> dict[str, Op]:
    return {
        "softmax": (lambda x, *_: x.softmax(axis), lambda x, *_: softmax(x, axis)),
        "max": (lambda x, *_: x.max(axis), lambda x, *_: x.max(axis)),
        "mean": (lambda x, *_: x.mean(axis), lambda x, *_: x.mean(axis)),
        "sum": (lambda x, *_: x.sum(axis), lambda x, *_: x.sum(axis)),
    }


ROWS: dict[str, Op] = {
    **reductions(1),
    "rms_norm": (lambda x, w, b: x.rms_norm(w, 1e-5), rms_norm),
    "layer_norm": (lambda x, w, b: x.layer_norm(w, b, 1e-5), layer_norm),
}
COLUMNS = reductions(0)


def check_sum(what: str, got: Array, want: Array, terms: int, magnitude: Array, dtype: str) -> None:
    """A sum of n products is off by at most ``n u / (1 - n u)`` times the sum of their magnitudes,
    u = 2**-24, in whatever order f32 makes it (Higham, 2002, "Accuracy and Stability of Numerical
    Algorithms", section 3.1); then it is rounded to the dtype."""
    bound = terms * 2.0**-24 / (1 - terms * 2.0**-24)
    off = abs(got.astype(np.float64) - want)
    allowed = ROUNDING[dtype] * abs(want) + bound * magnitude
    worst = np.unravel_index((off - allowed).argmax(), off.shape)
    assert (off <= allowed).all(), (
        f"{what} in {dtype}: {int((off > allowed).sum())} of {off.size} elements are wrong; the "
        f"worst: got {got[worst]!r}, need {want[worst]!r} within {allowed[worst]:.2g}"
    )


@cache
def rows_of(dtype: str, width: int) -> Array:
    """Three rows: the largest element is the last of one, the first of another."""
    x = np.array(some("x", dtype, 3, width))
    x[0].sort()
    x[1] = -np.sort(-x[1])
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [257, 1025, 4097, 5000])
@pytest.mark.parametrize("op", ROWS)
def test_long_rows(target: Target, op: str, width: int, dtype: str) -> None:
    target.need(dtype)
    operands = (rows_of(dtype, width), *(some(n, dtype, width) for n in "wb"))
    check_reduced(target, op, ROWS[op], 1, *operands)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", COLUMNS)
def test_long_columns(target: Target, op: str, dtype: str) -> None:
    target.need(dtype)
    check_reduced(target, op, COLUMNS[op], 0, np.ascontiguousarray(rows_of(dtype, 4097).T))


def check_reduced(target: Target, name: str, op: Op, axis: int, x: Array, *more: Array) -> None:
    got, want = run(target, op[0], x, *more), np.asarray(op[1](*wide(x, *more)))
    n, dtype = x.shape[axis], find_dtype(x.dtype).name
    what = f"{name} of {n}"
    size = abs(x.astype(np.float64)).mean(axis)
    magnitude = {"sum": n * size, "mean": size, "softmax": want}.get(name)
    if magnitude is None:
        check_close(f"{what} in {dtype}", got, want)
    else:  # some more terms, for exponentials and divisions
        check_sum(what, got, want, n + 20, magnitude, dtype)


# Long sums

TERMS = 4097


@pytest.mark.parametrize("rows", [1, 33])
def test_every_term_of_a_long_sum_counts(target: Target, rows: int) -> None:
    """Whole numbers of 12 bits whose partial sums f32 holds exactly, in whatever order."""
    target.need("f32")
    rng = random_of("terms", str(rows))
    a, b = (rng.integers(-4095, 4096, shape) for shape in ((rows, TERMS), (TERMS, 37)))
    signs = np.where(a < 0, -1, 1)
    assert max(abs(a).sum(1).max(), abs(b).sum(0).max()) < 2**24
    x, y, z = (values.astype(np.float32) for values in (a, signs, b))
    total, product = run(target, lambda x, y, z: [x.sum(1), y @ z], x, y, z)
    check_equal(f"sums of {TERMS}", total.astype(np.int64), a.sum(1))
    check_equal(f"products over {TERMS}", product.astype(np.int64), signs @ b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33])
def test_a_long_sum_is_as_exact_as_f32(target: Target, rows: int, dtype: str) -> None:
    target.need(dtype)
    a, b = some("left", dtype, rows, TERMS), some("right", dtype, TERMS, 37)
    total, product = run(target, lambda a, b: [a.sum(1), a @ b], a, b)
    x, y = wide(a, b)
    check_sum(f"sum over {TERMS}", total, x.sum(1), TERMS, abs(x).sum(1), dtype)
    check_sum(f"product over {TERMS}", product, x @ y, TERMS, abs(x) @ abs(y), dtype)


# Attention

DIM, LENGTH, GROUP, KV_HEADS = 128, 300, 8, 2


@cache
def cached_rows(name: str, dtype: str, *shape: int) -> Array:
    """Rows on the last axis but one; those from `LENGTH` on hold NaN."""
    out = np.array(some(name, dtype, *shape))
    out[..., LENGTH:, :] = np.nan
    return out


def causal(queries: int) -> Array:
    """Which of `LENGTH` rows a query sees, and none after them."""
    return np.arange(LENGTH + 7) <= np.arange(LENGTH - queries, LENGTH)[:, None]


QUERIES = pytest.mark.parametrize(
    ("dtype", "batch", "queries"), [("f32", 3, 1), ("bf16", 3, 1), ("f32", 3, 33), ("bf16", 1, 33)]
)


@QUERIES
def test_attention(target: Target, dtype: str, batch: int, queries: int) -> None:
    target.need(dtype)
    q = some("q", dtype, batch, GROUP * KV_HEADS, queries, DIM)
    k, v = (cached_rows(n, dtype, batch, KV_HEADS, LENGTH + 7, DIM) for n in "kv")
    got = run(target, lambda *t: attention(*t, length=LENGTH), q, k, v)
    want = reference.attend_many(*wide(q, k, v), scale=DIM**-0.5, seen=causal(queries))
    check_close(f"attention of {queries} queries in {dtype}", got, want)


@QUERIES
def test_ring_attention(target: Target, dtype: str, batch: int, queries: int) -> None:
    target.need(dtype)
    length, window, sinks = 1000, 200, 4
    q = some("q", dtype, batch, GROUP * KV_HEADS, queries, DIM)
    k, v = (some(n, dtype, batch, KV_HEADS, LENGTH, DIM) for n in "kv")
    held = np.zeros(LENGTH, np.int64)  # the position in each slot
    for p in range(length):
        held[reference.ring_slot(p, LENGTH, sinks)] = p
    at = np.arange(length - queries, length)[:, None]
    seen = (held <= at) & ((held > at - window) | (held < sinks))
    got = run(
        target, lambda *t: ring_attention(*t, length=length, window=window, sinks=sinks), q, k, v
    )
    want = reference.attend_many(*wide(q, k, v), scale=DIM**-0.5, seen=seen)
    check_close(f"ring attention of {queries} queries in {dtype}", got, want)


@QUERIES
def test_latent_attention(target: Target, dtype: str, batch: int, queries: int) -> None:
    """Rows are of one sequence, so there is no batch: its heads are as many as the others'."""
    target.need(dtype)
    heads = batch * GROUP
    q, qr = (some(n, dtype, 1, heads, queries, d) for n, d in (("q", DIM), ("qr", 64)))
    rows, keys = (cached_rows(n, dtype, LENGTH + 7, d) for n, d in (("c", DIM), ("r", 64)))
    got = run(target, lambda *t: latent_attention(*t, scale=0.07, length=LENGTH), q, qr, rows, keys)
    wide_q, joined = (np.concatenate(wide(*pair), -1) for pair in ((q, qr), (rows, keys)))
    k, v = (a[None, None] for a in (joined, *wide(rows)))
    want = reference.attend_many(wide_q, k, v, scale=0.07, seen=causal(queries))
    check_close(f"latent attention of {queries} queries in {dtype}", got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(target: Target, interleaved: bool, by_batch: bool, dtype: str) -> None:
    target.need(dtype)
    x = some("x", dtype, 3, GROUP, 33, DIM)
    cos, sin = (some(n, dtype, *([3] if by_batch else []), 33, DIM // 2) for n in ("cos", "sin"))
    got = run(target, lambda *t: t[0].rope(*t[1:], interleaved), x, cos, sin)
    wide_x, c, s = wide(x, cos, sin)
    c, s = (t[:, None] if by_batch else t for t in (c, s))
    half = DIM // 2
    one, two = (
        (np.s_[..., 0::2], np.s_[..., 1::2]) if interleaved
        else (np.s_[..., :half], np.s_[..., half:])
    )  # fmt: skip
    want = np.zeros_like(wide_x)
    want[one] = wide_x[one] * c - wide_x[two] * s
    want[two] = wide_x[two] * c + wide_x[one] * s
    check_close(f"rope of heads of {DIM} in {dtype}", got, want)


# Many axes and operands

SHAPE = (2, 3, 2, 4, 3)


def five(name: str, build: Any, want: Any, operands: int = 1) -> Case:
    return Case(f"{name}_rank_5", build, want, (Operand(SHAPE),) * operands, DTYPES)


AXES = [
    five("add", lambda a, b: a + b, lambda a, b: a + b, 2),
    five("mul_scalar", lambda a: a * 3.0, lambda a: a * 3),
    five("exp", lambda a: a.exp(), np.exp),
    five("cast", lambda a: a.cast("i32"), lambda a: np.trunc(a).astype(np.int64)),
    five("where", lambda a, b: where(a.lt(b), a, b), np.minimum, 2),
    *(five(f"softmax_{n}", lambda a, n=n: a.softmax(n), lambda a, n=n: softmax(a, n))
      for n in (1, 4)),
    *(five(f"{op}_{n}", lambda a, op=op, n=n: getattr(a, op)(n),
           lambda a, op=op, n=n: getattr(np, op)(a, axis=n))
      for op in ("max", "sum", "mean") for n in (2, 4)),
    five("concat", lambda a, b: concat([a, b, a], 3), lambda a, b: np.concatenate([a, b, a], 3), 2),
    Case(
        "concat_of_9", lambda *parts: concat(parts, 1), lambda *parts: np.concatenate(parts, 1),
        tuple(Operand((2, n, 3), make=patterns) for n in range(1, 10)), DTYPES, moves=True,
    ),
]  # fmt: skip

PARAMS = {
    name: param for name, param in every(AXES).items() if param[2] in ("contiguous", "permuted")
}


@pytest.mark.parametrize("param", PARAMS.values(), ids=PARAMS.keys())
def test_many_axes(target: Target, param: Param) -> None:
    check_case(target, *param)


# Long copies

LONG = (3 << 20) // 4 + 5
"""Elements of 3 MiB, and a few."""


def test_long_copies_to_and_from_the_host(target: Target) -> None:
    target.need("i32")
    data = np.arange(LONG, dtype=np.int32)
    store = Storage.allocate((LONG,), "i32", target.location)
    feed = target.backend.feeder(store.array)
    target.backend.copy_in(store.array, data)
    check_bits("copy_in of 3 MiB", store.to_numpy(), data)
    feed(-data)
    check_bits("a feeder's 3 MiB", store.to_numpy(), -data)


def test_long_operands_and_results(target: Target) -> None:
    target.need("i32")
    g = Graph()
    x = g.placeholder((LONG,), "i32")
    made = plan(x + 1, device=target.location)
    for n in range(2):
        data = np.arange(n, LONG + n, dtype=np.int32)
        check_bits("3 MiB through a plan", made.run({x: data}), data + 1)


def test_long_transfers(target: Target) -> None:
    target.need("i32")
    other, data, g = target.other_location(), np.arange(LONG, dtype=np.int32), Graph()
    x = g.placeholder((LONG,), "i32")
    for to, from_ in ((other, target.location), (target.location, other)):
        made = plan(x.to(str(to)), {x: target.storage(data, from_)}, from_)
        check_bits(f"3 MiB from {from_} to {to}", made.run(), data)
