from typing import Any

import numpy as np
import pytest
from toy_backends import FLOATS, check_everywhere, floats


def reference(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Each pair is a point in the plane, turned by a complex number."""
    x = x.astype(np.float64)
    half = x.shape[-1] // 2
    turn = cos.astype(np.float64) + 1j * sin.astype(np.float64)
    if turn.ndim == 3:
        turn = turn[:, None]
    out = np.empty_like(x)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = (x[..., a] + 1j * x[..., b]) * turn[..., i]
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


SHAPES = [(3, 8), (2, 5, 3, 8), (2, 3, 3, 2), (1, 2, 1, 4), (2, 0, 8), (3, 0)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope(shape: tuple[int, ...], interleaved: bool, dtype: str) -> None:
    rng = np.random.default_rng(9)
    x = floats(rng, shape, dtype)
    angles = rng.standard_normal((shape[-2], shape[-1] // 2))
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    want = reference(x, cos, sin, interleaved)
    check_everywhere(lambda t, c, s: t.rope(c, s, interleaved), [x, cos, sin], want, scale=2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_per_sequence(interleaved: bool) -> None:
    rng = np.random.default_rng(10)
    x, cos, sin = (floats(rng, s, "f32") for s in ((2, 3, 4, 6), (2, 4, 3), (2, 4, 3)))
    want = reference(x, cos, sin, interleaved)
    check_everywhere(lambda t, c, s: t.rope(c, s, interleaved), [x, cos, sin], want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_strided_and_unaligned_input(interleaved: bool) -> None:
    rng = np.random.default_rng(11)
    x, cos, sin = (floats(rng, s, "f32") for s in ((3, 2, 9), (3, 4), (3, 4)))
    cut = x[:, :, 1:].transpose(1, 0, 2)
    check_everywhere(
        lambda t, c, s: t[:, :, 1:].permute(1, 0, 2).rope(c, s, interleaved),
        [x, cos, sin], reference(cut, cos, sin, interleaved),
    )  # fmt: skip
    y = floats(rng, (8, 3), "f32")
    check_everywhere(
        lambda t, c, s: t.transpose(0, 1).rope(c, s, interleaved),
        [y, cos, sin], reference(y.T, cos, sin, interleaved),
    )  # fmt: skip


def test_known_quarter_turn() -> None:
    x = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    cos, sin = np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)
    check_everywhere(lambda t, c, s: t.rope(c, s, True), [x, cos, sin], [[-2, 1, -4, 3]])
    check_everywhere(lambda t, c, s: t.rope(c, s, False), [x, cos, sin], [[-3, -4, 1, 2]])
