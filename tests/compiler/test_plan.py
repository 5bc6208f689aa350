"""Held plans: what a run may be given, what it hands out, and what is left after a failure."""

import copy
import pickle
import threading
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from toy_backends import Toy, registered

import lazykv as lk
from lazykv.device import CPU, Call, Kernel, generation, register_backend
from lazykv.errors import (
    BindingError,
    GraphError,
    KernelError,
    LazyKvError,
    RangeError,
    SessionBusy,
    ShapeError,
    StorageTornError,
    SymbolError,
    SymbolRangeError,
    TopologyChanged,
)
from lazykv.ops.elementwise import Neg
from lazykv.ops.sources import Fill, SymValue
from lazykv.ops.write import WriteSlice
from lazykv.runtime.plan_cache import plan_cache

POS = lk.Sym("pos")


def rows(*values: float) -> Any:
    return np.array(values, np.float32)


class Held:
    """A cache of 8 rows, bound to a storage, and a row that comes with every step."""

    def __init__(self) -> None:
        self.store = lk.Storage.from_array(np.zeros(8, np.float32))
        self.g = lk.Graph()
        self.cache = self.g.placeholder((8,), "f32", name="cache")
        self.row = self.g.placeholder((1,), "f32", name="row")
        self.written = self.cache.at[POS : POS + 1].set(self.row)

    def plan(self, target: lk.Tensor | None = None) -> lk.Plan:
        return lk.plan(self.written if target is None else target, {self.cache: self.store})

    def now(self) -> Any:
        return self.store.to_numpy().tolist()


# Results


def test_E6_results_are_fresh_memory() -> None:
    g = lk.Graph()
    x = g.placeholder((), "f64")
    plan = lk.plan(x + 1)
    first, second = plan.run({x: np.float64(1.1)}), plan.run({x: np.float64(1.2)})
    assert (first, second) == (1.1 + 1, 1.2 + 1)
    assert not np.shares_memory(first, second)


def test_E6_reads_are_not_changed_by_a_later_write() -> None:
    h = Held()
    read, write = h.plan(h.cache[0:2]), h.plan()
    before = read.run()
    write.run({h.row: rows(7)}, {POS: 0})
    after = read.run()
    write.run({h.row: rows(9)}, {POS: 0})
    assert (before.tolist(), after.tolist()) == ([0, 0], [7, 0])


def test_SCH7_a_target_that_is_a_leaf_or_a_view_is_copied_out() -> None:
    data = np.arange(4.0)
    g = lk.Graph()
    p, c = g.placeholder((4,), "f64"), g.const(data)
    store = lk.Storage.from_array(data)
    for got in lk.realize([p, p[1:3], c, c.reshape(2, 2)], {p: store}):
        assert not np.shares_memory(got, store.array)
        assert got.flags.writeable
        got[...] = -1
    assert lk.realize([p, c], {p: store})[1].tolist() == [0, 1, 2, 3]
    assert store.to_numpy().tolist() == [0, 1, 2, 3]


def test_SCH7_constants_are_snapshots() -> None:
    data = rows(1, 2)
    g = lk.Graph()
    plan = lk.plan(g.const(data) + 1)
    data[:] = 50
    assert plan.run().tolist() == [2, 3]


def test_a_graph_of_sources_alone_is_run() -> None:
    g, n = lk.Graph(), lk.Sym("n")
    fill, count = g.apply(Fill((2,), lk.f32, 1.5)), g.apply(SymValue((), lk.i64, n + 1))
    plan = lk.plan([fill, count])
    for value in (3, 8):
        got = plan.run(env={n: value})
        assert [a.tolist() for a in got] == [[1.5, 1.5], value + 1]


def test_a_plan_for_a_list_returns_a_list() -> None:
    g = lk.Graph()
    c = g.const([1.0])
    assert isinstance(lk.plan([c]).run(), list)
    assert isinstance(lk.plan(c).run(), np.ndarray)
    assert [r.tolist() for r in lk.realize((c, c + 1))] == [[1.0], [2.0]]
    assert [r.tolist() for r in lk.realize(c + n for n in (1, 2))] == [[2.0], [3.0]]


@pytest.mark.parametrize("dtype", ["bf16", "f8_e4m3", "f16", "bool", "i64"])
def test_results_have_the_logical_dtype(dtype: str) -> None:
    g = lk.Graph()
    got = lk.realize(g.const([1, 0], "f32").cast(dtype))
    assert got.dtype == lk.dtype(dtype).numpy
    assert got.astype(float).tolist() == [1, 0]


