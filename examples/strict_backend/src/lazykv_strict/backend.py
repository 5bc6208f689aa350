"""The backend: locations, memory, copies, and where kernels are looked up."""

import weakref
from typing import Any, ClassVar

import array_api_strict as strict

from lazykv.device import Backend, Capabilities, DeviceLocation, HostArray, Kernel
from lazykv.dtypes import DType
from lazykv.layout import Layout
from lazykv.spec import Spec
from lazykv_strict.kernels import kernel_for
from lazykv_strict.memory import DEVICES, DTYPES, Block, StrictArray


class StrictBackend(Backend):
    """Serves ``strict:0`` and ``strict:1``, devices 1 and 2 of array-api-strict."""

    name: ClassVar[str] = "strict"
    api_version: ClassVar[int] = 1
    capabilities = Capabilities(dtypes=DTYPES)
    survives_fork: ClassVar[bool] = True
    xp = strict

    def __init__(self) -> None:
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()

    def locations(self) -> tuple[DeviceLocation, ...]:
        return tuple(DEVICES)

    def facts(self, location: DeviceLocation) -> dict[str, str]:
        return {"array_api_strict": strict.__version__}

    def allocate(self, nbytes: int, location: DeviceLocation) -> StrictArray:
        block = Block(nbytes, location)
        self._blocks.add(block)
        return StrictArray(block.bytes, block)

    def used_bytes(self, location: DeviceLocation) -> int:
        """Bytes allocated and not yet free: what tests of leaks ask."""
        return sum(b.bytes.nbytes for b in self._blocks if b.location == location)

    def view(self, buffer: StrictArray, dtype: DType, layout: Layout) -> StrictArray:
        return buffer.view(dtype, layout)

    def copy_in(self, dest: StrictArray, source: HostArray) -> None:
        dest.write(source)

    def copy_out(self, source: StrictArray) -> HostArray:
        return source.read()

    def kernel(self, op: Any, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
        return kernel_for(op, ins, out)
