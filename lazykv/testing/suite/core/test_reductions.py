"""Products, reductions, normalizations and rotations."""

from typing import Any

import numpy as np
import pytest

from lazykv.testing import reference
from lazykv.testing.golden import (
    FLOATS,
    Case,
    Maker,
    Operand,
    Param,
    check_case,
    every,
    given,
    numbers,
)
from lazykv.testing.target import Target

# A sign apart in every row, and values whose exponentials overflow unless the maximum goes first.
STEEP = given(np.array([[200.0, 199.0, -200.0, 198.5], [-190.0, -189.0, -191.0, -400.0]]))
# A row that sees nothing, and one that sees one element.
MASKED = given(np.array([[-np.inf] * 4, [-np.inf, 2.0, -np.inf, -np.inf]]))
WITH_NAN = given(np.array([[1.0, np.nan, 3.0, -1.0], [-np.inf, -2.0, -np.inf, -5.0]]))


def product(name: str, a: tuple[int, ...], b: tuple[int, ...], *empty: Any) -> Case:
    return Case(
        name, lambda x, y: x @ y, reference.matmul, (Operand(a), Operand(b)), FLOATS,
        empty or None,
    )  # fmt: skip


def softmax(name: str, shape: tuple[int, ...], axis: int, make: Maker = numbers) -> Case:
    empty = ((*shape[:axis], 0, *shape[axis + 1 :]),)
    return Case(
        name, lambda x: x.softmax(axis), lambda x: reference.softmax(x, axis),
        (Operand(shape, make=make),), FLOATS, empty,
    )  # fmt: skip


def reduce(name: str, axis: int, keepdims: bool, make: Maker = numbers) -> Case:
    op = name.partition("_")[0]
    f: Any = {"max": np.max, "sum": np.sum, "mean": np.mean}[op]
    shape, empty = ((3, 5, 4), (0, 5, 4)) if make is numbers else ((2, 4), (0, 4))
    return Case(
        f"{name}_axis{axis}{'_kept' * keepdims}",
        lambda x: getattr(x, op)(axis, keepdims),
        lambda x: f(x, axis=axis, keepdims=keepdims),
        (Operand(shape, make=make),), FLOATS, (empty,) if axis else None,
    )  # fmt: skip


def norm(name: str, *shape: int, eps: float = 1e-5) -> Case:
    x, vector = Operand(shape), Operand(shape[-1:])
    empty = ((0, *shape[1:]), shape[-1:])
    return Case(
        name, lambda x, w: x.rms_norm(w, eps), lambda x, w: reference.rms_norm(x, w, eps),
        (x, vector), FLOATS, empty if len(shape) > 1 else None,
    )  # fmt: skip


def rope(name: str, x: tuple[int, ...], table: tuple[int, ...], interleaved: bool) -> Case:
    empty = ((*x[:-2], 0, x[-1]), *[(*table[:-2], 0, table[-1])] * 2)
    return Case(
        name, lambda x, cos, sin: x.rope(cos, sin, interleaved),
        lambda x, cos, sin: reference.rope(x, cos, sin, interleaved),
        (Operand(x), Operand(table), Operand(table)), FLOATS, empty,
    )  # fmt: skip


CASES = [
    product("matmul", (3, 5), (5, 4), (0, 5), (5, 4)),
    product("matmul_no_terms", (3, 5), (5, 4), (3, 0), (0, 4)),
    product("matmul_no_columns", (3, 5), (5, 4), (3, 5), (5, 0)),
    product("matmul_row", (1, 37), (37, 9)),
    product("matmul_column", (9, 37), (37, 1)),
    product("matmul_lead", (2, 3, 5), (5, 4), (2, 0, 5), (5, 4)),
    product("matmul_batch", (2, 3, 4, 5), (2, 3, 5, 2), (2, 0, 4, 5), (2, 0, 5, 2)),
    *(reduce(n, axis, kept) for n in ("max", "sum", "mean") for axis in range(3)
      for kept in (False, True)),
    *(reduce(f"{n}_special", 1, False, WITH_NAN) for n in ("max", "sum")),
    softmax("softmax", (3, 2, 7), 2),
    softmax("softmax_inner", (3, 5, 2), 1),
    softmax("softmax_of_one", (3, 1), 1),
    softmax("softmax_steep", (2, 4), 1, STEEP),
    softmax("softmax_masked", (2, 4), 1, MASKED),
    norm("rms_norm", 3, 2, 8),
    norm("rms_norm_row", 1, 33),
    norm("rms_norm_vector", 7),
    norm("rms_norm_large_eps", 2, 8, eps=3.0),
    Case("rms_norm_of_zeros", lambda x, w: x.rms_norm(w, 1e-5), lambda x, w: np.zeros_like(x),
         (Operand((2, 8), make=given(np.zeros((2, 8)))), Operand((8,)))),
    Case("layer_norm", lambda x, w, b: x.layer_norm(w, b, 1e-5),
         lambda x, w, b: reference.layer_norm(x, w, b, 1e-5),
         (Operand((3, 2, 8)), Operand((8,)), Operand((8,))), FLOATS, ((3, 0, 8), (8,), (8,))),
    *(
        case for interleaved, name in ((False, "halves"), (True, "interleaved"))
        for case in (
            rope(f"rope_{name}", (2, 3, 4, 8), (4, 4), interleaved),
            rope(f"rope_{name}_one", (1, 3, 1, 8), (1, 4), interleaved),
            rope(f"rope_{name}_batch", (2, 3, 4, 6), (2, 4, 3), interleaved),
            rope(f"rope_{name}_flat", (5, 8), (5, 4), interleaved),
        )
    ),
]  # fmt: skip

PARAMS = every(CASES)


@pytest.mark.parametrize("param", PARAMS.values(), ids=PARAMS.keys())
def test_op(target: Target, param: Param) -> None:
    check_case(target, *param)
