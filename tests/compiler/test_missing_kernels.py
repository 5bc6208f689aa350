"""An op that a backend can run in no way is refused when planning, by name."""

import numpy as np
import pytest
from toy_backends import Toy, registered

import lazykv as lk
from lazykv.device import Capabilities, Kernel
from lazykv.ops.op import Op
from lazykv.spec import Spec


class No16Bit(Toy):
    """Has no kernel with a 16-bit float among its operands, casts included."""

    kind = "no16bit"

    def kernel(self, op: Op, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
        has = any(s.dtype is lk.f16 for s in (*ins, out))
        return None if has else super().kernel(op, ins, out)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda x: x.to("no16bit:0"), r"copy: got f16\[2\]"),
        (lambda x: x.cast("f32"), r"cast: got f16\[2\]"),
        (lambda x: x.silu(), r"cast: got f16\[2\]"),  # its lowering would begin with a cast
    ],
)
def test_an_op_whose_operands_no_kernel_takes_is_named(build, named):
    with registered(No16Bit()):
        g = lk.Graph()
        x = g.placeholder((2,), "f16")
        with pytest.raises(lk.BackendUnavailable, match=f"{named} on no16bit:0, need a kernel"):
            lk.plan(build(x), {x: np.zeros(2, np.float16)}, "no16bit:0")


def test_other_dtypes_run_there():
    with registered(No16Bit()):
        x = lk.Graph().const(np.float32([1, 2])).to("no16bit:0")
        assert lk.realize(x.silu().cast("i32")).tolist() == [0, 1]


PRIMITIVES = frozenset(
    {"copy", "write_slice", "zero_fill", "neg", "exp", "add_scalar", "div", "mul", "mul_scalar"}
)


class Few(Toy):
    """Declares a few ops, and must not be asked for others."""

    kind = "few"
    capabilities = Capabilities(host_memory=True, ops=PRIMITIVES)

    def kernel(self, op: Op, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
        assert op.name in PRIMITIVES, f"{op.name} is not declared"
        return super().kernel(op, ins, out)


def test_an_op_outside_the_declared_ones_is_lowered():
    with registered(Few()):
        g = lk.Graph()
        x = g.placeholder((2,), "f32")
        plan = lk.plan(x.silu(), {x: np.float32([0, 1])}, "few:0")
        assert [s.op.name for s in plan.steps] == ["neg", "exp", "add_scalar", "div", "output"]
        np.testing.assert_allclose(plan.run(), [0, 1 / (1 + np.exp(-1))], rtol=1e-6)


@pytest.mark.parametrize(
    ("build", "dtype", "named", "ops"),
    [
        (lambda x: x.tanh(), "f32", r"tanh: got f32\[2\]", ("tanh",)),
        (lambda x: x.softmax(0), "f32", r"max: got f32\[2\]", ("softmax", "max")),
        # The lowering of a 16-bit float begins with a cast.
        (lambda x: x.silu(), "f16", r"cast: got f16\[2\]", ("silu", "cast")),
    ],
)
def test_an_op_outside_the_declared_ones_that_cannot_be_lowered_is_named(build, dtype, named, ops):
    with registered(Few()):
        x = lk.Graph().placeholder((2,), dtype)
        with pytest.raises(lk.BackendUnavailable, match=f"{named} on few:0, need a k") as caught:
            lk.plan(build(x), device="few:0")
    assert caught.value.ops == ops


def test_a_copy_that_the_compiler_needs_has_to_be_declared():
    class NoCopies(Few):
        capabilities = Capabilities(host_memory=True, ops=PRIMITIVES - {"copy"})

    with registered(NoCopies()):
        g = lk.Graph()
        x = g.placeholder((4,), "f32")
        moved = x.at[1:4].set(x.slice(0, 0, 3))  # its source has to be kept
        with pytest.raises(lk.BackendUnavailable, match=r"copy: got f32\[3\] on few:0, need a k"):
            lk.plan([], {x: lk.Storage.allocate((4,), "f32", "few:0")}, "few:0", effects=[moved])
