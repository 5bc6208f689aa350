import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from toy_backends import FLOATS, check_everywhere, floats, run_everywhere

import lazykv as lk
from lazykv.ops.elementwise import ModScalar

SHAPES = [(5,), (2, 3, 4), (), (0,), (2, 0, 3)]

UNARY: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "neg": (lambda t: -t, lambda x: -x),
    "exp": (lambda t: t.exp(), np.exp),
    "sqrt": (lambda t: t.sqrt(), np.sqrt),
    "rsqrt": (lambda t: t.rsqrt(), lambda x: x**-0.5),
    "tanh": (lambda t: t.tanh(), np.tanh),
    "silu": (lambda t: t.silu(), lambda x: x / (1 + np.exp(-x))),
    "gelu": (
        lambda t: t.gelu(),
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "add_scalar": (lambda t: t + 0.3, lambda x: x + 0.3),
    "sub_scalar": (lambda t: t - 0.3, lambda x: x - 0.3),
    "rsub_scalar": (lambda t: 0.3 - t, lambda x: 0.3 - x),
    "mul_scalar": (lambda t: 0.3 * t, lambda x: x * 0.3),
    "div_scalar": (lambda t: t / 0.3, lambda x: x / 0.3),
    "rdiv_scalar": (lambda t: 0.3 / t, lambda x: 0.3 / x),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_one_operand(name: str, shape: tuple[int, ...], dtype: str) -> None:
    build, reference = UNARY[name]
    x = floats(np.random.default_rng(1), shape, dtype)
    if name in ("sqrt", "rsqrt", "rdiv_scalar"):
        x = (abs(x) + 1).astype(x.dtype)
    check_everywhere(build, [x], reference(x.astype(np.float64)), scale=2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_two_operands(name: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    a, b = floats(rng, (3, 4), dtype), (abs(floats(rng, (3, 4), dtype)) + 1).astype
    b = b(a.dtype)
    function = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
                "div": lambda x, y: x / y}[name]  # fmt: skip
    want = function(a.astype(np.float64), b.astype(np.float64))
    check_everywhere(function, [a, b], want)
    check_everywhere(lambda s, t: function(s.transpose(0, 1), t.transpose(0, 1)), [a, b], want.T)


@pytest.mark.parametrize("dtype", ["i8", "u8", "i32", "u32", "i64"])
def test_integers_wrap_as_numpys_do(dtype: str) -> None:
    rng = np.random.default_rng(3)
    info = np.iinfo(lk.dtype(dtype).numpy)
    a, b = rng.integers(info.min, info.max, (2, 6), dtype=info.dtype, endpoint=True)
    for function in (lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y):
        for got in run_everywhere(function, [a, b]).values():
            assert np.array_equal(got, function(a, b))
    for got in run_everywhere(lambda t: 3 * t + 1, [a]).values():
        assert np.array_equal(got, a * a.dtype.type(3) + a.dtype.type(1))


@pytest.mark.parametrize("dtype", ["i8", "u8", "i32", "i64"])
def test_the_remainder_is_never_negative(dtype: str) -> None:
    x = np.arange(-9, 9).astype(lk.dtype(dtype).numpy)
    for got in run_everywhere(lambda t: t.graph.apply(ModScalar(5), t), [x]).values():
        assert got.dtype == x.dtype
        assert got.tolist() == [int(n) % 5 for n in x]


@pytest.mark.parametrize(("dtype", "value"), [("i64", 0), ("i64", -3), ("f32", 5), ("u8", 256)])
def test_a_remainder_that_is_none_is_refused(dtype: str, value: int) -> None:
    t = lk.Graph().placeholder((3,), dtype)
    with pytest.raises(lk.DTypeError, match=f"mod_scalar: got {dtype}|mod_scalar: got {value}"):
        t.graph.apply(ModScalar(value), t)
    with pytest.raises(lk.DTypeError):
        t.graph.apply(ModScalar(5, reverse=True), t)


@pytest.mark.parametrize("dtype", [*FLOATS, "i32", "u8"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_give_bools(name: str, dtype: str) -> None:
    a = np.array([1, 2, 3, 3]).astype(lk.dtype(dtype).numpy)
    b = np.array([2, 2, 2, 3]).astype(a.dtype)
    reference = getattr(np, {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal",
                             "gt": "greater", "ge": "greater_equal"}[name])  # fmt: skip
    for got in run_everywhere(lambda s, t: getattr(s, name)(t), [a, b]).values():
        assert got.dtype == bool
        assert got.tolist() == reference(a.astype(float), b.astype(float)).tolist()
    for got in run_everywhere(lambda s: getattr(s, name)(2), [a]).values():
        assert got.tolist() == reference(a.astype(float), 2.0).tolist()


def test_inf_and_nan_are_results_and_not_warnings() -> None:
    x = np.array([-1000.0, 0.0, 1000.0, np.inf, -np.inf, np.nan], np.float32)
    builds = [lambda t: t.exp(), lambda t: t.rsqrt(), lambda t: 1 / t, lambda t: t - t,
              lambda t: t.cast("f16"), lambda t: t.sqrt()]  # fmt: skip
    with np.errstate(all="ignore"):
        wants = [np.exp(x), 1 / np.sqrt(x), 1 / x, x - x, x.astype(np.float16), np.sqrt(x)]
    for build, want in zip(builds, wants, strict=True):
        for got in run_everywhere(build, [x]).values():
            np.testing.assert_array_equal(got, want)
    for got in run_everywhere(lambda t: t.silu(), [x[:3]]).values():
        assert got.tolist() == [0.0, 0.0, 1000.0]


def test_H10_a_scalar_never_widens() -> None:
    x = np.ones(64, np.float32)
    for scalar in (1 / np.sqrt(64), np.float64(0.1), 1 / math.sqrt(64)):
        for got in run_everywhere(lambda t, s=scalar: t * s, [x]).values():
            assert got.dtype == np.float32
    plan = lk.plan(lk.Graph().const(x) * (1 / np.sqrt(64)))
    assert {r.spec.dtype for r in plan.program.registers} == {lk.f32}


def test_16_bit_arithmetic_rounds_once() -> None:
    x = np.array([300.0], np.float16)
    for got in run_everywhere(lambda t: t.gelu(), [x]).values():
        assert got.tolist() == [300.0]
    big = np.array([2048.0], np.float16)
    assert lk.realize(lk.Graph().const(big) + 1).tolist() == [2048.0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [1e300, -1e300, 10**39, 1e39, math.inf])
def test_a_number_beyond_the_dtype_is_infinite(dtype: str, value: float) -> None:
    """As IEEE rounding has it, and without a warning, wherever the number comes in."""
    x = np.array([2, -3, 0], lk.dtype(dtype).numpy)
    number = float(value) if dtype == "f64" else math.copysign(math.inf, value)
    with np.errstate(all="ignore"):
        wide, n = x.astype(np.float64), np.float64(number)
        wants = [wide + n, n - wide, wide * n, wide / n, n / wide]
    ops = [lambda t: t + value, lambda t: value - t, lambda t: t * value, lambda t: t / value,
           lambda t: value / t]  # fmt: skip
    for op, want in zip(ops, wants, strict=True):
        for place, got in run_everywhere(op, [x]).items():
            np.testing.assert_array_equal(got.astype(np.float64), want, err_msg=place)
    for place, got in run_everywhere(lambda t: t.lt(value), [x]).items():
        assert got.tolist() == [value > 0] * 3, place
    const = lk.realize(lk.Graph().const([float(value), 1.0], dtype))
    assert const.tolist() == [number, 1]


@pytest.mark.parametrize("dtype", [*FLOATS, "i32", "u8", "i64"])
def test_an_integer_that_no_number_type_holds_is_refused(dtype: str) -> None:
    t = lk.Graph().placeholder((2,), dtype)
    for op in (lambda n: t + n, lambda n: n - t, lambda n: t * n, lambda n: t.eq(n)):
        for n in (10**400, -(10**400)):
            with pytest.raises(lk.DTypeError, match=r"got .*need (one that a float|an integer in)"):
                op(n)
    if dtype in FLOATS:
        with pytest.raises(lk.LazyKvError):
            lk.Graph().const([10**400], dtype)
        with pytest.raises(lk.RangeError, match="need a finite number"):
            t.rms_norm(t, eps=10**400)
