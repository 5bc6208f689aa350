"""Random sequences of cache verbs against plain Python lists."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_state import rows, state

import lazykv as lk

LAYERS, HEADS, DIM, CAPACITY = 2, 2, 3, 6
COUNTS = st.integers(0, 4)
LENGTHS = st.integers(-1, CAPACITY + 2)
LAYER = st.integers(-1, LAYERS)
SLOT = st.sampled_from([0, 1])


class CacheMachine(RuleBasedStateMachine):
    """The model: per slot a list of CAPACITY numbers (row p of a buffer holds one number), the
    length, the rows and layers of the open step, and the counters."""

    @initialize(dtype=st.sampled_from(["f32", "bf16", "i32"]))
    def build(self, dtype: str) -> None:
        self.dtype = lk.dtype(dtype)
        self.cache = lk.KvCache.with_capacity(LAYERS, HEADS, DIM, CAPACITY, dtype)
        self.slots = self.empty()
        self.versions = [[0, 0] for _ in range(LAYERS)]
        self.length = 0
        self.open: tuple[int, set[int]] | None = None
        self.cleared = False
        self.ids = {0, int(self.cache.alloc_id())}
        self.id = self.cache.alloc_id()
        self.location = "cpu"
        self.next_value = 0

    @staticmethod
    def empty() -> list[list[list[int]]]:
        return [[[0] * CAPACITY for _ in range(2)] for _ in range(LAYERS)]

    def values(self, n: int) -> list[int]:
        """Numbers that even bf16 holds exactly."""
        self.next_value += n
        return [1 + (self.next_value + i) % 250 for i in range(n)]

    def rows(self, values: list[int]) -> np.ndarray[Any, Any]:
        return rows(values, HEADS, DIM, self.dtype.numpy)

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

    # Verbs

    @rule(layer=LAYER, n=COUNTS)
    def append(self, layer: int, n: int) -> None:
        k, v = self.values(n), self.values(n)
        bad = self.cleared or not 0 <= layer < LAYERS or self.length + n > CAPACITY
        if self.open is not None:
            bad = bad or self.open[0] != n or layer in self.open[1]
        if self.call(bad, lambda: self.cache.append(layer, self.rows(k), self.rows(v))):
            self.put(layer, 0, self.length, k)
            self.put(layer, 1, self.length, v)
            done = {layer} | (set() if self.open is None else self.open[1])
            self.open = (n, done)
            if len(done) == LAYERS:
                self.open = None
                self.length += n

    @rule(n=COUNTS, extra=st.integers(-1, 1))
    def append_all(self, n: int, extra: int) -> None:
        ks = [self.values(n) for _ in range(LAYERS + extra)]
        bad = self.cleared or self.open is not None or extra != 0 or self.length + n > CAPACITY
        arrays = [self.rows(k) for k in ks]
        if self.call(bad, lambda: self.cache.append_all(arrays, arrays)):
            for layer in range(LAYERS):
                for slot in range(2):
                    self.put(layer, slot, self.length, ks[layer])
            self.length += n

    @rule(layer=LAYER, slot=SLOT, start=LENGTHS, n=COUNTS, missing=st.booleans())
    def write_bytes(self, layer: int, slot: int, start: int, n: int, missing: bool) -> None:
        values = self.values(n)
        data = self.rows(values).tobytes()[1 if missing else 0 :]
        in_bounds = 0 <= layer < LAYERS and start >= 0 and start + n <= CAPACITY
        bad = self.cleared or not in_bounds or (missing and n > 0)
        if self.call(bad, lambda: self.cache.write_bytes(layer, slot, start, n, data)):
            self.put(layer, slot, start, values)

    @rule(n=LENGTHS)
    def truncate(self, n: int) -> None:
        if self.call(n < 0, lambda: self.cache.truncate_to(n)) and n <= self.length:
            self.length, self.open = n, None

    @rule(n=LENGTHS)
    def assign_length(self, n: int) -> None:
        if self.call(
            not 0 <= n <= CAPACITY, lambda: setattr(self.cache, "cached_len", n)
        ):  # fmt: skip
            self.length, self.open = n, None

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.length, self.open = 0, None

    @rule()
    def abort(self) -> None:
        self.cache.abort_step()
        self.open = None

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.length, self.open, self.cleared, self.location = 0, None, True, None
        self.minted()

    @precondition(lambda self: self.cleared)
    @rule()
    def refill(self) -> None:
        zeros = self.rows([0] * CAPACITY)
        for layer in range(LAYERS):
            pair = [lk.Storage.from_array(zeros) for _ in range(2)]
            self.cache.set_layer(layer, lk.KvLayer(*pair))
            self.minted()
        self.slots, self.cleared = self.empty(), False
        self.versions = [[0, 0] for _ in range(LAYERS)]

    def minted(self) -> None:
        self.id = self.cache.alloc_id()
        assert int(self.id) not in self.ids
        self.ids.add(int(self.id))

    # What must hold after every verb

    @invariant()
    def same_fields(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        assert (cache.cached_len, len(cache), bool(cache)) == (self.length, self.length, True)
        assert cache.alloc_id() == self.id
        place = cache.device_location()
        assert (None if place is None else str(place)) == self.location

    @invariant()
    def same_rows(self) -> None:
        if not hasattr(self, "cache") or self.cleared:
            return
        for i, layer in enumerate(self.cache.layers):
            assert [layer.k_version, layer.v_version] == self.versions[i]
            for store, numbers, live in zip(
                (layer.k, layer.v), self.slots[i], self.cache.live(i), strict=True
            ):
                whole = self.rows(numbers)
                assert store.to_numpy().tobytes() == whole.tobytes()
                assert live.tobytes() == whole[:, :, : self.length].tobytes()


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase
