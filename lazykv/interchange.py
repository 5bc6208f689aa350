"""Memory of other libraries: host arrays taken as they come, and memory lent where it is."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lazykv import dlpack
from lazykv.device import CPU, Array, Device, DeviceLike, HostArray, device
from lazykv.dtypes import dtype, to_raw
from lazykv.errors import BindingError, LazyKvError, ShapeError
from lazykv.layout import Layout
from lazykv.spec import Spec


def host_array(value: object, *, in_place: bool = False) -> HostArray:
    """A caller's array-like, DLPack or buffer object as a NumPy array (no copy where possible).

    `in_place`: BindingError for what NumPy can only copy, such as a list or a number.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise BindingError("array: got MaskedArray, need one without a mask; use filled()")
    if isinstance(value, np.ndarray):
        return np.asarray(value)  # of np.matrix too, whose views are never of rank 1
    if hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
        return _from_dlpack(value)
    if isinstance(value, bytes):  # NumPy would make a string of it
        return np.frombuffer(value, np.uint8)
    who = type(value).__name__
    try:
        return np.asarray(value, copy=False if in_place else None)
    except LazyKvError:
        raise
    except ValueError as e:
        if in_place:
            host_array(value)  # what fails in other ways is told as it always is
            raise BindingError(
                f"Storage.wrap: got {who}, need memory to use in place; Storage.from_array copies"
            ) from e
        raise ShapeError(f"array: got {who}: {e}, need a rectangular one") from e
    except Exception as e:  # what is asked for its array may raise anything
        raise BindingError(f"array: got {type(e).__name__}: {e} from {who}, need an array") from e


def read_only(array: HostArray) -> HostArray:
    """The same memory, which no flag of a view makes writable again. The array is contiguous, and
    of a dtype of NumPy's own."""
    return np.asarray(memoryview(array).toreadonly())  # type: ignore[arg-type]


def _from_dlpack(value: Any) -> HostArray:
    _check_bits(value)
    try:
        return np.from_dlpack(value)
    except LazyKvError:
        raise
    except Exception as e:  # of NumPy, for the memory of a device or bf16, or of the exporter
        kind, who = _dlpack_device(value), type(value).__name__
        lent = dlpack.borrow(value, None, may_copy=True) if _on_host(kind) else None
        if lent is not None and _on_host(lent.device):
            return dlpack.host_elements(lent)
        raise BindingError(
            f"array: got {who}: {e}, need memory that the host can read; copy it first, with "
            "to('cpu'), get() or to_numpy()"
        ) from e


def _on_host(kind: tuple[int, int] | None) -> bool:
    return kind is not None and kind[0] in (dlpack.HOST, dlpack.PINNED)


def _check_bits(value: Any) -> None:
    """Refuse a tensor that PyTorch negates as it reads it: it exports the numbers as they are."""
    is_neg = getattr(value, "is_neg", None)
    if callable(is_neg) and is_neg():
        raise BindingError(
            f"array: got {type(value).__name__} with its negative bit set, need the numbers "
            "themselves; use resolve_neg()"
        )


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory of another library as a backend's own contiguous array, in the raw dtype."""

    array: Array
    spec: Spec
    place: Device
    read_only: bool


def share(value: object, where: DeviceLike | None) -> Shared:
    """Take memory where it is, on a device; None: on the host or the CUDA device it says it is on.

    Raises `ShapeError` if it is not contiguous, `DTypeError`, `BackendUnavailable`, and
    `BindingError` if it cannot be lent to that device.
    """
    _check_bits(value)
    kind = _dlpack_device(value)
    place = device(_usual_place(kind) if where is None else where)
    # Of host memory NumPy knows more than DLPack says, and which memory of devices the host reads.
    if place.location == CPU and (isinstance(value, np.ndarray) or kind != _own(place)):
        return _of_host(value, place)
    _check_device(value, kind, place)
    return _of_device(value, place)


def _own(place: Device) -> tuple[int | None, int]:
    """How DLPack names a device, if its backend adopts memory."""
    return place.backend.dlpack_device_type, place.location.index


def _check_device(value: object, kind: tuple[int, int] | None, place: Device) -> None:
    own = _own(place)
    if kind != own:
        who, got = type(value).__name__, "the host" if kind is None else f"DLPack device {kind}"
        need = "a backend that adopts memory" if own[0] is None else f"that of DLPack device {own}"
        raise BindingError(
            f"Storage.wrap: got {who} in memory of {got} for {place}, need {need}; "
            "use Storage.from_array to copy a host array"
        )


def _usual_place(kind: tuple[int, int] | None) -> str:
    """Of other types there may be several backends, so for those a caller names the device."""
    return f"cuda:{kind[1]}" if kind is not None and kind[0] == dlpack.CUDA else "cpu"


def _dlpack_device(value: Any) -> tuple[int, int] | None:
    """DLPack's device type and number; None for what does not speak DLPack."""
    if not hasattr(value, "__dlpack_device__") or isinstance(value, np.generic):
        return None
    try:
        kind, index = map(int, value.__dlpack_device__())
    except LazyKvError:
        raise
    except Exception as e:  # every library has errors of its own here
        raise BindingError(
            f"DLPack: got {type(e).__name__}: {e} from {type(value).__name__}, need the device "
            "that its memory is on"
        ) from e
    return kind, index


def _of_host(value: object, place: Device) -> Shared:
    host = host_array(value, in_place=True)
    spec = Spec(host.shape, dtype(host.dtype))
    if not host.flags.c_contiguous:
        raise _not_contiguous(spec, host.strides)
    if spec.dtype.numpy != host.dtype:
        raise ShapeError(
            f"Storage.wrap: got byte order {host.dtype.str}, need the machine's; use from_array"
        )
    return Shared(to_raw(host), spec, place, not host.flags.writeable)


def _of_device(value: object, place: Device) -> Shared:
    with place.backend.receiving(place.location) as stream:
        lent = dlpack.borrow(value, stream)
    _check_device(value, lent.device, place)
    spec = Spec(lent.shape, lent.dtype)
    if lent.strides is not None and not Layout(0, lent.shape, lent.strides).is_contiguous:
        raise _not_contiguous(spec, lent.strides)
    if lent.address % lent.dtype.itemsize:
        raise ShapeError(
            f"Storage.wrap: got {spec} at address {lent.address:#x}, need a multiple of the "
            "element's size; copy it first"
        )
    buffer = place.backend.adopt(lent, place.location)
    array = place.backend.view(buffer, lent.dtype, Layout.contiguous(lent.shape))
    return Shared(array, spec, place, lent.read_only)


def _not_contiguous(spec: Spec, strides: tuple[int, ...]) -> ShapeError:
    return ShapeError(
        f"Storage.wrap: got strides {strides} for {spec}, need a C-contiguous array; copy it "
        "first, a host array with Storage.from_array"
    )
