"""The kernels of moves and writes against the ops' bodies, bit for bit."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from cuda_cpu import Array, Memory, module, needs_compiler

from lazykv.backends import cuda_kernels as ck
from lazykv.ops.write import WriteSliceRotating

pytestmark = needs_compiler

RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
BYTES = (1, 2, 4, 8, 16)
MOVES = ("copy", "write_slice_at", "write_slice_rotating", "write_rows_check", "write_rows", "take")
REFUSED = 1


def moves(element_bytes: int) -> Any:
    return module(*MOVES, BYTES=element_bytes)


def noise(rng: np.random.Generator, shape: tuple[int, ...], itemsize: int) -> Array:
    return rng.integers(0, 1 << 8 * itemsize, shape, RAW[itemsize])


def steps(a: Array) -> tuple[int, ...]:
    return tuple(s // a.itemsize for s in a.strides)


def move_between(dest: Array, src: Array, **options: Any) -> ck.Move:
    """The move from all of `src` into as much of `dest`, as a backend makes it."""
    made = ck.move_of(
        src.shape, steps(dest), steps(src), src.itemsize,
        addresses=(dest.ctypes.data, src.ctypes.data), **options,
    )  # fmt: skip
    assert made is not None
    return made


def copy(dest: Array, src: Array, start: int = 0, starts: tuple[int, ...] = ()) -> ck.Move:
    move = move_between(dest, src, starts=starts)
    assert start % move.scale == 0
    launch = ck.launch_of("copy", size=move.size)
    moves(move.element_bytes).launch("copy", launch, dest, src, start // move.scale, move.walk)
    return move


SHAPES = [
    (), (1,), (7,), (255,), (256,), (257,), (0,), (3, 0, 2), (33, 5), (4, 3, 2), (2, 3, 1, 5),
    (2, 2, 3, 2, 5), (2, 3, 2, 2, 3, 4), (1, 1, 1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("itemsize", RAW)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_copy_of_any_view_is_exact(
    memory: Memory, itemsize: int, shape: tuple[int, ...]
) -> None:  # fmt: skip
    rng = np.random.default_rng(1)
    for axes in list(itertools.permutations(range(len(shape))))[::7]:
        base = memory.input(noise(rng, tuple(n + 2 for n in shape), itemsize))
        view = base[(*(slice(1, 1 + n) for n in shape), ...)].transpose(axes)
        wanted = noise(rng, tuple(n + 1 for n in view.shape), itemsize)
        dest = memory.output(wanted)
        inner = (*(slice(0, n) for n in view.shape), ...)
        wanted[inner] = view
        copy(dest[inner], view)
        np.testing.assert_array_equal(dest, wanted)


def test_wide_elements_carry_contiguous_rows(memory: Memory) -> None:
    rng = np.random.default_rng(2)
    src = memory.input(noise(rng, (5, 3, 64), 2))
    wide = memory.output(noise(rng, (5, 4, 64), 2))
    move = copy(wide[:, 1:], src)
    assert (move.element_bytes, int(move.walk["rank"])) == (16, 2)  # axes merge where they can
    np.testing.assert_array_equal(wide[:, 1:], src)
    odd = memory.output(noise(rng, (5 * 3 * 64 + 1,), 2))
    assert copy(odd[1:].reshape(5, 3, 64), src).element_bytes == 2  # the address is not aligned
    np.testing.assert_array_equal(odd[1:], src.reshape(-1))


def test_a_broadcast_source_and_a_start_by_value(memory: Memory) -> None:
    rng = np.random.default_rng(3)
    row = memory.input(noise(rng, (1, 8), 4))
    wanted = noise(rng, (6, 8), 4)
    dest = memory.output(wanted)
    move = copy(dest[:2], np.broadcast_to(row, (2, 8)), start=3 * 8, starts=(8,))
    wanted[3:5] = row
    assert move.scale == 4
    np.testing.assert_array_equal(dest, wanted)


def test_more_than_six_axes_have_no_walk() -> None:
    strides = tuple(5**i for i in range(7))
    assert ck.move_of((2,) * 7, strides, strides, 4) is None
    merging = tuple(2**i for i in reversed(range(7)))
    made = ck.move_of((2,) * 7, merging, merging, 4)
    assert made is not None
    assert made.element_bytes == 16
    assert made.size == 32


def error_word(memory: Memory) -> Array:
    return memory.output(np.zeros((), np.int32))


def scalar(memory: Memory, value: int) -> Array:
    return memory.input(np.array(value, np.int64))


def by_row(dest: Array, src: Array, axis: int) -> tuple[Array, Array, ck.Move]:
    """Both sides with the axis first, and the move of the source's rows."""
    dest, src = np.moveaxis(dest, axis, 0), np.moveaxis(src, axis, 0)
    return dest, src, move_between(dest, src, by_row=True)


