"""Shapes and how they are written in messages: ``f32[1,8,4096,128]``."""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

from lazykv.dtypes import DType
from lazykv.errors import DTypeError, RangeError, ShapeError

Shape: TypeAlias = tuple[int, ...]

# What NumPy can address: larger shapes are input errors, not overflow.
MAX_BYTES = 2**63 - 1
MAX_RANK = 64


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and element type of one value."""

    shape: Shape
    dtype: DType

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


def as_shape(who: str, shape: Sequence[SupportsIndex] | SupportsIndex) -> Shape:
    """Check and normalize a caller's shape; extents are Python ints from here on."""
    items = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    out: list[int] = []
    for item in items:
        try:
            n = operator.index(item)
        except TypeError:
            raise ShapeError(f"{who}: got extent {item!r}, need an integer") from None
        if n < 0 or isinstance(item, bool):
            raise ShapeError(f"{who}: got extent {item!r} in {items!r}, need integers >= 0")
        out.append(n)
    if len(out) > MAX_RANK:
        raise ShapeError(f"{who}: got {len(out)} extents, need at most {MAX_RANK}")
    if _without_zeros(out) > MAX_BYTES:
        raise ShapeError(f"{who}: got shape {tuple(out)}, need fewer than 2**63 elements")
    return tuple(out)


def check_size(who: str, spec: Spec) -> Spec:
    """A spec that an array can have, empty ones included: their strides count bytes too."""
    if spec.rank > MAX_RANK:
        raise ShapeError(f"{who}: got rank {spec.rank}, need at most {MAX_RANK}")
    if _without_zeros(spec.shape) * spec.dtype.itemsize > MAX_BYTES:
        raise ShapeError(f"{who}: got {spec}, need fewer than 2**63 bytes, extents of 0 apart")
    return spec


def _without_zeros(shape: Sequence[int]) -> int:
    return math.prod(shape) or math.prod(n or 1 for n in shape)


def as_axis(who: str, axis: SupportsIndex, rank: int) -> int:
    """Normalize an axis; negative axes count from the end, as in NumPy."""
    try:
        a = operator.index(axis)
    except TypeError:
        raise ShapeError(f"{who}: got axis {axis!r}, need an integer") from None
    if rank == 0:
        raise ShapeError(f"{who}: got axis {a} for rank 0, need rank >= 1")
    if not -rank <= a < rank:
        raise ShapeError(f"{who}: got axis {a} for rank {rank}, need {-rank} <= axis < {rank}")
    return a % rank


def whole(who: str, name: str, value: SupportsIndex) -> int:
    """A caller's whole number, whatever its sign; nothing is rounded."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise DTypeError(f"{who}: got {name} {value!r}, need a whole number")


def finite(who: str, name: str, value: Any) -> float:
    """A caller's real number; NaN and inf are mistakes here, not values."""
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RangeError(f"{who}: got {name} {value!r}, need a finite number")
    return number


def not_plain(value: object) -> str | None:
    """The type of the first part of a key that is no plain value, or None. Plain are None, numbers,
    text, bytes and tuples of them: what can change under a key would change it unseen."""
    if isinstance(value, tuple):
        return next((found for item in value if (found := not_plain(item))), None)
    plain = value is None or isinstance(value, str | bytes | int | float)
    return None if plain else type(value).__name__
