"""Portable op bodies on the CPU: what runs where an op has no kernel for its operands."""

from collections.abc import Iterable

import numpy as np

from lazykv.device import Array, Call, Kernel, Step
from lazykv.dtypes import DType, to_logical
from lazykv.symbols import ScalarSlot


def portable(call: Call) -> Iterable[Step]:
    """The op's body as one step; also for a kernel that finds arrays it has no way with."""
    return [(_run_body, (call,))]


def _run_body(call: Call) -> None:
    """Run an op's body: operands widened to the dtype of arithmetic, the result rounded back."""
    op, scalars = call.op, call.scalars
    if op.dims:
        op = op.map_dims(lambda d: scalars[d.index] if isinstance(d, ScalarSlot) else d)
    if op.bits:
        call.out[...] = op.body(np, *call.ins)
        return
    wide = [_widen(a, s.dtype) for a, s in zip(call.ins, call.in_specs, strict=True)]
    to_logical(call.out, call.out_spec.dtype)[...] = op.body(np, *wide)


def _widen(array: Array, dtype: DType) -> Array:
    logical = to_logical(array, dtype)
    return logical if dtype.compute == dtype.numpy else logical.astype(dtype.compute)


PORTABLE = Kernel(portable)
