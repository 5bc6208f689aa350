"""Elementwise arithmetic. Shapes must be equal: broadcasting is asked for with `broadcast_to`.

That of integers wraps modulo 2**n.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lazykv.dtypes import bool_
from lazykv.errors import DTypeError, ShapeError
from lazykv.ops.op import Op, need_arity, need_float, need_number_of, need_same_dtype
from lazykv.spec import Spec


@dataclass(frozen=True)
class Binary(Op):
    """Two operands of one shape and dtype; `ufunc` is the array namespace's name for it."""

    ufunc: ClassVar[str]

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 2)
        need_same_dtype(self.name, *ins)
        if ins[0].shape != ins[1].shape:
            raise ShapeError(
                f"{self.name}: got {ins[0]} and {ins[1]}, need equal shapes; use broadcast_to()"
            )
        _need_number(self.name, ins[0])
        return ins[0]

    def body(self, xp: Any, *ins: Any) -> Any:
        return getattr(xp, self.ufunc)(ins[0], ins[1])


def _need_number(who: str, s: Spec) -> None:
    if s.dtype is bool_ or s.dtype.storage_only:
        raise DTypeError(f"{who}: got {s}, need a dtype with arithmetic; use cast()")


class Add(Binary):
    """a + b"""

    name: ClassVar[str] = "add"
    ufunc: ClassVar[str] = "add"


class Sub(Binary):
    """a - b"""

    name: ClassVar[str] = "sub"
    ufunc: ClassVar[str] = "subtract"


class Mul(Binary):
    """a * b"""

    name: ClassVar[str] = "mul"
    ufunc: ClassVar[str] = "multiply"


class Div(Binary):
    """a / b, floating dtypes only"""

    name: ClassVar[str] = "div"
    ufunc: ClassVar[str] = "divide"

    def infer(self, *ins: Spec) -> Spec:
        need_float(self.name, *ins)
        return super().infer(*ins)


class Compare(Binary):
    """A comparison; the result is bool."""

    def infer(self, *ins: Spec) -> Spec:
        return Spec(super().infer(*ins).shape, bool_)


class Eq(Compare):
    """a == b"""

    name: ClassVar[str] = "eq"
    ufunc: ClassVar[str] = "equal"


class Ne(Compare):
    """a != b"""

    name: ClassVar[str] = "ne"
    ufunc: ClassVar[str] = "not_equal"


class Lt(Compare):
    """a < b"""

    name: ClassVar[str] = "lt"
    ufunc: ClassVar[str] = "less"


class Le(Compare):
    """a <= b"""

    name: ClassVar[str] = "le"
    ufunc: ClassVar[str] = "less_equal"


class Gt(Compare):
    """a > b"""

    name: ClassVar[str] = "gt"
    ufunc: ClassVar[str] = "greater"


class Ge(Compare):
    """a >= b"""

    name: ClassVar[str] = "ge"
    ufunc: ClassVar[str] = "greater_equal"


class And(Binary):
    """Both conditions hold."""

    name: ClassVar[str] = "and"
    ufunc: ClassVar[str] = "logical_and"

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 2)
        if ins[0].dtype is not bool_ or ins[0] != ins[1]:
            raise DTypeError(f"{self.name}: got {ins[0]} and {ins[1]}, need two equal bool specs")
        return ins[0]


@dataclass(frozen=True)
class BinaryScalar(Op):
    """One operand and one Python number, which comes first if `reverse`."""

    ufunc: ClassVar[str]
    value: float
    reverse: bool = False

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        s = ins[0]
        _need_number(self.name, s)
        need_number_of(self.name, s, self.value)
        return s

    def body(self, xp: Any, *ins: Any) -> Any:
        pair = (self.value, ins[0]) if self.reverse else (ins[0], self.value)
        return getattr(xp, self.ufunc)(*pair)


class AddScalar(BinaryScalar):
    """a + number"""

    name: ClassVar[str] = "add_scalar"
    ufunc: ClassVar[str] = "add"


