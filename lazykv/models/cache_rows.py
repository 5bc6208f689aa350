"""Where a step's key and value rows are kept: a region per sequence, rings, or pages of a pool.

A kind says what the step binds, what one layer's caches look like, and how attention reads them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from lazykv.dtypes import f32, i64, u32
from lazykv.errors import GraphError
from lazykv.functions import attention, paged_attention, ring_attention
from lazykv.graph import Graph, Tensor
from lazykv.ops.sources import SymValue
from lazykv.spec import MAX_BYTES, Shape
from lazykv.symbols import Sym, as_dim

Caches: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step of `seq` tokens of `batch` sequences, and what changes from one to the next.

    `bound` are placeholders by name, ``cos`` and ``sin`` among them. The live length before the
    step is the symbol `position`, or bound as ``position`` with `length` the one after it.
    """

    batch: int
    seq: int
    bound: dict[str, Tensor]
    position: Sym | None = None
    length: Tensor | None = None


class CacheRows(ABC):
    """How rows are kept. Instances hold sizes only and may be shared by graphs."""

    ragged: ClassVar[bool] = False
    """Whether the sequences of a batch have lengths of their own."""

    @abstractmethod
    def inputs(self, g: Graph, batch: int, seq: int, half: int) -> StepInputs:
        """New inputs for `seq` tokens of `batch` sequences and rope tables `half` wide."""

    @abstractmethod
    def cache_shape(self, batch: int, n_kv_heads: int, head_dim: int) -> Shape:
        """Shape of the keys of one layer, which is that of its values."""

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, caches: Caches, step: StepInputs, window: int | None
    ) -> Tensor:
        """Write the step's rows, then attention ``[batch, Hq, seq, D]`` to all rows in view.

        q is ``[batch, Hq, seq, D]``, k and v ``[batch, Hkv, seq, D]`` in the dtype of the caches;
        `window` is that of the model.
        """


@dataclass(frozen=True)
class LinearRows(CacheRows):
    """Position p of each sequence is row p of its own region: a `KvCache` of `capacity` rows.

    The position is a symbol, or, `in_memory`, bound as ``position`` i64 ``[]`` that kernels read
    when they run: what a capture needs. The step adds `seq` to it in place, so the next one finds
    its own there. Who binds it keeps ``position + seq <= capacity``.
    """

    capacity: int
    in_memory: bool = False

    def inputs(self, g: Graph, batch: int, seq: int, half: int) -> StepInputs:
        if self.in_memory:
            position = g.placeholder((), i64, "position")
            length = position.write_slice(position + seq, ())
            bound = {**_tables(g, (seq, half)), "position": position}
            return StepInputs(batch, seq, bound, length=length)
        first = Sym("cached_len", 0, self.capacity - seq)
        return StepInputs(batch, seq, _tables(g, (seq, half)), first)

    def cache_shape(self, batch: int, n_kv_heads: int, head_dim: int) -> Shape:
        return batch, n_kv_heads, self.capacity, head_dim

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, caches: Caches, step: StepInputs, window: int | None
    ) -> Tensor:
        if self.in_memory:
            at = step.bound["position"]
            k_all, v_all = (c.write_slice_at(new, 2, at)
                            for c, new in zip(caches, (k, v), strict=True))  # fmt: skip
            return attention(q, k_all, v_all, length=step.length, window=window)
        position, seq = _position(step), q.shape[2]
        k_all, v_all = (c.at[:, :, position : position + seq].set(new)
                        for c, new in zip(caches, (k, v), strict=True))  # fmt: skip
        return attention(q, k_all, v_all, length=position + seq, window=window)


@dataclass(frozen=True)
class RingRows(CacheRows):
    """The last positions of each sequence share `rows` slots, and the first `sinks` keep theirs: a
    `SlidingKvCache`. The model must have a sliding window."""

    rows: int
    sinks: int

    def inputs(self, g: Graph, batch: int, seq: int, half: int) -> StepInputs:
        # The length of a ring is not bounded by its rows.
        position = Sym("cached_len", 0, MAX_BYTES - seq)
        return StepInputs(batch, seq, _tables(g, (seq, half)), position)

    def cache_shape(self, batch: int, n_kv_heads: int, head_dim: int) -> Shape:
        return batch, n_kv_heads, self.rows, head_dim

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, caches: Caches, step: StepInputs, window: int | None
    ) -> Tensor:
        if window is None:
            raise GraphError("RingRows: got a model without a sliding window, need one that has it")
        position = _position(step)
        start = q.graph.apply(SymValue((), i64, as_dim(position)))
        k_all, v_all = (c.write_slice_rotating(new, 2, start, self.rows, self.sinks)
                        for c, new in zip(caches, (k, v), strict=True))  # fmt: skip
        length = position + q.shape[2]
        return ring_attention(q, k_all, v_all, length=length, window=window, sinks=self.sinks)


@dataclass(frozen=True)
class PagedRows(CacheRows):
    """Rows in blocks of a pool that all sequences share; a sequence's table names its blocks.

    Caches are ``[num_blocks, block_size, n_kv_heads, head_dim]``. Bound to a step:

    - ``rows`` i64 ``[batch * seq]``: where each token's row goes, as block * block_size + slot;
    - ``count`` i64 ``[]``: how many of those, from the first, are written;
    - ``block_table`` u32 ``[batch, max_blocks]`` and ``context_lens`` u32 ``[batch]``: blocks of
      each sequence and its live rows, the step's own included;
    - ``cos``, ``sin`` f32 ``[batch, seq, D/2]``: every sequence is at positions of its own.

    Sequences that only pad a batch come last. They have a context_len of 0 and are not counted in
    ``count``; their ids must be tokens, and their logits mean nothing.
    """

    ragged: ClassVar[bool] = True
    num_blocks: int
    block_size: int
    max_blocks: int

    def inputs(self, g: Graph, batch: int, seq: int, half: int) -> StepInputs:
        bound = _tables(g, (batch, seq, half))
        bound["rows"] = g.placeholder((batch * seq,), i64, "rows")
        bound["count"] = g.placeholder((), i64, "count")
        bound["block_table"] = g.placeholder((batch, self.max_blocks), u32, "block_table")
        bound["context_lens"] = g.placeholder((batch,), u32, "context_lens")
        return StepInputs(batch, seq, bound)

    def cache_shape(self, batch: int, n_kv_heads: int, head_dim: int) -> Shape:
        return self.num_blocks, self.block_size, n_kv_heads, head_dim

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, caches: Caches, step: StepInputs, window: int | None
    ) -> Tensor:
        k_all, v_all = (self._write(pool, new, step.bound["rows"], step.bound["count"])
                        for pool, new in zip(caches, (k, v), strict=True))  # fmt: skip
        table, lengths = step.bound["block_table"], step.bound["context_lens"]
        return paged_attention(q, k_all, v_all, table, lengths, window=window)

    def _write(self, pool: Tensor, new: Tensor, rows: Tensor, count: Tensor) -> Tensor:
        """The pool once it has the rows ``[batch, heads, seq, D]``."""
        _, heads, _, dim = new.shape
        flat = pool.reshape(self.num_blocks * self.block_size, heads, dim)
        tokens = new.transpose(1, 2).reshape(rows.shape[0], heads, dim)
        return flat.write_rows(tokens, rows, count).reshape(pool.shape)


def _tables(g: Graph, shape: Shape) -> dict[str, Tensor]:
    """Rope tables, which every kind binds."""
    return {name: g.placeholder(shape, f32, name) for name in ("cos", "sin")}


def _position(step: StepInputs) -> Sym:
    assert step.position is not None, "these rows made the symbol"
    return step.position
