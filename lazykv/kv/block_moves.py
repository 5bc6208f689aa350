"""How the bytes of a pool's blocks move, all layers at once: plans made at first use and held.

A block's bytes outside the pool are one array ``[2 * n_layers, block_size, n_kv_heads, head_dim]``,
K before V of each layer.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lazykv.compiler.plan import Plan
from lazykv.device import HostArray
from lazykv.dtypes import DType, f32, f64
from lazykv.errors import DTypeError, ShapeError
from lazykv.functions import concat
from lazykv.graph import Graph, Tensor
from lazykv.runtime.realize import plan
from lazykv.storage import Storage
from lazykv.symbols import Sym


class BlockMoves:
    """Moves between blocks of one pool's storages, which stand as K and V of each layer.

    Callers take turns, and see to it that block numbers are in range and that nobody counts the
    rows of a block that is written: a move that fails midway leaves anything in it.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = tuple(storages)
        self._blocks = storages[0].shape[0]
        dt = storages[0].dtype
        self._wide = dt if dt is f64 else f32  # what keys are turned in
        self._source = Sym("source", 0, self._blocks - 1)
        self._dest = Sym("dest", 0, self._blocks - 1)

    def copy(self, source: int, dest: int) -> None:
        """All bytes of one block to another."""
        _run(self._copy, {}, {self._source: source, self._dest: dest})

    def read(self, block: int) -> HostArray:
        """A fresh host copy of a block, in the logical dtype."""
        out: HostArray = self._read.run(env={self._source: block})
        return out

    def write(self, block: int, data: HostArray) -> None:
        """Replace a block by what `read` gave."""
        made, incoming = self._write
        _run(made, {incoming: data}, {self._dest: block})

    def shift(self, source: int, dest: int, angles: NDArray[np.float64], interleaved: bool) -> None:
        """Copy a block with its keys turned by one angle (radians) per pair, ``[D/2]``."""
        made, tables = self._shift_interleaved if interleaved else self._shift_halves
        turned = [
            np.broadcast_to(f(angles).astype(self._wide.numpy), t.shape)
            for f, t in zip((np.cos, np.sin), tables, strict=True)
        ]
        tables_now = dict(zip(tables, turned, strict=True))
        _run(made, tables_now, {self._source: source, self._dest: dest})

    # Plans

    @cached_property
    def _copy(self) -> Plan:
        return self._between(lambda slot, rows: rows, Graph())

    @cached_property
    def _read(self) -> Plan:
        g = Graph()
        pools = [g.const(s) for s in self._storages]
        return plan(concat([p.slice(0, self._source, 1) for p in pools], 0))

    @cached_property
    def _write(self) -> tuple[Plan, Tensor]:
        g = Graph()
        first = self._storages[0]
        incoming = g.placeholder((len(self._storages), *first.shape[1:]), first.dtype, "block")
        effects = [
            self._put(g.const(s), incoming.slice(0, n, 1)) for n, s in enumerate(self._storages)
        ]
        return _untorn(plan([], effects=effects, device=first.location)), incoming

    @cached_property
    def _shift_interleaved(self) -> tuple[Plan, tuple[Tensor, Tensor]]:
        return self._shift(interleaved=True)

    @cached_property
    def _shift_halves(self) -> tuple[Plan, tuple[Tensor, Tensor]]:
        return self._shift(interleaved=False)

    def _shift(self, interleaved: bool) -> tuple[Plan, tuple[Tensor, Tensor]]:
        g = Graph()
        (_, rows, _, dim), dt = self._storages[0].shape, self._storages[0].dtype
        wide = self._wide
        cos = g.placeholder((rows, dim // 2), wide, "cos")
        sin = g.placeholder((rows, dim // 2), wide, "sin")

        def turn(slot: int, block: Tensor) -> Tensor:
            if slot % 2:  # values have no positions
                return block
            heads_first = (block if dt is wide else block.cast(wide)).transpose(1, 2)
            turned = heads_first.rope(cos, sin, interleaved=interleaved).transpose(1, 2)
            return turned if dt is wide else turned.cast(dt)

        return self._between(turn, g), (cos, sin)

    def _between(self, change: Callable[[int, Tensor], Tensor], g: Graph) -> Plan:
        """From the block `source` to the block `dest` in every storage."""
        effects = []
        for slot, storage in enumerate(self._storages):
            pool = g.const(storage)
            effects.append(self._put(pool, change(slot, pool.slice(0, self._source, 1))))
        return _untorn(plan([], effects=effects, device=self._storages[0].location))

    def _put(self, pool: Tensor, block: Tensor) -> Tensor:
        rest = [(0, extent) for extent in pool.shape[1:]]
        return pool.write_slice(block, [(self._dest, self._dest + 1), *rest])


def frequencies(who: str, inv_freq: ArrayLike, dt: DType, head_dim: int) -> NDArray[np.float64]:
    """A caller's angles per position, one for each pair of a key."""
    if not dt.is_float or dt.storage_only or head_dim % 2:
        raise DTypeError(
            f"{who}: got keys of {head_dim} {dt}, need an even number of floats to rotate"
        )
    try:
        freq = np.asarray(inv_freq)
    except ValueError as e:  # lists of several lengths
        raise DTypeError(f"{who}: got inv_freq {inv_freq!r:.80}, need numbers") from e
    if freq.dtype.kind not in "fiu":
        raise DTypeError(f"{who}: got inv_freq of {freq.dtype}, need real numbers")
    freq = freq.astype(np.float64)
    if freq.shape != (head_dim // 2,) or not np.isfinite(freq).all():
        raise ShapeError(
            f"{who}: got inv_freq of shape {freq.shape}, need {head_dim // 2} finite numbers"
        )
    return freq


def _run(made: Plan, bindings: Mapping[Tensor, HostArray], env: Mapping[Sym, int]) -> None:
    """A move, and the wait for it: a failure is the caller's, not that of whoever waits next."""
    made.run(bindings, env)


def _untorn(made: Plan) -> Plan:
    """A plan that writes nothing but blocks that nobody counts."""
    made.tears = False
    return made