class SubScalar(BinaryScalar):
    """a - number, or number - a"""

    name: ClassVar[str] = "sub_scalar"
    ufunc: ClassVar[str] = "subtract"


class MulScalar(BinaryScalar):
    """a * number"""

    name: ClassVar[str] = "mul_scalar"
    ufunc: ClassVar[str] = "multiply"


class DivScalar(BinaryScalar):
    """a / number, or number / a; floating dtypes only"""

    name: ClassVar[str] = "div_scalar"
    ufunc: ClassVar[str] = "divide"

    def infer(self, *ins: Spec) -> Spec:
        need_float(self.name, *ins)
        return super().infer(*ins)


class ModScalar(BinaryScalar):
    """a modulo a whole number of at least 1, never negative; integer dtypes only"""

    name: ClassVar[str] = "mod_scalar"
    ufunc: ClassVar[str] = "remainder"

    def infer(self, *ins: Spec) -> Spec:
        if self.reverse or self.value < 1 or ins[0].dtype.is_float:
            raise DTypeError(
                f"{self.name}: got {ins[0]} and {self.value!r}, need integers and a number above 0"
            )
        return super().infer(*ins)


@dataclass(frozen=True)
class Unary(Op):
    """One floating operand."""

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        need_float(self.name, *ins)
        return ins[0]


class Neg(Unary):
    """-a; also for signed integers"""

    name: ClassVar[str] = "neg"

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        if ins[0].dtype.name in ("u8", "u32", "bool") or ins[0].dtype.storage_only:
            raise DTypeError(f"{self.name}: got {ins[0]}, need a signed dtype")
        return ins[0]

    def body(self, xp: Any, *ins: Any) -> Any:
        return -ins[0]


class Exp(Unary):
    """e ** a"""

    name: ClassVar[str] = "exp"

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.exp(ins[0])


class Sqrt(Unary):
    """Square root"""

    name: ClassVar[str] = "sqrt"

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.sqrt(ins[0])


class Rsqrt(Unary):
    """1 / sqrt(a)"""

    name: ClassVar[str] = "rsqrt"

    def body(self, xp: Any, *ins: Any) -> Any:
        return 1 / xp.sqrt(ins[0])


class Tanh(Unary):
    """Hyperbolic tangent"""

    name: ClassVar[str] = "tanh"

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.tanh(ins[0])


class Silu(Unary):
    """a * sigmoid(a), also called swish"""

    name: ClassVar[str] = "silu"

    def body(self, xp: Any, *ins: Any) -> Any:
        # exp overflows to inf for a below about -88, and a / inf is the right -0.
        with np.errstate(over="ignore"):
            return ins[0] / (1 + xp.exp(-ins[0]))

    def lower(self, b: Any, *ins: Any) -> Any:
        one_more = b.apply(AddScalar(1.0), b.apply(Exp(), b.apply(Neg(), ins[0])))
        return b.apply(Div(), ins[0], one_more)


GELU_TANH = (math.sqrt(2 / math.pi), 0.044715)
"""Constants of the tanh form (Hendrycks and Gimpel, 2016, arXiv:1606.08415)."""


class Gelu(Unary):
    """Gaussian error linear unit, tanh form: ``a/2 * (1 + tanh(c * (a + d*a**3)))``"""

    name: ClassVar[str] = "gelu"

    def body(self, xp: Any, *ins: Any) -> Any:
        a, (c, d) = ins[0], GELU_TANH
        return a * ((xp.tanh((a + a * a * a * d) * c) + 1) * 0.5)  # at most a: it overflows nowhere

    def lower(self, b: Any, *ins: Any) -> Any:
        a, (c, d) = ins[0], GELU_TANH
        cube = b.apply(Mul(), b.apply(Mul(), a, a), a)
        inner = b.apply(MulScalar(c), b.apply(Add(), a, b.apply(MulScalar(d), cube)))
        gate = b.apply(AddScalar(1.0), b.apply(Tanh(), inner))
        return b.apply(Mul(), a, b.apply(MulScalar(0.5), gate))
