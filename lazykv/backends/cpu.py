"""The CPU backend: NumPy memory and kernels.

A kernel returns the NumPy calls to make, with every argument resolved and constants wrapped as 0-d
arrays (a Python float operand costs a ufunc twice as much). What has no kernel here runs the op's
portable body, in f32 for the 16-bit floats.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from lazykv.backends.cpu_attention import (
    NARROW_ATTENTION,
    WIDE_ATTENTION,
    runs_narrow,
    runs_wide,
)
from lazykv.backends.cpu_body import PORTABLE, portable
from lazykv.backends.cpu_latent import LATENT_ATTENTION, runs_latent
from lazykv.backends.cpu_paged import PAGED_ATTENTION, runs_paged
from lazykv.backends.cpu_ring import RING_ATTENTION, runs_ring
from lazykv.backends.cpu_write_rows import WRITE_ROWS
from lazykv.device import (
    API_VERSION,
    CPU,
    Array,
    Backend,
    Call,
    Capabilities,
    DeviceLocation,
    HostArray,
    Kernel,
    Step,
)
from lazykv.dlpack import HOST, Lent, host_view
from lazykv.dtypes import DType, f32
from lazykv.errors import OutOfMemory
from lazykv.layout import Layout
from lazykv.ops import elementwise as ew
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.matmul import MatMul
from lazykv.ops.move import Copy, Take
from lazykv.ops.norm import RmsNorm
from lazykv.ops.op import Op
from lazykv.ops.paged_attention import PagedAttention
from lazykv.ops.ring_attention import RingAttention
from lazykv.ops.rope import Rope
from lazykv.ops.sources import ZeroFill
from lazykv.ops.views import View
from lazykv.ops.write import WriteSlice, WriteSliceDoff, WriteSliceRotating
from lazykv.ops.write_rows import WriteRows
from lazykv.spec import Spec
from lazykv.symbols import ScalarSlot

_ALIGNMENT = 64
_Rule = Callable[[Any, tuple[Spec, ...], Spec], bool]


class CpuBackend(Backend):
    """Serves ``cpu``."""

    name: ClassVar[str] = "cpu"
    api_version: ClassVar[int] = API_VERSION
    capabilities = Capabilities(host_memory=True)
    survives_fork: ClassVar[bool] = True
    dlpack_device_type: ClassVar[int | None] = HOST
    xp = np

    def locations(self) -> tuple[DeviceLocation, ...]:
        return (CPU,)

    def facts(self, location: DeviceLocation) -> dict[str, str]:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return {"blas": f"{blas['name']} {blas['version']}"}

    def allocate(self, nbytes: int, location: DeviceLocation) -> Array:
        try:
            raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
        except (MemoryError, ValueError) as e:
            raise OutOfMemory(f"allocate on {location}: got no memory for {nbytes} bytes") from e
        skip = -raw.ctypes.data % _ALIGNMENT
        return raw[skip : skip + nbytes]

    def view(self, buffer: Array, dtype: DType, layout: Layout) -> Array:
        line = buffer.reshape(-1).view(dtype.raw)
        assert isinstance(layout.offset, int), "a view is made when its offset is known"
        strides = tuple(s * dtype.itemsize for s in layout.strides)
        return np.lib.stride_tricks.as_strided(line[layout.offset :], layout.shape, strides)

    def adopt(self, memory: Lent, location: DeviceLocation) -> Array:
        where = memory.address, memory.read_only
        bytes_ = {"shape": (memory.nbytes,), "typestr": "|u1", "data": where, "version": 3}
        return host_view(bytes_, memory)

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def copy_in(self, dest: Array, source: HostArray) -> None:
        dest[...] = source

    def feeder(self, dest: Array) -> Callable[[HostArray], object]:
        return partial(dest.__setitem__, ...)  # no Python-level call per token

    def copy_out(self, source: Array) -> HostArray:
        return np.array(source, order="C")

    def kernel(self, op: Op, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
        for rule, kernel in _KERNELS.get(type(op), ()):
            if rule(op, ins, out):
                return kernel
        if type(op).body is not Op.body and op.destroys is None:
            return PORTABLE
        return None


def _any(op: Any, ins: tuple[Spec, ...], out: Spec) -> bool:
    return True


def _all_f32(op: Any, ins: tuple[Spec, ...], out: Spec) -> bool:
    return all(s.dtype is f32 for s in ins)


def _plain_numbers(op: Any, ins: tuple[Spec, ...], out: Spec) -> bool:
    return not any(s.dtype.is_bits or s.dtype.name == "f16" for s in ins)


# Moves and writes: elements are copied as raw bits.


def _move(call: Call) -> Iterable[Step]:
    """A view that had to become a copy: the elements of the source in row-major order."""
    source = call.ins[0]
    return [(_assign, (call.out.reshape(source.shape), source))]


def _assign(dest: Array, source: Array) -> None:
    dest[...] = source


def _zero_fill(call: Call) -> Iterable[Step]:
    return [(call.out.fill, (0,))]


def _write_slice(call: Call) -> Iterable[Step]:
    """A slab with fixed bounds is one view made now; else the start is read from its slot."""
    starts, widths = call.op.starts, call.op.widths
    out, src = call.out, call.ins[1]
    dynamic = [a for a, s in enumerate(starts) if isinstance(s, ScalarSlot)]
    fixed = tuple(
        slice(None) if a in dynamic else slice(s, s + w)
        for a, (s, w) in enumerate(zip(starts, widths, strict=True))
    )
    slab = out[(*fixed, ...)]  # the Ellipsis keeps rank 0 an array
    if not dynamic:
        return [(_assign, (slab, src))]
    if len(dynamic) == 1:
        # Position first and extents of 1 gone: `rows[p] = row` is the cheapest form NumPy has.
        axis, width = dynamic[0], widths[dynamic[0]]
        rows, row = np.moveaxis(slab, axis, 0), np.moveaxis(src, axis, 0)
        drop = tuple(a for a in range(1, row.ndim) if row.shape[a] == 1)
        rows, row = np.squeeze(rows, drop), np.squeeze(row, drop)
        slot = starts[axis].index
        if width == 1:
            return [(_write_row, (rows, call.scalars, slot, row[0, ...]))]
        return [(_write_rows, (rows, call.scalars, slot, width, row))]
    return [(_write_slab, (call.op, slab, src, call.scalars))]


def _write_row(rows: Array, scalars: list[int], slot: int, row: Array) -> None:
    rows[scalars[slot]] = row


def _write_rows(rows: Array, scalars: list[int], slot: int, width: int, source: Array) -> None:
    start = scalars[slot]
    rows[start : start + width] = source


def _write_slab(op: WriteSlice, slab: Array, src: Array, scalars: list[int]) -> None:
    at = op.map_dims(lambda d: scalars[d.index] if isinstance(d, ScalarSlot) else 0)
    starts = [
        s if isinstance(d, ScalarSlot) else 0 for s, d in zip(at.starts, op.starts, strict=True)
    ]
    slab[tuple(slice(s, s + w) for s, w in zip(starts, op.widths, strict=True))] = src  # type: ignore[operator]


def _write_at(call: Call) -> Iterable[Step]:
    axis = call.op.axis
    rows, source = np.moveaxis(call.out, axis, 0), np.moveaxis(call.ins[1], axis, 0)
    return [(_write_at_offset, (call.op, rows, source, call.ins[2]))]


def _write_at_offset(op: WriteSliceDoff, rows: Array, source: Array, offset: Array) -> None:
    n = len(source)
    start = op.start(int(offset), n, len(rows))
    rows[start : start + n] = source


def _write_rotating(call: Call) -> Iterable[Step]:
    axis = call.op.axis
    rows, source = np.moveaxis(call.out, axis, 0), np.moveaxis(call.ins[1], axis, 0)
    return [(_write_ring, (call.op, rows, source, call.ins[2]))]


def _write_ring(op: WriteSliceRotating, ring: Array, source: Array, position: Array) -> None:
    for slot, row, n in op.pieces(int(position), len(source)):
        ring[slot : slot + n] = source[row : row + n]


def _take(call: Call) -> Iterable[Step]:
    return [(_take_rows, (call.op, call.ins[0], call.ins[1], call.out))]


def _take_rows(op: Take, table: Array, ids: Array, out: Array) -> None:
    if ids.size:
        op.check(int(ids.min()), int(ids.max()), len(table))
        if table.flags.c_contiguous:
            # mode="clip" only because "raise" buffers the output; ids are known to be in range.
            np.take(table, ids, axis=0, out=out, mode="clip")
        else:  # np.take would first copy the whole table
            out[...] = table[ids]


# Arithmetic in f32, or in whatever NumPy computes in natively.


def _lines(*arrays: Array) -> tuple[Array, ...]:
    """The arrays as 1-D where all are contiguous: a ufunc then has no axes to walk."""
    if all(a.flags.c_contiguous for a in arrays):
        return tuple(a.reshape(-1) for a in arrays)
    return arrays


def _binary(call: Call) -> Iterable[Step]:
    return [(getattr(np, call.op.ufunc), _lines(*call.ins, call.out))]


def _binary_scalar(call: Call) -> Iterable[Step]:
    number = np.asarray(call.op.value, dtype=call.ins[0].dtype)
    array, out = _lines(call.ins[0], call.out)
    pair = (number, array) if call.op.reverse else (array, number)
    return [(getattr(np, call.op.ufunc), (*pair, out))]


def _silu(call: Call) -> Iterable[Step]:
    return [(_silu_into, _lines(call.ins[0], call.out))]


_ONE = np.asarray(1, np.float32)


def _silu_into(x: Array, out: Array) -> None:
    # exp overflows to inf for x below about -88, and x / inf is the right -0.
    np.negative(x, out)
    np.exp(out, out)
    np.add(out, _ONE, out)
    np.divide(x, out, out)


def _matmul(call: Call) -> Iterable[Step]:
    a, b, out = call.ins[0], call.ins[1], call.out
    if not a.shape[-1]:
        return [(out.fill, (0,))]
    if b.ndim == 2 and a.size == a.shape[-1]:
        # dot on vectors goes straight to gemv; matmul costs twice as much per call.
        return [(np.dot, (a.reshape(-1), b, out.reshape(-1)))]
    if b.ndim == 2 and a.flags.c_contiguous:
        lines = a.reshape(-1, a.shape[-1])
        return [(np.dot, (lines, b, out.reshape(len(lines), -1)))] if out.size else []
    return [(np.matmul, (a, b, out))]


def _rms_norm_scratch(op: Any, ins: tuple[Spec, ...], out: Spec) -> tuple[Spec, ...]:
    return (Spec((*out.shape[:-1], 1), f32),)


def _rms_norm(call: Call) -> Iterable[Step]:
    (x, weight), out, scale = call.ins, call.out, call.scratch[0]
    if x.size == x.shape[-1]:
        lines = (a.reshape(-1) for a in (x, weight, scale, out))  # views, also of strided rows
        return [(_rms_norm_row, (*lines, 1 / x.size, call.op.eps))]
    width = np.asarray(x.shape[-1], np.float32)
    eps = np.asarray(call.op.eps, np.float32)
    return [
        (_row_squares, (x, scale)),
        (np.divide, (scale, width, scale)),
        (np.add, (scale, eps, scale)),
        (np.sqrt, (scale, scale)),
        (np.divide, (x, scale, out)),
        (np.multiply, (out, weight, out)),
    ]


def _rms_norm_row(
    x: Array, weight: Array, scale: Array, out: Array, per_element: float, eps: float
) -> None:
    """One row: its sum of squares is one dot product, and the scale is one number."""
    square = np.dot(x, x) * per_element + eps
    scale[0] = 1 / math.sqrt(square) if square else math.inf
    np.multiply(x, scale, out)
    np.multiply(out, weight, out)


def _row_squares(x: Array, out: Array) -> None:
    np.einsum("...i,...i->...", x, x, out=out[..., 0])


def _turn_scratch(op: Rope, ins: tuple[Spec, ...], out: Spec) -> tuple[Spec, ...]:
    return (Spec((*ins[1].shape, 2), f32),)


def _interleaved_f32(op: Rope, ins: tuple[Spec, ...], out: Spec) -> bool:
    return op.interleaved and _all_f32(op, ins, out)


def _rope_interleaved(call: Call) -> Iterable[Step]:
    """Pairs side by side are complex numbers, and rotating them is one multiplication."""
    (x, cos, sin), out, table = call.ins, call.out, call.scratch[0]
    if x.strides[-1] != x.itemsize:
        return portable(call)
    turn = table.view(np.complex64)[..., 0]
    if turn.ndim == 3:
        turn = turn[:, None]
    real, imaginary = table[..., 0], table[..., 1]
    return [
        (_assign, (real, cos)),
        (_assign, (imaginary, sin)),
        (np.multiply, (x.view(np.complex64), turn, out.view(np.complex64))),
    ]


def _half_scratch(op: Rope, ins: tuple[Spec, ...], out: Spec) -> tuple[Spec, ...]:
    return (Spec((*out.shape[:-1], out.shape[-1] // 2), f32),)


def _rope_halves(call: Call) -> Iterable[Step]:
    """Pairs half a row apart: two products and their sum, for each half."""
    (x, cos, sin), out, part = call.ins, call.out, call.scratch[0]
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    first, second = call.op.pairs(part.shape[-1])
    a, b = x[..., first], x[..., second]
    low, high = out[..., first], out[..., second]
    return [
        (np.multiply, (a, cos, low)),
        (np.multiply, (b, sin, part)),
        (np.subtract, (low, part, low)),
        (np.multiply, (b, cos, high)),
        (np.multiply, (a, sin, part)),
        (np.add, (high, part, high)),
    ]


_KERNELS: dict[type[Op], list[tuple[_Rule, Kernel]]] = {
    ZeroFill: [(_any, Kernel(_zero_fill))],
    WriteSlice: [(_any, Kernel(_write_slice))],
    WriteSliceDoff: [(_any, Kernel(_write_at))],
    WriteSliceRotating: [(_any, Kernel(_write_rotating))],
    WriteRows: [(_any, WRITE_ROWS)],
    Copy: [(_any, Kernel(_move))],
    Take: [(_any, Kernel(_take))],
    MatMul: [(_all_f32, Kernel(_matmul))],
    RmsNorm: [(_all_f32, Kernel(_rms_norm, _rms_norm_scratch))],
    Rope: [
        (_interleaved_f32, Kernel(_rope_interleaved, _turn_scratch)),
        (_all_f32, Kernel(_rope_halves, _half_scratch)),
    ],
    Attention: [(runs_wide, WIDE_ATTENTION), (runs_narrow, NARROW_ATTENTION)],
    LatentAttention: [(runs_latent, LATENT_ATTENTION)],
    RingAttention: [(runs_ring, RING_ATTENTION)],
    PagedAttention: [(runs_paged, PAGED_ATTENTION)],
    ew.Silu: [(_all_f32, Kernel(_silu))],
}
for _view in View.__subclasses__():
    _KERNELS[_view] = [(_any, Kernel(_move))]
for _op in (*ew.Binary.__subclasses__(), *ew.Compare.__subclasses__()):
    _KERNELS[_op] = [(_plain_numbers, Kernel(_binary))]
for _scalar_op in ew.BinaryScalar.__subclasses__():
    _KERNELS[_scalar_op] = [(_plain_numbers, Kernel(_binary_scalar))]
