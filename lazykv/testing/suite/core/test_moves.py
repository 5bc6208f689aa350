"""Views, copies, gathers and sources: every bit arrives where it belongs."""

from typing import Any

import numpy as np
import pytest

from lazykv.dtypes import DType, i64
from lazykv.dtypes import dtype as find_dtype
from lazykv.functions import concat
from lazykv.graph import Graph, Tensor
from lazykv.ops.move import Copy
from lazykv.ops.sources import Fill, Iota, SymValue
from lazykv.symbols import Sym
from lazykv.testing import reference
from lazykv.testing.compare import check_bits, check_equal
from lazykv.testing.golden import (
    STORED,
    Array,
    Case,
    Operand,
    Param,
    check_case,
    every,
    given,
    patterns,
    random_of,
)
from lazykv.testing.target import Target

N = Sym("n", 0, 2)
M = Sym("m", 0, 4)


def moved(name: str, shape: Any, empty: Any, build: Any, want: Any, **options: Any) -> Case:
    """A case with one operand of any bits."""
    operands = (Operand(shape, make=patterns),)
    return Case(
        name, build, want, operands, STORED, None if empty is None else (empty,), True, **options
    )


def copied(t: Tensor) -> Tensor:
    return t.graph.apply(Copy(), t)


# Reads through views end in a copy to the host; `contiguous` and `copy` end in the op itself.
CASES = [
    moved("reshape", (2, 3, 4), (2, 0, 4), lambda t: t.reshape(t.shape[1], 8),
          lambda a: a.reshape(a.shape[1], 8)),
    moved("slice", (2, 5, 4), (2, 5, 0), lambda t: t.slice(1, 2, 2), lambda a: a[:, 2:4]),
    moved("slice_to_nothing", (2, 5, 4), (2, 5, 0), lambda t: t.slice(1, 5, 0),
          lambda a: a[:, 5:]),
    moved("slice_at_symbol", (2, 5, 4), None, lambda t: t.slice(1, N + 1, 2),
          lambda a: a[:, 3:5], env={N: 2}),
    moved("slice_at_two_symbols", (3, 5, 6), None,
          lambda t: t.slice(0, N, 1).slice(2, M, 2).contiguous(),
          lambda a: a[2:3, :, 4:6], env={N: 2, M: 4}),
    moved("permute", (2, 3, 4), (0, 3, 4), lambda t: t.permute(2, 0, 1),
          lambda a: np.moveaxis(a, 2, 0)),
    moved("transpose", (2, 3, 4), (2, 3, 0), lambda t: t.transpose(0, 2),
          lambda a: np.swapaxes(a, 0, 2)),
    moved("broadcast_to", (3, 1), (0, 1), lambda t: t.broadcast_to(2, t.shape[0], 4),
          lambda a: np.array([[[x] * 4 for x in a[:, 0]]] * 2, a.dtype).reshape(2, len(a), 4)),
    moved("squeeze", (2, 1, 3), (0, 1, 3), lambda t: t.squeeze(1), lambda a: a[:, 0]),
    moved("unsqueeze", (2, 3), (2, 0), lambda t: t.unsqueeze(1), lambda a: a[:, None]),
    moved("contiguous", (2, 3, 4), (2, 0, 4), lambda t: t.permute(1, 2, 0).contiguous(),
          lambda a: np.moveaxis(a, 0, 2)),
    moved("reshape_of_permuted", (2, 3, 4), (2, 0, 4),
          lambda t: t.permute(1, 0, 2).reshape(t.shape[1] * 8),
          lambda a: np.moveaxis(a, 1, 0).reshape(-1)),
    moved("copy", (2, 3, 4), (2, 3, 0), copied, lambda a: a),
    moved("copy_of_permuted", (2, 3, 4), (2, 3, 0), lambda t: copied(t.permute(2, 1, 0)),
          lambda a: a.transpose(2, 1, 0)),
    moved("rank_0", (), None, copied, lambda a: a),
    moved("rank_6", (2, 1, 3, 2, 1, 2), (2, 1, 0, 2, 1, 2),
          lambda t: copied(t.permute(5, 3, 1, 0, 4, 2)), lambda a: a.transpose(5, 3, 1, 0, 4, 2)),
]  # fmt: skip

