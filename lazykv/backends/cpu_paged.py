"""The CPU kernel of paged attention: products with views and gathered tiles of the pools."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lazykv.backends.cpu_body import portable
from lazykv.backends.cpu_rows import LEAST, divide_rows, exp_in_place, score_rows
from lazykv.backends.cpu_walk import Limits, Rows, Sequences
from lazykv.device import Array, Call, Kernel, Step
from lazykv.dtypes import f32
from lazykv.ops.paged_attention import PagedAttention, visible
from lazykv.spec import Spec

_TILE_BYTES = 256 << 10
"""Rows gathered or widened at once, as f32."""

_VIEW_BYTES = 48 << 10
"""Runs from here on are read in place; below, the calls that a piece of its own takes cost more
than a copy."""

_SCORE_BYTES = 2 << 20
"""Scratch for the scores of several queries on one tile."""


def runs_paged(op: PagedAttention, ins: tuple[Spec, ...], out: Spec) -> bool:
    """f32 queries over f32 or 16-bit pools."""
    pool = ins[1].dtype
    reads = pool is f32 or pool.itemsize == 2
    return out.dtype is f32 and reads and ins[0].size > 0 and out.size > 0


def _limits(ins: tuple[Spec, ...]) -> Limits:
    """One query adds its rows up in any order; several need it for what they hide."""
    blocks, size, heads, dim = ins[1].shape
    row, several = 4 * heads * max(dim, ins[2].shape[3]), ins[0].shape[2] > 1
    tile = max(1, min(_TILE_BYTES // row, ins[3].shape[1] * size))
    bounded = several or ins[1].dtype is not f32
    return Limits(-(-_VIEW_BYTES // row), tile if bounded else blocks * size, tile, several)


def _query_block(ins: tuple[Spec, ...]) -> int:
    """Queries handled at once, so that their scores on one tile fit the scratch bound."""
    _, heads, queries, _ = ins[0].shape
    return max(1, min(queries, _SCORE_BYTES // (4 * heads * _limits(ins).tile)))


def _scratch(op: PagedAttention, ins: tuple[Spec, ...], out: Spec) -> tuple[Spec, ...]:
    """Two tiles for a pool (one query is done with keys when it reads values), then the rest."""
    (_, heads, queries, dim), (_, size, kv_heads, _) = ins[0].shape, ins[1].shape
    lead, wide, tile = (kv_heads, heads // kv_heads), out.shape[3], _limits(ins).tile
    elements = tile * kv_heads * max(dim, wide)
    tiles = [Spec((elements,), ins[1].dtype), Spec((elements * (ins[1].dtype is not f32),), f32)]
    if queries == 1:
        rows = ins[3].shape[1] * size
        rows = rows if op.window is None else min(rows, op.window)
        rest = [(*lead, dim), (heads * rows,), (*lead, 1), (*lead, wide)]
        return (*tiles, *(Spec(shape, f32) for shape in rest))
    lines, state = heads * _query_block(ins), (*lead, queries, 1)
    rest = [(lines * dim,), (lines * tile,), (lines,), (lines * wide,), state, state]
    return (*tiles, *tiles, *(Spec(shape, f32) for shape in rest))


def _paged_attention(call: Call) -> Iterable[Step]:
    q, k, v, table, lens = call.ins
    if not (k.flags.c_contiguous and v.flags.c_contiguous):
        return portable(call)
    (batch, heads, queries, _), (blocks, size, kv_heads, _) = q.shape, k.shape
    seqs = Sequences(call.op, table, lens, queries, blocks, size, _limits(call.in_specs))
    scale, bits = np.asarray(call.op.scale, np.float32), call.in_specs[1].dtype.is_bits
    tile, wide, *rest = call.scratch
    keys = Rows(k, tile, wide, bits)
    # Splitting the axis of heads keeps q a view, whatever its strides.
    lead = (batch, kv_heads, heads // kv_heads, *([queries] if queries > 1 else []))
    grouped, out = q.reshape(*lead, q.shape[3]), call.out.reshape(*lead, v.shape[3])
    if queries == 1:
        values = Rows(v, tile, wide, bits)
        return [(_attend_one, (seqs, keys, values, scale, grouped, out, *rest))]
    values, online = Rows(v, rest[0], rest[1], bits), _Online(*rest[2:])
    block = _query_block(call.in_specs)
    return [(_attend_many, (seqs, keys, values, scale, block, grouped, out, online))]


def _attend_one(
    seqs: Sequences, keys: Rows, values: Rows, scale: Array, q: Array, out: Array,
    scaled: Array, flat: Array, total: Array, more: Array,
) -> None:  # fmt: skip
    """One query per sequence: q ``[B, Hkv, G, D]``, out ``[B, Hkv, G, Dv]``.

    The softmax stays unnormalized and the result is divided instead.
    """
    heads, groups, _ = scaled.shape
    for b, (first, last, pieces) in enumerate(seqs.walks()):
        mine, n, at = out[b], last - first, 0
        if n == 0:
            mine.fill(0)
            continue
        np.multiply(q[b], scale, scaled)
        scores = flat[: heads * groups * n].reshape(heads, groups, n)
        for start, rows, blocks in pieces:
            score_rows(scaled, keys.read(start, rows, blocks), scores[:, :, at : at + rows])
            at += rows
        np.maximum.reduce(scores, 2, None, total, True)  # type: ignore[call-overload]
        exp_in_place(scores, total)
        np.add.reduce(scores, 2, None, total, True)  # type: ignore[call-overload]
        at = 0
        for start, rows, blocks in pieces:
            v, weights = values.read(start, rows, blocks), scores[:, :, at : at + rows]
            np.matmul(weights, v, more if at else mine)
            if at:
                np.add(mine, more, mine)
            at += rows
        divide_rows(mine, total)


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
    seqs: Sequences, keys: Rows, values: Rows, scale: Array, block: int, q: Array, out: Array,
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
            k, v, end = keys.read(*piece), values.read(*piece), at + piece[1]
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
    score_rows(part, k, scores)
    _hide(window, place, low, scores.reshape(*folded, n))
    tops, totals, sums = online.tops[:, :, mine], online.totals[:, :, mine], out[:, :, mine]
    np.maximum.reduce(scores, 2, None, top, True)  # type: ignore[call-overload]
    highest = top.reshape(*folded, 1)
    np.maximum(highest, tops, out=highest)
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
