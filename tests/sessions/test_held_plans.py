"""Plans that are kept and run again, outside of any cache."""

import numpy as np
import pytest

import lazykv as lk


def test_a_view_taken_before_a_write_keeps_its_meaning_e8():
    """The view reads what was there before the write that was built after it, eager and planned."""
    for planned in (False, True):
        store = lk.Storage.from_array(np.zeros((2, 1), np.float32))
        g = lk.Graph()
        dest = g.placeholder((2, 1), "f32")
        view = dest.slice(0, 0, 2)
        wrote = dest.at[0:1].set(g.const(np.array([[5]], np.float32)))
        if planned:
            old, new = lk.plan([view, wrote], {dest: store}).run()
        else:
            old, new = lk.realize([view, wrote], {dest: store})
        assert (old.tolist(), new.tolist()) == ([[0], [0]], [[5], [0]])
        assert store.to_numpy().tolist() == [[5], [0]]


@pytest.mark.parametrize(("size", "shift"), [(4, 1), (2**20, 2**19)])
def test_a_buffer_that_moves_into_itself_e9(size, shift):
    """Three steps of one plan: the buffer becomes its own tail plus new rows."""
    first = np.arange(size, dtype=np.float32)
    store = lk.Storage.from_array(first)
    g = lk.Graph()
    buffer, new = g.placeholder((size,), "f32"), g.placeholder((shift,), "f32")
    moved = lk.concat([buffer.slice(0, shift, size - shift), new])
    plan = lk.plan(buffer.at[0:size].set(moved), {buffer: store})
    want = first
    for step in range(3):
        rows = np.full(shift, 4 + step, np.float32)
        before, want = want, np.concatenate([want[shift:], rows])
        np.testing.assert_array_equal(plan.run({new: rows}), want)
        np.testing.assert_array_equal(store.to_numpy(), want)
        np.testing.assert_array_equal(want[: size - shift], before[shift:])
    if size == 4:
        assert store.to_numpy().tolist() == [3, 4, 5, 6]


def test_results_held_across_runs_e6():
    g = lk.Graph()
    x = g.placeholder((), "f64")
    plan = lk.plan(x + 1.0)
    one, two = plan.run({x: np.float64(1.1)}), plan.run({x: np.float64(1.2)})
    assert (float(one), float(two)) == (2.1, 2.2)


@pytest.mark.parametrize("transposed", [False, True])
def test_every_length_is_its_own_structure_f2(transposed):
    """Only starts are symbols, so each length has its own plan; none is used for another."""
    plans = {}
    for n in (1, 2, 3, 4, 2, 1):
        g = lk.Graph()
        x = g.placeholder((n, 2), "f32")
        y = (x.transpose(0, 1) if transposed else x) + 1.0
        plans.setdefault(n, (lk.plan(y), x))
        plan, mine = plans[n]
        value = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
        out = plan.run({mine: value})
        np.testing.assert_array_equal(out, (value.T if transposed else value) + 1)
        with pytest.raises(lk.BindingError, match=rf"got f32\[{n + 1},2\]"):
            plan.run({mine: np.zeros((n + 1, 2), np.float32)})
        np.testing.assert_array_equal(out, (value.T if transposed else value) + 1)
