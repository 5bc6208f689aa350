"""Rounding once, to formats that array libraries reach only by way of f32."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazykv.dtypes import DType


def odd_f32(xp: Any, x: Any) -> Any:
    """Numbers as f32, of one that lies between two of them the one with the odd last bit.

    No tie of a narrower format is made or lost so, and rounding the result once more is rounding x
    once (Boldo and Melquiond, 2008, "Emulation of FMA and correctly rounded sums").
    """
    if x.dtype.kind in "iu" and x.dtype.itemsize >= 4:
        x = _odd_f64(xp, x)
    if x.dtype != np.float64:
        return x.astype(np.float32, copy=False)
    near = x.astype(np.float32)
    wide = near.astype(np.float64)
    inexact = xp.isfinite(near) & (wide != x)
    below = xp.where(abs(wide) > abs(x), xp.nextafter(near, xp.zeros_like(near)), near)
    odd = (below.view(np.uint32) | np.uint32(1)).view(np.float32)
    return xp.where(inexact, odd, near)


def _odd_f64(xp: Any, x: Any) -> Any:
    """Whole numbers as f64; of an i64 beyond 53 bits the last 11 become one, which is set if any of
    them is."""
    if x.dtype.itemsize == 8:
        low = x & 2047
        x = xp.where(abs(x) > 1 << 53, (x - low) | xp.where(low != 0, 2048, 0), x)
    return x.astype(np.float64)


def nearest(x: NDArray[Any], dt: DType) -> NDArray[Any]:
    """Numbers on the host as another dtype, floats rounded once to nearest even; what a floating
    dtype cannot hold is infinite."""
    with np.errstate(over="ignore"):
        return (odd_f32(np, x) if dt.is_bits else x).astype(dt.numpy)
