"""Layouts: how an operand lies in memory.

`contiguous`; `sliced` out of a larger array whose other elements are junk; `permuted`, with its
axes in reverse order in memory; `broadcast`, one element repeated along an axis; `empty`, with an
extent of 0. A window is a part of a line that others may share.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazykv.dtypes import DType
from lazykv.dtypes import dtype as find_dtype
from lazykv.graph import Tensor
from lazykv.spec import Shape

Array = NDArray[Any]

LAYOUTS = ("contiguous", "sliced", "permuted", "broadcast", "empty")

JUNK = 0xFF
"""Every byte that no operand holds: NaN in floats, -1 or the largest value in integers."""


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


def window(base: Array, start: int, shape: Shape) -> Placed:
    """Elements of a line from `start`, in row-major order."""
    n = math.prod(shape)
    return Placed(
        base[start : start + n].reshape(shape), base,
        lambda t: t.slice(0, start, n).reshape(shape),
        lambda a: a[start : start + n].reshape(shape),
    )  # fmt: skip


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
