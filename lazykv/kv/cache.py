"""KvCache: keys and values of every layer, written in place and rewound by length.

Positions are axis 2 of every buffer (head-major). The cache names its *allocation*, not the
conversation: truncating, resetting and writing keep `alloc_id()`, replacing storage mints a new
one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

from lazykv.device import CPU, Device, DeviceLike, DeviceLocation, HostArray, device
from lazykv.dtypes import DType, DTypeLike, dtype, to_logical
from lazykv.errors import BindingError, DTypeError, GraphError, RangeError, ShapeError
from lazykv.graph import Graph
from lazykv.ids import KvAllocId, next_alloc_id
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


class KvCache:
    """The key/value cache of a model; made by `with_capacity` or `with_dims`.

    Fields: `layers` (a tuple; None where a layer has no storage), `cached_len` (the live length),
    `n_kv_heads`, `head_dim`, `max_seq_len` (the capacity, or None), `dtype` (or None until known).
    """

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int) -> None:
        self._layers: list[KvLayer | None] = [None] * n_layers
        self._n_kv_heads = n_kv_heads
        self._head_dim = head_dim
        self._max_seq_len: int | None = None
        self._dtype: DType | None = None
        self._location: DeviceLocation | None = None
        self._cached_len = 0
        self._alloc_id = next_alloc_id()
        self._step: _OpenStep | None = None
        # Plans that models hold for this cache, so that they live and die with it.
        self.held: dict[object, Any] = {}

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
        max_seq_len: SupportsIndex, dtype: DTypeLike, device: DeviceLike = "cpu",
    ) -> "KvCache":  # fmt: skip
        """A cache with all memory up front: K and V of every layer are one zeroed
        ``[1, n_kv_heads, max_seq_len, head_dim]`` buffer, `footprint` bytes in total.

        Raises `OutOfMemory` or `BackendUnavailable` before anything of the cache exists.
        """
        who = "KvCache.with_capacity"
        layers, heads, dim, capacity = _counts(
            who,
            n_layers=n_layers,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            max_seq_len=max_seq_len,
        )
        dt, where = _dtype(dtype), _device(device)
        shape = (1, heads, capacity, dim)
        graph = Graph()
        fills = [graph.alloc(shape, dt, where).zero_fill() for _ in range(2 * layers)]
        slots = allocate(fills)
        cache = cls(layers, heads, dim)
        cache._layers = [KvLayer(k, v) for k, v in zip(slots[::2], slots[1::2], strict=True)]
        cache._max_seq_len, cache._dtype, cache._location = capacity, dt, where.location
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
    def max_seq_len(self) -> int | None:
        return self._max_seq_len

    @property
    def dtype(self) -> DType | None:
        return self._dtype

    @property
    def cached_len(self) -> int:
        """Live rows. May be assigned within capacity by callers who write through their own plans;
        that drops an open step."""
        return self._cached_len

    @cached_len.setter
    def cached_len(self, n: SupportsIndex) -> None:
        rows = count("KvCache.cached_len", "length", n)
        if self._max_seq_len is not None and rows > self._max_seq_len:
            raise RangeError(
                f"KvCache.cached_len: got {rows}, need 0 <= length <= capacity {self._max_seq_len}"
            )
        # Rows of an open step stand at the old length: they cannot become part of the new one.
        self._step = None
        self._cached_len = rows

    def __len__(self) -> int:
        return self._cached_len

    def __bool__(self) -> bool:
        return True

    def n_layers(self) -> int:
        return len(self._layers)

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

    def alloc_id(self) -> KvAllocId:
        """Names the allocation: unique in the process, never reused, never 0."""
        return self._alloc_id

    def device_location(self) -> DeviceLocation | None:
        """Where the allocation was measured to live; None is "not proven", never "cpu"."""
        return self._location

    # What a held plan binds

    def rebind_location(self) -> DeviceLocation | None:
        return self._location

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        return self.slot_storage(layer, which)

    # Length

    def truncate_to(self, n: SupportsIndex) -> None:
        """Lower the live length; a larger n does nothing. Storage, id and plans stay.

        An open step's rows lie past every length that this keeps, so they are dropped too.
        """
        rows = count("KvCache.truncate_to", "length", n)
        if rows <= self._cached_len:
            self._step = None
            self._cached_len = rows

    def reset(self) -> None:
        """Rewind to length 0, keeping buffers and id."""
        self.truncate_to(0)

    def clear(self) -> None:
        """Drop every layer and mint a new id; the memory is free for others.

        Under `with_dims` the dtype goes too: the next first layer decides anew.
        """
        self._layers = [None] * len(self._layers)
        if self._max_seq_len is None:
            self._dtype = None
        self._location = None
        self._cached_len = 0
        self._step = None
        self.held.clear()
        self._alloc_id = next_alloc_id()

    def set_layer(self, index: SupportsIndex, layer: KvLayer) -> None:
        """Replace a layer's storage. Mints a new id and forfeits the proven location."""
        who = "KvCache.set_layer"
        i = whole(who, "layer", index)
        if not 0 <= i < len(self._layers):
            raise RangeError(f"{who}: got layer {i}, need 0 <= layer < {len(self._layers)}")
        self._check_layer(who, i, layer)
        self._layers[i] = layer
        self.held.clear()
        self._dtype = layer.k.dtype
        self._location = None
        self._step = None
        self._alloc_id = next_alloc_id()

    def _check_layer(self, who: str, index: int, layer: KvLayer) -> None:
        if not isinstance(layer, KvLayer):
            raise BindingError(f"{who}: got {type(layer).__name__}, need a KvLayer")
        batch, heads, rows, dim = layer.k.shape
        if (batch, heads, dim) != (1, self._n_kv_heads, self._head_dim):
            raise ShapeError(
                f"{who}: got {layer.k.spec}, need [1,{self._n_kv_heads},n,{self._head_dim}]"
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
        """Write raw little-endian rows ``[1, n_kv_heads, n, head_dim]`` at rows start..start+n.

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
        want = Spec((1, self._n_kv_heads, rows, self._head_dim), storage.dtype)
        if raw.nbytes != want.nbytes:
            raise ShapeError(f"{who}: got {raw.nbytes} bytes, need {want.nbytes} for {want}")
        values = raw.view(storage.dtype.numpy).reshape(want.shape)
        write_rows([(storage, values)], begin)
        self.bump_version(i, which)

    def append(self, layer: SupportsIndex, k: object, v: object) -> tuple[HostArray, HostArray]:
        """Write rows ``[1, n_kv_heads, n, head_dim]`` of K and V at `cached_len`.

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

    def abort_step(self) -> None:
        """Drop an open step: its rows were never counted."""
        self._step = None

    def live(self, layer: SupportsIndex) -> tuple[HostArray, HostArray]:
        """Zero-copy, read-only views ``[1, n_kv_heads, cached_len, head_dim]`` of K and V."""
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
        return storage, as_rows(who, slot, value, storage.dtype, self._n_kv_heads, self._head_dim)

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
