"""Handles to the memory of simulated devices."""

from typing import NoReturn

from lazykv.device import DeviceLocation, HostArray
from lazykv.dlpack import EXTENSION, host_view, label
from lazykv.errors import BindingError


class Block:
    """One allocation; its bytes are free when no handle refers to it any more."""

    __slots__ = ("__weakref__",)


class SimArray:
    """A handle to memory of a simulated device; only its backend can open it."""

    __slots__ = ("__weakref__", "_data", "block", "location")

    def __init__(self, data: HostArray, location: DeviceLocation, block: Block) -> None:
        self._data = data
        self.location = location
        # Views keep it alive; queued work does not, as on a device.
        self.block = block

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return EXTENSION, self.location.index

    def __dlpack__(
        self, *, stream: int | None = None, max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None, copy: bool | None = None,
    ) -> object:  # fmt: skip
        """For use on the same device, which has one stream: all work there is in order."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            self._refuse()
        # NumPy's capsule of the bytes keeps this handle, and is told where they are.
        lent = host_view(self._data.__array_interface__, self)
        return label(lent.__dlpack__(max_version=max_version), device=self.__dlpack_device__())

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise BindingError(f"{self!r}: got a host access, need a copy; use Storage.to_numpy()")

    __array__ = __iter__ = __len__ = __getitem__ = __setitem__ = _refuse

    def __repr__(self) -> str:
        return f"SimArray({self._data.dtype}{list(self._data.shape)} on {self.location})"
