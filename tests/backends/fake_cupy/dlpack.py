"""DLPack capsules of device memory, as a library that reads them would see them."""

import ctypes
from typing import Any

from fake_cupy.arrays import ndarray
from fake_cupy.streams import Event, current_stream, stream_at

_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_KEPT: dict[int, Any] = {}


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


def export(array: ndarray, stream: int | None) -> Any:
    """A capsule; the consumer's stream waits for the current one, unless it is -1."""
    consumer = stream_at(0 if stream in (None, 1) else int(stream)) if stream != -1 else None
    if consumer is not None and consumer is not current_stream():
        event = Event()
        event.record()
        consumer.wait_event(event)
    shape, strides = ((ctypes.c_int64 * array.ndim)(*line) for line in (
        array.shape, (s // array.itemsize for s in array.strides)))  # fmt: skip
    code = 4 if array.dtype.name == "bfloat16" else _CODES[array.dtype.kind]
    made = Tensor(
        array.data.ptr, 2, array.data.device_id, array.ndim, code, array.itemsize * 8, 1, shape,
        strides, 0, None, None,
    )  # fmt: skip
    _KEPT[ctypes.addressof(made)] = made, array
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return new(ctypes.addressof(made), b"dltensor", None)


def from_dlpack(exporter: Any) -> ndarray:
    assert exporter.__dlpack_device__()[0] == 2, "memory of a CUDA device"
    capsule = exporter.__dlpack__(stream=current_stream().ptr or 1)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    made, array = _KEPT.pop(get(capsule, b"dltensor"))
    assert made.data == (array.data.ptr or None)
    return ndarray(array.shape, array.dtype, array.data, array.strides)


def _dlpack(array: ndarray, *, stream: int | None = None, **options: Any) -> Any:
    return export(array, stream)


ndarray.__dlpack__ = _dlpack