# Bindings


def test_SCH9_arrays_are_copied_in_and_never_written() -> None:
    h = Held()
    data = np.zeros(8, np.float32)
    plan = lk.plan(h.written, {h.cache: data})
    plan.run({h.row: rows(5)}, {POS: 2})
    assert not data.any()
    data[:] = 9
    assert plan.run({h.row: rows(6)}, {POS: 1}).tolist() == [0, 6, 0, 0, 0, 0, 0, 0]


def test_SCH9_a_pass_over_arrays_can_be_run_again() -> None:
    g = lk.Graph()
    p = g.placeholder((3,), "i64")
    plan = lk.plan(p.at[:].set(p + 1), {p: np.array([1, 2, 3])})
    assert [plan.run().tolist() for _ in range(3)] == [[2, 3, 4]] * 3


def test_SCH9_what_is_not_needed_is_ignored() -> None:
    h, other = Held(), Held()
    unneeded = h.g.placeholder((99,), "i64")
    given = {h.cache: h.store, unneeded: "nonsense", other.row: rows(1)}
    got = lk.realize(h.cache + 1, given, {POS: 1, lk.Sym("other"): 3})
    assert got.tolist() == [1] * 8


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (np.zeros(1), "f64[1]"),
        (np.zeros(2, np.float32), "f32[2]"),
        (np.zeros((1, 1), np.float32), "f32[1,1]"),
        (np.zeros(1, np.float16), "f16[1]"),
        (np.zeros(1, ml_dtypes.bfloat16), "bf16[1]"),
        (1.0, "f64[]"),
        ([1], "i64[1]"),
        (lk.Storage.from_array(np.zeros(1)), "f64[1]"),
        (lk.Storage.from_array(np.zeros(2, np.float32)), "f32[2]"),
    ],
)
def test_SCH9_nothing_is_cast_or_broadcast_on_the_way_in(value: object, word: str) -> None:
    h = Held()
    plan = h.plan()
    with pytest.raises(BindingError) as e:
        plan.run({h.row: value}, {POS: 0})
    assert str(e.value).startswith(f"placeholder row: got {word}, need f32[1]")
    assert not any(h.now())
    assert h.store.version == 0


def test_bindings_that_make_no_sense() -> None:
    h = Held()
    with pytest.raises(BindingError, match=r"row: got no binding, need f32\[1\]"):
        h.plan().run(env={POS: 0})
    with pytest.raises(GraphError, match="placeholder Tensors as keys"):
        lk.plan(h.written, {"cache": h.store})  # type: ignore[dict-item]
    c = h.g.const(rows(1))
    with pytest.raises(BindingError, match=r"const.*need a placeholder"):
        lk.realize(c + 1, {c: rows(2)})


def test_a_storage_elsewhere_is_refused_by_a_plan_made_for_here() -> None:
    h = Held()
    plan = h.plan()
    with registered(Toy()):
        far = lk.Storage.from_array(rows(1), "toy:0")
        with pytest.raises(BindingError, match="storage on toy:0, need one on cpu"):
            plan.run({h.row: far}, {POS: 0})


def test_a_refused_run_leaves_the_bindings_as_they_were() -> None:
    h = Held()
    plan = h.plan(h.row + h.cache[POS : POS + 1])
    assert plan.run({h.row: rows(1)}, {POS: 0}).tolist() == [1]
    other = lk.Storage.from_array(np.full(8, 9, np.float32))
    for bindings, env in (({h.row: rows(5), h.cache: rows(1)}, {POS: 0}),
                          ({h.row: rows(5), h.cache: other}, {POS: 8})):  # fmt: skip
        with pytest.raises(LazyKvError):
            plan.run(bindings, env)
        assert plan.run(env={POS: 0}).tolist() == [1]


def test_rebinding_a_storage_is_seen_by_the_next_run() -> None:
    h = Held()
    plan = h.plan()
    plan.run({h.row: rows(1)}, {POS: 0})
    second = lk.Storage.from_array(np.zeros(8, np.float32))
    plan.run({h.row: rows(2), h.cache: second}, {POS: 0})
    plan.run({h.row: np.array([3], ">f4")}, {POS: 1})
    assert h.now()[:2] == [1, 0]
    assert second.to_numpy()[:2].tolist() == [2, 3]
    assert (h.store.version, second.version) == (1, 2)


