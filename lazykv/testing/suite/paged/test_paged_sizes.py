"""Paged attention of the sizes that real models have, over blocks that are no power of two too, and
with scores that 16 bits cannot hold."""

import numpy as np
import pytest

from lazykv.dtypes import dtype as find_dtype
from lazykv.functions import paged_attention
from lazykv.graph import Graph
from lazykv.testing import reference
from lazykv.testing.compare import check_close
from lazykv.testing.golden import Array, numbers, random_of
from lazykv.testing.target import Target

DIM, GROUP, HEADS = 128, 8, 2
LENS = (300, 33, 129)


def blocks_of(size: int) -> list[list[int]]:
    """The blocks of each sequence: scattered over a pool, and none of them shared."""
    counts = [-(-n // size) for n in LENS]
    order = random_of("blocks", str(size)).permutation(sum(counts)).tolist()
    return [[order.pop() for _ in range(n)] for n in counts]


def run(target: Target, *arrays: Array) -> Array:
    g = Graph()
    operands = {g.placeholder(a.shape, a.dtype): target.storage(a) for a in arrays}
    out: Array = target.run(paged_attention(*operands), operands)
    return out


@pytest.mark.parametrize(("dtype", "queries"), [("f32", 1), ("bf16", 1), ("f32", 33), ("bf16", 33)])
@pytest.mark.parametrize("size", [3, 16])
def test_paged_attention(target: Target, size: int, dtype: str, queries: int) -> None:
    """Three sequences of up to 300 rows; what no sequence has written holds NaN."""
    target.need(dtype, "u32")
    rng, dt, blocks = random_of("paged", str(size)), find_dtype(dtype), blocks_of(size)
    q = numbers(rng, (len(LENS), GROUP * HEADS, queries, DIM), dt)
    pools = [np.full((sum(map(len, blocks)), size, HEADS, DIM), np.nan, dt.numpy) for _ in "kv"]
    table = np.full((len(LENS), max(map(len, blocks))), 2**32 - 1, np.uint32)
    want = np.zeros(q.shape)
    for b, (own, n) in enumerate(zip(blocks, LENS, strict=True)):
        table[b, : len(own)] = own
        rows = [numbers(rng, (1, HEADS, n, DIM), dt) for _ in "kv"]
        for pool, new in zip(pools, rows, strict=True):
            for t in range(n):
                pool[own[t // size], t % size] = new[0, :, t]
        wide_q, k, v = (a.astype(np.float64) for a in (q[b : b + 1], *rows))
        seen = np.arange(n) <= np.arange(n - queries, n)[:, None]
        want[b] = reference.attend_many(wide_q, k, v, scale=DIM**-0.5, seen=seen)[0]
    got = run(target, q, *pools, table, np.array(LENS, np.uint32))
    check_close(f"paged attention over blocks of {size} in {dtype}", got, want)


def test_scores_may_be_larger_than_f16(target: Target) -> None:
    """Of three rows two have one score, far above 65504, and the third has a lower one."""
    target.need("f16", "u32")
    q = np.full((1, 2, 1, 8), 200, np.float16)
    k = np.full((2, 2, 2, 8), 210, np.float16)
    k[1, 1] = 180
    v = numbers(random_of("values"), k.shape, find_dtype("f16"))
    table, lens = np.array([[1, 0]], np.uint32), np.array([3], np.uint32)
    wide_q, k_pool, v_pool = (a.astype(np.float64) for a in (q, k, v))
    want = reference.paged_attention(wide_q, k_pool, v_pool, table, lens)
    check_close("paged attention with large scores", run(target, q, k, v, table, lens), want)
