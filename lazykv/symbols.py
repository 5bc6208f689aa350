"""Symbols: integers that are known when a plan runs, not when it is planned.

An expression is affine, ``c + k1*s1 + k2*s2 ...``: enough for offsets and lengths, and simple
enough that bounds follow from the declared ranges by interval arithmetic.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex, TypeAlias

from lazykv.errors import SymbolError, SymbolRangeError


def as_int(who: str, value: object) -> int:
    """A caller's integer; SymbolError for anything else, bools included."""
    if isinstance(value, bool):
        raise SymbolError(f"{who}: got {value!r}, need an integer")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise SymbolError(f"{who}: got {value!r}, need an integer") from None


class _Arithmetic:
    """The operators shared by symbols and expressions."""

    __slots__ = ()

    def __add__(self, other: "DimLike") -> "Expr":
        return _combine(as_expr(self), as_expr(other), 1)

    __radd__ = __add__

    def __sub__(self, other: "DimLike") -> "Expr":
        return _combine(as_expr(self), as_expr(other), -1)

    def __rsub__(self, other: "DimLike") -> "Expr":
        return _combine(as_expr(other), as_expr(self), -1)

    def __mul__(self, factor: SupportsIndex) -> "Expr":
        k, e = as_int("symbol *", factor), as_expr(self)
        return Expr(tuple((s, c * k) for s, c in e.terms if c * k), e.const * k)

    __rmul__ = __mul__

    def __neg__(self) -> "Expr":
        return self * -1


class Sym(_Arithmetic):
    """A named integer in ``low..high`` (both inclusive; `high=None` is unbounded).

    Two symbols are the same only if they are the same object, which never changes and is its own
    copy; the name is for people. A declared range lets bounds be proved when planning, and a value
    outside it is refused before the first kernel of a pass.
    """

    __slots__ = ("high", "low", "name")
    name: str
    low: int
    high: int | None

    def __init__(self, name: str, low: int = 0, high: int | None = None) -> None:
        if not isinstance(name, str):
            raise SymbolError(f"Sym: got name {name!r}, need a str")
        least = as_int(f"Sym {name!r} low", low)
        most = None if high is None else as_int(f"Sym {name!r} high", high)
        if least < 0 or (most is not None and most < least):
            raise SymbolRangeError(
                f"Sym {name!r}: got range {least}..{most}, need 0 <= low <= high"
            )
        for field, value in (("name", name), ("low", least), ("high", most)):
            object.__setattr__(self, field, value)

    def __setattr__(self, field: str, value: object) -> NoReturn:
        raise AttributeError(f"Sym {self.name!r}: got a new {field}, need another Sym")

    def __delattr__(self, field: str) -> NoReturn:
        raise AttributeError(f"Sym {self.name!r}: got no {field}, need another Sym")

    def __copy__(self) -> "Sym":
        return self

    def __deepcopy__(self, memo: object) -> "Sym":
        return self

    def __reduce__(self) -> NoReturn:
        raise SymbolError(f"Sym {self.name!r}: got a pickle, need a new Sym where it is loaded")

    def check(self, value: int) -> None:
        """Raise `SymbolRangeError` unless the value lies in the declared range."""
        if value < self.low or (self.high is not None and value > self.high):
            top = "" if self.high is None else f"..{self.high}"
            raise SymbolRangeError(
                f"symbol {self.name!r}: got {value}, need {self.low}{top or ' or more'}"
            )

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Expr(_Arithmetic):
    """An affine expression over symbols; `terms` holds nonzero coefficients."""

    terms: tuple[tuple[Sym, int], ...]
    const: int

    def bounds(self) -> tuple[int, int | None]:
        """Least and greatest value over the declared ranges; None means unbounded above.

        Unbounded below (a negative coefficient on an unbounded symbol) is reported as a very
        negative number, which no rule accepts as proved.
        """
        low: int | None = self.const
        high: int | None = self.const
        for s, c in self.terms:
            at_low, at_high = c * s.low, None if s.high is None else c * s.high
            small, large = (at_low, at_high) if c > 0 else (at_high, at_low)
            low = None if low is None or small is None else low + small
            high = None if high is None or large is None else high + large
        return (-(2**63) if low is None else low), high

    def __repr__(self) -> str:
        parts = [s.name if c == 1 else f"{c}*{s.name}" for s, c in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts).replace("+ -", "- ")


