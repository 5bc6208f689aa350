"""Roundings: to the nearest, ties to even, once."""

import math
from typing import Any

import numpy as np
import pytest

from lazykv.dtypes import dtype as find_dtype
from lazykv.graph import Graph
from lazykv.testing import reference
from lazykv.testing.compare import check_bits, check_close, check_equal
from lazykv.testing.golden import FLOATS, INTEGERS, STORED, Array
from lazykv.testing.reference import FORMATS
from lazykv.testing.target import Target

NARROW = ("f16", "bf16", "f8_e4m3", "f8_e5m2")


def cast(target: Target, values: Array, name: str) -> Array:
    """Values of one dtype as another, by the target."""
    target.need(find_dtype(values.dtype).name, name)
    g = Graph()
    x = g.placeholder(values.shape, values.dtype)
    out: Array = target.run(x.cast(name), {x: target.storage(values)})
    assert out.dtype == find_dtype(name).numpy
    return out


def every_value(name: str) -> Array:
    """All values of a float dtype of 8 or 16 bits."""
    dt = find_dtype(name)
    return np.arange(1 << 8 * dt.itemsize, dtype=dt.raw if dt.is_bits else np.uint16).view(dt.numpy)


def around(name: str, source: str) -> Array:
    """Values of `source` at, between and beside neighbours of a narrower format: halfway (a tie),
    and as little above and below as the source can tell."""
    exponent_bits, fraction_bits, _ = FORMATS[name]
    bias = (1 << (exponent_bits - 1)) - 1
    lowest, highest = 1 - bias - fraction_bits, bias + 1
    step = range(lowest - 2, highest + 1)
    exponents = sorted({lowest - 2, *step[:: max(1, len(step) // 24)], highest - 1, highest})
    values = [0.0, math.inf]
    for e in exponents:
        for k in range(1 << (fraction_bits + 1)) if fraction_bits < 4 else (0, 1, 2, 3, 5, 7, 127):
            values.append(math.ldexp(1 + k / (1 << (fraction_bits + 1)), e))
    with np.errstate(over="ignore"):
        exact = np.array(values, np.float64).astype(source)
    exact = exact[np.isfinite(exact)]
    near = [np.nextafter(exact, exact.dtype.type(to)) for to in (0, np.inf)]
    found = np.concatenate([exact, *near])
    found = found[np.isfinite(found)]
    return np.concatenate([found, -found, np.array([np.inf, -np.inf, np.nan], exact.dtype)])


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_a_cast_rounds_once_to_the_nearest_even(target: Target, source: str, name: str) -> None:
    values = around(name, find_dtype(source).numpy.name)
    got = cast(target, values, name).astype(np.float64)
    want = reference.cast_float(values.astype(np.float64), name)
    _check_values(f"cast of {source} to {name}", values, got, want)


def _check_values(what: str, values: Array, got: Array, want: Array) -> None:
    """Equal values, signs of zeros included."""
    same = (got == want) & (np.signbit(got) == np.signbit(want))
    wrong = ~(same | (np.isnan(got) & np.isnan(want)))
    if wrong.any():
        first = int(wrong.argmax())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {len(values)} values are wrong; the first: "
            f"{values[first]!r} gave {got[first]!r}, need {want[first]!r}"
        )


def test_f64_to_f32_rounds_to_the_nearest_even(target: Target) -> None:
    values = around("f32", "float64")
    got = cast(target, values, "f32").astype(np.float64)
    _check_values("cast of f64 to f32", values, got, reference.cast_float(values, "f32"))


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("wide", ["f32", "f64"])
def test_widening_is_exact(target: Target, wide: str, name: str) -> None:
    values = every_value(name)
    with np.errstate(invalid="ignore"):
        want = values.astype(find_dtype(wide).numpy)
    got = cast(target, values, wide)
    _check_values(f"cast of {name} to {wide}", values, got, want)


@pytest.mark.parametrize("name", [n for n in STORED if not n.startswith("f8")])
@pytest.mark.parametrize("source", [*INTEGERS, "bool"])
def test_whole_numbers_are_converted(target: Target, source: str, name: str) -> None:
    """What both dtypes hold; anything but 0 is True."""
    values = np.array([0, 1] if source == "bool" else [0, 1, 2, 7, 100, 127])
    if source[0] == "i" and name[0] != "u":
        values = np.concatenate([values, [-1, -100, -128]])
    got = cast(target, values.astype(find_dtype(source).numpy), name)
    check_equal(f"cast of {source} to {name}", got, values.astype(find_dtype(name).numpy))


@pytest.mark.parametrize("name", [*INTEGERS, "bool"])
@pytest.mark.parametrize("source", FLOATS)
def test_whole_floats_are_converted(target: Target, source: str, name: str) -> None:
    values = np.array([0.0, 1.0, 2.0, 7.0, 100.0, -0.0])
    if name[0] == "i":
        values = np.concatenate([values, [-1.0, -100.0]])
    got = cast(target, values.astype(find_dtype(source).numpy), name)
    check_equal(f"cast of {source} to {name}", got, values.astype(find_dtype(name).numpy))


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_arithmetic_rounds_to_the_nearest_even(target: Target, op: str, name: str) -> None:
    """Results of 16-bit floats that f32 holds exactly, many of them ties."""
    target.need(name)
    dt, fraction = find_dtype(name), FORMATS[name][1]
    unit = 2.0**-fraction
    ones = np.array([1 + k * unit for k in range(32)])
    a, b = (x.reshape(-1) for x in np.meshgrid(ones, ones if op == "mul" else ones * unit))
    g = Graph()
    x, y = (g.placeholder(a.shape, name) for _ in range(2))
    out = {"add": x + y, "sub": x - y, "mul": x * y}[op]
    stores = {t: target.storage(v.astype(dt.numpy)) for t, v in ((x, a), (y, b))}
    a, b = (v.astype(dt.numpy).astype(np.float64) for v in (a, b))
    exact = {"add": a + b, "sub": a - b, "mul": a * b}[op]
    got = target.run(out, stores).astype(np.float64)
    _check_values(f"{op} in {name}", exact, got, reference.cast_float(exact, name))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_sums_of_16_bit_floats_are_wide(target: Target, name: str) -> None:
    """Added up in the dtype itself, 700 ones would stay at 256 (bf16), and 2049 at 2048 (f16)."""
    target.need(name)
    n = 2500
    g = Graph()
    x, y = g.placeholder((1, n), name), g.placeholder((n, 1), name)
    ones = np.ones((1, n), find_dtype(name).numpy)
    stores: dict[Any, Any] = {x: target.storage(ones), y: target.storage(ones.T.copy())}
    total, product = target.run([x.sum(1), x @ y], stores)
    check_close(f"a sum of {n} ones in {name}", total, np.array([float(n)]))
    check_close(f"a product of {n} ones in {name}", product, np.array([[float(n)]]))


def test_results_have_the_dtype_of_their_operands(target: Target) -> None:
    """Nothing is cast on the way out."""
    for name in STORED:
        if name not in target.backend.capabilities.dtypes:
            continue
        values = np.array([0, 1, 1]).astype(find_dtype(name).numpy)
        g = Graph()
        x = g.placeholder((3,), name)
        check_bits(f"{name} handed through", target.run(x, {x: target.storage(values)}), values)
