"""The CUDA backend: ``cuda:N``, on CuPy.

Arrays are CuPy's; order, memory and copies are those of `cuda_queue`, kernels those of `cuda_ops`.
CuPy is imported when the backend is made.

No part of it has run on a GPU yet. It is tested against a stand-in for CuPy on the CPU, which runs
the kernels' own source, and ``tools/gpu_check.sh`` is there to be run on a machine with a GPU.
"""

import importlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

from lazykv.backends.cuda_body import portable
from lazykv.backends.cuda_moves import copy_steps
from lazykv.backends.cuda_ops import CudaOp, find
from lazykv.backends.cuda_probe import probe, version
from lazykv.backends.cuda_queue import Queue
from lazykv.backends.cuda_refusals import Word
from lazykv.backends.cuda_site import Site, Steps
from lazykv.device import (
    API_VERSION,
    Array,
    Backend,
    Call,
    Capabilities,
    DeviceLocation,
    HostArray,
    Kernel,
    Step,
)
from lazykv.dlpack import CUDA, Lent
from lazykv.dtypes import DType
from lazykv.errors import BackendUnavailable, RangeError, ShapeError
from lazykv.layout import Layout
from lazykv.ops.op import Op
from lazykv.spec import Spec


class CudaCapture:
    """A CUDA graph. It keeps the arrays and kernels of the calls it was recorded from."""

    def __init__(self, queue: Queue, calls: Sequence[Step]) -> None:
        self._queue = queue
        self._calls = tuple(calls)
        self._words: list[Word] = []
        with queue.refusals.recording(self._words):
            self._graph = queue.record(self._calls)

    def replay(self) -> None:
        self._queue.refuse_in_capture("a replay")
        self._queue.refusals.note(*self._words)
        self._queue.run(self._graph.launch, self._queue.stream)


