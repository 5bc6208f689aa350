"""KvCache: keys and values of every layer, written in place and rewound by length.

Positions are axis 2 of every buffer (head-major). The cache names its *allocation*, not the
conversation: truncating, resetting and writing keep `alloc_id()`, replacing storage mints a new one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import numpy as np

from lazykv.device import CPU, Device, DeviceLike, DeviceLocation, HostArray, as_location, device
from lazykv.dtypes import DType, DTypeLike, dtype, to_logical
from lazykv.errors import BackendUnavailable, DTypeError, GraphError, RangeError, ShapeError
from lazykv.graph import Graph, Tensor
from lazykv.ids import KvAllocId, next_alloc_id
from lazykv.kv.layer import KvLayer, KvSlot
from lazykv.runtime.realize import allocate, run_effects
from lazykv.spec import Spec, as_shape
from lazykv.storage import Storage, as_host_bytes
from lazykv.symbols import Sym


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
        return cls(*_counts("KvCache.with_dims", n_layers, n_kv_heads, head_dim))

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
        layers, heads, dim, capacity = _counts(who, n_layers, n_kv_heads, head_dim, max_seq_len)
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
        counts = _counts(who, n_layers, n_kv_heads, head_dim, max_seq_len, batch)
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
        """Live rows. May be assigned within capacity by callers who write through their own plans."""
        return self._cached_len

    @cached_len.setter
    def cached_len(self, n: SupportsIndex) -> None:
        rows = as_shape("KvCache.cached_len", (n,))[0]
        if self._max_seq_len is not None and rows > self._max_seq_len:
            raise RangeError(
                f"KvCache.cached_len: got {rows}, need 0 <= length <= capacity {self._max_seq_len}"
            )
        self._cached_len = rows

    def __len__(self) -> int:
        return self._cached_len

    def __bool__(self) -> bool:
        return True

    def n_layers(self) -> int:
        return len(self._layers)

    def layer(self, index: SupportsIndex) -> KvLayer | None:
        """The layer, or None if it has no storage or the index is out of range."""
        i = int(index)
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
            found.bump(KvSlot(slot))

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
        """Lower the live length; a larger n does nothing. Storage, id and plans stay."""
        rows = as_shape("KvCache.truncate_to", (n,))[0]
        self._step = None
        self._cached_len = min(self._cached_len, rows)

    def reset(self) -> None:
        """Rewind to length 0, keeping buffers and id."""
        self.truncate_to(0)

    def clear(self) -> None:
        """Drop every layer and mint a new id; the memory is free for others."""
        self._layers = [None] * len(self._layers)
        self._location = None
        self._cached_len = 0
        self._step = None
        self.held.clear()
        self._alloc_id = next_alloc_id()

    def set_layer(self, index: SupportsIndex, layer: KvLayer) -> None:
        """Replace a layer's storage. Mints a new id and forfeits the proven location."""
        i, who = int(index), "KvCache.set_layer"
        if not 0 <= i < len(self._layers):
            raise RangeError(f"{who}: got layer {i}, need 0 <= layer < {len(self._layers)}")
        heads, dim = layer.k.shape[1], layer.k.shape[3]
        if (heads, dim) != (self._n_kv_heads, self._head_dim):
            raise ShapeError(
                f"{who}: got {layer.k.spec}, need {self._n_kv_heads} heads of {self._head_dim}"
            )
        if self._dtype is not None and layer.k.dtype is not self._dtype:
            raise DTypeError(f"{who}: got {layer.k.dtype}, need {self._dtype}")
        if self._max_seq_len is not None and layer.k.shape[2] != self._max_seq_len:
            raise ShapeError(f"{who}: got {layer.k.spec}, need capacity {self._max_seq_len}")
        self._layers[i] = layer
        self._dtype = layer.k.dtype
        self._location = None
        self._step = None
        self._alloc_id = next_alloc_id()

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
        who = f"KvCache.write_bytes(layer {int(layer)}, {KvSlot(slot).name})"
        storage = self._writable(who, layer, slot, "reset() or with_capacity")
        begin, rows = as_shape(who, (start, n))
        self._check_rows(who, begin, rows)
        self._check_device(who, device)
        raw = as_host_bytes(data)
        want = Spec((1, self._n_kv_heads, rows, self._head_dim), storage.dtype)
        if raw.nbytes != want.nbytes:
            raise ShapeError(f"{who}: got {raw.nbytes} bytes, need {want.nbytes} for {want}")
        values = raw.view(storage.dtype.numpy).reshape(want.shape)
        write_rows([(storage, values)], begin)
        self.bump_version(layer, slot)

    def append(self, layer: SupportsIndex, k: object, v: object) -> tuple[HostArray, HostArray]:
        """Write rows ``[1, n_kv_heads, n, head_dim]`` of K and V at `cached_len`.

        Returns live views that include the new rows. A step is open from the first layer's append
        to the last one's; `cached_len` moves when it closes.
        """
        i, who = int(layer), f"KvCache.append(layer {int(layer)})"
        slots = [self._writable(who, i, slot, "with_capacity or set_layer") for slot in KvSlot]
        arrays = [self._rows(who, slot, x) for slot, x in zip(KvSlot, (k, v), strict=True)]
        rows = arrays[0].shape[2]
        if arrays[1].shape[2] != rows:
            raise ShapeError(
                f"{who}: got {rows} rows of K and {arrays[1].shape[2]} of V, need as many"
            )
        if self._step is not None and (i in self._step.layers or self._step.rows != rows):
            raise GraphError(
                f"{who}: got {rows} rows while a step of {self._step.rows} rows is open for layers "
                f"{sorted(self._step.layers)}, need each layer once; use abort_step()"
            )
        self._check_rows(who, self._cached_len, rows)
        write_rows(list(zip(slots, arrays, strict=True)), self._cached_len)
        for slot in KvSlot:
            self.bump_version(i, slot)
        length = self._cached_len + rows
        self._note_append(i, rows)
        return self._view(slots[0], length), self._view(slots[1], length)

    def append_all(
        self, ks: Sequence[object], vs: Sequence[object]
    ) -> list[tuple[HostArray, HostArray]]:
        """Append to every populated layer in one pass; all arguments are checked first."""
        who = "KvCache.append_all"
        present = [i for i, layer in enumerate(self._layers) if layer is not None]
        if len(ks) != len(present) or len(vs) != len(present):
            raise ShapeError(f"{who}: got {len(ks)} K and {len(vs)} V, need {len(present)} of each")
        if self._step is not None:
            raise GraphError(f"{who}: got an open step, need none; use abort_step()")
        writes = []
        for i, k, v in zip(present, ks, vs, strict=True):
            for slot, x in zip(KvSlot, (k, v), strict=True):
                storage = self._writable(who, i, slot, "with_capacity")
                writes.append((storage, self._rows(who, slot, x)))
        if not writes:
            raise GraphError(f"{who}: got a cache without layers, need with_capacity or set_layer")
        rows = writes[0][1].shape[2]
        if any(x.shape[2] != rows for _, x in writes):
            raise ShapeError(f"{who}: got different numbers of rows, need {rows} everywhere")
        self._check_rows(who, self._cached_len, rows)
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
            raise RangeError(f"KvCache.live: got layer {int(layer)}, need a populated layer")
        return self._view(found.k, self._cached_len), self._view(found.v, self._cached_len)

    # Checks: every way in decides here, before the first byte moves.

    def _writable(
        self, who: str, layer: SupportsIndex, slot: KvSlot | int, way_out: str
    ) -> Storage:
        storage = self.slot_storage(layer, slot)
        if storage is not None and self._max_seq_len is not None:
            return storage
        if self._max_seq_len is None:
            raise GraphError(
                f"{who}: got a cache without fixed capacity, need one made by with_capacity; or "
                "replace the layer with set_layer"
            )
        if all(known is None for known in self._layers) and 0 <= int(layer) < len(self._layers):
            raise GraphError(
                f"{who}: got a cleared cache, need one with storage; reset() keeps it, clear() drops it"
            )
        raise RangeError(
            f"{who}: got an absent layer, need a populated one in 0..{len(self._layers) - 1}; {way_out}"
        )

    def _check_rows(self, who: str, start: int, rows: int) -> None:
        if self._max_seq_len is None or start + rows > self._max_seq_len:
            raise RangeError(
                f"{who}: got rows {start}..{start + rows}, need {start + rows} <= capacity "
                f"{self._max_seq_len}"
            )

    def _check_device(self, who: str, given: DeviceLike | None) -> None:
        if given is not None and as_location(given) != self._location:
            raise BackendUnavailable(
                f"{who}: got device {as_location(given)}, need the cache's own {self._location}"
            )

    def _rows(self, who: str, slot: KvSlot, value: object) -> HostArray:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        dt = _dtype(array.dtype)
        want = (1, self._n_kv_heads, array.shape[2] if array.ndim == 4 else -1, self._head_dim)
        if array.shape != want:
            need = f"{self._dtype}[1,{self._n_kv_heads},n,{self._head_dim}]"
            raise ShapeError(f"{who}: got {slot.name} {Spec(array.shape, dt)}, need {need}")
        if dt is not self._dtype:
            raise DTypeError(
                f"{who}: got {slot.name} of {dt}, need {self._dtype}; convert it first"
            )
        return array

    def _note_append(self, layer: int, rows: int) -> None:
        self._step = self._step or _OpenStep(rows)
        self._step.layers.add(layer)
        if self._step.layers == {i for i, known in enumerate(self._layers) if known is not None}:
            self._cached_len += rows
            self._step = None

    def _view(self, storage: Storage, length: int) -> HostArray:
        if storage.location != CPU:
            return storage.to_numpy()[:, :, :length]
        view = to_logical(storage.array, storage.dtype)[:, :, :length]
        view.flags.writeable = False
        return view

    def __repr__(self) -> str:
        return (
            f"KvCache({len(self._layers)} layers, {self._n_kv_heads} heads x {self._head_dim}, "
            f"length {self._cached_len} of {self._max_seq_len}, {self._dtype})"
        )


