"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.errors import ShapeError
from lazykv.ops.elementwise import Add, Mul, Sub
from lazykv.ops.move import Concat
from lazykv.ops.op import Op, need_arity, need_float, need_same_dtype
from lazykv.ops.views import BroadcastTo, Reshape, Slice
from lazykv.spec import Shape, Spec


@dataclass(frozen=True)
class Rope(Op):
    """Rotate pair i of the last axis by the angle whose cosine and sine are given.

    x is ``[..., S, D]``, cos and sin are ``[S, D/2]`` (or ``[B, S, D/2]`` for x ``[B, H, S, D]``).
    Pair i is elements ``(2i, 2i+1)`` if `interleaved` (GGUF llama files), else ``(i, i + D/2)``
    (Hugging Face checkpoints).
    """

    name: ClassVar[str] = "rope"
    interleaved: bool

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 3)
        x, cos, sin = ins
        need_float(self.name, *ins)
        need_same_dtype(self.name, *ins)
        if x.rank < 2 or x.shape[-1] % 2:
            raise ShapeError(f"{self.name}: got {x}, need [..., S, D] with an even D")
        want: list[Shape] = [(x.shape[-2], x.shape[-1] // 2)]
        if x.rank == 4:
            want.append((x.shape[0], *want[0]))
        if cos.shape not in want or sin.shape != cos.shape:
            raise ShapeError(
                f"{self.name}: got cos {cos} and sin {sin} for {x}, need {Spec(want[0], x.dtype)}"
            )
        return x

    def _wide(self, xp: Any, table: Any) -> Any:
        return xp.expand_dims(table, axis=1) if table.ndim == 3 else table

    def body(self, xp: Any, *ins: Any) -> Any:
        x, cos, sin = ins[0], self._wide(xp, ins[1]), self._wide(xp, ins[2])
        half = x.shape[-1] // 2
        out = xp.empty_like(x)
        first, second = self.pairs(half)
        a, c = x[..., first], x[..., second]
        out[..., first] = a * cos - c * sin
        out[..., second] = c * cos + a * sin
        return out

    def pairs(self, half: int) -> tuple[slice, slice]:
        """Indices of the first and the second elements of all pairs."""
        if self.interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, half), slice(half, None)

    def lower(self, b: Any, *ins: Any) -> Any:
        x, cos, sin = ins
        shape = b.spec(x).shape
        rank, half = len(shape), shape[-1] // 2
        part = (*shape[:-1], half)
        if len(b.spec(cos).shape) == 3:
            tall = Reshape((shape[0], 1, shape[2], half))
            cos, sin = b.apply(tall, cos), b.apply(tall, sin)
        cos, sin = b.apply(BroadcastTo(part), cos), b.apply(BroadcastTo(part), sin)
        # Pairs side by side become [..., half, 2], pairs half a row apart [..., 2, half].
        axis = rank if self.interleaved else rank - 1
        paired = b.apply(Reshape((*shape[:-1], half, 2) if self.interleaved
                                 else (*shape[:-1], 2, half)), x)  # fmt: skip
        a = b.apply(Reshape(part), b.apply(Slice(axis, 0, 1), paired))
        c = b.apply(Reshape(part), b.apply(Slice(axis, 1, 1), paired))
        first = b.apply(Sub(), b.apply(Mul(), a, cos), b.apply(Mul(), c, sin))
        second = b.apply(Add(), b.apply(Mul(), c, cos), b.apply(Mul(), a, sin))
        one = Reshape((*part, 1) if self.interleaved else (*part[:-1], 1, half))
        joined = b.apply(Concat(axis), b.apply(one, first), b.apply(one, second))
        return b.apply(Reshape(shape), joined)
