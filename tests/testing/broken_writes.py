"""Backends that write the wrong bytes, or into the wrong memory."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
from broken_backends import Cpu, caught, go, with_operand

from lazykv.device import Kernel
from lazykv.ops.attention import Attention
from lazykv.ops.elementwise import Add
from lazykv.ops.move import Copy
from lazykv.ops.write import WriteSlice, WriteSliceDoff, WriteSliceRotating
from lazykv.ops.write_rows import WriteRows


@caught("core/test_writes.py", "test_write[at_offset_axis1-f32-", "axis1-f32")
class OffsetIsOneOff(Cpu):
    ops = (WriteSliceDoff,)

    def change(self, call):
        return with_operand(call, 2, call.ins[2] + 1)


@caught("core/test_writes.py", "test_write[slab_inside-f32-contiguous]", "slab and f32")
class CopiesInsteadOfWritingInPlace(Cpu):
    ops = (WriteSlice,)

    def change(self, call):
        return replace(call, out=call.out.copy())


@caught("core/test_writes.py", "test_write[rows-f32-", "rows and f32")
class DropsTheLastRow(Cpu):
    ops = (WriteRows,)

    def change(self, call):
        if call.op.has_count:
            return call
        return replace(call, ins=(call.ins[0], call.ins[1][:-1], call.ins[2][:-1]))


@caught("core/test_bounds.py", "writes_nothing[at_offset_-1]", "at_offset")
class WrapsOffsets(Cpu):
    ops = (WriteSliceDoff,)

    def change(self, call):
        room = call.out.shape[call.op.axis] - call.ins[1].shape[call.op.axis]
        return with_operand(call, 2, call.ins[2] % (room + 1))


@caught("core/test_bounds.py", "writes_nothing[at_offset_4]", "at_offset")
class ClampsOffsets(Cpu):
    ops = (WriteSliceDoff,)

    def change(self, call):
        room = call.out.shape[call.op.axis] - call.ins[1].shape[call.op.axis]
        return with_operand(call, 2, np.clip(call.ins[2], 0, room))


@caught("core/test_writes.py", "test_write[slab-f32-contiguous]", "slab and f32")
class BroadcastsOneRow(Cpu):
    ops = (WriteSlice,)

    def change(self, call):
        source = call.ins[1]
        if not source.size:
            return call
        return with_operand(call, 1, np.broadcast_to(source[..., :1], source.shape))


@caught("core/test_writes.py", "test_write[slab_inside-f32-contiguous]", "slab and f32")
class WritesOutsideTheSlab(Cpu):
    """A vector store that is wider than the row's end."""

    ops = (WriteSlice,)

    def run(self, inner, call):
        go(inner, call)
        widths = call.op.widths
        if all(isinstance(s, int) for s in call.op.starts) and 0 not in widths:
            ends = [s + w - 1 for s, w in zip(call.op.starts, widths, strict=True)]
            if ends and ends[-1] + 1 < call.out.shape[-1]:
                call.out[(*ends[:-1], ends[-1] + 1)] = 0


@caught("core/test_writes.py", "rows_counted-f32-", "rows_counted-f32")
class WritesUncountedRows(Cpu):
    ops = (WriteRows,)

    def run(self, inner, call):
        rows = call.ins[2]
        keep = (rows >= 0) & (rows < len(call.out))
        call.out[rows[keep]] = call.ins[1][keep]


@caught("core/test_writes.py", "rotating_sinks", "rotating_sinks-f32 or rotating_sinks_wraps-f32")
class ForgetsSinks(Cpu):
    ops = (WriteSliceRotating,)

    def change(self, call):
        return replace(call, op=replace(call.op, sinks=0))


@caught("core/test_writes.py", "rotating_wraps", "rotating_wraps-f32")
class RingStopsAtItsEnd(Cpu):
    ops = (WriteSliceRotating,)

    def change(self, call):
        op, axis = call.op, call.op.axis
        slot = op.pieces(int(call.ins[2]), call.ins[1].shape[axis])[0][0]
        rows = np.moveaxis(call.ins[1], axis, 0)[: max(0, op.modulus - slot)]
        return with_operand(call, 1, np.moveaxis(rows, 0, axis))


# Memory that a write reads and destroys


class MovesElements(Cpu):
    """Reads a row from where it was copied from, not from the copy that was made because a write
    destroys the row, and moves its elements one after another."""

    ops = (WriteSliceDoff,)
    step: ClassVar[int]

    def __init__(self):
        super().__init__()
        self.copied = {}

    def kernel(self, op, ins, out):
        inner = super().kernel(op, ins, out)
        return Kernel(partial(self.note, inner)) if isinstance(op, Copy) else inner

    def note(self, inner, call):
        self.copied[call.out.ctypes.data] = call.ins[0]
        return inner.emit(call)

    def run(self, inner, call):
        source = self.copied.get(call.ins[1].ctypes.data, call.ins[1])
        nowhere = np.full(call.out.shape, source.size)
        numbers = np.arange(source.size).reshape(source.shape)
        came = call.op.body(np, nowhere, numbers, *call.ins[2:])
        moves = sorted((n, at) for at, n in np.ndenumerate(came) if n < source.size)
        for n, at in moves[:: self.step]:
            call.out[at] = source.flat[n]


@caught(
    "core/test_writes.py", "memory_that_is_written[at_offset_axis0-up-i32]", "memory_that and i32"
)
class MovesFrontToBack(MovesElements):
    step = 1


@caught(
    "core/test_writes.py", "memory_that_is_written[at_offset_axis0-down-i32]", "memory_that and i32"
)
class MovesBackToFront(MovesElements):
    step = -1


@caught("core/test_elementwise.py", "test_op[add-f32-overlapping]", "add and f32")
class TakesViewsOfOneMemoryForOne(Cpu):
    """Loads an operand once, and knows it by the memory it lies in."""

    ops = (Add,)

    def change(self, call):
        a, b = call.ins
        return with_operand(call, 1, a) if np.shares_memory(a, b) else call


# Held plans


@caught(
    "session/test_held_plans.py", "test_a_rebound_plan_works_on_the_other_cache_only", "rebound"
)
class UsesAnOldPointer(Cpu):
    """Resolves a step once, for the first memory that it sees."""

    def kernel(self, op, ins, out):
        inner = super().kernel(op, ins, out)
        if not isinstance(op, WriteSliceDoff):
            return inner
        first = []

        def emit(call):
            first.append(call.out)
            return inner.emit(replace(call, out=first[0]))

        return Kernel(emit, inner.scratch)


@caught("session/test_held_plans.py", "test_steps_equal_the_reference[f32-symbol]", "reference")
class BakesTheFirstPosition(Cpu):
    ops = (WriteSlice, Attention)

    def __init__(self):
        super().__init__()
        self.baked = {}

    def change(self, call):
        return replace(call, scalars=self.baked.setdefault(call.op.name, list(call.scalars)))
