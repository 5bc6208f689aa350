"""The suite forgets no op: whatever the package can put into a graph is run on the backend."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from broken_backends import Cpu

import lazykv.backends.cpu  # noqa: F401 (so that every module of ops is loaded)
from lazykv.compiler.ir import Output
from lazykv.device import Call, Kernel, register_backend, unregister_backend
from lazykv.dtypes import ALL
from lazykv.ops.op import Op
from lazykv.ops.sources import Alloc, Const, Fill, Iota, Placeholder, SymValue, ZeroFill
from lazykv.ops.views import Contiguize, Reshape, View
from lazykv.testing.failing import Fail
from lazykv.testing.golden import FLOATS, OVERLAPPING, STORED
from lazykv.testing.layouts import LAYOUTS
from lazykv.testing.runner import run_suite


def concrete_ops() -> set[type[Op]]:
    found, todo = set(), [Op]
    while todo:
        kinds = todo.pop().__subclasses__()
        todo += kinds
        found |= {k for k in kinds if k.__module__.startswith("lazykv.ops.") and "name" in vars(k)}
    return found


def kernel_ops() -> set[type[Op]]:
    """Those that a backend is asked for: a view has a kernel only where it has to be a copy, and
    sources of data have none at all."""
    views = {v for v in View.__subclasses__() if v.__name__ not in ("Reshape", "Contiguize")}
    return concrete_ops() - views - {Const, Placeholder, Alloc, Output, Fail}


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


def run(backend: Cpu, keyword: str) -> None:
    """The part of the suite that runs ops one by one."""
    register_backend("broken", backend)
    try:
        done = run_suite("broken", levels=["core", "dtype", "paged"], keyword=keyword)
    finally:
        unregister_backend("broken")
    assert done.code == 0, done.text


def check_asked(keyword: str, but: set[type[Op]]) -> None:
    """Which ops, and on which dtypes, a part of the suite asks for: all that a backend can run."""
    backend = Watching()
    run(backend, keyword)
    ops = kernel_ops() - but
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


# Layouts


def layout_of(a: np.ndarray) -> str:
    """How an operand that a kernel has got lies in memory."""
    steps = [step for n, step in zip(a.shape, a.strides, strict=True) if n > 1]
    if not a.size:
        return "empty"
    if 0 in steps:
        return "broadcast"
    if steps != sorted(steps, reverse=True):
        return "permuted"
    return "contiguous" if a.flags.c_contiguous else "sliced"


def overlap(ins: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> bool:
    """Whether operands share elements: those of one call, or of one and the same operand of two
    calls, each a window of its own."""
    if any(np.shares_memory(a, b) for a, b in combinations(ins, 2)):
        return True
    return any(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        and a.ctypes.data != b.ctypes.data
        and np.shares_memory(a, b)
        for a, b in zip(ins, before, strict=False)
    )


@dataclass
class Seen:
    """The layouts in which an op's kernel has got an operand, or of a source its result."""

    layouts: set[str] = field(default_factory=set)
    last: tuple[np.ndarray, ...] = ()
    """The operands before: kept, so that no other memory takes their place."""

    def note(self, call: Call) -> None:
        self.layouts |= {layout_of(a) for a in call.ins or (call.out,)}
        if not call.out.size:
            self.layouts.add("empty")
        if overlap(call.ins, self.last):
            self.layouts.add(OVERLAPPING)
        self.last = call.ins if call.op.destroys is None else ()


class WatchingLayouts(Cpu):
    """Notes in which layouts kernels get their operands."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def kernel(self, op, ins, out):
        inner = super().kernel(op, ins, out)
        if inner is None:
            return None

        def emit(call):
            self.seen.setdefault(type(op), Seen()).note(call)
            return inner.emit(call)

        return Kernel(emit, inner.scratch)


SOURCES = (Iota, SymValue, Fill)
NEVER = {
    "a source has no operand, and results are contiguous": {
        (op, layout)
        for op in SOURCES
        for layout in ("sliced", "permuted", "broadcast", OVERLAPPING)
    },
    "a symbol's value is one element": {(SymValue, "empty")},
    "without elements any strides are in row-major order: it is never a copy": {
        (Reshape, "empty"),
        (Contiguize, "empty"),
    },
    "what is in row-major order is never copied": {
        (Reshape, "contiguous"),
        (Contiguize, "contiguous"),
    },
    "what a write reads is copied first if it lies in what is written": {
        (op, OVERLAPPING) for op in kernel_ops() if op.destroys is not None
    },
    "memory in which elements are repeated is not written": {(ZeroFill, "broadcast")},
}
"""What no backend is asked for, by the reason."""

ONE_DTYPE = "f32 or and-bool or mod_scalar-i32 or fill or iota or symbol"


def test_every_op_is_run_in_every_layout():
    backend = WatchingLayouts()
    run(backend, ONE_DTYPE)
    every = {(op, layout) for op in kernel_ops() for layout in (*LAYOUTS, OVERLAPPING)}
    seen = {(op, layout) for op, found in backend.seen.items() for layout in found.layouts}
    assert every - seen == set().union(*NEVER.values())


def test_the_suite_knows_every_dtype():
    assert set(STORED) == {t.name for t in ALL}
