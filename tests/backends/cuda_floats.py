"""Floats of lazykv's dtypes for the kernels' tests: raw bits in, float64 out, rounding bounds."""

from typing import Any

import numpy as np

import lazykv as lk
from lazykv.dtypes import to_logical, to_raw

Array = np.ndarray[Any, Any]

F32_ERROR = 1e-6
"""Relative to the sum of the magnitudes that were added: some tens of f32 roundings."""

# Half a unit in the last place, once the result is rounded to 16 bits.
_HALF_UNIT = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}
# What f16 cannot hold exactly below 2**-14.
_LEAST = {"f32": 0.0, "f16": 2.0**-25, "bf16": 0.0}


def bits_of(values: Any, dtype: str) -> Array:
    """Values rounded to a dtype, as a buffer holds them."""
    return to_raw(np.asarray(values, np.float64).astype(lk.dtype(dtype).numpy))


def wide(raw: Array, dtype: str) -> Array:
    """Raw bits as float64."""
    return to_logical(raw, lk.dtype(dtype)).astype(np.float64)


def zeros(shape: tuple[int, ...], dtype: str) -> Array:
    return np.zeros(shape, lk.dtype(dtype).raw)


def junk(shape: tuple[int, ...], dtype: str) -> Array:
    """Raw bits that a result must replace."""
    return bits_of(np.full(shape, 77.0), dtype)


def check_close(raw: Array, wanted: Array, magnitude: Any, dtype: str) -> None:
    """The result is `wanted` within f32 arithmetic on numbers of `magnitude`, rounded once."""
    got = wide(raw, dtype)
    allowed = F32_ERROR * np.asarray(magnitude) + _HALF_UNIT[dtype] * np.abs(wanted) * 1.001
    error = np.abs(got - wanted) - allowed - _LEAST[dtype]
    assert got.shape == wanted.shape
    # Written so that a NaN fails.
    assert (error <= 0).all(), f"error above what is allowed by {np.nanmax(error, initial=0)}"
