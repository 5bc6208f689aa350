"""Random sequences of verbs on a sliding cache against plain lists.

The model keeps every value ever counted and, apart from that, what each slot of the ring was last
written with. A row can come back into view exactly if its slot still holds it.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_state import line, machine_settings, rows, state

import lazykv as lk

LAYERS, HEADS, DIM = 2, 1, 2


class SlidingMachine(RuleBasedStateMachine):
    place = "cpu"

    @initialize(
        window=st.integers(1, 4), sinks=st.integers(0, 3), slack=st.integers(0, 3),
        most=st.sampled_from([None, 12]),
    )  # fmt: skip
    def build(self, window: int, sinks: int, slack: int, most: int | None) -> None:
        self.window, self.sinks, self.ring, self.most = window, sinks, window + slack, most
        self.cache = lk.SlidingKvCache.with_capacity(
            LAYERS, HEADS, DIM, window, "f32", self.place, sink_tokens=sinks,
            rollback_slack=slack, max_seq_len=most,
        )  # fmt: skip
        self.values: list[float] = []
        self.slots: dict[int, float] = {}
        self.waiting: dict[int, list[float]] = {}
        self.points: list[tuple[Any, int]] = []
        self.id = self.cache.alloc_id()
        self.next_value = 0

    # The model

    def slot(self, p: int) -> int:
        return p if p < self.sinks else self.sinks + (p - self.sinks) % self.ring

    def in_view(self, length: int) -> list[int]:
        return [p for p in range(length) if p < self.sinks or p >= length - self.window]

    def is_held(self, length: int) -> bool:
        return all(self.slots[self.slot(p)] == self.values[p] for p in self.in_view(length))

    def write(self, values: list[float]) -> None:
        for value in values:
            self.slots[self.slot(len(self.values))] = value
            self.values.append(value)

    def fresh(self, n: int) -> list[float]:
        self.next_value += n
        return [float(self.next_value - n + i) for i in range(n)]

    def has_room(self, n: int) -> bool:
        return self.most is None or len(self.values) + n <= self.most

    def call(self, allowed: bool, action: Any) -> bool:
        """Run a verb; a refused one must change nothing. True if it went through."""
        if allowed:
            action()
            return True
        before = state(self.cache)
        with pytest.raises(lk.LazyKvError):
            action()
        assert state(self.cache) == before
        return False

    def rewound(self, length: int) -> None:
        del self.values[length:]
        self.waiting = {}
        self.points = [(sp, n) for sp, n in self.points if n <= length]

    # Verbs

    @rule(n=st.integers(0, 9))
    def append_all(self, n: int) -> None:
        values = self.fresh(n)
        k, v = rows(values, HEADS, DIM), rows([-x for x in values], HEADS, DIM)
        if self.call(
            self.has_room(n) and not self.waiting,
            lambda: self.cache.append_all([k] * LAYERS, [v] * LAYERS),
        ):
            self.write(values)

    @rule(n=st.integers(0, 4), layer=st.integers(0, LAYERS - 1))
    def append(self, n: int, layer: int) -> None:
        values = next(iter(self.waiting.values()), None)
        if values is None or len(values) != n:
            values = self.fresh(n)
        k, v = rows(values, HEADS, DIM), rows([-x for x in values], HEADS, DIM)
        fits = layer not in self.waiting and all(len(x) == n for x in self.waiting.values())
        got: list[Any] = []
        if self.call(fits and self.has_room(n), lambda: got.extend(self.cache.append(layer, k, v))):
            after = [*self.values, *values]
            assert line(got[0]) == [after[p] for p in self.in_view(len(after))]
            self.waiting[layer] = values
            if len(self.waiting) == LAYERS:
                self.waiting = {}
                self.write(values)

    @rule()
    def abort(self) -> None:
        self.cache.abort_step()
        self.waiting = {}

    @rule(back=st.integers(-2, 9), assign=st.booleans())
    def shorten(self, back: int, assign: bool) -> None:
        length = len(self.values) - back
        if assign and back < 0:
            return  # a greater length says that rows were written elsewhere
        allowed = length >= 0 and (
            back <= 0
            or (not self.waiting and (length <= self.sinks or self.is_held(length)))
        )  # fmt: skip

        def act() -> None:
            if assign:
                self.cache.cached_len = length
            else:
                self.cache.truncate_to(length)

        if self.call(allowed, act) and back > 0:
            self.rewound(length)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.rewound(0)

    @rule()
    def savepoint(self) -> None:
        self.points.append((self.cache.savepoint(), len(self.values)))

    @rule(which=st.integers(0, 3), commit=st.booleans())
    def end_savepoint(self, which: int, commit: bool) -> None:
        if which >= len(self.points):
            return
        sp, length = self.points[which]
        same = length == len(self.values)
        if commit:
            sp.commit()
            del self.points[which:]
        elif self.call(same or length <= self.sinks or self.is_held(length), sp.rollback):
            del self.points[which:]
            self.rewound(length)

    # What must hold after every verb

    @invariant()
    def same_rows(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, shown = self.cache, [self.values[p] for p in self.in_view(len(self.values))]
        assert (cache.cached_len, cache.resident_rows) == (len(self.values), len(shown))
        assert cache.alloc_id() == self.id
        assert all(sp.is_open for sp, _ in self.points)
        for layer in range(LAYERS):
            k, v = cache.live(layer)
            assert (line(k), line(v)) == (shown, [-x for x in shown])


class OnSim(SlidingMachine):
    place = "sim:0"


SlidingMachine.TestCase.settings = machine_settings()
OnSim.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestSlidingMachine = SlidingMachine.TestCase
TestSlidingMachineOnSim = OnSim.TestCase
