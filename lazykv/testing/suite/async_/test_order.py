"""What is given to a location happens in order, whoever waits and whenever.

A backend that runs everything at once passes these without effort.
"""

import gc
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pytest

from lazykv.device import DeviceLocation
from lazykv.dtypes import dtype as find_dtype
from lazykv.graph import Graph, Tensor
from lazykv.layout import Layout
from lazykv.ops.write import WriteSlice, WriteSliceDoff
from lazykv.runtime.realize import realize
from lazykv.storage import Storage
from lazykv.symbols import ScalarSlot
from lazykv.testing.compare import check_bits
from lazykv.testing.queued import N, Queued, adder, empty, full
from lazykv.testing.target import Target

# One location


def test_a_host_array_may_change_as_soon_as_copy_in_returns(target: Target) -> None:
    stores, staging = [empty(target) for _ in range(4)], full(0)
    for n, store in enumerate(stores):
        staging[:] = n
        target.backend.copy_in(store.array, staging)
    staging[:] = -1
    for n, store in enumerate(stores):
        check_bits(f"copy {n} from one staging array", store.to_numpy(), full(n))


def test_values_of_symbols_are_those_of_their_own_launch(target: Target) -> None:
    """The list has other values when the queue gets there."""
    dest, row = target.storage(np.zeros((5, N), np.float32)), empty_row(target)
    written = Queued(WriteSlice((ScalarSlot(0), 0), (1, N)), [dest, row], dest, [0])
    for n in (3, 0, 4, 1, 2):
        target.backend.copy_in(row.array, full(n).reshape(1, N))
        written.scalars[0] = n
        written.give()
    written.scalars[0] = 0
    want = np.repeat(np.arange(5, dtype=np.float32)[:, None], N, 1)
    check_bits("rows at symbols", dest.to_numpy(), want)


def test_offsets_in_memory_are_those_of_their_own_launch(target: Target) -> None:
    target.need("i64")
    dest, row = target.storage(np.zeros((5, N), np.float32)), empty_row(target)
    at = target.storage(np.array(0))
    written = Queued(WriteSliceDoff(0), [dest, row, at], dest)
    position = np.array(0)
    for n in (3, 0, 4, 1, 2):
        target.backend.copy_in(row.array, full(n).reshape(1, N))
        position[...] = n
        target.backend.copy_in(at.array, position)
        written.give()
    want = np.repeat(np.arange(5, dtype=np.float32)[:, None], N, 1)
    check_bits("rows at offsets in memory", dest.to_numpy(), want)


def empty_row(target: Target) -> Storage:
    target.need("f32")
    return Storage.allocate((1, N), "f32", target.location)


def test_the_last_of_many_copies_stands(target: Target) -> None:
    store = empty(target)
    for n in range(20):
        target.backend.copy_in(store.array, full(n))
    check_bits("twenty copies to one place", store.to_numpy(), full(19))


def test_copies_and_kernels_take_turns(target: Target) -> None:
    source, results = empty(target), [empty(target) for _ in range(4)]
    for n, dest in enumerate(results):
        target.backend.copy_in(source.array, full(10 * n))
        adder(source, dest).give()
        target.backend.copy_in(source.array, full(-1))
    for n, dest in enumerate(results):
        check_bits(f"turn {n}", dest.to_numpy(), full(10 * n + 1))


def test_a_chain_of_kernels_runs_in_order(target: Target) -> None:
    stores = [target.storage(full(0)) for _ in range(6)]
    links = [adder(a, b) for a, b in pairwise(stores)]
    for link in links:
        link.give()
    check_bits("the end of a chain of five", stores[-1].to_numpy(), full(5))
    for link in reversed(links):  # now each reads what the chain has left
        link.give()
    check_bits("a chain backwards", stores[-1].to_numpy(), full(5))


def test_memory_that_was_let_go_is_still_there_for_queued_work(target: Target) -> None:
    source, dest = target.storage(full(7)), empty(target)
    work = adder(source, dest)
    work.give()
    del source, work
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


# Two locations

Ends: TypeAlias = tuple[DeviceLocation, DeviceLocation]


@pytest.fixture(params=["there", "back"])
def ends(request: pytest.FixtureRequest, target: Target) -> Ends:
    """Where a transfer comes from and where it goes, in both directions."""
    both = target.location, target.other_location()
    return both if request.param == "there" else both[::-1]


def test_a_transfer_waits_for_the_work_before_it(target: Target, ends: Ends) -> None:
    giver, taker = ends
    source, middle = target.storage(full(1), giver), empty(target, giver)
    dest = empty(target, taker)
    adder(source, middle).give()
    target.backend.transfer(dest.array, taker, middle.array, giver)
    check_bits("what was computed before a transfer", dest.to_numpy(), full(2))


def test_the_source_is_not_overwritten_before_it_is_copied(target: Target, ends: Ends) -> None:
    giver, taker = ends
    source, dest = target.storage(full(1), giver), empty(target, taker)
    target.backend.transfer(dest.array, taker, source.array, giver)
    target.backend.copy_in(source.array, full(9))
    target.backend.synchronize(giver)  # the giver alone is waited for
    check_bits("a copy of what was overwritten later", dest.to_numpy(), full(1))
    check_bits("the source", source.to_numpy(), full(9))


def test_work_on_the_destination_before_a_transfer_sees_the_old_bytes(
    target: Target, ends: Ends
) -> None:
    giver, taker = ends
    source, dest = target.storage(full(5), giver), target.storage(full(1), taker)
    kept = empty(target, taker)
    adder(dest, kept).give()
    target.backend.transfer(dest.array, taker, source.array, giver)
    check_bits("made of the destination before", kept.to_numpy(), full(2))
    check_bits("the destination", dest.to_numpy(), full(5))


def test_work_after_a_transfer_sees_the_new_bytes(target: Target, ends: Ends) -> None:
    giver, taker = ends
    source, dest = target.storage(full(5), giver), target.storage(full(1), taker)
    made = empty(target, taker)
    target.backend.transfer(dest.array, taker, source.array, giver)
    adder(dest, made).give()
    check_bits("made of the destination after", made.to_numpy(), full(6))


def test_there_and_back(target: Target) -> None:
    there = target.other_location()
    stores = [target.storage(full(0)), *(empty(target, p) for p in (there, target.location))]
    a, b, c = stores
    for n in range(5):
        target.backend.copy_in(a.array, full(n))
        target.backend.transfer(b.array, there, a.array, target.location)
        target.backend.transfer(c.array, target.location, b.array, there)
        adder(c, a).give()
    check_bits("five rounds of two transfers", a.to_numpy(), full(5))


def test_a_transfer_goes_through_views(target: Target, ends: Ends) -> None:
    giver, taker = ends
    data = np.arange(N, dtype=np.float32)
    source, dest = target.storage(data, giver), target.storage(full(-1), taker)
    f32 = find_dtype("f32")
    every_second = target.backend.view(source.array, f32, Layout(1, (4, 5), (8, 2)))
    columns = target.backend.view(dest.array, f32, Layout(3, (4, 5), (1, 9)))
    target.backend.transfer(columns, taker, every_second, giver)
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
