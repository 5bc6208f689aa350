"""Rows of a cache: what a caller may hand in, where rows may go, and the write itself.

A row is one token's place on axis 2 of ``[B, n_kv_heads, capacity, head_dim]``. Every way into a
cache decides here, before the first byte moves.
"""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

from lazykv.device import HostArray, host_array
from lazykv.dtypes import DType, dtype
from lazykv.errors import DTypeError, RangeError, ShapeError
from lazykv.graph import Graph, Tensor
from lazykv.kv.layer import KvSlot
from lazykv.runtime.realize import run_effects
from lazykv.spec import MAX_BYTES, Spec
from lazykv.storage import Storage
from lazykv.symbols import Sym


def whole(who: str, name: str, value: SupportsIndex) -> int:
    """A caller's whole number, whatever its sign; nothing is rounded."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise DTypeError(f"{who}: got {name} {value!r}, need a whole number")


def count(who: str, name: str, value: SupportsIndex, least: int = 0) -> int:
    """A whole number of at least `least`."""
    n = whole(who, name, value)
    if not least <= n <= MAX_BYTES:
        raise RangeError(f"{who}: got {name} {n}, need {least} <= {name} < 2**63")
    return n


def as_slot(who: str, slot: KvSlot | int) -> KvSlot:
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
    who: str, slot: KvSlot, value: object, want: DType, shape: tuple[int, int, int]
) -> HostArray:
    """A caller's rows ``[batch, heads, n, dim]`` (`shape` is all but n), already in the cache's
    dtype: nothing is cast."""
    try:
        array = host_array(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise DTypeError(
            f"{who}: got {slot.name} of {type(value).__name__}, need an array of {want}"
        ) from e
    have, (batch, heads, dim) = Spec(array.shape, dtype(array.dtype)), shape
    if array.ndim != 4 or (have.shape[0], have.shape[1], have.shape[3]) != shape:
        raise ShapeError(f"{who}: got {slot.name} {have}, need {want}[{batch},{heads},n,{dim}]")
    if have.dtype is not want:
        raise DTypeError(f"{who}: got {slot.name} {have}, need {want}; convert it first")
    return array


def to_head_major(rows: HostArray) -> HostArray:
    """Position-major rows ``[n, heads, dim]`` (a paged pool's order) as the ``[1, heads, n, dim]``
    of a cache: a contiguous copy."""
    return np.ascontiguousarray(np.swapaxes(rows, 0, 1))[None]


def to_position_major(rows: HostArray) -> HostArray:
    """A cache's rows ``[1, heads, n, dim]`` as position-major ``[n, heads, dim]``: a copy."""
    return np.ascontiguousarray(np.swapaxes(rows[0], 0, 1))


def write_graph(
    writes: Sequence[tuple[Storage, HostArray]], names: Sequence[str] | None = None
) -> tuple[list[Tensor], Sym]:
    """The throwaway graph of an eager write: per slot a ``Const -> WriteSlice`` at a symbolic row.

    The row is a symbol so that every position shares one compiled structure.
    """
    graph = Graph()
    capacity, rows = writes[0][0].shape[2], writes[0][1].shape[2]
    start = Sym("start", 0, capacity - rows)
    out = []
    for n, (storage, values) in enumerate(writes):
        name = names[n] if names else None
        dest = graph.const(storage, name=name)
        src = graph.const(values, name=f"{name}.rows" if name else None)
        out.append(dest.at[:, :, start : start + rows].set(src))
    return out, start


def write_rows(writes: Sequence[tuple[Storage, HostArray]], start: int) -> None:
    """Write rows at one position into several slots, in one pass; no rows launch nothing."""
    if writes[0][1].shape[2] == 0:
        return
    effects, at = write_graph(writes)
    run_effects(effects, env={at: start})
