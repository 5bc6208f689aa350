"""DLPack capsules of device memory, as CuPy makes and takes them.

NumPy makes the capsule, of the host's bytes behind an array; what it says of the device is changed.
"""

import ctypes
import math
from typing import Any

import ml_dtypes
import numpy as np

from fake_cupy.arrays import ndarray
from fake_cupy.memory import MemoryPointer, UnownedMemory
from fake_cupy.streams import Device, Event, current_stream, stream_at

CUDA = 2
_DTYPES = {
    (0, 8): np.int8, (0, 32): np.int32, (0, 64): np.int64, (1, 8): np.uint8, (1, 16): np.uint16,
    (1, 32): np.uint32, (2, 16): np.float16, (2, 32): np.float32, (2, 64): np.float64,
    (4, 16): ml_dtypes.bfloat16, (6, 8): np.bool_,
}  # fmt: skip


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


_BEFORE_TENSOR = {b"dltensor": 0, b"dltensor_versioned": 32}
_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def tensor_of(capsule: Any) -> Tensor:
    name = _name(capsule)
    return Tensor.from_address(_pointer(capsule, name) + _BEFORE_TENSOR[name])


class _Bytes:
    """Host memory that keeps an array."""

    def __init__(self, host: Any, owner: ndarray) -> None:
        self.__array_interface__, self.owner = host.__array_interface__, owner


def export(
    array: ndarray, *, stream: int | None = None, max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None, copy: bool | None = None,
) -> Any:  # fmt: skip
    """A capsule; the consumer's stream waits for the current one, unless it is -1."""
    assert dl_device in (None, (CUDA, array.data.device_id))
    assert not copy
    consumer = stream_at(0 if stream in (None, 1) else int(stream)) if stream != -1 else None
    if consumer is not None and consumer is not current_stream():
        event = Event()
        event.record()
        consumer.wait_event(event)
    is_bf16 = array.dtype == ml_dtypes.bfloat16
    host = array._host().view(np.uint16) if is_bf16 else array._host()
    capsule = np.asarray(_Bytes(host, array)).__dlpack__(max_version=max_version)
    tensor = tensor_of(capsule)
    tensor.device_type, tensor.device_id = CUDA, array.data.device_id
    tensor.code = 4 if is_bf16 else tensor.code
    return capsule


def from_dlpack(exporter: Any) -> ndarray:
    """An array in the exporter's memory; that it may be read only is not looked at."""
    kind, index = exporter.__dlpack_device__()
    assert kind == CUDA, "memory of a CUDA device"
    with Device(index):
        capsule = exporter.__dlpack__(stream=current_stream().ptr or 1, max_version=(1, 0))
    tensor = tensor_of(capsule)
    assert (tensor.device_type, tensor.device_id, tensor.lanes) == (CUDA, index, 1)
    dtype = np.dtype(_DTYPES[tensor.code, tensor.bits])
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = None
    if tensor.strides:
        strides = tuple(s * dtype.itemsize for s in tensor.strides[: tensor.ndim])
    memory = UnownedMemory(
        (tensor.data or 0) + tensor.byte_offset, math.prod(shape) * dtype.itemsize, capsule, index
    )
    return ndarray(shape, dtype, MemoryPointer(memory, 0), strides)


ndarray.__dlpack__ = export
