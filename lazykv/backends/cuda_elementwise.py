"""Elementwise ops on CUDA: one kernel, compiled for an expression and the dtypes of its operands.

Operands may be any views; the result is contiguous.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lazykv.backends import cuda_kernels as ck
from lazykv.backends.cuda_queue import Queue
from lazykv.backends.cuda_site import Site, Steps, launch, launch_later, steps_of
from lazykv.device import Array
from lazykv.dtypes import DType
from lazykv.ops import elementwise as ew
from lazykv.ops.move import Cast
from lazykv.spec import Spec
from lazykv.symbols import ScalarSlot

_FLOATS = ("f32", "f16", "bf16")
_INTEGERS = ("i8", "u8", "i32", "u32", "i64")
_CASTS = (*_FLOATS, *_INTEGERS, "f64", "bool")
_BITS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}

_UNARY: dict[type[Any], str] = {
    ew.Neg: "-x",
    ew.Exp: "expf(x)",
    ew.Sqrt: "sqrtf(x)",
    ew.Rsqrt: "1/sqrtf(x)",
    ew.Tanh: "tanhf(x)",
    # exp overflows to infinity for x below about -88, and x / infinity is the right -0.
    ew.Silu: "x/(1+expf(-x))",
    ew.Gelu: "x*((tanhf((x+x*x*x*{1!r}f)*{0!r}f)+1)*0.5f)".format(*ew.GELU_TANH),
}

_ARITHMETIC = {"add": "{0}+{1}", "subtract": "{0}-{1}", "multiply": "{0}*{1}",
               "divide": "{0}/{1}"}  # fmt: skip
"""By ufunc, for floats."""

_WRAPPING = {
    "add": "(u64){0}+(u64){1}",
    "subtract": "(u64){0}-(u64){1}",
    "multiply": "(u64){0}*(u64){1}",
    "remainder": "modulo({0},{1})",
}
"""For integers: unsigned ones wrap as NumPy's do, of whatever width the result is."""

_COMPARE = {"equal": "x==y", "not_equal": "x!=y", "less": "x<y", "less_equal": "x<=y",
            "greater": "x>y", "greater_equal": "x>=y"}  # fmt: skip


def _name(dt: DType) -> str:
    """What the kernel calls a dtype."""
    return "u8" if dt.name == "bool" else dt.name


def _template(op: Any, dt: DType) -> str | None:
    table = _ARITHMETIC if dt.name in _FLOATS else _WRAPPING if dt.name in _INTEGERS else {}
    return table.get(op.ufunc)


def runs_unary(op: Any, ins: tuple[Spec, ...], out: Spec) -> bool:
    return out.dtype.name in _FLOATS or (type(op) is ew.Neg and out.dtype.name in _INTEGERS)


def runs_binary(op: Any, ins: tuple[Spec, ...], out: Spec) -> bool:
    return _template(op, out.dtype) is not None


def runs_compare(op: Any, ins: tuple[Spec, ...], out: Spec) -> bool:
    return ins[0].dtype.name in _CASTS


def runs_cast(op: Cast, ins: tuple[Spec, ...], out: Spec) -> bool:
    return ins[0].dtype.name in _CASTS and out.dtype.name in _CASTS


def runs_fill(op: Any, ins: tuple[Spec, ...], out: Spec) -> bool:
    return out.dtype.name in (*_FLOATS, *_INTEGERS, "bool")


def unary(site: Site) -> Steps:
    call = site.call
    return _of_call(site, _UNARY[type(call.op)] if call.out_spec.dtype.is_float else "0-(u64)x")


def binary(site: Site) -> Steps:
    template = _template(site.call.op, site.call.out_spec.dtype)
    assert template is not None, "a rule has chosen what has an expression"
    return _of_call(site, template.format("x", "y"))


