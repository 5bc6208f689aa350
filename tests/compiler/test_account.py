"""What a failed pass says, and what it leaves of the storages it writes."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.compiler.failures import account
from lazykv.compiler.plan import Plan
from lazykv.device import device, register_backend
from lazykv.errors import LazyKvError
from lazykv.runtime.realize import plan as make_plan
from lazykv.testing.failing import fail


def zeros(place: str = "cpu") -> lk.Storage:
    return lk.Storage.from_array(np.zeros(2, np.float32), place)


class Writes:
    """A plan that writes three storages, one after another, in its steps 1, 3 and 5."""

    def __init__(self) -> None:
        g = lk.Graph()
        dests = [g.placeholder((2,), "f32", n) for n in "abc"]
        self.stores = [zeros() for _ in dests]
        made = [d.at[:].set(d.exp()) for d in dests]
        bound = dict(zip(dests, self.stores, strict=True))
        self.plan: Plan = make_plan([], bound, "cpu", effects=made)
        assert [s.op.name for s in self.plan.steps] == ["exp", "write_slice"] * 3

    def account(
        self, e: BaseException, at: int, *, op: int | None = None, refused: tuple[int, ...] = (),
        tears: bool = True,
    ) -> BaseException:  # fmt: skip
        """Of an error at a step, which names the op of one and the ops of those that refused."""
        steps = self.plan.steps
        if isinstance(e, LazyKvError):
            e.op = None if op is None else steps[op].op
            e.refused = tuple(steps[n].op for n in refused) or None
        return account(e, self.plan.program, self.stores, at, tears=tears)

    @property
    def left(self) -> list[tuple[int, bool]]:
        """Version and state of the storages."""
        return [(s.version, s.torn) for s in self.stores]


UNTOUCHED, COUNTED, TORN, BOTH = (0, False), (1, False), (0, True), (1, True)


@pytest.mark.parametrize(
    ("at", "left"),
    [(0, [UNTOUCHED] * 3), (1, [TORN, UNTOUCHED, UNTOUCHED]), (2, [COUNTED, UNTOUCHED, UNTOUCHED]),
     (3, [COUNTED, TORN, UNTOUCHED]), (5, [COUNTED, COUNTED, TORN])],
)  # fmt: skip
def test_a_failed_step_tears_what_it_writes_and_counts_what_was_written(at, left):
    w = Writes()
    error = w.account(ValueError("why"), at)
    assert w.left == left
    assert isinstance(error, lk.KernelError)
    name = w.plan.steps[at].op.name
    assert str(error).startswith(f"{name}[")
    assert f"ValueError: why in step {at}" in str(error)


def test_running_out_of_memory_stays_that():
    w = Writes()
    for e in (MemoryError("much"), lk.OutOfMemory("much")):
        error = w.account(e, 1)
        assert isinstance(error, lk.OutOfMemory)
        assert "much in step 1" in str(error)
    assert w.left == [TORN, UNTOUCHED, UNTOUCHED]


def test_a_refusal_has_written_nothing():
    w, e = Writes(), lk.RangeError("offset 9")
    assert w.account(e, 3) is e
    step = w.plan.steps[3]
    assert e.__notes__ == [f"in write_slice[{step.node}] of (f32[2], f32[2]), step 3 of its plan"]
    assert w.left == [COUNTED, UNTOUCHED, UNTOUCHED]


def test_an_interruption_stays_itself_and_tears():
    w, e = Writes(), KeyboardInterrupt()
    assert w.account(e, 3) is e
    assert w.left == [COUNTED, TORN, UNTOUCHED]


def test_a_plan_whose_failures_tear_nothing():
    w = Writes()
    w.account(ValueError("why"), 3, tears=False)
    assert w.left == [COUNTED, UNTOUCHED, UNTOUCHED]


def test_a_queued_failure_is_of_the_step_that_it_names():
    """The host was further, but nothing behind the failed step has run."""
    w = Writes()
    error = w.account(lk.KernelError("late"), 5, op=1)
    assert w.left == [TORN, UNTOUCHED, UNTOUCHED]
    assert "late in step 1" in str(error)
    assert isinstance(error, lk.KernelError)
    assert error.op is w.plan.steps[1].op


def test_a_failure_that_names_an_op_of_others_is_where_the_host_was():
    w, e = Writes(), lk.KernelError("late")
    e.op = lk.Graph().placeholder((2,), "f32").exp().op
    account(e, w.plan.program, w.stores, 4, tears=True)
    assert w.left == [COUNTED, COUNTED, UNTOUCHED]


@pytest.mark.parametrize(
    ("op", "refused", "at", "left"),
    [
        # Behind the refusal of an exp: its own write and all after it got what it had left.
        (0, (0,), 5, [BOTH, BOTH, BOTH]),
        (2, (2,), 5, [COUNTED, BOTH, BOTH]),
        (4, (4,), 5, [COUNTED, COUNTED, BOTH]),
        # A write that refused has written nothing; those behind it have.
        (1, (1,), 5, [UNTOUCHED, BOTH, BOTH]),
        (1, (1, 3), 5, [UNTOUCHED, UNTOUCHED, BOTH]),
        (1, (1, 5), 5, [UNTOUCHED, BOTH, UNTOUCHED]),
        (1, (1, 3, 5), 5, [UNTOUCHED, UNTOUCHED, UNTOUCHED]),
        # The host had given no more than the steps up to here.
        (1, (1,), 3, [UNTOUCHED, BOTH, UNTOUCHED]),
        (1, (1,), 1, [UNTOUCHED, UNTOUCHED, UNTOUCHED]),
    ],
)  # fmt: skip
def test_steps_behind_a_late_refusal_tear_unless_they_refused_too(op, refused, at, left):
    w, e = Writes(), lk.RangeError("id 9")
    assert w.account(e, at, op=op, refused=refused) is e
    assert w.left == left


def test_steps_behind_a_late_refusal_are_counted_where_nothing_tears():
    w = Writes()
    w.account(lk.RangeError("id 9"), 5, op=1, refused=(1,), tears=False)
    assert w.left == [UNTOUCHED, COUNTED, COUNTED]


@pytest.mark.parametrize(
    ("error", "op", "refused", "left"),
    [(lk.KernelError, 1, (), [BOTH, UNTOUCHED, UNTOUCHED]),
     (lk.KernelError, 0, (), [COUNTED, UNTOUCHED, UNTOUCHED]),
     (lk.RangeError, 1, (), [COUNTED, UNTOUCHED, UNTOUCHED]),
     (lk.RangeError, 0, (0,), [BOTH, UNTOUCHED, UNTOUCHED]),
     (lk.RangeError, 1, (1,), [COUNTED, UNTOUCHED, UNTOUCHED]),
     (lk.RangeError, None, (), [COUNTED, UNTOUCHED, UNTOUCHED])],
)  # fmt: skip
def test_a_second_failure_that_nobody_is_told_of_tears_too(error, op, refused, left):
    w, other = Writes(), error("as well")
    other.op = None if op is None else w.plan.steps[op].op
    other.refused = tuple(w.plan.steps[n].op for n in refused) or None
    for tears in (False, True):
        for s in w.stores:
            s.version = 0
        account(lk.RangeError("told"), w.plan.program, w.stores, 2, tears=tears, others=[other])
        assert w.left == (left if tears else [COUNTED, UNTOUCHED, UNTOUCHED])


# A pass waits for all that it gave


@pytest.fixture
def sim() -> Iterator[SimBackend]:
    """A fresh one in place of the process's own."""
    before, made = device("sim:0").backend, SimBackend()
    register_backend("sim", made)
    yield made
    register_backend("sim", before)


