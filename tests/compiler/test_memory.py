from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_backends import Toy, registered

import lazykv as lk
from lazykv.backends.cpu import CpuBackend
from lazykv.compiler.memory import ALIGNMENT, Interval, aligned, assign, last_uses


@st.composite
def intervals(draw: st.DrawFn) -> list[Interval]:
    out = []
    for owner in range(draw(st.integers(0, 12))):
        first = draw(st.integers(0, 10))
        last = first + draw(st.integers(0, 6))
        out.append(Interval((owner, 0), draw(st.integers(0, 300)), first, last))
    return out


@given(intervals())
def test_buffers_never_meet_in_time_and_space(wanted: list[Interval]) -> None:
    offsets, top = assign(wanted)
    assert set(offsets) == {iv.owner for iv in wanted}
    for a in wanted:
        start = offsets[a.owner]
        assert start % ALIGNMENT == 0
        assert start + a.nbytes <= top
        for b in wanted:
            apart = start + a.nbytes <= offsets[b.owner] or offsets[b.owner] + b.nbytes <= start
            later = a.last < b.first or b.last < a.first
            assert a is b or apart or later or not a.nbytes or not b.nbytes


@given(intervals())
def test_the_arena_holds_the_busiest_step_and_not_everything(wanted: list[Interval]) -> None:
    _, top = assign(wanted)
    steps = range(17)
    busiest = max(
        sum(aligned(iv.nbytes) for iv in wanted if iv.first <= s <= iv.last) for s in steps
    )
    assert busiest <= top <= sum(aligned(iv.nbytes) for iv in wanted)


def test_a_freed_buffer_is_used_again() -> None:
    offsets, top = assign(
        [Interval((0, 0), 64, 0, 1), Interval((1, 0), 64, 1, 2), Interval((2, 0), 64, 2, 3)]
    )
    assert offsets == {(0, 0): 0, (1, 0): 64, (2, 0): 0}
    assert top == 128
    assert last_uses([(0, [5]), (1, [6, 5]), (2, [6])]) == {5: 1, 6: 2}


def test_SCH4_a_long_chain_needs_two_buffers() -> None:
    t = lk.Graph().const(np.zeros(1000, np.float32))
    for _ in range(50):
        t = (t + 1).exp()
    plan = lk.plan(t)
    assert plan.program.arena_bytes == 2 * aligned(4000)


@pytest.mark.parametrize("place", ["cpu", "toy:0"])
def test_SCH4_peak_bytes_are_what_is_allocated(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    allocate, copy_out = CpuBackend.allocate, CpuBackend.copy_out

    def count(self: Any, nbytes: int, location: Any) -> Any:
        taken.append(nbytes)
        return allocate(self, nbytes, location)

    def count_result(self: Any, source: Any) -> Any:
        taken.append(source.nbytes)
        return copy_out(self, source)

    with registered(Toy()):
        g = lk.Graph()
        x, w = g.placeholder((3, 70), "f32"), g.placeholder((70,), "f32")
        scratch = g.alloc((3, 70), "f32", place).zero_fill().at[:, 0:1].set(x[:, 1:2])
        target = [(x + 1).rms_norm(w).softmax(), scratch + x, x.transpose(0, 1).cast("bf16")]
        arrays = {x: np.ones((3, 70), np.float32), w: np.ones(70, np.float32)}
        monkeypatch.setattr(CpuBackend, "allocate", count)
        monkeypatch.setattr(CpuBackend, "copy_out", count_result)
        plan = lk.plan(target, arrays, place)
        plan.run()
        assert plan.peak_bytes == sum(taken)
        assert str(plan.peak_bytes) in plan.describe()
        taken.clear()
        plan.run()
        assert sum(taken) == plan.program.result_bytes, "a second run allocates results alone"


def test_intermediates_of_a_held_plan_stay_where_they_are() -> None:
    g = lk.Graph()
    x = g.placeholder((100,), "f32")
    plan = lk.plan((x + 1).exp() * 2, {x: np.zeros(100, np.float32)})
    before = lk.stats().allocations
    for n in range(5):
        plan.run({x: np.full(100, n, np.float32)})
    assert lk.stats().allocations == before
