"""How the paged kernels of the CPU read a pool: the live rows only, in the longest runs there are.

Neighbouring blocks of a pool are one view of it, which BLAS takes as it is; scattered ones are
gathered, a tile at a time, into scratch that stays in the L2 cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from lazykv.backends.cpu_rows import widen_rows
from lazykv.device import Array
from lazykv.ops.paged_attention import PagedAttention

Piece: TypeAlias = tuple[int, int, Array | None]
"""Rows that one product reads, ``(start, rows, blocks)``: of the pool if blocks is None, else of
these blocks gathered one behind the other."""


class Walk(NamedTuple):
    """All rows of one sequence that are in view, and the highest block among them (-1: none)."""

    pieces: tuple[Piece, ...]
    highest: int


class Limits(NamedTuple):
    """Rows from which a run is read in place, the most that such a piece has, and the most that are
    gathered at once; and whether rows come in the sequence's order."""

    view: int
    longest: int
    tile: int
    in_order: bool


@lru_cache(maxsize=1024)
def walk(entries: bytes, first: int, last: int, size: int, limits: Limits) -> Walk:
    """How to read rows first..last of a sequence; all layers of a step share the answer.

    `entries` are the u32 blocks of `size` rows that hold them. Where order does not matter, blocks
    come as they lie in the pool, which makes runs longer; one that is only in part in view stays
    where it is.
    """
    blocks = np.frombuffer(entries, np.uint32).astype(np.intp)
    if not len(blocks):
        return Walk((), -1)
    skip, trim = first % size, -last % size
    if not limits.in_order:
        blocks[int(skip > 0) : len(blocks) - int(trim > 0)].sort()
    cuts = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    runs = [(max((z - a) * size, size) < limits.view, a, z) for a, z in pairwise(cuts)]
    if not limits.in_order:
        runs.sort(key=lambda run: run[0])  # the short ones fill tiles together
    pieces: list[Piece] = []
    short: list[tuple[int, int]] = []
    for is_short, a, z in runs:
        if is_short:
            short.append((a, z))
            continue
        pieces += _gathers(blocks, short, size, limits.tile, skip, trim)
        short = []
        start = int(blocks[a]) * size + (skip if a == 0 else 0)
        end = int(blocks[z - 1] + 1) * size - (trim if z == len(blocks) else 0)
        pieces += _views(start, end, limits.longest)
    pieces += _gathers(blocks, short, size, limits.tile, skip, trim)
    return Walk(tuple(pieces), int(blocks.max()))


def _views(start: int, end: int, longest: int) -> Iterator[Piece]:
    """One run in nearly equal parts, none above `longest` rows."""
    parts = -(-(end - start) // longest)
    step = -(-(end - start) // parts)
    for at in range(start, end, step):
        yield at, min(step, end - at), None


def _gathers(
    blocks: Array, runs: list[tuple[int, int]], size: int, tile: int, skip: int, trim: int
) -> Iterator[Piece]:
    """Short runs one behind the other, a tile at a time; the ends of the sequence are cut off."""
    if not runs:
        return
    chosen = np.concatenate([blocks[a:z] for a, z in runs])
    per = tile // size
    for i in range(0, len(chosen), per):
        part = chosen[i : i + per]
        start = skip if i == 0 and runs[0][0] == 0 else 0
        cut = trim if i + per >= len(chosen) and runs[-1][1] == len(blocks) else 0
        yield start, len(part) * size - start - cut, part


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a call, read when it runs; `queries` each, over `blocks` of `size` rows."""

    op: PagedAttention
    table: Array
    lens: Array
    queries: int
    blocks: int
    size: int
    limits: Limits

    def walks(self) -> list[tuple[int, int, tuple[Piece, ...]]]:
        """Per sequence ``(first, last, pieces)`` of the rows in view; refuses before any work."""
        op, table, size, queries = self.op, self.table, self.size, self.queries
        lens: list[int] = self.lens.tolist()
        op.check_lens(lens, queries, table.shape[1] * size)
        out = []
        for b, n in enumerate(lens):
            first = op.first(n, queries)
            entries = table[b, first // size : -(-n // size)].tobytes()
            pieces, highest = walk(entries, first, n, size, self.limits)
            op.check_blocks(b, highest, self.blocks)
            out.append((first, n, pieces))
        return out


class Rows:
    """The rows of one pool as f32, a piece at a time."""

    __slots__ = ("_bits", "_blocks", "_pool", "_tile", "_tile_rows", "_wide")

    def __init__(self, pool: Array, tile: Array, wide: Array, bits: bool) -> None:
        """pool ``[N, bs, Hkv, D]``, contiguous; scratch: a tile of its dtype and, where that is not
        f32, one to widen rows into, both 1-D."""
        size, heads, dim = pool.shape[1:]
        per = len(tile) // (size * heads * dim)
        self._blocks = pool
        self._tile = tile[: per * size * heads * dim].reshape(per, size, heads, dim)
        self._pool = pool.reshape(-1, heads, dim).transpose(1, 0, 2)
        self._tile_rows = self._tile.reshape(-1, heads, dim).transpose(1, 0, 2)
        self._wide, self._bits = wide if len(wide) else None, bits

    def read(self, start: int, n: int, blocks: Array | None) -> Array:
        """A piece as ``[Hkv, n, D]``: a view of the pool, or scratch that holds until the next
        call."""
        if blocks is None:
            rows = self._pool[:, start : start + n]
        else:
            # mode="clip" only because "raise" buffers the output; blocks are known to be in range.
            np.take(self._blocks, blocks, 0, self._tile[: len(blocks)], "clip")
            rows = self._tile_rows[:, start : start + n]
        if self._wide is None:
            return rows
        return widen_rows(rows.transpose(1, 0, 2), self._wide, self._bits).transpose(1, 0, 2)
