"""Threads that share simulated devices: whose work fails, who is told, and what still runs."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.device import device, register_backend
from lazykv.testing.interleaved import in_step
from lazykv.testing.queued import adder, full

HERE, THERE = PLACES = [lk.DeviceLocation(f"sim:{n}") for n in range(2)]
FAILED = r"^copy from the host: got RuntimeError: a scripted failure"


@pytest.fixture
def backend() -> Iterator[SimBackend]:
    """A fresh one in place of the process's own, so that counts begin at 0."""
    before, made = device("sim:0").backend, SimBackend()
    register_backend("sim", made)
    yield made
    register_backend("sim", before)


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def zeros(place: lk.DeviceLocation = HERE) -> lk.Storage:
    return lk.Storage.from_array(full(0), place)


def value(store: lk.Storage) -> float:
    """Of a storage whose elements are equal, without waiting."""
    return value_of(store.array._data)


def value_of(data: np.ndarray) -> float:
    (found,) = set(data.tolist())
    return found


def give(backend: SimBackend, store: lk.Storage, number: float) -> None:
    backend.copy_in(store.array, full(number))


def give_failing(backend: SimBackend, store: lk.Storage) -> None:
    """The next copy that runs fails: nothing else may be queued."""
    assert all(backend.stream(p).idle for p in PLACES)
    backend.fail("copy", 1)
    give(backend, store, 1)


def test_a_failure_is_told_once_and_to_its_own_thread(backend, other):
    mine, theirs = zeros(), zeros()
    other.submit(give_failing, backend, theirs).result()
    give(backend, mine, 2)
    assert set(mine.to_numpy()) == {2}  # all of it has run
    assert backend.stream(HERE).idle
    with pytest.raises(lk.KernelError, match=FAILED):
        other.submit(backend.synchronize, HERE).result()
    for run in (other.submit(backend.synchronize, HERE).result, mine.to_numpy):
        run()


def test_only_work_of_the_thread_that_failed_is_dropped(backend, other):
    stores = [zeros() for _ in range(4)]
    other.submit(give_failing, backend, stores[0]).result()
    give(backend, stores[1], 2)
    other.submit(give, backend, stores[2], 3).result()
    give(backend, stores[3], 4)
    backend.synchronize(HERE)
    assert [value(s) for s in stores] == [0, 2, 0, 4]
    with pytest.raises(lk.KernelError, match=FAILED):
        other.submit(backend.synchronize, HERE).result()


def test_nothing_more_of_a_thread_runs_before_it_was_told(backend, other):
    stores = [zeros() for _ in range(3)]
    other.submit(give_failing, backend, stores[0]).result()
    backend.synchronize(HERE)  # it has failed, and its thread does not know yet
    other.submit(give, backend, stores[1], 2).result()
    backend.synchronize(HERE)
    with pytest.raises(lk.KernelError, match=FAILED):
        other.submit(backend.synchronize, HERE).result()
    other.submit(give, backend, stores[2], 3).result()
    other.submit(backend.synchronize, HERE).result()
    assert [value(s) for s in stores] == [0, 0, 3]


def test_a_thread_that_ended_without_waiting_leaves_nothing(backend):
    stores = [zeros() for _ in range(3)]
    with ThreadPoolExecutor(1) as ended:
        ended.submit(give_failing, backend, stores[0]).result()
        ended.submit(give, backend, stores[1], 2).result()
    give(backend, stores[2], 3)
    backend.synchronize(HERE)
    assert [value(s) for s in stores] == [0, 0, 3]
    with ThreadPoolExecutor(1) as later:
        later.submit(give, backend, stores[0], 4).result()
        assert set(later.submit(stores[0].to_numpy).result()) == {4}


def test_memory_that_is_let_go_behind_a_failure_is_freed(backend):
    used, lost, dest = backend.used_bytes(HERE), zeros(), zeros()
    give_failing(backend, dest)
    give(backend, lost, 2)
    data = lost.array._data
    del lost
    assert value_of(data) == 0
    with pytest.raises(lk.KernelError, match=FAILED):
        backend.synchronize(HERE)
    assert np.isnan(data).all()
    del dest
    assert backend.used_bytes(HERE) == used


# Two devices


