"""Moves as the CUDA kernels see them: axes merged, elements as wide as alignment allows."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lazykv.backends.cuda_kernels.table import AXES, struct

_WIDEST = 16
"""Bytes of the widest load and store."""

_Axis = tuple[int, int, int]
"""An extent, and its steps in the destination and the source."""


@dataclass(frozen=True, slots=True)
class Move:
    """A walk over elements of `element_bytes` bytes, each `scale` of the tensor's.

    What a kernel is told in elements besides the walk (`start` of `copy`) is divided by `scale`.
    """

    element_bytes: int
    scale: int
    walk: npt.NDArray[np.void]

    @property
    def size(self) -> int:
        """Elements of the walk."""
        return int(self.walk["size"])


def move_of(
    shape: Sequence[int], dest: Sequence[int], src: Sequence[int], itemsize: int, *,
    by_row: bool = False, addresses: Iterable[int] = (), starts: Iterable[int] = (),
) -> Move | None:  # fmt: skip
    """The walk over `shape` with the strides of both sides in elements; None above 6 axes.

    With `by_row` axis 0 is that of the rows, which the kernel chooses: it stays as it is. (For
    `take` the strides of the source on it are the table's.) `addresses` are where both sides start
    in memory; `starts` are steps, in elements, that anything added to them is a multiple of.
    """
    rows = [(shape[0], dest[0], src[0])] if by_row else []
    rest = list(zip(shape, dest, src, strict=True))[len(rows) :]
    axes = _merged([axis for axis in rest if axis[0] != 1])
    if math.prod(n for n, _, _ in axes) == 0:
        axes = [(0, 0, 0)]
    axes, scale = _widened(rows, axes, itemsize, tuple(starts), tuple(addresses))
    if len(axes) > AXES:
        return None
    columns = np.zeros((3, AXES), np.int64)
    columns[:, : len(axes)] = np.array(axes, np.int64).reshape(-1, 3).T
    walk = struct(
        "walk", shape=columns[0], dest=columns[1], src=columns[2], rank=len(axes),
        size=math.prod(n for n, _, _ in axes),
    )  # fmt: skip
    return Move(itemsize * scale, scale, walk)


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """The destination's order, for neighbouring threads to write neighbouring elements; an axis
    that continues the one before it becomes part of it."""
    done: list[_Axis] = []
    for n, to, at in sorted(axes, key=lambda axis: -abs(axis[1])):
        if done and done[-1][1:] == (n * to, n * at):
            done[-1] = (done[-1][0] * n, to, at)
        else:
            done.append((n, to, at))
    return done


def _widened(
    rows: list[_Axis], axes: list[_Axis], itemsize: int, starts: Sequence[int],
    addresses: Sequence[int],
) -> tuple[list[_Axis], int]:  # fmt: skip
    """All axes with elements of several of the tensor's where the last axis has neighbours side by
    side on both sides and everything else is a multiple."""
    scale = 1
    if axes and axes[-1][1:] == (1, 1):
        steps = [step for axis in (*rows, *axes[:-1]) for step in axis[1:]]
        whole = math.gcd(axes[-1][0], *steps, *starts)
        while (
            itemsize * scale * 2 <= _WIDEST
            and whole % (scale * 2) == 0
            and all(a % (itemsize * scale * 2) == 0 for a in addresses)
        ):
            scale *= 2
        axes = [*axes[:-1], (axes[-1][0] // scale, scale, scale)]
    return [(n, to // scale, at // scale) for n, to, at in (*rows, *axes)], scale
