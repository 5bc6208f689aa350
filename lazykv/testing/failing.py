"""An op that fails when it runs, for tests of what is left behind."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from lazykv.compiler.plan import Plan
from lazykv.errors import BackendUnavailable
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
    Fail.armed = False
    try:
        yield
    finally:
        Fail.armed = True


def run_and_wait(made: Plan, bindings: Mapping[Tensor, Any] | None = None) -> None:
    """A pass that hands nothing back, to its end: where a queued failure shows at the latest."""
    made.run(bindings)
    made.synchronize()


def plan_to_fail(
    target: Target, targets: Sequence[Tensor], bindings: Mapping[Tensor, Any] | None = None,
    effects: Sequence[Tensor] = (),
) -> Plan:  # fmt: skip
    """A plan with a `Fail` in it; skips the test where bodies of other people's ops do not run."""
    try:
        return plan(targets, bindings, target.location, effects=effects)
    except BackendUnavailable as e:
        pytest.skip(f"{target.name} runs no op by its body: {e}")
