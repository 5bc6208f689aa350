from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lazykv as lk
from lazykv import dtypes
from lazykv.errors import RangeError, SymbolError

POS, ROW = lk.Sym("pos"), lk.Sym("row", 0, 8)
CACHES = {
    "rows": ((8,), 0), "head-major": ((1, 2, 8, 3), 2), "position-major": ((8, 2, 3), 0),
    "last axis": ((2, 8), 1),
}  # fmt: skip


class Cache:
    """A storage with known contents, bound to a placeholder."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "f32") -> None:
        size = int(np.prod(shape))
        self.before = np.arange(1, size + 1).reshape(shape).astype(lk.dtype(dtype).numpy)
        self.store = lk.Storage.from_array(self.before)
        self.g = lk.Graph()
        self.p = self.g.placeholder(shape, dtype)
        self.dtype = dtype

    def rows(self, axis: int, n: int) -> tuple[lk.Tensor, Any]:
        shape = tuple(n if a == axis else e for a, e in enumerate(self.before.shape))
        data = -np.arange(1, int(np.prod(shape)) + 1).reshape(shape).astype(self.before.dtype)
        return self.g.const(data), data

    def run(self, target: lk.Tensor, env: Any = None, **bindings: Any) -> Any:
        return lk.realize(target, {self.p: self.store, **bindings}, env)


def placed(before: Any, data: Any, axis: int, start: int) -> Any:
    """Row by row what a write must leave behind."""
    out = np.moveaxis(before.copy(), axis, 0)
    for i, row in enumerate(np.moveaxis(data, axis, 0)):
        out[start + i] = row
    return np.moveaxis(out, 0, axis)


@pytest.mark.parametrize("n", [0, 1, 3, 8])
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("how", ["fixed", "symbol", "ranged symbol", "device"])
def test_D1_rows_land_where_they_should_in_place(how: str, name: str, n: int) -> None:
    shape, axis = CACHES[name]
    for start in {0, (8 - n) // 2, 8 - n}:
        c = Cache(shape)
        src, data = c.rows(axis, n)
        env = {POS: start, ROW: start}
        if how == "device":
            made = c.p.write_slice_at(src, axis, c.g.const(np.int64(start)))
        else:
            at: Any = {"fixed": start, "symbol": POS, "ranged symbol": ROW}[how]
            made = c.p.write_slice(
                src, [(at, at + n) if a == axis else (0, e) for a, e in enumerate(shape)]
            )
        want = placed(c.before, data, axis, start)
        assert np.array_equal(c.run(made, env), want)
        assert np.array_equal(c.store.to_numpy(), want)
        assert c.store.version == 1


def test_writes_narrower_than_the_rest() -> None:
    c = Cache((4, 5))
    src = c.g.const(-np.ones((2, 2), np.float32))
    want = c.before.copy()
    want[1:3, 2:4] = -1
    for starts in ((1, 2), (POS, 2), (1, POS + 1), (POS, POS + 1)):
        made = c.p.write_slice(src, [(starts[0], starts[0] + 2), (starts[1], starts[1] + 2)])
        c.store = lk.Storage.from_array(c.before)
        assert np.array_equal(c.run(made, {POS: 1}), want)
        assert np.array_equal(c.store.to_numpy(), want)


def test_D1_out_of_bounds_is_refused_and_nothing_is_clamped() -> None:
    for start in (6, 7, -1):
        c = Cache((8,))
        src, _ = c.rows(0, 3)
        with pytest.raises(RangeError, match="start"):
            c.p.write_slice(src, [(start, start + 3)])
        before = lk.stats().kernels_run
        with pytest.raises((RangeError, SymbolError)):
            c.run(c.p.write_slice(src, [(POS, POS + 3)]), {POS: start})
        assert lk.stats().kernels_run == before
        with pytest.raises(RangeError, match=f"got offset {start} for 3 rows on axis 0"):
            c.run(c.p.write_slice_at(src, 0, c.g.const(np.int64(start))))
        assert np.array_equal(c.store.to_numpy(), c.before)
        assert (c.store.version, c.store.torn) == (0, False)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("modulus", [1, 3, 8])
def test_G5_rotating_writes_equal_one_row_at_a_time(modulus: int, name: str) -> None:
    shape, axis = CACHES[name]
    for rows in (0, 1, 2, 3, 7, 11):
        for position in (0, 2, 5, 17):
            c = Cache(shape)
            src, data = c.rows(axis, rows)
            made = c.p.write_slice_rotating(src, axis, c.g.const(np.int64(position)), modulus)
            want = np.moveaxis(c.before.copy(), axis, 0)
            for i, row in enumerate(np.moveaxis(data, axis, 0)):
                want[(position + i) % modulus] = row
            want = np.moveaxis(want, 0, axis)
            assert np.array_equal(c.run(made), want)
            assert np.array_equal(c.store.to_numpy(), want)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize(("modulus", "sinks"), [(4, 1), (8, 3), (8, 7), (3, 2)])
def test_G5_sinks_keep_their_own_slots(modulus: int, sinks: int, name: str) -> None:
    shape, axis = CACHES[name]
    for rows in (0, 1, 2, 4, 9, 13):
        for position in (0, 1, 2, 3, 6, 17):
            c = Cache(shape)
            src, data = c.rows(axis, rows)
            at = c.g.const(np.int64(position))
            made = c.p.write_slice_rotating(src, axis, at, modulus, sinks)
            want = np.moveaxis(c.before.copy(), axis, 0)
            for p, row in enumerate(np.moveaxis(data, axis, 0), position):
                want[p if p < sinks else sinks + (p - sinks) % (modulus - sinks)] = row
            want = np.moveaxis(want, 0, axis)
            assert np.array_equal(c.run(made), want)
            assert np.array_equal(c.store.to_numpy(), want)


def test_a_ring_of_sinks_alone_is_refused() -> None:
    c = Cache((8,))
    src, _ = c.rows(0, 2)
    for sinks in (-1, 4, 5):
        with pytest.raises(RangeError, match=f"got {sinks} sinks, need 0 <= sinks < modulus 4"):
            c.p.write_slice_rotating(src, 0, c.g.const(np.int64(0)), 4, sinks)


def test_a_negative_ring_position_is_refused() -> None:
    c = Cache((8,))
    src, _ = c.rows(0, 2)
    with pytest.raises(RangeError, match="position -3"):
        c.run(c.p.write_slice_rotating(src, 0, c.g.const(np.int64(-3)), 4))
    assert np.array_equal(c.store.to_numpy(), c.before)


@pytest.mark.parametrize("dtype", [t.name for t in dtypes.ALL])
def test_every_dtype_is_written_bit_by_bit(dtype: str) -> None:
    data = np.array([1, 0, 1]).astype(lk.dtype(dtype).numpy)
    store = lk.Storage.allocate((5,), dtype)
    g = lk.Graph()
    p = g.placeholder((5,), dtype)
    made = p.zero_fill().write_slice(g.const(data), [(1, 4)])
    got = lk.realize(made, {p: store})
    assert got.astype(float).tolist() == [0, 1, 0, 1, 0]
    assert store.to_numpy().tobytes() == got.tobytes()


def test_nan_payloads_are_written_as_they_are() -> None:
    bits = np.array([0x7FC1, 0x7F81], np.uint16)
    store = lk.Storage.allocate((2,), "bf16")
    g = lk.Graph()
    p = g.placeholder((2,), "bf16")
    lk.realize(p.write_slice(g.const(bits.view(ml_dtypes.bfloat16)), [(0, 2)]), {p: store})
    with store.read() as raw:
        assert raw.tolist() == bits.tolist()


def test_rank_0_and_zero_sizes() -> None:
    g = lk.Graph()
    p = g.placeholder((), "f32")
    store = lk.Storage.from_array(np.float32(1))
    assert lk.realize(p.write_slice(g.const(np.float32(5)), []), {p: store}).tolist() == 5.0
    assert store.to_numpy().tolist() == 5.0
    for shape in ((0,), (0, 3), (2, 0, 3)):
        q = g.placeholder(shape, "f32")
        full = [(0, n) for n in shape]
        made = q.zero_fill().write_slice(g.const(np.zeros(shape, np.float32)), full)
        assert lk.realize(made, {q: np.zeros(shape, np.float32)}).shape == shape


def test_I2_heads_and_rows_have_their_own_strides() -> None:
    store = lk.Storage.from_array(np.full((1, 2, 8, 1), -1, np.float32))
    g = lk.Graph()
    p = g.placeholder((1, 2, 8, 1), "f32")
    rows = g.const(np.array([1, 2, 3, 11, 12, 13], np.float32).reshape(1, 2, 3, 1))
    lk.realize(p.at[:, :, 2:5].set(rows), {p: store})
    flat = store.to_numpy().reshape(-1)
    assert flat.tolist() == [-1, -1, 1, 2, 3, -1, -1, -1, -1, -1, 11, 12, 13, -1, -1, -1]


def test_strided_sources() -> None:
    c = Cache((4, 3))
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    made = c.p.write_slice(c.g.const(data).transpose(0, 1), [(0, 4), (0, 3)])
    assert np.array_equal(c.run(made), data.T)


@pytest.mark.parametrize("name", CACHES)
def test_bodies_say_what_kernels_do(name: str) -> None:
    shape, axis = CACHES[name]
    c = Cache(shape)
    src, data = c.rows(axis, 3)
    at = c.g.const(np.int64(4))
    fixed = c.p.write_slice(src, [(4, 7) if a == axis else (0, e) for a, e in enumerate(shape)])
    for made in (fixed, c.p.write_slice_at(src, axis, at),
                 c.p.write_slice_rotating(src, axis, at, 6),
                 c.p.write_slice_rotating(src, axis, at, 6, 2), c.p.zero_fill()):  # fmt: skip
        body = made.op.body(np, c.before, data, np.asarray(4))
        assert np.array_equal(lk.realize(made, {c.p: c.before}), body)
