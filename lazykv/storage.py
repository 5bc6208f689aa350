"""Storage: a typed buffer in one location, behind a handle that plans hold on to."""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, SupportsIndex, TypeAlias

import numpy as np

from lazykv import config, counters, poison
from lazykv.backend_call import BackendCall
from lazykv.device import (
    CPU,
    Array,
    Backend,
    DeviceLike,
    DeviceLocation,
    HostArray,
    device,
    registry,
)
from lazykv.dlpack import label
from lazykv.dtypes import DType, DTypeLike, dtype, to_logical, to_raw
from lazykv.errors import (
    BindingError,
    DTypeError,
    ShapeError,
    StorageTornError,
    TopologyChanged,
)
from lazykv.ids import StorageId, next_storage_id
from lazykv.interchange import host_array, read_only, share
from lazykv.layout import Layout
from lazykv.locks import ReadWriteLock, new_hold, this_thread
from lazykv.spec import Shape, Spec, as_shape, check_size


class Storage:
    """A typed, contiguous buffer in one location.

    `id` is unique in the process and never reused; like `dtype`, `shape` and `location` it never
    changes. `version` moves with every completed write, also by plans. `==` and `hash` are
    identity. A *frozen* storage (model weights, read-only imports) refuses writes and therefore
    needs no lock. A storage whose writer failed midway is *torn*: it refuses reads until a
    `write()` block has rewritten it whole.
    """

    __slots__ = ("__weakref__", "_copies", "_dtype", "_id", "_location", "_shape", "array",
                 "exporter", "frozen", "lock", "made_by", "row_log", "torn",
                 "version")  # fmt: skip

    def __init__(
        self, array: Array, shape: Shape, dt: DType, location: DeviceLocation, *,
        frozen: bool = False, exporter: object = None, backend: Backend | None = None,
    ) -> None:  # fmt: skip
        self.array = array
        self.made_by = device(location).backend if backend is None else backend
        self._shape = shape
        self._dtype = dt
        self._location = location
        self.frozen = frozen
        self.exporter = exporter
        self._id = next_storage_id()
        self.version = 0
        self.torn = False
        self.lock = ReadWriteLock()
        self.row_log: poison.RowLog | None = None
        self._copies: dict[DeviceLocation, Storage] = {}
        if not frozen:
            _writable.add(self)

    @classmethod
    def allocate(
        cls, shape: Sequence[SupportsIndex], dt: DTypeLike, device_: DeviceLike = "cpu"
    ) -> "Storage":
        """Uninitialized memory. Raises `OutOfMemory`, `BackendUnavailable`."""
        who = "Storage.allocate"
        spec = check_size(who, Spec(as_shape(who, shape), dtype(dt)))
        where = device(device_)
        with BackendCall(where.location, f"allocate of {spec.nbytes} bytes"):
            buffer = where.backend.allocate(spec.nbytes, where.location)
            counters.add(allocations=1)
            if config.POISON:
                poison.fill(where.backend, buffer, spec.nbytes)
            array = where.backend.view(buffer, spec.dtype, Layout.contiguous(spec.shape))
        return cls(array, spec.shape, spec.dtype, where.location, backend=where.backend)

    @classmethod
    def from_array(cls, array: object, device: DeviceLike = "cpu") -> "Storage":
        """A copy of a host array, or of a storage in host memory, which is read under its lock.
        Later changes are not seen."""
        if isinstance(array, Storage):
            with array.read():
                return cls.from_array(np.asarray(array), device)
        host = host_array(array)
        dt = dtype(host.dtype)
        made = cls.allocate(host.shape, dt, device)
        with BackendCall(made.location, "copy_in"):
            made.made_by.copy_in(made.array, to_raw(host))
        made._wait()  # what failed must not be handed out
        return made

    @classmethod
    def wrap(cls, array: object, device: DeviceLike | None = None) -> "Storage":
        """Zero-copy import of a C-contiguous array: a host array, by the buffer protocol or DLPack,
        or memory of a device, by DLPack (a CUDA tensor of PyTorch or CuPy).

        The exporter stays alive as long as the storage; a read-only export gives a frozen storage.
        `device` says where, if the memory is neither the host's nor a CUDA device's.

        On a device, what the exporter's library has queued so far on its current stream runs before
        what is done with the storage. Nothing orders what either side does later: give the storage
        back through DLPack (``torch.from_dlpack(storage)``), whose stream then waits for the work
        here, or synchronize; and synchronize the other library, or wrap again, after it has
        written. When the storage and the plans that use it are let go, the work here is waited for.

        Raises `ShapeError` for other strides or byte orders, `DTypeError`, `BackendUnavailable`
        for a device that is not served, and `BindingError` for memory that cannot be used in place.
        """
        lent = share(array, device)
        return cls(
            lent.array, lent.spec.shape, lent.spec.dtype, lent.place.location,
            frozen=lent.read_only, exporter=array, backend=lent.place.backend,
        )  # fmt: skip

    @property
    def id(self) -> StorageId:
        return self._id

    @property
    def dtype(self) -> DType:
        return self._dtype

    @property
    def shape(self) -> Shape:
        """The allocated shape."""
        return self._shape

    @property
    def location(self) -> DeviceLocation:
        return self._location

    @property
    def is_snapshot(self) -> bool:
        """Whether it is on the host and its bytes never change: nobody writes them, and no exporter
        has them."""
        return self.frozen and self.exporter is None and self._location == CPU

    def at(self, location: DeviceLocation) -> "Storage":
        """Itself, or of a snapshot the copy on another location, made once and kept.

        Raises like `from_array`.
        """
        if location == self._location:
            return self
        assert self.is_snapshot, "only bytes that never change can be in two places"
        copy = self._copies.get(location)
        if copy is None or copy.made_by is not device(location).backend:
            copy = Storage.from_array(self.to_numpy(), location)
            copy.frozen = True
            self._copies[location] = copy
        return copy

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def spec(self) -> Spec:
        return Spec(self._shape, self._dtype)

    @property
    def _backend(self) -> Backend:
        self.check_backend()
        return self.made_by

    def is_served_by(self, backend: Backend) -> bool:
        """Whether a backend can work on these bytes: the one that made them, or, in memory of the
        host, another of its class."""
        same = type(backend) is type(self.made_by) and backend.capabilities.host_memory
        return backend is self.made_by or same

    def check_backend(self) -> None:
        """Refuse bytes of a backend that was replaced: another one can only misread them."""
        if not self.is_served_by(registry.find(self._location.kind)):
            raise TopologyChanged(
                f"{self!r}: got another backend of {self._location} than the one that made it, "
                "need a storage of that one; its bytes are gone"
            )

    def _wait(self) -> None:
        """Until the work queued on the location has run; raises the first failure of it."""
        with BackendCall(self._location, "synchronize"):
            self.made_by.synchronize(self._location)

    @contextmanager
    def read(self) -> Iterator[Array]:
        """The backend's own array (raw bits for bf16 and f8) under the shared lock, once the work
        queued on its location has run.

        A NumPy array comes as a read-only view. Nothing guards the arrays of other backends: what
        is written into one here moves no version.
        """
        backend = self._backend
        if self.frozen:
            self._wait()
            with backend.current(self._location):
                yield _to_read(self.array)
            return
        hold = new_hold()
        try:
            self.lock.acquire_read(hold)
            self.check_readable()
            self._wait()
            with backend.current(self._location):
                yield _to_read(self.array)
        finally:
            self.lock.release(hold)

    @contextmanager
    def write(self) -> Iterator[Array]:
        """The backend's own array under the exclusive lock; the version moves when it completes.

        An exception inside the block leaves the storage torn, until a later block completes, which
        has to rewrite it whole. Where the host cannot write the array, its backend copies a
        contiguous array of the same shape and the raw dtype into it::

            with storage.write() as a:
                lk.device(storage.location).backend.copy_in(a, host)
        """
        self.check_writable()
        backend, hold = self._backend, new_hold()
        try:
            self.lock.acquire_write(hold, self)
            self._wait()  # what fails here is earlier work: nothing of this block has been written
            try:
                with backend.current(self._location):
                    yield self.array
                self._wait()  # a copy that the block queued and that fails is part of it
            except BaseException:
                self.torn = True
                raise
            self.torn = False
            self.version += 1
            if self.row_log is not None:  # which rows the block wrote is not known
                self.row_log.note(0, len(self.row_log.written))
        finally:
            self.lock.release(hold)

    def check_readable(self) -> None:
        if self.torn:
            raise StorageTornError(
                f"{self!r}: got a read after a failed write, need it rewritten whole first, in a "
                "block `with storage.write() as a`"
            )

    def check_writable(self) -> None:
        if self.frozen:
            raise BindingError(f"{self!r}: got a write, need a writable storage; this is read-only")

    def to_numpy(self) -> HostArray:
        """A fresh host copy in the allocated shape and the logical dtype."""
        with self.read(), BackendCall(self._location, "copy_out"):
            return to_logical(self._backend.copy_out(self.array), self._dtype)

    # Exports share the memory and take no lock: who writes through one moves no version. Torn
    # memory is given to nobody, and frozen memory as read-only.

    def __dlpack__(self, **options: Any) -> object:
        self.check_readable()
        with self._backend.current(self._location):  # the consumer waits for what was given to it
            capsule = self.array.__dlpack__(**options)
        return label(capsule, dtype=self._dtype, read_only=self.frozen)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.array.__dlpack_device__()
        return int(kind), int(index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        return np.array(to_logical(self._on_host(), self._dtype), dtype=dtype, copy=copy)

    def __buffer__(self, flags: int) -> memoryview:
        """The raw bits. Python calls this from 3.12 on (PEP 688). In 3.11 ``memoryview(storage)``
        is a TypeError; ``np.asarray(storage)`` has the same memory there, in the logical dtype."""
        return memoryview(self._on_host())  # type: ignore[arg-type]

    def _on_host(self) -> HostArray:
        """The raw bits where they are, once the work queued on the location has run."""
        self.check_readable()
        if not self._backend.capabilities.host_memory:
            raise BindingError(f"{self!r}: got a host access, need a copy; use to_numpy()")
        self._wait()
        array: HostArray = np.asarray(self.array)
        return read_only(array) if self.frozen else array.view()

    def __copy__(self) -> "Storage":
        return self  # a handle: a second object with this id would have a state of its own

    def __deepcopy__(self, memo: object) -> "Storage":
        return self

    def __reduce__(self) -> NoReturn:
        raise BindingError(f"{self!r}: got a pickle, need bytes; use to_numpy()")

    def __len__(self) -> int:
        if not self._shape:
            raise ShapeError(f"{self!r}: got len() of a rank-0 storage, need rank >= 1")
        return self._shape[0]

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = " frozen" if self.frozen else " torn" if self.torn else ""
        return f"Storage(id={self._id}, {self.spec} on {self._location}{state})"


def _to_read(array: Array) -> Array:
    return read_only(array) if type(array) is np.ndarray else array


_writable: weakref.WeakSet[Storage] = weakref.WeakSet()


def _after_fork() -> None:
    """What a thread of the parent was writing is torn in the child, and locked by nobody."""
    for storage in _writable:
        if storage.lock.after_fork():
            storage.torn = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def overlapping(storages: Sequence[Storage | None]) -> list[tuple[int, int]]:
    """Positions of pairs of different storages that share memory.

    Only imported memory can be shared: one of a pair has an exporter, and one can be written.
    """
    given = [(n, s) for n, s in enumerate(storages) if s is not None]
    lent = {n for n, s in given if s.exporter is not None}
    if all(s.frozen for _, s in given):
        return []
    places = {s._location for n, s in given if n in lent}
    spans = []
    for n, s in given:
        if s._location in places and s.nbytes:
            start = s.made_by.address(s.array)
            spans.append((str(s._location), start, start + s.nbytes, n))
    out, begun = [], list[tuple[str, int, int, int]]()
    for span in sorted(spans):
        place, start, _, n = span
        begun = [other for other in begun if other[0] == place and other[2] > start]
        for *_, m in begun:
            a, b = storages[m], storages[n]
            if a is None or b is None or a is b or (a.frozen and b.frozen):
                continue
            if not lent.isdisjoint((m, n)):
                out.append((min(m, n), max(m, n)))
        begun.append(span)
    return sorted(out)


Claim: TypeAlias = tuple[Storage, bool]
"""A storage and whether it is to be written."""


def acquire_all(claims: Sequence[Claim], hold: int) -> None:
    """Take the locks of storages that stand in the order of their ids. Whoever calls this ends the
    hold with `release_all`, also if it raises.

    Raises `StorageTornError` for a torn one. An uncontended write takes no Python-level call.
    """
    writer = -this_thread.number
    for st, is_write in claims:
        lock = st.lock
        if not is_write:
            lock.acquire_read(hold)
        elif lock.holds or lock.nested:
            lock.acquire_write(hold, st)
        else:
            lock.holds[hold] = writer
            if len(lock.holds) > 1 or lock.nested:
                lock.wait_to_write(hold)
        if st.torn:
            st.check_readable()


def release_all(claims: Sequence[Claim], hold: int) -> None:
    """End a hold of any of the storages."""
    for st, _ in claims:
        lock = st.lock
        lock.holds.pop(hold, None)
        if lock.nested or lock.bells:
            lock.release(hold)


def as_host_bytes(who: str, data: object) -> HostArray:
    """A caller's bytes as a contiguous 1-D u8 host array (copied if needed).

    `data` is a bytes-like object, or an array whose elements are taken little-endian, in row-major
    order.
    """
    if not isinstance(data, np.ndarray) and not hasattr(data, "__dlpack__"):
        try:
            view = memoryview(data)  # type: ignore[arg-type]
        except TypeError:
            got = type(data).__name__
            raise DTypeError(f"{who}: got {got}, need bytes or an array") from None
        return np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8)
    given = host_array(data)
    if given.dtype.hasobject:
        raise DTypeError(f"{who}: got an array of {given.dtype}, need bytes or numbers")
    array = np.ascontiguousarray(given, given.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8)