_dtype = dtype


def _device(given: DeviceLike) -> Device:
    return device(given)


def _counts(who: str, *values: SupportsIndex) -> tuple[int, ...]:
    counts = as_shape(who, values)
    if 0 in counts:
        raise RangeError(f"{who}: got {counts}, need counts of at least 1")
    return counts


def write_graph(
    writes: Sequence[tuple[Storage, HostArray]], names: Sequence[str] | None = None
) -> tuple[list[Tensor], Sym]:
    """The throwaway graph of an eager write: per slot a ``Const -> WriteSlice`` at a symbolic row.

    The row is a symbol so that every position shares one compiled structure.
    """
    graph = Graph()
    capacity, rows = writes[0][0].shape[2], writes[0][1].shape[2]
    start = Sym("start", 0, capacity - rows)
    out = []
    for n, (storage, values) in enumerate(writes):
        name = names[n] if names else None
        dest = graph.const(storage, name=name)
        src = graph.const(values, name=f"{name}.rows" if name else None)
        out.append(dest.at[:, :, start : start + rows].set(src))
    return out, start


def write_rows(writes: Sequence[tuple[Storage, HostArray]], start: int) -> None:
    """Write rows at one position into several slots, in one pass."""
    effects, at = write_graph(writes)
    run_effects(effects, env={at: start})
