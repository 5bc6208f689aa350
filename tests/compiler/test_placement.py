"""Where nodes run, and what travels: storages in every pass, snapshots once."""

import gc
from typing import Any

import numpy as np
import pytest

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.device import register_backend

SIM = "sim:0"


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def on(plan: lk.Plan) -> list[tuple[str, str]]:
    """The kernels of a plan with the places they run in."""
    steps = [(s.op.name, str(plan.program.registers[s.output].location)) for s in plan.steps]
    return [step for step in steps if step[0] != "output"]


def copies(plan: lk.Plan) -> int:
    return [name for name, _ in on(plan)].count("copy")


def bytes_of_a_pass(plan: lk.Plan) -> int:
    plan.run()
    before = lk.stats().bytes_moved
    plan.run()
    return lk.stats().bytes_moved - before


def test_operands_that_are_storages_travel_in_every_pass_sch5() -> None:
    g = lk.Graph()
    a, b = floats(3, 4), floats(4, 2)
    host, far = (lk.Storage.from_array(b, place) for place in ("cpu", "sim:1"))
    x = g.const(lk.Storage.from_array(a, SIM))
    for other in (host, far):
        plan = lk.plan(x @ g.const(other), device=SIM)
        assert on(plan) == [("copy", SIM), ("matmul", SIM)]
        assert bytes_of_a_pass(plan) == b.nbytes + 3 * 2 * 4
        np.testing.assert_allclose(plan.run(), a @ b, rtol=1e-6)


def test_a_plan_for_the_host_has_copies_of_snapshots_too_sch5() -> None:
    g = lk.Graph()
    x = g.const(lk.Storage.from_array(floats(3), SIM))
    plan = lk.plan(x + g.const(floats(3)))
    assert on(plan) == [("copy", SIM), ("add", SIM)]


