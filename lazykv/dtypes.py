"""Element types: a logical type, and the raw bits that buffers hold.

NumPy has no arithmetic worth using for bf16 and f8, and CuPy has no such types at all, so their
buffers hold raw bits (`uint16`, `uint8`). `ml_dtypes` gives the logical view at the edge.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lazykv.errors import DTypeError


@dataclass(frozen=True, eq=False)
class DType:
    """One element type. There is exactly one object per type, so `==` is identity.

    `numpy` is the logical dtype (what users see), `raw` the dtype of the bytes in a buffer.
    """

    name: str
    numpy: np.dtype[Any]
    raw: np.dtype[Any] = field(repr=False)
    is_float: bool = field(default=False, repr=False)
    storage_only: bool = field(default=False, repr=False)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.raw.itemsize

    @property
    def is_bits(self) -> bool:
        """Whether buffers hold the type as raw bits rather than as a NumPy number."""
        return self.raw != self.numpy

    @property
    def compute(self) -> np.dtype[Any]:
        """The dtype arithmetic runs in: f32 for the 16-bit and 8-bit floats."""
        return np.dtype(np.float32) if self.is_float and self.itemsize < 4 else self.numpy

    def __repr__(self) -> str:
        return f"lazykv.{self.name}"

    def __str__(self) -> str:
        return self.name

    def __copy__(self) -> "DType":
        return self

    def __deepcopy__(self, memo: object) -> "DType":
        return self


def _plain(name: str, np_type: Any, *, is_float: bool = False) -> DType:
    dt = (
        np.dtype(np_type).newbyteorder("<") if np.dtype(np_type).itemsize > 1 else np.dtype(np_type)
    )
    return DType(name, dt, dt, is_float)


f64 = _plain("f64", np.float64, is_float=True)
f32 = _plain("f32", np.float32, is_float=True)
f16 = _plain("f16", np.float16, is_float=True)
bf16 = DType("bf16", np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16), is_float=True)
i8 = _plain("i8", np.int8)
u8 = _plain("u8", np.uint8)
i32 = _plain("i32", np.int32)
u32 = _plain("u32", np.uint32)
i64 = _plain("i64", np.int64)
bool_ = _plain("bool", np.bool_)
f8_e4m3 = DType(
    "f8_e4m3", np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8), True, storage_only=True
)
f8_e5m2 = DType(
    "f8_e5m2", np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.uint8), True, storage_only=True
)

ALL: tuple[DType, ...] = (f64, f32, f16, bf16, i8, u8, i32, u32, i64, bool_, f8_e4m3, f8_e5m2)

DTypeLike: TypeAlias = DType | str | npt.DTypeLike

_BY_NAME = {t.name: t for t in ALL}
_BY_NUMPY = {t.numpy: t for t in ALL}


def dtype(spec: DTypeLike) -> DType:
    """Look a dtype up by `DType`, name (``"bf16"``) or NumPy dtype.

    Raises `DTypeError` for anything else, a `uint16` array included: raw bits are handed over
    through the byte interfaces, never as numbers.
    """
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, str) and spec in _BY_NAME:
        return _BY_NAME[spec]
    if spec is not None:
        try:
            given = np.dtype(spec)
        except (TypeError, ValueError, SyntaxError):
            given = np.dtype(np.void)
        # Of NumPy's names only the full ones ("float32"): its codes count bytes, so that "f8" is
        # float64 and its "i8" is not ours.
        if not isinstance(spec, str) or spec == given.name:
            found = _BY_NUMPY.get(given.newbyteorder("="))
            if found is not None:
                return found
    raise DTypeError(f"dtype: got {spec!r}, need one of {', '.join(_BY_NAME)} or its NumPy dtype")


def to_raw(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same elements as the raw bits a buffer holds (a view where possible)."""
    dt = dtype(array.dtype)
    if array.dtype != dt.numpy:  # big-endian input: same values, our byte order
        array = array.astype(dt.numpy)
    return array.view(dt.raw) if dt.is_bits else array


def to_logical(array: npt.NDArray[Any], dt: DType) -> npt.NDArray[Any]:
    """View raw bits as the logical dtype."""
    return array.view(dt.numpy) if dt.is_bits else array
