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


def integers_of(name: str) -> Array:
    """Both ends of an integer dtype, and whole numbers at, just above and just below the middle of
    two floats of every format."""
    info = np.iinfo(find_dtype(name).numpy)
    found = [0, info.min, info.min + 1, info.max, info.max - 1, 2**53 + 1, 2**32, 2**31, -(2**31)]
    for _, fraction, _ in FORMATS.values():
        for half in (1 << (fraction + 1)) + 1, (1 << (fraction + 2)) - 1:
            found += [(half << e) + d for e in range(63) for d in (-1, 0, 1)]
    both = [int(sign * n) for n in found for sign in (1, -1)]
    return np.array(sorted({n for n in both if info.min <= n <= info.max}), info.dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("source", INTEGERS)
def test_a_whole_number_is_rounded_once_to_the_nearest_even(
    target: Target, source: str, name: str
) -> None:
    values = integers_of(source)
    got = cast(target, values, name).astype(np.float64)
    _check_values(f"cast of {source} to {name}", values, got, reference.cast_float(values, name))


@pytest.mark.parametrize("name", [*INTEGERS, "bool"])
@pytest.mark.parametrize("source", INTEGERS)
def test_whole_numbers_that_do_not_fit_wrap(target: Target, source: str, name: str) -> None:
    """Modulo 2**n; anything but 0 is True."""
    values = integers_of(source)
    got = cast(target, values, name)
    if name == "bool":
        want = [v != 0 for v in values.tolist()]
    else:
        low, size = int(np.iinfo(got.dtype).min), 1 << np.iinfo(got.dtype).bits
        want = [(v - low) % size + low for v in values.tolist()]
    check_equal(f"cast of {source} to {name}", got, np.array(want, got.dtype))


NANS = {
    "f32": ([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F810000, 0x7FBFFFFF], np.uint32),
    "f64": ([0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF, 0x7FF0000010000000], np.uint64),
    "f16": ([0x7C01, 0x7FFF, 0x7E00], np.uint16),
    "bf16": ([0x7F81, 0x7FFF, 0x7FC0], np.uint16),
}


@pytest.mark.parametrize("name", [*FLOATS, "f8_e4m3", "f8_e5m2"])
@pytest.mark.parametrize("source", NANS)
def test_every_nan_stays_one(target: Target, source: str, name: str) -> None:
    """Whatever its payload, of which nothing may be left in a narrower format, and its sign."""
    bits, kind = NANS[source]
    sign = 1 << (8 * np.dtype(kind).itemsize - 1)
    values = np.array([*bits, *(b | sign for b in bits)], kind).view(find_dtype(source).numpy)
    got = cast(target, values, name)
    check_equal(f"NaN of {source} as {name}", np.isnan(got), np.ones(len(values), np.bool_))


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("source", FLOATS)
def test_floats_lose_their_fraction(target: Target, source: str, name: str) -> None:
    """Towards zero, over the whole range of the integers. What does not fit has no result."""
    info, dt = np.iinfo(find_dtype(name).numpy), find_dtype(source)
    ends = np.array([info.min, info.min // 2, info.max // 2, info.max], np.float64)
    few = np.array([0.5, 1.9, -0.9, 2.5, -2.5, 1.5, 100.5, 1e5, 3e9, -3e9])
    with np.errstate(over="ignore"):
        values = np.concatenate([ends, few]).astype(dt.numpy)
    wide = values.astype(np.float64)
    fits = [math.isfinite(v) and info.min <= int(v) <= info.max for v in wide.tolist()]
    got = cast(target, values[fits], name)
    want = np.array([int(v) for v in wide[fits].tolist()], info.dtype)
    check_equal(f"cast of {source} to {name}", got, want)


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
