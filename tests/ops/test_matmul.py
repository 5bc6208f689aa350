import numpy as np
import pytest
from toy_backends import FLOATS, check_everywhere, floats

SHAPES = [((3, 4), (4, 5)), ((1, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((1, 1, 4), (4, 5)),
          ((2, 3, 4), (2, 4, 5)), ((2, 2, 1, 4), (2, 2, 4, 1)), ((1, 1), (1, 1)),
          ((3, 0), (0, 5)), ((1, 0), (0, 5)), ((0, 4), (4, 5)), ((3, 4), (4, 0)),
          ((2, 3, 0), (2, 0, 5)), ((0, 0), (0, 0)), ((2, 0, 4), (4, 5))]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(12)
    x, y = floats(rng, a, dtype), floats(rng, b, dtype)
    want = x.astype(np.float64) @ y.astype(np.float64)
    check_everywhere(lambda s, t: s @ t, [x, y], want, scale=4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 3])
def test_strided_operands(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(13)
    x, y = floats(rng, (8, rows), dtype), floats(rng, (5, 8), dtype)
    want = x.astype(np.float64).T @ y.astype(np.float64).T
    check_everywhere(lambda s, t: s.transpose(0, 1) @ t.transpose(0, 1), [x, y], want, scale=4)
    wide = floats(rng, (rows, 8, 2), dtype)
    check_everywhere(
        lambda s, t: s[:, :, 1] @ t.transpose(0, 1), [wide, y],
        wide[:, :, 1].astype(np.float64) @ y.astype(np.float64).T, scale=4,
    )  # fmt: skip


def test_a_broadcast_weight() -> None:
    rng = np.random.default_rng(14)
    x, y = floats(rng, (2, 3, 4), "f32"), floats(rng, (1, 4, 5), "f32")
    want = x.astype(np.float64) @ y.astype(np.float64)
    check_everywhere(lambda s, t: s @ t.broadcast_to(2, 4, 5), [x, y], want)


def test_H5_products_of_16_bits_are_summed_in_32() -> None:
    x = np.full((2, 64), 30, np.float16)
    check_everywhere(lambda s, t: s @ t, [x, x.T.copy()], np.full((2, 2), 57600.0))