def test_a_transfer_behind_a_failure_is_dropped_and_told_where_it_goes(backend):
    source, dest = zeros(), zeros(THERE)
    give_failing(backend, source)
    backend.transfer(dest.array, THERE, source.array, HERE)
    with pytest.raises(lk.KernelError, match=FAILED):
        backend.synchronize(THERE)  # which waits for the other device
    backend.synchronize(HERE)
    assert value(dest) == 0
    give(backend, source, 5)
    backend.transfer(dest.array, THERE, source.array, HERE)
    assert set(dest.to_numpy()) == {5}


@pytest.mark.parametrize("first", PLACES)
def test_events_are_reached_whatever_has_failed(backend, other, first):
    """Transfers of one thread wait for the queue of the other, in which work was dropped."""
    stores = [zeros(HERE), zeros(THERE), zeros(HERE)]
    lost = zeros()
    other.submit(give_failing, backend, lost).result()
    other.submit(backend.transfer, stores[1].array, THERE, lost.array, HERE).result()
    give(backend, stores[0], 3)
    backend.transfer(stores[1].array, THERE, stores[0].array, HERE)
    backend.transfer(stores[2].array, HERE, stores[1].array, THERE)
    for place in (first, *PLACES):
        backend.synchronize(place)
    assert [value(s) for s in stores] == [3, 3, 3]
    with pytest.raises(lk.KernelError, match=FAILED):
        other.submit(backend.synchronize, THERE).result()


# Captures


def test_a_replay_is_work_of_the_thread_that_asks_for_it(backend, other):
    source, dest = zeros(), zeros()
    work = adder(source, dest)
    capture = backend.capture(HERE, work.steps)
    backend.fail("kernel", 1)
    other.submit(capture.replay).result()
    backend.synchronize(HERE)  # it is not told
    with pytest.raises(lk.KernelError, match=r"^add_scalar on sim:0: got") as caught:
        other.submit(backend.synchronize, HERE).result()
    assert caught.value.op is work.op
    assert value(dest) == 0
    capture.replay()
    backend.synchronize(HERE)
    assert value(dest) == 1


def test_other_threads_go_on_during_a_capture(backend, other):
    store = zeros()

    def beside() -> None:
        give(backend, store, 1)
        backend.synchronize(HERE)
        assert value(store) == 1
        backend.allocate(8, HERE)

    capture = backend.capture(HERE, [(lambda: other.submit(beside).result(), ())])
    assert capture.work == ()


def test_numbers_out_of_bounds_are_refused_in_replays():
    g = lk.Graph()
    x, at = g.placeholder((4,), "f32"), g.placeholder((), "i64")
    held = lk.Storage.from_array(np.arange(4, dtype=np.float32), "sim:0")
    where = lk.Storage.from_array(np.array(0), "sim:0")
    row = g.const(lk.Storage.from_array(np.full(1, 9, np.float32), "sim:0"))
    plan = lk.plan(x.write_slice_at(row, 0, at), {x: held, at: where}, "sim:0")
    plan.run()
    plan.capture()
    for bad in (4, -1, 2**40):
        with where.write() as array:
            device("sim:0").backend.copy_in(array, np.array(bad))
        with pytest.raises(lk.RangeError, match=f"^write_slice_at: got offset {bad}") as caught:
            plan.run()
        assert "write_slice_at" in caught.value.__notes__[0]
        assert held.to_numpy().tolist() == [9, 1, 2, 3]
    assert plan.captured


# Counting and freeing


def test_memory_is_counted_right_by_threads_that_take_turns(backend):
    def work(thread: int, n: int) -> None:
        for k in range(5):
            backend.allocate(3 ** (k + 4 * thread), HERE)

    in_step(work, 10)
    assert backend.used_bytes(HERE) == 0


def test_memory_let_go_while_its_last_work_begins_is_still_there(backend):
    """Another thread lets go of the source between the end of the queue and the work itself."""
    source, dest = lk.Storage.from_array(full(3), HERE), zeros()
    held = [source]

    class Queue(deque):
        def popleft(self):
            work = super().popleft()
            held.clear()
            return work

    backend.stream(HERE).queue = Queue()
    backend.transfer(dest.array, HERE, source.array, HERE)
    del source
    backend.synchronize(HERE)
    assert value(dest) == 3
