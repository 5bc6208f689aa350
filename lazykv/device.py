"""Locations, the backend protocol and the backend registry.

A backend is one class: locations, memory, copies and a kernel table. Built-in backends are
imported on first use; others register under the entry-point group ``lazykv.backends`` (the entry
point's name is the location's kind, its value a `Backend` class). An entry point named like a
built-in kind is ignored. Of several with one name those that fail are passed over.
"""

import importlib.metadata
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy.typing as npt

from lazykv.dlpack import Lent
from lazykv.dtypes import ALL as ALL_DTYPES
from lazykv.dtypes import DType
from lazykv.errors import (
    BackendUnavailable,
    BindingError,
    CaptureError,
    LazyKvError,
)
from lazykv.layout import Layout
from lazykv.spec import Spec

Array: TypeAlias = Any
"""A backend's own array type (NumPy or CuPy `ndarray`), always in the raw dtype of its bytes."""

HostArray: TypeAlias = npt.NDArray[Any]

Step: TypeAlias = tuple[Callable[..., object], tuple[Any, ...]]
"""One resolved call of a plan: ``f(*args)``."""

_KIND = re.compile(r"[a-z][a-z0-9_-]*")
_LOCATION = re.compile(rf"cpu|{_KIND.pattern}:(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Where bytes live: ``cpu``, ``cuda:0``, ``sim:1``. Needs no backend to exist."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _LOCATION.fullmatch(self.name):
            raise BackendUnavailable(
                f"DeviceLocation: got {self.name!r}, need 'cpu' or 'KIND:INDEX' such as 'cuda:0'"
            )

    @property
    def kind(self) -> str:
        """The backend's name: the part before the colon."""
        return self.name.partition(":")[0]

    @property
    def index(self) -> int:
        """The device's number within its backend; 0 for ``cpu``."""
        return int(self.name.partition(":")[2] or 0)

    def __str__(self) -> str:
        return self.name


CPU = DeviceLocation("cpu")


@dataclass(frozen=True, slots=True)
class Call:
    """One op of a plan with everything resolved, handed to a kernel's `emit`.

    `ins` and `out` are arrays in raw dtypes; for an op that destroys an input, `out` is that
    input's memory. `scalars` is the plan's live list of symbol values: a kernel keeps the list and
    reads ``scalars[slot]`` when it runs, because values change from step to step.
    """

    op: Any
    ins: tuple[Array, ...]
    out: Array
    in_specs: tuple[Spec, ...]
    out_spec: Spec
    scratch: tuple[Array, ...]
    scalars: list[int]


def _no_scratch(op: Any, ins: tuple[Spec, ...], out: Spec) -> tuple[Spec, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a backend runs one op: the calls to make, and the scratch memory they need.

    Scratch is planned with the plan's other intermediates and is uninitialized.
    """

    emit: Callable[[Call], Iterable[Step]]
    scratch: Callable[[Any, tuple[Spec, ...], Spec], Sequence[Spec]] = _no_scratch


API_VERSION = 1
"""Of this protocol. A backend loaded by entry point states the one it was written for."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend declares, and what the conformance suite therefore asks of it.

    `dtypes` are the names of dtypes it stores. An asynchronous backend queues work and may return
    before it has run, which changes no test: what holds for queued work holds for any; one with
    `capture` can record a plan's calls and replay them. Arrays of `host_memory` can be used where
    they are by whoever takes host arrays, through DLPack or the buffer protocol. `ops` are the
    names (`Op.name`) of the ops it runs, by a kernel of its own or by their body; None is every op.
    It is asked for no other: those are lowered, or refused when a plan is made.
    """

    dtypes: frozenset[str] = frozenset(t.name for t in ALL_DTYPES)
    is_async: bool = False
    capture: bool = False
    host_memory: bool = False
    ops: frozenset[str] | None = None


class Capture(Protocol):
    """Calls that a backend recorded: `replay` queues them again, on the same memory."""

    def replay(self) -> None: ...


class Backend(ABC):
    """One kind of memory and the kernels that work on it.

    A location runs what it is given in order, perhaps later. Work of several locations is in order
    only through `transfer`, and the host sees it only through `copy_out` and `synchronize`.
    """

    name: ClassVar[str]
    api_version: ClassVar[int]
    capabilities: Capabilities = Capabilities()
    install_hint: ClassVar[str] = "install the package that provides it"
    survives_fork: ClassVar[bool] = False
    """Whether its memory can be used in a forked child; contexts of devices cannot."""
    dlpack_device_type: ClassVar[int | None] = None
    """DLPack's number for memory of its kind, if it can use such memory where it is (`adopt`)."""
    xp: Any
    """The array namespace of portable op bodies."""

    @abstractmethod
    def locations(self) -> tuple[DeviceLocation, ...]:
        """The devices that can be used now."""

    def facts(self, location: DeviceLocation) -> Mapping[str, str]:
        """What results measured on a location depend on, for who reads a report: the hardware, its
        driver, the library underneath, as in ``{"gpu": "NVIDIA L4", "driver_cuda": "13.0"}``."""
        return {}

    @abstractmethod
    def allocate(self, nbytes: int, location: DeviceLocation) -> Array:
        """Uninitialized memory as a 1-D u8 array, at least 64-byte aligned.

        Raises `OutOfMemory` naming the bytes asked for.
        """

    @abstractmethod
    def view(self, buffer: Array, dtype: DType, layout: Layout) -> Array:
        """A raw-dtype view of a contiguous buffer; the layout's offset is an int."""

    @abstractmethod
    def copy_in(self, dest: Array, source: HostArray) -> None:
        """Host to device; same shape and raw dtype. The source may change as soon as this
        returns."""

    def feeder(self, dest: Array) -> Callable[[HostArray], object]:
        """``copy_in`` for one destination, resolved once: what a held plan calls per token."""
        return partial(self.copy_in, dest)

    @abstractmethod
    def copy_out(self, source: Array) -> HostArray:
        """Device to a fresh, contiguous host array of the raw dtype, once the work given before it
        has run."""

    def transfer(
        self, dest: Array, to: DeviceLocation, source: Array, from_: DeviceLocation
    ) -> None:
        """Copy between two locations of this backend: after all work on the source that was given
        before, and before all that is given later."""
        self.copy_in(dest, self.copy_out(source))

    def synchronize(self, location: DeviceLocation) -> None:  # noqa: B027 (most never wait)
        """Wait until everything given to a location has run; raises the first failure of what the
        calling thread gave, once. Failures of others are left for them."""

    def current(self, location: DeviceLocation) -> AbstractContextManager[object]:
        """While a caller works on the backend's own arrays: what their library does inside is in
        order with everything given to the location."""
        return nullcontext()

    def receiving(self, location: DeviceLocation) -> AbstractContextManager[int | None]:
        """While an exporter is asked for memory of a location by DLPack: gives the number of the
        stream that the exporter's own work has to be in order with.

        The device is current inside, if the library knows such a thing; the stream is not, or an
        exporter of the same library would take it for the one that its work is on.
        """
        return nullcontext()

    def adopt(self, memory: Lent, location: DeviceLocation) -> Array:
        """Memory of another library, where it is, as `allocate` gives memory: a 1-D u8 array of
        its bytes from its address on.

        The array and its views keep `memory`, and let go of it only when the work that was given
        while they lived has run.
        """
        raise BindingError(
            f"backend {self.name!r}: got memory of another library, need one that declares a "
            "dlpack_device_type"
        )

    def address(self, array: Array) -> int:
        """Where a contiguous array is, in the numbers that DLPack has for memory of this kind."""
        raise BindingError(
            f"backend {self.name!r}: got a question for an address, need one that declares a "
            "dlpack_device_type"
        )

    def capture(self, location: DeviceLocation, calls: Sequence[Step]) -> Capture:
        """Record calls without running them. Raises `CaptureError` if one cannot be recorded, such
        as one that allocates or that the host waits for."""
        raise CaptureError(f"backend {self.name!r}: got a capture, need one that declares it")

    @abstractmethod
    def kernel(self, op: Any, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
        """The kernel for an op on these operands, or None if this backend has none."""


ENTRY_POINTS = "lazykv.backends"
_BUILTIN = {
    "cpu": "lazykv.backends.cpu:CpuBackend",
    "cuda": "lazykv.backends.cuda:CudaBackend",
    "sim": "lazykv.backends.sim:SimBackend",
}


class _Registry:
    """Loaded backends by kind, and how often each kind changed.

    `epoch` moves with every registration: while it stands still, no generation has moved.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.backends: dict[str, Backend] = {}
        self.generations: dict[str, int] = {}
        self.epoch = 0
        self.lost_in_fork: set[str] = set()

    def replace(self, kind: str, backend: Backend | None) -> None:
        with self.lock:
            self.lost_in_fork.discard(kind)
            if backend is None:
                self.backends.pop(kind, None)
            else:
                self.backends[kind] = backend
            self.generations[kind] = self.generations.get(kind, 0) + 1
            self.epoch += 1

    def find(self, kind: str) -> Backend:
        found = self.backends.get(kind)
        if found is not None:
            return found
        if kind in self.lost_in_fork:
            raise BackendUnavailable(
                f"location kind {kind!r}: got a forked child of the process that uses it, need a "
                "process of its own; start it with spawn"
            )
        with self.lock:
            if kind not in self.backends:
                self.backends[kind] = _load(kind)
            return self.backends[kind]

    def after_fork(self) -> None:
        """In a forked child: devices are lost, and a thread that held the lock is gone."""
        self.lock = threading.RLock()
        for kind, backend in list(self.backends.items()):
            if not backend.survives_fork:
                self.replace(kind, None)
                self.lost_in_fork.add(kind)


registry = _Registry()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=registry.after_fork)


def _load(kind: str) -> Backend:
    if kind in _BUILTIN:
        return _made(EntryPoint(kind, _BUILTIN[kind], ENTRY_POINTS))
    points = tuple(importlib.metadata.entry_points(group=ENTRY_POINTS, name=kind))
    if not points:
        raise BackendUnavailable(
            f"location kind {kind!r}: got no backend, need one of {', '.join(_known())}; or "
            f"install a package with an entry point {kind!r} in {ENTRY_POINTS!r}"
        )
    return _made(points[0]) if len(points) == 1 else _one_of(kind, points)


def _one_of(kind: str, points: Sequence[EntryPoint]) -> Backend:
    """Of several packages the one whose backend can be made; raises unless it is exactly one."""
    made, failed = dict[str, Backend](), dict[str, LazyKvError]()
    for source, point in sorted({_source(p): p for p in points}.items()):
        try:
            made[source] = _made(point)
        except LazyKvError as e:
            failed[source] = e
    if len(made) == 1:
        return next(iter(made.values()))
    if made:
        raise BackendUnavailable(
            f"backend {kind!r}: got {' and '.join(made)}, need one; uninstall the other, or "
            "choose with register_backend"
        )
    told = "; ".join(f"{source}: {e}" for source, e in failed.items())
    raise BackendUnavailable(
        f"backend {kind!r}: got {len(failed)} that fail, need one that loads; {told}"
    ) from ExceptionGroup(f"backend {kind!r}", list(failed.values()))


def _made(point: EntryPoint) -> Backend:
    """The backend of an entry point; raises if it cannot be made, or cannot be used."""
    try:
        made: Backend = point.load()()
    except LazyKvError:
        raise
    except (Exception, SystemExit) as e:  # some packages leave when a driver is missing
        raise BackendUnavailable(
            f"backend {point.name!r}: got {type(e).__name__}: {e} while loading {point.value}, "
            "need a Backend class"
        ) from e
    _check_backend(point.name, made, f" from {point.value}")
    locations_of(point.name, made)
    return made


def _source(point: EntryPoint) -> str:
    package = "" if point.dist is None else f"{point.dist.name} {point.dist.version}: "
    return f"{package}{point.value}"


def _known() -> list[str]:
    """Kinds that have a backend or may get one, whether or not it works here."""
    brought = importlib.metadata.entry_points(group=ENTRY_POINTS).names
    return sorted({*_BUILTIN, *registry.backends, *(k for k in brought if _KIND.fullmatch(k))})


def check_kind(kind: object) -> str:
    """The kind itself; raises `BackendUnavailable` if no location can have it."""
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise BackendUnavailable(
            f"backend: got {kind!r}, need a name such as 'cuda'; 'cuda:0' is one of its locations"
        )
    return kind


def _check_backend(kind: str, made: object, where: str = "") -> None:
    """Refuse what is no backend of this version, or declares what cannot be read."""
    if not isinstance(made, Backend):
        got = repr(made) if made is None or isinstance(made, type) else type(made).__name__
        raise BackendUnavailable(
            f"backend {kind!r}: got {got}{where}, need a Backend of api_version {API_VERSION}"
        )
    declared = {}
    for n in ("api_version", "name", "capabilities"):
        declared[n] = _asked(kind, n, partial(getattr, made, n, None))
    version, name = declared["api_version"], declared["name"]
    if type(version) is not int or version != API_VERSION:
        raise BackendUnavailable(
            f"backend {kind!r}: got api_version {version}{where}, need a Backend of api_version "
            f"{API_VERSION}"
        )
    if not isinstance(name, str):
        raise BackendUnavailable(f"backend {kind!r}: got name {name!r}{where}, need a string")
    wrong = _wrong_capability(declared["capabilities"])
    if wrong is not None:
        raise BackendUnavailable(f"backend {kind!r}: got {wrong[0]}{where}, need {wrong[1]}")


def _wrong_capability(declared: object) -> tuple[str, str] | None:
    """What is wrong with the type of a declaration, and what it has to be."""
    if not isinstance(declared, Capabilities):
        return f"capabilities {declared!r}", "Capabilities"
    for n in ("is_async", "capture", "host_memory"):
        value = getattr(declared, n)
        if not isinstance(value, bool):
            return f"capabilities with {n} {value!r}", "True or False"
    for n, words in (("dtypes", "a frozenset of names"), ("ops", "a frozenset of names, or None")):
        value = getattr(declared, n)
        if n == "ops" and value is None:
            continue
        if not isinstance(value, frozenset) or not all(isinstance(v, str) for v in value):
            return f"capabilities with {n} {value!r}", words
    return None


def register_backend(kind: str, backend: Backend) -> None:
    """Serve a location kind from now on; plans made with an earlier backend are refused.

    `kind` is what locations are called by, whatever the backend's own name. Raises
    `BackendUnavailable`, and changes nothing, for what is no kind, no `Backend` of this
    `API_VERSION`, or one that cannot name its devices (it may have none).
    """
    _check_backend(check_kind(kind), backend)
    locations_of(kind, backend)
    registry.replace(kind, backend)


def unregister_backend(kind: str) -> None:
    """Forget the backend that serves a location kind; held plans that use it are refused.

    Whoever names such a location next gets a new backend, if lazykv or a package brings the kind.
    """
    registry.replace(check_kind(kind), None)


def generation(location: DeviceLocation) -> int:
    """How often the backend of a location was registered, replaced or lost."""
    return registry.generations.get(location.kind, 0)


@dataclass(frozen=True, slots=True)
class Device:
    """A usable location together with its backend."""

    location: DeviceLocation
    backend: Backend

    def __str__(self) -> str:
        return str(self.location)


DeviceLike: TypeAlias = Device | DeviceLocation | str


def as_location(device: DeviceLike) -> DeviceLocation:
    if isinstance(device, Device):
        return device.location
    if isinstance(device, DeviceLocation):
        return device
    return DeviceLocation(device)


def device(spec: DeviceLike) -> Device:
    """Look a device up; raises `BackendUnavailable` naming it and what to install."""
    if isinstance(spec, Device):
        return spec
    location = as_location(spec)
    backend = registry.find(location.kind)
    places = locations_of(location.kind, backend)
    if location not in places:
        have = ", ".join(map(str, places)) or f"none now; {backend.install_hint}"
        raise BackendUnavailable(f"device {location}: got no such device, need one of: {have}")
    return Device(location, backend)


def locations_of(kind: str, backend: Backend) -> tuple[DeviceLocation, ...]:
    """The devices of a backend; raises `BackendUnavailable` if it cannot name them."""
    places: tuple[DeviceLocation, ...] = _asked(kind, "devices", lambda: tuple(backend.locations()))
    strays = [p for p in places if not isinstance(p, DeviceLocation) or p.kind != kind]
    if strays:
        raise BackendUnavailable(
            f"backend {kind!r}: got {strays[0]!r} among its devices, need DeviceLocations of kind "
            f"{kind!r}"
        )
    return places


def _asked(kind: str, what: str, ask: Callable[[], Any]) -> Any:
    """What a backend answers; an exception of its own becomes `BackendUnavailable`."""
    try:
        return ask()
    except LazyKvError:
        raise
    except (Exception, SystemExit) as e:  # some packages leave when a driver is missing
        raise BackendUnavailable(
            f"backend {kind!r}: got {type(e).__name__}: {e} when asked for its {what}, need an "
            "answer"
        ) from e