@dataclass(frozen=True, slots=True)
class ScalarSlot:
    """Stands for an expression in a compiled op: the value is ``scalars[index]`` at run time."""

    index: int


Dim: TypeAlias = int | Expr | ScalarSlot
"""What ops hold: a plain int or an expression with at least one symbol; compiled ops hold slots."""

DimLike: TypeAlias = SupportsIndex | Sym | Expr | ScalarSlot | _Arithmetic


def as_expr(value: object) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, Sym):
        return Expr(((value, 1),), 0)
    return Expr((), as_int("symbol expression", value))


def as_dim(value: object) -> Dim:
    """Normalize a caller's int, symbol or expression."""
    if type(value) is int:  # most are, several for each row that a cache takes
        return value
    e = as_expr(value)
    return e if e.terms else e.const


def dim_argument(who: str, name: str, value: object, axis: int | None = None) -> Dim:
    """`as_dim` of an op's argument, with an error that names the op, the argument and its axis."""
    try:
        return as_dim(value)
    except SymbolError:
        where = "" if axis is None else f" on axis {axis}"
        raise SymbolError(
            f"{who}: got {value!r} as {name}{where}, need an integer or a symbol expression"
        ) from None


def _combine(a: Expr, b: Expr, sign: int) -> Expr:
    coefficients = dict(a.terms)
    for s, c in b.terms:
        coefficients[s] = coefficients.get(s, 0) + sign * c
    terms = tuple((s, c) for s, c in coefficients.items() if c)
    return Expr(terms, a.const + sign * b.const)


def dim_bounds(dim: Dim) -> tuple[int, int | None]:
    """Least and greatest value a dim can take; None is unbounded."""
    if isinstance(dim, Expr):
        return dim.bounds()
    return (dim, dim) if isinstance(dim, int) else (0, None)


class SymEnv:
    """Values of symbols for one pass; each symbol is bound once.

    Raises `SymbolError` for a conflicting second bind, an unbound symbol or a non-integer, and
    `SymbolRangeError` for a value outside the symbol's declared range (so also for a negative).
    """

    __slots__ = ("_values",)

    def __init__(self, values: "Mapping[Sym, SupportsIndex] | SymEnv | None" = None) -> None:
        self._values: dict[Sym, int] = {}
        if isinstance(values, SymEnv):
            values = values._values
        for sym, value in (values or {}).items():
            self.bind(sym, value)

    def bind(self, sym: Sym, value: SupportsIndex) -> None:
        if not isinstance(sym, Sym):
            raise SymbolError(f"SymEnv.bind: got {sym!r}, need a Sym")
        n = as_int(f"symbol {sym.name!r}", value)
        sym.check(n)
        old = self._values.setdefault(sym, n)
        if old != n:
            raise SymbolError(f"symbol {sym.name!r}: got {n}, but it is already bound to {old}")

    def resolve(self, expr: DimLike) -> int:
        """The value of an expression; every symbol in it must be bound."""
        e = as_expr(expr)
        return e.const + sum(c * self[s] for s, c in e.terms)

    def __getitem__(self, sym: Sym) -> int:
        try:
            return self._values[sym]
        except KeyError:
            raise SymbolError(f"symbol {sym.name!r}: got no value, need one in env") from None

    def __contains__(self, sym: object) -> bool:
        return sym in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"SymEnv({ {s.name: v for s, v in self._values.items()} })"


EnvLike: TypeAlias = SymEnv | Mapping[Any, SupportsIndex] | None
