"""What kernels refuse: a number in device memory that does not fit its operands."""

import contextlib

import numpy as np
import pytest
from cuda_cpu import needs_compiler
from fake_cupy.machine import CUDARuntimeError

import lazykv as lk
from lazykv.backends.cuda import CudaBackend

pytestmark = needs_compiler

PLACE = lk.DeviceLocation("cuda:0")
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)


def store(array: object) -> lk.Storage:
    return lk.Storage.from_array(np.asarray(array), PLACE)


def constant(g: lk.Graph, array: object) -> lk.Tensor:
    """A constant on the device: where operands are, an op runs."""
    return g.const(store(array))


class Written:
    """A plan that writes rows of ones into a storage of four, at a number bound per run."""

    def __init__(self, op: str) -> None:
        g = lk.Graph()
        dest, number = g.placeholder((4, 2), "f32"), g.placeholder((), "i64")
        rows = constant(g, np.ones((2, 2), np.float32))
        made = {
            "write_slice_at": lambda: dest.write_slice_at(rows, 0, number),
            "write_slice_rotating": lambda: dest.write_slice_rotating(rows, 0, number, 3),
            "write_rows": lambda: dest.write_rows(
                rows, lk.concat([number.reshape(1), constant(g, np.array([0]))])
            ),
        }[op]()
        self.number, self.store = number, store(ROWS)
        self.plan = lk.plan(made.slice(0, 0, 1), {dest: self.store}, PLACE)

    def run(self, number: int) -> np.ndarray:
        self.plan.run({self.number: np.array(number)})
        return self.store.to_numpy()


@pytest.mark.parametrize(
    ("op", "bad", "good"),
    [("write_slice_at", 3, 2), ("write_slice_at", -1, 0), ("write_slice_rotating", -1, 5),
     ("write_rows", 4, 3), ("write_rows", 0, 1), ("write_rows", -1, 2)],
)  # fmt: skip
def test_a_refused_write_is_named_writes_nothing_and_is_over(
    cuda: CudaBackend, op: str, bad: int, good: int
) -> None:
    w = Written(op)
    with pytest.raises(lk.RangeError, match=rf"^{op}: got .* on cuda:0") as caught:
        w.run(bad)
    assert op in caught.value.__notes__[0]
    assert not w.store.torn
    np.testing.assert_array_equal(w.store.to_numpy(), ROWS)
    assert (w.run(good) == 1).any()


def attended(op: str, number: int) -> lk.Tensor:
    """An attention over four rows whose length (or block) is a number in device memory."""
    g = lk.Graph()
    q = constant(g, np.ones((1, 2, 1, 4), np.float32))
    k, v = (constant(g, np.ones((1, 1, 4, 4), np.float32)) for _ in range(2))
    length = constant(g, np.array(number))
    if op == "attention":
        return lk.attention(q, k, v, length=length)
    if op == "ring_attention":
        return lk.ring_attention(q, k, v, length=length, window=3)
    if op == "latent_attention":
        wide = np.ones((1, 2, 1, 4), np.float32)
        rows = [constant(g, np.ones((4, 4), np.float32)) for _ in range(2)]
        return lk.latent_attention(
            *(constant(g, wide) for _ in "qp"), *rows, length=length, scale=1.0
        )
    pools = [constant(g, np.ones((3, 2, 1, 4), np.float32)) for _ in range(2)]
    block, lens = (number, 4) if op == "block" else (1, number)
    table = constant(g, np.array([[0, block]], np.uint32))
    return lk.paged_attention(q, *pools, table, constant(g, np.array([lens], np.uint32)))


@pytest.mark.parametrize(
    ("op", "bad", "good"),
    [("attention", 5, 4), ("attention", 0, 1), ("ring_attention", 0, 9), ("latent_attention", 5, 4),
     ("paged_attention", 5, 4), ("block", 3, 2)],
)  # fmt: skip
def test_a_refused_length_or_block_is_named(
    cuda: CudaBackend, op: str, bad: int, good: int
) -> None:
    name = "paged_attention" if op == "block" else op
    with pytest.raises(lk.RangeError, match=rf"^{name}: got .* on cuda:0"):
        lk.realize(attended(op, bad), device=PLACE)
    np.testing.assert_allclose(lk.realize(attended(op, good), device=PLACE), 1)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_an_id_outside_the_table_is_refused(cuda: CudaBackend, dtype: type) -> None:
    g = lk.Graph()
    table, ids = constant(g, ROWS), g.placeholder((2,), np.dtype(dtype))
    plan = lk.plan(table.take(ids), {ids: store(np.array([3, 0], dtype))}, PLACE)
    np.testing.assert_array_equal(plan.run(), ROWS[[3, 0]])
    for bad in (4, -1):
        if bad >= 0 or np.issubdtype(dtype, np.signedinteger):
            with pytest.raises(lk.RangeError, match=r"^take: got .* on cuda:0"):
                plan.run({ids: np.array([0, bad], dtype)})
    np.testing.assert_array_equal(plan.run({ids: np.array([1, 1], dtype)}), ROWS[[1, 1]])


def test_of_several_refusals_the_first_is_named(cuda: CudaBackend) -> None:
    g = lk.Graph()
    table, bad = constant(g, ROWS), constant(g, np.array([9]))
    rows = table.take(bad)
    dest = constant(g, ROWS)
    made = dest.write_slice_at(rows, 0, constant(g, np.array(7)))
    with pytest.raises(lk.RangeError, match=r"^take: got .* on cuda:0"):
        lk.realize(made.slice(0, 0, 1), device=PLACE)
    cuda.synchronize(PLACE)  # both are over


