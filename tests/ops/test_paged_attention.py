"""Paged attention against one query, one head, one row at a time, in float64.

Pools are made from lists of rows. Whatever is not a live row is NaN, and table entries that are not
used hold the invalid mark, so that every test also shows that neither takes part.
"""

import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from toy_backends import (
    FLOATS,
    Primitive,
    check_everywhere,
    floats,
    registered,
    run_everywhere,
)

import lazykv as lk
from lazykv.backends import cpu_paged, cpu_rows
from lazykv.backends.cpu_walk import walk
from lazykv.errors import DTypeError, RangeError, ShapeError
from lazykv.runtime.plan_cache import plan_cache

INVALID = 2**32 - 1
LAYOUTS = ("in order", "reversed", "shuffled", "pairs")


def reference(
    q: Any, keys: list[Any], values: list[Any], window: int | None = None,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """q ``[B, Hq, Sq, D]``; keys and values of each sequence as ``[n, Hkv, D]``."""
    q, (heads, queries, dim) = q.astype(np.float64), q.shape[1:]
    scale = 1 / math.sqrt(dim) if scale is None else scale
    out = np.zeros((*q.shape[:3], values[0].shape[2]))
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        for h, i in np.ndindex(heads, queries):
            head, place = h // (heads // k.shape[1]), len(k) - queries + i
            first = 0 if window is None else max(0, place - window + 1)
            near = range(first, place + 1) if len(k) else ()
            scores = [scale * (q[b, h, i] @ k[p, head].astype(np.float64)) for p in near]
            shares = [math.exp(s - max(scores)) for s in scores]
            for p, share in zip(near, shares, strict=True):
                out[b, h, i] += share / sum(shares) * v[p, head].astype(np.float64)
    return out


class Case:
    """A ragged batch: random rows per sequence, and the pools and tables that hold them."""

    def __init__(
        self, seed: int, lens: list[int], size: int, queries: int = 1, dtype: str = "f32",
        layout: str = "shuffled", dv: int = 8, dead: float = np.nan, spare: int = 3,
        pool: str | None = None,
    ) -> None:  # fmt: skip
        rng, pool = np.random.default_rng(seed), dtype if pool is None else pool
        self.q = floats(rng, (len(lens), 4, queries, 8), dtype)
        self.keys = [floats(rng, (n, 2, 8), pool) for n in lens]
        self.values = [floats(rng, (n, 2, dv), pool) for n in lens]
        need = [-(-n // size) for n in lens]
        blocks = sum(need) + spare
        order = np.arange(blocks)
        if layout == "reversed":
            order = order[::-1]
        elif layout == "shuffled":
            order = rng.permutation(blocks)
        elif layout == "pairs":  # runs of two blocks
            order = np.concatenate([order[i : i + 2] for i in range(0, blocks, 2)][::-1])
        self.table = np.full((len(lens), max(need) + 2), INVALID, np.uint32)
        self.k_pool = np.full((blocks, size, 2, 8), dead).astype(self.keys[0].dtype)
        self.v_pool = np.full((blocks, size, 2, dv), dead).astype(self.keys[0].dtype)
        free = iter(order.tolist())
        for b, n in enumerate(lens):
            for t in range(n):
                if t % size == 0:
                    self.table[b, t // size] = next(free)
                at = int(self.table[b, t // size]), t % size
                self.k_pool[at], self.v_pool[at] = self.keys[b][t], self.values[b][t]
        self.lens = np.array(lens, np.uint32)

    @property
    def inputs(self) -> list[Any]:
        return [self.q, self.k_pool, self.v_pool, self.table, self.lens]

    def want(self, **options: Any) -> Any:
        return reference(self.q, self.keys, self.values, **options)

    def check(self, scale: float = 1.0, **options: Any) -> None:
        check_everywhere(
            lambda *t: lk.paged_attention(*t, **options), self.inputs, self.want(**options),
            scale=scale,
        )  # fmt: skip

    def plan(self, **options: Any) -> tuple[lk.Plan, dict[lk.Tensor, Any]]:
        """A plan over bound pools, and what a pass of it is given."""
        g = lk.Graph()
        tensors = [g.placeholder(a.shape, a.dtype) for a in self.inputs]
        stores = [lk.Storage.from_array(a) for a in self.inputs[1:3]]
        plan = lk.plan(
            lk.paged_attention(*tensors, **options), dict(zip(tensors[1:3], stores, strict=True))
        )
        given = dict(zip(tensors, self.inputs, strict=True))
        return plan, {t: given[t] for t in (tensors[0], *tensors[3:])}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of 8 rows of 64 bytes, runs read in place from 4 rows on, products of few scores, and
    few queries at once."""
    monkeypatch.setattr(cpu_paged, "_TILE_BYTES", 8 * 64)
    monkeypatch.setattr(cpu_paged, "_VIEW_BYTES", 4 * 64)
    monkeypatch.setattr(cpu_rows, "_SMALL_PRODUCT", 30)
    monkeypatch.setattr(cpu_paged, "_SCORE_BYTES", 400)
    plan_cache.clear()  # programs know how much scratch the kernel needs
    yield
    plan_cache.clear()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_lengths_on_before_and_after_a_block_boundary(
    window: int | None, queries: int, size: int, layout: str
) -> None:
    lens = [3, 0, size * 2 + 2, size * 2 + 3, 0, size * 3 + 1, 17]
    if size == 16:
        lens += [15, 16, 31, 32, 33]
    Case(1, lens, size, queries, layout=layout).check(window=window)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("pool", ["f32", "f16"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [None, 7, 20])
def test_views_and_tiles_in_pieces(window: int | None, queries: int, size: int, pool: str) -> None:
    """Runs longer than a tile, shorter than a view, and everything between."""
    for layout in LAYOUTS:
        case = Case(2, [3, 40, 0, 37, 8, 23], size, queries, layout=layout, pool=pool, dv=5)
        got = run_everywhere(lambda *t: lk.paged_attention(*t, window=window), case.inputs)
        for place, result in got.items():
            np.testing.assert_allclose(
                result, case.want(window=window), rtol=2e-5, atol=2e-5, err_msg=place
            )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("queries", [1, 3])
def test_dtypes_and_a_scale(queries: int, dtype: str) -> None:
    Case(3, [5, 0, 16, 9], 4, queries, dtype, dv=5).check(scale=1.0, window=6)
    case = Case(4, [5, 20], 4, queries, dtype)
    check_everywhere(
        lambda *t: lk.paged_attention(*t, scale=0.3), case.inputs, case.want(scale=0.3)
    )


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
@pytest.mark.parametrize("queries", [1, 3])
def test_f32_queries_over_16_bit_pools(queries: int, narrow: str) -> None:
    for layout in LAYOUTS:
        case = Case(5, [20, 0, 7], 4, queries, pool=narrow, layout=layout)
        got = run_everywhere(lambda *t: lk.paged_attention(*t, window=9), case.inputs)
        for place, result in got.items():
            assert result.dtype == np.float32
            np.testing.assert_allclose(
                result, case.want(window=9), rtol=1e-5, atol=1e-5, err_msg=place
            )


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("dead", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("window", [None, 3])
def test_K2_rows_that_are_not_live_never_matter(
    window: int | None, dead: float, queries: int
) -> None:
    Case(6, [6, 9, 0, 12], 4, queries, dead=dead).check(window=window)


def test_K2_zero_query_over_a_poisoned_pool() -> None:
    """Eager and planned; three rows of 1, 2, 3 in one block of 16."""
    for poison in (np.nan, np.inf):
        case = Case(7, [3], 16, dead=poison)
        case.q[:] = 0
        case.v_pool[int(case.table[0, 0]), :3] = np.array([1, 2, 3])[:, None, None]
        for got in run_everywhere(lk.paged_attention, case.inputs).values():
            assert np.array_equal(got, np.full(got.shape, 2.0))
        plan, given = case.plan()
        for _ in range(2):
            assert np.array_equal(plan.run(given), np.full(case.q.shape, 2.0))


@pytest.mark.parametrize("queries", [1, 3])
def test_K1_padding_gives_zeros(queries: int) -> None:
    case = Case(8, [5, 0], 2, queries)
    for got in run_everywhere(lk.paged_attention, case.inputs).values():
        assert not got[1].any() and got[0].all()  # noqa: PT018
    case.lens[:] = 0
    for got in run_everywhere(lk.paged_attention, case.inputs).values():
        assert got.tobytes() == bytes(got.nbytes)


def test_L11_rows_come_in_the_order_of_the_table() -> None:
    """Blocks of 2, table 2, 0, 1, rows 0..5 in logical order: a window of one row shows the row at
    each position, and a zero query the mean of the rows so far."""
    rows = np.arange(6, dtype=np.float32)
    v_pool = np.empty((3, 2, 1, 1), np.float32)
    for t in range(6):
        v_pool[(2, 0, 1)[t // 2], t % 2] = rows[t]
    assert v_pool.reshape(-1).tolist() == [2, 3, 4, 5, 0, 1]
    q, k_pool = np.zeros((1, 1, 6, 2), np.float32), np.zeros((3, 2, 1, 2), np.float32)
    table, lens = np.array([[2, 0, 1]], np.uint32), np.array([6], np.uint32)
    for window, want in ((1, rows), (None, rows / 2)):
        got = run_everywhere(
            lambda *t, w=window: lk.paged_attention(*t, window=w), [q, k_pool, v_pool, table, lens]
        )
        for result in got.values():
            np.testing.assert_allclose(result.reshape(-1), want, rtol=1e-6)
    for n in range(1, 7):
        inputs = [q[:, :, :1], k_pool, v_pool, table, np.array([n], np.uint32)]
        for result in run_everywhere(lambda *t: lk.paged_attention(*t, window=1), inputs).values():
            assert result.item() == n - 1


def test_L9_a_reused_table_row_reads_its_own_blocks_alone() -> None:
    """Row held 5, 6, 7; reused for a sequence of one block, 2: blocks 6 and 7 take no part."""
    case = Case(9, [5], 2, spare=5)
    for stale in (np.array([6, 7]), np.array([INVALID, INVALID]), np.array([1000, 2**31])):
        held = int(case.table[0, 0])
        table = np.concatenate([[held], stale]).astype(np.uint32)[None]
        inputs = [case.q, case.k_pool, case.v_pool, table, np.array([2], np.uint32)]
        want = reference(case.q, [case.keys[0][:2]], [case.values[0][:2]])
        check_everywhere(lk.paged_attention, inputs, want)


def test_I3_head_mapping() -> None:
    q, k = np.zeros((1, 4, 1, 2), np.float32), np.zeros((2, 2, 2, 2), np.float32)
    v = np.broadcast_to(np.array([10, 20], np.float32).reshape(2, 1), (2, 2, 2, 1)).copy()
    table, lens = np.array([[1, 0]], np.uint32), np.array([3], np.uint32)
    for got in run_everywhere(lk.paged_attention, [q, k, v, table, lens]).values():
        assert got.reshape(-1).tolist() == [10, 10, 20, 20]


def test_B5_the_window_counts_the_querys_own_position() -> None:
    q, k = np.zeros((1, 1, 6, 2), np.float32), np.zeros((3, 2, 1, 2), np.float32)
    v = np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
    table, lens = np.array([[0, 1, 2]], np.uint32), np.array([6], np.uint32)
    want = np.array([0, 0.5, 1, 2, 3, 4]).reshape(1, 1, 6, 1)
    check_everywhere(lambda *t: lk.paged_attention(*t, window=3), [q, k, v, table, lens], want)


def test_entries_before_the_window_are_never_looked_at() -> None:
    for queries in (1, 2):
        case = Case(10, [23, 9], 4, queries)
        want = case.want(window=5)
        for b, n in enumerate((23, 9)):
            old = (n - queries + 1 - 5) // 4
            for i in range(old):
                block = int(case.table[b, i])
                case.k_pool[block], case.v_pool[block] = np.nan, np.nan
            case.table[b, :old] = INVALID
        check_everywhere(lambda *t: lk.paged_attention(*t, window=5), case.inputs, want)


@pytest.mark.parametrize("pool", ["f32", "bf16"])
@pytest.mark.parametrize("queries", [9, 20])
@pytest.mark.parametrize("window", [None, 7])
def test_many_queries(window: int | None, queries: int, pool: str) -> None:
    case = Case(11, [40, queries, 0, 23], 4, queries, pool=pool)
    got = run_everywhere(lambda *t: lk.paged_attention(*t, window=window), case.inputs)
    for result in got.values():
        np.testing.assert_allclose(result, case.want(window=window), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("pool", ["f32", "bf16"])
@pytest.mark.parametrize("window", [None, 7])
def test_many_queries_are_split_in_blocks(window: int | None, pool: str) -> None:
    test_many_queries(window, 9, pool)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("queries", [1, 3])
def test_scores_that_grow_from_tile_to_tile(queries: int) -> None:
    """By more than exp can hold."""
    case = Case(12, [64], 4, queries)
    for t in range(64):
        case.k_pool[int(case.table[0, t // 4]), t % 4] *= 10 * t
        case.keys[0][t] *= 10 * t
    case.check(scale=5)


@pytest.mark.parametrize("queries", [1, 3])
def test_scores_far_below_zero(queries: int) -> None:
    case = Case(20, [9], 4, queries)
    case.q[:] = 40
    for t in range(9):
        row = case.k_pool[int(case.table[0, t // 4]), t % 4]
        row[:] = case.keys[0][t] = -20 - np.abs(case.keys[0][t])
    assert case.q[0, 0, 0] @ case.keys[0][0, 0] < -1000
    case.check(scale=5)


@pytest.mark.parametrize("queries", [1, 3])
def test_the_kernel_also_runs_on_a_simulated_device(queries: int) -> None:
    case = Case(13, [20, 0, 7], 4, queries)
    g = lk.Graph()
    tensors = [g.const(lk.Storage.from_array(a, "sim:0")) for a in case.inputs]
    plan = lk.plan(lk.paged_attention(*tensors), device="sim:0")
    assert {str(r.location) for r in plan.program.registers} == {"sim:0"}
    np.testing.assert_allclose(plan.run(), case.want(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("queries", [1, 3])
def test_strided_queries_and_pools(queries: int) -> None:
    """Pools that are no lines of rows are read by the portable body, wherever they are."""
    case = Case(14, [9, 0, 6], 4, queries)
    q = np.ascontiguousarray(case.q.transpose(0, 2, 1, 3))
    check_everywhere(
        lambda *t: lk.paged_attention(t[0].permute(0, 2, 1, 3), *t[1:]), [q, *case.inputs[1:]],
        case.want(),
    )  # fmt: skip
    pools = [np.ascontiguousarray(a.transpose(0, 2, 1, 3)) for a in case.inputs[1:3]]
    check_everywhere(
        lambda *t: lk.paged_attention(t[0], *(x.permute(0, 2, 1, 3) for x in t[1:3]), *t[3:]),
        [case.q, *pools, *case.inputs[3:]], case.want(),
    )  # fmt: skip
    both = np.concatenate([case.k_pool, case.v_pool])  # a part of a larger pool
    n = len(case.k_pool)
    check_everywhere(
        lambda q, p, *t: lk.paged_attention(q, p[:n], p[n:], *t),
        [case.q, both, *case.inputs[3:]], case.want(),
    )  # fmt: skip


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_held_plan_reads_pools_tables_and_lengths_anew(queries: int, turned: bool) -> None:
    cases = [
        Case(seed, [*lens], 4, queries, layout="pairs")
        for seed, lens in ((21, (9, 6)), (22, (5, 12)))
    ]
    axes = (0, 2, 1, 3) if turned else (0, 1, 2, 3)
    held = [[q, k.transpose(axes), v.transpose(axes), *rest] for q, k, v, *rest in
            (case.inputs for case in cases)]  # fmt: skip
    stores = [lk.Storage.from_array(np.zeros_like(a)) for a in held[0]]
    g = lk.Graph()
    q, k, v, *rest = (g.const(s) for s in stores)
    plan = lk.plan(lk.paged_attention(q, k.permute(*axes), v.permute(*axes), *rest))
    for case, arrays in zip(cases, held, strict=True):
        for store, data in zip(stores, arrays, strict=True):
            with store.write() as array:
                array[...] = data
        np.testing.assert_allclose(plan.run(), case.want(), rtol=2e-5, atol=2e-5)


def test_no_queries_and_no_batch() -> None:
    for batch, queries in ((2, 0), (0, 1)):
        q, k = np.zeros((batch, 4, queries, 8), np.float32), np.ones((3, 2, 2, 8), np.float32)
        table, lens = np.zeros((batch, 2), np.uint32), np.full(batch, 3, np.uint32)
        for got in run_everywhere(lk.paged_attention, [q, k, k, table, lens]).values():
            assert got.shape == q.shape


@pytest.mark.parametrize("queries", [1, 2])
def test_bad_lengths_and_blocks_are_refused_by_every_path(queries: int) -> None:
    case = Case(15, [7, 5], 2, queries)
    rows, blocks = case.table.shape[1] * 2, len(case.k_pool)
    full = np.minimum(case.table, blocks - 1)  # so that it is the length alone that is wrong
    lens = [(rows + 1, "context_lens[1] ="), (INVALID, "context_lens[1] =")]
    lens += [(1, "context_lens[1] = 1, need 0 or 2")] if queries == 2 else []
    for bad, text in lens:
        inputs = [*case.inputs[:3], full, np.array([7, bad], np.uint32)]
        _refused(inputs, text)
    for at, bad in (((1, 2), blocks), ((0, 0), INVALID), ((1, 0), 2**31)):
        table = case.table.copy()
        table[at] = bad
        _refused([*case.inputs[:3], table, case.lens], f"block {bad} in block_table[{at[0]}]")
        _refused([*case.inputs[:3], table, case.lens], f"need block < {blocks}")


def _refused(inputs: list[Any], text: str) -> None:
    """By the kernel and the body with this text, by the lowering as `take` says it."""
    for build in (lk.paged_attention, _strided):
        with pytest.raises(RangeError) as caught:
            lk.realize(build(*_consts(inputs)))
        assert str(caught.value).startswith("paged_attention: got ")
        assert text in str(caught.value)
    with pytest.raises(RangeError, match="take: got ids"):
        _run_lowered(inputs)


def _strided(q: Any, k: Any, v: Any, *rest: Any) -> lk.Tensor:
    """The same over pools that only the body reads."""
    k, v = (x.permute(0, 2, 1, 3).to("cpu").permute(0, 2, 1, 3) for x in (k, v))
    return lk.paged_attention(q, k, v, *rest)


def _run_lowered(inputs: list[Any]) -> None:
    with registered(Primitive()):
        g = lk.Graph()
        stores = [lk.Storage.from_array(a, "primitive:0") for a in inputs]
        lk.realize(lk.paged_attention(*(g.const(s) for s in stores)), device="primitive:0")


def _consts(arrays: list[Any]) -> list[lk.Tensor]:
    g = lk.Graph()
    return [g.const(np.ascontiguousarray(a)) for a in arrays]


def test_a_pass_is_refused_before_anything_of_it_is_computed() -> None:
    case = Case(16, [7, 5, 3], 2)
    plan, given = case.plan()
    want = plan.run(given)
    table, lens = list(given)[1:]
    bad = case.table.copy()
    bad[2, 1] = len(case.k_pool)
    for wrong in ({table: bad}, {lens: np.array([7, 5, 99], np.uint32)}):
        with pytest.raises(RangeError, match=r"block_table\[2\]|context_lens\[2\]"):
            plan.run({**given, **wrong})
    assert np.array_equal(plan.run(given), want)


def build(**shapes: tuple[tuple[int, ...], str]) -> lk.Tensor:
    operands = {
        "q": ((2, 4, 1, 8), "f32"), "k": ((6, 4, 2, 8), "f32"), "v": ((6, 4, 2, 5), "f32"),
        "table": ((2, 3), "u32"), "lens": ((2,), "u32"),
    }  # fmt: skip
    g = lk.Graph()
    return lk.paged_attention(*(g.placeholder(*s) for s in {**operands, **shapes}.values()))


def test_operands_that_do_not_fit_are_refused_when_built() -> None:
    assert build().spec == lk.Graph().placeholder((2, 4, 1, 5), "f32").spec
    f32, f16, pool = "f32", "f16", ((6, 4, 2, 8), "f16")
    for shapes, error, text in (
        ({"q": ((4, 1, 8), f32)}, ShapeError, "need rank 4"),
        ({"k": ((6, 4, 2), f32)}, ShapeError, "k_pool f32[6,4,2], need rank 4"),
        ({"table": ((2,), "u32")}, ShapeError, "block_table u32[2], need rank 2"),
        ({"k": pool}, DTypeError, "need one dtype"),
        ({"q": ((2, 4, 1, 8), f16)}, DTypeError, "f32 queries on 16-bit pools"),
        ({"q": ((2, 4, 1, 8), "f64"), "k": pool, "v": pool}, DTypeError, "on 16-bit pools"),
        ({"q": ((2, 4, 1, 8), "i32")}, DTypeError, "need a floating dtype"),
        ({"table": ((2, 3), "i32")}, DTypeError, "need u32"),
        ({"lens": ((2,), "i64")}, DTypeError, "need u32"),
        ({"table": ((3, 3), "u32")}, ShapeError, "[B,Hq,Sq,D], [B,M] and [B]"),
        ({"lens": ((3,), "u32")}, ShapeError, "[B,Hq,Sq,D], [B,M] and [B]"),
        ({"lens": ((2, 1), "u32")}, ShapeError, "[B,Hq,Sq,D], [B,M] and [B]"),
        ({"v": ((6, 4, 1, 8), f32)}, ShapeError, "v_pool [N,bs,Hkv,Dv]"),
        ({"v": ((7, 4, 2, 8), f32)}, ShapeError, "v_pool [N,bs,Hkv,Dv]"),
        ({"k": ((6, 4, 2, 9), f32)}, ShapeError, "v_pool [N,bs,Hkv,Dv]"),
        ({"k": ((0, 4, 2, 8), f32), "v": ((0, 4, 2, 8), f32)}, ShapeError, "N >= 1 and bs >= 1"),
        ({"k": ((6, 0, 2, 8), f32), "v": ((6, 0, 2, 8), f32)}, ShapeError, "N >= 1 and bs >= 1"),
        ({"q": ((2, 4, 13, 8), f32)}, ShapeError, "need room for the 13 rows of the queries"),
        ({"q": ((2, 4, 1, 0), f32)}, ShapeError, "need rank 4 and D >= 1"),
    ):
        with pytest.raises(error) as caught:
            build(**shapes)
        assert str(caught.value).startswith("paged_attention: got ")
        assert text in str(caught.value)
    assert build(q=((2, 4, 12, 8), f32)).shape == (2, 4, 12, 5)


def test_bad_windows_are_refused_when_built() -> None:
    case = Case(17, [3], 2)
    for window in (0, -1):
        with pytest.raises(RangeError, match=f"window {window}, need window >= 1"):
            lk.paged_attention(*_consts(case.inputs), window=window)
    with pytest.raises(DTypeError, match="need a whole number"):
        lk.paged_attention(*_consts(case.inputs), window=1.5)  # type: ignore[arg-type]


def test_I4_a_remainder_of_heads_is_refused_naming_both_numbers() -> None:
    with pytest.raises(ShapeError, match="6 query heads and 4 key heads, need a multiple"):
        build(q=((2, 6, 1, 8), "f32"), k=((6, 4, 4, 8), "f32"), v=((6, 4, 4, 8), "f32"))


def test_all_layers_of_a_step_share_one_walk() -> None:
    case = Case(18, [20, 9], 4)
    g = lk.Graph()
    tensors = [g.const(a) for a in case.inputs]
    plan = lk.plan([lk.paged_attention(*tensors, scale=s) for s in (0.1, 0.2, 0.3)])
    walk.cache_clear()
    plan.run()
    assert (walk.cache_info().misses, walk.cache_info().hits) == (2, 4)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", ["in order", "shuffled"])
def test_cost_is_of_the_live_rows_alone(
    monkeypatch: pytest.MonkeyPatch, layout: str, queries: int
) -> None:
    """A pool and a table a hundred times as large: the same pieces, and no memory of their size."""
    read: list[int] = []
    real = cpu_paged.Rows.read
    monkeypatch.setattr(
        cpu_paged.Rows, "read", lambda self, *piece: read.append(piece[1]) or real(self, *piece)
    )
    peaks, amounts = [], []
    for spare, wide in ((0, 0), (2000, 5000)):
        case = Case(19, [33, 0, 18], 4, queries, layout="in order", spare=spare)
        if layout == "shuffled":
            turn = np.random.default_rng(1).permutation(14)
            for pool in (case.k_pool, case.v_pool):
                pool[turn] = pool[:14].copy()
            case.table[case.table < 14] = turn[case.table[case.table < 14]]
        marks = np.full((3, wide), INVALID, np.uint32)
        case.table = np.concatenate([case.table, marks], 1)
        plan, given = case.plan()
        plan.run(given)
        read.clear()
        tracemalloc.start()
        got = plan.run(given)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        amounts.append(list(read))
        np.testing.assert_allclose(got, case.want(), rtol=2e-5, atol=2e-5)
    assert amounts[0] == amounts[1]
    assert sum(amounts[0]) == 2 * (33 + 18)
    table_bytes = case.table.nbytes  # an array bound to a plan is copied in, once
    assert peaks[1] - peaks[0] < table_bytes + (8 << 10) < case.k_pool.nbytes
