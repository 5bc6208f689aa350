"""Rows of a cache: what a caller may hand in, where rows may go, and the write itself.

A row is one token's place on a slot's axis of rows: axis 2 of ``[B, n_kv_heads, capacity,
head_dim]``, axis 0 of ``[capacity, ...]``. Every way into a cache decides here, before the first
byte moves.
"""

from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

from lazykv.device import HostArray
from lazykv.dtypes import DType, dtype
from lazykv.errors import DTypeError, RangeError, ShapeError
from lazykv.graph import Graph, Tensor
from lazykv.interchange import host_array
from lazykv.kv.layer import KvSlot
from lazykv.runtime.realize import run_effects
from lazykv.spec import MAX_BYTES, Shape, Spec, whole
from lazykv.storage import Storage
from lazykv.symbols import DimLike, Sym


def count(who: str, name: str, value: SupportsIndex, least: int = 0) -> int:
    """A whole number of at least `least`."""
    n = whole(who, name, value)
    if not least <= n <= MAX_BYTES:
        raise RangeError(f"{who}: got {name} {n}, need {least} <= {name} < 2**63")
    return n


MAX_LAYERS = 2**16
"""Far above any model; a layer costs kilobytes of handles whatever its buffers hold."""


def counts(who: str, **values: SupportsIndex) -> tuple[int, ...]:
    """Whole numbers of at least 1, in the order given."""
    return tuple(count(who, name, value, 1) for name, value in values.items())


def check_layers(who: str, n_layers: int) -> None:
    """Refuse a number of layers that no model has, before anything is made for each of them."""
    if n_layers > MAX_LAYERS:
        raise RangeError(f"{who}: got n_layers {n_layers}, need <= {MAX_LAYERS}")


def as_slot(who: str, slot: SupportsIndex) -> KvSlot:
    n = whole(who, "slot", slot)
    if n not in (KvSlot.K, KvSlot.V):
        raise RangeError(f"{who}: got slot {n}, need 0 (K) or 1 (V)")
    return KvSlot(n)


def check_rows(who: str, start: int, n: int, capacity: int) -> None:
    """Rows start..start+n must lie within the capacity."""
    if start + n > capacity:
        raise RangeError(
            f"{who}: got rows {start}..{start + n}, need {start + n} <= capacity {capacity}"
        )


def as_rows(
    who: str, name: str, value: object, want: DType, lead: Shape, trail: Shape
) -> HostArray:
    """A caller's rows ``[*lead, n, *trail]`` for the slot `name`, already in the cache's dtype:
    nothing is cast."""
    try:
        array = host_array(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise DTypeError(
            f"{who}: got {name} of {type(value).__name__}, need an array of {want}"
        ) from e
    have, axis = Spec(array.shape, dtype(array.dtype)), len(lead)
    if len(have.shape) != axis + 1 + len(trail) or (
        (have.shape[:axis], have.shape[axis + 1 :]) != (lead, trail)
    ):
        rule = ",".join(map(str, (*lead, "n", *trail)))
        raise ShapeError(f"{who}: got {name} {have}, need {want}[{rule}]")
    if have.dtype is not want:
        raise DTypeError(f"{who}: got {name} {have}, need {want}; convert it first")
    return array


def to_head_major(rows: HostArray) -> HostArray:
    """Position-major rows ``[n, heads, dim]`` (a paged pool's order) as the ``[1, heads, n, dim]``
    of a cache: a contiguous copy."""
    return np.ascontiguousarray(np.swapaxes(rows, 0, 1))[None]


def to_position_major(rows: HostArray) -> HostArray:
    """A cache's rows ``[1, heads, n, dim]`` as position-major ``[n, heads, dim]``: a copy."""
    return np.ascontiguousarray(np.swapaxes(rows[0], 0, 1))


def write_graph(
    writes: Sequence[tuple[Storage, HostArray]], names: Sequence[str] | None = None, axis: int = 2
) -> tuple[list[Tensor], Sym]:
    """The throwaway graph of an eager write: per slot a ``Const -> WriteSlice`` at a symbolic row
    of `axis`.

    The row is a symbol so that every position shares one compiled structure.
    """
    graph = Graph()
    capacity, rows = writes[0][0].shape[axis], writes[0][1].shape[axis]
    start = Sym("start", 0, capacity - rows)
    out = []
    for n, (storage, values) in enumerate(writes):
        name = names[n] if names else None
        dest = graph.const(storage, name=name)
        src = graph.const(values, name=f"{name}.rows" if name else None)
        ranges: list[tuple[DimLike, DimLike]] = [(0, extent) for extent in dest.shape]
        ranges[axis] = (start, start + rows)
        out.append(dest.write_slice(src, ranges))
    return out, start


def write_rows(writes: Sequence[tuple[Storage, HostArray]], start: int, axis: int = 2) -> None:
    """Write rows at one position into several slots, in one pass; no rows launch nothing."""
    if writes[0][1].shape[axis] == 0:
        return
    effects, at = write_graph(writes, axis=axis)
    run_effects(effects, env={at: start})
