"""Random sequences of cache verbs against plain Python lists."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_state import machine_settings, raw_bytes, state

import lazykv as lk

LAYERS, HEADS, DIM, CAPACITY = 2, 2, 3, 5
MOST_ROWS, MOST_SEQUENCES = 9, 4
COUNTS = st.integers(0, 4)
LENGTHS = st.integers(-1, CAPACITY + 2)
LAYER = st.integers(-1, LAYERS)
SLOT = st.sampled_from([0, 1])
ANY = st.integers(0, 100)

Table = list[list[int]]
"""``table[b][p]`` is the number that row p of sequence b holds in all its elements."""


class CacheMachine(RuleBasedStateMachine):
    """The model: per layer K and V tables (None: the layer is absent), the length, the rows and
    layers of the open step, the counters, and the lengths of open savepoints."""

    @initialize(dtype=st.sampled_from(["f32", "bf16", "i32"]), batch=st.integers(1, 2),
                place=st.sampled_from(["cpu", "sim:0", "sim:0,sim:1"]))  # fmt: skip
    def build(self, dtype: str, batch: int, place: str) -> None:
        self.dtype, self.batch, self.capacity = lk.dtype(dtype), batch, CAPACITY
        places = place.split(",")
        self.places: list[str | None] = [places[i % len(places)] for i in range(LAYERS)]
        self.homes = list(self.places)
        device = place if len(places) == 1 else list(self.places)
        self.cache = lk.KvCache.with_capacity(LAYERS, HEADS, DIM, CAPACITY, dtype, device, batch)
        self.one_place = place if len(places) == 1 else None
        self.layers: list[list[Table] | None] = [self.zeros() for _ in range(LAYERS)]
        self.versions = [[0, 0] for _ in range(LAYERS)]
        self.length = 0
        self.open: tuple[int, set[int]] | None = None
        self.savepoints: list[tuple[Any, int]] = []
        self.ended: list[Any] = []
        self.ids = {0, int(self.cache.alloc_id())}
        self.id = self.cache.alloc_id()
        self.next_value = 0

    # The model's own moves

    def zeros(self) -> list[Table]:
        return [[[0] * self.capacity for _ in range(self.batch)] for _ in range(2)]

    @property
    def present(self) -> list[int]:
        return [i for i, layer in enumerate(self.layers) if layer is not None]

    def values(self, n: int) -> Table:
        """Numbers that even bf16 holds exactly."""
        out = []
        for _ in range(self.batch):
            out.append([1 + (self.next_value + i) % 250 for i in range(n)])
            self.next_value += n
        return out

    def array(self, table: Table) -> np.ndarray[Any, Any]:
        rows = np.asarray(table, np.float64).reshape(len(table), 1, -1, 1)
        shape = (len(table), HEADS, rows.shape[2], DIM)
        return np.broadcast_to(rows, shape).astype(self.dtype.numpy)

    def call(self, expect_error: bool, action: Any) -> bool:
        """Run a verb; a refused one must change nothing. True if it went through."""
        if not expect_error:
            action()
            return True
        before, lengths = state(self.cache), [sp.is_open for sp, _ in self.savepoints]
        with pytest.raises(lk.LazyKvError):
            action()
        assert state(self.cache) == before
        assert [sp.is_open for sp, _ in self.savepoints] == lengths
        return False

    def put(self, layer: int, slot: int, start: int, table: Table) -> None:
        for b, row in enumerate(table):
            self.layers[layer][slot][b][start : start + len(row)] = row
        self.versions[layer][slot] += 1

    def rewind(self, n: int) -> None:
        self.length, self.open = n, None
        self.ended += [sp for sp, at in self.savepoints if at > n]
        self.savepoints = [(sp, at) for sp, at in self.savepoints if at <= n]

    def minted(self, *, rows_stay: bool = False) -> None:
        self.id = self.cache.alloc_id()
        assert int(self.id) not in self.ids
        self.ids.add(int(self.id))
        if not rows_stay:
            self.ended += [sp for sp, _ in self.savepoints]
            self.savepoints = []

    def counted(self, layers: list[int]) -> None:
        """Every slot of these layers was written, or is another storage: no version comes twice."""
        for i in layers:
            self.versions[i] = [n + 1 for n in self.versions[i]]

    # Verbs

    @rule(layer=LAYER, n=COUNTS)
    def append(self, layer: int, n: int) -> None:
        k, v = self.values(n), self.values(n)
        bad = layer not in self.present or self.length + n > self.capacity
        if self.open is not None:
            bad = bad or self.open[0] != n or layer in self.open[1]
        if self.call(bad, lambda: self.cache.append(layer, self.array(k), self.array(v))):
            self.put(layer, 0, self.length, k)
            self.put(layer, 1, self.length, v)
            done = {layer} | (set() if self.open is None else self.open[1])
            self.open = (n, done)
            if done == set(self.present):
                self.open = None
                self.length += n

    @rule(n=COUNTS, extra=st.sampled_from([0, 0, 0, -1, 1]))
    def append_all(self, n: int, extra: int) -> None:
        ks = [self.values(n) for _ in range(len(self.present) + extra)]
        bad = not self.present or self.open is not None or extra != 0
        bad = bad or self.length + n > self.capacity
        arrays = [self.array(k) for k in ks]
        if self.call(bad, lambda: self.cache.append_all(arrays, arrays)):
            for layer, k in zip(self.present, ks, strict=True):
                for slot in range(2):
                    self.put(layer, slot, self.length, k)
            self.length += n

    @rule(layer=LAYER, slot=SLOT, start=LENGTHS, n=COUNTS, missing=st.booleans())
    def write_bytes(self, layer: int, slot: int, start: int, n: int, missing: bool) -> None:
        values = self.values(n)
        data = self.array(values).tobytes()[1 if missing else 0 :]
        bad = layer not in self.present or start < 0 or start + n > self.capacity
        bad = bad or (missing and n > 0)
        if self.call(bad, lambda: self.cache.write_bytes(layer, slot, start, n, data)):
            self.put(layer, slot, start, values)

    @rule(n=LENGTHS)
    def truncate(self, n: int) -> None:
        lower = n < self.length
        bad = n < 0 or (lower and self.open is not None)
        if self.call(bad, lambda: self.cache.truncate_to(n)) and lower:
            self.rewind(n)

    @rule(n=LENGTHS)
    def assign_length(self, n: int) -> None:
        bad = not 0 <= n <= self.capacity or (n != self.length and self.open is not None)
        if self.call(bad, lambda: setattr(self.cache, "cached_len", n)) and n != self.length:
            self.rewind(n)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.rewind(0)
        self.counted(self.present)

    @rule()
    def abort(self) -> None:
        self.cache.abort_step()
        self.open = None

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.counted(self.present)
        self.layers, self.places, self.length = [None] * LAYERS, [None] * LAYERS, 0
        self.open = self.one_place = None
        self.minted()

    @rule(layer=LAYER, wrong=st.sampled_from([None, None, None, "capacity", "batch", "dtype"]))
    def set_layer(self, layer: int, wrong: str | None) -> None:
        tables = [self.values(self.capacity) for _ in range(2)]
        pair = [self.array(t) for t in tables]
        if wrong == "capacity":
            pair = [np.concatenate([a, a], 2) for a in pair]
        elif wrong == "batch":
            pair = [np.concatenate([a, a], 0) for a in pair]
        elif wrong == "dtype":
            pair = [a.astype(np.float64) for a in pair]
        bad = wrong is not None or not 0 <= layer < LAYERS or self.open is not None
        home = self.homes[max(0, layer) % LAYERS]
        made = lk.KvLayer(*(lk.Storage.from_array(a, home) for a in pair))
        if self.call(bad, lambda: self.cache.set_layer(layer, made)):
            if layer in self.present:
                self.counted([layer])
            self.layers[layer] = tables
            self.places[layer] = self.one_place = None
            self.minted()

    @precondition(lambda self: not self.present)
    @rule()
    def rebuild(self) -> None:
        for layer in range(LAYERS):
            self.set_layer(layer, None)

    @rule(extra=st.integers(-2, 3))
    def grow(self, extra: int) -> None:
        capacity = min(self.capacity + extra, MOST_ROWS)
        bad = capacity < self.capacity or (capacity > self.capacity and self.open is not None)
        if self.call(bad, lambda: self.cache.grow(capacity)):
            if capacity == self.capacity:
                return
            more = [0] * (capacity - self.capacity)
            for i in self.present:
                self.layers[i] = [[row + more for row in table] for table in self.layers[i]]
            self.capacity = capacity
            self.counted(self.present)
            self.minted(rows_stay=True)

    # Savepoints

    @rule()
    def savepoint(self) -> None:
        if len(self.savepoints) < 5:
            self.savepoints.append((self.cache.savepoint(), self.length))

    @precondition(lambda self: self.savepoints)
    @rule(which=ANY, back=st.booleans())
    def end_savepoint(self, which: int, back: bool) -> None:
        at = which % len(self.savepoints)
        sp, length = self.savepoints[at]
        sp.rollback() if back else sp.commit()
        self.ended += [inner for inner, _ in self.savepoints[at:]]
        self.savepoints = self.savepoints[:at]
        if back:
            self.rewind(length)

    @precondition(lambda self: self.ended)
    @rule(which=ANY, back=st.booleans())
    def use_an_ended_savepoint(self, which: int, back: bool) -> None:
        sp = self.ended[which % len(self.ended)]
        self.call(True, sp.rollback if back else sp.commit)

    # Batches

    @rule(index=st.lists(st.integers(0, MOST_SEQUENCES), max_size=MOST_SEQUENCES))
    def select(self, index: list[int]) -> None:
        bad = not index or max(index) >= self.batch or self.open is not None
        if self.call(bad, lambda: self.cache.select(index)):
            self.pick(index)

    @rule(index=st.lists(st.integers(0, MOST_SEQUENCES - 1), max_size=MOST_SEQUENCES))
    def reorder(self, index: list[int]) -> None:
        bad = len(index) != self.batch or max(index) >= self.batch or self.open is not None
        if self.call(bad, lambda: self.cache.reorder(index)):
            self.pick(index)

    @rule(seed=ANY)
    def shuffle(self, seed: int) -> None:
        index = [seed // (b + 1) % self.batch for b in range(self.batch)]
        if self.call(self.open is not None, lambda: self.cache.reorder(index)):
            self.pick(index)

    @rule(n=st.integers(0, 2))
    def repeat(self, n: int) -> None:
        if self.batch * n > MOST_SEQUENCES:
            return
        bad = n < 1 or (n > 1 and self.open is not None)
        if self.call(bad, lambda: self.cache.repeat(n)) and n > 1:
            self.pick([b for b in range(self.batch) for _ in range(n)])

    def pick(self, index: list[int]) -> None:
        """Sequences become those of `index`. Rows of these few lengths move all together, but
        where none is live, none moves."""
        same = len(index) == self.batch
        if not same or self.length:
            for i in self.present:
                self.layers[i] = [[list(table[b]) for b in index] for table in self.layers[i]]
        self.counted(self.present)
        if not same:
            self.batch = len(index)
            self.minted()

    # What must hold after every verb

    @invariant()
    def same_fields(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        assert (cache.cached_len, len(cache), bool(cache)) == (self.length, self.length, True)
        assert (cache.max_seq_len, cache.batch) == (self.capacity, self.batch)
        assert cache.alloc_id() == self.id
        places = [cache.layer_location(i) for i in range(LAYERS)]
        assert [None if p is None else str(p) for p in places] == self.places
        one = cache.device_location()
        assert (None if one is None else str(one)) == self.one_place
        assert all(sp.is_open for sp, _ in self.savepoints)
        assert not any(sp.is_open for sp in self.ended)

    @invariant()
    def same_rows(self) -> None:
        if not hasattr(self, "cache"):
            return
        for i, tables in enumerate(self.layers):
            layer = self.cache.layers[i]
            if tables is None:
                assert layer is None
                continue
            assert [layer.k_version, layer.v_version] == self.versions[i]
            for store, table, live in zip(
                (layer.k, layer.v), tables, self.cache.live(i), strict=True
            ):
                whole = self.array(table)
                assert raw_bytes(store) == whole.tobytes()
                assert live.tobytes() == whole[:, :, : self.length].tobytes()


CacheMachine.TestCase.settings = machine_settings()
TestCacheMachine = CacheMachine.TestCase
