"""What is given to a location happens in order, whoever waits and whenever.

A backend that runs everything at once passes these without effort.
"""

import gc
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lazykv.compiler.plan import Plan
from lazykv.dtypes import dtype as find_dtype
from lazykv.graph import Graph, Tensor
from lazykv.layout import Layout
from lazykv.runtime.realize import plan, realize
from lazykv.storage import Storage
from lazykv.symbols import Sym
from lazykv.testing.compare import check_bits
from lazykv.testing.golden import Array
from lazykv.testing.target import Target

N = 64


def full(value: float) -> Array:
    return np.full(N, value, np.float32)


def empty(target: Target, place: Any = None) -> Storage:
    target.need("f32")
    return Storage.allocate((N,), "f32", place or target.location)


def writer(target: Target, source: Storage, dest: Storage) -> Plan:
    """A plan that puts ``source + 1`` into dest, and hands nothing back."""
    g = Graph()
    x, y = g.const(source), g.placeholder(dest.shape, dest.dtype)
    return plan([], {y: dest}, dest.location, effects=[y.at[:].set(x + 1.0)])


# One location


def test_a_host_array_may_change_as_soon_as_copy_in_returns(target: Target) -> None:
    stores, staging = [empty(target) for _ in range(4)], full(0)
    for n, store in enumerate(stores):
        staging[:] = n
        target.backend.copy_in(store.array, staging)
    staging[:] = -1
    for n, store in enumerate(stores):
        check_bits(f"copy {n} from one staging array", store.to_numpy(), full(n))


def test_a_bound_array_may_change_as_soon_as_run_returns(target: Target) -> None:
    dest = target.storage(np.zeros((5, N), np.float32))
    g = Graph()
    y, row, at = g.placeholder((5, N), "f32"), g.placeholder((1, N), "f32"), Sym("at", 0, 4)
    made = plan([], {y: dest}, target.location, effects=[y.at[at : at + 1, :].set(row)])
    staging = full(0).reshape(1, N)
    for n in range(5):
        staging[:] = n
        made.run({row: staging}, {at: n})
    staging[:] = -1
    want = np.repeat(np.arange(5, dtype=np.float32)[:, None], N, 1)
    check_bits("rows from one staging array, at symbols", dest.to_numpy(), want)


def test_offsets_in_memory_are_those_of_their_own_pass(target: Target) -> None:
    target.need("f32", "i64")
    dest = target.storage(np.zeros((5, N), np.float32))
    g = Graph()
    y, row = g.placeholder((5, N), "f32"), g.placeholder((1, N), "f32")
    at = g.placeholder((), "i64")
    made = plan([], {y: dest}, target.location, effects=[y.write_slice_at(row, 0, at)])
    position = np.array(0)
    for n in (3, 0, 4, 1, 2):
        position[...] = n
        made.run({row: full(n).reshape(1, N), at: position})
    want = np.repeat(np.arange(5, dtype=np.float32)[:, None], N, 1)
    check_bits("rows at offsets in memory", dest.to_numpy(), want)


def test_the_last_of_many_copies_stands(target: Target) -> None:
    store = empty(target)
    for n in range(20):
        target.backend.copy_in(store.array, full(n))
    check_bits("twenty copies to one place", store.to_numpy(), full(19))


def test_copies_and_kernels_take_turns(target: Target) -> None:
    source, dest = empty(target), empty(target)
    made = writer(target, source, dest)
    seen = []
    for n in range(4):
        target.backend.copy_in(source.array, full(10 * n))
        made.run()
        target.backend.copy_in(source.array, full(-1))
        seen.append(dest.to_numpy())
    for n, got in enumerate(seen):
        check_bits(f"pass {n}", got, full(10 * n + 1))


def test_a_chain_of_passes_runs_in_order(target: Target) -> None:
    """Nobody waits between them."""
    stores = [target.storage(full(0)) for _ in range(6)]
    plans = [writer(target, a, b) for a, b in pairwise(stores)]
    for made in plans:
        made.run()
    check_bits("the end of a chain of five", stores[-1].to_numpy(), full(5))
    for made in reversed(plans):  # now every pass reads what the chain has left
        made.run()
    check_bits("a chain backwards", stores[-1].to_numpy(), full(5))


def test_memory_that_was_let_go_is_still_there_for_queued_work(target: Target) -> None:
    dest = empty(target)
    source = target.storage(full(7))
    target.backend.synchronize(target.location)
    writer(target, source, dest).run()
    del source
    gc.collect()
    others = [empty(target) for _ in range(4)]
    for other in others:
        target.backend.copy_in(other.array, full(-1))
    check_bits("what was made of memory let go", dest.to_numpy(), full(8))


def test_waiting_twice_or_for_nothing_is_no_error(target: Target) -> None:
    for place in target.backend.locations():
        target.backend.synchronize(place)
    store = target.storage(full(3))
    target.backend.synchronize(target.location)
    target.backend.synchronize(target.location)
    check_bits("after waiting", store.to_numpy(), full(3))


def test_threads_with_plans_of_their_own_do_not_meet(target: Target) -> None:
    results: dict[int, list[Array]] = {}

    def work(n: int, source: Storage, made: Plan, dest: Storage) -> None:
        results[n] = []
        for i in range(10):
            target.backend.copy_in(source.array, full(100 * n + i))
            made.run()
            results[n].append(dest.to_numpy())

    pairs = [(empty(target), empty(target)) for _ in range(3)]
    threads = [
        threading.Thread(target=work, args=(n, a, writer(target, a, b), b))
        for n, (a, b) in enumerate(pairs)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for n in range(3):
        assert len(results[n]) == 10, f"thread {n} ended early"
        for i, got in enumerate(results[n]):
            check_bits(f"thread {n}, pass {i}", got, full(100 * n + i + 1))


# Two locations


def test_a_transfer_waits_for_the_work_before_it(target: Target) -> None:
    there = target.other_location()
    source, middle, dest = target.storage(full(1)), empty(target), empty(target, there)
    writer(target, source, middle).run()
    target.backend.transfer(dest.array, there, middle.array, target.location)
    check_bits("what was computed before a transfer", dest.to_numpy(), full(2))


def test_the_source_is_not_overwritten_before_it_is_copied(target: Target) -> None:
    there = target.other_location()
    source, dest = target.storage(full(1)), empty(target, there)
    target.backend.transfer(dest.array, there, source.array, target.location)
    target.backend.copy_in(source.array, full(9))
    target.backend.synchronize(target.location)  # the giver alone is waited for
    check_bits("a copy of what was overwritten later", dest.to_numpy(), full(1))
    check_bits("the source", source.to_numpy(), full(9))


def test_work_on_the_destination_before_a_transfer_sees_the_old_bytes(target: Target) -> None:
    there = target.other_location()
    source, dest = target.storage(full(5)), target.storage(full(1), there)
    kept = empty(target, there)
    writer(target, dest, kept).run()
    target.backend.transfer(dest.array, there, source.array, target.location)
    check_bits("made of the destination before", kept.to_numpy(), full(2))
    check_bits("the destination", dest.to_numpy(), full(5))


def test_work_after_a_transfer_sees_the_new_bytes(target: Target) -> None:
    there = target.other_location()
    source, dest = target.storage(full(5)), target.storage(full(1), there)
    made = empty(target, there)
    target.backend.transfer(dest.array, there, source.array, target.location)
    writer(target, dest, made).run()
    check_bits("made of the destination after", made.to_numpy(), full(6))


def test_there_and_back(target: Target) -> None:
    there = target.other_location()
    stores = [target.storage(full(0)), *(empty(target, p) for p in (there, target.location))]
    for n in range(5):
        a, b, c = stores
        target.backend.copy_in(a.array, full(n))
        target.backend.transfer(b.array, there, a.array, target.location)
        target.backend.transfer(c.array, target.location, b.array, there)
        writer(target, c, a).run()
    check_bits("five rounds of two transfers", stores[0].to_numpy(), full(5))


def test_a_transfer_goes_through_views(target: Target) -> None:
    there = target.other_location()
    data = np.arange(N, dtype=np.float32)
    source, dest = target.storage(data), target.storage(full(-1), there)
    f32 = find_dtype("f32")
    every_second = target.backend.view(source.array, f32, Layout(1, (4, 5), (8, 2)))
    columns = target.backend.view(dest.array, f32, Layout(3, (4, 5), (1, 9)))
    target.backend.transfer(columns, there, every_second, target.location)
    want = full(-1)
    for i, j in np.ndindex(4, 5):
        want[3 + i + 9 * j] = data[1 + 8 * i + 2 * j]
    check_bits("a transfer between strided views", dest.to_numpy(), want)


@pytest.mark.parametrize("back", [False, True])
def test_operands_of_two_locations_get_copies(target: Target, back: bool) -> None:
    there = target.other_location()
    target.need("f32")
    g = Graph()
    x, y = (g.placeholder((N,), "f32", n) for n in "xy")
    total: Tensor = (x * 2.0).to(there) + y
    out = total.to(target.location) * x if back else total
    stores = {x: target.storage(full(3)), y: target.storage(full(1), there)}
    for _ in range(3):
        got = realize(out, stores, device=target.location)
        check_bits("a sum over two locations", got, full(21 if back else 7))
