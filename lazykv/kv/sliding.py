"""SlidingKvCache: keys and values of the last positions, in rings that never grow.

For models whose attention sees a window of W positions. Position p is kept in slot ``p`` of a ring
while it is one of the sinks (first positions that stay in view: StreamingLLM, arXiv:2309.17453),
and otherwise rotates over the slots behind them, as `WriteSliceRotating` and `RingAttention` do.
"""

from collections.abc import Sequence
from typing import ClassVar, NoReturn, SupportsIndex

import numpy as np

from lazykv.device import DeviceLike, HostArray
from lazykv.dtypes import DType, DTypeLike, dtype
from lazykv.errors import GraphError, RangeError
from lazykv.graph import Graph
from lazykv.kv.layer import KvSlot
from lazykv.kv.pairs import KvPairCache
from lazykv.kv.places import places
from lazykv.kv.rows import count, counts
from lazykv.kv.slots import OpenStep, zeroed
from lazykv.ops.write import ring_runs
from lazykv.runtime.realize import run_effects
from lazykv.spec import MAX_BYTES, whole
from lazykv.storage import Storage


class SlidingKvCache(KvPairCache):
    """A cache of the last `window` positions and the first `sink_tokens`; made by `with_capacity`.

    Fields: `cached_len` (positions so far, the absolute length: it may exceed what is held),
    `window`, `sink_tokens`, `rollback_slack`, `resident_rows` (rows that `live`
    gives), `ring_rows` (rows of every buffer), `max_seq_len` (most positions, or None),
    `layers`, `n_kv_heads`, `head_dim`, `dtype`.

    A rewind changes the length, and rows that later positions have overwritten do not come back.
    The ring holds `rollback_slack` rows more than the window, so a rewind by at most so many is
    always possible; a longer one is a RangeError unless every row it brings into view is still
    there. Rewinding to a length of at most `sink_tokens`, so to 0, is always possible too. Ids,
    versions, clearing and savepoints follow the rules of `KvCache`. There is no `set_layer`: a
    cleared cache stays empty.
    """

    refill: ClassVar[str] = "with_capacity makes a new one"
    bounded: ClassVar[bool] = False

    def __init__(
        self, n_layers: int, n_kv_heads: int, head_dim: int, window: int, sink_tokens: int,
        rollback_slack: int, dt: DType,
    ) -> None:  # fmt: skip
        super().__init__(n_layers, n_kv_heads, head_dim)
        self._window = window
        self._sinks = sink_tokens
        self._slack = rollback_slack
        self._dtype: DType = dt
        # The ring still holds every counted position from this one on.
        self._oldest = sink_tokens

    @classmethod
    def with_capacity(
        cls, n_layers: SupportsIndex, n_kv_heads: SupportsIndex, head_dim: SupportsIndex,
        window: SupportsIndex, dtype: DTypeLike,
        device: DeviceLike | Sequence[DeviceLike | None] = "cpu", *,
        sink_tokens: SupportsIndex = 0, rollback_slack: SupportsIndex = 0,
        max_seq_len: SupportsIndex | None = None,
    ) -> "SlidingKvCache":  # fmt: skip
        """A cache with all memory up front: K and V of every layer are one zeroed ``[1, n_kv_heads,
        sink_tokens + window + rollback_slack, head_dim]`` buffer, `footprint` bytes in total.

        A step of n tokens whose queries attend to the ring needs a `rollback_slack` of n - 1, since
        the step's own rows must not replace what its first query sees. `device` is one location,
        or one per layer (None: this process has no such layer). `max_seq_len` bounds `cached_len`;
        None leaves it unbounded. Raises `OutOfMemory` or `BackendUnavailable` before anything of
        the cache exists.
        """
        who = "SlidingKvCache.with_capacity"
        layers, heads, dim, size, sinks, slack = _extents(
            who, n_layers, n_kv_heads, head_dim, window, sink_tokens, rollback_slack
        )
        most = None if max_seq_len is None else count(who, "max_seq_len", max_seq_len, 1)
        dt, (where, place) = _dtype(dtype), places(who, device, layers)
        cache = cls(layers, heads, dim, size, sinks, slack, dt)
        made = zeroed([(1, heads, cache.ring_rows, dim) for _ in KvSlot], dt, where)
        cache._take_zeroed(made)
        cache._max_seq_len, cache._locations, cache._place = most, where, place
        return cache

    @staticmethod
    def footprint(
        n_layers: SupportsIndex, n_kv_heads: SupportsIndex, head_dim: SupportsIndex,
        window: SupportsIndex, dtype: DTypeLike, *, sink_tokens: SupportsIndex = 0,
        rollback_slack: SupportsIndex = 0,
    ) -> int:  # fmt: skip
        """Bytes that `with_capacity` would allocate: layers * 2 * heads * (sinks + window + slack)
        * dim * itemsize."""
        layers, heads, dim, size, sinks, slack = _extents(
            "SlidingKvCache.footprint", n_layers, n_kv_heads, head_dim, window, sink_tokens,
            rollback_slack,
        )  # fmt: skip
        return layers * 2 * heads * (sinks + size + slack) * dim * _dtype(dtype).itemsize

    # What the cache is

    @property
    def window(self) -> int:
        """Positions a query sees, its own included."""
        return self._window

    @property
    def sink_tokens(self) -> int:
        """First positions that stay in view."""
        return self._sinks

    @property
    def rollback_slack(self) -> int:
        """Positions that a rewind may always take back."""
        return self._slack

    @property
    def ring_rows(self) -> int:
        """Rows of every buffer: sinks, window and slack."""
        return self._sinks + self._window + self._slack

    @property
    def resident_rows(self) -> int:
        """Rows that `live` gives: all of them until the window is full, then sinks and window."""
        return sum(n for _, _, n in self._runs(self._cached_len))

    def plan_facts(self) -> dict[str, object]:
        """What a held plan bakes about a cache, beside its storages."""
        return {
            "layers": self.n_layers(),
            "ring_rows": self.ring_rows,
            "window": self._window,
            "sinks": self._sinks,
            "heads": self._n_kv_heads,
            "head_dim": self._head_dim,
            "dtype": self._dtype.name,
        }

    # Length

    def note_written(self, length: int) -> None:
        """Rows up to `length` are, or may be, written: older ones in their slots are gone."""
        self._oldest = max(self._oldest, length - (self.ring_rows - self._sinks))

    def check_rewind(self, rows: int) -> None:
        """Refuse a length that would bring overwritten rows into view."""
        if rows >= self._cached_len or rows <= self._sinks:
            return
        if max(self._sinks, rows - self._window) < self._oldest:
            raise RangeError(
                f"SlidingKvCache: got a rewind from {self._cached_len} to {rows}, need at least "
                f"{self._oldest + self._window}, or at most {self._sinks}; older rows of that "
                f"window are overwritten, use a rollback_slack above {self._slack}"
            )

    def _rewind(self, rows: int) -> None:
        super()._rewind(rows)
        if rows <= self._sinks:
            self._oldest = self._sinks

    def grow(self, new_capacity: SupportsIndex) -> NoReturn:
        """Refused: the bytes of a ring never grow, and rows in other slots would lose their
        place."""
        raise GraphError("SlidingKvCache.grow: got a ring, need a KvCache; make a new cache")

    def write_bytes(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: a row's place depends on the length, so rows come in by `append`."""
        raise GraphError("SlidingKvCache.write_bytes: got a ring, need a KvCache; use append")

    # Writing and reading

    def append(self, layer: SupportsIndex, k: object, v: object) -> tuple[HostArray, HostArray]:
        """Add any number of rows ``[1, n_kv_heads, n, head_dim]`` of K and V at `cached_len`.

        Returns what `live` will give with them. A step is open from the first layer's append to the
        last one's; `cached_len` moves when it closes, and only then are the rows written, since
        they replace others that are in view until then.
        """
        return super().append(layer, k, v)

    def live(self, layer: SupportsIndex) -> tuple[HostArray, HostArray]:
        """The sinks and the last `window` positions of K and V ``[1, n_kv_heads, resident_rows,
        head_dim]``, oldest first; read-only.

        Views where these rows lie side by side, copies where the ring wraps between them. A view
        shows what later positions write over its rows: copy it to keep it.
        """
        return super().live(layer)

    def _append(self, layer: SupportsIndex, values: Sequence[object]) -> tuple[HostArray, ...]:
        i = whole("SlidingKvCache.append", "layer", layer)
        who = f"SlidingKvCache.append(layer {i})"
        with self.owned(who):
            writes, rows = self._check_append(who, i, values)
            self._check_room(who, rows)
            step, length = self._step or OpenStep(rows), self._cached_len + rows
            layers = [*step.layers, i]
            if set(layers) == set(self._populated()):
                self._write_at_length(who, [*step.writes, *writes], layers)
                self._cached_len, self._step = length, None
                return tuple(self._view(who, storage, length) for storage, _ in writes)
            # The caller may change its arrays before the step closes.
            step.writes += [(storage, rows_.copy()) for storage, rows_ in writes]
            step.layers.add(i)
            self._step = step
            return tuple(self._joined(self._view(who, s, self._cached_len), x) for s, x in writes)

    def _write_at_length(
        self, who: str, writes: Sequence[tuple[Storage, HostArray]], layers: Sequence[int]
    ) -> None:
        rows = writes[0][1].shape[self.row_axis]
        self._check_room(who, rows)
        end = self._cached_len + rows
        before = [(s.version, s.torn) for s, _ in writes]
        try:
            if rows:
                self._write_rows(writes)
        except BaseException:
            if [(s.version, s.torn) for s, _ in writes] != before:
                self.note_written(end)
            raise
        self.note_written(end)
        for i in layers:
            for slot in KvSlot:
                self.bump_version(i, slot)

    def _write_rows(self, writes: Sequence[tuple[Storage, HostArray]]) -> None:
        graph = Graph()
        start = graph.const(np.int64(self._cached_len))
        axis, rows, sinks = self.row_axis, self.ring_rows, self._sinks
        run_effects([
            graph.const(s).write_slice_rotating(graph.const(x), axis, start, rows, sinks)
            for s, x in writes
        ])  # fmt: skip

    def _check_room(self, who: str, rows: int) -> None:
        end, most = self._cached_len + rows, self._max_seq_len
        if end > (MAX_BYTES if most is None else most):
            raise RangeError(
                f"{who}: got rows {self._cached_len}..{end}, need {end} <= max_seq_len {most}"
            )

    def _runs(self, length: int) -> list[tuple[int, int, int]]:
        """Where the rows in view at a length lie: ``(slot, position, count)``, oldest first."""
        low = max(self._sinks, length - self._window, self._oldest)
        sinks = ring_runs(0, min(self._sinks, length), self.ring_rows, self._sinks)
        return sinks + ring_runs(low, length, self.ring_rows, self._sinks)

    def _view(self, who: str, storage: Storage, length: int) -> HostArray:
        storage.check_readable()
        runs = self._runs(length)
        total = sum(n for _, _, n in runs)
        first = runs[0][0] if runs else 0
        if not runs or runs[-1][0] + runs[-1][2] == first + total:
            return self._rows(who, storage, first, total)
        parts = [self._rows(who, storage, slot, n) for slot, _, n in runs]
        return _read_only(np.concatenate(parts, self.row_axis))

    def _joined(self, live: HostArray, rows: HostArray) -> HostArray:
        """What will be in view once `rows` are counted: the sinks and the last `window` rows."""
        both = np.concatenate([live, rows], self.row_axis)
        held = [p for _, p, n in self._runs(self._cached_len) for p in range(p, p + n)]
        length = self._cached_len + rows.shape[self.row_axis]
        position = np.array([*held, *range(self._cached_len, length)], np.int64)
        seen = (position < self._sinks) | (position >= length - self._window)
        return _read_only(both[:, :, seen])

    def __repr__(self) -> str:
        return (
            f"SlidingKvCache({self.n_layers()} layers, {self._n_kv_heads} heads x "
            f"{self._head_dim}, length {self._cached_len}, window {self._window} after "
            f"{self._sinks} sinks, {self._dtype})"
        )


_dtype = dtype


def _extents(
    who: str, n_layers: SupportsIndex, n_kv_heads: SupportsIndex, head_dim: SupportsIndex,
    window: SupportsIndex, sink_tokens: SupportsIndex, rollback_slack: SupportsIndex,
) -> tuple[int, int, int, int, int, int]:  # fmt: skip
    """A caller's layers, heads, head_dim, window, sinks and slack as whole numbers in range."""
    layers, heads, dim, size = counts(
        who, n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim, window=window
    )
    sinks = count(who, "sink_tokens", sink_tokens)
    return layers, heads, dim, size, sinks, count(who, "rollback_slack", rollback_slack)


def _read_only(array: HostArray) -> HostArray:
    array.flags.writeable = False
    return array
