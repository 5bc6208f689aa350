"""CPU kernels of paged attention: live rows only, read in the longest runs that a table allows.

Neighbouring blocks of a pool are one view of it, which BLAS takes as it is; scattered ones are
gathered, a tile at a time, into scratch that stays in the L2 cache.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from lazykv.backends.cpu_body import portable
from lazykv.backends.cpu_rows import LEAST, divide_rows, exp_in_place, widen_rows
from lazykv.device import Array, Call, Kernel, Step
from lazykv.dtypes import f32
from lazykv.ops.paged_attention import PagedAttention, visible
from lazykv.spec import Spec

_TILE = 256
"""Rows gathered or widened at once."""

_VIEW_ONE, _VIEW_MANY = 64, 128
"""Rows from which a run is read in place, for one query and for several: below, the calls that a
piece of its own takes cost more than the copy."""

_SCORE_BYTES = 2 << 20
"""Scratch for the scores of several queries on one tile."""

_SMALL_PRODUCT = 1200
"""Scores up to which OpenBLAS multiplies by a transposed matrix without packing it first; for few
queries packing takes several times as long as the product."""


Piece: TypeAlias = tuple[int, int, Array | None]
"""Rows that one product reads, ``(start, rows, blocks)``: of the pool if blocks is None, else of
these blocks gathered one behind the other."""


class Walk(NamedTuple):
    """All rows of one sequence that are in view, and the highest block among them (-1: none)."""

    pieces: tuple[Piece, ...]
    highest: int


@lru_cache(maxsize=1024)
def walk(
    entries: bytes, first: int, last: int, size: int, view: int, longest: int, in_order: bool
) -> Walk:
    """How to read rows first..last of a sequence; all layers of a step share the answer.

    `entries` are the u32 blocks of `size` rows that hold them. Runs of `view` rows or more are
    views of at most `longest` rows. Unless `in_order`, blocks come as they lie in the pool, which
    makes runs longer; a block that is only in part in view stays where it is.
    """
    blocks = np.frombuffer(entries, np.uint32).astype(np.intp)
    if not len(blocks):
        return Walk((), -1)
    skip, trim = first % size, -last % size
    if not in_order:
        blocks[int(skip > 0) : len(blocks) - int(trim > 0)].sort()
    cuts = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    runs = []
    for a, z in pairwise(cuts):
        rows = (z - a) * size - (skip if a == 0 else 0) - (trim if z == len(blocks) else 0)
        runs.append((max(rows, size) < view, a, z, rows))
    if not in_order:
        runs.sort(key=lambda run: run[0])  # the scattered ones fill tiles together
    pieces: list[Piece] = []
    scattered: list[tuple[int, int]] = []
    for is_short, a, z, rows in runs:
        if is_short:
            scattered.append((a, z))
        else:
            pieces += _gathers(blocks, scattered, size, skip, trim)
            scattered = []
            pieces += _views(int(blocks[a]) * size + (skip if a == 0 else 0), rows, longest)
    pieces += _gathers(blocks, scattered, size, skip, trim)
    return Walk(tuple(pieces), int(blocks.max()))


def _views(start: int, rows: int, longest: int) -> Iterator[Piece]:
    """One run in equal parts, none above `longest` rows."""
    step = -(-rows // -(-rows // longest))
    for at in range(0, rows, step):
        yield start + at, min(step, rows - at), None


def _gathers(
    blocks: Array, runs: list[tuple[int, int]], size: int, skip: int, trim: int
) -> Iterator[Piece]:
    """Short runs one behind the other, a tile at a time; the ends of the sequence are cut off."""
    if not runs:
        return
    chosen = np.concatenate([blocks[a:z] for a, z in runs])
    per = _TILE // size
    for i in range(0, len(chosen), per):
        tile = chosen[i : i + per]
        start = skip if i == 0 and runs[0][0] == 0 else 0
        end = trim if i + per >= len(chosen) and runs[-1][1] == len(blocks) else 0
        yield start, len(tile) * size - start - end, tile


@dataclass(frozen=True, slots=True)
class _Pool:
    """The rows of one pool as f32: `by_head` is the pool as ``[Hkv, N*bs, D]``."""

    blocks: Array
    by_head: Array
    tile: Array
    tile_by_head: Array
    wide: Array | None
    bits: bool

    @classmethod
    def of(cls, pool: Array, tile: Array, wide: Array | None, bits: bool) -> "_Pool":
        n, size, heads, dim = pool.shape
        rows = len(tile) // (heads * dim) // size
        tile = tile[: rows * size * heads * dim].reshape(rows, size, heads, dim)
        by_head = (a.reshape(-1, heads, dim).transpose(1, 0, 2) for a in (pool, tile))
        return cls(pool, next(by_head), tile, next(by_head), wide, bits)

    def rows(self, start: int, n: int, blocks: Array | None) -> Array:
        """A piece as ``[Hkv, n, D]``: a view of the pool, or scratch that holds until the next
        call."""
        if blocks is None:
            rows = self.by_head[:, start : start + n]
        else:
            # mode="clip" only because "raise" buffers the output; blocks are known to be in range.
            np.take(self.blocks, blocks, 0, self.tile[: len(blocks)], "clip")
            rows = self.tile_by_head[:, start : start + n]
        if self.wide is None:
            return rows
        return widen_rows(rows.transpose(1, 0, 2), self.wide, self.bits).transpose(1, 0, 2)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The sequences of a call, read when it runs."""

    op: PagedAttention
    table: Array
    lens: Array
    queries: int
    blocks: int
    size: int
    longest: int

    def walks(self) -> list[tuple[int, int, tuple[Piece, ...]]]:
        """Per sequence ``(first, last, pieces)`` of the rows in view; refuses before any work."""
        op, size, many = self.op, self.size, self.queries > 1
        lens: list[int] = self.lens.tolist()
        op.check_lens(lens, self.queries, self.table.shape[1] * size)
        out = []
        for b, n in enumerate(lens):
            first = op.first(n, self.queries)
            entries = self.table[b, first // size : -(-n // size)].tobytes()
            view = _VIEW_MANY if many else _VIEW_ONE
            pieces, highest = walk(entries, first, n, size, view, self.longest, many)
            op.check_blocks(b, highest, self.blocks)
            out.append((first, n, pieces))
        return out


def runs_paged(op: PagedAttention, ins: tuple[Spec, ...], out: Spec) -> bool:
    """f32 queries over f32 or 16-bit pools."""
    rows = ins[1].dtype
    narrow = rows is f32 or rows.itemsize == 2
    return out.dtype is f32 and narrow and out.size > 0 and ins[0].size > 0


def _query_block(ins: tuple[Spec, ...]) -> int:
    """Queries handled at once, so that their scores on one tile fit the scratch bound."""
    _, heads, queries, _ = ins[0].shape
    return max(1, min(queries, _SCORE_BYTES // (4 * heads * _TILE)))


def _scratch(op: PagedAttention, ins: tuple[Spec, ...], out: Spec) -> tuple[Spec, ...]:
    """Tiles first, then what `_attend_one` or `_attend_many` takes."""
    (_, heads, queries, dim), (_, size, kv_heads, _), wide = (
        ins[0].shape,
        ins[1].shape,
        out.shape[3],
    )
    groups, rows = heads // kv_heads, ins[3].shape[1] * size
    tile = _TILE * kv_heads * max(dim, wide)
    tiles = [Spec((tile,), ins[1].dtype)] + [Spec((tile,), f32)] * (ins[1].dtype is not f32)
    if queries == 1:
        lead, rows = (kv_heads, groups), rows if op.window is None else min(rows, op.window)
        rest = [(*lead, dim), (heads * rows,), (*lead, 1), (*lead, wide)]
        return (*tiles, *(Spec(shape, f32) for shape in rest))
    lines, state = heads * _query_block(ins), (kv_heads, groups, queries, 1)
    rest = [(lines * dim,), (lines * _TILE,), (lines,), (lines * wide,), state, state]
    return (*tiles, *tiles, *(Spec(shape, f32) for shape in rest))


def _paged_attention(call: Call) -> Iterable[Step]:
    q, k, v, table, lens = call.ins
    if not (k.flags.c_contiguous and v.flags.c_contiguous):
        return portable(call)
    (batch, heads, queries, dim), (blocks, size, kv_heads, _) = q.shape, k.shape
    bits, narrow = call.in_specs[1].dtype.is_bits, call.in_specs[1].dtype is not f32
    step = 1 + narrow
    keys = _Pool.of(k, call.scratch[0], call.scratch[1] if narrow else None, bits)
    scale, groups = np.asarray(call.op.scale, np.float32), heads // kv_heads
    lead = (batch, kv_heads, groups)
    if queries == 1:
        # Keys are done with when values are read, so both use one tile.
        values = _Pool.of(v, call.scratch[0], call.scratch[1] if narrow else None, bits)
        longest = _TILE if narrow else blocks * size
        seqs = _Batch(call.op, table, lens, 1, blocks, size, longest)
        one = (seqs, keys, values, scale, q.reshape(*lead, dim), call.out.reshape(*lead, -1))
        return [(_attend_one, (*one, *call.scratch[step:]))]
    tiles = call.scratch[step : 2 * step]
    values = _Pool.of(v, tiles[0], tiles[1] if narrow else None, bits)
    seqs = _Batch(call.op, table, lens, queries, blocks, size, _TILE)
    # Splitting the axis of heads keeps q a view, whatever its strides.
    grouped, out = q.reshape(*lead, queries, dim), call.out.reshape(*lead, queries, -1)
    many = (seqs, keys, values, scale, _query_block(call.in_specs), grouped, out)
    return [(_attend_many, (*many, _Online(*call.scratch[2 * step :])))]


def _attend_one(
    seqs: _Batch, keys: _Pool, values: _Pool, scale: Array, q: Array, out: Array,
    scaled: Array, flat: Array, total: Array, more: Array,
) -> None:  # fmt: skip
    """One query per sequence: q ``[B, Hkv, G, D]``, out ``[B, Hkv, G, Dv]``.

    The softmax stays unnormalized and the result is divided instead.
    """
    heads, groups, _ = scaled.shape
    step = _SMALL_PRODUCT // groups
    for b, (first, last, pieces) in enumerate(seqs.walks()):
        mine, n, at = out[b], last - first, 0
        if n == 0:
            mine.fill(0)
            continue
        np.multiply(q[b], scale, scaled)
        scores = flat[: heads * groups * n].reshape(heads, groups, n)
        for start, rows, blocks in pieces:
            _score(scaled, keys.rows(start, rows, blocks), scores[:, :, at : at + rows], step)
            at += rows
        np.maximum.reduce(scores, 2, None, total, True)  # type: ignore[call-overload]
        exp_in_place(scores, total)
        np.add.reduce(scores, 2, None, total, True)  # type: ignore[call-overload]
        at = 0
        for start, rows, blocks in pieces:
            v, weights = values.rows(start, rows, blocks), scores[:, :, at : at + rows]
            np.matmul(weights, v, more if at else mine)
            if at:
                np.add(mine, more, mine)
            at += rows
        divide_rows(mine, total)


def _score(queries: Array, rows: Array, out: Array, step: int) -> None:
    """``queries @ rows^T`` per head, `step` rows at a time."""
    n = rows.shape[1]
    if n <= step:
        np.matmul(queries, rows.mT, out)
        return
    for at in range(0, n, step):
        np.matmul(queries, rows[:, at : at + step].mT, out[:, :, at : at + step])


@dataclass(frozen=True, slots=True)
class _Online:
    """Scratch of a softmax that sees its rows a tile at a time (1-D), and its state per query:
    the highest score so far and the sum of weights, ``[Hkv, G, Sq, 1]``."""

    scaled: Array
    scores: Array
    peak: Array
    mixed: Array
    tops: Array
    totals: Array


def _attend_many(
    seqs: _Batch, keys: _Pool, values: _Pool, scale: Array, block: int, q: Array, out: Array,
    online: _Online,
) -> None:  # fmt: skip
    """Several queries: q ``[B, Hkv, G, Sq, D]``, out ``[B, Hkv, G, Sq, Dv]``.

    Every tile is read once, for all queries that see some of it.
    """
    window, queries = seqs.op.window, seqs.queries
    for b, (first, last, pieces) in enumerate(seqs.walks()):
        out[b].fill(0)
        online.tops.fill(LEAST)
        online.totals.fill(0)
        at = first
        for piece in pieces:
            k, v, end = keys.rows(*piece), values.rows(*piece), at + piece[1]
            for start in range(0, queries, block):
                mine = slice(start, min(start + block, queries))
                place = last - queries + start
                low = at if window is None else max(at, place + 1 - window)
                high = min(end, last - queries + mine.stop)
                if low < high:
                    rows = slice(low - at, high - at)
                    part = (k[:, rows], v[:, rows], q[b], out[b])
                    _fold(window, scale, place, low, mine, *part, online)
            at = end
        divide_rows(out[b], online.totals)


def _fold(
    window: int | None, scale: Array, place: int, low: int, mine: slice, k: Array, v: Array,
    q: Array, out: Array, online: _Online,
) -> None:  # fmt: skip
    """Rows from position `low` on added to the sums of the queries `mine`, from `place` on.

    Sums so far are rescaled to the new highest score (the online softmax of FlashAttention,
    arXiv:2205.14135). k ``[Hkv, n, D]``, v ``[Hkv, n, Dv]``, q ``[Hkv, G, Sq, D]``, out
    ``[Hkv, G, Sq, Dv]``.
    """
    (heads, groups, _, dim), n, m = q.shape, k.shape[1], mine.stop - mine.start
    lines, folded = (heads, groups * m), (heads, groups, m)
    part = _cut(online.scaled, (*lines, dim))
    np.multiply(q[:, :, mine], scale, part.reshape(*folded, dim))
    scores, top = _cut(online.scores, (*lines, n)), _cut(online.peak, (*lines, 1))
    np.matmul(part, k.mT, scores)
    _hide(window, place, low, scores.reshape(*folded, n))
    tops, totals, sums = online.tops[:, :, mine], online.totals[:, :, mine], out[:, :, mine]
    np.maximum.reduce(scores, 2, None, top, True)  # type: ignore[call-overload]
    highest = top.reshape(*folded, 1)
    np.maximum(highest, tops, highest)
    np.subtract(scores, top, scores)
    np.exp(scores, scores)
    decay = np.exp(tops - highest)
    np.copyto(tops, highest)
    np.multiply(totals, decay, totals)
    np.add(totals, np.add.reduce(scores, 2).reshape(*folded, 1), totals)
    mixed = _cut(online.mixed, (*lines, v.shape[2]))
    np.matmul(scores, v, mixed)
    np.multiply(sums, decay, sums)
    np.add(sums, mixed.reshape(sums.shape), sums)


def _cut(flat: Array, shape: tuple[int, ...]) -> Array:
    return flat[: math.prod(shape)].reshape(shape)


def _hide(window: int | None, place: int, low: int, scores: Array) -> None:
    """``[Hkv, G, m, n]``: minus infinity where a query at `place` or after does not see a row at
    `low` or after that another one sees."""
    m, n = scores.shape[2:]
    if window is None:  # all see the rows up to the first one's own
        skip = max(0, place + 1 - low)
        scores, low, n = scores[..., skip:], low + skip, n - skip
    if n > 0:
        seen = visible(np, np.arange(place, place + m), np.arange(low, low + n), window)
        np.copyto(scores, np.float32(-np.inf), where=~seen)


PAGED_ATTENTION = Kernel(_paged_attention, _scratch)
