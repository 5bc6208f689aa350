"""Attention over a ring of rows: a sliding window, and the first positions kept beside it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.dtypes import i64
from lazykv.errors import RangeError
from lazykv.ops.attention import (
    attend,
    check_operands,
    lower_checked,
    lower_scores,
    lower_weighted,
    rows_where,
)
from lazykv.ops.elementwise import Add, AddScalar, And, Ge, Gt, Le, Lt, ModScalar, Sub, SubScalar
from lazykv.ops.move import Cast, Concat, Where
from lazykv.ops.op import Bound, Op, check_bound, need_arity, need_scalar_i64
from lazykv.ops.sources import Fill, Iota, SymValue
from lazykv.ops.views import BroadcastTo, Reshape
from lazykv.ops.write import ring_runs
from lazykv.spec import MAX_BYTES, Spec
from lazykv.symbols import Dim

_ALWAYS = 2**62
"""A position later than every window's start: what sinks count as where windows are compared."""


@dataclass(frozen=True)
class RingAttention(Op):
    """``softmax(scale * q k^T) v`` over the last `window` positions and the first `sinks`.

    q is ``[B, Hq, Sq, D]``, k ``[B, Hkv, R, D]`` and v ``[B, Hkv, R, Dv]``; k and v are rings in
    which position p has the slot that `ring_runs` names. `length` counts the positions so far and
    may exceed R; the last Sq are the queries' own. The query at position p sees positions
    ``p - window + 1 .. p`` and of the first `sinks` those up to p, wherever the ring has put them.
    No other row is part of any arithmetic. k and v may be 16-bit rows under f32 queries; arithmetic
    is f32 then, like the result. Inputs are q, k, v, then the length as a rank-0 i64 if
    `has_length`.

    The ring must hold what the first query sees when the last query's row is already written:
    ``R - sinks >= window + Sq - 1``.
    """

    name: ClassVar[str] = "ring_attention"
    dims: ClassVar[tuple[str, ...]] = ("length",)
    scale: float
    window: int
    sinks: int
    length: Dim | None
    has_length: bool

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 3 + self.has_length)
        q, k, v = ins[:3]
        check_operands(self.name, q, k, v)
        if self.window < 1 or self.sinks < 0:
            raise RangeError(
                f"{self.name}: got window {self.window} and {self.sinks} sinks, need window >= 1 "
                "and sinks >= 0"
            )
        queries, rows = q.shape[2], k.shape[2]
        if rows - self.sinks < max(1, self.window + queries - 1):
            raise RangeError(
                f"{self.name}: got {queries} queries over rings of {rows} rows with window "
                f"{self.window} and {self.sinks} sinks, need rows - sinks >= window + queries - 1 "
                f"= {self.window + queries - 1}, so that no row in view is overwritten; use a "
                "longer ring or fewer queries"
            )
        if self.has_length:
            need_scalar_i64(self.name, ins[3], "length")
        for b in self.bounds(*ins):
            check_bound(self.name, b)
        return Spec((*q.shape[:3], v.shape[3]), q.dtype)

    def bounds(self, *ins: Spec) -> Iterator[Bound]:
        if self.length is not None:
            yield Bound(self.length, ins[0].shape[2], MAX_BYTES, "length")

    def check_length(self, length: int, queries: int) -> int:
        """The length, once it is known to count the queries' own positions."""
        if length < queries:
            raise RangeError(f"{self.name}: got length {length}, need length >= {queries} queries")
        return length

    def runs(self, first: int, last: int, rows: int) -> list[tuple[int, int, int]]:
        """Runs ``(slot, position, count)`` of the rows that queries at positions first..last
        see."""
        low = max(self.sinks, first + 1 - self.window)
        return ring_runs(0, min(self.sinks, last), rows, self.sinks) + ring_runs(
            low, last, rows, self.sinks
        )

    def visible(self, xp: Any, first: int, last: int, positions: Any) -> Any:
        """``[last - first, n]`` bool: which of the rows at `positions` each query sees."""
        place = xp.arange(first, last)[:, None]
        recent = (positions > place - self.window) | (positions < self.sinks)
        return (positions <= place) & recent

    def body(self, xp: Any, *ins: Any) -> Any:
        q, k, v = ins[:3]
        length: Any = ins[3] if self.has_length else self.length
        queries, rows = q.shape[2], k.shape[2]
        last = self.check_length(int(length), queries)
        runs = self.runs(last - queries, last, rows)
        none = xp.arange(0)
        slots = xp.concat([none, *(xp.arange(s, s + n) for s, _, n in runs)])
        positions = xp.concat([none, *(xp.arange(p, p + n) for _, p, n in runs)])
        seen = self.visible(xp, last - queries, last, positions)
        k, v = (xp.take(x, slots, axis=2) for x in (k, v))
        return attend(xp, q, k, v, self.scale, seen)

    def lower(self, b: Any, *ins: Any) -> Any:
        """Over all R slots, with masks made from the position that each slot holds."""
        q, k, v = ins[:3]
        queries, rows, dtype = b.spec(q).shape[2], b.spec(k).shape[2], b.spec(q).dtype
        out = (*b.spec(q).shape[:3], b.spec(v).shape[3])
        if 0 in out:
            return b.apply(Fill(out, dtype, 0.0))
        if self.has_length:
            length = lower_checked(b, ins[3], queries)
        else:
            assert self.length is not None, "a length is a parameter or an input"
            length = b.apply(SymValue((), i64, self.length))
        position, recency = self._lower_positions(b, length, rows)
        oldest = b.apply(SubScalar(queries - 1 + self.window), length)
        alive = b.apply(
            And(),
            b.apply(Lt(), position, b.apply(BroadcastTo((rows,)), length)),
            b.apply(Ge(), recency, b.apply(BroadcastTo((rows,)), oldest)),
        )
        if b.spec(k).dtype is not dtype:
            k, v = b.apply(Cast(dtype), k), b.apply(Cast(dtype), v)
        k, v = rows_where(b, alive, k), rows_where(b, alive, v)
        seen = self._lower_visible(b, length, position, recency, queries)
        scores = lower_scores(b, q, k, self.scale)
        return lower_weighted(b, scores, b.apply(BroadcastTo(b.spec(scores).shape), seen), v)

    def _lower_positions(self, b: Any, length: Any, rows: int) -> tuple[Any, Any]:
        """Per slot, ``[R]`` each: the last position written to it, and what windows compare (the
        position; never old for a sink, never recent for a slot without a row)."""
        ring = rows - self.sinks
        last = b.apply(BroadcastTo((ring,)), b.apply(SubScalar(1), length))
        slot = b.apply(AddScalar(self.sinks), b.apply(Iota((ring,), i64)))
        # Positions p of a slot s have p = s modulo the ring: the last one is at most a round ago.
        age = b.apply(ModScalar(ring), b.apply(Sub(), last, slot))
        position = b.apply(Sub(), last, age)
        sinks = b.apply(Fill((ring,), i64, self.sinks))
        never = b.apply(Fill((ring,), i64, -_ALWAYS))
        recency = b.apply(Where(), b.apply(Ge(), position, sinks), position, never)
        own = b.apply(Iota((self.sinks,), i64))
        always = b.apply(Fill((self.sinks,), i64, _ALWAYS))
        return b.apply(Concat(0), own, position), b.apply(Concat(0), always, recency)

    def _lower_visible(
        self, b: Any, length: Any, position: Any, recency: Any, queries: int
    ) -> Any:  # fmt: skip
        """``[Sq, R]`` bool: which slot each query sees."""
        shape = (queries, b.spec(position).shape[0])
        own = b.apply(Reshape((queries, 1)), b.apply(Iota((queries,), i64)))
        first = b.apply(SubScalar(queries), b.apply(BroadcastTo(shape), length))
        place = b.apply(Add(), b.apply(BroadcastTo(shape), own), first)
        start = b.apply(SubScalar(self.window), place)
        return b.apply(
            And(),
            b.apply(Le(), b.apply(BroadcastTo(shape), position), place),
            b.apply(Gt(), b.apply(BroadcastTo(shape), recency), start),
        )
