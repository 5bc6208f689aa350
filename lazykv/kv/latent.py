"""LatentKvCache: a few compressed rows per token and layer, shared by all heads.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) keeps, per token, one
latent vector and one rotated key in place of keys and values per head. Other models keep a single
projection. Rows are axis 0 of every buffer.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, SupportsIndex

from lazykv.device import DeviceLike, HostArray
from lazykv.dtypes import DType, DTypeLike, dtype
from lazykv.errors import RangeError, ShapeError
from lazykv.kv.places import places
from lazykv.kv.rows import counts
from lazykv.kv.slots import SlotCache, zeroed
from lazykv.spec import Shape, as_shape, whole
from lazykv.storage import Storage


class LatentKvCache(SlotCache):
    """A cache of N slots per layer, slot s shaped ``[max_seq_len, *slot_trailing[s]]``; made by
    `with_capacity`.

    Fields: `max_seq_len` (the capacity in rows), `slot_trailing` (a shape per slot), `dtype`,
    `cached_len` (the live length). Ids, versions, truncating, clearing and savepoints follow the
    rules of `KvCache`. There is no `set_layer`: a cleared cache stays empty.
    """

    row_axis: ClassVar[int] = 0
    refill: ClassVar[str] = "with_capacity makes a new one"

    def __init__(self, n_layers: int, slot_trailing: tuple[Shape, ...], dt: DType) -> None:
        super().__init__(n_layers)
        self._slot_trailing = slot_trailing
        self._dtype = dt
        self._layers: list[tuple[Storage, ...] | None] = [None] * n_layers
        self._versions = [[0] * len(slot_trailing) for _ in range(n_layers)]

    # Construction

    @classmethod
    def with_capacity(
        cls, n_layers: SupportsIndex, max_seq_len: SupportsIndex,
        slot_trailing: Sequence[Sequence[SupportsIndex]], dtype: DTypeLike,
        device: DeviceLike | Sequence[DeviceLike | None] = "cpu",
    ) -> "LatentKvCache":  # fmt: skip
        """A cache with all memory up front: every slot is one zeroed buffer, `footprint` bytes in
        total.

        `slot_trailing` is one shape per slot: ``[(512,), (64,)]`` for a latent of 512 and a rotary
        key of 64. `device` is one location, or one per layer (None: this process has no such
        layer). Raises `RangeError` or `ShapeError` for zero layers, zero capacity, no slots or an
        extent below 1, and `OutOfMemory` or `BackendUnavailable` before anything of the cache
        exists.
        """
        who = "LatentKvCache.with_capacity"
        layers, capacity = counts(who, n_layers=n_layers, max_seq_len=max_seq_len)
        trailing, dt = _trailing(who, slot_trailing), _dtype(dtype)
        where, place = places(who, device, layers)
        cache = cls(layers, trailing, dt)
        cache._take_zeroed(zeroed([(capacity, *shape) for shape in trailing], dt, where))
        cache._max_seq_len, cache._locations, cache._place = capacity, where, place
        return cache

    @staticmethod
    def footprint(
        n_layers: SupportsIndex, max_seq_len: SupportsIndex,
        slot_trailing: Sequence[Sequence[SupportsIndex]], dtype: DTypeLike,
    ) -> int:  # fmt: skip
        """Bytes that `with_capacity` would allocate: layers * capacity * itemsize * the elements
        of one row over all slots."""
        who = "LatentKvCache.footprint"
        layers, capacity = counts(who, n_layers=n_layers, max_seq_len=max_seq_len)
        row = sum(math.prod(shape) for shape in _trailing(who, slot_trailing))
        return layers * capacity * _dtype(dtype).itemsize * row

    # What the cache is

    @property
    def slot_trailing(self) -> tuple[Shape, ...]:
        """Per slot, the shape of one row."""
        return self._slot_trailing

    @property
    def dtype(self) -> DType:
        return self._dtype

    def slot_version(self, layer: SupportsIndex, slot: SupportsIndex) -> int | None:
        """Cache-level writes to a slot so far; None where `slot_storage` is None."""
        found = self.slot_storage(layer, slot)
        return None if found is None else self._versions[int(layer)][int(slot)]

    def bump_version(self, layer: SupportsIndex, slot: SupportsIndex) -> None:
        """Count one cache-level write to a slot; nothing happens if the layer is absent."""
        i = whole("LatentKvCache.bump_version", "layer", layer)
        if self._slots(i) is not None:
            self._versions[i][self._slot_number("LatentKvCache.bump_version", slot)] += 1

    def plan_facts(self) -> dict[str, object]:
        """What a held plan bakes about a cache, beside its storages."""
        return {
            "layers": self.n_layers(),
            "capacity": self._max_seq_len,
            "slots": self._slot_trailing,
            "dtype": self._dtype.name,
        }

    def _slots(self, layer: int) -> tuple[Storage, ...] | None:
        return self._layers[layer] if 0 <= layer < len(self._layers) else None

    def _put_slots(self, layer: int, slots: tuple[Storage, ...] | None) -> None:
        if self._layers[layer] is not None:
            self._versions[layer] = [n + 1 for n in self._versions[layer]]
        self._layers[layer] = slots

    def _slot_names(self) -> Sequence[str]:
        return [f"slot {n}" for n in range(len(self._slot_trailing))]

    def _slot_number(self, who: str, slot: SupportsIndex) -> int:
        n = whole(who, "slot", slot)
        if not 0 <= n < len(self._slot_trailing):
            raise RangeError(f"{who}: got slot {n}, need 0 <= slot < {len(self._slot_trailing)}")
        return n

    def _row_shape(self, slot: int) -> tuple[Shape, Shape]:
        return (), self._slot_trailing[slot]

    # Writing

    def append(self, layer: SupportsIndex, *rows: object) -> tuple[HostArray, ...]:
        """Write rows ``[n, *slot_trailing[s]]``, one array per slot, at `cached_len`.

        Returns live views that include the new rows. A step is open from the first layer's append
        to the last one's; `cached_len` moves when it closes.
        """
        self._need_every_slot("append", len(rows))
        return self._append(layer, rows)

    def append_all(self, *rows: Sequence[object]) -> list[tuple[HostArray, ...]]:
        """Append to every populated layer in one pass: per slot a list of arrays, one per layer.
        All arguments are checked first."""
        self._need_every_slot("append_all", len(rows))
        return self._append_all(rows)

    def live(self, layer: SupportsIndex) -> tuple[HostArray, ...]:
        """Zero-copy, read-only views ``[cached_len, *slot_trailing[s]]`` of a layer's slots."""
        return self._live(layer)

    def _need_every_slot(self, verb: str, given: int) -> None:
        slots = len(self._slot_trailing)
        if given != slots:
            raise ShapeError(
                f"LatentKvCache.{verb}: got rows for {given} slots, need them for all {slots}"
            )

    def __repr__(self) -> str:
        slots = " + ".join(str(list(shape)) for shape in self._slot_trailing)
        return (
            f"LatentKvCache({self.n_layers()} layers, rows of {slots}, "
            f"length {self._cached_len} of {self._max_seq_len}, {self._dtype})"
        )


_dtype = dtype


def _trailing(who: str, given: Sequence[Sequence[SupportsIndex]]) -> tuple[Shape, ...]:
    """The shape of one row per slot; a bare number is no shape, so that ``(512, 64)`` cannot be
    read as two slots by one caller and as one by another."""
    rule = "need one shape per slot, such as [(512,), (64,)]"
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
        raise ShapeError(f"{who}: got slot_trailing {given!r}, {rule}")
    shapes = []
    for slot, shape in enumerate(given):
        if isinstance(shape, str | bytes) or not isinstance(shape, Sequence):
            raise ShapeError(f"{who}: got {shape!r} for slot {slot}, {rule}")
        shapes.append(as_shape(f"{who}, slot {slot}", shape))
        if 0 in shapes[-1]:
            raise ShapeError(f"{who}: got {shape!r} for slot {slot}, need extents >= 1")
    return tuple(shapes)
