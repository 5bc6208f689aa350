"""Attention over compressed rows that all heads share (multi-head latent attention)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.dtypes import f32
from lazykv.errors import DTypeError, RangeError, ShapeError
from lazykv.ops.attention import Attention, too_few_rows
from lazykv.ops.move import Concat
from lazykv.ops.op import (
    Bound,
    Op,
    check_bound,
    need_arity,
    need_float,
    need_rank,
    need_same_dtype,
    need_scalar_i64,
)
from lazykv.ops.reduce import Softmax
from lazykv.ops.views import Reshape
from lazykv.spec import Spec
from lazykv.symbols import Dim


@dataclass(frozen=True)
class LatentAttention(Op):
    """``softmax(scale * (q_latent latent^T + q_rope rope^T)) latent`` over the first `length` rows.

    The absorbed form of DeepSeek-V2's attention (arXiv:2405.04434, section 2.1): queries already
    carry the keys' up-projection, and the values' up-projection is applied to the result. q_latent
    is ``[1, H, Sq, R]``, q_rope ``[1, H, Sq, P]``, latent rows ``[S, R]``, rope keys ``[S, P]``,
    the result ``[1, H, Sq, R]``. Rows belong to one sequence, hence the batch of 1. Of the live
    rows the last Sq are the queries' own: query i stands at position ``length - Sq + i`` and, if
    `causal`, sees no later row. Rows past `length` are never part of any arithmetic. A query that
    sees nothing gives zeros. Rows may be 16-bit under f32 queries; arithmetic is f32 then. Inputs
    are q_latent, q_rope, latent, rope, then the length as a rank-0 i64 if `has_length`.
    """

    name: ClassVar[str] = "latent_attention"
    dims: ClassVar[tuple[str, ...]] = ("length",)
    scale: float
    causal: bool
    length: Dim | None
    has_length: bool

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 4 + self.has_length)
        names = ("q_latent", "q_rope", "latent", "rope")
        for what, s, rank in zip(names, ins, (4, 4, 2, 2), strict=False):
            need_rank(self.name, s, rank, what)
        need_float(self.name, *ins[:4])
        need_same_dtype(self.name, *ins[:2])
        need_same_dtype(self.name, *ins[2:4])
        q, rows = ins[0], ins[2]
        if q.dtype is not rows.dtype and not (q.dtype is f32 and rows.dtype.itemsize == 2):
            raise DTypeError(
                f"{self.name}: got q_latent {q} and latent {rows}, need one dtype, or f32 queries "
                "on 16-bit rows"
            )
        self._check_shapes(*ins[:4])
        if rows.shape[0] < self.least(q.shape[2]):
            raise too_few_rows(self.name, q, rows.shape[0])
        if self.has_length:
            need_scalar_i64(self.name, ins[4], "length")
        for b in self.bounds(*ins):
            check_bound(self.name, b)
        return q

    def _check_shapes(self, q_latent: Spec, q_rope: Spec, latent: Spec, rope: Spec) -> None:
        if q_latent.shape[0] != 1:
            raise ShapeError(
                f"{self.name}: got q_latent {q_latent}, need a batch of 1, since all rows are of "
                "one sequence"
            )
        (rows, rank), width = latent.shape, rope.shape[1]
        lead = q_latent.shape[:3]
        want = ((*lead, rank), (*lead, width), (rows, rank), (rows, width))
        if (q_latent.shape, q_rope.shape, latent.shape, rope.shape) != want:
            raise ShapeError(
                f"{self.name}: got q_latent {q_latent}, q_rope {q_rope}, latent {latent} and rope "
                f"{rope}, need [1,H,Sq,R], [1,H,Sq,P], [S,R] and [S,P]"
            )

    def least(self, queries: int) -> int:
        """Fewest live rows: the queries' own rows are among them where positions matter."""
        return queries if self.causal else 0

    def bounds(self, *ins: Spec) -> Iterator[Bound]:
        if not self.has_length:
            rows = ins[2].shape[0]
            length = rows if self.length is None else self.length
            yield Bound(length, self.least(ins[0].shape[2]), rows, "length")

    def check_live(self, length: int, queries: int, rows: int) -> int:
        """The live rows, once they are known to fit the operands."""
        low = self.least(queries)
        if not low <= length <= rows:
            raise RangeError(f"{self.name}: got length {length}, need {low} <= length <= {rows}")
        return length

    def body(self, xp: Any, *ins: Any) -> Any:
        q_latent, q_rope, latent, rope = ins[:4]
        length: Any = ins[4] if self.has_length else self.length
        rows, queries = latent.shape[0], q_latent.shape[2]
        live = rows if length is None else self.check_live(int(length), queries, rows)
        latent, rope = latent[:live, :], rope[:live, :]
        scale = self.scale
        scores = xp.matmul(q_latent * scale, latent.T) + xp.matmul(q_rope * scale, rope.T)
        if self.causal:
            place = xp.arange(live - queries, live)[:, None]
            scores = xp.where(xp.arange(live)[None, :] <= place, scores, -xp.inf)
        return xp.matmul(Softmax(3).body(xp, scores), latent)

    def lower(self, b: Any, *ins: Any) -> Any:
        """All query heads on one key head, whose keys are latent and rope key side by side and
        whose values are the latent."""
        q_latent, q_rope, latent, rope = ins[:4]
        rows, rank = b.spec(latent).shape
        width = rank + b.spec(rope).shape[1]
        q = b.apply(Concat(3), q_latent, q_rope)
        k = b.apply(Reshape((1, 1, rows, width)), b.apply(Concat(1), latent, rope))
        v = b.apply(Reshape((1, 1, rows, rank)), latent)
        op = Attention(
            scale=self.scale, causal=self.causal, window=None, length=self.length, has_mask=False,
            has_length=self.has_length,
        )  # fmt: skip
        return b.apply(op, q, k, v, *ins[4:])
