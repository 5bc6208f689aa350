"""A kernel that fails says so: typed and named, at the latest to whoever waits, and once."""

import numpy as np
import pytest

from lazykv.compiler.plan import Plan
from lazykv.errors import KernelError
from lazykv.graph import Graph
from lazykv.storage import Storage
from lazykv.testing.compare import check_bits
from lazykv.testing.failing import PURPOSE, fail, plan_to_fail, run_and_wait
from lazykv.testing.golden import Array
from lazykv.testing.target import Target


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


def test_a_failure_reaches_whoever_waits_and_only_once(target: Target) -> None:
    target.need("f32")
    store = target.storage(zeros())
    made = failing_write(target, store)
    with pytest.raises(KernelError, match=PURPOSE):
        run_and_wait(made)
    target.backend.synchronize(target.location)  # it was told
    check_bits("other memory afterwards", target.storage(zeros() + 1).to_numpy(), zeros() + 1)


def test_work_after_a_failure_runs(target: Target) -> None:
    target.need("f32")
    store = target.storage(zeros())
    made = failing_write(target, store)
    for n in range(3):
        with pytest.raises(KernelError, match=PURPOSE):
            run_and_wait(made)
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
    made = plan_to_fail(target, [fail(written)], {y: first})
    for n in range(3):
        with pytest.raises(KernelError, match=PURPOSE):
            made.run({x: zeros() + n})
        check_bits(f"the write before failure {n}", first.to_numpy(), zeros() + n + 1)
