"""Writes to rows that lie anywhere, against one assignment per row."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lazykv as lk
from lazykv import dtypes
from lazykv.errors import DTypeError, GraphError, RangeError, ShapeError

INVALID = 2**32 - 1


class Target:
    """A storage with known contents, bound to a placeholder, and rows to write to it."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "f32", place: str = "cpu") -> None:
        size = int(np.prod(shape))
        self.before = np.arange(1, size + 1).reshape(shape).astype(lk.dtype(dtype).numpy)
        self.store = lk.Storage.from_array(self.before, place)
        self.place = place
        self.g = lk.Graph()
        self.p = self.g.placeholder(shape, dtype)

    def source(self, n: int) -> Any:
        shape = (n, *self.before.shape[1:])
        return -np.arange(1, int(np.prod(shape)) + 1).reshape(shape).astype(self.before.dtype)

    def write(self, rows: Any, count: int | None = None, data: Any = None) -> Any:
        rows = np.asarray(rows, np.int64)
        data = self.source(len(rows)) if data is None else data
        g, n = self.g, None if count is None else self.g.const(np.int64(count))
        made = self.p.write_rows(g.const(data), g.const(rows), n)
        return lk.realize(made, {self.p: self.store}, device=self.place)

    def want(self, rows: Any, count: int | None = None) -> Any:
        out, data = self.before.copy(), self.source(len(rows))
        for i in range(len(rows) if count is None else count):
            out[rows[i]] = data[i]
        return out

    def check_untouched(self) -> None:
        assert self.store.to_numpy().tobytes() == self.before.tobytes()
        assert not self.store.torn
        if self.place == "cpu":  # a refusal of queued work is seen when the write counts as made
            assert self.store.version == 0


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
@pytest.mark.parametrize("shape", [(8,), (8, 3), (8, 2, 3), (8, 0)], ids=str)
@pytest.mark.parametrize("rows", [[], [5], [7, 0], [3, 4, 5], [7, 6, 1, 0, 4, 2, 3, 5]], ids=str)
def test_rows_land_where_they_should_in_place(
    rows: list[int], shape: tuple[int, ...], place: str
) -> None:
    for count in (None, *range(len(rows) + 1)):
        t = Target(shape, place=place)
        want = t.want(rows, count)
        assert np.array_equal(t.write(rows, count), want)
        assert np.array_equal(t.store.to_numpy(), want)
        assert t.store.version == 1


@given(st.data())
def test_any_rows_in_any_order(data: st.DataObject) -> None:
    extent = data.draw(st.integers(1, 20))
    rows = data.draw(st.permutations(range(extent)))[: data.draw(st.integers(0, extent))]
    count = data.draw(st.none() | st.integers(0, len(rows)))
    t = Target((extent, 2))
    assert np.array_equal(t.write(rows, count), t.want(rows, count))
    assert np.array_equal(t.store.to_numpy(), t.want(rows, count))


def test_what_follows_the_count_is_never_looked_at() -> None:
    for junk in (-1, 8, 3, 2**62, -(2**62)):
        t, rows = Target((8, 2)), [3, 6, junk, junk]
        data = t.source(4)
        data[2:] = np.nan
        assert np.array_equal(t.write(rows, 2, data), t.want(rows, 2))
        assert np.array_equal(t.store.to_numpy(), t.want(rows, 2))


def test_L9_a_full_width_write_stops_at_the_count() -> None:
    """A table row that held blocks 5, 6, 7 of two rows is reused for a sequence with block 2."""
    table, size = np.array([5, 6, 7], np.uint32), 2
    table[0], table[1:] = 2, INVALID
    rows = (table.astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1)
    t = Target((16, 3))
    t.write(rows, size)
    after = t.store.to_numpy()
    assert np.array_equal(after[4:6], t.source(6)[:2])
    after[4:6] = t.before[4:6]
    assert after.tobytes() == t.before.tobytes()


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
@pytest.mark.parametrize(
    ("rows", "count", "text"),
    [
        ([8], None, r"rows\[0\] = 8, need 0 <= row < 8"),
        ([-1], None, r"rows\[0\] = -1, need 0 <= row < 8"),
        ([2**40], None, r"rows\[0\] = 1099511627776, need 0 <= row < 8"),
        ([0, 1, 8], None, r"rows\[2\] = 8, need 0 <= row < 8"),
        ([0, -8, 1], 2, r"rows\[1\] = -8, need 0 <= row < 8"),
        ([4, 2, 4], None, r"rows\[0\] = rows\[2\] = 4, need each row at most once"),
        ([4, 2, 2, 0], 3, r"rows\[1\] = rows\[2\] = 2, need each row at most once"),
        ([0, 1], 3, "count 3, need 0 <= count <= 2"),
        ([0, 1], -1, "count -1, need 0 <= count <= 2"),
        ([], 1, "count 1, need 0 <= count <= 0"),
    ],
    ids=str,
)
def test_bad_rows_are_refused_before_the_first_byte_moves(
    rows: list[int], count: int | None, text: str, place: str
) -> None:
    t = Target((8, 2), place=place)
    with pytest.raises(RangeError, match=f"write_rows: got {text}"):
        t.write(rows, count)
    t.check_untouched()


