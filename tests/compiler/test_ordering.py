"""Hand-made hazards: what is computed, and how many edges and copies it took."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_backends import Toy, registered

import lazykv as lk
from lazykv.compiler.ir import IR
from lazykv.compiler.ordering import order
from lazykv.compiler.plan import Plan
from lazykv.errors import BackendUnavailable, BindingError, GraphError


class Buffer:
    """A bound i64 storage and the graph that works on it."""

    def __init__(self, *values: int, shape: tuple[int, ...] | None = None) -> None:
        data = np.array(values).reshape(shape or len(values))
        self.store = lk.Storage.from_array(data)
        self.g = lk.Graph()
        self.t = self.g.placeholder(data.shape, "i64")

    def plan(self, *targets: lk.Tensor) -> Plan:
        return lk.plan(list(targets), {self.t: self.store})

    def now(self) -> Any:
        return self.store.to_numpy().reshape(-1).tolist()

    def const(self, *values: int) -> lk.Tensor:
        return self.g.const(list(values), "i64")


def added(plan: Plan) -> tuple[int, int, int]:
    """How many ordering edges, safety copies and cloned destinations a plan has."""
    clones = [n for n in plan.program.nodes if n.reason and "destination" in n.reason]
    return len(plan.program.edges), len(plan.program.copies), len(clones)


def listed(results: list[Any]) -> list[Any]:
    return [r.tolist() for r in results]


def total(t: lk.Tensor) -> lk.Tensor:
    return t[0] + t[1]


def names(plan: Plan) -> list[str]:
    return [s.op.name for s in plan.steps]


def test_E1_overlapping_source_and_destination() -> None:
    b = Buffer(0, 1, 2, 3)
    up = b.plan(b.t.at[1:4].set(b.t[0:3]))
    assert listed(up.run()) == [[0, 0, 1, 2]]
    assert b.now() == [0, 0, 1, 2]
    assert added(up) == (1, 1, 0)
    b = Buffer(0, 1, 2, 3)
    down = b.plan(b.t.at[0:3].set(b.t[1:4]))
    assert listed(down.run()) == [[1, 2, 3, 3]]
    assert b.now() == [1, 2, 3, 3]


@pytest.mark.parametrize("turned", [False, True])
def test_E2_a_copy_is_taken_before_the_write_in_either_request_order(turned: bool) -> None:
    b = Buffer(0, 1, 2)
    dst, src = b.t.to("cpu"), b.t.at[:].set(b.t + 1)
    targets = [src, dst] if turned else [dst, src]
    plan = b.plan(*targets)
    want = [[0, 1, 2], [1, 2, 3]]
    assert listed(plan.run()) == (want[::-1] if turned else want)
    assert b.now() == [1, 2, 3]
    assert added(plan)[1:] == (0, 0), "independent readers need no copy"


def test_E3_a_read_built_before_a_write_sees_the_old_rows() -> None:
    b = Buffer(1, 1)
    r = total(b.t)
    plan = b.plan(b.t.at[:].set(b.const(9, 9)), r)
    assert listed(plan.run()) == [[9, 9], 2]
    assert b.now() == [9, 9]
    assert added(plan)[1:] == (0, 0)


def test_E4_readers_between_successive_writers() -> None:
    b = Buffer(1, 1)
    r1 = total(b.t)
    first = b.t.at[0:1].set(b.const(10))
    r2 = total(first)
    second = first.at[0:1].set(b.const(20))
    r3 = total(second)
    plan = b.plan(r3, r1, r2)
    assert listed(plan.run()) == [21, 2, 11]
    assert added(plan)[1:] == (0, 0)
    assert b.now() == [20, 1]
    b = Buffer(1, 1)
    r2 = total(b.t.at[0:1].set(b.const(10)))
    b.t.at[0:1].set(b.const(20))
    assert listed(b.plan(r2).run()) == [11]
    assert b.now() == [10, 1], "a write nobody asked for is not run"


def test_E5_an_addition_onto_itself_reads_before_it_writes() -> None:
    b = Buffer(1, 2, 3, 4)
    plan = b.plan(b.t.at[1:4].set(b.t[1:4] + b.t[0:3]))
    assert listed(plan.run()) == [[1, 3, 5, 7]]
    assert added(plan) == (0, 0, 0), "the sum has its own memory and comes first anyway"


def test_E8_an_earlier_view_keeps_its_value_eager_and_planned() -> None:
    for targets in (1, 2):
        b = Buffer(0, 0, 0, 0)
        view = b.t[0:2]
        cache = b.t.at[0:1].set(b.const(5))
        results = listed(b.plan(*[cache, view][:targets]).run())
        assert results[0] == [5, 0, 0, 0]
        assert results[1:] == [[0, 0]][: targets - 1]
        assert lk.realize(view, {b.t: b.store}).tolist() == [5, 0], "a later pass sees the storage"


def test_E9_shifts_in_place_step_after_step() -> None:
    b = Buffer(0, 1, 2, 3)
    new = b.g.placeholder((1,), "i64")
    plan = b.plan(b.t.at[0:3].set(b.t[1:4]).at[3:4].set(new))
    for n in (4, 5, 6):
        plan.run({new: np.array([n])})
    assert b.now() == [3, 4, 5, 6]
    half = 2**19
    store = lk.Storage.from_array(np.zeros(2 * half, np.float32))
    g = lk.Graph()
    big, value = g.placeholder((2 * half,), "f32"), g.placeholder((half,), "f32")
    plan = lk.plan(big.at[:half].set(big[half:]).at[half:].set(value), {big: store})
    for n in range(1, 4):
        plan.run({value: np.full(half, n, np.float32)})
        now = store.to_numpy()
        assert (now[:half] == n - 1).all()
        assert (now[half:] == n).all()


def test_E10_columns_of_one_array_are_not_confused() -> None:
    b = Buffer(1, 2, 3, 4, 5, 6, shape=(2, 3))
    plan = b.plan(b.t.at[:, 0:1].set(b.t[:, 2:3]))
    assert listed(plan.run()) == [[[3, 2, 3], [6, 5, 6]]]
    assert added(plan) == (0, 0, 0), "the columns share no element"


def test_SCH1_only_what_is_needed_runs_and_each_node_once() -> None:
    b = Buffer(1, 2, 3)
    shared = b.t + 1
    unused = b.t.at[0:1].set(b.const(7))
    plan = b.plan(shared + shared, shared, shared + shared)
    assert names(plan).count("add_scalar") == 1
    assert names(plan).count("add") == 1
    assert "write_slice" not in names(plan)
    assert listed(plan.run()) == [[4, 6, 8], [2, 3, 4], [4, 6, 8]]
    assert b.now() == [1, 2, 3]
    assert unused.shape == (3,)


def test_SCH2_a_safety_copy_copies_the_view_that_is_read() -> None:
    b = Buffer(*range(1000))
    first = b.t.at[0:500].set(b.t[2:3].broadcast_to(500))
    late = b.t[10:14] + first[0:4]
    plan = b.plan(first, late)
    assert listed(plan.run())[1] == [12, 13, 14, 15]
    copies = [plan.program.nodes[i] for i in plan.program.copies]
    assert {n.spec.size for n in copies} == {4, 500}
    assert all(n.reason for n in copies)
    assert plan.program.arena_bytes < 1000 * 8


def test_SCH2_two_late_readers_share_one_copy() -> None:
    b = Buffer(1, 2, 3)
    w = b.t.at[:].set(b.const(7, 8, 9))
    plan = b.plan(b.t + w, b.t * w)
    assert listed(plan.run()) == [[8, 10, 12], [7, 16, 27]]
    assert names(plan).count("copy") == added(plan)[1] == 1


def test_SCH2_ordering_an_ordered_graph_changes_nothing() -> None:
    b = Buffer(1, 2, 3)
    w = b.t.at[0:2].set(b.t[1:3])
    plan = b.plan(b.t + w)
    again = order(order_input(plan))
    assert again.copies == []
    assert again.sequence == list(range(len(again.ir)))


def order_input(plan: Plan) -> Any:
    """The nodes of a plan in the order that they run, as an IR."""
    at = {old: new for new, old in enumerate(plan.program.sequence)}
    nodes = [plan.program.nodes[i] for i in plan.program.sequence]
    return IR([replace(n, inputs=tuple(at[i] for i in n.inputs)) for n in nodes])


def test_SCH3_the_last_of_several_writes_is_in_place() -> None:
    b = Buffer(1, 2, 3)
    one, two = b.t.at[0:1].set(b.const(10)), b.t.at[1:2].set(b.const(20))
    plan = b.plan(one, two)
    assert listed(plan.run()) == [[10, 2, 3], [1, 20, 3]]
    assert b.now() == [1, 20, 3]
    assert added(plan)[2] == 1


def test_SCH3_writes_into_disjoint_views_all_land() -> None:
    b = Buffer(1, 2, 3, 4, shape=(2, 2))
    left, right = b.t[:, 0:1], b.t[:, 1:2]
    plan = b.plan(left.zero_fill(), right.at[0:1, :].set(b.g.const([[9]], "i64")))
    assert listed(plan.run()) == [[[0], [0]], [[9], [4]]]
    assert b.now() == [0, 9, 0, 4]
    assert added(plan)[2] == 0


def test_SCH3_views_that_meet_are_compared_whole() -> None:
    """The writes of two chains touch different elements at first, and the same one later on."""
    b = Buffer(1, 2, 3, 4)
    right = b.t[1:4].at[2:3].set(b.const(40)).at[0:1].set(b.const(20))
    left = b.t[0:3].at[0:1].set(right[0:1] + 80)
    plan = b.plan(left, right)
    assert listed(plan.run()) == [[100, 2, 3], [20, 3, 40]]


def test_SCH3_a_copied_destination_may_turn_copies_into_views() -> None:
    """Copying the transposed destination makes `contiguous` a view of the copy."""
    b = Buffer(1, 2, 3, 4, shape=(2, 2))
    turned = b.t.transpose(0, 1).at[0:1, 0:1].set(b.g.const([[9]], "i64"))
    row = turned.contiguous().at[1:2, :].set(b.g.const([[7, 7]], "i64"))
    plan = b.plan(row, turned.zero_fill(), b.t.zero_fill())
    assert listed(plan.run()) == [[[9, 3], [7, 7]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]


def test_SCH3_a_moving_view_beside_a_chain_closes_no_cycle() -> None:
    b = Buffer(1, 2, 3, 4)
    s = lk.Sym("s")
    left = b.t[0:2].at[:].set(b.const(10, 20))
    right = b.t[2:4].at[:].set(left + 1)
    plan = b.plan(left, right, right.slice(0, s, 1) + left.slice(0, s, 1))
    assert listed(plan.run(env={s: 1})) == [[10, 20], [11, 21], [41]]
    assert b.now() == [10, 20, 11, 21]


def test_SCH3_swapped_buffers_need_one_copy() -> None:
    g = lk.Graph()
    x, y = g.placeholder((2,), "i64"), g.placeholder((2,), "i64")
    xs, ys = (lk.Storage.from_array(np.array(v)) for v in ([1, 2], [3, 4]))
    plan = lk.plan([x.at[:].set(y), y.at[:].set(x)], {x: xs, y: ys})
    assert listed(plan.run()) == [[3, 4], [1, 2]]
    assert (xs.to_numpy().tolist(), ys.to_numpy().tolist()) == ([3, 4], [1, 2])
    assert len(plan.program.copies) == 1


def test_SCH3_one_storage_for_two_placeholders_is_refused_if_written() -> None:
    b = Buffer(1, 2)
    other = b.g.placeholder((2,), "i64", name="other")
    both = {b.t: b.store, other: b.store}
    assert lk.realize(b.t + other, both).tolist() == [2, 4]
    with pytest.raises(BindingError, match="other: got the same memory"):
        lk.realize(b.t.at[0:1].set(other[1:2]), both)
    with pytest.raises(BindingError, match="the same memory"):
        lk.realize(b.t.at[:].set(b.g.const(b.store)), {b.t: b.store})
    assert b.now() == [1, 2]
    assert b.store.version == 0


def test_constants_are_never_written() -> None:
    g = lk.Graph()
    c = g.const([1, 2], "i64")
    written = c.at[0:1].set(g.const([9], "i64"))
    for _ in range(2):
        assert [r.tolist() for r in lk.realize([written, c])] == [[9, 2], [1, 2]]


def test_noop_views_share_the_bytes_and_copies_do_not() -> None:
    for view, lands in [
        (lambda t: t.contiguous(), True),
        (lambda t: t.reshape(4).reshape(2, 2), True),
        (lambda t: t.transpose(0, 1).transpose(0, 1), True),
        (lambda t: t.unsqueeze(0).squeeze(0), True),
        (lambda t: t.to("cpu"), False),
        (lambda t: t.transpose(0, 1).contiguous(), False),
        (lambda t: t.transpose(0, 1).reshape(4).reshape(2, 2), False),
    ]:
        b = Buffer(1, 2, 3, 4, shape=(2, 2))
        plan = b.plan(view(b.t).zero_fill())
        assert listed(plan.run()) == [[[0, 0], [0, 0]]]
        assert b.now() == ([0, 0, 0, 0] if lands else [1, 2, 3, 4])


def test_views_that_change_nothing_cost_nothing() -> None:
    b = Buffer(1, 2, 3, 4, shape=(2, 2))
    plan = b.plan(b.t.transpose(0, 1).permute(1, 0).unsqueeze(0)[0] + 1)
    assert names(plan) == ["add_scalar", "output"]
    plan = b.plan(b.t.contiguous().reshape(2, 2).slice(0, 0, 2).permute(0, 1) + 1)
    assert [n.op.name for n in plan.program.nodes] == ["placeholder", "add_scalar", "output"]


# Several locations


def test_SCH5_operands_elsewhere_are_copied_and_results_come_back() -> None:
    with registered(Toy()):
        g = lk.Graph()
        x, y = g.placeholder((3,), "i64"), g.placeholder((3,), "i64")
        xs = lk.Storage.from_array(np.array([1, 2, 3]), "toy:0")
        ys = lk.Storage.from_array(np.array([10, 20, 30]))
        plan = lk.plan([x + y, x * y, y + 1, y.to("toy:1")], {x: xs, y: ys})
        assert listed(plan.run()) == [[11, 22, 33], [10, 40, 90], [11, 21, 31], [10, 20, 30]]
        moved = [n for n in plan.program.nodes if n.op.name == "copy" and n.reason]
        assert len(moved) == 1, "y travels to toy:0 once for both of its users"
        assert "operand is on cpu" in str(moved[0].reason)
        assert {str(place) for place in plan.program.locations} == {"cpu", "toy:0", "toy:1"}


def test_SCH5_writes_happen_where_their_destination_lives() -> None:
    with registered(Toy()):
        g = lk.Graph()
        cache, row = g.placeholder((2, 2), "f32"), g.placeholder((1, 2), "f32")
        store = lk.Storage.from_array(np.zeros((2, 2), np.float32), "toy:1")
        made = cache.at[1:2, :].set(row + 1)
        got = lk.realize(made, {cache: store, row: np.ones((1, 2), np.float32)})
        assert got.tolist() == store.to_numpy().tolist() == [[0, 0], [2, 2]]
        assert str(store.location) == "toy:1"


def test_SCH5_a_missing_backend_is_named() -> None:
    g = lk.Graph()
    with pytest.raises(BackendUnavailable, match=r"cuda.*lazykv\[cuda13\]"):
        lk.realize(g.const([1.0]).to("cuda:0"))
    with pytest.raises(BackendUnavailable, match="toy"):
        lk.realize(g.alloc((2,), "f32", "toy:0").zero_fill())
    with registered(Toy()), pytest.raises(BackendUnavailable, match=r"toy:9.*toy:0, toy:1"):
        lk.realize(g.const([1.0]).to("toy:9"))


# Determinism

DUMP = """
import json, sys
sys.path[:0] = {path!r}
from test_ordering import busy_plan
plan = busy_plan()
p = plan.program
print(json.dumps([plan.structure, [str(e) for e in p.edges], list(p.sequence), list(p.copies),
      [str(r) for r in p.registers], [(s.op.name, s.inputs, s.output) for s in p.steps]]))
