"""Backends that share memory badly with other libraries."""

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from broken_backends import Cpu, caught

from lazykv.backends.cpu import CpuBackend
from lazykv.device import Capabilities

# Memory of the host


@caught("interop/test_exchange.py", "test_a_plan_writes_wrapped_memory_in_place", "wrapped", "cpu")
class WorksOnACopyOfForeignMemory(CpuBackend):
    """Knows what it has allocated, and takes a copy of everything else."""

    def __init__(self):
        super().__init__()
        self.own = []

    def allocate(self, nbytes, location):
        made = super().allocate(nbytes, location)
        self.own.append(root(made))
        return made

    def view(self, buffer, dtype, layout):
        if not any(root(buffer) is memory for memory in self.own):
            buffer = buffer.copy()
        return super().view(buffer, dtype, layout)


def root(array: Any) -> Any:
    """Whoever holds an array's memory."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return array


class Bare(np.ndarray):
    """An array whose buffer was filled from it once, when it was new."""

    def __buffer__(self, flags):
        return memoryview(bytes(self.nbytes))


class BuffersAreStale(Cpu):
    def view(self, buffer, dtype, layout):
        return super().view(np.asarray(buffer), dtype, layout).view(Bare)


if sys.version_info >= (3, 12):
    caught("interop/test_exchange.py", "test_a_storage_is_a_buffer[f32]", "is_a_buffer")(
        BuffersAreStale
    )


# Memory of a device


class Lender(Cpu):
    """Memory that is not the host's and is lent by DLPack, to a library of its own."""

    capabilities = Capabilities()
    xp: ClassVar[Any] = SimpleNamespace(from_dlpack=np.from_dlpack)


class HealthyLender(Lender):
    """Nothing is wrong with it."""


HEADER = 64


class Headed(np.ndarray):
    """An array that is lent from the header of its allocation on."""

    def __dlpack__(self, **options):
        interface = {**self.__array_interface__, "data": (self.ctypes.data - HEADER, False)}
        return np.asarray(SimpleNamespace(__array_interface__=interface)).__dlpack__(**options)


@caught(
    "interop/test_exchange.py", "test_device_memory_is_exported_to_its_own_library[f32]",
    "device_memory",
)  # fmt: skip
class LendsItsHeaders(Lender):
    def allocate(self, nbytes, location):
        return super().allocate(nbytes + HEADER, location)[HEADER:]

    def view(self, buffer, dtype, layout):
        return super().view(np.asarray(buffer), dtype, layout).view(Headed)
