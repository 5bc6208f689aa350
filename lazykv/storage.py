"""Storage: a typed buffer in one location, behind a handle that plans hold on to."""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NoReturn, SupportsIndex, TypeAlias

import numpy as np

from lazykv import config, counters, poison
from lazykv.device import Array, DeviceLike, DeviceLocation, HostArray, device, host_array
from lazykv.dtypes import DType, DTypeLike, dtype, to_logical, to_raw
from lazykv.errors import BindingError, DTypeError, ShapeError, StorageLockError, StorageTornError
from lazykv.ids import next_storage_id
from lazykv.layout import Layout
from lazykv.spec import Shape, Spec, as_shape


class ReadWriteLock:
    """Many readers or one writer; a waiting writer goes before later readers.

    `gate` is held by a writer for its whole block and by a reader only while it registers, so an
    uncontended writer pays for one C-level lock. A thread may nest reads, also inside its own
    write; a write inside its own read or write is refused, since it could only deadlock. A thread
    that holds several storages at once takes them in the order of their ids, as plans do.
    """

    __slots__ = ("drained", "gate", "owner", "readers")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.owner = 0
        self.readers: dict[int, int] = {}
        self.drained = threading.Condition()

    def acquire_read(self) -> None:
        me = get_ident()
        # A nested read must not wait at the gate: a writer there may be waiting for this thread.
        if me in self.readers:
            self.readers[me] += 1
        elif self.owner == me:
            self.readers[me] = 1
        else:
            with self.gate:
                self.readers[me] = 1

    def release_read(self) -> None:
        me = get_ident()
        with self.drained:
            self.readers[me] -= 1
            if not self.readers[me]:
                del self.readers[me]
                if not self.readers:
                    self.drained.notify_all()

    def acquire_write(self, who: str = "storage") -> None:
        me = get_ident()
        if me in self.readers or self.owner == me:
            held = "write" if self.owner == me else "read"
            raise StorageLockError(
                f"{who}: got a write inside this thread's own {held}, need the {held} to end first"
            )
        self.gate.acquire()
        self.owner = me
        if self.readers:
            self.wait_for_readers()

    def wait_for_readers(self) -> None:
        """Block until no reader is left; the caller owns the gate and loses it if interrupted."""
        try:
            with self.drained:
                self.drained.wait_for(lambda: not self.readers)
        except BaseException:
            self.release_write()
            raise

    def release_write(self) -> None:
        self.owner = 0
        self.gate.release()

    def after_fork(self) -> bool:
        """In a forked child only the forking thread lives on: free what the others held. True if
        one of them was writing."""
        me = get_ident()
        abandoned = self.owner not in (0, me)
        self.gate = threading.Lock()
        self.drained = threading.Condition()
        self.readers = {me: self.readers[me]} if me in self.readers else {}
        if self.owner == me:
            self.gate.acquire()
        else:
            self.owner = 0
        return abandoned