def binary_scalar(site: Site) -> Steps:
    op, dt = site.call.op, site.call.out_spec.dtype
    template, number = _template(op, dt), "real" if dt.is_float else "whole"
    assert template is not None, "a rule has chosen what has an expression"
    pair = (number, "x") if op.reverse else ("x", number)
    return _of_call(site, template.format(*pair), op.value)


def compare(site: Site) -> Steps:
    return _of_call(site, _COMPARE[site.call.op.ufunc])


def both(site: Site) -> Steps:
    """`And`: two conditions."""
    return _of_call(site, "x&&y")


def where(site: Site) -> Steps:
    """`Where`: elements are picked as raw bits."""
    call, raw = site.call, _BITS[site.call.out_spec.dtype.itemsize]
    return map_steps(site.queue, "x?y:z", (raw, "u8", raw, raw), call.out, call.ins)


def cast(site: Site) -> Steps:
    return _of_call(site, "!is_zero(x)" if site.call.out_spec.dtype.name == "bool" else "x")


def fill(site: Site) -> Steps:
    dt = site.call.out_spec.dtype
    return _of_call(site, "real" if dt.is_float else "whole", site.call.op.number())


def symbol(site: Site) -> Steps:
    """`SymValue`: the number goes with the launch."""
    call, value = site.call, site.call.op.value
    if not isinstance(value, ScalarSlot):
        return _of_call(site, "whole", value)
    args, macros = _arguments((), []), _macros("whole", (_name(call.out_spec.dtype),))
    shape = ck.launch_of("map", size=1)
    return [
        launch_later(
            site.queue, "map", shape,
            lambda: (call.out, None, None, None, 0, site.scalar(value), args), **macros,
        )
    ]  # fmt: skip


def iota(site: Site) -> Steps:
    return _of_call(site, "index")


def _of_call(site: Site, text: str, number: float = 0) -> Steps:
    call = site.call
    types = tuple(_name(s.dtype) for s in (call.out_spec, *call.in_specs))
    return map_steps(site.queue, text, types, call.out, call.ins, number)


def map_steps(
    queue: Queue, text: str, types: Sequence[str], out: Array, ins: Sequence[Array],
    number: float = 0,
) -> Steps:  # fmt: skip
    """``out = text`` over `ins`; `types` are what the kernel calls the dtypes of out and ins."""
    args = _arguments(out.shape, [steps_of(a) for a in ins])
    if args is None:
        return None
    with np.errstate(over="ignore"):  # what f32 cannot hold is infinite
        real = np.float32(number if "real" in text else 0)
    whole = number if "whole" in text else 0
    shape = ck.launch_of("map", size=out.size)
    pointers = [*ins, None, None, None][:3]
    return [launch(queue, "map", shape, out, *pointers, real, whole, args, **_macros(text, types))]


def _macros(text: str, types: Sequence[str]) -> dict[str, object]:
    out, x, y, z = [*types, "u8", "u8", "u8"][:4]
    return {"OUT": out, "X": x, "Y": y, "Z": z, "INPUTS": len(types) - 1, "EXPR": text}


def _arguments(shape: Sequence[int], operands: Sequence[Sequence[int]]) -> Any:
    """The operands as the kernel walks them, axes merged where all allow it; None if more than 6
    are left."""
    axes: list[tuple[int, ...]] = []  # an extent, and the step of every operand on it
    for n, *steps in zip(shape, *operands, strict=True):
        if n == 1:
            continue
        if axes and all(above == n * s for above, s in zip(axes[-1][1:], steps, strict=True)):
            axes[-1] = (axes[-1][0] * n, *steps)
        else:
            axes.append((n, *steps))
    if len(axes) > ck.AXES:
        return None
    columns = np.zeros((4, ck.AXES), np.int64)
    for i, axis in enumerate(axes):
        columns[: len(axis), i] = axis
    size = math.prod(shape)
    return ck.struct(
        "map", shape=columns[0], x=columns[1], y=columns[2], z=columns[3], size=size, rank=len(axes)
    )
