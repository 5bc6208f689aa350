import ml_dtypes
import numpy as np
import pytest
from toy_backends import floats, run_everywhere

import lazykv as lk
from lazykv import dtypes
from lazykv.errors import RangeError

EVERY = [t.name for t in dtypes.ALL]


def some(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(40)
    return rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(lk.dtype(dtype).numpy)


@pytest.mark.parametrize("to", EVERY)
@pytest.mark.parametrize("of", EVERY)
def test_cast_between_all_dtypes(of: str, to: str) -> None:
    x = some(of, (2, 3))
    want = x.astype(np.float64).astype(lk.dtype(to).numpy)
    for got in run_everywhere(lambda t: t.transpose(0, 1).cast(to), [x]).values():
        assert got.dtype == want.dtype
        assert np.array_equal(got.astype(float), want.T.astype(float))


def test_cast_rounds_once() -> None:
    x = np.array([1 + 2**-11 + 2**-40])  # above the middle of two f16, on it in f32
    for got in run_everywhere(lambda t: t.cast("f16"), [x]).values():
        assert got.tolist() == [1 + 2**-10]


@pytest.mark.parametrize(("to", "unit"), [("bf16", 2**-7), ("f8_e4m3", 2**-3), ("f8_e5m2", 2**-2)])
def test_cast_of_f64_to_raw_bits_rounds_once(to: str, unit: float) -> None:
    """A little beside a tie, so little that f32 cannot tell; and what f32 cannot hold."""
    tie, little = 1 + unit / 2, 2.0**-40
    x = np.array([tie - little, tie, tie + little, -tie - little, 1e300, 1e-300, np.nan, -0.0])
    for got in run_everywhere(lambda t: t.cast(to), [x]).values():
        assert got[:4].tolist() == [1, 1, 1 + unit, -1 - unit]
        assert not np.isfinite(got[[4, 6]].astype(np.float64)).any()
        assert got[[5, 7]].tolist() == [0, 0]
        assert np.signbit(got[7])
    for got in run_everywhere(lambda t: t.cast(to), [np.array(tie + little)]).values():
        assert got.tolist() == 1 + unit


def test_cast_to_f16_overflows_to_inf() -> None:
    for got in run_everywhere(lambda t: t.cast("f16"), [np.array([1e6, -1e6])]).values():
        assert got.tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("dtype", EVERY)
def test_moves_carry_bits(dtype: str) -> None:
    x, y = some(dtype, (2, 3)), some(dtype, (2, 3))[::-1].copy()
    flags = np.array([[True, False, True], [False, False, True]])
    ids = np.array([[1, 0], [1, 1]], np.int32)
    cases = [
        (lambda s, t, c, i: lk.concat([s, t, s], axis=1), np.concatenate([x, y, x], 1)),
        (lambda s, t, c, i: lk.where(c, s, t), np.where(flags, x, y)),
        (lambda s, t, c, i: s.take(i), x[ids]),
        (lambda s, t, c, i: s.transpose(0, 1).take(i), x.T[ids]),
        (lambda s, t, c, i: s.transpose(0, 1).contiguous(), x.T),
        (lambda s, t, c, i: s.transpose(0, 1).reshape(6), x.T.reshape(6)),
        (lambda s, t, c, i: s.unsqueeze(1).broadcast_to(2, 2, 3), np.stack([x, x], 1)),
    ]
    for build, want in cases:
        for got in run_everywhere(build, [x, y, flags, ids]).values():
            assert got.dtype == want.dtype
            assert got.tobytes() == want.tobytes()


def test_nan_payloads_survive_moves() -> None:
    bits = np.array([0x7FC1, 0xFFFF, 0x7F81], np.uint16)
    x = bits.view(ml_dtypes.bfloat16)
    for got in run_everywhere(lambda t: lk.concat([t, t]), [x]).values():
        assert got.view(np.uint16).tolist() == bits.tolist() * 2


@pytest.mark.parametrize("ids", [(), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["i32", "u32", "i64"])
def test_take_of_odd_shapes(ids: tuple[int, ...], dtype: str) -> None:
    table, index = floats(np.random.default_rng(41), (3, 2), "f32"), np.ones(ids)
    index = index.astype(lk.dtype(dtype).numpy)
    for got in run_everywhere(lambda t, i: t.take(i), [table, index]).values():
        assert np.array_equal(got, table[index])
    for got in run_everywhere(lambda t, i: t.take(i), [table[:, 0].copy(), index]).values():
        assert np.array_equal(got, table[:, 0][index])


@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_take_refuses_ids_outside_the_table(bad: int) -> None:
    g = lk.Graph()
    table = g.const(np.zeros((3, 2), np.float32))
    with pytest.raises(RangeError, match=f"got ids 0..{bad}|got ids {bad}..0"):
        lk.realize(table.take(g.const([0, bad], "i64")))
    empty = g.const(np.zeros((0, 2), np.float32))
    with pytest.raises(RangeError, match="id < 0"):
        lk.realize(empty.take(g.const([0], "i64")))


def test_zero_sizes() -> None:
    x, y = np.zeros((0, 3), np.float32), np.ones((2, 3), np.float32)
    for got in run_everywhere(lambda s, t: lk.concat([s, t, s]), [x, y]).values():
        assert np.array_equal(got, y)
    for got in run_everywhere(lambda s: s.transpose(0, 1).contiguous(), [x]).values():
        assert got.shape == (3, 0)
