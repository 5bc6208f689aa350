"""The attention kernels against the ops' bodies in float64."""

import mmap
from typing import Any

import numpy as np
import pytest
from cuda_cpu import BACKWARDS, Memory, module, needs_compiler
from cuda_floats import Array, bits_of, check_close, junk, wide

from lazykv.backends import cuda_kernels as ck
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.paged_attention import PagedAttention
from lazykv.ops.ring_attention import RingAttention
from lazykv.ops.write import WriteSliceRotating

pytestmark = needs_compiler

REFUSED, NO_BLOCK = 1, 2**32 - 1
SCALE = 0.37

# dtypes, extents of keys and values, and what the kernels are compiled for: lines, team, vec.
VARIANTS = [
    ("f32", "f32", 20, 12, (4, 8, 4)),
    ("f32", "f16", 64, 64, (4, 8, 8)),
    ("f32", "bf16", 96, 144, (2, 16, 8)),
    ("f16", "f16", 40, 24, (1, 4, 8)),
    ("bf16", "bf16", 7, 5, (4, 32, 1)),
    ("f32", "f32", 4, 4, (2, 1, 4)),
]
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v[0]}-{v[1]}-{v[2]}")
each_way = pytest.mark.parametrize("flags", [0, BACKWARDS])
WHOLE = ("attention", "paged_attention", "ring_attention", "attention_reduce")


