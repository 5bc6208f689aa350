"""Sources: where values enter a graph."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lazykv.dtypes import DType
from lazykv.ops.op import Op, dtype_in, need_arity, need_number_of
from lazykv.ops.rounding import nearest
from lazykv.spec import Shape, Spec
from lazykv.symbols import Dim


@dataclass(frozen=True)
class Source(Op):
    """A node without inputs; shape and dtype are its parameters."""

    pure: ClassVar[bool] = False
    shape: Shape
    dtype: DType

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 0)
        return Spec(self.shape, self.dtype)


@dataclass(frozen=True)
class Const(Source):
    """Data held by the graph: a snapshot of a host array, or a storage taken by reference.

    The data is not a parameter: graphs that differ in data only share one compiled program.
    `frozen` data is never written; a write into it works on a copy. A `snapshot` never changes at
    all, so that other locations keep copies of it.
    """

    name: ClassVar[str] = "const"
    frozen: bool = True
    snapshot: bool = False


@dataclass(frozen=True)
class Placeholder(Source):
    """A graph input: shape and dtype only, bound to a storage or an array when realized."""

    name: ClassVar[str] = "placeholder"


@dataclass(frozen=True)
class Alloc(Source):
    """Uninitialized memory on a location."""

    name: ClassVar[str] = "alloc"
    location: str = "cpu"


@dataclass(frozen=True)
class ZeroFill(Op):
    """Overwrite the whole destination with zero bytes."""

    name: ClassVar[str] = "zero_fill"
    destroys: ClassVar[int | None] = 0
    bits: ClassVar[bool] = True

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        return ins[0]

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.zeros_like(ins[0])


@dataclass(frozen=True)
class Iota(Source):
    """``0, 1, ..., n-1`` as i64: positions, for the lowerings of masked ops."""

    name: ClassVar[str] = "iota"
    pure: ClassVar[bool] = True

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.arange(self.shape[0], dtype=dtype_in(xp, self.dtype.numpy))


@dataclass(frozen=True)
class SymValue(Source):
    """The value of a symbolic expression as a rank-0 i64."""

    name: ClassVar[str] = "sym_value"
    pure: ClassVar[bool] = True
    dims: ClassVar[tuple[str, ...]] = ("value",)
    value: Dim = 0

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.asarray(self.value, dtype=dtype_in(xp, self.dtype.numpy))


@dataclass(frozen=True)
class Fill(Source):
    """One value everywhere."""

    name: ClassVar[str] = "fill"
    pure: ClassVar[bool] = True
    value: float = 0.0

    def infer(self, *ins: Spec) -> Spec:
        out = super().infer(*ins)
        need_number_of(self.name, out, self.value)
        return out

    def number(self) -> float:
        """The value as an element holds it: of a float the nearest one of the dtype."""
        if not self.dtype.is_float:
            return self.value
        return float(nearest(np.asarray(self.value, np.float64), self.dtype))

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.full(self.shape, self.number(), dtype=dtype_in(xp, self.dtype.compute))
