"""What an op is: parameters, shape rule, effects, lowering and reference body, in one class.

The compiler reads what ops declare and never their names. To add an op: one class in one module of
this package, a method on `Tensor`, and kernels in the backends that can do better than the body.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np

from lazykv.dtypes import DType, bool_
from lazykv.errors import DTypeError, GraphError, RangeError, ShapeError
from lazykv.layout import Layout
from lazykv.spec import Spec
from lazykv.symbols import Dim, Expr, ScalarSlot, dim_bounds

V = TypeVar("V")


class Builder(Protocol[V]):
    """What a lowering builds with: the compiler's values, not the user's tensors."""

    def apply(self, op: "Op", *inputs: V) -> V: ...

    def spec(self, value: V) -> Spec: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """A condition on a symbolic parameter: ``low <= value <= high``, checked before a pass runs."""

    value: Dim
    low: int
    high: int
    what: str


@dataclass(frozen=True)
class Op:
    """Base of all ops. Instances hold parameters only: never data, never identities.

    - `destroys`: index of the input whose bytes the op overwrites in place, or None. The result of
      such an op adopts that input's buffer.
    - `bits`: the op moves elements without arithmetic, so it works on raw bits of any dtype.
    - `dims`: names of the fields that may hold symbolic dims.
    - `pure`: equal ops on equal inputs may be merged.
    """

    name: ClassVar[str]
    destroys: ClassVar[int | None] = None
    bits: ClassVar[bool] = False
    pure: ClassVar[bool] = True
    dims: ClassVar[tuple[str, ...]] = ()

    def infer(self, *ins: Spec) -> Spec:
        """Shape and dtype of the result; raises for operands that break the op's rules."""
        raise NotImplementedError

    def alias(self, source: Layout) -> Layout | None:
        """Where the result lies in the first input's buffer, or None if it needs its own."""
        return None

    def region(self, dest: Layout) -> Layout:
        """For a destructive op: the part of the destination it overwrites (may be too large)."""
        return dest

    def bounds(self, *ins: Spec) -> Iterator[Bound]:
        """Conditions on the symbolic parameters."""
        return iter(())

    def body(self, xp: Any, *ins: Any) -> Any:
        """The result as an array of namespace `xp`: the reference semantics.

        Inputs come in the dtype arithmetic runs in (f32 for 16-bit floats), or as raw bits if
        `bits`. Symbolic fields are ints by then. Never modifies its inputs; the result may be one.
        Of `xp` it takes what the array API standard has (2024.12), and that new arrays are made on
        the device of the inputs unless told otherwise.
        """
        raise NotImplementedError

    def lower(self, b: Builder[V], *ins: V) -> V | None:
        """The same result from more primitive ops, or None for a primitive op."""
        return None

    def map_dims(self, f: Callable[[Dim], Dim]) -> Self:
        """The op with `f` applied to every symbolic dim in its fields."""
        changes = {}
        for name in self.dims:
            old = getattr(self, name)
            new = tuple(_map(f, d) for d in old) if isinstance(old, tuple) else _map(f, old)
            if new != old:
                changes[name] = new
        return replace(self, **changes) if changes else self

    def key(self) -> tuple[Any, ...]:
        """Class and parameters as plain values; floats by bits, since 0.0 == -0.0."""
        return (type(self), *(_plain(getattr(self, f.name)) for f in fields(self)))

    def params(self) -> dict[str, Any]:
        """Parameters by name, for dumps."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _map(f: Callable[[Dim], Dim], value: Any) -> Any:
    return f(value) if isinstance(value, Expr | ScalarSlot) else value


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, DType):
        return value.name
    return value


def check_bound(who: str, b: Bound) -> None:
    """Refuse a parameter that is out of bounds for every value its symbols can take."""
    low, high = dim_bounds(b.value)
    if low > b.high or (high is not None and high < b.low):
        raise RangeError(f"{who}: got {b.what} = {b.value}, need {b.low} <= value <= {b.high}")


def is_proved(b: Bound) -> bool:
    """Whether declared ranges prove the bound, so that it need not be checked per pass."""
    low, high = dim_bounds(b.value)
    return b.low <= low and high is not None and high <= b.high


def dtype_in(xp: Any, dt: np.dtype[Any]) -> Any:
    """A NumPy dtype as the array namespace `xp` has it, under the same name."""
    return getattr(xp, dt.name)


def need_arity(who: str, ins: Sequence[Spec], n: int) -> None:
    if len(ins) != n:
        raise GraphError(f"{who}: got {len(ins)} operands, need {n}")


def need_number_of(who: str, s: Spec, value: float) -> None:
    """A Python number must be one that an element can hold; floats are rounded, never cut."""
    if s.dtype.is_float:
        return
    low, high = (0, 1) if s.dtype is bool_ else _range_of(s.dtype)
    if isinstance(value, float) or not low <= value <= high:
        raise DTypeError(f"{who}: got {value!r} with {s}, need an integer in {low}..{high}")


def _range_of(dt: DType) -> tuple[int, int]:
    info = np.iinfo(dt.numpy)
    return int(info.min), int(info.max)


def need_float(who: str, *ins: Spec) -> None:
    for s in ins:
        if not s.dtype.is_float or s.dtype.storage_only:
            raise DTypeError(
                f"{who}: got {s}, need a floating dtype of 16 bits or more; use cast()"
            )


def need_same_dtype(who: str, *ins: Spec) -> None:
    if any(s.dtype is not ins[0].dtype for s in ins[1:]):
        got = " and ".join(map(str, ins))
        raise DTypeError(f"{who}: got {got}, need one dtype; use cast()")


def need_rank(who: str, s: Spec, rank: int, what: str) -> None:
    if s.rank != rank:
        raise ShapeError(f"{who}: got {what} {s}, need rank {rank}")


def need_scalar_i64(who: str, s: Spec, what: str) -> None:
    if s.shape != () or s.dtype.name != "i64":
        raise ShapeError(f"{who}: got {what} {s}, need i64[]")
