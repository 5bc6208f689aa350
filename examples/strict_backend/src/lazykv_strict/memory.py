"""Memory of the strict devices: bytes behind handles, and the device arrays made from them.

An array of array-api-strict cannot be the memory itself: it has no strided views of one buffer, and
no way to read bytes as another dtype. So the memory is bytes, a handle knows where in them its
elements lie, and a kernel loads its operands into device arrays and stores its result.
"""

from typing import Any

import array_api_strict as strict
import numpy as np

from lazykv.device import DeviceLocation, HostArray
from lazykv.dtypes import DType
from lazykv.errors import DTypeError, KernelError, OutOfMemory
from lazykv.layout import Layout

DEVICES = {DeviceLocation(f"strict:{n}"): strict.Device(f"device{n + 1}") for n in range(2)}
HOST = strict.Device("CPU_DEVICE")
DTYPES = frozenset({"f64", "f32", "i8", "u8", "i32", "u32", "i64", "bool"})
ALIGNMENT = 64


class Block:
    """One allocation of a device; its bytes are free when no handle refers to it."""

    def __init__(self, nbytes: int, location: DeviceLocation) -> None:
        try:
            room = np.empty(nbytes + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError) as e:
            raise OutOfMemory(f"allocate on {location}: got no memory for {nbytes} bytes") from e
        skip = -room.ctypes.data % ALIGNMENT
        self.bytes = room[skip : skip + nbytes]
        self.location = location


class StrictArray:
    """Some elements of a block. The host cannot look into it: the backend copies."""

    __slots__ = ("__weakref__", "_elements", "block")

    def __init__(self, elements: HostArray, block: Block) -> None:
        self._elements = elements
        self.block = block  # a view keeps its memory

    @property
    def shape(self) -> tuple[int, ...]:
        return self._elements.shape

    @property
    def location(self) -> DeviceLocation:
        return self.block.location

    def __repr__(self) -> str:
        return f"StrictArray({self._elements.dtype}{list(self.shape)} on {self.location})"

    def view(self, dtype: DType, layout: Layout) -> "StrictArray":
        """The elements that a layout names, counted from the first of a contiguous array."""
        if dtype.name not in DTYPES:
            known = ", ".join(sorted(DTYPES))
            raise DTypeError(f"view on {self.location}: got {dtype}, need one of {known}")
        assert isinstance(layout.offset, int), "a view is made when its offset is known"
        line = self._elements.reshape(-1).view(dtype.raw)[layout.offset :]
        strides = [s * dtype.itemsize for s in layout.strides]
        found = np.lib.stride_tricks.as_strided(line, layout.shape, strides)
        return StrictArray(found, self.block)

    def part(self, index: tuple[slice, ...]) -> "StrictArray":
        """The elements in a range of every axis."""
        where: Any = (*index, ...)  # with the Ellipsis, rank 0 stays an array
        return StrictArray(self._elements[where], self.block)

    def write(self, source: HostArray) -> None:
        """Elements from the host."""
        self._elements[...] = source

    def read(self) -> HostArray:
        """Elements for the host: a fresh copy, in row-major order."""
        return np.array(self._elements, order="C")

    def load(self) -> Any:
        """A device array with a copy of the elements."""
        return strict.asarray(self._elements, device=DEVICES[self.location], copy=True)

    def store(self, array: Any) -> None:
        """Elements from an array of the same device and shape, rounded to the dtype they have."""
        device = DEVICES[self.location]
        if array.device != device or array.shape != self.shape:
            raise KernelError(
                f"store: got {array.shape} on {array.device}, need {self.shape} on {device}"
            )
        rounded = strict.astype(array, getattr(strict, self._elements.dtype.name), copy=False)
        self._elements[...] = np.from_dlpack(rounded.to_device(HOST))