class CudaBackend(Backend):
    """Serves ``cuda:0`` and on. `limit_bytes` bounds the memory taken from each device.

    Raises `BackendUnavailable` naming the stage of `probe` that failed and what to install.
    """

    name: ClassVar[str] = "cuda"
    api_version: ClassVar[int] = API_VERSION
    dlpack_device_type: ClassVar[int | None] = CUDA
    install_hint: ClassVar[str] = "pip install 'lazykv[cuda13]' or 'lazykv[cuda12]'"

    def __init__(self, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 1:  # CuPy takes 0 for no limit
            raise RangeError(f"CudaBackend: got limit_bytes {limit_bytes}, need at least 1")
        last = probe()[-1]
        if not last.ok and last.name != "capture":
            raise BackendUnavailable(
                f"backend 'cuda': got {last.detail} (stage {last.name!r}), need {last.hint}"
            )
        self.capabilities = Capabilities(is_async=True, capture=last.ok)
        self.xp = importlib.import_module("cupy")
        self._limit_bytes = limit_bytes
        self._queues: dict[DeviceLocation, Queue] = {}
        self._lock = threading.Lock()
        count = self.xp.cuda.runtime.getDeviceCount()
        self._locations = tuple(DeviceLocation(f"cuda:{n}") for n in range(count))
        devices = [self.xp.cuda.Device(n) for n in range(count)]
        # One number for all devices: scratch is planned before it is known where it will be.
        self._multiprocessors = max(int(d.attributes["MultiProcessorCount"]) for d in devices)

    def locations(self) -> tuple[DeviceLocation, ...]:
        return self._locations

    def facts(self, location: DeviceLocation) -> dict[str, str]:
        cuda = self.xp.cuda
        return {
            "gpu": cuda.runtime.getDeviceProperties(location.index)["name"].decode(),
            "compute_capability": str(cuda.Device(location.index).compute_capability),
            "driver_cuda": version(cuda.runtime.driverGetVersion()),
            "runtime_cuda": version(cuda.runtime.runtimeGetVersion()),
            "cupy": str(self.xp.__version__),
        }

    def queue(self, location: DeviceLocation) -> Queue:
        """The stream and memory of a device, made when first asked for."""
        found = self._queues.get(location)
        if found is None:
            with self._lock:
                found = self._queues.get(location)
                if found is None:
                    found = Queue(self.xp, location, self._multiprocessors, self._limit_bytes)
                    self._queues[location] = found
        return found

    def _queue_of(self, array: Array) -> Queue:
        return self.queue(self._locations[array.data.device_id])

    def current(self, location: DeviceLocation) -> AbstractContextManager[None]:
        """The device and its stream as CuPy's current ones: what CuPy does inside is in order with
        everything given to the backend."""
        return self.queue(location).current()

    # Memory

    def allocate(self, nbytes: int, location: DeviceLocation) -> Array:
        return self.queue(location).allocate(nbytes)

    def used_bytes(self, location: DeviceLocation) -> int:
        """Bytes of live allocations on a device, each rounded up to 512."""
        return self.queue(location).used_bytes()

    def view(self, buffer: Array, dtype: DType, layout: Layout) -> Array:
        assert isinstance(layout.offset, int), "a view is made when its offset is known"
        strides = tuple(s * dtype.itemsize for s in layout.strides)
        start = buffer.data + layout.offset * dtype.itemsize
        return self.xp.ndarray(layout.shape, dtype.raw, start, strides)

    # Memory of other libraries

    def receiving(self, location: DeviceLocation) -> AbstractContextManager[int]:
        return self.queue(location).receiving()

    def adopt(self, memory: Lent, location: DeviceLocation) -> Array:
        return self.queue(location).adopt(memory)

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    # Copies

    def copy_in(self, dest: Array, source: HostArray) -> None:
        queue = self._queue_of(dest)
        if (source.shape, source.dtype) != (dest.shape, dest.dtype):
            got, need = (f"{a.dtype}{list(a.shape)}" for a in (source, dest))
            raise ShapeError(f"copy to {queue.location}: got {got}, need {need}")
        if _is_contiguous(dest):
            queue.upload(dest, source)
        else:
            staged = queue.array(dest.shape, dest.dtype)
            queue.upload(staged, source)
            _copy(queue, dest, staged)

    def feeder(self, dest: Array) -> Callable[[HostArray], object]:
        return partial(self._queue_of(dest).upload, dest)  # inputs of plans are contiguous

    def copy_out(self, source: Array) -> HostArray:
        queue = self._queue_of(source)
        queue.refuse_in_capture("a copy to the host")
        return queue.download(_contiguous(queue, source))

    def transfer(
        self, dest: Array, to: DeviceLocation, source: Array, from_: DeviceLocation
    ) -> None:
        giver, taker = self.queue(from_), self.queue(to)
        for queue in (giver, taker):
            queue.refuse_in_capture("a copy between devices")
        line = _contiguous(giver, source)
        made = dest if _is_contiguous(dest) else taker.array(dest.shape, dest.dtype)
        taker.wait_for(giver)
        try:
            taker.copy_from_peer(made, giver, line)
        finally:  # `line` goes back to the giver's memory: not before the copy has read it
            giver.wait_for(taker)
        if made is not dest:
            _copy(taker, dest, made)

    # Work

    def synchronize(self, location: DeviceLocation) -> None:
        self.queue(location).synchronize()

    def capture(self, location: DeviceLocation, calls: Sequence[Step]) -> CudaCapture:
        return CudaCapture(self.queue(location), calls)

    def kernel(self, op: Any, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
        found = find(op, ins, out)
        if found is None:
            if type(op).body is Op.body:
                return None
            found = CudaOp(_no_kernel)
        return Kernel(partial(self._emit, found), partial(self._scratch, found))

    def _scratch(self, found: CudaOp, op: Any, ins: tuple[Spec, ...], out: Spec) -> Sequence[Spec]:
        return found.scratch(op, ins, out, self._multiprocessors)

    def _emit(self, found: CudaOp, call: Call) -> list[Step]:
        if call.op.destroys is None and not call.out.size:
            return []
        queue = self._queue_of(call.out)
        word = queue.refusals.take(call.op) if found.refuses else None
        site = Site(queue, call, word)
        steps = found.emit(site)
        if steps is None:
            return portable(site)
        return steps if word is None else [(queue.refusals.note, (word,)), *steps]


def _no_kernel(site: Site) -> Steps:
    return None


def _is_contiguous(array: Array) -> bool:
    return bool(array.flags.c_contiguous)


def _contiguous(queue: Queue, array: Array) -> Array:
    if _is_contiguous(array):
        return array
    line = queue.array(array.shape, array.dtype)
    _copy(queue, line, array)
    return line


def _copy(queue: Queue, dest: Array, source: Array) -> None:
    """Between two views on one device."""
    steps = copy_steps(queue, dest, source)
    if steps is None:
        steps = [(queue.run, (dest.__setitem__, ..., source))]
    for f, args in steps:
        f(*args)
