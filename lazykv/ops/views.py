"""Views: other ways to index the same buffer. A view op is a rule on layouts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.errors import RangeError, ShapeError
from lazykv.layout import Layout
from lazykv.ops.op import Bound, Op, check_bound, need_arity
from lazykv.spec import Shape, Spec
from lazykv.symbols import Dim


@dataclass(frozen=True)
class View(Op):
    """An op whose result is described by `alias` alone; its elements are never computed."""

    bits: ClassVar[bool] = True

    def shape_of(self, source: Spec) -> Shape:
        raise NotImplementedError

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        return Spec(self.shape_of(ins[0]), ins[0].dtype)


@dataclass(frozen=True)
class Reshape(View):
    """The same elements in row-major order; shares the buffer where strides can express it, and
    otherwise makes a contiguous copy."""

    name: ClassVar[str] = "reshape"
    shape: Shape

    def shape_of(self, source: Spec) -> Shape:
        if math.prod(self.shape) != source.size:
            raise ShapeError(
                f"{self.name}: got {source} to {list(self.shape)}, need {source.size} elements"
            )
        return self.shape

    def alias(self, source: Layout) -> Layout | None:
        return source.reshape(self.shape)

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.reshape(ins[0], self.shape)


@dataclass(frozen=True)
class Slice(View):
    """``length`` elements of one axis from ``start``, which may be a symbol."""

    name: ClassVar[str] = "slice"
    dims: ClassVar[tuple[str, ...]] = ("start",)
    axis: int
    start: Dim
    length: int

    def shape_of(self, source: Spec) -> Shape:
        if not 0 <= self.length <= source.shape[self.axis]:
            raise RangeError(
                f"{self.name}: got length {self.length} on axis {self.axis} of {source}, need "
                f"0 <= length <= {source.shape[self.axis]}"
            )
        for b in self.bounds(source):
            check_bound(self.name, b)
        return (*source.shape[: self.axis], self.length, *source.shape[self.axis + 1 :])

    def bounds(self, *ins: Spec) -> Iterator[Bound]:
        top = ins[0].shape[self.axis] - self.length
        yield Bound(self.start, 0, top, f"start on axis {self.axis} (length {self.length})")

    def alias(self, source: Layout) -> Layout | None:
        return source.slice(self.axis, self.start, self.length)

    def body(self, xp: Any, *ins: Any) -> Any:
        stop = self.start + self.length  # type: ignore[operator]
        return ins[0][(*(slice(None),) * self.axis, slice(self.start, stop), ...)]


@dataclass(frozen=True)
class Permute(View):
    """Axis i of the result is axis ``axes[i]`` of the source (`transpose` is one of these)."""

    name: ClassVar[str] = "permute"
    axes: tuple[int, ...]

    def shape_of(self, source: Spec) -> Shape:
        if sorted(self.axes) != list(range(source.rank)):
            raise ShapeError(
                f"{self.name}: got axes {list(self.axes)} for {source}, need each of 0.."
                f"{source.rank - 1} once"
            )
        return tuple(source.shape[a] for a in self.axes)

    def alias(self, source: Layout) -> Layout | None:
        return source.permute(self.axes)

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.permute_dims(ins[0], self.axes)


@dataclass(frozen=True)
class BroadcastTo(View):
    """Repeat extents of 1, and add leading axes, without moving a byte."""

    name: ClassVar[str] = "broadcast_to"
    shape: Shape

    def shape_of(self, source: Spec) -> Shape:
        lead = len(self.shape) - source.rank
        fits = lead >= 0 and all(
            have in (1, want) for have, want in zip(source.shape, self.shape[lead:], strict=True)
        )
        if not fits:
            raise ShapeError(
                f"{self.name}: got {source} to {list(self.shape)}, need trailing extents equal or 1"
            )
        return self.shape

    def alias(self, source: Layout) -> Layout | None:
        return source.broadcast(self.shape)

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.broadcast_to(ins[0], self.shape)


@dataclass(frozen=True)
class Squeeze(View):
    """Drop one axis of extent 1."""

    name: ClassVar[str] = "squeeze"
    axis: int

    def shape_of(self, source: Spec) -> Shape:
        if source.shape[self.axis] != 1:
            raise ShapeError(
                f"{self.name}: got extent {source.shape[self.axis]} on axis {self.axis} of "
                f"{source}, need 1"
            )
        return (*source.shape[: self.axis], *source.shape[self.axis + 1 :])

    def alias(self, source: Layout) -> Layout | None:
        return Layout(
            source.offset,
            (*source.shape[: self.axis], *source.shape[self.axis + 1 :]),
            (*source.strides[: self.axis], *source.strides[self.axis + 1 :]),
        )

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.squeeze(ins[0], self.axis)


@dataclass(frozen=True)
class Unsqueeze(View):
    """Insert an axis of extent 1."""

    name: ClassVar[str] = "unsqueeze"
    axis: int

    def shape_of(self, source: Spec) -> Shape:
        return (*source.shape[: self.axis], 1, *source.shape[self.axis :])

    def alias(self, source: Layout) -> Layout | None:
        return Layout(
            source.offset,
            (*source.shape[: self.axis], 1, *source.shape[self.axis :]),
            (*source.strides[: self.axis], 0, *source.strides[self.axis :]),
        )

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.expand_dims(ins[0], axis=self.axis)


@dataclass(frozen=True)
class Contiguize(View):
    """The same values in row-major order: nothing to do where they already are."""

    name: ClassVar[str] = "contiguous"

    def shape_of(self, source: Spec) -> Shape:
        return source.shape

    def alias(self, source: Layout) -> Layout | None:
        return source if source.is_contiguous else None

    def body(self, xp: Any, *ins: Any) -> Any:
        return ins[0]
