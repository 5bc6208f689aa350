"""Debug poison in a running plan: unfilled arenas, and the cache rows that it reads and writes.

The one place outside the kernels that knows ops by class: which rows a write or an attention
touches is no effect that ordering needs. What it cannot know, it takes for written.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazykv.compiler.program import Home, Program, ProgramStep
from lazykv.compiler.registers import Registers
from lazykv.device import device
from lazykv.layout import Layout
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.write import WriteSlice
from lazykv.poison import RowLog, fill
from lazykv.storage import Storage
from lazykv.symbols import Dim, ScalarSlot

_Rows = dict[RowLog, NDArray[np.bool_]]
_Event = Callable[[list[int], _Rows], None]
"""What a step does to the rows of a log, given symbol values and the rows this pass writes."""


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
    """The reads or the write of one step, on storages that have a log."""
    op = step.op
    if op.destroys is not None:
        log, whole = _log_of(program, storages, step.output)
        if log is not None:
            at, rows = 0, len(log.written)
            if whole and isinstance(op, WriteSlice):
                at, rows = op.starts[log.axis], op.widths[log.axis]  # type: ignore[assignment]
            yield _write(log, at, rows)
    elif isinstance(op, Attention) and not (op.has_length or op.has_mask):
        yield from _reads(program, storages, step, step.inputs[1:3], op.window)
    elif isinstance(op, LatentAttention) and not op.has_length:
        yield from _reads(program, storages, step, step.inputs[2:4], None)


def _reads(
    program: Program, storages: Sequence[Storage | None], step: ProgramStep,
    rows: Sequence[int], window: int | None,
) -> Iterable[_Event]:  # fmt: skip
    """The reads of an attention's rows; its queries are the first input."""
    op: Any = step.op
    queries = program.registers[step.inputs[0]].spec.shape[2]
    for i in rows:
        log, whole = _log_of(program, storages, i)
        if log is not None and whole:
            length = len(log.written) if op.length is None else op.length
            yield _read(log, op.name, length, None if window is None else queries + window)


def _log_of(
    program: Program, storages: Sequence[Storage | None], register: int
) -> tuple[RowLog | None, bool]:
    """The log of the storage a register lies in, and whether the register is all of it."""
    r = program.registers[register]
    store = storages[r.index] if r.home is Home.LEAF else None
    if store is None or store.row_log is None:
        return None, False
    return store.row_log, r.layout == Layout.contiguous(store.shape)


def _write(log: RowLog, at: Dim, rows: int) -> _Event:
    def note(scalars: list[int], now: _Rows) -> None:
        start = _value(at, scalars)
        now.setdefault(log, np.zeros_like(log.written))[start : start + rows] = True

    return note


def _read(log: RowLog, who: str, length: Dim, reach: int | None) -> _Event:
    """A read of the live rows; with a `reach`, only the last ``reach - 1`` of them."""

    def check(scalars: list[int], now: _Rows) -> None:
        end = _value(length, scalars)
        start = 0 if reach is None else max(0, end - reach + 1)
        log.check(who, start, end, now.get(log))

    return check


def _value(dim: Dim, scalars: list[int]) -> int:
    if isinstance(dim, ScalarSlot):
        return scalars[dim.index]
    assert isinstance(dim, int), "compiled ops hold numbers and slots"
    return dim
