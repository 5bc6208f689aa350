"""Device memory, the pool, and page-locked memory."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fake_cupy.machine import POISON, UNIT, machine
from fake_cupy.streams import current_stream, stream_at


class OutOfMemoryError(MemoryError):
    """A device has no memory left."""


class Block:
    """Some live memory of a device. Freed, it holds a pattern from that place in its stream on."""

    def __init__(self, pool: "MemoryPool", ptr: int, size: int, stream: int) -> None:
        self.pool, self.ptr, self.size, self.stream = pool, ptr, size, stream
        self.device_id, self.heaps = machine.device(), machine.heaps

    def __del__(self) -> None:
        # Of an earlier machine, or at the end of the process, nobody misses it.
        if self.ptr and machine.heaps is self.heaps and not sys.is_finalizing():
            with machine.running:
                self.pool.take_back(self)


class UnownedMemory:
    """Memory of somebody else, whose owner it keeps."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        assert device_id >= 0, "CuPy would ask the driver whose memory it is"
        self.ptr, self.size, self.device_id, self._owner = ptr, size, device_id, owner


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def __add__(self, offset: int) -> "MemoryPointer":
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + int(offset))


def pointer_to(block: Block) -> Any:
    if machine.cupy is None:
        return MemoryPointer(block, 0)
    cuda = machine.cupy.cuda
    memory = cuda.UnownedMemory(block.ptr, block.size, block, block.device_id)
    return cuda.MemoryPointer(memory, 0)


class MemoryPool:
    """Blocks by device and stream; a freed one is handed out again at once, to its own stream."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._limits: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._total: dict[int, int] = {}

    def malloc(self, size: int) -> Any:
        device, stream = machine.device(), current_stream().ptr
        size = -(-size // UNIT) * UNIT
        if not size:
            return pointer_to(Block(self, 0, 0, stream))
        with machine.running:  # so that no work that uses a block runs while it is taken back
            machine.mallocs += 1
            ptr = self._reuse((device, stream), size) or self._grow(device, size)
            self._used[device] = self._used.get(device, 0) + size
            return pointer_to(Block(self, ptr, size, stream))

    def _reuse(self, key: tuple[int, int], size: int) -> int | None:
        free = self._free.get(key, [])
        fitting = [block for block in free if block[1] == size]
        if not fitting:
            return None
        free.remove(fitting[-1])
        return fitting[-1][0]

    def _grow(self, device: int, size: int) -> int:
        machine.check()
        limit, total = self._limits.get(device), self._total.get(device, 0)
        ptr = None
        if not limit or total + size <= limit:
            ptr = machine.heaps[device].take(size)
        if ptr is None and self._release(device):
            return self._grow(device, size)
        if ptr is None:
            raise OutOfMemoryError(f"Out of memory allocating {size} bytes")
        self._total[device] = self._total.get(device, 0) + size
        return ptr

    def _release(self, device: int) -> bool:
        """Give free blocks back to the device, which waits for its streams."""
        blocks = [(k, b) for k, free in self._free.items() if k[0] == device for b in free]
        for (_, stream), (ptr, size) in blocks:
            stream_at(stream).drain()
            machine.heaps[device].give_back(ptr)
            self._total[device] -= size
        self._free = {k: free for k, free in self._free.items() if k[0] != device}
        return bool(blocks)

    def take_back(self, block: Block) -> None:
        heap = machine.heaps[block.device_id]
        self._used[block.device_id] -= block.size
        self._free.setdefault((block.device_id, block.stream), []).append((block.ptr, block.size))
        stream = machine.streams.get(block.stream)
        if stream is None or not stream.queue:
            heap.at(block.ptr, block.size)[:] = POISON
        else:
            ptr, size = block.ptr, block.size
            stream.queue.append(lambda: ctypes.memset(ptr, POISON, size))

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        assert size is not None, "the backend sets a size"
        if size < 0:
            raise ValueError(f"memory limit size out of range: {size}")
        self._limits[machine.device()] = size

    def used_bytes(self) -> int:
        return self._used.get(machine.device(), 0)


def current_allocator() -> Callable[[int], Any]:
    if machine.default_pool is None:
        machine.default_pool = MemoryPool()
    return getattr(machine.thread, "allocator", None) or machine.default_pool.malloc


@contextmanager
def using_allocator(allocator: Callable[[int], Any] | None = None) -> Iterator[None]:
    before = getattr(machine.thread, "allocator", None)
    machine.thread.allocator = allocator
    try:
        yield
    finally:
        machine.thread.allocator = before


def alloc_pinned_memory(size: int) -> Any:
    machine.check()
    made = (ctypes.c_ubyte * size)()
    machine.pinned.append((ctypes.addressof(made), size))
    return made
