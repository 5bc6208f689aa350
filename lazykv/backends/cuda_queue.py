"""One CUDA device as the backend uses it: a stream, memory, copies, refusals, compiled kernels.

Everything given to a device goes to one non-blocking stream, in order. Memory comes from a pool of
its own, whose free blocks are handed out again at once: what still uses a freed block was given to
the stream before whatever gets the block next, so it has run by then.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import finalize

import numpy as np

from lazykv.backends import cuda_kernels as ck
from lazykv.backends.cuda_pinned import PinnedRing, pinned
from lazykv.backends.cuda_refusals import WORDS, Refusals, Slab, Word, parts
from lazykv.device import Array, DeviceLocation, HostArray, Step
from lazykv.dlpack import Lent
from lazykv.errors import CaptureError, KernelError, OutOfMemory, RangeError

LANDING_BYTES = 1 << 20
"""Results up to this size go to the host through page-locked memory."""

MEMORY_ALLOCATION = 2
"""Status of an error of CUDA that means out of memory (`cudaErrorMemoryAllocation`)."""

_MODULES = (
    ("copy", "write_slice_at", "write_slice_rotating", "write_rows_check", "write_rows", "take"),
    ("rms_norm", "softmax", "rope"),
    *((name,) for name in ("attention", "paged_attention", "ring_attention", "latent_attention",
                           "attention_reduce")),
    ("gemv", "gemv_reduce"),
    ("map",),
)  # fmt: skip


class _Lease:
    """What arrays in lent memory keep; when it goes, nothing more is given that uses the memory."""

    __slots__ = ("__weakref__",)


class Queue:
    """The stream of one device. Safe to share between threads.

    While a thread captures, what it gives goes to a stream that records; other threads go on.
    """

    def __init__(
        self, cupy: Any, location: DeviceLocation, multiprocessors: int, limit_bytes: int | None
    ) -> None:
        self.cupy = cupy
        self.location = location
        self.multiprocessors = multiprocessors
        self.refusals = Refusals(self._slab, self.clear)
        self.refused_allocations = 0
        self._faults = cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError
        self._thread = threading.local()
        self._waiting = threading.Lock()
        self._compiling = threading.Lock()
        self._kernels: dict[tuple[object, ...], Any] = {}
        self._device = cupy.cuda.Device(location.index)
        with self._translated(), self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._pool = cupy.cuda.MemoryPool()
            if limit_bytes is not None:
                self._pool.set_limit(size=limit_bytes)
        self.zeros = self.array((16,), np.dtype(np.uint8))
        self.clear(self.zeros)
        self._landing = self.run(pinned, cupy, LANDING_BYTES)
        self._ring = self.run(PinnedRing, cupy)

    # Calls

    @property
    def stream(self) -> Any:
        """Where this thread's work goes: the device's stream, or the one that records."""
        return getattr(self._thread, "recording", self._stream)

    @property
    def capturing(self) -> bool:
        """Whether this thread's work is being recorded."""
        return hasattr(self._thread, "recording")

    def refuse_in_capture(self, what: str) -> None:
        if self.capturing:
            raise CaptureError(f"capture on {self.location}: got {what}, need queued work only")

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device and its stream as the current ones of CuPy."""
        with self._device, self.stream:
            yield

    def run(self, f: Callable[..., Any], *args: Any) -> Any:
        """Call CuPy with the device and its stream current, as everything here does.

        A fault of earlier work may be told by any later call.
        """
        with self._translated(), self._device, self.stream:
            return f(*args)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._faults as e:
            if getattr(e, "status", None) == MEMORY_ALLOCATION:
                raise OutOfMemory(
                    f"{self.location}: got {e}, need more memory of the device or page-locked "
                    "memory of the host"
                ) from e
            raise KernelError(
                f"{self.location}: got {e}, need its work to run; after a fault in a kernel the "
                "process cannot use the device any more"
            ) from e

    def run_later(
        self, kernel: Any, grid: tuple[int, ...], block: tuple[int, ...],
        arguments: Callable[[], tuple[Any, ...]],
    ) -> None:  # fmt: skip
        """Launch with arguments that are made now: values of symbols go with the launch."""
        self.run(kernel, grid, block, arguments())

    def run_body(self, f: Callable[..., Any], *args: Any) -> Any:
        """Call CuPy code that makes temporary arrays; they come from this device's pool."""
        return self.run(self._with_pool, f, *args)

    def _with_pool(self, f: Callable[..., Any], *args: Any) -> Any:
        with self.cupy.cuda.using_allocator(self.malloc):
            return f(*args)

    # Memory

    def malloc(self, nbytes: int) -> Any:
        """Memory of the device, aligned to 512 bytes."""
        if self.capturing:
            self.refused_allocations += 1
            self.refuse_in_capture(f"an allocation of {nbytes} bytes")
        try:
            return self._pool.malloc(nbytes)
        except self.cupy.cuda.memory.OutOfMemoryError as e:
            raise OutOfMemory(
                f"allocate on {self.location}: got no memory for {nbytes} bytes, need at most what "
                f"is free beside the {self._pool.used_bytes()} bytes in use"
            ) from e

    def allocate(self, nbytes: int) -> Array:
        """Uninitialized memory as a 1-D u8 array."""
        memory = self.run(self.malloc, nbytes)
        return self.cupy.ndarray((nbytes,), np.dtype(np.uint8), memory)

    @contextmanager
    def receiving(self) -> Iterator[int]:
        """The device as the current one; gives the stream's number for DLPack.

        The stream does not become CuPy's current one: an array of CuPy's would take it for the one
        that its own work is on, and wait for nothing.
        """
        with self._device:
            yield self._stream.ptr

    def adopt(self, memory: Lent) -> Array:
        """Memory of another library as a 1-D u8 array."""
        lease, where = _Lease(), (memory.address, memory.nbytes)
        finalize(lease, self._let_go, memory).atexit = False
        lent = self.cupy.cuda.UnownedMemory(*where, lease, self.location.index)
        start = self.cupy.cuda.MemoryPointer(lent, 0)
        return self.cupy.ndarray((memory.nbytes,), np.dtype(np.uint8), start)

    def _let_go(self, memory: Lent) -> None:
        """Its owner may hand it out again, in an order of its own, as soon as this returns."""
        with suppress(KernelError):  # a fault is for those to hear who wait for results
            self.run(self._stream.synchronize)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Uninitialized and contiguous."""
        memory = self.run(self.malloc, math.prod(shape) * dtype.itemsize)
        return self.cupy.ndarray(shape, dtype, memory)

    def clear(self, array: Array) -> None:
        """Zero bytes for all of a contiguous array."""
        self.run(self._clear, array.data.ptr, array.nbytes)

    def _clear(self, start: int, nbytes: int) -> None:
        if nbytes:
            self.cupy.cuda.runtime.memsetAsync(start, 0, nbytes, self.stream.ptr)

    def used_bytes(self) -> int:
        """Bytes of live allocations, each rounded up to 512."""
        return int(self.run(self._pool.used_bytes))

    # Copies of contiguous arrays

    def upload(self, dest: Array, source: HostArray) -> None:
        """From the host, by way of page-locked memory; the source is free when this returns."""
        self.refuse_in_capture("a copy from the host")
        self.run(self._ring.upload, dest.data.ptr, source, self._stream)

    def download(self, source: Array) -> HostArray:
        """To a fresh host array, when all work given before has run."""
        self.refuse_in_capture("a copy to the host")
        out = np.empty(source.shape, source.dtype)
        small = out.nbytes <= LANDING_BYTES
        with self._waiting:
            if out.nbytes:
                dest = self._landing if small else out
                self._to_host(dest, source.data.ptr, out.nbytes)
            self._finish()
            if small:
                out.reshape(-1).view(np.uint8)[:] = self._landing[: out.nbytes]
        return out

    def _to_host(self, dest: HostArray, source: int, nbytes: int) -> None:
        runtime = self.cupy.cuda.runtime
        self.run(runtime.memcpyAsync, dest.ctypes.data, source, nbytes,
                 runtime.memcpyDeviceToHost, self._stream.ptr)  # fmt: skip

    def wait_for(self, other: "Queue") -> None:
        """What is given from now on runs after all that the other queue was given so far."""
        event = other.run(other.stream.record)
        self.run(self.stream.wait_event, event)

    def copy_from_peer(self, dest: Array, other: "Queue", source: Array) -> None:
        self.run(self.cupy.cuda.runtime.memcpyPeerAsync, dest.data.ptr, self.location.index,
                 source.data.ptr, other.location.index, dest.nbytes, self._stream.ptr)  # fmt: skip

    # Waiting

    def synchronize(self) -> None:
        """Wait for all work given so far; raises its first failure."""
        self.refuse_in_capture("a wait")
        with self._waiting:
            self._finish()

    def _finish(self) -> None:
        """Wait, and look at the words of this thread's work; the caller holds the lock of the
        page-locked memory."""
        given = self.refusals.given()
        for source, dest in parts(given):
            self._to_host(dest, source.data.ptr, dest.nbytes)
        self.run(self._stream.synchronize)
        refused = [w for w in given if w.is_set]
        if refused:
            self.refusals.clear(refused)
        self.refusals.waited()  # an interrupted wait leaves them to the next one
        if refused:
            raise self._refusal(refused)

    def _refusal(self, words: Sequence[Word]) -> RangeError:
        first = words[0].op
        error = RangeError(
            f"{first.name}: got an offset, length, id, row or block out of range on "
            f"{self.location}, need those in tensors to fit the operands; the kernel wrote nothing "
            "there"
        )
        error.op = first
        error.refused = tuple(w.op for w in words)
        return error

    def _slab(self) -> Slab:
        device = self.array((WORDS,), np.dtype(np.int32))
        return Slab(device, self.run(pinned, self.cupy, device.nbytes).view(np.int32))

    # Captures

    def record(self, calls: Sequence[Step]) -> Any:
        """A CUDA graph of the calls, which do not run."""
        self.refuse_in_capture("another capture")
        stream = self.run(partial(self.cupy.cuda.Stream, non_blocking=True))
        self._thread.recording = stream
        try:
            return self.run_body(self._record, stream, calls)
        finally:
            del self._thread.recording

    def _record(self, stream: Any, calls: Sequence[Step]) -> Any:
        stream.begin_capture()
        try:
            for f, args in calls:
                f(*args)
        except BaseException as e:
            self._abandon(stream)
            if isinstance(e, CaptureError) or not isinstance(e, Exception):
                raise
            raise CaptureError(
                f"capture on {self.location}: got {type(e).__name__}: {e}, need queued work only"
            ) from e
        try:
            return stream.end_capture()
        except self._faults as e:
            raise CaptureError(f"capture on {self.location}: got {e}, need a whole graph") from e

    def _abandon(self, stream: Any) -> None:
        """End a capture that failed; that it cannot become a graph is no news."""
        try:
            stream.end_capture()
        except self._faults:
            return

    # Kernels

    def kernel(self, name: str, **macros: object) -> Any:
        """A kernel compiled for this device; the first time takes a moment."""
        options = ck.defines(name, **macros)
        found = self._kernels.get((name, options))
        if found is None:
            with self._compiling:  # another thread may have been first
                found = self._kernels.get((name, options)) or self.run(self._compile, name, options)
        return found

    def _compile(self, name: str, options: tuple[str, ...]) -> Any:
        names = next(m for m in _MODULES if name in m)
        module = self.cupy.RawModule(code=ck.source(*names), options=options)
        try:
            made = module.get_function(ck.KERNELS[name].symbol)
            made.num_regs  # noqa: B018 (its code is loaded now, and not in a capture)
        except self._faults:
            raise
        except Exception as e:
            raise KernelError(f"{name}: got {type(e).__name__}: {e}, need it to compile") from e
        self._kernels[name, options] = made
        return made