# Symbols


def test_F1_an_offset_is_not_baked() -> None:
    h = Held()
    built = lk.stats().plans_built
    plan = h.plan()
    for n in range(4):
        plan.run({h.row: rows(10 + n)}, lk.SymEnv({POS: n}))
    assert h.now() == [10, 11, 12, 13, 0, 0, 0, 0]
    assert lk.stats().plans_built - built <= 1


def test_F2_a_symbolic_length_is_refused_when_built() -> None:
    h = Held()
    for build in (lambda: h.cache[:POS], lambda: h.cache.slice(0, 0, POS),
                  lambda: h.cache.at[0:POS]):  # fmt: skip
        with pytest.raises(ShapeError, match="need a number"):
            build()


def test_G9_symbols_of_a_pass_are_checked() -> None:
    h = Held()
    low = lk.Sym("low", 2, 4)
    plan = h.plan(h.cache.at[low : low + 1].set(h.row))
    assert plan.program.checks == (), "the declared range proves the bound"
    for env, error, words in (
        ({}, SymbolError, "'low': got no value"),
        ({low: 5}, SymbolRangeError, r"'low': got 5, need 2\.\.4"),
        ({low: -1}, SymbolRangeError, "got -1"),
        ({low: 2.0}, SymbolError, "2.0, need an integer"),
        ({low: True}, SymbolError, "True, need an integer"),
        ({low: POS}, SymbolError, "need an integer"),
        (None, SymbolError, "no value"),
    ):
        with pytest.raises(error, match=words):
            plan.run({h.row: rows(1)}, env)
    assert not any(h.now())
    plan.run({h.row: rows(1)}, {low: np.int64(3)})
    assert h.now()[3] == 1


def test_G3_a_refused_pass_writes_nothing_anywhere() -> None:
    h = Held()
    other = lk.Storage.from_array(np.zeros(8, np.float32))
    q = h.g.placeholder((8,), "f32")
    plan = lk.plan([q.at[0:1].set(h.row), h.written], {h.cache: h.store, q: other})
    before = lk.stats().kernels_run
    with pytest.raises(RangeError, match=r"write_slice: got start .* = 8, need 0 <= value <= 7"):
        plan.run({h.row: rows(1)}, {POS: 8})
    assert lk.stats().kernels_run == before
    assert not other.to_numpy().any()
    assert (other.version, h.store.version) == (0, 0)


def test_bounds_of_symbolic_slices_and_expressions() -> None:
    h = Held()
    m = lk.Sym("m")
    plan = h.plan(h.cache.slice(0, POS + 2 * m - 1, 2))
    for pos, at in ((0, 0), (9, 0), (1, 3)):
        if 0 <= pos + 2 * at - 1 <= 6:
            plan.run(env={POS: pos, m: at})
        else:
            with pytest.raises(RangeError, match="slice: got start"):
                plan.run(env={POS: pos, m: at})
    assert plan.manifest.bound == {"pos": "symbol", "m": "symbol"}


# Failure


class Failing(Toy):
    """Its neg raises; its write_slice raises half way where `at` says so."""

    kind = "failing"
    armed: ClassVar[str] = ""

    def kernel(self, op: Any, ins: Any, out: Any) -> Kernel | None:
        real = super().kernel(op, ins, out)
        assert real is not None
        if not isinstance(op, Neg | WriteSlice):
            return real

        def emit(call: Call) -> Any:
            def run() -> None:
                if op.name == self.armed:
                    if isinstance(op, WriteSlice):
                        call.out.reshape(-1)[:1] = 99
                    raise ZeroDivisionError("no good")
                for f, args in real.emit(call):
                    f(*args)

            return [(run, ())]

        return Kernel(emit, real.scratch)


def failing_step() -> tuple[lk.Plan, lk.Storage, lk.Storage, dict[Any, Any]]:
    """Writes one storage, computes -x, writes another with it."""
    a, b = (lk.Storage.from_array(np.zeros(4, np.float32), "failing:0") for _ in range(2))
    g = lk.Graph()
    p, q, x = (g.placeholder((4,), "f32") for _ in range(3))
    first = p.at[0:4].set(x)
    second = q.at[0:4].set(-first)
    plan = lk.plan([first, second], {p: a, q: b}, "failing:0")
    return plan, a, b, {x: rows(1, 2, 3, 4)}


