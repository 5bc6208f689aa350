"""DLPack capsules: memory that one library lends to another, and what a capsule says of it.

The structures are those of ``dlpack.h``, version 1.1. A capsule is read where it is and never
consumed: whoever keeps it keeps the memory, and its own destructor gives the memory back.
"""

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lazykv.dtypes import ALL, DType, to_logical
from lazykv.errors import BindingError, DTypeError, LazyKvError

HOST, CUDA, PINNED, EXTENSION = 1, 2, 3, 12
"""Device types: host memory, CUDA memory, host memory that CUDA pinned, and one for devices that
DLPack has no number for."""

_VERSION = (1, 1)
_MOST_AXES = 64  # NumPy's most
_READ_ONLY, _COPIED = 1, 2  # bits of the flags


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


# Prototypes of our own: those of `ctypes.pythonapi` are shared with every user of it.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_KINDS = {"i": 0, "u": 1, "f": 2}
_CODES = {"bf16": 4, "bool": 6, "f8_e4m3": 10, "f8_e5m2": 12}


def _code(dt: DType) -> tuple[int, int]:
    """Type code and bits of an element."""
    return _CODES[dt.name] if dt.name in _CODES else _KINDS[dt.raw.kind], 8 * dt.itemsize


_BY_CODE = {_code(dt): dt for dt in ALL}


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """Memory of another library. It stays where it is, and valid, while this object lives.

    `address` is that of the first element, `strides` are in elements (None: contiguous), and
    `device` is the pair of DLPack's device type and the device's number.
    """

    capsule: object = field(repr=False)
    device: tuple[int, int]
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    read_only: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def borrow(exporter: Any, stream: int | None, *, may_copy: bool = False) -> Lent:
    """Ask an exporter for its memory; `stream` is DLPack's number of the stream that will use it.

    Raises `BindingError` if the exporter refuses, speaks a later DLPack, says what cannot be, or
    copies (unless it may); `DTypeError`.
    """
    who = type(exporter).__name__
    try:
        capsule = _ask(exporter, {} if stream is None else {"stream": stream})
    except LazyKvError:
        raise
    except Exception as e:  # every library has errors of its own here
        raise BindingError(
            f"DLPack: got {type(e).__name__}: {e} from {who}, need memory that it can lend"
        ) from e
    header, tensor = contents(capsule)
    flags = 0 if header is None else header.flags
    if flags & _COPIED and not may_copy:
        raise BindingError(f"DLPack: got a copy from {who}, need the memory itself")
    dt, ndim = _dtype(tensor), tensor.ndim
    shape = tuple(tensor.shape[:ndim]) if 0 < ndim <= _MOST_AXES else ()
    strides = tuple(tensor.strides[:ndim]) if shape and tensor.strides else None
    nbytes = math.prod(shape) * dt.itemsize
    if (
        not 0 <= ndim <= _MOST_AXES
        or any(not 0 <= n < 1 << 63 for n in (*shape, nbytes))
        or (nbytes and not tensor.data)
    ):
        raise BindingError(
            f"DLPack: got shape {shape} of {ndim} axes at address {tensor.data} from {who}, need "
            "memory that there can be"
        )
    return Lent(
        capsule, (tensor.device_type, tensor.device_id), (tensor.data or 0) + tensor.byte_offset,
        shape, strides, dt, bool(flags & _READ_ONLY),
    )  # fmt: skip


def _ask(exporter: Any, options: dict[str, Any]) -> object:
    try:
        return exporter.__dlpack__(max_version=_VERSION, **options)
    except TypeError:  # an exporter from before DLPack 1.0
        return exporter.__dlpack__(**options)


def contents(capsule: object) -> tuple[_Versioned | None, _Tensor]:
    """What a capsule holds; the first part is None before DLPack 1.0."""
    if _is_valid(capsule, b"dltensor_versioned"):
        header = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if header.major != _VERSION[0]:
            raise BindingError(
                f"DLPack: got version {header.major}.{header.minor}, need {_VERSION[0]}.x or older"
            )
        return header, header.tensor
    if _is_valid(capsule, b"dltensor"):
        return None, _Tensor.from_address(_pointer(capsule, b"dltensor"))
    raise BindingError(f"DLPack: got {capsule!r}, need a capsule that nobody has used")


def _dtype(tensor: _Tensor) -> DType:
    found = _BY_CODE.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if found is None:
        raise DTypeError(
            f"DLPack: got elements of type code {tensor.code}, {tensor.bits} bits and "
            f"{tensor.lanes} lanes, need one of {', '.join(dt.name for dt in ALL)}"
        )
    return found


def label(
    capsule: object, *, dtype: DType | None = None, device: tuple[int, int] | None = None,
    read_only: bool = False,
) -> object:  # fmt: skip
    """A fresh capsule, told the logical dtype of its raw elements, the device they are on, and
    that nobody may write them.

    Raises `BindingError` if the consumer speaks no DLPack 1.0, which alone can say read-only.
    """
    header, tensor = contents(capsule)
    if dtype is not None:
        tensor.code, tensor.bits = _code(dtype)
    if device is not None:
        tensor.device_type, tensor.device_id = device
    if read_only:
        if header is None:
            raise BindingError(
                "DLPack: got read-only memory for a consumer without DLPack 1.0, need "
                "max_version=(1, 0) or later; export a copy to others"
            )
        if not header.flags & _COPIED:
            header.flags |= _READ_ONLY
    return capsule


class _HostMemory:
    """What NumPy asks where host memory is; the array that it makes keeps this object."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def host_view(interface: dict[str, Any], owner: object) -> np.ndarray[Any, Any]:
    """Host memory, given as NumPy's array interface, as an array that keeps `owner`."""
    return np.asarray(_HostMemory(interface, owner))


def host_elements(lent: Lent) -> np.ndarray[Any, Any]:
    """Host memory in its logical dtype, bf16 and f8 too, which NumPy takes from nobody."""
    strides = lent.strides and tuple(n * lent.dtype.itemsize for n in lent.strides)
    raw = {
        "shape": lent.shape, "strides": strides, "typestr": lent.dtype.raw.str,
        "data": (lent.address, lent.read_only), "version": 3,
    }  # fmt: skip
    return to_logical(host_view(raw, lent), lent.dtype)
