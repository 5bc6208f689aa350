"""Golden cases: one op on given operands, held against its reference in every layout: those of
`layouts.py`, and `overlapping`, where operands share elements of one storage (see `Overlap`)."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lazykv.dtypes import DType, to_raw
from lazykv.dtypes import dtype as find_dtype
from lazykv.graph import Graph, Tensor
from lazykv.spec import Shape
from lazykv.symbols import Sym
from lazykv.testing.compare import check_bits, check_close
from lazykv.testing.layouts import LAYOUTS, Placed, place, window
from lazykv.testing.target import Target

Array = NDArray[Any]
Maker: TypeAlias = Callable[[np.random.Generator, Shape, DType], Array]

FLOATS = ("f64", "f32", "f16", "bf16")
INTEGERS = ("i8", "u8", "i32", "u32", "i64")
STORED = (*FLOATS, *INTEGERS, "bool", "f8_e4m3", "f8_e5m2")
OVERLAPPING = "overlapping"


# Values


def numbers(rng: np.random.Generator, shape: Shape, dt: DType) -> Array:
    """Floats of order 1; small integers, so that products of two fit in every dtype."""
    if dt.is_float:
        return rng.standard_normal(shape).astype(dt.numpy)
    low = 0 if dt.name.startswith("u") else -9
    return rng.integers(low, 10, shape).astype(dt.numpy)


def positive(rng: np.random.Generator, shape: Shape, dt: DType) -> Array:
    """Floats in 0.5..2; integers in 10..14, above all that `numbers` gives."""
    if dt.is_float:
        return (0.5 + 1.5 * rng.random(shape)).astype(dt.numpy)
    return rng.integers(10, 15, shape).astype(dt.numpy)


def falling(rng: np.random.Generator, shape: Shape, dt: DType) -> Array:
    """Positive numbers, the largest first: what lies further back is never larger."""
    found = 0.5 + 1.5 * rng.random(shape) if dt.is_float else rng.integers(1, 12, shape)
    return np.asarray(-np.sort(-found.reshape(-1))).reshape(shape).astype(dt.numpy)


def few(rng: np.random.Generator, shape: Shape, dt: DType) -> Array:
    """Whole numbers in 0..4, so that equal ones meet."""
    return rng.integers(0, 5, shape).astype(dt.numpy)


def patterns(rng: np.random.Generator, shape: Shape, dt: DType) -> Array:
    """Any bits, NaN of every kind included."""
    if dt.name == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    size = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(rng.bytes(size * dt.itemsize), dt.numpy).reshape(shape).copy()


def given(values: Any) -> Maker:
    """These values; of a shape with an extent of 0 there are none."""
    return lambda rng, shape, dt: np.asarray(np.zeros(shape) if 0 in shape else values).astype(
        dt.numpy
    )


def live(rows: int, axis: int = 2) -> Maker:
    """Floats of order 1, and NaN in rows that nobody may compute with."""

    def make(rng: np.random.Generator, shape: Shape, dt: DType) -> Array:
        out = numbers(rng, shape, dt)
        np.moveaxis(out, axis, 0)[rows:] = np.nan
        return out

    return make


FREE: tuple[Maker, ...] = (numbers, positive, patterns)
"""Makers whose values may stand anywhere, in arrays of any shape."""


# Cases


@dataclass(frozen=True)
class Operand:
    """One operand: `dtype` is the case's own if None. One that is `plain` has no broadcast form,
    because equal elements would break a rule of the op."""

    shape: Shape
    dtype: str | None = None
    make: Maker = numbers
    plain: bool = False


@dataclass(frozen=True)
class Case:
    """An op, its operands and its reference.

    `want` gets what the operands hold: floats as float64, integers as int64, and raw bits if the op
    `moves`; then the result is compared bit for bit. `empty` are the operands' shapes with an
    extent of 0 (None: the op has no such form). `shared` makes what operands of the case's dtype
    hold if they overlap and their own values would break a rule of the op.
    """

    name: str
    build: Callable[..., Tensor]
    want: Callable[..., Any]
    operands: tuple[Operand, ...]
    dtypes: tuple[str, ...] = FLOATS
    empty: tuple[Shape, ...] | None = None
    moves: bool = False
    env: Mapping[Sym, int] = field(default_factory=dict)
    shared: Maker | None = None

    def layouts(self) -> tuple[str, ...]:
        plain = LAYOUTS if self.empty is not None else LAYOUTS[:-1]
        return plain if overlap_of(self) is None else (*plain, OVERLAPPING)


Param: TypeAlias = tuple[Case, str, str]


def every(cases: Sequence[Case]) -> dict[str, Param]:
    """All combinations of cases, their dtypes and their layouts, by id."""
    found: dict[str, Param] = {}
    for case in cases:
        for dt in case.dtypes:
            for layout in case.layouts():
                found[f"{case.name}-{dt}-{layout}"] = (case, dt, layout)
    assert len(found) == sum(len(c.dtypes) * len(c.layouts()) for c in cases), "names repeat"
    return found


# Overlaps


@dataclass(frozen=True, slots=True)
class Overlap:
    """Operands that lie in one storage, as windows of one line of elements.

    Free ones (their maker is in `FREE`, or it is the case's `shared`) each begin halfway in the one
    before. Others can only be one and the same window: operands of one maker and shape, such as K
    and V. Where there is just one free operand the op runs twice in one plan, on two windows of
    which the second begins halfway in the first. A case with no free operand and no two of one
    maker has no such layout.
    """

    operands: tuple[int, ...]
    make: Maker
    same: bool = False

    def windows(self, shapes: Sequence[Shape], rng: np.random.Generator, dt: DType) -> list[Placed]:
        """A window for each of the shapes."""
        sizes = [math.prod(shape) for shape in shapes]
        starts = [0 if self.same else sum(n // 2 for n in sizes[:k]) for k in range(len(sizes))]
        total = max(start + n for start, n in zip(starts, sizes, strict=True))
        base = self.make(rng, shapes[0] if self.same else (total,), dt).reshape(-1)
        return [window(base, start, shape) for start, shape in zip(starts, shapes, strict=True)]


def overlap_of(case: Case) -> Overlap | None:
    """What overlaps: the largest group of operands that can; None if there is none."""
    free: dict[tuple[str | None, Maker], list[int]] = {}
    same: dict[tuple[str | None, Maker, Shape], list[int]] = {}
    for n, o in enumerate(case.operands):
        make = o.make if case.shared is None or o.dtype else case.shared
        if make is case.shared or make in FREE:
            free.setdefault((o.dtype, make), []).append(n)
        else:
            same.setdefault((o.dtype, make, o.shape), []).append(n)
    found = [Overlap(tuple(ns), make) for (_, make), ns in free.items()]
    found += [Overlap(tuple(ns), m, True) for (_, m, _), ns in same.items() if len(ns) > 1]
    return max(found, key=lambda o: len(o.operands), default=None)


# Running


def random_of(*names: str) -> np.random.Generator:
    """The same numbers in every run and process."""
    return np.random.default_rng(zlib.crc32("/".join(names).encode()))


def placed_operands(case: Case, dtype: str, layout: str) -> list[list[Placed]]:
    """The operands of every run of the op."""
    rng = random_of(case.name, dtype)
    overlap = overlap_of(case) if layout == OVERLAPPING else None
    out = []
    for n, o in enumerate(case.operands):
        shape = case.empty[n] if layout == "empty" and case.empty is not None else o.shape
        value = o.make(rng, shape, find_dtype(o.dtype or dtype))
        alone = overlap is not None or (layout == "broadcast" and o.plain)
        out.append(place(value, "contiguous" if alone else layout, axis=n))
    return [out] if overlap is None else _overlapped(case, dtype, out, overlap)


def _overlapped(
    case: Case, dtype: str, operands: Sequence[Placed], overlap: Overlap
) -> list[list[Placed]]:
    """The operands with windows of one line in place of those that overlap."""
    members = [case.operands[n] for n in overlap.operands]
    shapes = [o.shape for o in members] * (2 if len(members) == 1 else 1)
    dt = find_dtype(members[0].dtype or dtype)
    windows = overlap.windows(shapes, random_of(case.name, dtype, OVERLAPPING), dt)
    out = []
    for k in range(0, len(windows), len(members)):
        at = dict(zip(overlap.operands, windows[k : k + len(members)], strict=True))
        out.append([at.get(n, p) for n, p in enumerate(operands)])
    return out


def plain_values(value: Array, moves: bool) -> Array:
    """What a reference gets."""
    dt = find_dtype(value.dtype)
    if moves:
        return to_raw(value)
    if dt.is_float:
        return value.astype(np.float64)
    return value if dt.name == "bool" else value.astype(np.int64)


def check_case(target: Target, case: Case, dtype: str, layout: str) -> None:
    """Run one case on the target and compare; operands must be as they were."""
    target.need(dtype, *(o.dtype for o in case.operands if o.dtype))
    runs, g = placed_operands(case, dtype, layout), Graph()
    leaves: list[tuple[Array, Tensor]] = []
    outs = []
    for operands in runs:
        tensors = [p.view(_leaf(g, leaves, p.base)) for p in operands]
        outs.append(case.build(*tensors) if tensors else case.build(g))
    target.need(*(t.dtype.name for t in outs[0].graph))
    bindings = {t: target.storage(base) for base, t in leaves}
    results = target.run(outs, bindings, case.env)
    what = f"{case.name} on {dtype}, {layout} ({outs[0].op.name} of {_specs(runs[0])})"
    for operands, out, got in zip(runs, outs, results, strict=True):
        want = np.asarray(case.want(*(plain_values(p.value, case.moves) for p in operands)))
        assert got.dtype == out.dtype.numpy, f"{what}: got {got.dtype}, need {out.dtype.numpy}"
        if case.moves:
            check_bits(what, to_raw(got), want)
        else:
            check_close(what, got, want)
    for n, (base, t) in enumerate(leaves):
        check_bits(f"{what}: storage {n} afterwards", bindings[t].to_numpy(), base)


def _leaf(g: Graph, leaves: list[tuple[Array, Tensor]], base: Array) -> Tensor:
    """The placeholder of a storage that holds `base`: the one there is, or a new one."""
    for known, t in leaves:
        if known is base:
            return t
    leaves.append((base, g.placeholder(base.shape, base.dtype, f"operand{len(leaves)}")))
    return leaves[-1][1]


def _specs(operands: Sequence[Placed]) -> str:
    parts: Iterator[str] = (
        f"{find_dtype(p.value.dtype).name}{list(p.value.shape)}" for p in operands
    )
    return ", ".join(parts)
