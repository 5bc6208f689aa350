"""An op that fails when it runs, for tests of what is left behind."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from lazykv.compiler.plan import Plan
from lazykv.errors import BackendUnavailable, BindingError
from lazykv.graph import Tensor
from lazykv.ops.op import Op, need_arity
from lazykv.runtime.realize import plan
from lazykv.spec import Spec
from lazykv.testing.target import Target

PURPOSE = "fails on purpose"


@dataclass(frozen=True)
class Fail(Op):
    """Its operand; while `armed`, its body raises."""

    name: ClassVar[str] = "fail"
    pure: ClassVar[bool] = False
    armed: ClassVar[bool] = True

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        return ins[0]

    def body(self, xp: Any, *ins: Any) -> Any:
        if self.armed:
            raise RuntimeError(PURPOSE)
        return ins[0]


def fail(t: Tensor) -> Tensor:
    return t.graph.apply(Fail(), t)


@contextmanager
def disarmed() -> Iterator[None]:
    """`Fail` hands its operand through inside."""
    before, Fail.armed = Fail.armed, False
    try:
        yield
    finally:
        Fail.armed = before


def run_and_wait(made: Plan, bindings: Mapping[Tensor, Any] | None = None) -> None:
    """A pass that hands nothing back, to its end: where a queued failure shows at the latest."""
    made.run(bindings)


def plan_to_fail(
    target: Target, targets: Sequence[Tensor], bindings: Mapping[Tensor, Any] | None = None,
    effects: Sequence[Tensor] = (),
) -> Plan:  # fmt: skip
    """A plan with a `Fail` in it; skips the test where bodies of other people's ops do not run."""
    with skip_without_bodies(target):
        made = plan(targets, bindings, target.location, effects=effects)
        with suppress(BindingError):  # an input comes with the first run
            made.resolve()  # else kernels emit their calls now
        return made


@contextmanager
def skip_without_bodies(target: Target) -> Iterator[None]:
    """Skips the test if a plan inside is refused for its `Fail`, whose body does not fail inside: a
    backend may run it to see what it does."""
    try:
        with disarmed():
            yield
    except BackendUnavailable as e:
        if e.ops != (Fail.name,) or target.undeclared(e):
            raise
        pytest.skip(f"{target.name} runs no op by its body: {e}")
