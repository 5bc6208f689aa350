import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lazykv as lk
from lazykv.errors import SymbolError, SymbolRangeError
from lazykv.symbols import Expr, as_dim, as_expr, dim_bounds

A, B = lk.Sym("a", 0, 5), lk.Sym("b", 2, 4)


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[object, object]:
    """An expression built with the operators, and the same as a function of a and b."""
    if depth == 0:
        n = draw(st.integers(-4, 4))
        return draw(st.sampled_from([(A, lambda a, b: a), (B, lambda a, b: b),
                                     (as_expr(n), lambda a, b: n)]))  # fmt: skip
    x, f = draw(expressions(depth=depth - 1))
    y, h = draw(expressions(depth=depth - 1))
    n = draw(st.integers(-3, 3))
    return draw(
        st.sampled_from(
            [
                (x + y, lambda a, b: f(a, b) + h(a, b)),
                (x - y, lambda a, b: f(a, b) - h(a, b)),
                (n - x, lambda a, b: n - f(a, b)),
                (x * n, lambda a, b: f(a, b) * n),
                (-x, lambda a, b: -f(a, b)),
                (n + x, lambda a, b: n + f(a, b)),
            ]
        )
    )


@given(expressions(), st.integers(0, 5), st.integers(2, 4))
def test_arithmetic_is_that_of_integers(pair: tuple, a: int, b: int) -> None:
    expr, function = pair
    assert lk.SymEnv({A: a, B: b}).resolve(expr) == function(a, b)


@given(expressions())
def test_bounds_hold_every_value_and_are_reached(pair: tuple) -> None:
    expr, function = pair
    values = [function(a, b) for a, b in itertools.product(range(6), range(2, 5))]
    assert dim_bounds(as_dim(expr)) == (min(values), max(values))


def test_unbounded_symbols_prove_nothing_above() -> None:
    n = lk.Sym("n")
    assert (n + 1).bounds() == (1, None)
    assert (5 - n).bounds() == (-(2**63), 5)
    assert dim_bounds(7) == (7, 7)


def test_terms_that_cancel_leave_a_number() -> None:
    assert as_dim(A + 3 - A) == 3
    assert as_dim(A * 0) == 0
    assert as_dim(np.int64(4)) == 4
    assert repr(A + 2 * B - 1) == "a + 2*b - 1"


def test_symbols_compare_by_identity() -> None:
    assert lk.Sym("a") != lk.Sym("a")
    assert len({lk.Sym("a"), lk.Sym("a")}) == 2
    assert A + 1 == A + 1
    assert isinstance(A + 1, Expr)


@pytest.mark.parametrize("field", ["name", "low", "high", "new"])
def test_symbols_never_change(field: str) -> None:
    n = lk.Sym("n", 0, 3)
    with pytest.raises(AttributeError):
        setattr(n, field, 100)
    with pytest.raises(AttributeError):
        delattr(n, field)
    assert (n.name, n.low, n.high) == ("n", 0, 3)
    with pytest.raises(SymbolRangeError):
        lk.SymEnv({n: 50})


def test_a_copy_of_a_symbol_is_itself() -> None:
    assert copy.copy(A) is copy.deepcopy(A) is A
    assert lk.SymEnv({A: 3}).resolve(copy.deepcopy(A + 1)) == 4
    for value in (A, A + 1):
        with pytest.raises(SymbolError, match="got a pickle"):
            pickle.dumps(value)


@pytest.mark.parametrize("name", [3, None, b"n"])
def test_a_name_is_text(name: object) -> None:
    with pytest.raises(SymbolError, match=r"Sym: got name .*, need a str"):
        lk.Sym(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(("low", "high"), [(-1, None), (3, 2), (-2, -1)])
def test_a_declared_range_must_be_one(low: int, high: int | None) -> None:
    with pytest.raises(SymbolRangeError, match=f"got range {low}..{high}"):
        lk.Sym("n", low, high)


@pytest.mark.parametrize("bad", [1.0, "1", True, None, A])
def test_values_are_integers(bad: object) -> None:
    with pytest.raises(SymbolError, match="need an integer"):
        lk.SymEnv({A: bad})  # type: ignore[dict-item]
    with pytest.raises(SymbolError):
        A * bad  # type: ignore[operator]


def test_G9_each_symbol_is_bound_once() -> None:
    env = lk.SymEnv({A: 3})
    env.bind(A, np.int32(3))
    with pytest.raises(SymbolError, match="'a': got 4, but it is already bound to 3"):
        env.bind(A, 4)
    assert env[A] == 3
    assert env.resolve(A + 1) == 4
    assert A in env
    assert B not in env
    assert len(env) == 1


def test_G9_unbound_negative_and_out_of_range_are_typed() -> None:
    with pytest.raises(SymbolError, match="'b': got no value"):
        lk.SymEnv({A: 1}).resolve(A + B)
    with pytest.raises(SymbolRangeError, match="got -1, need 0 or more"):
        lk.SymEnv({lk.Sym("n"): -1})
    with pytest.raises(SymbolRangeError, match=r"'a': got 6, need 0\.\.5"):
        lk.SymEnv({A: 6})
    with pytest.raises(SymbolError, match="need a Sym"):
        lk.SymEnv({"a": 1})  # type: ignore[dict-item]
    assert issubclass(SymbolRangeError, IndexError)


def test_an_env_is_copied_from_an_env() -> None:
    first = lk.SymEnv({A: 1})
    second = lk.SymEnv(first)
    second.bind(B, 2)
    assert B not in first
    assert repr(second) == "SymEnv({'a': 1, 'b': 2})"
