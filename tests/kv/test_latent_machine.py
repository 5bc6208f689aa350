"""Random sequences of LatentKvCache verbs against plain Python lists, on the host and a device."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_state import machine_settings
from latent_state import rows, state

import lazykv as lk

LAYERS, CAPACITY = 2, 6
COUNTS = st.integers(0, 4)
LENGTHS = st.integers(-1, CAPACITY + 2)
LAYER = st.integers(-1, LAYERS)


class LatentMachine(RuleBasedStateMachine):
    """The model: per slot a list of capacity numbers (row p of a buffer holds one number), the
    length, the open step, the versions and the open savepoints with their lengths."""

    @initialize(
        dtype=st.sampled_from(["f32", "bf16", "i32"]),
        trailing=st.sampled_from([[(3,), (2,)], [(5,)], [(2, 2), (), (1,)]]),
        device=st.sampled_from(["cpu", "sim:0"]),
    )
    def build(self, dtype: str, trailing: list[tuple[int, ...]], device: str) -> None:
        self.dtype, self.trailing = lk.dtype(dtype).numpy, trailing
        self.capacity, self.place = CAPACITY, device
        self.cache = lk.LatentKvCache.with_capacity(LAYERS, CAPACITY, trailing, dtype, device)
        self.slots = [[[0] * CAPACITY for _ in trailing] for _ in range(LAYERS)]
        self.versions = [[0] * len(trailing) for _ in range(LAYERS)]
        self.length, self.open, self.cleared = 0, None, False
        self.points: list[tuple[Any, int]] = []
        self.ids, self.id = {0, int(self.cache.alloc_id())}, self.cache.alloc_id()
        self.next_value = 0

    def values(self, n: int) -> list[int]:
        """Numbers that even bf16 holds exactly."""
        self.next_value += n
        return [1 + (self.next_value + i) % 250 for i in range(n)]

    def rows(self, slot: int, values: list[int]) -> np.ndarray[Any, Any]:
        return rows(values, *self.trailing[slot], dtype=self.dtype)

    def call(self, expect_error: bool, action: Any) -> bool:
        """Run a verb; a refused one must change nothing. True if it went through."""
        if not expect_error:
            action()
            return True
        before = state(self.cache)
        with pytest.raises(lk.LazyKvError):
            action()
        assert state(self.cache) == before
        return False

    def put(self, layer: int, slot: int, start: int, values: list[int]) -> None:
        self.slots[layer][slot][start : start + len(values)] = values
        self.versions[layer][slot] += 1

    def rewound(self, length: int) -> None:
        self.length, self.open = length, None
        self.points = [(p, n) for p, n in self.points if n <= length]

    def minted(self) -> None:
        self.id = self.cache.alloc_id()
        assert int(self.id) not in self.ids
        self.ids.add(int(self.id))

    def counted(self) -> None:
        self.versions = [[n + 1 for n in of] for of in self.versions]

    # Verbs

    @rule(layer=LAYER, n=COUNTS, extra=st.sampled_from([0, 0, 0, 1, -1]))
    def append(self, layer: int, n: int, extra: int) -> None:
        new = [self.values(n) for _ in range(len(self.trailing) + extra)]
        bad = self.cleared or not 0 <= layer < LAYERS or self.length + n > self.capacity
        bad = bad or extra != 0
        if self.open is not None:
            bad = bad or self.open[0] != n or layer in self.open[1]
        arrays = [self.rows(min(s, len(self.trailing) - 1), x) for s, x in enumerate(new)]
        if self.call(bad, lambda: self.cache.append(layer, *arrays)):
            for slot, values in enumerate(new):
                self.put(layer, slot, self.length, values)
            done = {layer} | (set() if self.open is None else self.open[1])
            self.open = (n, done)
            if len(done) == LAYERS:
                self.open = None
                self.length += n

    @rule(n=COUNTS, extra=st.integers(-1, 1))
    def append_all(self, n: int, extra: int) -> None:
        new = [[self.values(n) for _ in range(LAYERS + extra)] for _ in self.trailing]
        bad = self.cleared or self.open is not None or extra != 0 or self.length + n > self.capacity
        arrays = [[self.rows(slot, x) for x in of] for slot, of in enumerate(new)]
        if self.call(bad, lambda: self.cache.append_all(*arrays)):
            for layer in range(LAYERS):
                for slot, of in enumerate(new):
                    self.put(layer, slot, self.length, of[layer])
            self.length += n

    @rule(layer=LAYER, slot=st.integers(-1, 3), start=LENGTHS, n=COUNTS, missing=st.booleans())
    def write_bytes(self, layer: int, slot: int, start: int, n: int, missing: bool) -> None:
        known = 0 <= slot < len(self.trailing)
        values = self.values(n)
        data = self.rows(slot if known else 0, values).tobytes()[1 if missing else 0 :]
        in_bounds = known and 0 <= layer < LAYERS and start >= 0 and start + n <= self.capacity
        bad = self.cleared or not in_bounds or (missing and n > 0)
        if self.call(bad, lambda: self.cache.write_bytes(layer, slot, start, n, data)):
            self.put(layer, slot, start, values)

    @rule(n=LENGTHS)
    def truncate(self, n: int) -> None:
        lower = n < self.length
        bad = n < 0 or (lower and self.open is not None)
        if self.call(bad, lambda: self.cache.truncate_to(n)) and lower:
            self.rewound(n)

    @rule(n=LENGTHS)
    def assign_length(self, n: int) -> None:
        bad = not 0 <= n <= self.capacity or (n != self.length and self.open is not None)
        if self.call(bad, lambda: setattr(self.cache, "cached_len", n)):
            if n < self.length:
                self.rewound(n)
            self.length = n

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.rewound(0)
        self.counted()

    @rule()
    def abort(self) -> None:
        self.cache.abort_step()
        self.open = None

    @rule()
    def savepoint(self) -> None:
        self.points.append((self.cache.savepoint(), self.length))

    @precondition(lambda self: self.points)
    @rule(data=st.data(), keep=st.booleans())
    def end_savepoint(self, data: st.DataObject, keep: bool) -> None:
        n = data.draw(st.integers(0, len(self.points) - 1))
        point, length = self.points[n]
        point.commit() if keep else point.rollback()
        del self.points[n:]
        if not keep:
            self.rewound(length)

    @rule(capacity=st.integers(CAPACITY - 1, CAPACITY + 3))
    def grow(self, capacity: int) -> None:
        old = self.capacity
        bad = capacity < old or (capacity > old and self.open is not None)
        if self.call(bad, lambda: self.cache.grow(capacity)) and capacity > old:
            for of in self.slots:
                for numbers in of:
                    numbers += [0] * (capacity - old)
            self.capacity = capacity
            self.counted()
            self.minted()

    @rule(sure=st.integers(0, 5))
    def clear(self, sure: int) -> None:
        if sure:  # a cleared cache has little left to try
            return
        self.cache.clear()
        self.length, self.cleared, self.open, self.points = 0, True, None, []
        self.minted()

    # What must hold after every verb

    @invariant()
    def same_fields(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        assert (cache.cached_len, len(cache), bool(cache)) == (self.length, self.length, True)
        assert (cache.alloc_id(), cache.max_seq_len) == (self.id, self.capacity)
        place = cache.device_location()
        assert (None if place is None else str(place)) == (None if self.cleared else self.place)
        assert all(point.is_open for point, _ in self.points)

    @invariant()
    def same_rows(self) -> None:
        if not hasattr(self, "cache") or self.cleared:
            return
        for i, of in enumerate(self.slots):
            got = [self.cache.slot_version(i, s) for s in range(len(of))]
            assert got == self.versions[i]
            for s, (numbers, live) in enumerate(zip(of, self.cache.live(i), strict=True)):
                whole = self.rows(s, numbers)
                assert self.cache.slot_storage(i, s).to_numpy().tobytes() == whole.tobytes()
                assert live.tobytes() == whole[: self.length].tobytes()


LatentMachine.TestCase.settings = machine_settings()
TestLatentMachine = LatentMachine.TestCase
