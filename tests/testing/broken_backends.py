"""Backends with one bug each, of the kinds that real ones have had. The suite must catch them all.

Most are the CPU's or the simulated device's backend with one method or one op's kernel changed. The
modules `broken_*` beside this one hold them; importing one fills `BUGS`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lazykv.backends.cpu import CpuBackend
from lazykv.backends.sim import SimBackend
from lazykv.device import DeviceLocation, Kernel
from lazykv.ops.op import Op

PLACES = (DeviceLocation("broken:0"), DeviceLocation("broken:1"))


@dataclass(frozen=True)
class Bug:
    """A broken backend, the tests to run on it, and one that must fail."""

    make: type[CpuBackend] | type[SimBackend]
    tests: str
    keyword: str | None
    caught_by: str
    kind: str = "broken"
    """The name that it is registered under."""


BUGS: list[Bug] = []


def caught(
    tests: str, by: str, keyword: str | None = None, kind: str = "broken"
) -> Callable[[Any], Any]:
    """Which part of the suite to run on a broken backend (a file, or a test, and what pytest takes
    as ``-k``), and a part of the id of a test that must fail."""

    def add(cls: Any) -> Any:
        BUGS.append(Bug(cls, tests, keyword, by, kind))
        return cls

    return add


class Cpu(CpuBackend):
    """The CPU's backend under another name, and nothing wrong with it yet.

    Of the ops in `ops`, `run` gets the right kernel and the call, when the kernel is to run.
    """

    name: ClassVar[str] = "broken"
    ops: ClassVar[tuple[type[Op], ...]] = ()

    def locations(self):
        return PLACES

    def kernel(self, op, ins, out):
        inner = super().kernel(op, ins, out)
        if inner is None or not isinstance(op, self.ops):
            return inner
        return Kernel(lambda call: [(self.run, (inner, call))], inner.scratch)

    def run(self, inner, call):
        go(inner, self.change(call))

    def change(self, call):
        return call


class Sim(SimBackend):
    """The simulated device under another name, and nothing wrong with it yet."""

    name: ClassVar[str] = "broken"

    def locations(self):
        return PLACES


def go(inner, call, **changes):
    """Run the right kernel, perhaps on other operands."""
    for f, args in inner.emit(replace(call, **changes)):
        f(*args)


def with_operand(call, n, value):
    ins = list(call.ins)
    ins[n] = value
    return replace(call, ins=tuple(ins))


class OtherOp(Cpu):
    """Runs an op with other parameters."""

    def other(self, op):
        raise NotImplementedError

    def kernel(self, op, ins, out):
        if not isinstance(op, self.ops):
            return CpuBackend.kernel(self, op, ins, out)
        changed = self.other(op)
        inner = CpuBackend.kernel(self, changed, ins, out)
        assert inner is not None

        def emit(call):
            now = self.other(call.op)
            return inner.emit(replace(call, op=now))

        return Kernel(emit, inner.scratch)


class Healthy(Cpu):
    """Nothing is wrong with it: what the others change passes without the change."""


class HealthySim(Sim):
    """Nothing is wrong with it either."""
