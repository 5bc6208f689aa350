"""Devices, streams, events and graphs."""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from fake_cupy.machine import CUDARuntimeError, machine

Work = Callable[[], object]

SPOILED = (
    "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during capture"
)

_pointers = itertools.count(1 << 20, 16)


class Device:
    def __init__(self, device: Any = None) -> None:
        self.id = machine.device() if device is None else int(device)

    def __enter__(self) -> "Device":
        if not 0 <= self.id < len(machine.heaps):
            raise CUDARuntimeError("cudaErrorInvalidDevice")
        machine.thread.__dict__.setdefault("devices", []).append(machine.device())
        machine.thread.device = self.id
        return self

    def __exit__(self, *args: object) -> None:
        machine.thread.device = machine.thread.devices.pop()

    @property
    def compute_capability(self) -> str:
        return "00"

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 2}


class Stream:
    """Work in order. Nothing runs until somebody waits.

    `spoil` makes a capture unusable, as a call does that CUDA does not allow in one.
    """

    null: ClassVar[Any] = None

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        if not null:
            machine.check()
        self.ptr = 0 if null else next(_pointers)
        self.device_id = -1 if null else machine.device()
        self._home = machine.device()
        self.is_non_blocking = non_blocking
        self.queue: deque[Work] = deque()
        self.recording: list[Work] | None = None
        self.spoiled = False
        if not null:
            machine.streams[self.ptr] = self

    def __enter__(self) -> "Stream":
        if self.device_id not in (-1, machine.device()):
            raise RuntimeError("The device that the stream is created on does not match")
        _stack(machine.device()).append(self)
        return self

    def __exit__(self, *args: object) -> None:
        _stack(machine.device()).pop()

    def push(self, work: Work) -> None:
        if self.recording is None:
            self.queue.append(work)
            if self.ptr == 0:
                self.drain()
        elif self.spoiled:
            raise CUDARuntimeError(SPOILED)
        else:
            self.recording.append(work)

    def run_one(self) -> None:
        with machine.running, np.errstate(all="ignore"):
            work = self.queue.popleft()
            try:
                work()
            except CUDARuntimeError as e:
                self.queue.clear()
                machine.fault(self._home, e)
                raise

    def drain(self) -> None:
        with machine.running:
            while self.queue:
                self.run_one()

    def synchronize(self) -> None:
        machine.check()
        if self.recording is not None:
            self.spoil()
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")
        self.drain()

    def record(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        machine.check()
        self.push(event.mark.complete)

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr == 0:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        machine.check()
        self.recording, self.spoiled = [], False

    def spoil(self) -> None:
        self.spoiled = True

    def end_capture(self) -> "Graph":
        assert self.recording is not None, "a capture was begun"
        work, self.recording = self.recording, None
        machine.check()
        if self.spoiled:
            raise CUDARuntimeError(SPOILED)
        return Graph(work)

    def is_capturing(self) -> bool:
        return self.recording is not None


def _stack(device: int) -> list[Stream]:
    stacks = machine.thread.__dict__.setdefault("streams", {})
    return stacks.setdefault(device, [null_stream(device)])


def null_stream(device: int) -> Stream:
    key = -1 - device
    if key not in machine.streams:
        machine.streams[key] = Stream(null=True)
    return machine.streams[key]


def current_stream() -> Stream:
    return _stack(machine.device())[-1]


def stream_at(ptr: int) -> Stream:
    return machine.streams[ptr] if ptr else null_stream(machine.device())


class Mark:
    """A place in a stream."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self.reached = stream is None

    def reach(self) -> None:
        self.reached = True

    def complete(self) -> None:
        while not self.reached:
            assert self.stream is not None, "only a recorded event is waited for"
            self.stream.run_one()


class Event:
    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        machine.check()
        self.mark = Mark(None)
        self.device_id = machine.device()

    def record(self, stream: Stream | None = None) -> None:
        machine.check()
        stream = stream or current_stream()
        if stream.device_id not in (-1, self.device_id):
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle")
        self.mark = Mark(stream)
        stream.push(self.mark.reach)

    @property
    def done(self) -> bool:
        return self.mark.reached

    def synchronize(self) -> None:
        machine.check()
        with machine.running:
            self.mark.complete()


def get_elapsed_time(start: Event, end: Event) -> float:
    assert start.done
    assert end.done
    return 1.0


class Graph:
    """Recorded work, which refers to memory by address and keeps none alive."""

    def __init__(self, work: list[Work]) -> None:
        self.work = tuple(work)

    def launch(self, stream: Stream | None = None) -> None:
        machine.check()
        machine.graph_launches += 1
        stream = stream or current_stream()
        for work in self.work:
            stream.push(work)
