import numpy as np
import pytest
from toy_backends import FLOATS, check_everywhere, floats


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 8), (0, 8), (1, 1)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(6)
    x, w = floats(rng, shape, dtype), floats(rng, shape[-1:], dtype)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * w.astype(np.float64)
    check_everywhere(lambda t, u: t.rms_norm(u, 1e-5), [x, w], want, scale=3)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(8,), (2, 3, 8), (0, 8)], ids=str)
def test_layer_norm(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(7)
    x, w, b = (floats(rng, s, dtype) for s in (shape, shape[-1:], shape[-1:]))
    wide, w64, b64 = (a.astype(np.float64) for a in (x, w, b))
    centred = wide - wide.mean(-1, keepdims=True)
    want = centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-3) * w64 + b64
    check_everywhere(lambda t, u, v: t.layer_norm(u, v, 1e-3), [x, w, b], want, scale=4)


@pytest.mark.parametrize("rows", [1, 4])
def test_strided_rows(rows: int) -> None:
    rng = np.random.default_rng(8)
    x, w = floats(rng, (8, rows), "f32"), floats(rng, (16,), "f32")
    wide = x.astype(np.float64).T
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * w[::2].astype(np.float64)
    check_everywhere(
        lambda t, u: t.transpose(0, 1).rms_norm(u.reshape(8, 2)[:, 0], 1e-5), [x, w], want
    )


def test_16_bit_squares_do_not_overflow() -> None:
    x = np.full((2, 4), 1000, np.float16)
    one = np.ones(4, np.float16)
    check_everywhere(lambda t, u: t.rms_norm(u, 0.0), [x, one], np.ones((2, 4)))


def test_zeros_without_eps_are_nan_as_in_the_formula() -> None:
    for rows in (1, 2):
        x, one = np.zeros((rows, 4), np.float32), np.ones(4, np.float32)
        check_everywhere(lambda t, u: t.rms_norm(u, 0.0), [x, one], np.full((rows, 4), np.nan))
        check_everywhere(lambda t, u: t.rms_norm(u, 1e-6), [x, one], np.zeros((rows, 4)))
