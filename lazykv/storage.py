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
from lazykv.ids import next_storage_id
from lazykv.interchange import host_array, share
from lazykv.layout import Layout
from lazykv.locks import ReadWriteLock, new_hold, this_thread
from lazykv.spec import Shape, Spec, as_shape, check_size


class Storage:
    """A typed, contiguous buffer in one location.

    `id` is unique in the process and never reused; `version` moves with every completed write,
    also by plans. `==` and `hash` are identity. A *frozen* storage (model weights, read-only
    imports) refuses writes and therefore needs no lock. A storage whose writer failed midway is
    *torn*: it refuses reads until a `write()` block has rewritten it whole.
    """

    __slots__ = ("__weakref__", "_copies", "array", "dtype", "exporter", "frozen", "id", "location",
                 "lock", "made_by", "row_log", "shape", "torn", "version")  # fmt: skip

    def __init__(
        self, array: Array, shape: Shape, dt: DType, location: DeviceLocation, *,
        frozen: bool = False, exporter: object = None, backend: Backend | None = None,
    ) -> None:  # fmt: skip
        self.array = array
        self.made_by = device(location).backend if backend is None else backend
        self.shape = shape
        self.dtype = dt
        self.location = location
        self.frozen = frozen
        self.exporter = exporter
        self.id = next_storage_id()
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
    def is_snapshot(self) -> bool:
        """Whether it is on the host and its bytes never change: nobody writes them, and no exporter
        has them."""
        return self.frozen and self.exporter is None and self.location == CPU

    def at(self, location: DeviceLocation) -> "Storage":
        """Itself, or of a snapshot the copy on another location, made once and kept.

        Raises like `from_array`.
        """
        if location == self.location:
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
        return Spec(self.shape, self.dtype).nbytes

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.dtype)

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
        if not self.is_served_by(registry.find(self.location.kind)):
            raise TopologyChanged(
                f"{self!r}: got another backend of {self.location} than the one that made it, need "
                "a storage of that one; its bytes are gone"
            )

    def _wait(self) -> None:
        """Until the work queued on the location has run; raises the first failure of it."""
        with BackendCall(self.location, "synchronize"):
            self.made_by.synchronize(self.location)

    @contextmanager
    def read(self) -> Iterator[Array]:
        """The backend's own array (raw bits for bf16 and f8) under the shared lock, once the work
        queued on its location has run."""
        backend = self._backend
        if self.frozen:
            self._wait()
            with backend.current(self.location):
                yield self.array
            return
        hold = new_hold()
        try:
            self.lock.acquire_read(hold)
            self.check_readable()
            self._wait()
            with backend.current(self.location):
                yield self.array
        finally:
            self.lock.release_read(hold)

    @contextmanager
    def write(self) -> Iterator[Array]:
        """The backend's own array under the exclusive lock; the version moves when it completes.

        An exception inside the block leaves the storage torn.
        """
        self.check_writable()
        backend = self._backend
        owner = self.lock.acquire_write(repr(self))
        try:
            self._wait()
        except BaseException:  # of earlier work: nothing of this block has been written
            self.lock.release_write(owner)
            raise
        try:
            with backend.current(self.location):
                yield self.array
            self._wait()  # a copy that the block queued and that fails is part of it
        except BaseException:
            self.torn = True
            raise
        else:
            self.torn = False
            self.version += 1
            if self.row_log is not None:  # which rows the block wrote is not known
                self.row_log.note(0, len(self.row_log.written))
        finally:
            self.lock.release_write(owner)

    def check_readable(self) -> None:
        if self.torn:
            raise StorageTornError(
                f"{self!r}: got a read after a failed write, need it rewritten whole first; "
                "use `with storage.write() as a: a[...] = ...`"
            )

    def check_writable(self) -> None:
        if self.frozen:
            raise BindingError(f"{self!r}: got a write, need a writable storage; this is read-only")

    def to_numpy(self) -> HostArray:
        """A fresh host copy in the allocated shape and the logical dtype."""
        with self.read() as array, BackendCall(self.location, "copy_out"):
            return to_logical(self._backend.copy_out(array), self.dtype)

    # Exports share the memory and take no lock: who writes through one moves no version. Torn
    # memory is given to nobody, and frozen memory as read-only.

    def __dlpack__(self, **options: Any) -> object:
        self.check_readable()
        with self._backend.current(self.location):  # the consumer waits for what was given to it
            capsule = self.array.__dlpack__(**options)
        return label(capsule, dtype=self.dtype, read_only=self.frozen)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.array.__dlpack_device__()
        return int(kind), int(index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        return np.array(to_logical(self._on_host(), self.dtype), dtype=dtype, copy=copy)

    def __buffer__(self, flags: int) -> memoryview:
        """The raw bits, for Python 3.12 and later (PEP 688)."""
        return memoryview(self._on_host())  # type: ignore[arg-type]

    def _on_host(self) -> HostArray:
        """The raw bits where they are, once the work queued on the location has run."""
        self.check_readable()
        if not self._backend.capabilities.host_memory:
            raise BindingError(f"{self!r}: got a host access, need a copy; use to_numpy()")
        self._wait()
        view: HostArray = np.asarray(self.array).view()
        if self.frozen:
            view.flags.writeable = False
        return view

    def __copy__(self) -> "Storage":
        return self  # a handle: a second object with this id would have a state of its own

    def __deepcopy__(self, memo: object) -> "Storage":
        return self

    def __reduce__(self) -> NoReturn:
        raise BindingError(f"{self!r}: got a pickle, need bytes; use to_numpy()")

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError(f"{self!r}: got len() of a rank-0 storage, need rank >= 1")
        return self.shape[0]

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = " frozen" if self.frozen else " torn" if self.torn else ""
        return f"Storage(id={self.id}, {self.spec} on {self.location}{state})"


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
    places = {s.location for n, s in given if n in lent}
    spans = []
    for n, s in given:
        if s.location in places and s.nbytes:
            start = s.made_by.address(s.array)
            spans.append((str(s.location), start, start + s.nbytes, n))
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


def acquire_all(claims: Sequence[Claim]) -> int:
    """Take the locks of storages that stand in the order of their ids; all or none. Returns what
    `release_all` takes.

    Raises `StorageTornError` for a torn one. An uncontended write takes no Python-level call.
    """
    me, hold = this_thread.number, new_hold()
    done = 0
    try:
        for st, is_write in claims:
            lock = st.lock
            if not is_write:
                lock.acquire_read(hold)
            elif lock.readers or lock.owner == me or not lock.gate.acquire(blocking=False):
                lock.acquire_write(repr(st))
            else:
                lock.owner = me
                if lock.readers:
                    lock.wait_for_readers()
            done += 1
            if st.torn:
                st.check_readable()
    except BaseException:
        release_all(claims[:done], hold)
        raise
    return hold


def release_all(claims: Sequence[Claim], hold: int) -> None:
    for st, is_write in claims:
        if is_write:
            st.lock.owner = 0
            st.lock.gate.release()
        else:
            st.lock.release_read(hold)


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