def test_a_held_plan_reads_rows_and_count_anew() -> None:
    t = Target((6, 2))
    src, rows, count = (t.g.placeholder(*s) for s in (((3, 2), "f32"), ((3,), "i64"), ((), "i64")))
    plan = lk.plan(t.p.write_rows(src, rows, count), {t.p: t.store})
    want, data = t.before.copy(), t.source(3)
    for at, n in (([0, 2, 4], 3), ([5, 5, 5], 1), ([1, 3, 9], 2), ([9, 9, 9], 0)):
        plan.run({src: data, rows: np.array(at), count: np.int64(n)})
        want[at[:n]] = data[:n]
        assert np.array_equal(t.store.to_numpy(), want)
    with pytest.raises(RangeError):
        plan.run({src: data, rows: np.array([0, 0, 1]), count: np.int64(2)})
    assert np.array_equal(t.store.to_numpy(), want)


def test_rows_of_a_view_and_strided_sources() -> None:
    t = Target((2, 3, 4))
    data = -np.arange(8, dtype=np.float32).reshape(4, 2)
    rows = t.p.permute(1, 0, 2)  # rows of the middle axis, each [2, 4]
    src = t.g.const(data).permute(1, 0).unsqueeze(1).broadcast_to((2, 2, 4))
    made = rows.write_rows(src, t.g.const(np.array([2, 0])))
    lk.realize(made, {t.p: t.store})
    want = t.before.copy()
    for i, row in enumerate((2, 0)):
        want[:, row] = data.T[i]
    assert np.array_equal(t.store.to_numpy(), want)


def test_rows_of_the_destination_itself_are_read_before_they_are_overwritten() -> None:
    t = Target((4, 2))
    made = t.p.write_rows(t.p, t.g.const(np.array([1, 2, 3, 0])))
    assert np.array_equal(lk.realize(made, {t.p: t.store}), t.before[[3, 0, 1, 2]])


@pytest.mark.parametrize("dtype", [d.name for d in dtypes.ALL])
def test_every_dtype_is_written_bit_by_bit(dtype: str) -> None:
    data = np.array([1, 0, 1]).astype(lk.dtype(dtype).numpy)
    store = lk.Storage.allocate((5,), dtype)
    g = lk.Graph()
    p = g.placeholder((5,), dtype)
    made = p.zero_fill().write_rows(g.const(data), g.const(np.array([4, 0, 2])))
    lk.realize(made, {p: store})
    assert store.to_numpy().astype(float).tolist() == [0, 0, 1, 0, 1]


def test_operands_that_do_not_fit_are_refused_when_built() -> None:
    g = lk.Graph()
    dest, src, rows = (g.placeholder(*s) for s in (((8, 3), "f32"), ((2, 3), "f32"), ((2,), "i64")))
    scalar = g.placeholder((), "f32")
    for bad in (g.placeholder((2, 4), "f32"), g.placeholder((2,), "f32"), scalar):
        with pytest.raises(ShapeError, match="one shape of a row"):
            dest.write_rows(bad, rows)
    with pytest.raises(ShapeError, match="one shape of a row"):
        scalar.write_rows(scalar, rows)
    with pytest.raises(DTypeError, match="one dtype"):
        dest.write_rows(src.cast("f16"), rows)
    for bad in (rows.cast("i32"), g.placeholder((3,), "i64"), g.placeholder((2, 1), "i64")):
        with pytest.raises(ShapeError, match=r"need i64\[2\]"):
            dest.write_rows(src, bad)
    for bad in (rows, g.placeholder((), "i32")):
        with pytest.raises(ShapeError, match=r"count .*need i64\[\]"):
            dest.write_rows(src, rows, bad)
    with pytest.raises(GraphError, match="need a Tensor"):
        dest.write_rows(src, [0, 1])  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="broadcast view"):
        g.placeholder((1, 3), "f32").broadcast_to((8, 3)).write_rows(src, rows)


def test_the_body_says_what_the_kernel_does() -> None:
    for rows, count in (([5], None), ([5, 0, 3], None), ([5, 0, 9], 2)):
        t = Target((8, 2))
        extra = () if count is None else (t.g.const(np.int64(count)),)
        made = t.p.write_rows(t.g.const(t.source(len(rows))), t.g.const(np.array(rows)), *extra)
        numbers = (np.asarray(rows), *(np.asarray(count) for _ in extra))
        body = made.op.body(np, t.before, t.source(len(rows)), *numbers)
        assert np.array_equal(lk.realize(made, {t.p: t.store}), body)
        assert np.array_equal(body, t.want(rows, count))
