"""The simulated device at its edges: errors of queued work, captures within captures, and when the
bytes of memory that was let go turn into a pattern."""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sim_faults import fresh_sim

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.errors import LazyKvError
from lazykv.poison import PATTERN

HERE, THERE = (lk.DeviceLocation(f"sim:{n}") for n in range(2))


@pytest.fixture
def sim() -> Iterator[SimBackend]:
    with fresh_sim() as made:
        yield made


def raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


# Errors of queued work


@pytest.mark.parametrize(
    ("error", "kind"),
    [(MemoryError("much"), lk.OutOfMemory), (ValueError("much"), lk.KernelError)],
)
def test_an_error_of_queued_work_is_typed_and_names_it(sim, error, kind):
    op = object()
    sim.stream(HERE).push("some work", raising(error), op=op)
    with pytest.raises(
        LazyKvError, match=rf"^some work: got {type(error).__name__}: much, need it to run$"
    ) as e:
        sim.synchronize(HERE)
    assert type(e.value) is kind
    assert e.value.op is op
    assert e.value.__cause__ is error
    sim.synchronize(HERE)  # it was told


@pytest.mark.parametrize("own", [None, object()])
def test_a_typed_error_of_queued_work_is_of_the_op_it_names_or_of_the_work(sim, own):
    error, op = lk.RangeError("id 9"), object()
    error.op = own
    sim.stream(HERE).push("some work", raising(error), op=op)
    with pytest.raises(lk.RangeError, match=r"^id 9$") as e:
        sim.synchronize(HERE)
    assert e.value is error
    assert error.op is (op if own is None else own)


def test_a_scripted_failure_comes_once(sim):
    store = lk.Storage.from_array(np.zeros(2, np.float32), HERE)
    sim.fail("copy", 2)
    for fails in (False, True, False, False):
        sim.copy_in(store.array, np.ones(2, np.float32))
        if fails:
            with pytest.raises(lk.KernelError):
                sim.synchronize(HERE)
        else:
            sim.synchronize(HERE)
    for what, at in (("launch", 1), ("copy", 0)):
        with pytest.raises(lk.GraphError, match="need one of"):
            sim.fail(what, at)


# Captures


def test_a_capture_holds_queued_work_and_nothing_else(sim):
    """Each verb is refused, the capture is over, and nothing of it is queued."""
    buffer, other = sim.allocate(8, HERE), sim.allocate(8, THERE)
    bytes_, ran = np.zeros(8, np.uint8), []
    work = (sim.stream(HERE).push, ("some work", ran.append, 1))
    recorded = sim.capture(HERE, [work])
    verbs: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "a replay": (recorded.replay, ()),
        "another capture": (sim.capture, (HERE, [])),
        "an allocation of 4 bytes": (sim.allocate, (4, HERE)),
        "a copy from the host": (sim.copy_in, (buffer, bytes_)),
        "a wait": (sim.synchronize, (HERE,)),
        "a copy between devices": (sim.transfer, (other, THERE, buffer, HERE)),
    }
    for what, call in verbs.items():
        with pytest.raises(lk.CaptureError, match=f"^capture on sim:0: got {what}, need queued"):
            sim.capture(HERE, [work, call])
        assert sim.stream(HERE).idle
        assert sim.stream(THERE).idle
    with pytest.raises(lk.CaptureError, match="sim:0: got a copy between devices"):
        sim.capture(HERE, [(sim.transfer, (buffer, HERE, other, THERE))])
    sim.synchronize(HERE)
    assert ran == []
    for _ in range(2):
        recorded.replay()
    sim.synchronize(HERE)
    assert ran == [1, 1]


def test_a_copy_on_one_device_is_recorded(sim):
    source, dest = (sim.allocate(4, HERE) for _ in range(2))
    recorded = sim.capture(HERE, [(sim.transfer, (dest, HERE, source, HERE))])
    for value in (3, 5):
        sim.copy_in(source, np.full(4, value, np.uint8))
        recorded.replay()
        assert sim.copy_out(dest).tolist() == [value] * 4


# Memory that is fresh, and memory that was let go


def test_fresh_memory_never_holds_what_was_there_before(sim, monkeypatch):
    real = sim._cpu.allocate

    def zeroed(nbytes: int, location: lk.DeviceLocation) -> np.ndarray:
        made = real(nbytes, location)
        made.fill(0)
        return made

    monkeypatch.setattr(sim._cpu, "allocate", zeroed)
    assert sim.copy_out(sim.allocate(64, HERE)).tolist() == [PATTERN] * 64


def test_memory_let_go_at_rest_is_filled_at_once(sim):
    buffer = sim.allocate(8, HERE)
    data = buffer._data
    data.fill(7)
    del buffer
    gc.collect()
    assert data.tolist() == [PATTERN] * 8
    assert sim.stream(HERE).idle


def test_memory_let_go_behind_queued_work_is_filled_after_it(sim):
    buffer, kept = sim.allocate(8, HERE), sim.allocate(8, HERE)
    data = buffer._data
    data.fill(7)
    sim.transfer(kept, HERE, buffer, HERE)
    del buffer
    gc.collect()
    assert data.tolist() == [7] * 8
    assert sim.copy_out(kept).tolist() == [7] * 8
    assert data.tolist() == [PATTERN] * 8


def test_memory_let_go_by_the_last_work_is_filled_after_it(sim):
    """Its queue is empty by then, and the work still runs."""
    holder, seen = [sim.allocate(8, HERE)], []
    data = holder[0]._data
    data.fill(7)

    def let_go() -> None:
        holder.clear()
        gc.collect()
        seen.append(data.tolist())

    sim.stream(HERE).push("some work", let_go)
    sim.synchronize(HERE)
    assert seen == [[7] * 8]
    assert data.tolist() == [PATTERN] * 8
    assert sim.stream(HERE).idle


def test_a_stream_is_at_rest_only_once_its_last_work_has_run(sim):
    """At no moment in between, at which another thread may let memory go."""
    stream, seen = sim.stream(HERE), []

    class Watched(deque[Any]):
        def popleft(self) -> Any:
            work = super().popleft()
            seen.append(stream.idle)
            return work

    stream.queue = Watched()
    assert stream.idle
    stream.push("some work", lambda: seen.append(stream.idle))
    assert not stream.idle
    sim.synchronize(HERE)
    assert seen == [False, False]
    assert stream.idle
    stream.push("some work", raising(ValueError()))
    with pytest.raises(lk.KernelError):
        sim.synchronize(HERE)
    assert stream.idle
