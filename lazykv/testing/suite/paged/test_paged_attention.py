"""Attention over the blocks of a pool that a block table names."""

from typing import Any

import numpy as np
import pytest

from lazykv.dtypes import DType
from lazykv.functions import paged_attention
from lazykv.graph import Tensor
from lazykv.testing import reference
from lazykv.testing.golden import (
    FLOATS,
    Array,
    Case,
    Maker,
    Operand,
    Param,
    check_case,
    every,
    given,
    numbers,
)
from lazykv.testing.target import Target

NONE = 2**32 - 1
"""What a table holds where there is no block."""

BLOCKS, SIZE = 6, 4


def paged(
    name: str, table: list[list[int]], lens: list[int], *, queries: int = 1, heads: int = 4,
    kv: int = 2, dim: int = 8, dv: int = 8, q_dtype: str | None = None, **options: Any,
) -> Case:  # fmt: skip
    """Rows that no query sees hold NaN."""
    seen = np.zeros((BLOCKS, SIZE), np.bool_)
    for row, n in zip(table, lens, strict=True):
        window = options.get("window")
        for t in range(0 if window is None else max(0, n - queries + 1 - window), n):
            seen[row[t // SIZE], t % SIZE] = True

    def make(rng: np.random.Generator, shape: Any, dt: DType) -> Array:
        out = numbers(rng, shape, dt)
        if 0 not in shape:
            out[~seen] = np.nan
        return out

    pools = [Operand((BLOCKS, SIZE, kv, d), make=make, plain=True) for d in (dim, dv)]
    numbers_: list[Maker] = [given(table), given(lens)]
    operands = (
        Operand((len(lens), heads, queries, dim), q_dtype), *pools,
        Operand(np.shape(table), "u32", numbers_[0], plain=True),
        Operand((len(lens),), "u32", numbers_[1], plain=True),
    )  # fmt: skip
    empty = ((0, *operands[0].shape[1:]), *(p.shape for p in pools), (0, len(table[0])), (0,))

    def build(*tensors: Tensor) -> Tensor:
        return paged_attention(*tensors, **options)

    return Case(
        name, build, lambda *arrays: reference.paged_attention(*arrays, **options), operands,
        ("f16", "bf16") if q_dtype else FLOATS, empty,
    )  # fmt: skip


CASES = [
    paged("one_block", [[3]], [2]),
    paged("whole_blocks", [[3, 1]], [8]),
    paged("scattered", [[4, 0, 2]], [10]),
    paged("in_a_row", [[1, 2, 3]], [11]),
    paged("padded", [[5, 2, NONE, NONE], [0, 1, 4, NONE]], [6, 9]),
    paged("stale_entries", [[5, 2, 99, 7]], [7]),
    paged("padding_sequence", [[1, 3, NONE], [NONE, NONE, NONE]], [5, 0]),
    paged("shared_block", [[2, 0], [2, 5]], [6, 8]),
    paged("one_token", [[0, NONE], [3, NONE]], [1, 1]),
    paged("queries", [[4, 0, 2], [1, NONE, NONE]], [10, 3], queries=3),
    paged("queries_in_one_block", [[4]], [3], queries=3),
    paged("window", [[4, 0, 2], [5, 1, NONE]], [10, 5], window=3),
    paged("window_skips_blocks", [[NONE, 77, 2]], [12], window=4),
    paged("window_queries", [[4, 0, 2]], [11], queries=3, window=2),
    paged("one_kv_head", [[4, 0]], [7], kv=1),
    paged("own_heads", [[4, 0]], [7], kv=4, dv=6),
    paged("wide", [[4, 0]], [7], dim=64, dv=64, heads=2, kv=1),
    paged("scale", [[4, 0]], [7], scale=0.7),
    paged("f32_on_16_bit", [[5, 2, NONE], [0, 1, 4]], [6, 9], q_dtype="f32"),
    paged("f32_on_16_bit_queries", [[5, 2, NONE], [0, 1, 4]], [6, 9], queries=2, q_dtype="f32"),
]

PARAMS = every(CASES)


@pytest.mark.parametrize("param", PARAMS.values(), ids=PARAMS.keys())
def test_op(target: Target, param: Param) -> None:
    check_case(target, *param)
