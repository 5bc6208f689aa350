"""The machine behind the stand-in: devices with memory, and what is current in a thread."""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNIT = 512
POISON = 0xFF


class CUDARuntimeError(RuntimeError):
    """A call or queued work failed."""


class CUDADriverError(RuntimeError):
    """A launch failed."""


class Heap:
    """The memory of one device: host bytes that are never given back to the host."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.zeros(nbytes + UNIT, np.uint8)
        self.base = -(-self._bytes.ctypes.data // UNIT) * UNIT
        self._free = [(self.base, nbytes)]
        self.taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The address of a new block, which holds a pattern; None if there is no room."""
        for i, (start, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, size - nbytes)] if size > nbytes else []
                self.taken[start] = nbytes
                self.at(start, nbytes)[:] = POISON
                return start
        return None

    def give_back(self, start: int) -> None:
        self._free.append((start, self.taken.pop(start)))
        merged: list[tuple[int, int]] = []
        for at, size in sorted(self._free):
            if merged and sum(merged[-1]) == at:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((at, size))
        self._free = merged

    def at(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        first = address - self._bytes.ctypes.data
        return self._bytes[first : first + nbytes]

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether the bytes lie in one block."""
        return any(s <= address and address + nbytes <= s + n for s, n in self.taken.items())


class Machine:
    """All state, so that a test can have a fresh one. `running` is held while queued work runs."""

    def __init__(self) -> None:
        self.reset(0, 0)

    def reset(self, devices: int, heap_bytes: int) -> None:
        self.heaps = [Heap(heap_bytes) for _ in range(devices)]
        self.running = threading.RLock()
        self.thread: Any = threading.local()
        self.streams: dict[int, Any] = {}
        self.pinned: list[tuple[int, int]] = []
        self.default_pool: Any = None
        self.cupy: Any = None  # CuPy itself, where its own arrays are used
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.faults: dict[int, str] = {}
        self.launches = 0
        self.graph_launches = 0
        self.cublas_calls = 0
        self.mallocs = 0

    def device(self) -> int:
        """The current device of this thread."""
        return int(getattr(self.thread, "device", 0))

    def check(self) -> None:
        """What every call of CUDA does first: behind a fault in a kernel, no call on its device
        works any more."""
        if self.device() in self.faults:
            raise CUDARuntimeError(self.faults[self.device()])

    def fault(self, device: int, error: CUDARuntimeError) -> None:
        """Work of a device has failed; who waited for that work has not failed himself."""
        if not self.faults:
            self.faults[device] = str(error)

    def heap_of(self, address: int, nbytes: int) -> Heap:
        """The heap whose live memory holds these bytes."""
        for heap in self.heaps:
            if heap.holds(address, nbytes):
                return heap
        raise AssertionError(f"{nbytes} bytes at {address:#x} are no live memory of a device")

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return any(s <= address and address + nbytes <= s + n for s, n in self.pinned)


machine = Machine()
