"""Floats at the edges of their formats: arguments far out, results that overflow on the way only,
zeros, infinities and subnormals.

Not asked for: silu and gelu of -inf, where their formulas are NaN; squares and sums that f32 itself
cannot hold; and f32 subnormals in arithmetic, which a backend may take for zeros (so also those of
bf16, whose arithmetic is f32). Those of f16 are normal numbers there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lazykv.dtypes import dtype as find_dtype
from lazykv.functions import attention, latent_attention, ring_attention
from lazykv.graph import Graph, Tensor
from lazykv.testing import reference
from lazykv.testing.compare import ROUNDING, check_close, check_equal
from lazykv.testing.golden import FLOATS, Array, random_of
from lazykv.testing.target import Target

Op = tuple[Callable[..., Tensor], Callable[..., Any]]
"""What builds it, and its reference."""


def held(values: Any, name: str) -> Array:
    """Values as a dtype has them."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(find_dtype(name).numpy)


def run(target: Target, op: Op, *arrays: Array) -> tuple[Array, Array]:
    """What the target gives and what the reference does."""
    target.need(*(find_dtype(a.dtype).name for a in arrays))
    g = Graph()
    operands = {g.placeholder(a.shape, a.dtype): target.storage(a) for a in arrays}
    with np.errstate(all="ignore"):
        want = np.asarray(op[1](*(a.astype(np.float64) for a in arrays)))
    return target.run(op[0](*operands), operands), want


def check(target: Target, what: str, op: Op, *arrays: Array) -> None:
    got, want = run(target, op, *arrays)
    check_close(what, got, want)


# Far arguments