"""


def busy_plan() -> Plan:
    g = lk.Graph()
    x, y = g.placeholder((4, 4), "f32", name="x"), g.placeholder((4, 4), "f32")
    s, u = lk.Sym("s", 0, 3), lk.Sym("u")
    w = x.at[s : s + 1, :].set(y[0:1] + x[1:2])
    v = y.at[:, u : u + 1].set(w[:, 0:1])
    return lk.plan([x + w, v.softmax(), y @ w, x.transpose(0, 1).reshape(16)])


def test_SCH6_planning_is_deterministic_also_across_processes() -> None:
    one, two = busy_plan(), busy_plan()
    assert one.program is two.program, "one structure is compiled once"
    outputs = set()
    for seed in ("0", "1", "77"):
        code = DUMP.format(path=[os.path.dirname(__file__), *sys.path])
        env = {**os.environ, "PYTHONHASHSEED": seed}
        outputs.add(subprocess.check_output([sys.executable, "-c", code], env=env, text=True))
    assert len(outputs) == 1
    assert json.loads(outputs.pop())[0] == one.structure


def test_targets_must_be_tensors() -> None:
    g = lk.Graph()
    for bad in (5, [g.const(1.0), 5], [None]):
        with pytest.raises(GraphError):
            lk.realize(bad)
    with pytest.raises(GraphError, match="no targets"):
        lk.plan([])
    assert lk.realize([]) == []
