"""Writes: in place, to the last bit, and not one byte beside the slab."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lazykv.dtypes import dtype as find_dtype
from lazykv.dtypes import to_raw
from lazykv.graph import Graph, Tensor
from lazykv.spec import Shape
from lazykv.storage import Storage
from lazykv.symbols import Sym
from lazykv.testing import reference
from lazykv.testing.compare import check_bits
from lazykv.testing.golden import STORED, Array, patterns, random_of
from lazykv.testing.layouts import LAYOUTS, place, window
from lazykv.testing.target import Target

S = Sym("s", 0, 64)
R = Sym("r", 0, 64)


@dataclass(frozen=True)
class Write:
    """A write of `src` into `dest`; `scalars` are i64 operands (arrays of the given values)."""

    name: str
    dest: Shape
    src: Shape | None
    build: Callable[..., Tensor]
    want: Callable[..., None]
    scalars: tuple[Any, ...] = ()
    empty: tuple[Shape, Shape | None] | None = None
    env: Mapping[Sym, int] = field(default_factory=dict)

    def arrays(self) -> list[Array]:
        return [np.array(values, np.int64) for values in self.scalars]


def slab(name: str, dest: Shape, src: Shape, *starts: int, empty: Any = None) -> Write:
    return Write(
        name, dest, src,
        lambda d, s: d.write_slice(s, [(a, a + n) for a, n in zip(starts, s.shape, strict=True)]),
        lambda d, s: reference.write_slice(d, s, starts), empty=empty,
    )  # fmt: skip


def at_symbols(name: str, dest: Shape, src: Shape, starts: list[Any], *values: int) -> Write:
    return Write(
        name, dest, src,
        lambda d, s: d.write_slice(s, [(a, a + n) for a, n in zip(starts, s.shape, strict=True)]),
        lambda d, s: reference.write_slice(d, s, values), env={S: 2, R: 1},
    )  # fmt: skip


def at_offset(name: str, dest: Shape, src: Shape, axis: int, offset: int) -> Write:
    empty = tuple(tuple(0 if a == (axis + 1) % 3 else n for a, n in enumerate(s))
                  for s in (dest, src))  # fmt: skip
    return Write(
        name, dest, src, lambda d, s, o: d.write_slice_at(s, axis, o),
        lambda d, s, o: reference.write_slice_at(d, s, axis, int(o)), (offset,), empty,  # type: ignore[arg-type]
    )  # fmt: skip


def rotating(name: str, rows: int, position: int, modulus: int, sinks: int = 0) -> Write:
    return Write(
        name, (2, 7, 3), (2, rows, 3),
        lambda d, s, p: d.write_slice_rotating(s, 1, p, modulus, sinks),
        lambda d, s, p: reference.write_slice_rotating(d, s, 1, int(p), modulus, sinks),
        (position,), ((0, 7, 3), (0, rows, 3)),
    )  # fmt: skip


def scattered(name: str, rows: list[int], count: int | None = None) -> Write:
    scalars = (rows,) if count is None else (rows, count)
    return Write(
        name, (6, 2, 3), (len(rows), 2, 3), lambda d, s, r, *c: d.write_rows(s, r, *c),
        lambda d, s, r, *c: reference.write_rows(d, s, r, *map(int, c)), scalars,
        ((6, 0, 3), (len(rows), 0, 3)),
    )  # fmt: skip


def fill_zeros(d: Array) -> None:
    d[...] = 0


WRITES = [
    slab("slab", (2, 6, 3), (2, 2, 3), 0, 3, 0, empty=((2, 6, 0), (2, 2, 0))),
    slab("slab_at_start", (2, 6, 3), (2, 1, 3), 0, 0, 0),
    slab("slab_at_end", (2, 6, 3), (2, 2, 3), 0, 4, 0),
    slab("slab_inside", (4, 6, 5), (2, 3, 2), 1, 2, 1),
    slab("slab_whole", (2, 4, 3), (2, 4, 3), 0, 0, 0),
    slab("slab_of_nothing", (2, 6, 3), (2, 0, 3), 0, 6, 0),
    slab("slab_rank_1", (11,), (4,), 5),
    slab("slab_rank_0", (), ()),
    at_symbols("slab_at_symbol", (2, 6, 3), (2, 2, 3), [0, S + 1, 0], 0, 3, 0),
    at_symbols("row_at_symbol", (1, 2, 6, 4), (1, 2, 1, 4), [0, 0, S, 0], 0, 0, 2, 0),
    at_symbols("first_axis_at_symbol", (6, 3), (1, 3), [S, 0], 2, 0),
    at_symbols("last_axis_at_symbol", (3, 6), (3, 2), [0, S + 2], 0, 4),
    at_symbols("slab_at_two_symbols", (4, 6, 3), (2, 2, 3), [R, S, 0], 1, 2, 0),
    *(at_offset(f"at_offset_axis{axis}", (4, 5, 6), src, axis, 2)
      for axis, src in enumerate([(2, 5, 6), (4, 2, 6), (4, 5, 2)])),
    at_offset("at_offset_0", (2, 5, 3), (2, 2, 3), 1, 0),
    at_offset("at_offset_end", (2, 5, 3), (2, 2, 3), 1, 3),
    rotating("rotating", 2, 3, 6),
    rotating("rotating_row", 1, 13, 7),
    rotating("rotating_wraps", 3, 12, 7),
    rotating("rotating_far", 3, 700_000_005, 7),
    rotating("rotating_longer_than_ring", 9, 2, 4),
    rotating("rotating_sinks", 3, 0, 6, 2),
    rotating("rotating_sinks_wraps", 3, 10, 6, 2),
    rotating("rotating_sinks_longer_than_ring", 11, 1, 6, 2),
    scattered("rows", [4, 0, 3]),
    scattered("rows_one", [5]),
    scattered("rows_none", []),
    scattered("rows_counted", [4, 0, 3], 2),
    scattered("rows_counted_none", [4, 4, 99], 0),
    scattered("rows_counted_all", [5, 1], 2),
    scattered("rows_unused_are_not_looked_at", [1, -7, 1], 1),
    Write("zero_fill", (2, 3, 4), None, lambda d: d.zero_fill(), fill_zeros,
          empty=((2, 0, 4), None)),
]  # fmt: skip

PARAMS = {
    f"{w.name}-{dt}-{layout}": (w, dt, layout)
    for w in WRITES
    for dt in STORED
    for layout in LAYOUTS
    if (layout != "empty" or w.empty is not None) and (layout != "broadcast" or w.src)
}


@pytest.mark.parametrize("param", PARAMS.values(), ids=PARAMS.keys())
def test_write(target: Target, param: tuple[Write, str, str]) -> None:
    """The destination's memory and the result; `broadcast` is a layout of the source alone."""
    w, name, layout = param
    target.need(name, *["i64"] * bool(w.scalars))
    dt, rng = find_dtype(name), random_of(w.name, name)
    shapes = w.empty if layout == "empty" and w.empty is not None else (w.dest, w.src)
    plain = "contiguous" if layout == "broadcast" else layout
    dest = place(patterns(rng, shapes[0], dt), plain)
    sources = [] if shapes[1] is None else [place(patterns(rng, shapes[1], dt), layout, axis=1)]
    numbers = w.arrays()
    g, store = Graph(), target.storage(dest.base)
    base = g.placeholder(dest.base.shape, name, "dest")
    bindings: dict[Tensor, Storage] = {base: store}
    operands = []
    for n, p in enumerate([*sources, *(place(a, plain) for a in numbers)]):
        t = g.placeholder(p.base.shape, p.base.dtype, f"operand{n}")
        bindings[t] = target.storage(p.base)
        operands.append(p.view(t))
    got = target.run(w.build(dest.view(base), *operands), bindings, w.env)
    want = to_raw(dest.base).copy()
    slab_ = dest.look(want)
    w.want(slab_, *(to_raw(p.value) for p in sources), *numbers)
    what = f"{w.name} of {name}{list(w.src or ())} into {list(w.dest)}, {layout}"
    check_bits(f"{what}: the destination's memory", to_raw(store.to_numpy()), want)
    check_bits(f"{what}: the result", to_raw(got), np.array(slab_, order="C"))


