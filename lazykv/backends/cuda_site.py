"""What CUDA kernels are emitted with: a device's queue, the resolved call, and typed arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from lazykv.backends import cuda_kernels as ck
from lazykv.backends.cuda_queue import Queue
from lazykv.backends.cuda_refusals import Word
from lazykv.device import Array, Call, Step
from lazykv.symbols import ScalarSlot

Steps: TypeAlias = list[Step] | None
"""What an emitter gives: the calls, or None for operands that only the portable body can take."""

_SCALARS: dict[str, Any] = {"i32": np.int32, "i64": np.int64, "f32": np.float32}
_NULL = np.uint64(0)


@dataclass(frozen=True, slots=True)
class Site:
    """One op of a plan on one device, and its word if its kernels may refuse."""

    queue: Queue
    call: Call
    word: Word | None = None

    @property
    def error(self) -> Array:
        """Where its kernels say that they refused."""
        assert self.word is not None, "an op whose kernels may refuse has a word"
        return self.word.array

    def scalar(self, slot: ScalarSlot) -> int:
        """The value of a symbolic parameter now."""
        return self.call.scalars[slot.index]


def launch(queue: Queue, name: str, shape: ck.Launch, *values: Any, **macros: object) -> Step:
    """The launch of a kernel, whose arguments are known; None is a null pointer."""
    kernel = queue.kernel(name, **macros)
    return queue.run, (kernel, shape.grid, shape.block, arguments(name, *values))


def launch_later(
    queue: Queue, name: str, shape: ck.Launch, values: Callable[[], Sequence[Any]],
    **macros: object,
) -> Step:  # fmt: skip
    """A launch whose arguments depend on symbols: `values` is called at every launch."""
    kernel = queue.kernel(name, **macros)
    return queue.run_later, (kernel, shape.grid, shape.block, lambda: arguments(name, *values()))


def arguments(name: str, *values: Any) -> tuple[Any, ...]:
    """Values as a kernel declares them: pointers, numbers of exactly one width, structs."""
    made = []
    for (_, kind), value in zip(ck.KERNELS[name].args, values, strict=True):
        if kind == "pointer":
            made.append(_NULL if value is None else value)
        else:
            made.append(_SCALARS[kind](value) if kind in _SCALARS else value)
    return tuple(made)


def steps_of(array: Array) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(s // array.itemsize for s in array.strides)


def addresses_of(*arrays: Array) -> tuple[int, ...]:
    """Where arrays start in memory."""
    return tuple(a.data.ptr for a in arrays)


def is_dense(array: Array) -> bool:
    """Whether the elements of the last axis are neighbours."""
    return bool(array.shape[-1] <= 1 or array.strides[-1] == array.itemsize)


def even_rows(array: Array) -> int | None:
    """Elements from one row (along the last axis) to the next, if they are equally far apart and
    dense; else None."""
    if not is_dense(array):
        return None
    lead = zip(array.shape[:-1], steps_of(array)[:-1], strict=True)
    axes = [(n, step) for n, step in lead if n != 1]
    if any(above != n * step for (_, above), (n, step) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else int(array.shape[-1])
