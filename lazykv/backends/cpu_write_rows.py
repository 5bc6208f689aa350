"""The CPU kernel of writes to rows that lie anywhere."""

from collections.abc import Iterable

from lazykv.device import Array, Call, Kernel, Step
from lazykv.ops.write_rows import WriteRows


def _write_rows(call: Call) -> Iterable[Step]:
    src, rows = call.ins[1:3]
    count = call.ins[3] if call.op.has_count else None
    return [(_write, (call.op, call.out, src, rows, count))]


def _write(op: WriteRows, dest: Array, src: Array, rows: Array, count: Array | None) -> None:
    n = len(rows) if count is None else op.check_count(int(count), len(rows))
    op.check_rows(rows[:n].tolist(), len(dest))
    dest[rows[:n]] = src[:n]


WRITE_ROWS = Kernel(_write_rows)
