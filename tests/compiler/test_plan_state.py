"""What a plan knows after what was tried with it: its inputs, what can be read, its recording."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sim_faults import fresh_sim, interrupted

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.device import device, register_backend
from lazykv.ops.move import Copy

PLACE = lk.DeviceLocation("sim:0")
recorded_or_not = pytest.mark.parametrize("recorded", [False, True], ids=["walked", "recorded"])


@pytest.fixture
def sim() -> Iterator[SimBackend]:
    with fresh_sim() as made:
        yield made


@pytest.fixture(params=["cpu", "sim:0"])
def place(request: Any, sim: SimBackend) -> str:
    return request.param


def rows(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def storage(value: float, place: Any = PLACE) -> lk.Storage:
    return lk.Storage.from_array(rows(value, value), place)


class Sum:
    """10 x and 10 x + y, whose inputs are bound to ones."""

    def __init__(self, place: Any = PLACE) -> None:
        g = lk.Graph()
        self.x, self.y = (g.placeholder((2,), "f32", n) for n in "xy")
        self.part = self.x * 10.0
        self.total = self.part + self.y
        bound = {self.x: rows(1, 1), self.y: rows(1, 1)}
        self.plan = lk.plan([self.part, self.total], bound, place)

    def check(self, value: float, bindings: Any = None) -> None:
        """A pass, and what its nodes can be read as."""
        part, total = self.plan.run(bindings)
        assert total.tolist() == [value] * 2
        for node, result in ((self.part, part), (self.total, total)):
            assert self.plan.read(node).tolist() == result.tolist()

    @property
    def told(self) -> tuple[Any, ...]:
        return self.plan.manifest, self.plan.peak_bytes, self.plan.describe(), self.plan.captured


def ready(place: Any = PLACE, *, recorded: bool = False) -> Sum:
    """One that has run."""
    s = Sum(place)
    s.check(11)
    if recorded:
        s.plan.capture()
        s.check(11)
    return s


# Inputs of a pass that fails


@recorded_or_not
@pytest.mark.parametrize("failing", [1, 2])
def test_inputs_of_a_failed_pass_have_to_be_given_again(sim, failing, recorded):
    """One of two copies failed: what is in the two buffers was never meant to be together."""
    s = ready(recorded=recorded)
    before, twos = s.told, rows(2, 2)
    sim.fail("copy", failing)
    with pytest.raises(lk.KernelError, match="copy from the host"):
        s.plan.run({s.x: twos, s.y: twos})
    for given, name in (({}, "[xy]"), ({s.x: twos}, "y"), ({s.y: twos}, "x")):
        with pytest.raises(lk.BindingError, match=f"placeholder {name}: got no binding"):
            s.plan.run(given)
    s.check(22, {s.x: twos, s.y: twos})
    s.check(22)
    assert s.told == before


@pytest.mark.parametrize("stop", ["kernel", "interrupt"])
def test_inputs_that_a_failed_pass_was_not_given_stay(sim, stop):
    def stopped(bindings: Any = None) -> None:
        if stop == "kernel":
            sim.fail("kernel", 1)
            with pytest.raises(lk.KernelError):
                s.plan.run(bindings)
        else:
            with interrupted(sim, 1), pytest.raises(KeyboardInterrupt):
                s.plan.run(bindings)

    s = ready()
    stopped({s.x: rows(2, 2)})
    with pytest.raises(lk.BindingError, match="placeholder x: got no binding"):
        s.plan.run()
    s.check(31, {s.x: rows(3, 3)})
    stopped()  # was given nothing, so nothing is unknown
    s.check(31)


def test_a_storage_that_was_given_to_a_failed_pass_stays_bound(sim):
    s, lent = ready(), storage(5)
    sim.fail("kernel", 1)
    with pytest.raises(lk.KernelError):
        s.plan.run({s.x: lent})
    s.check(51)
    assert s.plan.storage_of(s.x) is lent


@pytest.mark.parametrize("verb", ["bind", "rebind", "run"])
def test_a_storage_takes_the_place_of_an_input_of_a_failed_pass(sim, verb):
    s, lent = ready(), storage(5)
    sim.fail("copy", 1)
    with pytest.raises(lk.KernelError):
        s.plan.run({s.x: rows(2, 2)})
    if verb == "run":
        s.check(51, {s.x: lent})
    elif verb == "bind":
        s.plan.bind(s.x, lent)
    else:
        s.plan.rebind({s.x: lent})
    s.check(51)


def writer(place: Any) -> tuple[lk.Plan, lk.Tensor, lk.Tensor, lk.Tensor]:
    """A plan that doubles x into the first half of d, which takes an array or a storage."""
    g = lk.Graph()
    d, x = g.placeholder((4,), "f32", "d"), g.placeholder((2,), "f32", "x")
    done = d.at[0:2].set(x * 2.0)
    return lk.plan(done, device=place), d, x, done


def test_a_storage_in_place_of_an_array_that_passes_write(place):
    plan, d, x, _ = writer(place)
    for _ in range(2):
        assert plan.run({d: rows(1, 1, 1, 1), x: rows(3, 3)}).tolist() == [6, 6, 1, 1]
        assert plan.run({x: rows(4, 4)}).tolist() == [8, 8, 1, 1]
        lent = lk.Storage.from_array(rows(5, 5, 5, 5), place)
        for verb in (lambda s: plan.bind(d, s), lambda s: plan.rebind({d: s})):
            verb(lent)
            assert plan.run({x: rows(6, 6)}).tolist() == [12, 12, 5, 5]
            assert lent.to_numpy().tolist() == [12, 12, 5, 5]
        other = lk.Storage.from_array(rows(7, 7, 7, 7), place)
        assert plan.run({d: other}).tolist() == [12, 12, 7, 7]


def test_an_array_that_passes_write_is_copied_once_a_pass(sim):
    plan, d, x, _ = writer(PLACE)
    plan.run({d: rows(1, 1, 1, 1), x: rows(3, 3)})
    before = sim.counts["copy"]
    plan.run({d: rows(2, 2, 2, 2)})
    assert sim.counts["copy"] == before + 1
    plan.run()
    assert sim.counts["copy"] == before + 2


def test_a_first_pass_takes_arrays_and_storages_together(place):
    s = Sum(place)
    g = lk.Graph()
    x, y = g.placeholder((2,), "f32"), g.placeholder((2,), "f32")
    plan = lk.plan(x + y, device=place)
    assert plan.run({x: rows(1, 2), y: storage(5, place)}).tolist() == [6, 7]
    s.check(51, {s.x: storage(5, place)})


def test_an_input_that_a_failed_kernel_wrote_is_rewritten_whole(sim):
    plan, d, x, done = writer(PLACE)
    given = {d: rows(1, 1, 1, 1), x: rows(3, 3)}
    plan.run(given)
    sim.fail("kernel", 2)
    with pytest.raises(lk.KernelError):
        plan.run(given)
    assert plan.run(given).tolist() == [6, 6, 1, 1]
    assert plan.read(done).tolist() == [6, 6, 1, 1]


def test_the_buffer_of_an_input_is_the_plans_alone(place):
    """It is written without a lock."""
    s = ready(place)
    with pytest.raises(lk.BindingError, match=r"need a leaf of it that a storage is bound to"):
        s.plan.storage_of(s.x)
    with pytest.raises(lk.BindingError, match=r"need a leaf of it"):
        s.plan.storage_of(s.part)


@pytest.mark.parametrize("verb", ["bind", "rebind", "run", "capture", "read"])
def test_nothing_changes_a_plan_that_runs(sim, verb):
    s, lent = ready(), storage(5)
    verbs: dict[str, Callable[[], object]] = {
        "bind": lambda: s.plan.bind(s.x, rows(8, 8)),
        "rebind": lambda: s.plan.rebind({s.x: lent}),
        "run": lambda: s.plan.run({s.x: rows(8, 8)}),
        "capture": s.plan.capture,
        "read": lambda: s.plan.read(s.part),
    }
    with s.plan.alone("a pass"), pytest.raises(lk.SessionBusy, match=f"plan {s.plan.id}: got a "):
        verbs[verb]()
    s.check(11)


def test_a_failed_pass_waits_for_the_backend_that_it_ran_on(sim):
    class Lost(SimBackend):
        """Replaced by another while a pass waits for it."""

        waits = 0
        armed = False

        def synchronize(self, location: lk.DeviceLocation) -> None:
            self.waits += 1
            if self.armed:
                self.armed = False
                register_backend("sim", SimBackend())
            super().synchronize(location)

    lost = Lost()
    register_backend("sim", lost)
    g = lk.Graph()
    x = g.placeholder((2,), "f32")
    plan = lk.plan([], {x: storage(0)}, PLACE, effects=[x.at[:].set(g.const(rows(1, 1)) * 2.0)])
    plan.run()
    before, lost.armed = lost.waits, True
    lost.fail("kernel", 1)
    with pytest.raises(lk.KernelError):
        plan.run()
    assert lost.waits == before + 2


def test_a_copy_that_fails_in_bind_is_told_there(sim):
    """The pass after it was given nothing: the one after that would take the old bytes."""
    s = ready()
    sim.fail("copy", 1)
    with pytest.raises(lk.KernelError, match="copy from the host"):
        s.plan.bind(s.x, rows(2, 2))
    with pytest.raises(lk.BindingError, match="placeholder x: got no binding"):
        s.plan.run()
    s.plan.bind(s.x, rows(2, 2))
    s.check(21)


def test_a_bind_without_memory_leaves_what_was_bound(sim):
    s, lent = ready(), storage(5)
    s.plan.bind(s.x, lent)
    sim.fail("allocation", 1)
    with pytest.raises(lk.OutOfMemory):
        s.plan.bind(s.x, rows(2, 2))
    s.check(51)


REFUSED: dict[str, Callable[[Sum], Any]] = {
    "shape": lambda s: {s.y: rows(7, 7), s.x: rows(1)},
    "dtype": lambda s: {s.y: rows(7, 7), s.x: np.zeros(2)},
    "place": lambda s: {s.y: rows(7, 7), s.x: storage(1, "sim:1")},
    "mapping": lambda s: [s.y],
}


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_a_refused_run_changes_nothing(place, given):
    s = ready(place)
    before = s.told
    with pytest.raises(lk.BindingError):
        s.plan.run(given(s))
    assert s.told == before
    assert s.plan.read(s.total).tolist() == [11, 11]
    s.check(11)


def test_a_run_that_is_refused_for_shared_memory_tells_of_no_buffer(place):
    """It would have taken a buffer of its own for the row."""
    g = lk.Graph()
    dest, row, more = (g.placeholder((2,), "f32", n) for n in ("dest", "row", "more"))
    bound = {dest: storage(0, place), row: storage(3, place), more: storage(4, place)}
    plan = lk.plan(dest.write_slice(row + more, [(0, 2)]), bound, place)
    assert plan.run().tolist() == [7, 7]
    before = plan.manifest, plan.peak_bytes
    assert plan.manifest.baked["storage:row"] == int(bound[row].id)
    with pytest.raises(lk.BindingError, match="same memory"):
        plan.run({row: rows(9, 9), more: bound[dest]})
    assert (plan.manifest, plan.peak_bytes) == before
    assert (bound[dest].version, bound[dest].to_numpy().tolist()) == (1, [7, 7])
    assert plan.run().tolist() == [7, 7]
    assert plan.run({row: rows(9, 9)}).tolist() == [13, 13]
    assert "storage:row" not in plan.manifest.baked
    assert plan.peak_bytes == before[1] + 8


# Reading nodes


def unreadable(plan: lk.Plan, *nodes: lk.Tensor) -> None:
    for node in nodes:
        with pytest.raises(lk.GraphError, match="need a pass before it"):
            plan.read(node)


def test_nothing_is_read_before_a_pass(place):
    s = Sum(place)
    unreadable(s.plan, s.x, s.part, s.total)
    unbound = lk.plan(s.total, None, place)
    unreadable(unbound, s.x, s.part, s.total)
    with pytest.raises(lk.BindingError, match="got no binding"):
        unbound.run({s.x: rows(1, 1)})
    unreadable(unbound, s.x, s.part, s.total)
    s.check(11)
    assert s.plan.read(s.x).tolist() == [1, 1]


@recorded_or_not
def test_nothing_is_read_after_a_pass_that_failed(sim, recorded):
    """The nodes before the failed one are of the new pass, those behind it of the old."""
    s = ready(recorded=recorded)
    before = sim.counts["kernel"]
    s.check(11)
    kernels = sim.counts["kernel"] - before
    assert kernels >= 2
    for k in range(1, kernels + 1):
        sim.fail("kernel", k)
        with pytest.raises(lk.KernelError):
            s.plan.run({s.x: rows(5, 5)})
        unreadable(s.plan, s.x, s.part, s.total)
        s.check(51, {s.x: rows(5, 5)})
    sim.fail("kernel", kernels)
    with pytest.raises(lk.KernelError):
        s.plan.run()
    unreadable(s.plan, s.x, s.part, s.total)


def test_nothing_is_read_once_some_of_the_inputs_have_been_copied_in(sim, monkeypatch):
    s, real, given = ready(), sim.copy_in, []

    def second_fails(dest: Any, source: np.ndarray) -> None:
        given.append(source)
        if len(given) == 2:
            raise lk.KernelError("copy: got a test, need none")
        real(dest, source)

    monkeypatch.setattr(sim, "copy_in", second_fails)
    with pytest.raises(lk.KernelError, match="got a test"):
        s.plan.run({s.x: rows(5, 5), s.y: rows(5, 5)})
    monkeypatch.undo()
    unreadable(s.plan, s.x, s.part, s.total)
    s.check(55, {s.x: rows(5, 5), s.y: rows(5, 5)})


BINDINGS: dict[str, Callable[[Sum, str], None]] = {
    "an array": lambda s, place: s.plan.bind(s.x, rows(5, 5)),
    "a storage": lambda s, place: s.plan.bind(s.x, storage(5, place)),
    "all at once": lambda s, place: s.plan.rebind({s.x: storage(5, place)}),
}


@pytest.mark.parametrize("bind", BINDINGS.values(), ids=BINDINGS)
def test_nothing_is_read_between_a_binding_and_the_pass_after_it(place, bind):
    s = ready(place)
    with pytest.raises(lk.BindingError):
        s.plan.bind(s.x, rows(1))
    assert s.plan.read(s.total).tolist() == [11, 11]  # what is refused binds nothing
    bind(s, place)
    unreadable(s.plan, s.x, s.part, s.total)
    s.check(51)
    assert s.plan.read(s.x).tolist() == [5, 5]


def test_a_bound_storage_is_read_as_it_is_now_and_not_while_it_is_torn(place):
    g = lk.Graph()
    dest, row = (g.placeholder((2,), "f32", n) for n in ("dest", "row"))
    written = dest.write_slice(row, [(0, 2)])
    held, backend = storage(0, place), device(place).backend
    plan = lk.plan(written, {dest: held, row: storage(3, place)}, place)
    plan.run()
    assert plan.read(written).tolist() == [3, 3]
    with held.write() as array:
        backend.copy_in(array, rows(4, 4))
    assert plan.read(written).tolist() == [4, 4]
    with pytest.raises(KeyError), held.write():
        raise KeyError
    with pytest.raises(lk.StorageTornError):
        plan.read(written)
    assert plan.read(row).tolist() == [3, 3]
    with held.write() as array:
        backend.copy_in(array, rows(5, 5))
    assert plan.read(written).tolist() == [5, 5]


def test_a_node_that_was_written_over_is_refused_by_name(place):
    """In a bound storage, and in memory of the plan."""
    g = lk.Graph()
    dest, row, x = (g.placeholder((2,), "f32", n) for n in ("dest", "row", "x"))
    doubled = x * 2.0
    targets = [dest.write_slice(row, [(0, 2)]), doubled.write_slice(row.slice(0, 0, 1), [(0, 1)])]
    bound = {dest: storage(0, place), row: storage(1, place), x: storage(6, place)}
    plan = lk.plan(targets, bound, place)
    plan.run()
    for node in (dest, doubled):
        with pytest.raises(lk.GraphError, match="make it a target"):
            plan.read(node)
    assert [plan.read(t).tolist() for t in targets] == [[1, 1], [1, 12]]


def test_scratch_is_not_taken_for_what_a_node_holds(place):
    """The kernel of rms_norm has scratch, which is planned as memory of the same node."""
    g = lk.Graph()
    x = g.placeholder((2, 8), "f32", "x")
    normed = x.rms_norm(g.const(np.ones(8, np.float32)))
    plan = lk.plan(normed * 1.0, None, place)
    assert any(step.scratch for step in plan.steps)
    for value in (1.0, -3.0):
        plan.run({x: np.full((2, 8), value, np.float32)})
        np.testing.assert_allclose(plan.read(normed), np.sign(value), rtol=1e-4)


@recorded_or_not
def test_a_pass_that_runs_keeps_the_plan_to_itself(sim, monkeypatch, recorded):
    s, real, seen = ready(recorded=recorded), sim.copy_out, []

    def meanwhile(source: Any) -> np.ndarray:
        for verb in (s.plan.capture, s.plan.run, lambda: s.plan.read(s.x)):
            with pytest.raises(lk.SessionBusy, match="need one thread at a time"):
                verb()
        seen.append(s.plan.captured)
        return real(source)

    monkeypatch.setattr(sim, "copy_out", meanwhile)
    assert s.plan.run()[1].tolist() == [11, 11]
    assert seen == [recorded] * 2
    monkeypatch.undo()
    s.check(11)


def test_results_of_a_failed_pass_are_let_go(sim, monkeypatch):
    s, real, made = ready(), sim.copy_out, []

    def second_fails(source: Any) -> np.ndarray:
        if made:
            raise RuntimeError
        out = real(source)
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(sim, "copy_out", second_fails)
    with pytest.raises(lk.KernelError):
        s.plan.run()
    gc.collect()
    assert made[0]() is None


# Recording


def test_a_plan_that_never_ran_can_be_recorded(sim):
    s = Sum()
    s.plan.capture()
    s.check(11)
    s.check(31, {s.x: rows(3, 3)})
    assert s.plan.captured


def test_what_is_recorded_is_what_is_bound_now(sim):
    s, lent = ready(recorded=True), storage(5)
    s.plan.bind(s.x, lent)
    s.plan.capture()
    s.check(51)
    assert s.plan.captured
    with lent.write() as array:
        sim.copy_in(array, rows(6, 6))
    s.check(61)
    assert s.plan.captured


def test_an_unbound_plan_is_not_recorded(sim):
    s = Sum()
    plan = lk.plan(s.total, None, PLACE)
    with pytest.raises(lk.BindingError, match="got no binding"):
        plan.capture()
    assert not plan.captured


def test_nothing_is_recorded_on_a_backend_that_took_the_place_of_another(sim):
    s = ready()
    register_backend("sim", SimBackend())
    with pytest.raises(lk.TopologyChanged, match="plan again"):
        s.plan.capture()
    assert not s.plan.captured


def test_only_a_backend_that_declares_captures_is_asked_for_one(sim, monkeypatch):
    s = ready()
    unable = replace(sim.capabilities, capture=False)
    monkeypatch.setattr(sim, "capabilities", unable, raising=False)
    with pytest.raises(lk.CaptureError, match="need a backend that declares capture"):
        s.plan.capture()
    monkeypatch.undo()
    s.plan.capture()
    s.check(11)


def test_a_backend_without_a_kernel_for_copies_records_nothing(sim, monkeypatch):
    s, real = ready(), sim.kernel
    monkeypatch.setattr(
        sim, "kernel", lambda op, *specs: None if isinstance(op, Copy) else real(op, *specs)
    )
    with pytest.raises(lk.CaptureError, match="no kernel for copies"):
        s.plan.capture()
    assert not s.plan.captured
    s.check(11)
