import numpy as np
import pytest
from toy_backends import FLOATS, check_everywhere, floats, run_everywhere

import lazykv as lk


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", ["max", "sum", "mean"])
def test_reductions(name: str, axis: int, keepdims: bool, dtype: str) -> None:
    x = floats(np.random.default_rng(4), (3, 4, 5), dtype)
    want = getattr(np, name)(x.astype(np.float64), axis=axis, keepdims=keepdims)
    check_everywhere(lambda t: getattr(t, name)(axis, keepdims), [x], want, scale=4)
    turned = getattr(np, name)(x.astype(np.float64).T, axis=axis, keepdims=keepdims)
    check_everywhere(
        lambda t: getattr(t.permute(2, 1, 0), name)(axis, keepdims), [x], turned, scale=4
    )


def test_sums_of_16_bits_are_kept_in_32() -> None:
    x = np.ones(5000, np.float16)
    for got in run_everywhere(lambda t: t.sum(), [x]).values():
        assert got.item() == 5000
    many = np.full(100, 60000, np.float16)
    for got in run_everywhere(lambda t: t.mean(), [many]).values():
        assert got.item() == 60000


def test_rows_of_nothing_and_nothing_of_rows() -> None:
    for got in run_everywhere(lambda t: t.sum(1), [np.zeros((0, 3), np.float32)]).values():
        assert got.shape == (0,)
    assert np.isnan(lk.realize(lk.Graph().const(np.array([1.0, np.nan])).max()))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_softmax(axis: int, dtype: str) -> None:
    x = floats(np.random.default_rng(5), (4, 6), dtype)
    e = np.exp(x.astype(np.float64))
    check_everywhere(lambda t: t.softmax(axis), [x], e / e.sum(axis, keepdims=True))


def test_softmax_of_large_values_does_not_overflow() -> None:
    x = np.array([[60000, 59999], [-60000, -60000]], np.float16)
    want = np.array([[0.5, 0.5], [0.5, 0.5]])  # 59999 is 60000 in f16
    check_everywhere(lambda t: t.softmax(), [x], want)


def test_K1_softmax_over_nothing_gives_zeros() -> None:
    x = np.array([[-np.inf, -np.inf], [0, -np.inf]], np.float32)
    for got in run_everywhere(lambda t: t.softmax(), [x]).values():
        assert got.tolist() == [[0, 0], [1, 0]]
    for shape in ((2, 0), (0, 2)):
        for got in run_everywhere(lambda t: t.softmax(), [np.zeros(shape, np.float32)]).values():
            assert got.shape == shape
