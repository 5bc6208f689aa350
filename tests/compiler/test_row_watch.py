"""Debug poison (KV-15) in plans over parts of a cache: a view reads the rows that it has."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_backends import Primitive, registered

import lazykv as lk
from lazykv import config
from lazykv.compiler.row_watch import _View
from lazykv.layout import Layout
from lazykv.poison import RowLog

SHAPE = (1, 2, 8, 4)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "POISON", True)


@pytest.fixture(params=["cpu", "sim:0"])
def cache(request: pytest.FixtureRequest) -> lk.KvCache:
    return lk.KvCache.with_capacity(1, 2, 4, 8, "f32", request.param)


def write(cache: lk.KvCache, start: int, end: int) -> None:
    rows = np.ones((1, 2, end - start, 4), np.float32)
    for slot in lk.KvSlot:
        cache.write_bytes(0, slot, start, end - start, rows)


POS = lk.Sym("pos", 0, 5)
Q = np.ones((1, 2, 1, 4), np.float32)
READS: dict[str, Callable[[lk.Tensor, lk.Tensor, lk.Tensor], lk.Tensor]] = {
    "result": lambda q, k, v: k[:, :, 2:5],
    "arithmetic": lambda q, k, v: k[:, :, 2:5] + 1.0,
    "second operand": lambda q, k, v: v[:, :, 0:3] * k[:, :, 2:5],
    "matmul": lambda q, k, v: q @ k[:, :, 2:5].transpose(2, 3),
    "some heads": lambda q, k, v: k[:, 1:, 2:5].sum(),
    "some columns": lambda q, k, v: k[:, :, 2:5, 1:2] * 2.0,
    "one row": lambda q, k, v: k[0, 1, 3].exp(),
    "reshaped": lambda q, k, v: k.reshape(16, 4)[10:13] + 1.0,
    "permuted": lambda q, k, v: k.permute(2, 0, 3, 1)[2:5].softmax(0),
    "concat": lambda q, k, v: lk.concat([q, k[:, :, 2:5]], 2),
    "source of a write": lambda q, k, v: q.broadcast_to(1, 2, 3, 4).contiguous().at[...].set(
        k[:, :, 2:5]),
    "elsewhere": lambda q, k, v: k[:, :, 2:5].to("sim:1") + 1.0,
    "symbol": lambda q, k, v: k.slice(2, POS + 1, 3) + 1.0,
    "attention": lambda q, k, v: lk.attention(q, k[:, :, 2:5], v[:, :, 2:5]),
    "attention of a length": lambda q, k, v: lk.attention(q, k[:, :, 2:], v[:, :, 2:], length=3),
    "attention in a window": lambda q, k, v: lk.attention(
        q, k[:, :, :5], v[:, :, :5], window=3),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_a_view_reads_the_rows_that_it_has(cache: lk.KvCache, name: str) -> None:
    g = lk.Graph()
    q, k, v = (g.placeholder(s, "f32") for s in (Q.shape, SHAPE, SHAPE))
    slots = {k: cache.slot_storage(0, 0), v: cache.slot_storage(0, 1)}
    target, feed, env = READS[name](q, k, v), {q: Q, **slots}, {POS: 1}
    first, place = 3 if name == "one row" else 2, cache.device_location()
    if name == "second operand":
        cache.write_bytes(0, 1, 0, 3, np.ones((1, 2, 3, 4), np.float32))
    with pytest.raises(lk.RangeError, match=f"read of row {first} of KvCache layer 0, K"):
        lk.realize(target, feed, env, place)
    write(cache, first, 4)
    if name != "one row":
        with pytest.raises(lk.RangeError, match="read of row 4 of KvCache layer 0, K"):
            lk.realize(target, feed, env, place)
    write(cache, 4, 5)
    lk.realize(target, feed, env, place)


@pytest.mark.parametrize("part", ["before", "part", "after"])
def test_rows_that_the_pass_itself_writes_first_may_be_read(cache: lk.KvCache, part: str) -> None:
    g = lk.Graph()
    k, new = g.placeholder(SHAPE, "f32"), g.const(np.full((1, 2, 3, 4), 7, np.float32))
    written = k.at[:, :, 2:5].set(new)
    view = {"before": k[:, :, 2:5], "part": written[:, :, 3:6], "after": written[:, :, 2:5]}[part]
    slots = {k: cache.slot_storage(0, 0)}
    if part == "after":
        assert (lk.realize([written.sum(), view + 0.0], slots)[1] == 7).all()
        return
    row = 2 if part == "before" else 5
    with pytest.raises(lk.RangeError, match=f"read of row {row} of"):
        lk.realize([written.sum(), view + 0.0], slots)


def test_a_write_into_a_view_writes_no_row_beside_it(cache: lk.KvCache) -> None:
    g = lk.Graph()
    k, new = g.placeholder(SHAPE, "f32"), g.const(np.ones((1, 2, 1, 4), np.float32))
    store = cache.slot_storage(0, 0)
    assert store is not None
    assert store.row_log is not None
    lk.realize(k[:, :, 2:5].at[:, :, 0:1].set(new), {k: store})
    assert store.row_log.written.tolist() == [False, False, True, True, True] + [False] * 3


def test_a_read_of_every_row_is_left_to_its_masks(cache: lk.KvCache) -> None:
    """Arithmetic over the whole capacity is what hand-made masks work on."""
    g = lk.Graph()
    q, k = g.placeholder(Q.shape, "f32"), g.placeholder(SHAPE, "f32")
    feed = {q: Q, k: cache.slot_storage(0, 0)}
    assert not lk.realize(q @ k.transpose(2, 3), feed).any()
    assert not lk.realize(k[:, 1:] + 0.0, feed).any()
    assert not lk.realize(k.take(g.const(np.zeros(1, np.int64))), feed).any()


def test_what_a_lowering_reads_behind_its_masks_is_no_read_of_the_user() -> None:
    with registered(Primitive()):
        cache = lk.KvCache.with_capacity(1, 2, 4, 8, "f32", "primitive:0")
        write(cache, 0, 2)
        g = lk.Graph()
        q, k, v = (g.placeholder(s, "f32") for s in (Q.shape, SHAPE, SHAPE))
        feed: dict[lk.Tensor, Any] = {q: Q}
        feed |= {t: cache.slot_storage(0, n) for n, t in enumerate((k, v))}
        out = lk.attention(q, k[:, :, 0:5], v[:, :, 0:5], length=2)
        assert (lk.realize(out, feed, device="primitive:0") == 1).all()


@pytest.mark.parametrize(("start", "n", "rows"), [
    (0, 4, [0]), (0, 5, [0, 1]), (3, 2, [0, 1]), (3, 1, [0]), (7, 6, [1, 2, 3]), (31, 1, [7]),
    (5, 0, []),
])  # fmt: skip
def test_rows_of_a_line_of_elements(start: int, n: int, rows: list[int]) -> None:
    line = Layout.contiguous((8, 4)).reshape((32,))
    assert line is not None
    assert _View(RowLog("t", 0, 8), line.slice(0, start, n), (8, 4)).rows([]).tolist() == rows


@given(st.data())
def test_rows_of_a_view_are_those_of_numpys_view(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple))
    axis = data.draw(st.integers(0, len(shape) - 1))
    numbers = np.broadcast_to(
        np.arange(shape[axis]).reshape((-1,) + (1,) * (len(shape) - axis - 1)), shape
    ).copy()
    layout = Layout.contiguous(shape)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(layout.shape) - 1))
        kind = data.draw(st.sampled_from(["slice", "permute", "reshape", "broadcast"]))
        if kind == "slice":
            start = data.draw(st.integers(0, layout.shape[at]))
            n = data.draw(st.integers(0, layout.shape[at] - start))
            layout = layout.slice(at, start, n)
            numbers = np.take(numbers, range(start, start + n), at)
        elif kind == "permute":
            axes = data.draw(st.permutations(range(len(layout.shape))))
            layout, numbers = layout.permute(axes), numbers.transpose(axes)
        elif kind == "broadcast":
            wide = (2, *layout.shape)
            layout, numbers = layout.broadcast(wide), np.broadcast_to(numbers, wide)
        else:
            flat = layout.reshape((math.prod(layout.shape),))
            if flat is not None:
                layout, numbers = flat, numbers.reshape(-1)
    view = _View(RowLog("t", axis, shape[axis]), layout, shape)
    assert view.rows([]).tolist() == np.unique(numbers).tolist()