@pytest.mark.parametrize("itemsize", RAW)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    ("rows", "offset", "fits"),
    [(2, 0, True), (2, 5, True), (7, 0, True), (1, 6, True), (0, 7, True), (2, 6, False),
     (1, 7, False), (2, -1, False), (0, 8, False), (2, 2**62, False), (2, -(2**63), False)],
)  # fmt: skip
def test_write_slice_at(
    memory: Memory, itemsize: int, axis: int, rows: int, offset: int, fits: bool
) -> None:
    rng = np.random.default_rng(4)
    shape = [3, 4, 5]
    shape[axis] = 7
    wanted = noise(rng, tuple(shape), itemsize)
    dest, error = memory.output(wanted), error_word(memory)
    shape[axis] = rows
    src = memory.input(noise(rng, tuple(shape), itemsize))
    if fits:
        np.moveaxis(wanted, axis, 0)[offset : offset + rows] = np.moveaxis(src, axis, 0)
    to, source, move = by_row(dest, src, axis)
    moves(move.element_bytes).launch(
        "write_slice_at", ck.launch_of("write_slice_at", size=move.size), to, source,
        scalar(memory, offset), len(to), error, move.walk,
    )  # fmt: skip
    np.testing.assert_array_equal(dest, wanted)
    assert error == (0 if fits else REFUSED)


def test_a_refusal_stays_behind_another_launch(memory: Memory) -> None:
    dest, src = memory.output(np.zeros(4, np.uint8)), memory.input(np.ones(2, np.uint8))
    error = error_word(memory)
    _, _, move = by_row(dest, src, 0)
    launch = ck.launch_of("write_slice_at", size=move.size)
    for offset, wanted in ((3, 0), (1, 2)):
        moves(1).launch("write_slice_at", launch, dest, src, scalar(memory, offset), 4, error,
                        move.walk)  # fmt: skip
        assert error == REFUSED
        assert dest.sum() == wanted


@pytest.mark.parametrize(("modulus", "sinks"), [(5, 0), (5, 2), (1, 0), (6, 5), (8, 3)])
@pytest.mark.parametrize("axis", [0, 1])
def test_write_slice_rotating(memory: Memory, modulus: int, sinks: int, axis: int) -> None:
    rng, op = np.random.default_rng(5), WriteSliceRotating(axis, modulus, sinks)
    shape = [6, 3, 4]
    shape[axis] = 9
    for position, rows in itertools.product((0, 1, 2, 4, 5, 7, 23, 10**12), (0, 1, 3, 8, 19)):
        before = noise(rng, tuple(shape), 2)
        source_shape = tuple(rows if a == axis else n for a, n in enumerate(shape))
        src, dest = memory.input(noise(rng, source_shape, 2)), memory.output(before)
        error = error_word(memory)
        to, source, move = by_row(dest, src, axis)
        moves(move.element_bytes).launch(
            "write_slice_rotating", ck.launch_of("write_slice_rotating", size=move.size), to,
            source, scalar(memory, position), modulus, sinks, error, move.walk,
        )  # fmt: skip
        np.testing.assert_array_equal(dest, op.body(np, before, src, np.int64(position)))
        assert error == 0


@pytest.mark.parametrize("position", [-1, -(2**63), 2**63 - 2])
def test_a_position_that_cannot_be_is_refused(memory: Memory, position: int) -> None:
    before = np.arange(24, dtype=np.uint32).reshape(6, 4)
    dest, src = memory.output(before), memory.input(before[:3] + 100)
    error = error_word(memory)
    move = move_between(dest, src, by_row=True)
    moves(move.element_bytes).launch(
        "write_slice_rotating", ck.launch_of("write_slice_rotating", size=move.size), dest, src,
        scalar(memory, position), 5, 0, error, move.walk,
    )  # fmt: skip
    np.testing.assert_array_equal(dest, before)
    assert error == REFUSED


def write_rows(
    memory: Memory, dest: Array, src: Array, rows: list[int], count: int | None, flags: int
) -> int:
    """Both launches; the error word afterwards."""
    n, error = len(rows), error_word(memory)
    numbers = memory.input(np.array(rows, np.int64))
    usable = memory.output(np.array(-99, np.int64))
    owner = memory.output(np.full(len(dest), -99, np.int32))
    counted = None if count is None else scalar(memory, count)
    move = move_between(dest, src, by_row=True)
    module_ = moves(move.element_bytes)
    module_.launch(
        "write_rows_check", ck.launch_of("write_rows_check"), usable, owner, numbers, n, counted,
        len(dest), error, flags=flags,
    )  # fmt: skip
    launch = ck.launch_of("write_rows", size=move.size)
    module_.launch("write_rows", launch, dest, src, numbers, usable, move.walk, flags=flags)
    return int(error)


