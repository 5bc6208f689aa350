"""Backends on NumPy memory that leave something out, so that other paths of the compiler run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

import lazykv as lk
from lazykv.backends.cpu import CpuBackend
from lazykv.backends.cpu_body import PORTABLE
from lazykv.device import DeviceLocation, Kernel, register_backend, unregister_backend
from lazykv.ops.op import Op
from lazykv.spec import Spec


class Toy(CpuBackend):
    """The CPU's kernels under another name."""

    kind: ClassVar[str] = "toy"

    def locations(self) -> tuple[DeviceLocation, ...]:
        return (DeviceLocation(f"{self.kind}:0"), DeviceLocation(f"{self.kind}:1"))


class Primitive(Toy):
    """Has no kernel for a fused op: its lowering runs."""

    kind = "primitive"

    def kernel(self, op: Op, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
        return None if type(op).lower is not Op.lower else super().kernel(op, ins, out)


class Portable(Toy):
    """Has no kernel of its own where an op has a body."""

    kind = "portable"

    def kernel(self, op: Op, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
        has_body = type(op).body is not Op.body and op.destroys is None
        return PORTABLE if has_body else super().kernel(op, ins, out)


@contextmanager
def registered(*backends: Toy) -> Iterator[None]:
    for b in backends:
        register_backend(b.kind, b)
    try:
        yield
    finally:
        for b in backends:
            unregister_backend(b.kind)


OTHERS: list[str] = []
"""Locations of further backends, for as long as they are registered."""


def run_everywhere(
    build: Callable[..., lk.Tensor], inputs: Sequence[Any], env: Any = None
) -> dict[str, Any]:
    """The result of a graph with the CPU's kernels, with bodies alone, and with lowerings.

    `build` gets one tensor per input array.
    """
    with registered(Primitive(), Portable()):
        results = {}
        for place in ("cpu", "portable:0", "primitive:0", *OTHERS):
            g = lk.Graph()
            tensors = [g.placeholder(np.shape(a), np.asarray(a).dtype) for a in inputs]
            stores = [lk.Storage.from_array(np.array(a), place) for a in inputs]
            plan = lk.plan(build(*tensors), dict(zip(tensors, stores, strict=True)), place)
            assert {str(r.location) for r in plan.program.registers} <= {place}
            if place == "primitive:0":
                assert all(type(s.op).lower is Op.lower for s in plan.steps)
            results[place] = plan.run(env=env)
        return results


TOLERANCE = {"f64": 1e-12, "f32": 2e-5, "f16": 2e-3, "bf16": 2e-2}
FLOATS = tuple(TOLERANCE)


def check_everywhere(
    build: Callable[..., lk.Tensor], inputs: Sequence[Any], want: Any, env: Any = None,
    scale: float = 1.0,
) -> None:  # fmt: skip
    """Compare all three ways with a float64 reference, to the precision of the result's dtype."""
    for place, got in run_everywhere(build, inputs, env).items():
        limit = TOLERANCE[lk.dtype(got.dtype).name] * scale
        assert got.shape == np.shape(want), place
        np.testing.assert_allclose(
            got.astype(np.float64), want, rtol=limit, atol=limit, err_msg=place
        )


def floats(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> Any:
    return rng.standard_normal(tuple(shape)).astype(lk.dtype(dtype).numpy)
