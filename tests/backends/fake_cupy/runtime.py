"""The CUDA runtime: versions, devices and copies."""

import ctypes

from fake_cupy.machine import CUDARuntimeError as CUDARuntimeError
from fake_cupy.machine import machine
from fake_cupy.streams import stream_at

memcpyHostToDevice, memcpyDeviceToHost = 1, 2


def driverGetVersion() -> int:
    return 12080


def runtimeGetVersion() -> int:
    return 12090


def getDeviceCount() -> int:
    return len(machine.heaps)


def getDeviceProperties(device: int) -> dict[str, object]:
    return {"name": b"no GPU", "totalGlobalMem": 0}


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    machine.check()
    to_host = kind == memcpyDeviceToHost
    device, host = (src, dst) if to_host else (dst, src)
    pinned = machine.is_pinned(host, size)
    assert pinned or to_host, "a copy from pageable memory is not asynchronous"
    if size:
        machine.heap_of(device, size)
    queue = stream_at(stream)
    queue.push(lambda: ctypes.memmove(dst, src, size))
    if not pinned:  # returns when the copy is done
        queue.synchronize()


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    machine.check()
    machine.heap_of(ptr, size)
    stream_at(stream).push(lambda: ctypes.memset(ptr, value, size))


def memcpyPeerAsync(
    dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int
) -> None:
    machine.check()
    if not size:
        return
    assert machine.heaps[dstDevice].holds(dst, size)
    assert machine.heaps[srcDevice].holds(src, size)
    stream_at(stream).push(lambda: ctypes.memmove(dst, src, size))
