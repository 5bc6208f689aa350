"""Matrix products."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.errors import ShapeError
from lazykv.ops.op import Op, need_arity, need_float, need_same_dtype
from lazykv.spec import Spec


@dataclass(frozen=True)
class MatMul(Op):
    """``[..., M, K] @ [K, N]``, or ``[..., M, K] @ [..., K, N]`` with equal leading extents."""

    name: ClassVar[str] = "matmul"

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 2)
        need_float(self.name, *ins)
        need_same_dtype(self.name, *ins)
        a, b = ins
        fits = (
            a.rank >= 2
            and b.rank >= 2
            and a.shape[-1] == b.shape[-2]
            and (b.rank == 2 or a.shape[:-2] == b.shape[:-2])
        )
        if not fits:
            raise ShapeError(
                f"{self.name}: got {a} and {b}, need [..., M, K] and [K, N] or [..., K, N] with "
                "equal leading extents"
            )
        return Spec((*a.shape[:-1], b.shape[-1]), a.dtype)

    def body(self, xp: Any, *ins: Any) -> Any:
        return xp.matmul(ins[0], ins[1])