@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize("itemsize", RAW)
@pytest.mark.parametrize(
    ("rows", "count", "fits"),
    [([3, 0, 8], None, True), ([3, 0, 8], 2, True), ([3, 3, 9], 1, True), ([3, -1], 0, True),
     ([], None, True), ([8], None, True), ([3, 0, 9], None, False), ([3, -1], None, False),
     ([3, 0, 3], None, False), ([3, 0], 3, False), ([3, 0], -1, False), ([2, 1, 2], 3, False),
     ([1, 2, 2], None, False),
     ([2**40], None, False)],
)  # fmt: skip
def test_write_rows(
    memory: Memory, itemsize: int, rows: list[int], count: int | None, fits: bool, flags: int
) -> None:
    rng = np.random.default_rng(6)
    wanted = noise(rng, (9, 2, 6), itemsize)
    dest, src = memory.output(wanted), memory.input(noise(rng, (len(rows), 2, 6), itemsize))
    used = rows if count is None else rows[:count]
    error = write_rows(memory, dest, src, rows, count, flags)
    if fits:
        wanted[used] = src[: len(used)]
    np.testing.assert_array_equal(dest, wanted)
    assert error == (0 if fits else REFUSED)


@pytest.mark.parametrize("n", [255, 256, 257, 600])
@pytest.mark.parametrize("flags", [0, 1])
def test_more_row_numbers_than_threads(memory: Memory, n: int, flags: int) -> None:
    rng = np.random.default_rng(7)
    rows = rng.permutation(700)[:n].tolist()
    wanted = noise(rng, (700,), 4)
    dest, src = memory.output(wanted), memory.input(noise(rng, (n,), 4))
    twice = [*rows[:-1], rows[0]]
    assert write_rows(memory, dest, src, twice, None, flags) == REFUSED
    np.testing.assert_array_equal(dest, wanted)
    assert write_rows(memory, dest, src, rows, None, flags) == 0
    wanted[rows] = src
    np.testing.assert_array_equal(dest, wanted)


@pytest.mark.parametrize("dtype", ck.ID_TYPES)
@pytest.mark.parametrize("itemsize", RAW)
@pytest.mark.parametrize("shape", [(5, 3, 4), (5,), (5, 8), (5, 0)], ids=str)
def test_take(memory: Memory, dtype: str, itemsize: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(8)
    raw = {"i32": np.int32, "u32": np.uint32, "i64": np.int64}[dtype]
    table = memory.input(noise(rng, shape, itemsize))
    outside = [] if dtype == "u32" else [-1]
    for ids in ([0, 4, 4, 2], [], [3] * 70, [1, 5, 0], [*outside, 2], [2**31 - 1]):
        numbers, error = memory.input(np.array(ids, raw)), error_word(memory)
        bad = [not 0 <= i < 5 for i in ids]
        wanted = table[[0 if b else i for i, b in zip(ids, bad, strict=True)]]
        wanted[bad] = 0
        out = memory.output(noise(rng, wanted.shape, itemsize))
        move = ck.move_of(
            out.shape, steps(out), steps(table), itemsize, by_row=True,
            addresses=(out.ctypes.data, table.ctypes.data),
        )  # fmt: skip
        assert move is not None
        moves(move.element_bytes).launch(
            "take", ck.launch_of("take", size=move.size), out, table, numbers, ck.ID_TYPES[dtype],
            5, error, move.walk,
        )  # fmt: skip
        np.testing.assert_array_equal(out, wanted)
        assert error == (REFUSED if any(bad) and math.prod(wanted.shape) else 0)


def test_take_from_strided_rows(memory: Memory) -> None:
    rng = np.random.default_rng(9)
    base = memory.input(noise(rng, (4, 6, 10), 2))
    table = base[:, ::2, 1:7].transpose(1, 0, 2)  # [3, 4, 6]
    numbers = memory.input(np.array([2, 0], np.int64))
    out = memory.output(noise(rng, (2, 4, 6), 2))
    move = ck.move_of(
        out.shape, steps(out), steps(table), 2, by_row=True,
        addresses=(out.ctypes.data, table.ctypes.data),
    )  # fmt: skip
    assert move is not None
    error = error_word(memory)
    moves(move.element_bytes).launch(
        "take", ck.launch_of("take", size=move.size), out, table, numbers, 2, 3, error,
        move.walk,
    )  # fmt: skip
    np.testing.assert_array_equal(out, table[[2, 0]])


def test_threads_stride_over_walks_longer_than_the_grid(memory: Memory) -> None:
    src = memory.input(np.arange(1000, dtype=np.uint32)[::-1])
    dest = memory.output(np.zeros(1000, np.uint32))
    move = ck.move_of((1000,), (1,), (1,), 4)
    assert move is not None
    few = ck.Launch((2, 1, 1), (32, 1, 1))
    moves(move.element_bytes).launch("copy", few, dest, src, 0, move.walk)
    np.testing.assert_array_equal(dest, src)
