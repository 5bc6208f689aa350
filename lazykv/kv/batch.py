"""Whole-cache moves as graphs: more capacity, other sequences, another order of sequences."""

from collections.abc import Callable, Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lazykv.errors import DTypeError, RangeError
from lazykv.graph import Graph, Tensor
from lazykv.runtime.realize import allocate, run_effects
from lazykv.spec import whole
from lazykv.storage import Storage

_ROW_STEP = 64
"""Reordering moves the live rows rounded up to this many: few structures to plan, and not the
whole capacity."""


def as_index(who: str, index: Sequence[SupportsIndex], batch: int) -> list[int]:
    """Numbers of sequences, each in 0..batch."""
    try:
        given = list(index)
    except TypeError:
        got = type(index).__name__
        raise DTypeError(f"{who}: got {got}, need a sequence of indices") from None
    rows = [whole(who, "index", i) for i in given]
    for i in rows:
        if not 0 <= i < batch:
            raise RangeError(f"{who}: got sequence {i}, need 0 <= index < {batch}")
    return rows


def reorder_rows(storages: Sequence[Storage], index: Sequence[int], live: int) -> None:
    """Permute (or repeat) the sequences of each storage in place, over the live rows.

    A failure after some of them have moved tears all: together they are no cache any more.
    """
    if not storages or live == 0 or list(index) == list(range(len(index))):
        return
    for storage in storages:
        storage.check_writable()
    rows = min(-(-live // _ROW_STEP) * _ROW_STEP, storages[0].shape[2])
    graph = Graph()
    order = graph.const(_indices(index))
    writes = []
    for storage in storages:
        slab = graph.const(storage).slice(2, 0, rows)
        writes.append(slab.write_slice(slab.take(order), [(0, n) for n in slab.shape]))
    logs = [storage.row_log for storage in storages]
    before = [storage.version for storage in storages]
    for storage in storages:
        storage.row_log = None
    try:
        run_effects(writes)
    except BaseException:
        if any(s.torn or s.version != v for s, v in zip(storages, before, strict=True)):
            for storage in storages:
                storage.torn = True
        raise
    finally:  # moving rows writes none that was not written before
        for storage, log in zip(storages, logs, strict=True):
            storage.row_log = log


def replace_storages(
    storages: Sequence[Storage], make: Callable[[Tensor], Tensor]
) -> list[Storage]:
    """A new storage for each old one, filled in one pass; `make` turns the old slot into a chain of
    writes on an Alloc."""
    graph = Graph()
    return allocate([make(graph.const(storage)) for storage in storages])


def grown(slot: Tensor, capacity: int, axis: int = 2) -> Tensor:
    """The same rows in a buffer of `capacity` rows on `axis`, zeros behind them."""
    shape = (*slot.shape[:axis], capacity, *slot.shape[axis + 1 :])
    fresh = _alloc_like(slot, shape).zero_fill()
    return fresh.write_slice(slot, [(0, n) for n in slot.shape])


def selected(slot: Tensor, index: Sequence[int]) -> Tensor:
    """A buffer of the chosen sequences."""
    taken = slot.take(slot.graph.const(_indices(index)))
    fresh = _alloc_like(slot, taken.shape)
    return fresh.write_slice(taken, [(0, n) for n in taken.shape])


def repeated(slot: Tensor, times: int) -> Tensor:
    """A buffer of every sequence `times` times in a row."""
    batch, *rest = slot.shape
    copies = slot.unsqueeze(1).broadcast_to((batch, times, *rest))
    fresh = _alloc_like(slot, (batch * times, *rest))
    return fresh.write_slice(copies.reshape(fresh.shape), [(0, n) for n in fresh.shape])


def _alloc_like(slot: Tensor, shape: tuple[int, ...]) -> Tensor:
    assert slot.data is not None, "a slot is a const over its storage"
    return slot.graph.alloc(shape, slot.dtype, slot.data.location)


def _indices(index: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(index, np.int64)
