"""Where the elements of a view lie in its buffer: offset, shape and strides, in elements.

A view op is a rule on layouts and nothing else, so every backend gets every view for free. The
offset may be symbolic (a slice that starts at a symbol).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazykv.spec import Shape
from lazykv.symbols import Dim, ScalarSlot, as_dim, dim_bounds

# Bound on the exact overlap search (a bounded Diophantine problem); past it we assume an overlap.
_OVERLAP_WORK = 100_000


@dataclass(frozen=True, slots=True)
class Layout:
    """Element (i0, i1, ...) lies at ``offset + i0*strides[0] + i1*strides[1] + ...``."""

    offset: Dim
    shape: Shape
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, shape: Shape) -> "Layout":
        """Row-major, from the start of the buffer."""
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        return cls(0, shape, tuple(reversed(strides)))

    @property
    def is_contiguous(self) -> bool:
        """Whether elements are adjacent in row-major order (offset aside)."""
        if 0 in self.shape:
            return True
        step = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True

    @property
    def repeats(self) -> bool:
        """Whether several indices name one element (a broadcast view)."""
        if 0 in self.shape:
            return False
        return any(n > 1 and s == 0 for n, s in zip(self.shape, self.strides, strict=True))

    def slice(self, axis: int, start: Dim, length: int) -> "Layout":
        assert not isinstance(self.offset, ScalarSlot), "slots only stand in compiled registers"
        assert not isinstance(start, ScalarSlot), "ops are compiled after their layouts are known"
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        offset = as_dim(self.offset + start * self.strides[axis])
        return Layout(offset, shape, self.strides)

    def permute(self, axes: Sequence[int]) -> "Layout":
        return Layout(
            self.offset, tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes)
        )

    def broadcast(self, shape: Shape) -> "Layout":
        """Repeat extents of 1 and new leading axes with stride 0 (shapes already checked)."""
        lead = len(shape) - len(self.shape)
        strides = [0] * lead
        for have, want, stride in zip(self.shape, shape[lead:], self.strides, strict=True):
            strides.append(stride if have == want else 0)
        return Layout(self.offset, shape, tuple(strides))

    def reshape(self, shape: Shape) -> "Layout | None":
        """The same elements in row-major order under another shape, or None where strides cannot.

        Extents of 1 are dropped first; then each run of old axes and the run of new axes with the
        same product must have strides that merge.
        """
        if math.prod(self.shape) == 0:
            return Layout(self.offset, shape, Layout.contiguous(shape).strides)
        old = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        strides: list[int] = []
        i = j = 0
        while i < len(old) or j < len(shape):
            have = want = 1
            first, group = i, j
            while have != want or have == 1:
                if have <= want and i < len(old):
                    have *= old[i][0]
                    i += 1
                elif j < len(shape):
                    want *= shape[j]
                    j += 1
                else:
                    break
            run = old[first:i]
            if any(a[1] != b[0] * b[1] for a, b in pairwise(run)):
                return None
            step = run[-1][1] if run else 1
            part: list[int] = []
            for extent in reversed(shape[group:j]):
                part.append(step)
                step *= extent
            strides.extend(reversed(part))
        return Layout(self.offset, shape, tuple(strides))

    def span(self) -> tuple[int, int] | None:
        """First and one-past-last element offset touched, or None when it is not known."""
        low, high = dim_bounds(self.offset)
        if high is None:
            return None
        if math.prod(self.shape) == 0:
            return (low, low)
        extent = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (low, high + extent + 1)


@lru_cache(maxsize=4096)
def overlap(a: Layout, b: Layout) -> bool:
    """Whether two views of one buffer may share an element; exact for fixed offsets."""
    if math.prod(a.shape) == 0 or math.prod(b.shape) == 0:
        return False
    sa, sb = a.span(), b.span()
    if sa is None or sb is None:
        return True
    if sa[1] <= sb[0] or sb[1] <= sa[0]:
        return False
    if not isinstance(a.offset, int) or not isinstance(b.offset, int):
        return True
    base = np.empty(1, np.uint8)
    work: Any = _OVERLAP_WORK  # NumPy's stubs name only its two special values
    try:
        return np.shares_memory(_ghost(base, a), _ghost(base, b), max_work=work)
    except np.exceptions.TooHardError:
        return True


def _ghost(base: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint8]:
    """An array with the addresses of a view and no memory behind it; never read."""
    assert isinstance(layout.offset, int), "a symbolic offset has no address"
    line = np.lib.stride_tricks.as_strided(base, (layout.offset + 1,), (1,))
    return np.lib.stride_tricks.as_strided(line[layout.offset :], layout.shape, layout.strides)
