"""KvCache: keys and values of every layer, written in place and rewound by length.

Positions are axis 2 of every buffer (head-major). The cache names its *allocation*, not the
conversation: truncating, resetting and writing keep `alloc_id()`, replacing storage mints a new
one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

from lazykv.device import CPU, Device, DeviceLike, DeviceLocation, HostArray, device
from lazykv.dtypes import DType, DTypeLike, dtype, to_logical
from lazykv.errors import BindingError, DTypeError, GraphError, RangeError, ShapeError
from lazykv.graph import Graph, Tensor
from lazykv.kv.base import RowCache
from lazykv.kv.batch import as_index, grown, reorder_rows, replace_storages, selected
from lazykv.kv.layer import KvLayer, KvSlot
from lazykv.kv.rows import as_rows, as_slot, check_rows, count, whole, write_rows
from lazykv.runtime.realize import allocate
from lazykv.spec import Spec
from lazykv.storage import Storage, as_host_bytes


@dataclass
class _OpenStep:
    """Rows of one step that some layers already hold and the cache does not yet count."""

    rows: int
    layers: set[int] = field(default_factory=set)


class KvCache(RowCache):
    """The key/value cache of a model; made by `with_capacity` or `with_dims`.

    Fields: `layers` (a tuple; None where a layer has no storage), `cached_len` (the live length),
    `n_kv_heads`, `head_dim`, `batch` (sequences, all of one length), `max_seq_len` (the capacity,
    or None), `dtype` (or None until known).
    """

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int, batch: int = 1) -> None:
        super().__init__(n_layers)
        self._layers: list[KvLayer | None] = [None] * n_layers
        self._n_kv_heads = n_kv_heads
        self._head_dim = head_dim
        self._batch = batch
        self._max_seq_len: int | None = None
        self._dtype: DType | None = None
        self._step: _OpenStep | None = None

    # Construction

    @classmethod
    def with_dims(
        cls, n_layers: SupportsIndex, n_kv_heads: SupportsIndex, head_dim: SupportsIndex
    ) -> "KvCache":
        """A cache that grows by replacement: layers start as None, `set_layer` brings storage.

        Capacity, dtype and location are None; the dtype follows the first inserted layer.
        """
        who = "KvCache.with_dims"
        return cls(*_counts(who, n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim))

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
        layers, heads, dim, capacity, sequences = _counts(
            "KvCache.with_capacity", n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim,
            max_seq_len=max_seq_len, batch=batch,
        )  # fmt: skip
        dt, places = _dtype(dtype), _places("KvCache.with_capacity", device, layers)
        shape = (sequences, heads, capacity, dim)
        graph = Graph()
        fills = [
            graph.alloc(shape, dt, place).zero_fill()
            for place in places if place is not None for _ in KvSlot
        ]  # fmt: skip
        slots = iter(allocate(fills))
        cache = cls(layers, heads, dim, sequences)
        cache._layers = [None if p is None else KvLayer(next(slots), next(slots)) for p in places]
        cache._max_seq_len, cache._dtype, cache._locations = capacity, dt, places
        return cache

    @staticmethod
    def footprint(
        n_layers: SupportsIndex, n_kv_heads: SupportsIndex, head_dim: SupportsIndex,
        max_seq_len: SupportsIndex, dtype: DTypeLike, batch: SupportsIndex = 1,
    ) -> int:  # fmt: skip
        """Bytes that `with_capacity` would allocate: layers * 2 * batch * heads * capacity * dim *
        itemsize."""
        who = "KvCache.footprint"
        counts = _counts(
            who, n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim,
            max_seq_len=max_seq_len, batch=batch,
        )  # fmt: skip
        total = 2 * _dtype(dtype).itemsize
        for n in counts:
            total *= n
        return total

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
    def max_seq_len(self) -> int | None:
        return self._max_seq_len

    capacity = max_seq_len

    @property
    def dtype(self) -> DType | None:
        return self._dtype

    def layer(self, index: SupportsIndex) -> KvLayer | None:
        """The layer, or None if it has no storage or the index is out of range."""
        i = whole("KvCache.layer", "layer", index)
        return self._layers[i] if 0 <= i < len(self._layers) else None

    layer_mut = layer

    def slot_storage(self, layer: SupportsIndex, slot: KvSlot | int) -> Storage | None:
        """The storage of K or V: what plans and `InferenceContext.insert` bind."""
        found = self.layer(layer)
        return None if found is None or slot not in (0, 1) else found.slot(KvSlot(slot))

    def bump_version(self, layer: SupportsIndex, slot: KvSlot | int) -> None:
        """Count one cache-level write to a slot; nothing happens if the layer is absent."""
        found = self.layer(layer)
        if found is not None:
            found.bump(as_slot("KvCache.bump_version", slot))

    # What a held plan binds, and what it bakes about its cache

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        return self.slot_storage(layer, which)

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

    def drop_open_step(self) -> None:
        self._step = None

    abort_step = drop_open_step

    def clear(self) -> None:
        """Drop every layer and mint a new id; the memory is free for others.

        Under `with_dims` the dtype goes too: the next first layer decides anew.
        """
        self._layers = [None] * len(self._layers)
        if self._max_seq_len is None:
            self._dtype = None
        self._locations = [None] * len(self._layers)
        self._cached_len = 0
        self._step = None
        self._new_allocation()

    def set_layer(self, index: SupportsIndex, layer: KvLayer) -> None:
        """Replace a layer's storage. Mints a new id and forfeits the proven location."""
        who = "KvCache.set_layer"
        i = whole(who, "layer", index)
        if not 0 <= i < len(self._layers):
            raise RangeError(f"{who}: got layer {i}, need 0 <= layer < {len(self._layers)}")
        self._check_layer(who, i, layer)
        self._layers[i] = layer
        self._dtype = layer.k.dtype
        self._locations[i] = None
        self._step = None
        self._new_allocation()

    def grow(self, new_capacity: SupportsIndex) -> None:
        """More rows for every layer, old rows kept; mints a new id. A smaller capacity is refused.

        The new storage is made before the old is let go, so a failure changes nothing.
        """
        who = "KvCache.grow"
        capacity = count(who, "capacity", new_capacity, 1)
        if self._max_seq_len is None:
            raise GraphError(f"{who}: got a cache without fixed capacity, need with_capacity")
        if capacity < self._max_seq_len:
            raise RangeError(f"{who}: got capacity {capacity}, need >= {self._max_seq_len}")
        if capacity > self._max_seq_len:
            self._replace(lambda slot: grown(slot, capacity))
            self._max_seq_len = capacity

    def reorder(self, index: Sequence[SupportsIndex]) -> None:
        """Sequence i becomes what sequence ``index[i]`` was (beam search); storage and id stay."""
        rows = as_index("KvCache.reorder", index, self._batch)
        if len(rows) != self._batch:
            raise ShapeError(
                f"KvCache.reorder: got {len(rows)} indices, need {self._batch}; use select"
            )
        present = [layer for layer in self._layers if layer is not None]
        reorder_rows([s for layer in present for s in (layer.k, layer.v)], rows, self._cached_len)
        for i in range(len(self._layers)):
            for slot in KvSlot:
                self.bump_version(i, slot)

    def select(self, index: Sequence[SupportsIndex]) -> None:
        """Keep these sequences, in this order, repeats allowed; another batch mints a new id."""
        rows = as_index("KvCache.select", index, self._batch)
        if not rows:
            raise ShapeError("KvCache.select: got no indices, need at least one")
        if len(rows) == self._batch:
            self.reorder(rows)
        else:
            self._replace(lambda slot: selected(slot, rows))
            self._batch = len(rows)

    def repeat(self, n: SupportsIndex) -> None:
        """Every sequence n times in a row: ``a b`` becomes ``a a b b``."""
        times = count("KvCache.repeat", "n", n, 1)
        self.select([i for i in range(self._batch) for _ in range(times)])

    def _replace(self, make: Callable[[Tensor], Tensor]) -> None:
        """New storage for every layer, made from the old, in one pass; length and rows stay."""
        present = [(i, layer) for i, layer in enumerate(self._layers) if layer is not None]
        made = replace_storages([s for _, layer in present for s in (layer.k, layer.v)], make)
        for n, (i, _) in enumerate(present):
            self._layers[i] = KvLayer(made[2 * n], made[2 * n + 1])
        self._step = None
        self._new_allocation()

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

    # Writing

    def write_bytes(
        self, layer: SupportsIndex, slot: KvSlot | int, start: SupportsIndex, n: SupportsIndex,
        data: object, device: DeviceLike | None = None,
    ) -> None:  # fmt: skip
        """Write raw little-endian rows ``[batch, n_kv_heads, n, head_dim]`` at rows start..start+n.

        Head-major: position is axis 2, unlike the blocks of a paged pool. One throwaway ``Const ->
        WriteSlice`` graph runs into the same storage, so a plan held for this cache sees the rows
        on its next step. `cached_len` does not move.
        """
        who = "KvCache.write_bytes"
        i, which = whole(who, "layer", layer), as_slot(who, slot)
        who = f"{who}(layer {i}, {which.name})"
        storage, capacity = self._writable(who, i, which)
        begin, rows = count(who, "start", start), count(who, "n", n)
        check_rows(who, begin, rows, capacity)
        _check_device(who, device, storage.location)
        raw = as_host_bytes(who, data)
        want = Spec((self._batch, self._n_kv_heads, rows, self._head_dim), storage.dtype)
        if raw.nbytes != want.nbytes:
            raise ShapeError(f"{who}: got {raw.nbytes} bytes, need {want.nbytes} for {want}")
        values = raw.view(storage.dtype.numpy).reshape(want.shape)
        write_rows([(storage, values)], begin)
        self.bump_version(i, which)

    def append(self, layer: SupportsIndex, k: object, v: object) -> tuple[HostArray, HostArray]:
        """Write rows ``[batch, n_kv_heads, n, head_dim]`` of K and V at `cached_len`.

        Returns live views that include the new rows. A step is open from the first layer's append
        to the last one's; `cached_len` moves when it closes.
        """
        i = whole("KvCache.append", "layer", layer)
        who = f"KvCache.append(layer {i})"
        writes = [self._write_of(who, i, slot, x) for slot, x in zip(KvSlot, (k, v), strict=True)]
        (k_store, k_rows), (v_store, v_rows) = writes
        rows = k_rows.shape[2]
        if v_rows.shape[2] != rows:
            raise ShapeError(
                f"{who}: got {rows} rows of K and {v_rows.shape[2]} of V, need as many"
            )
        if self._step is not None and (i in self._step.layers or self._step.rows != rows):
            raise GraphError(
                f"{who}: got {rows} rows while a step of {self._step.rows} rows is open for layers "
                f"{sorted(self._step.layers)}, need each layer once; use abort_step()"
            )
        check_rows(who, self._cached_len, rows, k_store.shape[2])
        write_rows(writes, self._cached_len)
        for slot in KvSlot:
            self.bump_version(i, slot)
        length = self._cached_len + rows
        self._note_append(i, rows)
        return _view(who, k_store, length), _view(who, v_store, length)

    def append_all(
        self, ks: Sequence[object], vs: Sequence[object]
    ) -> list[tuple[HostArray, HostArray]]:
        """Append to every populated layer in one pass; all arguments are checked first."""
        who = "KvCache.append_all"
        present = [i for i, layer in enumerate(self._layers) if layer is not None]
        if not present:
            self._writable(who, 0, KvSlot.K)
        if len(ks) != len(present) or len(vs) != len(present):
            raise ShapeError(f"{who}: got {len(ks)} K and {len(vs)} V, need {len(present)} of each")
        if self._step is not None:
            raise GraphError(f"{who}: got an open step, need none; use abort_step()")
        writes = [
            self._write_of(f"{who}(layer {i})", i, slot, x)
            for i, k, v in zip(present, ks, vs, strict=True)
            for slot, x in zip(KvSlot, (k, v), strict=True)
        ]
        rows = writes[0][1].shape[2]
        if any(x.shape[2] != rows for _, x in writes):
            raise ShapeError(f"{who}: got different numbers of rows, need {rows} everywhere")
        check_rows(who, self._cached_len, rows, writes[0][0].shape[2])
        write_rows(writes, self._cached_len)
        for i in present:
            for slot in KvSlot:
                self.bump_version(i, slot)
        self._cached_len += rows
        return [self.live(i) for i in present]

    def live(self, layer: SupportsIndex) -> tuple[HostArray, HostArray]:
        """Zero-copy, read-only views ``[batch, n_kv_heads, cached_len, head_dim]`` of K and V."""
        found = self.layer(layer)
        if found is None:
            raise RangeError(f"KvCache.live: got layer {layer}, need a populated layer")
        who, length = f"KvCache.live(layer {layer})", self._cached_len
        return _view(who, found.k, length), _view(who, found.v, length)

    def _writable(self, who: str, layer: int, slot: KvSlot) -> tuple[Storage, int]:
        """A slot that rows may be written to, and the capacity."""
        if self._max_seq_len is None:
            raise GraphError(
                f"{who}: got a cache without fixed capacity, need one made by with_capacity; or "
                "replace the layer with set_layer"
            )
        storage = self.slot_storage(layer, slot)
        if storage is not None:
            # As a graph's constant a read-only storage would be written as a copy, to no effect.
            storage.check_writable()
            return storage, self._max_seq_len
        if all(known is None for known in self._layers) and 0 <= layer < len(self._layers):
            raise GraphError(
                f"{who}: got a cleared cache, need one with storage; reset() rewinds and keeps it, "
                "set_layer brings new"
            )
        raise RangeError(
            f"{who}: got an absent layer, need a populated one in 0..{len(self._layers) - 1}"
        )

    def _write_of(
        self, who: str, layer: int, slot: KvSlot, value: object
    ) -> tuple[Storage, HostArray]:
        storage, _ = self._writable(who, layer, slot)
        want = (self._batch, self._n_kv_heads, self._head_dim)
        return storage, as_rows(who, slot, value, storage.dtype, want)

    def _note_append(self, layer: int, rows: int) -> None:
        self._step = self._step or _OpenStep(rows)
        self._step.layers.add(layer)
        if self._step.layers == {i for i, known in enumerate(self._layers) if known is not None}:
            self._cached_len += rows
            self._step = None

    def __repr__(self) -> str:
        return (
            f"KvCache({len(self._layers)} layers, {self._n_kv_heads} heads x {self._head_dim}, "
            f"length {self._cached_len} of {self._max_seq_len}, {self._dtype})"
        )


_dtype = dtype


def _device(given: DeviceLike) -> Device:
    return device(given)


def _places(
    who: str, given: DeviceLike | Sequence[DeviceLike | None], layers: int
) -> list[DeviceLocation | None]:
    """A location per layer, every one of them served by a backend."""
    if isinstance(given, str | Device | DeviceLocation):
        return [_device(given).location] * layers
    if len(given) != layers:
        raise ShapeError(f"{who}: got {len(given)} devices, need one per layer ({layers})")
    return [None if d is None else _device(d).location for d in given]


def _counts(who: str, **values: SupportsIndex) -> tuple[int, ...]:
    return tuple(count(who, name, value, 1) for name, value in values.items())


def _check_device(who: str, given: DeviceLike | None, location: DeviceLocation) -> None:
    if given is not None and _device(given).location != location:
        raise BindingError(f"{who}: got device {_device(given)}, need the cache's own {location}")


def _view(who: str, storage: Storage, length: int) -> HostArray:
    storage.check_readable()
    check_rows(who, 0, length, storage.shape[2])
    if storage.location != CPU:
        return storage.to_numpy()[:, :, :length]
    view = to_logical(storage.array, storage.dtype)[:, :, :length]
    view.flags.writeable = False
    return view
