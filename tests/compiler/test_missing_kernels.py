"""An op that a backend can run in no way is refused when planning, by name."""

import numpy as np
import pytest
from toy_backends import Toy, registered

import lazykv as lk
from lazykv.device import Kernel
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
