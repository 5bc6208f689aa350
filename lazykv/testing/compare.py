"""Comparing results with references: how close is close enough, and what a failure says.

Arithmetic runs in f32 (f64 for f64) and a result is rounded once. So an element may be off by half
a unit in its last place (`ROUNDING`, relative to the element), and by what arithmetic in another
order costs (`ARITHMETIC`, relative to the largest element of the reference, or to 1 if that is
larger). NaN and infinities must be where the reference has them.
"""

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lazykv.dtypes import DType
from lazykv.dtypes import dtype as find_dtype

ROUNDING = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
ARITHMETIC = {"f64": 1e-12, "f32": 1e-5, "f16": 1e-5, "bf16": 1e-5}

Array = NDArray[Any]


def tolerance(want: Array, dt: DType) -> Array:
    """How far each element of a result of a floating dtype may be from the reference."""
    finite = np.where(np.isfinite(want), np.abs(want), 0.0)
    scale = max(1.0, float(finite.max(initial=0.0)))
    smallest = 2.0**-24 if dt.name == "f16" else 0.0  # of f16: a subnormal is off by up to half
    limit: Array = ROUNDING[dt.name] * finite + ARITHMETIC[dt.name] * scale + smallest
    return limit


def check_close(what: str, got: Array, want: Array) -> None:
    """Compare a result with a float64 reference (or an exact one, for integers and bool).

    `want` is as the reference has it; it is not rounded to the result's dtype.
    """
    check_shape(what, got, want.shape)
    dt = find_dtype(got.dtype)
    if not dt.is_float:
        check_equal(what, got, want)
        return
    wide = got.astype(np.float64)
    limit = tolerance(want, dt)
    with np.errstate(invalid="ignore", over="ignore"):
        fits = np.abs(wide - want) <= limit
        # What rounds to infinity in the result's dtype is one.
        rounded = want.astype(got.dtype).astype(np.float64)
    fits |= (wide == rounded) | (np.isnan(wide) & np.isnan(want))
    if not fits.all():
        at = _first(~fits)
        off = f"{dt.name}: {wide[at]!r}, need {want[at]!r} within {limit[at]:.2g}"
        _fail(what, ~fits, f"got {off}")


def check_equal(what: str, got: Array, want: Array) -> None:
    """Compare values exactly; NaN equals nothing."""
    check_shape(what, got, want.shape)
    wrong = np.asarray(got != want)
    if wrong.any():
        at = _first(wrong)
        _fail(what, wrong, f"got {got[at]!r}, need {want[at]!r}")


def check_bits(what: str, got: Array, want: Array) -> None:
    """Compare dtype, shape and every bit."""
    assert got.dtype == want.dtype, f"{what}: got dtype {got.dtype}, need {want.dtype}"
    check_shape(what, got, want.shape)
    a, b = bits(got), bits(want)
    wrong = a != b
    if wrong.any():
        at = _first(wrong)
        width = 2 * a.dtype.itemsize
        _fail(what, wrong, f"got bits {a[at]:0{width}x}, need {b[at]:0{width}x}")


def bits(array: Array) -> Array:
    """The same elements as unsigned integers of their size."""
    return np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")


def check_shape(what: str, got: object, shape: tuple[int, ...]) -> None:
    assert isinstance(got, np.ndarray), f"{what}: got {type(got).__name__}, need a NumPy array"
    assert got.shape == shape, f"{what}: got shape {list(got.shape)}, need {list(shape)}"


def _first(wrong: Array) -> tuple[int, ...]:
    return tuple(int(n) for n in np.argwhere(wrong)[0])


def _fail(what: str, wrong: Array, first: str) -> NoReturn:
    places = ", ".join(str([int(n) for n in at]) for at in np.argwhere(wrong)[:4])
    more = ", ..." if wrong.sum() > 4 else ""
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.size} elements are wrong, at {places}{more}; "
        f"the first: {first}"
    )