class Storage:
    """A typed, contiguous buffer in one location.

    `id` is unique in the process and never reused; `version` moves with every completed write,
    also by plans. `==` and `hash` are identity. A *frozen* storage (model weights, read-only
    imports) refuses writes and therefore needs no lock. A storage whose writer failed midway is
    *torn*: it refuses reads until a `write()` block has rewritten it whole.
    """

    __slots__ = ("__weakref__", "array", "dtype", "exporter", "frozen", "id", "location", "lock",
                 "row_log", "shape", "torn", "version")  # fmt: skip

    def __init__(
        self, array: Array, shape: Shape, dt: DType, location: DeviceLocation, *,
        frozen: bool = False, exporter: object = None,
    ) -> None:  # fmt: skip
        self.array = array
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
        if not frozen:
            _writable.add(self)

    @classmethod
    def allocate(
        cls, shape: Sequence[SupportsIndex], dt: DTypeLike, device_: DeviceLike = "cpu"
    ) -> "Storage":
        """Uninitialized memory. Raises `OutOfMemory`, `BackendUnavailable`."""
        spec = Spec(as_shape("Storage.allocate", shape), dtype(dt))
        where = device(device_)
        buffer = where.backend.allocate(spec.nbytes, where.location)
        counters.add(allocations=1)
        if config.POISON:
            poison.fill(where.backend, buffer, spec.nbytes)
        array = where.backend.view(buffer, spec.dtype, Layout.contiguous(spec.shape))
        return cls(array, spec.shape, spec.dtype, where.location)

    @classmethod
    def from_array(cls, array: object, device: DeviceLike = "cpu") -> "Storage":
        """A copy of a host array; later changes to the array are not seen."""
        host = host_array(array)
        dt = dtype(host.dtype)
        made = cls.allocate(host.shape, dt, device)
        made._backend.copy_in(made.array, to_raw(host))
        return made

    @classmethod
    def wrap(cls, array: object) -> "Storage":
        """Zero-copy import of a C-contiguous host array (buffer protocol or DLPack).

        The exporter stays alive as long as the storage; a read-only export gives a frozen storage.
        """
        host = host_array(array)
        dt = dtype(host.dtype)
        if not host.flags.c_contiguous:
            raise ShapeError(
                f"Storage.wrap: got strides {host.strides} for {Spec(host.shape, dt)}, need a "
                "C-contiguous array; use Storage.from_array to copy it"
            )
        location = device("cpu").location
        raw = to_raw(host)
        if dt.numpy != host.dtype:
            raise ShapeError(
                f"Storage.wrap: got byte order {host.dtype.str}, need the machine's; use from_array"
            )
        frozen = not host.flags.writeable
        return cls(raw, host.shape, dt, location, frozen=frozen, exporter=array)

    @property
    def nbytes(self) -> int:
        return Spec(self.shape, self.dtype).nbytes

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.dtype)

    @property
    def _backend(self):  # type: ignore[no-untyped-def]
        return device(self.location).backend

    @contextmanager
    def read(self) -> Iterator[Array]:
        """The backend's own array (raw bits for bf16 and f8) under the shared lock, once the work
        queued on its location has run."""
        backend = self._backend
        if self.frozen:
            backend.synchronize(self.location)
            with backend.current(self.location):
                yield self.array
            return
        self.lock.acquire_read()
        try:
            self.check_readable()
            backend.synchronize(self.location)
            with backend.current(self.location):
                yield self.array
        finally:
            self.lock.release_read()

    @contextmanager
    def write(self) -> Iterator[Array]:
        """The backend's own array under the exclusive lock; the version moves when it completes.

        An exception inside the block leaves the storage torn.
        """
        self.check_writable()
        backend = self._backend
        self.lock.acquire_write(repr(self))
        try:
            backend.synchronize(self.location)
            with backend.current(self.location):
                yield self.array
        except BaseException:
            self.torn = True
            raise
        else:
            self.torn = False
            self.version += 1
            if self.row_log is not None:  # which rows the block wrote is not known
                self.row_log.note(0, len(self.row_log.written))
        finally:
            self.lock.release_write()

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
        with self.read() as array:
            return to_logical(self._backend.copy_out(array), self.dtype)

    # Exports share the memory and take no lock: who writes through one moves no version.

    def __dlpack__(self, **options: Any) -> object:
        with self._backend.current(self.location):  # the consumer waits for what was given to it
            return to_logical(self.array, self.dtype).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.array.__dlpack_device__()
        return int(kind), int(index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        try:
            return np.array(to_logical(self.array, self.dtype), dtype=dtype, copy=copy)
        except TypeError as e:
            raise self._not_host(e) from e

    def __buffer__(self, flags: int) -> memoryview:
        """The raw bits, for Python 3.12 and later (PEP 688)."""
        try:
            return memoryview(self.array)
        except (TypeError, RuntimeError) as e:
            raise self._not_host(e) from e

    def _not_host(self, e: Exception) -> BindingError:
        return BindingError(
            f"{self!r}: got a host access ({e}), need a copy; use to_numpy() or to('cpu')"
        )

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
    """Positions of pairs of different storages that may share host memory.

    Only imported memory can be shared, so only storages with an exporter are compared.
    """
    out = []
    for n, a in enumerate(storages):
        if a is None or a.exporter is None or a.frozen:
            continue
        for m, b in enumerate(storages):
            if b is None or b is a or (m < n and b.exporter is not None and not b.frozen):
                continue
            if a.location == b.location and np.may_share_memory(a.array, b.array):
                out.append((n, m))
    return out


Claim: TypeAlias = tuple[Storage, bool]
"""A storage and whether it is to be written."""


def acquire_all(claims: Sequence[Claim]) -> None:
    """Take the locks of storages that stand in the order of their ids; all or none.

    Raises `StorageTornError` for a torn one. An uncontended write takes no Python-level call.
    """
    me = get_ident()
    done = 0
    try:
        for st, is_write in claims:
            lock = st.lock
            if not is_write:
                lock.acquire_read()
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
        release_all(claims[:done])
        raise


def release_all(claims: Sequence[Claim]) -> None:
    for st, is_write in claims:
        if is_write:
            st.lock.owner = 0
            st.lock.gate.release()
        else:
            st.lock.release_read()


def as_host_bytes(who: str, data: object) -> HostArray:
    """A caller's bytes as a contiguous 1-D u8 host array (copied if needed).

    `data` is a bytes-like object, or an array whose elements are taken little-endian, in row-major
    order.
    """
    if not isinstance(data, np.ndarray):
        if not hasattr(data, "__dlpack__"):
            try:
                view = memoryview(data)  # type: ignore[arg-type]
            except TypeError:
                got = type(data).__name__
                raise DTypeError(f"{who}: got {got}, need bytes or an array") from None
            return np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8)
        data = host_array(data)
    if data.dtype.hasobject:
        raise DTypeError(f"{who}: got an array of {data.dtype}, need bytes or numbers")
    array = np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8)
