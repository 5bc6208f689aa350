"""Page-locked host memory, which a device can copy from and to while the host goes on."""

import threading
from typing import Any

import numpy as np

from lazykv.device import HostArray

SLOTS = 8
SLOT_BYTES = 1 << 20


def pinned(cupy: Any, nbytes: int) -> HostArray:
    """Page-locked memory as a 1-D u8 array, which keeps it."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


class PinnedRing:
    """Slots through which host arrays go to a device in the order of its stream.

    A slot is taken again only when the copy from it has run, which its event tells.
    """

    def __init__(self, cupy: Any) -> None:
        self._runtime = cupy.cuda.runtime
        self._memory = pinned(cupy, SLOTS * SLOT_BYTES).reshape(SLOTS, SLOT_BYTES)
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(SLOTS)]
        self._next = 0
        self._lock = threading.Lock()

    def upload(self, dest: int, source: HostArray, stream: Any) -> None:
        """Queue a copy of the source to contiguous memory at `dest`, in pieces if it is large."""
        data = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        for at in range(0, data.size, SLOT_BYTES):
            self._piece(dest + at, data[at : at + SLOT_BYTES], stream)

    def _piece(self, dest: int, data: HostArray, stream: Any) -> None:
        with self._lock:
            slot, event = self._memory[self._next], self._events[self._next]
            self._next = (self._next + 1) % SLOTS
            event.synchronize()
            slot[: data.size] = data
            self._runtime.memcpyAsync(
                dest, slot.ctypes.data, data.size, self._runtime.memcpyHostToDevice, stream.ptr
            )
            event.record(stream)
