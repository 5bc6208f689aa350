"""The simulated accelerator: NumPy underneath, behind queues and handles as a device has them.

It serves ``sim:0`` and ``sim:1``. Each has a stream: kernels and copies given to it are queued and
run in order when the host waits for them (`copy_out`, `synchronize`), not before. Streams know
nothing of each other but for the events that `transfer` puts into them. Memory cannot be looked
into from the host, holds a pattern while fresh and again once freed, and can be bounded by
`limit_bytes`; a scripted allocation, copy or kernel can be made to fail. So stream order,
residency, captures and running out of memory are tested without a GPU, and a backend's author finds
here what a real one has to do.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from lazykv.backends.cpu import CpuBackend
from lazykv.backends.sim_memory import Block, SimArray
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
from lazykv.dlpack import EXTENSION, Lent
from lazykv.dtypes import DType
from lazykv.errors import (
    BindingError,
    CaptureError,
    GraphError,
    KernelError,
    LazyKvError,
    OutOfMemory,
)
from lazykv.layout import Layout
from lazykv.poison import PATTERN
from lazykv.spec import Spec
from lazykv.symbols import ScalarSlot

DEVICES = 2


class _Giver:
    """A thread that gives work, and the first failure of it that the thread has not been told."""

    __slots__ = ("failure",)

    def __init__(self) -> None:
        self.failure: LazyKvError | None = None


@dataclass(frozen=True, slots=True)
class _Work:
    """One queued call, what to call it when it fails, the op it is part of, and who gave it (None:
    it runs whatever has failed)."""

    label: str
    op: object
    run: Callable[..., object]
    args: tuple[Any, ...]
    giver: _Giver | None = None


class Event:
    """A place in a stream."""

    def __init__(self, stream: "Stream") -> None:
        self._stream = stream
        self.reached = False

    def reach(self) -> None:
        self.reached = True

    def complete(self) -> None:
        """Run the event's stream up to it."""
        while not self.reached:
            self._stream.run_one()


class Stream:
    """Work of one device, in order. Nothing runs until somebody waits for it.

    Threads share it. After a failure nothing more of what its thread gave runs until that thread
    has waited and been told; the work of others goes on.
    """

    def __init__(self, location: DeviceLocation, backend: "SimBackend") -> None:
        self.location = location
        self.queue: deque[_Work] = deque()
        self._backend = backend
        self._thread = threading.local()
        self._busy = False

    @property
    def idle(self) -> bool:
        return not self.queue and not self._busy

    @property
    def recording(self) -> list[_Work] | None:
        """Where this thread's work goes while it captures."""
        return getattr(self._thread, "recording", None)

    def record_calls(self, calls: Sequence[Step]) -> list[_Work]:
        """What calls give, which is not queued."""
        self._thread.recording = recorded = list[_Work]()
        try:
            for f, args in calls:
                f(*args)
        finally:
            self._thread.recording = None
        return recorded

    def push(self, label: str, run: Callable[..., object], *args: Any, op: object = None) -> None:
        work = _Work(label, op, run, args, self._backend.giver)
        (self.queue if self.recording is None else self.recording).append(work)

    def push_always(self, label: str, run: Callable[..., object], *args: Any) -> None:
        """What runs whatever has failed: events, and the end of an allocation."""
        self.queue.append(_Work(label, None, run, args))

    def replay(self, recorded: Sequence[_Work]) -> None:
        giver = self._backend.giver
        self.queue.extend(_Work(w.label, w.op, w.run, w.args, giver) for w in recorded)

    def record(self) -> Event:
        event = Event(self)
        self.push_always("event", event.reach)
        return event

    def wait(self, event: Event) -> None:
        """What is pushed from now on runs after the event."""
        self.push_always("wait", event.complete)

    def run_one(self) -> None:
        self._busy = True  # before the queue is empty, or memory of this work might be let go
        try:
            work = self.queue.popleft()
            if work.giver is None or work.giver.failure is None:
                self._run(work)
        finally:
            self._busy = False

    def _run(self, work: _Work) -> None:
        try:
            with np.errstate(all="ignore"):
                work.run(*work.args)
        except BaseException as e:
            if work.giver is not None:
                work.giver.failure = _failure(e, work)  # what depends on it must not run
            if work.giver is None or not isinstance(e, Exception):
                raise

    def drain(self) -> None:
        """Run everything; raises what has failed of this thread's work."""
        with self._backend.running:
            while self.queue:
                self.run_one()
        giver = self._backend.giver
        failure, giver.failure = giver.failure, None
        if failure is not None:
            raise failure

    def refuse_in_capture(self, what: str) -> None:
        if self.recording is not None:
            raise CaptureError(f"capture on {self.location}: got {what}, need queued work only")


