"""Locks that end elsewhere than they began: in another thread, by a collector, after a thread."""

import gc
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import lazykv as lk
from lazykv import locks
from lazykv.errors import StorageLockError, StorageTornError
from lazykv.storage import acquire_all, release_all


def storage() -> lk.Storage:
    return lk.Storage.from_array(np.arange(4, dtype=np.float32))


def rows_of(store: lk.Storage) -> Iterator[float]:
    with store.read() as a:
        yield from a.tolist()


def filled(store: lk.Storage) -> Iterator[None]:
    with store.write() as a:
        a[...] = 7
        yield


def elsewhere(f: Callable[[], object]) -> None:
    """Run `f` in a thread of its own to its end; what it raises is raised here."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            f()
        except BaseException as e:
            failures.append(e)

    t = threading.Thread(target=guarded, daemon=True)
    t.start()
    t.join(20)
    assert not t.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def write(store: lk.Storage, value: float = 5) -> None:
    with store.write() as a:
        a[...] = value


def test_ST1_a_read_may_end_in_another_thread() -> None:
    store = storage()
    rows = rows_of(store)
    assert next(rows) == 0
    elsewhere(rows.close)  # type: ignore[attr-defined]
    elsewhere(lambda: write(store, 6))
    assert store.to_numpy().tolist() == [6] * 4


def test_ST1_a_read_that_is_collected_in_another_thread_ends_there() -> None:
    store = storage()
    cycle: list[object] = [rows_of(store)]
    assert next(cycle[0]) == 0  # type: ignore[call-overload]
    cycle.append(cycle)
    del cycle
    elsewhere(gc.collect)
    elsewhere(lambda: write(store))


def test_ST1_nested_reads_may_end_in_another_thread_one_by_one() -> None:
    store = storage()
    first, second = rows_of(store), rows_of(store)
    next(first), next(second)
    elsewhere(first.close)  # type: ignore[attr-defined]
    with pytest.raises(StorageLockError, match="own read"):
        write(store)
    elsewhere(second.close)  # type: ignore[attr-defined]
    elsewhere(lambda: write(store))


def test_ST1_a_write_may_end_in_another_thread() -> None:
    store = storage()
    block = filled(store)
    next(block)
    elsewhere(lambda: next(block, None))
    assert store.version == 1
    elsewhere(lambda: write(store))
    stopped = filled(store)
    next(stopped)
    elsewhere(stopped.close)  # type: ignore[attr-defined]
    with pytest.raises(StorageTornError):
        store.to_numpy()
    elsewhere(lambda: write(store))
    assert store.version == 3


def same_thread_number(first: Callable[[], object], then: Callable[[], object]) -> bool:
    """Run two functions in threads of which the system gave the second the number of the first."""
    numbers: list[int] = []
    elsewhere(lambda: (numbers.append(threading.get_ident()), first()))
    for _ in range(200):
        t = threading.Thread(target=lambda: threading.get_ident() in numbers and then())
        t.daemon = True
        t.start()
        reused = t.ident in numbers
        t.join(0.05)
        if reused:
            return True
    return False


@pytest.mark.parametrize("take", [rows_of, filled])
def test_a_later_thread_is_not_taken_for_one_that_is_gone(
    take: Callable[[lk.Storage], Iterator[object]],
) -> None:
    store, outcome, done = storage(), list[object](), threading.Event()
    held = take(store)

    def late() -> None:
        try:
            write(store)  # waits: no lock is this thread's own
            outcome.append(store.to_numpy()[0])
        except BaseException as e:
            outcome.append(e)
        done.set()

    if not same_thread_number(lambda: next(held), late):
        pytest.skip("this system gives no number twice")
    assert not outcome, "got in beside a lock, or was refused"
    held.close()  # type: ignore[attr-defined]
    assert done.wait(20)
    assert outcome == [5]


def test_threads_have_numbers_that_no_later_thread_gets() -> None:
    numbers = [locks.this_thread.number]
    for _ in range(50):
        elsewhere(lambda: numbers.append(locks.this_thread.number))
    assert len(set(numbers)) == 51
    assert locks.this_thread.number == numbers[0]


def test_a_nested_read_whose_outer_one_just_ended_waits_for_the_writer() -> None:
    lock = locks.ReadWriteLock()
    inside = threading.Event()
    done = threading.Event()

    def write_until_done() -> None:
        hold = locks.new_hold()
        lock.acquire_write(hold)
        inside.set()
        done.wait(20)
        lock.release(hold)

    threading.Thread(target=write_until_done, daemon=True).start()
    assert inside.wait(20)
    mine = locks.new_hold()
    assert not lock.nest(mine, locks.this_thread.number)
    assert not lock.nested
    reader = threading.Thread(target=lambda: lock.acquire_read(mine), daemon=True)
    reader.start()
    reader.join(0.05)
    assert reader.is_alive()
    done.set()
    reader.join(20)
    assert list(lock.holds) == [mine]


def test_a_writer_waits_for_nested_reads_whose_outer_ones_have_ended() -> None:
    store = storage()
    outer, nested = rows_of(store), rows_of(store)
    next(outer), next(nested)
    writer = threading.Thread(target=write, args=(store,), daemon=True)
    writer.start()
    outer.close()  # type: ignore[attr-defined]
    writer.join(0.05)
    assert writer.is_alive()
    assert list(nested) == [1, 2, 3]
    writer.join(20)
    assert store.to_numpy().tolist() == [5] * 4


def test_nobody_overtakes_in_the_queue() -> None:
    """A reader that comes after a waiting writer waits too, and a writer after that for both."""
    store, order = storage(), list[str]()
    first = rows_of(store)
    next(first)
    threads = []
    for n, name in enumerate(("write", "read", "read", "write")):

        def work(name: str = name) -> None:
            with store.write() if name == "write" else store.read():
                order.append(name)

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        while len(store.lock.bells) < n + 1:
            time.sleep(0.001)
    assert order == []
    first.close()  # type: ignore[attr-defined]
    for t in threads:
        t.join(20)
    assert order == ["write", "read", "read", "write"]


def test_who_waits_for_a_pass_is_woken_by_its_end() -> None:
    store = storage()
    claims = [(store, True)]
    acquire_all(claims, 1)
    writer = threading.Thread(target=write, args=(store,), daemon=True)
    writer.start()
    while not store.lock.bells:
        time.sleep(0.001)
    release_all(claims, 1)
    writer.join(20)
    assert not writer.is_alive()
    assert store.to_numpy().tolist() == [5] * 4


def test_a_pass_that_is_overtaken_while_it_takes_a_lock_waits() -> None:
    class Overtaken(dict[int, int]):
        def __setitem__(self, hold: int, thread: int) -> None:
            if hold == 1:
                super().__setitem__(2, -1000)
            super().__setitem__(hold, thread)

    store, taken = storage(), threading.Event()
    store.lock.holds = Overtaken()
    run = threading.Thread(
        target=lambda: (acquire_all([(store, True)], 1), taken.set()), daemon=True
    )
    run.start()
    assert not taken.wait(0.05)
    store.lock.release(2)
    assert taken.wait(20)


def test_ST1_many_threads_that_end_each_others_reads_never_see_half_a_write() -> None:
    store = lk.Storage.from_array(np.zeros(512, np.int64))
    stop = threading.Event()
    handed: list[Iterator[float]] = []
    failures: list[BaseException] = []

    def guarded(f: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                while not stop.is_set():
                    f()
            except BaseException as e:
                failures.append(e)

        return threading.Thread(target=run, daemon=True)

    def hand_over() -> None:
        rows = rows_of(store)
        next(rows)
        handed.append(rows)
        with store.read() as a:  # nested, while the other read may end elsewhere
            assert a.min() == a.max(), "half a write was seen"
        time.sleep(0)

    def close() -> None:
        if handed:
            rows = handed.pop()
            assert len(set(rows)) <= 1, "half a write was seen"
        time.sleep(0)

    def change() -> None:
        with store.write() as a:
            n = int(a[0]) + 1
            a[:256] = n
            time.sleep(0)
            a[256:] = n

    threads = [guarded(f) for f in (hand_over, close, close)]
    for t in threads:
        t.start()
    try:
        elsewhere(lambda: [change() for _ in range(200)])
    finally:
        stop.set()
        for t in threads:
            t.join(20)
    while handed:
        handed.pop().close()  # type: ignore[attr-defined]
    if failures:
        raise failures[0]
    assert store.version == 200
    assert not store.lock.holds
    assert not store.lock.nested