def test_refusals_of_equal_ops_name_the_step_of_their_own_plan(cuda: CudaBackend) -> None:
    g = lk.Graph()
    ids = [g.placeholder((1,), "i64", f"ids{n}") for n in range(2)]
    tables = [constant(g, ROWS), constant(g, ROWS + 1)]
    parts = [t.take(i) for t, i in zip(tables, ids, strict=True)]
    plan = lk.plan(parts, {i: store(np.array([0])) for i in ids}, PLACE)
    takes = [n for n, s in enumerate(plan.steps) if s.op.name == "take"]
    for n in range(2):
        data = {i: np.array([9 if m == n else 0]) for m, i in enumerate(ids)}
        with pytest.raises(lk.RangeError) as caught:
            plan.run(data)
        assert f"step {takes[n]} of its plan" in caught.value.__notes__[0]


def test_a_pass_without_results_waits_for_its_refusal(cuda: CudaBackend) -> None:
    g = lk.Graph()
    dest, at = g.placeholder((4, 2), "f32"), g.placeholder((), "i64")
    write = dest.write_slice_at(constant(g, ROWS[:1]), 0, at)
    held = store(ROWS)
    plan = lk.runtime.realize.plan([], {dest: held}, PLACE, effects=[write])
    with pytest.raises(lk.RangeError, match="write_slice_at"):
        plan.run({at: np.array(4)})
    plan.run({at: np.array(3)})
    np.testing.assert_array_equal(held.to_numpy(), [*ROWS[:3], ROWS[0]])


# What is left of a pass whose kernels ran on


class Copied:
    """A plan that writes rows of a table, by ids bound per run, into two storages: one at an offset
    that is bound too, one behind it."""

    def __init__(self) -> None:
        g = lk.Graph()
        self.stores = [store(ROWS) for _ in range(2)]
        first, second = (g.placeholder((4, 2), "f32") for _ in self.stores)
        self.ids, self.at = g.placeholder((1,), "i64"), g.placeholder((), "i64")
        rows = constant(g, ROWS + 10).take(self.ids)
        writes = [first.write_slice_at(rows, 0, self.at), second.at[3:4].set(rows)]
        bound = dict(zip((first, second), self.stores, strict=True))
        self.plan = lk.runtime.realize.plan([], bound, PLACE, effects=writes)

    def run(self, row: int, at: int) -> list[tuple[int, bool]]:
        """How far the versions of the storages have moved, and whether they are torn."""
        before = [s.version for s in self.stores]
        with contextlib.suppress(lk.RangeError):
            self.plan.run({self.ids: np.array([row]), self.at: np.array(at)})
        return [(s.version - v, s.torn) for s, v in zip(self.stores, before, strict=True)]


@pytest.mark.parametrize(
    ("row", "at", "left"),
    [(1, 2, [(1, False), (1, False)]), (9, 2, [(1, True), (1, True)]),
     (1, 7, [(0, False), (1, True)]), (9, 7, [(0, False), (1, True)])],
)  # fmt: skip
def test_writes_behind_a_refusal_have_happened_and_tear_unless_they_refused_too(
    cuda: CudaBackend, row: int, at: int, left: list[tuple[int, bool]]
) -> None:
    w = Copied()
    assert w.run(row, at) == left
    for held, (_, torn) in zip(w.stores, left, strict=True):
        if torn:
            with pytest.raises(lk.StorageTornError):
                held.to_numpy()
            with held.write() as array:
                cuda.copy_in(array, ROWS)
    assert w.run(3, 0) == [(1, False), (1, False)]
    first, second = (s.to_numpy() for s in w.stores)
    np.testing.assert_array_equal(first[0], ROWS[3] + 10)
    np.testing.assert_array_equal(second, [*ROWS[:3], ROWS[3] + 10])


def test_all_that_refused_are_told_together(cuda: CudaBackend) -> None:
    w = Copied()
    with pytest.raises(lk.RangeError) as caught:
        w.plan.run({w.ids: np.array([9]), w.at: np.array(7)})
    names = [s.op.name for s in w.plan.steps]
    assert caught.value.refused is not None
    assert [op.name for op in caught.value.refused] == ["take", "write_slice_at"]
    assert caught.value.op is w.plan.steps[names.index("take")].op
    cuda.synchronize(PLACE)  # both are over


def test_a_refusal_on_a_device_that_hands_out_nothing_is_told(cuda: CudaBackend) -> None:
    g = lk.Graph()
    ids = g.placeholder((1,), "i64")
    rows = constant(g, ROWS).take(ids).to("cuda:1") * 2.0
    plan = lk.plan(rows, {ids: store(np.array([0]))}, "cuda:1")
    with pytest.raises(lk.RangeError, match=r"^take: got .* on cuda:0"):
        plan.run({ids: np.array([9])})
    np.testing.assert_array_equal(plan.run({ids: np.array([2])}), ROWS[[2]] * 2)


def test_a_fault_in_queued_work_is_a_kernel_error(cuda: CudaBackend) -> None:
    def fault() -> None:
        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access")

    for wait in (
        lambda: cuda.synchronize(PLACE), lambda: store(ROWS).to_numpy(),
        lambda: lk.realize(constant(lk.Graph(), ROWS) + 1.0),
    ):  # fmt: skip
        cuda.queue(PLACE).stream.push(fault)
        with pytest.raises(lk.KernelError, match="illegal memory access"):
            wait()
