"""A kernel that fails says so: typed and named, at the latest to whoever waits, and once."""

import numpy as np
import pytest

from lazykv.compiler.plan import Plan
from lazykv.errors import KernelError
from lazykv.graph import Graph
from lazykv.storage import Storage
from lazykv.testing.compare import check_bits
from lazykv.testing.failing import PURPOSE, fail, plan_to_fail
from lazykv.testing.golden import Array
from lazykv.testing.queued import KINDS, Told, adder, empty, failing, full
from lazykv.testing.target import Target

# A pass of a plan, which waits


def zeros() -> Array:
    return np.zeros((4,), np.float32)


def failing_write(target: Target, store: Storage) -> Plan:
    """A plan that hands nothing back and fails before it writes."""
    g = Graph()
    x, y = g.const(target.storage(zeros())), g.placeholder((4,), "f32")
    return plan_to_fail(target, [], {y: store}, effects=[y.at[:].set(fail(x))])


def test_a_failure_is_typed_and_names_the_op(target: Target) -> None:
    target.need("f32")
    g = Graph()
    x = g.const(target.storage(zeros()))
    made = plan_to_fail(target, [fail(x) + 1.0])
    with pytest.raises(KernelError, match=r"fail.*f32\[4\]") as caught:
        made.run()
    assert PURPOSE in str(caught.value), "the message says what the kernel said"


def test_a_pass_that_hands_nothing_back_is_told_of_its_failure_once(target: Target) -> None:
    target.need("f32")
    store = target.storage(zeros())
    made = failing_write(target, store)
    with pytest.raises(KernelError, match=PURPOSE):
        made.run()
    target.backend.synchronize(target.location)  # it was told
    check_bits("what it would have written", store.to_numpy(), zeros())
    check_bits("other memory afterwards", target.storage(zeros() + 1).to_numpy(), zeros() + 1)


def test_passes_after_a_failure_run(target: Target) -> None:
    target.need("f32")
    store = target.storage(zeros())
    made = failing_write(target, store)
    for n in range(3):
        with pytest.raises(KernelError, match=PURPOSE):
            made.run()
        g = Graph()
        x = g.placeholder((4,), "f32")
        got = target.run(x + 1.0, {x: target.storage(zeros() + n)})
        check_bits(f"a pass after failure {n}", got, zeros() + n + 1)


def test_a_plan_that_failed_runs_again(target: Target) -> None:
    """The same plan, whose failing kernel comes last: what came before has been done."""
    target.need("f32")
    g = Graph()
    x, y = g.placeholder((4,), "f32"), g.placeholder((4,), "f32")
    first = target.storage(zeros())
    written = y.at[:].set(x + 1.0)
    made = plan_to_fail(target, [fail(written)], {x: zeros(), y: first})
    for n in range(3):
        with pytest.raises(KernelError, match=PURPOSE):
            made.run({x: zeros() + n})
        check_bits(f"the write before failure {n}", first.to_numpy(), zeros() + n + 1)


# Work that nobody has waited for


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_waits_for_failed_work_is_told_once(target: Target, kind: str) -> None:
    work = failing(target, kind)
    for _ in range(2):
        told = Told(target, work)
        told.give()
        for _ in range(2):
            told.wait()
        told.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_to_the_host_tells_too(target: Target, kind: str) -> None:
    other = target.storage(full(3))
    told = Told(target, failing(target, kind))
    told.give()
    told.copy_out(other)
    told.wait()
    told.check()
    check_bits("other memory", other.to_numpy(), full(3))


@pytest.mark.parametrize("kind", KINDS)
def test_work_behind_a_failure_does_not_run_unless_the_error_says_so(
    target: Target, kind: str
) -> None:
    """By that the compiler knows which storages still hold what they did."""
    source, dest = target.storage(full(1)), target.storage(full(0))
    told, behind = Told(target, failing(target, kind)), adder(source, dest)
    told.give()
    if told.at_once is None:
        behind.give()
    told.wait()
    told.check()
    if not any(e.refused for e in told.later):
        check_bits("what work behind a failure writes", dest.to_numpy(), full(0))
    behind.give()
    check_bits("the same work given again", dest.to_numpy(), full(2))


# Two locations


@pytest.mark.parametrize("kind", KINDS)
def test_failures_are_told_by_every_location(target: Target, kind: str) -> None:
    target.other_location()
    for place in target.backend.locations():
        told = Told(target, failing(target, kind, place))
        told.give()
        told.wait(place)
        told.check()
        told.wait(place)
        told.check()


@pytest.mark.parametrize("waits", ["failed first", "good first"])
@pytest.mark.parametrize("place", ["there", "here"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_leaves_work_of_the_other_location_alone(
    target: Target, kind: str, place: str, waits: str
) -> None:
    good, bad = target.location, target.other_location()
    if place == "here":
        good, bad = bad, good
    source, before, behind = target.storage(full(1), good), empty(target, good), empty(target, good)
    told = Told(target, failing(target, kind, bad))
    adder(source, before).give()
    told.give()
    adder(source, behind).give()
    if waits == "failed first":
        told.wait(bad)
    check_bits("work given before a failure elsewhere", before.to_numpy(), full(2))
    check_bits("work given behind a failure elsewhere", behind.to_numpy(), full(2))
    if waits != "failed first":
        told.wait(bad)
    told.check()


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_go_on_after_a_failure_on_one_end(target: Target, kind: str) -> None:
    there = target.other_location()
    for giver, taker in ((target.location, there), (there, target.location)):
        source, dest = target.storage(full(1), giver), empty(target, taker)
        told = Told(target, failing(target, kind, giver))
        told.give()
        target.backend.transfer(dest.array, taker, source.array, giver)
        told.wait(taker)
        told.wait(giver)
        told.check()
        target.backend.transfer(dest.array, taker, source.array, giver)
        check_bits("a transfer after the failure was told", dest.to_numpy(), full(1))
