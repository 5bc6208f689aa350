"""Arithmetic, comparisons and choices, element by element."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lazykv.dtypes import DType
from lazykv.functions import where
from lazykv.graph import Tensor
from lazykv.ops.elementwise import And, ModScalar, Tanh
from lazykv.testing import reference
from lazykv.testing.golden import (
    FLOATS,
    INTEGERS,
    STORED,
    Array,
    Case,
    Maker,
    Operand,
    Param,
    check_case,
    every,
    falling,
    few,
    given,
    numbers,
    patterns,
    positive,
)
from lazykv.testing.target import Target

SHAPE, EMPTY = (3, 2, 5), (3, 0, 5)
SIGNED = (*FLOATS, "i8", "i32", "i64")


def quietly(f: Callable[..., Any]) -> Callable[..., Any]:
    """NaN, infinities and divisions by zero are results, not warnings."""

    def g(*arrays: Array) -> Any:
        with np.errstate(all="ignore"):
            return f(*arrays)

    return g


def unary(
    name: str, build: Callable[[Tensor], Tensor], want: Callable[[Array], Any],
    make: Maker = numbers, dtypes: tuple[str, ...] = FLOATS, shared: Maker | None = None,
) -> Case:  # fmt: skip
    operands = (Operand(SHAPE, make=make),)
    return Case(name, build, quietly(want), operands, dtypes, (EMPTY,), shared=shared)


def binary(
    name: str, build: Callable[[Tensor, Tensor], Tensor], want: Callable[[Array, Array], Any],
    dtypes: tuple[str, ...] = (*FLOATS, *INTEGERS), left: Maker = positive, right: Maker = numbers,
    shape: tuple[int, ...] = SHAPE, shared: Maker | None = None,
) -> Case:  # fmt: skip
    operands = (Operand(shape, make=left), Operand(shape, make=right))
    return Case(name, build, quietly(want), operands, dtypes, (EMPTY, EMPTY), shared=shared)


# Every pair of these.
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5]
LEFT, RIGHT = (given(a) for a in np.meshgrid(SPECIAL, SPECIAL))
# Few values, so that equal ones meet.
CLOSE_LEFT, CLOSE_RIGHT = (
    given(np.array(values).reshape(SHAPE))
    for values in ([0, 1, 2, 3, 4] * 6, [0, 0, 1, 2, 3, 3, 4, 4, 2, 1] * 3)
)
FAR = given(np.linspace(-30, 30, 30).reshape(SHAPE))


def modulo(rng: np.random.Generator, shape: tuple[int, ...], dt: DType) -> Array:
    low = 0 if dt.name.startswith("u") else -100
    return rng.integers(low, 100, shape).astype(dt.numpy)


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def compare(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: getattr(a, name)(b)


CASES = [
    binary("add", lambda a, b: a + b, lambda a, b: a + b, shared=falling),
    binary("sub", lambda a, b: a - b, lambda a, b: a - b, shared=falling),
    binary("mul", lambda a, b: a * b, lambda a, b: a * b, shared=falling),
    binary("div", lambda a, b: b / a, lambda a, b: b / a, FLOATS, shared=falling),
    binary("add_special", lambda a, b: a + b, lambda a, b: a + b, FLOATS, LEFT, RIGHT, (6, 6)),
    binary("mul_special", lambda a, b: a * b, lambda a, b: a * b, FLOATS, LEFT, RIGHT, (6, 6)),
    binary("div_special", lambda a, b: a / b, lambda a, b: a / b, FLOATS, LEFT, RIGHT, (6, 6)),
    *(
        binary(name, compare(name), want, left=CLOSE_LEFT, right=CLOSE_RIGHT, shared=few)
        for name, want in COMPARISONS.items()
    ),
    *(
        binary(f"{name}_special", compare(name), want, FLOATS, LEFT, RIGHT, (6, 6))
        for name, want in COMPARISONS.items()
    ),
    unary("add_scalar", lambda a: a + 3, lambda a: a + 3, dtypes=(*FLOATS, *INTEGERS)),
    unary("sub_scalar", lambda a: a - 3, lambda a: a - 3, positive, (*FLOATS, *INTEGERS)),
    unary("scalar_sub", lambda a: 30 - a, lambda a: 30 - a, dtypes=(*FLOATS, *INTEGERS)),
    unary("mul_scalar", lambda a: a * 3, lambda a: a * 3, dtypes=(*FLOATS, *INTEGERS)),
    unary("div_scalar", lambda a: a / 4.0, lambda a: a / 4),
    unary("scalar_div", lambda a: 2.5 / a, lambda a: 2.5 / a, positive),
    unary(
        "mod_scalar", lambda a: a.graph.apply(ModScalar(7), a), lambda a: a % 7, modulo, INTEGERS,
        shared=modulo,
    ),
    unary("neg", lambda a: -a, lambda a: -a, dtypes=SIGNED),
    unary("exp", lambda a: a.exp(), np.exp),
    unary("exp_special", lambda a: a.exp(), np.exp, given(np.array([*SPECIAL] * 5).reshape(SHAPE))),
    unary("sqrt", lambda a: a.sqrt(), np.sqrt, positive),
    unary("rsqrt", lambda a: a.rsqrt(), lambda a: 1 / np.sqrt(a), positive),
    unary("tanh", lambda a: a.graph.apply(Tanh(), a), np.tanh),
    unary("silu", lambda a: a.silu(), reference.silu),
    unary("silu_far", lambda a: a.silu(), reference.silu, FAR),
    unary("gelu", lambda a: a.gelu(), reference.gelu),
    unary("gelu_far", lambda a: a.gelu(), reference.gelu, FAR),
    unary(
        "cast_to_f32", lambda a: a.cast("f32"), lambda a: a.astype(np.float64),
        dtypes=tuple(n for n in STORED if n != "f32"),
    ),
    Case(
        "and", lambda a, b: a.graph.apply(And(), a, b), lambda a, b: a & b,
        (Operand(SHAPE, "bool", patterns), Operand(SHAPE, "bool", patterns)), ("bool",),
        (EMPTY, EMPTY),
    ),
    Case(
        "where", where, reference.where,
        (Operand(SHAPE, "bool", patterns), Operand(SHAPE, make=patterns),
         Operand(SHAPE, make=patterns)),
        STORED, (EMPTY,) * 3, moves=True,
    ),
]  # fmt: skip

PARAMS = every(CASES)


@pytest.mark.parametrize("param", PARAMS.values(), ids=PARAMS.keys())
def test_op(target: Target, param: Param) -> None:
    check_case(target, *param)
