"""Arrays in device memory. What NumPy computes here, CuPy computes by kernels on a stream.

In-place work is queued, by address. Anything else waits for the current stream first, since its
result is a new array; a GPU would queue that too, which nobody could tell apart.
"""

import math
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from fake_cupy.machine import machine
from fake_cupy.memory import MemoryPointer, current_allocator
from fake_cupy.streams import Device, current_stream

_VIEWS = {"broadcast_to", "expand_dims", "matrix_transpose", "moveaxis", "permute_dims", "reshape",
          "squeeze", "transpose"}  # fmt: skip
_BASIC = (int, slice, type(None), EllipsisType)


class Flags:
    def __init__(self, c_contiguous: bool) -> None:
        self.c_contiguous = c_contiguous


class ndarray(NDArrayOperatorsMixin):
    """A view of device memory, which it keeps."""

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None,
        strides: Any = None, order: str = "C",
    ) -> None:  # fmt: skip
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.itemsize = self.dtype.itemsize
        self.nbytes = self.size * self.itemsize
        if strides is None:
            strides = [self.itemsize * math.prod(self.shape[n + 1 :]) for n in range(self.ndim)]
        self.strides = tuple(strides)
        self.data = current_allocator()(self.nbytes) if memptr is None else memptr

    # What it is

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "strides": self.strides, "typestr": self.dtype.str,
                "data": (self.data.ptr, False), "version": 3}  # fmt: skip

    @property
    def device(self) -> Device:
        return Device(self.data.device_id)

    @property
    def flags(self) -> Flags:
        axes = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        steps = [self.itemsize * math.prod(n for n, _ in axes[i + 1 :]) for i in range(len(axes))]
        return Flags(not self.size or [s for _, s in axes] == steps)

    def _host(self) -> Any:
        """The memory as a NumPy array; it may be looked at when the stream has been waited for."""
        ends = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        if not self.size:
            return np.empty(self.shape, self.dtype)
        low, high = sum(min(0, e) for e in ends), sum(max(0, e) for e in ends) + self.itemsize
        line = machine.heap_of(self.data.ptr + low, high - low).at(self.data.ptr + low, high - low)
        return np.ndarray(self.shape, self.dtype, line, -low, self.strides)

    def _view(self, host: Any) -> "ndarray":
        """Another view of this memory, given as one of `_host`."""
        offset = host.ctypes.data - self._host().ctypes.data if host.size and self.size else 0
        return ndarray(host.shape, host.dtype, self.data + offset, host.strides)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator["ndarray"]:
        return (self[n] for n in range(len(self)))

    def __repr__(self) -> str:
        return f"fake({self.dtype}{list(self.shape)})"

    # To the host

    def get(self) -> Any:
        _wait("Device-to-host transfers")
        return self._host().copy()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    # Views

    def view(self, dtype: Any = None) -> "ndarray":
        return self._view(self._host().view(dtype or self.dtype))

    def reshape(self, *shape: Any) -> "ndarray":
        return function("reshape")(self, shape[0] if isinstance(shape[0], tuple) else shape)

    def transpose(self, *axes: Any) -> "ndarray":
        return function("transpose")(self, axes or None)

    @property
    def T(self) -> "ndarray":
        return self.transpose()

    def __getitem__(self, index: Any) -> "ndarray":
        parts = index if isinstance(index, tuple) else (index,)
        if all(isinstance(p, _BASIC) for p in parts):
            whole = parts if Ellipsis in parts else (*parts, Ellipsis)
            return self._view(self._host()[whole])
        return _eager(lambda a, *at: a[at], self, *parts)

    # In place

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self[index]
        _check_operands(target, value)
        machine.check()
        to = target._host()  # fixed addresses from here on, and nothing kept alive
        source = value._host() if isinstance(value, ndarray) else value
        current_stream().push(lambda: to.__setitem__(..., source))

    # Arithmetic

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        assert method == "__call__"
        assert not kwargs
        return _eager(ufunc, *args)

    def astype(self, dtype: Any, copy: bool = True) -> "ndarray":
        same = not copy and self.dtype == np.dtype(dtype)
        return self if same else _eager(lambda a: a.astype(dtype), self)

    def copy(self) -> "ndarray":
        return _eager(np.array, self)

    def min(self) -> "ndarray":
        return _eager(lambda a: np.asarray(a.min()), self)

    def max(self) -> "ndarray":
        return _eager(lambda a: np.asarray(a.max()), self)

    # DLPack

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id

    __dlpack__: Any


def _wait(what: str) -> None:
    machine.check()
    stream = current_stream()
    if stream.is_capturing():
        raise RuntimeError(f"{what} in a capture are disallowed")
    stream.drain()


def _check_operands(*operands: Any) -> None:
    for a in operands:
        if isinstance(a, np.ndarray) and a.ndim:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if isinstance(a, ndarray) and a.size:
            assert a.data.device_id == machine.device(), "an array of another device"


def _placed(result: Any) -> ndarray:
    """A result in new memory."""
    made = ndarray(result.shape, result.dtype)
    made._host()[...] = result
    return made


def _eager(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute now, after what was given to the current stream before."""
    _check_operands(*args)
    _wait(f"computing {f}")
    flat = [[b._host() for b in a] if isinstance(a, list | tuple) and a
            and isinstance(a[0], ndarray) else a._host() if isinstance(a, ndarray) else a
            for a in args]  # fmt: skip
    with np.errstate(all="ignore"):
        return _placed(np.asarray(f(*flat, **kwargs)))


def _matmul(a: ndarray, b: ndarray, out: ndarray | None = None) -> ndarray:
    """By cuBLAS: queued if it has a place for the result, with f32 sums for 16-bit floats."""
    stream = current_stream()
    machine.check()
    if stream.is_capturing():
        raise NotImplementedError("calling cuBLAS API during stream capture is unsupported")
    machine.cublas_calls += 1
    made = ndarray((*a.shape[:-1], b.shape[-1]), a.dtype) if out is None else out
    _check_operands(a, b, made)
    assert made.shape == (*a.shape[:-1], b.shape[-1])
    assert made.dtype == a.dtype == b.dtype
    x, y, to = a._host(), b._host(), made._host()

    def work() -> None:
        wide = [m.astype(np.float32) if m.dtype.itemsize == 2 else m for m in (x, y)]
        to[...] = np.matmul(*wide)

    stream.push(work)
    return made


def _asarray(value: Any, dtype: Any = None, *, copy: bool | None = None) -> ndarray:
    if isinstance(value, ndarray):
        return value.astype(value.dtype if dtype is None else dtype, copy=bool(copy))
    _wait("Host-to-device transfers")
    return _placed(np.asarray(value, dtype))


def _ascontiguousarray(a: ndarray) -> ndarray:
    return a if a.flags.c_contiguous else a.copy()


_SPECIAL: dict[str, Callable[..., Any]] = {
    "asarray": _asarray,
    "ascontiguousarray": _ascontiguousarray,
    "asnumpy": lambda a: a.get(),
    "empty": lambda shape, dtype=float: ndarray(shape, dtype),
    "empty_like": lambda a: ndarray(a.shape, a.dtype),
    "matmul": _matmul,
}


def function(name: str) -> Callable[..., Any]:
    """CuPy's function of a name, on these arrays."""
    if name in _SPECIAL:
        return _SPECIAL[name]
    numpys = getattr(np, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if name in _VIEWS:
            host = numpys(args[0]._host(), *args[1:], **kwargs)
            if not host.size or np.may_share_memory(host, args[0]._host()):
                return args[0]._view(host)
        return _eager(numpys, *args, **kwargs)

    return call
