"""Memory of the backend's devices that other libraries lend: used where it is, by DLPack."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from lazykv import dlpack
from lazykv.dtypes import dtype as find_dtype
from lazykv.dtypes import to_raw
from lazykv.errors import BindingError, ShapeError
from lazykv.graph import Graph
from lazykv.runtime.realize import plan
from lazykv.storage import Storage
from lazykv.testing.compare import check_bits
from lazykv.testing.golden import STORED, Array, patterns, random_of
from lazykv.testing.lending import Lender, need_lending, rows_of, transposed
from lazykv.testing.target import Target

SHAPE = (3, 4)


def some(name: str = "f32") -> Array:
    return patterns(random_of("lent", name), SHAPE, find_dtype(name))


def ones(rows: int = 1) -> Array:
    return np.ones((rows, SHAPE[1]), np.float32)


def owned(target: Target, name: str = "f32") -> Storage:
    """Memory that is to be lent."""
    need_lending(target)
    target.need(name)
    return target.storage(some(name))


def wrap(target: Target, lender: object) -> Storage:
    return Storage.wrap(lender, target.location)


def write(target: Target, store: Storage, data: Array) -> None:
    with store.write() as memory:
        target.backend.copy_in(memory, data)


@pytest.mark.parametrize("name", STORED)
def test_both_sides_see_what_the_other_writes(target: Target, name: str) -> None:
    owner = owned(target, name)
    lent = wrap(target, owner)
    assert (lent.location, lent.spec, lent.frozen) == (target.location, owner.spec, False)
    check_bits(f"{name} in lent memory", lent.to_numpy(), some(name))
    zeros = np.zeros(SHAPE, find_dtype(name).numpy)
    write(target, lent, to_raw(zeros))
    check_bits(f"{name}, written by the borrower", owner.to_numpy(), zeros)
    write(target, owner, to_raw(some(name)))
    check_bits(f"{name}, written by the owner", lent.to_numpy(), some(name))


def test_memory_starts_where_the_lender_says(target: Target) -> None:
    owner = owned(target)
    lent = wrap(target, Lender(owner, rows_of(1, 3)))
    check_bits("rows from the second on", lent.to_numpy(), some()[1:])
    write(target, lent, ones(2))
    check_bits("the whole", owner.to_numpy(), np.concatenate([some()[:1], ones(2)]))


def test_lent_memory_outlives_its_owner(target: Target) -> None:
    owner = owned(target)
    lender = Lender(owner)
    del owner
    lent = wrap(target, lender)
    del lender
    gc.collect()
    others = [target.storage(np.zeros(SHAPE, np.float32)) for _ in range(4)]
    check_bits("lent memory whose owner is gone", lent.to_numpy(), some())
    assert len(others) == 4


def test_a_view_alone_keeps_lent_memory(target: Target) -> None:
    """As a plan does, which keeps arrays and no storages."""
    owner = owned(target)
    array = wrap(target, Lender(owner)).array
    del owner
    gc.collect()
    others = [target.storage(np.zeros(SHAPE, np.float32)) for _ in range(4)]
    check_bits("lent memory by its array", target.backend.copy_out(array), some())
    assert len(others) == 4


def test_lent_memory_is_let_go(target: Target) -> None:
    owner: Storage | None = owned(target)
    used = getattr(target.backend, "used_bytes", lambda place: 0)
    gc.collect()
    target.backend.synchronize(target.location)
    assert owner is not None
    before = used(target.location)
    try:
        alive = weakref.ref(owner.array)
    except TypeError:
        pytest.skip(f"arrays of {target.name} cannot be referred to weakly")
    x = (g := Graph()).placeholder(SHAPE, "f32")
    held = plan(x.at[0:1].set(g.const(ones())), {x: wrap(target, Lender(owner))}, target.location)
    held.run()
    owner = None
    gc.collect()
    assert alive() is not None, "memory that a plan uses was let go"
    del held, x, g
    gc.collect()
    target.backend.synchronize(target.location)
    gc.collect()
    assert alive() is None, "memory that nobody uses any more is kept from its owner"
    assert used(target.location) <= before


def test_a_plan_writes_lent_memory_in_place(target: Target) -> None:
    owner, g = owned(target), Graph()
    write(target, owner, np.zeros(SHAPE, np.float32))
    x, row = g.placeholder(SHAPE, "f32"), g.placeholder((1, SHAPE[1]), "f32")
    held = plan([], {x: wrap(target, Lender(owner))}, target.location,
                effects=[x.at[1:2].set(row + 1.0)])  # fmt: skip
    want = np.zeros(SHAPE, np.float32)
    for n in range(3):
        held.run({row: n * ones()})
        want[1] = n + 1
        check_bits(f"pass {n}, seen by the owner", owner.to_numpy(), want)


def test_a_recording_writes_lent_memory_in_place(target: Target) -> None:
    target.need_capture()
    owner, g = owned(target), Graph()
    write(target, owner, np.zeros(SHAPE, np.float32))
    x, row = g.placeholder(SHAPE, "f32"), g.placeholder((1, SHAPE[1]), "f32")
    held = plan([], {x: wrap(target, Lender(owner))}, target.location,
                effects=[x.at[1:2].set(row)])  # fmt: skip
    held.run({row: ones()})
    held.capture()
    want = np.zeros(SHAPE, np.float32)
    for n in (5, 7):
        held.run({row: n * ones()})
        want[1] = n
        check_bits(f"a replay with {n}, seen by the owner", owner.to_numpy(), want)


def test_what_is_lent_read_only_is_never_written(target: Target) -> None:
    owner, g = owned(target), Graph()
    lent = wrap(target, Lender(owner, read_only=True))
    assert lent.frozen
    with pytest.raises(BindingError), lent.write():
        pass
    x = g.placeholder(SHAPE, "f32")
    with pytest.raises(BindingError):
        plan(x.at[0:1].set(g.const(ones())), {x: lent}, target.location).run()
    check_bits("memory lent read-only", owner.to_numpy(), some())
    with target.backend.receiving(target.location) as stream:
        assert dlpack.borrow(lent, stream).read_only, "an export of it must say so too"


def test_memory_that_is_not_contiguous_is_refused(target: Target) -> None:
    owner = owned(target)
    with pytest.raises(ShapeError):
        wrap(target, Lender(owner, transposed))


def written(target: Target, first: Storage, second: Storage) -> Any:
    """Two storages in one plan, which writes the first."""
    g = Graph()
    x, y = (g.placeholder(s.shape, "f32") for s in (first, second))
    bindings = {x: first, y: second}
    return plan([x.at[0:1].set(g.const(ones())), y + 1.0], bindings, target.location).run()


def test_a_plan_that_writes_takes_memory_once(target: Target) -> None:
    owner = owned(target)
    lent, again = (wrap(target, Lender(owner)) for _ in range(2))
    upper, lower = (wrap(target, Lender(owner, rows_of(*r))) for r in ((0, 2), (1, 3)))
    for pair in ((lent, again), (owner, lent), (lent, owner), (upper, lower)):
        with pytest.raises(BindingError):
            written(target, *pair)
    check_bits("memory that was bound twice", owner.to_numpy(), some())


def test_a_plan_takes_neighbours_in_lent_memory(target: Target) -> None:
    owner = owned(target)
    write(target, owner, ones(3) * 2)
    upper, lower = (wrap(target, Lender(owner, rows_of(*r))) for r in ((0, 1), (1, 3)))
    written(target, upper, lower)
    check_bits("the row above", owner.to_numpy(), np.concatenate([ones(), ones(2) * 2]))