def test_SCH10_a_failing_kernel_names_its_node_and_tears_nothing_else() -> None:
    with registered(Failing()):
        plan, a, b, data = failing_step()
        Failing.armed = "neg"
        with pytest.raises(
            KernelError, match=r"neg\[\d+\] of \(f32\[4\]\): got ZeroDivisionError: no"
        ):
            plan.run(data)
        assert (a.torn, a.version, a.to_numpy().tolist()) == (False, 1, [1, 2, 3, 4])
        assert (b.torn, b.version, b.to_numpy().tolist()) == (False, 0, [0, 0, 0, 0])
        Failing.armed = ""
        assert [r.tolist() for r in plan.run(data)] == [[1, 2, 3, 4], [-1, -2, -3, -4]]


def test_SCH10_a_write_that_fails_midway_tears_its_storage() -> None:
    with registered(Failing()):
        plan, a, b, data = failing_step()
        Failing.armed = "write_slice"
        with pytest.raises(KernelError, match="write_slice") as e:
            plan.run(data)
        assert isinstance(e.value.__cause__, ZeroDivisionError)
        Failing.armed = ""
        assert (a.torn, b.torn) == (True, False)
        with pytest.raises(StorageTornError):
            plan.run(data)
        with a.write() as raw:
            raw[...] = 0
        assert [r.tolist() for r in plan.run(data)] == [[1, 2, 3, 4], [-1, -2, -3, -4]]


def test_SCH10_a_refusal_at_run_time_tears_nothing() -> None:
    h = Held()
    at = h.g.placeholder((), "i64")
    plan = h.plan(h.cache.write_slice_at(h.row, 0, at))
    with pytest.raises(RangeError, match="offset 8") as e:
        plan.run({h.row: rows(1), at: np.int64(8)})
    assert any("write_slice_at" in note for note in e.value.__notes__)
    assert (h.store.torn, h.store.version) == (False, 0)
    plan.run({h.row: rows(1), at: np.int64(7)})
    assert h.now()[7] == 1


def test_an_interrupt_is_not_swallowed() -> None:
    class Interrupted(Failing):
        kind = "interrupted"

        def kernel(self, op: Any, ins: Any, out: Any) -> Kernel | None:
            def stop() -> None:
                raise KeyboardInterrupt

            return Kernel(lambda call: [(stop, ())])

    with registered(Interrupted()):
        store = lk.Storage.from_array(rows(1), "interrupted:0")
        g = lk.Graph()
        p = g.placeholder((1,), "f32")
        plan = lk.plan(p.zero_fill(), {p: store}, "interrupted:0")
        for _ in range(2):
            store.torn = False
            with pytest.raises(KeyboardInterrupt):
                plan.run()
            assert store.torn
        assert not store.lock.holds


def test_P1_one_plan_runs_in_one_thread_at_a_time() -> None:
    h = Held()
    plan = h.plan()
    inside, go = threading.Event(), threading.Event()
    results: list[Any] = []

    def hold() -> None:
        with h.store.write():
            inside.set()
            go.wait(5)

    def first() -> None:
        results.append(plan.run({h.row: rows(4)}, {POS: 0}))

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(5)
    runner = threading.Thread(target=first)
    runner.start()
    while not plan.running.holds:
        pass
    with pytest.raises(SessionBusy, match=f"plan {plan.id}"):
        plan.run({h.row: rows(5)}, {POS: 1})
    go.set()
    holder.join()
    runner.join()
    assert results[0].tolist() == [4, 0, 0, 0, 0, 0, 0, 0]
    assert h.now()[:2] == [4, 0]


def test_P1_two_plans_on_one_storage_take_turns() -> None:
    store = lk.Storage.from_array(np.zeros(512, np.int64))
    g = lk.Graph()
    p = g.placeholder((512,), "i64")
    plans = [lk.plan(p.at[:].set(p + 1), {p: store}) for _ in range(2)]
    check = lk.plan(p, {p: store})
    bad: list[Any] = []

    def write(plan: lk.Plan) -> None:
        for _ in range(100):
            plan.run()

    def read() -> None:
        for _ in range(100):
            got = check.run()
            if got.min() != got.max():
                bad.append(got)

    threads = [threading.Thread(target=write, args=(x,)) for x in plans]
    threads.append(threading.Thread(target=read))
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert not bad
    assert store.to_numpy().tolist() == [200] * 512
    assert store.version == 200