CASES += [
    Case(
        "concat", lambda a, b, c: concat([a, b, c], 1), lambda *parts: reference.concat(parts, 1),
        tuple(Operand((2, n, 3), make=patterns) for n in (1, 4, 2)), STORED,
        ((2, 0, 3), (2, 2, 3), (2, 0, 3)), True,
    ),
    Case(
        "concat_last", lambda a, b: concat([a, b], 2), lambda *parts: reference.concat(parts, 2),
        tuple(Operand((2, 3, n), make=patterns) for n in (1, 4)), STORED,
        ((2, 0, 1), (2, 0, 2)), True,
    ),
    Case(
        "concat_with_itself", lambda a: concat([a, a], 0),
        lambda a: reference.concat([a, a], 0), (Operand((2, 3), make=patterns),), STORED,
        ((0, 3),), True,
    ),
    *(
        Case(
            f"take_by_{ids}", lambda t, i: t.take(i), reference.take,
            (Operand((5, 2, 3), make=patterns), Operand((4,), ids, given([4, 0, 3, 3]))), STORED,
            ((5, 0, 3), (4,)), True,
        )
        for ids in ("i32", "u32", "i64")
    ),
    Case(
        "take_grid", lambda t, i: t.take(i), reference.take,
        (Operand((5, 3), make=patterns), Operand((2, 3), "i64", given([[4, 0, 2], [1, 1, 3]]))),
        STORED, ((5, 3), (2, 0)), True,
    ),
    Case(
        "take_one", lambda t, i: t.take(i), reference.take,
        (Operand((5, 3), make=patterns), Operand((), "i64", given(2))), STORED, None, True,
    ),
]  # fmt: skip

PARAMS = every(CASES)


@pytest.mark.parametrize("param", PARAMS.values(), ids=PARAMS.keys())
def test_op(target: Target, param: Param) -> None:
    check_case(target, *param)


# Sources have no operands; these run on the target because the plan's device is the target's.


@pytest.mark.parametrize("name", STORED)
def test_fill(target: Target, name: str) -> None:
    target.need(name)
    dt = find_dtype(name)
    value = 1 if name == "bool" else 1.5 if dt.is_float else 7
    for shape in ((2, 3), (), (0, 4)):
        got = target.run(Graph().apply(Fill(shape, dt, value)))
        check_bits(f"fill of {name}{list(shape)}", got, np.full(shape, value).astype(dt.numpy))


def test_iota(target: Target) -> None:
    target.need("i64")
    for n in (0, 1, 7):
        got = target.run(Graph().apply(Iota((n,), i64)))
        check_bits(f"iota of {n}", got, np.array(range(n), np.int64))


def test_symbol_value(target: Target) -> None:
    target.need("i64")
    n = Sym("n")
    for value in (0, 5, 2**40):
        got = target.run(Graph().apply(SymValue((), i64, n * 2 + 1)), env={n: value})
        check_equal("symbol value", got, np.array(2 * value + 1))


def test_a_plan_follows_its_symbols(target: Target) -> None:
    """The same plan at another start reads other rows."""
    target.need("f32")
    g, n = Graph(), Sym("n", 0, 4)
    x = g.placeholder((6, 3), "f32")
    data = _rows(find_dtype("f32"))
    out = x.slice(0, n, 2)
    for start in (0, 4, 1):
        got = target.run(out, {x: target.storage(data)}, {n: start})
        check_bits(f"slice at {start}", got, data[start : start + 2])


def _rows(dt: DType) -> Array:
    return patterns(random_of("rows"), (6, 3), dt)
