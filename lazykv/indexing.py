"""What a caller writes between brackets: ranges, slices and Ellipsis, as starts and widths."""

from types import EllipsisType
from typing import Any

from lazykv.errors import GraphError, RangeError, ShapeError
from lazykv.symbols import Dim, DimLike, as_dim, as_expr, dim_argument


def half_open(who: str, axis: int, pair: tuple[DimLike, DimLike]) -> tuple[Dim, int]:
    """(start, width) of a half-open range whose width is a number."""
    try:
        low, high = pair
    except (TypeError, ValueError):
        raise ShapeError(f"{who}: got range {pair!r} on axis {axis}, need (start, end)") from None
    start, end = dim_argument(who, "start", low, axis), dim_argument(who, "end", high, axis)
    width = as_dim(as_expr(end) - start)
    if not isinstance(width, int):
        raise ShapeError(f"{who}: got width {width} on axis {axis}, need a number")
    if width < 0:
        raise RangeError(f"{who}: got range {start}..{end} on axis {axis}, need start <= end")
    return start, width


def expand(who: str, index: Any, rank: int) -> list[Any]:
    """One entry per axis (and per None): Ellipsis and missing axes become full slices."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(1 for i in items if i is not None and not isinstance(i, EllipsisType))
    dots = [n for n, i in enumerate(items) if isinstance(i, EllipsisType)]
    if len(dots) > 1 or used > rank:
        raise ShapeError(
            f"{who}: got {len(items)} indices for rank {rank}, need at most one per axis"
        )
    place = dots[0] if dots else len(items)
    items[place : place + 1] = [slice(None)] * (rank - used)
    return items


def slice_bounds(who: str, axis: int, item: slice, extent: int) -> tuple[Dim, int]:
    if item.step not in (None, 1):
        raise GraphError(f"{who}: got step {item.step} on axis {axis}, need 1")
    start, end = item.start, item.stop
    start = 0 if start is None else dim_argument(who, "start", start, axis)
    end = extent if end is None else dim_argument(who, "end", end, axis)
    return half_open(who, axis, (from_end(start, extent), from_end(end, extent)))


def from_end(dim: Dim, extent: int) -> Dim:
    """A negative number counts from the end, as in Python; bounds are checked later."""
    return dim + extent if isinstance(dim, int) and dim < 0 else dim