OUTSIDE = [20.0, 44.4, 88.0, 88.8, 90.0, 104.0, 710.0, 3e4, 6e4, 1e13, 3e38]
FUNCTIONS: dict[str, Op] = {
    "exp": (lambda x: x.exp(), np.exp),
    "tanh": (lambda x: x.tanh(), np.tanh),
    "silu": (lambda x: x.silu(), reference.silu),
    "gelu": (lambda x: x.gelu(), reference.gelu),
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_far_arguments(target: Target, function: str, name: str) -> None:
    values = held([*OUTSIDE, *(-v for v in OUTSIDE), np.inf], name)
    values = values[values > -np.inf]  # in f16 some are infinite
    got, want = run(target, FUNCTIONS[function], values)
    for n, value in enumerate(values):
        check_close(f"{function} of {value} in {name}", got[n : n + 1], want[n : n + 1])


ROOTS: dict[str, Op] = {
    "sqrt": (lambda x: x.sqrt(), np.sqrt),
    "rsqrt": (lambda x: x.rsqrt(), lambda x: 1 / np.sqrt(x)),
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("root", ROOTS)
def test_roots_of_special_numbers(target: Target, root: str, name: str) -> None:
    least = {"f16": 2.0**-24, "f64": 2.0**-1022}.get(name, 2.0**-126)
    values = held([0.0, -0.0, np.inf, np.nan, -1.0, -np.inf, least, 3 * least, 1e4, 3e38], name)
    got, want = run(target, ROOTS[root], values)
    wide = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = abs(wide - want) <= (ROUNDING[name] + 1e-5) * abs(want)
    fits = near | (wide == want) | (np.isnan(wide) & np.isnan(want))
    assert fits.all(), f"{root} in {name} of {values}: got {got}, need {want}"


@pytest.mark.parametrize("op", ["add", "mul", "gt", "max"])
def test_f16_subnormals_count(target: Target, op: str) -> None:
    target.need("f16", "bool")
    small = held(2.0**-24 * np.array([[1, 2, 3, 341], [-1, -2, -3, -341]]), "f16")
    ops: dict[str, Op] = {
        "add": (lambda x: x + x, lambda x: x + x),
        "mul": (lambda x: x * 3.0, lambda x: x * 3),
        "gt": (lambda x: x.gt(0.0), lambda x: x > 0),
        "max": (lambda x: x.max(1), lambda x: x.max(1)),
    }
    got, want = run(target, ops[op], small)
    check_equal(f"{op} of f16 subnormals", got.astype(np.float64), want.astype(np.float64))


# Rows

LOW = [-np.inf] * 5
MAXIMA = [LOW, [*LOW[:4], -3e38], [*LOW[:3], -60000.0, -1.0], [*LOW[:4], np.inf], [-0.0] * 5]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_maximum_of_nothing_but_infinities(target: Target, axis: int, name: str) -> None:
    values = held(MAXIMA, name)
    x = values if axis else np.ascontiguousarray(values.T)
    op: Op = (lambda t: t.max(axis), lambda a: a.max(axis))
    got, want = run(target, op, x)
    check_equal(f"max over axis {axis} in {name}", got.astype(np.float64), want)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("width", [4, 256])
def test_the_variance_of_rows_far_from_zero(target: Target, width: int, name: str) -> None:
    """The difference of the mean square and the squared mean has no digits left there in f32."""
    rows = np.add.outer([1000.0, -4000.0], np.arange(width) % 8)
    weight, bias = held(np.linspace(0.5, 2, width), name), held(np.linspace(-1, 1, width), name)
    op: Op = (
        lambda x, w, b: x.layer_norm(w, b, 1e-5),
        lambda x, w, b: reference.layer_norm(x, w, b, 1e-5),
    )
    check(target, f"layer_norm of rows of {width} in {name}", op, held(rows, name), weight, bias)


LARGE = held([[60000.0, 60000, -60000, 30000], [300, -300, 299, 256], [5e4] * 4], "f16")
ONE = held([1.0, 0.5, 2.0, 1.0], "f16")
WIDE_ON_THE_WAY: dict[str, tuple[Op, tuple[Array, ...]]] = {
    "rms_norm": (
        (lambda x, w: x.rms_norm(w, 1e-5), lambda x, w: reference.rms_norm(x, w, 1e-5)),
        (LARGE, ONE),
    ),
    "layer_norm": (
        (lambda x, w, b: x.layer_norm(w, b, 1e-5),
         lambda x, w, b: reference.layer_norm(x, w, b, 1e-5)),
        (LARGE, ONE, ONE),
    ),
    "mean": ((lambda x: x.mean(1), lambda x: x.mean(1)), (LARGE,)),
    "sum": ((lambda x: x.sum(1), lambda x: x.sum(1)), (held([[6e4, 6e4, -6e4, -5e4]] * 2, "f16"),)),
    "softmax": ((lambda x: x.softmax(1), lambda x: reference.softmax(x, 1)), (LARGE,)),
    "matmul": (
        (lambda a, b: a @ b, reference.matmul),
        (LARGE, held([[300.0, 1], [-300, 0], [-1, 0], [0.5, 0.25]], "f16")),
    ),
    "gelu": ((lambda x: x.gelu(), reference.gelu), (LARGE,)),
}  # fmt: skip


@pytest.mark.parametrize("op", WIDE_ON_THE_WAY)
def test_results_of_f16_overflow_only_at_the_end(target: Target, op: str) -> None:
    pair, arrays = WIDE_ON_THE_WAY[op]
    check(target, f"{op} of large f16", pair, *arrays)


# Attention

ATTENTION: dict[str, Op] = {
    "attention": (
        lambda q, k, v: attention(q, k, v, causal=False),
        lambda q, k, v: reference.attention(q, k, v, causal=False),
    ),
    "ring": (
        lambda q, k, v: ring_attention(q, k, v, length=3, window=3),
        lambda q, k, v: reference.ring_attention(q, k, v, length=3, window=3),
    ),
    "latent": (
        lambda q, k, v: latent_attention(
            q, q, k.slice(1, 0, 1).reshape(3, 8), k.slice(1, 0, 1).reshape(3, 8), scale=0.5
        ),
        lambda q, k, v: reference.latent_attention(q, q, k[0, 0], k[0, 0], scale=0.5),
    ),
}


@pytest.mark.parametrize("op", ATTENTION)
def test_scores_may_be_larger_than_f16(target: Target, op: str) -> None:
    """Of three rows two have one score, far above 65504, and the third has a lower one."""
    q = held(np.full((1, 2, 1, 8), 200.0), "f16")
    k = held(np.full((1, 2, 3, 8), 210.0), "f16")
    k[:, :, 1] = 180
    v = held(random_of("values").standard_normal(k.shape), "f16")
    check(target, f"{op} with large scores", ATTENTION[op], q, k, v)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("by", ["1e9", "lowest"])
def test_masks_of_large_negative_numbers(target: Target, by: str, name: str) -> None:
    """What models add instead of -inf: -1e9, or the lowest number of the dtype."""
    lowest = float(np.nextafter(held(-np.inf, name), held(0, name)))
    low = lowest if by == "lowest" else max(lowest, -1e9)
    rng = random_of("masks")
    q, k, v = (held(rng.standard_normal((1, 2, n, 8)), name) for n in (3, 5, 5))
    seen = np.array([[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [1, 1, 0, 1, 1]], np.bool_)
    mask = held(np.where(seen, 0.0, low), name)
    op: Op = (
        lambda q, k, v, m: attention(q, k, v, mask=m, causal=False),
        lambda q, k, v, m: reference.attention(q, k, v, mask=m, causal=False),
    )
    check(target, f"a mask of {low} in {name}", op, q, k, v, mask)
