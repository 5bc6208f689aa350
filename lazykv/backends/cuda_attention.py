"""Attention on CUDA: kernels that read the live rows once, whatever cache they lie in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lazykv.backends import cuda_kernels as ck
from lazykv.backends.cuda_site import (
    Site,
    Steps,
    addresses_of,
    is_dense,
    launch,
    launch_later,
    steps_of,
)
from lazykv.device import Array, Step
from lazykv.dtypes import f32
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.paged_attention import PagedAttention
from lazykv.ops.ring_attention import RingAttention
from lazykv.spec import Spec
from lazykv.symbols import ScalarSlot

LONG_PROMPT = 64
"""Queries from which on products of matrices are the better way, where the host knows the length:
the kernels read all rows once for every 4 queries."""


@dataclass(frozen=True, slots=True)
class Extents:
    """The sizes of one attention, whatever its operands; `rows` are the most that can be live."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    rows: int
    dim: int
    value_dim: int
    row_bytes: int
    window: int = ck.NO_WINDOW
    sinks: int = 0

    @property
    def lines(self) -> int:
        """Queries of all heads."""
        return self.batch * self.heads * self.queries

    def shape(
        self, steps: Sequence[int] = (), addresses: Sequence[int] = ()
    ) -> ck.AttentionShape | None:
        lines = self.heads // self.kv_heads * self.queries
        return ck.attention_shape(
            self.row_bytes, self.dim, self.value_dim, lines, steps, addresses
        )  # fmt: skip

    def splits(self, lines: int, multiprocessors: int) -> int:
        blocks = -(-(self.heads // self.kv_heads * self.queries) // lines)
        return ck.attention_splits(
            self.batch * self.kv_heads * blocks, self.rows, self.queries, self.window, self.sinks,
            multiprocessors,
        )  # fmt: skip


def _extents(op: Any, ins: tuple[Spec, ...]) -> Extents:
    q, k, v = ins[:3]
    batch, heads, queries, dim = q.shape
    row_bytes, window = k.dtype.itemsize, getattr(op, "window", None) or ck.NO_WINDOW
    if isinstance(op, LatentAttention):
        rows, width = ins[2].shape[0], dim + ins[3].shape[1]
        return Extents(batch, heads, 1, queries, rows, width, dim, ins[2].dtype.itemsize)
    if isinstance(op, PagedAttention):
        rows, kv_heads = ins[3].shape[1] * k.shape[1], k.shape[2]
    else:
        rows, kv_heads = k.shape[2], k.shape[1]
    sinks = op.sinks if isinstance(op, RingAttention) else 0
    return Extents(batch, heads, kv_heads, queries, rows, dim, v.shape[3], row_bytes, window, sinks)


def runs(op: Any, ins: tuple[Spec, ...], out: Spec) -> bool:
    """Whether the kernels take an attention op; the portable body has products of matrices."""
    if out.dtype.itemsize > 4 or (isinstance(op, Attention) and op.has_mask):
        return False
    known = isinstance(op, Attention) and not op.has_length
    extents = _extents(op, ins)
    return (
        not (known and extents.queries > LONG_PROMPT)
        and extents.shape() is not None
        and ck.fits_grid(extents.batch, extents.kv_heads)
    )


def scratch(op: Any, ins: tuple[Spec, ...], out: Spec, multiprocessors: int) -> tuple[Spec, ...]:
    extents = _extents(op, ins)
    shape = extents.shape()
    assert shape is not None, "a rule has chosen what has a shape"
    splits = extents.splits(shape.lines, multiprocessors)
    values, stats = ck.attention_scratch(extents.lines, splits, extents.value_dim)
    return Spec((values,), f32), Spec((stats,), f32)


def attention(site: Site) -> Steps:
    q, k, v = site.call.ins[:3]
    steps = {
        "q_step": steps_of(q)[:3], "k_step": steps_of(k)[:3], "v_step": steps_of(v)[:3],
        "causal": site.call.op.causal,
    }  # fmt: skip
    return _steps(site, "attention", (q, k, v), (q, k, v), **steps)


def ring_attention(site: Site) -> Steps:
    q, k, v = site.call.ins[:3]
    steps = {"q_step": steps_of(q)[:3], "k_step": steps_of(k)[:3], "v_step": steps_of(v)[:3]}
    return _steps(site, "ring_attention", (q, k, v), (q, k, v), **steps)


def latent_attention(site: Site) -> Steps:
    q, p, latent, rope = site.call.ins[:4]
    steps = {
        "q_step": steps_of(q)[:3], "p_step": steps_of(p)[:3],
        "k_step": (0, 0, steps_of(latent)[0]), "v_step": (0, 0, steps_of(rope)[0]),
        "causal": site.call.op.causal,
    }  # fmt: skip
    return _steps(site, "latent_attention", (q, latent, rope), (q, p, latent, rope), **steps)


def paged_attention(site: Site) -> Steps:
    q, k, v, table, lens = site.call.ins
    if not (is_dense(table) and is_dense(lens)):
        return None
    (block, row, head), (v_block, v_row, v_head) = steps_of(k)[:3], steps_of(v)[:3]
    steps = {
        "q_step": steps_of(q)[:3], "k_step": (block, head, row), "v_step": (v_block, v_head, v_row),
        "blocks": k.shape[0], "block_size": k.shape[1], "table_step": steps_of(table)[0],
    }  # fmt: skip
    return _steps(site, "paged_attention", (q, k, v), (q, k, v, table, lens), **steps)


def _steps(
    site: Site, name: str, rows: tuple[Array, ...], pointers: tuple[Array, ...], **fields: Any
) -> Steps:
    """The launches for operands of which the last two of `rows` are read row by row."""
    call, queue = site.call, site.queue
    extents = _extents(call.op, call.in_specs)
    lanes = (*steps_of(rows[1])[:-1], *steps_of(rows[2])[:-1])
    shape = extents.shape(lanes, addresses_of(*rows[1:]))
    if shape is None or not all(map(is_dense, pointers)):
        return None
    splits = extents.splits(shape.lines, queue.multiprocessors)
    args = ck.struct(
        "attention", batch=extents.batch, heads=extents.heads, kv_heads=extents.kv_heads,
        queries=extents.queries, rows=extents.rows, window=extents.window, sinks=extents.sinks,
        splits=splits, scale=call.op.scale, **fields,
    )  # fmt: skip
    macros = {
        "QUERY": call.in_specs[0].dtype.name, "ROW": call.in_specs[2].dtype.name,
        "DIM": extents.dim, "VALUE_DIM": extents.value_dim, "LINES": shape.lines,
        "TEAM": shape.team, "VEC": shape.vec,
    }  # fmt: skip
    parts = call.scratch if splits > 1 else (None, None)
    sizes = {n: getattr(extents, n) for n in ("batch", "heads", "kv_heads", "queries")}
    grid = ck.launch_of(name, **sizes, lines=shape.lines, splits=splits)
    tail = (*parts, site.error)
    steps = [_main(site, name, grid, (call.out, *pointers), tail, args, macros)]
    if splits > 1:
        grid = ck.launch_of("attention_reduce", lines=extents.lines)
        values = (call.out, *parts, extents.lines, splits)
        steps.append(launch(queue, "attention_reduce", grid, *values, **macros))
    return steps


def _main(
    site: Site, name: str, grid: ck.Launch, head: tuple[Any, ...], tail: tuple[Any, ...],
    args: Any, macros: dict[str, Any],
) -> Step:  # fmt: skip
    """The launch of the kernel itself: the length is in memory, a symbol's value or a number."""
    op = site.call.op
    if isinstance(op, PagedAttention):
        return launch(site.queue, name, grid, *head, *tail, args, **macros)
    pointer = site.call.ins[-1] if op.has_length else None
    length = op.length
    if isinstance(length, ScalarSlot):
        values = _with_length(site, length, (*head, None, *tail), args)
        return launch_later(site.queue, name, grid, values, **macros)
    args["length"] = args["rows"] if length is None else length
    return launch(site.queue, name, grid, *head, pointer, *tail, args, **macros)


def _with_length(
    site: Site, slot: ScalarSlot, values: tuple[Any, ...], args: Any
) -> Callable[[], tuple[Any, ...]]:
    def made() -> tuple[Any, ...]:
        now = args.copy()
        now["length"] = site.scalar(slot)
        return *values, now

    return made
