"""Whole numbers over the whole range of their dtypes: arithmetic wraps modulo 2**n, comparisons and
remainders are exact, and what is unsigned has no sign.

Values are far above what f32 (2**24) or f64 (2**53) can tell apart, and beside each other there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lazykv.dtypes import dtype as find_dtype
from lazykv.graph import Graph, Tensor
from lazykv.ops.elementwise import ModScalar
from lazykv.testing.compare import check_equal
from lazykv.testing.golden import INTEGERS, Array
from lazykv.testing.target import Target


def values_of(name: str) -> list[int]:
    """Both ends of a dtype, the middle of its bits, and what floats round."""
    info = np.iinfo(find_dtype(name).numpy)
    top = int(info.max)
    near = [0, 1, 2, 5, 127, 128, 200, 2**24, 2**24 + 1, 2**31, 2**31 + 1, 2**53, 2**53 + 1]
    found = {*near, top, top - 1, top // 2, top // 2 + 1, int(info.min), int(info.min) + 1}
    found |= {-n for n in (1, 2, 100, 2**24 + 1, 2**53 + 1)}
    return sorted(n for n in found if info.min <= n <= info.max)


def wrapped(values: Any, name: str) -> Array:
    """Python's whole numbers as a dtype has them, modulo 2**n."""
    info = np.iinfo(find_dtype(name).numpy)
    low, size = int(info.min), 1 << info.bits
    flat = [(int(v) - low) % size + low for v in values]
    return np.array(flat, info.dtype)


Exact = Callable[[int, int], int]

BINARY: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Exact]] = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
}
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
SCALAR: dict[str, tuple[Callable[[Tensor, int], Tensor], Exact]] = {
    "add_scalar": (lambda a, n: a + n, lambda a, n: a + n),
    "sub_scalar": (lambda a, n: a - n, lambda a, n: a - n),
    "scalar_sub": (lambda a, n: n - a, lambda a, n: n - a),
    "mul_scalar": (lambda a, n: a * n, lambda a, n: a * n),
    "mod_scalar": (lambda a, n: a.graph.apply(ModScalar(n), a), lambda a, n: a % n),
}


def pairs(name: str) -> list[tuple[int, int]]:
    values = values_of(name)
    return [(a, b) for a in values for b in values]


def run_pairs(target: Target, name: str, build: Callable[[Tensor, Tensor], Tensor]) -> Array:
    target.need(name)
    g, dt = Graph(), find_dtype(name).numpy
    sides = [np.array(side, dt) for side in zip(*pairs(name), strict=True)]
    operands = {g.placeholder(a.shape, name): target.storage(a) for a in sides}
    out: Array = target.run(build(*operands), operands)
    return out


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("op", BINARY)
def test_arithmetic_wraps(target: Target, op: str, name: str) -> None:
    build, exact = BINARY[op]
    got = run_pairs(target, name, build)
    check_equal(f"{op} of {name}", got, wrapped((exact(a, b) for a, b in pairs(name)), name))


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("op", COMPARISONS)
def test_comparisons_are_exact(target: Target, op: str, name: str) -> None:
    target.need("bool")
    got = run_pairs(target, name, lambda a, b: getattr(a, op)(b))
    want = np.array([COMPARISONS[op](a, b) for a, b in pairs(name)])
    check_equal(f"{op} of {name}", got, want)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("op", SCALAR)
def test_arithmetic_with_a_number_wraps(target: Target, op: str, name: str) -> None:
    target.need(name)
    build, exact = SCALAR[op]
    values, g = values_of(name), Graph()
    numbers = [n for n in values if n > 0] if op == "mod_scalar" else values
    x = g.placeholder((len(values),), name)
    store = target.storage(np.array(values, x.dtype.numpy))
    found = target.run([build(x, n) for n in numbers], {x: store})
    for n, got in zip(numbers, found, strict=True):
        want = wrapped((exact(v, n) for v in values), name)
        check_equal(f"{op} of {name} and {n}", got, want)


@pytest.mark.parametrize("name", [n for n in INTEGERS if n[0] == "i"])
def test_negation_wraps(target: Target, name: str) -> None:
    """The lowest number is its own negative."""
    target.need(name)
    values, g = values_of(name), Graph()
    x = g.placeholder((len(values),), name)
    got = target.run(-x, {x: target.storage(np.array(values, x.dtype.numpy))})
    check_equal(f"neg of {name}", got, wrapped((-v for v in values), name))
