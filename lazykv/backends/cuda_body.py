"""Portable op bodies on CUDA, by CuPy: what runs where an op has no kernel for its operands.

Bodies make temporary arrays and may wait for the host, so they cannot be captured.
"""

from lazykv.backends.cuda_elementwise import map_steps
from lazykv.backends.cuda_queue import Queue
from lazykv.backends.cuda_site import Site
from lazykv.device import Array, Step
from lazykv.dtypes import DType, f32, f64
from lazykv.symbols import ScalarSlot


def portable(site: Site) -> list[Step]:
    """The op's body as one step."""
    return [(site.queue.run_body, (_run_body, site))]


def _run_body(site: Site) -> None:
    """Run an op's body: operands widened to the dtype of arithmetic, the result rounded back."""
    call, queue, op = site.call, site.queue, site.call.op
    if queue.capturing:
        specs = ", ".join(map(str, call.in_specs))
        queue.refuse_in_capture(f"{op.name} of ({specs}), for which there is no kernel")
    if op.dims:
        op = op.map_dims(lambda d: site.scalar(d) if isinstance(d, ScalarSlot) else d)
    if op.bits:
        call.out[...] = op.body(queue.cupy, *call.ins)
        return
    wide = [widened(queue, a, s.dtype) for a, s in zip(call.ins, call.in_specs, strict=True)]
    store(queue, call.out, call.out_spec.dtype, op.body(queue.cupy, *wide))


def widened(queue: Queue, array: Array, dt: DType) -> Array:
    """The elements in the dtype of arithmetic; CuPy has no floats of 8 bits, so the host widens
    those."""
    xp = queue.cupy
    if dt.compute == dt.numpy:
        return array
    if dt.storage_only:
        return xp.asarray(array.get().view(dt.numpy).astype(dt.compute))
    wide = xp.empty(array.shape, f32.numpy)
    _convert(queue, (f32, wide), (dt, array))
    return wide


def store(queue: Queue, out: Array, dt: DType, result: Array) -> None:
    """Put a result of arithmetic into its place, rounded to nearest even."""
    xp = queue.cupy
    if dt.compute == dt.numpy:
        out[...] = result
    elif dt.storage_only:
        out[...] = xp.asarray(result.get().astype(dt.numpy).view(dt.raw))
    else:
        wide = f64 if result.dtype == f64.numpy else f32
        _convert(queue, (dt, out), (wide, result.astype(wide.numpy)))


def _convert(queue: Queue, to: tuple[DType, Array], from_: tuple[DType, Array]) -> None:
    types, source = (to[0].name, from_[0].name), from_[1]
    steps = map_steps(queue, "x", types, to[1], (source,))
    if steps is None:
        steps = map_steps(queue, "x", types, to[1], (queue.cupy.ascontiguousarray(source),))
    assert steps is not None, "contiguous arrays have one axis"
    for f, args in steps:
        f(*args)
