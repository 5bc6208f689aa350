"""Norms, rotary embedding and matrix products on CUDA."""

from typing import Any

from lazykv.backends import cuda_kernels as ck
from lazykv.backends.cuda_body import store, widened
from lazykv.backends.cuda_site import (
    Site,
    Steps,
    addresses_of,
    even_rows,
    is_dense,
    launch,
    steps_of,
)
from lazykv.dtypes import f32, to_logical
from lazykv.spec import Spec

GEMV_ROWS = 8
"""Rows of a product up to which its matrix is read by a kernel of our own, which can be captured;
more are a product for cuBLAS."""


def rms_norm(site: Site) -> Steps:
    (x, weight), out = site.call.ins, site.call.out
    step, width = even_rows(x), x.shape[-1]
    if step is None or not is_dense(weight):
        return None
    rows = out.size // width
    shape = ck.launch_of("rms_norm", rows=rows)
    values = (out, x, weight, rows, width, step, site.call.op.eps)
    return [launch(site.queue, "rms_norm", shape, *values, ELEMENT=site.call.out_spec.dtype.name)]


def softmax(site: Site) -> Steps:
    (x,), out = site.call.ins, site.call.out
    step = even_rows(x)
    if step is None or site.call.op.axis != x.ndim - 1:
        return None
    rows, width = out.size // x.shape[-1], x.shape[-1]
    shape = ck.launch_of("softmax", rows=rows)
    values = (out, x, rows, width, step)
    return [launch(site.queue, "softmax", shape, *values, ELEMENT=site.call.out_spec.dtype.name)]


def rope(site: Site) -> Steps:
    (x, cos, sin), out = site.call.ins, site.call.out
    if x.ndim > 4 or not all(map(is_dense, (x, cos, sin))) or cos.strides != sin.strides:
        return None
    batch, heads, queries, dim = (1,) * (4 - x.ndim) + x.shape
    args = ck.struct(
        "rope", batch=batch, heads=heads, queries=queries, half=dim // 2,
        x_step=((0,) * (4 - x.ndim) + steps_of(x))[:3],
        table_step=((0,) * (3 - cos.ndim) + steps_of(cos))[:2],
        interleaved=site.call.op.interleaved,
    )  # fmt: skip
    shape, kind = ck.launch_of("rope", size=out.size // 2), site.call.out_spec.dtype.name
    return [launch(site.queue, "rope", shape, out, x, cos, sin, args, ELEMENT=kind)]


def _few_rows(ins: tuple[Spec, ...], out: Spec) -> tuple[int, int, int] | None:
    """Rows, K and columns of a product for `gemv`, or None."""
    k, n = ins[1].shape[-2:]
    if ins[1].rank != 2 or not out.size or not k or ins[0].dtype.itemsize > 4:
        return None
    rows = out.size // n
    return (rows, k, n) if rows <= GEMV_ROWS else None


def matmul_scratch(
    op: Any, ins: tuple[Spec, ...], out: Spec, multiprocessors: int
) -> tuple[Spec, ...]:
    few = _few_rows(ins, out)
    if few is None:
        return ()
    m, k, n = few
    # Narrower loads make fewer splits.
    splits = ck.gemv_splits(k, n, ck.gemv_vec(ins[1].dtype.itemsize, 1 << 20), multiprocessors)
    return (Spec((ck.gemv_scratch(m, n, splits),), f32),)


def matmul(site: Site) -> Steps:
    call, queue = site.call, site.queue
    few = _few_rows(call.in_specs, call.out_spec)
    if not call.in_specs[0].shape[-1]:
        return [(queue.clear, (call.out,))]
    a, b = call.ins
    step = even_rows(a)
    if few is None or step is None or not is_dense(b):
        return [(queue.run_body, (_blas, site))]
    m, k, n = few
    kind, w_step = call.out_spec.dtype.name, steps_of(b)[0]
    vec = ck.gemv_vec(b.itemsize, n, (w_step,), addresses_of(b))
    splits = ck.gemv_splits(k, n, vec, queue.multiprocessors)
    args = ck.struct("gemv", m=m, k=k, n=n, x_step=step, w_step=w_step, splits=splits)
    macros = {"INPUT": kind, "WEIGHT": kind, "LINES": ck.gemv_lines(m), "VEC": vec}
    part = call.scratch[0] if splits > 1 else None
    shape = ck.launch_of("gemv", n=n, vec=vec, splits=splits)
    steps = [launch(queue, "gemv", shape, call.out, a, b, part, args, **macros)]
    if splits > 1:
        shape = ck.launch_of("gemv_reduce", size=m * n)
        values = (call.out, part, m * n, splits)
        steps.append(launch(queue, "gemv_reduce", shape, *values, **macros))
    return steps


def _blas(site: Site) -> None:
    """The product by cuBLAS, in its dtype and with f32 sums for the 16-bit floats."""
    call, xp = site.call, site.queue.cupy
    site.queue.refuse_in_capture(
        f"a matmul of ({', '.join(map(str, call.in_specs))}) by cuBLAS, which is for more than "
        f"{GEMV_ROWS} rows and for matrices whose rows are not dense"
    )
    specs, arrays = (*call.in_specs, call.out_spec), (*call.ins, call.out)
    if call.ins[1].ndim > 2 and call.out_spec.dtype.itemsize == 2:  # CuPy has no batches of these
        a, b = (widened(site.queue, x, s.dtype) for x, s in zip(call.ins, specs[:2], strict=True))
        store(site.queue, call.out, call.out_spec.dtype, xp.matmul(a, b))
        return
    a, b, out = (to_logical(x, s.dtype) for x, s in zip(arrays, specs, strict=True))
    if b.ndim == 2:
        a, out = xp.ascontiguousarray(a).reshape(-1, a.shape[-1]), out.reshape(-1, out.shape[-1])
    xp.matmul(a, b, out=out)


def is_float(op: Any, ins: tuple[Spec, ...], out: Spec) -> bool:
    """Whether kernels have the dtype: they compute in f32."""
    return out.dtype.name in ("f32", "f16", "bf16")
