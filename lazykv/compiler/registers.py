"""Registers: the arrays of one plan, and the resolved calls made from them.

A register in an arena never moves. One in a leaf follows the storage bound to the leaf: new calls
are *staged* first and take effect all together, so a failure changes nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lazykv.backend_call import BackendCall
from lazykv.compiler.ir import Output
from lazykv.compiler.kernels import emit
from lazykv.compiler.program import Home, Program, ProgramStep, Register
from lazykv.device import (
    Array,
    Backend,
    Call,
    DeviceLocation,
    HostArray,
    Kernel,
    Step,
    device,
)
from lazykv.dtypes import to_logical
from lazykv.layout import Layout
from lazykv.ops.move import Copy
from lazykv.storage import Storage
from lazykv.symbols import ScalarSlot


@dataclass(frozen=True, slots=True)
class Moving:
    """A register whose view moves with a symbol: made anew each time it is used."""

    backend: Backend
    buffer: Array
    register: Register
    first: int
    """Element of the buffer at which the register's own buffer begins."""

    def view(self, scalars: list[int]) -> Array:
        layout = self.register.layout
        assert isinstance(layout.offset, ScalarSlot), "only symbolic offsets move"
        offset = self.first + scalars[layout.offset.index]
        at = Layout(offset, layout.shape, layout.strides)
        return self.backend.view(self.buffer, self.register.spec.dtype, at)


@dataclass(frozen=True, slots=True)
class Staged:
    """Arrays and calls that would hold for other storages; nothing uses them yet."""

    arrays: dict[int, Any]
    calls: dict[int, tuple[Step, ...]]


class Registers:
    """Arrays by register number, calls by step, and the values that calls read when they run.

    `scalars` are the values of symbolic expressions and `results` the arrays handed to the caller;
    both lists live as long as the plan, because calls hold on to them.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scalars = [0] * len(program.scalars)
        self.results: list[Any] = [None] * len(program.results)
        self.arenas = {
            place: Storage.allocate((size,), "u8", place) for place, size in program.arenas.items()
        }
        self._arrays: dict[int, Any] = {
            n: self._in_arena(r) for n, r in enumerate(program.registers) if r.home is Home.ARENA
        }
        self._calls: dict[int, tuple[Step, ...]] = {}

    def stage(self, storages: Sequence[Storage | None], leaves: Iterable[int]) -> Staged:
        """The arrays and calls that change if some leaves have these storages."""
        changed, program = set(leaves), self.program
        arrays = dict[int, Any]()
        for n, r in enumerate(program.registers):
            store = storages[r.index] if r.home is Home.LEAF and r.index in changed else None
            if store is not None:
                arrays[n] = _operand(device(r.location).backend, store.array, r, 0)
        now = {**self._arrays, **arrays}
        calls = {
            n: tuple(self._emit(step, now))
            for n, step in enumerate(program.steps)
            if n not in self._calls or any(i in arrays for i in (*step.inputs, step.output))
        }
        return Staged(arrays, calls)

    def commit(self, staged: Staged) -> list[Step]:
        """Take staged arrays and calls; returns all calls in order."""
        self._arrays.update(staged.arrays)
        self._calls.update(staged.calls)
        return [call for n in range(len(self.program.steps)) for call in self._calls[n]]

    def calls_of(self, step: int) -> tuple[Step, ...]:
        """The calls of one step."""
        return self._calls[step]

    def array_of(self, register: int) -> Any:
        """The array of a register, or how to make it if it moves with a symbol."""
        return self._arrays[register]

    def copy_out(self, register: int) -> HostArray:
        """A host copy of what a register holds now, in its logical dtype."""
        r = self.program.registers[register]
        with BackendCall(r.location, "copy_out"):
            array = device(r.location).backend.copy_out(_now(self._arrays[register], self.scalars))
        return to_logical(array, r.spec.dtype)

    def step_of_call(self, index: int) -> int:
        """Which step the call at this place in the flat list belongs to."""
        steps = range(len(self.program.steps))
        return [n for n in steps for _ in self._calls[n]][index]

    def _in_arena(self, r: Register) -> Any:
        backend, size = device(r.location).backend, r.spec.dtype.itemsize
        if r.location not in self.arenas:  # every intermediate there is empty
            return _operand(backend, backend.allocate(0, r.location), r, 0)
        # Arena offsets are multiples of the alignment, so of every item size.
        return _operand(backend, self.arenas[r.location].array, r, r.index // size)

    def _emit(self, step: ProgramStep, arrays: dict[int, Any]) -> Iterable[Step]:
        """The calls of one step, with arrays in place of registers."""
        registers = self.program.registers
        operands = tuple(arrays[i] for i in step.inputs)
        if isinstance(step.op, Output):
            backend = device(registers[step.output].location).backend
            return [
                (_hand_over, (self.results, step.op.position, backend, operands[0], self.scalars))
            ]
        out = arrays[step.output]
        source = (
            registers[step.inputs[0]].location if step.inputs else registers[step.output].location
        )
        if isinstance(step.op, Copy) and source != registers[step.output].location:
            ends = (source, registers[step.output].location)
            return [(_transfer, (*ends, operands[0], out, self.scalars))]
        assert step.kernel is not None, "only results have no kernel"
        specs = tuple(registers[i].spec for i in step.inputs)
        scratch = tuple(arrays[i] for i in step.scratch)
        call = Call(
            step.op, operands, out, specs, registers[step.output].spec, scratch, self.scalars
        )
        if any(isinstance(a, Moving) for a in (*operands, out)):
            return [(_run_moving, (step.kernel, call))]
        return emit(registers[step.output].location, step.kernel, call)

    def take_results(self) -> list[HostArray]:
        """The results of this pass; the next pass makes new ones."""
        out = self.results[:]
        self.results[:] = [None] * len(out)
        return out


def _operand(backend: Backend, buffer: Array, r: Register, first: int) -> Any:
    layout = r.layout
    if isinstance(layout.offset, ScalarSlot):
        return Moving(backend, buffer, r, first)
    assert isinstance(layout.offset, int), "a compiled offset is a number or a slot"
    at = Layout(first + layout.offset, layout.shape, layout.strides)
    return backend.view(buffer, r.spec.dtype, at)


# Calls hold the lists they use and not their `Registers`: a plan must go when its last user does,
# and a cycle would keep its arenas.


def _now(operand: Any, scalars: list[int]) -> Array:
    return operand.view(scalars) if isinstance(operand, Moving) else operand


def _hand_over(
    results: list[Any], position: int, backend: Backend, operand: Any, scalars: list[int]
) -> None:
    results[position] = backend.copy_out(_now(operand, scalars))


def _transfer(
    from_: DeviceLocation, to: DeviceLocation, operand: Any, out: Array, scalars: list[int]
) -> None:
    """Between two locations: by their backend if it serves both, else by way of the host."""
    source, dest = device(from_).backend, device(to).backend
    if source is dest:
        source.transfer(out, to, _now(operand, scalars), from_)
    else:
        dest.copy_in(out, source.copy_out(_now(operand, scalars)))


def _run_moving(kernel: Kernel, call: Call) -> None:
    """Run a kernel some of whose operands move with a symbol: resolve them, then its calls."""
    at = [a.view(call.scalars) if isinstance(a, Moving) else a for a in (*call.ins, call.out)]
    now = Call(
        call.op, tuple(at[:-1]), at[-1], call.in_specs, call.out_spec, call.scratch, call.scalars
    )
    for f, args in kernel.emit(now):
        f(*args)