# Views of one memory


OVERLAPS = {
    w.name: w
    for w in WRITES
    if w.name
    in ("slab_rank_1", "slab_inside", "slab_at_symbol", "at_offset_axis0", "at_offset_axis1",
        "rotating_wraps", "rows", "rows_counted")
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("way", ["up", "down", "whole"])
@pytest.mark.parametrize("w", OVERLAPS.values(), ids=OVERLAPS.keys())
def test_a_source_in_the_memory_that_is_written(
    target: Target, w: Write, way: str, name: str
) -> None:
    """The source is read as it was, whether it lies half before the first element that is written,
    half behind it, or begins at it."""
    target.need(name, *["i64"] * bool(w.scalars))
    assert w.src is not None, "a write without a source overlaps nothing"
    dt, size, numbers = find_dtype(name), math.prod(w.src), w.arrays()
    marks = np.zeros(w.dest, np.int64)
    w.want(marks, np.ones(w.src, np.int64), *numbers)
    begin = size + int(marks.argmax()) + {"up": -(size // 2), "down": size // 2, "whole": 0}[way]
    line = patterns(random_of(w.name, way, name), (2 * size + marks.size,), dt)
    dest, src = window(line, size, w.dest), window(line, begin, w.src)
    g, store = Graph(), target.storage(line)
    x = g.placeholder(line.shape, name, "line")
    bindings: dict[Tensor, Any] = {x: store}
    operands = [g.placeholder(a.shape, "i64") for a in numbers]
    bindings |= {t: target.storage(a) for t, a in zip(operands, numbers, strict=True)}
    got = target.run(w.build(dest.view(x), src.view(x), *operands), bindings, w.env)
    want = to_raw(line).copy()
    slab_ = dest.look(want)
    w.want(slab_, to_raw(src.value), *numbers)
    what = f"{w.name} of {name}, {way} in one memory"
    check_bits(f"{what}: the memory", to_raw(store.to_numpy()), want)
    check_bits(f"{what}: the result", to_raw(got), np.array(slab_))


def setup(target: Target, *shape: int) -> tuple[Graph, Tensor, Storage, Array]:
    target.need("f32")
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    g = Graph()
    return g, g.placeholder(shape, "f32", "x"), target.storage(data), data.copy()


def test_the_later_of_two_overlapping_writes_wins(target: Target) -> None:
    g, x, store, want = setup(target, 8, 2)
    a, b = (g.const(target.storage(np.full((4, 2), n, np.float32))) for n in (-1, -2))
    both = x.at[0:4].set(a).slice(0, 2, 6).at[0:4].set(b)
    target.run(both, {x: store})
    want[0:4], want[2:6] = -1, -2
    check_bits("two writes that overlap", store.to_numpy(), want)


def test_of_two_writes_on_one_version_the_last_built_lands(target: Target) -> None:
    g, x, store, data = setup(target, 6)
    a, b = (g.const(target.storage(np.full((3,), n, np.float32))) for n in (-1, -2))
    first, second = x.at[0:3].set(a), x.at[1:4].set(b)
    got = target.run([first, second], {x: store})
    wants = [data.copy(), data.copy()]
    wants[0][0:3], wants[1][1:4] = -1, -2
    check_bits("the earlier sibling", got[0], wants[0])
    check_bits("the later sibling", got[1], wants[1])
    check_bits("the memory", store.to_numpy(), wants[1])


@pytest.mark.parametrize("shift", [1, -1])
def test_rows_move_within_one_memory(target: Target, shift: int) -> None:
    """Source and destination overlap; the source is read as it was."""
    _, x, store, data = setup(target, 6, 2)
    low = max(0, shift)
    target.run(x.at[low : low + 5].set(x.slice(0, max(0, -shift), 5)), {x: store})
    want = data.copy()
    want[low : low + 5] = data[max(0, -shift) : max(0, -shift) + 5]
    check_bits(f"rows moved by {shift}", store.to_numpy(), want)


def test_a_reader_sees_the_bytes_from_before_the_write(target: Target) -> None:
    g, x, store, data = setup(target, 4, 3)
    row = g.const(target.storage(np.full((1, 3), 9, np.float32)))
    written = x.at[1:2].set(row)
    before, after = target.run([x + 0.0, written + 0.0], {x: store})
    check_bits("the old value", before, data)
    data[1] = 9
    check_bits("the new value", after, data)


def test_a_transposed_view_writes_its_base(target: Target) -> None:
    g, x, store, want = setup(target, 3, 4)
    column = g.const(target.storage(np.array([[7, 8, 9]], np.float32)))
    target.run(x.transpose(0, 1).at[2:3].set(column), {x: store})
    want[:, 2] = [7, 8, 9]
    check_bits("a column", store.to_numpy(), want)


def test_one_plan_writes_at_every_position(target: Target) -> None:
    """What moves is data and symbols: the same calls, other places."""
    target.need("f32", "i64")
    g, n = Graph(), Sym("n", 0, 5)
    x, y = (g.placeholder((6, 2), "f32", name) for name in "xy")
    row, at = g.placeholder((1, 2), "f32"), g.placeholder((), "i64")
    stores = {t: target.storage(np.zeros((6, 2), np.float32)) for t in (x, y)}
    outs = [x.at[n : n + 1].set(row), y.write_slice_at(row, 0, at)]
    want = np.zeros((6, 2), np.float32)
    for step, where in enumerate((0, 5, 2, 3, 2)):
        data = np.full((1, 2), step + 1, np.float32)
        target.run(outs, {**stores, row: data, at: np.array(where)}, {n: where})
        want[where] = step + 1
        for t in (x, y):
            check_bits(f"step {step} at {where}", stores[t].to_numpy(), want)
