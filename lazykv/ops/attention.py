"""Attention over the live rows of a key/value cache."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.dtypes import bool_, f32, i64
from lazykv.errors import DTypeError, RangeError, ShapeError
from lazykv.ops.elementwise import Add, And, Ge, Gt, Le, Lt, MulScalar, SubScalar
from lazykv.ops.matmul import MatMul
from lazykv.ops.move import Cast, Concat, Take, Where
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
from lazykv.ops.reduce import Max, Softmax
from lazykv.ops.sources import Fill, Iota, SymValue
from lazykv.ops.views import BroadcastTo, Permute, Reshape
from lazykv.spec import Shape, Spec
from lazykv.symbols import Dim


def check_operands(who: str, q: Spec, k: Spec, v: Spec) -> None:
    """q ``[B, Hq, Sq, D]``, k ``[B, Hkv, S, D]``, v ``[B, Hkv, S, Dv]``, Hq a multiple of Hkv; one
    floating dtype, or f32 queries on 16-bit rows."""
    for what, s in (("q", q), ("k", k), ("v", v)):
        need_rank(who, s, 4, what)
    need_float(who, q, k, v)
    need_same_dtype(who, k, v)
    if q.dtype is not k.dtype and not (q.dtype is f32 and k.dtype.itemsize == 2):
        raise DTypeError(
            f"{who}: got q {q} and k {k}, need one dtype, or f32 queries on 16-bit rows"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            f"{who}: got q {q}, k {k} and v {v}, need q [B,Hq,Sq,D], k [B,Hkv,S,D] and "
            "v [B,Hkv,S,Dv]"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"{who}: got {q.shape[1]} query heads and {k.shape[1]} key heads, need a multiple"
        )


def too_few_rows(who: str, q: Spec, rows: int) -> RangeError:
    return RangeError(
        f"{who}: got {q.shape[2]} queries over {rows} rows, need at least as many rows, since the "
        "last ones are the queries' own"
    )


@dataclass(frozen=True)
class Attention(Op):
    """``softmax(scale * q k^T + mask) v`` over the first `length` rows of k and v.

    q is ``[B, Hq, Sq, D]``, k ``[B, Hkv, S, D]`` and v ``[B, Hkv, S, Dv]``; query head h reads key
    head ``h // (Hq/Hkv)``. Of the live rows the last Sq are the queries' own: query i stands at
    position ``length - Sq + i``, sees no later row if `causal`, and of the others only the last
    `window` positions, its own included. Rows past `length`, and those that a mask hides from every
    query of their head, do not matter, whatever they hold. A query that sees nothing gives zeros. k
    and v may be 16-bit rows under f32 queries; arithmetic is f32 then, like the result. Inputs are
    q, k, v, then the mask if `has_mask` (bool, True is visible, or additive), then the length as a
    rank-0 i64 if `has_length`.
    """

    name: ClassVar[str] = "attention"
    dims: ClassVar[tuple[str, ...]] = ("length",)
    scale: float
    causal: bool
    window: int | None
    length: Dim | None
    has_mask: bool
    has_length: bool

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 3 + self.has_mask + self.has_length)
        q, k, v = ins[:3]
        check_operands(self.name, q, k, v)
        if self.window is not None and self.window < 1:
            raise RangeError(f"{self.name}: got window {self.window}, need window >= 1")
        if k.shape[2] < self.least(q):
            raise too_few_rows(self.name, q, k.shape[2])
        if self.has_length:
            need_scalar_i64(self.name, ins[-1], "length")
        if self.has_mask:
            self._check_mask(q, k, ins[3])
        for b in self.bounds(*ins):
            check_bound(self.name, b)
        return Spec((*q.shape[:3], v.shape[3]), q.dtype)

    def _check_mask(self, q: Spec, k: Spec, mask: Spec) -> None:
        if mask.dtype is not bool_ and mask.dtype is not q.dtype:
            raise DTypeError(f"{self.name}: got mask {mask}, need bool or additive {q.dtype}")
        length = k.shape[2] if self.length is None and not self.has_length else self.length
        rows = length if isinstance(length, int) else None
        want = (q.shape[0], q.shape[1], q.shape[2])
        lead = (1,) * (4 - mask.rank) + mask.shape if mask.rank <= 4 else mask.shape
        fits = len(lead) == 4 and all(h in (1, w) for h, w in zip(lead[:3], want, strict=True))
        if not fits or lead[3] > k.shape[2] or (rows is not None and lead[3] not in (1, rows)):
            n = "length" if rows is None else rows
            raise ShapeError(
                f"{self.name}: got mask {mask}, need extents 1 or equal to "
                f"[{','.join(map(str, want))},{n}]"
            )

    def least(self, q: Any) -> int:
        """Fewest live rows: the queries' own rows are among them where positions matter."""
        return q.shape[2] if self.causal or self.window is not None else 0

    def bounds(self, *ins: Spec) -> Iterator[Bound]:
        if not self.has_length:
            low = max(self.least(ins[0]), self._mask_rows(ins))
            high = self._mask_rows(ins) or ins[1].shape[2]
            length = ins[1].shape[2] if self.length is None else self.length
            yield Bound(length, low, high, "length")

    def _mask_rows(self, ins: tuple[Spec, ...]) -> int:
        """Rows a mask with a last extent above 1 was made for, else 0."""
        rows = ins[3].shape[-1] if self.has_mask and ins[3].rank else 1
        return rows if rows > 1 else 0

    def check_live(self, rows: int, ins: tuple[Any, ...]) -> int:
        """The live rows, once they are known to fit the operands (arrays or specs)."""
        low, high = self._live_range(ins)
        if not low <= rows <= high:
            raise RangeError(f"{self.name}: got length {rows}, need {low} <= length <= {high}")
        return rows

    def _live_range(self, ins: tuple[Any, ...]) -> tuple[int, int]:
        """Fewest and most live rows of operands (arrays or specs)."""
        if self.has_mask and len(ins[3].shape) and ins[3].shape[-1] > 1:
            return ins[3].shape[-1], ins[3].shape[-1]
        return self.least(ins[0]), ins[1].shape[2]

    def body(self, xp: Any, *ins: Any) -> Any:
        q, k, v = ins[:3]
        length: Any = ins[-1] if self.has_length else self.length
        live = k.shape[2] if length is None else self.check_live(int(length), ins)
        masks = [ins[3]] if self.has_mask else []
        if self.causal or self.window is not None:
            masks.append(self.visible(xp, q.shape[2], live))
        return attend(xp, q, k[:, :, :live, :], v[:, :, :live, :], self.scale, *masks)

    def visible(self, xp: Any, queries: int, live: int) -> Any:
        """``[queries, live]`` bool: which row each query may see by position."""
        place = xp.arange(live - queries, live)[:, None]
        rows = xp.arange(live)[None, :]
        seen = rows <= place if self.causal else rows >= 0
        return seen if self.window is None else seen & (rows > place - self.window)

    def lower(self, b: Any, *ins: Any) -> Any:
        """Over all S rows with masks in place of a live length; dead rows of v are zeroed first,
        since 0 * NaN is NaN."""
        q, k, v = ins[:3]
        queries, rows, dtype = b.spec(q).shape[2], b.spec(k).shape[2], b.spec(q).dtype
        shape, full = (*b.spec(q).shape[:3], b.spec(v).shape[3]), (*b.spec(q).shape[:3], rows)
        if 0 in shape or rows == 0:
            return b.apply(Fill(shape, dtype, 0.0))
        if self.has_length:
            length = lower_checked(b, ins[-1], *self._live_range(tuple(map(b.spec, ins))))
        else:
            length = b.apply(SymValue((), i64, rows if self.length is None else self.length))
        seen = b.apply(BroadcastTo(full), self._lower_visible(b, length, queries, rows))
        if b.spec(k).dtype is not dtype:
            k, v = b.apply(Cast(dtype), k), b.apply(Cast(dtype), v)
        live = b.apply(Lt(), b.apply(Iota((rows,), i64)), b.apply(BroadcastTo((rows,)), length))
        k, v = rows_where(b, live, k), rows_where(b, live, v)
        scores = lower_scores(b, q, k, self.scale)
        if self.has_mask:
            mask = _lower_mask(b, ins[3], full)
            if b.spec(mask).dtype is not bool_:
                scores = b.apply(Add(), scores, mask)
                mask = b.apply(Gt(), mask, b.apply(Fill(full, dtype, -math.inf)))
            seen = b.apply(And(), seen, mask)
            v = _seen_rows(b, seen, v)
        return lower_weighted(b, scores, seen, v)

    def _lower_visible(self, b: Any, length: Any, queries: int, rows: int) -> Any:
        """``[queries, rows]`` bool: visible by liveness, causality and window."""
        shape = (queries, rows)
        row = b.apply(BroadcastTo(shape), b.apply(Iota((rows,), i64)))
        wide = b.apply(BroadcastTo(shape), length)
        seen = b.apply(Lt(), row, wide)
        own = b.apply(Reshape((queries, 1)), b.apply(Iota((queries,), i64)))
        offset = b.apply(SubScalar(queries), wide)
        place = b.apply(Add(), b.apply(BroadcastTo(shape), own), offset)
        if self.causal:
            seen = b.apply(And(), seen, b.apply(Le(), row, place))
        if self.window is not None:
            oldest = b.apply(SubScalar(self.window), place)
            seen = b.apply(And(), seen, b.apply(Gt(), row, oldest))
        return seen


