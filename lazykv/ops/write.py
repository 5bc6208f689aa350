"""Writes: the ops that overwrite part of a buffer in place.

All three share one rule: the destination keeps its shape and its buffer, bytes outside the slab
never change, and an out-of-bounds slab is refused before the first byte moves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.errors import RangeError, ShapeError
from lazykv.layout import Layout
from lazykv.ops.op import Bound, Op, check_bound, need_arity, need_same_dtype, need_scalar_i64
from lazykv.spec import Spec
from lazykv.symbols import Dim


@dataclass(frozen=True)
class WriteSlice(Op):
    """``dest[start_0 : start_0+width_0, ...] = src`` with one start and width per axis."""

    name: ClassVar[str] = "write_slice"
    destroys: ClassVar[int | None] = 0
    bits: ClassVar[bool] = True
    dims: ClassVar[tuple[str, ...]] = ("starts",)
    starts: tuple[Dim, ...]
    widths: tuple[int, ...]

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 2)
        dest, src = ins
        if not dest.rank == src.rank == len(self.starts) == len(self.widths):
            raise ShapeError(
                f"{self.name}: got {len(self.starts)} ranges, dest {dest} and src {src}, need one "
                "range per axis and equal ranks"
            )
        need_same_dtype(self.name, dest, src)
        if src.shape != self.widths:
            raise ShapeError(
                f"{self.name}: got {src}, need {Spec(self.widths, dest.dtype)}; the source extent "
                "must equal the range width on every axis"
            )
        for b in self.bounds(*ins):
            check_bound(self.name, b)
        return dest

    def region(self, dest: Layout) -> Layout:
        for axis, (start, width) in enumerate(zip(self.starts, self.widths, strict=True)):
            if isinstance(start, int):
                dest = dest.slice(axis, start, width)
        return dest

    def bounds(self, *ins: Spec) -> Iterator[Bound]:
        for axis, (start, width) in enumerate(zip(self.starts, self.widths, strict=True)):
            extent = ins[0].shape[axis]
            if width > extent:
                raise RangeError(
                    f"{self.name}: got width {width} on axis {axis}, need <= extent {extent}"
                )
            yield Bound(start, 0, extent - width, f"start on axis {axis} (width {width})")

    def body(self, xp: Any, *ins: Any) -> Any:
        out = xp.asarray(ins[0], copy=True)
        out[self.index()] = ins[1]
        return out

    def index(self) -> tuple[slice, ...]:
        """The slab as an index, once every start is an int."""
        return tuple(
            slice(s, s + w)  # type: ignore[operator]
            for s, w in zip(self.starts, self.widths, strict=True)
        )


def _same_but(who: str, axis: int, dest: Spec, src: Spec) -> None:
    need_same_dtype(who, dest, src)
    rest = [a for a in range(dest.rank) if a != axis]
    if dest.rank != src.rank or any(dest.shape[a] != src.shape[a] for a in rest):
        want = [str(n) for n in dest.shape]
        want[axis] = "n"
        raise ShapeError(f"{who}: got {src}, need {dest.dtype}[{','.join(want)}]")


@dataclass(frozen=True)
class WriteSliceDoff(Op):
    """``dest[..., offset : offset+n, ...] = src`` on one axis, full width on the others.

    `offset` is a rank-0 i64 tensor read when the kernel runs, so one plan (and one device capture)
    serves every position. The bound is checked there, before the first byte moves. A backend that
    cannot check in a replay may leave it to the caller, and then writes no byte outside `dest`.
    """

    name: ClassVar[str] = "write_slice_at"
    destroys: ClassVar[int | None] = 0
    bits: ClassVar[bool] = True
    axis: int

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 3)
        dest, src, offset = ins
        _same_but(self.name, self.axis, dest, src)
        need_scalar_i64(self.name, offset, "offset")
        if src.shape[self.axis] > dest.shape[self.axis]:
            raise RangeError(
                f"{self.name}: got {src.shape[self.axis]} rows, need <= {dest.shape[self.axis]}"
            )
        return dest

    def start(self, offset: int, rows: int, extent: int) -> int:
        """The offset, once it is known to be in bounds."""
        if not 0 <= offset <= extent - rows:
            raise RangeError(
                f"{self.name}: got offset {offset} for {rows} rows on axis {self.axis}, need "
                f"0 <= offset <= {extent - rows}"
            )
        return offset

    def body(self, xp: Any, *ins: Any) -> Any:
        out, rows = xp.asarray(ins[0], copy=True), ins[1].shape[self.axis]
        start = self.start(int(ins[2]), rows, out.shape[self.axis])
        out[(slice(None),) * self.axis + (slice(start, start + rows), ...)] = ins[1]
        return out


def ring_runs(low: int, high: int, modulus: int, sinks: int = 0) -> list[tuple[int, int, int]]:
    """Where positions low..high lie in a ring: runs ``(slot, position, count)`` in their order.

    Position p below `sinks` has slot p for itself, a later one shares slot ``sinks + (p - sinks) %
    (modulus - sinks)``. At most three runs: sinks, the ring's tail, its head. At most ``modulus -
    sinks`` positions past the sinks lie in it at a time.
    """
    runs = []
    if low < min(sinks, high):
        runs.append((low, low, min(sinks, high) - low))
    low = max(low, sinks)
    if low < high:
        slot = sinks + (low - sinks) % (modulus - sinks)
        tail = min(high - low, modulus - slot)
        runs.append((slot, low, tail))
        if low + tail < high:
            runs.append((sinks, low + tail, high - low - tail))
    return runs


@dataclass(frozen=True)
class WriteSliceRotating(Op):
    """Write rows into a ring of `modulus` slots on one axis: position p goes to slot p mod modulus.

    The first `sinks` positions keep their own slots and the rest rotate over the others (see
    `ring_runs`). `position` is a rank-0 i64 tensor, the logical position of the first source row. A
    write that passes the end of the ring is split; one longer than the ring keeps its last rows,
    and the sinks among its rows.
    """

    name: ClassVar[str] = "write_slice_rotating"
    destroys: ClassVar[int | None] = 0
    bits: ClassVar[bool] = True
    axis: int
    modulus: int
    sinks: int = 0

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 3)
        dest, src, position = ins
        _same_but(self.name, self.axis, dest, src)
        need_scalar_i64(self.name, position, "position")
        if not 1 <= self.modulus <= dest.shape[self.axis]:
            raise RangeError(
                f"{self.name}: got modulus {self.modulus}, need 1 <= modulus <= "
                f"{dest.shape[self.axis]} (axis {self.axis} of {dest})"
            )
        if not 0 <= self.sinks < self.modulus:
            raise RangeError(
                f"{self.name}: got {self.sinks} sinks, need 0 <= sinks < modulus {self.modulus}"
            )
        return dest

    def region(self, dest: Layout) -> Layout:
        return dest.slice(self.axis, 0, self.modulus)

    def pieces(self, position: int, rows: int) -> list[tuple[int, int, int]]:
        """At most three moves ``(slot, source row, count)`` for `rows` rows from `position`."""
        if position < 0:
            raise RangeError(f"{self.name}: got position {position}, need position >= 0")
        end = position + rows
        kept = max(position, self.sinks, end - (self.modulus - self.sinks))
        runs = ring_runs(position, min(end, self.sinks), self.modulus, self.sinks)
        runs += ring_runs(kept, end, self.modulus, self.sinks)
        return [(slot, place - position, count) for slot, place, count in runs]

    def body(self, xp: Any, *ins: Any) -> Any:
        out, lead = xp.asarray(ins[0], copy=True), (slice(None),) * self.axis
        for slot, row, n in self.pieces(int(ins[2]), ins[1].shape[self.axis]):
            out[(*lead, slice(slot, slot + n), ...)] = ins[1][(*lead, slice(row, row + n), ...)]
        return out
