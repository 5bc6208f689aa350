"""Layouts against NumPy views of an arange, whose elements are their own offsets."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lazykv as lk
from lazykv.layout import Layout, overlap
from lazykv.symbols import as_dim

Pair = tuple[Layout, Any]


def strides_of(view: Any) -> tuple[int, ...]:
    return tuple(s // view.itemsize for s in view.strides)


def offsets(layout: Layout) -> Any:
    """The offset of every element, straight from the definition."""
    out = np.zeros(layout.shape, np.int64)
    for index in np.ndindex(*layout.shape):
        out[index] = layout.offset + sum(i * s for i, s in zip(index, layout.strides, strict=True))
    return out


@st.composite
def folds(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    shape = []
    for factor in draw(st.permutations([2, 2, 3, 1])):
        if size and size % factor == 0 and draw(st.booleans()):
            shape.append(factor)
            size //= factor
    shape.insert(draw(st.integers(0, len(shape))), size)
    return tuple(shape)


@st.composite
def pairs(draw: st.DrawFn, size: int = 24, steps: int = 4) -> Pair:
    """A layout reached by some view steps, and the NumPy view reached by the same."""
    shape = draw(folds(size))
    layout, view = Layout.contiguous(shape), np.arange(size).reshape(shape)
    for _ in range(draw(st.integers(0, steps))):
        layout, view = draw(stepped(layout, view))
    return layout, view


@st.composite
def stepped(draw: st.DrawFn, layout: Layout, view: Any) -> Pair:
    kind = draw(st.sampled_from(["slice", "permute", "broadcast", "reshape"]))
    if kind == "permute":
        axes = draw(st.permutations(range(view.ndim)))
        return layout.permute(axes), view.transpose(axes)
    if kind == "broadcast" and view.ndim < 4:
        shape = tuple(draw(st.sampled_from([1, 2])) if n == 1 else n for n in view.shape)
        shape = (draw(st.sampled_from([1, 2])), *shape)
        return layout.broadcast(shape), np.broadcast_to(view, shape)
    if kind == "reshape":
        shape = draw(folds(view.size))
        made = layout.reshape(shape)
        return (layout, view) if made is None else (made, view.reshape(shape))
    if not view.ndim:
        return layout, view
    axis = draw(st.integers(0, view.ndim - 1))
    length = draw(st.integers(0, view.shape[axis]))
    start = draw(st.integers(0, view.shape[axis] - length))
    cut = view[(slice(None),) * axis + (slice(start, start + length),)]
    return layout.slice(axis, start, length), cut


@given(pairs())
def test_views_name_the_elements_that_numpy_names(pair: Pair) -> None:
    layout, view = pair
    assert layout.shape == view.shape
    assert np.array_equal(offsets(layout), view)


@given(pairs())
def test_contiguous_means_what_numpy_means(pair: Pair) -> None:
    layout, view = pair
    assert layout.is_contiguous == view.flags.c_contiguous


@given(pairs())
def test_repeats_means_that_elements_are_named_twice(pair: Pair) -> None:
    layout, view = pair
    assert layout.repeats == (len(np.unique(view)) < view.size)


@given(pairs(), st.data())
def test_reshape_shares_memory_exactly_where_numpy_can(pair: Pair, data: st.DataObject) -> None:
    layout, view = pair
    shape = data.draw(folds(view.size))
    made = layout.reshape(shape)
    try:
        want = np.reshape(view, shape, copy=False)
    except ValueError:
        assert made is None
    else:
        assert made is not None
        assert np.array_equal(offsets(made), want)


@given(pairs())
def test_span_holds_every_element(pair: Pair) -> None:
    layout, view = pair
    span = layout.span()
    assert span is not None
    if view.size:
        assert span == (view.min(), view.max() + 1)
    else:
        assert span[0] == span[1]


@given(pairs(), pairs())
def test_overlap_equals_brute_force(a: Pair, b: Pair) -> None:
    assert overlap(a[0], b[0]) == bool(np.intersect1d(a[1], b[1]).size)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (1, 1), (5,)])
def test_plain_layouts_never_repeat(shape: tuple[int, ...]) -> None:
    layout = Layout.contiguous(shape)
    assert layout.is_contiguous
    assert not layout.repeats


def test_symbolic_offsets_are_answered_by_their_range() -> None:
    row = Layout.contiguous((10,))
    low, free = lk.Sym("low", 0, 2), lk.Sym("free")
    early = row.slice(0, as_dim(low), 2)
    assert early.span() == (0, 4)
    assert overlap(early, row.slice(0, 3, 2))
    assert not overlap(early, row.slice(0, 4, 2))
    assert row.slice(0, as_dim(free), 2).span() is None
    assert overlap(row.slice(0, as_dim(free), 2), row.slice(0, 8, 2))
    assert not overlap(row.slice(0, as_dim(free), 0), row)


def test_a_search_that_is_too_hard_counts_as_an_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Layout.contiguous((8,))

    def give_up(*args: object, **options: object) -> bool:
        raise np.exceptions.TooHardError

    monkeypatch.setattr(np, "shares_memory", give_up)
    overlap.cache_clear()
    assert overlap(a, a.slice(0, 1, 3))
    overlap.cache_clear()
