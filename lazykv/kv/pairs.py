"""Caches whose layers are a pair of storages: keys and values of every head, row by row."""

from collections.abc import Sequence
from typing import ClassVar, SupportsIndex

from lazykv.device import HostArray
from lazykv.dtypes import DType
from lazykv.kv.layer import KvLayer
from lazykv.kv.rows import as_slot
from lazykv.kv.slots import SlotCache
from lazykv.spec import Shape, whole
from lazykv.storage import Storage


class KvPairCache(SlotCache):
    """Base of caches of K and V, each ``[batch, n_kv_heads, rows, head_dim]`` per layer."""

    row_axis: ClassVar[int] = 2

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int, batch: int = 1) -> None:
        super().__init__(n_layers)
        self._layers: list[KvLayer | None] = [None] * n_layers
        # Per layer: where the versions of its next storages begin, above those of all before.
        self._next_versions = [(0, 0)] * n_layers
        self._n_kv_heads = n_kv_heads
        self._head_dim = head_dim
        self._batch = batch
        self._dtype: DType | None = None

    # What the cache is

    @property
    def layers(self) -> tuple[KvLayer | None, ...]:
        return tuple(self._layers)

    @property
    def n_kv_heads(self) -> int:
        return self._n_kv_heads

    @property
    def head_dim(self) -> int:
        return self._head_dim

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def dtype(self) -> DType | None:
        return self._dtype

    def layer(self, index: SupportsIndex) -> KvLayer | None:
        """The layer, or None if it has no storage or the index is out of range."""
        i = whole(f"{type(self).__name__}.layer", "layer", index)
        return self._layers[i] if 0 <= i < len(self._layers) else None

    layer_mut = layer

    def bump_version(self, layer: SupportsIndex, slot: SupportsIndex) -> None:
        """Count one cache-level write to a slot; nothing happens if the layer is absent."""
        found = self.layer(layer)
        if found is not None:
            found.bump(as_slot(f"{type(self).__name__}.bump_version", slot))

    def _slots(self, layer: int) -> tuple[Storage, ...] | None:
        found = self._layers[layer] if 0 <= layer < len(self._layers) else None
        return None if found is None else (found.k, found.v)

    def _put_slots(self, layer: int, slots: tuple[Storage, ...] | None) -> None:
        self._put_layer(layer, None if slots is None else KvLayer(*slots))

    def _put_layer(self, index: int, layer: KvLayer | None) -> None:
        old = self._layers[index]
        if old is not None:
            self._next_versions[index] = (old.k_version + 1, old.v_version + 1)
        if layer is not None:
            layer.count_from(self._next_versions[index])
        self._layers[index] = layer

    def _slot_names(self) -> Sequence[str]:
        return "KV"

    def _slot_number(self, who: str, slot: SupportsIndex) -> int:
        return as_slot(who, slot)

    def _row_shape(self, slot: int) -> tuple[Shape, Shape]:
        return (self._batch, self._n_kv_heads), (self._head_dim,)

    def append(self, layer: SupportsIndex, k: object, v: object) -> tuple[HostArray, HostArray]:
        """Write rows ``[batch, n_kv_heads, n, head_dim]`` of K and V at `cached_len`.

        Returns live views that include the new rows. A step is open from the first layer's append
        to the last one's; `cached_len` moves when it closes.
        """
        k_live, v_live = self._append(layer, (k, v))
        return k_live, v_live

    def append_all(
        self, ks: Sequence[object], vs: Sequence[object]
    ) -> list[tuple[HostArray, HostArray]]:
        """Append to every populated layer in one pass; all arguments are checked first."""
        return [(k, v) for k, v in self._append_all((ks, vs))]

    def live(self, layer: SupportsIndex) -> tuple[HostArray, HostArray]:
        """Zero-copy, read-only views ``[batch, n_kv_heads, cached_len, head_dim]`` of K and V."""
        k, v = self._live(layer)
        return k, v
