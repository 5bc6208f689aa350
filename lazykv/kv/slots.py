"""Caches whose layers are slots of rows: writing, appending, reading, growing and dropping them.

A cache says which storages a layer has and which axis counts its rows. What moves rows is here,
once for every such cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, SupportsIndex

from lazykv import config
from lazykv.backend_call import BackendCall
from lazykv.device import CPU, DeviceLike, DeviceLocation, HostArray, device
from lazykv.dtypes import DType, to_logical
from lazykv.errors import DTypeError, GraphError, RangeError, ShapeError
from lazykv.graph import Graph, Tensor
from lazykv.interchange import read_only
from lazykv.kv.base import RowCache
from lazykv.kv.batch import grown, replace_storages
from lazykv.kv.places import check_device
from lazykv.kv.rows import as_rows, check_rows, count, write_rows
from lazykv.layout import Layout
from lazykv.owner import exclusive
from lazykv.poison import RowLog
from lazykv.runtime.realize import allocate
from lazykv.spec import Shape, Spec, whole
from lazykv.storage import Storage, as_host_bytes

_EVERY = (slice(None),) * 2  # of each axis that can come before the rows


@dataclass
class OpenStep:
    """Rows of one step that some layers already hold and the cache does not yet count.

    `writes` are those that wait for the step to close, in a cache that cannot write them earlier.
    """

    rows: int
    layers: set[int] = field(default_factory=set)
    writes: list[tuple[Storage, HostArray]] = field(default_factory=list)


class SlotCache(RowCache):
    """Base of caches that hold, per layer, the same few storages (slots) of `capacity` rows."""

    row_axis: ClassVar[int]
    """The axis of every slot that counts rows."""

    refill: ClassVar[str]
    """How a cleared cache gets storage again, for messages."""

    bounded: ClassVar[bool] = True
    """Whether rows can be written only up to a capacity."""

    def __init__(self, n_layers: int) -> None:
        super().__init__(n_layers)
        self._max_seq_len: int | None = None
        self._step: OpenStep | None = None

    # What a cache of slots tells about itself

    def _slots(self, layer: int) -> tuple[Storage, ...] | None:
        """The storages of a layer; None if it has none or does not exist."""
        raise NotImplementedError

    def _put_slots(self, layer: int, slots: tuple[Storage, ...] | None) -> None:
        """Replace a layer's storages by others of the same kind, or drop them. Versions go on."""
        raise NotImplementedError

    def _slot_names(self) -> Sequence[str]:
        """The slots' names in messages, in the slots' order."""
        raise NotImplementedError

    def _slot_number(self, who: str, slot: SupportsIndex) -> int:
        """A caller's slot; RangeError if there is no such slot."""
        raise NotImplementedError

    def _row_shape(self, slot: int) -> tuple[Shape, Shape]:
        """A slot's extents before and after its axis of rows."""
        raise NotImplementedError

    def bump_version(self, layer: SupportsIndex, slot: SupportsIndex) -> None:
        """Count one cache-level write to a slot; nothing happens if the layer is absent."""
        raise NotImplementedError

    def _bump_all(self) -> None:
        for i in self._populated():
            for slot in range(len(self._slot_names())):
                self.bump_version(i, slot)

    def _populated(self) -> list[int]:
        return [i for i in range(self.n_layers()) if self._slots(i) is not None]

    @property
    def max_seq_len(self) -> int | None:
        """The capacity in rows, or None under grow-by-replacement."""
        return self._max_seq_len

    @property
    def capacity(self) -> int | None:
        return self._max_seq_len

    def slot_storage(self, layer: SupportsIndex, slot: SupportsIndex) -> Storage | None:
        """The storage of a slot: what plans and `InferenceContext.insert` bind. None if the layer
        has none, or if there is no such layer or slot."""
        who = f"{type(self).__name__}.slot_storage"
        slots, which = self._slots(whole(who, "layer", layer)) or (), whole(who, "slot", slot)
        return slots[which] if 0 <= which < len(slots) else None

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        return self.slot_storage(layer, which)

    # Storage

    def drop_open_step(self) -> None:
        self._step = None

    @exclusive
    def abort_step(self) -> None:
        """Drop a step in progress; its rows were never counted."""
        self.drop_open_step()

    def check_no_open_step(self, who: str) -> None:
        if self._step is not None:
            raise GraphError(
                f"{who}: got an open step of {self._step.rows} rows for layers "
                f"{sorted(self._step.layers)}, need none; append to the other layers, or use "
                "abort_step()"
            )

    @exclusive
    def reset(self) -> None:
        """Rewind to length 0 and drop an open step, keeping buffers and id. Versions move, so that
        who compares them sees that the rows are gone."""
        super().reset()
        self._bump_all()

    @exclusive
    def clear(self) -> None:
        """Drop every layer and mint a new id; the memory is free for others."""
        for i in range(self.n_layers()):
            self._put_slots(i, None)
        self._locations, self._place = [None] * self.n_layers(), None
        self._cached_len = 0
        self._step = None
        self._savepoints.clear()
        self._new_allocation()

    @exclusive
    def grow(self, new_capacity: SupportsIndex) -> None:
        """More rows for every layer, old rows and savepoints kept; mints a new id. A smaller
        capacity is refused, and so is an open step.

        The new storage is made before the old is let go, so a failure changes nothing.
        """
        who = f"{type(self).__name__}.grow"
        capacity = count(who, "capacity", new_capacity, 1)
        if self._max_seq_len is None:
            raise GraphError(f"{who}: got a cache without fixed capacity, need with_capacity")
        if capacity < self._max_seq_len:
            raise RangeError(f"{who}: got capacity {capacity}, need >= {self._max_seq_len}")
        if capacity > self._max_seq_len:
            self.check_no_open_step(who)
            self._replace(lambda slot: grown(slot, capacity, self.row_axis))
            self._max_seq_len = capacity

    def _replace(self, make: Callable[[Tensor], Tensor]) -> None:
        """New storage for every slot, made from the old, in one pass; length and rows stay."""
        old = {i: slots for i in self._populated() if (slots := self._slots(i)) is not None}
        made = iter(replace_storages([s for slots in old.values() for s in slots], make))
        for i, slots in old.items():
            fresh = tuple(next(made) for _ in slots)
            for before, after in zip(slots, fresh, strict=True):
                if before.row_log is not None:
                    after.row_log = before.row_log.resized(after.shape[self.row_axis])
            self._put_slots(i, fresh)
        self._new_allocation()

    def _take_zeroed(self, made: Sequence[tuple[Storage, ...] | None]) -> None:
        """Take the slots that `zeroed` made; under debug poison none of their rows is written."""
        for i, slots in enumerate(made):
            self._put_slots(i, slots)
            if config.POISON:
                for which, storage in enumerate(slots or ()):
                    rows = storage.shape[self.row_axis]
                    storage.row_log = RowLog(self._log_name(i, which), self.row_axis, rows)

    def _log_name(self, layer: int, slot: int) -> str:
        return f"{type(self).__name__} layer {layer}, {self._slot_names()[slot]}"

    # Writing and reading

    @exclusive
    def write_bytes(
        self, layer: SupportsIndex, slot: SupportsIndex, start: SupportsIndex, n: SupportsIndex,
        data: object, device: DeviceLike | None = None,
    ) -> None:  # fmt: skip
        """Write raw little-endian bytes of a slot, in its order of axes, at rows start..start+n.

        One throwaway ``Const -> WriteSlice`` graph runs into the same storage, so a plan held for
        this cache sees the rows on its next step. `cached_len` does not move.
        """
        who = f"{type(self).__name__}.write_bytes"
        i, which = whole(who, "layer", layer), self._slot_number(who, slot)
        who = f"{who}(layer {i}, {self._slot_names()[which]})"
        storage, capacity = self._writable(who, i, which)
        begin, rows = count(who, "start", start), count(who, "n", n)
        check_rows(who, begin, rows, capacity)
        check_device(who, device, storage.location)
        raw = as_host_bytes(who, data)
        lead, trail = self._row_shape(which)
        want = Spec((*lead, rows, *trail), storage.dtype)
        if raw.nbytes != want.nbytes:
            raise ShapeError(f"{who}: got {raw.nbytes} bytes, need {want.nbytes} for {want}")
        values = raw.view(storage.dtype.numpy).reshape(want.shape)
        write_rows([(storage, values)], begin, self.row_axis)
        self.bump_version(i, which)

    def _append(self, layer: SupportsIndex, values: Sequence[object]) -> tuple[HostArray, ...]:
        """Write rows of every slot of a layer at `cached_len`; live views with the new rows.

        A step is open from the first layer's append to the last populated one's; `cached_len`
        moves when it closes.
        """
        i = whole(f"{type(self).__name__}.append", "layer", layer)
        who = f"{type(self).__name__}.append(layer {i})"
        with self.owned(who):
            writes, rows = self._check_append(who, i, values)
            self._write_at_length(who, writes, [i])
            length = self._cached_len + rows
            self._note_append(i, rows)
            return tuple(self._view(who, storage, length) for storage, _ in writes)

    def _check_append(
        self, who: str, i: int, values: Sequence[object]
    ) -> tuple[list[tuple[Storage, HostArray]], int]:
        """The writes of one layer's append and their number of rows, which fit an open step."""
        writes = [self._write_of(who, i, slot, x) for slot, x in enumerate(values)]
        counts = [x.shape[self.row_axis] for _, x in writes]
        rows = counts[0]
        if any(n != rows for n in counts):
            names = self._slot_names()
            got = " and ".join(
                f"{n} {'of' if slot else 'rows of'} {names[slot]}" for slot, n in enumerate(counts)
            )
            raise ShapeError(f"{who}: got {got}, need as many")
        if self._step is not None and (i in self._step.layers or self._step.rows != rows):
            raise GraphError(
                f"{who}: got {rows} rows while a step of {self._step.rows} rows is open for layers "
                f"{sorted(self._step.layers)}, need each layer once; use abort_step()"
            )
        return writes, rows

    def _append_all(self, values: Sequence[Sequence[object]]) -> list[tuple[HostArray, ...]]:
        """Append to every populated layer in one pass; `values` holds, per slot, the rows of each
        layer. All arguments are checked first."""
        who = f"{type(self).__name__}.append_all"
        with self.owned(who):
            writes, rows, present = self._check_append_all(who, values)
            self._write_at_length(who, writes, present)
            self._cached_len += rows
            return [self._live(i) for i in present]

    def _check_append_all(
        self, who: str, values: Sequence[Sequence[object]]
    ) -> tuple[list[tuple[Storage, HostArray]], int, list[int]]:
        """The writes of a whole step, its number of rows and the layers."""
        present = self._populated()
        if not present:
            self._writable(who, 0, 0)
        names = self._slot_names()
        counts = [_length(f"{who}: got {name}", xs) for name, xs in zip(names, values, strict=True)]
        if any(n != len(present) for n in counts):
            got = " and ".join(f"{n} {name}" for n, name in zip(counts, names, strict=True))
            raise ShapeError(f"{who}: got {got}, need {len(present)} of each")
        self.check_no_open_step(who)
        writes = [
            self._write_of(f"{who}(layer {i})", i, slot, x)
            for i, of_layer in zip(present, zip(*values, strict=True), strict=True)
            for slot, x in enumerate(of_layer)
        ]
        rows = writes[0][1].shape[self.row_axis]
        if any(x.shape[self.row_axis] != rows for _, x in writes):
            raise ShapeError(f"{who}: got different numbers of rows, need {rows} everywhere")
        return writes, rows, present

    def _live(self, layer: SupportsIndex) -> tuple[HostArray, ...]:
        """Read-only views of the live rows of a layer's slots; zero-copy where the host can."""
        who = f"{type(self).__name__}.live(layer {layer})"
        slots = self._slots(whole(who, "layer", layer))
        if slots is None:
            who = f"{type(self).__name__}.live"
            raise RangeError(f"{who}: got layer {layer}, need a populated layer")
        return tuple([self._view(who, storage, self._cached_len) for storage in slots])

    def _writable(self, who: str, layer: int, slot: int) -> tuple[Storage, int]:
        """A slot that rows may be written to, and how many it holds."""
        if self.bounded and self._max_seq_len is None:
            raise GraphError(
                f"{who}: got a cache without fixed capacity, need one made by with_capacity; or "
                "replace the layer with set_layer"
            )
        slots = self._slots(layer)
        if slots is not None:
            # As a graph's constant a read-only storage would be written as a copy, to no effect.
            slots[slot].check_writable()
            return slots[slot], slots[slot].shape[self.row_axis]
        if not self._populated() and 0 <= layer < self.n_layers():
            raise GraphError(
                f"{who}: got a cleared cache, need one with storage; reset() rewinds and keeps it, "
                f"{self.refill}"
            )
        raise RangeError(
            f"{who}: got an absent layer, need a populated one in 0..{self.n_layers() - 1}"
        )

    def _write_of(
        self, who: str, layer: int, slot: int, value: object
    ) -> tuple[Storage, HostArray]:
        storage, _ = self._writable(who, layer, slot)
        if storage.row_log is not None:  # what append returns will hold these rows
            storage.row_log.check(who, slice(self._cached_len))
        lead, trail = self._row_shape(slot)
        return storage, as_rows(who, self._slot_names()[slot], value, storage.dtype, lead, trail)

    def _write_at_length(
        self, who: str, writes: Sequence[tuple[Storage, HostArray]], layers: Sequence[int]
    ) -> None:
        storage, values = writes[0]
        rows, capacity = values.shape[self.row_axis], storage.shape[self.row_axis]
        check_rows(who, self._cached_len, rows, capacity)
        write_rows(writes, self._cached_len, self.row_axis)
        for i in layers:
            for slot in range(len(writes) // len(layers)):
                self.bump_version(i, slot)

    def _note_append(self, layer: int, rows: int) -> None:
        self._step = self._step or OpenStep(rows)
        self._step.layers.add(layer)
        if self._step.layers == set(self._populated()):
            self._cached_len += rows
            self._step = None

    def _view(self, who: str, storage: Storage, length: int) -> HostArray:
        storage.check_readable()
        check_rows(who, 0, length, storage.shape[self.row_axis])
        return self._rows(who, storage, 0, length)

    def _rows(self, who: str, storage: Storage, start: int, n: int) -> HostArray:
        """Read-only rows start..start+n of a slot: a view, or a copy if not on the host."""
        if storage.row_log is not None:
            storage.row_log.check(who, slice(start, start + n))
        if storage.location == CPU:
            at = (*_EVERY[: self.row_axis], slice(start, start + n))
            return to_logical(read_only(storage.array), storage.dtype)[at]
        layout = Layout.contiguous(storage.shape).slice(self.row_axis, start, n)
        backend = device(storage.location).backend
        with storage.read() as array, BackendCall(storage.location, "copy_out"):
            rows = backend.copy_out(backend.view(array, storage.dtype, layout))
        view = to_logical(rows, storage.dtype)
        view.flags.writeable = False
        return view


def _length(who: str, layers: Sequence[object]) -> int:
    try:
        return len(layers)
    except TypeError:
        got = type(layers).__name__
        raise DTypeError(f"{who} of {got}, need a list of rows, one array per layer") from None


def zeroed(
    shapes: Sequence[Shape], dt: DType, where: Sequence[DeviceLocation | None]
) -> list[tuple[Storage, ...] | None]:
    """Zeroed slots of these shapes for every layer that has a place, all in one pass of ``Alloc ->
    ZeroFill``; nothing is kept if any allocation fails."""
    graph = Graph()
    fills = [
        graph.alloc(shape, dt, place).zero_fill()
        for place in where if place is not None for shape in shapes
    ]  # fmt: skip
    made = iter(allocate(fills))
    return [None if place is None else tuple(next(made) for _ in shapes) for place in where]
