"""Debug poison in a running plan: unfilled arenas, and the cache rows that it reads and writes.

The one place outside the kernels that knows ops by class: which rows a write or an attention
touches is no effect that ordering needs. What it cannot know, it takes for written. Reads of all
rows of a buffer are not checked, since hand-made masks hide some of them, and neither are those of
what the compiler added.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazykv.compiler.program import Home, Program, ProgramStep
from lazykv.compiler.registers import Registers
from lazykv.device import device
from lazykv.layout import Layout
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.move import Take
from lazykv.ops.op import Op
from lazykv.ops.paged_attention import PagedAttention
from lazykv.ops.ring_attention import RingAttention
from lazykv.ops.write import WriteSlice
from lazykv.poison import RowLog, fill
from lazykv.spec import Shape
from lazykv.storage import Storage
from lazykv.symbols import Dim, ScalarSlot

_Rows = dict[RowLog, NDArray[np.bool_]]
_Event = Callable[[list[int], _Rows], None]
"""What a step does to the rows of a log, given symbol values and the rows this pass writes."""

_READ_SOME_ROWS: tuple[type[Op], ...] = (
    Attention, LatentAttention, RingAttention, PagedAttention, Take,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _View:
    """A register that lies in a storage with a log."""

    log: RowLog
    layout: Layout
    shape: Shape
    """Of the storage."""

    @property
    def is_whole(self) -> bool:
        return self.layout == Layout.contiguous(self.shape)

    def rows(self, scalars: list[int]) -> NDArray[np.int64]:
        """The rows that have an element in the view, ascending."""
        if 0 in self.layout.shape:
            return np.zeros(0, np.int64)
        count, inner = len(self.log.written), math.prod(self.shape[self.log.axis + 1 :])
        start = _value(self.layout.offset, scalars)
        # Steps over all rows stay in a row, and so do those that together are within one.
        steps = [(n, s) for n, s in zip(self.layout.shape, self.layout.strides, strict=True)
                 if s % (inner * count)]  # fmt: skip
        if start % inner + sum((n - 1) * s for n, s in steps if s < inner) < inner:
            steps = [(n, s) for n, s in steps if s >= inner]
        at = np.array([start], np.int64)
        for n, s in steps:
            at = (at[:, None] + np.arange(n) * s).reshape(-1)
        found: NDArray[np.int64] = np.unique(at // inner % count)
        return found


class RowWatch:
    """Checks every pass of one plan before its first kernel, and notes its rows after the last."""

    def __init__(
        self, program: Program, storages: Sequence[Storage | None], registers: Registers
    ) -> None:
        self._registers = registers
        self._events = [e for step in program.steps for e in _events(program, storages, step)]
        self._rows: _Rows = {}

    def begin(self) -> None:
        """Poison the arenas, and refuse a read of rows that neither a cache nor this pass wrote."""
        self._rows = {}
        for event in self._events:
            event(self._registers.scalars, self._rows)
        for place, arena in self._registers.arenas.items():
            fill(device(place).backend, arena.array, arena.nbytes)

    def end(self) -> None:
        for log, rows in self._rows.items():
            log.written |= rows


def _events(
    program: Program, storages: Sequence[Storage | None], step: ProgramStep
) -> Iterable[_Event]:
    """The reads and the write of one step, on storages that have a log."""
    op = step.op
    views = [_view_of(program, storages, i) for i in step.inputs]
    if isinstance(op, Attention) and not (op.has_length or op.has_mask):
        yield from _attention(program, step, views[1:3], op.window)
    elif isinstance(op, LatentAttention) and not op.has_length:
        yield from _attention(program, step, views[2:4], None)
    elif not isinstance(op, _READ_SOME_ROWS) and program.nodes[step.node].reason is None:
        for n, view in enumerate(views):
            if n != op.destroys and view is not None:
                yield _read_part(view, op.name)
    if op.destroys is not None:
        written = _view_of(program, storages, step.output)
        if written is not None:
            yield _write(written, op)


def _attention(
    program: Program, step: ProgramStep, views: Sequence[_View | None], window: int | None
) -> Iterable[_Event]:
    """The reads of an attention's rows; its queries are the first input."""
    op: Any = step.op
    queries = program.registers[step.inputs[0]].spec.shape[2]
    for view in views:
        if view is not None:
            yield _read(view, op.name, op.length, None if window is None else queries + window)


def _view_of(program: Program, storages: Sequence[Storage | None], register: int) -> _View | None:
    r = program.registers[register]
    store = storages[r.index] if r.home is Home.LEAF else None
    if store is None or store.row_log is None:
        return None
    return _View(store.row_log, r.layout, store.shape)


def _write(view: _View, op: Op) -> _Event:
    """A write into all of a buffer at rows that it names; else it counts as one to all of them."""
    log = view.log

    def note(scalars: list[int], now: _Rows) -> None:
        rows: Any = view.rows(scalars)
        if view.is_whole and isinstance(op, WriteSlice):
            start = _value(op.starts[log.axis], scalars)
            rows = slice(start, start + op.widths[log.axis])
        now.setdefault(log, np.zeros_like(log.written))[rows] = True

    return note


def _read(view: _View, who: str, length: Dim | None, reach: int | None) -> _Event:
    """A read of the live rows; with a `reach`, only the last ``reach - 1`` of them."""

    def check(scalars: list[int], now: _Rows) -> None:
        rows = view.rows(scalars)
        end = len(rows) if length is None else _value(length, scalars)
        start = 0 if reach is None else max(0, end - reach + 1)
        view.log.check(who, rows[start:end], now.get(view.log))

    return check


def _read_part(view: _View, who: str) -> _Event:
    """A read of a view, unless all rows are in it."""

    def check(scalars: list[int], now: _Rows) -> None:
        rows = view.rows(scalars)
        if len(rows) < len(view.log.written):
            view.log.check(who, rows, now.get(view.log))

    return check


def _value(dim: Dim, scalars: list[int]) -> int:
    if isinstance(dim, ScalarSlot):
        return scalars[dim.index]
    assert isinstance(dim, int), "compiled ops hold numbers and slots"
    return dim
