"""What a held plan asks of a cache it is to be re-bound to, and the named ways to say no.

A refusal is a normal outcome, not an error: the caller builds a new session.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from lazykv.device import DeviceLocation
from lazykv.errors import BindingError
from lazykv.ids import KvAllocId
from lazykv.spec import whole
from lazykv.storage import Storage


@runtime_checkable
class KvRebindSource(Protocol):
    """A cache whose storages a held plan can be welded to."""

    def alloc_id(self) -> KvAllocId:
        """Identity of the allocation."""

    def rebind_location(self) -> DeviceLocation | None:
        """Where all storages live, or None if that is not proven."""

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        """Storage of slot 0 or 1 of a layer, in the order the builder bound them."""


class RebindRefusal:
    """Why a plan was not re-bound; the plan and the cache are as they were."""


@dataclass(frozen=True, slots=True)
class ResidencyUnknown(RebindRefusal):
    """The source cannot prove where a layer's storage lives."""

    layer: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ResidencyDiffers(RebindRefusal):
    """The source lives elsewhere than the plan was made for."""

    baked: DeviceLocation
    incoming: DeviceLocation


@dataclass(frozen=True, slots=True)
class MissingSlot(RebindRefusal):
    """The source has no storage for a slot that the plan binds."""

    layer: int
    which: int


@dataclass(frozen=True, slots=True)
class StorageDiffers(RebindRefusal):
    """A slot's storage is not like the baked one; `what` names the field that differs."""

    layer: int
    which: int
    what: str = field(default="", compare=False)
    baked: Any = field(default=None, compare=False)
    incoming: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StorageTorn(RebindRefusal):
    """A slot's storage lost its last writer midway and has to be rewritten first."""

    layer: int
    which: int


Baked: TypeAlias = tuple[tuple[Storage | None, ...] | None, ...]
"""The storages a plan is welded to: the slots of every layer (None: it has no such slot, or no such
layer)."""


class Snapshot:
    """A source read once, so that what is checked is what is bound."""

    def __init__(self, source: object, baked: Baked) -> None:
        if not isinstance(source, KvRebindSource):
            raise BindingError(f"rebind: got {type(source).__name__}, need a cache")
        self._id = KvAllocId(whole("rebind", "alloc_id", source.alloc_id()))
        self._everywhere = source.rebind_location()
        by_layer = getattr(source, "layer_location", None)
        self._by_layer = [by_layer(n) if by_layer else None for n in range(len(baked))]
        self.n_layers = layer_count(source)
        self._slots = {
            (layer, which): source.rebind_slot(layer, which)
            for layer, pair in enumerate(baked)
            for which in range(len(pair or ()))
        }

    def alloc_id(self) -> KvAllocId:
        return self._id

    def rebind_location(self) -> DeviceLocation | None:
        return self._everywhere

    def layer_location(self, layer: int) -> DeviceLocation | None:
        return self._by_layer[layer]

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        return self._slots[layer, which]


def find_refusal(baked: Baked, source: KvRebindSource) -> RebindRefusal | None:
    """The first reason not to re-bind, or None.

    Residency is compared before any storage, and a torn storage is named last: it can be repaired.
    """
    refusal = _residency(baked, source)
    if refusal is not None:
        return refusal
    layers = layer_count(source)
    if layers is not None and layers > len(baked):
        return StorageDiffers(len(baked), 0, "layers", len(baked), layers)
    seen: set[int] = set()
    torn: StorageTorn | None = None
    for layer, pair in enumerate(baked):
        for which, old in enumerate(pair or ()):
            new = source.rebind_slot(layer, which)
            refusal = _slot(layer, which, old, new, seen)
            if refusal is not None:
                return refusal
            if torn is None and new is not None and new.torn:
                torn = StorageTorn(layer, which)
    return torn


def layer_count(kv: Any) -> int | None:
    """Layers of a cache, or None if it does not tell."""
    layers: int | None = getattr(kv, "n_layers", None)
    return layers() if callable(layers) else layers


def _residency(baked: Baked, source: KvRebindSource) -> RebindRefusal | None:
    everywhere = source.rebind_location()
    by_layer = getattr(source, "layer_location", None)
    for layer, pair in enumerate(baked):
        if pair is None:
            continue
        incoming = everywhere
        if incoming is None and by_layer is not None:
            incoming = by_layer(layer)
        if incoming is None:
            return ResidencyUnknown(layer)
        for old in pair:
            if old is not None and old.location != incoming:
                return ResidencyDiffers(old.location, incoming)
    return None


def _slot(
    layer: int, which: int, old: Storage | None, new: Storage | None, seen: set[int]
) -> RebindRefusal | None:
    if old is None:
        return None if new is None else StorageDiffers(layer, which, "slot", None, new.id)
    if new is None:
        return MissingSlot(layer, which)
    for what in ("dtype", "shape", "location", "nbytes", "frozen"):
        before, after = getattr(old, what), getattr(new, what)
        if before != after:
            return StorageDiffers(layer, which, what, before, after)
    if not new.is_served_by(old.made_by):
        return StorageDiffers(layer, which, "backend", old.made_by, new.made_by)
    if new.id in seen:
        return StorageDiffers(layer, which, "id", "a storage of its own", new.id)
    seen.add(new.id)
    return None


class SessionDisposition:
    """What `InferenceContext.refresh` did with the held session.

    One of `Absent`, `Kept`, `Rebound`, `Dropped`: classes, also reachable as attributes here. A
    value equals its class and every value of it, so ``disposition == SessionDisposition.Kept``
    reads as it should.
    """

    Absent: "type[Absent]"
    Kept: "type[Kept]"
    Rebound: "type[Rebound]"
    Dropped: "type[Dropped]"

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is type(self) or type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return type(self).__name__


class Absent(SessionDisposition):
    """No session was held."""

    __slots__ = ()


class Kept(SessionDisposition):
    """The held session is valid as it is."""

    __slots__ = ()


class Rebound(SessionDisposition):
    """Only the allocation differed, and the plan now runs on the new one."""

    __slots__ = ()


class Dropped(SessionDisposition):
    """The session is gone. `refusal` says why re-binding was refused (None: it was not tried, since
    something else differs); `differences` names every baked fact that differs, as (baked, now)."""

    __slots__ = ("differences", "refusal")

    def __init__(
        self, refusal: RebindRefusal | None = None,
        differences: dict[str, tuple[object, object]] | None = None,
    ) -> None:  # fmt: skip
        self.refusal = refusal
        self.differences = differences or {}

    def __repr__(self) -> str:
        return f"Dropped({self.refusal or self.differences})"


SessionDisposition.Absent = Absent
SessionDisposition.Kept = Kept
SessionDisposition.Rebound = Rebound
SessionDisposition.Dropped = Dropped
