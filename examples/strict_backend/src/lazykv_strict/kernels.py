"""How ops run on the strict devices: by their portable bodies, and writes by their own kernels."""

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import array_api_strict as strict

from lazykv.device import Call, Kernel, Step
from lazykv.ops.op import Op
from lazykv.ops.write import WriteSlice, WriteSliceDoff, WriteSliceRotating
from lazykv.spec import Spec
from lazykv.symbols import ScalarSlot
from lazykv_strict.memory import DEVICES, DTYPES, StrictArray


def kernel_for(op: Op, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
    """A kernel of the op's own, or its body; with neither the compiler lowers the op."""
    if any(s.dtype.name not in DTYPES for s in (*ins, out)):
        return None
    has_body = type(op).body is not Op.body
    return _OWN.get(type(op), _BODY if has_body else None)


def _with_values(op: Any, scalars: list[int]) -> Any:
    """The op with the present values of symbols in its fields."""
    return op.map_dims(lambda d: scalars[d.index] if isinstance(d, ScalarSlot) else d)


# Bodies


def _namespace(device: strict.Device) -> SimpleNamespace:
    """array-api-strict with a current device: a body that makes an array does not name one."""
    names = {n: getattr(strict, n) for n in strict.__all__}
    makers = ("arange", "asarray", "empty", "full", "ones", "zeros")
    return SimpleNamespace(**{**names, **{n: partial(names[n], device=device) for n in makers}})


_NAMESPACES = {place: _namespace(device) for place, device in DEVICES.items()}


def _emit_body(call: Call) -> Iterable[Step]:
    return [(_run_body, (call,))]


def _run_body(call: Call) -> None:
    op = _with_values(call.op, call.scalars)
    operands = [a.load() for a in call.ins]
    call.out.store(op.body(_NAMESPACES[call.out.location], *operands))


_BODY = Kernel(_emit_body)


# Writes: only the slab is stored, where a body would make the whole destination anew.


def _emit_write_slice(call: Call) -> Iterable[Step]:
    return [(_write_slice, (call.op, call.out, call.ins[1], call.scalars))]


def _write_slice(op: WriteSlice, dest: StrictArray, src: StrictArray, scalars: list[int]) -> None:
    dest.part(_with_values(op, scalars).index()).store(src.load())


def _emit_write_at(call: Call) -> Iterable[Step]:
    return [(_write_at, (call.op, call.out, *call.ins[1:]))]


def _write_at(op: WriteSliceDoff, dest: StrictArray, src: StrictArray, offset: StrictArray) -> None:
    rows = src.shape[op.axis]
    start = op.start(int(offset.load()), rows, dest.shape[op.axis])  # refuses, or is in bounds
    dest.part(_rows(op.axis, start, rows)).store(src.load())


def _emit_write_rotating(call: Call) -> Iterable[Step]:
    return [(_write_rotating, (call.op, call.out, *call.ins[1:]))]


def _write_rotating(
    op: WriteSliceRotating, dest: StrictArray, src: StrictArray, position: StrictArray
) -> None:
    for slot, row, n in op.pieces(int(position.load()), src.shape[op.axis]):
        piece = src.part(_rows(op.axis, row, n)).load()
        dest.part(_rows(op.axis, slot, n)).store(piece)


def _rows(axis: int, start: int, n: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, start + n))


_OWN: dict[type[Op], Kernel] = {
    WriteSlice: Kernel(_emit_write_slice),
    WriteSliceDoff: Kernel(_emit_write_at),
    WriteSliceRotating: Kernel(_emit_write_rotating),
}
