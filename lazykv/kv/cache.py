"""KvCache: keys and values of every layer, written in place and rewound by length.

Positions are axis 2 of every buffer (head-major). The cache names its *allocation*, not the
conversation: truncating, resetting and writing keep `alloc_id()`, replacing storage mints a new
one.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, SupportsIndex

from lazykv.device import DeviceLike
from lazykv.dtypes import DTypeLike, dtype
from lazykv.errors import BindingError, DTypeError, RangeError, ShapeError
from lazykv.graph import Tensor
from lazykv.kv.batch import as_index, reorder_rows, repeated, selected
from lazykv.kv.layer import KvLayer, KvSlot
from lazykv.kv.pairs import KvPairCache
from lazykv.kv.places import places
from lazykv.kv.rows import check_layers, count, counts
from lazykv.kv.slots import zeroed
from lazykv.owner import exclusive
from lazykv.spec import whole
from lazykv.storage import overlapping


class KvCache(KvPairCache):
    """The key/value cache of a model; made by `with_capacity` or `with_dims`.

    Fields: `layers` (a tuple; None where a layer has no storage), `cached_len` (the live length),
    `n_kv_heads`, `head_dim`, `batch` (sequences, all of one length), `max_seq_len` (the capacity,
    or None), `dtype` (or None until known).
    """

    refill: ClassVar[str] = "set_layer brings new"

    # Construction

    @classmethod
    def with_dims(
        cls, n_layers: SupportsIndex, n_kv_heads: SupportsIndex, head_dim: SupportsIndex
    ) -> "KvCache":
        """A cache that grows by replacement: layers start as None, `set_layer` brings storage.

        Capacity, dtype and location are None; the dtype follows the first inserted layer.
        """
        who = "KvCache.with_dims"
        layers, heads, dim = counts(
            who, n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim
        )
        check_layers(who, layers)
        return cls(layers, heads, dim)

    @classmethod
    def with_capacity(
        cls, n_layers: SupportsIndex, n_kv_heads: SupportsIndex, head_dim: SupportsIndex,
        max_seq_len: SupportsIndex, dtype: DTypeLike,
        device: DeviceLike | Sequence[DeviceLike | None] = "cpu", batch: SupportsIndex = 1,
    ) -> "KvCache":  # fmt: skip
        """A cache with all memory up front: K and V of every layer are one zeroed
        ``[batch, n_kv_heads, max_seq_len, head_dim]`` buffer, `footprint` bytes in total.

        `device` is one location, or one per layer (None: this process has no such layer). Raises
        `OutOfMemory` or `BackendUnavailable` before anything of the cache exists.
        """
        layers, heads, dim, capacity, sequences = counts(
            "KvCache.with_capacity", n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim,
            max_seq_len=max_seq_len, batch=batch,
        )  # fmt: skip
        dt, (where, place) = _dtype(dtype), places("KvCache.with_capacity", device, layers)
        shape = (sequences, heads, capacity, dim)
        made = zeroed([shape for _ in KvSlot], dt, where)
        cache = cls(layers, heads, dim, sequences)
        cache._take_zeroed(made)
        cache._max_seq_len, cache._dtype = capacity, dt
        cache._locations, cache._place = where, place
        return cache

    @staticmethod
    def footprint(
        n_layers: SupportsIndex, n_kv_heads: SupportsIndex, head_dim: SupportsIndex,
        max_seq_len: SupportsIndex, dtype: DTypeLike, batch: SupportsIndex = 1,
    ) -> int:  # fmt: skip
        """Bytes that `with_capacity` would allocate: layers * 2 * batch * heads * capacity * dim *
        itemsize."""
        who = "KvCache.footprint"
        extents = counts(
            who, n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim,
            max_seq_len=max_seq_len, batch=batch,
        )  # fmt: skip
        total = 2 * _dtype(dtype).itemsize
        for n in extents:
            total *= n
        return total

    # What a held plan bakes

    def plan_facts(self) -> dict[str, object]:
        """What a held plan bakes about a cache, beside its storages."""
        return {
            "layers": len(self._layers),
            "capacity": self._max_seq_len,
            "heads": self._n_kv_heads,
            "head_dim": self._head_dim,
            "batch": self._batch,
            "dtype": None if self._dtype is None else self._dtype.name,
        }

    # Length and storage

    @exclusive
    def clear(self) -> None:
        """Drop every layer and mint a new id; the memory is free for others.

        Under `with_dims` the dtype goes too: the next first layer decides anew.
        """
        super().clear()
        if self._max_seq_len is None:
            self._dtype = None

    @exclusive
    def set_layer(self, index: SupportsIndex, layer: KvLayer) -> None:
        """Replace a layer's storage. Mints a new id, forfeits the proven location and ends
        savepoints; the layer's versions go on above those of the one before. Refused in an open
        step."""
        who = "KvCache.set_layer"
        i = whole(who, "layer", index)
        if not 0 <= i < len(self._layers):
            raise RangeError(f"{who}: got layer {i}, need 0 <= layer < {len(self._layers)}")
        self._check_layer(who, i, layer)
        self.check_no_open_step(who)
        self._put_layer(i, layer)
        self._dtype = layer.k.dtype
        for slot, storage in enumerate((layer.k, layer.v)):
            if storage.row_log is not None:
                storage.row_log.name = self._log_name(i, slot)
        self._locations[i] = self._place = None
        self._savepoints.clear()
        self._new_allocation()

    @exclusive
    def reorder(self, index: Sequence[SupportsIndex]) -> None:
        """Sequence i becomes what sequence ``index[i]`` was (beam search); storage and id stay.

        Only live rows move, so an open step is refused.
        """
        rows = as_index("KvCache.reorder", index, self._batch)
        if len(rows) != self._batch:
            raise ShapeError(
                f"KvCache.reorder: got {len(rows)} indices, need {self._batch}; use select"
            )
        self.check_no_open_step("KvCache.reorder")
        present = [layer for layer in self._layers if layer is not None]
        reorder_rows([s for layer in present for s in (layer.k, layer.v)], rows, self._cached_len)
        self._bump_all()

    @exclusive
    def select(self, index: Sequence[SupportsIndex]) -> None:
        """Keep these sequences, in this order, repeats allowed; another batch mints a new id."""
        rows = as_index("KvCache.select", index, self._batch)
        if not rows:
            raise ShapeError("KvCache.select: got no indices, need at least one")
        if len(rows) == self._batch:
            self.reorder(rows)
        else:
            self._rebatch("KvCache.select", len(rows), lambda slot: selected(slot, rows))

    @exclusive
    def repeat(self, n: SupportsIndex) -> None:
        """Every sequence n times in a row: ``a b`` becomes ``a a b b``."""
        times = count("KvCache.repeat", "n", n, 1)
        if times > 1:
            self._rebatch("KvCache.repeat", self._batch * times, lambda slot: repeated(slot, times))

    def _rebatch(self, who: str, batch: int, make: Callable[[Tensor], Tensor]) -> None:
        """Another number of sequences; savepoints end, since no length brings the old ones back."""
        self.check_no_open_step(who)
        self._replace(make)
        self._savepoints.clear()
        self._batch = batch

    def _check_layer(self, who: str, index: int, layer: KvLayer) -> None:
        if not isinstance(layer, KvLayer):
            raise BindingError(f"{who}: got {type(layer).__name__}, need a KvLayer")
        batch, heads, rows, dim = layer.k.shape
        if (batch, heads, dim) != (self._batch, self._n_kv_heads, self._head_dim):
            raise ShapeError(
                f"{who}: got {layer.k.spec}, need "
                f"[{self._batch},{self._n_kv_heads},n,{self._head_dim}]"
            )
        if self._dtype is not None and layer.k.dtype is not self._dtype:
            raise DTypeError(f"{who}: got {layer.k.dtype}, need {self._dtype}")
        if self._max_seq_len is not None and rows != self._max_seq_len:
            raise ShapeError(f"{who}: got {layer.k.spec}, need capacity {self._max_seq_len}")
        for other, known in enumerate(self._layers):
            if other != index and known is not None and {known.k, known.v} & {layer.k, layer.v}:
                raise BindingError(
                    f"{who}: got a storage that layer {other} holds, need separate ones, because "
                    "every layer is written"
                )
        self._check_memory(who, index, layer)

    def _check_memory(self, who: str, index: int, layer: KvLayer) -> None:
        """Refuse a layer whose rows, when written, would show up in another slot."""
        slots = [(index, half, layer.slot(half)) for half in KvSlot]
        for other, known in enumerate(self._layers):
            if other != index and known is not None:
                slots += [(other, half, known.slot(half)) for half in KvSlot]
        for pair in overlapping([storage for _, _, storage in slots]):
            first, second = (self._log_name(*slots[n][:2]) for n in pair)
            raise BindingError(
                f"{who}: got one memory for {first} and {second}, need separate ones, because "
                "every slot is written"
            )

    # Writing

    def write_bytes(
        self, layer: SupportsIndex, slot: SupportsIndex, start: SupportsIndex, n: SupportsIndex,
        data: object, device: DeviceLike | None = None,
    ) -> None:  # fmt: skip
        """Write raw little-endian rows ``[batch, n_kv_heads, n, head_dim]`` at rows start..start+n.

        Head-major: position is axis 2, unlike the blocks of a paged pool. One throwaway ``Const ->
        WriteSlice`` graph runs into the same storage, so a plan held for this cache sees the rows
        on its next step. `cached_len` does not move.
        """
        super().write_bytes(layer, slot, start, n, data, device)

    def __repr__(self) -> str:
        return (
            f"KvCache({len(self._layers)} layers, {self._n_kv_heads} heads x {self._head_dim}, "
            f"length {self._cached_len} of {self._max_seq_len}, {self._dtype})"
        )


_dtype = dtype
