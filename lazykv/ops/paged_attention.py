"""Attention over the blocks of a paged pool that a block table names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.dtypes import f32, i64
from lazykv.errors import DTypeError, RangeError, ShapeError
from lazykv.ops.attention import attend, lower_scores, lower_weighted
from lazykv.ops.elementwise import Add, AddScalar, And, Gt, Le, Lt, MulScalar, SubScalar
from lazykv.ops.move import Cast, Take, Where
from lazykv.ops.op import Op, need_arity, need_float, need_rank, need_same_dtype
from lazykv.ops.sources import Fill, Iota
from lazykv.ops.views import BroadcastTo, Permute, Reshape
from lazykv.spec import Spec


@dataclass(frozen=True)
class PagedAttention(Op):
    """Causal ``softmax(scale * q k^T) v`` of ragged sequences whose rows lie in blocks of a pool.

    q is ``[B, Hq, Sq, D]``, k_pool ``[N, bs, Hkv, D]``, v_pool ``[N, bs, Hkv, Dv]``, block_table
    u32 ``[B, M]`` and context_lens u32 ``[B]``. Token t of sequence b lies in block
    ``block_table[b, t // bs]``, slot ``t % bs``. context_lens[b] counts live tokens, the last Sq
    of which are the queries' own: query i stands at position ``context_len - Sq + i``, sees no
    later row, and of the others only the last `window` positions, its own included. Query head h
    reads key head ``h // (Hq/Hkv)``. A sequence with a context_len of 0 is padding and gives zeros.

    Rows that no query sees, those past context_len above all, are never part of any arithmetic. A
    table entry is used if a query sees one of its rows; others may hold any mark and are never
    looked at. Pools may be 16-bit under f32 queries; arithmetic is f32 then, like the result.
    """

    name: ClassVar[str] = "paged_attention"
    scale: float
    window: int | None

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 5)
        q, k, v, table, lens = ins
        self._check_pools(q, k, v)
        need_rank(self.name, table, 2, "block_table")
        if table.dtype.name != "u32" or lens.dtype.name != "u32":
            raise DTypeError(
                f"{self.name}: got block_table {table} and context_lens {lens}, need u32"
            )
        batch, queries, size = q.shape[0], q.shape[2], k.shape[1]
        if table.shape[0] != batch or lens.shape != (batch,):
            raise ShapeError(
                f"{self.name}: got q {q}, block_table {table} and context_lens {lens}, need "
                "[B,Hq,Sq,D], [B,M] and [B]"
            )
        if table.shape[1] * size < queries:
            raise ShapeError(
                f"{self.name}: got block_table {table} for blocks of {size} rows, need room for "
                f"the {queries} rows of the queries"
            )
        if self.window is not None and self.window < 1:
            raise RangeError(f"{self.name}: got window {self.window}, need window >= 1")
        return Spec((*q.shape[:3], v.shape[3]), q.dtype)

    def _check_pools(self, q: Spec, k: Spec, v: Spec) -> None:
        for what, s in (("q", q), ("k_pool", k), ("v_pool", v)):
            need_rank(self.name, s, 4, what)
        need_float(self.name, q, k, v)
        need_same_dtype(self.name, k, v)
        if q.dtype is not k.dtype and not (q.dtype is f32 and k.dtype.itemsize == 2):
            raise DTypeError(
                f"{self.name}: got q {q} and k_pool {k}, need one dtype, or f32 queries on 16-bit "
                "pools"
            )
        if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
            raise ShapeError(
                f"{self.name}: got q {q}, k_pool {k} and v_pool {v}, need q [B,Hq,Sq,D], k_pool "
                "[N,bs,Hkv,D] and v_pool [N,bs,Hkv,Dv]"
            )
        if k.shape[0] == 0 or k.shape[1] == 0:
            raise ShapeError(f"{self.name}: got k_pool {k}, need N >= 1 and bs >= 1")
        if k.shape[2] == 0 or q.shape[1] % k.shape[2]:
            raise ShapeError(
                f"{self.name}: got {q.shape[1]} query heads and {k.shape[2]} key heads, need a "
                "multiple"
            )

    def check_lens(self, lens: Sequence[int], queries: int, rows: int) -> None:
        """Refuse a context_len that neither holds the queries' own rows nor is padding, or that is
        above the `rows` a table row can name."""
        for b, n in enumerate(lens):
            if n and not queries <= n <= rows:
                raise RangeError(
                    f"{self.name}: got context_lens[{b}] = {n}, need 0 or {queries} <= context_len "
                    f"<= {rows}"
                )

    def check_blocks(self, b: int, highest: int, blocks: int) -> None:
        """Refuse a used table entry outside the pool."""
        if highest >= blocks:
            raise RangeError(
                f"{self.name}: got block {highest} in block_table[{b}], need block < {blocks}"
            )

    def first(self, length: int, queries: int) -> int:
        """The oldest position in view of the first of the queries that end at `length`."""
        return 0 if self.window is None else max(0, length - queries + 1 - self.window)

    def body(self, xp: Any, *ins: Any) -> Any:
        q, k_pool, v_pool, table, lens = ins
        (batch, heads, queries, _), (blocks, size) = q.shape, k_pool.shape[:2]
        live = [int(lens[b]) for b in range(batch)]
        self.check_lens(live, queries, table.shape[1] * size)
        used = [self._used(xp, b, table, n, queries, blocks, size) for b, n in enumerate(live)]
        out = xp.zeros((batch, heads, queries, v_pool.shape[3]), dtype=q.dtype)
        for b, n in enumerate(live):
            if n and queries:
                first = self.first(n, queries)
                skip, rows = first % size, xp.arange(first, n)
                blocks_of = (xp.take(p, used[b], axis=0) for p in (k_pool, v_pool))
                k, v = (_in_order(xp, p, skip, n - first) for p in blocks_of)
                seen = visible(xp, xp.arange(n - queries, n), rows, self.window)
                out[b, ...] = attend(xp, q[b : b + 1, ...], k, v, self.scale, seen)[0, ...]
        return out

    def _used(
        self, xp: Any, b: int, table: Any, n: int, queries: int, blocks: int, size: int
    ) -> Any:  # fmt: skip
        """The used entries of a table row, once they are known to lie in the pool."""
        used = table[b, self.first(n, queries) // size : -(-n // size)]
        if used.size:
            self.check_blocks(b, int(xp.max(used)), blocks)
        return used

    def lower(self, b: Any, *ins: Any) -> Any:
        """Over all M blocks of every table row. Entries that are not used become block 0 and rows
        that no query sees zeros, since 0 * NaN is NaN; `take` refuses what is out of range."""
        q, k, v, table, lens = ins
        (batch, heads, queries, _), size = b.spec(q).shape, b.spec(k).shape[1]
        out, dtype = (batch, heads, queries, b.spec(v).shape[3]), b.spec(q).dtype
        rows = b.spec(table).shape[1] * size
        if 0 in out:
            return b.apply(Fill(out, dtype, 0.0))
        if b.spec(k).dtype is not dtype:
            k, v = b.apply(Cast(dtype), k), b.apply(Cast(dtype), v)
        lens = b.apply(Cast(i64), lens)
        first = self._lower_first(b, lens, queries, rows)
        ids = self._lower_ids(b, table, lens, first, size)
        live = self._lower_live(b, lens, first, rows)
        k, v = (_lower_rows(b, p, ids, live) for p in (k, v))
        scores = lower_scores(b, q, k, self.scale)
        seen = self._lower_visible(b, first, queries, rows)
        seen = b.apply(Reshape((batch, 1, queries, rows)), seen)
        return lower_weighted(b, scores, b.apply(BroadcastTo(b.spec(scores).shape), seen), v)

    def _lower_first(self, b: Any, lens: Any, queries: int, rows: int) -> Any:
        """``[B]`` i64: the first query's position (0 for padding), taken from a table of all that
        are allowed, so that a bad context_len is refused."""
        shape = b.spec(lens).shape
        own = b.apply(Fill(shape, i64, queries))
        is_live = b.apply(Gt(), lens, b.apply(Fill(shape, i64, 0)))
        first = b.apply(SubScalar(queries), b.apply(Where(), is_live, lens, own))
        return b.apply(Take(), b.apply(Iota((rows - queries + 1,), i64)), first)

    def _lower_ids(self, b: Any, table: Any, lens: Any, first: Any, size: int) -> Any:
        """``[B, M]`` i64: the table with 0 for entries that are not used."""
        shape = b.spec(table).shape
        start = _spread(b, b.apply(MulScalar(size), b.apply(Iota(shape[1:], i64))), shape, 1)
        used = b.apply(Lt(), start, _spread(b, lens, shape, 0))
        if self.window is not None:
            oldest = b.apply(SubScalar(self.window), _spread(b, first, shape, 0))
            last = b.apply(AddScalar(size - 1), start)
            used = b.apply(And(), used, b.apply(Gt(), last, oldest))
        return b.apply(Where(), used, b.apply(Cast(i64), table), b.apply(Fill(shape, i64, 0)))

    def _lower_live(self, b: Any, lens: Any, first: Any, rows: int) -> Any:
        """``[B, rows]`` bool: the rows that some query sees."""
        shape = (*b.spec(lens).shape, rows)
        row = _spread(b, b.apply(Iota((rows,), i64)), shape, 1)
        live = b.apply(Lt(), row, _spread(b, lens, shape, 0))
        if self.window is None:
            return live
        oldest = b.apply(SubScalar(self.window), _spread(b, first, shape, 0))
        return b.apply(And(), live, b.apply(Gt(), row, oldest))

    def _lower_visible(self, b: Any, first: Any, queries: int, rows: int) -> Any:
        """``[B, Sq, rows]`` bool: which row each query sees; padding sees rows that are zeros."""
        shape = (*b.spec(first).shape, queries, rows)
        row = _spread(b, b.apply(Iota((rows,), i64)), shape, 2)
        own = _spread(b, b.apply(Iota((queries,), i64)), shape, 1)
        place = b.apply(Add(), own, _spread(b, first, shape, 0))
        seen = b.apply(Le(), row, place)
        if self.window is None:
            return seen
        return b.apply(And(), seen, b.apply(Gt(), row, b.apply(SubScalar(self.window), place)))


def visible(xp: Any, place: Any, rows: Any, window: int | None) -> Any:
    """``[Sq, n]`` bool: which of the rows at some positions the queries at some places see."""
    rows, place = rows[None, :], place[:, None]
    seen = rows <= place
    return seen if window is None else seen & (rows > place - window)


def _in_order(xp: Any, blocks: Any, skip: int, rows: int) -> Any:
    """``[n, bs, H, D]`` blocks as one sequence of rows after `skip`: ``[1, H, rows, D]``."""
    flat = xp.reshape(blocks, (-1, *blocks.shape[2:]))[skip : skip + rows, ...]
    return xp.permute_dims(flat, (1, 0, 2))[None, ...]


def _spread(b: Any, line: Any, shape: tuple[int, ...], axis: int) -> Any:
    """A 1-D value along one axis of a shape, equal along the others."""
    thin = tuple(n if a == axis else 1 for a, n in enumerate(shape))
    return b.apply(BroadcastTo(shape), b.apply(Reshape(thin), line))


def _lower_rows(b: Any, pool: Any, ids: Any, live: Any) -> Any:
    """Rows of a pool as ``[B, Hkv, M*bs, D]``, zero where not `live` (``[B, M*bs]`` bool)."""
    (batch, rows), (heads, dim) = b.spec(live).shape, b.spec(pool).shape[2:]
    taken = b.apply(Reshape((batch, rows, heads, dim)), b.apply(Take(), pool, ids))
    x = b.apply(Permute((0, 2, 1, 3)), taken)
    shape = (batch, heads, rows, dim)
    wide = b.apply(BroadcastTo(shape), b.apply(Reshape((batch, 1, rows, 1)), live))
    return b.apply(Where(), wide, x, b.apply(Fill(shape, b.spec(x).dtype, 0)))
