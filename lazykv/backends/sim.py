"""The simulated backend: NumPy underneath, behind handles that the host cannot look into.

It serves ``sim:0`` and ``sim:1`` and keeps a byte limit per device, so that residency, transfers
and running out of memory can be tested without a GPU. A host access to its memory that is not a
copy is an error, as it would be on a device.
"""

import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

from lazykv.backends.cpu import CpuBackend
from lazykv.device import Array, Backend, Call, DeviceLocation, HostArray, Kernel, Step
from lazykv.dtypes import DType
from lazykv.errors import BindingError, OutOfMemory
from lazykv.layout import Layout
from lazykv.spec import Spec

DEVICES = 2


class SimArray:
    """A handle to memory of a simulated device; only its backend can open it."""

    __slots__ = ("__weakref__", "_data", "location")

    def __init__(self, data: HostArray, location: DeviceLocation) -> None:
        self._data = data
        self.location = location

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise BindingError(
            f"{self!r}: got a host access, need a copy; use Storage.to_numpy() or to('cpu')"
        )

    __array__ = __dlpack__ = __dlpack_device__ = __iter__ = __len__ = _refuse
    __getitem__ = __setitem__ = _refuse

    def __repr__(self) -> str:
        return f"SimArray({self._data.dtype}{list(self._data.shape)} on {self.location})"


class SimBackend(Backend):
    """Serves ``sim:0`` and ``sim:1``. `limit_bytes` bounds each device's live allocations."""

    name: ClassVar[str] = "sim"

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._cpu = CpuBackend()
        self._used = dict.fromkeys(self.locations(), 0)

    def locations(self) -> tuple[DeviceLocation, ...]:
        return tuple(DeviceLocation(f"sim:{n}") for n in range(DEVICES))

    def used_bytes(self, location: DeviceLocation) -> int:
        """Bytes allocated on a device and not yet freed."""
        return self._used[location]

    def allocate(self, nbytes: int, location: DeviceLocation) -> Array:
        free = None if self.limit_bytes is None else self.limit_bytes - self._used[location]
        if free is not None and nbytes > free:
            raise OutOfMemory(
                f"allocate on {location}: got no memory for {nbytes} bytes, need at most {free}"
            )
        data = self._cpu.allocate(nbytes, location)
        self._used[location] += nbytes
        # Views keep the memory itself alive, so the bytes are free when that goes.
        weakref.finalize(_owner(data), self._free, nbytes, location)
        return SimArray(data, location)

    def _free(self, nbytes: int, location: DeviceLocation) -> None:
        self._used[location] -= nbytes

    def view(self, buffer: Array, dtype: DType, layout: Layout) -> Array:
        return SimArray(self._cpu.view(buffer._data, dtype, layout), buffer.location)

    def copy_in(self, dest: Array, source: HostArray) -> None:
        dest._data[...] = source

    def copy_out(self, source: Array) -> HostArray:
        return self._cpu.copy_out(source._data)

    def kernel(self, op: Any, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
        inner = self._cpu.kernel(op, ins, out)
        if inner is None:
            return None

        def emit(call: Call) -> Iterable[Step]:
            return inner.emit(_opened(call))

        return Kernel(emit, inner.scratch)


def _owner(data: HostArray) -> Any:
    """The object that holds an array's memory."""
    while isinstance(data.base, type(data)):
        data = data.base
    return data


def _opened(call: Call) -> Call:
    """The call with the arrays inside the handles; all of them must be of one device."""
    handles = (*call.ins, call.out, *call.scratch)
    assert len({a.location for a in handles}) == 1, "placement puts operands on one device"
    ins = tuple(a._data for a in call.ins)
    scratch = tuple(a._data for a in call.scratch)
    return Call(call.op, ins, call.out._data, call.in_specs, call.out_spec, scratch, call.scalars)
