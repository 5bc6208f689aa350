"""Reductions over one axis, and softmax."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.errors import ShapeError
from lazykv.ops.elementwise import Div, Eq, Exp, Sub
from lazykv.ops.move import Where
from lazykv.ops.op import Op, need_arity, need_float
from lazykv.ops.sources import Fill
from lazykv.ops.views import BroadcastTo
from lazykv.spec import Spec


@dataclass(frozen=True)
class Reduce(Op):
    """One axis reduced to one element; the axis stays with extent 1 if `keepdims`."""

    axis: int
    keepdims: bool = False

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        s = ins[0]
        need_float(self.name, s)
        if s.shape[self.axis] == 0:
            raise ShapeError(f"{self.name}: got {s}, need extent >= 1 on axis {self.axis}")
        kept = (1,) if self.keepdims else ()
        return Spec((*s.shape[: self.axis], *kept, *s.shape[self.axis + 1 :]), s.dtype)


class Max(Reduce):
    """Greatest element; NaN if there is one."""

    name: ClassVar[str] = "max"

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.max(ins[0], axis=self.axis, keepdims=self.keepdims)


class Sum(Reduce):
    """Sum of the elements."""

    name: ClassVar[str] = "sum"

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.sum(ins[0], axis=self.axis, keepdims=self.keepdims)


class Mean(Reduce):
    """Arithmetic mean."""

    name: ClassVar[str] = "mean"

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.mean(ins[0], axis=self.axis, keepdims=self.keepdims)


@dataclass(frozen=True)
class Softmax(Op):
    """``exp(a - max) / sum(exp(a - max))`` along an axis.

    A row of -inf only (nothing is visible) gives zeros, not NaN.
    """

    name: ClassVar[str] = "softmax"
    axis: int

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        need_float(self.name, ins[0])
        return ins[0]

    def body(self, xp: Any, *ins: Any) -> Any:
        a = ins[0]
        if a.shape[self.axis] == 0:
            return a
        top = xp.max(a, axis=self.axis, keepdims=True)
        e = xp.exp(a - xp.where(top == -xp.inf, xp.zeros_like(top), top))
        total = xp.sum(e, axis=self.axis, keepdims=True)
        return e / xp.where(total == 0, xp.ones_like(total), total)

    def lower(self, b: Any, *ins: Any) -> Any:
        spec = b.spec(ins[0])
        if spec.shape[self.axis] == 0:
            return ins[0]
        top = finite_max(b, b.apply(Max(self.axis, True), ins[0]))
        e = b.apply(Exp(), b.apply(Sub(), ins[0], b.apply(BroadcastTo(spec.shape), top)))
        total = one_if_zero(b, b.apply(Sum(self.axis, True), e))
        return b.apply(Div(), e, b.apply(BroadcastTo(spec.shape), total))


def finite_max(b: Any, top: Any) -> Any:
    """A row maximum with -inf replaced by 0, so that exp(-inf - max) is 0 and not NaN."""
    from_spec = b.spec(top)
    low = b.apply(Fill(from_spec.shape, from_spec.dtype, float("-inf")))
    zero = b.apply(Fill(from_spec.shape, from_spec.dtype, 0.0))
    return b.apply(Where(), b.apply(Eq(), top, low), zero, top)


def one_if_zero(b: Any, total: Any) -> Any:
    """A row sum with 0 replaced by 1, so that an empty row divides to zeros."""
    spec = b.spec(total)
    zero = b.apply(Fill(spec.shape, spec.dtype, 0.0))
    one = b.apply(Fill(spec.shape, spec.dtype, 1.0))
    return b.apply(Where(), b.apply(Eq(), total, zero), one, total)