def _failure(e: BaseException, work: _Work) -> LazyKvError:
    """The error to raise for queued work that failed; it names the op, and so does what interrupted
    the wait for it."""
    if not isinstance(e, Exception):
        vars(e)["op"] = work.op
    if isinstance(e, LazyKvError):
        e.op = e.op or work.op
        return e
    kind = OutOfMemory if isinstance(e, MemoryError) else KernelError
    failure = kind(f"{work.label}: got {type(e).__name__}: {e}, need it to run")
    failure.op, failure.__cause__ = work.op, e
    return failure


class SimCapture:
    """Recorded work of one stream. It refers to memory by address: keep what it uses alive."""

    def __init__(self, stream: Stream, work: Sequence[_Work]) -> None:
        self._stream = stream
        self.work = tuple(work)

    def replay(self) -> None:
        self._stream.refuse_in_capture("a replay")
        self._stream.replay(self.work)


class SimBackend(Backend):
    """Serves ``sim:0`` and ``sim:1``. `limit_bytes` bounds each device's live allocations."""

    name: ClassVar[str] = "sim"
    api_version: ClassVar[int] = API_VERSION
    capabilities = Capabilities(is_async=True, capture=True)
    dlpack_device_type: ClassVar[int | None] = EXTENSION

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.running = threading.RLock()
        self.counts = dict.fromkeys(("allocation", "copy", "kernel"), 0)
        self._failing: dict[str, int] = {}
        self._cpu = CpuBackend()
        self._thread = threading.local()
        # Bytes and device by address. No total: two threads that add to one lose a change.
        self._live: dict[int, tuple[int, DeviceLocation]] = {}
        self._streams = {place: Stream(place, self) for place in self.locations()}

    def locations(self) -> tuple[DeviceLocation, ...]:
        return tuple(DeviceLocation(f"sim:{n}") for n in range(DEVICES))

    def facts(self, location: DeviceLocation) -> dict[str, str]:
        return self._cpu.facts(location)

    def used_bytes(self, location: DeviceLocation) -> int:
        """Bytes allocated on a device and not yet freed."""
        return sum(n for n, place in list(self._live.values()) if place == location)

    def stream(self, location: DeviceLocation) -> Stream:
        return self._streams[location]

    @property
    def giver(self) -> _Giver:
        """The thread that calls, as its queued work knows it."""
        if not hasattr(self._thread, "giver"):
            self._thread.giver = _Giver()
        giver: _Giver = self._thread.giver
        return giver

    def fail(self, what: str, at: int) -> None:
        """Let the `at`-th ``"allocation"``, ``"copy"`` or ``"kernel"`` from now fail, once."""
        if what not in self.counts or at < 1:
            raise GraphError(f"fail: got {what!r} at {at}, need one of {sorted(self.counts)} and 1")
        self._failing[what] = self.counts[what] + at

    def _count(self, what: str) -> bool:
        """Count one, and whether it is to fail."""
        self.counts[what] += 1
        if self._failing.get(what) != self.counts[what]:
            return False
        del self._failing[what]
        return True

    # Memory

    def allocate(self, nbytes: int, location: DeviceLocation) -> Array:
        self._streams[location].refuse_in_capture(f"an allocation of {nbytes} bytes")
        free = None if self.limit_bytes is None else self.limit_bytes - self.used_bytes(location)
        if self._count("allocation") or (free is not None and nbytes > free):
            have = "none" if free is None else f"at most {free}"
            raise OutOfMemory(
                f"allocate on {location}: got no memory for {nbytes} bytes, need {have}"
            )
        data = self._cpu.allocate(nbytes, location)
        data.fill(PATTERN)
        self._live[self._cpu.address(data)] = nbytes, location
        block = Block()
        weakref.finalize(block, self._free, data, location)
        return SimArray(data, location, block)

    def _free(self, data: HostArray, location: DeviceLocation) -> None:
        """In stream order: work that was queued before still finds its bytes, later work does not.

        A capture is no such work. It has to keep what it uses.
        """
        del self._live[self._cpu.address(data)]
        stream = self._streams[location]
        if stream.idle:
            data.fill(PATTERN)
        else:
            stream.push_always("free", data.fill, PATTERN)

    def view(self, buffer: Array, dtype: DType, layout: Layout) -> Array:
        data = self._cpu.view(buffer._data, dtype, layout)
        return SimArray(data, buffer.location, buffer.block)

    def adopt(self, memory: Lent, location: DeviceLocation) -> Array:
        """Only what this backend has allocated: other devices share its DLPack device type."""
        end = memory.address + memory.nbytes
        starts = (s for s in list(self._live) if s <= memory.address)
        gone = 0, location
        if not any(end <= s + self._live.get(s, gone)[0] for s in starts):
            raise BindingError(f"adopt on {location}: got {memory}, need memory of {location}")
        # Queued work keeps the bytes too, so whoever lends them gets them back when it has run.
        return SimArray(self._cpu.adopt(memory, location), location, Block())

    def address(self, array: Array) -> int:
        return self._cpu.address(array._data)

    # Copies

    def copy_in(self, dest: Array, source: HostArray) -> None:
        stream = self._streams[dest.location]
        stream.refuse_in_capture("a copy from the host")
        # The caller may change its array before the copy runs.
        stream.push("copy from the host", self._copy, dest._data, np.array(source))

    def copy_out(self, source: Array) -> HostArray:
        self.synchronize(source.location)
        return self._cpu.copy_out(source._data)

    def transfer(
        self, dest: Array, to: DeviceLocation, source: Array, from_: DeviceLocation
    ) -> None:
        giver, taker = self._streams[from_], self._streams[to]
        if giver is not taker:
            giver.refuse_in_capture("a copy between devices")
            taker.refuse_in_capture("a copy between devices")
            taker.wait(giver.record())
        taker.push(f"copy from {from_}", self._copy, dest._data, source._data)
        if giver is not taker:
            giver.wait(taker.record())

    def _copy(self, dest: HostArray, source: HostArray) -> None:
        if self._count("copy"):
            raise RuntimeError("a scripted failure")
        dest[...] = source

    # Work

    def synchronize(self, location: DeviceLocation) -> None:
        stream = self._streams[location]
        stream.refuse_in_capture("a wait")
        stream.drain()

    def capture(self, location: DeviceLocation, calls: Sequence[Step]) -> SimCapture:
        stream = self._streams[location]
        stream.refuse_in_capture("another capture")
        return SimCapture(stream, stream.record_calls(calls))

    def kernel(self, op: Any, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
        inner = self._cpu.kernel(op, ins, out)
        if inner is None:
            return None
        return Kernel(partial(self._emit, inner), inner.scratch)

    def _emit(self, inner: Kernel, call: Call) -> Iterable[Step]:
        stream, opened = self._streams[call.out.location], _opened(call)
        if any(_has_slot(getattr(call.op, name)) for name in call.op.dims):
            # A launch takes the values of symbols along; the queue runs after they have changed.
            return [(self._launch, (stream, inner, opened))]
        return [(self._push, (stream, opened, f, args)) for f, args in inner.emit(opened)]

    def _launch(self, stream: Stream, inner: Kernel, call: Call) -> None:
        now = replace(call, scalars=list(call.scalars))
        for f, args in inner.emit(now):
            self._push(stream, now, f, args)

    def _push(
        self, stream: Stream, call: Call, f: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        stream.push(f"{call.op.name} on {stream.location}", self._run, f, args, op=call.op)

    def _run(self, f: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._count("kernel"):
            raise RuntimeError("a scripted failure")
        f(*args)


def _has_slot(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_slot, value))
    return isinstance(value, ScalarSlot)


def _opened(call: Call) -> Call:
    """The call with the arrays inside the handles; all of them must be of one device."""
    handles = (*call.ins, call.out, *call.scratch)
    assert len({a.location for a in handles}) == 1, "placement puts operands on one device"
    ins = tuple(a._data for a in call.ins)
    scratch = tuple(a._data for a in call.scratch)
    return Call(call.op, ins, call.out._data, call.in_specs, call.out_spec, scratch, call.scalars)
