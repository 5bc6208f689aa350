"""The stand-in for CuPy: what it refuses and how it fails, as CuPy does."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import fake_cupy
import numpy as np
import pytest
from fake_cupy.machine import CUDARuntimeError, Machine
from fake_cupy.streams import SPOILED

FAULT = "cudaErrorIllegalAddress: an illegal memory access was encountered"


@pytest.fixture
def machine() -> Iterator[Machine]:
    with fake_cupy.installed() as made:
        yield made


@pytest.fixture
def cupy(machine: Machine) -> ModuleType:
    return fake_cupy.build()


def fault() -> None:
    raise CUDARuntimeError(FAULT)


def test_arrays_are_copied_when_asked(cupy: ModuleType) -> None:
    a = cupy.asarray(np.arange(3, dtype=np.float32))
    assert cupy.asarray(a) is a
    assert cupy.asarray(a, np.float32, copy=False) is a
    assert a.astype(np.float32, copy=False) is a
    for made in (cupy.asarray(a, copy=True), cupy.asarray(a, np.float64), a.astype(np.float32)):
        assert made.data.ptr != a.data.ptr
        assert made.tolist() == [0, 1, 2]


def test_a_limit_of_zero_is_none(cupy: ModuleType) -> None:
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=1024)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        pool.malloc(2048)
    pool.set_limit(size=0)
    assert pool.malloc(2048).ptr
    with pytest.raises(ValueError, match="out of range"):
        pool.set_limit(size=-1)


def test_behind_a_fault_every_call_on_its_device_fails(cupy: ModuleType) -> None:
    cuda, runtime = cupy.cuda, cupy.cuda.runtime
    array, event = cupy.asarray(np.zeros(3, np.float32)), cuda.Event()
    stream, recording = cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True)
    recording.begin_capture()
    graph = recording.end_capture()
    recording.begin_capture()
    stream.push(fault)
    calls: list[Any] = [
        stream.synchronize, stream.record, event.record, event.synchronize, cuda.Event, cuda.Stream,
        lambda: stream.wait_event(event), stream.begin_capture, recording.end_capture,
        lambda: graph.launch(stream), lambda: cuda.alloc_pinned_memory(4), array.get,
        lambda: cuda.MemoryPool().malloc(4), lambda: array + 1, lambda: array.__setitem__(..., 1),
        lambda: cupy.asarray(np.ones(2)), lambda: cupy.matmul(array, array),
        lambda: runtime.memsetAsync(array.data.ptr, 0, 4, stream.ptr),
        lambda: runtime.memcpyAsync(0, array.data.ptr, 4, runtime.memcpyDeviceToHost, stream.ptr),
        lambda: runtime.memcpyPeerAsync(array.data.ptr, 0, array.data.ptr, 0, 4, stream.ptr),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CUDARuntimeError, match=FAULT):
            call()
    with cuda.Device(1):
        assert cupy.asarray(np.ones(2)).tolist() == [1, 1]


def test_a_fresh_machine_has_no_fault(cupy: ModuleType, machine: Machine) -> None:
    stream = cupy.cuda.Stream()
    stream.push(fault)
    with pytest.raises(CUDARuntimeError):
        stream.synchronize()
    machine.reset(1, 1 << 20)
    assert cupy.asarray(np.ones(2)).tolist() == [1, 1]


def test_a_fault_is_of_the_device_whose_work_it_was(cupy: ModuleType, machine: Machine) -> None:
    with cupy.cuda.Device(1):
        other = cupy.cuda.Stream()
        other.push(fault)
        event = other.record()
    mine = cupy.cuda.Stream()
    mine.wait_event(event)
    with pytest.raises(CUDARuntimeError):
        mine.synchronize()
    assert machine.faults == {1: FAULT}


def test_a_capture_that_is_spoiled_becomes_no_graph(cupy: ModuleType) -> None:
    stream = cupy.cuda.Stream()
    for waits in (False, True):
        stream.begin_capture()
        if waits:
            with pytest.raises(CUDARuntimeError, match="StreamCaptureUnsupported"):
                stream.synchronize()
        else:
            stream.spoil()
        with pytest.raises(CUDARuntimeError, match="StreamCaptureInvalidated"):
            stream.record()
        with pytest.raises(CUDARuntimeError, match=SPOILED):
            stream.end_capture()
        assert not stream.is_capturing()
    stream.begin_capture()
    stream.end_capture().launch(stream)
    stream.synchronize()
