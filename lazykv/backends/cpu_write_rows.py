"""The CPU kernel of writes to rows that lie anywhere."""

from collections.abc import Iterable

from lazykv.device import Array, Call, Kernel, Step
from lazykv.ops.write_rows import WriteRows


def _write_rows(call: Call) -> Iterable[Step]:
    op, dest, (src, rows) = call.op, call.out, call.ins[1:3]
    if op.has_count:
        return [(_write_counted, (op, dest, src, rows, call.ins[3]))]
    if len(rows) == 1:
        return [(_write_one, (op, dest, src[0, ...], rows))]  # the Ellipsis keeps rank 0 an array
    return [(_write, (op, dest, src, rows))]


def _write_one(op: WriteRows, dest: Array, row: Array, rows: Array) -> None:
    at = rows.item()
    if not 0 <= at < len(dest):
        op.check_rows([at], len(dest))
    dest[at] = row


def _write(op: WriteRows, dest: Array, src: Array, rows: Array) -> None:
    op.check_rows(rows.tolist(), len(dest))
    dest[rows] = src


def _write_counted(op: WriteRows, dest: Array, src: Array, rows: Array, count: Array) -> None:
    n = op.check_count(int(count), len(rows))
    _write(op, dest, src[:n], rows[:n])


WRITE_ROWS = Kernel(_write_rows)
