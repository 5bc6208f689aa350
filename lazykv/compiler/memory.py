"""Step 5: lifetimes of intermediates and their offsets in one arena per location."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector load of the CPUs and GPUs in use."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A buffer needed from step `first` to step `last`, both included."""

    owner: tuple[int, int]
    nbytes: int
    first: int
    last: int


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def assign(intervals: Iterable[Interval]) -> tuple[dict[tuple[int, int], int], int]:
    """Offset of each buffer and the arena's size: first fit, in the order buffers are needed.

    Two buffers share bytes only if their intervals do not touch.
    """
    offsets: dict[tuple[int, int], int] = {}
    live: list[tuple[int, int, int]] = []
    top = 0
    for iv in sorted(intervals, key=lambda iv: (iv.first, iv.owner)):
        live = sorted(entry for entry in live if entry[2] >= iv.first)
        offset = 0
        for start, end, _ in live:
            if offset + aligned(iv.nbytes) <= start:
                break
            offset = max(offset, end)
        end = offset + aligned(iv.nbytes)
        offsets[iv.owner] = offset
        live.append((offset, end, iv.last))
        top = max(top, end)
    return offsets, top


def last_uses(reads: Iterable[tuple[int, Iterable[int]]]) -> dict[int, int]:
    """Last step that touches each buffer, from (step, buffers touched) in order."""
    last: dict[int, int] = defaultdict(int)
    for step, bases in reads:
        for base in bases:
            last[base] = step
    return last
