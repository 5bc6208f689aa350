"""What is out of bounds is refused, and nothing has been written; nothing clamps or wraps.

Symbols are checked before the first kernel. What lives in tensors is checked when the kernel runs:
the error is a `RangeError` or a `KernelError`, at the latest when somebody waits, and the
destination is as it was, or torn. Good data runs afterwards.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lazykv.errors import KernelError, RangeError
from lazykv.functions import attention, latent_attention, paged_attention, ring_attention
from lazykv.graph import Graph, Tensor
from lazykv.runtime.realize import plan
from lazykv.symbols import Sym
from lazykv.testing import reference
from lazykv.testing.compare import check_bits, check_close
from lazykv.testing.golden import Array, random_of
from lazykv.testing.target import Target


@pytest.mark.parametrize("start", [5, 6, 2**40])
def test_a_symbol_out_of_bounds_writes_nothing_anywhere(target: Target, start: int) -> None:
    target.need("f32")
    g, n = Graph(), Sym("n")
    stores = [target.storage(np.zeros((6, 2), np.float32)) for _ in range(2)]
    x, y = (g.placeholder((6, 2), "f32", name) for name in "xy")
    row = g.const(target.storage(np.ones((2, 2), np.float32)))
    made = plan(
        [x.at[0:2].set(row), y.at[n : n + 2].set(row)],
        dict(zip((x, y), stores, strict=True)), target.location,
    )  # fmt: skip
    with pytest.raises(RangeError):
        made.run(env={n: start})
    for store in stores:
        check_bits(f"after a refusal of {start}", store.to_numpy(), np.zeros((6, 2), np.float32))
    made.run(env={n: 4})
    for store, first in zip(stores, (0, 4), strict=True):
        want = np.zeros((6, 2), np.float32)
        want[first : first + 2] = 1
        check_bits("after good data", store.to_numpy(), want)


Wrong = tuple[str, Callable[..., Tensor], list[Array], list[Array]]
"""A name, a write ``(dest, rows, *operands)``, operands that are wrong, and good ones."""


def wrong(name: str, build: Callable[..., Tensor], bad: list[Any], good: list[Any]) -> Wrong:
    def as_arrays(values: list[Any]) -> list[Array]:
        return [np.array(v, np.int64) for v in values]

    return name, build, as_arrays(bad), as_arrays(good)


def at_offset(dest: Tensor, src: Tensor, offset: Tensor) -> Tensor:
    return dest.write_slice_at(src, 0, offset)


def rotating(dest: Tensor, src: Tensor, position: Tensor) -> Tensor:
    return dest.write_slice_rotating(src, 0, position, 5)


def scattered(dest: Tensor, src: Tensor, *rows: Tensor) -> Tensor:
    return dest.write_rows(src, *rows)


FAR = 2**32
"""What 32 bits hold nothing of: a number that is in bounds, and this more or less, is not."""

ENDS = (2**63 - 1, -(2**63))

WRONG = [
    *(
        wrong(f"at_offset_{n}", at_offset, [n], [3])
        for n in (-1, 4, -6, 2**40, -(2**40), FAR + 1, 1 - FAR, *ENDS)
    ),
    *(wrong(f"rotating_at_{n}", rotating, [n], [7]) for n in (-1, -5, 2 - FAR, ENDS[1])),
    *(
        wrong(f"rows_{n}", scattered, [[0, 2, n]], [[0, 2, 5]])
        for n in (-1, 6, 2**40, 2, FAR + 5, 5 - FAR, *ENDS)
    ),
    *(
        wrong(f"count_{n}", scattered, [[0, 2, 4], n], [[0, 2, 9], 2])
        for n in (-1, 4, FAR + 2, 2 - FAR, *ENDS)
    ),
    wrong("counted_row_-1", scattered, [[0, -1, 4], 2], [[0, 1, -1], 2]),
]


@pytest.mark.parametrize("case", WRONG, ids=[w[0] for w in WRONG])
def test_a_tensor_out_of_bounds_writes_nothing(target: Target, case: Wrong) -> None:
    target.need("f32", "i64")
    name, build, bad, good = case
    g = Graph()
    old = np.arange(12, dtype=np.float32).reshape(6, 2)
    new = -1 - np.arange(6, dtype=np.float32).reshape(3, 2)
    store = target.storage(old)
    dest, src = g.placeholder((6, 2), "f32"), g.const(target.storage(new))
    operands = [g.placeholder(a.shape, a.dtype) for a in bad]
    made = plan(build(dest, src, *operands), {dest: store}, target.location)
    with pytest.raises((RangeError, KernelError)):
        made.run(dict(zip(operands, bad, strict=True)))
    if not store.torn:
        check_bits(f"{name}: the destination after a refusal", store.to_numpy(), old)
    repair(target, store, old)
    made.run(dict(zip(operands, good, strict=True)))
    assert not np.array_equal(store.to_numpy(), old), f"{name}: good data was not written"


def repair(target: Target, store: Any, data: Array) -> None:
    with store.write() as memory:
        target.backend.copy_in(memory, data)


IDS = [
    *((ids, n) for ids in ("i32", "i64") for n in (-1, 5, 2**31 - 1)),
    *(("u32", n) for n in (5, 2**31 - 1, 2**32 - 1)),
    *(("i64", n) for n in (FAR + 3, 3 - FAR, *ENDS)),
]


@pytest.mark.parametrize(("ids", "bad"), IDS)
def test_ids_outside_a_table_are_refused(target: Target, ids: str, bad: int) -> None:
    target.need("f32", ids)
    g = Graph()
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    t, i = g.placeholder((5, 2), "f32"), g.placeholder((3,), ids)
    made = plan(t.take(i), {t: target.storage(table)}, target.location)
    with pytest.raises((RangeError, KernelError)):
        made.run({i: np.array([0, bad, 4]).astype(i.dtype.numpy)})
    got = made.run({i: np.array([0, 3, 4]).astype(i.dtype.numpy)})
    check_bits("take with good ids", got, table[[0, 3, 4]])


def linear(g: Graph, n: Tensor, **options: Any) -> Tensor:
    q, k = (
        g.placeholder(shape, "f32", name)
        for shape, name in (((1, 2, 2, 4), "q"), ((1, 2, 6, 4), "k"))
    )
    return attention(q, k, k, length=n, **options)


def latent(g: Graph, n: Tensor) -> Tensor:
    q, k = g.placeholder((1, 2, 2, 4), "f32", "q"), g.placeholder((6, 4), "f32", "k")
    return latent_attention(q, q, k, k, scale=0.5, length=n)


def ring(g: Graph, n: Tensor) -> Tensor:
    q, k = g.placeholder((1, 2, 2, 4), "f32", "q"), g.placeholder((1, 2, 6, 4), "f32", "k")
    return ring_attention(q, k, k, length=n, window=4)


LENGTHS: list[tuple[str, Callable[..., Tensor], int]] = [
    *((f"attention_{n}", linear, n) for n in (-1, 1, 7, 2**40, FAR + 6, 6 - FAR, *ENDS)),
    *(
        (f"attention_not_causal_{n}", lambda g, n: linear(g, n, causal=False), n)
        for n in (-1, FAR, -FAR)
    ),
    *((f"latent_{n}", latent, n) for n in (-1, 1, 7, FAR + 6, 6 - FAR, *ENDS)),
    *((f"ring_{n}", ring, n) for n in (-1, 1, 6 - FAR, ENDS[1])),
]


@pytest.mark.parametrize("case", LENGTHS, ids=[c[0] for c in LENGTHS])
def test_a_length_out_of_bounds_is_refused(target: Target, case: Any) -> None:
    """Two queries over six rows: fewer than 2 live rows or more than 6 are not there."""
    target.need("f32", "i64")
    _, build, bad = case
    g = Graph()
    n = g.placeholder((), "i64", "n")
    out = build(g, n)
    stores = {t: target.storage(np.ones(t.shape, np.float32)) for t in g if t.name in ("q", "k")}
    made = plan(out, stores, target.location)
    with pytest.raises((RangeError, KernelError)):
        made.run({n: np.array(bad)})
    np.testing.assert_allclose(made.run({n: np.array(6)}), 1, rtol=1e-5)


@pytest.mark.parametrize("position", [FAR + 8, 2**40 + 3, 2**53 + 1])
def test_positions_in_a_ring_have_64_bits(target: Target, position: int) -> None:
    """Written there, and seen by queries, by a tensor and by a symbol."""
    target.need("f32", "i64")
    rows, sinks, window, queries = 7, 1, 4, 2
    rng, length = random_of("far", str(position)), position + queries
    q, new, old = (
        rng.standard_normal((1, 2, n, 4)).astype(np.float32) for n in (queries, queries, rows)
    )
    g, end = Graph(), Sym("end")
    place, count = (g.placeholder((), "i64") for _ in range(2))
    dest, k = g.placeholder(old.shape, "f32"), g.const(target.storage(old))
    written = dest.write_slice_rotating(g.const(target.storage(new)), 2, place, rows, sinks)
    seen = [
        ring_attention(g.const(target.storage(q)), k, k, length=n, window=window, sinks=sinks)
        for n in (count, end)
    ]
    made = plan([written, *seen], {dest: target.storage(old)}, target.location)
    got, *found = made.run({place: np.array(position), count: np.array(length)}, {end: length})
    want = old.copy()
    reference.write_slice_rotating(want, new, 2, position, rows, sinks)
    check_bits(f"a ring after a write at {position}", got, want)
    q64, k64 = q.astype(np.float64), old.astype(np.float64)
    attended = reference.ring_attention(q64, k64, k64, length=length, window=window, sinks=sinks)
    for what, result in zip(("a tensor", "a symbol"), found, strict=True):
        check_close(f"a ring of {length} positions, told by {what}", result, attended)


PAGES = {
    "length_1": ([0, 1, 2], 1),
    "length_13": ([0, 1, 2], 13),
    "length_of_32_bits": ([0, 1, 2], 2**31 + 12),
    "block_of_32_bits": ([0, 2**31 + 1, 2], 12),
    "block_5": ([0, 5, 2], 12),
    "block_none": ([0, 2**32 - 1, 2], 12),
    "last_block": ([0, 1, 77], 9),
}


@pytest.mark.parametrize("case", PAGES.values(), ids=PAGES.keys())
def test_pages_out_of_bounds_are_refused(target: Target, case: tuple[list[int], int]) -> None:
    """Two queries over three blocks of four rows, of a pool of five blocks."""
    target.need("f32", "u32")
    blocks, length = case
    g = Graph()
    q, pool = g.placeholder((1, 2, 2, 4), "f32"), g.placeholder((5, 4, 2, 4), "f32")
    table, lens = g.placeholder((1, 3), "u32"), g.placeholder((1,), "u32")
    out = paged_attention(q, pool, pool, table, lens)
    stores = {t: target.storage(np.ones(t.shape, np.float32)) for t in (q, pool)}
    made = plan(out, stores, target.location)
    with pytest.raises((RangeError, KernelError)):
        made.run({table: np.array([blocks], np.uint32), lens: np.array([length], np.uint32)})
    good = {table: np.array([[4, 0, 2**32 - 1]], np.uint32), lens: np.array([7], np.uint32)}
    np.testing.assert_allclose(made.run(good), 1, rtol=1e-5)
