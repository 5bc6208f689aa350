"""Moves and writes on CUDA: elements are copied as raw bits."""

from typing import Any

from lazykv.backends import cuda_kernels as ck
from lazykv.backends.cuda_queue import Queue
from lazykv.backends.cuda_site import Site, Steps, addresses_of, launch, launch_later, steps_of
from lazykv.device import Array
from lazykv.dtypes import i32, i64
from lazykv.spec import Spec
from lazykv.symbols import ScalarSlot


def copy_steps(queue: Queue, dest: Array, source: Array) -> Steps:
    """Every element of a view to its place in another one of the same shape."""
    move = _move_of(dest, source)
    if move is None or not move.size:
        return None if move is None else []
    shape = ck.launch_of("copy", size=move.size)
    return [launch(queue, "copy", shape, dest, source, 0, move.walk, BYTES=move.element_bytes)]


def _move_of(dest: Array, source: Array, **options: Any) -> ck.Move | None:
    return ck.move_of(
        source.shape, steps_of(dest), steps_of(source), source.itemsize,
        addresses=addresses_of(dest, source), **options,
    )  # fmt: skip


def move(site: Site) -> Steps:
    """A copy, or a view that had to become one: elements in row-major order."""
    source = site.call.ins[0]
    return copy_steps(site.queue, site.call.out.reshape(source.shape), source)


def zero_fill(site: Site) -> Steps:
    queue, out = site.queue, site.call.out
    if out.flags.c_contiguous:
        return [(queue.clear, (out,))]
    # A zero that is read over and over.
    zero = queue.cupy.ndarray(out.shape, out.dtype, queue.zeros.data, (0,) * out.ndim)
    return copy_steps(queue, out, zero)


def concat(site: Site) -> Steps:
    call, at, done = site.call, 0, []
    for source in call.ins:
        n = source.shape[call.op.axis]
        part = call.out[(slice(None),) * call.op.axis + (slice(at, at + n),)]
        steps = copy_steps(site.queue, part, source)
        if steps is None:
            return None
        done += steps
        at += n
    return done


def write_slice(site: Site) -> Steps:
    """A slab whose start is read from its slots when the kernel is launched."""
    op, out, source = site.call.op, site.call.out, site.call.ins[1]
    slots = [(s, step) for s, step in zip(op.starts, steps_of(out), strict=True)
             if isinstance(s, ScalarSlot)]  # fmt: skip
    slab = out[(*_first_slab(op), ...)]
    if not slots:
        return copy_steps(site.queue, slab, source)
    found = _move_of(slab, source, starts=[step for _, step in slots])
    if found is None or not found.size:
        return None if found is None else []
    scale, walk = found.scale, found.walk

    def values() -> tuple[Any, ...]:
        start = sum(site.scalar(s) * step for s, step in slots)
        return slab, source, start // scale, walk

    shape = ck.launch_of("copy", size=found.size)
    return [launch_later(site.queue, "copy", shape, values, BYTES=found.element_bytes)]


def _first_slab(op: Any) -> tuple[slice, ...]:
    """The slab at start 0 on axes where a symbol says where it starts."""
    starts = (0 if isinstance(s, ScalarSlot) else s for s in op.starts)
    return tuple(slice(s, s + w) for s, w in zip(starts, op.widths, strict=True))


def write_at(site: Site) -> Steps:
    """`write_slice_at`: the offset is read from memory by the kernel, which refuses a bad one."""
    dest, source, found = _by_row(site)
    if found is None:
        return None
    shape = ck.launch_of("write_slice_at", size=found.size)
    return [
        launch(
            site.queue, "write_slice_at", shape, dest, source, site.call.ins[2], len(dest),
            site.error, found.walk, BYTES=found.element_bytes,
        )
    ]  # fmt: skip


def write_rotating(site: Site) -> Steps:
    op, (dest, source, found) = site.call.op, _by_row(site)
    if found is None:
        return None
    shape = ck.launch_of("write_slice_rotating", size=found.size)
    return [
        launch(
            site.queue, "write_slice_rotating", shape, dest, source, site.call.ins[2], op.modulus,
            op.sinks, site.error, found.walk, BYTES=found.element_bytes,
        )
    ]  # fmt: skip


def _by_row(site: Site) -> tuple[Array, Array, ck.Move | None]:
    """Both sides of a write with the axis it is on first."""
    axis, xp = site.call.op.axis, site.queue.cupy
    dest, source = (xp.moveaxis(a, axis, 0) for a in (site.call.out, site.call.ins[1]))
    return dest, source, _move_of(dest, source, by_row=True)


def write_rows_scratch(
    op: Any, ins: tuple[Spec, ...], out: Spec, multiprocessors: int
) -> tuple[Spec, ...]:
    return Spec((), i64), Spec((out.shape[0],), i32)


def write_rows(site: Site) -> Steps:
    """The row numbers are checked by one kernel, which says to the other how many it may use."""
    op, dest, (_, source, rows) = site.call.op, site.call.out, site.call.ins[:3]
    usable, owner = site.call.scratch
    found = _move_of(dest, source, by_row=True)
    if found is None or max(len(rows), len(dest)) >= 2**31 or not _is_line(rows):
        return None
    count = site.call.ins[3] if op.has_count else None
    width = {"BYTES": found.element_bytes}
    check = launch(
        site.queue, "write_rows_check", ck.launch_of("write_rows_check"), usable, owner, rows,
        len(rows), count, len(dest), site.error, **width,
    )  # fmt: skip
    shape = ck.launch_of("write_rows", size=found.size)
    values = (dest, source, rows, usable, found.walk)
    return [check, launch(site.queue, "write_rows", shape, *values, **width)]


def take(site: Site) -> Steps:
    """Rows by id. An id outside the table is refused, and gives zeros."""
    out, (table, ids) = site.call.out, site.call.ins
    lines = out.reshape(ids.size, *table.shape[1:])
    found = ck.move_of(
        lines.shape, steps_of(lines), steps_of(table), table.itemsize, by_row=True,
        addresses=addresses_of(lines, table),
    )  # fmt: skip
    if found is None or not _is_line(ids):
        return None
    shape, kind = ck.launch_of("take", size=found.size), site.call.in_specs[1].dtype.name
    return [
        launch(
            site.queue, "take", shape, lines, table, ids, ck.ID_TYPES[kind], len(table),
            site.error, found.walk, BYTES=found.element_bytes,
        )
    ]  # fmt: skip


def _is_line(array: Array) -> bool:
    """Whether the elements lie one behind the other."""
    return bool(array.flags.c_contiguous)
