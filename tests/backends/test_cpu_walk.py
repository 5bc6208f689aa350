"""How paged kernels read a pool: pieces that hold every row in view once, and nothing else."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lazykv.backends.cpu_walk import Limits, walk


def rows_of(pieces: Any, size: int) -> list[int]:
    """The rows of the pool that pieces read, in their order."""
    out: list[int] = []
    for start, rows, blocks in pieces:
        if blocks is None:
            out += range(start, start + rows)
        else:
            gathered = [int(b) * size + slot for b in blocks for slot in range(size)]
            out += gathered[start : start + rows]
    return out


@given(st.data())
def test_a_walk_holds_every_row_in_view_once(data: st.DataObject) -> None:
    size, view = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    tile = max(size, view, data.draw(st.integers(1, 20)))
    longest = data.draw(st.sampled_from([1000, tile, view]))
    limits = Limits(view, longest, tile, data.draw(st.booleans()))
    count = data.draw(st.integers(1, 12))
    blocks = data.draw(st.permutations(range(data.draw(st.sampled_from([12, 14, 30])))))[:count]
    first = data.draw(st.integers(0, size - 1)) + 3 * size  # blocks that left the window before
    last = 3 * size + (count - 1) * size + data.draw(st.integers(1, size))
    first = min(first, last - 1)
    entries = np.array(blocks, np.uint32).tobytes()
    pieces, highest = walk(entries, first, last, size, limits)
    got = rows_of(pieces, size)
    want = [blocks[t // size - 3] * size + t % size for t in range(first, last)]
    assert highest == max(blocks)
    assert got == want if limits.in_order else sorted(got) == sorted(want)
    for _, rows, chosen in pieces:
        assert rows >= 1
        assert rows <= longest if chosen is None else len(chosen) * size <= tile


def test_neighbours_are_one_view_and_scattered_blocks_fill_tiles() -> None:
    size, limits = 4, Limits(8, 1000, 16, False)

    def pieces(blocks: list[int], last: int, in_order: bool = False) -> list[tuple[int, int, bool]]:
        entries = np.array(blocks, np.uint32).tobytes()
        found = walk(entries, 0, last, size, limits._replace(in_order=in_order)).pieces
        return [(start, rows, chosen is not None) for start, rows, chosen in found]

    assert pieces([3, 4, 5, 6], 15) == [(12, 15, False)]
    assert pieces([5, 3, 4, 6], 15) == [(12, 15, False)]  # order does not matter to one query
    assert pieces([9, 1, 7, 5, 3, 0], 21) == [(0, 16, True), (0, 5, True)]
    assert pieces([0, 20, 21, 22, 30], 20) == [(80, 12, False), (0, 8, True)]
    assert pieces([0, 20, 21, 22, 9], 20, True) == [(0, 4, True), (80, 12, False), (0, 4, True)]


def test_H7_rows_far_into_a_pool_have_no_32_bit_numbers() -> None:
    stride = 1_039_680  # bytes of a block of 16 rows
    for block, offset in ((2065, 2_146_939_200), (2066, 2_147_978_880)):
        entries = np.array([block], np.uint32).tobytes()
        ((start, rows, _),), _ = walk(entries, 0, 16, 16, Limits(1, 99, 99, False))
        assert (start * (stride // 16), rows) == (offset, 16)
    entries = np.array([2**28, 2**28 + 1], np.uint32).tobytes()
    ((start, rows, _),), highest = walk(entries, 0, 32, 16, Limits(1, 99, 99, True))
    assert (start, rows, highest) == (2**32, 32, 2**28 + 1)
