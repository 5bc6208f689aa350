"""Normalizations over the last axis."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from lazykv.errors import RangeError, ShapeError
from lazykv.ops.elementwise import Add, AddScalar, Mul, Rsqrt, Sub
from lazykv.ops.op import Op, need_arity, need_float, need_same_dtype
from lazykv.ops.reduce import Mean
from lazykv.ops.views import BroadcastTo
from lazykv.spec import Spec


def _check(who: str, ins: tuple[Spec, ...], vectors: int, eps: float) -> Spec:
    need_arity(who, ins, 1 + vectors)
    if not 0 <= eps < math.inf:
        raise RangeError(f"{who}: got eps {eps}, need a finite number >= 0")
    need_float(who, ins[0])
    need_same_dtype(who, *ins)
    if ins[0].rank < 1 or ins[0].shape[-1] == 0:
        raise ShapeError(f"{who}: got {ins[0]}, need rank >= 1 and a last axis that is not empty")
    for s in ins[1:]:
        if s.shape != ins[0].shape[-1:]:
            raise ShapeError(f"{who}: got {s}, need {Spec(ins[0].shape[-1:], s.dtype)}")
    return ins[0]


@dataclass(frozen=True)
class RmsNorm(Op):
    """``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

    name: ClassVar[str] = "rms_norm"
    eps: float

    def infer(self, *ins: Spec) -> Spec:
        return _check(self.name, ins, 1, self.eps)

    def body(self, xp: Any, *ins: Any) -> Any:
        x, weight = ins
        square = xp.mean(x * x, axis=-1, keepdims=True)
        return x * (1 / xp.sqrt(square + self.eps)) * weight

    def lower(self, b: Any, *ins: Any) -> Any:
        x, weight = ins
        shape = b.spec(x).shape
        square = b.apply(Mean(len(shape) - 1, True), b.apply(Mul(), x, x))
        scale = b.apply(Rsqrt(), b.apply(AddScalar(self.eps), square))
        scaled = b.apply(Mul(), x, b.apply(BroadcastTo(shape), scale))
        return b.apply(Mul(), scaled, b.apply(BroadcastTo(shape), weight))


@dataclass(frozen=True)
class LayerNorm(Op):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` (Ba et al., 2016, arXiv:1607.06450)."""

    name: ClassVar[str] = "layer_norm"
    eps: float

    def infer(self, *ins: Spec) -> Spec:
        return _check(self.name, ins, 2, self.eps)

    def body(self, xp: Any, *ins: Any) -> Any:
        x, weight, bias = ins
        centred = x - xp.mean(x, axis=-1, keepdims=True)
        variance = xp.mean(centred * centred, axis=-1, keepdims=True)
        return centred * (1 / xp.sqrt(variance + self.eps)) * weight + bias

    def lower(self, b: Any, *ins: Any) -> Any:
        x, weight, bias = ins
        shape = b.spec(x).shape
        last, wide = len(shape) - 1, BroadcastTo(shape)
        centred = b.apply(Sub(), x, b.apply(wide, b.apply(Mean(last, True), x)))
        variance = b.apply(Mean(last, True), b.apply(Mul(), centred, centred))
        scale = b.apply(Rsqrt(), b.apply(AddScalar(self.eps), variance))
        scaled = b.apply(Mul(), centred, b.apply(wide, scale))
        weighted = b.apply(Mul(), scaled, b.apply(wide, weight))
        return b.apply(Add(), weighted, b.apply(wide, bias))
