"""Threads share a location: each gets its own results, and is told of its own failures alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import pytest

from lazykv.errors import RangeError
from lazykv.graph import Graph
from lazykv.runtime.realize import plan
from lazykv.testing.compare import check_bits
from lazykv.testing.golden import random_of
from lazykv.testing.interleaved import THREADS, in_step
from lazykv.testing.queued import KINDS, N, Told, adder, empty, failing, full
from lazykv.testing.target import Target


def test_threads_with_plans_of_their_own_do_not_meet(target: Target) -> None:
    """All do the same to memory of the same shape, at the same time."""
    target.need("f32")
    sources = [empty(target) for _ in range(THREADS)]
    plans = []
    for source in sources:
        g = Graph()
        x = g.placeholder((N,), "f32")
        plans.append(plan(x + 1.0 + 2.0 + 3.0 + 4.0, {x: source}, target.location))

    def work(thread: int, n: int) -> str | None:
        value = 1000 * thread + n
        target.backend.copy_in(sources[thread].array, full(value))
        got = plans[thread].run()
        strays = got[got != value + 10]
        return f"got {strays[0]}, need {value + 10}" if strays.size else None

    in_step(work, 5)


def test_results_and_refusals_of_threads_do_not_mix(target: Target) -> None:
    target.need("f32", "i64")
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    choose = random_of("ids of threads")
    ids = choose.integers(0, 8, (THREADS, ROUNDS))
    runs = []
    for _ in range(THREADS):
        g = Graph()
        at = g.placeholder((1,), "i64")
        made = plan(
            g.const(target.storage(rows)).take(at) * 2.0, {at: np.array([0])}, target.location
        )
        runs.append((made, at))

    def work(thread: int, n: int) -> str | None:
        (made, at), row = runs[thread], ids[thread, n]
        try:
            got = made.run({at: np.array([row])})
        except RangeError:
            return None if row >= len(rows) else f"row {row} was refused"
        if row >= len(rows):
            return f"got {got} of row {row}, need a RangeError"
        return None if (got == 2 * rows[row]).all() else f"got {got} of row {row}"

    in_step(work, ROUNDS)


ROUNDS = 12


# Failures


Threads: TypeAlias = tuple[ThreadPoolExecutor, ThreadPoolExecutor]


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Two threads that do what they are given."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        yield one, other


@pytest.mark.parametrize(
    "order",
    [
        "bad gives, good gives, bad waits, good waits",
        "bad gives, good gives, good waits, bad waits",
        "good gives, bad gives, bad waits, good waits",
        "good gives, bad gives, good waits, bad waits",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_told_to_the_thread_that_gave_the_work(
    target: Target, threads: Threads, kind: str, order: str
) -> None:
    bad, good = threads
    told = Told(target, failing(target, kind))
    source, dest = target.storage(full(1)), empty(target)
    work = adder(source, dest)
    does = {
        "bad gives": (bad, told.give), "bad waits": (bad, told.wait),
        "good gives": (good, work.give),
        "good waits": (good, lambda: target.backend.synchronize(target.location)),
    }  # fmt: skip
    for step in order.split(", "):
        thread, f = does[step]
        thread.submit(f).result()
    told.check()
    for thread in threads:
        got = thread.submit(dest.to_numpy).result()
        check_bits("what the other thread computed", got, full(2))
    after = empty(target)
    for thread in threads:  # both go on
        thread.submit(adder(dest, after).give).result()
        check_bits("work after the failure", thread.submit(after.to_numpy).result(), full(3))


@pytest.mark.parametrize("kind", KINDS)
def test_moving_other_data_collects_no_failure_of_another_thread(
    target: Target, threads: Threads, kind: str
) -> None:
    bad, third = threads
    told = Told(target, failing(target, kind))
    bad.submit(told.give).result()
    store = third.submit(target.storage, full(5)).result()
    check_bits("data of another thread", third.submit(store.to_numpy).result(), full(5))
    bad.submit(told.wait).result()
    told.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_of_a_thread_that_has_ended_is_told_to_no_other(
    target: Target, kind: str
) -> None:
    source, dest = target.storage(full(1)), empty(target)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(Told(target, failing(target, kind)).give).result()
    for _ in range(2):
        with ThreadPoolExecutor(1) as later:
            later.submit(adder(source, dest).give).result()
            check_bits("of a later thread", later.submit(dest.to_numpy).result(), full(2))
            later.submit(target.backend.copy_in, dest.array, full(0)).result()
    target.backend.synchronize(target.location)