def alone(x: lk.Tensor, y: lk.Tensor) -> list[lk.Tensor]:
    return []


def behind_a_result(x: lk.Tensor, y: lk.Tensor) -> list[lk.Tensor]:
    """The old bytes are handed out before they are written."""
    return [x]


def beside_a_result_elsewhere(x: lk.Tensor, y: lk.Tensor) -> list[lk.Tensor]:
    """Whoever waits for the other device does not wait for the write."""
    return [(y + 1.0).to("sim:1")]


@pytest.mark.parametrize("results", [alone, behind_a_result, beside_a_result_elsewhere])
def test_a_pass_is_told_of_a_write_that_fails(
    sim: SimBackend, results: Callable[[lk.Tensor, lk.Tensor], list[lk.Tensor]]
) -> None:
    g = lk.Graph()
    x, y = (g.placeholder((2,), "f32") for _ in range(2))
    held, other = zeros("sim:0"), zeros("sim:0")
    bound = {x: held, y: other}
    made = make_plan(results(x, y), bound, "sim:0", effects=[x.at[:].set(x.exp())])
    before = sim.counts["kernel"]
    made.run()
    for place in sim.locations():
        sim.synchronize(place)
    kernels = sim.counts["kernel"] - before
    sim.fail("kernel", kernels)
    with pytest.raises(lk.KernelError, match=r"^write_slice"):
        made.run()
    assert held.torn
    for place in sim.locations():
        sim.synchronize(place)  # it was told


@pytest.mark.parametrize("kernel", [1, 2])
def test_what_a_failed_pass_had_queued_elsewhere_is_waited_for(
    sim: SimBackend, kernel: int
) -> None:
    """A kernel of the host fails at once, and one of the device has been given before it."""
    g = lk.Graph()
    x, y, z = (g.placeholder((2,), "f32") for _ in range(3))
    bound = {x: zeros("sim:0"), y: zeros(), z: zeros()}
    writes = [x.at[:].set(x.exp()), y.at[:].set(fail(z))]
    made = make_plan([], bound, "cpu", effects=writes)
    assert [s.op.name for s in made.steps] == ["exp", "write_slice", "fail", "write_slice"]
    sim.fail("kernel", kernel)
    with pytest.raises(lk.KernelError, match=r"^fail\["):
        made.run()
    assert sim.stream(lk.DeviceLocation("sim:0")).idle
    sim.synchronize(lk.DeviceLocation("sim:0"))  # it is over
    assert [bound[t].torn for t in (x, y)] == [kernel == 2, False]
