"""A write of rows that lie anywhere: the scatter twin of `write_slice_at`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.errors import RangeError, ShapeError
from lazykv.ops.op import Op, need_arity, need_same_dtype, need_scalar_i64
from lazykv.spec import Spec


@dataclass(frozen=True)
class WriteRows(Op):
    """``dest[rows[i]] = src[i]`` for every i below the count.

    dest is ``[R, ...]``, src ``[n, ...]`` and rows i64 ``[n]``; the count is a rank-0 i64 if
    `has_count`, else n. Row numbers and count are read when the kernel runs. Source rows from the
    count on and their row numbers are never looked at. A row number outside dest, one that comes
    twice, or a count that is not in 0..n is refused before the first byte moves.
    """

    name: ClassVar[str] = "write_rows"
    destroys: ClassVar[int | None] = 0
    bits: ClassVar[bool] = True
    has_count: bool

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 3 + self.has_count)
        dest, src, rows = ins[:3]
        need_same_dtype(self.name, dest, src)
        if dest.rank < 1 or src.rank < 1 or dest.shape[1:] != src.shape[1:]:
            raise ShapeError(
                f"{self.name}: got dest {dest} and src {src}, need [R,...] and [n,...] with one "
                "shape of a row"
            )
        if rows.shape != src.shape[:1] or rows.dtype.name != "i64":
            raise ShapeError(
                f"{self.name}: got rows {rows}, need i64[{src.shape[0]}]; one row number per row "
                f"of src {src}"
            )
        if self.has_count:
            need_scalar_i64(self.name, ins[3], "count")
        return dest

    def check_count(self, count: int, rows: int) -> int:
        """The count, once it is known to be one of the source's rows."""
        if not 0 <= count <= rows:
            raise RangeError(f"{self.name}: got count {count}, need 0 <= count <= {rows}")
        return count

    def check_rows(self, used: Sequence[int], extent: int) -> None:
        """Refuse row numbers outside a destination of `extent` rows, and one that comes twice."""
        if not used or (min(used) >= 0 and max(used) < extent and len(set(used)) == len(used)):
            return
        seen: dict[int, int] = {}
        for i, row in enumerate(used):
            if not 0 <= row < extent:
                raise RangeError(f"{self.name}: got rows[{i}] = {row}, need 0 <= row < {extent}")
            if row in seen:
                raise RangeError(
                    f"{self.name}: got rows[{seen[row]}] = rows[{i}] = {row}, need each row at "
                    "most once"
                )
            seen[row] = i

    def body(self, xp: Any, *ins: Any) -> Any:
        out, src, rows = xp.asarray(ins[0], copy=True), ins[1], ins[2]
        n = self.check_count(int(ins[3]), rows.shape[0]) if self.has_count else rows.shape[0]
        used = [int(rows[i]) for i in range(n)]
        self.check_rows(used, out.shape[0])
        for i, row in enumerate(used):
            out[row, ...] = src[i, ...]
        return out