# Topology


def test_ST4_a_replaced_backend_refuses_the_plans_that_used_it() -> None:
    with registered(Toy(), Failing()):
        Failing.armed = ""
        here, there = (_small_plan(place) for place in ("toy:0", "failing:0"))
        register_backend("failing", Failing())
        assert here.run().tolist() == [2.0], "a change elsewhere changes nothing"
        with pytest.raises(TopologyChanged, match=r"failing:0.*plan again"):
            there.run()
        assert _small_plan("failing:0").run().tolist() == [2.0]


def test_ST4_a_copy_to_a_replaced_backend_is_compiled_anew() -> None:
    calls = []

    class Counting(Toy):
        def kernel(self, op: Any, ins: Any, out: Any) -> Kernel | None:
            calls.append(op.name)
            return super().kernel(op, ins, out)

    with registered(Toy()):
        for backend in (Toy(), Counting()):
            register_backend("toy", backend)
            g = lk.Graph()
            assert lk.realize(g.const(rows(3)).to("toy:0") * 2).tolist() == [6.0]
    assert "mul_scalar" in calls


def _small_plan(place: str) -> lk.Plan:
    g = lk.Graph()
    p = g.placeholder((1,), "f32")
    return lk.plan(p + 1, {p: lk.Storage.from_array(rows(1), place)}, place)


# What a plan says about itself


def test_manifest_names_what_is_baked_and_what_is_bound() -> None:
    h = Held()
    twin = h.g.placeholder((8,), "f32", name="cache")
    twin_store = lk.Storage.from_array(np.zeros(8, np.float32))
    ranged = lk.Sym("pos", 1, 3)
    target = h.written + twin + h.cache.slice(0, ranged, 1).broadcast_to(8)
    plan = lk.plan(target, {h.cache: h.store, twin: twin_store})
    baked, bound = plan.manifest.baked, plan.manifest.bound
    ids = [v for k, v in baked.items() if k.startswith("storage:cache")]
    assert sorted(ids) == sorted([h.store.id, twin_store.id]), "namesakes do not hide each other"
    ranges = {v for k, v in baked.items() if k.startswith("range:pos")}
    assert ranges == {(0, None), (1, 3)}
    assert baked["generation:cpu"] == generation(CPU)
    assert bound["row"] == "f32[1]"
    assert list(bound.values()).count("symbol") == 2
    assert not plan.manifest.differences(dict(baked))
    changed = {**baked, "generation:cpu": 10**6}
    assert set(plan.manifest.differences(changed)) == {"generation:cpu"}


def test_plans_have_ids_and_a_description() -> None:
    h = Held()
    one, two = h.plan(), h.plan()
    assert one.id < two.id
    text = one.describe()
    assert "write_slice" in text
    assert text.startswith("plan: 2 steps")
    assert text == two.describe(), "SCH-6: the same graph, the same text"
    assert one.runs == 0
    one.run({h.row: rows(1)}, {POS: 0})
    assert repr(one) == f"Plan(id={one.id}, 2 steps, runs=1)"


def test_a_plan_is_one_object_and_keeps_its_id() -> None:
    plan = Held().plan()
    before = plan.id
    with pytest.raises(AttributeError):
        plan.id = plan.id + 1  # type: ignore[misc]
    assert plan.id == before
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(GraphError, match=f"id={before}.*got a copy or a pickle, need a plan"):
            make(plan)


def test_counters_count() -> None:
    plan_cache.clear()
    h = Held()
    start = lk.stats()
    plan = h.plan()
    h.plan()
    built = lk.stats()
    assert (
        built.plans_built - start.plans_built,
        built.plan_cache_hits - start.plan_cache_hits,
    ) == (1, 1)
    plan.run({h.row: rows(1)}, {POS: 0})
    end = lk.stats()
    assert end.kernels_run - built.kernels_run == 1, "the write; no kernel hands the result out"
    assert end.bytes_moved - built.bytes_moved == 4 + 32


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
def test_results_handed_out_are_no_kernels(place: str) -> None:
    b = lk.Graph().const(rows(1, 2)).exp()
    plan = lk.plan([b + b, b * b, b], device=place)
    assert len(plan.steps) == 3 + 3, "exp, add and mul, and three results"
    before = lk.stats().kernels_run
    plan.run()
    assert lk.stats().kernels_run - before == 3
