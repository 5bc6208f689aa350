"""Moves: results in new memory whose elements come straight from the inputs."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.dtypes import DType
from lazykv.errors import DTypeError, RangeError, ShapeError
from lazykv.ops.op import Op, dtype_in, need_arity, need_same_dtype
from lazykv.ops.rounding import odd_f32
from lazykv.spec import Spec


@dataclass(frozen=True)
class Copy(Op):
    """New, contiguous memory with the same elements, on `location` (None: where the input is)."""

    name: ClassVar[str] = "copy"
    bits: ClassVar[bool] = True
    location: str | None = None

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        return ins[0]

    def body(self, xp: Any, *ins: Any) -> Any:
        return ins[0]


@dataclass(frozen=True)
class Cast(Op):
    """Elements converted to another dtype: to a float rounded once, to nearest even; from a float
    to an integer without the fraction; between integers modulo 2**n.

    A float that an integer dtype cannot hold has no defined result; cast to a wider one first.
    """

    name: ClassVar[str] = "cast"
    dtype: DType

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        return Spec(ins[0].shape, self.dtype)

    def body(self, xp: Any, *ins: Any) -> Any:
        # Storing rounds, and must be the only rounding.
        if self.dtype.is_bits:
            return odd_f32(xp, ins[0])
        if self.dtype.is_float and xp.isdtype(ins[0].dtype, "real floating"):
            return ins[0]
        return xp.astype(ins[0], dtype_in(xp, self.dtype.compute))


@dataclass(frozen=True)
class Take(Op):
    """Rows of a table by index: ``out[i...] = table[ids[i...]]`` (an embedding)."""

    name: ClassVar[str] = "take"
    bits: ClassVar[bool] = True

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 2)
        table, ids = ins
        if table.rank < 1:
            raise ShapeError(f"{self.name}: got table {table}, need rank >= 1")
        if ids.dtype.name not in ("i32", "u32", "i64"):
            raise DTypeError(f"{self.name}: got ids {ids}, need i32, u32 or i64")
        return Spec(ids.shape + table.shape[1:], table.dtype)

    def check(self, low: int, high: int, rows: int) -> None:
        """Refuse ids outside the table: nothing wraps."""
        if low < 0 or high >= rows:
            raise RangeError(f"{self.name}: got ids {low}..{high}, need 0 <= id < {rows}")

    def body(self, xp: Any, *ins: Any) -> Any:
        table, ids = ins
        if ids.size:
            self.check(int(xp.min(ids)), int(xp.max(ids)), table.shape[0])
        rows = xp.take(table, xp.reshape(ids, (-1,)), axis=0)
        return xp.reshape(rows, ids.shape + table.shape[1:])


@dataclass(frozen=True)
class Concat(Op):
    """Inputs one after another along an axis."""

    name: ClassVar[str] = "concat"
    bits: ClassVar[bool] = True
    axis: int

    def infer(self, *ins: Spec) -> Spec:
        if not ins:
            raise ShapeError(f"{self.name}: got no operands, need at least one")
        first = ins[0]
        need_same_dtype(self.name, *ins)
        for s in ins[1:]:
            same = s.rank == first.rank and all(
                a == self.axis or s.shape[a] == first.shape[a] for a in range(first.rank)
            )
            if not same:
                raise ShapeError(
                    f"{self.name}: got {first} and {s}, need equal extents but on axis {self.axis}"
                )
        total = sum(s.shape[self.axis] for s in ins)
        shape = (*first.shape[: self.axis], total, *first.shape[self.axis + 1 :])
        return Spec(shape, first.dtype)

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.concat(ins, axis=self.axis)


@dataclass(frozen=True)
class Where(Op):
    """``a`` where the condition holds, else ``b``; all three of one shape."""

    name: ClassVar[str] = "where"
    bits: ClassVar[bool] = True

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 3)
        cond, a, b = ins
        if cond.dtype.name != "bool":
            raise DTypeError(f"{self.name}: got condition {cond}, need bool")
        need_same_dtype(self.name, a, b)
        if not cond.shape == a.shape == b.shape:
            raise ShapeError(
                f"{self.name}: got {cond}, {a} and {b}, need equal shapes; use broadcast_to()"
            )
        return a

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.where(ins[0], ins[1], ins[2])