VIEWS: dict[str, Any] = {
    "itself": lambda t: t,
    "a view": lambda t: t.transpose(0, 1).transpose(0, 1),
    "a view of a part": lambda t: t[:, 1:3],
    "a copy that was asked for": lambda t: t.to(SIM),
    "a copy of a view": lambda t: t[:, 1:3].to(SIM),
    "a view of a copy": lambda t: t.to(SIM)[:, 1:3],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_snapshot_is_copied_to_the_device_of_the_plan_once(view: str) -> None:
    g = lk.Graph()
    a, w = floats(3, 4), floats(4, 3)
    x = g.const(lk.Storage.from_array(a, SIM))
    c = g.const(w)
    part = VIEWS[view](c)
    plan = lk.plan(x @ part, device=SIM)
    assert copies(plan) == 0
    assert plan.program.locations == (lk.DeviceLocation(SIM),)
    assert {str(leaf.location) for leaf in plan.program.leaves} == {SIM}
    assert plan.storage_of(c).frozen
    assert bytes_of_a_pass(plan) == 3 * part.shape[1] * 4  # the result
    want = a @ (w[:, 1:3] if part.shape[1] == 2 else w)
    np.testing.assert_allclose(plan.run(), want, rtol=1e-6)
    other = lk.plan((x @ part) * 2.0, device=SIM)
    assert other.storage_of(c) is plan.storage_of(c)
    np.testing.assert_allclose(other.run(), 2 * want, rtol=1e-6)


def test_a_plan_of_such_leaves_can_be_captured_ses10() -> None:
    g = lk.Graph()
    x = g.placeholder((2, 3), "f32")
    plan = lk.plan(x @ g.const(floats(3, 4)), device=SIM)
    a = floats(2, 3)
    want = plan.run({x: a})
    plan.capture()
    np.testing.assert_array_equal(plan.run({x: a}), want)
    assert plan.captured


def test_constant_expressions_run_on_the_device_of_the_plan() -> None:
    g = lk.Graph()
    a = floats(4)
    plan = lk.plan(g.const(a) * 2.0 + g.const(a), device=SIM)
    assert {place for _, place in on(plan)} == {SIM}
    np.testing.assert_array_equal(plan.run(), a * 2 + a)


def test_what_a_storage_decides_stays_decided() -> None:
    """Weights that were put somewhere are not copied, and work on the host stays there."""
    g = lk.Graph()
    w, h = floats(4), floats(4)
    far = g.const(lk.Storage.from_array(w, "sim:1"))
    host = g.const(lk.Storage.from_array(h))
    c = g.const(np.ones(4, np.float32))
    plan = lk.plan([c + far, c + host], device=SIM)
    assert on(plan) == [("copy", "sim:1"), ("add", "sim:1"), ("add", "cpu")]
    added, kept = plan.run()
    np.testing.assert_array_equal(added, 1 + w)
    np.testing.assert_array_equal(kept, 1 + h)


def test_one_snapshot_in_two_places() -> None:
    g = lk.Graph()
    a = floats(3)
    c, near, far = g.const(a), g.placeholder((3,), "f32"), g.placeholder((3,), "f32")
    stores = {
        near: lk.Storage.from_array(2 * a, SIM),
        far: lk.Storage.from_array(3 * a, "cpu"),
    }
    plan = lk.plan([c + near, c + far, c], stores, SIM)
    for got, factor in zip(plan.run(), (3, 4, 1), strict=True):
        np.testing.assert_allclose(got, factor * a, rtol=1e-6)
    assert [str(leaf.location) for leaf in plan.program.leaves if leaf.op.name == "const"] == [
        "cpu",
        SIM,
    ]
    names = [name for name in plan.manifest.baked if name.startswith("storage:const")]
    assert len(names) == 2


@pytest.mark.parametrize("dest", ["itself", "a view", "a copy that was asked for"])
def test_a_write_into_a_snapshot_works_on_a_copy(dest: str) -> None:
    g = lk.Graph()
    w = floats(4, 4)
    c = g.const(w)
    row = g.const(lk.Storage.from_array(np.ones((1, 4), np.float32), SIM))
    written = VIEWS[dest](c).at[1:2].set(row)
    plan = lk.plan([written, c * 1.0], device=SIM)
    want = w.copy()
    want[1] = 1
    for _ in range(2):
        got, untouched = plan.run()
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(untouched, w)


def test_plans_for_different_devices_do_not_share_a_program() -> None:
    def traced(device: str) -> lk.Plan:
        g = lk.Graph()
        return lk.plan(g.const(np.ones(7, np.float32)) * 3.0, device=device)

    assert on(traced("cpu")) == [("mul_scalar", "cpu")]
    assert on(traced(SIM)) == [("mul_scalar", SIM)]

    t = lk.Graph().const(np.ones(7, np.float32)).to(SIM)
    assert [on(lk.plan(t, device=place)) for place in ("cpu", SIM)] == [[("copy", SIM)], []]


def test_the_copy_lives_as_long_as_the_snapshot() -> None:
    place = lk.DeviceLocation(SIM)
    backend = lk.device(SIM).backend
    gc.collect()
    before = backend.used_bytes(place)
    g = lk.Graph()
    c = g.const(np.ones(1024, np.float32))
    for factor in (2.0, 3.0):
        lk.plan(c * factor, device=SIM).run()
        gc.collect()
        assert backend.used_bytes(place) - before == 4096
    del g, c
    gc.collect()
    assert backend.used_bytes(place) == before


def test_memory_of_another_library_is_not_taken_for_a_snapshot() -> None:
    """It is read-only here, and may change there."""
    g = lk.Graph()
    owner = np.ones(3, np.float32)
    lent = owner.view()
    lent.flags.writeable = False
    plan = lk.plan(g.const(lk.Storage.wrap(lent)).to(SIM) + 1.0, device=SIM)
    assert plan.run().tolist() == [2, 2, 2]
    owner[:] = 5
    assert plan.run().tolist() == [6, 6, 6]


def test_no_memory_for_the_copy_is_told_when_planning_st5() -> None:
    g = lk.Graph()
    backend = lk.device(SIM).backend
    t = g.const(np.ones(1 << 12, np.float32)) * 2.0
    backend.fail("allocation", 1)
    with pytest.raises(lk.OutOfMemory, match="16384 bytes"):
        lk.plan(t, device=SIM)
    assert lk.plan(t, device=SIM).run().tolist() == [2] * (1 << 12)


def test_the_copy_is_made_anew_on_a_backend_that_was_replaced() -> None:
    before = lk.device(SIM).backend
    c = lk.Graph().const(np.ones(3, np.float32))
    old = lk.plan(c * 2.0, device=SIM)
    register_backend("sim", SimBackend())
    try:
        assert lk.plan(c * 2.0, device=SIM).run().tolist() == [2, 2, 2]
        with pytest.raises(lk.TopologyChanged):
            old.run()
    finally:
        register_backend("sim", before)