def attend(xp: Any, q: Any, k: Any, v: Any, scale: float, *masks: Any) -> Any:
    """Softmax of scaled scores under masks (bool or additive), times v: the reference."""
    (batch, heads, queries, dim), (kv_heads, rows) = q.shape, k.shape[1:3]
    folded = (batch, kv_heads, heads // kv_heads * queries)
    grouped = xp.reshape(q, (*folded, dim)) * scale
    scores = xp.matmul(grouped, xp.matrix_transpose(k))
    scores = xp.reshape(scores, (batch, heads, queries, rows))
    for mask in masks:
        seen = mask
        if not xp.isdtype(mask.dtype, "bool"):
            scores, seen = scores + mask, mask != -xp.inf
        scores = xp.where(seen, scores, -xp.inf)
    weights = xp.reshape(Softmax(3).body(xp, scores), (*folded, rows))
    if masks:  # a weight of zero does not silence a NaN
        v = xp.where(xp.any(weights != 0, axis=2)[..., None], v, xp.zeros_like(v))
    return xp.reshape(xp.matmul(weights, v), (batch, heads, queries, v.shape[3]))


def lower_checked(b: Any, value: Any, low: int, high: int | None = None) -> Any:
    """A rank-0 i64, refused when it is read unless ``low <= value <= high``: `take` then gets an id
    that its table has not."""
    fits = b.apply(Ge(), value, b.apply(Fill((), i64, low)))
    if high is not None:
        fits = b.apply(And(), fits, b.apply(Le(), value, b.apply(Fill((), i64, high))))
    zero, one = (b.apply(Fill((), i64, n)) for n in (0, 1))
    checked = b.apply(Take(), b.apply(Iota((1,), i64)), b.apply(Where(), fits, zero, one))
    return b.apply(Add(), value, checked)


def rows_where(b: Any, live: Any, x: Any) -> Any:
    """``[B, H, S, D]`` with the rows that are not `live` (``[S]`` bool) set to zero: a weight of
    zero does not silence a NaN."""
    shape, dtype = b.spec(x).shape, b.spec(x).dtype
    wide = b.apply(BroadcastTo(shape), b.apply(Reshape((shape[2], 1)), live))
    return b.apply(Where(), wide, x, b.apply(Fill(shape, dtype, 0)))


def lower_scores(b: Any, q: Any, k: Any, scale: float) -> Any:
    """``scale * q k^T`` as ``[B, Hq, Sq, S]``."""
    (batch, heads, queries, dim), (kv_heads, rows) = b.spec(q).shape, b.spec(k).shape[1:3]
    folded = (batch, kv_heads, heads // kv_heads * queries, dim)
    grouped = b.apply(MulScalar(scale), b.apply(Reshape(folded), q))
    scores = b.apply(MatMul(), grouped, b.apply(Permute((0, 1, 3, 2)), k))
    return b.apply(Reshape((batch, heads, queries, rows)), scores)


def lower_weighted(b: Any, scores: Any, seen: Any, v: Any) -> Any:
    """Softmax over what is seen (bool like the scores), times v: ``[B, Hq, Sq, Dv]``."""
    full, dtype = b.spec(scores).shape, b.spec(scores).dtype
    (batch, heads, queries, rows), kv_heads = full, b.spec(v).shape[1]
    scores = b.apply(Where(), seen, scores, b.apply(Fill(full, dtype, -math.inf)))
    folded = (batch, kv_heads, heads // kv_heads * queries, rows)
    weights = b.apply(Reshape(folded), b.apply(Softmax(3), scores))
    mixed = b.apply(MatMul(), weights, v)
    return b.apply(Reshape((batch, heads, queries, b.spec(v).shape[3])), mixed)


def _seen_rows(b: Any, seen: Any, v: Any) -> Any:
    """v with the rows set to zero that no query of their head sees (`seen` is bool like the
    scores)."""
    (batch, heads, queries, rows), shape, dtype = (
        b.spec(seen).shape,
        b.spec(v).shape,
        b.spec(v).dtype,
    )
    folded = (batch, shape[1], heads // shape[1] * queries, rows)
    ones = b.apply(Where(), seen, *(b.apply(Fill(b.spec(seen).shape, dtype, n)) for n in (1, 0)))
    most = b.apply(Max(2), b.apply(Reshape(folded), ones))
    any_seen = b.apply(Gt(), most, b.apply(Fill(b.spec(most).shape, dtype, 0)))
    wide = b.apply(BroadcastTo(shape), b.apply(Reshape((*shape[:3], 1)), any_seen))
    return b.apply(Where(), wide, v, b.apply(Fill(shape, dtype, 0)))


def _lower_mask(b: Any, mask: Any, full: Shape) -> Any:
    """A mask at full size; what it lacks beyond the live length is hidden anyway."""
    spec = b.spec(mask)
    shape = (1,) * (4 - spec.rank) + spec.shape
    mask = b.apply(Reshape(shape), mask)
    if shape[3] == 1:
        return b.apply(BroadcastTo(full), mask)
    mask = b.apply(BroadcastTo((*full[:3], shape[3])), mask)
    rest = (*full[:3], full[3] - shape[3])
    return b.apply(Concat(3), mask, b.apply(Fill(rest, spec.dtype, 0)))
