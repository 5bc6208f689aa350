"""Op bodies take nothing of their namespace that the array API standard does not have."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lazykv.dtypes import bool_, dtype, f32, f64, i64, u8
from lazykv.ops import elementwise as ew
from lazykv.ops import move, reduce, sources, views, write
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.matmul import MatMul
from lazykv.ops.norm import LayerNorm, RmsNorm
from lazykv.ops.op import Op
from lazykv.ops.paged_attention import PagedAttention
from lazykv.ops.ring_attention import RingAttention
from lazykv.ops.rope import Rope
from lazykv.ops.write_rows import WriteRows
from lazykv.spec import Spec

xp = pytest.importorskip("array_api_strict")
RNG = np.random.default_rng(7)


def x(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.asarray(RNG.standard_normal(shape)).astype(dtype)


def i(values: Any, dtype: str = "int64") -> np.ndarray:
    return np.array(values, dtype)


FLAGS = RNG.random((2, 3)) < 0.5
Q, K, V = x(1, 4, 2, 8), x(1, 2, 6, 8), x(1, 2, 6, 5)


def attention(
    mask: bool = False, length: int | None = None, causal: bool = True, window: int | None = None
) -> Attention:
    return Attention(0.3, causal, window, length, mask, length is None)


CASES: list[tuple[Op, tuple[np.ndarray, ...]]] = [
    *((op(), (x(2, 3), x(2, 3))) for op in (ew.Add, ew.Sub, ew.Mul, ew.Div)),
    *((op(), (i([1, 2, 3]), i([2, 2, 2]))) for op in (ew.Eq, ew.Ne, ew.Lt, ew.Le, ew.Gt, ew.Ge)),
    *((op(), (x(2, 3), x(2, 3))) for op in (ew.Eq, ew.Lt)),
    (ew.Add(), (x(2, dtype="float64"), x(2, dtype="float64"))),
    (ew.And(), (FLAGS, ~FLAGS)),
    *(
        (op(0.3, reverse), (x(2, 3),))
        for op in (ew.AddScalar, ew.SubScalar, ew.MulScalar, ew.DivScalar)
        for reverse in (False, True)
    ),
    *((op(3), (i([1, 2], t),)) for op in (ew.AddScalar, ew.MulScalar) for t in ("int8", "uint32")),
    (ew.SubScalar(9, True), (i([1, 2], "uint8"),)),
    (ew.ModScalar(3), (i([-4, 4, 0]),)),
    *((op(), (np.abs(x(2, 3)),)) for op in (ew.Neg, ew.Exp, ew.Sqrt, ew.Rsqrt, ew.Tanh)),
    *((op(), (x(2, 3),)) for op in (ew.Silu, ew.Gelu)),
    (ew.Gelu(), (x(),)),
    (ew.Neg(), (i([1, -2], "int8"),)),
    (MatMul(), (x(2, 3), x(3, 4))),
    (MatMul(), (x(2, 2, 3), x(2, 3, 4))),
    *((op(1, kept), (x(2, 3),)) for op in (reduce.Max, reduce.Sum, reduce.Mean)
      for kept in (False, True)),
    (reduce.Softmax(1), (x(2, 3),)),
    (reduce.Softmax(1), (np.full((2, 3), -np.inf, np.float32),)),
    (reduce.Softmax(1), (x(2, 0),)),
    (RmsNorm(1e-5), (x(2, 8), x(8))),
    (LayerNorm(1e-5), (x(2, 8), x(8), x(8))),
    *((Rope(way), (x(2, 3, 4, 8), x(4, 4), x(4, 4))) for way in (False, True)),
    (Rope(False), (x(2, 3, 4, 8), x(2, 4, 4), x(2, 4, 4))),
    (move.Copy("cpu"), (x(2, 3),)),
    *((move.Cast(t), (x(2, 3),)) for t in (f32, f64, i64, u8, bool_)),
    *((move.Cast(t), (i([0, 1, 2]),)) for t in (f32, f64, u8, bool_)),
    (move.Cast(f32), (FLAGS,)),
    *((move.Take(), (x(5, 2), i(ids, t))) for ids in ([], 3, [[0, 4], [1, 1]])
      for t in ("int32", "uint32", "int64")),
    (move.Concat(1), (x(2, 3), x(2, 1), x(2, 0))),
    (move.Where(), (FLAGS, x(2, 3), x(2, 3))),
    (sources.Iota((4,), i64), ()),
    (sources.SymValue((), i64, 5), ()),
    *((sources.Fill((2, 3), t, 1), ()) for t in (f32, f64, i64, bool_)),
    (sources.ZeroFill(), (x(2, 3),)),
    (views.Reshape((3, 2)), (x(2, 3),)),
    (views.Slice(1, 1, 2), (x(2, 3, 4),)),
    (views.Permute((2, 0, 1)), (x(2, 3, 4),)),
    (views.BroadcastTo((2, 3)), (x(1, 3),)),
    (views.Squeeze(1), (x(2, 1, 3),)),
    (views.Unsqueeze(1), (x(2, 3),)),
    (views.Contiguize(), (x(2, 3).T,)),
    (write.WriteSlice((1, 0), (2, 3)), (x(4, 3), x(2, 3))),
    (write.WriteSlice((), ()), (x(), x())),
    (write.WriteSliceDoff(1), (x(2, 5, 3), x(2, 2, 3), i(3))),
    (write.WriteSliceRotating(0, 5, 1), (x(6, 2), x(3, 2), i(8))),
    (WriteRows(False), (x(6, 2), x(3, 2), i([4, 0, 3]))),
    (WriteRows(True), (x(6, 2), x(3, 2), i([4, 0, 99]), i(2))),
    (attention(length=5), (Q, K, V)),
    (attention(window=2), (Q, K, V, i(5))),
    (attention(causal=False, length=0), (Q, K, V)),
    (attention(mask=True, length=6), (Q, K, V, RNG.random((2, 6)) < 0.5)),
    (attention(mask=True, length=6), (Q, K, V, x(4, 2, 6))),
    (LatentAttention(0.3, True, None, True), (Q, x(1, 4, 2, 4), x(6, 8), x(6, 4), i(5))),
    (RingAttention(0.3, 3, 1, None, True), (Q, K, V, i(20))),
    (RingAttention(0.3, 3, 0, 2, False), (Q, K, V)),
    *(
        (PagedAttention(0.3, window), (x(2, 4, 2, 8), x(5, 4, 2, 8), x(5, 4, 2, 5),
         i([[0, 3], [7, 7]], "uint32"), i([6, 0], "uint32")))
        for window in (None, 2)
    ),
]  # fmt: skip


def classes(of: type[Op] = Op) -> Iterator[type[Op]]:
    for c in of.__subclasses__():
        yield from ([c] if "name" in vars(c) and c.body is not Op.body else [])
        yield from classes(c)


def test_every_op_with_a_body_is_among_the_cases() -> None:
    own = {c for c in classes() if c.__module__.startswith("lazykv.ops.")}
    assert own == {type(op) for op, _ in CASES}
    assert len(own) > 50


@pytest.mark.parametrize(("op", "ins"), CASES, ids=lambda v: v.name if isinstance(v, Op) else "")
def test_a_body_gives_what_it_gives_with_numpy(op: Op, ins: tuple[np.ndarray, ...]) -> None:
    before, given = [a.copy() for a in ins], [xp.asarray(a, copy=True) for a in ins]
    with np.errstate(all="ignore"):
        want, got = op.body(np, *ins), op.body(xp, *given)
    assert got.shape == np.shape(want)
    np.testing.assert_array_equal(np.from_dlpack(got), want, strict=True)
    for old, own, after in zip(before, ins, given, strict=True):
        np.testing.assert_array_equal(own, old, err_msg="an input is changed")
        np.testing.assert_array_equal(np.from_dlpack(after), old, err_msg="an input is changed")


@pytest.mark.parametrize(("op", "ins"), CASES, ids=lambda v: v.name if isinstance(v, Op) else "")
def test_a_body_stays_in_the_dtype_of_arithmetic(op: Op, ins: tuple[np.ndarray, ...]) -> None:
    """A Python number in a body makes nothing wider; a result of f64 would round twice."""
    out = op.infer(*(Spec(a.shape, dtype(a.dtype)) for a in ins))
    with np.errstate(all="ignore"):
        got = op.body(np, *ins)
    if not isinstance(op, move.Cast):
        assert got.dtype == out.dtype.compute
