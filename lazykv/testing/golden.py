"""Golden cases: one op on given operands, held against its reference in every layout.

A layout says how each operand lies in memory: `contiguous`; `sliced` out of a larger array whose
other elements are junk; `permuted`, with its axes in reverse order in memory; `broadcast`, one
element repeated along an axis; `empty`, with an extent of 0.
"""

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
from lazykv.testing.target import Target

Array = NDArray[Any]
Maker: TypeAlias = Callable[[np.random.Generator, Shape, DType], Array]

FLOATS = ("f64", "f32", "f16", "bf16")
INTEGERS = ("i8", "u8", "i32", "u32", "i64")
STORED = (*FLOATS, *INTEGERS, "bool", "f8_e4m3", "f8_e5m2")
LAYOUTS = ("contiguous", "sliced", "permuted", "broadcast", "empty")

JUNK = 0xFF
"""Every byte that no operand holds: NaN in floats, -1 or the largest value in integers."""


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
    extent of 0 (None: the op has no such form).
    """

    name: str
    build: Callable[..., Tensor]
    want: Callable[..., Any]
    operands: tuple[Operand, ...]
    dtypes: tuple[str, ...] = FLOATS
    empty: tuple[Shape, ...] | None = None
    moves: bool = False
    env: Mapping[Sym, int] = field(default_factory=dict)

    def layouts(self) -> tuple[str, ...]:
        return LAYOUTS if self.empty is not None else LAYOUTS[:-1]


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


# Layouts


@dataclass(frozen=True, slots=True)
class Placed:
    """An array inside a larger one: `view` finds it in a tensor of the base, `look` in an array."""

    value: Array
    base: Array
    view: Callable[[Tensor], Tensor]
    look: Callable[[Array], Array]


def place(value: Array, layout: str, axis: int = 0) -> Placed:
    """An array laid out in memory; `broadcast` repeats its first element along `axis`."""
    if not value.ndim or layout in ("contiguous", "empty"):
        return Placed(value, value, lambda t: t, lambda a: a)
    if layout == "sliced":
        return _sliced(value)
    if layout == "permuted":
        axes = tuple(range(value.ndim))[::-1]
        base = np.ascontiguousarray(value.transpose(axes))
        return Placed(value, base, lambda t: t.permute(axes), lambda a: a.transpose(axes))
    assert layout == "broadcast", f"{layout!r} is no layout"
    shape, axis = value.shape, axis % value.ndim
    base = np.ascontiguousarray(value.take([0], axis)) if shape[axis] else value
    wide = np.broadcast_to(base, shape)
    return Placed(wide, base, lambda t: t.broadcast_to(shape), lambda a: np.broadcast_to(a, shape))


def _sliced(value: Array) -> Placed:
    before = [1 + axis % 2 for axis in range(value.ndim)]
    shape = tuple(n + first + 2 for n, first in zip(value.shape, before, strict=True))
    base = junk(shape, find_dtype(value.dtype))
    window = tuple(slice(f, f + n) for f, n in zip(before, value.shape, strict=True))
    base[window] = value

    def view(t: Tensor) -> Tensor:
        for axis, first in enumerate(before):
            t = t.slice(axis, first, value.shape[axis])
        return t

    return Placed(value, base, view, lambda a: a[window])


def junk(shape: Shape, dt: DType) -> Array:
    if dt.name == "bool":
        return np.ones(shape, np.bool_)
    size = int(np.prod(shape, dtype=np.int64)) * dt.itemsize
    return np.full(size, JUNK, np.uint8).view(dt.numpy).reshape(shape)


# Running


def random_of(*names: str) -> np.random.Generator:
    """The same numbers in every run and process."""
    return np.random.default_rng(zlib.crc32("/".join(names).encode()))


def placed_operands(case: Case, dtype: str, layout: str) -> list[Placed]:
    rng = random_of(case.name, dtype)
    out = []
    for n, o in enumerate(case.operands):
        shape = case.empty[n] if layout == "empty" and case.empty is not None else o.shape
        value = o.make(rng, shape, find_dtype(o.dtype or dtype))
        how = "contiguous" if layout == "broadcast" and o.plain else layout
        out.append(place(value, how, axis=n))
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
    operands = placed_operands(case, dtype, layout)
    g, tensors, bindings = Graph(), [], {}
    for n, p in enumerate(operands):
        t = g.placeholder(p.base.shape, p.base.dtype, f"operand{n}")
        bindings[t] = target.storage(p.base)
        tensors.append(p.view(t))
    out = case.build(*tensors) if tensors else case.build(g)
    target.need(out.dtype.name)
    got = target.run(out, bindings, case.env)
    want = np.asarray(case.want(*(plain_values(p.value, case.moves) for p in operands)))
    what = f"{case.name} on {dtype}, {layout} ({out.op.name} of {_specs(operands)})"
    assert got.dtype == out.dtype.numpy, f"{what}: got {got.dtype}, need {out.dtype.numpy}"
    if case.moves:
        check_bits(what, to_raw(got), want)
    else:
        check_close(what, got, want)
    for n, (t, p) in enumerate(zip(bindings, operands, strict=True)):
        check_bits(f"{what}: operand {n} afterwards", bindings[t].to_numpy(), p.base)


def _specs(operands: Sequence[Placed]) -> str:
    parts: Iterator[str] = (
        f"{find_dtype(p.value.dtype).name}{list(p.value.shape)}" for p in operands
    )
    return ", ".join(parts)