def step(a: Array) -> list[int]:
    return [s // a.itemsize for s in a.strides[:-1]]


class Run:
    """One attention: operands in guarded memory, the launches, and what came out."""

    def __init__(self, memory: Memory, variant: Any, seed: int = 1, flags: int = 0) -> None:
        self.memory, self.flags = memory, flags
        self.query, self.row, self.dim, self.value_dim, self.shape = variant
        self.rng = np.random.default_rng(seed)
        self.error = memory.output(np.zeros((), np.int32))

    def queries(self, *shape: int) -> Array:
        """Queries whose heads and positions are swapped in memory, as a model has them."""
        batch, heads, queries, dim = shape
        base = self.rng.normal(size=(batch, queries, heads, dim))
        return self.memory.input(bits_of(base, self.query)).swapaxes(1, 2)

    def rows(self, *shape: int) -> Array:
        return bits_of(self.rng.normal(size=shape), self.row)

    def launch(
        self, name: str, q: Array, value_dim: int, kv_heads: int, splits: int, pointers: Any,
        **fields: Any,
    ) -> Array:  # fmt: skip
        lines, team, vec = self.shape
        batch, heads, queries, _ = q.shape
        names = (name, "attention_reduce") if name == "latent_attention" else WHOLE
        dim = fields.pop("dim", self.dim)
        kernels = module(
            *names, QUERY=self.query, ROW=self.row, DIM=dim, VALUE_DIM=value_dim, LINES=lines,
            TEAM=team, VEC=vec,
        )  # fmt: skip
        out = self.memory.output(junk((batch, heads, queries, value_dim), self.query))
        total = batch * heads * queries
        parts = [
            self.memory.output(np.full(n, np.nan, np.float32))
            for n in ck.attention_scratch(total, splits, value_dim)
        ]
        fields = {"window": ck.NO_WINDOW, "scale": SCALE, **fields}
        args = ck.struct(
            "attention", q_step=step(q), batch=batch, heads=heads, kv_heads=kv_heads,
            queries=queries, splits=splits, **fields,
        )  # fmt: skip
        launch = ck.launch_of(
            name, batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, lines=lines,
            splits=splits,
        )  # fmt: skip
        kernels.launch(name, launch, out, *pointers, *parts, self.error, args, flags=self.flags)
        if splits > 1:
            reduce = ck.launch_of("attention_reduce", lines=total)
            kernels.launch("attention_reduce", reduce, out, *parts, total, splits, flags=self.flags)
        return out

    def check(self, out: Array, wanted: Array, values: Array, error: int = 0) -> None:
        finite = np.abs(wide(values, self.row))
        check_close(out, wanted, np.nanmax(finite, initial=0), self.query)
        assert self.error == error

    def wide(self, q: Array, *rows: Array) -> list[Array]:
        return [wide(q, self.query), *(wide(r, self.row) for r in rows)]


# batch, heads, key heads, queries, rows, live, causal, window, splits
CACHES = [
    (1, 4, 1, 1, 40, 33, True, None, 1), (2, 6, 2, 1, 130, 129, True, None, 3),
    (1, 3, 3, 1, 16, 1, True, None, 1), (1, 9, 3, 1, 16, 16, True, None, 4),
    (2, 2, 1, 3, 20, 17, True, None, 1), (1, 6, 2, 5, 70, 64, True, 7, 2),
    (1, 4, 2, 4, 20, 4, True, None, 2), (1, 8, 8, 2, 48, 47, False, None, 1),
    (1, 4, 2, 3, 60, 50, False, 9, 2), (1, 2, 1, 1, 40, 40, True, 1, 1),
    (1, 2, 1, 1, 300, 290, True, 100, 5), (1, 2, 1, 2, 8, 0, False, None, 1),
    (1, 2, 1, 2, 8, 1, False, None, 3), (1, 2, 1, 7, 9, 9, True, 3, 1),
    (0, 2, 1, 1, 8, 4, True, None, 1), (1, 2, 1, 0, 8, 4, True, None, 2),
    (1, 2, 1, 1, 0, 0, False, None, 1), (2, 5, 1, 2, 33, 32, True, 40, 2),
]  # fmt: skip


@each_variant
@each_way
@pytest.mark.parametrize("case", CACHES, ids=str)
def test_attention(memory: Memory, variant: Any, flags: int, case: Any) -> None:
    batch, heads, kv_heads, queries, rows, live, causal, window, splits = case
    run = Run(memory, variant, 2, flags)
    q = run.queries(batch, heads, queries, run.dim)
    # Rows of all heads side by side; what is not live is NaN.
    k, v = (run.rows(batch, rows, kv_heads, n) for n in (run.dim, run.value_dim))
    k[:, live:], v[:, live:] = bits_of(np.nan, run.row), bits_of(np.nan, run.row)
    k, v = (memory.input(a).swapaxes(1, 2) for a in (k, v))
    by_pointer = flags == 0
    length = memory.input(np.array(live, np.int64)) if by_pointer else None
    out = run.launch(
        "attention", q, run.value_dim, kv_heads, splits, (q, k, v, length), k_step=step(k),
        v_step=step(v), rows=rows, length=-1 if by_pointer else live, causal=causal,
        window=ck.NO_WINDOW if window is None else window,
    )  # fmt: skip
    op = Attention(SCALE, causal, window, live, False, False)
    run.check(out, op.body(np, *run.wide(q, k, v)), v[:, :, :live])


@each_variant
@pytest.mark.parametrize(
    ("live", "causal", "window"),
    [(9, True, None), (-1, True, None), (1, True, None), (2**40, False, None), (-(2**63), False, 3),
     (1, False, 4)],
)  # fmt: skip
def test_a_length_that_does_not_fit_is_refused_and_gives_zeros(
    memory: Memory, variant: Any, live: int, causal: bool, window: int | None
) -> None:
    for splits in (1, 2):
        run = Run(memory, variant)
        q = run.queries(1, 2, 2, run.dim)
        k, v = (memory.input(run.rows(1, 1, 8, n)) for n in (run.dim, run.value_dim))
        length = memory.input(np.array(live, np.int64))
        out = run.launch(
            "attention", q, run.value_dim, 1, splits, (q, k, v, length), k_step=step(k),
            v_step=step(v), rows=8, causal=causal,
            window=ck.NO_WINDOW if window is None else window,
        )  # fmt: skip
        run.check(out, np.zeros(out.shape), v, REFUSED)


def test_dead_rows_are_never_touched(memory: Memory) -> None:
    """They are in protected pages."""
    run = Run(memory, VARIANTS[1])
    per_page = mmap.PAGESIZE // (64 * 2)
    rows, live = 3 * per_page, 2 * per_page
    q = run.queries(1, 4, 2, 64)
    k, v = (memory.output(run.rows(1, 1, rows, 64)) for _ in range(2))
    for pool in (k, v):
        memory.forbid(pool[:, :, live:])
    out = run.launch(
        "attention", q, 64, 1, 2, (q, k, v, None), k_step=step(k), v_step=step(v), rows=rows,
        length=live, causal=True,
    )  # fmt: skip
    op = Attention(SCALE, True, None, live, False, False)
    run.check(out, op.body(np, *run.wide(q, k[:, :, :live], v[:, :, :live])), v[:, :, :live])


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_out_of_a_querys_sight_is_no_part_of_its_arithmetic(
    memory: Memory, causal: bool
) -> None:
    run = Run(memory, VARIANTS[0])
    q = run.queries(1, 1, 4, run.dim)
    k, v = (run.rows(1, 1, 12, n) for n in (run.dim, run.value_dim))
    k[0, 0, 7] = v[0, 0, 7] = np.nan
    out = run.launch(
        "attention", q, run.value_dim, 1, 1, (q, memory.input(k), memory.input(v), None),
        k_step=step(k), v_step=step(v), rows=12, length=10, causal=causal, window=2,
    )  # fmt: skip
    # Queries stand at 6, 7, 8 and 9; each sees two positions, and without causality later ones.
    seen = [False, True, True, False] if causal else [True, True, True, False]
    assert np.isnan(out[0, 0]).any(axis=1).tolist() == seen
    assert np.isnan(out[0, 0]).all(axis=1).tolist() == seen


@pytest.mark.parametrize("splits", [1, 3])
def test_infinite_and_missing_scores(memory: Memory, splits: int) -> None:
    """Rows of scores -inf give zeros, NaN gives NaN, as in the softmax of the op."""
    run = Run(memory, VARIANTS[0])
    q = run.memory.input(np.ones((1, 1, 1, run.dim), np.float32))
    for fill, wanted in ((-np.inf, 0.0), (np.nan, np.nan), (np.inf, np.nan)):
        k = run.memory.input(np.full((1, 1, 50, run.dim), fill, np.float32))
        v = run.memory.input(np.ones((1, 1, 50, run.value_dim), np.float32))
        out = run.launch(
            "attention", q, run.value_dim, 1, splits, (q, k, v, None), k_step=step(k),
            v_step=step(v), rows=50, length=50, causal=True,
        )  # fmt: skip
        np.testing.assert_array_equal(out, np.full(out.shape, wanted, np.float32))


# heads, key heads, queries, block size, table width, lengths, window, splits
POOLS = [
    (4, 2, 1, 16, 4, (33, 0, 64, 1), None, 1), (4, 1, 1, 5, 9, (45, 44, 6, 5), None, 3),
    (6, 2, 3, 4, 6, (3, 24, 0, 9), None, 2), (2, 2, 2, 1, 7, (7, 2, 4, 0), 3, 1),
    (4, 4, 1, 16, 3, (48, 17, 16, 15), 5, 2), (3, 1, 5, 8, 4, (32, 5, 0, 0), 4, 1),
    (2, 1, 1, 16, 2, (0, 0, 0, 0), None, 2), (2, 1, 0, 16, 2, (3, 0, 9, 0), None, 1),
]  # fmt: skip


def paged(run: Run, case: Any, table: Array | None = None, spoil: Any = None) -> Any:
    """Operands with shuffled blocks: what no sequence uses is NaN, and its entries NO_BLOCK."""
    heads, kv_heads, queries, size, width, lens, window, _ = case
    batch, blocks, first = len(lens), len(lens) * width + 2, queries
    q = run.queries(batch, heads, queries, run.dim)
    # The second layer of a pool of two.
    shape = (2, blocks, size, kv_heads)
    pools = [np.full((*shape, n), bits_of(np.nan, run.row)) for n in (run.dim, run.value_dim)]
    table = np.full((batch, width), NO_BLOCK, np.uint32)
    fresh = iter(run.rng.permutation(blocks).tolist())
    for b, n in enumerate(lens):
        low = 0 if window is None else max(0, n - first + 1 - window)
        for nth in range(low // size, -(-n // size)) if n else ():
            table[b, nth] = block = next(fresh)
            rows = slice(max(0, low - nth * size), min(size, n - nth * size))
            for pool in pools:
                pool[1, block, rows] = run.rows(*pool[1, block, rows].shape)
    if spoil is not None:
        spoil(table)
    k, v = (run.memory.input(pool)[1] for pool in pools)
    return q, k, v, run.memory.input(table), run.memory.input(np.array(lens, np.uint32))


def launch_paged(run: Run, case: Any, operands: Any) -> Array:
    q, k, v, table, _ = operands
    return run.launch(
        "paged_attention", q, run.value_dim, k.shape[2], case[-1], operands,
        k_step=_pool_step(k), v_step=_pool_step(v), rows=table.shape[1] * k.shape[1],
        blocks=len(k), block_size=k.shape[1], table_step=table.shape[1],
        window=ck.NO_WINDOW if case[-2] is None else case[-2],
    )  # fmt: skip


def _pool_step(pool: Array) -> list[int]:
    block, row, head = step(pool)
    return [block, head, row]


@each_variant
@each_way
@pytest.mark.parametrize("case", POOLS, ids=str)
def test_paged_attention(memory: Memory, variant: Any, flags: int, case: Any) -> None:
    run = Run(memory, variant, 3, flags)
    operands = paged(run, case)
    q, k, v, table, lens = operands
    out = launch_paged(run, case, operands)
    wanted = PagedAttention(SCALE, case[-2]).body(np, *run.wide(q, k, v), table, lens)
    run.check(out, wanted, v)


@pytest.mark.parametrize("bad", [NO_BLOCK, 18])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_used_block_outside_the_pool_is_refused_and_not_read(
    memory: Memory, bad: int, splits: int
) -> None:
    case = (4, 2, 1, 16, 4, (33, 20, 64, 1), None, splits)
    run = Run(memory, VARIANTS[0])

    def spoil(table: Array) -> None:
        table[1, 1] = bad

    operands = paged(run, case, spoil=spoil)
    q, k, v, table, lens = operands
    out = launch_paged(run, case, operands)
    # Its rows are left out; nothing else changes.
    short = lens.copy()
    short[1] = 16
    wanted = PagedAttention(SCALE, None).body(np, *run.wide(q, k, v), table, short)
    run.check(out, wanted, v, REFUSED)


@pytest.mark.parametrize("length", [2, 65, 2**32 - 1])
def test_a_context_len_that_does_not_fit_is_refused_and_gives_zeros(
    memory: Memory, length: int
) -> None:
    case = (4, 2, 3, 16, 4, (33, 0, 64, 3), None, 2)
    run = Run(memory, VARIANTS[0])
    q, k, v, table, lens = paged(run, case)
    bad = lens.copy()
    bad[3] = length
    out = launch_paged(run, case, (q, k, v, table, memory.input(bad)))
    wanted = PagedAttention(SCALE, None).body(np, *run.wide(q, k, v), table, lens)
    wanted[3] = 0
    run.check(out, wanted, v, REFUSED)


# heads, key heads, queries, ring rows, window, sinks, length, splits
RINGS = [
    (heads, heads // 2, queries, rows, window, sinks, length, splits)
    for heads, queries, rows, window, sinks in (
        (4, 1, 12, 8, 0), (4, 3, 14, 8, 2), (2, 1, 40, 36, 4), (4, 2, 6, 2, 3), (2, 1, 4, 1, 3),
    )
    for length in (queries, 5, 12, 13, 41, 997)
    for splits in (1, 2)
]  # fmt: skip


@each_variant
@pytest.mark.parametrize("case", RINGS, ids=str)
def test_ring_attention(memory: Memory, variant: Any, case: Any) -> None:
    heads, kv_heads, queries, rows, window, sinks, length, splits = case
    run = Run(memory, variant, 4, BACKWARDS if splits > 1 else 0)
    q = run.queries(1, heads, queries, run.dim)
    nan = bits_of(np.nan, run.row)
    fill = WriteSliceRotating(2, rows, sinks)
    rings = [
        fill.body(np, np.full((1, kv_heads, rows, n), nan), run.rows(1, kv_heads, length, n), 0)
        for n in (run.dim, run.value_dim)
    ]
    k, v = (memory.input(r) for r in rings)
    pointer = memory.input(np.array(length, np.int64)) if splits == 1 else None
    out = run.launch(
        "ring_attention", q, run.value_dim, kv_heads, splits, (q, k, v, pointer), k_step=step(k),
        v_step=step(v), rows=rows, length=length, window=window, sinks=sinks,
    )  # fmt: skip
    op = RingAttention(SCALE, window, sinks, length, False)
    run.check(out, op.body(np, *run.wide(q, k, v)), v)


def test_a_ring_without_the_queries_own_rows_is_refused(memory: Memory) -> None:
    run = Run(memory, VARIANTS[0])
    q = run.queries(1, 2, 2, run.dim)
    k, v = (memory.input(run.rows(1, 2, 8, n)) for n in (run.dim, run.value_dim))
    for length in (1, -5):
        out = run.launch(
            "ring_attention", q, run.value_dim, 2, 1, (q, k, v, None), k_step=step(k),
            v_step=step(v), rows=8, length=length, window=4,
        )  # fmt: skip
        run.check(out, np.zeros(out.shape), v, REFUSED)


LATENT = [
    ("f32", "f32", 24, 16, (4, 4, 4)),
    ("f32", "bf16", 80, 64, (2, 16, 8)),
    ("f16", "f16", 9, 6, (1, 8, 1)),
]
# heads, queries, rows, live, causal, splits
LATENTS = [
    (4, 1, 40, 33, True, 1), (5, 3, 40, 40, True, 2), (16, 1, 16, 1, True, 3),
    (3, 2, 9, 7, False, 1), (3, 2, 9, 0, False, 2), (2, 1, 300, 280, True, 4),
]  # fmt: skip


@pytest.mark.parametrize("variant", LATENT, ids=lambda v: f"{v[0]}-{v[1]}")
@each_way
@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_latent_attention(memory: Memory, variant: Any, flags: int, case: Any) -> None:
    heads, queries, rows, live, causal, splits = case
    run = Run(memory, variant, 5, flags)
    rank, width = run.value_dim, run.dim - run.value_dim
    q, p = run.queries(1, heads, queries, rank), run.queries(1, heads, queries, width)
    latent, rotary = run.rows(rows, rank), run.rows(rows, width)
    latent[live:], rotary[live:] = bits_of(np.nan, run.row), bits_of(np.nan, run.row)
    latent, rotary = memory.input(latent), memory.input(rotary)
    length = memory.input(np.array(live, np.int64)) if flags == 0 else None
    out = run.launch(
        "latent_attention", q, rank, 1, splits, (q, p, latent, rotary, length), p_step=step(p),
        k_step=[0, 0, rank], v_step=[0, 0, width], rows=rows, length=live, causal=causal,
    )  # fmt: skip
    op = LatentAttention(SCALE, causal, live, False)
    q64, latent64, rotary64 = run.wide(q, latent, rotary)
    run.check(out, op.body(np, q64, wide(p, run.query), latent64, rotary64), latent[:live])
