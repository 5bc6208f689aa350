"""The suite forgets no op: whatever the package can put into a graph is run on the backend."""

from broken_backends import Cpu

import lazykv.backends.cpu  # noqa: F401 (so that every module of ops is loaded)
from lazykv.compiler.ir import Output
from lazykv.device import register_backend, unregister_backend
from lazykv.dtypes import ALL
from lazykv.ops.op import Op
from lazykv.ops.sources import Alloc, Const, Fill, Iota, Placeholder, SymValue, ZeroFill
from lazykv.ops.views import View
from lazykv.testing.failing import Fail
from lazykv.testing.golden import FLOATS, STORED
from lazykv.testing.runner import run_suite


def concrete_ops() -> set[type[Op]]:
    found, todo = set(), [Op]
    while todo:
        kinds = todo.pop().__subclasses__()
        todo += kinds
        found |= {k for k in kinds if k.__module__.startswith("lazykv.ops.") and "name" in vars(k)}
    return found


PLAIN = "reshape_of_permuted or not (sliced or permuted or broadcast or overlapping])"
"""Without the layouts: they make no difference to which ops run."""


class Watching(Cpu):
    """Notes which kernels were asked for, and on which dtypes."""

    def __init__(self):
        super().__init__()
        self.asked = {}

    def kernel(self, op, ins, out):
        self.asked.setdefault(type(op), set()).update(s.dtype.name for s in (*ins[:1], out))
        return super().kernel(op, ins, out)


def check_asked(keyword: str, but: set[type[Op]]) -> None:
    """Which ops, and on which dtypes, a part of the suite asks for: all that a backend can run."""
    backend = Watching()
    register_backend("broken", backend)
    try:
        done = run_suite("broken", levels=["core", "dtype", "paged"], keyword=keyword)
    finally:
        unregister_backend("broken")
    assert done.code == 0, done.text
    # A view has a kernel only where it has to be a copy; sources of data have none at all.
    views = {v for v in View.__subclasses__() if v.__name__ not in ("Reshape", "Contiguize")}
    ops = concrete_ops() - views - {Const, Placeholder, Alloc, Output, Fail} - but
    assert ops - set(backend.asked) == set()
    moves = {op for op in ops if op.bits}
    missing = {op.__name__: set(STORED) - backend.asked[op] for op in moves}
    assert {n: names for n, names in missing.items() if names} == {}
    floats = {
        op.__name__: set(FLOATS) - backend.asked[op]
        for op in ops - moves
        if backend.asked[op] & set(FLOATS)
    }
    assert {n: names for n, names in floats.items() if names} == {}


def test_every_op_is_run_on_every_dtype_it_takes():
    check_asked(PLAIN, set())


def test_every_op_that_reads_is_run_on_operands_that_overlap():
    check_asked("overlapping] or memory_that_is_written", {Iota, SymValue, Fill, ZeroFill})


def test_the_suite_knows_every_dtype():
    assert set(STORED) == {t.name for t in ALL}
